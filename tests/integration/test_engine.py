"""Real processes, real namespaces, real pipes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardbox
from shardbox import (
    CappedLog,
    EngineError,
    EngineProcess,
    Spawner,
    Usage,
    diagnose,
    oom_kills,
    process_identity,
    stop_leftover,
    stop_leftovers,
)

DEADLINE_S = 20.0
NODE_ENV = {"PYTHONPATH": str(Path(shardbox.__file__).parent)}
Launch = Callable[..., EngineProcess]

HOLD = "import signal; print('up', flush=True); signal.pause()"
SPIN = "print('up', flush=True)\nwhile True: pass"
SERVER = """
import socket, sys
with socket.create_server(("0.0.0.0", int(sys.argv[1]))) as server:
    print("up", flush=True)
    while True:
        with server.accept()[0] as client:
            client.sendall(b"hello " + client.recv(100))
"""
# An engine that does not want to go: deaf to SIGTERM, a child in its own session, and a grandchild of that.
STUBBORN = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
ready, tell = os.pipe()
if not os.fork():
    os.setsid()
    middle = os.getpid()
    if os.fork():
        os._exit(0) if "orphan" in sys.argv else signal.pause()
    os.setsid()
    os.write(tell, f"{middle} {os.getpid()}".encode())
    while True: signal.pause()
print("family", os.getpid(), os.read(ready, 100).decode(), flush=True)
while True: signal.pause()
"""
FACTS = """
import os, json, signal, resource
links = {}
for name in os.listdir("/proc/self/fd"):
    if os.path.lexists(link := f"/proc/self/fd/{name}"): links[name] = os.readlink(link)
print("facts", json.dumps({
    "env": {k.decode(): v.hex() for k, v in os.environb.items()}, "cwd": os.getcwd(), "links": links,
    "mask": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "session": os.getsid(0) - os.getpid(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "status": open("/proc/self/status").read()}))
"""
# A node: starts engines and prints what exists, then waits to be killed.
NODE = """
import json, os, sys, signal, threading
from shardbox import Spawner
spawner = Spawner.start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
def run(isolate):
    env = {key: value for key, value in os.environ.items() if key == "SHARDBOX_RUN"}
    e = spawner.spawn(argv=[sys.executable, "-c", sys.argv[1]], env=env, cwd="/", isolate=isolate)
    line = b""
    while not line.endswith(b"\\n"): line += os.read(e.output, 1000)
    return [e, [spawner._pid, e._keeper, *map(int, line.split()[1:])]]
engines = [run(isolate) for isolate in (False, True)]
print(json.dumps([pids for _, pids in engines]), flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def spawner() -> Iterator[Spawner]:
    started = Spawner.start()
    yield started
    started.close()


@pytest.fixture(params=[False, True], ids=["open", "isolated"])
def isolate(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def launch(spawner: Spawner) -> Iterator[Launch]:
    """Starts a Python program as an engine, waits for a line of it if told to, closes it at the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(program: str, *args: object, heard: str = "", isolate: bool = False, **how: Any) -> EngineProcess:
            argv = [sys.executable, "-c", program, *map(str, args)]
            process = spawner.spawn(argv=argv, isolate=isolate, **{"env": {}, "cwd": "/", **how})
            stack.callback(process.close)
            if heard:
                said(process, heard)
            return process

        yield start


def until(check: Callable[[], bool], what: str) -> None:
    """For what has no event to wait on (a foreign process's end, /proc): ask again, with a deadline."""
    end = time.monotonic() + DEADLINE_S
    gate = threading.Event()
    while not check():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE_S} s"
        gate.wait(0.01)


def said(process: EngineProcess, marker: str) -> str:
    """The engine's output up to and with the line that holds the marker."""
    text, end = b"", time.monotonic() + DEADLINE_S
    while not re.search(marker.encode() + rb".*\n", text):
        ready, _, _ = select.select([process.output], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"no {marker!r} in {text!r}"
        chunk = os.read(process.output, 65536)
        assert chunk, f"the output ended without {marker!r}: {text!r}"
        text += chunk
    return text.decode()


def alive(pid: int) -> bool:
    return process_identity(pid) != ""


def open_files(pid: object = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.abort()", -6),
        ("import os; os.kill(os.getpid(), 9)", -9),
    ],
)
def test_exit_of_an_engine_is_reported_as_by_subprocess(launch: Launch, isolate: bool, program: str, code: int) -> None:
    process = launch(program, isolate=isolate)
    assert (process.wait_exit(), process.exit_code, process.wait_exit()) == (code, code, code)


