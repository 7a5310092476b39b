"""The mesh between real sockets on loopback: what it carries, what it refuses, what it leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hmac
import os
import pathlib
import queue
import re
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
PATIENCE_S = 30.0  # only a failure takes so long
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500  # the start of one for TLS


@pytest.fixture(scope="session")
def keys() -> dict[str, MeshKeys]:
    members = {name: mesh_keys(SECRET, "attic", name) for name in ("alpha", "beta")}
    members |= {f"{name} off": dataclasses.replace(members[name], encryption="off") for name in ("alpha", "beta")}
    return {**members, "stranger": mesh_keys(SECRET + "!", "attic", "beta"), "cellar": mesh_keys(SECRET, "cellar", "b")}


def eventually(condition: Callable[[], bool], what: str = "counted") -> None:
    """Wait for a state that nothing announces (a count of the kernel, of the interpreter, or of the far side)."""
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        pause.wait(0.005)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HERE, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for sock in (near, far):
        sock.settimeout(PATIENCE_S)
    return near, far


class Far:
    """A far node: its services hand their connected sockets to `accepted`."""

    def __init__(self, keys: MeshKeys, handshake_deadline_s: float = 10) -> None:
        self.accepted: queue.Queue[tuple[str, str, socket.socket]] = queue.Queue()
        self.stats = WireStats()
        self.mesh = Mesh(keys=keys, open_service=self._open, handshake_deadline_s=handshake_deadline_s)
        self.port = self.mesh.listen(HERE, 0)

    def _open(self, peer: str, service: str) -> tuple[socket.socket, WireStats]:
        if service.startswith("old/"):
            raise MeshError("generation 7 is over")
        if service.startswith("down/"):
            return socket.create_connection((HERE, 1)), self.stats
        ours, engine = tcp_pair()
        self.accepted.put((peer, service, engine))
        return ours, self.stats

    def engine(self) -> socket.socket:
        """The engine's end of the next connection."""
        return self.accepted.get(timeout=PATIENCE_S)[2]


def nothing(peer: str, service: str) -> tuple[socket.socket, WireStats]:
    raise MeshError("nothing here")


@pytest.fixture
def far(keys: dict[str, MeshKeys]) -> Iterator[Far]:
    node = Far(keys["beta"])
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

    near: Mesh
    far: Far
    via: int = 0  # port of a middle man
    stats: WireStats = field(default_factory=WireStats)
    ended: queue.Queue[bool] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self.link = self.near.dial(HERE, self.via or self.far.port, "beta", "data/m/1/0/1", 5)
        self.a, local = tcp_pair()
        self.link.pump(local, self.stats, self.ended.put)
        self.b = self.far.engine()

    def close(self) -> None:
        for closing in (self.a, self.b, self.near):
            closing.close()


