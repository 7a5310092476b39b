"""Measurements as ratios, taken side by side in one run: `make bench`. Nothing here passes or fails.

The machine drifts: what is compared runs in pairs, in random order, and each ratio is the median of the pairs.

The forwarder: a client process -> near node -> far node -> server process, all on loopback, against the same path
through two HAProxy processes, and through nginx, socat, stunnel and ssh. Each node is a process of its own, as
`shardbox up` is one. Then the same through an emulated LAN, and with a node that has other things to do; a real ring
is in bench_ring.py.
SHARDBOX_EXE=dist/shardbox measures the executable's start instead of the module's.
"""

import collections
import contextlib
import dataclasses
import fcntl
import functools
import http.client
import json
import multiprocessing
import os
import random
import re
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import bench_ring

import shardbox

PAIRS = int(os.environ.get("BENCH_PAIRS", "7"))
MODULE = str(Path(shardbox.__file__).resolve())
HERE = "127.0.0.1"
RINGS = 8
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


def write_config(folder: str, models: str = "") -> tuple[int, str, str]:
    """A cluster of one: its endpoint's port, its name, its configuration file."""
    (mesh, api), cluster = free_ports(2), f"bench-{os.getpid()}"
    path = os.path.join(folder, "shardbox.toml")
    Path(path).write_text(
        f'[cluster]\nname = "{cluster}"\nsecret = "a bench needs no better secret than this"\n'
        'discovery = "static"\n[engine]\nkind = "rehearsal"\n[[nodes]]\nname = "a"\naddress = "127.0.0.1"\n'
        f"[nodes.ports]\nmesh = {mesh}\napi = {api}\n{models}"
    )
    return api, cluster, path


@contextlib.contextmanager
def lone_node(
    folder: str, models: str = "", errors: BinaryIO | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], int, str]]:
    """`up` of a cluster of one: the process, its endpoint's port, its configuration. `errors`: where it logs them."""
    api, _, path = write_config(folder, models)
    env = {**os.environ, "SHARDBOX_STATE": os.path.join(folder, "state"), "SHARDBOX_LOG": "error"}
    with subprocess.Popen([*program(), "up", "--config", path, "--node", "a"], env=env, stderr=errors) as process:
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


# in a small process: until its exec a child counts as large as its parent
PEAK_KIB = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


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
        peak = subprocess.run(
            [sys.executable, "-c", PEAK_KIB, *argv], capture_output=True, text=True, check=True
        ).stdout
    return {"idle node, MB": memory, "idle node, % of a core": used * 10, "status, MB": int(peak) / 1024}


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


def client(targets: dict[str, tuple[str, int]], orders: Connection) -> None:
    """Obeys (route, bytes, bytes of the answer, seconds); tells (requests, seconds, median seconds of a request)."""
    socks = {route: tuned(socket.create_connection(target)) for route, target in targets.items()}
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


# --- the ways through: at each end a process that takes connections and passes them on -----------------------------

SECRET = "a bench needs no better secret than this"
Address = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class End:
    """One end of a way: `far` before the server, `near` before the client. `target` is what it passes on to."""

    role: str
    encryption: str
    bind: str
    target: Address
    folder: Path

    @property
    def port(self) -> int:
        with socket.create_server((self.bind, 0)) as sock:
            return int(sock.getsockname()[1])

    @property
    def sealed(self) -> bool:
        return self.encryption == "on"

    @property
    def key(self) -> Path:
        """A certificate with its key, the same at both ends."""
        path = self.folder / "key.pem"
        if not path.exists():
            path.touch(0o600)
            path.write_bytes(self_signed())
        return path

    def write(self, name: str, text: str) -> str:
        path = self.folder / f"{name}-{self.role}-{self.encryption}"
        path.write_text(text)
        return str(path)


Started = tuple["subprocess.Popen[str]", int]  # with the port that it takes connections at
Way = Callable[[End], Started]