def test_signal_has_its_default_effect_and_later_requests_say_that_it_is_gone(launch: Launch, isolate: bool) -> None:
    process = launch(HOLD, isolate=isolate, heard="up")
    process.signal(signal.SIGTERM)
    assert process.wait_exit() == -signal.SIGTERM
    assert not alive(process.pid)
    process.signal(signal.SIGTERM)  # no error
    with pytest.raises(ProcessLookupError):
        process.connect(7, 1.0)
    assert (process.bound_ports(), process.usage()) == (frozenset(), Usage())


@pytest.mark.parametrize(
    ("content", "mode", "cwd", "words"),
    [
        (None, 0, "/", "No such file"),
        (b"#!/bin/true\n", 0o755, "/nowhere", "/nowhere"),
        (b"#!/bin/true\n", 0o644, "/", "chmod"),
        (b"#!/nowhere/loader\n", 0o755, "/", "loader or interpreter"),
        (b"\x7fELF\x02\x01\x01" + bytes(200), 0o755, "/", "uname -m"),
        (b"#!/bin/true\n", 0o755, "/\0", "null byte"),
    ],
)
def test_spawn_of_what_cannot_run_raises_engine_error_with_a_hint(
    spawner: Spawner, tmp_path: Path, isolate: bool, content: bytes | None, mode: int, cwd: str, words: str
) -> None:
    program = tmp_path / "llama-cli"
    if content:
        program.write_bytes(content)
        program.chmod(mode)
    before = open_files()
    with pytest.raises(EngineError, match=words) as caught:
        spawner.spawn(argv=[str(program)], env={}, cwd=cwd, isolate=isolate)
    assert caught.value.where == str(program)
    assert open_files() == before


def test_spawn_from_many_threads_gives_each_its_own_and_leaks_nothing(spawner: Spawner, launch: Launch) -> None:
    def one(number: int) -> tuple[int | None, int | None]:
        pair = [launch(program, isolate=bool(number % 2)) for program in (f"raise SystemExit({number})", HOLD)]
        pair[0].wait_exit()
        for process in pair:
            process.close()
        return pair[0].exit_code, pair[1].exit_code

    launch("pass").close()
    before = open_files(), open_files(spawner._pid)
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(one, range(12))) == [(number, -signal.SIGKILL) for number in range(12)]
    until(lambda: shardbox._children(spawner._pid) == [], "the keepers are reaped")
    assert (open_files(), open_files(spawner._pid)) == before


def test_engine_gets_exactly_its_environment_folder_and_descriptors(
    launch: Launch, isolate: bool, tmp_path: Path
) -> None:
    launch(HOLD, isolate=isolate, heard="up")  # another, whose channels must not show up either
    held = os.pipe()
    os.set_inheritable(held[1], True)
    env = {"A": "1", "LC_ALL": "C.UTF-8", "UMLAUT": "ä", "RAW": "\udcff"}
    process = launch(FACTS, isolate=isolate, env=env, cwd=str(tmp_path))
    facts = json.loads(said(process, "facts").partition("facts")[2])
    for fd in held:
        os.close(fd)
    links = facts.pop("links")
    assert set(links) == {"0", "1", "2"}
    assert (links["0"], links["1"][:5], links["2"]) == (os.devnull, "pipe:", links["1"])
    ignored = int(re.findall(r"SigIgn:\s*([0-9a-f]+)", facts.pop("status"))[0], 16) & 0x7FFFFFFF
    assert ignored == 0x01001000  # Python itself: SIGPIPE, SIGXFSZ; `make` ignores two of libc's own signals above
    assert facts == {
        "env": {name: os.fsencode(value).hex() for name, value in env.items()},
        "cwd": str(tmp_path),
        "mask": [],
        "session": 0,
        "files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody with a supplementary group")
