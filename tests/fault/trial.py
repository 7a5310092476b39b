"""One fault, tried on a ring of three that has clients: what is seen, what is mended, what the clients meet."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import engine
from engine import Orders
from hosts import CHAT, CRITICAL, MEMBERS, Host, Lan, a_lan, chat, eventually, model, nodes_of, parse_event, serves
from models import llama_metadata, write_gguf

from shardbox import Snapshot, status_line

MODEL = "tiny.gguf"
TOKENS = 12
STALL_MIN_S, STALL_MAX_S, HOLD_S = 5.0, 8.0, 30.0
BOUND_S = HOLD_S + STALL_MAX_S + 7.0  # a request without an end for so long hangs: README, and a look at silent ranks
PATIENCE_S = 60.0
SEEN_S = STALL_MAX_S + 12.0  # until status has to show a fault
WATCH_S = 0.05
STEADY_ANSWERS = 2  # of each client, when a fault is not to be noticed


def toml(**engine_keys: str) -> str:
    """The cluster's file: real engines by kind, so that binaries, model bytes and isolation are all checked, and
    windows by hand, so that it takes all three."""
    lines = ["[cluster]", 'name = "attic"', 'secret_file = "cluster.secret"', "form_wait_s = 20"]
    lines += ["[api]", f"hold_s = {HOLD_S:g}"]
    lines += ["[engine]", 'kind = "prima"', 'path = "bin"', "threads = 1"]
    lines += [f"stall_min_s = {STALL_MIN_S:g}", f"stall_max_s = {STALL_MAX_S:g}"]
    lines += [f'{key} = "{value}"' for key, value in engine_keys.items()]
    lines += [line for name in MEMBERS for line in ("[[nodes]]", f'name = "{name}"')]
    lines += ["[[models]]", 'name = "tiny"', f'path = "{MODEL}"', "context = 512", "slots = 2"]
    lines += ['leader = "alpha"', "layers = {alpha = 10, beta = 10, gamma = 10}", ""]
    return "\n".join(lines)


def model_file() -> bytes:
    """A small model, which has to be read and compared like any other."""
    layer = [("attn_q.weight", (64, 2048), "F16"), ("attn_norm.weight", (64,), "F32")]
    layers = [(f"blk.{n}.{name}", dims, kind) for n in range(engine.LAYERS) for name, dims, kind in layer]
    ends = [("token_embd.weight", (64, 4096), "F16"), ("output_norm.weight", (64,), "F32")]
    tensors = [ends[0], *layers, ends[1], ("output.weight", (64, 4096), "F16")]
    return write_gguf(llama_metadata(layers=engine.LAYERS), tensors)


# --- clients -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one request ended. `kind`: answered | error | refused (nobody listens) | cut | short | hung; the last three
    are silent losses, but for what was cut by its own node's death."""

    node: str
    begun: float
    ended: float
    kind: str
    says: str = ""


class Clients:
    """One client a node, that asks again and again, in turns for a stream and for a whole answer."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.outcomes: list[Outcome] = []  # appended to by every client
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(host,), name=f"client on {host.name}") for host in hosts
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def answered(self, since: float, node: str = "") -> list[Outcome]:
        """Requests that began after a moment and were answered, by one node or any."""
        return [o for o in list(self.outcomes) if o.kind == "answered" and o.begun >= since and node in ("", o.node)]

    def _run(self, host: Host) -> None:
        for number in itertools.count():
            begun = time.monotonic()
            kind, says = ask(host, streamed=number % 2 == 0)
            self.outcomes.append(Outcome(node=host.name, begun=begun, ended=time.monotonic(), kind=kind, says=says))
            if self._stop.wait(0.05 if kind == "answered" else 0.3):
                return


def ask(host: Host, *, streamed: bool) -> tuple[str, str]:
    """One request; its kind of outcome and the words of an error."""
    try:
        connection, reply = host.request("POST", CHAT, chat(max_tokens=TOKENS, stream=streamed), timeout_s=BOUND_S)
        with contextlib.closing(connection):
            if reply.status != 200:
                return refusal(reply.status, reply.read())
            if streamed:
                return read_stream(reply)
            choice = json.loads(reply.read())["choices"][0]
            whole = choice["finish_reason"] == "length" and len(choice["message"]["content"].split()) == TOKENS
            return ("answered", "") if whole else ("short", str(choice))
    except ConnectionRefusedError:
        return "refused", ""
    except TimeoutError:
        return "hung", f"nothing for {BOUND_S:g} s"
    except (OSError, http.client.HTTPException) as error:
        return "cut", repr(error)


def refusal(status: int, body: bytes) -> tuple[str, str]:
    """An error in OpenAI's shape counts as one, anything else as no answer at all."""
    try:
        return "error", f"{status} {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return "short", f"{status} {body[:300]!r}"


