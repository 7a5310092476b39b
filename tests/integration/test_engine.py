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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import shardbox as under_test
from shardbox import (
    CappedLog,
    EngineError,
    EngineProcess,
    Spawner,
    Usage,
    isolation_problem,
    process_identity,
    stop_leftover,
)

DEADLINE_S = 20.0
MODULE_DIR = str(Path(under_test.__file__).parent)
Launch = Callable[..., EngineProcess]

HOLD = "import sys; print('up', flush=True); sys.stdin.read(); import signal; signal.pause()"
SERVER = """
import socket, sys
with socket.create_server(("0.0.0.0", int(sys.argv[1]))) as server:
    print("bound", flush=True)
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
pids = [os.getpid()]
if not os.fork():
    os.setsid()
    middle = os.getpid()
    if os.fork():
        os._exit(0) if len(sys.argv) > 1 else signal.pause()
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
    try: links[name] = os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError: pass  # the listing's own
print("facts", json.dumps([
    {k.decode(): v.hex() for k, v in os.environb.items()}, os.getcwd(), links,
    list(signal.pthread_sigmask(signal.SIG_BLOCK, [])), os.getsid(0) == os.getpid(),
    [os.getuid(), os.getgid()],
    list(resource.getrlimit(resource.RLIMIT_NOFILE)), open("/proc/self/status").read()]))
"""
# A node: starts engines and prints what exists, then waits to be killed.
NODE = """
import json, os, sys, signal, threading
from shardbox import Spawner
spawner = Spawner.start()
for _ in range(3): threading.Thread(target=threading.Event().wait, daemon=True).start()
def run(isolate):
    e = spawner.spawn(argv=[sys.executable, "-c", sys.argv[1]], env={}, cwd="/", isolate=isolate)
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
    """Starts a Python program as an engine; closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(
            program: str, *args: str, isolate: bool = False, env: Mapping[str, str] | None = None, cwd: str = "/"
        ) -> EngineProcess:
            argv = [sys.executable, "-c", program, *args]
            process = spawner.spawn(argv=argv, env=env or {}, cwd=cwd, isolate=isolate)
            stack.callback(process.close)
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


def drain(process: EngineProcess) -> str:
    text = b""
    while chunk := os.read(process.output, 65536):
        text += chunk
    return text.decode()


def alive(pid: int) -> bool:
    return process_identity(pid) != ""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# Start and exit.


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_exit_of_an_engine_is_reported_as_by_subprocess(launch: Launch, isolate: bool, program: str, code: int) -> None:
    process = launch(program, isolate=isolate)
    assert process.wait_exit() == code
    assert process.exit_code == code
    assert process.wait_exit() == code


def test_signal_reaches_the_whole_group_with_default_disposition(launch: Launch, isolate: bool) -> None:
    process = launch(HOLD, isolate=isolate)
    said(process, "up")
    process.signal(signal.SIGTERM)
    assert process.wait_exit() == -signal.SIGTERM
    process.signal(signal.SIGTERM)  # gone: no error
    assert not alive(process.pid)


def test_requests_after_the_end_say_that_it_is_gone(launch: Launch) -> None:
    process = launch("pass", isolate=True)
    process.wait_exit()
    with pytest.raises(ProcessLookupError):
        process.listen(7)
    assert process.bound_ports() == frozenset()
    assert process.usage() == Usage()


@pytest.mark.parametrize(
    ("argv", "cwd", "words"),
    [
        (["/nowhere/llama-server"], "/", "No such file"),
        ([sys.executable], "/nowhere", "/nowhere"),
        (["/etc/passwd"], "/", "Permission denied"),
        ([sys.executable, "a\0b"], "/", "null byte"),
    ],
)
def test_spawn_of_what_cannot_run_raises_engine_error(
    spawner: Spawner, isolate: bool, argv: list[str], cwd: str, words: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EngineError, match=words) as caught:
        spawner.spawn(argv=argv, env={}, cwd=cwd, isolate=isolate)
    assert argv[0] in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_spawn_of_another_machines_binary_tells_so(spawner: Spawner, tmp_path: Path) -> None:
    (tmp_path / "llama-cli").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(200))
    (tmp_path / "llama-cli").chmod(0o755)
    with pytest.raises(EngineError) as caught:
        spawner.spawn(argv=[str(tmp_path / "llama-cli")], env={}, cwd="/", isolate=False)
    assert "uname -m" in caught.value.hint