def test_engine_isolated_without_root_keeps_supplementary_groups(tmp_path: Path) -> None:
    device = tmp_path / "renderD128"
    device.write_text("gpu")
    device.chmod(0o640)
    os.chown(device, 0, 4242)
    for folder in [tmp_path, *tmp_path.parents][:3]:
        folder.chmod(0o755)
    # It drops root after the imports, as this Python may be readable for root alone. 4: PR_SET_DUMPABLE, as after exec.
    node = (
        "import os, sys, ctypes; from shardbox import Spawner, load_all; load_all()\n"
        "os.setgroups([4242]); os.setgid(65534); os.setuid(65534); ctypes.CDLL(None).prctl(4, 1)\n"
        "s = Spawner.start()\n"
        "e = s.spawn(argv=['/bin/cat', sys.argv[1]], env={}, cwd='/', isolate=True)\n"
        "print(os.getuid(), e.wait_exit(), os.read(e.output, 100).decode()); e.close(); s.close()"
    )
    argv = [sys.executable, "-c", node, str(device)]
    done = subprocess.run(argv, env=NODE_ENV, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.stdout.split() == ["65534", "0", "gpu"], done.stderr


def test_connect_reaches_what_the_engine_binds_and_nothing_else(launch: Launch, isolate: bool) -> None:
    port = free_port()
    process = launch(SERVER, port, isolate=isolate, heard="up")
    with process.connect(port, 5.0) as client:
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert client.gettimeout() is None
        assert not client.get_inheritable()
        client.sendall(b"you")
        assert client.recv(100) == b"hello you"
    with pytest.raises(ConnectionRefusedError):
        process.connect(free_port(), 5.0)


def test_listen_is_reached_by_the_engine_and_shares_its_ports(launch: Launch, isolate: bool) -> None:
    dial = (
        "import socket, sys, time; print('up', flush=True)\n"
        "while True:\n"
        "    try: s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); break\n"
        "    except ConnectionRefusedError: time.sleep(0.01)\n"
        "s.sendall(b'from inside'); print(s.recv(10).decode(), flush=True)\n"
    )
    port, taken = free_port(), free_port()
    process = launch(dial + SERVER.replace("argv[1]", "argv[2]"), port, taken, isolate=isolate, heard="up")
    with process.listen(port) as listener:
        listener.settimeout(DEADLINE_S)
        with listener.accept()[0] as client:
            client.settimeout(DEADLINE_S)
            assert client.recv(11) == b"from inside"
            client.sendall(b"thanks")
            said(process, "thanks(.|\n)*up")
    process.listen(port).close()  # the port is free again
    with pytest.raises(OSError, match="in use") as caught:
        process.listen(taken)
    assert caught.value.errno == errno.EADDRINUSE


def test_isolated_engines_bind_one_port_on_every_address_and_the_host_reaches_none(launch: Launch) -> None:
    assert shardbox.isolation_problem() == ""
    port = free_port()
    pair = [launch(SERVER, port, isolate=True, heard="up") for _ in range(2)]
    for process in pair:
        with process.connect(port, 5.0) as client:
            client.sendall(b"both")
            assert client.recv(100) == b"hello both"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5.0)
    with pair[0].listen(port + 1), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port + 1), 5.0)
    launch(SERVER, port, isolate=False, heard="up")  # the same engine, not isolated, can be reached
    socket.create_connection(("127.0.0.1", port), 5.0).close()


def test_bound_ports_are_those_of_this_engine_and_its_children_only(launch: Launch, isolate: bool) -> None:
    port = free_port()
    other = launch(HOLD, isolate=isolate, heard="up")
    wrapper = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    process = launch(wrapper, SERVER, port, isolate=isolate, heard="up")
    with process.listen(free_port()):  # ours, though in the engine's network
        assert process.bound_ports() == {port}
        assert other.bound_ports() == frozenset()


def test_bound_ports_are_found_in_a_table_of_more_than_a_mebibyte(launch: Launch) -> None:
    many = (
        "import socket, signal\n"
        "kept = [socket.create_server(('127.0.0.1', 2000 + n), backlog=64) for n in range(400)]\n"
        "kept += [socket.create_connection(s.getsockname()) for s in kept for _ in range(9)]\n"
        "print('up', flush=True); signal.pause()"
    )
    process = launch(many, isolate=True, heard="up")
    assert Path(f"/proc/{process.pid}/net/tcp").read_bytes()[1 << 20 :]
    assert process.bound_ports() == set(range(2000, 2400))


