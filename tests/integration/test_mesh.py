"""The mesh between real sockets on loopback: what it carries, what it refuses, what it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import zmq
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

import shardbox as mesh
from shardbox import Mesh, MeshError, MeshKeys, SealedLink, Wire, WireStats, mesh_keys

HERE = "127.0.0.1"
SECRET = "a secret of the tests, long enough"
PATIENCE_S = 15.0


@pytest.fixture(scope="session")
def keys() -> dict[str, MeshKeys]:
    return {
        "alpha": mesh_keys(SECRET, "attic", "alpha"),
        "beta": mesh_keys(SECRET, "attic", "beta"),
        "stranger": mesh_keys(SECRET + "!", "attic", "beta"),
        "cellar": mesh_keys(SECRET, "cellar", "beta"),
    }


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a state that nothing announces (a count of the kernel or of the interpreter)."""
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        pause.wait(0.005)


def footprint() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@dataclass
class Far:
    """A far node: its services hand their connected sockets to `accepted`."""

    mesh: Mesh
    port: int
    accepted: queue.Queue[tuple[str, str, socket.socket]]
    stats: WireStats

    def engine(self) -> socket.socket:
        """The engine's end of the next connection."""
        sock = self.accepted.get(timeout=PATIENCE_S)[2]
        sock.settimeout(PATIENCE_S)
        return sock


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HERE, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for sock in (near, far):
        sock.settimeout(PATIENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def far_node(keys: MeshKeys, handshake_deadline_s: float = 10) -> Far:
    accepted: queue.Queue[tuple[str, str, socket.socket]] = queue.Queue()
    stats = WireStats()

    def open_service(peer: str, service: str) -> tuple[socket.socket, WireStats]:
        if service.startswith("old/"):
            raise MeshError("generation 7 is over")
        if service.startswith("down/"):
            return socket.create_connection((HERE, 1)), stats
        ours, engine = tcp_pair()
        accepted.put((peer, service, engine))
        return ours, stats

    node = Mesh(keys=keys, open_service=open_service, handshake_deadline_s=handshake_deadline_s)
    return Far(node, node.listen(HERE, 0), accepted, stats)


def nothing(peer: str, service: str) -> tuple[socket.socket, WireStats]:
    raise MeshError("nothing here")


@pytest.fixture
def far(keys: dict[str, MeshKeys]) -> Iterator[Far]:
    node = far_node(keys["beta"])
    yield node
    node.mesh.close()


@pytest.fixture
def near(keys: dict[str, MeshKeys]) -> Iterator[Mesh]:
    node = Mesh(keys=keys["alpha"], open_service=nothing)
    yield node
    node.close()


@dataclass
class Path:
    """engine A = `a` -- near node -- far node -- `b` = engine B."""

    a: socket.socket
    b: socket.socket
    near: Mesh
    far: Far
    stats: WireStats
    link: SealedLink
    ended: queue.Queue[bool]


def joined(keys: dict[str, MeshKeys], dead_peer_s: float = 20, via: int = 0, far: Far | None = None) -> Path:
    far = far or far_node(keys["beta"])
    near = Mesh(keys=keys["alpha"], open_service=nothing, dead_peer_s=dead_peer_s)
    link = near.dial(HERE, via or far.port, "beta", "data/m/1/0/1", 5)
    a, local = tcp_pair()
    ended: queue.Queue[bool] = queue.Queue()
    stats = WireStats()
    link.pump(local, stats, ended.put)
    return Path(a, far.engine(), near, far, stats, link, ended)


@pytest.fixture
def path(keys: dict[str, MeshKeys]) -> Iterator[Path]:
    made = joined(keys)
    yield made
    finish(made)


def finish(made: Path) -> None:
    for sock in (made.a, made.b):
        sock.close()
    made.near.close()
    made.far.mesh.close()


def read_all(sock: socket.socket) -> bytes:
    parts = bytearray()
    while part := sock.recv(1 << 20):
        parts += part
    return bytes(parts)


def read_exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(1 << 20, size - len(parts)))
        assert part, "ended too early"
        parts += part
    return bytes(parts)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
    sock.close()


