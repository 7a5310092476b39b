"""Hostile input for every parser of bytes from outside, then a crowd at the mesh port: `make fuzz`.

FUZZ_SECONDS (60) bounds the parsers together; FUZZ_CROWD (10000) is the number of half-open connections. Hypothesis
changes good samples, shrinks what breaks, and prints how to repeat it. No network but loopback. Exit code 1: a finding.
"""

import contextlib
import dataclasses
import json
import os
import queue
import random
import resource
import socket
import ssl
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from guided import guided_gguf
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from samples import box, shape

import shardbox
from shardbox import Mesh, MeshKeys, WireStats, mesh_keys

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("FUZZ_SECONDS", "60"))
CROWD = int(os.environ.get("FUZZ_CROWD", "10000"))
HERE, PATIENCE_S = "127.0.0.1", 20.0
SECRET = "a secret of the fuzzer, long enough"

Changes = list[tuple[int, int, bytes]]
CHANGES = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.integers(0, 64), st.binary(max_size=64) | st.just(b"\xff" * 8)),
    min_size=1,
    max_size=6,
)


def changed(sample: bytes, changes: Changes) -> bytes:
    """The sample with some bytes replaced, put in, or left out."""
    data = bytearray(sample)
    for at, gone, new in changes:
        at %= len(data) + 1
        data[at : at + gone] = new
    return bytes(data)


# --- parsers: each takes what anybody may write, and raises only what it says --------------------------------------

EXAMPLE = (ROOT / "config.example.toml").read_bytes()


def toml(changes: Changes) -> None:
    with contextlib.suppress(shardbox.ConfigError):
        shardbox.parse_config(changed(EXAMPLE, changes), file="box.toml", folder="/")


