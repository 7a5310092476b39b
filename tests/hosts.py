"""Hosts on a LAN, on one machine: a network namespace each, with its own eth0, address and machine-id.

The bridge that joins them lives in a namespace of its own, so that neither the machine's firewall nor its other
networks play a part, and nothing is left once the namespaces are gone. Needs root and iproute2 on Linux.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import functools
import http.client
import itertools
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

import shardbox
from shardbox import ModelView, RankView, Snapshot, from_json, status_address, status_line

PATIENCE_S = 60.0  # for a state that must come; generous, since a CI machine has two slow cores
POLL_S = 0.05
SECRET = "a secret of the tests, long enough"
OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3
MEMBERS = ("alpha", "beta", "gamma")
CHAT = "/v1/chat/completions"
CLONE_NEWNET = 0x40000000
T = TypeVar("T")
_numbers = itertools.count()


def why_no_hosts() -> str:
    """Empty where hosts can be had, else the reason for a skip."""
    if sys.platform != "linux" or os.geteuid():
        return "network namespaces need root on Linux"
    return "" if shutil.which("ip") else "there is no `ip` (iproute2) here"


def shardbox_command() -> list[str]:
    """The program under test: the frozen file that SHARDBOX_EXE names, else the module, which start.py runs."""
    frozen = os.environ.get("SHARDBOX_EXE")
    return [os.path.abspath(frozen)] if frozen else [sys.executable, str(Path(__file__).with_name("start.py"))]


def program_file() -> Path:
    """What people copy: the frozen file under test, else the module."""
    return Path(os.environ.get("SHARDBOX_EXE", shardbox.__file__)).resolve()


def tool(*args: str) -> str:
    """What a system tool prints; it must succeed."""
    done = subprocess.run(args, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(args)}: {done.stderr}"
    return done.stdout


def eventually(ask: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first true answer. For states that nothing announces: asked again and again until the deadline."""
    pause, deadline = threading.Event(), time.monotonic() + patience_s
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what}"
        pause.wait(POLL_S)
    return answer


def in_namespace(netns: str, action: Callable[[], T]) -> T:
    """The action's result, from a thread inside a network namespace. Sockets made there stay there."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{netns}", "rb") as file:
                if libc.setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            result.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=f"in {netns}")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


# --- a cable as a program --------------------------------------------------------------------------------------

TUNSETIFF, IFF_TAP_NO_PI = 0x400454CA, 0x1002
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
ETH_P_ALL, PACKET_OUTGOING = 3, 4


def open_tap(name: str) -> int:
    """A network interface whose frames are this descriptor's. It goes when that is closed."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP_NO_PI))
    return tap