@pytest.fixture(params=["sealed", "spliced", "copied"])
def path(request: pytest.FixtureRequest, keys: dict[str, MeshKeys], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if request.param == "copied":  # as where there is no splice(2)
        monkeypatch.delattr(os, "splice")
    off = "" if request.param == "sealed" else " off"
    far, near = Far(keys["beta" + off]), Mesh(keys=keys["alpha" + off], open_service=nothing)
    made = Path(near, far)
    yield made
    made.close()
    far.mesh.close()


def read_exactly(sock: socket.socket, size: int | None = None) -> bytes:
    """`size` bytes, or all until the end."""
    parts = bytearray()
    while len(parts) != size:
        part = sock.recv(1 << 20 if size is None else min(1 << 20, size - len(parts)))
        if not part:
            assert size is None, "ended too early"
            break
        parts += part
    return bytes(parts)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
    sock.close()


def send(sock: socket.socket, *pieces: bytes, end: bool = False) -> None:
    with contextlib.suppress(OSError):
        for piece in pieces:
            sock.sendall(piece)
        if end:
            sock.shutdown(socket.SHUT_WR)


def echo(sock: socket.socket) -> None:
    while data := sock.recv(1 << 18):
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


def stuff(sock: socket.socket) -> int:
    """Write until nothing more is taken for half a second; the bytes taken, which are bounded."""
    sock.setblocking(False)
    total, piece = 0, b"p" * (1 << 18)
    while select.select([], [sock], [], 0.5)[1]:
        total += sock.send(piece)
    assert total < 64 << 20  # socket buffers of three connections and one frame
    sock.settimeout(PATIENCE_S)
    return total


# ---- what it carries ----

SIZES = [0, 1, 16, 32 * 1024, 262143, 262144, 262145, 1 << 20, 16 << 20]
CASES = [pytest.param([os.urandom(size)], id=str(size)) for size in SIZES]


@pytest.mark.parametrize("pieces", [*CASES, pytest.param([os.urandom(1 + i % 700) for i in range(4000)], id="small")])
def test_echo_of_any_size_comes_back_whole(path: Path, pieces: list[bytes]) -> None:
    sent, size = b"".join(pieces), sum(map(len, pieces))
    threads = [in_thread(lambda: echo(path.b)), in_thread(lambda: send(path.a, *pieces, end=True))]
    assert read_exactly(path.a) == sent
    assert path.ended.get(timeout=PATIENCE_S) is True
    for thread in threads:
        thread.join(PATIENCE_S)
    eventually(lambda: path.far.stats.connections == 0, "the far side ends")
    assert path.stats == path.far.stats == WireStats(sent_bytes=size, received_bytes=size, opened=1)


@pytest.mark.parametrize("first", ["near", "far"])
def test_half_close_leaves_the_other_way_open(path: Path, first: str) -> None:
    asks, answers = (path.a, path.b) if first == "near" else (path.b, path.a)
    send(asks, b"question", end=True)
    assert read_exactly(answers) == b"question"
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
    eventually(lambda: path.far.stats.resets == 1)


@pytest.mark.parametrize("by", ["the node", "the sender"])
def test_reset_passes_an_engine_that_does_not_read(path: Path, by: str) -> None:
    """Back-pressure first: the pumps are then inside send(), not inside recv()."""
    stuff(path.a)
    if by == "the node":
        path.link.close("enough")
        assert path.ended.get(timeout=PATIENCE_S) is False
        assert path.link.why == "enough"
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:
                path.a.sendall(b"x" * 65536)
    else:
        reset(path.a)
        eventually(lambda: path.far.stats.resets == 1)
    with pytest.raises(ConnectionResetError):
        read_exactly(path.b)


def test_reader_that_pauses_is_no_dead_peer_and_costs_nothing(keys: dict[str, MeshKeys], far: Far) -> None:
    """TCP_USER_TIMEOUT would have ended it (see _unanswered_s); 4.5 s are about what a dead peer gets here."""
    near = Mesh(keys=keys["alpha"], open_service=nothing, dead_peer_s=1.5)
    with contextlib.closing(Path(near, far)) as path:
        taken, used_s = stuff(path.a), time.process_time()
        with pytest.raises(queue.Empty):
            path.ended.get(timeout=4.5)
        assert time.process_time() - used_s < 1
        path.a.shutdown(socket.SHUT_WR)
        assert len(read_exactly(path.b)) == taken


@pytest.mark.parametrize("caller", ["alpha", "beta"])  # a node may call itself
def test_probe_tells_the_name_and_connect_gives_a_plain_socket(near: Mesh, far: Far, caller: str) -> None:
    node = near if caller == "alpha" else far.mesh
    assert node.probe(HERE, far.port, 5) == "beta"
    assert far.accepted.empty()
    with node.connect(HERE, far.port, "beta", "control", 5) as talk:
        peer, service, engine = far.accepted.get(timeout=PATIENCE_S)
        assert (peer, service) == (caller, "control")
        echoing, sent = in_thread(lambda: echo(engine)), os.urandom(300_000)
        in_thread(lambda: talk.sendall(sent))
        assert read_exactly(talk, len(sent)) == sent
    eventually(lambda: far.stats.connections == 0, "closing our end ends the far one")
    assert far.stats.resets == 0 and not far.mesh.refusals
    echoing.join(PATIENCE_S)
    engine.close()


def overheard(near: Mesh, far: Far, service: str, said: bytes) -> bytes:
    """What goes over the cable while `said` is sent to a service."""
    heard = bytearray()

    def listen(piece: bytes) -> bytes:
        heard.extend(piece)
        return piece

    middle = Middle(far.port, listen)
    middle.armed.set()
    with near.connect(HERE, middle.listener.getsockname()[1], "beta", service, 5) as talk, far.engine() as engine:
        talk.sendall(said)
        assert read_exactly(engine, len(said)) == said
    middle.thread.join(PATIENCE_S)
    return bytes(heard)


@pytest.mark.parametrize(("off", "service"), [("", "data/m/1/0/1"), (" off", "data/m/1/0/1"), (" off", "control")])
def test_only_data_of_an_unencrypted_cluster_is_readable_on_the_cable(
    keys: dict[str, MeshKeys], off: str, service: str
) -> None:
    far, near = Far(keys["beta" + off]), Mesh(keys=keys["alpha" + off], open_service=nothing)
    heard = overheard(near, far, service, b"tell nobody")
    assert (b"tell nobody" in heard) is (off != "" and service != "control")
    assert b"alpha" not in heard and b"random" not in heard  # the prefaces
    near.close()
    far.mesh.close()


# ---- what it refuses ----


@pytest.mark.parametrize(
    ("who", "to", "service", "kind", "reason"),
    [
        ("stranger", "beta", "control", "wrong_secret", "secret"),
        ("cellar", "beta", "control", "wrong_secret", "cluster name"),
        ("alpha", "gamma", "control", "wrong_name", "the node there is beta"),  # relayed to another node
        ("alpha off", "beta", "control", "encryption", "this node has encryption = \"on\", the caller 'off'"),
        ("alpha", "beta", "old/m/7", "refused", "generation 7 is over"),
        ("alpha", "beta", "down/x", "refused", "cannot open it: .*refused"),
    ],
)
def test_refused_service_gives_the_reason(
    keys: dict[str, MeshKeys], far: Far, who: str, to: str, service: str, kind: str, reason: str
) -> None:
    """Both sides know the kind. MeshError's own kind, "unreachable", was counted for a service that refused."""
    caller = Mesh(keys=keys[who], open_service=nothing)
    for call in (caller.dial, caller.connect):
        with pytest.raises(MeshError, match=reason) as caught:
            call(HERE, far.port, to, service, 5)
        assert caught.value.kind == kind
    eventually(lambda: far.mesh.refusals == {kind: 2})
    assert far.mesh.last_refused == {kind: HERE}
    assert far.accepted.empty()
    caller.close()


@pytest.mark.parametrize("certificate", ["none", "of another authority"])
def test_caller_that_trusts_anybody_is_told_nothing(far: Far, certificate: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if certificate != "none":
        context = mesh_keys(SECRET + "!", "attic", "beta").client
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((HERE, far.port)) as sock:
        sock.settimeout(PATIENCE_S)
        tls = context.wrap_socket(sock)
        seen = tls.getpeercert(binary_form=True) or b""
        assert not [word for word in (b"alpha", b"beta", b"attic", b"shardbox") if word in seen]
        with pytest.raises(ssl.SSLError):
            tls.sendall(b'{"protocol": 1, "from": "alpha", "to": "", "service": ""}\n')
            assert tls.recv(100) == b""
            tls.recv(100)
        tls.close()
    eventually(lambda: far.mesh.refusals == {"wrong_secret": 1})
    assert far.accepted.empty()


GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 400, b"SSH-2.0-x\r\n", b"\x16\x03\x01\x00\x05hello", b""]


@pytest.mark.parametrize("sent", GARBAGE)
def test_garbage_gets_no_word(far: Far, sent: bytes) -> None:
    with socket.create_connection((HERE, far.port)) as sock:
        sock.settimeout(PATIENCE_S)
        send(sock, sent, end=not sent)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            answer = sock.recv(1000)
    assert answer == b"" or (sent[:1] == b"\x16" and answer[:1] == b"\x15" and len(answer) == 7)  # an alert
    eventually(lambda: far.mesh.refusals == {"not_tls": 1})


@pytest.mark.parametrize("pause_s", [None, 0.05])
def test_hello_that_does_not_end_is_cut_at_the_deadline(keys: dict[str, MeshKeys], pause_s: float | None) -> None:
    """Also while bytes drip in: the deadline is one for all of them."""
    far = Far(keys["beta"], handshake_deadline_s=0.6)
    gone, started = threading.Event(), time.monotonic()
    with socket.create_connection((HERE, far.port)) as sock:
        sock.settimeout(PATIENCE_S)

        def drip() -> None:
            for byte in HELLO:
                send(sock, bytes([byte]))
                if gone.wait(pause_s):
                    return

        dripping = in_thread(drip)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
        gone.set()
        dripping.join(PATIENCE_S)
    assert 0.5 < time.monotonic() - started < 20  # dripping all of it would take 25 s
    eventually(lambda: far.mesh.refusals == {"timeout": 1})
    far.mesh.close()


def test_2000_half_open_connections_do_not_keep_a_node_out(near: Mesh, far: Far) -> None:
    before, most = threading.active_count(), 0
    with contextlib.ExitStack() as crowd:
        for i in range(2000):
            sock = crowd.enter_context(socket.create_connection((HERE, far.port)))
            if i % 2:
                sock.sendall(HELLO[:6])
            if i % 200 == 199:
                with near.connect(HERE, far.port, "beta", "control", 5) as talk, far.engine() as engine:
                    talk.sendall(b"ping")
                    assert read_exactly(engine, 4) == b"ping"
                most = max(most, threading.active_count() - before)
        assert most < mesh.HALF_OPEN_MAX + 20
        assert far.mesh.refusals["busy"] >= 1500
    eventually(lambda: threading.active_count() <= before + 4, "the visitors' threads end")


NONSENSE = [b"[" * 1000, b"[1]", b"\xff", b"{", b"x" * 9000, b"{}", b'{"protocol": "1"}', b'{"protocol": 2}', None]


@pytest.mark.parametrize("text", NONSENSE)
def test_member_that_speaks_otherwise_is_refused(keys: dict[str, MeshKeys], far: Far, text: bytes | None) -> None:
    answer = b""
    with socket.create_connection((HERE, far.port)) as sock:
        sock.settimeout(PATIENCE_S)
        with keys["alpha"].client.wrap_socket(sock) as tls, contextlib.suppress(OSError):
            if text is not None:
                tls.sendall(text + b"\n")
                answer = tls.recv(4000)
    if text == b'{"protocol": 2}':
        assert b"speaks mesh protocol 1, the caller 2" in answer
    assert b'"kind": ""' not in answer
    eventually(lambda: far.mesh.refusals == {"protocol": 1})
    assert far.accepted.empty()


def test_nobody_or_a_silent_listener_is_unreachable_in_time(near: Mesh) -> None:
    with socket.create_server((HERE, 0)) as silent:
        for port in (1, silent.getsockname()[1]):
            started = time.monotonic()
            with pytest.raises(MeshError) as caught:
                near.dial(HERE, port, "beta", "control", 0.3)
            assert caught.value.kind == "unreachable"
            assert time.monotonic() - started < 5


NEW, CHANGING, OLD = "new", "changing", "old"


@pytest.fixture(scope="module")
def generations() -> dict[str, dict[str, MeshKeys]]:
    """Stage of a change of secret -> node -> keys."""
    new, old = SECRET + " of today", SECRET + " of yesterday"
    stages = {NEW: (new, ""), CHANGING: (new, old), OLD: (old, "")}
    return {
        stage: {name: mesh_keys(secret, "attic", name, old_secret=older) for name in ("alpha", "beta")}
        for stage, (secret, older) in stages.items()
    }


@pytest.mark.parametrize("server", [NEW, CHANGING, OLD])
@pytest.mark.parametrize("caller", [NEW, CHANGING, OLD])
def test_nodes_meet_during_a_change_of_secret(
    generations: dict[str, dict[str, MeshKeys]], caller: str, server: str
) -> None:
    near, far = Mesh(keys=generations[caller]["alpha"], open_service=nothing), Far(generations[server]["beta"])
    if {caller, server} == {NEW, OLD}:
        with pytest.raises(MeshError) as caught:
            near.probe(HERE, far.port, 5)
        assert caught.value.kind == "wrong_secret"
    else:
        assert near.probe(HERE, far.port, 5) == "beta"
    far.mesh.close()


def test_short_old_secret_is_refused() -> None:
    with pytest.raises(MeshError):
        mesh_keys(SECRET, "attic", "alpha", old_secret="hunter2hunter2")


@pytest.mark.parametrize("posing", ["", "caller", "server"])
@pytest.mark.parametrize("name", ["beta", "BETA"])
def test_pinned_name_belongs_to_the_one_with_the_key(keys: dict[str, MeshKeys], posing: str, name: str) -> None:
    """`beta` is pinned by both; who poses as it is a member with the right secret and another key."""
    beta = keys["beta"]
    impostor = dataclasses.replace(mesh_keys(SECRET, "attic", "beta"), node=name)
    pins = {"beta": beta.public}
    alpha = dataclasses.replace(keys["alpha"], pins=pins)
    server = impostor if posing == "server" else alpha if posing == "caller" else dataclasses.replace(beta, pins=pins)
    caller = impostor if posing == "caller" else alpha
    far, near = Far(server), Mesh(keys=caller, open_service=nothing)
    if posing:
        for call in (
            lambda: near.dial(HERE, far.port, server.node, "control", 5),
            lambda: near.probe(HERE, far.port, 5),
        ):
            with pytest.raises(MeshError, match="pins another key for") as caught:
                call()
            assert caught.value.kind == "wrong_key"
        if posing == "caller":
            eventually(lambda: far.mesh.refusals == {"wrong_key": 2})
            assert far.accepted.empty()
        else:
            far.engine().close()
    else:
        near.dial(HERE, far.port, "beta", "control", 5).close()
        far.engine().close()
        assert near.probe(HERE, far.port, 5) == "beta"
    near.close()
    far.mesh.close()


def test_node_with_another_key_than_its_own_pin_does_not_start(keys: dict[str, MeshKeys]) -> None:
    with pytest.raises(MeshError, match="pins another key for alpha") as caught:
        mesh_keys(SECRET, "attic", "alpha", pins={"alpha": keys["beta"].public})
    assert caught.value.kind == "wrong_key"


def test_node_key_is_made_once_for_its_owner_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "node.key"
    first, again = mesh.node_key(str(path)), mesh.node_key(str(path))
    assert first.private_bytes_raw() == again.private_bytes_raw() == path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["node.key"]
    keys = mesh_keys(SECRET, "attic", "alpha", key=first)
    assert re.fullmatch("[A-Za-z0-9_-]{43}", keys.public)
    assert first.private_bytes_raw().hex() not in repr(keys)


@pytest.mark.parametrize(
    ("content", "mode"), [(b"", 0o600), (b"x" * 31, 0o600), (b"x" * 33, 0o600), (b"x" * 32, 0o640)]
)
def test_node_key_that_will_not_do_is_refused(tmp_path: pathlib.Path, content: bytes, mode: int) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(MeshError) as caught:
        mesh.node_key(str(path))
    assert caught.value.where == str(path)


def test_short_secret_is_refused_without_showing_it() -> None:
    with pytest.raises(MeshError) as caught:
        mesh_keys("hunter2hunter2", "attic", "alpha")
    assert "hunter2" not in f"{caught.value} {caught.value.hint} {caught.value.where} {caught.value!r}"


# ---- a man in the middle ----


@dataclass
class Middle:
    """Passes bytes on; `meddle(piece)` may change what the caller sends once `armed`."""

    target: int
    meddle: Callable[[bytes], bytes | None]

    def __post_init__(self) -> None:
        self.armed, self.meddled = threading.Event(), threading.Event()
        self.listener = socket.create_server((HERE, 0))
        self.thread = in_thread(self._run)

    def _run(self) -> None:
        with self.listener, self.listener.accept()[0] as a, socket.create_connection((HERE, self.target)) as b:
            back = in_thread(lambda: self._pass(b, a, lambda piece: piece))
            self._pass(a, b, self._changed)
            back.join()

    def _changed(self, piece: bytes) -> bytes | None:
        if not self.armed.is_set():
            return piece
        self.meddled.set()
        return self.meddle(piece)

    def _pass(self, source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes | None]) -> None:
        try:
            while (piece := source.recv(1 << 16)) and (changed := change(piece)) is not None:
                sink.sendall(changed)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for sock in (source, sink):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def test_replayed_connection_opens_nothing_and_is_counted(near: Mesh, far: Far) -> None:
    """All that an honest caller sent, once more: the far side's part of the handshake is another one."""
    heard: list[bytes] = []
    middle = Middle(far.port, lambda piece: heard.append(piece) or piece)  # type: ignore[func-returns-value]
    middle.armed.set()
    path = Path(near, far, middle.listener.getsockname()[1])
    path.a.sendall(b"once")
    assert read_exactly(path.b, 4) == b"once"
    path.close()
    middle.thread.join(PATIENCE_S)

    with socket.create_connection((HERE, far.port), PATIENCE_S) as sock:
        sock.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionError):  # it may hang up on what follows
            for piece in heard:
                sock.sendall(piece)
            while sock.recv(1 << 16):
                pass

    eventually(lambda: far.mesh.refusals == {"not_tls": 1})
    assert len(heard) > 2 and far.accepted.empty()