def node(role: str, encryption: str, bind: str, host: str, port: str) -> None:
    """One node in this process: `far` dials the target, `near` its mesh port. Prints its own port."""
    sys.setswitchinterval(1e-4)  # as `up` does

    def open_service(peer: str, service: str) -> tuple[socket.socket, shardbox.WireStats]:
        return socket.create_connection((host, int(port))), shardbox.WireStats()

    keys = shardbox.mesh_keys(SECRET, "bench", role, encryption=encryption)
    mesh = shardbox.Mesh(keys=keys, open_service=open_service)
    if role == "far":
        own = mesh.listen(bind, 0)
    else:
        listener = socket.create_server((bind, 0))
        own = int(listener.getsockname()[1])
        dial = functools.partial(mesh.dial, host, int(port), "far", "data/bench", 5.0)
        shardbox.Wire(listener=listener, dial=dial, stats=shardbox.WireStats(), on_trouble=print)
    print(own, flush=True)
    sys.stdin.read()


def node_process(role: str, encryption: str, bind: str, target: Address, *config: str) -> Started:
    """A node in a process of its own; with a configuration, inside of its `up`."""
    argv = [sys.executable, __file__, role, encryption, bind, *map(str, target), *config]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, int(process.stdout.readline())


def shardbox_way(end: End) -> Started:
    return node_process(end.role, end.encryption, end.bind, end.target)


def program_way(end: End, port: int, *argv: str) -> Started:
    """A program that listens there once it is up."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
    while not listening(end.bind, port):
        assert process.poll() is None, f"{argv[0]} did not start"
        time.sleep(0.02)
    return process, port


HAPROXY = """
defaults
    mode tcp
    timeout connect 5s
    timeout client 1h
    timeout server 1h
listen it
    bind {bind}:{port} {listens}
    server next {host}:{target} {dials}