def open_port(name: str) -> int:
    """The frames that come in at an interface, and go out at it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.bind((name, ETH_P_ALL))
    port.setblocking(False)
    return port.detach()


def set_offload(name: str, wanted: bool) -> None:
    """Whether checksums and segments are left to the hardware, which between namespaces nobody is."""
    value = ctypes.create_string_buffer(struct.pack("=II", ETHTOOL_STXCSUM, wanted))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP16x", name.encode(), ctypes.addressof(value)))


def carry(tap: int, port_fd: int, end: int, *, delay_s: float, loss: float, hears: bool, heard: bool) -> None:
    """Carry frames between the switch (`tap`) and the host (`port_fd`) until the other side of `end` is closed."""
    chance, queue = random.Random(1), collections.deque[tuple[float, bool, bytes]]()
    port = socket.socket(fileno=os.dup(port_fd))

    def take(frame: bytes, inwards: bool) -> None:
        if (hears if inwards else heard) and chance.random() >= loss:
            queue.append((time.monotonic() + delay_s, inwards, frame))

    with port:
        while True:
            wait_s = max(0.0, queue[0][0] - time.monotonic()) if queue else None
            ready, _, _ = select.select([tap, port.fileno(), end], [], [], wait_s)
            if end in ready:
                return
            with contextlib.suppress(OSError):  # nothing more, or the link is down
                for _ in range(64 if tap in ready else 0):
                    take(os.read(tap, 1 << 16), True)
            with contextlib.suppress(OSError):
                for _ in range(64 if port.fileno() in ready else 0):
                    frame, (*_, kind, _, _) = port.recvfrom(1 << 16)
                    if kind != PACKET_OUTGOING:
                        take(frame, False)
            while queue and queue[0][0] <= time.monotonic():
                _, inwards, frame = queue.popleft()
                with contextlib.suppress(OSError):  # full, or the link is down: lost
                    port.send(frame) if inwards else os.write(tap, frame)


class Connection(http.client.HTTPConnection):
    """HTTP from inside a namespace."""

    def __init__(self, netns: str, address: str, port: int, timeout_s: float) -> None:
        super().__init__(address, port, timeout=timeout_s)
        self._netns = netns

    def connect(self) -> None:
        """Open the socket in the namespace."""
        self.sock = in_namespace(self._netns, functools.partial(socket.socket, socket.AF_INET, socket.SOCK_STREAM))
        self.sock.settimeout(self.timeout)
        self.sock.connect((self.host, self.port))


def model(snapshot: Snapshot) -> ModelView:
    """The only model."""
    return snapshot.models[0]


def serves(world: int) -> Callable[[Snapshot], bool]:
    """A whole ring of that many ranks answers."""
    return lambda snapshot: (
        model(snapshot).phase == "serving" and model(snapshot).alive == model(snapshot).world == world
    )


def rank_on(snapshot: Snapshot, node: str) -> RankView:
    """A node's rank."""
    return next(rank for rank in model(snapshot).ranks if rank.node == node)


def nodes_of(snapshot: Snapshot) -> list[str]:
    """The ring's nodes, the leader first."""
    return [rank.node for rank in model(snapshot).ranks]


