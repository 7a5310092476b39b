"""One running node, and everything that should not be sent to it: it goes on serving."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hosts import shardbox_command

import shardbox
from shardbox import PORT_BLOCK, REQUEST_TIMEOUT_S, control_path, status_address

HERE = "127.0.0.1"
SECRET = "hunter2-correct-horse-battery"
PATIENCE_S = 20.0
KEY = "k-correct-horse-battery-staple"
JSON_HEAD = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a state that nothing announces."""
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        pause.wait(0.05)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node in a process of its own, with one rehearsed model that it serves alone."""

    process: subprocess.Popen[bytes]
    config: str
    cluster: str
    mesh: int
    api: int
    control: str
    log: Path
    env: dict[str, str]

    def command(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*shardbox_command(), *args, "--config", self.config, "--node", "alpha"],
            capture_output=True,
            text=True,
            env=self.env,
            timeout=60,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        """What the status socket says."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(status_address(self.cluster, "alpha"))
            data: dict[str, Any] = json.loads(b"".join(iter(lambda: sock.recv(1 << 16), b"")))
            return data

    def serving(self) -> bool:
        try:
            return bool(self.status()["models"][0]["phase"] == "serving")
        except (OSError, ValueError):
            return False

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        """A request to the endpoint; a body that is no bytes goes as JSON."""
        return http_ask(http.client.HTTPConnection(HERE, self.api, timeout=PATIENCE_S), method, path, body, headers)

    def owner(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """A request to the control socket."""
        connection = http.client.HTTPConnection("shardbox")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(PATIENCE_S)
        with shardbox.short_socket_path(self.control) as short:
            connection.sock.connect(short)
        return http_ask(connection, method, path, body, {})

    def dial(self, port: int) -> socket.socket:
        return socket.create_connection((HERE, port), PATIENCE_S)

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def http_ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: dict[str, str]
) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        try:
            connection.request(method, path, data, {**JSON_HEAD, **headers})
        except (BrokenPipeError, ConnectionResetError):
            assert data  # it answers before all of a body is sent that is too large
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind((HERE, port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the kernel gives to outgoing connections."""
    for _ in range(100):
        base = random.SystemRandom().randrange(20000, 32000)
        if all(map(is_free, range(base, base + count))):
            return base
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("hostile")
    base = free_ports(2 + 2 * PORT_BLOCK)
    mesh, api, data, signals = base, base + 1, base + 2, base + 2 + PORT_BLOCK
    cluster = f"t{uuid.uuid4().hex[:12]}"
    config = folder / "box.toml"
    config.write_text(
        f'[cluster]\nname = "{cluster}"\nsecret = "{SECRET}"\ndiscovery = "static"\ninterfaces = ["lo"]\n'
        f'[api]\nkeys_file = "keys"\n[ports]\nmesh = {mesh}\napi = {api}\ndata = {data}\nsignal = {signals}\n'
        f'[engine]\nkind = "rehearsal"\nisolate = "never"\n[[nodes]]\nname = "alpha"\naddress = "{HERE}"\n'
        f'[[models]]\nname = "m"\npath = "m.gguf"\ncontext = 2048\n'
        f'rehearse = {{layers = 2, width = 64, bytes = "1MiB"}}\n',
        encoding="utf-8",
    )
    (folder / "keys").write_text(f"# one key a line\n\n{KEY}\nanother-key\n", encoding="utf-8")
    log = folder / "node.log"
    state = folder / "state"
    env = {**os.environ, "SHARDBOX_STATE": str(state)}
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*shardbox_command(), "up", "--config", str(config), "--node", "alpha"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
        )
    it = Node(
        process=process,
        config=str(config),
        cluster=cluster,
        mesh=mesh,
        api=api,
        control=control_path(str(state / cluster / "alpha")),
        log=log,
        env=env,
    )
    try:
        try:
            eventually(lambda: it.serving() or process.poll() is not None, "the node serves")
            assert process.poll() is None
        except AssertionError as error:
            raise AssertionError(log.read_text(encoding="utf-8", errors="replace")) from error
        yield it
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def no_traceback(node: Node) -> Iterator[None]:
    """What the node logs meanwhile has no traceback and no secret: what others send is no bug of ours."""
    before = node.log.stat().st_size
    yield
    new = node.log.read_bytes()[before:].decode(errors="replace")
    assert SECRET not in new
    assert KEY not in new
    assert "Traceback" not in new, new
    assert "bug" not in new, new


@pytest.fixture(autouse=True)
def goes_on_serving(node: Node, request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the node answers on each of its sockets, and has logged no traceback."""
    known = request.node.get_closest_marker("xfail") is not None
    with contextlib.nullcontext() if known else no_traceback(node):
        yield
    if node.process.poll() is None:
        assert node.serving()
        assert node.ask("GET", "/v1/models")[0] == 200
        assert node.owner("GET", "/nodes")[0] == 200


def openai_error(answer: tuple[int, bytes], *codes: int) -> dict[str, Any]:
    """The error object of an answer in OpenAI's shape."""
    status, body = answer
    assert status in codes, answer
    data = json.loads(body)
    assert set(data) == {"error"}
    error = data["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert isinstance(error["message"], str)
    assert error["message"]
    assert len(error["message"]) < 1000
    assert "Traceback" not in error["message"]
    result: dict[str, Any] = error
    return result


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def test_node_answers_a_good_request(node: Node) -> None:
    """What all the others are measured by."""
    status, body = node.ask("POST", "/v1/chat/completions", CHAT)
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"]


# --- the mesh port ---


def client_hello() -> bytes:
    context = ssl.create_default_context()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="alpha")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


NOISE = random.Random(1).randbytes(4096)
MESH = {
    "nothing": b"",
    "one-byte": b"\x16",
    "noise": NOISE,
    "zeros": bytes(65536),
    "half-a-hello": client_hello()[:60],
    "hello-then-noise": client_hello() + NOISE,
    "hello-of-another-authority": client_hello(),
    "http": b"GET / HTTP/1.1\r\nHost: alpha\r\n\r\n",
    "tls-record-too-long": b"\x16\x03\x01\xff\xff" + NOISE,
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
}


@pytest.mark.parametrize("what", MESH)
def test_mesh_port_given_garbage_hangs_up(node: Node, what: str) -> None:
    with node.dial(node.mesh) as sock:
        try:
            sock.sendall(MESH[what])
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        except (ConnectionError, OSError) as error:
            assert not isinstance(error, TimeoutError), "it never hung up"


def test_mesh_port_given_ten_megabytes_reads_little_of_it(node: Node) -> None:
    with node.dial(node.mesh) as sock, pytest.raises(ConnectionError):
        for _ in range(160):
            sock.sendall(random.Random(2).randbytes(65536))
        while sock.recv(1 << 16):
            pass
        raise ConnectionResetError  # a clean end is as good


def test_mesh_port_with_many_silent_visitors_goes_on(node: Node) -> None:
    """They say nothing and stay: the node keeps its threads and its sockets for those who prove themselves."""
    before = node.files()
    visitors = [node.dial(node.mesh) for _ in range(200)]
    try:
        assert node.serving()
        assert node.ask("POST", "/v1/chat/completions", CHAT)[0] == 200
    finally:
        for sock in visitors:
            sock.close()
    eventually(lambda: node.files() <= before + 20, "the visitors' sockets are closed")


# --- the endpoint: what is not HTTP, or too much of it ---


BROKEN_HTTP = {
    "noise": NOISE,
    "half-a-request": b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Le",
    "no-version": b"GET /\r\n\r\n",
    "bad-length": b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    "bad-length-word": b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: many\r\n\r\n",
    "two-lengths": b"POST /health HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "bad-chunks": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "header-without-colon": b"GET /health HTTP/1.1\r\nHost a\r\n\r\n",
    "huge-header": b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    "many-headers": b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    "huge-path": b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "nul-in-path": b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n",
    "two-smuggled": b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 50,
}


def head(length: int) -> bytes:
    """The head of a good request with a body of this length."""
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def raw(sock: socket.socket, data: bytes, half_close: bool = True) -> bytes:
    """What comes back for these bytes, until the other side ends it."""
    answer = b""
    try:
        sock.sendall(data)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        while chunk := sock.recv(1 << 16):
            answer += chunk
    except ConnectionError:
        pass  # it hung up: an answer as well
    return answer


@pytest.mark.parametrize("what", BROKEN_HTTP)
def test_endpoint_given_broken_http_refuses_or_hangs_up(node: Node, what: str) -> None:
    with no_traceback(node), node.dial(node.api) as sock:
        answer = raw(sock, BROKEN_HTTP[what])
    good = what == "two-smuggled"
    assert answer == b"" or re.match(rb"HTTP/\d\.\d 200" if good else rb"HTTP/\d\.\d 4", answer), answer[:300]


@pytest.mark.parametrize("what", BROKEN_HTTP)
def test_control_socket_given_broken_http_refuses_or_hangs_up(node: Node, what: str) -> None:
    with no_traceback(node), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(node.control)
        answer = raw(sock, BROKEN_HTTP[what])
    assert answer == b"" or re.match(rb"HTTP/\d\.\d 4", answer), answer[:300]


def bad_gzip(path: str) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
        "Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope"
    ).encode()


def test_endpoint_given_a_body_that_does_not_unpack_refuses(node: Node) -> None:
    with no_traceback(node), node.dial(node.api) as sock:
        answer = raw(sock, bad_gzip("/v1/completions"), half_close=False)
    assert answer.startswith(b"HTTP/1.1 4"), answer[:300]


def test_control_socket_given_a_body_that_does_not_unpack_refuses(node: Node) -> None:
    with no_traceback(node), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(node.control)
        answer = raw(sock, bad_gzip("/want"), half_close=False)
    assert answer.startswith(b"HTTP/1.1 4"), answer[:300]


def test_endpoint_with_slow_body_keeps_serving_others(node: Node) -> None:
    with node.dial(node.api) as slow:
        slow.sendall(head(500) + b"{")
        for _ in range(3):
            slow.sendall(b" ")
            assert node.ask("POST", "/v1/chat/completions", CHAT)[0] == 200


def test_endpoint_with_a_body_too_large_is_413(node: Node) -> None:
    body = b'{"model": "m", "prompt": "' + b"x" * (40 << 20) + b'"}'
    try:
        answer = node.ask("POST", "/v1/completions", body)
    except ConnectionResetError:
        return  # it closed while we still sent: its answer was lost on our side
    openai_error(answer, 413)


# --- the endpoint: keys ---


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer ", "Bearer x", f"Bearer {KEY}x", f"Basic {KEY}", KEY[:-1]])
def test_endpoint_given_a_wrong_key_is_401(node: Node, given: str) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/nothing")):
        error = openai_error(node.ask(method, path, CHAT if method == "POST" else None, Authorization=given), 401)
        assert error["code"] == "invalid_api_key"
        assert KEY not in error["message"]


NO_TEXT = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"


def test_endpoint_given_a_key_that_is_no_text_is_401(node: Node) -> None:
    with no_traceback(node), node.dial(node.api) as sock:
        answer = raw(sock, NO_TEXT, half_close=False)
    assert answer.startswith(b"HTTP/1.1 401"), answer[:300]


def test_endpoint_connection_that_asks_nothing_is_closed(node: Node) -> None:
    with node.dial(node.api) as silent, node.dial(node.api) as slow:
        slow.sendall(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n")  # and never the end of its header
        for sock in (silent, slow):
            sock.settimeout(2 * REQUEST_TIMEOUT_S)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""


def test_endpoint_health_needs_no_key(node: Node) -> None:
    assert node.ask("GET", "/health", Authorization="")[0] == 200


# --- the endpoint: HTTP, but nothing that it should answer ---


def test_endpoint_unknown_path_is_404(node: Node) -> None:
    openai_error(node.ask("GET", "/v1/nothing"), 404)
    openai_error(node.ask("GET", "/"), 404)
    openai_error(node.ask("GET", "/v1/../../etc/passwd"), 404)


def test_endpoint_wrong_method_is_405(node: Node) -> None:
    openai_error(node.ask("GET", "/v1/chat/completions"), 405)
    openai_error(node.ask("DELETE", "/v1/models"), 405)


BAD_JSON = {
    "empty": b"",
    "word": b"hello",
    "cut": b'{"model": "m"',
    "noise": NOISE,
    "latin-1": '{"model": "\xe9"}'.encode("latin-1"),
    "list": b"[]",
    "number": b"5",
    "null": b"null",
    "deep": b"[" * 200_000,
    "deep-object": b'{"a":' * 100_000,
    "digits": b'{"model": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("what", BAD_JSON)
def test_endpoint_given_no_json_object_is_400(node: Node, path: str, what: str) -> None:
    openai_error(node.ask("POST", path, BAD_JSON[what]), 400)


@pytest.mark.parametrize("model", ["other", 5, [], {}, "", "../m", "\x00", "m" * 300, "\ud800", True])
def test_endpoint_given_a_model_that_is_not_there_is_404(node: Node, model: Any) -> None:
    error = openai_error(node.ask("POST", "/v1/chat/completions", {**CHAT, "model": model}), 404)
    assert error["code"] == "model_not_found"
    assert "m" in error["message"]


def test_endpoint_given_no_model_takes_the_only_one(node: Node) -> None:
    body = {key: value for key, value in CHAT.items() if key != "model"}
    assert node.ask("POST", "/v1/chat/completions", body)[0] == 200


def test_endpoint_given_a_megabyte_of_model_name_answers_shortly(node: Node) -> None:
    openai_error(node.ask("POST", "/v1/chat/completions", {**CHAT, "model": "x" * (1 << 20)}), 404)


def test_endpoint_embeddings_of_a_chat_model_is_501(node: Node) -> None:
    error = openai_error(node.ask("POST", "/v1/embeddings", {"model": "m", "input": "x"}), 501)
    assert error["code"] == "not_implemented"


REFUSED_CHAT: dict[str, Any] = {
    "no-messages": {"messages": None},
    "messages-empty": {"messages": []},
    "messages-word": {"messages": "hello"},
    "messages-object": {"messages": {"role": "user"}},
    "messages-number": {"messages": 5},
    "n-two": {"n": 2},
    "n-word": {"n": "one"},
    "n-list": {"n": [1]},
    "best-of": {"best_of": 3},
    "best-of-list": {"best_of": []},
}
TAKEN_CHAT: dict[str, Any] = {
    "stream-word": {"stream": "yes"},
    "stream-number": {"stream": 3},
    "stream-list": {"stream": [1]},
    "max-tokens-word": {"max_tokens": "many"},
    "max-tokens-list": {"max_tokens": [1]},
    "max-tokens-float": {"max_tokens": 1.5},
    "max-tokens-flag": {"max_tokens": True},
    "max-completion-tokens-word": {"max_completion_tokens": "many"},
}


@pytest.mark.parametrize("what", REFUSED_CHAT)
def test_endpoint_given_wrong_types_is_400(node: Node, what: str) -> None:
    openai_error(node.ask("POST", "/v1/chat/completions", {**CHAT, **REFUSED_CHAT[what]}), 400)


@pytest.mark.parametrize("what", TAKEN_CHAT)
def test_endpoint_given_wrong_types_of_options_is_400(node: Node, what: str) -> None:
    """Without its limit an answer may fill the whole context, for minutes."""
    openai_error(node.ask("POST", "/v1/chat/completions", {**CHAT, **TAKEN_CHAT[what]}), 400)


@pytest.mark.parametrize("messages", [[5], [None], ["hello"], [{"content": "x"}], [{"role": 5}]], ids=str)
def test_endpoint_given_messages_that_are_none_is_400(node: Node, messages: list[Any]) -> None:
    openai_error(node.ask("POST", "/v1/chat/completions", {**CHAT, "messages": messages}), 400)


REFUSED_TEXT: dict[str, Any] = {
    "no-prompt": {},
    "prompt-number": {"prompt": 5},
    "prompt-empty-list": {"prompt": []},
    "prompts": {"prompt": ["a", "b"]},
    "prompt-mixed": {"prompt": ["a", 1]},
    "prompt-object": {"prompt": {"a": 1}},
    "echo": {"prompt": "a", "echo": True},
    "suffix": {"prompt": "a", "suffix": "b"},
    "n": {"prompt": "a", "n": 0},
}


@pytest.mark.parametrize("what", REFUSED_TEXT)
def test_endpoint_given_wrong_prompts_is_400(node: Node, what: str) -> None:
    openai_error(node.ask("POST", "/v1/completions", {"model": "m", "max_tokens": 2, **REFUSED_TEXT[what]}), 400)


ODD_TEXT = [
    "",
    "\x00",
    "\ud800",
    "\udfff\ud800",
    "\u202e\u2028",
    "a" * 100_000,
    "\U0001d518" * 1000,
    "data: [DONE]\n\n",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ODD_TEXT, ids=lambda text: ascii(text[:12]))
def test_endpoint_given_odd_text_answers_or_refuses(node: Node, text: str, stream: bool) -> None:
    body = {**CHAT, "stream": stream, "messages": [{"role": "user", "content": text}]}
    status, answer = node.ask("POST", "/v1/chat/completions", body)
    if status == 200:
        assert answer.endswith(b"data: [DONE]\n\n") if stream else json.loads(answer)["choices"]
    else:
        openai_error((status, answer), 400)


def test_endpoint_client_that_leaves_in_the_middle_of_an_answer(node: Node) -> None:
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 1000}).encode()
    for _ in range(5):
        with node.dial(node.api) as sock:
            sock.sendall(head(len(body)) + body)
            assert sock.recv(1024)
    eventually(lambda: node.status()["models"][0]["in_flight"] == 0, "answers that nobody waits for end")
    assert node.ask("POST", "/v1/chat/completions", CHAT)[0] == 200


# --- the control socket ---


@pytest.mark.parametrize("what", [name for name in BAD_JSON if name not in ("empty", "deep", "deep-object")])
def test_control_socket_given_no_json_object_refuses(node: Node, what: str) -> None:
    status, body = node.owner("POST", "/want", BAD_JSON[what])
    assert status == 409
    assert json.loads(body)["error"]["what"]


@pytest.mark.parametrize("what", ["deep", "deep-object"])
def test_control_socket_given_deep_json_refuses(node: Node, what: str) -> None:
    assert node.owner("POST", "/want", BAD_JSON[what])[0] == 409


@pytest.mark.parametrize(
    "body", [{}, {"model": 5}, {"model": None}, {"model": "other"}, {"model": ["m"], "wanted": True}], ids=str
)
def test_control_socket_given_wrong_types_refuses(node: Node, body: dict[str, Any]) -> None:
    status, answer = node.owner("POST", "/want", body)
    assert status == 409
    assert json.loads(answer)["error"]["what"]


@pytest.mark.parametrize("wanted", ["no", 0.5, [False]])
def test_control_socket_given_a_wish_that_is_no_flag_refuses(node: Node, wanted: Any) -> None:
    assert node.owner("POST", "/want", {"model": "m", "wanted": wanted})[0] == 409


@pytest.mark.parametrize("lines", ["many", "1.5", "", "-1", "0", "1e3", "²", "9" * 5000], ids=lambda t: t[:5])
def test_control_socket_given_no_number_of_lines_refuses_or_answers(node: Node, lines: str) -> None:
    status, _ = node.owner("GET", f"/logs?lines={urllib.parse.quote(lines)}")
    assert status in (200, 409)


@pytest.mark.parametrize("query", ["model=other", "node=other", "node=..%2F..", "model=%00", "model=..%2F..%2Fetc"])
def test_control_socket_logs_of_what_is_not_there_refuses(node: Node, query: str) -> None:
    status, body = node.owner("GET", f"/logs?{query}")
    assert status == 409
    assert json.loads(body)["error"]["what"]


def test_control_socket_unknown_path_is_404(node: Node) -> None:
    assert node.owner("GET", "/nothing")[0] == 404
    assert node.owner("GET", "/down")[0] == 405


def test_control_socket_body_too_large_is_413(node: Node) -> None:
    with contextlib.suppress(ConnectionError):  # it may close while we still send
        assert node.owner("POST", "/want", b" " * (10 << 20))[0] == 413


def test_control_socket_is_for_the_owner_alone(node: Node) -> None:
    assert os.stat(node.control).st_mode & 0o777 == 0o600


AS_NOBODY = """
import os, socket
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect("control.sock")
sock.sendall(b"POST /down HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
print(sock.makefile().read())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_control_socket_refuses_another_user_though_its_mode_lets_him(node: Node) -> None:
    folder = os.path.dirname(node.control)
    mode = os.stat(folder).st_mode & 0o777
    try:
        os.chmod(node.control, 0o666)
        os.chmod(folder, 0o755)
        argv = [sys.executable, "-c", AS_NOBODY]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    finally:
        os.chmod(folder, mode)
        os.chmod(node.control, 0o600)

    assert done.stdout.startswith("HTTP/1.1 403") and "user 65534 is neither root nor the owner" in done.stdout
    shown = node.command("status").stdout
    assert re.search(r"(?m)^other_user +1 +user 65534$", shown), shown
    assert node.owner("GET", "/nodes")[0] == 200  # it did not end


# --- the status socket ---


def test_status_socket_with_clients_that_never_read_goes_on(node: Node) -> None:
    silent = []
    try:
        for _ in range(100):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(PATIENCE_S)
            sock.connect(status_address(node.cluster, "alpha"))
            silent.append(sock)
        done = node.command("status", "--brief")
        assert done.returncode in (0, 1)  # a rehearsal is a warning
        assert done.stdout.startswith("SHARDBOX ")
    finally:
        for sock in silent:
            sock.close()


def test_status_socket_given_bytes_ignores_them(node: Node) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(status_address(node.cluster, "alpha"))
        try:
            sock.sendall(NOISE * 100)
            while sock.recv(1 << 16):
                pass
        except ConnectionError:
            pass  # it did not care to read


def test_status_shows_no_secret(node: Node) -> None:
    done = node.command("status", "--json")
    assert json.loads(done.stdout)["node"] == "alpha"
    assert SECRET not in done.stdout + done.stderr
    assert SECRET not in json.dumps(node.status())
    for path in ("/nodes", "/check", "/logs?lines=9"):
        status, body = node.owner("GET", path)
        assert status == 200
        assert SECRET.encode() not in body


# --- a member that sends what it should not ---

ABSENT = {"model": "absent", "generation": "0" * 16, "reason": "none", "plan": None}
EMPTY_PLAN = {"model": "m", "ranks": [], "block": 0, "layers": 0, "context": 1, "reason": ""}


def member(node: Node, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """A request of a node that proved the secret."""
    mesh = shardbox.Mesh(keys=shardbox.mesh_keys(SECRET, node.cluster, "beta"), open_service=lambda *_: None)  # type: ignore[arg-type]
    try:
        connection = http.client.HTTPConnection("alpha", timeout=PATIENCE_S)
        connection.sock = mesh.connect(HERE, node.mesh, "alpha", "control", PATIENCE_S)
        return http_ask(connection, method, path, body, {})
    finally:
        mesh.close()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        *(("POST", f"/peer/{verb}", ABSENT) for verb in ("prepare", "launch", "lease")),
        ("GET", f"/peer/bound?model=absent&generation={0:016}", None),
        ("GET", "/peer/logs?model=absent&lines=9", None),
        ("GET", "/peer/state?uptime=long", None),
        ("POST", "/peer/lease", {"model": 7, "generation": "0"}),
    ],
)
def test_member_message_about_what_is_not_here_is_409_with_words(node: Node, method: str, path: str, body: Any) -> None:
    status, answer = member(node, method, path, body)
    assert status == 409
    assert json.loads(answer)["error"]["what"]
    told = node.status()
    assert told["refusals"]["order"] >= 1 and told["last_refused"]["order"] == "beta"


def proposal(**change: Any) -> dict[str, Any]:
    numbers = ["layers", "width", "vocab", "heads", "kv_heads", "key_width", "value_width", "ff_width", "context_train"]
    shape = dict.fromkeys([*numbers, "embedding_bytes", "output_bytes"], 1) | {"layer_bytes": [1]}
    words_of = {"architecture": "llama", "quantisation": "Q4_K", "tied_output": False}
    return {"generation": "0" * 16, "plan": {**EMPTY_PLAN, "shape": {**shape, **words_of}, **change}}


def test_member_plan_that_cannot_be_is_409(node: Node) -> None:
    status, answer = member(node, "POST", "/peer/prepare", proposal())
    assert status == 409
    assert "contradicts itself" in json.loads(answer)["error"]["what"]


@pytest.mark.parametrize("verb", ["release", "trouble", "prepare"])
def test_member_that_asks_nothing_of_this_node_changes_nothing(node: Node, verb: str) -> None:
    """While a TOML is being reloaded one after the other, a node may hear of models that it does not know."""
    before = node.status()["models"][0]["generation"]
    body = proposal(model="absent") if verb == "prepare" else ABSENT
    assert member(node, "POST", f"/peer/{verb}", body)[0] == 200
    after = node.status()["models"]
    assert [(view["model"], view["generation"], view["phase"]) for view in after] == [("m", before, "serving")]


@pytest.mark.parametrize(
    ("service", "kind"),
    [("data/m/0000000000000000/0/1", "old_generation"), ("file/../../etc/passwd", "refused"), ("sh/id", "refused")],
)
def test_member_wire_that_is_none_of_ours_is_refused_and_counted(node: Node, service: str, kind: str) -> None:
    mesh = shardbox.Mesh(keys=shardbox.mesh_keys(SECRET, node.cluster, "beta"), open_service=lambda *_: None)  # type: ignore[arg-type]
    before = node.status()["refusals"].get(kind, 0)
    try:
        with pytest.raises(shardbox.MeshError) as caught:
            mesh.dial(HERE, node.mesh, "alpha", service, PATIENCE_S)
    finally:
        mesh.close()
    assert caught.value.kind == kind
    eventually(lambda: node.status()["refusals"].get(kind) == before + 1, "it is counted")


def test_nodes_shows_the_key_that_others_may_pin(node: Node) -> None:
    key = shardbox.node_key(os.path.join(os.path.dirname(node.control), "node.key"))
    public = shardbox.mesh_keys(SECRET, node.cluster, "alpha", key=key).public
    assert re.search(rf"(?m)^alpha +{public}$", node.command("nodes").stdout)


# --- after all that ---


def test_zz_down_still_works(node: Node) -> None:
    """The last test of this file: it ends the node."""
    done = node.command("down")
    assert (done.returncode, done.stdout) == (0, "alpha: down\n")
    assert node.process.wait(PATIENCE_S) == 0
    assert node.command("status", "--brief").returncode == 2
    text = node.log.read_text(encoding="utf-8", errors="replace")
    assert SECRET not in text