def echo(sock: socket.socket) -> None:
    while data := sock.recv(1 << 18):
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


# ---- what it carries ----


@pytest.mark.parametrize("size", [0, 1, 16, 32 * 1024, 262143, 262144, 262145, 1 << 20, 16 << 20])
def test_echo_of_any_size_comes_back_whole(path: Path, size: int) -> None:
    sent = os.urandom(size)
    echoing = in_thread(lambda: echo(path.b))

    def send() -> None:
        path.a.sendall(sent)
        path.a.shutdown(socket.SHUT_WR)

    sending = in_thread(send)
    assert hashlib.sha256(read_all(path.a)).digest() == hashlib.sha256(sent).digest()
    assert path.ended.get(timeout=PATIENCE_S) is True
    sending.join(PATIENCE_S)
    echoing.join(PATIENCE_S)
    assert (path.stats.sent_bytes, path.stats.received_bytes) == (size, size)
    assert (path.stats.connections, path.stats.opened, path.stats.resets) == (0, 1, 0)
    eventually(lambda: path.far.stats.connections == 0, "the far side ends")
    assert (path.far.stats.received_bytes, path.far.stats.resets) == (size, 0)


def test_many_small_pieces_arrive_in_order(path: Path) -> None:
    sent = [os.urandom(1 + i % 700) for i in range(4000)]

    def send() -> None:
        for piece in sent:
            path.a.sendall(piece)
        path.a.shutdown(socket.SHUT_WR)

    in_thread(send)
    assert read_all(path.b) == b"".join(sent)


@pytest.mark.parametrize("first", ["near", "far"])
def test_half_close_leaves_the_other_way_open(path: Path, first: str) -> None:
    asks, answers = (path.a, path.b) if first == "near" else (path.b, path.a)
    asks.sendall(b"question")
    asks.shutdown(socket.SHUT_WR)
    assert read_all(answers) == b"question"
    for i in range(3):
        answers.sendall(b"answer %d" % i)
        assert read_exactly(asks, 8) == b"answer %d" % i
    answers.shutdown(socket.SHUT_WR)
    assert asks.recv(1) == b""
    assert path.ended.get(timeout=PATIENCE_S) is True


@pytest.mark.parametrize("side", ["near", "far"])
@pytest.mark.parametrize("half_closed", [False, True])
def test_reset_on_one_side_is_a_reset_on_the_other(path: Path, side: str, half_closed: bool) -> None:
    gone, left = (path.a, path.b) if side == "near" else (path.b, path.a)
    gone.sendall(b"x")
    assert left.recv(1) == b"x"
    if half_closed:
        gone.shutdown(socket.SHUT_WR)
        assert left.recv(1) == b""
    reset(gone)
    if half_closed:  # the end was delivered before: the reset shows as an error of the socket
        eventually(lambda: left.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0, "a reset")
    else:
        with pytest.raises(ConnectionResetError):
            left.recv(1)
    assert path.ended.get(timeout=PATIENCE_S) is False
    assert path.stats.resets == 1
    eventually(lambda: path.far.stats.resets == 1, "the far side counts it")


def test_reset_while_the_sender_is_blocked_reaches_both(path: Path) -> None:
    """Back-pressure first: the pump is then inside send(), not inside recv()."""
    path.a.setblocking(False)
    stuffed = stuff(path.a)
    assert stuffed < 64 << 20
    path.link.close("enough")
    assert path.ended.get(timeout=PATIENCE_S) is False
    assert path.link.why == "enough"
    path.a.settimeout(PATIENCE_S)
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        while True:
            path.a.sendall(b"x" * 65536)
    with pytest.raises(ConnectionResetError):
        read_all(path.b)