MESSAGES: dict[type[Any], Any] = {
    shardbox.NodeFacts: box("alpha", 20 << 30, shape(layers=8)),
    shardbox.PeerView: shardbox.PeerView(name="a", state="self"),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
KINDS = [*MESSAGES, shardbox.ModelPlan, shardbox.Snapshot, shardbox.ModelView, shardbox.RankView]


def message(changes: Changes) -> None:
    for kind, good in MESSAGES.items():
        text = json.dumps(shardbox.to_json(good)).encode()
        with contextlib.suppress(shardbox.MessageError, ValueError, RecursionError):
            shardbox.from_json(kind, json.loads(changed(text, changes)), "message")


def message_of_any_shape(data: Any) -> None:
    for kind in KINDS:
        with contextlib.suppress(shardbox.MessageError):
            shardbox.from_json(kind, data, "message")


def advert(fields: dict[str, str | None], addresses: list[str], port: int | None) -> None:
    hint = shardbox.parse_advert(fields, addresses, port)
    assert hint is None or (hint.address in addresses and (hint.cluster + hint.version).isprintable())


KEY = AESGCM(bytes(32))


def frames(changes: Changes) -> None:
    stream, whole = b"", b"onez" + b"z" * 299
    for number, piece in enumerate((b"one", b"z" * 300, b"")):
        stream += bytes(shardbox.seal_frame(KEY, number, memoryview(piece), memoryview(bytearray(400))))
    into = memoryview(bytearray(4096))
    with contextlib.suppress(InvalidTag, ConnectionAbortedError):
        _, used, gained, ended = shardbox.open_frames(KEY, 0, memoryview(changed(stream, changes)), into)
        assert used <= len(stream) and whole.startswith(bytes(into[:gained]))
        assert gained == len(whole) or not ended


# --- a live node: whatever comes, it refuses and goes on serving ---------------------------------------------------


class Target:
    """A far node whose only service sends everything back, and a member that may talk to it."""

    def __init__(self) -> None:
        self.keys: dict[str, MeshKeys] = {name: mesh_keys(SECRET, "fuzz", name) for name in ("alpha", "beta")}
        self.far = Mesh(keys=self.keys["beta"], open_service=self._open, handshake_deadline_s=2)
        self.near = Mesh(keys=self.keys["alpha"], open_service=self._open)
        self.port = self.far.listen(HERE, 0)
        self.hello = self._hello()

    @staticmethod
    def _open(peer: str, service: str) -> tuple[socket.socket, WireStats]:
        ours, theirs = socket.socketpair()
        threading.Thread(target=echo, args=(theirs,), daemon=True).start()
        return ours, WireStats()

    def _hello(self) -> bytes:
        outgoing = ssl.MemoryBIO()
        tls = self.keys["alpha"].client.wrap_bio(ssl.MemoryBIO(), outgoing)
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
        return outgoing.read()

    def serves(self) -> None:
        """An honest member is served."""
        with self.near.connect(HERE, self.port, "beta", "control", PATIENCE_S) as talk:
            talk.settimeout(PATIENCE_S)
            talk.sendall(b"ping")
            assert talk.recv(4, socket.MSG_WAITALL) == b"ping"

    def first_bytes(self, changes: Changes) -> None:
        with socket.create_connection((HERE, self.port), PATIENCE_S) as sock:
            drain(sock, changed(self.hello, changes))

    def preface(self, changes: Changes) -> None:
        ask = {
            "random": "0" * 64,
            "protocol": 1,
            "encryption": "on",
            "from": "alpha",
            "to": "beta",
            "service": "control",
        }
        sock = socket.create_connection((HERE, self.port), PATIENCE_S)
        with sock, self.keys["alpha"].client.wrap_socket(sock) as tls:
            tls.sendall(changed(json.dumps(ask).encode() + b"\n", changes))
            drain(tls, b"")  # what is left is no TLS any more

    def cable(self, changes: Changes) -> None:
        """Bytes of a stranger within a connection of members: nothing but a reset may follow."""
        evil = changed(b"\0\0\0\4" + bytes(20), changes)
        assume(evil)
        link = self.near.dial(HERE, self.port, "beta", "control", PATIENCE_S)
        ended: queue.Queue[bool] = queue.Queue()
        ours, theirs = socket.socketpair()
        with ours, contextlib.suppress(OSError):
            raw = socket.socket(fileno=os.dup(link._wire.fileno()))
            with raw:
                raw.sendall(evil)
            link.pump(theirs, WireStats(), ended.put)
            ours.shutdown(socket.SHUT_WR)
            ours.settimeout(PATIENCE_S)
            assert ours.recv(100) == b""
        assert ended.get(timeout=PATIENCE_S) is False


class Ordered:
    """A real node, and a member that knows what a proposer may say, and says it in other ways."""

    MODEL = '[[models]]\nname = "m"\npath = "m.gguf"\nautostart = false\n'
    MODEL += 'rehearse = {layers = 2, width = 64, bytes = "1MiB"}\n'

    def __init__(self, stack: contextlib.ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self.log = Path(folder, "log")
        with self.log.open("wb") as log:
            self.process, api, path = stack.enter_context(bench.lone_node(folder, self.MODEL, log))
        while not bench.listening(HERE, api):
            assert self.process.poll() is None
            time.sleep(0.02)
        self.config = config = shardbox.parse_config(Path(path).read_bytes(), file=path, folder=folder)
        self.port = config.nodes[0].ports.mesh
        keys = mesh_keys(bench.SECRET, config.cluster.name, "a")  # no pin says that it is another
        self.member = Mesh(keys=keys, open_service=Target._open)
        stack.callback(self.member.close)
        facts = dataclasses.replace(box("a", 20 << 30, shape(layers=2)), engine_kind="rehearsal")
        plan = shardbox.plan_all(config, [facts])["m"]
        assert isinstance(plan, shardbox.ModelPlan), plan
        said = {"model": "m", "generation": "0" * 16, "reason": "none", "orderly": False, "plan": plan}
        self.bodies = {verb: shardbox.to_json(said) for verb in ("prepare", "launch", "lease", "release", "trouble")}
        self.asked = [self.http("POST", f"/peer/{verb}", json.dumps(body)) for verb, body in self.bodies.items()]
        query = f"model=m&generation={0:016}&lines=9&uptime=1"
        self.asked += [self.http("GET", f"/peer/{what}?{query}") for what in ("state", "bound", "logs", "pairs")]

    @staticmethod
    def http(method: str, path: str, body: str = "") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body.encode())}\r\n\r\n"
        return (head + body).encode(errors="replace")

    def say(self, data: bytes) -> None:
        with self.member.connect(HERE, self.port, "a", "control", PATIENCE_S) as talk:
            talk.settimeout(PATIENCE_S)
            drain(talk, data)
        assert self.process.poll() is None, "the node has ended"
        assert b"Traceback" not in (said := self.log.read_bytes()), said.decode()

    def orders(self, which: int, changes: Changes) -> None:
        self.say(changed(self.asked[which % len(self.asked)], changes))

    def orders_of_any_shape(self, verb: str, key: str, value: Any) -> None:
        body = {**self.bodies[verb], key: value}
        self.say(self.http("POST", f"/peer/{verb}", json.dumps(body)))


def echo(sock: socket.socket) -> None:
    with sock, contextlib.suppress(OSError):
        while data := sock.recv(1 << 16):
            sock.sendall(data)


def drain(sock: socket.socket, data: bytes) -> None:
    """Send, end, and read until the other side ends it too."""
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        raise AssertionError("it never hung up") from None
    except OSError:
        pass  # it hung up before