def test_spawn_of_a_binary_without_its_loader_tells_so(spawner: Spawner, tmp_path: Path) -> None:
    (tmp_path / "llama-cli").write_text("#!/nowhere/loader\n")
    (tmp_path / "llama-cli").chmod(0o755)
    with pytest.raises(EngineError) as caught:
        spawner.spawn(argv=[str(tmp_path / "llama-cli")], env={}, cwd="/", isolate=False)
    assert "loader or interpreter" in caught.value.hint


def test_spawn_from_many_threads_gives_each_its_own(launch: Launch) -> None:
    found: dict[int, int] = {}

    def one(number: int) -> None:
        found[number] = launch(f"raise SystemExit({number})", isolate=bool(number % 2)).wait_exit()

    threads = [threading.Thread(target=one, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == {n: n for n in range(12)}


def test_spawn_and_close_many_times_leaks_nothing(spawner: Spawner, launch: Launch) -> None:
    launch("pass").close()
    fds = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", spawner._pid)]
    for number in range(20):
        launch(HOLD, isolate=bool(number % 2)).close()
    assert [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", spawner._pid)] == fds
    until(lambda: under_test._children(spawner._pid) == [], "the keepers are reaped")


# What an engine is given.


def test_engine_gets_exactly_its_environment_folder_and_descriptors(
    launch: Launch, isolate: bool, tmp_path: Path
) -> None:
    other = launch(HOLD, isolate=isolate)  # whose channels must not show up either
    said(other, "up")
    held_r, held_w = os.pipe()
    os.set_inheritable(held_w, True)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    env = {"A": "1", "LC_ALL": "C.UTF-8", "UMLAUT": "ä", "RAW": "\udcff"}
    process = launch(FACTS, isolate=isolate, env=env, cwd=str(tmp_path))
    facts = json.loads(said(process, "facts").partition("facts")[2])
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    os.close(held_r)
    os.close(held_w)
    assert facts[0] == {name: os.fsencode(value).hex() for name, value in env.items()}
    assert facts[1] == str(tmp_path)
    links = facts[2]
    assert set(links) == {"0", "1", "2"}
    assert links["0"] == os.devnull
    assert links["1"] == links["2"]
    assert links["1"].startswith("pipe:")
    assert facts[3:5] == [[], True]
    assert facts[5] == [os.getuid(), os.getgid()]
    assert tuple(facts[6]) == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert re.search(r"SigIgn:\s*0000000001001000", facts[7])  # Python itself: SIGPIPE, SIGXFSZ


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody with a supplementary group")
def test_engine_isolated_without_root_keeps_supplementary_groups(tmp_path: Path) -> None:
    device = tmp_path / "renderD128"
    device.write_text("gpu")
    device.chmod(0o640)
    os.chown(device, 0, 4242)
    for folder in [tmp_path, *tmp_path.parents][:3]:
        folder.chmod(0o755)
    node = (
        "import os, sys; from engine import Spawner\n"
        "s = Spawner.start()\n"
        f"e = s.spawn(argv=['/bin/cat', {str(device)!r}], env={{}}, cwd='/', isolate=True)\n"
        "print(os.getuid(), e.wait_exit(), os.read(e.output, 100).decode()); e.close(); s.close()"
    )
    done = subprocess.run(
        ["setpriv", "--reuid", "65534", "--regid", "65534", "--groups", "4242", sys.executable, "-c", node],
        env={"PYTHONPATH": MODULE_DIR},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stdout.split() == ["65534", "0", "gpu"], done.stderr


# Its network.


def test_isolation_is_available_here_else_the_sentence_says_why() -> None:
    assert isolation_problem() == ""


def test_connect_reaches_a_port_that_the_engine_binds(launch: Launch, isolate: bool) -> None:
    port = free_port()
    process = launch(SERVER, str(port), isolate=isolate)
    said(process, "bound")
    with process.connect(port, 5.0) as client:
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert client.gettimeout() is None
        assert not client.get_inheritable()
        client.sendall(b"you")
        assert client.recv(100) == b"hello you"


def test_connect_to_a_port_that_nobody_binds_is_refused(launch: Launch, isolate: bool) -> None:
    process = launch(HOLD, isolate=isolate)
    with pytest.raises(ConnectionRefusedError):
        process.connect(free_port(), 5.0)


def test_listen_is_reached_by_the_engine(launch: Launch, isolate: bool) -> None:
    dial = (
        "import socket, sys; sys.stdout.write('ready\\n'); sys.stdout.flush(); import time\n"
        "while True:\n"
        "    try: s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); break\n"
        "    except ConnectionRefusedError: time.sleep(0.01)\n"
        "s.sendall(b'from inside'); print(s.recv(10).decode(), flush=True)"
    )
    port = free_port()
    process = launch(dial, str(port), isolate=isolate)
    said(process, "ready")
    with process.listen(port) as listener:
        listener.settimeout(DEADLINE_S)
        with listener.accept()[0] as client:
            client.settimeout(DEADLINE_S)
            assert client.recv(11) == b"from inside"
            client.sendall(b"thanks")
            said(process, "thanks")
    assert process.wait_exit() == 0


def test_listen_on_the_engines_own_port_passes_eaddrinuse_and_frees_it_on_close(launch: Launch, isolate: bool) -> None:
    port = free_port()
    process = launch(SERVER, str(port), isolate=isolate)
    said(process, "bound")
    with pytest.raises(OSError, match="in use") as caught:
        process.listen(port)
    assert caught.value.errno == errno.EADDRINUSE
    other = free_port()
    process.listen(other).close()
    process.listen(other).close()


def test_isolated_engine_on_every_address_cannot_be_reached_from_the_host(launch: Launch) -> None:
    port = free_port()
    process = launch(SERVER, str(port), isolate=True)
    said(process, "bound")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5.0)
    with process.listen(port + 1), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port + 1), 5.0)
    control = launch(SERVER, str(port), isolate=False)  # the same engine, not isolated, can be reached
    said(control, "bound")
    socket.create_connection(("127.0.0.1", port), 5.0).close()


def test_isolated_engines_may_bind_the_same_port(launch: Launch) -> None:
    port = free_port()
    pair = [launch(SERVER, str(port), isolate=True) for _ in range(2)]
    for process in pair:
        said(process, "bound")
    for process in pair:
        with process.connect(port, 5.0) as client:
            client.sendall(b"both")
            assert client.recv(100) == b"hello both"


def test_bound_ports_are_those_of_this_engine_only(launch: Launch, isolate: bool) -> None:
    port = free_port()
    process = launch(HOLD, isolate=isolate)
    said(process, "up")
    assert process.bound_ports() == frozenset()
    server = launch(SERVER, str(port), isolate=isolate)
    until(lambda: server.bound_ports() == {port}, "its port shows")
    other = free_port()
    with server.listen(other):  # ours, though in the engine's network
        assert server.bound_ports() == {port}
        assert process.bound_ports() == frozenset()


def test_bound_ports_see_a_wrappers_child(launch: Launch, isolate: bool) -> None:
    port = free_port()
    wrapper = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
    process = launch(wrapper, SERVER, str(port), isolate=isolate)
    said(process, "bound")
    assert process.bound_ports() == {port}


def test_usage_grows_with_work(launch: Launch, isolate: bool) -> None:
    process = launch(
        "keep = bytearray(50 << 20)\nkeep[::4096] = b'x' * len(keep[::4096])\nprint('up', flush=True)\n"
        "while True: pass",
        isolate=isolate,
    )
    said(process, "up")
    first = process.usage()
    assert first.rss_bytes > 50 << 20
    assert 0 < first.rss_bytes < 500 << 20
    until(lambda: process.usage().cpu_s > first.cpu_s + 0.05, "CPU time grows")


def test_usage_counts_reads_from_storage(launch: Launch, tmp_path: Path, isolate: bool) -> None:
    data = tmp_path / "model.gguf"
    data.write_bytes(os.urandom(4 << 20))
    with data.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    process = launch(
        "import sys, mmap; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
        "sum(m[i] for i in range(0, len(m), 4096)); print('read', flush=True); import signal; signal.pause()",
        str(data),
        isolate=isolate,
    )
    said(process, "read")
    assert process.usage().read_bytes >= 4 << 20


# Nothing survives.


def test_close_leaves_nothing_of_a_stubborn_engine(launch: Launch, isolate: bool) -> None:
    for args in ((), ("orphan",)):
        process = launch(STUBBORN, *args, isolate=isolate)
        pids = [int(pid) for pid in said(process, "family").split()[1:]]
        assert len(pids) == 3
        process.signal(signal.SIGTERM)
        assert alive(pids[0])
        assert alive(pids[2])
        process.close()
        assert process.exit_code == -signal.SIGKILL
        assert not [pid for pid in pids if alive(pid)]
        process.close()


def test_exit_of_an_engine_takes_what_it_has_forked(launch: Launch, isolate: bool) -> None:
    process = launch(STUBBORN, isolate=isolate)
    pids = [int(pid) for pid in said(process, "family").split()[1:]]
    os.kill(pids[0], signal.SIGKILL)
    assert process.wait_exit() == -signal.SIGKILL
    assert not [pid for pid in pids if alive(pid)]
    assert drain(process) == ""  # nobody holds the pipe


def test_kill_of_a_keeper_takes_engine_and_orphans(launch: Launch, isolate: bool) -> None:
    process = launch(STUBBORN, isolate=isolate)
    pids = [int(pid) for pid in said(process, "family").split()[1:]]
    os.kill(process._keeper, signal.SIGKILL)
    assert process.wait_exit() == -signal.SIGKILL
    until(lambda: not any(map(alive, pids)), f"{pids} end")


def test_kill_of_spawner_and_hung_keeper_takes_the_engine(isolate: bool) -> None:
    spawner = Spawner.start()
    process = spawner.spawn(argv=[sys.executable, "-c", STUBBORN], env={}, cwd="/", isolate=isolate)
    pids = [int(pid) for pid in said(process, "family").split()[1:]]
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
    os.kill(process._keeper, signal.SIGSTOP)  # it cannot act any more: only the kernel is left
    os.kill(spawner._pid, signal.SIGKILL)
    os.kill(process._keeper, signal.SIGKILL)
    assert process.wait_exit() == -signal.SIGKILL
    until(lambda: not alive(process.pid), "the engine ends")
    process.close()
    spawner.close()


def test_helpers_ignore_the_terminals_and_the_service_managers_signals(spawner: Spawner, launch: Launch) -> None:
    process = launch(HOLD, isolate=True)
    said(process, "up")
    for pid in (spawner._pid, process._keeper):
        assert os.getsid(pid) != os.getsid(0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(pid, number)
    process.listen(4000).close()
    assert launch("pass").wait_exit() == 0
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in (spawner._pid, process._keeper)}
    assert names == {"sb-spawner", "sb-keeper"}


@pytest.mark.parametrize("victim", ["node", "spawner", "node-term"])
def test_kill_of_node_or_spawner_leaves_no_process(victim: str) -> None:
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, STUBBORN], env={"PYTHONPATH": MODULE_DIR}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert node.stdout is not None
        groups = json.loads(node.stdout.readline())
        pids = sorted({pid for group in groups for pid in group})
        assert len(pids) == 1 + 2 * 4
        assert all(map(alive, pids))
        number = signal.SIGTERM if victim == "node-term" else signal.SIGKILL
        os.kill(groups[0][0] if victim == "spawner" else node.pid, number)
        until(lambda: not any(map(alive, pids)), f"{pids} end")
    finally:
        node.kill()
        node.wait(DEADLINE_S)
        if node.stdout is not None:
            node.stdout.close()