def test_reset_reaches_an_engine_that_does_not_read(path: Path) -> None:
    """The far pump is blocked towards it, and must see that the other side is gone."""
    path.a.setblocking(False)
    stuff(path.a)
    reset(path.a)
    eventually(lambda: path.far.stats.resets == 1, "the far side ends")
    with pytest.raises(ConnectionResetError):
        read_all(path.b)


def stuff(sock: socket.socket) -> int:
    """Write until nothing more is taken for half a second; the bytes taken."""
    import select

    total, piece = 0, b"p" * (1 << 18)
    while select.select([], [sock], [], 0.5)[1]:
        total += sock.send(piece)
    return total


def test_slow_reader_blocks_the_sender_and_loses_nothing(path: Path) -> None:
    path.a.setblocking(False)
    taken = stuff(path.a)
    assert taken < 64 << 20  # socket buffers of three connections and one frame: bounded
    path.a.settimeout(PATIENCE_S)
    in_thread(lambda: path.a.shutdown(socket.SHUT_WR))
    assert len(read_all(path.b)) == taken


def test_reader_that_pauses_longer_than_the_dead_peer_time_is_no_dead_peer(keys: dict[str, MeshKeys]) -> None:
    """TCP_USER_TIMEOUT would have ended it (see _unanswered_s)."""
    path = joined(keys, dead_peer_s=0.5)
    path.a.setblocking(False)
    taken = stuff(path.a)
    with pytest.raises(queue.Empty):
        path.ended.get(timeout=4.5)  # CHECK_S twice, and more
    path.a.settimeout(PATIENCE_S)
    path.a.shutdown(socket.SHUT_WR)
    assert len(read_all(path.b)) == taken
    finish(path)


def test_connect_gives_a_plain_socket_to_talk_on(near: Mesh, far: Far) -> None:
    with near.connect(HERE, far.port, "beta", "control", 5) as talk:
        peer, service, engine = far.accepted.get(timeout=PATIENCE_S)
        assert (peer, service) == ("alpha", "control")
        in_thread(lambda: echo(engine))
        sent = os.urandom(300_000)
        in_thread(lambda: talk.sendall(sent))
        assert read_exactly(talk, len(sent)) == sent
    eventually(lambda: far.stats.connections == 0, "closing our end ends the far one")
    assert far.stats.resets == 0
    engine.close()


def test_probe_tells_who_is_there(near: Mesh, far: Far) -> None:
    assert near.probe(HERE, far.port, 5) == "beta"
    assert far.accepted.empty()
    assert not far.mesh.refusals


def test_node_may_call_itself(far: Far) -> None:
    with far.mesh.connect(HERE, far.port, "beta", "control", 5) as talk:
        engine = far.engine()
        talk.sendall(b"hello")
        assert read_exactly(engine, 5) == b"hello"
        engine.close()


# ---- what it refuses ----


@pytest.mark.parametrize("who", ["stranger", "cellar"])
def test_wrong_secret_or_cluster_is_refused_on_both_sides(keys: dict[str, MeshKeys], far: Far, who: str) -> None:
    caller = Mesh(keys=keys[who], open_service=nothing)
    for call in (caller.dial, caller.connect):
        with pytest.raises(MeshError) as caught:
            call(HERE, far.port, "beta", "control", 5)
        assert caught.value.kind == "wrong_secret"
    eventually(lambda: far.mesh.refusals == {"wrong_secret": 2}, "counted")
    assert far.mesh.last_refused == {"wrong_secret": HERE}
    assert far.accepted.empty()
    caller.close()