def read_stream(reply: http.client.HTTPResponse) -> tuple[str, str]:
    """Read a streamed answer to its end."""
    words, finish = "", None
    for line in reply:
        if not line.startswith(b"data:"):
            continue
        event = parse_event(line)
        if event == "[DONE]":
            whole = finish == "length" and len(words.split()) == TOKENS
            return ("answered", "") if whole else ("short", words)
        if "error" in event:
            return "error", f"{event['error']['code']}: {event['error']['message']}"
        for choice in event["choices"]:
            words += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
    return "cut", f"no [DONE] after {words!r}"


# --- what status says ---------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What was seen since a moment, by any node."""

    since: float
    generation: str
    trouble: str  # of before
    out_at: float = 0.0  # the model no longer answers, by its status
    named_at: float = 0.0  # and the cause is named
    words: str = ""
    critical_at: float = 0.0
    back_at: float = 0.0  # it serves again


class Watch:
    """Reads every node's status all the time, in a thread of its own."""

    def __init__(self, hosts: Sequence[Host], says: str) -> None:
        views = [model(found) for host in hosts if (found := host.snapshot())]
        generation, trouble = (
            next(filter(None, values), "")
            for values in ([view.generation for view in views], [view.last_trouble for view in views])
        )
        self.seen = Seen(since=time.monotonic(), generation=generation, trouble=trouble)
        self._hosts, self._says, self._stop = hosts, re.compile(says), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(WATCH_S):
            for host in self._hosts:
                found = host.snapshot() if host.up_process and host.up_process.poll() is None else None
                if found:
                    self._note(found)

    def _note(self, found: Snapshot) -> None:
        now, seen, view = time.monotonic(), self.seen, model(found)
        code, _ = status_line(found)
        changed = view.generation not in ("", seen.generation)
        if changed or view.phase != "serving":
            seen.out_at = seen.out_at or now
            if code == CRITICAL:
                seen.critical_at = seen.critical_at or now
            said = [
                view.reason,
                *([view.last_trouble] if view.last_trouble != seen.trouble else []),
                *(f"{p.name} {p.state} {p.detail}" for p in found.peers if p.state == "lost"),
            ]
            words = next((text for text in said if self._says.search(text)), "")
            if words and not seen.named_at:
                seen.named_at, seen.words = now, words
        if seen.out_at and changed and view.phase == "serving":
            seen.back_at = seen.back_at or now


# --- the cluster ----------------------------------------------------------------------------------------------


class Cluster:
    """Three boxes, each with its own folder: TOML, secret, binaries, model."""

    def __init__(self, lan: Lan) -> None:
        self.lan = lan
        self.hosts = [lan.hosts[name] for name in MEMBERS]

    def host(self, name: str) -> Host:
        """One of them."""
        return self.lan.hosts[name]

    def configure(self, text: str) -> None:
        """Another TOML everywhere; for nodes that are down."""
        for host in self.lan.hosts.values():
            host.config.write_text(text)

    def settle(self) -> None:
        """All up, well-behaved, and the model stopped: nothing of an earlier trial counts."""
        for host in self.hosts:
            engine.order(host.folder / "bin", None)
            if host.up_process is None or host.up_process.poll() is not None:
                host.up()
        for host in self.hosts:
            host.wait_status(
                lambda found: sum(p.state in ("self", "live") for p in found.peers) >= 3, "three are there"
            )
        done = self.hosts[0].run("stop", "tiny")
        assert done.returncode == 0, done.stderr
        for host in self.hosts:
            host.wait_status(lambda found: model(found).phase == "stopped", "the model is stopped")

    def start(self) -> None:
        """Let the operator start the model."""
        done = self.hosts[0].run("start", "tiny")
        assert done.returncode == 0, done.stderr

    def serving(self, world: int = 3, but: str = "") -> Snapshot:
        """Wait until the nodes that are up agree on a ring; what it looks like."""
        up = [host for host in self.hosts if host.up_process and host.up_process.poll() is None]

        def agreed() -> Snapshot | None:
            found = [snapshot for host in up if (snapshot := host.snapshot())]
            good = len(found) == len(up) > 0 and all(map(serves(world), found))
            same = {model(snapshot).generation for snapshot in found}
            return found[0] if good and len(same) == 1 and same != {but} else None

        try:
            found = eventually(agreed, f"a ring of {world} on all", PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}") from None
        assert found
        return found

    def told(self) -> str:
        """What every node says now, and the end of its log."""
        text = ""
        for host in self.hosts:
            found, process = host.snapshot(), host.up_process
            text += f"{host.name}: {status_line(found)[1] if found else 'no status'}\n"
            text += "".join(f"    {line}\n" for line in host.output(process).splitlines()[-25:]) if process else ""
        return text

    def leftovers(self) -> list[str]:
        """What should not be there while all nodes run and serve: engines, keepers, ports, sockets too many."""
        found = []
        for host in self.hosts:
            words = list(host.pids().values())
            engines = sum("/llama-" in text for text in words)
            found += [f"{host.name}: {engines} engines"] if engines > 1 else []
            found += [f"{host.name}: {len(words)} processes: {words}"] if len(words) > 4 else []
            usual, opened = {"0.0.0.0:7311", "127.0.0.1:8080"}, 'isolate = "never"' in host.config.read_text()
            found += [] if opened else [f"{host.name}: listens on {port}" for port in host.listening() - usual]
            found += (
                [f"{host.name}: {len(host.abstract_sockets())} sockets"] if len(host.abstract_sockets()) > 1 else []
            )
        return found

    def close(self) -> list[str]:
        """`down` everywhere; what it leaves."""
        self.hosts[0].run("down", "--all")
        for host in self.hosts:
            if host.up_process and host.up_process.poll() is None:
                host.run("down")
        return [left for host in self.hosts for left in gone(host, socket_file=True)]