def test_usage_counts_cpu_reads_and_as_anonymous_only_what_no_file_backs(
    launch: Launch, tmp_path: Path, isolate: bool
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(os.urandom(64 << 20))
    with model.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    work = (
        "import sys, mmap; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
        "sum(m[i] for i in range(0, len(m), 4096)); keep = bytearray(b'x') * (50 << 20)\n"
    )
    process = launch(work + SPIN, model, isolate=isolate, heard="up")
    first = process.usage()
    assert first.read_bytes >= 64 << 20
    assert 50 << 20 < first.anon_bytes < 90 << 20
    assert 114 << 20 < first.rss_bytes < 180 << 20
    until(lambda: process.usage().cpu_s > first.cpu_s + 0.05, "CPU time grows")


@pytest.mark.parametrize("shape", ["", "orphan"])
@pytest.mark.parametrize("how", ["close", "engine killed", "keeper killed"])
def test_end_of_a_stubborn_engine_leaves_nothing_of_it(launch: Launch, isolate: bool, shape: str, how: str) -> None:
    process = launch(STUBBORN, shape, isolate=isolate)
    pids = [int(pid) for pid in said(process, "family").split()[1:]]
    process.signal(signal.SIGTERM)
    assert len(pids) == 3
    assert [alive(pid) for pid in pids] == [True, not shape, True]
    if how == "close":
        process.close()
        process.close()
    else:
        os.kill(pids[0] if how == "engine killed" else process._keeper, signal.SIGKILL)
    assert process.wait_exit() == -signal.SIGKILL
    if how == "keeper killed":  # then nobody is left to report their end
        until(lambda: not any(map(alive, pids)), f"{pids} end")
    assert not any(map(alive, pids))


def test_helpers_ignore_the_terminals_and_the_service_managers_signals(spawner: Spawner, launch: Launch) -> None:
    process = launch(HOLD, isolate=True, heard="up")
    for pid, name in (spawner._pid, "sb-spawner"), (process._keeper, "sb-keeper"):
        assert os.getsid(pid) != os.getsid(0)
        assert Path(f"/proc/{pid}/comm").read_text().strip() == name
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            os.kill(pid, number)
    process.listen(4000).close()
    assert launch("pass").wait_exit() == 0


@pytest.mark.parametrize(
    "blows",
    [
        [("node", signal.SIGKILL)],
        [("node", signal.SIGTERM)],
        [("spawner", signal.SIGKILL)],
        [("keeper", signal.SIGSTOP), ("node", signal.SIGKILL)],
        # `killall -9 shardbox`: engines are left to the kernel; what moved out of their session ends otherwise here
        [("child", signal.SIGKILL), ("node", signal.SIGSTOP), ("spawner", signal.SIGSTOP), ("keeper", signal.SIGKILL)],
    ],
    ids=lambda blows: " ".join(f"{who}-{number.name}" for who, number in blows),
)
def test_kill_of_the_node_or_its_helpers_leaves_no_process(blows: list[tuple[str, signal.Signals]]) -> None:
    argv = [sys.executable, "-c", NODE, STUBBORN]
    with subprocess.Popen(argv, env=NODE_ENV, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        groups = json.loads(node.stdout.readline())
        pids = {"node": [node.pid], "spawner": [groups[0][0]], "keeper": [group[1] for group in groups]}
        pids |= {"engine": [group[2] for group in groups], "child": [pid for group in groups for pid in group[3:]]}
        try:
            assert all(alive(pid) for who in pids.values() for pid in who)
            for who, number in blows:
                for pid in pids[who]:
                    os.kill(pid, number)
            until(lambda: not any(map(alive, pids["engine"] + pids["child"])), "the engines end")
        finally:
            node.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids["spawner"][0], signal.SIGCONT)
        until(lambda: not any(map(alive, pids["spawner"] + pids["keeper"])), "the helpers end")


def test_close_of_the_spawner_stops_engines_and_further_spawns_say_so() -> None:
    for end in (Spawner.close, lambda spawner: os.kill(spawner._pid, signal.SIGKILL)):
        spawner = Spawner.start()
        process = spawner.spawn(argv=[sys.executable, "-c", HOLD], env={}, cwd="/", isolate=True)
        end(spawner)
        assert process.wait_exit() == -signal.SIGKILL
        process.close()
        with pytest.raises(EngineError):
            spawner.spawn(argv=[sys.executable], env={}, cwd="/", isolate=False)
        spawner.close()
        spawner.close()
        assert not alive(spawner._pid)


def test_stop_leftover_kills_only_the_process_it_was_told_of() -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True) as stranger:
        identity = process_identity(stranger.pid)
        assert re.fullmatch(r"[0-9a-f-]{36}:\d+", identity)
        assert not stop_leftover(stranger.pid, "")
        assert not stop_leftover(stranger.pid, identity + "1")
        assert stranger.poll() is None
        assert stop_leftover(stranger.pid, identity)
        assert stranger.wait(DEADLINE_S) == -signal.SIGKILL
        assert process_identity(stranger.pid) == ""
        assert not stop_leftover(stranger.pid, identity)


