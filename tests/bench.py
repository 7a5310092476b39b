"""Measurements as ratios, taken side by side in one run: `make bench`. Nothing here passes or fails.

The machine drifts: what is compared runs in pairs, in random order, and each ratio is the median of the pairs.

The forwarder: a client process -> near node -> far node -> server process, all on loopback, against the same path
through two HAProxy processes. Each node is a process of its own, as `shardbox up` is one.
SHARDBOX_EXE=dist/shardbox measures the executable's start instead of the module's.
"""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import random
import re
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import shardbox

PAIRS = int(os.environ.get("BENCH_PAIRS", "7"))
MODULE = str(Path(shardbox.__file__).resolve())
HERE = "127.0.0.1"
RINGS = 8
ROUTES = ("plain haproxy", "plain shardbox", "encrypted haproxy", "encrypted shardbox")
FORK = multiprocessing.get_context("fork")
BUFFER = 256 << 10
_HEAD = struct.Struct(">QQ")  # of a request: its bytes, and those of the answer


def command(*argv: str) -> Callable[[], float]:
    """A whole process, from start to end."""

    def run() -> float:
        started = time.perf_counter()
        subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        return time.perf_counter() - started

    return run


def program() -> list[str]:
    """What is measured: the executable that SHARDBOX_EXE names, else the module."""
    executable = os.environ.get("SHARDBOX_EXE")
    return [executable] if executable else [sys.executable, MODULE]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


@contextlib.contextmanager
def lone_node(folder: str) -> Iterator[tuple[subprocess.Popen[bytes], int, str]]:
    """`up` of a cluster of one with nothing to serve: the process, its endpoint's port, its configuration."""
    mesh, api = free_ports(2)
    path = os.path.join(folder, "shardbox.toml")
    Path(path).write_text(
        f'[cluster]\nname = "bench-{os.getpid()}"\nsecret = "a bench needs no better secret than this"\n'
        'discovery = "static"\n[engine]\nkind = "rehearsal"\n[[nodes]]\nname = "a"\naddress = "127.0.0.1"\n'
        f"[nodes.ports]\nmesh = {mesh}\napi = {api}\n"
    )
    env = {**os.environ, "SHARDBOX_STATE": os.path.join(folder, "state"), "SHARDBOX_LOG": "error"}
    with subprocess.Popen([*program(), "up", "--config", path, "--node", "a"], env=env) as process:
        yield process, api, path
        process.terminate()


def until_it_listens() -> float:
    """Seconds from the start of `up` until its endpoint takes a connection."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with lone_node(folder) as (process, port, _):
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    return time.perf_counter() - started
                time.sleep(0.002)
    raise RuntimeError("up has ended")


def start_up() -> dict[str, float]:
    """Commands that cron and people wait for, as ratios to `python -c pass`."""
    cases: dict[str, Callable[[], float]] = {
        "python -c pass": command(sys.executable, "-c", "pass"),
        "version": command(*program(), "version"),
        "status (not running)": command(*program(), "status", "--config", "config.example.toml"),
        "up until it listens": until_it_listens,
    }
    seen: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(PAIRS):
        for name in random.sample(list(cases), len(cases)):
            seen[name].append(cases[name]())
    times = {name: statistics.median(values) for name, values in seen.items()}
    return {name: value / times["python -c pass"] for name, value in times.items()}


def idle() -> dict[str, float]:
    """What a node costs that has nothing to do, and one `status` that asks it."""
    with tempfile.TemporaryDirectory() as folder, lone_node(folder) as (process, _, config):
        time.sleep(3)  # past its start
        family = [process.pid, *map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]
        before = sum(cpu_s(pid) for pid in family)
        time.sleep(10)
        used = sum(cpu_s(pid) for pid in family) - before
        memory = sum(private_mb(pid) for pid in family)
        argv = [*program(), "status", "--config", config, "--node", "a"]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as status:
            _, code, usage = os.wait4(status.pid, 0)
            status.returncode = os.waitstatus_to_exitcode(code)
    return {"idle node, MB": memory, "idle node, % of a core": used * 10, "status, MB": usage.ru_maxrss / 1024}


def private_mb(pid: int) -> float:
    """Memory of a process in MB, what it shares counted in parts (PSS)."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"(?m)^Pss:\s+(\d+)", text)[0]) / 1024


