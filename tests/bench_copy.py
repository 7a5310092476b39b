"""Copies between boxes, measured: `make bench-copy`. Nothing here passes or fails.

Boxes are network namespaces on one bridge, files lie in memory (/dev/shm) where there is room. What is compared runs in
turn, in random order; figures are medians. As root on Debian it installs openssh-server and rsync. With SHARDBOX_PRIMA
and SHARDBOX_MODEL the ring beside which a copy runs is a real one, else a rehearsed one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hosts import PATIENCE_S, SECRET, Host, Lan, eventually, tool
from models import write_model

from shardbox import MIB, Mesh, MeshError, WireStats, mesh_keys

ROUNDS = int(os.environ.get("BENCH_ROUNDS", "5"))
SIZE = int(os.environ.get("BENCH_MIB", "512")) * MIB
PORT = 7400
PATHS = os.pathsep.join(os.path.abspath(path) for path in sys.path)
NAME = "models/m.gguf"
QUESTION = {"model": "ring", "messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": 150}


# --- the mesh alone, as a process in each of two boxes ---


def mesh_give(port: int) -> None:
    """Send zeros to whoever asks, until killed."""

    def serve(near: socket.socket) -> None:
        block = bytes(MIB)
        with near, contextlib.suppress(OSError):
            while True:
                near.sendall(block)

    def opened(_peer: str, _service: str) -> tuple[socket.socket, WireStats]:
        near, far = socket.socketpair()
        threading.Thread(target=serve, args=(near,), daemon=True).start()
        return far, WireStats()

    Mesh(keys=mesh_keys(SECRET, "bench", "giver"), open_service=opened).listen("0.0.0.0", port)
    signal.pause()


def mesh_take(address: str, port: int, size: int) -> None:
    """Print the seconds that so many bytes take, connection and handshake included."""

    def refuse(_peer: str, _service: str) -> tuple[socket.socket, WireStats]:
        raise MeshError("takes only", kind="refused")

    mesh = Mesh(keys=mesh_keys(SECRET, "bench", "taker"), open_service=refuse)
    started, view = time.perf_counter(), memoryview(bytearray(MIB))
    with mesh.connect(address, port, "giver", "file/bench", 10.0) as sock:
        while size > 0:
            size -= sock.recv_into(view)
    print(time.perf_counter() - started)


# --- boxes ---


def toml(names: list[str], models: str, cluster: str = "", engine: str = 'kind = "rehearsal"') -> str:
    nodes = "".join(f'[[nodes]]\nname = "{name}"\nmemory = "2GiB"\n' for name in names)
    head = f'[cluster]\nname = "bench"\nsecret_file = "cluster.secret"\n{cluster}\n[engine]\n{engine}\n'
    return f"{head}{nodes}{models}"


@contextlib.contextmanager
def boxes(names: list[str], text: str) -> Iterator[Lan]:
    """Boxes whose first one has the model; nobody is up."""
    with Lan() as lan:
        for name in names:
            host = lan.add(name, lan.folder)
            host.config = host.folder / "shardbox.toml"
            host.config.write_text(text)
            (host.folder / "cluster.secret").write_text(SECRET)
        yield lan


def limit(lan: Lan, rate: str) -> None:
    """Both directions of every cable."""
    shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "30ms")
    for number, host in enumerate(lan.hosts.values(), 1):
        tool("ip", "netns", "exec", host.netns, "tc", "qdisc", "replace", "dev", "eth0", *shape)
        tool("ip", "netns", "exec", lan._switch, "tc", "qdisc", "replace", "dev", f"port{number}", *shape)


def wait_whole(host: Host, node: str) -> None:
    """Until that node is known to have read its copy."""

    def asked() -> bool:
        rows = json.loads(host.run("models", "--json").stdout)["models"]
        return any(row["node"] == node and row["root"] for row in rows)

    eventually(asked, f"{node} has read its copy", 2 * PATIENCE_S)


def lacks(host: Host) -> bool:
    """Whether a box knows that it has no copy."""
    rows = json.loads(host.run("models", "--json").stdout)["models"]
    return all(row["node"] != host.name or not row["root"] for row in rows)


@contextlib.contextmanager
def warm(size: int) -> Iterator[None]:
    """Memory for the files that come in meanwhile. A virtual machine gives freed memory back to its host, and waits for
    it at the first touch (0.7 to 1.4 GB/s on one such machine, 4.3 later): nine boxes would share that wait, real ones
    do not. So it is held, and let go of as the files grow."""
    step, ahead = 32 * MIB, 256 * MIB
    if tempfile.gettempdir() != "/dev/shm":  # main() has seen that there is room
        size = 0
    free = shutil.disk_usage(tempfile.gettempdir()).free
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    held, ended = [mmap.mmap(-1, step, flags) for _ in range(size // step)], threading.Event()

    def let_go() -> None:
        while held and not ended.wait(0.02):
            come = free - shutil.disk_usage(tempfile.gettempdir()).free
            while held and len(held) * step > size - ahead - come:
                held.pop().close()

    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for rest in held:
            rest.close()


def pull(takers: list[Host], size: int) -> float:
    """Seconds until all of them have the file of that size; it is removed again."""
    with warm(len(takers) * size):
        started = time.perf_counter()
        running = [host.popen("pull", "m") for host in takers]
        codes = [process.wait(600) for process in running]
        seconds = time.perf_counter() - started
    assert codes == [0] * len(takers), [host.output(process) for host, process in zip(takers, running, strict=True)]
    for host in takers:
        (host.folder / NAME).unlink()
    for host in takers:
        eventually(functools.partial(lacks, host), "it has noticed that the file is gone")
    return seconds


def own_s(host: Host, size: int) -> float:
    """Seconds of the last copy to a box without the start of `pull`, from the rate in that node's log."""
    assert host.up_process
    *_, (rate, unit) = re.findall(r"whole, and in place \(.*, ([\d.]+) (\w+)/s\)", host.output(host.up_process))
    return size / (float(rate) * {"KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB}[unit])


def figure(results: dict[str, list[float]], name: str) -> float:
    return statistics.median(results[name])


# --- one taker: shardbox, the mesh alone, scp, rsync ---


@contextlib.contextmanager
def ssh_server(host: Host) -> Iterator[list[str]]:
    """An sshd in a box, and how to call it."""
    keys = host.folder / "ssh"
    keys.mkdir()
    for name in ("host", "user"):
        tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name))
    shutil.copy(keys / "user.pub", keys / "authorized")
    (keys / "config").write_text(
        f"Port 2222\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/authorized\nStrictModes no\nPidFile none\n"
        "UsePAM no\nPermitRootLogin yes\nSubsystem sftp internal-sftp\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    daemon = host.spawn(shutil.which("sshd") or "sshd", "-D", "-f", str(keys / "config"))
    options = ("-i", str(keys / "user"), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
    eventually(lambda: "0.0.0.0:2222" in host.listening(), "sshd listens")
    yield [*options, "-o", "LogLevel=ERROR"]
    daemon.kill()


def install() -> None:
    if not (shutil.which("sshd") and shutil.which("rsync") and shutil.which("scp")):
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        packages = ("openssh-server", "openssh-client", "rsync")
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages], check=True)