# --- the crowd: in its own process, the node in another ------------------------------------------------------------


def footprint(pid: int) -> tuple[int, int]:
    """(resident KiB, threads) of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values["VmRSS"].split()[0]), int(values["Threads"])


def crowd() -> None:
    """Half-open connections by the thousand; every so often an honest member asks, and is served."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(CROWD, hard - 200)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((HERE, 0)))

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        process, port = bench.node_process("far", "on", HERE, listener.getsockname())
        stack.callback(process.communicate)
        stack.callback(process.kill)
        member = Mesh(keys=mesh_keys(bench.SECRET, "bench", "near"), open_service=Target._open)
        before, slowest = footprint(process.pid), 0.0
        most = before
        for number in range(count):
            sock = stack.enter_context(socket.create_connection((HERE, port), PATIENCE_S))
            if number % 2:
                sock.sendall(b"\x16\x03\x01\x02\x00\x01")
            if number % 500 == 499:
                started = time.monotonic()
                with member.connect(HERE, port, "far", "data/x", PATIENCE_S) as talk:
                    talk.sendall(b"ping")
                    assert talk.recv(4, socket.MSG_WAITALL) == b"ping"
                slowest = max(slowest, time.monotonic() - started)
                most = max(most, footprint(process.pid))
        member.close()
        print(f"crowd: {count} half-open; node {before[0] >> 10} -> {most[0] >> 10} MiB, at most {most[1]} threads")
        print(f"crowd: an honest member was served within {slowest * 1000:.0f} ms")
        assert most[0] - before[0] < 64 << 10, "the node's memory grew"
        assert most[1] < before[1] + shardbox.HALF_OPEN_MAX + 50, "the node's threads grew"


# --- running ---------------------------------------------------------------------------------------------------


def bounded(name: str, work: Callable[..., None], seconds: float, *strategies: st.SearchStrategy[Any]) -> int:
    """Examples tried within about so many seconds; raises what broke, with the smallest example found."""
    tried, deadline = 0, time.monotonic() + seconds

    def counted(drawn: tuple[Any, ...]) -> None:
        nonlocal tried
        tried += 1
        work(*drawn)

    rounds = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    while time.monotonic() < deadline:
        rounds(given(st.tuples(*strategies))(counted))()
    print(f"{name}: {tried} examples")
    return tried


def main() -> int:
    """All targets one after the other; the number of those that broke decides the exit code."""
    with contextlib.ExitStack() as stack:
        return attack(Target(), Ordered(stack))


def attack(target: Target, node: Ordered) -> int:
    """The exit code."""
    text = st.none() | st.text(max_size=80)
    fields = st.fixed_dictionaries(dict.fromkeys(("node", "cluster", "protocol", "version"), text))
    addresses = st.lists(st.sampled_from(["10.0.0.1", "fe80::1", ""]) | st.text(max_size=9), max_size=3)
    verbs, keys = st.sampled_from([*node.bodies]), st.sampled_from(["model", "generation", "plan", "reason", "expect"])
    jobs: list[tuple[str, Callable[..., None], tuple[st.SearchStrategy[Any], ...]]] = [
        ("TOML", toml, (CHANGES,)),
        ("messages", message, (CHANGES,)),
        ("messages of any shape", message_of_any_shape, (JSON,)),
        ("adverts", advert, (fields, addresses, st.none() | st.integers(0, 70000))),
        ("frames", frames, (CHANGES,)),
        ("first bytes", target.first_bytes, (CHANGES,)),
        ("preface", target.preface, (CHANGES,)),
        ("cable", target.cable, (CHANGES,)),
        ("orders", node.orders, (st.integers(0, 20), CHANGES)),
        ("orders of any shape", node.orders_of_any_shape, (verbs, keys, JSON)),
    ]
    broken = []
    try:
        guided_gguf(SECONDS / (len(jobs) + 1), random.randrange(1 << 32))
    except Exception:
        traceback.print_exc()
        broken.append("GGUF")
    for name, work, strategies in jobs:
        try:
            bounded(name, work, SECONDS / (len(jobs) + 1), *strategies)
            target.serves()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            broken.append(name)
    refused = shardbox.read_status(node.config, "a", PATIENCE_S).refusals
    print("refused by the nodes:", dict(target.far.refusals), refused)
    if not refused.get("order"):
        broken.append("counting of orders")
    target.near.close()
    target.far.close()
    try:
        crowd()
    except (AssertionError, OSError, shardbox.ShardboxError):
        traceback.print_exc()
        broken.append("crowd")
    print(f"broken: {', '.join(broken)}" if broken else "nothing broke")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