def cpu_s(pid: int) -> float:
    """Seconds of a core that a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


# --- the load: it asks, and gets what it asked for; each connection has a process at both ends -------------------


def tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def receive(sock: socket.socket, buffer: memoryview, size: int) -> None:
    """Take `size` bytes, each time into the start of `buffer`: the load should cost little beside the forwarder."""
    while size:
        got = sock.recv_into(buffer, min(size, len(buffer)), socket.MSG_WAITALL)
        if not got:
            raise ConnectionResetError
        size -= got


def send(sock: socket.socket, buffer: memoryview, size: int) -> None:
    while size:
        size -= sock.send(buffer[: min(size, len(buffer))])


def answer(sock: socket.socket) -> None:
    """An engine: reads a whole request, then answers."""
    buffer = memoryview(bytearray(BUFFER))
    while sock.recv_into(buffer, _HEAD.size, socket.MSG_WAITALL) == _HEAD.size:
        size, reply = _HEAD.unpack_from(buffer)
        receive(sock, buffer, size)
        send(sock, buffer, reply)


def serve(listener: socket.socket) -> None:
    while True:
        sock, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            with contextlib.suppress(OSError, KeyboardInterrupt):
                answer(tuned(sock))
            os._exit(0)
        sock.close()


def client(ports: dict[str, int], orders: Connection) -> None:
    """Obeys (route, bytes, bytes of the answer, seconds); tells (requests, seconds, median seconds of a request)."""
    socks = {route: tuned(socket.create_connection((HERE, port))) for route, port in ports.items()}
    head, buffer = bytearray(_HEAD.size), memoryview(bytearray(BUFFER))
    orders.send("ready")
    while order := orders.recv():
        route, size, reply, seconds = order
        _HEAD.pack_into(head, 0, size - len(head), reply)
        sock, started = socks[route], time.perf_counter()
        times: list[float] = []
        while (now := time.perf_counter()) < started + seconds or len(times) < 3:
            sock.sendmsg([head, buffer[: min(size, BUFFER) - len(head)]])
            send(sock, buffer, size - min(size, BUFFER))
            receive(sock, buffer, reply)
            times.append(time.perf_counter() - now)
        orders.send((len(times), time.perf_counter() - started, statistics.median(times)))


# --- the two ways through ----------------------------------------------------------------------------------------

SECRET = "a bench needs no better secret than this"


def node(role: str, encryption: str, target: str) -> None:
    """One node in this process: `far` dials the port `target`, `near` the mesh port `target`. Prints its own port."""
    sys.setswitchinterval(1e-4)  # as `up` does

    def open_service(peer: str, service: str) -> tuple[socket.socket, shardbox.WireStats]:
        return socket.create_connection((HERE, int(target))), shardbox.WireStats()

    mesh = shardbox.Mesh(
        keys=shardbox.mesh_keys(SECRET, "bench", role, encryption=encryption), open_service=open_service
    )
    if role == "far":
        port = mesh.listen(HERE, 0)
    else:
        listener = socket.create_server((HERE, 0))
        port = int(listener.getsockname()[1])
        dial = functools.partial(mesh.dial, HERE, int(target), "far", "data/bench", 5.0)
        shardbox.Wire(listener=listener, dial=dial, stats=shardbox.WireStats(), on_trouble=print)
    print(port, flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def nodes(encryption: str, target: int) -> Iterator[tuple[int, list[int]]]:
    """(port that leads to `target`, process ids of the two nodes)."""
    started: list[subprocess.Popen[str]] = []
    try:
        for role in ("far", "near"):
            argv = [sys.executable, __file__, role, encryption, str(target)]
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            started.append(process)
            assert process.stdout
            target = int(process.stdout.readline())
        yield target, [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


HAPROXY = """
defaults
    mode tcp
    timeout connect 5s
    timeout client 1h
    timeout server 1h
listen it
    bind {here}:{port} {bind}
    server next {here}:{target} {server}