def one_taker(encryption: str, rate: str = "") -> dict[str, float]:
    """SIZE to one box, on unlimited cables or of this rate: MB/s, and ratios to the others (1: as fast; more: faster).
    The mesh alone is compared with the copy alone, programs with `pull`, all with their start."""
    names = ["alpha", "beta"]
    text = toml(names, f'[[models]]\nname = "m"\npath = "{NAME}"\nautostart = false\n', f'encryption = "{encryption}"')
    results: dict[str, list[float]] = {"shardbox": [], "mesh": [], "scp": [], "rsync": []}
    alone = []
    with boxes(names, text) as lan:
        alpha, beta = lan.hosts.values()
        source = write_model(alpha.folder / NAME, SIZE)
        if rate:
            limit(lan, rate)
        lan.up(*names)
        wait_whole(beta, "alpha")
        me = [sys.executable, str(Path(__file__).resolve())]
        alpha.spawn(*me, "mesh-give", str(PORT), PYTHONPATH=PATHS)
        eventually(lambda: f"0.0.0.0:{PORT}" in alpha.listening(), "the mesh listens")
        with ssh_server(alpha) as options:
            remote, target = f"root@{alpha.address}:{source}", str(beta.folder / "copy")

            def timed(*args: str) -> float:
                started = time.perf_counter()
                done = beta.run_tool(*args, timeout=600)
                assert done.returncode == 0, done.stderr
                Path(target).unlink()
                return time.perf_counter() - started

            ways: dict[str, Callable[[], float]] = {
                "shardbox": lambda: pull([beta], SIZE),
                "mesh": lambda: float(
                    beta.run_tool(*me, "mesh-take", alpha.address, str(PORT), str(SIZE),
                                  PYTHONPATH=PATHS).stdout
                ),
                "scp": lambda: timed("scp", "-q", "-P", "2222", *options, remote, target),
                "rsync": lambda: timed(
                    "rsync", "--whole-file", "-e", " ".join(["ssh", "-p", "2222", *options]), remote, target
                ),
            }  # fmt: skip
            for _ in range(ROUNDS):
                for way in random.sample(list(ways), len(ways)):
                    results[way].append(ways[way]())
                alone.append(own_s(beta, SIZE))
    pulls, results["copy_alone"] = results["shardbox"], alone
    seconds = {name: figure(results, name) for name in results}
    ratios = {f"vs_{n}": statistics.median(b / a for a, b in zip(ours, results[n], strict=True))
              for n, ours in (("mesh", alone), ("scp", pulls), ("rsync", pulls))}  # fmt: skip
    return {**{f"{name}_MB_s": SIZE / 1e6 / value for name, value in seconds.items()}, **ratios}