@pytest.mark.parametrize("certificate", ["none", "of another authority"])
def test_caller_that_trusts_anybody_is_told_nothing(keys: dict[str, MeshKeys], far: Far, certificate: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if certificate != "none":
        context = mesh_keys(SECRET + "!", "attic", "beta").client
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((HERE, far.port)) as sock:
        sock.settimeout(PATIENCE_S)
        tls = context.wrap_socket(sock)
        seen = tls.getpeercert(binary_form=True) or b""
        for word in (b"alpha", b"beta", b"attic", b"shardbox"):  # TLS shows a certificate to anybody
            assert word not in seen
        with pytest.raises(ssl.SSLError):
            tls.sendall(b'{"protocol": 1, "from": "alpha", "to": "", "service": ""}\n')
            assert tls.recv(100) == b""
            tls.recv(100)
        tls.close()
    eventually(lambda: far.mesh.refusals == {"wrong_secret": 1}, "counted")
    assert far.accepted.empty()


def test_connection_relayed_to_another_node_is_refused_by_name(near: Mesh, far: Far) -> None:
    with pytest.raises(MeshError, match="beta") as caught:
        near.dial(HERE, far.port, "gamma", "control", 5)
    assert caught.value.kind == "wrong_name"
    eventually(lambda: far.mesh.refusals == {"wrong_name": 1}, "counted")
    assert far.accepted.empty()


@pytest.mark.parametrize(
    "bytes_", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 400, b"SSH-2.0-x\r\n", b"\x16\x03\x01\x00\x05hello", b""]
)
def test_garbage_gets_no_word(far: Far, bytes_: bytes) -> None:
    with socket.create_connection((HERE, far.port)) as sock:
        sock.settimeout(PATIENCE_S)
        sock.sendall(bytes_)
        if not bytes_:
            sock.shutdown(socket.SHUT_WR)
        try:
            answer = sock.recv(1000)
        except ConnectionResetError:
            answer = b""
    assert answer == b"" or (bytes_[:1] == b"\x16" and answer[:1] == b"\x15" and len(answer) == 7)
    eventually(lambda: far.mesh.refusals["not_tls"] == 1, "counted")


@pytest.mark.parametrize("pause_s", [None, 0.05])
def test_hello_that_does_not_end_is_cut_at_the_deadline(keys: dict[str, MeshKeys], pause_s: float | None) -> None:
    """Also while bytes drip in: the deadline is one for all of them."""
    far = far_node(keys["beta"], handshake_deadline_s=0.6)
    hello, gone, started = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
        threading.Event(),
        time.monotonic(),
    )
    with socket.create_connection((HERE, far.port)) as sock:
        sock.settimeout(PATIENCE_S)

        def drip() -> None:
            for byte in hello:
                send_quietly(sock, bytes([byte]))
                if gone.wait(pause_s):
                    return

        dripping = in_thread(drip)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
        gone.set()
        dripping.join(PATIENCE_S)
    assert 0.5 < time.monotonic() - started < 5
    eventually(lambda: far.mesh.refusals == {"timeout": 1}, "counted")
    far.mesh.close()


def test_2000_half_open_connections_do_not_keep_a_node_out(near: Mesh, far: Far) -> None:
    before = threading.active_count()
    crowd: list[socket.socket] = []
    most = 0
    try:
        for i in range(2000):
            sock = socket.create_connection((HERE, far.port))
            crowd.append(sock)
            if i % 2:
                sock.sendall(b"\x16\x03\x01\x02\x00\x01")
            if i % 200 == 199:
                with near.connect(HERE, far.port, "beta", "control", 5) as talk:
                    engine = far.engine()
                    talk.sendall(b"ping")
                    assert read_exactly(engine, 4) == b"ping"
                    engine.close()
                most = max(most, threading.active_count() - before)
        assert most < mesh.HALF_OPEN_MAX + 20
        assert far.mesh.refusals["busy"] >= 1500
    finally:
        for sock in crowd:
            sock.close()
    eventually(lambda: threading.active_count() <= before + 4, "the visitors' threads end")


@pytest.mark.parametrize(
    ("service", "reason"), [("old/m/7", "generation 7 is over"), ("down/x", "cannot open it: .*refused")]
)
def test_refused_service_gives_the_reason(near: Mesh, far: Far, service: str, reason: str) -> None:
    with pytest.raises(MeshError, match=reason) as caught:
        near.dial(HERE, far.port, "beta", service, 5)
    assert caught.value.kind == "refused"
    eventually(lambda: far.mesh.refusals == {"refused": 1}, "counted")