def chat(text: str = "What is this?", **more: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


@dataclass
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def body(self) -> Any:
        """The JSON."""
        return json.loads(self.data)

    @property
    def error(self) -> Any:
        """OpenAI's error object."""
        return self.body["error"]

    def events(self) -> list[Any]:
        """The server-sent events; [DONE] as it stands."""
        return [parse_event(line) for line in self.data.splitlines() if line.startswith(b"data:")]


def parse_event(line: bytes) -> Any:
    """One `data:` line."""
    text = line.removeprefix(b"data:").strip()
    return "[DONE]" if text == b"[DONE]" else json.loads(text)


@dataclass
class Stream:
    """An answer that is read event by event."""

    connection: Connection
    reply: http.client.HTTPResponse

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.reply.close()
        self.connection.close()

    def __iter__(self) -> Iterator[Any]:
        for line in self.reply:
            if line.startswith(b"data:"):
                yield parse_event(line)

    def take(self, count: int) -> list[Any]:
        """The next events."""
        return list(itertools.islice(self, count))


@dataclass
class Host:
    """One box of the LAN. `folder` is its state folder and where its processes run."""

    name: str
    netns: str
    address: str
    folder: Path
    config: Path
    up_process: subprocess.Popen[str] | None = None
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    # --- programs ---

    def command(self, *args: str) -> list[str]:
        """How to run something inside."""
        return ["ip", "netns", "exec", self.netns, *args]

    def environment(self, **more: str) -> dict[str, str]:
        """What shardbox finds in its environment on this host."""
        kept = {key: os.environ[key] for key in ("PATH", "LANG", "TMPDIR") if key in os.environ}
        own = {"SHARDBOX_STATE": str(self.folder), "SHARDBOX_NODE": self.name, "SHARDBOX_CONFIG": str(self.config)}
        return {**kept, "PYTHONUNBUFFERED": "1", **own, **more}

    def spawn(self, *args: str, cwd: Path | None = None, **more: str) -> subprocess.Popen[str]:
        """Any program inside, its output to a file; ended with the host."""
        with open(self.folder / f"{len(self.started)}.log", "w") as log:
            process = subprocess.Popen(
                self.command(*args),
                env=self.environment(**more),
                cwd=cwd or self.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
            )
        self.started.append(process)
        return process

    def popen(self, *args: str, cwd: Path | None = None, **more: str) -> subprocess.Popen[str]:
        """A shardbox command that goes on."""
        return self.spawn(*shardbox_command(), *args, cwd=cwd, **more)

    def run(self, *args: str, timeout: float = 60.0, **more: str) -> subprocess.CompletedProcess[str]:
        """A shardbox command, whole. Its output is kept apart: `stdout`, `stderr`."""
        return self.run_tool(*shardbox_command(), *args, timeout=timeout, **more)

    def run_tool(self, *args: str, timeout: float = 60.0, **more: str) -> subprocess.CompletedProcess[str]:
        """Any program inside, whole."""
        return subprocess.run(
            self.command(*args),
            env=self.environment(**more),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def up(self, cwd: Path | None = None, **more: str) -> subprocess.Popen[str]:
        """`shardbox up` in the foreground."""
        self.up_process = self.popen("up", cwd=cwd, **more)
        return self.up_process

    def output(self, process: subprocess.Popen[str]) -> str:
        """What a spawned program has printed so far."""
        return (self.folder / f"{self.started.index(process)}.log").read_text(errors="replace")

    def pids(self) -> dict[int, str]:
        """What runs here, with its command line: in the namespace, or (an engine closed in) in our folder."""
        inside = {int(pid) for pid in tool("ip", "netns", "pids", self.netns).split()}
        found = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if pid in inside or os.readlink(f"/proc/{pid}/cwd").startswith(str(self.folder)):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if words and pid != os.getpid():  # not the dead, and not a thread of ours
                        found[pid] = words
        return found

    def kill_all(self) -> None:
        """End everything that runs here, and collect it."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.kill()
            process.wait(10)
            if process.stdin:
                process.stdin.close()

    # --- sockets ---

    def connect(self, address: str, port: int, timeout_s: float = 5.0) -> socket.socket:
        """A TCP connection from here. Raises OSError."""
        sock = in_namespace(self.netns, functools.partial(socket.socket, socket.AF_INET, socket.SOCK_STREAM))
        try:
            sock.settimeout(timeout_s)
            sock.connect((address, port))
        except BaseException:
            sock.close()
            raise
        return sock

    def listening(self) -> set[str]:
        """`address:port` of every TCP listener in the namespace."""
        return {line.split()[3] for line in self.run_tool("ss", "-Hltn").stdout.splitlines()}

    def abstract_sockets(self) -> list[str]:
        """Abstract UNIX sockets of the namespace that belong to shardbox."""
        text = in_namespace(self.netns, lambda: Path("/proc/thread-self/net/unix").read_text())
        return [line.split()[-1] for line in text.splitlines() if "@shardbox" in line]

    def request(
        self, method: str, path: str, body: Any = None, *, port: int = 8080, timeout_s: float = PATIENCE_S
    ) -> tuple[Connection, http.client.HTTPResponse]:
        """Ask the endpoint on this host's loopback."""
        connection = Connection(self.netns, "127.0.0.1", port, timeout_s)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def http(self, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        """The whole answer of this host's endpoint."""
        connection, reply = self.request(method, path, body, **more)
        with contextlib.closing(connection):
            return Answer(reply.status, dict(reply.headers), reply.read())

    def stream(self, path: str, body: dict[str, Any], **more: Any) -> Stream:
        """An answer of this host's endpoint as it comes."""
        return Stream(*self.request("POST", path, {**body, "stream": True}, **more))

    # --- status, as any user of this host may read it ---

    @property
    def cluster(self) -> str:
        """The cluster's name in the TOML."""
        found = re.search(r'^name = "(.*)"', self.config.read_text(), re.MULTILINE)
        assert found
        return found[1]

    def snapshot(self) -> Snapshot | None:
        """What the node serves on its status socket, None while it does not."""
        sock = in_namespace(self.netns, functools.partial(socket.socket, socket.AF_UNIX, socket.SOCK_STREAM))
        with sock:
            sock.settimeout(10)
            try:
                sock.connect(status_address(self.cluster, self.name))
                data = b"".join(iter(lambda: sock.recv(1 << 16), b""))
                return from_json(Snapshot, json.loads(data), "status")
            except (OSError, ValueError):  # not up yet, or just ending
                return None

    def wait_status(
        self, predicate: Callable[[Snapshot], object], what: str, patience_s: float = PATIENCE_S
    ) -> Snapshot:
        """The first snapshot that fulfils a condition; a failure shows the last one and the node's log."""
        last: list[Snapshot] = []

        def ask() -> Snapshot | None:
            found = self.snapshot()
            if found:
                last[:] = [found]
            return found if found and predicate(found) else None

        try:
            found = eventually(ask, what, patience_s)
        except AssertionError as error:
            line = status_line(last[0])[1] if last else "no status at all"
            log = self.output(self.up_process)[-3000:] if self.up_process else ""
            raise AssertionError(f"{error}\n{self.name}: {line}\n{log}") from None
        assert found
        return found


class Lan:
    """Hosts on one switch; a context manager that leaves nothing behind."""

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self._stem = f"sbt{os.getpid()}n{next(_numbers)}"
        self._switch = f"{self._stem}-switch"
        self._subnet = f"10.{random.randrange(1, 255)}.{random.randrange(256)}"
        # not pytest's folder, which other users cannot enter: `status` has to work for them
        self.folder = Path(tempfile.mkdtemp(prefix="shardbox-lan-"))

    def __enter__(self) -> Lan:
        self.folder.chmod(0o755)
        try:
            tool("ip", "netns", "add", self._switch)
            inside = ("ip", "-n", self._switch, "link")
            tool(*inside, "add", "lan", "type", "bridge", "stp_state", "0", "forward_delay", "0", "mcast_snooping", "0")
            tool(*inside, "set", "lan", "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str, config: Path) -> Host:
        """One more host, with the next address."""
        number = len(self.hosts) + 1
        netns, address = f"{self._stem}-{name}", f"{self._subnet}.{10 + number}"
        folder = self.folder / name
        folder.mkdir(mode=0o700)
        host = self.hosts[name] = Host(name=name, netns=netns, address=address, folder=folder, config=config)
        etc = Path("/etc/netns") / netns
        etc.mkdir(parents=True)
        (etc / "machine-id").write_text(f"{random.getrandbits(128):032x}\n")
        tool("ip", "netns", "add", netns)
        port = f"port{number}"
        tool(*("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", netns))
        tool("ip", "-n", self._switch, "link", "set", port, "master", "lan", "up")
        tool("ip", "-n", netns, "link", "set", "lo", "up")
        tool("ip", "-n", netns, "link", "set", "eth0", "up")
        self.set_address(host, address)
        return host

    def set_address(self, host: Host, address: str) -> None:
        """Give a host this address alone, as a new DHCP lease would."""
        tool("ip", "-n", host.netns, "-4", "addr", "flush", "dev", "eth0")
        tool("ip", "-n", host.netns, "addr", "add", f"{address}/24", "dev", "eth0")
        tool("ip", "-n", host.netns, "route", "add", "default", "dev", "eth0")  # without a route, no multicast
        host.address = address

    def _port(self, name: str) -> str:
        """Where the host's cable ends at the switch."""
        return f"port{list(self.hosts).index(name) + 1}"

    def _set_port(self, name: str, *what: str) -> None:
        tool("ip", "-n", self._switch, "link", "set", self._port(name), *what)

    def block_multicast(self, blocked: bool = True) -> None:
        """The switch floods no multicast, as many WLANs and managed switches do."""
        for name in self.hosts:
            self._set_port(name, "type", "bridge_slave", "mcast_flood", "off" if blocked else "on")

    def separate(self, *names: str, apart: bool = True) -> None:
        """Hosts that reach every other one, but not each other; `apart` False undoes it."""
        for name in names:
            self._set_port(name, "type", "bridge_slave", "isolated", "on" if apart else "off")

    def link(self, name: str, up: bool) -> None:
        """Take the power of a host's port at the switch, or give it back: both ends see no carrier."""
        self._set_port(name, "up" if up else "down")

    @contextlib.contextmanager
    def cable(
        self, host: Host, *, delay_s: float = 0.0, loss: float = 0.0, hears: bool = True, heard: bool = True
    ) -> Iterator[None]:
        """As long as the block lasts, a program carries the host's frames: each `delay_s` late and, of a hundred,
        `loss` times a hundred not at all; and none to a host that does not hear, or from one that is not heard.
        The carrier stays. (Kernels have netem for it, but not every one.)"""
        # what comes out of a real cable is whole: the program must not meet packets that hardware would finish
        in_namespace(host.netns, functools.partial(set_offload, "eth0", False))
        tap, port = in_namespace(self._switch, lambda: (open_tap("cable"), open_port(self._port(host.name))))
        tool("ip", "-n", self._switch, "link", "set", "cable", "master", "lan", "up")
        self._set_port(host.name, "nomaster")
        end, ended = os.pipe()
        wire = functools.partial(carry, tap, port, end, delay_s=delay_s, loss=loss, hears=hears, heard=heard)
        thread = threading.Thread(target=wire, name=f"cable of {host.name}")
        thread.start()
        try:
            yield
        finally:
            os.close(ended)
            thread.join()
            for fd in (end, tap, port):
                os.close(fd)
            self._set_port(host.name, "master", "lan", "up")

    def free_address(self) -> str:
        """An address that no host has."""
        return f"{self._subnet}.{random.randrange(100, 250)}"

    def write(self, name: str, text: str, mode: int = 0o644) -> Path:
        """A file that all hosts read."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(mode)
        return path

    def up(self, *names: str) -> list[Host]:
        """Start nodes at the same time."""
        for name in names:
            self.hosts[name].up()
        return [self.hosts[name] for name in names]

    def close(self) -> None:
        """End every process of the hosts and remove every trace of them. Idempotent."""
        for host in self.hosts.values():
            with contextlib.suppress(AssertionError):  # the namespace itself could not be made
                host.kill_all()
        for netns in (self._switch, *(host.netns for host in self.hosts.values())):
            subprocess.run(["ip", "netns", "del", netns], capture_output=True, timeout=30, check=False)
            shutil.rmtree(Path("/etc/netns") / netns, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rmdir("/etc/netns")  # only where it was ours alone
        shutil.rmtree(self.folder, ignore_errors=True)


def agree(lan: Lan, but: str = "") -> str:
    """Wait until every member says that all ranks serve, under one generation that is not `but`; which one."""
    hosts = [lan.hosts[name] for name in MEMBERS]

    def ask() -> str:
        found = {model(host.wait_status(serves(3), "a ring of 3")).generation for host in hosts}
        return found.pop() if len(found) == 1 and found != {but} else ""

    return eventually(ask, "the same ring on all three")


@contextlib.contextmanager
def a_lan(config: str, names: Sequence[str], *, secret: str = SECRET) -> Iterator[Lan]:
    """Hosts of one cluster: all read the same TOML, named `shardbox.toml`, and the secret file beside it."""
    with Lan() as lan:
        lan.write("cluster.secret", secret, 0o600)
        path = lan.write("shardbox.toml", config)
        for name in names:
            lan.add(name, path)
        yield lan


@pytest.fixture(scope="module")
def hosts() -> Callable[..., contextlib.AbstractContextManager[Lan]]:
    """Makes LANs: `with hosts(toml, ("alpha", "beta")) as lan`. Skips where namespaces cannot be had."""
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)
    return a_lan