def test_close_of_the_spawner_stops_engines_and_further_spawns_say_so() -> None:
    spawner = Spawner.start()
    pid = spawner._pid
    process = spawner.spawn(argv=[sys.executable, "-c", HOLD], env={}, cwd="/", isolate=True)
    spawner.close()
    spawner.close()
    assert process.wait_exit() == -signal.SIGKILL
    assert not alive(process.pid)
    assert not alive(pid)
    process.close()
    with pytest.raises(EngineError):
        spawner.spawn(argv=[sys.executable], env={}, cwd="/", isolate=False)


def test_spawn_after_the_spawner_was_killed_raises_engine_error() -> None:
    spawner = Spawner.start()
    os.kill(spawner._pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        spawner.spawn(argv=[sys.executable], env={}, cwd="/", isolate=False)
    spawner.close()


# Leftovers.


def test_stop_leftover_kills_only_the_process_it_was_told_of() -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True) as stranger:
        identity = process_identity(stranger.pid)
        assert re.fullmatch(r"[0-9a-f-]{36}:\d+", identity)
        assert process_identity(stranger.pid) == identity
        assert not stop_leftover(stranger.pid, "")
        assert not stop_leftover(stranger.pid, identity + "1")
        assert stranger.poll() is None
        assert stop_leftover(stranger.pid, identity)
        assert stranger.wait(DEADLINE_S) == -signal.SIGKILL
        assert process_identity(stranger.pid) == ""
        assert not stop_leftover(stranger.pid, identity)