"""


def free_port() -> int:
    with socket.create_server((HERE, 0)) as sock:
        return int(sock.getsockname()[1])


def listening(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as sock:
        return sock.connect_ex((HERE, port)) == 0


@contextlib.contextmanager
def haproxies(encryption: str, target: int, folder: Path) -> Iterator[tuple[int, list[int]]]:
    """The same through two HAProxy processes with default settings, TLS 1.3 between them if "on"."""
    key = folder / "key.pem"
    if not key.exists():
        key.write_bytes(self_signed())
    tls = encryption == "on"
    bind = f"ssl crt {key} ca-file {key} verify required ssl-min-ver TLSv1.3" if tls else ""
    server = f"ssl crt {key} ca-file {key} verify required" if tls else ""
    started = []
    try:
        for role, options in (("far", {"bind": bind, "server": ""}), ("near", {"bind": "", "server": server})):
            config, port = folder / f"{role}-{encryption}.cfg", free_port()
            config.write_text(HAPROXY.format(here=HERE, port=port, target=target, **options))
            started.append(subprocess.Popen(["haproxy", "-db", "-f", str(config)], stderr=subprocess.DEVNULL))
            while not listening(port):
                assert started[-1].poll() is None, "haproxy did not start"
                time.sleep(0.02)
            target = port
        yield target, [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def self_signed() -> bytes:
    """A certificate and its key (ECDSA, P-256), as PEM."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name.from_rfc4514_string("CN=bench")
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), 1, datetime.datetime(2020, 1, 1), datetime.datetime(2099, 1, 1)
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return builder.sign(key, hashes.SHA256()).public_bytes(pem) + secret


# --- the forwarder's figures -------------------------------------------------------------------------------------


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Figure:
    """What is measured: `better` says how the ratio shardbox to HAProxy should be read."""

    name: str
    size: int
    reply: int
    seconds: float
    clients: int = 1
    better: str = "less"


FIGURES = (
    Figure("64 B round trip, us", 64, 64, 0.3),
    Figure("32 KiB round trip, us", 32 << 10, 32 << 10, 0.4),
    Figure("128 KiB round trip, us", 128 << 10, 128 << 10, 0.4),
    Figure("16 MiB throughput, MB/s", 16 << 20, 16, 0.8, better="more"),
    Figure("CPU, s/GB", 16 << 20, 16, 0.8),
    Figure("8 rings, 32 KiB round trip, us", 32 << 10, 32 << 10, 0.6, RINGS),
    Figure("8 rings, throughput, MB/s", 4 << 20, 16, 0.8, RINGS, better="more"),
)


@dataclasses.dataclass
class Load:
    """The clients, and the processes that each route goes through."""

    clients: list[Connection]
    pids: dict[str, list[int]]

    def run(self, route: str, figure: Figure) -> float:
        """One sample of a figure."""
        clients = self.clients[: figure.clients]
        used = cpu_seconds(self.pids[route])
        for one in clients:
            one.send((route, figure.size, figure.reply, figure.seconds))
        told: list[tuple[int, float, float]] = [one.recv() for one in clients]
        used = cpu_seconds(self.pids[route]) - used
        if "round trip" in figure.name:
            return statistics.median(median for _, _, median in told) * 1e6
        if "CPU" in figure.name:
            return used / (sum(count for count, _, _ in told) * figure.size / 1e9)
        return sum(count * figure.size / seconds for count, seconds, _ in told) / 1e6


def compare(load: Load, kind: str, figure: Figure) -> dict[str, float]:
    """Medians of both, and the median of the ratios of the pairs."""
    seen: dict[str, list[float]] = {"haproxy": [], "shardbox": []}
    for _ in range(PAIRS):
        for name in random.sample(sorted(seen), 2):
            seen[name].append(load.run(f"{kind} {name}", figure))
    ratios = [ours / theirs for ours, theirs in zip(seen["shardbox"], seen["haproxy"], strict=True)]
    medians = {name: statistics.median(values) for name, values in seen.items()}
    return {**medians, "ratio": statistics.median(ratios)}


