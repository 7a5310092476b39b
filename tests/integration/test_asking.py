"""How a node asks its engine, and other nodes that may have several addresses."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from shardbox import (
    EngineError,
    Hint,
    MeshError,
    Peer,
    Peers,
    RankRun,
    dialled_session,
    first_success,
    is_open,
    keep_task,
)

DEADLINE_S = 20.0
Attempt = Callable[[], Coroutine[Any, Any, None]]


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"])
def test_session_closed_while_it_asks_breaks_the_question(said: bytes) -> None:
    """A model was stopped with answers on their way: aiohttp left their readers waiting, so that the rings after it
    were thought to be asked, and `stalled` again and again (found by tests/fault/soak.py)."""

    async def ask_and_close(server: socket.socket, pool: ThreadPoolExecutor) -> None:
        session = dialled_session(lambda _: socket.create_connection(server.getsockname()), pool)
        begun = asyncio.Event()

        async def ask() -> None:
            async with session.get("http://engine/") as reply:
                async for _ in reply.content.iter_any():
                    begun.set()

        asking = asyncio.create_task(ask())
        with (await asyncio.to_thread(server.accept))[0] as engine:
            await asyncio.to_thread(engine.recv, 1000)
            engine.sendall(said)
            if said:
                await asyncio.wait_for(begun.wait(), DEADLINE_S)
            await session.close()
            with pytest.raises(aiohttp.ClientError):
                await asyncio.wait_for(asking, DEADLINE_S)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        asyncio.run(ask_and_close(server, pool))


def test_rank_that_is_being_ended_is_not_asked() -> None:
    """A leader that was suspended for longer than its lease asked on a closed session, which was a traceback."""

    async def ask(pool: ThreadPoolExecutor) -> None:
        parts: dict[str, Any] = dict.fromkeys(("lease", "wiring", "started_as"))
        run = RankRun(plan=SimpleNamespace(model="tiny"), rank=0, **parts)  # type: ignore[arg-type]
        with pytest.raises(EngineError, match="has been stopped"):
            _ = run.http
        run.session = dialled_session(lambda _: socket.socket(), pool)
        assert run.http is run.session
        await run.session.close()
        with pytest.raises(EngineError, match="rank 0 of tiny: its engine has been stopped"):
            _ = run.http

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(ask(pool))


class Attempts:
    """Attempts that note what becomes of them."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def answers(self, name: str) -> Attempt:
        """One that succeeds."""

        async def attempt() -> None:
            self.told.append(name)

        return attempt

    def fails(self, name: str) -> Attempt:
        """One that is refused."""

        async def attempt() -> None:
            self.told.append(name)
            raise MeshError(f"{name} refuses")

        return attempt

    def silent(self, name: str) -> Attempt:
        """One that nobody answers."""

        async def attempt() -> None:
            self.told.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                self.told.append(f"{name} given up")

        return attempt

    def run(self, *attempts: Attempt, delay_s: float) -> list[str]:
        """What was tried, in order."""
        asyncio.run(asyncio.wait_for(first_success(attempts, delay_s), DEADLINE_S))
        return self.told


def test_first_success_answer_leaves_the_others_alone() -> None:
    tries = Attempts()
    assert tries.run(tries.answers("a"), tries.answers("b"), delay_s=9.0) == ["a"]


def test_first_success_failure_begins_the_next_at_once() -> None:
    tries = Attempts()
    assert tries.run(tries.fails("a"), tries.answers("b"), delay_s=2 * DEADLINE_S) == ["a", "b"]


def test_first_success_silence_begins_the_next_and_is_given_up() -> None:
    tries = Attempts()
    told = tries.run(tries.silent("a"), tries.silent("b"), tries.answers("c"), delay_s=0.01)
    assert told[:3] == ["a", "b", "c"] and sorted(told[3:]) == ["a given up", "b given up"]


def test_first_success_without_one_raises_the_first_failure() -> None:
    tries = Attempts()
    with pytest.raises(MeshError, match="a refuses"):
        tries.run(tries.fails("a"), tries.fails("b"), delay_s=0.01)
    assert tries.run(delay_s=0.01) == ["a", "b"]


def test_first_success_bug_is_not_covered_up() -> None:
    async def bug() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        Attempts().run(bug, Attempts().answers("b"), delay_s=9.0)


def test_twin_is_named_as_long_as_something_is_heard_of_it() -> None:
    """`nodes` went on to say that two machines had one name after the second had been given another."""

    async def hear(pool: ThreadPoolExecutor) -> None:
        hints = [Hint(node="beta", address=f"192.0.2.{n}", port=7311, source="mdns") for n in (2, 9)]
        box: Any = SimpleNamespace(name="alpha", started=0.0, pool=pool)
        mesh: Any = None
        peers = Peers(box, mesh, lambda: hints, lambda _: None)
        beta = peers.known["beta"] = Peer(name="beta", twin=hints[1])
        peers.refresh()
        assert beta.twin == hints[1]
        del hints[1]
        peers.refresh()
        assert beta.twin is None
        await peers.close()

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(hear(pool))


# --- engine ports that a stranger might reach ---


def test_port_that_resets_at_once_is_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no peer by the time it is looked at: a TypeError there ended the whole node."""

    async def knock(server: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        connect = loop.sock_connect

        async def connect_to_be_reset(sock: socket.socket, address: Any) -> None:
            await connect(sock, address)
            accepted, _ = await loop.sock_accept(server)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # so that it resets
            accepted.close()
            ended = select.poll()
            ended.register(sock, select.POLLIN)
            assert await asyncio.to_thread(ended.poll, DEADLINE_S * 1000)

        monkeypatch.setattr(loop, "sock_connect", connect_to_be_reset)
        return await is_open(*server.getsockname())

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        assert not asyncio.run(knock(server))


def test_port_of_this_very_box_is_not_open_to_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not asyncio.run(is_open(*server.getsockname()))


def test_task_that_nobody_waits_for_logs_its_bug(caplog: pytest.LogCaptureFixture) -> None:
    """While something held the task, as a peer holds the one that follows it, its bug was never seen."""

    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    async def run() -> None:
        held = keep_task(set(), fail())
        await asyncio.wait({held}, timeout=DEADLINE_S)
        assert "a bug" in caplog.text

    asyncio.run(run())