def test_leftovers_that_moved_out_of_their_session_are_found_when_all_were_killed_at_once(tmp_path: Path) -> None:
    """Node, spawner and keepers killed in one blow: the kernel ends the engines, nobody their children."""
    mark, other = "ab" * 16, "cd" * 16
    argv = [sys.executable, "-c", NODE, STUBBORN]
    with (
        subprocess.Popen(argv, env={**NODE_ENV, "SHARDBOX_RUN": mark}, stdout=subprocess.PIPE, text=True) as node,
        subprocess.Popen([sys.executable, "-c", HOLD], env={"SHARDBOX_RUN": other}, stdout=subprocess.PIPE) as stranger,
    ):
        assert node.stdout is not None
        groups = json.loads(node.stdout.readline())
        helpers = [node.pid, groups[0][0], *(group[1] for group in groups)]
        children = [pid for group in groups for pid in group[3:]]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped, nobody can tidy up for another
            for pid in helpers:
                os.kill(pid, number)
        until(lambda: not any(alive(group[2]) for group in groups), "the engines end")
        assert all(map(alive, children)), "or there is nothing to find"

        (tmp_path / "engines.json").write_text(json.dumps({"mark": mark, "engines": []}))
        stop_leftovers(str(tmp_path))

        assert not any(map(alive, children))
        assert stranger.poll() is None
        stranger.kill()


def test_engine_killed_by_the_kernel_for_lack_of_memory_is_told_from_one_killed_by_hand(launch: Launch) -> None:
    cgroup = Path("/sys/fs/cgroup/memory") / f"shardbox-test-{os.getpid()}"
    try:
        cgroup.mkdir()
        (cgroup / "memory.limit_in_bytes").write_text(str(60 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup (version 1) can be made here: {error}")
    before = oom_kills()
    assert before is not None
    try:
        join = f"open({str(cgroup / 'cgroup.procs')!r}, 'w').write('0')"
        code = launch(f"{join}\nprint(len(bytearray(200 << 20)))").wait_exit()
    finally:
        cgroup.rmdir()
    killed = oom_kills()
    assert (code, killed) == (-signal.SIGKILL, before + 1)
    assert diagnose(code, [], 1).startswith("killed by the kernel, out of memory")


def logged(path: Path, sent: bytes, **how: int) -> CappedLog:
    """A log that was given all of `sent` and closed."""
    read_end, write_end = os.pipe()
    log = CappedLog(str(path), read_end, **how)
    for at in range(0, len(sent), 7777):
        os.write(write_end, sent[at : at + 7777])
    for fd in (read_end, write_end):
        os.close(fd)
    log.close()
    log.close()
    return log


def test_log_keeps_two_capped_files_and_the_last_lines(tmp_path: Path) -> None:
    path, old = tmp_path / "engine.log", tmp_path / "engine.log.1"
    logged(path, b"previous run")
    sent = b"".join(b"line %d\n" % number for number in range(50_000)) + b"unfinished \xff\x1b"
    log = logged(path, sent, cap_bytes=100_000)
    assert sorted(tmp_path.iterdir()) == [path, old]
    assert max(path.stat().st_size, old.stat().st_size) <= 100_000
    kept = old.read_bytes() + path.read_bytes()
    assert len(kept) > 30_000
    assert sent.endswith(kept)
    assert log.tail(3) == ["line 49998", "line 49999", "unfinished \ufffd?"]
    assert (len(log.tail(1000)), log.tail(0), log.problem) == (1000, [], "")
    assert path.stat().st_mode & 0o077 == 0


def test_log_on_a_full_disk_reads_on_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    (tmp_path / "log.1" / "in the way").mkdir(parents=True)
    log = logged(tmp_path / "log", b"first\n" + b"y" * 5_000_000)
    assert "No space left" in log.problem
    assert log.tail(1) == ["y" * 4000]


def test_log_whose_folder_is_missing_appears_with_it(launch: Launch, tmp_path: Path) -> None:
    process = launch("import os\nwhile True: os.write(1, b'forever\\n')")
    path = tmp_path / "gone" / "log"
    log = CappedLog(str(path), process.output)
    until(lambda: log.tail(1) != [], "it reads")
    assert "No such file" in log.problem
    path.parent.mkdir()
    until(lambda: path.exists() and path.stat().st_size > 0, "it writes")
    log.close()  # ends though the engine goes on
    until(lambda: not log._thread.is_alive(), "the thread ends")


def test_log_takes_a_storm_of_100_mb_without_holding_up_the_engine(launch: Launch, tmp_path: Path) -> None:
    storm = "import os\nfor _ in range(1600): os.write(1, (b'w' * 99 + b'\\n') * 625)\nos.write(1, b'last')"
    process = launch(storm)
    log = CappedLog(str(tmp_path / "log"), process.output, cap_bytes=1 << 20)
    assert process.wait_exit() == 0
    process.close()
    log.close()
    assert log.tail(2) == ["w" * 99, "last"]
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 2 << 20