def gone(host: Host, *, socket_file: bool = False) -> list[str]:
    """What is left of a node that has ended, after a moment: processes, ports, sockets."""

    def left() -> list[str]:
        found = [*host.pids().values(), *host.listening(), *host.abstract_sockets()]
        return [*found, *map(str, host.folder.rglob("control.sock"))] if socket_file else found

    with contextlib.suppress(AssertionError):
        eventually(lambda: not left(), "nothing is left", 10)
    return [f"{host.name}: {thing}" for thing in left()]


@contextlib.contextmanager
def a_cluster() -> Iterator[Cluster]:
    """Three boxes that are not up yet, and a fourth that is none of them."""
    with a_lan(toml(), (*MEMBERS, "delta")) as lan:
        data = model_file()
        for host in lan.hosts.values():
            engine.install(host.folder / "bin")
            (host.folder / MODEL).write_bytes(data)
            for file in ("shardbox.toml", "cluster.secret"):
                (host.folder / file).write_bytes((lan.folder / file).read_bytes())
                (host.folder / file).chmod(0o600)
            host.config = host.folder / "shardbox.toml"
        yield Cluster(lan)


# --- a trial ------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Row:
    """What came of one trial, or of several of one fault."""

    fault: str
    seen_after_s: float | None = None
    served_after_s: float | None = None  # since the fault, or where its cause has to be taken away, since that
    held: int = 0
    errors: int = 0
    silent: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    mended: bool = False
    critical: bool = False
    says: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, how it comes about, and what has to be seen of it."""

    name: str
    act: Callable[[Trial], None]
    says: str = ""  # a pattern of the cause that status has to name; "": nobody may notice the fault
    before: Callable[[Trial], None] | None = None  # to be arranged while the model is stopped
    mend: Callable[[Trial], None] | None = None  # takes the cause away, where shardbox can only wait for that
    starting: bool = False  # it strikes while the ring forms: `act` comes before the start
    quick: bool = False  # also in `make test`


class Trial:
    """The state of one trial, for those who bring a fault about."""

    def __init__(self, cluster: Cluster, fault: Fault) -> None:
        self.cluster, self.fault, self.lan = cluster, fault, cluster.lan
        self.row = Row(fault=fault.name)
        self.undo = contextlib.ExitStack()  # for the end of the trial
        self.cause = contextlib.ExitStack()  # what `mend` may take away
        self.dead: set[str] = set()  # nodes whose own clients lose their connections
        self.nodes: list[str] = list(MEMBERS)  # of the ring, the leader first
        self.pids: dict[str, int] = {}

    @property
    def leader(self) -> Host:
        """Rank 0's box."""
        return self.cluster.host(self.nodes[0])

    @property
    def worker(self) -> Host:
        """Rank 1's box."""
        return self.cluster.host(self.nodes[1])

    @property
    def last(self) -> Host:
        """The last rank's box."""
        return self.cluster.host(self.nodes[-1])

    def order(self, host: Host, at: str, do: str, value: float = 0, **more: object) -> None:
        """Tell the engine of a box to misbehave."""
        role = "server" if host is self.leader else "cli"
        orders = Orders(role=role, at=at, do=do, value=value, **more)  # type: ignore[arg-type]
        engine.order(host.folder / "bin", orders)
        self.undo.callback(engine.order, host.folder / "bin", None)

    def gone(self, host: Host, *, socket_file: bool = False) -> None:
        """A node has ended: nothing may be left."""
        self.row.leftovers += gone(host, socket_file=socket_file)

    def down(self, host: Host) -> None:
        """End a node in order."""
        done = host.run("down")
        assert done.returncode == 0, done.stderr
        assert host.up_process and host.up_process.wait(PATIENCE_S) == 0

    def run(self) -> Row:
        """Try it on a cluster that starts afresh, with clients of its own."""
        cluster, fault = self.cluster, self.fault
        with self.undo, self.cause, contextlib.ExitStack() as stack:
            cluster.settle()
            if fault.before:
                fault.before(self)
            if fault.starting:
                watch = stack.enter_context(Watch(cluster.hosts, fault.says or "^$"))
                fault.act(self)
                cluster.start()
                clients = stack.enter_context(Clients(cluster.hosts))
                self._observe(clients, watch.seen)
            else:
                cluster.start()
                cluster.serving()
                clients = stack.enter_context(Clients(cluster.hosts))
                self._await_answers(clients, time.monotonic())
                watch = self.strike(clients)
            stack.close()
            self._judge(clients.outcomes, watch.seen)
        return self.row

    def strike(self, clients: Clients) -> Watch:
        """Bring the fault about where a ring serves, and wait for all that has to come of it."""
        found = self.cluster.serving()
        self.nodes = nodes_of(found)
        self.pids = {rank.node: rank.pid for rank in model(found).ranks}
        with Watch(self.cluster.hosts, self._says() or "^$") as watch:
            self.fault.act(self)
            self._observe(clients, watch.seen)
        return watch

    def _says(self) -> str:
        """The fault's pattern with the nodes as this ring has them: measured links may have put them in another order,
        which a fault whose box was arranged before does not follow."""
        says = self.fault.says
        ranks = dict(zip(MEMBERS, self.nodes, strict=True))
        return says if self.fault.before else re.sub("|".join(MEMBERS), lambda found: ranks[found[0]], says)

    def _await_answers(self, clients: Clients, since: float, count: int = 1) -> None:
        for host in self.cluster.hosts:
            if host.up_process and host.up_process.poll() is None:
                name = host.name
                eventually(
                    partial(lambda n: len(clients.answered(since, n)) >= count, name),
                    f"{count} answers on {name}",
                    PATIENCE_S,
                )

    def _observe(self, clients: Clients, seen: Seen) -> None:
        """Wait for all that has to come of the fault."""
        fault, row = self.fault, self.row
        if not fault.says:
            self._await_answers(clients, seen.since, STEADY_ANSWERS)
            if fault.mend:
                fault.mend(self)
            row.mended, row.served_after_s = True, 0.0
            trouble = [model(found).last_trouble for host in self.cluster.hosts if (found := host.snapshot())]
            assert fault.starting or not seen.out_at, f"it was noticed\n{self.cluster.told()}"
            assert not {*trouble} - {"", seen.trouble}, trouble
            return
        eventually(lambda: seen.named_at, f"status says {fault.says!r}", SEEN_S)
        row.seen_after_s, row.says = seen.named_at - seen.since, seen.words
        since = seen.since
        if fault.mend:
            since = time.monotonic()
            fault.mend(self)
        eventually(lambda: seen.back_at, "it serves again", PATIENCE_S)
        self.cluster.serving(but=seen.generation)
        self._await_answers(clients, seen.back_at)
        first = min(o.ended for o in clients.answered(0.0) if o.ended >= seen.back_at)
        row.mended, row.served_after_s = True, first - since

    def _judge(self, outcomes: Sequence[Outcome], seen: Seen) -> None:
        row = self.row
        row.critical = seen.critical_at > 0
        ended = [o for o in outcomes if o.ended >= seen.since]
        out = seen.out_at and (seen.back_at or float("inf"))
        row.held = sum(o.kind == "answered" and o.begun < out <= o.ended for o in ended) if out else 0
        row.errors = sum(o.kind == "error" or (o.kind == "cut" and o.node in self.dead) for o in ended)
        lost = ("short", "hung", "cut")
        row.silent += [
            f"{o.node}: {o.kind} {o.says}"
            for o in ended
            if o.kind in lost and not (o.kind == "cut" and o.node in self.dead)
        ]
        row.leftovers += self.cluster.leftovers()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process that may have gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