"""


def haproxy_way(end: End) -> Started:
    """HAProxy with default settings; TLS 1.3 with certificates both ways where it is sealed."""
    tls, port = f"ssl crt {end.key} ca-file {end.key} verify required", end.port
    listens = f"{tls} ssl-min-ver TLSv1.3" if end.sealed and end.role == "far" else ""
    dials = tls if end.sealed and end.role == "near" else ""
    host, target = end.target
    text = HAPROXY.format(bind=end.bind, port=port, host=host, target=target, listens=listens, dials=dials)
    return program_way(end, port, "haproxy", "-db", "-f", end.write("haproxy", text))


NGINX = """
daemon off; worker_processes auto; pid {folder}/nginx-{port}.pid; error_log /dev/null; {module}
events {{}}
stream {{ server {{ listen {bind}:{port} {listens}; proxy_pass {host}:{target}; {dials} }} }}
"""
NGINX_MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")


def nginx_way(end: End) -> Started:
    """nginx with default settings; TLS likewise."""
    port, (host, target), listens, dials = end.port, end.target, "", ""
    if end.sealed and end.role == "far":
        listens = "ssl"
        dials = f"ssl_certificate {end.key}; ssl_certificate_key {end.key}; ssl_client_certificate {end.key};"
        dials += "ssl_verify_client on; ssl_protocols TLSv1.3;"
    elif end.sealed:
        dials = f"proxy_ssl on; proxy_ssl_certificate {end.key}; proxy_ssl_certificate_key {end.key};"
        dials += f"proxy_ssl_trusted_certificate {end.key}; proxy_ssl_verify on; proxy_ssl_name bench;"
        dials += "proxy_ssl_protocols TLSv1.3;"
    module = f"load_module {NGINX_MODULE};" if NGINX_MODULE.exists() else ""
    text = NGINX.format(
        folder=end.folder,
        port=port,
        module=module,
        bind=end.bind,
        host=host,
        target=target,
        listens=listens,
        dials=dials,
    )
    return program_way(end, port, "nginx", "-e", "/dev/null", "-c", end.write("nginx", text))


def socat_way(end: End) -> Started:
    port, (host, target) = end.port, end.target
    listens = f"TCP4-LISTEN:{port},bind={end.bind},fork,reuseaddr,nodelay"
    return program_way(end, port, "socat", listens, f"TCP4:{host}:{target},nodelay")


STUNNEL = """
foreground = yes
pid =
[it]
accept = {bind}:{port}
connect = {host}:{target}
client = {client}
cert = {key}
CAfile = {key}
verifyPeer = yes
sslVersionMin = TLSv1.3
"""


def stunnel_way(end: End) -> Started:
    port, (host, target), client = end.port, end.target, "yes" if end.role == "near" else "no"
    text = STUNNEL.format(bind=end.bind, port=port, host=host, target=target, client=client, key=end.key)
    return program_way(end, port, "stunnel", end.write("stunnel", text))


def ssh_way(end: End) -> Started:
    """An sshd of our own, and `ssh -L` through it to what the far end was to pass on to."""
    port, key, public, goal = end.port, end.folder / "ssh", end.folder / "ssh.pub", end.folder / "ssh-goal"
    if end.role == "far":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        goal.write_text(":".join(map(str, end.target)))
        os.makedirs("/run/sshd", exist_ok=True)
        settings = {"ListenAddress": f"{end.bind}:{port}", "HostKey": key, "AuthorizedKeysFile": public}
        settings |= {"PidFile": "none", "StrictModes": "no", "UsePAM": "no"}
        return program_way(end, port, "/usr/sbin/sshd", "-D", "-f", "/dev/null", *options(settings))
    settings = {"IdentityFile": key, "StrictHostKeyChecking": "no", "UserKnownHostsFile": "/dev/null"}
    forward = f"{end.bind}:{port}:{goal.read_text()}"
    host, target = end.target
    argv = ["ssh", "-F", "/dev/null", "-N", "-L", forward, "-p", str(target), *options(settings), f"root@{host}"]
    return program_way(end, port, *argv)


def options(settings: dict[str, object]) -> Iterator[str]:
    for name, value in settings.items():
        yield from ("-o", f"{name}={value}")


def listening(host: str, port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as sock:
        return sock.connect_ex((host, port)) == 0


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


# kind -> who is compared; shardbox's ratios are to haproxy
WAYS: dict[str, dict[str, Way]] = {
    "plain": {"haproxy": haproxy_way, "shardbox": shardbox_way, "nginx": nginx_way, "socat": socat_way},
    "encrypted": {
        "haproxy": haproxy_way, "shardbox": shardbox_way, "nginx": nginx_way, "stunnel": stunnel_way, "ssh": ssh_way
    },
}  # fmt: skip
PROGRAMS = {"haproxy": "haproxy", "nginx": "nginx", "socat": "socat", "stunnel": "stunnel4", "ssh": "openssh-server"}


def missing() -> list[str]:
    """Which of the others are not here, after an attempt to install them (root, Debian)."""

    def absent() -> list[str]:
        found = [name for name in PROGRAMS if not shutil.which({"ssh": "/usr/sbin/sshd"}.get(name, name))]
        return found if "nginx" in found or NGINX_MODULE.exists() else ["nginx", *found]

    if absent() and os.geteuid() == 0 and shutil.which("apt-get"):
        wanted = [*(PROGRAMS[name] for name in absent()), "libnginx-mod-stream"]
        subprocess.run(["apt-get", "update", "-qq"], check=False)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *wanted], check=False)
    return absent()


# --- the forwarder's figures -------------------------------------------------------------------------------------


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


LAN_FIGURES = (
    Figure("64 B round trip, us", 64, 64, 0.5),
    Figure("32 KiB round trip, us", 32 << 10, 32 << 10, 0.5),
    Figure("16 MiB throughput, MB/s", 16 << 20, 16, 1.5, better="more"),
)


@dataclasses.dataclass
class Load:
    """The clients, and the processes that each route goes through."""

    clients: list[Connection]
    processes: dict[str, list[int]]

    def cpu_s(self, route: str) -> float:
        return sum(cpu_s(pid) for parent in self.processes[route] for pid in shardbox._family(parent))

    def run(self, route: str, figure: Figure) -> float:
        """One sample of a figure."""
        clients = self.clients[: figure.clients]
        used = self.cpu_s(route)
        for one in clients:
            one.send((route, figure.size, figure.reply, figure.seconds))
        told: list[tuple[int, float, float]] = [one.recv() for one in clients]
        used = self.cpu_s(route) - used
        if "round trip" in figure.name:
            return statistics.median(median for _, _, median in told) * 1e6
        if "CPU" in figure.name:
            return used / (sum(count for count, _, _ in told) * figure.size / 1e9)
        return sum(count * figure.size / seconds for count, seconds, _ in told) / 1e6


def compare(load: Load, kind: str, figure: Figure, names: Sequence[str]) -> dict[str, float]:
    """Medians of all, and the median of the ratios of shardbox to HAProxy, pair by pair."""
    seen: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(PAIRS):
        for name in random.sample(names, len(names)):
            seen[name].append(load.run(f"{kind} {name}", figure))
    ratios = [ours / theirs for ours, theirs in zip(seen["shardbox"], seen["haproxy"], strict=True)]
    medians = {name: statistics.median(values) for name, values in seen.items()}
    return {**medians, "ratio": statistics.median(ratios)}


Networks = Callable[[str], str]  # role -> the address to be bound there, once this process is in its network


def end_process(process: "subprocess.Popen[str]") -> None:
    for pid in reversed(shardbox._family(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


@contextlib.contextmanager
def load(ways: dict[str, dict[str, Way]], enter: Networks = lambda _: HERE, rings: int = RINGS) -> Iterator[Load]:
    """Everything started and connected."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bind = enter("far")
        listener = stack.enter_context(socket.create_server((HERE, 0), backlog=64))
        server = FORK.Process(target=serve, args=(listener,))
        server.start()
        stack.callback(server.kill)
        routes = {f"{kind} {name}": way for kind, named in ways.items() for name, way in named.items()}
        server_at: Address = listener.getsockname()
        targets = dict.fromkeys(routes, server_at)
        pids: dict[str, list[int]] = {route: [] for route in routes}
        for role in ("far", "near"):
            bind = bind if role == "far" else enter(role)
            for route, way in routes.items():
                encryption = "on" if route.startswith("encrypted") else "off"
                process, port = way(End(role, encryption, bind, targets[route], folder))
                stack.callback(end_process, process)
                targets[route] = (bind, port)
                pids[route].append(process.pid)
        clients = []
        for _ in range(rings):
            ours, theirs = FORK.Pipe()
            process_ = FORK.Process(target=client, args=(targets, theirs))
            process_.start()
            stack.callback(process_.kill)
            assert ours.recv() == "ready"
            clients.append(ours)
        yield Load(clients, pids)