# Output.


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    for fd in (read_end, write_end):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_log_keeps_two_capped_files_and_the_last_lines(tmp_path: Path, pipe: tuple[int, int]) -> None:
    path = tmp_path / "engine.log"
    path.write_text("previous run")
    log = CappedLog(str(path), pipe[0], cap_bytes=1000)
    assert (tmp_path / "engine.log.1").read_text() == "previous run"
    for number in range(1000):
        os.write(pipe[1], b"line %d\n" % number)
    os.write(pipe[1], b"unfinished")
    log.close()
    log.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine.log", "engine.log.1"]
    assert (tmp_path / "engine.log.1").stat().st_size == 1000
    assert path.stat().st_size <= 1000
    text = (tmp_path / "engine.log.1").read_text() + path.read_text()
    assert "".join(f"line {n}\n" for n in range(1000)).endswith(text.removesuffix("unfinished"))
    assert log.tail(3) == ["line 998", "line 999", "unfinished"]
    assert len(log.tail(1000)) == 201
    assert log.tail(0) == []
    assert (log.problem, log.lost_bytes) == ("", 0)
    assert path.stat().st_mode & 0o077 == 0


def test_log_of_garbage_gives_printable_short_lines(tmp_path: Path, pipe: tuple[int, int]) -> None:
    log = CappedLog(str(tmp_path / "log"), pipe[0])
    sent = (
        b"\x1b[31mred\x1b[0m\tb\x07ell\x9b\xff\r\n"
        + b"x" * 10_000
        + b"\n"
        + "ä".encode() * 5000
        + b"\n"
        + bytes(range(256))
    )
    os.write(pipe[1], sent)
    log.close()
    lines = log.tail(9)
    assert lines[0] == "red bell\ufffd\ufffd"
    assert lines[1] == "x" * 4000
    assert lines[2] == "ä" * 4000
    assert all(char.isprintable() for line in lines for char in line)
    assert (tmp_path / "log").read_bytes() == sent