@pytest.mark.parametrize(
    "text", [b"[" * 1000, b"[1]", b"\xff", b"{", b"x" * 9000, b"{}", b'{"protocol": "1"}', b'{"protocol": 2}', None]
)
def test_member_that_speaks_otherwise_is_refused(keys: dict[str, MeshKeys], far: Far, text: bytes | None) -> None:
    with socket.create_connection((HERE, far.port)) as sock:
        sock.settimeout(PATIENCE_S)
        tls = keys["alpha"].client.wrap_socket(sock)
        answer = b""
        if text is not None:
            with contextlib.suppress(OSError):
                tls.sendall(text + b"\n")
                answer = tls.recv(4000)
        tls.close()
    if text == b'{"protocol": 2}':
        assert b"speaks mesh protocol 1, the caller 2" in answer
    assert b'"kind": ""' not in answer
    eventually(lambda: far.mesh.refusals == {"protocol": 1}, "counted")
    assert far.accepted.empty()


def test_nobody_there_is_unreachable(near: Mesh) -> None:
    with pytest.raises(MeshError) as caught:
        near.dial(HERE, 1, "beta", "control", 5)
    assert caught.value.kind == "unreachable"


def test_silent_listener_is_unreachable_in_time(near: Mesh) -> None:
    with socket.create_server((HERE, 0)) as listener:
        started = time.monotonic()
        with pytest.raises(MeshError) as caught:
            near.dial(HERE, listener.getsockname()[1], "beta", "control", 0.3)
        assert caught.value.kind == "unreachable"
        assert time.monotonic() - started < 2


def test_short_secret_is_refused_without_showing_it() -> None:
    with pytest.raises(MeshError) as caught:
        mesh_keys("hunter2hunter2", "attic", "alpha")
    assert "hunter2" not in f"{caught.value} {caught.value.hint} {caught.value.where} {caught.value!r}"


# ---- a man in the middle ----


class Middle:
    """Passes bytes on; `meddle(piece)` may change what the caller sends once `armed`."""

    def __init__(self, target: int, meddle: Callable[[bytes], bytes | None]) -> None:
        self.target, self.meddle = target, meddle
        self.armed, self.meddled = threading.Event(), threading.Event()
        self.listener = socket.create_server((HERE, 0))
        self.port = int(self.listener.getsockname()[1])
        self.socks: list[socket.socket] = []
        self.thread = in_thread(self._run)

    def _run(self) -> None:
        a, _ = self.listener.accept()
        b = socket.create_connection((HERE, self.target))
        self.socks += [a, b]
        back = in_thread(lambda: self._pass(b, a, None))
        self._pass(a, b, self.meddle)
        back.join()
        for sock in self.socks:
            sock.close()

    def _pass(self, source: socket.socket, sink: socket.socket, meddle: Callable[[bytes], bytes | None] | None) -> None:
        try:
            while piece := source.recv(1 << 16):
                changed: bytes | None = piece
                if meddle and self.armed.is_set():
                    changed = meddle(piece)
                    self.meddled.set()
                if changed is None:
                    break
                sink.sendall(changed)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for sock in (source, sink):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.listener.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def flip(at: int) -> Callable[[bytes], bytes | None]:
    return lambda piece: bytes(b ^ (1 if i == at % len(piece) else 0) for i, b in enumerate(piece))