def flip(at: int) -> Callable[[bytes], bytes | None]:
    return lambda piece: bytes(b ^ (1 if i == at % len(piece) else 0) for i, b in enumerate(piece))


MEDDLERS: dict[str, Callable[[bytes], bytes | None]] = {
    "length, high": flip(0),
    "length, low": flip(3),
    "first byte": flip(4),
    "tag": flip(-1),
    "doubled": lambda piece: piece + piece,
    "truncated, then more": lambda piece: piece[: len(piece) // 2],
    "cut off": lambda piece: None,
    "dropped": lambda piece: b"",
}


@pytest.mark.parametrize("name", MEDDLERS)
def test_meddling_resets_and_delivers_no_wrong_byte(near: Mesh, far: Far, name: str) -> None:
    middle = Middle(far.port, MEDDLERS[name])
    path = Path(near, far, middle.listener.getsockname()[1])
    path.a.sendall(b"good")
    assert read_exactly(path.b, 4) == b"good"
    middle.armed.set()
    path.a.sendall(b"evil" * 100)
    assert middle.meddled.wait(PATIENCE_S)
    if name == "dropped":
        middle.armed.clear()
    if name != "cut off":  # a damaged length waits for more, a missing frame shows at the next
        in_thread(lambda: send(path.a, b"more" * 100_000))
    got = b""
    with pytest.raises(ConnectionResetError):
        while part := path.b.recv(1 << 16):
            got += part
        raise AssertionError("a clean end")
    assert got in (b"", b"evil" * 100) if name == "doubled" else got == b""
    eventually(lambda: far.stats.resets == 1)
    path.close()
    middle.thread.join(PATIENCE_S)
    assert not middle.thread.is_alive()


# ---- frames ----

VECTORS = [  # key, number, plain -> frame
    (bytes(32), 0, b"", "000000003c1d3d0e57c91f9d0c13aad954e911e0"),
    (bytes(range(32)), 7, b"shardbox", "000000089305726d737531823151c447b8635cd6122a867141157d3d"),
]


@pytest.mark.parametrize(("key", "number", "plain", "wanted"), VECTORS)
def test_frame_vectors(key: bytes, number: int, plain: bytes, wanted: str) -> None:
    aead, length, into = AESGCM(key), struct.pack(">I", len(plain)), memoryview(bytearray(100))
    frame = bytes(mesh.seal_frame(aead, number, memoryview(plain), memoryview(bytearray(100))))
    assert frame == length + aead.encrypt(number.to_bytes(12, "big"), plain, length)
    assert frame.hex() == wanted
    assert mesh.open_frames(aead, number, memoryview(frame), into) == (number + 1, len(frame), len(plain), not plain)
    assert bytes(into[: len(plain)]) == plain


def test_keys_of_the_directions_differ_and_depend_on_both() -> None:
    one, two = mesh._frame_keys(b"c" * 32, b"s" * 32)
    assert one + two == hmac.digest(b"shardbox frames 1", b"c" * 32 + b"s" * 32, "sha512")
    assert not {one, two} & {*mesh._frame_keys(b"c" * 32, b"t" * 32), *mesh._frame_keys(b"d" * 32, b"s" * 32)}


INT = st.integers(0, 2500)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.binary(min_size=1, max_size=300), max_size=6), cut=INT, at=INT, bit=st.integers(0, 8))
def test_fuzzed_frames_yield_a_true_prefix_or_nothing(pieces: list[bytes], cut: int, at: int, bit: int) -> None:
    aead, stream = AESGCM(bytes(32)), b""
    for number, piece in enumerate([*pieces, b""]):
        stream += bytes(mesh.seal_frame(aead, number, memoryview(piece), memoryview(bytearray(400))))
    damaged, into = bytearray(stream[:cut]), memoryview(bytearray(4000))
    if bit < 8 and at < len(damaged):
        damaged[at] ^= 1 << bit
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