Measured = dict[str, dict[str, dict[str, float]]]  # kind -> figure -> medians and ratio


def forwarder(ways: dict[str, dict[str, Way]]) -> Measured:
    with load(ways) as made:
        return {kind: {figure.name: compare(made, kind, figure, [*ways[kind]]) for figure in FIGURES} for kind in ways}


# --- through a LAN: two network namespaces, and between them a process that delays and paces ------------------------

LAN_DELAY_S, LAN_BYTES_S = 0.0005, 125e6  # each way: 1 ms there and back, 1 Gbit/s
TUNSETIFF, IFF_TUN_NO_PI = 0x400454CA, 0x1001


def make_tun(address: str) -> int:
    """A network interface whose packets are this descriptor's, in the network that this process is in."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"lan", IFF_TUN_NO_PI))
    subprocess.run(["ip", "link", "set", "lan", "mtu", "9000", "up"], check=True)
    subprocess.run(["ip", "addr", "add", f"{address}/24", "dev", "lan"], check=True)
    os.set_blocking(tun, False)
    return tun


def relay(tuns: Sequence[int]) -> None:
    """Carry packets both ways, each after its turn on the cable and the delay."""
    other, free = dict(zip(tuns, reversed(tuns), strict=True)), dict.fromkeys(tuns, 0.0)
    waiting: dict[int, collections.deque[tuple[float, bytes]]] = {tun: collections.deque() for tun in tuns}
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        select.select(tuns, [], [], None if due is None else max(0.0, due - time.monotonic()))
        for tun in tuns:
            with contextlib.suppress(BlockingIOError):
                while len(waiting[tun]) < 1000:  # as a switch does, it drops what is too much
                    packet = os.read(tun, 1 << 16)
                    free[tun] = max(free[tun], time.monotonic()) + len(packet) / LAN_BYTES_S
                    waiting[tun].append((free[tun] + LAN_DELAY_S, packet))
            while waiting[tun] and waiting[tun][0][0] <= time.monotonic():
                with contextlib.suppress(BlockingIOError):
                    os.write(other[tun], waiting[tun].popleft()[1])


def lan(ways: dict[str, dict[str, Way]], answer: Connection) -> None:
    """In a process of its own, which changes its network: tells what `forwarder` would."""
    tuns: list[int] = []

    def enter(role: str) -> str:
        shardbox._enter_own_network()
        address = {"far": "10.9.0.2", "near": "10.9.0.1"}[role]
        tuns.append(make_tun(address))
        if len(tuns) == 2:
            FORK.Process(target=relay, args=(tuns,), daemon=True).start()
        return address

    with load(ways, enter, 1) as made:
        answer.send({kind: {one.name: compare(made, kind, one, [*ways[kind]]) for one in LAN_FIGURES} for kind in ways})


def through_lan() -> Measured:
    """HAProxy and shardbox through the LAN; nothing, and a sentence, where there can be none."""
    if sys.platform != "linux" or os.geteuid() or not os.path.exists("/dev/net/tun") or not shutil.which("ip"):
        print("no emulated LAN here: it needs root, `ip` and /dev/net/tun")
        return {}
    ways = {kind: {name: named[name] for name in ("haproxy", "shardbox")} for kind, named in WAYS.items()}
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=lan, args=(ways, theirs))
    process.start()
    theirs.close()
    try:
        return typing.cast(Measured, ours.recv())
    finally:
        process.join()


# --- a node that has other things to do ---------------------------------------------------------------------------


def busy_node(config: str, *end: str) -> None:
    """`up`, with an end of a way in the same process."""
    start = shardbox.Spawner.start

    def started() -> shardbox.Spawner:
        spawner = start()  # which wants to be alone in its process
        threading.Thread(target=node, args=end, daemon=True).start()
        return spawner

    shardbox.Spawner.start = started  # type: ignore[method-assign]
    sys.exit(shardbox.main(["up", "--config", config, "--node", "a"]))


def keep_asking(cluster: str, api: int, wanted: Any) -> None:
    """While it is wanted: ten times a second the status, and an answer of 100 tokens a second, streamed."""
    body = json.dumps({"messages": [{"role": "user", "content": "Go on."}], "stream": True, "max_tokens": 10})
    while wanted.wait():
        started = time.monotonic()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(shardbox.status_address(cluster, "a"))
            while sock.recv(1 << 16):
                pass
        connection = http.client.HTTPConnection(HERE, api, timeout=10)
        connection.request("POST", "/v1/chat/completions", body)
        assert b"[DONE]" in connection.getresponse().read()
        time.sleep(max(0.0, started + 0.1 - time.monotonic()))


@contextlib.contextmanager
def busy_way(encryption: str) -> Iterator[tuple[Connection, Any]]:
    """A client through such a node, and the event that makes the node busy."""
    model = '[[models]]\nname = "m"\npath = "m.gguf"\nrehearse = {layers = 2, width = 64, bytes = "1MiB"}\n'
    with contextlib.ExitStack() as stack:

        def fork(target: Callable[..., None], *args: object) -> multiprocessing.process.BaseProcess:
            process = FORK.Process(target=target, args=args)
            process.start()
            stack.callback(process.kill)
            return process

        folder = stack.enter_context(tempfile.TemporaryDirectory())
        api, cluster, config = write_config(folder, model)
        os.environ |= {"SHARDBOX_STATE": os.path.join(folder, "state"), "SHARDBOX_LOG": "error"}
        listener = stack.enter_context(socket.create_server((HERE, 0)))
        fork(serve, listener)
        far, port = node_process("far", encryption, HERE, listener.getsockname())
        stack.callback(end_process, far)
        near, port = node_process("near", encryption, HERE, (HERE, port), config)
        stack.callback(near.communicate)
        stack.callback(near.terminate)
        while not answers(api):
            time.sleep(0.1)
        wanted, (ours, theirs) = FORK.Event(), FORK.Pipe()
        asker = fork(keep_asking, cluster, api, wanted)
        fork(client, {"it": (HERE, port)}, theirs)
        assert ours.recv() == "ready"
        yield ours, wanted
        assert asker.is_alive(), "the asker was refused"


def while_busy() -> dict[str, float]:
    """The 32 KiB round trip while the near node also answers status and streams, to that while it does not."""
    result = {}
    for kind, encryption in (("plain", "off"), ("encrypted", "on")):
        seen: dict[bool, list[float]] = {False: [], True: []}
        with busy_way(encryption) as (orders, wanted):
            for _ in range(PAIRS):
                for busy in random.sample((False, True), 2):
                    (wanted.set if busy else wanted.clear)()
                    time.sleep(0.3)
                    orders.send(("it", 32 << 10, 32 << 10, 1.0))
                    seen[busy].append(orders.recv()[2])
        pairs = zip(seen[True], seen[False], strict=True)
        result[kind] = statistics.median(busy / idle for busy, idle in pairs)
    return result


def answers(api: int) -> bool:
    """Whether a node's endpoint says that every model is served."""
    try:
        connection = http.client.HTTPConnection(HERE, api, timeout=10)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


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
    names = [*next(iter(figures.values()))]
    yield f"| | {' | '.join(names)} |\n|{'-|' * (len(names) + 1)}"
    for figure, values in figures.items():
        yield f"| {figure} | " + " | ".join(f"{values[name]:.3g}" for name in names) + " |"