@pytest.mark.parametrize(
    ("meddle", "name"),
    [
        (flip(0), "length, high"),
        (flip(3), "length, low"),
        (flip(4), "first byte"),
        (flip(-1), "tag"),
        (lambda piece: piece + piece, "doubled"),
        (lambda piece: piece[: len(piece) // 2], "truncated, then more"),
        (lambda piece: None, "cut off"),
        (lambda piece: b"", "dropped"),
    ],
)
def test_meddling_resets_and_delivers_no_wrong_byte(
    keys: dict[str, MeshKeys], meddle: Callable[[bytes], bytes | None], name: str
) -> None:
    far = far_node(keys["beta"])
    middle = Middle(far.port, meddle)
    path = joined(keys, via=middle.port, far=far)
    a, b = path.a, path.b
    a.sendall(b"good")
    assert read_exactly(b, 4) == b"good"
    middle.armed.set()
    a.sendall(b"evil" * 100)
    assert middle.meddled.wait(PATIENCE_S)
    if name == "dropped":
        middle.armed.clear()
    if name != "cut off":  # a damaged length waits for more, a missing frame shows at the next
        in_thread(lambda: send_quietly(a, b"more" * 100_000))
    got = b""
    with pytest.raises(ConnectionResetError):
        while part := b.recv(1 << 16):
            got += part
        raise AssertionError("a clean end")
    assert got in (b"", b"evil" * 100) if name == "doubled" else got == b""
    eventually(lambda: far.stats.resets == 1, "counted")
    finish(path)
    middle.close()


def send_quietly(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)


# ---- frames ----

VECTORS = [  # key, number, plain -> frame
    (bytes(32), 0, b"", "000000003c1d3d0e57c91f9d0c13aad954e911e0"),
    (bytes(range(32)), 7, b"shardbox", "000000089305726d737531823151c447b8635cd6122a867141157d3d"),
]


@pytest.mark.parametrize(("key", "number", "plain", "wanted"), VECTORS)
def test_frame_vectors(key: bytes, number: int, plain: bytes, wanted: str) -> None:
    aead = AESGCM(key)
    frame = bytes(mesh.seal_frame(aead, number, memoryview(plain), memoryview(bytearray(100))))
    length = struct.pack(">I", len(plain))
    assert frame == length + aead.encrypt(number.to_bytes(12, "big"), plain, length)
    assert frame.hex() == wanted
    into = memoryview(bytearray(100))
    assert mesh.open_frames(aead, number, memoryview(frame), into) == (number + 1, len(frame), len(plain), not plain)
    assert bytes(into[: len(plain)]) == plain


def test_keys_of_the_directions_differ_and_depend_on_both() -> None:
    one, two = mesh._frame_keys(b"c" * 32, b"s" * 32)
    assert one + two == hmac.digest(b"shardbox frames 1", b"c" * 32 + b"s" * 32, "sha512")
    assert not {one, two} & set(mesh._frame_keys(b"c" * 32, b"t" * 32))
    assert not {one, two} & set(mesh._frame_keys(b"s" * 32, b"c" * 32))


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=300), max_size=6),
    cut=st.integers(0, 2500),
    at=st.integers(0, 2500),
    bit=st.integers(0, 8),
)
def test_fuzzed_frames_yield_a_true_prefix_or_nothing(pieces: list[bytes], cut: int, at: int, bit: int) -> None:
    aead, stream = AESGCM(bytes(32)), b""
    for number, piece in enumerate([*pieces, b""]):
        stream += bytes(mesh.seal_frame(aead, number, memoryview(piece), memoryview(bytearray(400))))
    damaged = bytearray(stream[:cut])
    if bit < 8 and at < len(damaged):
        damaged[at] ^= 1 << bit
    into = memoryview(bytearray(4000))
    try:
        _, _, gained, ended = mesh.open_frames(aead, 0, memoryview(damaged), into)
    except (InvalidTag, ConnectionAbortedError):
        assert bit < 8
        return
    assert b"".join(pieces).startswith(bytes(into[:gained]))
    if ended:
        assert bytes(into[:gained]) == b"".join(pieces)


# ---- the forwarder ----


def wire_to(dial: Callable[[], SealedLink], told: Callable[[str], None]) -> tuple[Wire, socket.socket]:
    """(a wire, an engine's connection to it)."""
    listener = socket.create_server((HERE, 0))
    wire = Wire(listener=listener, dial=dial, stats=WireStats(), on_trouble=told)
    engine = socket.create_connection(listener.getsockname())
    engine.settimeout(PATIENCE_S)
    return wire, engine