def test_log_on_a_full_disk_reads_on_and_says_so(pipe: tuple[int, int]) -> None:
    log = CappedLog("/dev/full", pipe[0])
    for _ in range(100):
        os.write(pipe[1], b"y" * 65535 + b"\n")
    log.close()
    assert "No space left" in log.problem
    assert log.lost_bytes == 100 * 65536
    assert log.tail(1) == ["y" * 4000]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount; /dev/full is tried by everybody")
def test_log_on_a_disk_that_fills_and_frees_goes_on(tmp_path: Path, pipe: tuple[int, int]) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True)
    try:
        (tmp_path / "other").write_bytes(b"z" * 40_000)
        log = CappedLog(str(tmp_path / "log"), pipe[0])
        os.write(pipe[1], b"a" * 60_000)
        until(lambda: log.problem != "", "the full disk is noticed")
        assert "No space left" in log.problem
        assert 0 < log.lost_bytes < 60_000
        (tmp_path / "other").unlink()
        os.write(pipe[1], b"b" * 10_000)
        log.close()
        assert (tmp_path / "log").read_bytes().endswith(b"b" * 10_000)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_log_whose_folder_is_missing_reads_on_and_appears_with_it(tmp_path: Path, pipe: tuple[int, int]) -> None:
    log = CappedLog(str(tmp_path / "gone" / "log"), pipe[0])
    os.write(pipe[1], b"one\n")
    until(lambda: log.tail(1) == ["one"], "it reads")
    until(lambda: log.lost_bytes == 4, "the loss is counted")
    assert "No such file" in log.problem
    (tmp_path / "gone").mkdir()
    os.write(pipe[1], b"two\n")
    log.close()
    assert (tmp_path / "gone" / "log").read_text() == "two\n"


def test_log_takes_a_storm_of_100_mb_without_holding_up_the_engine(
    launch: Launch, tmp_path: Path, isolate: bool
) -> None:
    storm = "import os\nfor _ in range(1600): os.write(1, (b'w' * 99 + b'\\n') * 625)\nos.write(1, b'last')"
    process = launch(storm, isolate=isolate)
    log = CappedLog(str(tmp_path / "log"), process.output, cap_bytes=1 << 20)
    started = time.monotonic()
    assert process.wait_exit() == 0
    assert time.monotonic() - started < DEADLINE_S
    process.close()
    log.close()
    assert log.tail(2) == ["w" * 99, "last"]
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 2 << 20


def test_log_close_while_the_engine_goes_on_ends_anyway(launch: Launch, tmp_path: Path) -> None:
    process = launch("import os\nwhile True: os.write(1, b'forever\\n')")
    log = CappedLog(str(tmp_path / "log"), process.output)
    until(lambda: log.tail(1) != [], "it writes")
    closer = threading.Thread(target=log.close)
    closer.start()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