@pytest.mark.parametrize("closed_meanwhile", [False, True])
def test_wire_that_cannot_dial_resets_the_engine_at_once(closed_meanwhile: bool) -> None:
    dialling, release = threading.Event(), threading.Event()
    troubles: queue.Queue[str] = queue.Queue()

    def dial() -> SealedLink:
        dialling.set()
        assert not closed_meanwhile or release.wait(PATIENCE_S)
        raise MeshError("not today", kind="unreachable")

    wire, engine = wire_to(dial, troubles.put)
    assert dialling.wait(PATIENCE_S)
    closing = in_thread(wire.close) if closed_meanwhile else None
    with engine, pytest.raises(ConnectionResetError):
        engine.recv(1)
    release.set()
    eventually(lambda: wire.last_failure == "not today" and wire.stats.resets == 1)
    assert troubles.empty()
    wire.close()
    if closing:
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


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

    def to_engine(peer: str, service: str) -> tuple[socket.socket, WireStats]:
        return socket.create_connection((HERE, pull_port)), WireStats()

    far = Mesh(keys=keys["beta"], open_service=to_engine)
    port = far.listen(HERE, 0)
    wire, engine = wire_to(lambda: near.dial(HERE, port, "beta", "data/m/1/0/1", 5), lambda reason: None)
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        push.setsockopt(zmq.LINGER, 0)
        push.connect("tcp://{}:{}".format(*engine.getpeername()))
        engine.close()
        eventually(lambda: wire.stats.resets >= 2, "two refused connections, one of them ZeroMQ's")
        pull.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        pull.bind(f"tcp://{HERE}:{pull_port}")
        for size in (1, 32768, 16 << 20):
            sent = os.urandom(size)
            push.send(sent)
            assert pull.recv() == sent
    wire.close()
    far.close()


def test_closing_leaves_no_descriptor_and_no_thread(keys: dict[str, MeshKeys]) -> None:
    def footprint() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = footprint()
    for _ in range(3):
        far, near = Far(keys["beta"]), Mesh(keys=keys["alpha"], open_service=nothing)
        path = Path(near, far)
        path.a.sendall(b"x")
        assert path.b.recv(1) == b"x"
        dial = functools.partial(near.dial, HERE, far.port, "beta", "signal/m/1/0/1", 5)
        wire, engine = wire_to(dial, lambda reason: None)
        socks = [path.a, path.b, engine, far.engine(), socket.create_connection((HERE, far.port))]
        unpumped = dial()
        socks.append(far.engine())
        wire.close()
        near.close()
        far.mesh.close()
        for sock in socks:
            sock.close()
        unpumped.close()
    eventually(lambda: footprint() == before, f"back to {before}, now {footprint()}")
