"""Measurements as ratios, taken side by side in one run: `make bench`. Nothing here passes or fails.

The machine drifts: rounds are interleaved, medians are shown, and each figure stands beside what it is compared with.
"""

import dataclasses
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
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


def start_up() -> dict[str, float]:
    """Commands that cron and people wait for, as ratios to `python -c pass`."""
    python = sys.executable
    times = interleaved(
        {
            "python -c pass": command(python, "-c", "pass"),
            "version": command(python, MODULE, "version"),
            "status (not running)": command(python, MODULE, "status", "--config", "config.example.toml"),
        }
    )
    base = times["python -c pass"]
    return {name: value / base for name, value in times.items()}


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
    results = {"start-up / python -c pass": start_up(), "sealed wire / direct": forwarder(), "plan": plans()}
    for title, figures in results.items():
        print(f"\n{title}")
        for name, value in figures.items():
            print(f"  {name:24} {value:10.4g}")
    Path("build").mkdir(exist_ok=True)
    Path("build/bench.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