def test_wire_that_cannot_dial_resets_the_engine_at_once() -> None:
    def dial() -> SealedLink:
        raise MeshError("not today", kind="unreachable")

    troubles: queue.Queue[str] = queue.Queue()
    wire, engine = wire_to(dial, troubles.put)
    with engine, pytest.raises(ConnectionResetError):
        engine.recv(1)
    eventually(lambda: wire.stats.resets == 1, "counted")
    assert wire.last_failure == "not today"
    assert troubles.empty()
    wire.close()


def test_wire_tells_of_a_link_that_broke(near: Mesh, far: Far) -> None:
    troubles: queue.Queue[str] = queue.Queue()
    wire, engine = wire_to(lambda: near.dial(HERE, far.port, "beta", "data/m/1/0/1", 5), troubles.put)
    where = engine.getpeername()
    with engine:
        engine.sendall(b"x")
        other = far.engine()
        assert other.recv(1) == b"x"
        reset(other)
        with pytest.raises(ConnectionResetError):
            engine.recv(1)
        assert "beta" in troubles.get(timeout=PATIENCE_S)
    wire.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where)


def test_zeromq_delivers_once_the_far_side_is_up(keys: dict[str, MeshKeys], near: Mesh) -> None:
    """The wire listens first, the far engine binds later: ZeroMQ must find it by itself."""
    with socket.create_server((HERE, 0)) as reserved:
        pull_port = int(reserved.getsockname()[1])
    refused = threading.Event()

    def to_engine(peer: str, service: str) -> tuple[socket.socket, WireStats]:
        try:
            return socket.create_connection((HERE, pull_port)), WireStats()
        except OSError:
            refused.set()
            raise

    far = Mesh(keys=keys["beta"], open_service=to_engine)
    port = far.listen(HERE, 0)
    listener = socket.create_server((HERE, 0))
    wire = Wire(
        listener=listener,
        dial=lambda: near.dial(HERE, port, "beta", "data/m/1/0/1", 5),
        stats=WireStats(),
        on_trouble=lambda reason: None,
    )
    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    try:
        push.connect(f"tcp://{HERE}:{listener.getsockname()[1]}")
        assert refused.wait(PATIENCE_S)
        pull.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        pull.bind(f"tcp://{HERE}:{pull_port}")
        for size in (1, 32768, 16 << 20):
            sent = os.urandom(size)
            push.send(sent)
            assert pull.recv() == sent
        assert wire.stats.resets >= 1
    finally:
        push.close(0)
        pull.close(0)
        context.term()
        wire.close()
        far.close()


def test_closing_leaves_no_descriptor_and_no_thread(keys: dict[str, MeshKeys]) -> None:
    before = footprint()
    for _ in range(3):
        made = joined(keys)
        made.a.sendall(b"x")
        assert made.b.recv(1) == b"x"
        near, port = made.near, made.far.port
        dial = functools.partial(near.dial, HERE, port, "beta", "signal/m/1/0/1", 5)
        wire, engine = wire_to(dial, lambda reason: None)
        other = made.far.engine()
        half_open = socket.create_connection((HERE, made.far.port))
        unpumped = made.near.dial(HERE, made.far.port, "beta", "data/m/1/0/2", 5)
        third = made.far.engine()
        wire.close()
        made.near.close()
        made.far.mesh.close()
        for sock in (made.a, made.b, engine, other, third, half_open):
            sock.close()
        unpumped.close()
    eventually(lambda: footprint() == before, f"back to {before}, now {footprint()}")


def test_wire_closed_while_dialling_resets_the_engine_at_once() -> None:
    dialling, release = threading.Event(), threading.Event()

    def dial() -> SealedLink:
        dialling.set()
        assert release.wait(PATIENCE_S)
        raise MeshError("too late", kind="unreachable")

    wire, engine = wire_to(dial, lambda reason: None)
    with engine:
        assert dialling.wait(PATIENCE_S)
        closing = in_thread(wire.close)
        with pytest.raises(ConnectionResetError):
            engine.recv(1)
        release.set()
        closing.join(PATIENCE_S)
    assert not closing.is_alive()