def compared() -> dict[str, object]:
    """Everything beside HAProxy, printed, as it goes into build/bench.json."""
    absent = missing()
    if "haproxy" in absent:
        print("no haproxy here: the forwarder is not measured")
        return {}
    if absent:
        print(f"not measured, since they are not here: {', '.join(absent)}")
    ways = {kind: {name: way for name, way in named.items() if name not in absent} for kind, named in WAYS.items()}
    measured = forwarder(ways)
    through = through_lan()
    for title, found in (("", measured), (", through 1 ms and 1 Gbit/s", through)):
        for kind, figures in found.items():
            print(f"\n{kind}{title}\n" + "\n".join(table(figures)))
    short = {"rtt": "32 KiB round trip, us", "throughput": "16 MiB throughput, MB/s", "cpu": "CPU, s/GB"}
    ratios = {f"{kind}_{key}": measured[kind][name]["ratio"] for kind in measured for key, name in short.items()}
    return {"forwarder": ratios, "against HAProxy": measured, "through a LAN": through}


def main() -> None:
    """Run everything, print tables, and write build/bench.json."""
    results = compared()
    others: dict[str, Callable[[], dict[str, float]]] = {
        "32 KiB round trip, node busy / idle": while_busy,
        "start-up / python -c pass": start_up,
        "at rest": idle,
        "plan": plans,
        "a real ring of three": functools.partial(bench_ring.ring, program()),
    }
    for title, measure in others.items():
        results[title] = values = measure()
        print(f"\n{title}")
        for name, value in values.items():
            print(f"  {name:40} {value:10.4g}")
    Path("build").mkdir(exist_ok=True)
    Path("build/bench.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    if len(sys.argv) == 7:
        busy_node(sys.argv[6], *sys.argv[1:6])
    elif len(sys.argv) == 6:
        node(*sys.argv[1:])
    else:
        main()
