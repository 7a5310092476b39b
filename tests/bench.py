"""Measurements as ratios, taken side by side in one run: `make bench`. Nothing here passes or fails.

SHARDBOX_EXE=dist/shardbox measures the executable's start instead of the module's.

The machine drifts: rounds are interleaved, medians are shown, and each figure stands beside what it is compared with.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import shardbox

ROUNDS = 7
MODULE = str(Path(shardbox.__file__).resolve())


def interleaved(cases: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of each case, one of each per round."""
    seen: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            seen[name].append(case())
    return {name: statistics.median(values) for name, values in seen.items()}


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
    times = interleaved(
        {
            "python -c pass": command(sys.executable, "-c", "pass"),
            "version": command(*program(), "version"),
            "status (not running)": command(*program(), "status", "--config", "config.example.toml"),
            "up until it listens": until_it_listens,
        }
    )
    base = times["python -c pass"]
    return {name: value / base for name, value in times.items()}


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


# --- the forwarder: engine -> wire -> mesh -> mesh -> engine, all on loopback ------------------------------


def echo_server() -> int:
    """A far engine that sends back what it gets; returns its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=echo, args=(sock,), daemon=True).start()

    def echo(sock: socket.socket) -> None:
        while data := sock.recv(1 << 18):
            sock.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def forwarded(port: int) -> int:
    """A port on which a wire through two meshes leads to `port`."""
    secret = "a bench needs no better secret than this"

    def open_service(peer: str, service: str) -> tuple[socket.socket, shardbox.WireStats]:
        return socket.create_connection(("127.0.0.1", port)), shardbox.WireStats()

    far = shardbox.Mesh(keys=shardbox.mesh_keys(secret, "bench", "far"), open_service=open_service)
    near = shardbox.Mesh(keys=shardbox.mesh_keys(secret, "bench", "near"), open_service=open_service)
    mesh_port = far.listen("127.0.0.1", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    shardbox.Wire(
        listener=listener,
        dial=lambda: near.dial("127.0.0.1", mesh_port, "far", "data/bench", 5.0),
        stats=shardbox.WireStats(),
        on_trouble=print,
    )
    return int(listener.getsockname()[1])


def round_trips(port: int, size: int, count: int) -> Callable[[], float]:
    """Seconds for one round trip of `size` bytes, over `count` of them on a warm connection."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    payload, buffer = bytes(size), bytearray(size)

    def run() -> float:
        started = time.perf_counter()
        for _ in range(count):
            sender = threading.Thread(target=sock.sendall, args=(payload,)) if size > 1 << 20 else None
            if sender:
                sender.start()
            else:
                sock.sendall(payload)
            view = memoryview(buffer)
            while view:
                view = view[sock.recv_into(view) :]
            if sender:
                sender.join()
        return (time.perf_counter() - started) / count

    return run


def forwarder() -> dict[str, float]:
    """The sealed wire as ratios to a direct connection."""
    direct = echo_server()
    wire = forwarded(direct)
    result = {}
    for label, size, count in (("64 B", 64, 300), ("32 KiB", 32 << 10, 200), ("16 MiB", 16 << 20, 2)):
        cases = {"direct": round_trips(direct, size, count), "wire": round_trips(wire, size, count)}
        times = interleaved(cases)
        result[f"round trip {label}"] = times["wire"] / times["direct"]
    return result


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


def main() -> None:
    """Run everything, print tables, and write build/bench.json."""
    sys.setswitchinterval(1e-4)
    results = {
        "start-up / python -c pass": start_up(),
        "at rest": idle(),
        "sealed wire / direct": forwarder(),
        "plan": plans(),
    }
    for title, figures in results.items():
        print(f"\n{title}")
        for name, value in figures.items():
            print(f"  {name:24} {value:10.4g}", flush=True)
    Path("build").mkdir(exist_ok=True)
    Path("build/bench.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
