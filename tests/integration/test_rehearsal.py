"""Rings of rehearsal engines as real processes; with SHARDBOX_PRIMA and SHARDBOX_MODEL also mixed with real ones."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

import shardbox as under_test
from shardbox import REHEARSAL_TOO_LONG, RehearsalError, model_shape, read_gguf_header, rehearsal_setup, rehearse

DEADLINE_S = 20.0
PRIMA, MODEL = os.environ.get("SHARDBOX_PRIMA", ""), os.environ.get("SHARDBOX_MODEL", "")
WIDTH, LAYERS = 64, 30
SIZES = {"layers": LAYERS, "width": WIDTH, "name": "demo"}
HOOKED = "import os, shardbox, sys; sys.exit(shardbox.rehearse(sys.argv[1:], os.environ, hook=lambda *p: print(*p)))"
ROLES = ("llama-server", "llama-cli")
CHAT, COMPLETION = "/v1/chat/completions", "/completion"


def until(check: Callable[[], bool], what: str) -> None:
    """For what has no event to wait on (another process gets ready): ask again, with a deadline."""
    pause, deadline = threading.Event(), time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < deadline, f"never happened: {what}"
        pause.wait(0.02)


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the kernel hands out."""
    while True:
        base = random.randrange(18000, 30000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(base, base + count):
                stack.enter_context(socket.create_server(("", port)))
            return base


@contextlib.contextmanager
def ask(port: int, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
    """The reply as soon as its header is there; the client goes away at the end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        yield connection.getresponse()


def get(port: int, path: str, body: object = None) -> tuple[int, Any]:
    with ask(port, path, body) as reply:
        return reply.status, json.loads(reply.read())


def stream(port: int, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """All events as (field, JSON or text)."""
    with ask(port, path, body | {"stream": True}) as reply:
        assert (reply.status, reply.getheader("Content-Type")) == (200, "text/event-stream")
        pairs = [event.split(": ", 1) for event in reply.read().decode().split("\n\n") if event]
    return [(field, value if value == "[DONE]" else json.loads(value)) for field, value in pairs]


def hello(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello there"}], **more}


class Ring:
    """Processes that form one ring; `kinds`: h is a rehearsal, r is real Prima, rank 0 first."""

    def __init__(self, folder: Path, kinds: str, windows: str, *flags: str) -> None:
        self.folder, self.kinds, self.windows, self.flags = folder, kinds, windows, flags
        base = free_ports(192)
        self.data_ports, self.signal_port, self.port = [base] * len(kinds), base + 128, base + 191
        self.command = [sys.executable, str(under_test.__file__), "rehearse"]
        self.sizes = SIZES
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            role = ROLES[rank > 0]
            command = [*self.command, role] if self.kinds[rank] == "h" else [os.path.join(PRIMA, role)]
            argv = ["-m", MODEL or "none", "-t", "1", "-ngl", "0"]
            if rank == 0:
                argv += ["-c", "1024", "--host", "127.0.0.1", "--port", str(self.port), *self.flags]
            if len(self.kinds) > 1:
                argv += ["--world", str(len(self.kinds)), "--rank", str(rank), "--master", "127.0.0.1"]
                argv += ["--next", "127.0.0.1", "--data-port", str(self.data_ports[rank])]
                argv += ["--signal-port", str(self.signal_port), "-lw", self.windows]
            environ = {**os.environ, "SHARDBOX_REHEARSE": json.dumps(self.sizes), "PYTHONUNBUFFERED": "1"}
            environ["PYTHONPATH"] = str(Path(under_test.__file__).parent)
            with open(self.folder / str(rank), "wb") as log:
                self.ranks[rank] = subprocess.Popen(
                    [*command, *argv], env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
                )

    def log(self, rank: int) -> str:
        return (self.folder / str(rank)).read_text(errors="replace")

    def health(self) -> int:
        assert all(process.poll() is None for process in self.ranks.values()), [*map(self.log, self.ranks)]
        with contextlib.suppress(ConnectionError):
            return get(self.port, "/health")[0]
        return 0

    def ready(self) -> None:
        """Starts the ranks that are not, and waits until the leader serves."""
        self.start(*set(range(len(self.kinds))).difference(self.ranks))
        until(lambda: self.health() == 200, "the ring is up")

    def slots(self) -> list[int]:
        return [slot["state"] for slot in get(self.port, "/slots")[1]]

    def codes(self) -> list[int]:
        """All exit codes, by rank."""
        return [process.wait(DEADLINE_S) for _, process in sorted(self.ranks.items())]

    def stop(self) -> list[int]:
        self.ranks[0].send_signal(signal.SIGTERM)
        return self.codes()

    def kill(self) -> None:
        for process in self.ranks.values():
            process.kill()
            process.wait()


Rings = Callable[..., Ring]
Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def rings(tmp_path: Path) -> Iterator[Rings]:
    """Makes rings whose processes end with the test."""
    with contextlib.ExitStack() as stack:

        def make(*args: str) -> Ring:
            ring = Ring(tmp_path, *args)
            stack.callback(ring.kill)
            return ring

        yield make


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """Three ranks, ten cycles, two slots of 20,000 tokens."""
    ring = Ring(tmp_path_factory.mktemp("three"), "hhh", "1,1,1", "-np", "2", "-c", "40000", "--no-context-shift")
    with contextlib.ExitStack() as stack:
        stack.callback(ring.kill)
        ring.ready()
        yield ring
        assert ring.stop() == [0, 0, 0], [*map(ring.log, ring.ranks)]


def test_ring_forms_answers_and_stops_and_the_hook_hears_of_it(rings: Rings) -> None:
    ring = rings("hh", "4,5")
    ring.command = [sys.executable, "-c", HOOKED]
    ring.start(0)
    until(lambda: ring.health() == 503, "the leader listens")
    refusal = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    assert get(ring.port, CHAT, hello()) == (503, refusal)
    ring.ready()
    assert get(ring.port, COMPLETION, {"prompt": "one two", "n_predict": 2})[0] == 200
    assert ring.stop() == [0, 0]
    points = ["barrier:1 0", "barrier:2 0", "loaded 0", "token 2", "token 4", "token 5", "stop 5"]
    assert ring.log(0).splitlines() == ring.log(1).splitlines() == points


def test_leader_while_it_loads_ends_by_the_signal(rings: Rings) -> None:
    ring = rings("hh", "4,5")
    ring.start(0)
    until(lambda: ring.health() == 503, "the leader listens")
    assert ring.stop() == [-signal.SIGTERM]


def test_chat_is_whole_or_streams_words_with_usage(three: Ring) -> None:
    status, reply = get(three.port, CHAT, hello())
    choice = reply["choices"][0]
    assert (status, choice["finish_reason"], choice["message"]["role"]) == (200, "stop", "assistant")
    assert "This is a rehearsal: no model is loaded." in choice["message"]["content"]
    events = stream(three.port, CHAT, hello(max_tokens=3, model="mine"))
    assert events.pop() == ("data", "[DONE]")
    assert all((field, event["model"]) == ("data", "mine") for field, event in events)
    choices = [event["choices"][0] for _, event in events]
    assert [choice["delta"].get("content") for choice in choices] == ["This", " is", " a", None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    usage = events[-1][1]["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (3, usage["prompt_tokens"] + 3)


@pytest.mark.parametrize("path", [COMPLETION, "/v1/completions"])
def test_completion_has_llama_cpp_form(three: Ring, path: str) -> None:
    ends = {"stop": True, "stopped_limit": True, "stopped_eos": False, "tokens_predicted": 2, "tokens_evaluated": 3}
    status, reply = get(three.port, path, {"prompt": "one two six", "n_predict": 2})
    assert (status, reply["content"], reply["timings"]["predicted_n"]) == (200, "This is", 2)
    assert reply | ends == reply
    *events, (_, last) = stream(three.port, path, {"prompt": [1, 2, 3], "max_tokens": 2})
    assert [(event["content"], event["stop"]) for _, event in events] == [("This", False), (" is", False)]
    assert last | ends == last
    assert last["content"] == ""


def check_too_long(port: int, prompt: str) -> None:
    """The engine that answers at this port refuses the prompt as Prima does (bdf9d8e7)."""
    chat = {"messages": [{"role": "user", "content": prompt}]}
    assert get(port, CHAT, chat) == get(port, COMPLETION, {"prompt": prompt}) == (400, {"error": REHEARSAL_TOO_LONG})
    error = [("data", REHEARSAL_TOO_LONG), ("error", REHEARSAL_TOO_LONG)]
    assert stream(port, COMPLETION, {"prompt": prompt}) == error
    assert stream(port, CHAT, chat) == [*error, ("data", "[DONE]")]


def test_other_requests_have_their_answers(three: Ring) -> None:
    assert get(three.port, "/v1/models")[1]["data"][0]["id"] == "demo"
    assert get(three.port, "/nowhere")[0] == 404
    check_too_long(three.port, "a " * 20000)
    assert [get(three.port, CHAT, body)[0] for body in ({}, [3], hello(max_tokens="x"))] == [400] * 3
    assert get(three.port, COMPLETION, {"prompt": "a", "n_predict": 0})[1]["content"] == ""
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b c"}, {"type": "image"}]}]}
    assert get(three.port, CHAT, parts | {"max_tokens": 1})[1]["usage"]["prompt_tokens"] == 3


def test_ring_of_one_cuts_a_prompt_too_long_with_context_shift(rings: Rings) -> None:
    ring = rings("h", "", "-c", "100")
    ring.ready()
    status, reply = get(ring.port, CHAT, {"messages": [{"content": "a " * 500}], "max_tokens": 1000})
    assert (status, reply["choices"][0]["finish_reason"]) == (200, "length")
    assert 0 < reply["usage"]["prompt_tokens"] < reply["usage"]["total_tokens"] <= 101
    assert ring.stop() == [0]


def test_slots_queue_and_are_freed_when_the_client_goes(three: Ring) -> None:
    def send(path: str, body: dict[str, Any]) -> socket.socket:
        text = json.dumps(body)
        client = stack.enter_context(socket.create_connection(("127.0.0.1", three.port)))
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        return client

    with contextlib.ExitStack() as stack:
        # One that streams, and one to which nothing is written that could fail once its client has gone.
        clients = [send(CHAT, hello(max_tokens=19000, stream=streamed)) for streamed in (True, False)]
        until(lambda: three.slots() == [1, 1], "both slots are busy")
        third = send(COMPLETION, {"prompt": "a"})
        assert select.select([third], [], [], 0.3)[0] == [], "no slot was free, yet there is an answer"
        clients[1].close()
        assert select.select([third], [], [], DEADLINE_S)[0] == [third]
        clients[0].close()
        until(lambda: three.slots() == [0, 0], "both are gone")


def test_stop_amid_an_answer_breaks_it_off(rings: Rings) -> None:
    ring = rings("hh", "5,5", "-c", "90000")
    ring.ready()
    with ask(ring.port, CHAT, hello(max_tokens=80000, stream=True)) as reply:
        assert reply.readline().startswith(b"data:")
        assert ring.stop() == [0, 0]
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            reply.read()


def test_port_taken_ends_with_the_message(three: Ring, rings: Rings) -> None:
    bound = "Error binding/connecting recv socket to endpoint: Address already in use"
    for rank, message in ((1, bound), (0, "address already in use")):
        ring = rings("hhh", "5,5,5")
        ring.port, ring.data_ports[1] = three.port, three.data_ports[1]
        ring.start(rank)
        assert ring.codes() == [1]
        assert message in ring.log(rank)
        assert "Traceback" not in ring.log(rank)


@pytest.fixture
def context() -> Iterator[Context]:
    """To be ended by term(), which the relays' threads hear of; a context's own exit would close their sockets."""
    context: Context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    yield context
    context.term()


class Relay:
    """PULL on one port, PUSH to another, and a note of every message in between."""

    def __init__(self, context: Context, source: int, target: int) -> None:
        self.seen: list[list[bytes]] = []
        self.pull, self.push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.pull.bind(f"tcp://127.0.0.1:{source}")
        self.push.connect(f"tcp://127.0.0.1:{target}")
        threading.Thread(target=self._run).start()

    def _run(self) -> None:
        with self.pull, self.push, contextlib.suppress(zmq.ContextTerminated):
            while True:
                frames = self.pull.recv_multipart()
                self.seen.append(frames)
                self.push.send_multipart(frames)

    def tensors(self) -> list[tuple[int, int]]:
        """Tokens and bytes of each tensor message since the last call."""
        seen, self.seen = self.seen, []
        found = [frames for frames in seen if frames[0] == b"sub_gf_out"]
        assert [struct.unpack("<q", frames[1][:8])[0] for frames in found] == [WIDTH] * len(found)
        return [(struct.unpack("<q", frames[1][8:16])[0], len(frames[2])) for frames in found]


def test_messages_have_the_models_sizes_in_every_cycle(rings: Rings, context: Context) -> None:
    ring = rings("hh", "10,5", "-c", "2000", "-b", "700")
    ring.data_ports[1] += 64  # so that there is room for the relays; visits: rank 1, leader, rank 1, leader
    down = Relay(context, ring.data_ports[0] + 1, ring.data_ports[1] + 1)
    back = Relay(context, ring.data_ports[1], ring.data_ports[0])
    ring.ready()
    row = 4 * WIDTH
    assert down.tensors() == back.tensors() == [(2, 2 * row)] * 2, "the warm-up"
    assert get(ring.port, COMPLETION, {"prompt": "a " * 800, "n_predict": 3})[0] == 200
    prompt = [(size, size * row) for size in (512, 188, 100) for _ in range(2)]
    assert down.tensors() == back.tensors() == [*prompt, *[(1, row)] * 4]
    assert ring.stop() == [0, 0]


def test_stranger_in_the_ring_ends_the_rank_that_meets_it(rings: Rings, context: Context) -> None:
    ring = rings("hh", "5,5")
    ring.ready()
    for rank in (1, 0):
        with context.socket(zmq.PUSH) as push:
            push.connect(f"tcp://127.0.0.1:{ring.data_ports[rank] + rank}")
            push.send(b"junk")
            if rank == 0:  # the leader meets it when it waits for an answer
                with pytest.raises((ConnectionError, http.client.HTTPException)):
                    get(ring.port, CHAT, hello())
            assert ring.ranks[rank].wait(DEADLINE_S) == 1
        assert "stranger on the port" in ring.log(rank)
        assert "Traceback" not in ring.log(rank)


def test_rank_that_joins_a_running_ring_ends(rings: Rings, context: Context) -> None:
    ring = rings("hh", "5,5")
    ring.start(1)
    with context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{ring.data_ports[1] + 1}")
        push.send_multipart([b"n_tokens", struct.pack("<i", 1)])
        assert ring.codes() == [1]
    assert "start-up barrier 1: expected b'should_profile', got b'n_tokens'" in ring.log(1)


def test_flags_that_make_no_sense_are_refused() -> None:
    worker = ["llama-cli", "--world", "2", "--rank", "1", "-lw"]
    for argv, sizes, text in (
        (["llama-server", "-c", "many"], SIZES, "cannot read a flag"),
        (["llama-server"], {"layers": 3}, "cannot read a flag or SHARDBOX_REHEARSE"),
        (["llama-server"], SIZES | {"width": 0}, "nothing may be zero"),
        (["llama-server", *worker[1:], "1,1"], SIZES, "rank 0 is llama-server"),
        ([*worker, "1"], SIZES, "-lw needs 2 numbers"),
        ([*worker, "1,0"], SIZES, "-lw needs 2 numbers"),
    ):
        with pytest.raises(RehearsalError, match=text):
            rehearsal_setup(argv, {"SHARDBOX_REHEARSE": json.dumps(sizes)})


def test_version_is_said_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert rehearse(["llama-server", "--version"], {}) == 0
    assert "rehearsal" in capsys.readouterr().out


@pytest.mark.prima
@pytest.mark.skipif(not (PRIMA and MODEL), reason="needs SHARDBOX_PRIMA and SHARDBOX_MODEL")
@pytest.mark.parametrize(("kinds", "windows"), [("rhh", "5,5,20"), ("hrr", "7,7,7")])
def test_ring_with_real_engines_answers_and_stops(rings: Rings, kinds: str, windows: str) -> None:
    with open(MODEL, "rb") as file:
        shape = model_shape([read_gguf_header(file, os.path.getsize(MODEL), MODEL)])
    ring = rings(kinds, windows, "-c", "2048", "-np", "2", "--cont-batching", "--no-context-shift")
    ring.sizes = {"layers": shape.layers, "width": shape.width, "name": "demo"}
    ring.ready()
    prompts = ["a b " * 280, "a b", "a b"]  # the first is longer than a micro-batch, and there are only two slots
    with ThreadPoolExecutor(len(prompts)) as pool:
        bodies = [{"messages": [{"role": "user", "content": prompt}], "max_tokens": 3} for prompt in prompts]
        replies = list(pool.map(lambda body: get(ring.port, CHAT, body), bodies))
    assert [status for status, _ in replies] == [200] * 3
    assert replies[0][1]["usage"]["prompt_tokens"] > 512
    check_too_long(ring.port, "a b " * 800)
    until(lambda: ring.slots() == [0, 0], "the slots are free")
    codes = ring.stop()
    # A real leader passes STOP round and may then crash while it frees its sockets (seen in a ring of real ones too).
    assert codes[0] in ((0, -signal.SIGSEGV) if kinds[0] == "r" else (0,))
    assert codes[1:] == [0] * (len(kinds) - 1), [*map(ring.log, ring.ranks)]