# --- many takers ---


def growth(rate: str, size: int, encryption: str) -> dict[str, float]:
    """Seconds of the slowest copy to 1, 2, and 8 boxes at once, on cables of this rate. Without the start of `pull`:
    eight of them on one machine's cores are no property of eight boxes."""
    names = [f"box{n}" for n in range(9)]
    text = toml(names, f'[[models]]\nname = "m"\npath = "{NAME}"\nautostart = false\n', f'encryption = "{encryption}"')
    results: dict[str, list[float]] = {"1": [], "2": [], "8": []}
    with boxes(names, text) as lan:
        first, *others = lan.hosts.values()
        write_model(first.folder / NAME, size)
        limit(lan, rate)
        lan.up(*names)
        for host in others:
            wait_whole(host, first.name)
        for _ in range(max(1, ROUNDS // 2)):
            for count in random.sample(list(results), len(results)):
                takers = others[: int(count)]
                pull(takers, size)
                results[count].append(max(own_s(host, size) for host in takers))
    found = {f"seconds_to_{count}": figure(results, count) for count in results}
    return {**found, "growth": found["seconds_to_8"] / found["seconds_to_2"]}


# --- beside a ring that answers ---


def seconds_a_token(host: Host, beside: subprocess.Popen[str] | None = None) -> float:
    """Of one streamed answer, from its first token on; only while that process runs."""
    times = []
    with host.stream("/v1/chat/completions", {**QUESTION, "ignore_eos": True}) as stream:
        for event in stream:
            if beside is not None and beside.poll() is not None:
                break
            if event != "[DONE]" and event["choices"] and event["choices"][0]["delta"].get("content"):
                times.append(time.perf_counter())
    assert len(times) > 10, "the copy ended too soon: make BENCH_MIB larger"
    return (times[-1] - times[0]) / (len(times) - 1)


def token_rise(copy_limit: str) -> float:
    """By how much a copy from a rank of a ring to a third box lengthens the time of a token: 0.1 is a tenth."""
    prima, model = os.environ.get("SHARDBOX_PRIMA"), os.environ.get("SHARDBOX_MODEL")
    names = ["alpha", "beta", "gamma"]
    models = '[[models]]\nname = "ring"\npath = "ring.gguf"\ncontext = 1024\nlayers = {alpha = 15, beta = 15}\n'
    if not (prima and model):
        models += 'rehearse = {layers = 30, width = 4096, bytes = "1GiB"}\n'
    models += f'[[models]]\nname = "m"\npath = "{NAME}"\nautostart = false\n'
    engine = f'path = "{prima}"\nthreads = 1' if prima and model else 'kind = "rehearsal"'
    alone, beside = [], []
    with boxes(names, toml(names, models, f"copy_limit = {copy_limit}", engine)) as lan:
        alpha, beta, gamma = lan.hosts.values()
        if prima and model:
            for host in (alpha, beta):
                shutil.copy(model, host.folder / "ring.gguf")
        write_model(alpha.folder / NAME, SIZE)
        lan.up("alpha", "beta", "gamma")
        beta.wait_status(lambda found: found.models[0].phase == "serving", "the ring serves", 2 * PATIENCE_S)
        seconds_a_token(alpha)
        for _ in range(ROUNDS):
            alone.append(seconds_a_token(alpha))
            wait_whole(gamma, "alpha")
            pulling = gamma.popen("pull", "m")
            gamma.wait_status(lambda found: any(view.done_bytes for view in found.copies), "the copy has begun")
            beside.append(seconds_a_token(alpha, pulling))
            assert gamma.up_process
            gamma.up_process.kill()
            pulling.wait(30)
            for file in (gamma.folder / "models").iterdir():
                file.unlink()
            gamma.up()
    return statistics.median(b / a for a, b in zip(alone, beside, strict=True)) - 1


def main() -> None:
    """All of it, as a table and as build/copy.json."""
    if sys.argv[1:2] == ["mesh-give"]:
        return mesh_give(int(sys.argv[2]))
    if sys.argv[1:2] == ["mesh-take"]:
        return mesh_take(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    if shutil.disk_usage("/dev/shm").free > 16 * SIZE:
        tempfile.tempdir = "/dev/shm"
    install()
    found: dict[str, object] = {"size_MiB": SIZE // MIB, "rounds": ROUNDS}
    parts = sys.argv[1:] or ["one", "growth", "tokens"]
    if "one" in parts:
        found["encrypted"], found["plain"] = (one, _) = one_taker("on"), one_taker("off")
        found["encrypted_at_1gbit"] = one_taker("on", "1gbit")
        found |= {key: one[key] for key in ("vs_mesh", "vs_scp", "vs_rsync")}
    if "growth" in parts:
        found["at_200mbit"] = growth("200mbit", 2 * SIZE, "on")  # which two cores bear for nine boxes
        found["at_1gbit"] = fast = growth("1gbit", 2 * SIZE, "on")
        found["growth_2_to_8"] = fast["growth"]
    if "tokens" in parts:
        found["token_time_rise"] = token_rise('"auto"')
        print(f"token time beside a copy: {found['token_time_rise']:+.1%}", flush=True)
        found["token_time_rise_unlimited"] = token_rise("0")
        found["ring"] = "prima" if os.environ.get("SHARDBOX_PRIMA") else "rehearsal"
    text = json.dumps(found, indent=2)
    print(text)
    Path("build").mkdir(exist_ok=True)
    Path("build/copy.json").write_text(text + "\n")
    return None


if __name__ == "__main__":
    main()