@contextlib.contextmanager
def load() -> Iterator[Load]:
    """Everything started and connected."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        listener = stack.enter_context(socket.create_server((HERE, 0), backlog=64))
        server = FORK.Process(target=serve, args=(listener,))
        server.start()
        stack.callback(server.kill)
        target, ports, pids = int(listener.getsockname()[1]), {}, {}
        for kind, encryption in (("plain", "off"), ("encrypted", "on")):
            for name, way in (
                ("haproxy", haproxies(encryption, target, folder)),
                ("shardbox", nodes(encryption, target)),
            ):
                route = f"{kind} {name}"
                ports[route], pids[route] = stack.enter_context(way)
        clients = []
        for _ in range(RINGS):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=client, args=(ports, theirs))
            process.start()
            stack.callback(process.kill)
            assert ours.recv() == "ready"
            clients.append(ours)
        yield Load(clients, pids)


def forwarder() -> dict[str, dict[str, dict[str, float]]]:
    """kind -> figure -> medians and ratio."""
    with load() as made:
        return {
            kind: {figure.name: compare(made, kind, figure) for figure in FIGURES} for kind in ("plain", "encrypted")
        }


def have_haproxy() -> bool:
    if shutil.which("haproxy") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=False)
        subprocess.run(["apt-get", "install", "-y", "-qq", "haproxy"], check=False)
    return shutil.which("haproxy") is not None


# --- the plan ------------------------------------------------------------------------------------------------


def plan_seconds(nodes: int) -> float:
    """One plan of a 70B-like model over `nodes` equal boxes that hold three layers each."""
    config = shardbox.parse_config(
        b'[cluster]\nsecret = "a bench needs no better secret than this"\n[engine]\nkind = "rehearsal"\n[[models]]\n'
        b'name = "m"\npath = "m.gguf"\nrehearse = {layers = 80, width = 8192, bytes = "40GiB"}\n',
        file="bench.toml",
        folder="/",
    )
    memory = shardbox.MemoryFacts(total_bytes=4 << 30, available_bytes=4 << 30)
    model = shardbox.ModelFacts(name="m", problem="not found")
    one = shardbox.NodeFacts(
        name="", machine="", start=1, protocol=shardbox.PROTOCOL, version="", config_hash="", platform="", cores=8,
        memory=memory, models=(model,), engine_kind="rehearsal",
    )  # fmt: skip
    facts = [dataclasses.replace(one, name=f"n{n}", machine=f"m{n}") for n in range(nodes)]
    started = time.perf_counter()
    shardbox.plan_all(config, facts)
    return time.perf_counter() - started


def plans(sizes: Sequence[int] = (4, 32, 256, 2000)) -> dict[str, float]:
    """Seconds for one plan, by the number of candidate nodes."""
    return {f"{size} nodes, seconds": statistics.median(plan_seconds(size) for _ in range(3)) for size in sizes}


def table(figures: dict[str, dict[str, float]]) -> Iterator[str]:
    """The figures of one kind as a Markdown table."""
    yield "| | HAProxy | shardbox | ratio |\n|-|-|-|-|"
    for name, values in figures.items():
        yield f"| {name} | {values['haproxy']:.3g} | {values['shardbox']:.3g} | {values['ratio']:.2f} |"


def main() -> None:
    """Run everything, print tables, and write build/bench.json."""
    results: dict[str, object] = {}
    if have_haproxy():
        measured = forwarder()
        for kind, figures in measured.items():
            print(f"\n{kind}\n" + "\n".join(table(figures)))
        short = {"rtt": "32 KiB round trip, us", "throughput": "16 MiB throughput, MB/s", "cpu": "CPU, s/GB"}
        ratios = {f"{kind}_{key}": measured[kind][name]["ratio"] for kind in measured for key, name in short.items()}
        results |= {"forwarder": ratios, "against HAProxy": measured}
    else:
        print("no haproxy here: the forwarder is not measured")
    others = {"start-up / python -c pass": start_up(), "at rest": idle(), "plan": plans()}
    for title, values in others.items():
        print(f"\n{title}")
        for name, value in values.items():
            print(f"  {name:24} {value:10.4g}")
    Path("build").mkdir(exist_ok=True)
    Path("build/bench.json").write_text(json.dumps(results | others, indent=2))


if __name__ == "__main__":
    node(*sys.argv[1:]) if len(sys.argv) == 4 else main()
