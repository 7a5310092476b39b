#!/usr/bin/env python3
"""shardbox: one language model on several ordinary machines, as a ring of Prima.cpp engines.

Data flows one way:

    shardbox.toml -> Config -> NodeFacts (what each node has) -> ModelPlan (pure) -> RankWiring (ports, argv)
        -> step(ring, event, now) -> effects -> RankHost and Mesh act -> Snapshot -> status text or JSON

Sections, top to bottom; none uses a later one:

     1 errors            a failure that a person can mend: what, where, hint
     2 units, messages   bytes and durations for people; dataclasses as JSON between nodes
     3 configuration     TOML text -> Config, with every mistake at once
     4 inventory, GGUF   what each node has, and what a model file's header says
     5 plan              which node holds which layers, why, and how fast
     6 wiring            ports, argv and environment of one rank
     7 lifecycle         one ring as a state machine; leases; what `status` is told; diagnosis of an engine's end
    --- I/O starts here ---
     8 probes            memory, GPUs, binaries, model files, network addresses of this box
     9 survey            all of them as this node's facts, kept up to date; its folders, ports and sockets
    10 discovery         mDNS adverts: hints, never trusted
    11 mesh              mutual TLS 1.3 from the cluster secret, then sealed frames; the forwarder's wires
    12 files             models and engines from other boxes, chunk by chunk; the stick
    13 engine            spawner, closed network namespace, capped logs
    14 rehearsal         an engine without a model, which speaks as Prima does
    15 peers             which nodes are there, which of them live, and the ways to them
    16 ranks             this node's engines, from a lease to the last log line
    17 rings             those that this node leads, and when it forms one
    18 node              one `shardbox up`, which holds all of this together
    19 endpoint          the OpenAI API on every node
    20 control           the owner's socket, the peers' service, the status socket
    21 status            Snapshot -> exit code, one line for a pager, tables (pure)
    22 running           configuration, names and secrets; `up`, its end, and asking this box's node
    23 commands          what a person types; each returns its exit code
    24 program           what it was built from, its demo, click's options; only main() ends it
"""

from __future__ import annotations

import sys

VERSION = "0.1.0"
if __name__ == "__main__" and sys.argv[1:] == ["version"]:  # at once: the rest takes five times as long
    sys.exit(print(f"shardbox {VERSION}"))

import collections
import contextlib
import dataclasses
import errno
import fcntl
import functools
import gc
import hashlib
import importlib
import itertools
import json
import logging
import math
import mmap
import os
import re
import select
import signal
import socket
import stat
import struct
import threading
import time
import types
import typing
import urllib.parse
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BufferedReader
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeAlias, TypeVar

if TYPE_CHECKING:
    import asyncio
    import base64
    import ctypes
    import difflib
    import fnmatch
    import hmac
    import ipaddress
    import platform
    import random
    import secrets
    import ssl
    import subprocess
    import tempfile
    import uuid

    import aiohttp
    from aiohttp import web
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.x509 import Certificate
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf


class LazyModule:
    """A module that is imported at its first use: cron asks for `status` every minute, and all of them take 0.3 s."""

    def __init__(self, name: str) -> None:
        self._name = name

    def load(self) -> Any:
        """The module itself, which takes this one's place."""
        module = importlib.import_module(self._name)
        globals()[self._name.rpartition(".")[2]] = module
        return module

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.load(), attribute)


if not TYPE_CHECKING:
    web = LazyModule("aiohttp.web")
    for _name in ("aiohttp", "asyncio", "base64", "ctypes", "difflib", "fnmatch", "hmac", "ipaddress", "platform",
                  "random", "secrets", "ssl", "subprocess", "tempfile", "uuid"):  # fmt: skip
        globals()[_name] = LazyModule(_name)


def load_all(*but: str) -> None:
    """Import now what waits: whoever runs for weeks does not depend on unpacked files, which may vanish."""
    kept = {name: os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
    # aiohttp's import reads all CAs of the system, which nothing here uses: 50 ms, 2 MB
    os.environ.update(dict.fromkeys(kept, os.devnull))
    for name, value in list(globals().items()):
        if isinstance(value, LazyModule) and name not in but:
            value.load()
    for name, before in kept.items():
        os.environ.pop(name) if before is None else os.environ.update({name: before})


PROTOCOL = 3  # of control messages and services between nodes; another number is named, never guessed at
log = logging.getLogger("shardbox")


# ======================================================================================================
# 1. Errors: one type for each failure that a person can mend. Bugs stay ordinary exceptions.
# ======================================================================================================


class ShardboxError(Exception):
    """A failure that a person can mend: what went wrong, where, and what to do about it."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\nhint: {self.hint}" if self.hint else head


class UsageError(ShardboxError):
    """The command line, or the state it meets, does not allow this command."""

    exit_code = 2


class ConfigError(ShardboxError):
    """One or more mistakes in a configuration file; `problems` holds every one of them."""

    exit_code = 2

    def __init__(self, problems: Sequence[ShardboxError]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class MessageError(ShardboxError):
    """A file or a peer's message does not have the shape that was agreed on."""


class GgufError(ShardboxError):
    """A model file is not a GGUF file that can be read, or is not whole."""


class PlanError(ShardboxError):
    """The model cannot be placed on the nodes that are there."""


class StallError(ShardboxError):
    """A ring that is asked shows no sign of life."""


class MeshError(ShardboxError):
    """A mesh connection could not be made; `kind` says why in one word.

    Kinds: unreachable, wrong_secret, wrong_name, refused, old_generation, protocol, encryption
    (on here, off there), wrong_key (not the one pinned for that name), busy, twin (another box has that name).
    """

    def __init__(self, what: str, *, kind: str = "unreachable", where: str = "", hint: str = "") -> None:
        super().__init__(what, where=where, hint=hint)
        self.kind = kind


class FileError(ShardboxError):
    """A model's or an engine's file could not be fetched, or cannot be put where it belongs."""


class EngineError(ShardboxError):
    """An engine could not be started, or ended in a way that is explained."""


# ======================================================================================================
# 2. Units and messages: bytes and durations for people, and dataclasses as JSON between nodes.
# ======================================================================================================

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_SIZE_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", 1):
    _SIZE_UNITS |= {f"{_prefix}b": 1000**_power, f"{_prefix}ib": 1024**_power}

T = TypeVar("T")


def parse_size(text: str) -> int:
    """Bytes of a size such as "20GiB", "1.5 GB" or "4096". Raises ValueError with the accepted forms."""
    found = re.fullmatch(r"(\d(?:.*\d)?)\s*(\D*)", text.strip())
    with contextlib.suppress(ValueError, KeyError):
        if found and (number := float(found[1])) < 1e18:
            return int(number * _SIZE_UNITS[found[2].lower()])
    raise ValueError('a size such as "20GiB", "512MiB" or "1.5GB"')


def format_size(count: int) -> str:
    """A number of bytes in binary units, three digits: 98362432 -> "93.8 MiB"."""
    value, sign = float(abs(count)), "-" if count < 0 else ""
    unit, *larger = ("B", "KiB", "MiB", "GiB", "TiB")
    while value >= 1024 and larger:
        value, unit = value / 1024, larger.pop(0)
    return f"{sign}{value:.0f} {unit}" if unit == "B" or value >= 999.5 else f"{sign}{value:.3g} {unit}"


def format_duration(seconds: float) -> str:
    """A duration for people: 0.25 -> "0.2 s", 75 -> "1 min 15 s", 7300 -> "2 h 1 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"


def to_json(value: Any) -> Any:
    """Dataclasses, tuples and mappings as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], data: Any, where: str = "message") -> T:
    """The dataclass `kind` from plain JSON values; unknown keys are ignored, so that nodes of two versions
    can talk. Raises MessageError naming the first field that does not fit."""
    return typing.cast(T, _decode(kind, data, where))


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    optional = origin in (typing.Union, types.UnionType)
    if kind is Any or (optional and data is None):
        return data
    if optional:
        return _decode(next(arg for arg in args if arg is not type(None)), data, where)
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    if origin is tuple and isinstance(data, list):
        return tuple(_decode(args[0], item, f"{where}[{n}]") for n, item in enumerate(data))
    if origin in (dict, Mapping) and isinstance(data, dict):
        return {str(key): _decode(args[1], item, f"{where}.{key}") for key, item in data.items()}
    if kind is float and type(data) in (int, float) and abs(data) < 1e300:  # no NaN, and nothing float() cannot hold
        return float(data)
    if kind in (str, int, bool) and type(data) is kind:
        return data
    raise MessageError(f"expected {getattr(kind, '__name__', kind)}, got {type(data).__name__}", where=where)


def _decode_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise MessageError(f"expected an object, got {type(data).__name__}", where=where)
    values = {}
    for name, hint, required in _fields(kind):
        if name in data:
            values[name] = _decode(hint, data[name], f"{where}.{name}")
        elif required:
            raise MessageError("missing", where=f"{where}.{name}")
    return kind(**values)


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """(name, type, whether it has no default) of a dataclass's fields; to find the types takes a compiler's run."""
    hints = typing.get_type_hints(kind)
    return tuple((field.name, hints[field.name], _required(field)) for field in dataclasses.fields(kind))


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def digest(value: Any) -> str:
    """A short content hash of a JSON-able value (16 hex digits of SHA-256 over its canonical form)."""
    text = json.dumps(to_json(value), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ======================================================================================================
# 3. Configuration: TOML text -> Config
# ======================================================================================================


MAX_CONFIG_BYTES = MIB
MAX_PROBLEMS = 50  # told of one file, the others are counted: the search for near words is slow
MAX_RANKS = 32  # Prima sends the layer windows as uint32[32] (bdf9d8e7, src/llama.cpp)
PORT_BLOCK = 64  # ports a model may use from each base: ranks 0-31, and 32 for the leader's HTTP
SECRET_CHARACTERS = 20

_Path = tuple[str | int, ...]  # such as ("nodes", 0, "ports", "data")

# --- where a key stands: tomli tells no positions, so the text that it has accepted is scanned for keys ---

_BARE = r"[A-Za-z0-9_-]+"
_STATEMENT = re.compile(rf"[ \t]*(\[\[?)?[ \t]*({_BARE}(?:[ \t]*\.[ \t]*{_BARE})*)[ \t]*[\]=]")
_QUOTED = re.compile(r'''"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?'{3,5}|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*''', re.DOTALL)


def _key_lines(text: str) -> dict[_Path, int]:
    """The line of each table, array element and key; quoted keys and those within brackets are left out."""
    lines: dict[_Path, int] = {}
    elements: Counter[_Path] = Counter()
    table: _Path = ()
    depth = 0
    plain = _QUOTED.sub(lambda found: "_" + "\n" * found[0].count("\n"), text)
    for number, line in enumerate(plain.split("\n"), 1):
        if depth == 0 and (found := _STATEMENT.match(line)):
            bracket, parts = found[1], re.findall(_BARE, found[2])
            path: _Path = () if bracket else table
            for n, part in enumerate(parts[:6], 1):  # nothing of ours is deeper
                path += (part,)
                lines.setdefault(path, number)
                elements[path] += bracket == "[[" and n == len(parts)
                if bracket and elements[path]:
                    path += (elements[path] - 1,)
                    lines.setdefault(path, number)
            table = path if bracket else table
        depth += line.count("[") + line.count("{") - line.count("]") - line.count("}")
    return lines


# --- what is wrong, and where ---

_KINDS = {str: "a string", bool: "true or false", int: "a number", float: "a number", dict: "a table", list: "a list"}
_PRIVATE = {"secret", "secret_file", "old_secret_file", "keys_file", "env", "args"}  # a secret may stand here


def _shown(value: Any, private: bool = False) -> str:
    """A value in a message, on one line. A string of several may be a quote too few, and then a secret."""
    if not private and isinstance(value, str) and value.isprintable():
        return repr(value[:55]) + "..." * (len(value) > 55)
    if not private and isinstance(value, (int, float)) and abs(value) < 10**18:
        return repr(value).lower()
    return _KINDS.get(type(value), "a date or time")


@dataclass(slots=True, kw_only=True, eq=False)
class _Report:
    """All that is wrong with one file."""

    file: str
    lines: Mapping[_Path, int]
    problems: list[tuple[int, ShardboxError]] = dataclasses.field(default_factory=list)  # with its line, or 0
    more: int = 0
    wrong: set[_Path] = dataclasses.field(default_factory=set)  # keys that no further check builds on
    around: set[_Path] = dataclasses.field(default_factory=set)  # the tables that they stand in


@dataclass(frozen=True, slots=True)
class _Place:
    """A key of the file, or an element of a list in it."""

    report: _Report
    path: _Path = ()

    def __str__(self) -> str:
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:60]}" for part in self.path)[1:]
        return text if text.isprintable() else repr(text)

    def at(self, *keys: str | int) -> _Place:
        return _Place(self.report, self.path + keys)

    def clean(self) -> bool:
        """Nothing is wrong here, further in, or with a table around: what the file says here can be built on."""
        starts = (self.path[:end] for end in range(len(self.path) + 1))
        return self.path not in self.report.around and self.report.wrong.isdisjoint(starts)

    def add(self, what: str, hint: str = "") -> None:
        """Notes a problem, at the line of the key or else of the table around it."""
        starts = [self.path[:end] for end in range(len(self.path), -1, -1)]
        self.report.wrong.add(self.path)
        self.report.around.update(starts[1:])
        if len(self.report.problems) == MAX_PROBLEMS:
            self.report.more += 1
            return
        line = next((self.report.lines[start] for start in starts if start in self.report.lines), 0)
        where = f"{self.report.file}:{line}" if line else self.report.file
        self.report.problems.append((line, ShardboxError(what, where=f"{where}: {self}", hint=hint)))

    def must(self, wanted: str, value: Any, hint: str = "") -> Any:
        """Notes that a value is not what is wanted. Returns None."""
        self.add(f"must be {wanted}, got {_shown(value, not _PRIVATE.isdisjoint(self.path))}", hint)

    def near(self, word: str, words: Iterable[str], otherwise: str = "") -> str:
        """A hint at the word that was meant, which then does not count as missing too."""
        few = itertools.islice(words, 0 if self.report.more else 200)
        for near in difflib.get_close_matches(word[:60].lower(), list(few), 1):
            self.report.wrong.add((*self.path, near))
            return f'did you mean "{near}"?'
        return otherwise


# --- readers: value and place -> what the dataclass holds; None for its default, or when a problem was noted ---

_Reader = Callable[[Any, _Place], Any]


def _number(low: int, high: int, hint: str = "", kind: type[int | float] = int) -> _Reader:
    def read(value: Any, place: _Place) -> Any:
        fits = type(value) in (int, kind)
        if fits and low <= value <= high:
            return kind(value)
        wanted = f"{low}-{high}" if fits else f"a {'whole ' if kind is int else ''}number {low}-{high}"
        return place.must(wanted, value, hint)

    return read


def _flag(value: Any, place: _Place) -> Any:
    return value if isinstance(value, bool) else place.must("true or false", value)


def _text(wanted: str, pattern: str, turned: Callable[[str], str] = str) -> _Reader:
    def read(value: Any, place: _Place) -> Any:
        fits = isinstance(value, str) and re.fullmatch(pattern, value)
        return turned(value) if fits else place.must(wanted, value)

    return read


def _size(value: Any, place: _Place, wanted: str = "a size") -> Any:
    with contextlib.suppress(ValueError):
        size = parse_size(value) if isinstance(value, str) and len(value) < 60 else value
        if type(size) is int and MIB <= size < 10**18:  # "20" is never meant as 20 bytes
            return size
    return place.must(f'{wanted} of 1 MiB or more such as "20GiB" or "1.5GB"', value)


def _cap(value: Any, place: _Place) -> Any:
    spared = type(value) is int and value == 0
    return None if value == "auto" else 0 if spared else _size(value, place, '"auto", 0 or a size')


def _interface(value: Any, place: _Place) -> Any:
    if isinstance(value, str) and re.fullmatch(r"(?![0-9.]+$)[A-Za-z0-9_.@-]{1,15}", value):
        return value
    with contextlib.suppress(ValueError):
        if isinstance(value, str) and "/" in value:
            return str(ipaddress.IPv4Network(value, strict=False))
    return place.must('an interface name or an IPv4 network such as "eth0" or "192.168.1.0/24"', value)


_OWN_FLAGS = re.compile(
    r"(--(?:world|rank|master|next|n-layer-window|data-port|signal-port|host|port|model|ctx-size|parallel|threads"
    r"|embeddings?)|-(?:lw|m|c|np|t))(?![^\s=])"
)


def _argument(value: Any, place: _Place) -> Any:
    """An engine argument that shardbox does not set. Of `--flag=value` only the flag is shown."""
    if found := isinstance(value, str) and _OWN_FLAGS.match(value.replace("_", "-")):  # as llama.cpp reads it
        return place.add(f"{found[1]} is set by shardbox itself", "from [ports], engine.threads and [[models]]")
    return _line(value, place)


def _list(item: _Reader, wanted: str = "a list", lone: bool = False) -> _Reader:
    def read(value: Any, place: _Place) -> Any:
        value = [value] if lone and isinstance(value, str) else value  # a lone one will do as well
        if not isinstance(value, list):
            return place.must(wanted, value)
        got = [item(entry, place.at(n)) for n, entry in enumerate(value)]
        return tuple(entry for entry in got if entry is not None)

    return read


def _map(name: _Reader, item: _Reader) -> _Reader:
    """A table whose keys the user chooses."""

    def read(value: Any, place: _Place) -> Any:
        if not isinstance(value, dict):
            return place.must("a table", value)
        pairs = [(name(key, place.at(key)), item(entry, place.at(key))) for key, entry in value.items()]
        if len(dict(pairs)) < len(pairs) and place.clean():
            place.add("a name is given twice; upper and lower case do not matter")
        return {key: entry for key, entry in pairs if key is not None and entry is not None}

    return read


@functools.cache
def _table(kind: Any, *only: str) -> _Reader:
    """A dict of the fields of a dataclass (of `only` these) that are right; those that it needs, the others are "".
    What reads a field stands in its annotation; a key does not say the unit of a size."""
    hints = typing.get_type_hints(kind, include_extras=True)
    readers = {field: hints[field].__metadata__[0] for field in only or hints if hasattr(hints[field], "__metadata__")}
    keys = {field.removesuffix("_bytes"): field for field in readers}
    needs = [field.name for field in dataclasses.fields(kind) if field.name in readers and _required(field)]

    def read(value: Any, place: _Place) -> dict[str, Any]:
        out: dict[str, Any] = dict.fromkeys(needs, "")
        if not isinstance(value, dict):
            return place.must("a table", value) or out
        for key, entry in value.items():
            if key not in keys:
                place.at(key).add("unknown key", place.near(key, keys, f"valid: {', '.join(keys)}"))
            elif (got := readers[keys[key]](entry, place.at(key))) is not None:
                out[keys[key]] = got
        for key, field in keys.items():
            if field in needs and key not in value and place.at(key).clean():
                place.at(key).add("missing")
        return out

    return read


def _made(kind: Any) -> _Reader:
    """The dataclass itself, from a table."""
    return lambda value, place: kind(**_table(kind)(value, place))


def _one_of(*words: str) -> _Reader:
    quoted = [f'"{word}"' for word in words]
    return _text(f"{', '.join(quoted[:-1])} or {quoted[-1]}", "|".join(words))


def _base(default: int) -> _Reader:
    return _number(1024, 65535 - PORT_BLOCK, f"Prima needs {PORT_BLOCK} ports from here; leave it out for {default}")


_seconds = functools.partial(_number, kind=float)
_LINE, _NAME = r"[^\x00-\x1f\x7f]", r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_NAME_WANTED = "1-63 letters, digits, '-', '_' or '.', a letter or digit first"
_line = _text("one line of text, at most 4096 characters", _LINE + "{0,4096}")
_path = _text("a path", _LINE + "{1,4096}")
_name = _text(_NAME_WANTED, _NAME, str.lower)
_model_name = _text(
    "1-128 letters, digits, '.', '-', '_', ':' or '/', a letter or digit first, without '..' or '//'",
    r"(?!.*(\.\.|//|/$))[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}",
)
_OCTET, _LABEL = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])", r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = rf"{_OCTET}(\.{_OCTET}){{3}}|(?=.{{1,253}}$)({_LABEL}\.)*(?![0-9]+$){_LABEL}"
_host = _text("an IPv4 address or a host name, without a port", _HOST)
_address = _text("an IPv4 address or a host name, without a port", f"({_HOST})?")
_secret = _text(
    f"{SECRET_CHARACTERS} characters or more; `shardbox secret` makes one",
    rf"(\S{_LINE}{{{SECRET_CHARACTERS - 2},4094}}\S)?",
)
_variable = _text("a variable's name", r"[^=\x00-\x1f\x7f]{1,255}")
_public_key = _text("the 43 characters that `shardbox nodes` shows", "([A-Za-z0-9_-]{43})?")
_sha256 = _text("64 hex digits, as sha256sum prints", "[0-9A-Fa-f]{64}", str.lower)
_leader = _text(_NAME_WANTED, f"({_NAME})?", str.lower)


# --- what the file may say: a field is a key, with what reads it and its default ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """[cluster]: who belongs together, and how they find each other."""

    name: Annotated[str, _name] = "shardbox"
    secret_file: Annotated[str, _line] = ""  # as written; whoever reads it starts from the TOML's folder
    secret: Annotated[str, _secret] = dataclasses.field(default="", repr=False)
    old_secret_file: Annotated[str, _line] = ""  # of the secret before this one, during a change
    discovery: Annotated[str, _one_of("mdns", "static")] = "mdns"
    encryption: Annotated[str, _one_of("on", "off")] = "on"
    interfaces: Annotated[tuple[str, ...], _list(_interface)] = ()
    form_wait_s: Annotated[float, _seconds(0, 86400)] = 30.0
    # without requests, before a clearly better plan takes the place of a ring; 0: never
    replan_s: Annotated[float, _seconds(0, 86400)] = 60.0
    copy_models: Annotated[bool, _flag] = True
    # bytes a second of a node; None: as fast as may be, slowly while an engine answers
    copy_limit: Annotated[int | None, _cap] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PortsConfig:
    """[ports]: TCP ports. `mesh` is the one that other boxes must reach."""

    mesh: Annotated[int, _number(1, 65535)] = 7311
    api: Annotated[int, _number(1, 65535)] = 8080
    data: Annotated[int, _base(9000)] = 9000
    signal: Annotated[int, _base(10000)] = 10000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """[api]: who may use the OpenAI endpoint."""

    bind: Annotated[str, _host] = "127.0.0.1"
    keys_file: Annotated[str, _line] = ""
    tls_cert: Annotated[str, _line] = ""  # PEM files, relative to the TOML's folder; "": plain HTTP
    tls_key: Annotated[str, _line] = ""
    hold_s: Annotated[float, _seconds(0, 3600)] = 60.0  # how long a request waits for a ring that forms again
    drain_s: Annotated[float, _seconds(0, 3600)] = 20.0  # how long a node that goes down lets answers in progress end

    @property
    def open(self) -> bool:
        """Whether anybody on the LAN may ask."""
        return self.bind not in ("127.0.0.1", "localhost") and not self.keys_file


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """[engine], or [nodes.engine] merged over it: where the binaries are and how they run."""

    kind: Annotated[str, _one_of("prima", "rehearsal")] = "prima"
    isolate: Annotated[str, _one_of("auto", "always", "never")] = "auto"
    share: Annotated[bool, _flag] = True
    # a ring that is asked, but shows no sign of life, hangs after a time between these two
    stall_min_s: Annotated[float, _seconds(5, 3600)] = 10.0
    stall_max_s: Annotated[float, _seconds(5, 3600)] = 30.0
    path: Annotated[tuple[str, ...], _list(_path, "a folder or a list of folders", lone=True)] = ("bin",)
    lib: Annotated[str, _line] = ""
    args: Annotated[tuple[str, ...], _list(_argument)] = ()
    env: Annotated[dict[str, str], _map(_variable, _line)] = dataclasses.field(default_factory=dict)
    threads: Annotated[int, _number(0, 1024)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One [[nodes]] entry, with the cluster-wide [engine] and [ports] merged in."""

    name: Annotated[str, _name]
    address: Annotated[str, _address] = ""  # "" means: found by mDNS
    key: Annotated[str, _public_key] = ""  # that it must have; "": any member may claim the name
    memory_bytes: Annotated[int | None, _cap] = None  # None: measured
    gpu_memory_bytes: Annotated[int | None, _cap] = None  # None: measured ("auto"); 0: leave the GPU alone
    model_dirs: Annotated[tuple[str, ...], _list(_path)] = ()
    ports: Annotated[PortsConfig, _table(PortsConfig)] = PortsConfig()
    engine: Annotated[EngineConfig, _table(EngineConfig, "path", "lib", "args", "env", "threads")] = EngineConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseConfig:
    """models.rehearse: what a model that is not there would look like, for the rehearsal engine only."""

    layers: Annotated[int, _number(1, 4096)]
    width: Annotated[int, _number(1, 1 << 20)]
    bytes: Annotated[int, _size]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One [[models]] entry."""

    name: Annotated[str, _model_name]
    path: Annotated[str, _path]
    aliases: Annotated[tuple[str, ...], _list(_model_name)] = ()
    sha256: Annotated[tuple[str, ...], _list(_sha256, lone=True)] = ()  # of each part; (): what the leader has counts
    context: Annotated[int, _number(64, 1 << 24)] = 4096
    slots: Annotated[int, _number(1, 64)] = 1
    max_output: Annotated[int, _number(0, 1 << 24)] = 0  # tokens; 0: no limit of ours
    nodes: Annotated[tuple[str, ...], _list(_name)] = ()  # which may hold it; (): every one
    leader: Annotated[str, _leader] = ""  # "": planned
    # node -> layer window; {}: planned
    layers: Annotated[dict[str, int], _map(_name, _number(1, 4096))] = dataclasses.field(default_factory=dict)
    autostart: Annotated[bool, _flag] = True
    embeddings: Annotated[bool, _flag] = False
    overcommit: Annotated[bool, _flag] = False  # may be read from disk again for every token, where memory is short
    rehearse: Annotated[RehearseConfig | None, _made(RehearseConfig)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole shardbox.toml."""

    file: str  # the path as the user gave it
    folder: str  # that relative paths in it start from
    cluster: Annotated[ClusterConfig, _made(ClusterConfig)] = ClusterConfig()
    ports: Annotated[PortsConfig, _made(PortsConfig)] = PortsConfig()
    api: Annotated[ApiConfig, _made(ApiConfig)] = ApiConfig()
    engine: Annotated[EngineConfig, _made(EngineConfig)] = EngineConfig()
    nodes: Annotated[tuple[NodeConfig, ...], _list(_table(NodeConfig), "a list of tables, [[nodes]]")] = ()
    models: Annotated[tuple[ModelConfig, ...], _list(_made(ModelConfig), "a list of tables, [[models]]")] = ()

    def node(self, name: str) -> NodeConfig:
        """The entry of this node, or one with the cluster's defaults where [[nodes]] does not name it."""
        others = NodeConfig(name=name, engine=self.engine, ports=self.ports)
        return next((node for node in self.nodes if node.name == name), others)

    def model(self, name: str) -> ModelConfig | None:
        """The model with this name or alias, None where there is none."""
        return next((model for model in self.models if name == model.name or name in model.aliases), None)

    @property
    def hash(self) -> str:
        """16 hex digits over all that the file says, without the secret: equal on boxes that agree."""
        cluster = replace(self.cluster, secret="", secret_file="", old_secret_file="")  # changed box by box
        return digest(replace(self, file="", folder="", cluster=cluster))


def _build(raw: Mapping[str, Any], **more: str) -> Config:
    """The Config of what is right, with [engine] and [ports] merged into each node."""
    config, nodes = Config(**{**raw, **more, "nodes": ()}), []
    for node in raw.get("nodes", ()):
        own = node.get("engine", {})
        engine = replace(config.engine, **{**own, "env": {**config.engine.env, **own.get("env", {})}})
        ports = replace(config.ports, **node.get("ports", {}))
        nodes.append(NodeConfig(**{**node, "engine": engine, "ports": ports}))
    return replace(config, nodes=tuple(nodes))


# --- checks over several keys: each builds only on keys that are clean ---


def _check_cluster(config: Config, root: _Place) -> None:
    cluster, secret, secret_file = config.cluster, root.at("cluster", "secret"), root.at("cluster", "secret_file")
    if secret.clean() and secret_file.clean():
        if cluster.secret and cluster.secret_file:
            secret.add("given beside secret_file", "keep one of the two")
        elif not cluster.secret and not cluster.secret_file:
            secret_file.add("missing, and no secret either", "`shardbox secret` makes one; every box needs the same")
    stall, low, high = root.at("engine", "stall_max_s"), config.engine.stall_min_s, config.engine.stall_max_s
    if low > high and stall.clean() and root.at("engine", "stall_min_s").clean():
        stall.add(f"{high:g} is less than stall_min_s, {low:g}")
    if cluster.discovery == "static":
        if not config.nodes and root.at("nodes").clean():
            root.at("cluster", "discovery").add('"static" needs [[nodes]] with an address each')
        for n, node in enumerate(config.nodes):
            if not node.address and root.at("nodes", n, "address").clean():
                root.at("nodes", n, "address").add('missing: cluster.discovery = "static" needs it for every node')


def _check_unique(config: Config, root: _Place) -> None:
    """No two nodes share a name, and no two models a name or alias."""
    claims = [(root.at("nodes", n, "name"), node.name) for n, node in enumerate(config.nodes)]
    claims += [(root.at("models", n, "name"), model.name) for n, model in enumerate(config.models)]
    claims += [
        (root.at("models", n, "aliases"), name) for n, model in enumerate(config.models) for name in model.aliases
    ]
    taken: dict[tuple[str | int, str], _Place] = {}
    for place, name in claims:
        first = taken.setdefault((place.path[0], name), place)
        if name and first is not place:
            place.add(f'"{name}" is taken by {first}')


def _check_models(config: Config, root: _Place) -> None:
    """The nodes that a model names are declared; each of nodes, layers, leader narrows the one before."""
    declared = dict.fromkeys(node.name for node in config.nodes)
    for n, model in enumerate(config.models):
        allowed, source = (declared if "" not in declared else {}), "[[nodes]]"
        leader = dict.fromkeys(filter(None, [model.leader]))
        for key, named in (("nodes", dict.fromkeys(model.nodes)), ("layers", model.layers), ("leader", leader)):
            place = root.at("models", n, key)
            if not named or not place.clean():
                continue
            for name in named:
                if allowed and name not in allowed:
                    place.add(f'"{name}" is not in {source}', place.near(name, allowed))
            allowed, source = dict.fromkeys(named), f"{key} of this model"
        if len(model.layers) > MAX_RANKS:
            root.at("models", n, "layers").add(f"{len(model.layers)} nodes; a ring has at most {MAX_RANKS}")


def _check_ports(config: Config, root: _Place) -> None:
    """The ports and blocks of each node end before 65536 and do not meet. Engines that are closed in for sure have
    ports of their own: there one block is all, and it meets nothing of ours."""
    hint, closed = f"data and signal take {PORT_BLOCK} ports for each model", config.engine.isolate == "always"
    block = PORT_BLOCK * (1 if closed else max(1, len(config.models)))
    places = {} if config.nodes else {root.at("ports"): config.ports}
    for n, node in enumerate(config.nodes):
        places[root.at("ports") if node.ports == config.ports else root.at("nodes", n, "ports")] = node.ports
    for place, ports in places.items():
        if not root.at("ports").clean() or not place.clean():
            continue
        sizes = {"signal": block, "data": block, "api": 1, "mesh": 1}
        spans = {key: range(getattr(ports, key), getattr(ports, key) + size) for key, size in sizes.items()}
        text = {key: f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for key, span in spans.items()}
        for key, span in spans.items():
            if span[-1] > 65535:
                place.at(key).add(f"takes the ports {text[key]}, and 65535 is the last", hint)
        for pair in itertools.combinations(spans, 2):
            # The one to blame is the one that stands here, not inherited.
            key, other = sorted(pair, key=lambda key: place.at(key).path not in place.report.lines)
            if closed and len(spans[key]) != len(spans[other]):
                continue
            if spans[key][0] in spans[other] or spans[other][0] in spans[key]:
                place.at(key).add(f"{text[key]} meets {other}, {text[other]}", hint)


def _document(data: bytes, file: str) -> tuple[str, dict[str, Any]]:
    """The text and what TOML makes of it. Raises ConfigError."""
    import tomli

    where = file
    try:
        if len(data) <= MAX_CONFIG_BYTES:
            text = data.decode("utf-8-sig")  # Windows editors put a byte order mark first
            return text, tomli.loads(text)
        what = f"is {format_size(len(data))}; a configuration has at most {format_size(MAX_CONFIG_BYTES)}"
    except UnicodeDecodeError as error:
        where = f"{file}:{data.count(10, 0, error.start) + 1}"
        what = f"not UTF-8 text (byte 0x{data[error.start]:02x})"
    except tomli.TOMLDecodeError as error:
        where, what = f"{file}:{error.lineno}:{error.colno}", f"not TOML: {error.msg}"
    except (RecursionError, ValueError):
        what = "not a configuration: nested too deeply, or a number with too many digits"
    # Out here, because the errors above carry the whole text, and with it the secret.
    raise ConfigError([ShardboxError(what, where=where)])


def parse_config(data: bytes, *, file: str, folder: str) -> Config:
    """The Config that the bytes of a TOML file say. `file` names it in messages, `folder` is what its
    relative paths start from; neither is opened. Raises ConfigError with every problem, in file order."""
    text, document = _document(data, file)
    root = _Place(report := _Report(file=file, lines=_key_lines(text)))
    config = _build(_table(Config)(document, root), file=file, folder=folder)
    for check in (_check_cluster, _check_unique, _check_models, _check_ports):
        check(config, root)
    problems = [problem for _, problem in sorted(report.problems, key=lambda found: found[0])]
    if report.more:
        problems.append(ShardboxError(f"and {report.more} more problems", where=file))
    if problems:
        raise ConfigError(problems)
    return config


# What a node takes from the TOML only when it starts; all else follows a SIGHUP.
_FIXED = {
    "cluster": ("name", "secret", "secret_file", "old_secret_file",
                "discovery", "encryption", "interfaces", "copy_limit"),
    "api": ("bind", "tls_cert", "tls_key"),
    "engine": ("kind",),
}  # fmt: skip


def reloaded(old: Config, new: Config, name: str) -> tuple[Config, tuple[str, ...]]:
    """What the running node `name` takes of a changed file, and the keys that only a restart applies."""
    parts: dict[str, Any] = {}
    left: list[str] = []
    for section, keys in _FIXED.items():
        was, now = getattr(old, section), getattr(new, section)
        changed = {key: getattr(was, key) for key in keys if getattr(was, key) != getattr(now, key)}
        parts[section] = replace(now, **changed)
        left += [f"{section}.{key}" for key in changed]
    ports = old.node(name).ports
    if ports != new.node(name).ports:
        left.append("ports")
        parts["nodes"] = tuple(replace(node, ports=ports) if node.name == name else node for node in new.nodes)
        parts["ports"] = old.ports if name in {node.name for node in new.nodes} else ports
    if {node.name: node.key for node in old.nodes} != {node.name: node.key for node in new.nodes}:
        left.append("nodes.key")
    return replace(new, **parts), tuple(left)


def as_started(model: ModelConfig) -> ModelConfig:
    """The model without what may change while it runs."""
    return replace(model, aliases=(), max_output=0, autostart=True)


# ======================================================================================================
# 4. Inventory: what each node has, and what a GGUF header says
# ======================================================================================================


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the planner needs to know of a model; all sizes in bytes as stored in the file."""

    architecture: str
    layers: int
    width: int  # n_embd
    vocab: int
    heads: int
    kv_heads: int
    key_width: int  # per head
    value_width: int
    ff_width: int
    context_train: int
    layer_bytes: tuple[int, ...]  # one entry a layer: the bytes of its own tensors
    active_bytes: tuple[int, ...] = ()  # of these, what one token reads: not every expert; (): all
    kv_values: tuple[int, ...] = ()  # one entry a layer: keys and values of one token; (): kv_heads in each
    experts_used: int = 0  # of each layer; 0: it has none
    merges: bool = False  # a BPE vocabulary
    sliding_window: int = 0  # tokens, as the header says; Prima keeps the whole context all the same
    embedding_bytes: int  # token_embd
    output_bytes: int  # output, output_norm and all else that is not in a layer
    tied_output: bool  # no output.weight: the embedding is used again
    quantisation: str  # of most bytes, such as "Q4_K"
    name: str = ""  # general.name
    chat_template: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One accelerator as NVML reports it; None where it gives no reading (a Jetson shares the memory)."""

    index: int
    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    bytes_per_s: float = 0.0  # of its memory, from clock and width of the bus; 0: no reading
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Memory of this box or, in a container, of its control group."""

    total_bytes: int
    available_bytes: int  # what a new process could take, without our own engines' share added back
    source: str = "meminfo"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFacts:
    """How fast this box reads, measured once; 0: not measured (yet)."""

    memory_bytes_per_s: float = 0.0  # all cores together, from memory
    core_bytes_per_s: float = 0.0  # one core, from its cache: how fast it computes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """The way to another node over the mesh, measured at the sizes of the engine's messages."""

    rtt_ns: int  # of a small message
    bytes_per_s: int  # of large ones


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryFacts:
    """One engine binary: "leader" is llama-server, "worker" is llama-cli."""

    role: str
    path: str = ""
    sha256: str = ""
    version: str = ""  # the first line of --version
    commit: str = ""
    problem: str = ""  # "" when it runs
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One [[models]] entry as this node finds it."""

    name: str
    path: str = ""  # first part; "" when it is not here
    parts: int = 0
    size_bytes: int = 0
    shape: ModelShape | None = None
    root: str = ""  # content hash over the chunk hashes; "" until it is known
    hashed_bytes: int = 0  # progress towards it
    room_bytes: int = 0  # where it is not here: how large a copy may be; 0 where none may be put
    receiving: str = ""  # the content hash of a copy that is coming in
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressFacts:
    """One IPv4 address that other boxes may use."""

    address: str
    interface: str
    prefix: int
    note: str = ""  # such as "link-local, nothing better was found"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Everything that a node knows of itself and tells the others."""

    name: str
    machine: str  # a hash of /etc/machine-id, the same for all nodes of one box
    start: int  # grows with every start of the node on that box
    protocol: int
    version: str
    config_hash: str
    platform: str  # such as "linux-x86_64"
    cores: int
    memory: MemoryFacts
    addresses: tuple[AddressFacts, ...] = ()
    mesh_port: int = 7311
    gpus: tuple[GpuFacts, ...] = ()
    gpu_note: str = ""  # why there are none
    binaries: tuple[BinaryFacts, ...] = ()
    models: tuple[ModelFacts, ...] = ()
    isolation: str = ""  # "" when engines can be closed in, else why not
    engine_kind: str = "prima"
    ports: PortsConfig = PortsConfig()
    own_bytes: int = 0  # memory held by our own engines now: it counts as free
    speed: SpeedFacts = SpeedFacts()
    links: dict[str, LinkFacts] = dataclasses.field(default_factory=dict)  # to other nodes, by name
    key: str = ""  # its public key, as [[nodes]] may pin it
    engine_root: str = ""  # content hash of the engine files that it gives to boxes of the same platform

    def binary(self, role: str) -> BinaryFacts:
        """This node's binary for a role; one with a `problem` where there is none."""
        unknown = BinaryFacts(role=role, problem="not looked for")
        return next((binary for binary in self.binaries if binary.role == role), unknown)

    def model(self, name: str) -> ModelFacts:
        """This node's copy of a model; one with a `problem` where there is none."""
        unknown = ModelFacts(name=name, problem="not in this node's configuration")
        return next((model for model in self.models if model.name == name), unknown)


# ======================================================================================================
# 4b. GGUF: what a model file's header says. Nothing in it is believed before it is checked.
# ======================================================================================================

MAX_ENTRIES = 100_000  # tensors, and keys: large real models have about 2,000 and 60
MAX_READ_BYTES = 16 * MIB  # of a header, without long arrays and token texts: room for 2 million tokens
KEPT_ARRAY_LENGTH = 1024  # longer arrays are skipped; those with one entry a layer are shorter

# ggml's types: number -> (name, elements in a block, bytes of a block). Source: prima.cpp bdf9d8e7,
# ggml/include/ggml.h (numbers) and ggml/src/ggml-common.h (block sizes).
GGML_TYPES = {
    int(number): (name, int(block), int(size))
    for number, name, block, size in re.findall(
        r"(\d+) (\w+) (\d+) (\d+)",
        """
         0 F32 1 4          1 F16 1 2          2 Q4_0 32 18       3 Q4_1 32 20       6 Q5_0 32 22
         7 Q5_1 32 24       8 Q8_0 32 34       9 Q8_1 32 36      10 Q2_K 256 84     11 Q3_K 256 110
        12 Q4_K 256 144    13 Q5_K 256 176    14 Q6_K 256 210    15 Q8_K 256 292    16 IQ2_XXS 256 66
        17 IQ2_XS 256 74   18 IQ3_XXS 256 98  19 IQ1_S 256 50    20 IQ4_NL 32 18    21 IQ3_S 256 110
        22 IQ2_S 256 82    23 IQ4_XS 256 136  24 I8 1 1          25 I16 1 2         26 I32 1 4
        27 I64 1 8         28 F64 1 8         29 IQ1_M 256 56    30 BF16 1 2        34 TQ1_0 256 54
        35 TQ2_0 256 66
        """,
    )
}
_NEWER_TYPES = {39: " (MXFP4)", 40: " (NVFP4)"}  # common, but Prima's ggml is older
# GGUF value type -> struct code. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_COPY_AGAIN = "copy or download the file again, and compare its size with the original"
_WHOLE_MODEL = "a whole language model is wanted: not an adapter, a projector or a vocabulary"
_CONVERT = "convert it with Prima's convert_hf_to_gguf.py, or download the model as GGUF"
_OTHER_FILES = (  # how it begins, what such a file is, what to do
    (rb"version https://git-lfs", "a Git LFS pointer", "run `git lfs pull` where it was cloned"),
    (rb'.{8}\{"', "a safetensors file", _CONVERT),
    (rb"\s*(<|\{)", "a web page or an error message", "use the file's direct link, and check the login"),
    (rb"\0+\Z", "zeros only", "a download or copy that did not finish: start it again"),
    (rb"", "something else", _CONVERT),
)

GgufValue = str | int | float | tuple[int | float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor's entry; `offset` counts from the header's `data_offset`, `bytes` is without padding."""

    name: str
    dims: tuple[int, ...]  # the first is contiguous: width comes before rows
    type: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The checked header of one GGUF file, which may be one part of a split model."""

    name: str  # as the caller calls the file
    metadata: dict[str, GgufValue]  # without arrays that are long or of strings
    tensors: tuple[TensorInfo, ...]
    data_offset: int  # bytes


class _GgufReader:
    """Little-endian values from a stream; each length is checked before anything of that length is made."""

    def __init__(self, stream: BinaryIO, size: int, name: str) -> None:
        self.stream, self.size, self.name = stream, size, name
        self.pos = self.taken = 0

    def error(self, what: str, hint: str = _COPY_AGAIN) -> GgufError:
        return GgufError(what, where=self.name, hint=hint)

    def damaged(self, what: str) -> GgufError:
        return self.error(f"the header is damaged: {what}")

    def require(self, count: int) -> None:
        if count > self.size - self.pos:
            raise self.error(f"cut short: it needs at least {self.pos + count} bytes, the file has {self.size}")

    def skip(self, count: int) -> None:
        self.require(count)
        self.pos += count
        self.stream.seek(self.pos)

    def take(self, count: int) -> bytes:
        self.require(count)
        self.taken += count
        if self.taken > MAX_READ_BYTES:
            raise self.damaged(f"it has more than {format_size(MAX_READ_BYTES)} of names and values")
        data = self.stream.read(count)
        self.pos += len(data)
        if len(data) < count:
            raise self.error(f"cut short: it ended at {self.pos} of {self.size} bytes while being read")
        return data

    def integer(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def string(self) -> str:
        return self.take(self.integer(8)).decode("utf-8", "replace")


def read_gguf_header(stream: BinaryIO, size: int, name: str) -> GgufHeader:
    """The header of the GGUF file in a buffered `stream` of `size` bytes, called `name` in errors.

    Work and memory are bounded whatever the bytes are. Raises GgufError when it is not GGUF version 2 or 3
    (little endian), is damaged, or when the tensors do not fit into `size`.
    Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
    """
    reader = _GgufReader(stream, size, name)
    _read_preamble(reader)
    tensor_count, key_count = reader.integer(8), reader.integer(8)
    for count, what in ((tensor_count, "tensors"), (key_count, "keys")):
        if count > MAX_ENTRIES:
            raise reader.damaged(f"it claims {count} {what}, {MAX_ENTRIES} is the limit")
    metadata: dict[str, GgufValue] = {}
    for _ in range(key_count):
        _read_key(reader, metadata)
    tensors = tuple(_read_tensor(reader) for _ in range(tensor_count))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment not in [1 << n for n in range(21)]:
        raise reader.error(f"key 'general.alignment' is {alignment!r:.40}: a power of two up to 1 MiB is wanted")
    data_offset = -(-reader.pos // alignment) * alignment
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset % alignment or tensor.offset < end:
            raise reader.damaged(f"tensor {tensor.name[:64]!r} cannot start at {tensor.offset}")
        end = tensor.offset + tensor.bytes
    if tensors:
        reader.pos = data_offset
        reader.require(end)
    return GgufHeader(name=name, metadata=metadata, tensors=tensors, data_offset=data_offset)


def _read_preamble(reader: _GgufReader) -> None:
    if reader.size == 0:
        raise reader.error("the file is empty")
    first = reader.take(min(64, reader.size))
    if not first.startswith(b"GGUF"):
        for pattern, looks, hint in _OTHER_FILES:
            if re.match(pattern, first, re.DOTALL):
                raise reader.error(f"not a GGUF file: it looks like {looks} (first bytes {first[:8].hex(' ')})", hint)
    reader.pos = 0
    reader.skip(4)
    version = reader.integer(4)
    if version not in (2, 3):
        raise reader.error(f"GGUF version {version}: only 2 and 3, little endian, can be read", _CONVERT)


def _read_key(reader: _GgufReader, metadata: dict[str, GgufValue]) -> None:
    key, kind = reader.string(), reader.integer(4)
    if kind == 8:
        metadata[key] = reader.string()
        return
    is_array, length = kind == 9, 1
    if is_array:
        kind, length = reader.integer(4), reader.integer(8)
    if is_array and kind == 8:
        for _ in range(length):  # ends where the file or MAX_READ_BYTES does
            reader.skip(reader.integer(8))
    elif kind not in _SCALARS:  # an array of arrays too: the format allows it, ggml asserts against it
        raise reader.error(f"key {key[:64]!r} has the value type {kind}, which Prima cannot read")
    elif length > KEPT_ARRAY_LENGTH:
        reader.skip(length * struct.calcsize("<" + _SCALARS[kind]))
    else:
        layout = f"<{length}{_SCALARS[kind]}"
        items = struct.unpack(layout, reader.take(struct.calcsize(layout)))
        metadata[key] = items if is_array else items[0]


def _read_tensor(reader: _GgufReader) -> TensorInfo:
    name, dim_count = reader.string(), reader.integer(4)
    label = f"tensor {name[:64]!r}"
    if dim_count > 4:
        raise reader.damaged(f"{label} has {dim_count} dimensions, 4 is the limit")
    dims = tuple(reader.integer(8) for _ in range(dim_count))
    number, offset = reader.integer(4), reader.integer(8)
    if number not in GGML_TYPES:
        what = f"{label} has type {number}{_NEWER_TYPES.get(number, '')}, unknown to Prima"
        raise reader.error(what, "take a file of a common quantisation such as Q4_K_M")
    kind, block, block_bytes = GGML_TYPES[number]
    elements = math.prod(dims)
    if elements == 0 or elements >= 1 << 63 or (dims[0] if dims else 1) % block:
        raise reader.damaged(f"{label} of type {kind} cannot have the shape {' x '.join(map(str, dims))}")
    return TensorInfo(name=name, dims=dims, type=kind, offset=offset, bytes=elements // block * block_bytes)


def split_parts(name: str) -> tuple[str, ...]:
    """All parts of a split model such as "x-00002-of-00003.gguf", in order; (name,) where it is not split."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", name, re.DOTALL)
    if not match or not 1 <= int(match[2]) <= int(match[3]):
        return (name,)
    return tuple(f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1))


def _key_counts(header: GgufHeader, key: str, default: int | None = None) -> tuple[int, ...]:
    """A key's whole numbers: one, or one a layer. Raises GgufError where it has others, or none."""
    value = header.metadata.get(key, default)
    if value is None:
        raise GgufError(f"key {key[:64]!r} is missing", where=header.name, hint=_WHOLE_MODEL)
    items = value if isinstance(value, tuple) else (value,)
    whole = tuple(item for item in items if type(item) is int and 0 <= item < 1 << 31)  # a bool is no number
    if not whole or len(whole) < len(items):
        what = f"key {key[:64]!r} must be a whole number, got {value!r:.40}"
        raise GgufError(what, where=header.name, hint=_COPY_AGAIN)
    return whole


def _key_count(header: GgufHeader, key: str, default: int | None = None) -> int:
    """A key's whole number, the largest where it has one a layer. Raises GgufError where it has none."""
    return max(_key_counts(header, key, default))


def model_shape(headers: Sequence[GgufHeader]) -> ModelShape:
    """What the planner needs to know of a model, from the headers of all its parts in order.

    Raises GgufError where a part is missing or of another model, or a key or tensor that is needed is absent.
    """
    first, tensors = headers[0], _all_tensors(headers)
    architecture = first.metadata.get("general.architecture")
    embedding = tensors.get("token_embd.weight")
    if not isinstance(architecture, str) or not embedding:
        absent = "tensor 'token_embd.weight'" if isinstance(architecture, str) else "key 'general.architecture'"
        raise GgufError(f"{absent} is missing", where=first.name, hint=_WHOLE_MODEL)

    def count(key: str, default: int | None = None) -> int:
        return _key_count(first, f"{architecture}.{key}", default)

    layers, experts = count("block_count"), count("expert_count", 0)
    used = min(experts, count("expert_used_count", experts))
    layer_bytes, active_bytes = _layer_bytes(first.name, tensors, layers, used / (experts or 1))
    heads, width = count("attention.head_count"), count("embedding_length")
    head_width = width // max(1, heads)
    key_width, value_width = (count(f"attention.{what}_length", head_width) for what in ("key", "value"))
    kv_heads = _kv_heads(first, f"{architecture}.attention.head_count_kv", heads, layers)
    by_type: Counter[str] = Counter()
    for tensor in tensors.values():
        by_type[tensor.type] += tensor.bytes
    return ModelShape(
        architecture=_plain_text(architecture),
        layers=layers,
        width=width,
        vocab=math.prod(embedding.dims[1:]),
        heads=heads,
        kv_heads=max(kv_heads),
        key_width=key_width,
        value_width=value_width,
        ff_width=count("feed_forward_length"),
        context_train=count("context_length"),
        layer_bytes=layer_bytes,
        active_bytes=active_bytes,
        kv_values=tuple(its * (key_width + value_width) for its in kv_heads),
        experts_used=used,
        merges=first.metadata.get("tokenizer.ggml.model") == "gpt2",
        sliding_window=count("attention.sliding_window", 0),
        embedding_bytes=embedding.bytes,
        output_bytes=by_type.total() - sum(layer_bytes) - embedding.bytes,
        tied_output="output.weight" not in tensors,
        quantisation=by_type.most_common(1)[0][0],
        name=_plain_text(str(first.metadata.get("general.name", ""))),
        chat_template="tokenizer.chat_template" in first.metadata,
    )


def _kv_heads(header: GgufHeader, key: str, heads: int, layers: int) -> tuple[int, ...]:
    """Of each layer; the file may give one number for all. Raises GgufError."""
    found = _key_counts(header, key, heads)
    if len(found) not in (1, layers):
        what = f"key '{key}' has {len(found)} values for {layers} layers"
        raise GgufError(what, where=header.name, hint=_COPY_AGAIN)
    return tuple(found) * (layers // len(found))


def _plain_text(text: str) -> str:
    """Text from a file, safe to print in one line: no control characters, at most 80 long."""
    return "".join(char for char in text if char.isprintable())[:80]


def _all_tensors(headers: Sequence[GgufHeader]) -> dict[str, TensorInfo]:
    """The tensors of all parts by name. Raises GgufError where the parts do not make one whole model."""
    tensors: dict[str, TensorInfo] = {}
    for number, header in enumerate(headers, 1):
        # a merged model keeps the key, with a count of 0
        part, parts = _key_count(header, "split.no", 0) + 1, _key_count(header, "split.count", 1) or 1
        if (part, parts) != (number, len(headers)):
            what = f"its header says part {part} of {parts}, its name says part {number} of {len(headers)}"
            hint = "keep the names that the parts came with: x-00001-of-00003.gguf"
            raise GgufError(what, where=header.name, hint=hint)
        for tensor in header.tensors:
            if tensor.name in tensors:
                what = f"tensor {tensor.name[:64]!r} is there twice"
                raise GgufError(what, where=header.name, hint=_COPY_AGAIN)
            tensors[tensor.name] = tensor
    wanted = _key_count(headers[0], "split.tensors.count", len(tensors))
    if len(headers) > 1 and wanted != len(tensors):
        what = f"the parts hold {len(tensors)} tensors, {wanted} were announced"
        raise GgufError(what, where=headers[0].name, hint="one part is of another model")
    return tensors


def _layer_bytes(
    where: str, tensors: dict[str, TensorInfo], layers: int, used: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of each layer's own tensors, and what one token reads of them, with this share of the experts.
    Raises GgufError where a layer has none, or is one too many."""
    sizes: Counter[int] = Counter()
    active: Counter[int] = Counter()
    for name, tensor in tensors.items():
        if match := re.match(r"blk\.(\d{1,9})\.(ffn_\w+(_exps|\.\d+)\.)?", name):
            sizes[int(match[1])] += tensor.bytes
            active[int(match[1])] += int(tensor.bytes * used) if match[2] else tensor.bytes
    if not layers or len(sizes) != layers or max(sizes, default=0) >= layers:
        what = f"{layers} layers are announced, there are tensors of {len(sizes)}, up to {max(sizes, default=0)}"
        raise GgufError(what, where=where, hint=_COPY_AGAIN)
    return tuple(sizes[number] for number in range(layers)), tuple(active[number] for number in range(layers))


# ======================================================================================================
# 5. Plan: Config + NodeFacts -> where each layer goes, and why. Pure: same input, same plan, everywhere.
# ======================================================================================================

HTTP_OFFSET = 32
GPU_BASE_BYTES = 512 * MIB  # a CUDA context and its scratch space, on each card
HEADROOM = 0.05  # of a node's memory, left alone
CONTEXT_STEP = 32  # llama.cpp rounds a context up to this
PREFILL_BATCH = 512  # tokens; llama.cpp's default ubatch, what compute buffers are sized for
_OVERCOMMIT_HINT = ", or (slow, from disk) set `overcommit = true`"
MAX_CYCLES = 8  # each takes a compute buffer and all hops again; Prima's schedulers end at 29 (bdf9d8e7, src/llama.cpp)
EXACT_ORDER = 10  # ranks: up to here the order of a ring is the best there is

# What an engine holds beside buffers (measured on bdf9d8e7 over five models): code, threads, tables; strings and
# indexes of its vocabulary, per token, with and without merges (BPE); cells of the KV cache, per token of context.
ENGINE_BASE_BYTES, VOCAB_TOKEN_BYTES, CONTEXT_CELL_BYTES = 8 * MIB, {False: 320, True: 640}, 128

# How fast it computes: weights a core multiplies while it could scan one byte in its cache; time around each layer; one
# hop through two engines and forwarders beside the network. Measured on bdf9d8e7 with AVX-512 (2026-12-01, AMD EPYC
# 9004): eleven quantisations lie within 0.7 and 1.4 of this.
WEIGHTS_PER_SCANNED_BYTE, LAYER_S, HOP_S = 0.2, 60e-6, 250e-6
TOKEN_S_PER_VOCAB = 20e-9  # sampling on the leader
ASSUMED_LINK = LinkFacts(rtt_ns=500_000, bytes_per_s=110_000_000)  # until it is measured: 1 Gbit/s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one node does in a ring. Sizes in bytes; `free_bytes` is what the plan leaves of its budget."""

    rank: int
    node: str
    window: int  # layers in one go round the ring
    layers: int = 0  # in all
    first_layer: int
    gpu_layers: int  # of each window
    weights_bytes: int
    kv_bytes: int
    buffer_bytes: int
    gpu_bytes: int  # the part of all these that goes to the card
    paged_bytes: int = 0  # of the weights, for which there is no memory: read from disk for every token
    free_bytes: int
    threads: int
    why: str
    compute_s: float = 0.0  # for one token, predicted; 0: not known
    hop_s: float = 0.0  # from here to the next rank
    copy_bytes: int = 0  # of the model's file, which this node has to fetch first


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """How one model is served: rank 0 leads. `world` 1 means one node holds it all."""

    model: str
    ranks: tuple[RankPlan, ...]
    block: int  # which block of PORT_BLOCK ports, counted from each node's own bases
    layers: int
    context: int  # tokens over all slots: what the engine is told with -c
    shape: ModelShape
    reason: str
    cycles: int = 1  # how often a token goes round the ring; more than once: memory is short, weights come from disk
    token_s: float = 0.0  # predicted for one token, early in a context; 0: not known
    alone: str = ""  # the node that would be fastest alone, had it the memory; "": not known
    alone_s: float = 0.0
    root: str = ""  # the content hash that counts; "" while it is not known
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)  # node -> why

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def leader(self) -> str:
        """The node of rank 0."""
        return self.ranks[0].node

    @property
    def paged_bytes(self) -> int:
        """Weights that no memory holds, over all ranks."""
        return sum(rank.paged_bytes for rank in self.ranks)

    def rank_of(self, node: str) -> RankPlan | None:
        """This node's part, None where it has none."""
        return next((rank for rank in self.ranks if rank.node == node), None)


BETTER = 0.8  # a plan is clearly better when a token takes at most this share of the time


def improvement(old: ModelPlan, new: ModelPlan) -> str:
    """Why a ring that serves by the old plan should form anew by the new one; "" where that is not worth it: in memory
    instead of paged from disk, a token in at most BETTER of the time, or, where times are not known, fewer ranks, or as
    many with (1 - BETTER) of the layers more on cards."""
    if old.paged_bytes or new.paged_bytes:
        return "it fits into memory now" if not new.paged_bytes else ""
    if old.token_s and new.token_s:
        times = f"{1000 * new.token_s:.3g} ms a token are predicted, instead of {1000 * old.token_s:.3g} ms"
        return times if new.token_s <= BETTER * old.token_s else ""
    if new.world != old.world:
        fewer = f"{new.world} node{'s' * (new.world > 1)} can serve it now, instead of {old.world}"
        return fewer if new.world < old.world else ""
    gained = sum(rank.gpu_layers for rank in new.ranks) - sum(rank.gpu_layers for rank in old.ranks)
    return f"{gained} more layers fit on cards" if gained >= (1 - BETTER) * new.layers else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one node may spend on a model, in bytes, after caps, head-room and models placed before."""

    node: str
    ram_bytes: int
    gpu_bytes: int
    measured_bytes: int  # of memory, free or held by our own engines
    cap_bytes: int | None  # what the TOML allows
    taken_bytes: int  # by models placed before

    @property
    def total_bytes(self) -> int:
        """Memory and GPU memory together."""
        return self.ram_bytes + self.gpu_bytes

    @property
    def note(self) -> str:
        """Where the room comes from."""
        text, cap = f"{format_size(self.measured_bytes)} available", self.cap_bytes
        if cap is not None:
            below = cap > self.measured_bytes
            text = f"{text}, below its cap of {format_size(cap)}" if below else f"capped at {format_size(cap)}"
        return text + (f", {format_size(self.taken_bytes)} of it for other models" if self.taken_bytes else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a model costs in bytes, independent of where it goes."""

    layer_bytes: tuple[int, ...]  # weights
    kv_bytes: tuple[int, ...]  # KV cache of each layer over the whole context
    sizes: tuple[int, ...]  # of each layer, both together
    ends_bytes: int  # embedding and output, held by the leader
    graph_bytes: int  # compute buffer of one window
    leader_buffer_bytes: int  # what the leader has beside it, for both ends and the answers
    base_bytes: int  # an engine before all that, with its scratch space

    def buffer_bytes(self, leader: bool, cycles: int = 1) -> int:
        """All that a rank holds beside weights and KV cache."""
        return self.base_bytes + cycles * self.graph_bytes + (self.leader_buffer_bytes if leader else 0)

    def fixed_bytes(self, leader: bool, cycles: int = 1) -> int:
        """What a rank needs before its first layer."""
        return self.buffer_bytes(leader, cycles) + (self.ends_bytes if leader else 0)

    @property
    def total_bytes(self) -> int:
        """All of it on one node."""
        return self.fixed_bytes(leader=True) + sum(self.sizes)


def model_costs(shape: ModelShape, context: int, slots: int = 1) -> Costs:
    """Costs for `context` tokens over all slots, as Prima allocates them (bdf9d8e7, src/llama.cpp: build_llama,
    llama_kv_cache_init, llama_output_reserve; compute buffers to the MiB on five models).

    The KV cache is f16, two bytes a value, for the whole context also in layers with a sliding window. A window's
    graph keeps the mask and either the scores of all heads and four activations, or both halves of the feed-forward
    layer (of every used expert) and three; one less where the model ends. The leader's ends have graphs of their own:
    three activations, and logits for a whole batch."""
    batch, used = min(PREFILL_BATCH, context), max(1, shape.experts_used)
    inner, outer = 4 * batch * max(shape.width, shape.heads * shape.key_width), 4 * batch * shape.width
    forward = 4 * batch * used * max(2 * shape.ff_width, shape.ff_width + shape.width) + 3 * outer
    scores = 4 * batch * context * shape.heads
    scratch = 2 * batch * max(context * shape.heads, shape.ff_width * used)  # src1 of a product, as f16 at most
    words = VOCAB_TOKEN_BYTES[shape.merges]
    values = shape.kv_values or (shape.kv_heads * (shape.key_width + shape.value_width),) * shape.layers
    kv_bytes = tuple(2 * context * count for count in values)
    return Costs(
        layer_bytes=shape.layer_bytes,
        kv_bytes=kv_bytes,
        sizes=tuple(map(sum, zip(shape.layer_bytes, kv_bytes, strict=True))),
        ends_bytes=shape.embedding_bytes + shape.output_bytes,
        graph_bytes=4 * batch * context + max(scores + 4 * inner, forward) + 128 * KIB,
        leader_buffer_bytes=4 * (batch + slots + 1) * shape.vocab + 2 * outer + 128 * KIB,
        base_bytes=ENGINE_BASE_BYTES + scratch + words * shape.vocab + CONTEXT_CELL_BYTES * context,
    )


def rehearsed_shape(rehearse: RehearseConfig, name: str) -> ModelShape:
    """A model of this many equal layers, for the rehearsal of one that is not there; proportions of a common
    dense model (grouped heads of 128, four times the width between, no tied output)."""
    ends = rehearse.bytes // 20
    layer = (rehearse.bytes - ends) // rehearse.layers
    heads = max(1, rehearse.width // 128)
    return ModelShape(
        architecture="rehearsal",
        layers=rehearse.layers,
        width=rehearse.width,
        vocab=32000,
        heads=heads,
        kv_heads=max(1, heads // 8),
        key_width=128,
        value_width=128,
        ff_width=4 * rehearse.width,
        context_train=131072,
        layer_bytes=(layer,) * rehearse.layers,
        embedding_bytes=ends // 2,
        output_bytes=ends - ends // 2,
        tied_output=False,
        quantisation="none",
        name=name,
    )


# --- what the nodes have -------------------------------------------------------------------------------


def node_room(node: NodeConfig, facts: NodeFacts, taken: int = 0, gpu_taken: int = 0) -> Room:
    """What this node may spend. The rehearsal holds no weights, so there a cap counts as given."""
    measured, cap = facts.memory.available_bytes + facts.own_bytes, node.memory_bytes
    if facts.engine_kind == "rehearsal" and cap is not None:
        measured = max(measured, cap)
    ram = measured if cap is None else min(cap, measured)
    cards = [gpu.free_bytes for gpu in facts.gpus if gpu.free_bytes]
    gpu = sum(max(0, int(free * (1 - HEADROOM)) - GPU_BASE_BYTES) for free in cards)
    if node.gpu_memory_bytes is not None:
        gpu = min(gpu, node.gpu_memory_bytes)
    return Room(
        node=facts.name,
        ram_bytes=max(0, int(ram * (1 - HEADROOM)) - taken),
        gpu_bytes=max(0, gpu - gpu_taken),
        measured_bytes=measured,
        cap_bytes=cap,
        taken_bytes=taken,
    )


def _binary_problem(facts: NodeFacts, role: str) -> str:
    problem = "" if facts.engine_kind == "rehearsal" else facts.binary(role).problem
    return f"cannot {'lead' if role == 'leader' else 'work'}: {problem}" if problem else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """All nodes, looked through once for every model: what does not depend on the model."""

    config: Config
    facts: dict[str, NodeFacts]  # by name, in its order
    entries: dict[str, NodeConfig]
    copies: dict[str, dict[str, ModelFacts]]  # node -> model -> its copy
    workers: dict[str, str]  # node -> why it cannot lead
    broken: dict[str, str]  # node -> why it can do nothing

    def copy(self, node: str, model: str) -> ModelFacts:
        """This node's copy of a model; one with a `problem` where there is none."""
        return self.copies[node].get(model) or self.facts[node].model(model)


def _look_over(config: Config, facts: Sequence[NodeFacts]) -> _Field:
    declared = {node.name: node for node in config.nodes}
    by_name = {node.name: node for node in sorted(facts, key=lambda node: node.name)}
    default = NodeConfig(name="", engine=config.engine, ports=config.ports)
    broken, workers = {}, {}
    for name, node in by_name.items():
        leader, worker = _binary_problem(node, "leader"), _binary_problem(node, "worker")
        if leader:
            workers[name] = leader
        if node.engine_kind != config.engine.kind:
            broken[name] = f"runs engine kind {node.engine_kind!r}, this box wants {config.engine.kind!r}"
        elif leader and worker:
            broken[name] = worker
    return _Field(
        config=config,
        facts=by_name,
        entries={name: declared.get(name, default) for name in by_name},
        copies={name: {copy.name: copy for copy in node.models} for name, node in by_name.items()},
        workers=workers,
        broken=broken,
    )


def to_fetch(config: Config, model: ModelConfig, here: ModelFacts, wanted: ModelFacts) -> int:
    """Bytes of the model's file that a node with this copy has to fetch first; 0 where it needs none or cannot."""
    rehearsed = config.engine.kind == "rehearsal" and model.rehearse is not None
    fits = here.problem and config.cluster.copy_models and 0 < wanted.size_bytes <= here.room_bytes
    return wanted.size_bytes if fits and not rehearsed else 0


def _node_problem(field: _Field, model: ModelConfig, name: str, wanted: ModelFacts) -> str:
    """Why this node cannot hold any part of the model, "" when it can. `wanted`: the copy that counts."""
    for key, allowed in (("nodes", model.nodes), ("layers", model.layers)):
        if allowed and name not in allowed:
            return f"not in the model's `{key}`"
    if name in field.broken:
        return field.broken[name]
    config, copy = field.config, field.copy(name, model.name)
    if to_fetch(config, model, copy, wanted):
        return ""
    if copy.problem and not (config.engine.kind == "rehearsal" and model.rehearse and not copy.path):
        needs, free = format_size(wanted.size_bytes), format_size(copy.room_bytes)
        short = config.cluster.copy_models and 0 < copy.room_bytes < wanted.size_bytes
        return copy.problem + (f"; a copy needs {needs}, {free} are free" if short else "")
    if wanted.root and copy.root and copy.root != wanted.root:
        return f"its copy of {model.path} has other bytes ({copy.root[:8]}, others have {wanted.root[:8]})"
    return ""


def most_common_root(copies: Iterable[ModelFacts]) -> str:
    """The content hash of most of these copies that are whole, of two with as many the lowest; "" without any."""
    votes = Counter(copy.root for copy in copies if copy.root and not copy.problem)
    return min(votes, key=lambda root: (-votes[root], root), default="")


def _copy_that_counts(field: _Field, model: ModelConfig) -> ModelFacts:
    """The content that every rank must have: the leader's where the TOML names one, else that of most nodes that hold
    the model (ties: lowest hash). One that contradicts the TOML's `sha256` is no copy at all. Nodes that may not hold
    a rank count only if no other has it. Raises PlanError where no node has it, or where some would have to fetch it
    and those who have it disagree."""
    config, allowed = field.config, dict.fromkeys(model.nodes or tuple(model.layers) or field.facts)
    copies = {name: field.copy(name, model.name) for name in field.facts}
    whole = {name: copy for name, copy in copies.items() if copy.shape is not None and not copy.problem}
    inside = {name: copy for name, copy in whole.items() if name in allowed}
    whole = inside or (whole if config.cluster.copy_models else {})
    if not whole:
        if config.engine.kind == "rehearsal" and model.rehearse:
            return ModelFacts(name=model.name, shape=rehearsed_shape(model.rehearse, model.name))
        found = "; ".join(f"{name}: {copies[name].problem or 'not there'}" for name in copies if name in allowed)
        hint = "copy the file to one box, under the TOML's folder or one of model_dirs"
        raise _plan_error(model, f"no node has a whole copy of {model.path} ({found:.4000})", hint)
    root = whole[model.leader].root if model.leader in whole else ""
    root = root or most_common_root(whole.values())
    wanted = next((copy for copy in whole.values() if copy.root == root), next(iter(whole.values())))
    takers = [name for name, copy in copies.items() if name in allowed and to_fetch(config, model, copy, wanted)]
    disputed = len({copy.root for copy in whole.values() if copy.root}) > 1
    if disputed and takers and not model.sha256 and model.leader not in whole:
        held = ", ".join(f"{name} has {copy.root[:8]}" for name, copy in whole.items() if copy.root)
        what = f"{takers[0]} has to fetch {model.path}, but the copies differ: {held}"
        raise _plan_error(model, what, "say which one is right: `sha256` of the model, as sha256sum prints it")
    return wanted


def _plan_error(model: ModelConfig, what: str, hint: str) -> PlanError:
    return PlanError(what, where=f"model {model.name}", hint=hint)


def coarse(count: int) -> int:
    """The number to four binary digits: two views of a node's memory that differ by a little order it alike."""
    shift = max(0, count.bit_length() - 4)
    return count >> shift << shift


# --- how fast it would be ------------------------------------------------------------------------------


def compute_s(shape: ModelShape, facts: NodeFacts, threads: int, layers: Sequence[int], gpu: int, leads: bool) -> float:
    """Seconds that this node computes for one token of which it holds these layers, the last `gpu` on its card;
    0 where its speed is not known, or nothing is computed (rehearsal).

    What a token reads is weights; early in a context the KV cache adds little. A core is bound by its arithmetic, all
    of them together by the memory."""
    active = shape.active_bytes or shape.layer_bytes
    on_card = sum(active[n] for n in layers[len(layers) - gpu :])
    ends = (shape.embedding_bytes if shape.tied_output else shape.output_bytes) if leads else 0
    in_memory = sum(active[n] for n in layers) - on_card + ends
    _, block, block_bytes = next((kind for kind in GGML_TYPES.values() if kind[0] == shape.quantisation), ("", 1, 1))
    card = min((gpu.bytes_per_s for gpu in facts.gpus if gpu.bytes_per_s), default=0.0)
    speed = facts.speed
    if facts.engine_kind == "rehearsal" or not speed.memory_bytes_per_s or (on_card and not card):
        return 0.0
    weights = in_memory * block / block_bytes
    busy = weights / (threads * speed.core_bytes_per_s * WEIGHTS_PER_SCANNED_BYTE)
    seconds = max(busy, in_memory / speed.memory_bytes_per_s) + len(layers) * LAYER_S
    return seconds + (on_card / card if on_card else 0.0) + (shape.vocab * TOKEN_S_PER_VOCAB if leads else 0.0)


def hop_ns(one: NodeFacts, other: NodeFacts, message_bytes: int) -> int:
    """Nanoseconds of one message over the network, one way; the same in both directions."""
    seen = [link for link in (one.links.get(other.name), other.links.get(one.name)) if link] or [ASSUMED_LINK]
    return min(link.rtt_ns // 2 + message_bytes * 10**9 // max(1, link.bytes_per_s) for link in seen)


def ring_order(costs: Sequence[Sequence[int]]) -> list[int]:
    """The cheapest way round all places from 0, as their numbers; exact for EXACT_ORDER, else the nearest next and
    then turned pieces. Of equal ways the one with the lowest numbers first. `costs`: symmetric, integers."""
    count = len(costs)
    if count <= 3:
        return list(range(count))
    if count > EXACT_ORDER:
        return _good_order(costs)
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {
        (1 << n, n): (costs[0][n], (n,)) for n in range(1, count)
    }
    for _ in range(count - 2):
        further: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        for (seen, last), (cost, way) in best.items():
            for n in range(1, count):
                if not seen >> n & 1:
                    key, offer = (seen | 1 << n, n), (cost + costs[last][n], (*way, n))
                    if key not in further or offer < further[key]:
                        further[key] = offer
        best = further
    _, way = min((cost + costs[last][0], way) for (_, last), (cost, way) in best.items())
    return [0, *way]


def _good_order(costs: Sequence[Sequence[int]]) -> list[int]:
    way, left = [0], set(range(1, len(costs)))
    while left:
        way.append(min(left, key=lambda n: (costs[way[-1]][n], n)))
        left.remove(way[-1])
    size, better = len(way), True
    while better:
        better = False
        for i, j in itertools.combinations(range(1, size), 2):
            a, b, c, d = way[i - 1], way[i], way[j], way[(j + 1) % size]
            if costs[a][c] + costs[b][d] < costs[a][b] + costs[c][d]:
                way[i : j + 1] = reversed(way[i : j + 1])
                better = True
    return way


# --- one model -----------------------------------------------------------------------------------------


def _placed(field: _Field, model: ModelConfig, taken: Mapping[str, int], gpu_taken: Mapping[str, int]) -> ModelPlan:
    """Where one model goes, without times. `taken`: bytes of memory, `gpu_taken`: of cards, that models placed before
    use, by node. Raises PlanError saying what is missing, and by how much."""
    wanted = _copy_that_counts(field, model)
    shape = typing.cast(ModelShape, wanted.shape)
    context = model.slots * (-(-model.context // CONTEXT_STEP) * CONTEXT_STEP)
    costs = model_costs(shape, context, model.slots)
    least = costs.fixed_bytes(leader=False) + min(costs.layer_bytes) + min(costs.kv_bytes)
    left_out, rooms = {}, []
    for name, node in field.facts.items():
        if problem := _node_problem(field, model, name, wanted):
            left_out[name] = problem
        else:
            rooms.append(node_room(field.entries[name], node, taken.get(name, 0), gpu_taken.get(name, 0)))
    large = [room for room in rooms if room.total_bytes >= least]
    if large and not model.layers:  # one that could hold nothing stands in nobody's way
        for room in rooms:
            if room.total_bytes < least:
                free = f"{format_size(room.total_bytes)} free here"
                left_out[room.node] = f"no room: {free}, the least part takes {format_size(least)}"
        rooms = large
    fetch = {room.node: to_fetch(field.config, model, field.copy(room.node, model.name), wanted) for room in rooms}
    rooms.sort(key=lambda room: (fetch[room.node] > 0, -coarse(room.total_bytes), room.node))  # who has it goes first
    draft = _Draft(field=field, model=model, shape=shape, costs=costs, rooms=rooms, left_out=left_out, fetch=fetch)
    ring, cycles, reason = draft.by_hand() if model.layers else draft.single() or draft.ring()
    for room in rooms:
        left_out[room.node] = f"not needed: fewer ranks are faster ({format_size(room.total_bytes)} free here)"
    for room, _ in ring:
        del left_out[room.node]
    return ModelPlan(
        model=model.name,
        block=field.config.models.index(model),
        layers=shape.layers,
        shape=shape,
        context=context,
        reason=reason,
        cycles=cycles,
        root=wanted.root,
        left_out=left_out,
        ranks=draft.ranks(ring, cycles),
    )


_Ring = list[tuple[Room, int]]  # each rank's node and layer window, the leader first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """One model's way to a plan: rooms are sorted, the roomiest first."""

    field: _Field
    model: ModelConfig
    shape: ModelShape
    costs: Costs
    rooms: list[Room]
    left_out: dict[str, str]
    fetch: dict[str, int]  # node -> bytes of the file that it has to fetch first

    def leaders(self) -> list[Room]:
        """Who can lead, the roomiest first. Raises PlanError where nobody can."""
        model, workers, wanted = self.model, self.field.workers, self.model.leader
        found = [room for room in self.rooms if room.node not in workers and wanted in ("", room.node)]
        if not found and wanted:
            what = f"its leader {wanted} is {(workers | self.left_out).get(wanted, 'not reachable')}"
            raise _plan_error(model, what, "mend or start that box, or leave out `leader`")
        if not found:
            reasons = "; ".join(f"{node}: {why}" for node, why in [*(workers | self.left_out).items()][:MAX_RANKS])
            raise _plan_error(model, f"no node can lead: {reasons}", "one box needs llama-server in [engine] path")
        return found

    def single(self) -> tuple[_Ring, int, str] | None:
        """One node that can lead, when it all fits there: the fastest as far as is known, else the roomiest."""
        layers, need = self.shape.layers, self.costs.total_bytes
        roomy = [room for room in self.leaders() if room.total_bytes >= need]
        fitting = [room for room in roomy if self.free([(room, layers)])[0] >= 0]
        if not fitting:
            return None

        def slowness(room: Room) -> tuple[bool, float]:
            facts = self.field.facts[room.node]
            gpu = fit_gpu(self.costs.sizes, layers, self.gpu_room(room))[0]
            seconds = compute_s(self.shape, facts, facts.cores, range(layers), gpu, leads=True)
            return self.fetch[room.node] > 0, coarse(int(seconds * 1e9)) if seconds else math.inf

        room = min(fitting, key=slowness)
        fits = f"fits on {room.node} alone ({format_size(need)} of {format_size(room.total_bytes)})"
        return [(room, layers)], 1, f"{fits}: not worth splitting, a ring would be slower"

    def by_hand(self) -> tuple[_Ring, int, str]:
        """The windows that the TOML sets, checked."""
        windows, layers = self.model.layers, self.shape.layers
        there = [room.node for room in self.rooms]
        missing = [node for node in windows if node not in there]
        if missing:
            reasons = ", ".join(f"{node} ({self.left_out.get(node, 'not reachable')})" for node in missing)
            what = f"`layers` names nodes that cannot take part: {reasons}"
            raise _plan_error(self.model, what, "start them, or plan without `layers`")
        if sum(windows.values()) != layers:
            what = f"`layers` adds up to {sum(windows.values())}, the model has {layers}"
            raise _plan_error(self.model, what, "give every layer to one node")
        ring = [(room, windows[room.node]) for room in self.ordered(self.leaders()[0], self.rooms)]
        free = zip([room.node for room, _ in ring], self.free(ring), strict=True)
        short = [f"{node} is short by {format_size(-left)}" for node, left in free if left < 0]
        if short:
            what = f"`layers` by hand do not fit: {', '.join(short)}"
            raise _plan_error(self.model, what, "move layers to a node with room")
        return ring, 1, "windows set by hand in `layers`"

    def ring(self) -> tuple[_Ring, int, str]:
        """The fewest nodes that hold it, the roomiest leading; cards are filled first, then memory by its size."""
        lead, need = self.leaders()[0], self.costs.total_bytes
        others = [room for room in self.rooms if room is not lead]
        others.sort(key=lambda room: (-room.total_bytes, room.node))
        most = min(1 + len(others), MAX_RANKS, self.shape.layers)
        for count in range(2, most + 1):
            ring = self.shared(self.ordered(lead, others[: count - 1]))
            if ring:
                alone = f"any one node that can lead ({lead.node} has {format_size(lead.total_bytes)})"
                return ring, 1, f"{format_size(need)} is too much for {alone}: {count} nodes share it"
        rooms = [lead, *others][:most]
        need += (len(rooms) - 1) * self.costs.fixed_bytes(leader=False)
        have = sum(room.total_bytes for room in rooms)
        short = f"short by {format_size(need - have)}"
        if need <= have:
            short = f"but not in pieces that hold whole layers of {format_size(max(self.costs.layer_bytes))}"
        if self.model.overcommit and (found := self.cycled(lead, others[: most - 1])):
            missing = sum(max(0, -left) for left in self.free(*found))
            reason = f"memory is short by {format_size(missing)}: weights are read from disk again for every token"
            return *found, reason
        listing = ", ".join(f"{room.node} {format_size(room.total_bytes)}" for room in rooms)
        what = f"too big for the nodes there are: needs {format_size(need)}, they have {format_size(have)}"
        hint = "add a box, a smaller quantisation or a shorter context"
        hint += "; also from disk, KV cache and buffers must fit" if self.model.overcommit else _OVERCOMMIT_HINT
        raise _plan_error(self.model, f"{what} ({listing}); {short}", hint)

    def ordered(self, lead: Room, rooms: Sequence[Room]) -> list[Room]:
        """The leader, then the others so that a token is soonest round."""
        ring = [lead, *(room for room in rooms if room is not lead)]
        facts = [self.field.facts[room.node] for room in ring]
        if not any(node.links for node in facts):
            return ring
        message = 4 * self.shape.width
        return [ring[n] for n in ring_order([[hop_ns(one, other, message) for other in facts] for one in facts])]

    def shared(self, rooms: list[Room]) -> _Ring | None:
        """Layers for each node, at least one each: first what cards hold, the rest in proportion to what is free
        then; None when they cannot hold them."""
        layers = self.shape.layers
        windows = self.first_shares(rooms)
        for _ in range(layers if windows else 0):  # layers differ in size: move one at a time from over to under
            ring = list(zip(rooms, windows, strict=True))
            free = self.free(ring)
            worst, best = free.index(min(free)), free.index(max(free))
            if free[worst] >= 0:
                return ring
            if windows[worst] == 1 or free[best] <= 0:
                return None
            windows[worst] -= 1
            windows[best] += 1
        return None

    def first_shares(self, rooms: list[Room]) -> list[int]:
        layers, layer = self.shape.layers, max(1, sum(self.costs.sizes) // self.shape.layers)
        spare = [room.total_bytes - self.costs.fixed_bytes(leader=n == 0) for n, room in enumerate(rooms)]
        if min(spare) <= 0 or len(rooms) > layers:
            return []
        cards = [min(self.gpu_room(room), left) // layer for room, left in zip(rooms, spare, strict=True)]
        if sum(map(max, cards, itertools.repeat(1))) >= layers:  # the cards are enough
            return largest_remainder(layers, [max(1, card) for card in cards])
        left = [max(1, have - card * layer) for have, card in zip(spare, cards, strict=True)]
        rest = layers - sum(cards)
        extra = largest_remainder(rest + len(rooms), left)
        windows = [card + more - 1 for card, more in zip(cards, extra, strict=True)]
        for n, window in enumerate(windows):  # a rank without layers would leave the ring
            if not window:
                windows[windows.index(max(windows))] -= 1
                windows[n] = 1
        return windows

    def cycled(self, lead: Room, others: Sequence[Room]) -> tuple[_Ring, int] | None:
        """Windows small enough that each node holds the one it computes and the next, which it fetches meanwhile; and
        how often they go round. Only what cannot be dropped from memory must fit: KV cache and buffers."""
        costs, layers = self.costs, self.shape.layers
        least = costs.fixed_bytes(leader=False, cycles=MAX_CYCLES) + 2 * max(costs.layer_bytes)
        least += MAX_CYCLES * max(costs.kv_bytes)
        able = [room for room in others if room.total_bytes >= least][: max(0, layers // 2 - 1)]
        rooms = self.ordered(lead, able)
        for cycles in range(2, min(MAX_CYCLES, layers // len(rooms)) + 1) if able else (1,):
            spare = [room.total_bytes - costs.fixed_bytes(room is lead, cycles) for room in rooms]
            if min(spare) <= 0:
                return None
            ring = list(zip(rooms, largest_remainder(-(-layers // cycles), spare), strict=True))
            needs = [
                sum(costs.kv_bytes[n] for n in held) + (2 * window * max(costs.layer_bytes) if able else 0)
                for held, (_, window) in zip(self.held(ring), ring, strict=True)
            ]
            if all(need <= have for need, have in zip(needs, spare, strict=True)):
                return ring, cycles
        return None

    def held(self, ring: _Ring) -> list[list[int]]:
        """Each rank's layers."""
        return segments([window for _, window in ring], self.shape.layers)

    def gpu_room(self, room: Room) -> int:
        """Bytes of a card for whole layers: each engine on it also has its compute buffer there."""
        return max(0, room.gpu_bytes - self.costs.graph_bytes)

    def free(self, ring: _Ring, cycles: int = 1) -> list[int]:
        """What each node has left, in bytes; negative: too much. A part of a layer's room on a card is no use."""
        result = []
        for rank, ((room, window), held) in enumerate(zip(ring, self.held(ring), strict=True)):
            sizes = [self.costs.sizes[n] for n in held]
            on_card = fit_gpu(sizes, window, self.gpu_room(room))[1]
            result.append(room.ram_bytes + on_card - self.costs.fixed_bytes(rank == 0, cycles) - sum(sizes))
        return result

    def ranks(self, ring: _Ring, cycles: int) -> tuple[RankPlan, ...]:
        """The finished ranks with GPU layers and reasons."""
        free, costs = self.free(ring, cycles), self.costs
        lead = "leads: set in the TOML" if self.model.leader else "leads: most room of those that can"
        if len(ring) == 1 and not self.model.leader:
            lead = "leads: holds it all"
        result = []
        for rank, ((room, window), layers) in enumerate(zip(ring, self.held(ring), strict=True)):
            gpu_layers, gpu_bytes = fit_gpu([costs.sizes[n] for n in layers], window, self.gpu_room(room))
            why = self.field.workers.get(room.node, "window by usable memory") if rank else lead
            result.append(
                RankPlan(
                    rank=rank,
                    node=room.node,
                    window=window,
                    layers=len(layers),
                    first_layer=layers[0],
                    gpu_layers=gpu_layers,
                    weights_bytes=sum(costs.layer_bytes[n] for n in layers) + (0 if rank else costs.ends_bytes),
                    kv_bytes=sum(costs.kv_bytes[n] for n in layers),
                    buffer_bytes=costs.buffer_bytes(rank == 0, cycles),
                    gpu_bytes=gpu_bytes,
                    paged_bytes=max(0, -free[rank]),
                    free_bytes=max(0, free[rank]),
                    threads=self.field.entries[room.node].engine.threads or self.field.facts[room.node].cores,
                    why=f"{why} ({room.note})",
                    copy_bytes=self.fetch[room.node],
                )
            )
        return tuple(result)


def segments(windows: Sequence[int], layers: int) -> list[list[int]]:
    """Each rank's layers: rank 1 starts and the leader ends a round, and rounds go on until the layers are used up
    (measured on Prima bdf9d8e7)."""
    held: list[list[int]] = [[] for _ in windows]
    done, turns = 0, itertools.cycle([*range(1, len(windows)), 0])
    while done < layers:
        rank = next(turns)
        held[rank] += range(done, min(done + windows[rank], layers))
        done += windows[rank]
    return held


def largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    """`total` split in proportion to positive `weights`, at least 1 each, adding up exactly."""
    extra, whole = total - len(weights), sum(weights)
    shares = [extra * weight // whole for weight in weights]
    rest = sorted(range(len(weights)), key=lambda n: (-(extra * weights[n] % whole), n))
    for n in rest[: extra - sum(shares)]:
        shares[n] += 1
    return [share + 1 for share in shares]


def fit_gpu(sizes: Sequence[int], window: int, room: int) -> tuple[int, int]:
    """How many layers of each window (from the last back, as Prima offloads) fit in `room`, and their bytes."""
    count = used = 0
    while count < window:
        more = sum(sizes[window - 1 - count :: window])
        if used + more > room:
            break
        count, used = count + 1, used + more
    return count, used


def _timed(plan: ModelPlan, facts: Mapping[str, NodeFacts]) -> ModelPlan:
    """The plan with what a token will take, rank by rank, and on one box that held it all."""
    shape, ranks = plan.shape, []
    for rank, layers in zip(plan.ranks, segments([rank.window for rank in plan.ranks], plan.layers), strict=True):
        here, after = facts[rank.node], facts[plan.ranks[(rank.rank + 1) % plan.world].node]
        gpu = min(len(layers), rank.gpu_layers * plan.cycles)
        seconds = 0.0 if plan.paged_bytes else compute_s(shape, here, rank.threads, layers, gpu, rank.rank == 0)
        hop_s = HOP_S + hop_ns(here, after, 4 * shape.width) / 1e9 if plan.world > 1 else 0.0
        ranks.append(replace(rank, compute_s=seconds, hop_s=hop_s))
    known = all(rank.compute_s or facts[rank.node].engine_kind == "rehearsal" for rank in ranks)
    total = sum(rank.compute_s for rank in ranks) + plan.cycles * sum(rank.hop_s for rank in ranks)
    alone = [(total if known else 0.0, plan.leader)]
    if plan.world > 1:
        everything = range(plan.layers)
        alone = [(compute_s(shape, facts[rank.node], rank.threads, everything, 0, True), rank.node) for rank in ranks]
    alone_s, fastest = min((pair for pair in alone if pair[0]), default=(0.0, ""))
    token_s = total if known and not plan.paged_bytes else 0.0
    return replace(plan, ranks=tuple(ranks), token_s=token_s, alone=fastest, alone_s=alone_s)


# --- all models ----------------------------------------------------------------------------------------


def plan_all(
    config: Config, facts: Sequence[NodeFacts], placed: Mapping[str, ModelPlan] | None = None
) -> dict[str, ModelPlan | PlanError]:
    """A plan or the reason against it for each model, in the TOML's order; `placed` are rings that run
    already and keep what they have."""
    placed, field = placed or {}, _look_over(config, facts)
    blocks = {plan.block for plan in placed.values()}  # the TOML's order may have changed since
    taken, holders = Counter[str](), Counter[str]()
    gpu_taken = Counter[str]()  # not of `placed`: what NVML calls free is already without it
    result: dict[str, ModelPlan | PlanError] = {}

    def take(plan: ModelPlan) -> None:
        for rank in plan.ranks:
            need = rank.weights_bytes + rank.kv_bytes + rank.buffer_bytes - rank.gpu_bytes - rank.paged_bytes
            taken[rank.node] += need
            holders[plan.model] += need

    for plan in placed.values():
        take(plan)
    for model in config.models:
        if model.name in placed:
            result[model.name] = placed[model.name]
            continue
        try:
            plan = _placed(field, model, taken, gpu_taken)
        except PlanError as error:
            given = ", ".join(f"{name} ({format_size(count)})" for name, count in holders.items())
            error.hint += f"; memory is already given to {given}" if given else ""
            result[model.name] = error
            continue
        free = [block for block in (plan.block, *range(len(config.models))) if block not in blocks]
        result[model.name] = plan = replace(plan, block=(*free, plan.block)[0])
        blocks.add(plan.block)
        if model.autostart:
            take(plan)
            graph = model_costs(plan.shape, plan.context).graph_bytes + GPU_BASE_BYTES
            gpu_taken.update({rank.node: rank.gpu_bytes + graph for rank in plan.ranks if rank.gpu_bytes})
    return _divide_cores(field, result, placed)


def _divide_cores(
    field: _Field, plans: dict[str, ModelPlan | PlanError], placed: Mapping[str, ModelPlan]
) -> dict[str, ModelPlan | PlanError]:
    """Every engine its share of its box: one that waits for its ring spins, so they must not overlap. One that has all
    on a card needs a single core. A model that is not started with the node gets a share as if it was."""
    autostart = {model.name for model in field.config.models if model.autostart}
    machine = {name: node.machine for name, node in field.facts.items()}
    cpu, card = Counter[str](), Counter[str]()
    for name, plan in plans.items():
        for rank in plan.ranks if isinstance(plan, ModelPlan) and (name in autostart or name in placed) else ():
            (card if rank.gpu_layers == rank.window else cpu)[machine.get(rank.node, "")] += 1

    def threads(rank: RankPlan, counted: bool) -> int:
        box, all_there = machine[rank.node], field.facts[rank.node].cores
        if rank.gpu_layers == rank.window:
            return 1
        return max(1, (all_there - card[box]) // max(1, cpu[box] + (not counted)))

    result: dict[str, ModelPlan | PlanError] = {}
    for name, plan in plans.items():
        if isinstance(plan, ModelPlan) and name not in placed:
            ranks = [
                rank
                if field.entries[rank.node].engine.threads
                else replace(rank, threads=threads(rank, name in autostart))
                for rank in plan.ranks
            ]
            plan = _timed(replace(plan, ranks=tuple(ranks)), field.facts)
        result[name] = plan
    return result


# ======================================================================================================
# 6. Wiring: ModelPlan -> ports, argv and environment of one rank
# ======================================================================================================


def api_url(config: Config, node: NodeConfig) -> str:
    """Where clients find this node's endpoint."""
    return f"http{'s' if config.api.tls_cert else ''}://{config.api.bind}:{node.ports.api}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One port that the engine here will dial on 127.0.0.1, and the rank that it stands for."""

    kind: str  # "data" | "signal"
    rank: int
    node: str  # where that rank lives
    port: int  # on this box


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWiring:
    """All that is needed to start one rank on its own box."""

    role: str  # "leader" | "worker"
    data_port: int  # what this rank's engine binds
    signal_port: int
    http_port: int  # 0 on workers
    routes: tuple[Route, ...]
    args: tuple[str, ...]  # behind the binary


def wire_rank(
    plan: ModelPlan, rank: int, *, ports: PortsConfig, engine: EngineConfig, model: ModelConfig, path: str
) -> RankWiring:
    """The wiring of one rank, from its own box's port bases. `path`: the model file there.

    Rank R binds data+R and signal+R on every interface and dials 127.0.0.1 at those of other ranks, with its
    own bases: the forwarder answers there (Prima bdf9d8e7, src/llama.cpp). Every other rank gets a route,
    since Prima may dial past a rank that it leaves out."""
    data = ports.data + PORT_BLOCK * plan.block
    signal = ports.signal + PORT_BLOCK * plan.block
    mine = plan.ranks[rank]
    http = data + HTTP_OFFSET if rank == 0 else 0
    flags: dict[str, object] = {"-m": path, "-t": mine.threads, "-ngl": mine.gpu_layers}
    if rank == 0:
        flags |= {"-c": plan.context, "-np": model.slots, "-a": model.name, "--host": "127.0.0.1", "--port": http}
        switches = {"--no-context-shift": True, "--metrics": True, "--embeddings": model.embeddings}
        switches["--cont-batching"] = model.slots > 1
        flags |= {switch: None for switch, wanted in switches.items() if wanted}
    if plan.world > 1:
        flags |= {"--world": plan.world, "--rank": rank, "--master": "127.0.0.1", "--next": "127.0.0.1"}
        flags |= {"--data-port": data, "--signal-port": signal}
        flags["-lw"] = ",".join(str(other.window) for other in plan.ranks)
    if plan.cycles > 1:
        flags["--prefetch"] = None
    args = [str(word) for pair in flags.items() for word in pair if word is not None]
    routes = tuple(
        Route(kind=kind, rank=other.rank, node=other.node, port=base + other.rank)
        for other in plan.ranks
        if other.rank != rank
        for kind, base in (("data", data), ("signal", signal))
    )
    return RankWiring(
        role="leader" if rank == 0 else "worker",
        data_port=data + rank,
        signal_port=signal + rank,
        http_port=http,
        routes=routes,
        args=(*args, *engine.args),
    )


_PASSED_ON = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_PROC_BIND",
    "OMP_PLACES",
)


def engine_environment(base: Mapping[str, str], engine: EngineConfig, extra: Mapping[str, str]) -> dict[str, str]:
    """What an engine may see of our environment: a short list, its library folder, and the TOML's `env`."""
    env = {key: base[key] for key in _PASSED_ON if key in base}
    env.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    if engine.lib:
        env["LD_LIBRARY_PATH"] = engine.lib
    return {**env, **extra, **engine.env}


# ======================================================================================================
# 7. Lifecycle: one ring as a state machine. step(state, event, now) -> (state, effects); it never acts.
# ======================================================================================================

PREPARE_TIMEOUT_S = 20.0  # bounds asking every rank for a lease; nothing is loaded yet
COPY_STALL_S = 90.0  # bounds how long no rank's copy of the model may grow
PROBE_TIMEOUT_S = 120.0  # bounds the one-token answer that makes a ring ready
LOAD_BASE_S, LOAD_BYTES_PER_S = 120.0, 40e6  # start deadline: a slow disk reads 40 MB/s
BACKOFF_BASE_S, BACKOFF_CAP_S = 1.0, 16.0  # pause before a ring forms again, doubled at each failure
QUICK_FAILURES = 6  # this many in a row, and the model is `failed` until an operator starts it
STEADY_S = 30.0  # a ring that served this long has proved itself: failures count from zero again
RESTART_MEMORY_S = 900.0  # how long `status` warns of a restart


class Phase:
    """Where a ring is. ACTIVE phases hold leases on other nodes; in WHOLE ones every engine is up."""

    STOPPED = "stopped"  # by the operator, or autostart = false
    WAITING = "waiting"  # for nodes, files or a plan; `reason` says for what
    COPYING = "copying"  # ranks that lack the model fetch it; nobody has granted anything yet
    PREPARING = "preparing"  # asking every rank for its lease
    LOADING = "loading"  # engines start and read the model
    PROBING = "probing"  # one real token
    SERVING = "serving"
    DRAINING = "draining"  # one of its nodes goes: answers in progress may end
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"
    WHOLE = frozenset({PROBING, SERVING, DRAINING})
    ACTIVE = WHOLE | {COPYING, PREPARING, LOADING}
    ALL = ACTIVE | {STOPPED, WAITING, STOPPING, BACKOFF, FAILED}
    TELLING = (SERVING, DRAINING, PROBING, LOADING, PREPARING, COPYING, STOPPING, FAILED, BACKOFF)  # who counts first


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The proposer's view of one model. Times are monotonic seconds of this node."""

    model: str
    phase: str = Phase.WAITING
    since: float = 0.0
    wanted: bool = True
    reason: str = "starting"
    generation: str = ""
    plan: ModelPlan | None = None
    deadline: float = 0.0  # of the phase; 0: none
    failures: int = 0  # in a row
    restarts: tuple[float, ...] = ()
    served_since: float = 0.0
    last_trouble: str = ""
    stalled: bool = False  # it hung, and has not answered since


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a ring. `generation` fences those that come late; "" fits every one."""

    kind: str  # one of _STEPS
    generation: str = ""
    reason: str = ""
    plan: ModelPlan | None = None
    token: str = ""  # a fresh random generation, for `plan`
    jitter: float = 0.0  # 0..1, for `stopped`
    grace_s: float = 0.0  # for answers in progress, for `leaving`
    idle: bool = False  # nobody waits for an answer, for `tick`


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What the supervisor has to do: provision | prepare | launch | probe | teardown."""

    kind: str
    generation: str
    plan: ModelPlan
    reason: str = ""
    orderly: bool = False  # the ring is whole: the leader may pass STOP round


_Step = tuple[Ring, tuple[Effect, ...]]


def step(ring: Ring, event: Event, now: float) -> _Step:
    """The ring after an event, and what to do about it. Unexpected or late events change nothing."""
    assert event.kind in _STEPS, f"no such event: {event.kind}"
    phases, handler = _STEPS[event.kind]
    late = event.generation and event.generation != ring.generation
    return (ring, ()) if late or ring.phase not in phases else handler(ring, event, now)


def _move(ring: Ring, now: float, phase: str, reason: str, deadline: float = 0.0, **changes: Any) -> Ring:
    return replace(ring, phase=phase, since=now, reason=reason, deadline=deadline, **changes)


def _act(ring: Ring, kind: str, **more: Any) -> _Step:
    assert ring.plan is not None
    return ring, (Effect(kind=kind, generation=ring.generation, plan=ring.plan, **more),)


def _on_plan(ring: Ring, event: Event, now: float) -> _Step:
    """A plan in which this node leads, or the reason why there is none."""
    if event.plan is None:
        return replace(ring, reason=event.reason, plan=None), ()
    ring = replace(ring, plan=event.plan, generation=event.token)
    lacking = ", ".join(rank.node for rank in event.plan.ranks if rank.copy_bytes)
    if lacking:
        return _act(_move(ring, now, Phase.COPYING, f"{lacking} fetch it", now + COPY_STALL_S), "provision")
    return _on_provisioned(ring, event, now)


def _on_copied(ring: Ring, event: Event, now: float) -> _Step:
    """More of a copy has come in: the deadline follows."""
    return replace(ring, reason=event.reason, deadline=now + COPY_STALL_S), ()


def _on_provisioned(ring: Ring, event: Event, now: float) -> _Step:
    """Every rank has the model."""
    return _act(_move(ring, now, Phase.PREPARING, "asking every rank", now + PREPARE_TIMEOUT_S), "prepare")


def _on_granted(ring: Ring, event: Event, now: float) -> _Step:
    assert ring.plan is not None
    load_s = LOAD_BASE_S + sum(rank.weights_bytes for rank in ring.plan.ranks) / LOAD_BYTES_PER_S
    return _act(_move(ring, now, Phase.LOADING, "engines are loading", now + load_s), "launch")


def _on_loaded(ring: Ring, event: Event, now: float) -> _Step:
    return _act(_move(ring, now, Phase.PROBING, "asking for one token", now + PROBE_TIMEOUT_S), "probe")


def _on_answered(ring: Ring, event: Event, now: float) -> _Step:
    return _move(ring, now, Phase.SERVING, "", served_since=now, stalled=False), ()


def _on_trouble(ring: Ring, event: Event, now: float) -> _Step:
    """Anything that breaks the ring: all of it stops."""
    serving, whole = ring.phase in (Phase.SERVING, Phase.DRAINING), ring.phase in Phase.WHOLE
    failures = 1 if serving and now - ring.served_since >= STEADY_S else ring.failures + 1
    blameless = ring.phase in (Phase.COPYING, Phase.PREPARING) or event.kind in ("refused", "lost", "leaving")
    if blameless:  # no engine is to blame: it is never given up
        failures = min(failures, QUICK_FAILURES - 1)
    restarts = (*ring.restarts, now) if serving else ring.restarts
    stalled = ring.stalled or event.kind == "stalled"
    ring = replace(ring, last_trouble=event.reason, failures=failures, restarts=restarts, stalled=stalled)
    ring = _move(ring, now, Phase.STOPPING, event.reason)
    return _act(ring, "teardown", reason=event.reason, orderly=whole and event.kind == "leaving")


def _on_leaving(ring: Ring, event: Event, now: float) -> _Step:
    """A node of the ring goes down: answers in progress may end first."""
    if ring.phase == Phase.DRAINING:
        return ring, ()
    if ring.phase == Phase.SERVING and event.grace_s > 0:
        return _move(ring, now, Phase.DRAINING, event.reason, now + event.grace_s), ()
    return _on_trouble(ring, event, now)


def _on_yield(ring: Ring, event: Event, now: float) -> _Step:
    """Another node leads this model too, and goes before this one: no failure, just one ring too many."""
    return _act(_move(ring, now, Phase.STOPPING, event.reason, failures=0), "teardown", reason=event.reason)


def _on_stopped(ring: Ring, event: Event, now: float) -> _Step:
    """The teardown is through."""
    phase, reason, deadline = Phase.BACKOFF, ring.last_trouble, 0.0
    if not ring.wanted:
        phase, reason = Phase.STOPPED, "stopped by the operator"
    elif ring.failures >= QUICK_FAILURES:
        phase = Phase.FAILED
    elif ring.failures == 0:
        phase, reason = Phase.WAITING, "starting"
    else:
        deadline = now + min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2 ** (ring.failures - 1)) * (1 + event.jitter / 2)
    return _move(ring, now, phase, reason, deadline, plan=None, generation=""), ()


def _on_want(ring: Ring, event: Event, now: float) -> _Step:
    """The operator's start: everything is tried afresh."""
    ring = replace(ring, wanted=True, failures=0)
    if ring.phase in (Phase.STOPPED, Phase.FAILED, Phase.BACKOFF):
        ring = _move(ring, now, Phase.WAITING, "starting")
    return ring, ()


def _on_replan(ring: Ring, event: Event, now: float) -> _Step:
    """A quiet ring makes room for a better plan: no failure, and nobody notices."""
    ring = replace(_move(ring, now, Phase.STOPPING, event.reason, failures=0), last_trouble=event.reason)
    return _act(ring, "teardown", reason=event.reason, orderly=True)


def _on_unwant(ring: Ring, event: Event, now: float) -> _Step:
    """The operator's stop."""
    ring, whole, told = replace(ring, wanted=False), ring.phase in Phase.WHOLE, "stopped by the operator"
    if ring.phase in Phase.ACTIVE:
        return _act(_move(ring, now, Phase.STOPPING, "stopping", failures=0), "teardown", reason=told, orderly=whole)
    return (ring if ring.phase in (Phase.STOPPING, Phase.STOPPED) else _move(ring, now, Phase.STOPPED, told)), ()


def _on_tick(ring: Ring, event: Event, now: float) -> _Step:
    """Time alone: deadlines, the end of a pause, and old restarts that no longer count."""
    if ring.restarts and now - ring.restarts[0] > RESTART_MEMORY_S:
        ring = replace(ring, restarts=ring.restarts[1:])
        if not ring.restarts and ring.phase == Phase.SERVING:
            ring = replace(ring, last_trouble="")
    drained = ring.phase == Phase.DRAINING and event.idle
    if not drained and (not ring.deadline or now < ring.deadline):
        return ring, ()
    if ring.phase == Phase.DRAINING:
        return _on_trouble(ring, Event(kind="leaving", reason=ring.reason), now)
    if ring.phase == Phase.BACKOFF:
        return _move(ring, now, Phase.WAITING, ring.last_trouble), ()
    why = f"the start deadline ran out while {ring.phase}: {event.reason or 'no rank says why'}"
    return _on_trouble(ring, Event(kind="trouble", reason=why), now)


# Each event, the phases in which it counts, and what it does there.
_STEPS: dict[str, tuple[frozenset[str], Callable[[Ring, Event, float], _Step]]] = {
    "plan": (frozenset({Phase.WAITING}), _on_plan),
    "copied": (frozenset({Phase.COPYING}), _on_copied),
    "provisioned": (frozenset({Phase.COPYING}), _on_provisioned),
    "granted": (frozenset({Phase.PREPARING}), _on_granted),
    "loaded": (frozenset({Phase.LOADING}), _on_loaded),
    "answered": (frozenset({Phase.PROBING}), _on_answered),
    **dict.fromkeys(("trouble", "stalled", "refused", "lost"), (Phase.ACTIVE, _on_trouble)),
    "leaving": (Phase.ACTIVE, _on_leaving),
    "yield": (Phase.ACTIVE, _on_yield),
    "replan": (frozenset({Phase.SERVING}), _on_replan),
    "stopped": (frozenset({Phase.STOPPING}), _on_stopped),
    "want": (Phase.ALL, _on_want),
    "unwant": (Phase.ALL, _on_unwant),
    "tick": (Phase.ALL, _on_tick),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One rank's promise to one proposer, on this node's own clock. One a model: two leaders cannot share it."""

    model: str
    proposer: str
    generation: str
    expires: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the leader has, for each rank to compare with: "" is not compared."""

    root: str = ""  # content hash of the model
    commit: str = ""  # the engine's build


LEASE_S = 10.0  # a rank that hears nothing from its proposer for so long stops by itself


def grant(held: Lease | None, *, model: str, proposer: str, generation: str, now: float) -> Lease:
    """A new lease, or the renewed one. Raises PlanError naming the holder when somebody else has it."""
    if held and held.expires > now and (held.proposer, held.generation) != (proposer, generation):
        raise PlanError(f"its lease belongs to {held.proposer} (generation {held.generation})", where=f"model {model}")
    return Lease(model=model, proposer=proposer, generation=generation, expires=now + LEASE_S)


WATCH_S = 1.0  # between two looks at a ring's ranks
LOOK_GAP_S = 6.0  # more between two looks, and it was the watcher that slept: a suspended box saw nothing
PAUSES = 4.0  # a ring hangs when it is quiet for so many times the longest pause that it has made lately
PAUSE_DECAY = 0.95  # of that pause, at each sign of life


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """How a ring that is asked shows signs of life (see sign_of_life), to one who looks every WATCH_S. Seconds."""

    sign: str = ""  # "": not looked yet
    looked_at: float = 0.0
    quiet_s: float = 0.0  # since the sign changed
    pause_s: float | None = None  # the longest quiet lately that ended by itself; None: none yet

    def seen(self, sign: str, now: float, *, asked: bool) -> Pulse:
        """After another look. `asked`: the ring has something to do."""
        quiet_s = self.quiet_s + min(LOOK_GAP_S, now - self.looked_at)
        if not asked or not self.sign:
            return replace(self, sign=sign, looked_at=now, quiet_s=0.0)
        if sign == self.sign:
            return replace(self, looked_at=now, quiet_s=quiet_s)
        return Pulse(sign=sign, looked_at=now, pause_s=max(quiet_s, PAUSE_DECAY * (self.pause_s or 0.0)))

    def stall_s(self, low_s: float, high_s: float) -> float:
        """How long the ring may be quiet; `high_s` while its pace is not known."""
        return high_s if self.pause_s is None else min(high_s, max(low_s, PAUSES * self.pause_s))

    def hangs(self, stall_s: float) -> bool:
        """Whether it has been quiet for so long. Looks come up to WATCH_S late, at the begin of the quiet and now."""
        return self.quiet_s > stall_s - 2 * WATCH_S


HELD_TRIES = 3  # rings that may break under one request: more, and it may be what breaks them
SAME_RING_S = 3.0  # a ring that broke off a request, but is still said to serve after so long, is asked again


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A request whose client has been sent nothing yet, so that another ring may answer it. Monotonic seconds."""

    until: float  # then its client is told
    breaks: int = 0  # rings that broke under it
    generation: str = ""  # of the last one
    broke_at: float = 0.0

    def broken(self, generation: str, now: float) -> Held:
        """The ring of that generation has just broken under it."""
        return replace(self, breaks=self.breaks + 1, generation=generation, broke_at=now)

    def may_ask(self, phase: str, generation: str, now: float) -> bool:
        """Whether a ring in that phase is to be asked now."""
        known_bad = generation == self.generation and now - self.broke_at < SAME_RING_S
        return phase == Phase.SERVING and not known_bad

    def gives_up(self, phase: str, now: float) -> bool:
        """Whether waiting for a ring in that phase makes no sense, or no sense any more."""
        return now >= self.until or self.breaks >= HELD_TRIES or phase in (Phase.STOPPED, Phase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireView:
    """One forwarded port as `status` shows it."""

    kind: str
    rank: int
    node: str
    open: int
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank as its own node sees it."""

    model: str
    generation: str
    rank: int
    node: str
    phase: str  # prepared | starting | bound | exited | stopping
    layers: int
    pid: int = 0
    isolated: bool = False
    isolation_problem: str = ""
    open_ports: tuple[int, ...] = ()  # of an engine that is not closed in
    cpu_s: float = 0.0
    read_bytes: int = 0
    rss_bytes: int = 0
    exit_code: int | None = None
    problem: str = ""
    wires: tuple[WireView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model as its leader, or the node that waits to lead it, tells it."""

    model: str
    phase: str
    reason: str = ""
    generation: str = ""
    leader: str = ""
    world: int = 0
    alive: int = 0  # ranks whose engine runs
    seconds: float = 0.0  # in this phase
    overdue: bool = False  # without an answer for longer than a start may take, or since it hung
    restarts: int = 0  # in RESTART_MEMORY_S
    failures: int = 0  # in a row
    in_flight: int = 0
    held: int = 0  # requests that wait at this node for the ring to form again
    tokens_per_s: float = 0.0  # of the last answers
    ranks: tuple[RankView, ...] = ()
    last_trouble: str = ""
    plan: ModelPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """One node, or something that is not (yet) one, as this node sees it."""

    name: str
    declared: bool = False  # in [[nodes]]: its absence is a warning
    state: str  # self | live | lost | unreachable | refused | foreign | missing
    address: str = ""
    source: str = ""  # static | mdns | self
    detail: str = ""
    rtt_ms: float = 0.0
    silent_s: float = 0.0
    version: str = ""
    config_hash: str = ""
    memory_bytes: int = 0
    gpus: int = 0
    cores: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyView:
    """A file on its way to a node, as that node tells it."""

    model: str
    node: str
    state: str  # copying | done | failed; reading: the node hashes its own
    done_bytes: int = 0
    size_bytes: int = 0
    bytes_per_s: float = 0.0
    givers: tuple[str, ...] = ()
    problem: str = ""
    hint: str = ""


def copy_text(view: CopyView) -> str:
    """How far a copy is, or the reading of one, in words."""
    if view.state == "failed":
        return f"{view.node}: {view.problem}"
    has = "has read" if view.state == "reading" else "has"
    text = f"{view.node} {has} {100 * view.done_bytes // max(1, view.size_bytes)} % of {format_size(view.size_bytes)}"
    if not view.size_bytes:
        return f"{view.node} asks for it"
    if view.state == "copying" and view.done_bytes == view.size_bytes:
        return f"{view.node} has all of {format_size(view.size_bytes)}, and puts it in place"
    if view.bytes_per_s:
        left_s = (view.size_bytes - view.done_bytes) / view.bytes_per_s
        text += f", {format_size(int(view.bytes_per_s))}/s, {format_duration(left_s)} left"
    return text + (f", from {', '.join(view.givers)}" if view.givers else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that `status` needs, from one node, at one moment."""

    cluster: str
    node: str
    version: str
    engine_kind: str
    demo: bool
    seconds_up: float
    api: str
    peers: tuple[PeerView, ...]
    models: tuple[ModelView, ...]
    warnings: tuple[str, ...]
    exits: tuple[str, ...]  # last engine exits with their diagnosis, newest first
    refusals: dict[str, int] = dataclasses.field(default_factory=dict)
    copies: tuple[CopyView, ...] = ()  # of all nodes
    last_refused: dict[str, str] = dataclasses.field(default_factory=dict)  # kind -> who it was


# --- diagnosis: an engine's end in one sentence (pure) ------------------------------------------------

OUT_OF_MEMORY = "out of memory: lower this node's cap, the context or the layers"
# What Prima bdf9d8e7 and the loader print, and what a person should read; the first that fits wins.
_DIAGNOSES = (
    (r"Error binding/connecting .* socket.*Address already in use", "its port is taken by another process"),
    (r"couldn't bind|bind\(\).*in use", "its HTTP port is taken by another process"),
    (
        r"out of memory|failed to allocate|unable to allocate|cudaMalloc failed|bad_alloc|Cannot allocate memory",
        OUT_OF_MEMORY,
    ),
    (
        r"data is not within the file bounds|failed to read (?:key-value|tensor)",
        "the model file is cut short: copy it again",
    ),
    (r"invalid magic characters", "the model file is no GGUF: copy it again"),
    (r"unknown model architecture: '?([^'\s]+)", "this Prima does not know the model's architecture, {}"),
    (r"failed to open '(.*)': 'No such file", "the model file is missing"),
    (r"failed to open '.*': 'Permission denied'", "the model file may not be read by this user"),
    (r"failed to load model from|failed to open", "the model could not be loaded"),
    (r"CUDA driver version is insufficient", "the NVIDIA driver is older than the engine's CUDA wants: update it"),
    (r"no kernel image is available", "the engine was built for another kind of NVIDIA card"),
    (r"error while loading shared libraries: ([^\s:]+)", "a shared library is missing, {}: set [engine] lib"),
    (r"version `(\S+?)' not found", "the engine was built on a newer system: it wants {}"),
    (r"GGML_ASSERT.*should_profile", "it met a ring that was already running"),
    (r"error: (?:unknown|invalid) argument: (\S+)", "it does not know one of the flags in `args`, {}"),
)
_SIGNALS = {
    4: "illegal instruction: the binary was built for another processor",
    6: "it aborted",
    9: "killed by hand",
    11: "it crashed (segmentation fault)",
    15: "it was told to end",
}


def diagnose(code: int, tail: Sequence[str], oom_kills: int | None = None) -> str:
    """One sentence on an engine's exit, with the line that shows it. `code`: negative for a signal. `oom_kills`: what
    the kernel killed for lack of memory while the engine ran; None where it does not tell."""
    for pattern, words in _DIAGNOSES:
        for line in reversed(tail):
            if found := re.search(pattern, line):
                return f"{words.format(*(group[:40] for group in found.groups()))} [{line.strip()[:160]}]"
    number = -code if code < 0 else max(0, code - 128)
    words = _SIGNALS.get(number, f"signal {number}" if number else f"it ended with exit code {code}")
    if number == 9 and oom_kills != 0:
        words = f"killed by the kernel, {OUT_OF_MEMORY}" if oom_kills else "killed (for lack of memory, or by hand)"
    last = next((f" [{line.strip()[:160]}]" for line in reversed(tail) if line.strip()), "")
    return words if number in (9, 15) else words + last  # killed: its own output says nothing about that


def why(view: ModelView) -> str:
    """Why a model does not answer: what it waits for, and what broke before."""
    before = view.last_trouble if view.last_trouble != view.reason else ""
    return "; before that: ".join(filter(None, (view.reason, before)))


# ======================================================================================================
# 8. Probes: what this box has. I/O starts here. Every probe answers; what is not there is said in words.
# ======================================================================================================

CHUNK_BYTES = 4 * MIB  # of a model file behind one hash: what a copy over the mesh verifies, passes on and resumes by
CHUNKS = f"chunks of {CHUNK_BYTES}"  # as HashCache calls them
ROLE_BINARIES = {"leader": "llama-server", "worker": "llama-cli"}


def _read_text(*path: str) -> str:
    """A small text file's content, stripped; "" where it cannot be read."""
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="replace") as file:
            return file.read(MIB).strip()
    except OSError:
        return ""


def _list_folder(path: str) -> list[str]:
    """The names in a folder; none where it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(path))
    return []


# -- memory and cores ----------------------------------------------------------------------------------

_GROUP_MEMORY = {  # cgroup version -> its limits, its use, what of it is dropped under pressure
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
_GROUP_CPU = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}


def _cgroup_folders(root: str, controller: str) -> Iterator[tuple[int, str]]:
    """(cgroup version, folder) of this process's control group and those above it, innermost first."""
    mount = os.path.join(root, "sys/fs/cgroup")
    for line in _read_text(root, "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        version, base = (1, os.path.join(mount, controller)) if controllers else (2, mount)
        names = [name for name in path.split("/") if name not in ("", "..")]
        for depth in range(len(names), -1, -1):
            folder = os.path.join(base, *names[:depth])
            if os.path.isdir(folder):  # in a container the path may be the host's
                yield version, folder


def _key_values(text: str) -> dict[str, int]:
    """The numbers of /proc/meminfo or memory.stat by their key."""
    return {key: int(number) for key, number in re.findall(r"^([\w()]+):?\s+(\d+)", text, re.MULTILINE)}


def probe_memory(root: str = "/") -> MemoryFacts:
    """Memory that a new process could take: the kernel's figure, or a control group's if smaller."""
    if platform.system() == "Darwin" and root == "/":
        return macos_memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), subprocess.getoutput("vm_stat"))
    info = _key_values(_read_text(root, "proc/meminfo"))
    total, free = info.get("MemTotal", 0) * 1024, info.get("MemAvailable", 0) * 1024
    source = "meminfo" if total else "unknown: /proc/meminfo cannot be read"
    for version, folder in _cgroup_folders(root, "memory"):
        limit_files, use_file, droppable = _GROUP_MEMORY[version]
        texts = [_read_text(folder, name) for name in limit_files]
        limits = [int(text) for text in texts if text.isdecimal()]  # "max" is none
        used = _read_text(folder, use_file)
        if limits and used.isdecimal():
            held = max(0, int(used) - _key_values(_read_text(folder, "memory.stat")).get(droppable, 0))
            total, left = min(total, *limits), max(0, min(limits) - held)
            if left < free:
                free, source = left, f"cgroup v{version} {folder.removeprefix(root.rstrip('/'))}"
    return MemoryFacts(total_bytes=total, available_bytes=free, source=source)


def oom_kills(root: str = "/") -> int | None:
    """How many processes the kernel has killed for lack of memory (Linux 4.13); None where it does not tell."""
    found = re.search(r"^oom_kill (\d+)$", _read_text(root, "proc/vmstat"), re.MULTILINE)
    return int(found[1]) if found else None


def macos_memory(total: int, vm_stat: str) -> MemoryFacts:
    """Free and droppable pages, from the output of `vm_stat`."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = re.findall(r"Pages (?:free|inactive|speculative|purgeable):\s+(\d+)", vm_stat)
    free = min(total, sum(map(int, pages)) * int(page[1] if page else 0))
    return MemoryFacts(total_bytes=total, available_bytes=free, source="vm_stat")


def probe_cores(root: str = "/", affinity: int = 0) -> int:
    """CPU cores this process may keep busy: its affinity (0: measured), or a control group's quota if lower."""
    measured = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))  # Linux only
    cores = affinity or len(measured(0))
    for version, folder in _cgroup_folders(root, "cpu"):
        quota = " ".join(_read_text(folder, name) for name in _GROUP_CPU[version])
        if limit := re.fullmatch(r"(\d+) ([1-9]\d*)", quota):  # not "max 100000", nor "-1 100000"
            # rounded down: one thread too many is throttled, and the whole ring waits for it
            cores = min(cores, int(limit[1]) // int(limit[2]))
    return max(1, cores)


def _scan_rate(pieces: Sequence[tuple[int, int]], seconds: float) -> float:
    """Bytes a second that as many threads read, each its own piece of memory (address, size) again and again. memchr()
    reads as wide as the processor can, and runs beside the interpreter's lock; a thread's own time does not count what
    other programs take of the processor."""
    scan = ctypes.CDLL(None).memchr
    scan.argtypes, scan.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    times, deadline = max(1, 8 * MIB // pieces[0][1]), time.perf_counter() + seconds

    def rate(piece: tuple[int, int]) -> float:
        started, count = time.thread_time(), 0
        while not count or time.perf_counter() < deadline:
            for _ in range(times):
                scan(piece[0], 7, piece[1])
            count += times
        return count * piece[1] / max(1e-6, time.thread_time() - started)

    with ThreadPoolExecutor(len(pieces)) as pool:
        return sum(pool.map(rate, pieces))


def measure_speed(cores: int, available_bytes: int) -> SpeedFacts:
    """How fast this box reads: 0.4 s with all cores, and up to 256 MiB for that time."""
    size = max(8 * MIB, min(256 * MIB, available_bytes // 8)) // cores // 4096 * 4096
    with mmap.mmap(-1, size * cores) as memory:
        view = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(view)
        try:
            ctypes.memset(start, 1, size * cores)  # untouched pages are all one page of zeros
            memory_rate = _scan_rate([(start + n * size, size) for n in range(cores)], 0.2)
            core_rate = _scan_rate([(start, 256 * KIB)], 0.05)
        finally:
            del view  # else the memory cannot be given back
    return SpeedFacts(memory_bytes_per_s=float(f"{memory_rate:.2g}"), core_bytes_per_s=float(f"{core_rate:.2g}"))


def known_speed(folder: str, machine: str, cores: int) -> SpeedFacts | None:
    """What was measured on this box before; None where nothing was, or the box has changed."""
    with contextlib.suppress(OSError, ValueError, MessageError, AttributeError):
        with open(os.path.join(folder, "speed.json"), "rb") as file:
            data = json.load(file)
        if (data.get("machine"), data.get("cores")) == (machine, cores):
            return from_json(SpeedFacts, data.get("speed"), "speed")
    return None


def keep_speed(folder: str, machine: str, cores: int, speed: SpeedFacts) -> None:
    """For `known_speed`; that it cannot be written costs the time to measure again."""
    body = json.dumps({"machine": machine, "cores": cores, "speed": to_json(speed)})
    with contextlib.suppress(OSError):
        write_atomic(os.path.join(folder, "speed.json"), body.encode())


def probe_platform() -> str:
    """Operating system and machine, such as "linux-x86_64" or "darwin-arm64"."""
    return f"{platform.system()}-{platform.machine()}".lower()


def machine_identity(root: str = "/") -> str:
    """16 hex digits that stay the same for this box, and do not give away the id behind them."""
    known = _read_text(root, "etc/machine-id").lower() or _read_text(root, "var/lib/dbus/machine-id").lower()
    if not re.fullmatch(r"[0-9a-f]{32}", known):  # it may be empty or "uninitialized" in an image
        is_mac = platform.system() == "Darwin"
        listing = subprocess.getoutput("ioreg -rd1 -c IOPlatformExpertDevice") if is_mac else ""
        found, mac = re.search(r'"IOPlatformUUID" = "([^"]+)"', listing), uuid.getnode()
        made_up = mac >> 40 & 1  # getnode() invents one, anew in every process, where there is no card
        known = found[1] if found else f"{socket.gethostname()} {'' if made_up else mac}"
    return hashlib.sha256(f"shardbox machine {known}".encode()).hexdigest()[:16]


# -- GPUs ----------------------------------------------------------------------------------------------


def probe_gpus(root: str = "/") -> tuple[tuple[GpuFacts, ...], str]:
    """NVIDIA GPUs as NVML reports them, and a sentence about what is missing, "" if nothing is."""
    try:
        import pynvml as nvml  # late: it costs 15 ms, and may not be there
    except ImportError:
        return (), _no_gpu(root, "the Python package nvidia-ml-py is not installed")
    cards, lost, failures = [], [], (nvml.NVMLError, OSError)
    try:
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                cards.append(_read_gpu(nvml, index))
            except failures as error:
                lost.append(f"GPU {index} cannot be used: {error}")
    except failures as error:
        lost.append(str(error))
    finally:
        with contextlib.suppress(*failures):
            nvml.nvmlShutdown()
    why = "; ".join(lost)
    return tuple(cards), why if cards else _no_gpu(root, why or "the NVIDIA driver sees no card")


def _read_gpu(nvml: Any, index: int) -> GpuFacts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    facts = GpuFacts(index=index, name=str(nvml.nvmlDeviceGetName(handle)))
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except (nvml.NVMLError, OSError) as error:
        return replace(facts, note=f"its memory cannot be read ({error}): probably shared, as on a Jetson")
    facts = replace(facts, total_bytes=int(memory.total), free_bytes=int(memory.free))
    with contextlib.suppress(nvml.NVMLError, OSError, AttributeError):  # two transfers a clock, as with GDDR and HBM
        clock_hz = 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
        facts = replace(facts, bytes_per_s=2 * clock_hz * nvml.nvmlDeviceGetMemoryBusWidth(handle) / 8)
    return facts


def _no_gpu(root: str, reason: str) -> str:
    """`reason`, with the NVIDIA display devices on the PCI bus, which only lack a driver."""
    bus = os.path.join(root, "sys/bus/pci/devices")
    nvidia = [slot for slot in _list_folder(bus) if _read_text(bus, slot, "vendor").lower() == "0x10de"]
    cards = ", ".join(slot for slot in nvidia if _read_text(bus, slot, "class").startswith("0x03"))
    return f"the NVIDIA card (PCI {cards}) has no driver: {reason}" if cards else f"no GPU: {reason}"


# -- hashes --------------------------------------------------------------------------------------------


def file_signature(path: str) -> tuple[str, int, int, int]:
    """Changes when the file does; zeros where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return path, 0, 0, 0
    return path, found.st_size, found.st_mtime_ns, found.st_ino


def part_paths(path: str) -> tuple[str, ...]:
    """All parts of a split model beside its first."""
    folder, name = os.path.split(path)
    return tuple(os.path.join(folder, part) for part in split_parts(name))


def write_atomic(path: str, data: bytes) -> None:
    """Write beside the file and move in place, so that a reader sees the old bytes or the new."""
    draft = f"{path}.{os.getpid()}.new"
    try:
        with open(draft, "wb") as file:
            file.write(data)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def nearest_folder(path: str) -> str:
    """The folder where a file is, or the one above in which its folders would be made."""
    home = os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(home):
        home = os.path.dirname(home)
    return home


Spend: TypeAlias = Callable[[int], None]  # asked before so many bytes are read or sent


def freely(_: int) -> None:
    """Wait for nothing."""


def hash_range(file: int, start: int, size: int, spend: Spend = freely) -> str:
    """SHA-256 of a part of an open file, of what is there if it is shorter."""
    found, end = hashlib.sha256(), start + size
    while start < end:
        spend(min(MIB, end - start))
        data = os.pread(file, min(MIB, end - start), start)
        if not data:
            break
        found.update(data)
        start += len(data)
    return found.hexdigest()


class HashCache:
    """Content hashes of files, kept in `hashes.json` in the state folder; losing it costs time only. An entry counts
    while path, size, mtime and inode are the same. Safe to use from several threads."""

    def __init__(self, folder: str) -> None:
        self._file = os.path.join(folder, "hashes.json")
        self._lock = threading.Lock()
        self._entries: dict[str, list[Any]] = {}  # kind and path -> size, mtime, inode, then the hashes
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError), open(self._file, "rb") as file:
            self._entries = {key: list(entry) for key, entry in json.load(file).items()}

    def file_sha256(self, path: str, spend: Spend = freely, *, again: bool = False) -> str:
        """SHA-256 of a file as sha256sum prints it. `spend` and errors: as file_hashes."""

        def compute(file: BufferedReader, size: int) -> list[str]:
            return [hash_range(file.fileno(), 0, size, spend)]

        return str(self._cached("file", path, compute, again)[3])

    def file_hashes(self, path: str, spend: Spend = freely, *, again: bool = False) -> tuple[str, ...]:
        """SHA-256 of each CHUNK_BYTES of a file, on all cores. `spend` is called by each of them before it reads so
        many bytes: it may wait, and what it raises ends all. `again`: also what is known already. Raises GgufError
        where the file cannot be read or changes meanwhile."""

        def compute(file: BufferedReader, size: int) -> list[str]:
            def chunk(start: int) -> str:
                return hash_range(file.fileno(), start, min(CHUNK_BYTES, size - start), spend)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return list(pool.map(chunk, range(0, size, CHUNK_BYTES)))

        return tuple(self._cached(CHUNKS, path, compute, again)[3:])

    def known(self, path: str, kind: str = CHUNKS) -> tuple[str, ...] | None:
        """The hashes of a file that has not changed since they were made; None without."""
        with contextlib.suppress(OSError), open(path, "rb") as file:
            entry = self._entries.get(f"{kind} {os.path.abspath(path)}", [])
            return tuple(entry[3:]) if entry[:3] == _identity(file) else None
        return None

    def remember(self, path: str, hashes: Sequence[str]) -> None:
        """Chunk hashes that were checked while the file was written. Raises OSError."""
        with open(path, "rb") as file:
            self._keep(f"{CHUNKS} {os.path.abspath(path)}", [*_identity(file), *hashes])

    def _cached(
        self, kind: str, path: str, compute: Callable[[BufferedReader, int], list[str]], again: bool
    ) -> list[Any]:
        key = f"{kind} {os.path.abspath(path)}"
        try:
            with open(path, "rb") as file:
                before = _identity(file)
                entry = self._entries.get(key, [])
                if entry[:3] == before and not again:
                    return entry
                entry = [*before, *compute(file, before[0])]
                if _identity(file) != before:
                    raise GgufError("it changed while it was being hashed", where=path, hint="wait for the copy")
        except OSError as error:
            raise GgufError(f"cannot be read: {error.strerror}", where=path, hint="check its disk") from None
        self._keep(key, entry)
        return entry

    def _keep(self, key: str, entry: list[Any]) -> None:
        with self._lock, contextlib.suppress(OSError):  # a full or read-only disk: hash again after a restart
            self._entries[key] = entry
            os.makedirs(os.path.dirname(self._file), mode=0o700, exist_ok=True)
            write_atomic(self._file, json.dumps(self._entries).encode())


def _identity(file: BufferedReader) -> list[int]:
    found = os.fstat(file.fileno())
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def root_hash(parts: Sequence[tuple[int, Sequence[str]]]) -> str:
    """One hash for a whole model, from (bytes, chunk hashes) of each part in order: SHA-256 over lines, each with
    a newline: "shardbox-model-2", then for each part "<bytes> <number of chunks>" and its chunk hashes in hex."""
    lines = ["shardbox-model-2"]
    for size, hashes in parts:
        lines += [f"{size} {len(hashes)}", *hashes]
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


# -- engine binaries -----------------------------------------------------------------------------------


def probe_binary(
    role: str, folders: Sequence[str], *, lib: str, env: Mapping[str, str], cache: HashCache, timeout_s: float = 10.0
) -> BinaryFacts:
    """The first binary for `role` in `folders` that runs here with --version, else the first with its problem, as
    folders for several machines may stand in one list. `lib` goes in front of the library path in `env`."""
    name, problems = ROLE_BINARIES[role], []
    if lib:
        variable = "DYLD_LIBRARY_PATH" if platform.system() == "Darwin" else "LD_LIBRARY_PATH"
        libraries = [os.path.abspath(os.path.expanduser(lib)), env.get(variable, "")]
        env = {**env, variable: os.pathsep.join(filter(None, libraries))}
    places = [os.path.abspath(os.path.join(os.path.expanduser(folder), name)) for folder in folders]
    for path in filter(os.path.lexists, places):
        try:
            version = _run_version(path, env, timeout_s)
            commit = re.search(r"\(([0-9a-f]{7,40})\)", version)
            found = BinaryFacts(role=role, path=path, version=version, commit=commit[1] if commit else "")
            return replace(found, sha256=cache.file_sha256(path))
        except ShardboxError as error:
            problems.append(BinaryFacts(role=role, path=path, problem=error.what, hint=error.hint))
    problem = f"no {name} in {' or '.join(map(os.path.dirname, places)) or 'engine.path, which is empty'}"
    hint = f"set engine.path to the folder that holds {name}"
    return problems[0] if problems else BinaryFacts(role=role, problem=problem, hint=hint)


def _run_version(path: str, env: Mapping[str, str], timeout_s: float) -> str:
    """What --version says, in one line. Raises EngineError where the binary does not run, or not in time."""
    try:
        with open(path, "rb") as file:
            problem = program_problem(file.read(20), platform.system(), platform.machine())
        if problem:
            raise EngineError(problem, hint="build Prima on a box like this one, and set engine.path for this node")
        argv, silent = [path, "--version"], subprocess.DEVNULL
        with (
            tempfile.TemporaryDirectory(prefix="shardbox-") as folder,  # engines leave files where they run
            tempfile.TemporaryFile() as output,  # a pipe would stay open while a grandchild lives
            subprocess.Popen(
                argv, cwd=folder, env=env, stdin=silent, stdout=output, stderr=output, start_new_session=True
            ) as process,
        ):
            try:
                code = process.wait(timeout_s)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            output.seek(0)
            text = output.read(64 * KIB).decode(errors="replace").strip()
    except subprocess.TimeoutExpired:
        raise EngineError(f"--version did not end within {timeout_s:.0f} s", hint="is it Prima's own?") from None
    except OSError as error:
        hint = "is it executable (chmod +x), its disk not mounted noexec, its loader (ld-linux, musl) on this box?"
        raise EngineError(f"cannot be run: {error.strerror or error}", hint=hint) from None
    if code:
        raise version_error(code, text)
    lines = text.splitlines() or [""]
    return next((line for line in lines if line.startswith("version:")), lines[0])[:200]


def program_problem(head: bytes, system: str, machine: str) -> str:
    """Why a program with these first 20 bytes cannot run on such a machine; "" where running it tells."""
    if system != "Linux" or head.startswith(b"#!"):
        return ""
    if not head.startswith(b"\x7fELF") or len(head) < 20:
        return "not a program for Linux"
    number = int.from_bytes(head[18:20], "big" if head[5] == 2 else "little")
    kinds = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
    kind = kinds.get(number, f"ELF machine {number}")
    if machine.startswith(kind) or (kind, machine) == ("arm", "aarch64"):  # a Pi's kernel may be 64-bit alone
        return ""
    return f"built for {kind}, this machine is {machine}"


def version_error(code: int, output: str) -> EngineError:
    """Why --version ended with an exit code that is not 0."""
    if missing := re.search(r"(?:loading shared libraries|Library not loaded): ([^\s:]+)", output):
        hint = f"install it, or set engine.lib to a folder that holds {missing[1]}"
        return EngineError(f"the shared library {missing[1]} is missing", hint=hint)
    if needed := re.search(r"version `([^']+)' not found", output):
        return EngineError(f"needs a newer system library ({needed[1]})", hint="build Prima on this box")
    if code == -signal.SIGILL:
        return EngineError("uses instructions this CPU does not have", hint="build Prima without -march=native")
    last = (output.splitlines() or ["nothing printed"])[-1][:200]
    return EngineError(f"--version failed (exit {code}): {last}", hint="run it by hand to see why")


# -- models --------------------------------------------------------------------------------------------


def _places(path: str, folder: str, dirs: Sequence[str]) -> list[str]:
    """Where a model's first part may be, in order."""
    path = os.path.expanduser(split_parts(path)[0])
    roots = [os.path.join(folder, os.path.expanduser(extra)) for extra in dirs]
    names = [os.path.join(root, name) for root in roots for name in (path, os.path.basename(path))]
    return list(dict.fromkeys(os.path.abspath(name) for name in [os.path.join(folder, path), *names]))


def find_model(path: str, *, folder: str, dirs: Sequence[str]) -> str:
    """Absolute path of a model's first part, "" where there is none. Looks at `path` from `folder` (the TOML's),
    then in each of `dirs` for that path and for its last part; a file wins over a folder of that name."""
    here = filter(os.path.exists, _places(path, folder, dirs))
    return min(here, key=lambda place: not os.path.isfile(place), default="")


def probe_model(name: str, path: str, *, folder: str, dirs: Sequence[str]) -> ModelFacts:
    """A [[models]] entry as it is on this box: where, how large, its shape; else the problem in words."""
    first = find_model(path, folder=folder, dirs=dirs)
    if not first:
        problem = f"not found: tried {', '.join(_places(path, folder, dirs))}"
        return ModelFacts(name=name, problem=problem, hint="copy it there, or name its folder in model_dirs")
    parts = split_parts(first)
    try:
        headers, sizes = zip(*map(_read_part, parts), strict=True)
        shape = model_shape(headers)
    except GgufError as error:
        problem = f"{error.where}: {error.what}"
        return ModelFacts(name=name, path=first, parts=len(parts), problem=problem, hint=error.hint)
    return ModelFacts(name=name, path=first, parts=len(parts), size_bytes=sum(sizes), shape=shape)


def safe_place(path: str, *, folder: str, dirs: Sequence[str] = ()) -> str:
    """Where a file goes on this box: below the TOML's folder or one of model_dirs, also after symbolic links are
    followed. Raises FileError for any other place."""
    where = os.path.join(folder, os.path.expanduser(path))
    home = os.path.realpath(os.path.dirname(where))
    allowed = [os.path.realpath(os.path.join(folder, os.path.expanduser(extra))) for extra in ("", *dirs)]
    if os.path.basename(where) in ("", ".", "..") or not any(os.path.commonpath([home, top]) == top for top in allowed):
        what, hint = f"leads to {home}, outside the TOML's folder", "name that folder in this node's model_dirs"
        raise FileError(what, where=path, hint=hint)
    return os.path.join(home, os.path.basename(where))


def place_in(path: str, *, folder: str, dirs: Sequence[str]) -> tuple[str, ...]:
    """Where all parts of a model go on this box. Raises FileError as safe_place does."""
    return part_paths(safe_place(split_parts(path)[0], folder=folder, dirs=dirs))


def engine_places(config: Config, node: NodeConfig, state: str) -> tuple[list[str], str]:
    """(folders to look for engines in, the one with their libraries or ""): this box's own, or what it was given."""
    own = [os.path.join(config.folder, os.path.expanduser(path)) for path in node.engine.path]
    lib = os.path.join(config.folder, os.path.expanduser(node.engine.lib)) if node.engine.lib else ""
    given = os.path.join(state, "engines")
    has_own = any(os.path.lexists(os.path.join(folder, name)) for folder in own for name in ROLE_BINARIES.values())
    return (own, lib) if has_own or not config.engine.share or not os.path.isdir(given) else ([given], given)


def engine_files(binaries: Sequence[BinaryFacts], lib: str) -> list[str]:
    """What another box needs to run these engines: both binaries and the libraries beside them; [] where one fails."""
    if not binaries or any(binary.problem for binary in binaries):
        return []
    names = sorted(name for name in (os.listdir(lib) if lib and os.path.isdir(lib) else []) if ".so" in name)
    return [*(binary.path for binary in binaries), *(os.path.join(lib, name) for name in names)]


def _read_part(path: str) -> tuple[GgufHeader, int]:
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
            raise GgufError("not a regular file", where=path, hint="name the .gguf file")
        with open(path, "rb") as stream:
            return read_gguf_header(stream, found.st_size, path), found.st_size
    except FileNotFoundError:
        raise GgufError("this part of the model is missing", where=path, hint="copy all parts") from None
    except OSError as error:
        raise GgufError(f"cannot be read: {error.strerror}", where=path, hint="check its owner and mode") from None


# -- addresses -----------------------------------------------------------------------------------------

_TUNNELS = "tun* tap* wg* tailscale* zt* utun* ppp* ipsec* nebula*"
_VIRTUAL = "docker* br-* virbr* lxc* lxdbr* cni* flannel* vmnet* vboxnet* podman* kube* cali* vnet* bridge1[0-9][0-9]"
_BY_NAME = "; name it in cluster.interfaces to use it"


def local_addresses(interfaces: Sequence[str]) -> tuple[tuple[AddressFacts, ...], tuple[str, ...]]:
    """IPv4 addresses of this box that other boxes may use, best first, and sentences about the rest.
    `interfaces` holds names (also with *) and CIDRs that may be used; empty: every real one."""
    import ifaddr  # late: only a node that starts needs it

    ips = [(str(adapter.name), ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips]
    found = [(name, ip.ip, ip.network_prefix) for name, ip in ips if isinstance(ip.ip, str)]
    return choose_addresses("/", found, interfaces)


def choose_addresses(
    root: str, found: Sequence[tuple[str, str, int]], allowed: Sequence[str]
) -> tuple[tuple[AddressFacts, ...], tuple[str, ...]]:
    """The rules behind `local_addresses`, for (interface, address, prefix length): cards first, then by name;
    link-local only when alone."""
    usable, left_out = [], []
    ips = [(name, ipaddress.IPv4Address(address), prefix) for name, address, prefix in found]
    for _, why, name, ip, prefix in sorted((*_judge(root, name), name, ip, prefix) for name, ip, prefix in ips):
        if allowed:
            why = "" if any(_matches(entry, name, ip) for entry in allowed) else "not in cluster.interfaces"
        elif ip.is_loopback:
            why = "loopback"
        if why:
            left_out.append(f"{name} {ip}: {why}")
        else:
            note = "link-local, nothing better was found" if ip.is_link_local else ""
            usable.append(AddressFacts(address=str(ip), interface=name, prefix=prefix, note=note))
    best = [facts for facts in usable if not facts.note]
    if best:
        left_out += [f"{facts.interface} {facts.address}: link-local" for facts in usable if facts.note]
    for entry in allowed:
        if not any(_matches(entry, name, ip) for name, ip, _ in ips):
            left_out.append(f"cluster.interfaces: nothing here matches {entry}")
    return tuple(best or usable), tuple(left_out)


def _judge(root: str, name: str) -> tuple[int, str]:
    """A rank, 0 for a card, and why an interface is not used unless it is named; "" where it is used."""
    folder = os.path.join(root, "sys/class/net", name.partition(":")[0])  # "eth0:1" is a label of eth0
    there, rank = _list_folder(folder), 0 if _on_a_card(folder) else 1
    wireguard = "DEVTYPE=wireguard" in _read_text(folder, "uevent").splitlines()
    if wireguard or "tun_flags" in there or _fits(name, _TUNNELS):
        return rank, "a VPN or tunnel" + _BY_NAME
    if rank and ("bridge" in there or "brport" in there or _fits(name, _VIRTUAL)):
        return rank, "a network of containers or virtual machines" + _BY_NAME
    return rank, "no link" if _read_text(folder, "operstate") in ("down", "lowerlayerdown", "notpresent") else ""


def _on_a_card(folder: str, depth: int = 4) -> bool:
    """Whether an interface is a card or made of one: /sys has a link lower_X for each X below it."""
    there = _list_folder(folder) if depth else []
    lower = (os.path.join(folder, entry) for entry in there if entry.startswith("lower_"))
    return "device" in there or any(_on_a_card(below, depth - 1) for below in lower)


def _fits(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())


def _matches(entry: str, name: str, ip: ipaddress.IPv4Address) -> bool:
    try:
        return ip in ipaddress.ip_network(entry, strict=False)
    except ValueError:  # not a CIDR, so a name
        return _fits(name, entry) or _fits(name.partition(":")[0], entry)


# ======================================================================================================
# 9. Survey: what this node is, kept up to date; its folders, ports and sockets
# ======================================================================================================


class Reading:
    """How far this box is with reading a model's files, and how fast. Any thread."""

    def __init__(self, model: str, node: str, size: int) -> None:
        self.model, self.node, self.size, self.done, self._lock = model, node, size, 0, threading.Lock()
        self._marks = collections.deque([(time.monotonic(), 0)], maxlen=11)

    def add(self, count: int) -> None:
        """So many bytes more."""
        with self._lock:
            self.done, now = self.done + count, time.monotonic()
            if now - self._marks[-1][0] > 0.5:
                self._marks.append((now, self.done))

    def view(self) -> CopyView:
        """The rate is that of the last seconds."""
        (then, before), (now, after) = self._marks[0], self._marks[-1]
        rate = (after - before) / (now - then) if now > then else 0.0
        return CopyView(model=self.model, node=self.node, state="reading", done_bytes=self.done, size_bytes=self.size,
                        bytes_per_s=rate)  # fmt: skip


class Surveyor:
    """Gathers this node's facts; what is slow (binaries, model files, hashing) only when it changed."""

    RECHECK_S = 10.0  # between two looks at model files, binaries and network addresses
    SAY_S = 10.0  # between two lines in the log on a model that is being read

    def __init__(self, config: Config, name: str, folder: str, isolation: str, key: str = "") -> None:
        """`isolation`: "" or why engines cannot be closed in. `key`: this node's public one."""
        self._config, self._node, self._cache = config, config.node(name), HashCache(folder)
        self._folder, self._engine_paths = folder, list[str]()
        self._facts = NodeFacts(
            name=name,
            machine=machine_identity(),
            start=time.time_ns(),
            protocol=PROTOCOL,
            version=VERSION,
            config_hash=config.hash,
            platform=probe_platform(),
            cores=probe_cores(),
            memory=probe_memory(),
            mesh_port=self._node.ports.mesh,
            isolation=isolation,
            engine_kind=config.engine.kind,
            ports=self._node.ports,
            key=key,
        )
        self._checked = 0.0
        self._left_out: tuple[str, ...] = ()  # addresses that are not used, each with its reason
        self._known: dict[str, tuple[Any, Any]] = {}  # probe -> what its files looked like, and what it said
        self.readings: dict[str, Reading] = {}  # by first part
        self.pace: Spend = freely  # waits while engines here are at work; see Node
        self._roots: dict[str, tuple[str, str]] = {}  # model -> (content hash, problem)
        self.receiving: dict[str, str] = {}  # model -> content hash of a copy that is coming in
        self._stop = threading.Event()
        self._hasher: threading.Thread | None = None
        self._folder, self._speed = folder, known_speed(folder, self._facts.machine, self._facts.cores)
        self.speedometer = threading.Thread(target=self._measure, name="speed", daemon=True)
        if config.engine.kind == "prima" and not self._speed:
            self.speedometer.start()  # now, while no engine runs

    def _measure(self) -> None:
        machine, cores = self._facts.machine, self._facts.cores
        try:
            self._speed = measure_speed(cores, self._facts.memory.available_bytes)
            keep_speed(self._folder, machine, cores, self._speed)
        except (OSError, AttributeError, RuntimeError) as error:  # no room for a moment, or no such C library
            log.info("this box's speed cannot be measured: %s", error)

    def content(self, root: str) -> list[tuple[str, int, tuple[str, ...]]]:
        """Path, size and chunk hashes of each file of this content, a model or engines; [] where it is not here now."""
        models = [part_paths(path) for path, (its, _) in list(self._roots.items()) if its == root]
        for paths in [*models, self._engine_paths]:
            parts = [(part, file_signature(part)[1], self._cache.known(part)) for part in paths]
            found = [(part, size, hashes) for part, size, hashes in parts if hashes is not None]
            if found and len(found) == len(parts) and root_hash([(size, hashes) for _, size, hashes in found]) == root:
                return found
        return []

    def still_here(self, root: str) -> bool:
        """Whether the files of this content are what they were when they were read; if not, the next survey looks."""
        with contextlib.suppress(OSError):
            if self.content(root):
                return True
        self._checked = 0.0
        return False

    def reread(self, model: ModelConfig) -> dict[str, str]:
        """The content hash of a model here before, and now that every byte is read again; a problem in words."""
        found = find_model(model.path, folder=self._config.folder, dirs=self._node.model_dirs)
        if not found:
            return {"problem": "not here"}
        before, _ = self._roots.get(found, ("", ""))
        self._hash([(found, model)], again=True)
        root, problem = self._roots[found]
        return {"path": found, "before": before, "root": root, "problem": problem}

    def landed(self, model: str, paths: Sequence[str], hashes: Sequence[Sequence[str]]) -> None:
        """Files have come in whole: they are not read again, but looked at at the next survey. `model`: "" for engines.
        Raises OSError."""
        for path, its in zip(paths, hashes, strict=True):
            self._cache.remember(path, its)
        if model:
            self._roots[paths[0]] = (root_hash(self._hashed(paths)), "")
        self._checked = 0.0

    def reload(self, config: Config) -> None:
        """Look at everything again, by another configuration."""
        self._config, self._node, self._known, self._checked = config, config.node(self._facts.name), {}, 0.0

    def survey(self, *, own_bytes: int) -> NodeFacts:
        """The facts now. Memory is reported in steps, so that facts change only when something did."""
        now, memory, last = time.monotonic(), probe_memory(), self._facts.memory.available_bytes
        if not self._checked or now - self._checked > self.RECHECK_S:
            self._facts, self._checked = self._look(), now
        if abs(memory.available_bytes - last) <= max(memory.total_bytes // 50, 64 * MIB):
            memory = replace(memory, available_bytes=last)
        own_bytes, speed = own_bytes // (64 * MIB) * (64 * MIB), self._speed or SpeedFacts()
        self._facts = replace(self._facts, memory=memory, own_bytes=own_bytes, speed=speed)
        models = tuple(map(self._with_root, self._facts.models))
        return replace(self._facts, models=models, config_hash=self._config.hash)

    def _look(self) -> NodeFacts:
        addresses, left_out = local_addresses(self._config.cluster.interfaces)
        for sentence in [sentence for sentence in left_out if sentence not in self._left_out]:
            log.info("not used: %s", sentence)
        self._left_out = left_out
        gpus, note = ((), "") if self._node.gpu_memory_bytes == 0 else probe_gpus()
        models = tuple(map(self._model, self._config.models))
        roles = ENGINE_ROLES if self._config.engine.kind == "prima" else ()
        if not (self._hasher and self._hasher.is_alive()):
            found = zip(models, self._config.models, strict=True)
            work = [(copy.path, model) for copy, model in found if copy.path and not copy.problem]
            self._hasher = threading.Thread(target=self._hash, args=(work,), name="hash", daemon=True)
            self._hasher.start()
        if self._stop.is_set():  # it reads nothing, only says what is known
            self._hasher.join()
        binaries = tuple(map(self._binary, roles))
        self._engine_paths = []
        if self._config.engine.share:
            self._engine_paths = engine_files(binaries, engine_places(self._config, self._node, self._folder)[1])
        engine_root = root_hash(self._hashed(self._engine_paths)) if self._engine_paths else ""
        facts = replace(self._facts, addresses=addresses, models=models, binaries=binaries, engine_root=engine_root)
        return replace(facts, gpus=gpus, gpu_note=note, cores=probe_cores())

    def _hashed(self, paths: Sequence[str], **how: Any) -> list[tuple[int, Sequence[str]]]:
        """Size and chunk hashes of files; see HashCache.file_hashes."""
        return [(os.path.getsize(path), self._cache.file_hashes(path, **how)) for path in paths]

    def _binary(self, role: str) -> BinaryFacts:
        engine = self._node.engine
        folders, lib = engine_places(self._config, self._node, self._folder)
        env, paths = engine_environment(os.environ, engine, {}), [os.path.join(f, ROLE_BINARIES[role]) for f in folders]
        probe = functools.partial(probe_binary, role, folders, lib=lib, env=env, cache=self._cache)
        return self._unless_changed(role, paths, probe)

    def _model(self, model: ModelConfig) -> ModelFacts:
        places: dict[str, Any] = {"folder": self._config.folder, "dirs": self._node.model_dirs}
        probe = functools.partial(probe_model, model.name, model.path, **places)
        return self._unless_changed(f"model {model.name}", part_paths(find_model(model.path, **places)), probe)

    def _unless_changed(self, key: str, paths: Sequence[str], probe: Callable[[], T]) -> T:
        """What the probe said when these files last changed."""
        signature = [file_signature(path) for path in paths]
        if key not in self._known or self._known[key][0] != signature:
            self._known[key] = (signature, probe())
        return typing.cast(T, self._known[key][1])

    def _with_root(self, copy: ModelFacts) -> ModelFacts:
        root, problem = self._roots.get(copy.path, ("", ""))
        reading, receiving = self.readings.get(copy.path), self.receiving.get(copy.name, "")
        hashed = copy.size_bytes * reading.done // reading.size if reading else 0
        hint = copy.hint or (problem and f"`shardbox pull {copy.name} --replace`, or correct `sha256`")
        found = replace(copy, root=root, problem=copy.problem or problem, hint=hint, hashed_bytes=hashed,
                        receiving=receiving)  # fmt: skip
        return replace(found, room_bytes=coarse(self._room(copy.name))) if copy.problem else found

    def _room(self, name: str) -> int:
        """How large a copy of the model may be; 0 where a part of it is there and another copy may not replace it."""
        model = self._config.model(name)
        try:
            assert model is not None
            paths = place_in(model.path, folder=self._config.folder, dirs=self._node.model_dirs)
            there = [part for path in paths for part in (path, f"{path}.part") if os.path.isfile(part)]
            held, home = sum(os.stat(part).st_blocks * 512 for part in there), nearest_folder(paths[0])
            if not os.access(home, os.W_OK):  # or the file system is read-only
                return 0
            found = os.statvfs(home)
        except (ShardboxError, OSError):
            return 0
        whole = find_model(model.path, folder=self._config.folder, dirs=self._node.model_dirs)
        missing = not all(map(os.path.exists, part_paths(whole))) if whole else True
        return found.f_bavail * found.f_frsize + held if missing else 0

    def _hash(self, work: Sequence[tuple[str, ModelConfig]], again: bool = False) -> None:
        """In a thread: read new or changed files, or all of them `again`; unchanged ones come from the cache at once.
        `work`: first parts, each with its model."""
        for path, model in work:
            root, problem = "", ""
            try:
                with self._reading(path, model, again) as spend:
                    root = root_hash(self._hashed(part_paths(path), spend=spend, again=again))
                    problem = self._contradiction(path, model.sha256, spend, again)
            except (ShardboxError, OSError) as error:
                problem = error.what if isinstance(error, ShardboxError) else f"cannot be read: {error.strerror}"
            if root or not self._stop.is_set():
                self._roots[path] = (root, problem)

    @contextlib.contextmanager
    def _reading(self, path: str, model: ModelConfig, again: bool) -> Iterator[Spend]:
        """What is to be told of each MiB of a model's files that is read; `readings` has it meanwhile."""
        parts, said_at = part_paths(path), time.monotonic()
        work = [*((part, CHUNKS) for part in parts), *((part, "file") for part in parts if model.sha256)]
        sizes = [os.path.getsize(part) for part, kind in work if again or self._cache.known(part, kind) is None]
        reading = Reading(model.name, self._facts.name, sum(sizes))

        def spend(count: int) -> None:
            nonlocal said_at
            if self._stop.is_set():
                raise ShardboxError("reading was stopped", where=path)
            self.pace(count)
            reading.add(count)
            if time.monotonic() - said_at > self.SAY_S:
                said_at = time.monotonic()
                log.info("model %s: %s", model.name, copy_text(reading.view()))

        if reading.size:
            self.readings[path] = reading
        try:
            yield spend
        finally:
            if self.readings.get(path) is reading:
                del self.readings[path]

    def _contradiction(self, path: str, wanted: Sequence[str], spend: Spend, again: bool) -> str:
        """Where a part is not what the TOML's `sha256` says; "" where all are."""
        parts = part_paths(path)
        if wanted and len(wanted) != len(parts):
            return f"it has {len(parts)} parts, the TOML's sha256 is of {len(wanted)}"
        for part, said in zip(parts, wanted, strict=False):
            if (found := self._cache.file_sha256(part, spend, again=again)) != said:
                return f"{part} has SHA-256 {found[:16]}..., the TOML says {said[:16]}..."
        return ""

    def close(self) -> None:
        """Read no model any more; what is finished stays cached."""
        self._stop.set()
        if self._hasher:
            self._hasher.join(2.0)  # a disk that hangs holds nobody up


ENGINE_ROLES = ("leader", "worker")


def port_owner_hint(port: int) -> str:
    """What to do about a TCP port that is taken; names its owner where that can be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            for fields in map(str.split, file.readlines()[1:]):
                if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:  # 0A: LISTEN
                    inodes.add(f"socket:[{fields[9]}]")
    for pid in filter(str.isdigit, os.listdir("/proc") if inodes else []):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}") in inodes:
                    with open(f"/proc/{pid}/comm") as file:
                        owner = f"{file.read().strip()} (pid {pid})"
                    return f"port {port} is used by {owner}; end it or choose another port"
    return f"is port {port} taken?"


def port_owners(wiring: RankWiring) -> str:
    """Who holds ports that this rank needs, as far as that can be seen."""
    hints = map(port_owner_hint, filter(None, (wiring.data_port, wiring.signal_port, wiring.http_port)))
    return "; ".join(hint for hint in hints if "is used by" in hint)


def check_ports_free(wiring: RankWiring) -> None:
    """Raises EngineError naming the first port of this rank that another process holds."""
    own = [wiring.data_port, wiring.signal_port] if wiring.routes else []
    for port in filter(None, [*own, *(route.port for route in wiring.routes), wiring.http_port]):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("0.0.0.0", port))
            except OSError as error:
                what = f"port {port} cannot be had: {error.strerror}"
                raise EngineError(what, where="ports", hint=port_owner_hint(port)) from None


def own_file() -> str:
    """The file that people copy and start: this module, or the executable (tools/launcher.c tells its name)."""
    if not getattr(sys, "frozen", False):
        return os.path.abspath(__file__)
    return os.environ.get("_SHARDBOX_FILE", sys.executable)


def self_command() -> list[str]:
    """How to start this very program again: as it is unpacked, or from the executable when a cleaner took that away."""
    if not getattr(sys, "frozen", False):
        return [sys.executable, own_file()]
    return [sys.executable if os.path.exists(sys.executable) else own_file()]


def state_folder(cluster: str, node: str) -> str:
    """Where this node keeps its state; see the README."""
    base = "/var/lib/shardbox"
    if os.geteuid() != 0:
        home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
        base = os.path.join(home, "shardbox")
    return os.path.join(os.environ.get("SHARDBOX_STATE") or base, cluster, node)


def control_path(folder: str) -> str:
    """The owner's control socket."""
    return os.path.join(folder, "control.sock")


def peer_uid(sock: socket.socket) -> int | None:
    """The user at the other end of a UNIX socket, as the kernel saw it connect or listen; None where not told."""
    if sys.platform == "darwin":  # LOCAL_PEERCRED of SOL_LOCAL gives a struct xucred (sys/ucred.h): version, uid, ...
        return int(struct.unpack_from("=iI", sock.getsockopt(0, 1, 76))[1])
    if sys.platform == "linux":
        return int(struct.unpack("=iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])
    return None


@contextlib.contextmanager
def short_socket_path(path: str) -> Iterator[str]:
    """A name for a UNIX socket's path that fits the kernel's 107 bytes, however deep the folder is."""
    if len(os.fsencode(path)) <= 100 or sys.platform != "linux":
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


# ======================================================================================================
# 10. Discovery: mDNS adverts. They are only hints: a peer is a node that proved the secret.
# ======================================================================================================

SERVICE_TYPE = "_shardbox._tcp.local."


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """Where a node may be. `cluster` and `protocol` are what an advert claims; a static address claims ours."""

    node: str
    address: str
    port: int
    source: str  # "static" | "mdns"
    cluster: str = ""
    protocol: int = PROTOCOL
    version: str = ""


class Discovery:
    """Advertises this node and collects the adverts of others in `hints`, by service name."""

    def __init__(
        self, cluster: str, node: str, machine: str, port: int, on_change: Callable[[], None], advertise: bool = True
    ) -> None:
        self.hints: dict[str, Hint] = {}
        self.problem = ""
        self._properties = {"cluster": cluster, "node": node, "protocol": str(PROTOCOL), "version": VERSION}
        self._label = f"{node[:50]}-{machine[:8]}"
        self._port = port
        self._on_change = on_change
        self._advertise = advertise
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._addresses: tuple[str, ...] = ()
        self._lookups: set[asyncio.Task[None]] = set()

    async def announce(self, addresses: tuple[str, ...]) -> None:
        """Advertise and listen on these IPv4 addresses; call again when they change, or to try once more.
        Where multicast cannot be had, `problem` says why and static addresses still work."""
        if addresses == self._addresses and not self.problem:
            return
        await self.close()
        self._addresses = addresses
        if not addresses:
            self.problem = "no network address that may be used"
            return
        try:
            await self._start(addresses)
            self.problem = ""
        except (OSError, zeroconf_errors()) as error:
            self.problem = f"mDNS does not work here ({error or type(error).__name__})"
            await self.close()

    async def _start(self, addresses: tuple[str, ...]) -> None:
        from zeroconf import IPVersion, ServiceInfo
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        self._zeroconf = AsyncZeroconf(interfaces=list(addresses), ip_version=IPVersion.V4Only)
        info = ServiceInfo(
            SERVICE_TYPE,
            f"{self._label}.{SERVICE_TYPE}",
            port=self._port,
            parsed_addresses=list(addresses),
            properties=self._properties,
            server=f"{self._label}.local.",
        )
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE_TYPE, handlers=[self._on_service])
        if self._advertise:
            await self._zeroconf.async_register_service(info, allow_name_change=True)

    def _on_service(self, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        if state_change.name == "Removed":
            self.hints.pop(name, None)
            self._on_change()
            return
        task = asyncio.get_running_loop().create_task(self._look_up(zeroconf, service_type, name))
        self._lookups.add(task)
        task.add_done_callback(self._lookups.discard)

    async def _look_up(self, zeroconf: Any, service_type: str, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(service_type, name)
        if not await info.async_request(zeroconf, 3000):
            return
        hint = parse_advert(info.decoded_properties, info.parsed_addresses(), info.port)
        if hint and len(self.hints) < 4096:  # a stranger on the LAN must not fill our memory
            self.hints[name] = hint
            self._on_change()

    async def close(self) -> None:
        """Say goodbye and stop listening; idempotent."""
        browser, zeroconf = self._browser, self._zeroconf
        self._browser = self._zeroconf = None
        for task in self._lookups:
            task.cancel()
        if browser:
            await browser.async_cancel()
        if zeroconf:
            await zeroconf.async_unregister_all_services()
            await zeroconf.async_close()
        self._addresses = ()


def zeroconf_errors() -> type[Exception]:
    """The library's base error, imported late: it costs 80 ms."""
    from zeroconf import Error

    return Error


def parse_advert(properties: Mapping[str, str | None], addresses: Sequence[str], port: int | None) -> Hint | None:
    """The hint in an advert, None where it is not one of ours. Anything on the LAN may have sent it."""
    node, cluster = properties.get("node") or "", properties.get("cluster") or ""
    usable = [address for address in addresses if ":" not in address]
    if not usable or not port or not re.fullmatch(r"[a-z0-9_.-]{1,63}", node) or len(cluster) > 63:
        return None
    protocol = properties.get("protocol") or ""
    return Hint(
        node=node,
        cluster=printable(cluster),
        address=usable[0],
        port=port,
        source="mdns",
        protocol=int(protocol) if protocol.isdigit() and len(protocol) < 6 else 0,
        version=printable(properties.get("version") or "")[:32],
    )


def printable(text: str) -> str:
    """The text without control characters, as it may stand on a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


# ======================================================================================================
# 11. Mesh and forwarder: proof of the secret, sealed frames, and wires that carry the engines' connections
# ======================================================================================================
# secret -> scrypt -> seed of an Ed25519 authority that every node rebuilds in memory. A connection:
#   1. mutual TLS 1.3; each side proves that the authority signed its certificate, which names nobody, and that
#      it has that certificate's key: the one pinned for the name that it goes by, where [[nodes]] pins one
#   2. client -> server, a line of JSON in TLS: {"random", "protocol": 1, "encryption", "from", "to", "service"}
#   3. server -> client, the same: {"random", "node", "kind", "reason"}; a kind other than "" is a refusal
#   4. both leave TLS; the two lines give one AES-256-GCM key a direction; frames until the end.
#      With encryption = "off" only `control` goes on so; the others carry plain bytes from here on
# A frame: length (4 bytes, authenticated) | ciphertext | tag (16). The nonce is the number of the frame.
# Length 0 is an authenticated end: it alone is a half-close, everything else is a reset.
# A member can pose as another one without a pinned key, for all hold the authority; a stranger can pose as none.
# While the secret changes a node has two authorities: it trusts both, and shows its certificate by the new one
# together with one by the old for the new: each side finds the way to an authority that it knows.

MESH_PROTOCOL = 1
HALF_OPEN_MAX = 256  # connections of a station that wait for a proof, or for the far node
CHECK_S = 1  # how often a pump that waits looks around: bounds how late a cut is noticed
CLOSE_WAIT_S = 2.0  # for threads to end, on close
UNPACED = b"reno"  # congestion control of wires, and of engines among themselves
PREFACE_MAX_BYTES = 8192
FRAME_BYTES = 256 * 1024
CONTROL_FRAME_BYTES = 32 * 1024  # small messages, many connections
FILE_FRAME_BYTES = MIB  # the interpreter runs for each frame, and a box has up to 32 streams of files at once
FRAME_SIZES = {"control": CONTROL_FRAME_BYTES, "file": FILE_FRAME_BYTES}  # by a service's first word; else FRAME_BYTES
# 1 MiB is no faster for one connection, and 11 % slower for eight at once (2026-12-01, 21 pairs on two cores)
PIPE_BYTES = 128 * 1024
SECRET_MIN_CHARS = 20
_LENGTH = struct.Struct(">I")
_OVERHEAD_BYTES = _LENGTH.size + 16


@dataclass(slots=True)
class WireStats:
    """Counters of one wire. Writers use plain +=: CPython does not switch threads within one."""

    sent_bytes: int = 0  # from this box to the mesh
    received_bytes: int = 0
    connections: int = 0  # open now
    opened: int = 0  # ever
    resets: int = 0  # ended unclean, or could not be dialled


@dataclass(frozen=True, slots=True, repr=False)
class MeshKeys:
    """What a node needs to prove itself and to check others; lives in memory only."""

    node: str
    server: ssl.SSLContext
    client: ssl.SSLContext
    public: str  # this node's own key, as others may pin it
    pins: Mapping[str, str]  # node -> the only key that it may have
    encryption: str


def mesh_keys(
    secret: str, cluster: str, node: str, *, old_secret: str = "", key: Ed25519PrivateKey | None = None,
    pins: Mapping[str, str] | None = None, encryption: str = "on",
) -> MeshKeys:  # fmt: skip
    """What `node` proves itself with; those who only have `old_secret` are members too. Without a `key` it gets one
    for now. Raises MeshError for a short secret, or if another key is pinned for it."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, pins = key or Ed25519PrivateKey.generate(), pins or {}
    public = _key_text(key.public_key())
    if pins.get(node, public) != public:
        what, hint = f"[[nodes]] pins another key for {node}; this box has {public}", "pin this one, on every box"
        raise MeshError(what, kind="wrong_key", hint=hint)
    authorities = [_authority(text, cluster) for text in (secret, old_secret) if text]
    return MeshKeys(node, *_contexts(authorities, key), public, pins, encryption)


def node_key(path: str) -> Ed25519PrivateKey:
    """The key pair kept in this file for its owner alone; made if there is none. Raises MeshError, OSError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not os.path.exists(path):
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path)) as fresh:  # of mode 0600
            fresh.write(secrets.token_bytes(32))
            fresh.flush()
            os.fsync(fresh.fileno())
            with contextlib.suppress(FileExistsError):  # another process was quicker
                os.link(fresh.name, path)
    with open(path, "rb") as file:
        seed, mode = file.read(), os.fstat(file.fileno()).st_mode
    if len(seed) != 32:
        raise MeshError("is no key of a node", kind="wrong_key", where=path, hint="delete it: a new one is made")
    if mode & 0o077:
        raise MeshError("others may read it", kind="wrong_key", where=path, hint="delete it: a new one is made")
    return Ed25519PrivateKey.from_private_bytes(seed)


def _key_text(public: Ed25519PublicKey) -> str:
    """A public key as 43 letters, digits, "-" and "_"."""
    return base64.urlsafe_b64encode(public.public_bytes_raw()).decode().rstrip("=")


def _authority(secret: str, cluster: str) -> Ed25519PrivateKey:
    """In about 100 ms (scrypt, RFC 7914): guessing is slow."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if len(secret) < SECRET_MIN_CHARS:
        what = f"the cluster secret has {len(secret)} characters, at least {SECRET_MIN_CHARS} are needed"
        raise MeshError(what, kind="wrong_secret", hint="`shardbox secret` makes a good one")
    salt = b"shardbox mesh 1:" + cluster.encode()
    seed = hashlib.scrypt(secret.encode(), salt=salt, n=1 << 15, r=8, p=1, maxmem=64 << 20, dklen=32)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _contexts(
    authorities: Sequence[Ed25519PrivateKey], key: Ed25519PrivateKey
) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS settings (server, client): 1.3 only, a certificate by an authority shown and demanded, no resumption.
    The first of the authorities signs for this node, the others sign for the first."""
    import ssl

    from cryptography.hazmat.primitives import serialization as form

    pem = form.Encoding.PEM
    newest = authorities[0].public_key()
    roots = [_certificate(one.public_key(), one, is_authority=True).public_bytes(pem).decode() for one in authorities]
    chain = [_certificate(key.public_key(), authorities[0], is_authority=False)]
    chain += [_certificate(newest, older, is_authority=True) for older in authorities[1:]]
    text = key.private_bytes(pem, form.PrivateFormat.PKCS8, form.NoEncryption())
    text += b"".join(certificate.public_bytes(pem) for certificate in chain)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # names come with the preface: anybody is shown a server's certificate
    server.num_tickets = 0  # nothing may follow the handshake but our own bytes, or leaving TLS breaks
    in_memory = sys.platform == "linux"
    with open(os.memfd_create("key"), "wb") if in_memory else tempfile.NamedTemporaryFile() as file:
        file.write(text)
        file.flush()
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata="".join(roots))
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}" if in_memory else file.name)
    return server, client


def _certificate(public: Ed25519PublicKey, authority: Ed25519PrivateKey, *, is_authority: bool) -> Certificate:
    """By the authority, valid from 2000 to 9999: the clocks of boxes without internet need not agree."""
    import datetime

    from cryptography import x509

    names = (hashlib.sha256(key.public_bytes_raw()).hexdigest()[:32] for key in (authority.public_key(), public))
    issued_by, issued_to = (x509.Name.from_rfc4514_string(f"CN={name}") for name in names)
    first, last = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
    number, rights = x509.random_serial_number(), x509.BasicConstraints(is_authority, None)
    builder = x509.CertificateBuilder(issued_by, issued_to, public, number, first, last)
    return builder.add_extension(rights, critical=True).sign(authority, None)


def _frame_keys(asked: bytes, answered: bytes) -> tuple[bytes, bytes]:
    """(client -> server, server -> client) from the two prefaces, which nobody saw outside the proven channel."""
    keys = hmac.digest(b"shardbox frames 1", asked + answered, "sha512")  # HKDF-Extract (RFC 5869, 2.2)
    return keys[:32], keys[32:]


def seal_frame(aead: AESGCM, number: int, plain: memoryview, into: memoryview) -> memoryview:
    """Frame `number` with `plain` (none of it: the end) as a part of `into`."""
    size = len(plain)
    _LENGTH.pack_into(into, 0, size)
    aead.encrypt_into(number.to_bytes(12, "big"), plain, into[:4], into[4 : size + _OVERHEAD_BYTES])
    return into[: size + _OVERHEAD_BYTES]


def open_frames(aead: AESGCM, number: int, sealed: memoryview, into: memoryview) -> tuple[int, int, int, bool]:
    """Open the whole frames, `number` and later ones, at the start of `sealed` into `into`, up to an end.

    Returns (number of the next frame, sealed bytes used up, plain bytes gained, ended). Nothing may be
    delivered if it raises: InvalidTag (not the peer's frame of this number), ConnectionAbortedError (nobody's).
    """
    at = gained = 0
    while len(sealed) - at >= _LENGTH.size:
        (size,) = _LENGTH.unpack_from(sealed, at)
        if size > len(into):
            raise ConnectionAbortedError("a frame longer than any")
        body, after = at + _LENGTH.size, at + size + _OVERHEAD_BYTES
        if after > len(sealed):
            break
        nonce = number.to_bytes(12, "big")
        aead.decrypt_into(nonce, sealed[body:after], sealed[at:body], into[gained : gained + size])
        number, at, gained = number + 1, after, gained + size
        if not size:
            return number, at, gained, True
    return number, at, gained, False


def _tune(sock: socket.socket) -> None:
    """Blocking calls that return every CHECK_S, no delays, and keepalive that finds a silent peer in 25 s.

    Reno, which every Linux lets everybody have: where BBR is the system's choice, its pacing costs a timer's interrupt
    a segment, and a wire on loopback carries 2.0 instead of 1.3 GB/s without it (2026-12-01, 15 pairs on two cores).
    """
    sock.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # the kernel's clock costs no extra call
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", CHECK_S, 0))
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_CONGESTION"):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPALIVE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # macOS has the second, others the first
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _unanswered_s(sock: socket.socket) -> float:
    """Seconds since the peer's kernel last answered, 0.0 if nothing awaits an answer or it cannot be told.

    TCP_USER_TIMEOUT would also end a connection whose peer is well but does not read for so long (a
    stopped engine, a slow disk: measured on 6.18, tcp_probe_timer in net/ipv4/tcp_timer.c). This does not.
    """
    if sys.platform != "linux":
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    waits = len(info) >= 60 and (info[2] or info[3])  # struct tcp_info: tcpi_retransmits, tcpi_probes
    return float(struct.unpack_from("=I", info, 56)[0]) / 1000 if waits else 0.0  # tcpi_last_ack_recv, ms


def _reset(sock: socket.socket) -> None:
    """Close at once: the other end sees a reset, not an end. Only for a socket nobody is waiting in."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
    sock.close()


def _wake(sock: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End the waiting of a thread in `sock`, or in a duplicate of it; nothing can be had from it any more."""
    with contextlib.suppress(OSError):
        sock.shutdown(how)


def _widened(pipe: int) -> int:
    """The size of a pipe, made PIPE_BYTES if may be: a user without privileges has 64 MiB for all (pipe(7))."""
    with contextlib.suppress(OSError):
        return fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)


class SealedLink:
    """A connection to a proven peer; `pump` joins it to a local socket. Threads: two while pumping."""

    def __init__(
        self, sock: socket.socket, *, peer: str, service: str, keys: tuple[bytes, bytes] | None, dead_peer_s: float
    ) -> None:
        """Takes over `sock`. `keys` are (send, receive), None for plain bytes; `dead_peer_s` as for Mesh."""
        self.peer, self.service, self.why = peer, service, ""
        self._wire, self._keys, self._dead_peer_s = sock, keys, dead_peer_s
        self._frame_bytes = FRAME_SIZES.get(service.partition("/")[0], FRAME_BYTES)
        self._answered_at = time.monotonic()  # the last check that found the peer well
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # for the fields below; a socket closes only under it
        self._sides = {sock: peer}
        self._cut, self._running = False, 0

    def pump(self, local: socket.socket, stats: WireStats, on_end: Callable[[bool], None] | None = None) -> None:
        """Carry bytes both ways in threads, then close both sockets and call `on_end(clean)`; `why` tells more."""
        stats.opened += 1
        stats.connections += 1
        with self._lock:
            self._sides[local], self._running = "this box", 2
            _tune(local)
        leave = functools.partial(self._leave, stats, on_end)
        for carry in (self._outward, self._inward) if self._keys else (self._plain_outward, self._plain_inward):
            args = (functools.partial(carry, local, stats), leave)
            thread = threading.Thread(target=self._run, name=f"wire-{self.peer}", args=args, daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:
                self.close("this box cannot start another thread")
                leave()

    def close(self, why: str = "closed by this node") -> None:
        """Reset both sides; returns at once. Safe from any thread and more than once."""
        with self._lock:
            if self._cut:
                return
            self._cut, self.why = True, why
            for sock in self._sides:
                if self._running:
                    _wake(sock, socket.SHUT_RD)  # which does not tell the other side of an end
                else:
                    _reset(sock)

    def join(self, deadline: float) -> None:
        """Wait until the pumps have ended, at most until `deadline` (monotonic seconds)."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, carry: Callable[[], None], leave: Callable[[], None]) -> None:
        from cryptography.exceptions import InvalidTag

        try:
            self._check()
            carry()
        except InvalidTag:
            self.close(f"bytes from {self.peer} were changed on the way")
        except OSError as error:
            self.close(str(error))
        except BaseException:
            self.close("a fault in shardbox")
            raise
        finally:
            leave()

    def _leave(self, stats: WireStats, on_end: Callable[[bool], None] | None) -> None:
        """The last one closes both sockets: until then no descriptor can change its meaning."""
        with self._lock:
            self._running -= 1
            if self._running:
                return
            clean, sides, self._sides = not self._cut, self._sides, {}
            for sock in sides:
                sock.close() if clean else _reset(sock)
        stats.connections -= 1
        stats.resets += not clean
        if on_end is not None:
            on_end(clean)

    def _check(self) -> None:
        """Raise if this link is cut or an end is gone, also one that this thread neither reads nor writes."""
        self._check_uncut()
        for sock, side in self._sides.items():
            if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise ConnectionResetError(f"{side} broke the connection: {os.strerror(error)}")
        now = time.monotonic()
        if _unanswered_s(self._wire) <= self._dead_peer_s:
            self._answered_at = now
        elif now - self._answered_at > 2 * CHECK_S:  # one bad look may fall just after a probe
            raise ConnectionAbortedError(f"{self.peer} has not answered for {self._dead_peer_s:.0f} s")

    def _moved(self, sock: socket.socket, move: Callable[[T], int], what: T) -> int:
        """What `move`, a call of `sock`, returns for `what`; looks around while it waits."""
        while True:
            try:
                moved = move(what)
            except BlockingIOError:
                self._check()
                continue
            except OSError as error:
                raise self._broken(sock, error) from error
            if not moved:
                self._check_uncut()
            return moved

    def _broken(self, sock: socket.socket, error: OSError) -> ConnectionResetError:
        return ConnectionResetError(f"{self._sides[sock]} broke the connection: {error.strerror}")

    def _check_uncut(self) -> None:
        """What looks like an end may be close(), which has woken this thread."""
        if self._cut:
            raise ConnectionAbortedError(self.why)

    def _deliver(self, sink: socket.socket, view: memoryview) -> None:
        while view:
            view = view[self._moved(sink, sink.send, view) :]

    def _tools(self, way: int) -> tuple[AESGCM, memoryview, memoryview]:
        """(cipher, buffer for a plain frame, buffer for a sealed one); they take memory only once touched."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        assert self._keys is not None
        plain, sealed = (mmap.mmap(-1, self._frame_bytes + more) for more in (0, _OVERHEAD_BYTES))
        return AESGCM(self._keys[way]), memoryview(plain), memoryview(sealed)

    def _outward(self, local: socket.socket, stats: WireStats) -> None:
        """Carry local -> mesh until the local end."""
        aead, plain, sealed = self._tools(0)
        number, got = 0, 1
        while got:
            got = self._moved(local, local.recv_into, plain)
            self._deliver(self._wire, seal_frame(aead, number, plain[:got], sealed))
            number += 1
            stats.sent_bytes += got
        self._wire.shutdown(socket.SHUT_WR)

    def _inward(self, local: socket.socket, stats: WireStats) -> None:
        """Carry mesh -> local until the authenticated end. Nothing is delivered that was not verified."""
        aead, plain, sealed = self._tools(1)
        number, have, ended = 0, 0, False
        while not ended:
            got = self._moved(self._wire, self._wire.recv_into, sealed[have:])
            if not got:
                raise ConnectionResetError(f"{self.peer} broke the connection: cut off")
            number, used, gained, ended = open_frames(aead, number, sealed[: have + got], plain)
            self._deliver(local, plain[:gained])
            stats.received_bytes += gained
            have += got - used
            if used:
                sealed[:have] = sealed[used : used + have]
        local.shutdown(socket.SHUT_WR)

    def _plain_outward(self, local: socket.socket, stats: WireStats) -> None:
        for moved in self._plain(local, self._wire):
            stats.sent_bytes += moved

    def _plain_inward(self, local: socket.socket, stats: WireStats) -> None:
        for moved in self._plain(self._wire, local):
            stats.received_bytes += moved

    def _plain(self, source: socket.socket, sink: socket.socket) -> Iterator[int]:
        """Carry source -> sink until the end, in the kernel where there is splice(2): yields the bytes of each move."""
        if hasattr(os, "splice"):
            out, into = os.pipe()
            try:
                yield from self._spliced(source, out, into, sink)
            finally:
                os.close(out)
                os.close(into)
        else:
            view = memoryview(bytearray(FRAME_BYTES))
            while moved := self._moved(source, source.recv_into, view):
                self._deliver(sink, view[:moved])
                yield moved
        sink.shutdown(socket.SHUT_WR)

    def _spliced(self, source: socket.socket, out: int, into: int, sink: socket.socket) -> Iterator[int]:
        """The same through a pipe. Every call here is paid at each hop of each token, so there are few."""
        room, waiting, side = _widened(into), 0, source  # waiting: bytes in the pipe
        splice, from_fd, to_fd = os.splice, source.fileno(), sink.fileno()
        while True:
            try:
                if not waiting:
                    side = source
                    waiting = splice(from_fd, into, room)
                    if not waiting:
                        return self._check_uncut()
                    side = sink
                moved = splice(out, to_fd, waiting)
            except BlockingIOError:
                self._check()
                continue
            except OSError as error:
                raise self._broken(side, error) from error
            waiting -= moved
            yield moved


LinkT = TypeVar("LinkT", bound=SealedLink)


class SealedStream(SealedLink):
    """A connection that one thread of this node uses itself: without pumps, bytes are copied once less at each end.

    That thread leaves it by the end of `with`; `close` from another one ends its waiting. `outgoing` is memory for
    what it is to send, of the size that goes at once.
    """

    def __init__(
        self, sock: socket.socket, *, peer: str, service: str, keys: tuple[bytes, bytes] | None, dead_peer_s: float
    ) -> None:
        super().__init__(sock, peer=peer, service=service, keys=keys, dead_peer_s=dead_peer_s)
        _tune(sock)
        self.silent_s = math.inf  # a call in which nothing moves for longer raises TimeoutError
        self._running, self._since = 1, 0.0
        self._buffer, self.outgoing = (memoryview(mmap.mmap(-1, self._frame_bytes)) for _ in range(2))
        self._opened, self._ended, self._have = self._buffer[:0], False, 0  # bytes to be read; sealed ones to be opened
        self._numbers = [0, 0]  # of the next frame out, and in
        if keys:
            (self._sealer, _, self._sealed), (self._opener, _, self._came) = self._tools(0), self._tools(1)

    def __enter__(self) -> SealedStream:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running = 0
            self._sides.clear()
            _reset(self._wire) if self._cut else self._wire.close()

    def read(self, limit: int) -> memoryview:
        """Up to `limit` bytes, good until the next call; none at the end. Raises OSError."""
        while not self._opened and not self._ended:
            self._fill()
        piece, self._opened = self._opened[:limit], self._opened[limit:]
        return piece

    def recv_into(self, view: memoryview | bytearray) -> int:
        """As of a socket. Raises OSError."""
        piece = self.read(len(view))
        view[: len(piece)] = piece
        return len(piece)

    def sendall(self, data: bytes | memoryview) -> None:
        """As of a socket. Raises OSError."""
        view = memoryview(data)
        for start in range(0, len(view), self._frame_bytes):
            piece = view[start : start + self._frame_bytes]
            if self._keys:
                piece = seal_frame(self._sealer, self._numbers[0], piece, self._sealed)
                self._numbers[0] += 1
            self._deliver(self._wire, piece)

    def _fill(self) -> None:
        from cryptography.exceptions import InvalidTag

        if not self._keys:
            got = self._moved(self._wire, self._wire.recv_into, self._buffer)
            self._opened, self._ended = self._buffer[:got], not got
            return
        came = self._came
        got = self._moved(self._wire, self._wire.recv_into, came[self._have :])
        if not got:
            raise ConnectionResetError(f"{self.peer} broke the connection: cut off")
        have = self._have + got
        try:
            found = open_frames(self._opener, self._numbers[1], came[:have], self._buffer)
        except InvalidTag:
            raise ConnectionAbortedError(f"bytes from {self.peer} were changed on the way") from None
        self._numbers[1], used, gained, self._ended = found
        self._opened, self._have = self._buffer[:gained], have - used
        if used:
            came[: self._have] = came[used:have]

    def _moved(self, sock: socket.socket, move: Callable[[T], int], what: T) -> int:
        self._since = time.monotonic()
        return super()._moved(sock, move, what)

    def _check(self) -> None:
        super()._check()
        if time.monotonic() - self._since > self.silent_s:
            raise TimeoutError(f"nothing moved for {self.silent_s:.0f} s")


class _Station:
    """Serves what connects to its listeners, and owns the links that it made, until close().

    Each connection has a thread and is a guest until that calls `_take`. Past HALF_OPEN_MAX the oldest guest is
    hung up on: idle strangers cannot keep out a node, which needs 3 ms to prove itself.
    """

    def __init__(self, serve: Callable[[socket.socket, str], None], hang_up: Callable[[socket.socket], None]) -> None:
        """`serve(sock, address)` must `_take`, then close `sock` or hand it on; `hang_up(sock)` ends its waiting."""
        from weakref import WeakSet

        self._serve_guest, self._hang_up = serve, hang_up
        self._doors: list[tuple[socket.socket, threading.Thread]] = []
        self._closing, self._lock = threading.Event(), threading.Lock()  # the lock is for the fields below
        self._guests: dict[threading.Thread, socket.socket] = {}  # oldest first
        self._links: WeakSet[SealedLink] = WeakSet()

    def _open_door(self, listener: socket.socket) -> None:
        listener.settimeout(None)
        thread = threading.Thread(target=self._accept, name="door", args=(listener,), daemon=True)
        self._doors.append((listener, thread))
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            oldest = None
            try:
                sock, address = listener.accept()
                thread = threading.Thread(target=self._serve_guest, args=(sock, str(address[0])), daemon=True)
                with self._lock:
                    thread.start()
                    self._guests[thread] = sock
                    if len(self._guests) > HALF_OPEN_MAX:
                        oldest = next(iter(self._guests))
                        self._hang_up(self._guests.pop(oldest))
            except (OSError, RuntimeError):  # no descriptors or threads left, or the peer has gone again
                self._closing.wait(0.05)
            if oldest:
                oldest.join(1)  # bounds the threads too
        listener.close()

    def _take(self) -> bool:
        """Whether this thread has its guest's socket for itself from now on; False if it was hung up on."""
        with self._lock:
            return self._guests.pop(threading.current_thread(), None) is not None

    def _adopt(self, link: LinkT) -> LinkT:
        with self._lock:
            self._links.add(link)
        if self._closing.is_set():
            link.close()
        return link

    def close(self) -> None:
        """Close the listeners, reset every connection, wait for the threads (bounded)."""
        deadline = time.monotonic() + CLOSE_WAIT_S
        self._closing.set()
        for listener, _ in self._doors:
            _wake(listener)  # ends accept() on Linux; elsewhere the close does
            if sys.platform != "linux":
                listener.close()
        with self._lock:
            guests, self._guests, links = self._guests, {}, list(self._links)
            for sock in guests.values():
                self._hang_up(sock)
        for link in links:
            link.close()
        for thread in (*(door for _, door in self._doors), *guests):
            thread.join(max(0.0, deadline - time.monotonic()))
        for link in links:
            link.join(deadline)


def _until(sock: socket.socket, deadline: float) -> None:
    sock.settimeout(max(0.001, deadline - time.monotonic()))


def _say(tls: ssl.SSLSocket, deadline: float, **note: object) -> bytes:
    """The preface that was sent."""
    line = json.dumps({"random": secrets.token_hex(32), **note}).encode() + b"\n"
    _until(tls, deadline)
    tls.sendall(line)
    return line


def _hear(tls: ssl.SSLSocket, deadline: float) -> tuple[bytes, dict[str, object]]:
    """(the other side's preface, what it says). Raises OSError."""
    _until(tls, deadline)
    with tls.makefile("rb") as file:
        line = file.readline(PREFACE_MAX_BYTES)
    try:
        return line, dict(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise ConnectionAbortedError("it hung up, or what came is no preface") from None


def _leave_tls(tls: ssl.SSLSocket, deadline: float) -> socket.socket:
    """The bare, blocking socket after a close_notify both ways (RFC 8446, 6.1); `tls` has no descriptor any more."""
    _until(tls, deadline)
    tls.unwrap()
    tls.settimeout(None)
    return socket.socket(tls.family, tls.type, tls.proto, fileno=tls.detach())


def _handshake_failure(error: OSError) -> tuple[str, str, str]:
    """(kind as a server counts it, kind and meaning to the one who called)."""
    reason = getattr(error, "reason", None) or ""  # OpenSSL's
    if isinstance(error, TimeoutError):
        return "timeout", "unreachable", "it accepts connections but does not answer"
    if "CERT" in reason or "ALERT" in reason:  # all that OpenSSL says of certificates, here or there
        return "wrong_secret", "wrong_secret", "the other side has another cluster secret, or another cluster name"
    if isinstance(error, ConnectionError) or "EOF" in str(error):
        return "not_tls", "busy", "it hung up at once: too busy, or no shardbox"
    return "not_tls", "protocol", "what answers there is no shardbox"


# what is at the near end of a service: a socket to be joined to it, or what uses the connection, in its own thread
Near: TypeAlias = "socket.socket | Callable[[SealedStream], None]"
OpenService = Callable[[str, str], tuple[Near, WireStats]]


class Mesh(_Station):
    """This node's listeners and its connections to other nodes."""

    def __init__(
        self, *, keys: MeshKeys, open_service: OpenService, handshake_deadline_s: float = 10, dead_peer_s: float = 20
    ) -> None:
        """`open_service(peer, service)` connects the local side; it raises ShardboxError or OSError to refuse.

        `handshake_deadline_s`: from accepting to pumping. `dead_peer_s`: for bytes unanswered; kernels need 2.
        """
        super().__init__(self._serve, _wake)
        self.refusals: Counter[str] = Counter()
        self.last_refused: dict[str, str] = {}  # kind -> who it was
        self._keys, self._open_service = keys, open_service
        self._handshake_deadline_s, self._dead_peer_s = handshake_deadline_s, dead_peer_s

    def listen(self, address: str, port: int) -> int:
        """The port now listened on (0: any free one). May be called for several addresses. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=1024)
        self._open_door(listener)
        return int(listener.getsockname()[1])

    def _serve(self, sock: socket.socket, address: str) -> None:
        """One accepted connection, from the first byte until its pumps run or it is refused."""
        deadline, kind, proven = time.monotonic() + self._handshake_deadline_s, "", False
        try:
            _tune(sock)
            _until(sock, deadline)
            if sock.recv(1, socket.MSG_PEEK) != b"\x16":  # a TLS handshake record (RFC 8446, 5.1)
                raise OSError("not even an alert as an answer")
            _until(sock, deadline)
            # a duplicate: until `_take` another thread may hang up on `sock`
            with self._keys.server.wrap_socket(sock.dup(), True, do_handshake_on_connect=False) as tls:
                tls.do_handshake()  # unlike wrap_socket() it never passes over a socket that is not connected
                proven = self._take()
                kind = self._answer(tls, deadline) if proven else "busy"
        except OSError as error:
            kind = "protocol" if proven else _handshake_failure(error)[0]
        if not proven and not self._take():
            kind = "busy"
        sock.close()
        if kind:
            self.refuse(kind, address)

    def refuse(self, kind: str, who: str) -> None:
        """Count it for `status`, which names them all."""
        with self._lock:
            self.refusals[kind] += 1
            self.last_refused[kind] = who

    def _answer(self, tls: ssl.SSLSocket, deadline: float) -> str:
        """Open what a proven peer asks for and start pumping; "" or the kind of refusal. Raises OSError."""
        asked, note = _hear(tls, deadline)
        peer, service, local = str(note.get("from")), str(note.get("service")), typing.cast("Near | None", None)
        kind, reason = self._mismatch(note)
        if not kind and not self._is_pinned(tls, peer):
            kind, reason = "wrong_key", f"[[nodes]] pins another key for {peer!r:.70} than the caller has"
        if service and not kind:  # else a probe: only who we are
            try:
                local, stats = self._open_service(peer, service)
            except (ShardboxError, OSError) as error:
                kind = "old_generation" if getattr(error, "kind", "") == "old_generation" else "refused"
                reason = error.what if isinstance(error, ShardboxError) else f"cannot open it: {error}"
        try:
            answered = _say(tls, deadline, node=self._keys.node, kind=kind, reason=reason[:500])
            bare = _leave_tls(tls, deadline)  # also when refusing: closing over unread bytes could destroy it
        except OSError:
            if isinstance(local, socket.socket):
                _reset(local)
            raise
        keys = _frame_keys(asked, answered)[::-1]
        if local is None:
            bare.close()
        elif isinstance(local, socket.socket):
            self._link(SealedLink, bare, peer, service, keys).pump(local, stats)
        else:
            stream = self._link(SealedStream, bare, peer, service, keys)
            threading.Thread(target=local, name=f"stream-{peer}", args=(stream,), daemon=True).start()
        return kind

    def _mismatch(self, note: dict[str, object]) -> tuple[str, str]:
        """(kind, reason) to refuse one that speaks otherwise or means another node; else empty."""
        theirs = note.get("protocol")
        if theirs != MESH_PROTOCOL:
            return "protocol", f"this node speaks mesh protocol {MESH_PROTOCOL}, the caller {theirs!r:.20}"
        theirs = note.get("encryption")
        if theirs != self._keys.encryption:
            return "encryption", f'this node has encryption = "{self._keys.encryption}", the caller {theirs!r:.20}'
        if note.get("to") not in ("", self._keys.node):
            return "wrong_name", f"the node there is {self._keys.node}"
        return "", ""

    def _is_pinned(self, tls: ssl.SSLSocket, node: str) -> bool:
        """Whether the one at the other end may be `node`: it has proved the key of its certificate."""
        from cryptography.x509 import load_der_x509_certificate

        pin = self._keys.pins.get(node.lower())
        if pin is None:
            return True
        public = load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"").public_key()
        return pin == _key_text(typing.cast("Ed25519PublicKey", public))

    def _link(
        self, kind: type[LinkT], sock: socket.socket, peer: str, service: str, keys: tuple[bytes, bytes]
    ) -> LinkT:
        plain = self._keys.encryption == "off" and service != "control"  # orders stay sealed: they are few
        return self._adopt(
            kind(sock, peer=peer, service=service, keys=None if plain else keys, dead_peer_s=self._dead_peer_s)
        )

    def dial(self, address: str, port: int, peer: str, service: str, timeout_s: float) -> SealedLink:
        """A link to the node `peer` for `service`; blocks up to `timeout_s`. Raises MeshError."""
        return self._call(SealedLink, address, port, peer, service, timeout_s)[0]

    def stream(self, address: str, port: int, peer: str, service: str, timeout_s: float) -> SealedStream:
        """The same for a thread that uses it itself."""
        return self._call(SealedStream, address, port, peer, service, timeout_s)[0]

    def connect(self, address: str, port: int, peer: str, service: str, timeout_s: float) -> socket.socket:
        """The same as a plain stream socket. A reset may look like an end there: check lengths or hashes."""
        link = self.dial(address, port, peer, service, timeout_s)
        ours, theirs = socket.socketpair()
        link.pump(theirs, WireStats())
        return ours

    def drop(self, peer: str) -> None:
        """Reset every connection with a peer that says nothing: a stopped process would hold them open for ever."""
        with self._lock:
            links = [link for link in self._links if link.peer == peer]
        for link in links:
            link.close(f"{peer} is lost")

    def probe(self, address: str, port: int, timeout_s: float) -> str:
        """The name of the node there, if it has the secret and speaks as we do. Raises MeshError."""
        link, node = self._call(SealedLink, address, port, "", "", timeout_s)
        link.close()
        return node

    def _call(
        self, wanted: type[LinkT], address: str, port: int, peer: str, service: str, timeout_s: float
    ) -> tuple[LinkT, str]:
        """(link, name of the node there) once `service` is open; "" as peer and service only asks for the name."""
        where = f"{peer} at {address}:{port}".removeprefix(" at ")
        deadline, step = time.monotonic() + timeout_s, "no connection"
        ask = {"protocol": MESH_PROTOCOL, "encryption": self._keys.encryption, "from": self._keys.node}
        ask |= {"to": peer, "service": service}
        try:
            with socket.create_connection((address, port), max(0.001, timeout_s)) as sock:
                _tune(sock)
                _until(sock, deadline)
                step = "handshake"
                with self._keys.client.wrap_socket(sock, do_handshake_on_connect=False) as tls:
                    tls.do_handshake()
                    step = "lost on the way"
                    asked = _say(tls, deadline, **ask)
                    answered, answer = _hear(tls, deadline)
                    node = str(answer.get("node"))
                    if not answer.get("kind") and not self._is_pinned(tls, peer or node):
                        what = f"[[nodes]] pins another key for {peer or node!r:.70} than the one that answers has"
                        raise MeshError(what, kind="wrong_key", where=where)
                    bare = _leave_tls(tls, deadline)
        except OSError as error:
            kind, what = "unreachable", f"{step}: {error}"
            if step == "handshake":
                _, kind, what = _handshake_failure(error)
            raise MeshError(what, kind=kind, where=where) from error
        if answer.get("kind"):
            bare.close()
            raise MeshError(str(answer.get("reason")), kind=str(answer["kind"]), where=where)
        return self._link(wanted, bare, peer, service, _frame_keys(asked, answered)), node


class Wire(_Station):
    """The near end of one engine port on another node: what connects here, arrives there."""

    def __init__(
        self,
        *,
        listener: socket.socket,
        dial: Callable[[], SealedLink],
        stats: WireStats,
        on_trouble: Callable[[str], None],
    ) -> None:
        """Takes over `listener`. `on_trouble(reason)` tells of each link that did not end cleanly."""
        super().__init__(self._forward, _reset)
        self.stats, self.last_failure = stats, ""  # of dialling
        self._dial, self._on_trouble = dial, on_trouble
        self._open_door(listener)

    def _forward(self, sock: socket.socket, _address: str) -> None:
        """Join one connection of the engine to the far node, or reset it at once: ZeroMQ then tries again."""
        try:
            link = self._adopt(self._dial())
        except ShardboxError as error:
            self.stats.resets += 1
            self.last_failure = error.what
            if self._take():
                _reset(sock)
            return
        if self._take():
            link.pump(sock, self.stats, lambda clean: self._ended(link, clean))
        else:
            link.close()

    def _ended(self, link: SealedLink, clean: bool) -> None:
        if not clean and not self._closing.is_set():
            self._on_trouble(link.why)


# ======================================================================================================
# 12. Files: what a box takes from others, chunk by chunk; each is checked as it lands, and passed on at once
# ======================================================================================================
# On a `file/<root>` connection the taker speaks first, one letter:
#   L             the answer is a length (4 bytes) and JSON: sizes and chunk hashes, which give <root>
#   A, a bitmap   of the chunks that it lacks and that nobody is sending it. The answer is the number (4 bytes, signed)
#                 of the one that this giver has handed out least; -1: none of them is here now. Then the taker says
#                 y, and the chunk's bytes come, or n: it has found it elsewhere in the meantime
# The giver chooses, because it alone knows what it gave to whom: every chunk leaves a lone giver once before any leaves
# it twice, and the takers pass the rest on among themselves. A taker has one connection to each giver, and a giver
# turns nobody away: fewer of either leave cables idle (tests/unit/test_copies.py has the model that says so). Nothing
# is believed of either side: what does not hash to what <root> says is fetched again, and its giver left alone.

LONE_STREAMS = 2  # connections to an only giver, once a chunk has come: one receives while the other hashes
MAX_STREAMS = 16  # in all
SILENT_S = 15.0  # a giver that sends nothing for so long is given up for now
BENCH_S = 10.0  # how long one that failed is left alone
SLOW_S = 5.0  # once all that is missing is on its way: a chunk that takes longer, and four times as long as others,
# may come from a second giver too
GIVE_UP_S = 60.0  # a copy into which nothing came for so long has failed
OFFER_WAIT_S = 1.0  # how long a giver waits for a chunk of its own to land before it says -1
MAX_LISTING_BYTES = 32 * MIB
TRICKLE_BYTES_PER_S = 4 * MIB  # of a copy on a box whose engine is answering
READ_BYTES_PER_S = 16 * MIB  # to hash what is on the disk there: one core in thirty, or less
_CHUNK_NUMBER = struct.Struct(">i")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    """One file of a listing."""

    name: str
    size: int
    hashes: tuple[str, ...]  # SHA-256 of each CHUNK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The content of a model, all its parts in order, or of a set of engine files."""

    files: tuple[ListedFile, ...]

    @property
    def root(self) -> str:
        """The hash that stands for all of it."""
        return root_hash([(file.size, file.hashes) for file in self.files])

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def chunks(self) -> tuple[tuple[int, int, int, str], ...]:
        """(number of its file, offset, bytes, SHA-256) of each chunk; chunks are numbered through all files."""
        return tuple(
            (n, start, min(CHUNK_BYTES, file.size - start), digest)
            for n, file in enumerate(self.files)
            for start, digest in zip(range(0, file.size, CHUNK_BYTES), file.hashes, strict=True)
        )


def read_listing(data: bytes, root: str) -> Listing:
    """The listing that another node sent. Raises MessageError where it is not the one that `root` stands for."""
    try:
        listing = from_json(Listing, json.loads(data), "listing")
        if listing.root == root and listing.files and listing.chunks:
            return listing
    except (ValueError, RecursionError):  # no JSON, or sizes that contradict the number of hashes
        pass
    raise MessageError(f"sent a list of chunks that is not that of {root[:8]}")


class HandedOut:
    """How often a giver gave each chunk. In bitmaps: a model may have 100,000 chunks, and each of them asks here."""

    def __init__(self) -> None:
        self._more: list[int] = []  # [n]: the chunks given more than n times

    def pick(self, offered: int) -> int:
        """Of the chunks in the bitmap `offered` the one given least, of these the first, as given once more now;
        -1 for none."""
        if not offered:
            return -1
        times = next((n for n, more in enumerate(self._more) if offered & ~more), len(self._more))
        if times == len(self._more):
            self._more.append(0)
        least = offered & ~self._more[times]
        first = least & -least
        self._more[times] |= first
        return first.bit_length() - 1

    def put_back(self, number: int) -> None:
        """That one was not wanted."""
        self._more[self.times(number) - 1] &= ~(1 << number)

    def times(self, number: int) -> int:
        """How often a chunk was given."""
        return sum(more >> number & 1 for more in self._more)


class Pace:
    """What copies may take of this box while its engines answer, or always if a rate is set. Any thread."""

    def __init__(self, limit: int | None, busy: Callable[[], bool], trickle: int = TRICKLE_BYTES_PER_S) -> None:
        """`limit`: bytes a second; 0 for none; None: none, but `trickle` while engines answer."""
        self._limit, self._busy, self._trickle, self._lock, self._next = limit, busy, trickle, threading.Lock(), 0.0

    def spend(self, count: int) -> None:
        """Wait until `count` more bytes may have been moved."""
        rate = self._limit if self._limit is not None else self._trickle if self._busy() else 0
        if rate:
            with self._lock:
                now = time.monotonic()
                self._next = max(self._next, now) + count / rate
            time.sleep(min(self._next - now, SILENT_S / 3))


def receive_exactly(sock: socket.socket | SealedStream, view: memoryview) -> None:
    """Fill `view`. Raises OSError when the connection ends before."""
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionResetError("the connection ended early")
        view = view[got:]


class Landing:
    """Files that come in: beside their names until they are whole, then moved in place. What is there of an earlier
    attempt is believed only as far as its hashes are right, so whatever ended that attempt does no harm."""

    def __init__(
        self, listing: Listing, paths: Sequence[str], *, mode: int = 0o644, replace: bool = False, spend: Spend = freely
    ) -> None:
        """`replace`: files with other bytes may stand at `paths`. `spend` is asked before what is there is read.
        Nothing is touched before open()."""
        self.listing, self.paths, self.chunks, self.held = listing, tuple(paths), listing.chunks, 0
        self.changed = threading.Condition()  # told of each chunk
        self.files: list[int] = []  # descriptors
        self._mode, self._replace, self._spend = mode, replace, spend
        self._shorter = {n: CHUNK_BYTES - size for n, (_, _, size, _) in enumerate(self.chunks) if size < CHUNK_BYTES}
        self._settled: set[int] = set()  # files that stood there already, right and whole
        self._writing = [threading.Lock() for _ in range(MAX_STREAMS)]  # of a chunk: two may be on it

    @property
    def own(self) -> list[str]:
        """The paths that this puts there."""
        return [path for number, path in enumerate(self.paths) if number not in self._settled]

    @property
    def missing(self) -> int:
        """A bitmap."""
        return ~self.held & ((1 << len(self.chunks)) - 1)

    @property
    def held_bytes(self) -> int:
        """Bytes that are here and right."""
        held = self.held
        return held.bit_count() * CHUNK_BYTES - sum(less for n, less in self._shorter.items() if held >> n & 1)

    def open(self) -> None:
        """Take stock of what is there already, and of the room. Raises FileError, OSError."""
        if len(self.paths) != len(self.listing.files):
            what = f"has {len(self.listing.files)} parts elsewhere, {len(self.paths)} by its name"
            raise FileError(what, where=self.paths[0], hint="name its first part as it is named there")
        for number, path in enumerate(self.paths):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.lexists(path) and self._take_stock_of(number, path):
                continue
            self.files.append(self._open_draft(f"{path}.part"))
            self._check(number, self.files[-1])
            if number not in self._settled and os.path.isfile(path):
                self._borrow(number, path)
        self._check_room()
        for number, file in enumerate(self.files):
            size = self.listing.files[number].size
            if number not in self._settled and os.fstat(file).st_size > size:  # to lengthen it, FAT would write zeros
                os.ftruncate(file, size)

    def _take_stock_of(self, number: int, path: str) -> bool:
        """Whether the right file stands there. Raises FileError where another one does and must stay."""
        entry = self.listing.files[number]
        if os.path.isfile(path) and os.path.getsize(path) == entry.size:
            file = os.open(path, os.O_RDONLY)
            self.files.append(file)
            if self._check(number, file):
                self._settled.add(number)
                return True
            os.close(self.files.pop())
            self._forget(number)
        if os.path.isdir(path):
            raise FileError("is a folder", where=path, hint="name the file that is to be there")
        if not self._replace:
            what, hint = "is there with other bytes", "with --replace the right file takes its place"
            raise FileError(what, where=path, hint=hint)
        return False

    def _open_draft(self, path: str) -> int:
        """The descriptor of a file of ours alone: no link to another place, no second name of a finished one."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        for _ in range(2):
            try:
                file = os.open(path, flags, self._mode)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
                    raise
                os.unlink(path)
                continue
            found = os.fstat(file)
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(file)
                    what, hint = "another copy writes it", "wait until that one has ended"
                    raise FileError(what, where=path, hint=hint) from None
                return file
            os.close(file)
            os.unlink(path)
        raise FileError("cannot be made", where=path, hint="delete it")

    def _check(self, number: int, file: int) -> bool:
        """Note which chunks of a file are right; whether all are. Holes are passed over."""

        def right(chunk: tuple[int, int, int, str]) -> bool:
            _, start, size, wanted = chunk
            try:
                data = os.lseek(file, start, os.SEEK_DATA)
            except OSError as error:  # ENXIO: nothing but a hole from here to the end; else it cannot be told
                data = start + size if error.errno == errno.ENXIO else start
            return data < start + size and hash_range(file, start, size, self._spend) == wanted

        mine = [(n, chunk) for n, chunk in enumerate(self.chunks) if chunk[0] == number]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for (n, _), good in zip(mine, pool.map(right, (chunk for _, chunk in mine)), strict=True):
                self.held |= good << n
        return all(self.held >> n & 1 for n, _ in mine)

    def _forget(self, number: int) -> None:
        for n, chunk in enumerate(self.chunks):
            if chunk[0] == number:
                self.held &= ~(1 << n)

    def _borrow(self, number: int, path: str) -> None:
        """Take the right chunks of the file that is to be replaced: often it lacks one alone."""
        with open(path, "rb") as file:
            for n, (owner, start, size, wanted) in enumerate(self.chunks):
                if owner == number and not self.held >> n & 1:
                    data = os.pread(file.fileno(), size, start)
                    if len(data) == size and hashlib.sha256(data).hexdigest() == wanted:
                        self.write(n, memoryview(data))

    def _check_room(self) -> None:
        drafts = [n for n in range(len(self.files)) if n not in self._settled]
        need = sum(self.listing.files[n].size - os.fstat(self.files[n]).st_blocks * 512 for n in drafts)
        for n in drafts[:1]:
            found = os.fstatvfs(self.files[n])
            free = found.f_bavail * found.f_frsize
            if need > free:
                what = f"needs {format_size(need)} more, and {format_size(free)} are free"
                hint = f"make room for {format_size(need - free)}; what is there already is kept"
                raise FileError(what, where=os.path.dirname(self.paths[n]), hint=hint)

    def write(self, number: int, data: memoryview, at: int = 0) -> None:
        """Store bytes of a chunk, from `at` in it, unless all of it is here: with its last byte it counts, so its hash
        must have been right before that. Raises OSError, as on a full disk."""
        owner, start, size, _ = self.chunks[number]
        with self._writing[number % len(self._writing)]:
            while data and not self.held >> number & 1:
                written = os.pwrite(self.files[owner], data, start + at)
                at, data = at + written, data[written:]
                if at == size:
                    with self.changed:
                        self.held |= 1 << number
                        self.changed.notify_all()

    def finish(self, sha256: Sequence[str] = ()) -> None:
        """Move whole files in place; the first part comes last, for a model counts from there. `sha256`: what
        sha256sum must print for each. Raises FileError, OSError."""
        assert not self.missing
        for file, path, wanted in zip(self.files, self.paths, sha256, strict=False):
            found = hash_range(file, 0, os.fstat(file).st_size, self._spend)
            if found != wanted:
                what, hint = f"the copies there are have SHA-256 {found}", f"the TOML says {wanted}: correct either"
                raise FileError(what, where=path, hint=hint)
        for number in reversed(range(len(self.files))):
            if number not in self._settled:
                os.fsync(self.files[number])
                self._move(f"{self.paths[number]}.part", self.paths[number])
        for folder in {os.path.dirname(path) for path in self.paths}:
            with contextlib.suppress(OSError):  # some file systems cannot
                descriptor = os.open(folder, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

    def _move(self, draft: str, path: str) -> None:
        if self._replace:
            os.replace(draft, path)
            return
        try:
            os.link(draft, path)  # unlike a rename it never takes another's place
            os.unlink(draft)
        except FileExistsError:
            raise FileError("was put there meanwhile", where=path, hint="delete one of the two") from None
        except OSError:  # FAT has no links
            if os.path.lexists(path):
                raise FileError("was put there meanwhile", where=path, hint="delete one of the two") from None
            os.rename(draft, path)

    def close(self) -> None:
        """Give the descriptors back; what has landed stays."""
        with contextlib.ExitStack() as stack:
            for writing in self._writing:
                stack.enter_context(writing)
            stack.enter_context(self.changed)
            for file in self.files:
                with contextlib.suppress(OSError):  # a disk that is gone; what counts was synced before
                    os.close(file)
            self.files = []


def read_ledger(folder: str) -> dict[str, list[int]]:
    """What shardbox itself has put on this box: path -> size, mtime and inode when it was whole, [] of a draft."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "copied.json"), "rb") as file:
        data = json.load(file)
        return {str(path): list(entry) for path, entry in data.items()} if isinstance(data, dict) else {}
    return {}


def note_in_ledger(folder: str, paths: Iterable[str]) -> None:
    """Remember these files as put here by shardbox, and forget what is gone. Raises OSError."""
    ledger = {**read_ledger(folder), **{path: [] for path in paths}}
    for path in [path for path in ledger if not path.endswith(".part")]:
        with contextlib.suppress(OSError):
            ledger[path] = ledger[path] or list(file_signature(path)[1:])
    kept = {path: entry for path, entry in ledger.items() if os.path.lexists(path)}
    write_atomic(os.path.join(folder, "copied.json"), json.dumps(kept).encode())


def to_prune(folder: str, config: Config, node: NodeConfig) -> list[str]:
    """Files that shardbox put here, that are as it left them, and that belong to no model of the TOML any more, nor to
    the engines that this box runs."""
    given, named = os.path.join(folder, "engines"), set[str]()
    if engine_places(config, node, folder)[0] == [given]:
        named = {os.path.realpath(os.path.join(given, name)) for name in os.listdir(given)}
    for model in config.models:
        whole = find_model(model.path, folder=config.folder, dirs=node.model_dirs)
        for place in (whole, os.path.join(config.folder, os.path.expanduser(model.path))):
            named |= {os.path.realpath(part) for part in part_paths(place)} if place else set()
    named |= {f"{path}.part" for path in named}
    return [
        path
        for path, entry in sorted(read_ledger(folder).items())
        if os.path.realpath(path) not in named
        and os.path.isfile(path)
        and not os.path.islink(path)
        and (path.endswith(".part") or entry == list(file_signature(path)[1:]))
    ]


class Giver:
    """Hands out the chunks of one content that this node holds, whole or while they still come in."""

    def __init__(self, listing: Listing, paths: Sequence[str], pace: Pace, landing: Landing | None = None) -> None:
        self._listing, self._paths, self._pace, self._landing = listing, paths, pace, landing
        self._chunks = listing.chunks
        self.handed_out, self._lock = HandedOut(), threading.Lock()

    def serve(self, stream: SealedStream) -> None:
        """Answer one taker until it leaves; in a thread. Files that changed meanwhile end it."""
        with contextlib.suppress(OSError, struct.error), contextlib.ExitStack() as stack:
            stack.enter_context(stream)
            files = [stack.enter_context(file) for file in self._open()]
            letter, bitmap = bytearray(1), bytearray(-(-len(self._chunks) // 8))
            while stream.recv_into(letter):
                stream.silent_s = SILENT_S  # a taker that stands still must not keep others waiting
                if letter == b"L":
                    data = json.dumps(to_json(self._listing)).encode()
                    stream.sendall(_LENGTH.pack(len(data)) + data)
                else:
                    receive_exactly(stream, memoryview(bitmap))
                    self._offer(stream, files, int.from_bytes(bitmap, "little"))
                stream.silent_s = math.inf

    def _offer(self, stream: SealedStream, files: Sequence[BinaryIO], wanted: int) -> None:
        """Offer one chunk, and send it if that is still welcome."""
        self._await_chunk(wanted)
        number, answer = self._pick(wanted), bytearray(1)
        stream.sendall(_CHUNK_NUMBER.pack(number))
        if number < 0:
            return
        receive_exactly(stream, memoryview(answer))
        if answer == b"y":
            self._send(stream, files, number)
        else:
            with self._lock:
                self.handed_out.put_back(number)

    def _open(self) -> list[BinaryIO]:
        """Each connection has its own."""
        if self._landing is None:
            return [open(path, "rb") for path in self._paths]
        with self._landing.changed:
            if not self._landing.files:
                raise ConnectionAbortedError("that copy has just ended")
            return [open(os.dup(file), "rb") for file in self._landing.files]

    def _await_chunk(self, wanted: int) -> None:
        """Where none of these is here yet: wait a moment for one to land."""
        if (landing := self._landing) is not None:
            with landing.changed:
                landing.changed.wait_for(lambda: landing.held & wanted, OFFER_WAIT_S)

    def _pick(self, wanted: int) -> int:
        wanted &= self._landing.held if self._landing else (1 << len(self._chunks)) - 1
        with self._lock:
            return self.handed_out.pick(wanted)

    def _send(self, stream: SealedStream, files: Sequence[BinaryIO], number: int) -> None:
        owner, start, size, _ = self._chunks[number]
        while size:
            step = os.preadv(files[owner].fileno(), [stream.outgoing[:size]], start)
            if not step:
                raise ConnectionAbortedError("the file has become shorter")
            self._pace.spend(step)
            stream.sendall(stream.outgoing[:step])
            start, size = start + step, size - step


class Copy:
    """One content on its way to this box, from every node that has it or some of it. `run` blocks; the rest is for
    any thread."""

    def __init__(
        self, *, model: str, node: str, root: str, place: Callable[[Listing], Sequence[str]], pace: Pace,
        givers: Callable[[], Sequence[str]], connect: Callable[[str], SealedStream],
        replace: bool = False, mode: int = 0o644, sha256: Sequence[str] = (), spend: Spend = freely,
    ) -> None:  # fmt: skip
        """`model`: "" for engines. `place`: paths for a listing's files. `givers`: nodes that have it now, those with
        all of it first."""
        self.model, self.root, self.state, self.problem, self.hint = model, root, "copying", "", ""
        self.label = model or "the engines"
        self.landing: Landing | None = None
        self.giver: Giver | None = None
        self._node, self._place, self._pace, self._givers, self._connect = node, place, pace, givers, connect
        self._options: dict[str, Any] = {"replace": replace, "mode": mode, "spend": spend}
        self._sha256, self._lock, self._stop = sha256, threading.Lock(), threading.Event()
        self._in_flight: dict[int, list[float]] = {}  # chunk -> when each stream that receives it began
        self._chunk_s = 0.0  # what a chunk takes, about
        self._received = 0  # bytes, also of chunks that are not whole yet
        self._benched: dict[str, tuple[float, str]] = {}  # giver -> until when, and why
        self._streams: dict[threading.Thread, str] = {}
        self._open: set[SealedStream] = set()
        self._rates: collections.deque[tuple[float, int]] = collections.deque(maxlen=11)
        self._fault: OSError | None = None  # of this box's disk

    def run(self) -> None:
        """Fetch it; `state` says how that ended."""
        try:
            self._fetch()
            self.state = "landed"
        except ShardboxError as error:
            self.state, self.problem, self.hint = "failed", str(error).partition("\n")[0], error.hint
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            which = f"{error.filename} " if error.filename else ""
            self.state, self.problem = "failed", f"{which}cannot be written: {error.strerror}"
            self.hint = "make room: what has landed is kept" if full else "check that disk"
        finally:
            self._stop.set()
            for stream in list(self._open):
                stream.close()
            for thread in list(self._streams):
                thread.join(SILENT_S)
            if self.landing is not None:
                self.landing.close()

    def cancel(self) -> None:
        """End it soon; what has landed stays for another time."""
        self._stop.set()

    def view(self) -> CopyView:
        """How far it is."""
        landing, done, rate = self.landing, 0, 0.0
        size = landing.listing.size if landing else 0
        if landing:
            done = landing.held_bytes
        if len(self._rates) > 1:
            (then, before), (now, after) = self._rates[0], self._rates[-1]
            rate = (after - before) / max(now - then, 0.001)
        givers = tuple(sorted({name for thread, name in list(self._streams.items()) if thread.is_alive()}))
        return CopyView(
            model=self.model, node=self._node, state=self.state, done_bytes=done, size_bytes=size, givers=givers,
            bytes_per_s=rate if self.state == "copying" else 0.0, problem=self.problem, hint=self.hint,
        )  # fmt: skip

    def _fetch(self) -> None:
        listing = self._find_listing()
        landing = Landing(listing, self._place(listing), **self._options)
        self.landing = landing
        landing.open()
        self.giver = Giver(listing, landing.paths, self._pace, landing)
        self._gather(landing)
        landing.finish(self._sha256)

    def _find_listing(self) -> Listing:
        """From the first giver that has the right one."""
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline and not self._stop.is_set():
            for name in self._ready():
                try:
                    with self._connect(name) as stream:
                        stream.silent_s = SILENT_S
                        stream.sendall(b"L")
                        head = bytearray(_LENGTH.size)
                        receive_exactly(stream, memoryview(head))
                        data = bytearray(min(_LENGTH.unpack(head)[0], MAX_LISTING_BYTES))
                        receive_exactly(stream, memoryview(data))
                    return read_listing(bytes(data), self.root)
                except (ShardboxError, OSError) as error:
                    self._bench(name, error)
            self._stop.wait(0.5)
        raise self._nobody()

    def _ready(self) -> list[str]:
        now = time.monotonic()
        return [name for name in self._givers() if self._benched.get(name, (0.0, ""))[0] <= now]

    def _bench(self, name: str, error: Exception) -> None:
        """Leave a giver alone: for good if it gave other bytes than it promised."""
        lied, why = isinstance(error, MessageError), getattr(error, "what", str(error))
        brief = isinstance(error, MeshError) and error.kind == "refused"  # it begins itself, or has just ended
        self._benched[name] = (time.monotonic() + (math.inf if lied else 1.0 if brief else BENCH_S), why)
        log.log(logging.WARNING if lied else logging.INFO, "copy of %s: %s: %s", self.label, name, why)

    def _nobody(self) -> FileError:
        if self._stop.is_set():
            return FileError("was stopped", where=f"copy of {self.label}")
        why = "; ".join(f"{name}: {text}" for name, (_, text) in sorted(self._benched.items())) or "nobody has it now"
        hint = "it goes on from here once a box that has it is up"
        return FileError(f"nothing came for {GIVE_UP_S:.0f} s ({why})", where=f"copy of {self.label}", hint=hint)

    def _gather(self, landing: Landing) -> None:
        """Keep a stream to each giver until all has landed."""
        moved_at, last = time.monotonic(), -1
        while landing.missing:
            self._streams = {thread: name for thread, name in self._streams.items() if thread.is_alive()}
            ready = self._ready()
            streams = Counter(self._streams.values())
            wanted = LONE_STREAMS if len(ready) == 1 and landing.held else 1
            for name in [giver for giver in ready for _ in range(wanted - streams[giver])]:
                if len(self._streams) < MAX_STREAMS:
                    thread = threading.Thread(target=self._take_from, args=(name, landing), name="copy", daemon=True)
                    self._streams[thread] = name
                    thread.start()
            now = time.monotonic()
            self._rates.append((now, self._received))
            if self._received != last:
                moved_at, last = now, self._received
            if self._fault:
                raise self._fault
            if self._stop.is_set() or now - moved_at > GIVE_UP_S:
                raise self._nobody()
            with landing.changed:
                landing.changed.wait_for(lambda: not landing.missing, 0.5)

    def _take_from(self, name: str, landing: Landing) -> None:
        """One stream from one giver, in a thread."""
        size, number = -(-len(landing.chunks) // 8), bytearray(_CHUNK_NUMBER.size)
        try:
            with self._connect(name) as stream:
                stream.silent_s = SILENT_S
                self._open.add(stream)
                try:
                    while landing.missing and not self._stop.is_set():
                        wanted = self._wanted(landing)
                        if not wanted:
                            with landing.changed:
                                landing.changed.wait(0.2)
                            continue
                        stream.sendall(b"A" + wanted.to_bytes(size, "little"))
                        receive_exactly(stream, memoryview(number))
                        chosen = _CHUNK_NUMBER.unpack(number)[0]
                        if chosen >= 0 and not wanted >> chosen & 1:
                            raise MessageError("sends what was not asked for")
                        if chosen >= 0:
                            self._take(stream, landing, chosen)
                finally:
                    self._open.discard(stream)
        except (ShardboxError, OSError) as error:
            if not self._stop.is_set() and landing.missing:
                self._bench(name, error)

    def _wanted(self, landing: Landing) -> int:
        """A bitmap: what nobody is sending; once that is nothing, what has been on its way for long."""
        with self._lock:
            missing, late = landing.missing, time.monotonic() - self._slow_s
            free = missing & ~sum(1 << n for n in self._in_flight)
            return free or missing & sum(1 << n for n, begun in self._in_flight.items() if begun[-1] < late)

    @property
    def _slow_s(self) -> float:
        return max(SLOW_S, 4 * self._chunk_s)

    def _take(self, stream: SealedStream, landing: Landing, number: int) -> None:
        """Accept a chunk, if no other stream was quicker, check it and store it."""
        now = time.monotonic()
        with self._lock:
            begun = self._in_flight.get(number, [])
            late = bool(begun)
            welcome = landing.missing >> number & 1 and (not late or begun[-1] < now - self._slow_s)
            if welcome:
                self._in_flight[number] = [*begun, now]
        stream.sendall(b"y" if welcome else b"n")
        if not welcome:
            return
        try:
            self._receive(stream, landing, number, late)
            self._chunk_s = 0.8 * self._chunk_s + 0.2 * (time.monotonic() - now)
        finally:
            with self._lock:
                self._in_flight[number].remove(now)
                if not self._in_flight[number]:
                    del self._in_flight[number]

    def _receive(self, stream: SealedStream, landing: Landing, number: int, late: bool) -> None:
        """Write a chunk as it comes; `late`: another stream does that, so only when it is whole."""
        _, _, size, wanted = landing.chunks[number]
        whole, found, at = memoryview(bytearray(size if late else 0)), hashlib.sha256(), 0
        while at < size:
            piece = stream.read(size - at)
            after = at + len(piece)
            if after == at or not landing.missing >> number & 1:
                raise ConnectionResetError("the connection ended early")
            found.update(piece)
            if after == size and found.hexdigest() != wanted:
                raise MessageError("sent bytes that are not those it promised: check its disk and memory")
            if late:
                whole[at:after] = piece
            else:
                self._write(landing, number, piece, at)
            at, self._received = after, self._received + len(piece)
            self._pace.spend(len(piece))
        if late:
            self._write(landing, number, whole)

    def _write(self, landing: Landing, number: int, data: memoryview, at: int = 0) -> None:
        try:
            landing.write(number, data, at)
        except OSError as error:
            self._fault = error
            raise


# --- the stick: a folder that holds all that a box needs, on a file system that may be FAT ----------------

STICK_FORMAT = 2
PIECE_BYTES = 1023 * CHUNK_BYTES  # FAT takes files of less than 4 GiB
MANIFEST_NAME = "manifest.json"
STICK_BACK = "put the stick back and type it again: it goes on from here"
STICK_TEXT = """This stick sets up a box of the shardbox cluster "{cluster}".

In a terminal on that box, in an empty folder where shardbox is to live:

    cp {stick}/shardbox-PLATFORM shardbox && chmod +x shardbox    (PLATFORM is one of: {platforms})
    ./shardbox unpack {stick}
    {secret}
    ./shardbox up

Use the folder where the stick is mounted for {stick}. `unpack` checks every byte that it installs; if the stick is
pulled out in the middle, type it again. Add --node NAME to both if the box goes by another name than its host name.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StickFile:
    """One file of a box, as it lies on the stick."""

    kind: str  # program | toml | secret | engine | model
    path: str  # on the box, from the TOML's folder
    size: int
    hashes: tuple[str, ...]
    pieces: tuple[str, ...]  # on the stick, of PIECE_BYTES but for the last
    platform: str = ""  # "" for all
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that is on a stick."""

    format: int
    files: tuple[StickFile, ...]


def read_manifest(folder: str, name: str = MANIFEST_NAME) -> Manifest:
    """Raises FileError where the folder is no whole stick."""
    path = os.path.join(folder, name)
    try:
        with open(path, "rb") as file:
            manifest = from_json(Manifest, json.load(file), MANIFEST_NAME)
    except FileNotFoundError:
        what, hint = "is no stick of shardbox, or `pack` did not come to its end", "`shardbox pack` it (again)"
        raise FileError(what, where=folder, hint=hint) from None
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}", where=path, hint=STICK_BACK) from None
    except (ValueError, RecursionError, MessageError) as error:
        raise FileError(f"cannot be read: {error}", where=path, hint="`shardbox pack` it again") from None
    if manifest.format != STICK_FORMAT:
        raise FileError(f"has format {manifest.format}, this shardbox reads {STICK_FORMAT}", where=path)
    return manifest


def piece_listing(size: int, hashes: Sequence[str]) -> Listing:
    """The pieces of a file, as files of their own."""
    step, starts = PIECE_BYTES // CHUNK_BYTES, range(0, max(1, size), PIECE_BYTES)
    sizes = [min(PIECE_BYTES, size - start) for start in starts]
    parts = [tuple(hashes[n * step : n * step + step]) for n in range(len(sizes))]
    return Listing(files=tuple(ListedFile(name="", size=n, hashes=its) for n, its in zip(sizes, parts, strict=True)))


def fill(landing: Landing, read: Callable[[int, int], bytes], tell: Callable[[int], None]) -> None:
    """Bring in what is missing, in order, from `read(offset, size)`, where all files of the listing follow each other.
    `tell` gets the bytes of each chunk. Raises FileError, OSError."""
    with contextlib.closing(landing):
        landing.open()
        at = 0
        for number, (owner, _, size, wanted) in enumerate(landing.chunks):
            if landing.missing >> number & 1:
                data = read(at, size)
                if hashlib.sha256(data).hexdigest() != wanted:
                    raise FileError("was read with other bytes than were written", where=landing.paths[owner],
                                    hint="the source is damaged, or was changed: pack it again")  # fmt: skip
                landing.write(number, memoryview(data))
            at += size
            tell(size)
        landing.finish()


def stick_name(kind: str, path: str, platform: str, taken: set[str]) -> str:
    """A name that FAT can have, which does not care for case."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", os.path.basename(path)).strip("._") or "file"
    folder = {"engine": f"engines/{platform}/", "model": "models/"}.get(kind, "")
    name = f"{folder}{stem}-{platform}" if kind == "program" else folder + stem
    while name.lower() in taken:
        name += "_"
    taken.add(name.lower())
    return name


def to_pack(
    config: Config, binaries: Sequence[BinaryFacts], lib: str, dirs: Sequence[str]
) -> list[tuple[str, str, str, str]]:
    """(kind, path on a box, file here, model) of what a stick takes from this box. Raises FileError for a model that
    is not here, or that goes to a place outside the TOML's folder."""
    found = [("program", "shardbox", own_file(), "")]
    home = next((path for path in config.engine.path if not os.path.isabs(os.path.expanduser(path))), "")
    libraries = config.engine.lib if config.engine.lib and not os.path.isabs(config.engine.lib) else home
    for n, path in enumerate(engine_files(binaries, lib) if home else []):
        target = os.path.join(home if n < len(binaries) else libraries, os.path.basename(path))
        found.append(("engine", target, path, ""))
    for model in config.models:
        here = find_model(model.path, folder=config.folder, dirs=dirs)
        parts = part_paths(here) if here else ()
        if parts and all(map(os.path.isfile, parts)):
            for target, path in zip(split_parts(model.path), parts, strict=True):
                safe_place(target, folder=config.folder)
                found.append(("model", target, path, model.name))
        elif model.rehearse is None:
            raise FileError("is not on this box whole", where=f"model {model.name}", hint="`shardbox pull` fetches it")
    return found


def piece_names(name: str, size: int) -> tuple[str, ...]:
    """The names of a file's pieces on the stick."""
    count = len(range(0, max(1, size), PIECE_BYTES))
    return tuple(f"{name}.{n:03}" for n in range(1, count + 1)) if count > 1 else (name,)


def pack_file(folder: str, path: str, entry: StickFile, cache: HashCache, tell: Callable[[int], None]) -> StickFile:
    """Put one file on the stick, in pieces; those that are there already and right stay. `entry` lacks the hashes.
    Raises FileError, OSError."""
    hashes = cache.file_hashes(path)
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size != entry.size:
            raise FileError("it changed meanwhile", where=path, hint="wait until it is whole, and pack again")
        places = [os.path.join(folder, piece) for piece in entry.pieces]
        landing = Landing(piece_listing(entry.size, hashes), places, replace=True)
        fill(landing, lambda at, count: os.pread(file.fileno(), count, at), tell)
    return replace(entry, hashes=hashes)


def unpack_file(stick: str, entry: StickFile, path: str, replace_it: bool, tell: Callable[[int], None]) -> list[str]:
    """Install one file; what was put there. Raises FileError, also for a stick that is gone or damaged."""
    mode = {"program": 0o755, "engine": 0o755, "secret": 0o600}.get(entry.kind, 0o644)
    pieces = [safe_place(piece, folder=stick) for piece in entry.pieces]

    def read(at: int, size: int) -> bytes:
        piece = pieces[at // PIECE_BYTES]
        try:
            with open(piece, "rb") as file:
                file.seek(at % PIECE_BYTES)
                return file.read(size)  # unlike pread it fails where a part can be read
        except OSError as error:
            raise FileError(f"cannot be read: {error.strerror}", where=piece, hint=STICK_BACK) from None

    listing = Listing(files=(ListedFile(name=entry.path, size=entry.size, hashes=entry.hashes),))
    landing = Landing(listing, [path], mode=mode, replace=replace_it)
    fill(landing, read, tell)
    return landing.own


# ======================================================================================================
# 13. Engine: how engines are spawned, closed in, watched and logged
# ======================================================================================================
# node -> spawner -> one keeper an engine -> engine. Spawner and keepers are single-threaded forks of the node; a keeper
# lives in its engine's network and makes the node's sockets there. When the node is killed, they see their channels end
# and kill what is below them; a killed spawner ends the keepers' lifeline, a pipe, with the same effect; of a killed
# keeper the kernel kills the engine and the spawner what that has forked. On Linux orphans fall to the nearest "child
# subreaper", so neither setsid nor a double fork gets away; elsewhere only the engine's process group is killed.

OWN_FDS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
LAUNCH_S = 60.0  # from the request to the engine's exec; a slow stick or a swapping box needs seconds
ANSWER_S = 30.0  # a keeper's answer to anything else
CLOSE_S = 10.0  # the wait for the end of what was told to end, or killed; longer, and it hangs in the kernel
LOG_CLOSE_S = 2.0  # how long the log waits for the end of the output, which somebody may hold open
MARK = "SHARDBOX_RUN"  # in an engine's environment: which `up` started it
LOG_BYTES = 64 * KIB  # of output read at once, and kept in memory
LAUNCH_HINTS = {
    errno.ENOENT: "if the file is there, the loader or interpreter that it asks for is not (`file` names it)",
    errno.EACCES: "`chmod +x` it, and see that its disk is not mounted noexec",
    errno.ENOEXEC: "it is not a program for this machine: compare `file` with `uname -m`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an engine and its children have used so far; zeros where it cannot be read."""

    cpu_s: float = 0.0
    read_bytes: int = 0  # from storage, so also pages of a mapped model
    rss_bytes: int = 0  # for display
    anon_bytes: int = 0  # resident without pages of files: those of a mapped model count as available memory anyway


def _send(channel: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    """Between node and keeper: a line of JSON, with descriptors at its start. Every message waits for its answer."""
    line = json.dumps(message).encode() + b"\n"
    channel.sendall(line[socket.send_fds(channel, [line], fds) :])


def _receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """Message and descriptors. Raises OSError: EMFILE when there was no room for them, others at the channel's end."""
    line, fds, flags, _ = socket.recv_fds(channel, 1 << 16, 2)
    for fd in fds:
        os.set_inheritable(fd, False)
    while not line.endswith(b"\n") and (more := channel.recv(1 << 16)):
        line += more
    if line.endswith(b"\n") and not flags & socket.MSG_CTRUNC:
        return json.loads(line), fds
    for fd in fds:
        os.close(fd)
    number = errno.EMFILE if flags & socket.MSG_CTRUNC else errno.ECONNRESET
    raise OSError(number, os.strerror(number))


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from its third field on: state, ppid, ... (the name before is free text). [] if gone."""
    return _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _children(pid: int) -> list[int]:
    """Direct children, dead ones too. Linux; nothing elsewhere."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        if os.path.exists(f"/proc/{pid}/task/{pid}/children"):  # CONFIG_PROC_CHILDREN
            return [int(c) for t in threads for c in _read_text(f"/proc/{pid}/task/{t}/children").split()]
        return [int(p) for p in os.listdir("/proc") if p.isdigit() and _stat(int(p))[1:2] == [str(pid)]]
    except OSError:
        return []


def _family(pid: int) -> list[int]:
    """The process and everything below it."""
    return [pid, *(below for child in _children(pid) for below in _family(child))]


def _kill(target: int) -> None:
    """A process, or for -N the group N; one that is gone is fine. macOS says EPERM for a group of zombies."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(target, signal.SIGKILL)


def _kill_all_below() -> None:
    """Kill (Linux) and await whatever is below this process; who is orphaned meanwhile comes in the next round."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _family(os.getpid())[1:]:
                _kill(pid)
            os.waitpid(-1, 0)


def _libc(name: str, *args: int | bytes) -> None:
    """Call `prctl` or `unshare` (os.unshare came with Python 3.12); nothing elsewhere than on Linux. Raises OSError."""
    if sys.platform == "linux":
        words = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_ulong(a) for a in args]
        if getattr(ctypes.CDLL(None, use_errno=True), name)(*words):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _fork(main: Callable[..., None], *args: object) -> int:
    """Run `main` in a child that ends with it; its pid."""
    if pid := os.fork():
        return pid
    try:
        main(*args)
        os._exit(0)
    except BaseException:  # a bug: say so on the node's stderr, but never run on in the node's code
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _become_helper(name: str, *keep: int) -> int:
    """Shed what came with the fork and turn deaf to the terminal; a descriptor to read when a child has ended."""
    gc.disable()  # a collected file object of the parent's would close a number that is ours by then
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for fd in {int(n) for n in os.listdir(OWN_FDS)} - {0, 1, 2, *keep}:
        with contextlib.suppress(OSError):
            os.close(fd)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for deaf in ("SIGCHLD", "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
        signal.signal(signal.Signals[deaf], lambda *_: None)  # SIG_IGN would outlive the exec of the engine
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _libc("prctl", PR_SET_NAME, name.encode())
    _libc("prctl", PR_SET_CHILD_SUBREAPER, 1)
    return woken


def _wait(woken: int, *others: int) -> list[int]:
    """Wait until a child has ended or one of the others can be read; which of those can."""
    ready, _, _ = select.select([woken, *others], [], [])
    if woken in ready:
        os.read(woken, 4096)
    return [fd for fd in ready if fd != woken]


def _enter_own_network() -> None:
    """Put this process into a network of its own with `lo` up; without the right to, in a user namespace of its own, as
    the same user with the same supplementary groups (devices!). Clears the parent-death signal. Raises OSError.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        _libc("unshare", CLONE_NEWNET)
    except PermissionError:
        _libc("unshare", CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
            with open(f"/proc/self/{name}", "wb") as file:  # as text it would look for a codec's file
                file.write(text.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP | IFF_RUNNING))
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv4/tcp_congestion_control", "wb") as file:
        file.write(UNPACED)  # of this network alone


@functools.cache
def isolation_problem() -> str:
    """Empty when an isolated engine can be had here, else why not, and what to do. Tried once, in a fork: ask early."""
    if sys.platform != "linux":
        return "isolation needs Linux: set engine.isolate, and keep the engine's ports behind a firewall"
    if not (child := os.fork()):
        try:
            _enter_own_network()
            os._exit(0)
        except OSError as problem:
            os._exit(problem.errno or 1)
        finally:
            os._exit(1)
    if not (number := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])):
        return ""
    for switch, closed, opened in (
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),  # Ubuntu 23.10 and later
        ("user.max_user_namespaces", "0", "10000"),
    ):
        if os.geteuid() and _read_text("/proc/sys", *switch.split(".")) == closed:
            return f"{switch} is {closed}: as root run `sysctl -w {switch}={opened}`, or run shardbox as root"
    if re.search(r"^Seccomp:\s*2", _read_text("/proc/self/status"), re.MULTILINE):
        hint = "give the container CAP_SYS_ADMIN, or leave isolation to the container and set engine.isolate"
        return f"a seccomp filter forbids namespaces (of a container, or systemd's RestrictNamespaces=): {hint}"
    return f"the kernel refuses a network namespace ({os.strerror(number)}): run as root, or set engine.isolate"


def _spawner_main(channel: socket.socket) -> None:
    """The spawner's life: a keeper for each channel that comes; kill what a killed keeper leaves, in the end all."""
    os.setsid()  # away from the terminal's Ctrl-C
    woken = _become_helper("sb-spawner", channel.fileno())
    lifeline, held = os.pipe()
    keepers: set[int] = set()
    while True:
        if _wait(woken, channel.fileno()):
            request, fds, _, _ = socket.recv_fds(channel, 1, 1)
            if not request:
                break
            for fd in fds:
                with contextlib.suppress(OSError):  # out of processes: the node sees its channel end
                    keepers.add(_fork(_keeper_main, fd, lifeline))
                os.close(fd)
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                keepers.discard(ended)
        for orphan in set(_children(os.getpid())) - keepers:
            _kill(orphan)
    os.close(held)  # elsewhere than on Linux the keepers have to do it
    _kill_all_below()


def _keeper_main(channel_fd: int, lifeline: int) -> None:
    """A keeper's life: start the engine, serve the node until node, spawner or engine ends, leave nothing, report."""
    woken, channel = _become_helper("sb-keeper", channel_fd, lifeline), socket.socket(fileno=channel_fd)
    (output, engine_end), (report, report_end) = os.pipe(), os.pipe()
    failure = "cannot close it in (see engine.isolate)"
    try:
        request, _ = _receive(channel)
        if request.pop("isolate"):
            _enter_own_network()
        failure = "cannot start"
        engine = subprocess.Popen(
            **request,
            stdout=engine_end,
            stderr=engine_end,
            start_new_session=True,
            preexec_fn=lambda: _libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
        )
    except (OSError, ValueError, subprocess.SubprocessError) as problem:  # ValueError: a NUL byte
        with contextlib.suppress(OSError):
            _send(channel, [f"{failure}: {problem}", getattr(problem, "errno", 0), []])
        return
    os.close(engine_end)  # so that the output ends with the engine
    with contextlib.suppress(OSError):  # the node has gone
        _send(channel, ["", 0, [engine.pid, os.getpid()]], [output, report])
        os.close(output)
        while engine.poll() is None and lifeline not in (ready := _wait(woken, channel_fd, lifeline)):
            if ready:
                _answer(channel, engine.pid)
            for orphan in set(_children(os.getpid())) - {engine.pid}:
                os.waitpid(orphan, os.WNOHANG)
    _kill(-engine.pid)
    code = engine.wait()
    _kill_all_below()
    os.write(report_end, b"%d\n" % code)


def _answer(channel: socket.socket, group: int) -> None:
    """Do what the node asks of a keeper. Raises OSError when it has gone."""
    ((verb, value), _), number, fds = _receive(channel), 0, []
    try:
        if verb == "signal":
            os.killpg(group, value)
        else:
            made = socket.create_server(("127.0.0.1", value), backlog=128) if value else socket.socket()
            fds = [made.detach()]
    except OSError as problem:
        number = problem.errno or errno.EIO
    _send(channel, number, fds)
    for fd in fds:
        os.close(fd)


class Spawner:
    """Starts engines for a process that has threads."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self._channel, self._pid, self._lock = channel, pid, threading.Lock()

    @classmethod
    def start(cls) -> Spawner:
        """Fork the spawner. Call it in the main thread, before any other exists."""
        ours, theirs = socket.socketpair()
        with theirs:
            return cls(ours, _fork(_spawner_main, theirs))

    def spawn(self, *, argv: Sequence[str], env: Mapping[str, str], cwd: str, isolate: bool) -> EngineProcess:
        """A running engine (exec has succeeded). Takes some milliseconds; any thread. Raises EngineError."""
        with contextlib.ExitStack() as undo:
            try:
                near, far = socket.socketpair()
                undo.enter_context(near).settimeout(LAUNCH_S)
                with far, self._lock:
                    socket.send_fds(self._channel, [b"+"], [far.fileno()])
                _send(near, {"args": list(argv), "env": dict(env), "cwd": cwd, "isolate": isolate})
                (failure, number, pids), fds = _receive(near)
            except OSError as why:
                raise EngineError(f"no spawner: {why}", where=argv[0], hint="out of memory or processes?") from why
            if failure:
                raise EngineError(failure, where=argv[0], hint=LAUNCH_HINTS.get(number, ""))
            for fd in fds:
                undo.callback(os.close, fd)
            near.settimeout(ANSWER_S)
            return EngineProcess(near, [*pids, *fds], undo.pop_all(), isolate)

    def close(self) -> None:
        """Kill whatever is left and wait for it. May be called again."""
        with self._lock, self._channel, contextlib.suppress(OSError):  # of the second time
            self._channel.shutdown(socket.SHUT_WR)
            _await_end(self._channel.fileno(), self._pid)
            os.waitpid(self._pid, 0)


def _await_end(fd: int, pid: int) -> None:
    """Wait for what a helper writes, or leaves, when it ends. One that hangs is killed."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(CLOSE_S * 1000):
        _kill(pid)


class EngineProcess:
    """A running engine. Every method may be called from any thread."""

    def __init__(self, channel: socket.socket, numbers: list[int], held: contextlib.ExitStack, isolated: bool) -> None:
        self.pid, self._keeper, self.output, self._report = numbers  # output: of its stdout and stderr, until close()
        self.isolated, self._channel, self._held = isolated, channel, held
        self._lock, self._exit_lock = threading.Lock(), threading.Lock()
        self.exit_code: int | None = None

    def _ask(self, verb: str, value: int) -> list[int]:
        """Descriptors from the keeper. Raises OSError as it happened there, ProcessLookupError at the end."""
        with self._lock:
            try:
                _send(self._channel, [verb, value])
                number, fds = _receive(self._channel)
            except (ConnectionError, TimeoutError) as problem:
                self._channel.shutdown(socket.SHUT_RDWR)  # after a timeout the answers no longer fit the questions
                raise ProcessLookupError(errno.ESRCH, "the engine has ended") from problem
        if number:
            raise OSError(number, os.strerror(number))
        return fds

    def listen(self, port: int) -> socket.socket:
        """A socket listening on 127.0.0.1:port in the engine's network. Raises OSError (EADDRINUSE, ...)."""
        return socket.socket(fileno=self._ask("socket", port)[0])

    def connect(self, port: int, timeout_s: float) -> socket.socket:
        """A blocking TCP_NODELAY connection to 127.0.0.1:port in the engine's network. Raises OSError."""
        with contextlib.ExitStack() as undo:
            made = undo.enter_context(socket.socket(fileno=self._ask("socket", 0)[0]))
            made.settimeout(timeout_s)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.connect(("127.0.0.1", port))
            if made.getsockname() == made.getpeername():  # a free port of the ephemeral range can meet itself
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            made.settimeout(None)
            undo.pop_all()
        return made

    def signal(self, signum: int) -> None:
        """Send it to the engine's process group; nothing happens when that is gone."""
        with contextlib.suppress(OSError):
            self._ask("signal", signum)

    def wait_exit(self) -> int:
        """Block until the engine and all it has forked are gone; its exit code, negative for a signal."""
        with self._exit_lock:
            if self.exit_code is None:
                code = os.read(self._report, 99)
                if not code:  # the keeper was killed; on Linux the kernel then kills the engine
                    _kill(-self.pid)
                self.exit_code = int(code or -signal.SIGKILL)
            return self.exit_code

    def bound_ports(self) -> frozenset[int]:
        """TCP ports it listens on. Some 8 ms: the kernel walks its whole table (2 cores, Linux 6.18)."""
        if sys.platform != "linux":
            shown = subprocess.getoutput(f"lsof -nP -a -g {self.pid:d} -iTCP -sTCP:LISTEN -Fn")
            return frozenset(int(port) for port in re.findall(r"^n.*:(\d+)$", shown, re.MULTILINE))
        sockets, rows = set(), []
        for pid in _family(self.pid):
            with contextlib.suppress(OSError):  # it has ended
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        for name in ("tcp", "tcp6"):  # 0A: LISTEN
            with contextlib.suppress(OSError), open(f"/proc/{self.pid}/net/{name}", encoding="utf-8") as table:
                rows += re.findall(r"^ *\d+: \w+:(\w{4}) \S+ 0A (?:\S+ +){5}(\d+)", table.read(), re.MULTILINE)
        return frozenset(int(port, 16) for port, inode in rows if f"socket:[{inode}]" in sockets)

    def usage(self) -> Usage:
        """What it has used up to now, with what it has forked."""
        ticks, read, resident, shared = 0, 0, 0, 0
        for pid in _family(self.pid):
            ticks += sum(map(int, _stat(pid)[11:15]))  # its own, and of children it has waited for
            read += sum(map(int, re.findall(r"\nread_bytes: (\d+)", _read_text(f"/proc/{pid}/io"))))
            pages = [int(n) for n in _read_text(f"/proc/{pid}/statm").split()] or [0, 0, 0]
            resident, shared = resident + pages[1], shared + pages[2]
        page, cpu_s = os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK")
        return Usage(cpu_s=cpu_s, read_bytes=read, rss_bytes=resident * page, anon_bytes=(resident - shared) * page)

    def close(self) -> None:
        """Kill it if it lives, wait for it, close everything. May be called again."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # the keeper takes it as the node's end
        if self.exit_code is None:
            _await_end(self._report, self._keeper)
            self.wait_exit()
        self._held.close()


def process_identity(pid: int) -> str:
    """What tells this process from any other that had or gets its number; empty when there is none."""
    if sys.platform == "linux":
        seen, boot = _stat(pid), _read_text("/proc/sys/kernel/random/boot_id")
        return f"{boot}:{seen[19]}" if seen and seen[0] not in "ZX" else ""
    return subprocess.getoutput(f"/bin/ps -o lstart= -p {pid:d}").strip()


def stop_marked(mark: str) -> int:
    """Kill every process that was started with `mark` in its environment, and wait, bounded; how many there were.
    Linux: elsewhere what an engine forks into a session of its own is not found."""
    entry, killed, deadline = f"{MARK}={mark}".encode(), set[int](), time.monotonic() + CLOSE_S
    while time.monotonic() < deadline:
        found = set()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else [])):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                if entry in file.read().split(b"\0"):  # a dead one has none
                    found.add(pid)
                    _kill(pid)
        if not found:
            break
        killed |= found
        time.sleep(0.02)
    return len(killed)


def stop_leftover(pid: int, identity: str) -> bool:
    """Kill the group of an engine left by a crash; wait, bounded. False: it is not that process."""
    if not identity or process_identity(pid) != identity:
        return False
    _kill(-pid)  # an engine leads its group
    deadline = time.monotonic() + CLOSE_S
    while process_identity(pid) == identity and time.monotonic() < deadline:
        time.sleep(0.02)  # somebody else's child: there is nothing to wait on that every system has
    return True


class CappedLog:
    """A thread that copies an engine's output into a file and goes on when that fails; `problem` says why it did.

    PATH is moved to PATH.1 at the start and before it grows over `cap_bytes` (64 KiB or more). tail() has 64 KiB too.
    """

    def __init__(self, path: str, fd: int, *, cap_bytes: int = 8 * MIB) -> None:
        self.problem, self._recent, self._closed = "", b"", False
        self._path, self._cap, self._size = path, cap_bytes, cap_bytes + 1
        self._input = os.dup(fd)  # so that the caller may close its own at any time
        self._write(b"")
        self._thread = threading.Thread(target=self._run, name=f"log {os.path.basename(path)}", daemon=True)
        self._thread.start()

    def tail(self, lines: int) -> list[str]:
        """The last lines, oldest first, printable; an unfinished one counts."""
        kept = self._recent.decode("utf-8", "replace").splitlines()[-lines:] if lines > 0 else []
        return [printable(line.expandtabs()[:4000]) for line in kept]

    def close(self) -> None:
        """Wait for the end of the output, then, or after LOG_CLOSE_S, write no more. May be called again."""
        self._thread.join(LOG_CLOSE_S)
        self._closed = True

    def note(self, line: str) -> None:
        """A line of our own, after close()."""
        self._write(f"shardbox: {line}\n".encode())

    def _run(self) -> None:
        while not self._closed and (chunk := os.read(self._input, LOG_BYTES)):
            self._recent = (self._recent + chunk)[-LOG_BYTES:]
            self._write(chunk)
        os.close(self._input)

    def _write(self, chunk: bytes) -> None:
        mode, self._size = "ab", self._size + len(chunk)
        try:
            if self._size > self._cap:
                mode, self._size = "wb", len(chunk)  # also when the old one cannot be moved: the cap holds
                with contextlib.suppress(OSError):
                    os.replace(self._path, self._path + ".1")
            with open(self._path, mode, opener=functools.partial(os.open, mode=0o600)) as file:
                file.write(chunk)
        except OSError as problem:
            self.problem = f"{self._path}: {problem.strerror}"


# ======================================================================================================
# 14. Rehearsal: an engine without a model, which speaks as Prima does
# ======================================================================================================

RehearsalHook = Callable[[str, int], None]

REHEARSAL_STOP_LINGER_MS = 1000  # bounds how long a rank that leaves waits for its successor to take the STOP
REHEARSAL_CANCEL_S = 0.1  # bounds, twice, how long answers that are under way delay a stop
REHEARSAL_FLAGS = {"-c": "context", "-np": "slots", "-b": "batch", "-ub": "ubatch", "-lw": "windows"} | {
    f"--{name.replace('_', '-')}": name
    for name in ("host", "port", "world", "rank", "master", "next", "data_port", "signal_port")
}
REHEARSAL_TOO_LONG = {
    "code": 400,
    "message": "the request exceeds the available context size. "
    "try increasing the context size or enable context shift",
    "type": "invalid_request_error",
}


class RehearsalError(Exception):
    """The rehearsal cannot start or go on; the text says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalSetup:
    """One rank's flags, with Prima's defaults, and the sizes of the model that is rehearsed."""

    layers: int
    width: int
    name: str
    windows: tuple[int, ...]  # layers a visit for each rank
    world: int = 1
    rank: int = 0
    master: str = ""
    next: str = ""
    data_port: int = 9000
    signal_port: int = 10000
    context: int = 4096
    slots: int = 1
    batch: int = 2048
    ubatch: int = 512
    host: str = "127.0.0.1"
    port: int = 8080
    context_shift: bool = True


def rehearsal_setup(argv: Sequence[str], environ: Mapping[str, str]) -> RehearsalSetup:
    """What an engine's argv and `SHARDBOX_REHEARSE` say; other flags are skipped. Raises RehearsalError."""
    pairs = itertools.pairwise([*argv[1:], ""])
    found: dict[str, Any] = {REHEARSAL_FLAGS[flag]: value for flag, value in pairs if flag in REHEARSAL_FLAGS}
    try:
        sizes, listed = json.loads(environ["SHARDBOX_REHEARSE"]), found.pop("windows", "")
        found |= {key: int(value) for key, value in found.items() if key not in ("host", "master", "next")}
        found |= {"layers": int(sizes["layers"]), "width": int(sizes["width"]), "name": str(sizes["name"])}
        world = found.get("world", 1)
        # Without -lw an even share, where Prima would profile the boxes.
        shares = listed.split(",") if listed and world > 1 else [-(-found["layers"] // max(1, world))] * world
        windows = tuple(map(int, shares))
        setup = RehearsalSetup(windows=windows, context_shift="--no-context-shift" not in argv, **found)
    except (ValueError, KeyError, TypeError) as error:
        raise RehearsalError(f"cannot read a flag or SHARDBOX_REHEARSE: {error!r}") from error
    if not 0 <= setup.rank < world <= 32 or (setup.rank == 0) != (argv[0] == "llama-server"):
        raise RehearsalError(f"rank {setup.rank} of {world}: rank 0 is llama-server, the rest llama-cli")
    slot_context = setup.context // max(1, setup.slots)
    if len(windows) != world or min(*windows, setup.width, setup.slots, setup.batch, setup.ubatch, slot_context) < 1:
        raise RehearsalError(f"-lw needs {world} numbers, and nothing may be zero: {setup}")
    return replace(setup, batch=min(setup.batch, setup.context), ubatch=min(setup.ubatch, setup.batch, setup.context))


def rehearsal_ints(*values: int) -> bytes:
    """As Prima sends `int32_t[]`."""
    return struct.pack(f"<{len(values)}i", *values)


class RehearsalRing:
    """One rank's sockets, and what passes through them. For one thread; no timeouts, because Prima has none."""

    def __init__(self, setup: RehearsalSetup, hook: RehearsalHook) -> None:
        """Binds and dials as Prima does (llama_init_sockets). Raises RehearsalError when a port is taken."""
        import zmq  # here, so that only an engine pays for it

        self.setup, self.hook = setup, hook
        self.tokens = 0  # that went round so far, the warm-up's two included
        self.visits: list[int] = []  # the ranks in the order in which a token meets them
        self.after = (setup.rank + 1) % setup.world
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.zmq.setsockopt(zmq.LINGER, 0)
        self.inbox, self.signals = self.zmq.socket(zmq.PULL), self.zmq.socket(zmq.PULL)
        self.onward, self.stopper = self.zmq.socket(zmq.PUSH), self.zmq.socket(zmq.PUSH)
        self.to_leader = self.onward if self.after == 0 else self.zmq.socket(zmq.PUSH)
        self.poller = zmq.Poller()
        self.poller.register(self.inbox, zmq.POLLIN)
        self.poller.register(self.signals, zmq.POLLIN)
        if setup.world == 1:
            return
        try:
            self.inbox.bind(f"tcp://*:{setup.data_port + setup.rank}")
            self.signals.bind(f"tcp://*:{setup.signal_port + setup.rank}")
            self.onward.connect(f"tcp://{setup.next}:{setup.data_port + self.after}")
            if 0 < setup.rank < setup.world - 1:
                self.to_leader.connect(f"tcp://{setup.master}:{setup.data_port}")
        except zmq.ZMQError as error:
            reason = os.strerror(error.errno or 0)
            raise RehearsalError(f"Error binding/connecting recv socket to endpoint: {reason}") from error

    def form(self) -> None:
        """Pass both barriers, where a worker learns the layer windows. Raises RehearsalError."""
        windows = self.setup.windows
        if self.setup.world > 1:
            context = rehearsal_ints(self.setup.context)
            if self._barrier(1, [b"should_profile", b"\0", b"n_ctx", context])[1] != b"\0":
                raise RehearsalError("the leader wants a device profile, which a rehearsal has not: start it with -lw")
            padded = rehearsal_ints(*windows, *[0] * (32 - len(windows)))
            windows = struct.unpack("<32i", self._barrier(2, [b"n_layer_window", padded])[1])[: self.setup.world]
            if min(windows) < 1:
                raise RehearsalError(f"a rank without layers: {windows}")
        left = self.setup.layers
        while left > 0:  # rank 1 has the first layers and the leader closes the cycle (this_layer_is_mine)
            self.visits.append((len(self.visits) + 1) % len(windows))
            left -= windows[self.visits[-1]]
        self.hook("loaded", 0)

    def _barrier(self, number: int, message: list[bytes]) -> list[bytes]:
        """What the leader sends at a barrier; the last rank answers the leader with `ACK`."""
        self.hook(f"barrier:{number}", 0)
        leader = self.setup.rank == 0
        if leader:
            self.onward.send_multipart(message)
        frames, expected = self.inbox.recv_multipart(), [b"ACK"] if leader else message
        keys, sizes = expected[::2], [len(part) for part in expected[1::2]]
        if frames[::2][: len(keys)] != keys or [len(part) for part in frames[1::2]][: len(sizes)] != sizes:
            raise RehearsalError(
                f"start-up barrier {number}: expected {keys[0]!r}, got {frames[0][:40]!r}; "
                "a rank cannot join a ring that runs, all must start together"
            )
        if not leader:
            self.onward.send_multipart([b"ACK"] if self.after == 0 else frames)
        return message if leader else frames

    def work(self) -> None:
        """A worker's life after the barriers, until STOP (llama_decode_internal). Raises RehearsalError."""
        lasts = [index == len(self.visits) - 1 for index, rank in enumerate(self.visits) if rank == self.setup.rank]
        while (frames := self._receive()) is not None:
            wanted = self._announced(frames)
            if self.after != 0:
                self.onward.send_multipart(frames)
            for start in range(0, len(wanted), self.setup.ubatch):
                part = wanted[start : start + self.setup.ubatch]
                for last in lasts:
                    if (tensor := self._receive()) is None:
                        return
                    target = self.to_leader if last else self.onward
                    target.send_multipart(self._through_layers(tensor, part, last))

    def _receive(self) -> list[bytes] | None:
        """The next data message, or None once a STOP has come on the signal port."""
        return None if self.signals in dict(self.poller.poll()) else self.inbox.recv_multipart()

    def _announced(self, frames: Sequence[bytes]) -> list[bool]:
        """For each token that a message announces, whether it wants an answer; cache commands: none."""
        if frames[0].startswith((b"kv_seq_", b"clear_kv_cache")):
            return []
        if frames[0] != b"n_tokens" or len(frames) < 2:
            raise RehearsalError(f"not a message of the ring: {frames[0][:40]!r}; a stranger on the port")
        named = dict(zip(frames[::2], frames[1::2], strict=False))
        count = int.from_bytes(named[b"n_tokens"], "little")
        self.tokens += count
        self.hook("token", self.tokens)
        return [wants != 0 for wants in named.get(b"logits", bytes(max(0, count - 1)) + b"\1")]

    def _through_layers(self, frames: list[bytes], wanted: Sequence[bool], last: bool = False) -> list[bytes]:
        """The tensor message of `len(wanted)` tokens as a window leaves it: after the last layer, only the rows
        that want an answer. Raises RehearsalError when it is another message, or of another size."""
        row, rows = 4 * self.setup.width, len(wanted)
        key, shape, data = [*frames, b"", b"", b""][:3]
        if (key, shape[:16], len(data)) != (b"sub_gf_out", struct.pack("<2q", self.setup.width, rows), row * rows):
            raise RehearsalError(
                f"expected {rows} tokens of {row} bytes from the rank before, got {key[:20]!r} "
                f"with {len(data)} bytes: another model there, or a stranger on the port"
            )
        if not last:
            return frames
        kept = b"".join(data[row * i : row * (i + 1)] for i, wants in enumerate(wanted) if wants)
        return [key, struct.pack("<4q", self.setup.width, sum(wanted), 1, 1), kept, *frames[3:]]

    def decode(self, positions: Sequence[int], wanted: Sequence[bool], slot: int) -> None:
        """Send a batch from the leader round the ring and wait for the answer. Position 0 empties the slot's cache
        everywhere, so that real workers do not run out of it. Raises RehearsalError."""
        count, width = len(positions), self.setup.width
        self.tokens += count
        self.hook("token", self.tokens)
        if self.setup.world == 1:
            return
        if positions[0] == 0:
            self.onward.send_multipart([b"kv_seq_rm", *map(rehearsal_ints, (slot, -1, -1))])
        ones, slots, zero = rehearsal_ints(*[1] * count), rehearsal_ints(*[slot] * count), rehearsal_ints(0)
        meta = [b"n_tokens", rehearsal_ints(count), b"pos", rehearsal_ints(*positions), b"n_seq_id", ones]
        meta += [b"seq_id", slots, b"logits", bytes(wanted), b"all_pos_0", zero, b"all_pos_1", zero]
        self.onward.send_multipart(meta)
        for start in range(0, count, self.setup.ubatch):
            part = positions[start : start + self.setup.ubatch]
            mine = wanted[start : start + self.setup.ubatch]
            tensor = [b"sub_gf_out", struct.pack("<4q", width, len(part), 1, 1), bytes(4 * width * len(part))]
            tensor += [b"inp_pos", struct.pack("<q", len(part)), rehearsal_ints(*part)]
            returns = [mine] * self.visits.count(0) + ([[True] * sum(mine)] if self.visits[-1] else [])
            for expected in returns:
                self.onward.send_multipart(tensor)
                tensor = self._through_layers(self.inbox.recv_multipart(), expected)

    def leave(self) -> None:
        """Hand STOP on. The leader waits until it has been all round: as in Prima for ever, if it cannot."""
        self.hook("stop", self.tokens)
        if self.setup.world > 1:
            self.stopper.connect(f"tcp://{self.setup.next}:{self.setup.signal_port + self.after}")
            self.stopper.send(b"STOP")
            if self.setup.rank == 0:
                self.signals.recv()
            self.stopper.close(linger=REHEARSAL_STOP_LINGER_MS)
        self.zmq.destroy()


def rehearsal_text(value: Any) -> str:
    """The text of a prompt, a list of token numbers, or a chat's messages, whose content may be a list of parts."""
    if isinstance(value, dict):
        value = value.get("content", value.get("text"))
    return " ".join(map(rehearsal_text, value)) if isinstance(value, list) else str(value or "")


def rehearsal_refusal(**error: Any) -> web.Response:
    """An error as llama-server words it."""
    return web.json_response({"error": error}, status=error["code"])


class RehearsalRequest:
    """One completion, and how far it is. Times in seconds; `limit` None: the answer ends by itself."""

    def __init__(self, body: Mapping[str, Any], chat: bool, name: str) -> None:
        """Raises ValueError, KeyError, TypeError or AttributeError for a body that is none."""
        self.chat, self.stream, self.model = chat, bool(body.get("stream")), str(body.get("model") or name)
        prompt = rehearsal_text(body["messages" if chat else "prompt"])
        # A token for every four letters of a word comes near a real tokenizer's count.
        self.prompt_tokens = max(1, len(re.findall(r"\s*\S{1,4}", prompt)))
        limits = [body.get(key) for key in ("max_tokens", "max_completion_tokens", "n_predict")]
        self.limit = next((int(limit) for limit in limits if limit is not None and int(limit) >= 0), None)
        self.past, self.made, self.prompt_s, self.made_s, self.text = 0, 0, 0.0, 0.0, ""
        self.finish: str | None = None

    def reply(self, text: str) -> dict[str, Any]:
        """The whole reply, or one event of a stream, of which the last has `finish` and no text. What is not a
        chat has llama.cpp's own form, on `/v1/completions` too, as in Prima's server."""
        if self.chat:
            said = {"content": text} if text or not self.stream else {}
            choice = {"delta": said} if self.stream else {"message": {"role": "assistant", **said}}
            reply: dict[str, Any] = {"choices": [{"index": 0, "finish_reason": self.finish, **choice}]}
            reply |= {"id": f"chatcmpl-{id(self):x}", "created": int(time.time()), "model": self.model}
            reply["object"] = "chat.completion.chunk" if self.stream else "chat.completion"
            counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.made}
            ends: dict[str, Any] = {"usage": counts | {"total_tokens": sum(counts.values())}}
        else:
            reply = {"content": text, "stop": self.finish is not None, "index": 0, "model": self.model}
            ends = {"stopped_limit": self.finish == "length", "stopped_eos": self.finish == "stop"}
            ends |= {"tokens_evaluated": self.prompt_tokens, "tokens_predicted": self.made}
        timings = {"prompt_n": self.prompt_tokens, "prompt_ms": 1000 * self.prompt_s}
        timings |= {"predicted_n": self.made, "predicted_ms": 1000 * self.made_s}
        return reply if self.finish is None else reply | ends | {"timings": timings}


class RehearsalLeader:
    """Slots, answers and HTTP of rank 0, as in llama-server. The ring has one thread, where batches queue up."""

    def __init__(self, setup: RehearsalSetup, hook: RehearsalHook) -> None:
        self.setup, self.ring, self.thread = setup, RehearsalRing(setup, hook), ThreadPoolExecutor(1)
        self.slot_context = setup.context // setup.slots
        self.busy, self.free = [False] * setup.slots, asyncio.Semaphore(setup.slots)
        self.ready, self.stop = False, asyncio.Event()
        self.failure: RehearsalError | None = None

    async def lead(self) -> None:
        """Form the ring, warm it up, serve until SIGTERM or SIGINT. Raises RehearsalError, and OSError for the port."""
        loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=REHEARSAL_CANCEL_S)
        await runner.setup()
        await web.TCPSite(runner, self.setup.host, self.setup.port).start()
        await loop.run_in_executor(self.thread, self.ring.form)
        await loop.run_in_executor(self.thread, self.ring.decode, [0, 1], [False, True], 0)
        # Not earlier: while it loads, a signal kills Prima's server outright, the only way out of its barriers.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)
        self.ready = True
        await self.stop.wait()
        await runner.cleanup()
        if self.failure is not None:
            raise self.failure
        await loop.run_in_executor(self.thread, self.ring.leave)

    async def _handle(self, http: web.Request) -> web.StreamResponse:
        """Any request; all are 503 while the ring forms."""
        if not self.ready:
            return rehearsal_refusal(code=503, message="Loading model", type="unavailable_error")
        states = [{"id": slot, "state": int(busy)} for slot, busy in enumerate(self.busy)]
        card = {"id": self.setup.name, "object": "model", "owned_by": "shardbox-rehearsal"}
        views = {"/health": {"status": "ok"}, "/slots": states, "/v1/models": {"object": "list", "data": [card]}}
        if http.method == "GET" and http.path in views:
            return web.json_response(views[http.path])
        if http.method != "POST" or not http.path.endswith(("/completion", "/completions")):
            return rehearsal_refusal(code=404, message="File Not Found", type="not_found_error")
        try:
            request = RehearsalRequest(await http.json(), "/chat/" in http.path, self.setup.name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return rehearsal_refusal(code=400, message=f"not a request: {error!r}", type="invalid_request_error")
        return await self._complete(http, request)

    async def _complete(self, http: web.Request, request: RehearsalRequest) -> web.StreamResponse:
        """Answer as one JSON or as events."""
        events = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

        async def send(field: str, value: object) -> None:
            await events.write(f"{field}: {json.dumps(value)}\n\n".encode())

        async def say(word: str) -> None:
            request.text += word
            if request.stream:
                await send("data", request.reply(word))

        if request.stream:
            await events.prepare(http)
        if request.prompt_tokens >= self.slot_context and not self.setup.context_shift:
            if not request.stream:
                return rehearsal_refusal(**REHEARSAL_TOO_LONG)
            for field in ("data", "error"):  # both, as in the real server's stream
                await send(field, REHEARSAL_TOO_LONG)
        else:
            await self._answer(request, say)
            if not request.stream:
                return web.json_response(request.reply(request.text))
            await send("data", request.reply(""))
        if request.chat:
            await events.write(b"data: [DONE]\n\n")
        await events.write_eof()
        return events

    async def _answer(self, request: RehearsalRequest, say: Callable[[str], Awaitable[None]]) -> None:
        """Once a slot is free, say an answer word by word, each after its round. A client that goes cancels it."""
        if request.prompt_tokens >= self.slot_context:  # cut to fit, unsaid, as with Prima
            request.prompt_tokens = self.slot_context // 2
        async with self.free:
            slot = self.busy.index(False)
            try:
                self.busy[slot] = True
                while (left := request.prompt_tokens - request.past) > 0:
                    request.prompt_s += await self._decode(request, slot, min(left, self.setup.batch))
                for word in self._words(request):
                    if request.made == request.limit or request.past >= self.slot_context:
                        request.finish = "length"
                        return
                    if request.made:  # the first one comes of the prompt
                        request.made_s += await self._decode(request, slot, 1)
                    request.made += 1
                    await say(f" {word}" if request.made > 1 else word)
                request.finish = "stop"
            finally:
                self.busy[slot] = False

    async def _decode(self, request: RehearsalRequest, slot: int, count: int) -> float:
        """Send the next tokens round; the seconds, without queueing. A broken ring ends the answer and the leader."""
        positions = range(request.past, request.past + count)
        request.past += count
        wanted = [*[False] * (count - 1), request.past >= request.prompt_tokens]

        def timed() -> float:
            start = time.monotonic()
            try:
                if self.failure is None:  # else a batch that was queued would wait for ever
                    self.ring.decode(positions, wanted, slot)
            except RehearsalError as error:
                self.failure = error
            return time.monotonic() - start

        seconds = await asyncio.get_running_loop().run_in_executor(self.thread, timed)
        if self.failure is not None:
            self.stop.set()
            raise asyncio.CancelledError("the ring is broken")
        return seconds

    def _words(self, request: RehearsalRequest) -> Iterator[str]:
        """The answer's words; figures are taken when they are about to be said."""
        layers, size = ",".join(map(str, self.setup.windows)), 4 * self.setup.width
        yield from f"This is a rehearsal: no model is loaded. Layers {layers}; a token is {size} B a hop.".split()
        while True:
            mean_s = max(1e-9, request.made_s / (request.made - 1))
            yield from f"The network alone allows {1 / mean_s:.0f} tokens/s, {1000 * mean_s:.2f} ms each.".split()
            if request.limit is None:
                return


def rehearse(argv: Sequence[str], environ: Mapping[str, str], *, hook: RehearsalHook = lambda *_: None) -> int:
    """Be one rank of a rehearsed ring until it is stopped; the exit code, 0, or 1 with the reason on stderr.

    argv[0] is "llama-server" or "llama-cli". To be called in the main thread of a process of its own, because
    it takes over SIGTERM and SIGINT. `hook(point, tokens so far)` is called before "barrier:1" and
    "barrier:2", when "loaded", at each batch ("token") and at "stop".
    """
    if "--version" in argv:
        print("version: rehearsal (shardbox)")
        return 0
    if not argv:
        print("rehearse: the first argument must be llama-server or llama-cli", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        setup = rehearsal_setup(argv, environ)
        if setup.rank == 0:
            asyncio.run(RehearsalLeader(setup, hook).lead())
            return 0
        ring = RehearsalRing(setup, hook)
        for stage in (ring.form, ring.work, ring.leave):
            stage()
    except (RehearsalError, OSError) as error:
        print(f"{argv[0]}: rehearsal: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


# ======================================================================================================
# 15. Peers: which nodes are there, which of them live, and the ways to them
# ======================================================================================================

MAX_PEERS, MAX_HINTS = 1024, 16  # names remembered, and addresses of one name: adverts are anybody's
POLL_S = 2.0  # between two questions to a peer
CALL_TIMEOUT_S = 5.0  # bounds one question to a peer
ATTEMPT_S = 1.0  # without an answer at one address of a peer, until the next one is asked too
LOST_S = 7.0  # a peer silent for longer is lost: three questions unanswered
TWIN_HINT = "give this one another name: --node NAME, SHARDBOX_NODE or its hostname"
Target = tuple[str, str, int]  # node, address, port


def new_event() -> asyncio.Event:
    """A function, so that asyncio is imported only by who needs it."""
    return asyncio.Event()


def keep_task(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run it beside everything else; `tasks` holds it until it ends, as the event loop does not. It logs a bug."""

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()):
            log.error("bug in a background task", exc_info=bug)

    tasks.add(task := asyncio.get_running_loop().create_task(work))
    task.add_done_callback(ended)
    return task


async def gather_all(actions: Iterable[Awaitable[None]]) -> None:
    """All at once; raises the first failure, after every one has ended."""
    for result in await asyncio.gather(*actions, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def first_success(attempts: Iterable[Callable[[], Coroutine[Any, Any, None]]], delay_s: float) -> None:
    """Begin each as soon as one before has failed, or all have been silent for `delay_s` (as RFC 8305 does), until one
    succeeds; the others are cancelled. Raises the first one's ShardboxError when all fail."""
    left, tasks, running = list(attempts), list[asyncio.Task[None]](), set[asyncio.Task[None]]()
    try:
        while left or running:
            if left:
                tasks.append(asyncio.get_running_loop().create_task(left.pop(0)()))
                running.add(tasks[-1])
            wait_s = delay_s if left else None
            done, running = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            good = [task for task in done if not isinstance(task.exception(), ShardboxError)]
            if good:
                good[0].result()  # raises a bug
                return
    finally:
        for task in running:
            task.cancel()
    if tasks:
        tasks[0].result()


def view_of(kind: type[T], *sources: object, **given: Any) -> T:
    """A view: each field is given, or comes from the first source that has an attribute of its name."""
    for field in dataclasses.fields(typing.cast(Any, kind)):
        holder = next((source for source in sources if hasattr(source, field.name)), None)
        if field.name not in given and holder is not None:
            given[field.name] = getattr(holder, field.name)
    return kind(**given)


class Box:
    """This node as its parts see it: settings, today's facts, threads, and tasks that nobody waits for."""

    def __init__(self, config: Config, name: str, folder: str, facts: NodeFacts) -> None:
        self.config, self.name, self.folder = config, name, folder
        self.facts = facts  # at most some seconds old
        self.settings = config.node(name)
        self.rehearses = config.engine.kind == "rehearsal"
        self.started = time.monotonic()
        self.pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="call")
        self.tasks: set[asyncio.Task[None]] = set()
        self.stop = asyncio.Event()
        self.failure: ShardboxError | None = None

    def fail(self, error: ShardboxError) -> None:
        """End this node with an error for its operator."""
        self.failure = self.failure or error
        self.stop.set()

    def model(self, name: str) -> ModelConfig:
        """The model that another node's message names. Raises PlanError where it is not configured here."""
        for model in self.config.models:
            if model.name == name:
                return model
        hint = "put the same shardbox.toml on every box"
        raise PlanError(f"not in the configuration of {self.name}", where=f"model {name[:100]}", hint=hint)

    async def in_thread(self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """What a blocking call returns."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, functools.partial(call, *args, **options))


def dialled_session(dial: Callable[[str], socket.socket], pool: Executor) -> aiohttp.ClientSession:
    """An HTTP client without a time limit, whose connections come from `dial(host)`, a blocking call. Closed, it breaks
    what it still asks."""
    transports = weakref.WeakSet[asyncio.Transport]()

    class DialConnector(aiohttp.BaseConnector):  # here, so that aiohttp is imported only by who needs it
        async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
            loop = asyncio.get_running_loop()
            sock = await loop.run_in_executor(pool, dial, str(req.url.host))
            sock.setblocking(False)
            transport, protocol = await loop.create_connection(self._factory, sock=sock)
            transports.add(transport)
            return protocol

        async def close(self, **options: Any) -> None:
            for transport in transports:
                transport.abort()
            await asyncio.sleep(0)  # who reads an answer learns of it; aiohttp (3.14) alone lets him wait for ever
            await super().close(**options)

    connector = DialConnector(limit=0, keepalive_timeout=30.0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """What a node answers when another asks how it is."""

    facts: NodeFacts | None = None  # None: the asker has those with this digest
    digest: str = ""
    uptime: float = 0.0
    wall: float = 0.0
    leaving: bool = False  # it goes down: no new ring with it
    desired: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)  # see Node.desired
    models: tuple[ModelView, ...] = ()
    copies: tuple[CopyView, ...] = ()
    reached: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # see Node.reached


@dataclass(slots=True, kw_only=True)
class Peer:
    """What we know of one other node. `last_seen` is our own monotonic clock; 0: never."""

    name: str
    hints: dict[tuple[str, int], Hint] = dataclasses.field(default_factory=dict)  # the one heard last is last
    said: PeerState = PeerState()  # its last answer, always with facts
    at: Hint | None = None  # where it answered last
    rtt_ms: float = 0.0
    last_seen: float = 0.0
    wall_skew_s: float = 0.0
    problem: str = ""
    refused_for: str = ""  # the kind of the MeshError that the log has named
    twin: Hint | None = None  # where another machine calls itself the same
    news: asyncio.Event = dataclasses.field(default_factory=new_event)  # ask it now
    following: asyncio.Task[None] | None = None

    @property
    def facts(self) -> NodeFacts | None:
        """What it said of itself; None: it never answered."""
        return self.said.facts

    @property
    def target(self) -> Target | None:
        """Where to reach it; None: it never answered."""
        return (self.name, self.at.address, self.at.port) if self.at else None


class Peers:
    """Asks every node that a hint points at, knows who is live, and tells twins apart."""

    def __init__(
        self, box: Box, mesh: Mesh, hints: Callable[[], Iterable[Hint]], on_state: Callable[[PeerState], None]
    ) -> None:
        self.known: dict[str, Peer] = {}
        self.newest = box.started  # when the last one was found
        self.session = dialled_session(self._connect, box.pool)
        self._box, self._mesh, self._hints, self._on_state = box, mesh, hints, on_state
        self._tasks: set[asyncio.Task[None]] = set()

    def refresh(self) -> None:
        """Take in new hints; a name heard of for the first time gets its own task. One that never proved itself is
        forgotten with its last hint."""
        hints = list(self._hints())
        heard = {hint.node for hint in hints}
        for one in self.known.values():
            one.twin = one.twin if one.twin in hints else None
        for name in [name for name, peer in self.known.items() if name not in heard and peer.facts is None]:
            if following := self.known.pop(name).following:
                following.cancel()
        for hint in hints:
            peer = self.known.get(hint.node)
            if peer is None:
                if len(self.known) >= MAX_PEERS:
                    continue
                peer = self.known[hint.node] = Peer(name=hint.node)
                peer.following = keep_task(self._tasks, self._follow(peer))
            peer.hints.pop((hint.address, hint.port), None)
            peer.hints[hint.address, hint.port] = hint
            if len(peer.hints) > MAX_HINTS:
                del peer.hints[next(iter(peer.hints))]

    def ask_now(self, name: str) -> None:
        """That node has news: ask it at once."""
        if name in self.known:
            self.known[name].news.set()

    def live(self) -> list[Peer]:
        """Other nodes that answered within LOST_S."""
        since, own = time.monotonic() - LOST_S, self._box.name
        return [p for p in list(self.known.values()) if p.facts and p.last_seen >= since and p.name != own]

    def all_facts(self) -> list[NodeFacts]:
        """This node's facts and those of every live peer that stays."""
        others = [peer.facts for peer in self.live() if not peer.said.leaving]
        return [self._box.facts, *filter(None, others)]

    def silent_s(self, name: str) -> float:
        """Since when a node that was heard has not been."""
        peer = self.known.get(name)
        return time.monotonic() - peer.last_seen if peer and peer.last_seen else 0.0

    def places(self, names: Iterable[str]) -> tuple[object, ...]:
        """Where these nodes are now; this one by all its addresses."""
        return tuple(
            self.known[name].target if name in self.known and name != self._box.name else self._box.facts.addresses
            for name in names
        )

    def target(self, name: str) -> Target:
        """Where to reach a node now. Raises MeshError where it never answered."""
        peer = self.known.get(name)
        if peer is None or peer.target is None:
            raise MeshError("never seen", where=name, hint="`shardbox nodes` shows who is there")
        return peer.target

    def dial(self, name: str, service: str) -> SealedLink:
        """A link for the forwarder; blocks, any thread. Raises MeshError."""
        node, address, port = self.target(name)
        return self._mesh.dial(address, port, node, service, CALL_TIMEOUT_S)

    def _connect(self, host: str) -> socket.socket:
        node, address, port = json.loads(bytes.fromhex(host.removeprefix("node-")))
        try:
            return self._mesh.connect(address, port, node, "control", CALL_TIMEOUT_S)
        except MeshError as error:  # aiohttp lets only its own pass
            raise aiohttp.ClientError(str(error)) from error

    def url(self, target: Target, path: str) -> str:
        """The URL of a path on that node, for `session`; its host spells the target, so nothing is remembered."""
        return f"http://node-{json.dumps(target).encode().hex()}{path}"

    async def call(
        self, to: str | Target, method: str, path: str, body: Any = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """The JSON answer of a node. Raises MeshError with its own words, or why it cannot be asked."""
        target = self.target(to) if isinstance(to, str) else to
        try:
            url = self.url(target, path)
            async with asyncio.timeout(timeout_s), self.session.request(method, url, json=body) as reply:
                data = await reply.json(content_type=None)
        except TimeoutError:
            raise MeshError(f"no answer within {format_duration(timeout_s)}", where=target[0]) from None
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            if isinstance(error.__cause__, MeshError):
                raise error.__cause__ from None
            raise MeshError(f"the connection broke ({error or type(error).__name__})", where=target[0]) from None
        if isinstance(to, str):  # whoever answers lives, though the next question may hang at an address of before
            self.known[to].last_seen = time.monotonic()
        if reply.status == 200:
            return data
        said = data.get("error") if isinstance(data, dict) else None
        said = said if isinstance(said, dict) else {}
        kind = "twin" if said.get("kind") == "twin" else "refused"
        what, hint = str(said.get("what") or f"answered {reply.status}"), str(said.get("hint") or "")
        raise MeshError(what, kind=kind, where=target[0], hint=hint)

    async def call_all(self, method: str, path: str, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any]:
        """What every live node answers, all asked at once: JSON, or the ShardboxError that says why it does not."""
        names = [peer.name for peer in self.live()]
        calls = (self.call(name, method, path, timeout_s=timeout_s) for name in names)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ShardboxError):
                raise answer
        return dict(zip(names, answers, strict=True))

    async def _follow(self, peer: Peer) -> None:
        while True:
            peer.news.clear()
            try:
                await self._ask(peer)
            except ShardboxError as error:
                peer.problem = str(error.what)
                kind = error.kind if isinstance(error, MeshError) else ""
                if kind not in ("", "unreachable", peer.refused_for):  # said once: this wait has no end by itself
                    peer.refused_for = kind
                    log.warning("%s takes no part: %s", peer.name, error.what)
                if peer.facts and time.monotonic() - peer.last_seen > LOST_S:
                    self._mesh.drop(peer.name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(peer.news.wait(), POLL_S)

    async def _ask(self, peer: Peer) -> None:
        """One question, at the address that answered last while it is still heard of, then at each that we know."""
        heard = {(hint.address, hint.port) for hint in self._hints() if hint.node == peer.name}

        def rank(hint: Hint) -> tuple[bool, bool, bool]:
            place = (hint.address, hint.port)
            return place not in heard, peer.target != (peer.name, *place), hint.source != "static"

        hints = sorted(peer.hints.values(), key=rank)
        await first_success([functools.partial(self._ask_at, peer, hint) for hint in hints], ATTEMPT_S)

    async def _ask_at(self, peer: Peer, hint: Hint) -> None:
        """One question at one address; one that is in time for finding the peer lost. Raises ShardboxError."""
        started, uptime_s = time.monotonic(), time.monotonic() - self._box.started
        hello = {"machine": self._box.facts.machine, "uptime": f"{uptime_s:.3f}", "have": peer.said.digest}
        path = f"/peer/state?{urllib.parse.urlencode(hello)}"
        left_s = LOST_S - self.silent_s(peer.name)
        timeout_s = left_s if ATTEMPT_S < left_s < CALL_TIMEOUT_S else CALL_TIMEOUT_S
        try:
            state = await self.call((peer.name, hint.address, hint.port), "GET", path, timeout_s=timeout_s)
            self._take(peer, hint, from_json(PeerState, state, "state"), started)
        except ShardboxError as error:
            if isinstance(error, MeshError) and error.kind == "twin":
                self._box.fail(UsageError(error.what, hint=error.hint))
            error.what = f"{error.what} ({hint.address}:{hint.port})"
            raise

    def _take(self, peer: Peer, hint: Hint, state: PeerState, started: float) -> None:
        now, known = time.monotonic(), peer.facts
        facts = state.facts or known
        if facts is None:
            raise MessageError("sent no facts", where=peer.name)
        if facts.protocol != PROTOCOL:
            what = f"speaks protocol {facts.protocol}, this box {PROTOCOL} (shardbox {facts.version})"
            raise MeshError(what, kind="protocol", where=peer.name)
        if known and facts.machine != known.machine and now - peer.last_seen <= LOST_S:
            peer.twin = hint
            return
        if known and facts.machine == known.machine and facts.start < known.start:
            return  # an older start of the same node, late
        rtt_ms = (now - started) * 1000
        peer.rtt_ms = rtt_ms if not peer.rtt_ms else min(rtt_ms, 0.8 * peer.rtt_ms + 0.2 * rtt_ms)
        peer.said = replace(state, facts=facts)
        peer.at, peer.twin = hint, None if peer.twin == hint else peer.twin
        peer.last_seen, peer.problem = now, ""
        peer.wall_skew_s = state.wall - time.time() if state.wall else 0.0
        if peer.name == self._box.name and facts.machine != self._box.facts.machine:
            self._end_younger(facts.machine, state.uptime)
            return
        if known is None:
            self.newest = now
            log.info("found %s at %s (%s, %.1f ms)", peer.name, hint.address, hint.source, rtt_ms)
        self._on_state(state)

    def _end_younger(self, machine: str, uptime_s: float) -> bool:
        """Of two boxes with this node's name the younger ends: whether that is this one."""
        younger = uptime_s > time.monotonic() - self._box.started
        if younger:
            what = f"another box (machine {machine[:8]}) already is node {self._box.name}"
            self._box.fail(UsageError(what, hint=TWIN_HINT))
        return younger

    def check_twin(self, caller: str, machine: str, uptime_s: float) -> None:
        """Raises MeshError (kind "twin") towards a caller whose name an older box holds."""
        mine = caller == self._box.name
        known = next((peer.facts for peer in self.live() if peer.name == caller), None)
        holder = self._box.facts if mine else known
        if holder is None or machine == holder.machine or (mine and self._end_younger(machine, uptime_s)):
            return
        what = f"another box (machine {holder.machine[:8]}) already is node {caller}"
        raise MeshError(what, kind="twin", hint=TWIN_HINT)

    async def close(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.session.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What one node found when it dialled another."""

    source: str
    target: str
    address: str
    rtt_ms: float = 0.0
    problem: str = ""
    hint: str = ""


REACH_HINTS = {
    "unreachable": "is shardbox up there? open TCP port {port} in its firewall",
    "wrong_secret": "put the same cluster secret on both boxes",
    "wrong_name": "another node answers at this address: correct [[nodes]]",
    "protocol": "install the same shardbox on both boxes",
    "encryption": "give both boxes the same [cluster] encryption",
    "wrong_key": "`shardbox nodes` on that box shows its key: correct [[nodes]], or somebody poses as it",
}


async def reach_all(config: Config, name: str, hints: Iterable[Hint], mesh: Mesh, pool: Executor) -> list[Reach]:
    """Dial every hinted and declared node from here, afresh: address, port, secret and name are all tried."""
    targets: dict[str, list[Hint]] = {node.name: [] for node in config.nodes if node.name != name}
    for hint in hints:
        if hint.node != name:
            targets.setdefault(hint.node, []).append(hint)

    async def reach(target: str, hints: list[Hint]) -> Reach:
        advice = "is it up? give its `address` in [[nodes]] where multicast is blocked"
        best = Reach(source=name, target=target, address="-", problem="not discovered", hint=advice)
        for hint in hints:
            started, at = time.monotonic(), replace(best, address=f"{hint.address}:{hint.port}", problem="", hint="")
            call = functools.partial(mesh.dial, hint.address, hint.port, target, "control", CALL_TIMEOUT_S)
            try:
                link = await asyncio.get_running_loop().run_in_executor(pool, call)
            except MeshError as error:
                advice = error.hint or REACH_HINTS.get(error.kind, "see that node's log").format(port=hint.port)
                best = replace(at, problem=error.what, hint=advice)
                continue
            link.close()
            return replace(at, rtt_ms=(time.monotonic() - started) * 1000)
        return best

    return list(await asyncio.gather(*(reach(target, found) for target, found in sorted(targets.items()))))


def measure_link(sock: socket.socket) -> LinkFacts:
    """The way to a node that echoes what comes, at the sizes of the engine's messages: the best of some round trips of
    a token, and of some of a batch. About 1 MB each way. Raises OSError."""
    sock.settimeout(CALL_TIMEOUT_S)
    large = 256 * KIB  # fits into what lies between, so that it can be sent before anything is read

    def trip_ns(size: int) -> int:
        message, left = bytes(size), size
        started = time.monotonic_ns()
        sock.sendall(message)
        while left > 0:
            data = sock.recv(large)
            if not data:
                raise ConnectionAbortedError("it ended early")
            left -= len(data)
        return time.monotonic_ns() - started

    trip_ns(64)
    rtt_ns = min(trip_ns(64) for _ in range(10))
    took_ns = max(1, min(trip_ns(large) for _ in range(4)) - rtt_ns)
    return LinkFacts(rtt_ns=int(float(f"{rtt_ns:.2g}")), bytes_per_s=int(float(f"{large * 10**9 // took_ns:.2g}")))


def echo(sock: socket.socket) -> None:
    """The other side of `measure_link`: for a bounded time and amount. In its own thread."""
    deadline, left = time.monotonic() + CALL_TIMEOUT_S, 4 * MIB
    with sock, contextlib.suppress(OSError):
        sock.settimeout(CALL_TIMEOUT_S)
        while left > 0 and time.monotonic() < deadline and (data := sock.recv(256 * KIB)):
            sock.sendall(data)
            left -= len(data)


# ======================================================================================================
# 16. Ranks: this node's engines and what they need, from a lease to the last log line
# ======================================================================================================

RING_STOP_S = 6.0  # after the leader's SIGTERM a whole ring is gone in about 3 s (measured)
TERM_S = 2.0  # from SIGTERM to SIGKILL
# How long a thread may keep the interpreter from others that want it. A wire's must not wait for the event loop's: each
# token pays for it. Without engines, nine boxes on two cores take a model 1.3 times as fast with the longer one
# (2026-12-01): whoever waits wakes up as often, and copies have many threads.
WIRES_SWITCH_S, IDLE_SWITCH_S = 1e-4, 5e-3
WIRE_GRACE_S = 0.5  # from a broken wire to the alarm: the engine whose end broke it can say more


@dataclass(slots=True, kw_only=True)
class RankRun:
    """This node's part in one ring, from its lease to its end."""

    lease: Lease
    plan: ModelPlan
    rank: int
    wiring: RankWiring
    started_as: ModelConfig  # its [[models]] entry then
    oom_kills: int = 0  # by the kernel, until then
    phase: str = "prepared"
    engine: EngineProcess | None = None
    log: CappedLog | None = None
    exit_code: int | None = None
    problem: str = ""
    isolation_problem: str = ""
    bound: asyncio.Event = dataclasses.field(default_factory=new_event)
    exited: asyncio.Event = dataclasses.field(default_factory=new_event)
    starting: asyncio.Task[None] | None = None
    ending: asyncio.Task[None] | None = None
    tasks: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)  # end with the run
    wires: list[tuple[Route, Wire]] = dataclasses.field(default_factory=list)
    session: aiohttp.ClientSession | None = None  # to the engine's HTTP; leaders only

    @property
    def works(self) -> bool:
        """Whether its engine is expected to run."""
        return self.phase in ("starting", "bound")

    @property
    def open_ports(self) -> tuple[int, ...]:
        """What the engine listens on, where it is not closed in."""
        if self.engine is None or self.engine.isolated or self.exited.is_set():
            return ()
        ports = (self.wiring.data_port, self.wiring.signal_port, self.wiring.http_port)
        return tuple(port for port in ports if port)

    @property
    def http(self) -> aiohttp.ClientSession:
        """To the leader's engine. Raises EngineError once the rank is being ended, as after its box has slept."""
        if self.session is None or self.session.closed:
            raise EngineError("its engine has been stopped", where=f"rank {self.rank} of {self.plan.model}")
        return self.session

    def close(self) -> None:
        """Give back what it holds of the system; blocks."""
        for _, wire in self.wires:
            wire.close()
        for part in (self.engine, self.log):
            if part is not None:
                part.close()


def check_own(name: str, copy: ModelFacts, binary: BinaryFacts, expect: Expected) -> None:
    """Raises ShardboxError where this node's engine or model file is not what the leader has."""
    if binary.problem:
        raise EngineError(binary.problem, where=f"{name}: {binary.role} binary", hint=binary.hint)
    if expect.commit and binary.commit and binary.commit != expect.commit:
        what = f"built from commit {binary.commit}, the leader's from {expect.commit}"
        hint = "engines of one ring must be one build: copy the same binaries to every box"
        raise EngineError(what, where=f"{name}: {binary.path}", hint=hint)
    where = f"{name}: {copy.path or copy.name}"
    if copy.problem or not copy.root:
        raise GgufError(copy.problem or "still being read", where=where, hint=copy.hint)
    if expect.root and copy.root != expect.root:
        what = f"has other bytes than the leader's copy ({copy.root[:8]}, not {expect.root[:8]})"
        raise GgufError(what, where=where, hint="copy the file again, from the leader")


class Library:
    """What this node has fetched, is fetching, and gives to others. In the event loop but where it says so."""

    def __init__(self, box: Box, mesh: Mesh, peers: Peers, surveyor: Surveyor, refresh: Callable[[], Awaitable[None]],
                 busy: Callable[[], bool]) -> None:  # fmt: skip
        """`refresh` makes changes to this node's files known at once; `busy`: its engines answer somebody."""
        self.copies: dict[str, Copy] = {}  # by model
        self._rounds: dict[str, str] = {}  # the generation that asked for it, "" a person
        self._givers: dict[str, tuple[Sequence[str], Giver]] = {}
        self._engines_at = 0.0  # when they were fetched last
        self._pace = Pace(box.config.cluster.copy_limit, busy)
        self._box, self._mesh, self._peers, self._surveyor, self._refresh = box, mesh, peers, surveyor, refresh

    def fetch(
        self, model: ModelConfig, root: object, *, round_: str = "", only: str = "", replace: bool = False
    ) -> Copy:
        """The copy of a model's content to this box, begun unless it is on its way. One that failed is told of once to
        each round. `only`: the one node to take it from. Raises ShardboxError."""
        box, name = self._box, model.name
        if not isinstance(root, str) or not re.fullmatch("[0-9a-f]{64}", root):
            raise MessageError("not a content hash", where="root")
        copy = self.copies.get(name)
        if copy and copy.state == "copying" and copy.root != root:
            raise FileError("other content is being copied already", where=f"model {name}", hint="wait for it")
        if copy and copy.root == root and (copy.state == "copying" or (round_ and self._rounds[name] == round_)):
            return copy
        if round_ and not box.config.cluster.copy_models:
            raise FileError("copy_models is off here", where=box.name, hint="`shardbox pull` fetches it by hand")
        paths = self._places(model)
        for other in box.config.models:
            copy = self.copies.get(other.name)
            if copy and copy.state == "copying" and copy.root == root and self._places(other) == paths:  # they share it
                self.copies[name], self._rounds[name] = copy, round_
                return copy
        self._rounds[name] = round_
        how = {"replace": replace, "sha256": model.sha256, "spend": self._surveyor.pace}
        return self._begin(name, root, only, place=lambda _: paths, **how)

    def _begin(self, model: str, root: str, only: str, **how: Any) -> Copy:
        """A copy of this content, that runs; `only`: see fetch()."""
        copy = self.copies[model] = Copy(
            model=model, node=self._box.name, root=root, pace=self._pace,
            connect=functools.partial(self._connect, root),
            givers=lambda: [node for node in self.givers(root) if only in ("", node)], **how,
        )  # fmt: skip
        keep_task(self._box.tasks, self._run(copy))
        return copy

    def pull(self, model: ModelConfig, only: str, replace: bool) -> CopyView:
        """Fetch a model as an operator asks, unless it is here. Raises FileError where no other box has it, or where
        those who have it disagree."""
        facts = [peer.facts for peer in self._peers.live() if peer.facts]
        copies = {node.name: node.model(model.name) for node in facts if only in ("", node.name)}
        whole = {name: copy for name, copy in copies.items() if copy.root and not copy.problem}
        where = f"model {model.name}"
        if not whole:
            found = "; ".join(f"{name}: {copy.problem or 'still reading it'}" for name, copy in copies.items())
            raise FileError(f"no other box has a whole copy ({found or only or 'none is reached'})", where=where)
        if len({copy.root for copy in whole.values()}) > 1 and model.leader not in whole:
            held = ", ".join(f"{name} has {copy.root[:8]}" for name, copy in sorted(whole.items()))
            raise FileError(f"the copies differ: {held}", where=where, hint="--from NODE, or `sha256` in the TOML")
        wanted = whole[model.leader] if model.leader in whole else next(iter(whole.values()))
        mine = self._box.facts.model(model.name)
        if mine.root == wanted.root and not mine.problem and self.still_here(mine.root):
            size = mine.size_bytes
            return CopyView(model=model.name, node=self._box.name, state="done", done_bytes=size, size_bytes=size)
        view = self.fetch(model, wanted.root, only=only, replace=replace).view()
        return dataclasses.replace(view, model=model.name)

    def _places(self, model: ModelConfig) -> tuple[str, ...]:
        return place_in(model.path, folder=self._box.config.folder, dirs=self._box.settings.model_dirs)

    def engines_from(self, facts: NodeFacts, others: Iterable[NodeFacts]) -> str:
        """The content hash of the engines that a node without any can have from one of its platform; "" for none."""
        lacks = facts.binaries and all(binary.problem and not binary.path for binary in facts.binaries)
        if not lacks or not self._box.config.engine.share:
            return ""
        votes = Counter(other.engine_root for other in others if other.platform == facts.platform and other.engine_root)
        return min(votes, key=lambda root: (-votes[root], root), default="")

    def tend_engines(self, others: Iterable[NodeFacts]) -> None:
        """Fetch engines where this box has none and another one of its platform gives them."""
        root, box, before = self.engines_from(self._box.facts, others), self._box, self.copies.get("")
        if not root or (before and (before.state == "copying" or time.monotonic() - self._engines_at < BENCH_S)):
            return

        def place(listing: Listing) -> list[str]:
            names = [file.name for file in listing.files]
            strange = [name for name in names if not re.fullmatch(r"llama-(server|cli)|[\w+.-]+\.so[\w.]*", name)]
            if strange or len(set(names)) < len(names):
                raise FileError(f"these are no engine files: {strange[:3]}", where="engines")
            return [os.path.join(box.folder, "engines", name) for name in names]

        self._engines_at = time.monotonic()
        self._begin("", root, only="", place=place, replace=True, mode=0o755)

    async def _run(self, copy: Copy) -> None:
        log.info("copy of %s: begun", copy.label)
        begun = time.monotonic()
        running = asyncio.ensure_future(self._box.in_thread(copy.run))
        try:
            said, told = 0.0, False
            while not running.done():
                if copy.landing is not None and copy.giver is not None and not told:
                    told = True
                    if copy.model:
                        self._surveyor.receiving[copy.model] = copy.root
                    self._note([f"{path}.part" for path in copy.landing.own])
                    await self._refresh()  # the others learn that they can have of it
                if time.monotonic() - said > 10.0:
                    said = time.monotonic()
                    log.info("copy of %s: %s", copy.label, copy_text(copy.view()))
                await asyncio.wait({running}, timeout=0.5)
            await running
            if copy.landing is not None and copy.state == "landed":
                self._note(copy.landing.own)
                hashes = [file.hashes for file in copy.landing.listing.files]
                with contextlib.suppress(OSError):  # then they are read again
                    await self._box.in_thread(self._surveyor.landed, copy.model, copy.landing.paths, hashes)
        finally:
            self._surveyor.receiving.pop(copy.model, None)
            await self._refresh()
            copy.state = "done" if copy.state == "landed" else "failed"
        seconds, size = time.monotonic() - begun, copy.view().done_bytes
        rate = f"{format_size(size)} in {format_duration(seconds)}, {format_size(int(size / seconds))}/s"
        log.info("copy of %s: %s", copy.label, copy.problem or f"whole, and in place ({rate})")

    def _note(self, paths: Sequence[str]) -> None:
        try:
            note_in_ledger(self._box.folder, paths)
        except OSError as error:
            log.warning("`models --prune` will not know of %s: %s", ", ".join(paths), error)

    def still_here(self, root: str) -> bool:
        """See Surveyor.still_here. Any thread."""
        return self._surveyor.still_here(root)

    async def reread(self, model: ModelConfig) -> dict[str, str]:
        """See Surveyor.reread."""
        found = await self._box.in_thread(self._surveyor.reread, model)
        await self._refresh()
        return found

    def givers(self, root: str) -> list[str]:
        """Live nodes that have a content, those that have only some of it last. Any thread."""
        found = {}
        for peer in self._peers.live():
            if peer.facts is None:
                continue
            whole = {copy.root for copy in peer.facts.models if not copy.problem} | {peer.facts.engine_root}
            if root in whole or root in {copy.receiving for copy in peer.facts.models}:
                found[peer.name] = root not in whole
        return sorted(found, key=lambda name: (found[name], random.random()))  # else all would ask the same ones

    def _connect(self, root: str, name: str) -> SealedStream:
        node, address, port = self._peers.target(name)
        return self._mesh.stream(address, port, node, f"file/{root}", CALL_TIMEOUT_S)

    def open_service(self, root: str) -> tuple[Near, WireStats]:
        """What answers on a connection on which somebody takes this content. Any thread. Raises MeshError."""
        coming = [copy.giver for copy in list(self.copies.values()) if copy.root == root and copy.state == "copying"]
        giver = next(filter(None, coming), None) or self._whole(root)
        if giver is None:
            raise MeshError("has no file of this content any more", kind="refused")
        return giver.serve, WireStats()

    def _whole(self, root: str) -> Giver | None:
        """One for all takers, so that it knows what it gave; another one when the file has moved."""
        found = self._surveyor.content(root)
        paths = [path for path, _, _ in found]
        if found and self._givers.get(root, ([], None))[0] != paths:
            files = (ListedFile(name=os.path.basename(path), size=size, hashes=its) for path, size, its in found)
            self._givers[root] = paths, Giver(Listing(files=tuple(files)), paths, self._pace)
        return self._givers[root][1] if found else None

    async def close(self) -> None:
        """End every copy; what has landed is kept for the next time."""
        for copy in self.copies.values():
            copy.cancel()


def engine_command(box: Box, run: RankRun, mark: str) -> tuple[list[str], dict[str, str]]:
    """The engine's argv and environment."""
    role, extra = run.wiring.role, {MARK: mark}
    if box.rehearses:
        shape = {key: getattr(run.plan.shape, key) for key in ("layers", "width", "vocab")}
        extra["SHARDBOX_REHEARSE"] = json.dumps({**shape, "name": run.plan.model})
        argv = [*self_command(), "rehearse", ROLE_BINARIES[role]]
    else:
        argv = [box.facts.binary(role).path]
    engine = box.settings.engine
    engine = replace(engine, lib=engine_places(box.config, box.settings, box.folder)[1])
    return [*argv, *run.wiring.args], engine_environment(os.environ, engine, extra)


def engine_session(box: Box, run: RankRun) -> aiohttp.ClientSession:
    """An HTTP client of the leader's engine."""
    engine, port = run.engine, run.wiring.http_port
    assert engine is not None
    return dialled_session(lambda _: engine.connect(port, 5.0), box.pool)


async def settle(box: Box, run: RankRun) -> None:
    """Wait until the slots of a leader, whose requests were dropped, are free: told to end while tokens flow, Prima
    aborts without passing STOP (measured, bdf9d8e7)."""
    deadline = time.monotonic() + TERM_S
    async with engine_session(box, run) as session:
        while time.monotonic() < deadline and not run.exited.is_set():
            with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, TimeoutError):
                async with asyncio.timeout(1.0), session.get("http://engine/slots") as reply:
                    if not any(slot.get("state") for slot in await reply.json(content_type=None)):
                        return
            await asyncio.sleep(0.1)


async def end_engine(box: Box, run: RankRun, engine: EngineProcess, orderly: bool) -> None:
    """The ladder of signals. In a whole ring only the leader is told: it passes STOP round."""
    if orderly and run.session is not None:
        await settle(box, run)
    steps: list[tuple[int, float]] = [(signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)]
    if orderly and run.plan.world > 1 and run.rank > 0:
        steps.insert(0, (0, RING_STOP_S))
    for signum, wait_s in steps:
        if signum:
            engine.signal(signum)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run.exited.wait(), wait_s)
            return


class RankHost:
    """Grants leases, starts engines with their wires, and stops them. All in the event loop but `open_service`."""

    def __init__(self, box: Box, spawner: Spawner, peers: Peers, library: Library,
                 on_trouble: Callable[[RankRun, str, str], None]) -> None:  # fmt: skip
        self.runs: dict[str, RankRun] = {}  # by model
        self.exits: collections.deque[str] = collections.deque(maxlen=8)
        self._claims: dict[str, Lease] = {}  # which proposer may form a ring now, by model
        self._mark = secrets.token_hex(16)
        self._box, self._spawner, self._peers, self._library = box, spawner, peers, library
        self._on_trouble, self._loop = on_trouble, asyncio.get_running_loop()
        self._engines_changed()

    async def answer(self, verb: str, body: Mapping[str, Any], proposer: str) -> Any:
        """What a proposer, be it this node or a peer, asks of the rank here: fetch | prepare | launch | lease |
        release. JSON in and out. Raises ShardboxError."""
        generation = body["generation"]
        if verb == "prepare":
            expect = from_json(Expected, body.get("expect") or {}, "expect")
            await self._prepare(from_json(ModelPlan, body.get("plan"), "plan"), generation, proposer, expect)
            return {}
        model = str(body["model"])
        if verb == "fetch":
            return to_json(self._library.fetch(self._box.model(model), body.get("root"), round_=generation).view())
        if verb == "release":
            run = self.runs.get(model)
            if run and run.lease.generation == generation and run.lease.proposer == proposer:
                await self.release(run, orderly=bool(body.get("orderly")))
            return {}
        run = self.get(model, generation)
        run.lease = grant(run.lease, model=model, proposer=proposer, generation=generation, now=time.monotonic())
        if verb == "launch":
            await self._launch(run)
        return to_json(self.view(run))

    def get(self, model: str, generation: str) -> RankRun:
        """The run that a message is about. Raises PlanError for an old generation."""
        run = self.runs.get(model)
        if run is None or run.lease.generation != generation:
            raise PlanError(f"no rank under generation {generation} here", where=f"model {model}")
        return run

    async def _prepare(self, plan: ModelPlan, generation: str, proposer: str, expect: Expected) -> None:
        """Grant the lease for this node's rank after checking what only this node can check."""
        name, box = plan.model, self._box
        mine, where = plan.rank_of(box.name), f"model {name}"
        if mine is None and box.config.model(name) is None:
            return  # its TOML is not as new as the proposer's
        model = box.model(name)
        numbered = [rank.rank for rank in plan.ranks] == [*range(plan.world)]
        layers = sum(rank.layers for rank in plan.ranks)
        if not plan.ranks or not numbered or layers != plan.layers or plan.leader != proposer:
            raise PlanError("the proposed plan contradicts itself", where=where)
        if mine and box.stop.is_set():
            raise PlanError(f"{box.name} goes down", where=where)
        copy = box.facts.model(name)
        reads = mine and copy.root and not box.rehearses
        if reads and not await box.in_thread(self._library.still_here, copy.root):
            raise GgufError("has changed, and is being read again", where=f"{box.name}: {copy.path}")
        lend = functools.partial(grant, model=name, proposer=proposer, generation=generation, now=time.monotonic())
        held, claim = self.runs.get(name), self._claims.get(name)
        self._claims[name] = lend(claim if claim and claim.proposer != proposer else None)
        if mine is None:  # a consent: nobody else will be granted this model while the ring forms
            if held and held.ending is None and held.lease.proposer != proposer:
                raise PlanError(f"{box.name} is in a ring of {held.lease.proposer}", where=where)
            return
        if held and (held.lease.proposer, held.lease.generation) == (proposer, generation):
            held.lease = lend(held.lease)
            return
        if held:  # of another proposer only when its lease ran out, but it has not been reaped yet
            lend(None if held.lease.proposer == proposer else held.lease)
            await self.release(held, orderly=False)
        if not box.rehearses:
            check_own(box.name, copy, box.facts.binary("leader" if mine.rank == 0 else "worker"), expect)
        path = copy.path or os.path.join(box.config.folder, model.path)
        ports, engine = box.settings.ports, box.settings.engine
        wiring = wire_rank(plan, mine.rank, ports=ports, engine=engine, model=model, path=path)
        parts: dict[str, Any] = {"plan": plan, "rank": mine.rank, "wiring": wiring, "started_as": model}
        self.runs[name] = RankRun(lease=lend(None), oom_kills=oom_kills() or 0, **parts)

    async def _launch(self, run: RankRun) -> None:
        """Start the engine, and its wires as the far ranks come up; once, however often it is asked for."""
        if run.starting is None and run.ending is None:
            run.phase = "starting"
            run.starting = self._loop.create_task(self._start(run))
        if run.starting is not None:
            await asyncio.shield(run.starting)  # a caller that goes away must not leave half a start

    async def _start(self, run: RankRun) -> None:
        box = self._box
        problem, wish = box.facts.isolation, box.settings.engine.isolate
        isolate = wish != "never" and not problem
        if wish == "always" and problem:
            what, hint = f"engines must be closed in, but cannot be: {problem}", 'mend that, or set isolate = "auto"'
            raise EngineError(what, where=box.name, hint=hint)
        run.isolation_problem = problem if wish == "auto" else ""
        if not isolate:
            await box.in_thread(check_ports_free, run.wiring)
        argv, env = engine_command(box, run, self._mark)
        work = os.path.join(box.folder, "work")
        os.makedirs(work, exist_ok=True)
        engine = await box.in_thread(self._spawner.spawn, argv=argv, env=env, cwd=work, isolate=isolate)
        run.engine = engine
        run.log = CappedLog(self.log_path(run.plan.model), engine.output)
        self._engines_changed()
        if run.rank == 0:
            run.session = engine_session(box, run)

        def wait_exit() -> None:
            code = engine.wait_exit()
            with contextlib.suppress(RuntimeError):  # the loop is closed: the node is ending
                self._loop.call_soon_threadsafe(self._on_exit, run, code)

        threading.Thread(target=wait_exit, daemon=True, name=f"exit-{engine.pid}").start()
        if run.ending is None:
            keep_task(run.tasks, self._watch_bound(run, engine))
            for node in sorted({route.node for route in run.wiring.routes}):
                keep_task(run.tasks, self._open_wires(run, engine, node))

    def log_path(self, model: str) -> str:
        """Where this node keeps the engine's output for a model."""
        return os.path.join(self._box.folder, "logs", f"{urllib.parse.quote(model, safe='')}.log")

    def _on_exit(self, run: RankRun, code: int) -> None:
        run.exit_code = code
        run.exited.set()
        if run.phase != "stopping":
            run.phase = "exited"
            keep_task(self._box.tasks, self._explain_exit(run, code))

    async def _explain_exit(self, run: RankRun, code: int) -> None:
        """Let the last output arrive, then say what happened."""
        assert run.log is not None
        await self._box.in_thread(run.log.close)
        tail = run.log.tail(40)
        if code == 0 and any("No layer is assigned to me" in line for line in tail):
            run.problem = "took no layers and left, as the engine's own scheduler told it"
            return
        killed = oom_kills()
        run.problem = diagnose(code, tail, None if killed is None else killed - run.oom_kills)
        if "port is taken" in run.problem:
            run.problem += await self._box.in_thread(port_owners, run.wiring)
        run.log.note(run.problem)
        text = f"rank {run.rank} ({self._box.name}) of {run.plan.model}: {run.problem}"
        self.exits.appendleft(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
        self._on_trouble(run, "trouble", text)

    async def _watch_bound(self, run: RankRun, engine: EngineProcess) -> None:
        """Set `bound` once the engine listens on what others will dial."""
        wanted = {run.wiring.data_port, run.wiring.signal_port} if run.plan.world > 1 else set()
        while not run.exited.is_set():
            if wanted <= await self._box.in_thread(engine.bound_ports):
                run.phase = "bound" if run.phase == "starting" else run.phase
                run.bound.set()
                return
            await asyncio.sleep(0.05)

    async def _open_wires(self, run: RankRun, engine: EngineProcess, node: str) -> None:
        """Once the far engine is bound: listen for ours on its ports. A listener before that would fool Prima."""
        model, generation = run.plan.model, run.lease.generation
        query, bound = urllib.parse.urlencode({"model": model, "generation": generation}), False
        while not bound:
            try:
                bound = (await self._peers.call(node, "GET", f"/peer/bound?{query}", None, 15.0)).get("bound", False)
            except ShardboxError:
                await asyncio.sleep(0.2)
        for route in run.wiring.routes:
            if route.node != node or run.exited.is_set():
                continue
            service = f"{route.kind}/{urllib.parse.quote(model, safe='')}/{generation}/{run.rank}/{route.rank}"
            dial = functools.partial(self._peers.dial, node, service)
            text = f"{route.kind} wire from {self._box.name} to rank {route.rank} ({route.node}) broke"
            alarm = functools.partial(self._alarm, run, text)
            try:
                listener = await self._box.in_thread(engine.listen, route.port)
            except OSError as error:
                alarm(f"port {route.port} cannot be had ({error.strerror})")
                return
            # signal wires are idle until the end: never a fault
            on_trouble = alarm if route.kind == "data" else lambda _: None
            run.wires.append((route, Wire(listener=listener, dial=dial, stats=WireStats(), on_trouble=on_trouble)))

    def _alarm(self, run: RankRun, what: str, reason: str) -> None:
        """Tell of trouble with a wire, unless the engine says more in the meantime. Any thread."""

        def tell() -> None:
            if run.works:
                self._on_trouble(run, "lost", f"{what}: {reason}")

        if run.works:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the node is ending
                self._loop.call_soon_threadsafe(self._loop.call_later, WIRE_GRACE_S, tell)

    def open_service(self, peer: str, service: str) -> tuple[socket.socket, WireStats]:
        """The engine's side of a wire that `peer` dialled; in a mesh thread. Raises MeshError to refuse."""
        parts = re.fullmatch(r"(data|signal)/([^/]{1,384})/([0-9a-f]{16})/([0-9]{1,2})/([0-9]{1,2})", service)
        if parts is None:
            raise MeshError("no such service", kind="refused")
        kind, generation, source, target = parts[1], parts[3], int(parts[4]), int(parts[5])
        run = self.runs.get(urllib.parse.unquote(parts[2]))
        if run is None or run.lease.generation != generation or run.engine is None or run.exited.is_set():
            raise MeshError("no rank under this generation", kind="old_generation")
        if target != run.rank or source >= run.plan.world or run.plan.ranks[source].node != peer:
            raise MeshError("not a wire of this ring", kind="refused")
        port = run.wiring.data_port if kind == "data" else run.wiring.signal_port
        return run.engine.connect(port, 5.0), WireStats()

    async def release(self, run: RankRun, *, orderly: bool) -> None:
        """Stop this rank's engine and take its wires down; it is gone when this returns. Idempotent."""
        if run.ending is None:
            run.phase = "stopping"
            run.ending = self._loop.create_task(self._end(run, orderly))
        await asyncio.shield(run.ending)

    async def _end(self, run: RankRun, orderly: bool) -> None:
        for task in run.tasks:
            task.cancel()
        if run.starting is not None:
            await asyncio.wait({run.starting})
        if run.session is not None:  # who waits for an answer need not wait for the engine's end
            await run.session.close()
        if run.engine is not None and not run.exited.is_set():
            await end_engine(self._box, run, run.engine, orderly)
        await self._box.in_thread(run.close)
        if self.runs.get(run.plan.model) is run:
            del self.runs[run.plan.model]
        self._engines_changed()

    async def reap(self) -> None:
        """Stop what no proposer has asked about for LEASE_S."""
        late = [run for run in self.runs.values() if run.lease.expires < time.monotonic() and run.ending is None]
        for run in late:
            model, proposer = run.plan.model, run.lease.proposer
            log.warning("model %s: nothing heard from %s for %.0f s: this rank stops", model, proposer, LEASE_S)
        await gather_all(self.release(run, orderly=False) for run in late)

    async def close(self) -> None:
        """Stop everything that runs here."""
        await gather_all(self.release(run, orderly=False) for run in list(self.runs.values()))

    def anon_bytes(self) -> int:
        """Memory that our engines hold for themselves: it is free again when they end."""
        engines = [run.engine for run in self.runs.values() if run.engine and run.exit_code is None]
        return sum(engine.usage().anon_bytes for engine in engines)

    def view(self, run: RankRun) -> RankView:
        """This rank for `status`, measured now."""
        usage = run.engine.usage() if run.engine and run.exit_code is None else Usage()
        wires = tuple(view_of(WireView, route, wire.stats, open=wire.stats.connections) for route, wire in run.wires)
        more = {"node": self._box.name, "layers": run.plan.ranks[run.rank].layers, "wires": wires}
        return view_of(RankView, run, run.plan, run.lease, usage, run.engine, **more)

    def _engines_changed(self) -> None:
        """Write down which ones run, so that the next `up` can stop what this one may leave; hurry for their wires."""
        pids = [run.engine.pid for run in self.runs.values() if run.engine and not run.exited.is_set()]
        sys.setswitchinterval(WIRES_SWITCH_S if pids else IDLE_SWITCH_S)
        engines = [{"pid": pid, "identity": process_identity(pid)} for pid in pids]
        record = json.dumps({"mark": self._mark, "engines": engines})
        try:
            write_atomic(os.path.join(self._box.folder, "engines.json"), record.encode())
        except OSError as error:
            log.warning("cannot record running engines: %s", error)


# ======================================================================================================
# 17. Rings: those that this node leads: the state machine's effects become calls, and when it forms one
# ======================================================================================================

PUT_BYTES_PER_S = 10e6  # a copy that has landed is hashed, if the TOML has its `sha256`, and synced faster than this
UNHEARD_S = 3.0  # a peer silent for so long is not waited for when a ring is torn down
LINKS_WAIT_S = 4.0  # after a node came, until a ring of three or more forms without its ways measured
SETTLE_S = 3.0  # without [[nodes]]: how long nobody new must have come before a ring forms (mDNS takes 1.2 s)


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What clients meet at one model, on this node."""

    in_flight: int = 0
    held: int = 0  # entered here, and wait for the ring to form again
    tokens_per_s: float = 0.0  # of the last answer
    answered_at: float = 0.0  # when the last byte of an answer came
    unanswered_since: float = 0.0  # wanted, but served nowhere; 0: it is served or is not wanted


class Rings:
    """The rings that this node leads or would lead. Turns effects into calls, and what comes of them into events."""

    def __init__(self, box: Box, host: RankHost, peers: Peers, on_change: Callable[[], None]) -> None:
        self.rings: dict[str, Ring] = {}
        self.traffic: dict[str, Traffic] = {}
        self._doubted: dict[str, str] = {}  # models that are about to be asked, and their ring's generation
        self.pauses: dict[str, float | None] = {}  # see Pulse, by model: kept from ring to ring
        self.ranks: dict[str, dict[str, RankView]] = {}  # what the ranks of a ring said last, by model and node
        self._box, self._host, self._peers, self._on_change = box, host, peers, on_change
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._works = {"provision": self._provision, "prepare": self._prepare, "launch": self._launch,
                       "probe": self._probe, "teardown": self._teardown}  # fmt: skip
        self.follow()

    def follow(self) -> None:
        """Have a ring for each model of the configuration; those of others end, and are forgotten."""
        models = {model.name: model for model in self._box.config.models}
        for name in [name for name in self.rings if name not in models]:
            self.post(name, Event(kind="unwant"))
            if self.rings[name].phase == Phase.STOPPED:
                del self.rings[name]
        for name in [name for name in models if name not in self.rings]:
            ring = Ring(model=name, since=time.monotonic())
            off = replace(ring, wanted=False, phase=Phase.STOPPED, reason="autostart is off")
            self.rings[name] = ring if models[name].autostart else off
            self.traffic[name], self._tasks[name] = Traffic(), set()

    def post(self, model: str, event: Event) -> None:
        """Take one event in; its effects run as tasks."""
        ring = self.rings[model]
        self.rings[model], effects = step(ring, event, time.monotonic())
        after = self.rings[model]
        if after.phase != ring.phase:
            log.info("model %s: %s%s", model, after.phase, f" ({after.reason})" if after.reason else "")
            self._on_change()
        for effect in effects:
            if effect.kind == "teardown":
                for task in self._tasks[model]:
                    task.cancel()
            self._run(effect, self._works[effect.kind])

    def _run(self, effect: Effect, work: Callable[[str, Effect], Awaitable[None]]) -> None:
        """A failure that a person can mend, or a bug, breaks the ring; a bug also leaves a traceback in the log."""
        model = effect.plan.model

        async def guarded() -> None:
            try:
                await work(model, effect)
                return
            except ShardboxError as error:
                kinds = {MeshError: "lost", StallError: "stalled"}
                kind, reason = kinds.get(type(error), "trouble"), str(error).replace("\n", "; ")
            except Exception as error:
                log.exception("model %s: bug in %s", model, effect.kind)
                kind, reason = "trouble", f"bug: {error!r}"
            self._tell(effect, kind, reason=reason)

        keep_task(self._tasks[model], guarded())

    def _tell(self, effect: Effect, kind: str, **more: Any) -> None:
        """What has come of an effect."""
        self.post(effect.plan.model, Event(kind=kind, generation=effect.generation, **more))

    async def _on_rank(self, node: str, verb: str, effect: Effect, timeout_s: float, **more: Any) -> Any:
        """What a rank answers, be it here or on another node; see RankHost.answer. Raises ShardboxError."""
        body = {"model": effect.plan.model, "generation": effect.generation, **more}
        if node == self._box.name:
            return await self._host.answer(verb, body, node)
        return await self._peers.call(node, "POST", f"/peer/{verb}", body, timeout_s)

    async def _provision(self, model: str, effect: Effect) -> None:
        """Every rank that lacks the model fetches it, from whoever has it or some of it."""
        nodes, last, since = [rank.node for rank in effect.plan.ranks if rank.copy_bytes], -1, 0.0
        heard = dict.fromkeys(nodes, time.monotonic())
        views: dict[str, CopyView] = {}
        while any(node not in views or views[node].state != "done" for node in nodes):
            for node in nodes:
                try:
                    answer = await self._on_rank(node, "fetch", effect, CALL_TIMEOUT_S, root=effect.plan.root)
                    views[node], heard[node] = from_json(CopyView, answer, "copy"), time.monotonic()
                except MeshError as error:
                    if error.kind == "refused" or time.monotonic() - heard[node] > LOST_S:
                        raise
            for view in views.values():
                if view.state == "failed":
                    raise FileError(view.problem, where=f"copy on {view.node}", hint=view.hint)
            done, now = sum(view.done_bytes for view in views.values()), time.monotonic()
            last, since = done, since if done == last else now
            whole = done and all(view.done_bytes == view.size_bytes for view in views.values())
            if since == now or (whole and now - since < done / PUT_BYTES_PER_S):
                text = "; ".join(copy_text(view) for view in views.values() if view.state != "done")
                self._tell(effect, "copied", reason=text)
            await asyncio.sleep(WATCH_S)
        self._tell(effect, "provisioned")

    async def _prepare(self, model: str, effect: Effect) -> None:
        """A lease of every rank, and the consent of every other node that can be asked."""
        facts, plan, expect = self._box.facts, effect.plan, Expected()
        if not self._box.rehearses:
            expect = Expected(root=plan.root or facts.model(model).root, commit=facts.binary("leader").commit)
        more = {"plan": to_json(plan), "expect": to_json(expect)}

        async def ask(node: str) -> None:
            try:
                await self._on_rank(node, "prepare", effect, PREPARE_TIMEOUT_S, **more)
            except MeshError as error:
                if plan.rank_of(node) or error.kind == "refused":
                    raise
                log.info("model %s: %s has no rank and cannot be asked (%s)", model, node, error.what)

        await ask(self._box.name)
        asked = {*(peer.name for peer in self._peers.live()), *(rank.node for rank in plan.ranks)} - {self._box.name}
        await gather_all(ask(node) for node in sorted(asked))
        self._tell(effect, "granted")

    async def _launch(self, model: str, effect: Effect) -> None:
        self._run(effect, self._watch)
        await gather_all(self._on_rank(rank.node, "launch", effect, PREPARE_TIMEOUT_S) for rank in effect.plan.ranks)
        run = self._host.get(model, effect.generation)
        self.traffic[model].tokens_per_s = 0.0  # that was another ring
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(5), run.http.get("http://engine/health") as reply:
                    if reply.status == 200:
                        break
            await asyncio.sleep(0.1)
        self._tell(effect, "loaded")

    async def _probe(self, model: str, effect: Effect) -> None:
        """One real token through every rank: only then is the ring ready."""
        run, where = self._host.get(model, effect.generation), f"model {model}"
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        if run.started_as.embeddings:
            path, body = "/v1/embeddings", {"input": "Hi"}
        try:
            async with run.http.post(f"http://engine{path}", json=body) as reply:
                answer = await reply.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"no one-token answer: {error!r}", where=where) from None
        if reply.status != 200 or not (answer.get("choices") or answer.get("data")):
            raise EngineError(f"the one-token answer was {str(answer)[:200]}", where=where)
        await asyncio.gather(*(self._look(rank, effect, self.ranks[model], {}) for rank in effect.plan.ranks))
        self._tell(effect, "answered")

    async def _teardown(self, model: str, effect: Effect) -> None:
        """Leader first (it passes STOP round a whole ring), the others at the same time wait for that or are killed.
        Who is silent is told once: its lease runs out, and the next generation keeps its engine out."""
        ranks, patience_s = effect.plan.ranks, RING_STOP_S + 3 * TERM_S
        told = {rank: 1.0 if self._peers.silent_s(rank.node) > UNHEARD_S else patience_s for rank in ranks}
        asked = [self._on_rank(rank.node, "release", effect, told[rank], orderly=effect.orderly) for rank in ranks]
        for rank, result in zip(ranks, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(result, ShardboxError):
                log.info("model %s: could not tell %s to stop (%s); its lease runs out", model, rank.node, result.what)
            elif isinstance(result, BaseException):
                log.error("model %s: stopping rank %d", model, rank.rank, exc_info=result)
        self.ranks.pop(model, None)
        self._tell(effect, "stopped", jitter=random.random())

    async def _watch(self, model: str, effect: Effect) -> None:
        """Renew every lease, and see that every rank lives and, while the ring has something to do, that it does."""
        views = self.ranks[model] = {}
        engine, traffic, heard = self._box.config.engine, self.traffic[model], dict[str, float]()
        pace, places = Pulse(pause_s=self.pauses.get(model)), None
        while True:
            await asyncio.gather(*(self._look(rank, effect, views, heard) for rank in effect.plan.ranks))
            serving = self.rings[model].phase in (Phase.SERVING, Phase.DRAINING)
            sign = f"{sign_of_life([*views.values()])}/{traffic.answered_at}"
            pace = pace.seen(sign, time.monotonic(), asked=not serving or traffic.in_flight > 0)
            places, before = self._peers.places(rank.node for rank in effect.plan.ranks), places
            if serving and before not in (None, places):  # its wires may be dead, and nobody would notice
                self.doubt(model, "an address changed")
            if serving:  # how long it pauses while it loads says nothing about answers
                self.pauses[model] = pace.pause_s
            stall_s = pace.stall_s(engine.stall_min_s if serving else engine.stall_max_s, engine.stall_max_s)
            if pace.hangs(stall_s):
                doing = "a request is in flight" if serving else self.lagging(model)
                raise StallError(f"stalled: {doing}, but nothing moved, no rank computed or read for {stall_s:.0f} s")
            await asyncio.sleep(WATCH_S)

    async def _look(self, rank: RankPlan, effect: Effect, views: dict[str, RankView], heard: dict[str, float]) -> None:
        """Take one rank's view, renewing its lease. Raises ShardboxError when the rank is lost or has ended. `heard`:
        when each node answered last. It may end after its ring: `views` are of that ring alone."""
        now, name = time.monotonic(), f"rank {rank.rank} ({rank.node})"
        left_s = heard.setdefault(rank.node, now) + LOST_S - now
        try:
            answer = await self._on_rank(rank.node, "lease", effect, min(CALL_TIMEOUT_S, max(1.0, left_s)))
            view = from_json(RankView, answer)
        except MeshError as error:
            if error.kind == "refused" or time.monotonic() - heard[rank.node] >= LOST_S:
                raise MeshError(f"{name} is lost: {error.what}") from None
            return
        heard[rank.node] = time.monotonic()
        views[rank.node] = view
        if view.phase == "exited" and view.exit_code != 0:
            raise EngineError(f"{name}: {view.problem or f'exit {view.exit_code}'}")

    def doubt(self, model: str, reason: str) -> None:
        """A ring that serves may be broken: ask it for a token. Only then: a probe can cost somebody's prompt cache."""
        ring = self.rings.get(model)
        if ring and ring.phase == Phase.SERVING and ring.plan and self._doubted.get(model) != ring.generation:
            self._doubted[model] = ring.generation
            log.info("model %s: asked for a token, because %s", model, reason)
            self._run(Effect(kind="doubt", generation=ring.generation, plan=ring.plan), self._ask_again)

    async def _ask_again(self, model: str, effect: Effect) -> None:
        """One token of the free slot with the shortest prompt; a busy ring shows by itself whether it works."""
        try:
            await asyncio.sleep(WIRE_GRACE_S + LOG_CLOSE_S)  # an engine that has ended says more
        finally:
            self._doubted.pop(model, None)
        run, traffic = self._host.get(model, effect.generation), self.traffic[model]
        path, body = "/v1/embeddings", dict[str, Any](input="Hi")
        traffic.in_flight += 1  # so that a hang is one
        try:
            if not run.started_as.embeddings:
                async with run.http.get("http://engine/slots") as reply:
                    slots = [slot for slot in await reply.json(content_type=None) if not slot.get("state")]
                if not slots:
                    return
                free = min(slots, key=lambda slot: len(str(slot.get("prompt") or "")))
                path, body = "/completion", {"prompt": "Hi", "n_predict": 1, "id_slot": free.get("id", -1)}
            async with run.http.post(f"http://engine{path}", json=body) as reply:
                await reply.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run.exited.wait(), WIRE_GRACE_S)
                return  # what is told of its end says more
            raise EngineError(f"no answer when asked again: {error!r}", where=f"model {model}") from None
        finally:
            traffic.in_flight -= 1
        if reply.status != 200:
            raise EngineError(f"answered {reply.status} when asked again", where=f"model {model}")

    def lagging(self, model: str) -> str:
        """Which ranks have not come up yet, for a deadline's message."""
        plan, views = self.rings[model].plan, self.ranks.get(model, {})
        if plan is None:
            return ""
        phases = {rank: views[rank.node].phase if rank.node in views else "silent" for rank in plan.ranks}
        late = [f"rank {rank.rank} ({rank.node}) is {phase}" for rank, phase in phases.items() if phase != "bound"]
        return ", ".join(late) or "every engine runs, but the model is not loaded"

    async def close(self) -> None:
        """Stop every ring in order and wait for it."""
        for model in self.rings:
            self.post(model, Event(kind="unwant"))
        deadline = time.monotonic() + RING_STOP_S + 3 * TERM_S
        while time.monotonic() < deadline and any(r.phase == Phase.STOPPING for r in self.rings.values()):
            await asyncio.sleep(0.05)
        for task in set().union(*self._tasks.values()):
            task.cancel()


def sign_of_life(views: Sequence[RankView]) -> str:
    """Changes when bytes move in the ring, or a rank reads, brings pages in (16 MiB: some file systems count no reads)
    or computes (0.2 s: more than idling does)."""
    moved = sum(wire.sent_bytes + wire.received_bytes for view in views for wire in view.wires)
    computed, resident = (sum(int(view.cpu_s * 5) for view in views), sum(view.rss_bytes >> 24 for view in views))
    return f"{moved}/{computed}/{resident}/{sum(view.read_bytes for view in views)}"


def precedence(phase: str, world: int, leader: str) -> tuple[bool, int, str]:
    """Of two rings for one model, which a partition can bring about, the lower stays: the one that serves, then the
    one with more ranks, then by the leader's name."""
    return phase != Phase.SERVING, -world, leader


class Proposer:
    """Decides for every model whether this node forms a ring now, by which plan, and when one of its own makes room."""

    def __init__(self, box: Box, peers: Peers, host: RankHost, library: Library, rings: Rings) -> None:
        self.formed: set[str] = set()  # models that were served while this node was up
        self._box, self._peers, self._host, self._library, self._rings = box, peers, host, library, rings
        self._plans: dict[str, ModelPlan | PlanError] = {}
        self._plans_key = ""
        self._compared: dict[str, float] = {}  # model -> when its ring was last compared with today's plan
        self._offers: dict[str, float] = {}  # model -> since when there has been a better one

    def _running(self) -> dict[str, ModelPlan]:
        """The plans of all rings that are up or coming up, here and elsewhere."""
        theirs = [view for peer in self._peers.live() for view in peer.said.models if view.leader == peer.name]
        rings: list[ModelView | Ring] = [*theirs, *self._rings.rings.values()]
        return {ring.model: ring.plan for ring in rings if ring.plan and ring.phase in Phase.ACTIVE}

    def _todays_plans(self) -> dict[str, ModelPlan | PlanError]:
        """Today's plans from live facts; rings that run keep what they have. Cached while nothing changes."""
        running, facts = self._running(), self._peers.all_facts()
        key = digest([self._box.config.hash, facts, running])
        if key != self._plans_key:
            self._plans_key, self._plans = key, plan_all(self._box.config, facts, running)
        return self._plans

    def led_elsewhere(self, model: str) -> ModelView | None:
        """The ring that a live peer leads for this model."""
        for peer in self._peers.live():
            for view in peer.said.models:
                if view.model == model and view.leader == peer.name and view.phase in (*Phase.ACTIVE, Phase.STOPPING):
                    return view
        return None

    def leader_of(self, model: str) -> str:
        """The other node to ask for this model: what its rank's lease says, or what a peer says; "" where none."""
        held = self._host.runs.get(model)
        if held and held.lease.proposer != self._box.name:
            return held.lease.proposer
        view = self.led_elsewhere(model)
        return view.leader if view else ""

    def tick(self) -> None:
        """Let time pass for every ring, and propose where this node leads."""
        now = time.monotonic()
        self._rings.follow()
        for name, ring in list(self._rings.rings.items()):
            traffic = self._rings.traffic[name]
            self._rings.post(name, Event(kind="tick", reason=self._rings.lagging(name), idle=not traffic.in_flight))
            rival = self.led_elsewhere(name)
            served = Phase.SERVING in (ring.phase, rival.phase if rival else "")
            traffic.unanswered_since = 0.0 if served or not ring.wanted else traffic.unanswered_since or now
            if served:
                self.formed.add(name)
            if ring.plan and ring.phase in Phase.ACTIVE and rival and rival.phase in Phase.ACTIVE:
                own = precedence(ring.phase, ring.plan.world, ring.plan.leader)
                if precedence(rival.phase, rival.world, rival.leader) < own:
                    self._rings.post(name, Event(kind="yield", reason=f"{rival.leader} leads it too, and goes first"))
            if ring.phase == Phase.SERVING and ring.plan and self._box.config.model(name):
                self._improve(name, ring, ring.plan, now)
            if ring.phase == Phase.WAITING and ring.wanted and self._box.config.model(name):
                plan = self._todays_plans()[name]
                reason = self._obstacle(self._box.model(name), plan, now)
                offer = plan if not reason and isinstance(plan, ModelPlan) else None
                self._rings.post(name, Event(kind="plan", plan=offer, reason=reason, token=secrets.token_hex(8)))

    def _improve(self, name: str, ring: Ring, old: ModelPlan, now: float) -> None:
        """Form a ring of this node anew once a clearly better plan has stood, and nobody has asked, for replan_s."""
        quiet_s, traffic = self._box.config.cluster.replan_s, self._rings.traffic[name]
        asked_at = now if traffic.in_flight else max(traffic.answered_at, ring.served_since)
        if not quiet_s or now - asked_at < quiet_s / 2 or now - self._compared.get(name, 0.0) < quiet_s / 10:
            return
        self._compared[name] = now
        others = {model: plan for model, plan in self._running().items() if model != name}
        plan = plan_all(self._box.config, self._peers.all_facts(), others)[name]
        better = ""
        if isinstance(plan, ModelPlan) and not any(rank.copy_bytes for rank in plan.ranks):
            better = improvement(old, plan) if not self._unready(name, plan) else ""
        offered_at = self._offers.setdefault(name, now)
        if not better or self._box.stop.is_set():
            del self._offers[name]
        elif now - max(asked_at, offered_at) >= quiet_s:
            del self._offers[name]
            self._rings.post(name, Event(kind="replan", generation=ring.generation, reason=f"a better plan: {better}"))

    def _unready(self, name: str, plan: ModelPlan) -> str:
        """Which node of the plan cannot take part yet, and why; "" when all can."""
        for node in [] if self._box.rehearses else self._peers.all_facts():
            copy, rank = node.model(name), plan.rank_of(node.name)
            if rank and not rank.copy_bytes and not copy.root:
                return f"{node.name} is reading the model ({100 * copy.hashed_bytes // max(1, copy.size_bytes)} %)"
        silent = [peer for peer in self._peers.live() if peer.problem and plan.rank_of(peer.name)]
        return f"{silent[0].name} does not answer: {silent[0].problem}" if silent else ""

    def _obstacle(self, model: ModelConfig, plan: ModelPlan | PlanError, now: float) -> str:
        """Why this node should not propose the plan now; "" when it should."""
        elsewhere, held = self.led_elsewhere(model.name), self._host.runs.get(model.name)
        if self._box.stop.is_set():
            return f"{self._box.name} goes down"
        if elsewhere:
            return f"{elsewhere.leader} leads it"
        if held and held.lease.proposer != self._box.name:
            return f"this node's rank belongs to {held.lease.proposer}"
        if waiting := self._forming_wait(model, now):
            return waiting
        if isinstance(plan, PlanError):
            return plan.what
        if not plan.root and any(rank.copy_bytes for rank in plan.ranks):
            return "the copy that others are to fetch is still being read"
        elsewhere_led = f"{plan.leader} is to lead it" if plan.leader != self._box.name else ""
        return self._unready(model.name, plan) or elsewhere_led or self._unmeasured(plan, now)

    def _unmeasured(self, plan: ModelPlan, now: float) -> str:
        """Whether forming should wait a moment until the plan's nodes know their speed, and the ways between them where
        the order of the ring counts."""
        here = {facts.name: facts for facts in self._peers.all_facts() if plan.rank_of(facts.name)}
        if now - self._peers.newest >= LINKS_WAIT_S:
            return ""
        slow = [name for name, facts in here.items() if not (self._box.rehearses or facts.speed.core_bytes_per_s)]
        pairs = itertools.combinations(sorted(here), 2) if plan.world > 2 else ()
        unknown = any(b not in here[a].links and a not in here[b].links for a, b in pairs)
        return "measuring nodes and network" if slow or unknown else ""

    def _forming_wait(self, model: ModelConfig, now: float) -> str:
        """What the first forming still waits for: declared nodes, or a moment without new ones."""
        live = {self._box.name, *(peer.name for peer in self._peers.live())}
        declared = [node.name for node in self._box.config.nodes if not model.nodes or node.name in model.nodes]
        missing = [name for name in declared if name not in live]
        left = self._box.config.cluster.form_wait_s - (now - self._box.started)
        facts = self._peers.all_facts()
        waiting = [node.name for node in facts if self._library.engines_from(node, facts)]
        if waiting and left > 0:
            return f"waiting for {', '.join(waiting)} to fetch engines"
        if missing and left > 0 and model.name not in self.formed:
            return f"waiting for {', '.join(missing)} ({left:.0f} s more)"
        return "looking for other nodes" if not declared and now - self._peers.newest < SETTLE_S else ""


# ======================================================================================================
# 18. Node: one `shardbox up`, which holds all of this together
# ======================================================================================================

LINK_AGE_S = 1800.0  # until the way to a node is measured again
KNOCK_S = 5.0  # between two tries to reach engines that are not closed in, and for each of them
MAX_DOORS = 96  # ports that are tried: of a whole ring


async def every(pause_s: float, action: Callable[[], Awaitable[None]]) -> None:
    """Do it again and again, with a pause between."""
    while True:
        await action()
        await asyncio.sleep(pause_s)


async def is_open(address: str, port: int) -> bool:
    """Whether somebody on another box takes connections there."""
    with contextlib.suppress(OSError), socket.socket() as sock:
        sock.setblocking(False)
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, (address, port)), KNOCK_S)
        return bool(sock.getsockname()[0] != sock.getpeername()[0])
    return False


class Node:
    """One `shardbox up`: everything that this box does, in one event loop and the mesh's threads."""

    def __init__(self, *, config: Config, name: str, folder: str, keys: MeshKeys, spawner: Spawner, demo: bool) -> None:
        self.demo = demo
        self.surveyor = Surveyor(config, name, folder, isolation_problem(), keys.public)
        self.box = box = Box(config, name, folder, self.surveyor.survey(own_bytes=0))
        self.stop = box.stop
        self.warnings: dict[str, str] = {}
        self.followers: list[Callable[[Config], None]] = []  # told of a changed configuration; may refuse it
        self.desired: dict[str, tuple[int, str, bool]] = {}  # model -> (counter, node that said it, wanted)
        self.mesh = Mesh(keys=keys, open_service=self._open_service)
        self.peers = Peers(box, self.mesh, self._hints, self._on_state)
        port, machine = box.settings.ports.mesh, box.facts.machine
        self.discovery = Discovery(config.cluster.name, name, machine, port, self.peers.refresh)
        self.library = Library(box, self.mesh, self.peers, self.surveyor, self.refresh, self._is_answering)
        self.host = RankHost(box, spawner, self.peers, self.library, self._on_trouble)
        self.rings = Rings(box, self.host, self.peers, self._tell_news)
        self.proposer = Proposer(box, self.peers, self.host, self.library, self.rings)
        self.control: Any = None  # makes a protocol for a peer's connection; set by start_services()
        self.reached: dict[str, tuple[int, ...]] = {}  # node -> ports of its engines that anybody could reach from here
        self.callers: dict[int, str] = {}  # descriptor of a mesh connection's local end -> who is there
        self.asking = 0  # requests of clients that entered here and are being answered or held
        self.links: dict[str, LinkFacts] = {}  # to other nodes, as measured from here
        self._tried: dict[str, float] = {}  # when each was last to be measured
        self._surveying, self._moved = asyncio.Lock(), (0.0, 0)
        self.surveyor.pace = Pace(None, self._is_answering, READ_BYTES_PER_S).spend
        self._loop = asyncio.get_running_loop()

    # --- peers ---------------------------------------------------------------------------------------

    def _open_service(self, peer: str, service: str) -> tuple[Near, WireStats]:
        """In a mesh thread: what a proven peer asked for."""
        if service.startswith("file/"):
            return self.library.open_service(service.removeprefix("file/"))
        if service == "echo" and self.host.runs:
            raise MeshError("an engine runs here", kind="refused")
        if service not in ("control", "echo"):
            return self.host.open_service(peer, service)
        far, near = socket.socketpair()
        if service == "echo":
            threading.Thread(target=echo, args=(near,), name="echo", daemon=True).start()
            return far, WireStats()
        near.setblocking(False)

        async def adopt() -> None:
            self.callers[near.fileno()] = peer
            await self._loop.connect_accepted_socket(self.control, near)

        try:
            asyncio.run_coroutine_threadsafe(adopt(), self._loop).result(CALL_TIMEOUT_S)
        except BaseException:
            far.close()
            raise
        return far, WireStats()

    def _hints(self) -> Iterator[Hint]:
        """Static addresses, and adverts that name our cluster and protocol."""
        config, name, facts = self.box.config, self.box.name, self.box.facts
        for node in config.nodes:
            if node.address and node.name != name:
                yield Hint(node=node.name, address=node.address, port=node.ports.mesh, source="static")
        own = {(name, address.address, facts.mesh_port) for address in facts.addresses}
        for hint in list(self.discovery.hints.values()):
            mine = (hint.node, hint.address, hint.port) in own
            if hint.cluster == config.cluster.name and hint.protocol == PROTOCOL and not mine:
                yield hint

    def _on_state(self, state: PeerState) -> None:
        """Take over what an operator said on another node."""
        for model, said in state.desired.items():
            match said:
                case (int(counter), str(node), bool(wanted)) if counter > 0 and model in self.rings.rings:
                    self._wish(model, (counter, node, wanted))

    def want(self, model: str, wanted: bool) -> None:
        """Start or stop a model: the operator says so, here."""
        counter = self.desired[model][0] if model in self.desired else 0
        self._wish(model, (counter + 1, self.box.name, wanted))

    def _wish(self, model: str, said: tuple[int, str, bool]) -> None:
        """The newest word wins, on every node."""
        if said[:2] > self.desired.get(model, (0, ""))[:2]:
            self.desired[model] = said
            self.rings.post(model, Event(kind="want" if said[2] else "unwant"))

    def reload(self, read: Callable[[], Config]) -> None:
        """Take over what the TOML says now, without touching rings that serve. One with mistakes changes nothing."""
        old, name = self.box.config, self.box.name
        try:
            config, fixed = reloaded(old, read(), name)
            for follow in self.followers:
                follow(config)
        except ShardboxError as error:
            log.error("%s is not taken over: %s", old.file, error)
            self.warnings["reload"] = f"{old.file} was changed, but is not taken over: {str(error).splitlines()[0]}"
            return
        self.box.config, self.box.settings = config, config.node(name)
        self.surveyor.reload(config)
        self.rings.follow()
        for model in config.models:
            if model.autostart and model.name not in self.desired and not self.rings.rings[model.name].wanted:
                self.rings.post(model.name, Event(kind="want"))
        self.warnings.pop("reload", None)
        log.info("%s is taken over", old.file)
        if fixed:
            self.warnings["reload"] = f"{old.file} was changed: {', '.join(fixed)} needs a restart of this node"
            log.warning("%s", self.warnings["reload"])

    def _tell_news(self) -> None:
        """A ring changed its phase: the others should not learn it only at their next question."""

        async def tell(name: str) -> None:
            with contextlib.suppress(ShardboxError):  # it asks by itself within POLL_S
                await self.peers.call(name, "POST", "/peer/news")

        for peer in self.peers.live():
            keep_task(self.box.tasks, tell(peer.name))

    async def reach_all(self) -> list[Reach]:
        """Dial every known and declared node, afresh."""
        hints = [hint for peer in self.peers.known.values() for hint in peer.hints.values()]
        return await reach_all(self.box.config, self.box.name, hints, self.mesh, self.box.pool)

    async def knock(self) -> None:
        """Try, as a stranger would, what engines of other boxes listen on that are not closed in."""
        views = [view for ranks in self.rings.ranks.values() for view in ranks.values()]
        views += [view for peer in self.peers.live() for model in peer.said.models for view in model.ranks]
        doors = sorted({(view.node, port) for view in views for port in view.open_ports})[:MAX_DOORS]

        reached: dict[str, tuple[int, ...]] = {}

        async def knock_at(node: str, port: int) -> None:
            with contextlib.suppress(MeshError):  # it has never answered
                if await is_open(self.peers.target(node)[1], port):
                    reached[node] = (*reached.get(node, ()), port)

        await gather_all(knock_at(*door) for door in doors)
        self.reached = reached

    def _on_trouble(self, run: RankRun, kind: str, text: str) -> None:
        """A rank here is broken, or lost to another: tell the ring's proposer, which may be this node."""
        log.warning("%s", text)
        if run.lease.proposer == self.box.name:
            self.rings.post(run.plan.model, Event(kind=kind, generation=run.lease.generation, reason=text))
        else:
            keep_task(self.box.tasks, self._report(run, kind, text))

    async def _report(self, run: RankRun, kind: str, reason: str) -> None:
        try:
            await self._tell_proposer(run, kind, reason)
        except ShardboxError as error:
            log.info("%s cannot be told (%s): this rank stops", run.lease.proposer, error.what)
            await self.host.release(run, orderly=False)

    async def _leave(self, run: RankRun) -> None:
        """Tell the leader of a ring that this node goes, and give it time to stop the ring in order."""
        with contextlib.suppress(ShardboxError, TimeoutError):
            await self._tell_proposer(run, "leaving", f"{self.box.name} goes down")
            await asyncio.wait_for(run.exited.wait(), self.box.config.api.drain_s + RING_STOP_S)

    async def _tell_proposer(self, run: RankRun, kind: str, reason: str) -> None:
        body = {"model": run.plan.model, "generation": run.lease.generation, "kind": kind, "reason": reason}
        await self.peers.call(run.lease.proposer, "POST", "/peer/trouble", body)

    # --- running -------------------------------------------------------------------------------------

    async def run(self, open_services: Callable[[Node, contextlib.AsyncExitStack], Awaitable[None]]) -> None:
        """Serve until `stop` is set; raises ShardboxError when this node cannot start or go on."""
        cluster, port = self.box.config.cluster, self.box.settings.ports.mesh
        for address in [a.address for a in self.box.facts.addresses] if cluster.interfaces else ["0.0.0.0"]:
            try:
                self.mesh.listen(address, port)
            except OSError as error:
                what = f"cannot listen on {address}:{port}: {error.strerror}"
                raise UsageError(what, where="ports.mesh", hint=port_owner_hint(port)) from None
        async with contextlib.AsyncExitStack() as services:
            await open_services(self, services)
            self.peers.refresh()
            loops = [(self._tick, 0.5), (self._survey, 2.0), (self.knock, KNOCK_S), (self._measure_links, 0.5)]
            loops += [(self._announce, 5.0)] if cluster.discovery == "mdns" else []
            tasks = [keep_task(self.box.tasks, every(pause_s, action)) for action, pause_s in loops]
            for task in tasks:
                task.add_done_callback(self._on_loop_end)
            try:
                await self.stop.wait()
                await self._drain(0.0 if self.box.failure else self.box.config.api.drain_s)
            finally:
                for task in tasks:
                    task.cancel()
                await self._shut_down(services)
        if self.box.failure:
            raise self.box.failure

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception():
            self.box.fail(ShardboxError(f"bug: {task.exception()!r}", hint="the log has the traceback"))

    async def _drain(self, grace_s: float) -> None:
        """Let answers in progress end, here and in rings that this node is part of."""
        log.info("going down: answers in progress have %s; a second signal ends them", format_duration(grace_s))
        self._tell_news()
        for name in self.rings.rings:
            self.rings.post(name, Event(kind="leaving", reason=f"{self.box.name} goes down", grace_s=grace_s))
        theirs = [self._leave(run) for run in self.host.runs.values() if run.lease.proposer != self.box.name]
        leaving, deadline = asyncio.gather(*theirs), time.monotonic() + grace_s
        while self.asking or any(ring.phase == Phase.DRAINING for ring in self.rings.rings.values()):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        await leaving

    async def _shut_down(self, services: contextlib.AsyncExitStack) -> None:
        log.info("stopping")
        for part in (self.rings, self.library, self.host, self.discovery):
            await part.close()
        await services.aclose()
        await self.peers.close()
        await self.box.in_thread(self.mesh.close)
        self.surveyor.close()
        self.box.pool.shutdown(wait=False, cancel_futures=True)

    async def _tick(self) -> None:
        self.peers.refresh()
        self.library.tend_engines(self.peers.all_facts()[1:])
        self.proposer.tick()
        keep_task(self.box.tasks, self.host.reap())

    async def _survey(self) -> None:
        async with self._surveying:
            facts = await self.box.in_thread(self.surveyor.survey, own_bytes=self.host.anon_bytes())
            self.box.facts = replace(facts, links=dict(self.links))

    async def _measure_links(self) -> None:
        """Measure the way to every other node, rarely, one at a time, and never while an engine runs. Of two nodes the
        one whose name comes first does it."""
        now = time.monotonic()
        names = [peer.name for peer in self.peers.live() if peer.name > self.box.name]
        for name in [name for name in names if now - self._tried.get(name, -math.inf) > LINK_AGE_S]:
            if self.host.runs:
                return
            self._tried[name] = now
            try:
                link = await self.box.in_thread(self._measure_link, name)
            except (ShardboxError, OSError) as error:
                log.info("the way to %s cannot be measured: %s", name, error)
                continue
            known = self.links.get(name)
            if not known or not 0.7 < link.rtt_ns / known.rtt_ns < 1.4:  # facts change only when something did
                self.links[name] = link
                self.box.facts = replace(self.box.facts, links=dict(self.links))
                self._tell_news()

    def _measure_link(self, name: str) -> LinkFacts:
        target = self.peers.target(name)
        with self.mesh.connect(target[1], target[2], name, "echo", CALL_TIMEOUT_S) as sock:
            return measure_link(sock)

    async def refresh(self) -> None:
        """Look again, and tell the others to."""
        await self._survey()
        self._tell_news()

    def _is_answering(self) -> bool:
        """Whether an engine here is at work for somebody: copies go slowly then. Any thread."""
        moved = sum(w.stats.sent_bytes for run in list(self.host.runs.values()) for _, w in list(run.wires))
        now = time.monotonic()
        if moved != self._moved[1] or any(traffic.in_flight for traffic in list(self.rings.traffic.values())):
            self._moved = now, moved
        return now - self._moved[0] < 1.0

    async def _announce(self) -> None:
        """Keep the adverts true: again when addresses change, or after multicast failed."""
        await self.discovery.announce(tuple(address.address for address in self.box.facts.addresses))
        self.warnings.pop("mdns", None)
        if self.discovery.problem:
            self.warnings["mdns"] = f"{self.discovery.problem}; only nodes with an `address` are found"


# --- what a node tells of itself and the others --------------------------------------------------------


def model_view(node: Node, name: str) -> ModelView:
    """One model as this node knows it, without asking anybody."""
    ring, traffic, now = node.rings.rings[name], node.rings.traffic[name], time.monotonic()
    views = node.rings.ranks.get(name, {}) if ring.phase in Phase.ACTIVE else {}
    patience_s = node.box.config.cluster.form_wait_s + LOAD_BASE_S / 4
    late = 0 < traffic.unanswered_since < now - patience_s and ring.phase in (Phase.WAITING, Phase.BACKOFF)
    plan = ring.plan
    return view_of(
        ModelView,
        ring,
        traffic,
        plan,
        alive=sum(view.exit_code == 0 or (view.exit_code is None and view.pid > 0) for view in views.values()),
        seconds=now - ring.since,
        overdue=late or ring.stalled or ring.phase == Phase.FAILED,
        restarts=len(ring.restarts),
        ranks=tuple(views[rank.node] for rank in plan.ranks if rank.node in views) if plan else (),
    )


def best_view(node: Node, name: str) -> ModelView:
    """One model as its leader tells it, else as this node knows it."""
    own = model_view(node, name)
    if own.phase in (*Phase.ACTIVE, Phase.STOPPING, Phase.STOPPED):
        return own
    peers = [peer for peer in node.peers.live() if not peer.problem]
    views = [view for peer in peers for view in peer.said.models if view.model == name]
    others = [view for view in views if view.phase in Phase.TELLING]
    return min(others, key=lambda view: Phase.TELLING.index(view.phase), default=own)


def peer_views(node: Node) -> list[PeerView]:
    """Every node that this one knows of, with what is wrong with it."""
    box, live = node.box, {peer.name for peer in node.peers.live()}
    declared = {entry.name for entry in box.config.nodes}
    addresses = box.facts.addresses
    address, notes = ", ".join(a.address for a in addresses), "; ".join(a.note for a in addresses if a.note)
    views = [facts_view(box.facts, state="self", source="self", address=address, detail=notes)]
    for peer in node.peers.known.values():
        if peer.name != box.name:
            view = peer_view(peer, live=peer.name in live, declared=peer.name in declared)
            if view.state == "live" and view.config_hash != box.config.hash:
                view = replace(view, detail=view.detail or "its shardbox.toml differs from this one")
            views.append(view)
        elif peer.twin or peer.facts:
            views.append(PeerView(name=peer.name, state="refused", detail="another box with this node's name"))
    for hint in node.discovery.hints.values():
        state, detail = "refused", f"speaks protocol {hint.protocol}, this box {PROTOCOL}"
        if hint.cluster != box.config.cluster.name:
            state, detail = "foreign", f"belongs to cluster {hint.cluster!r}"
        elif hint.protocol == PROTOCOL:
            continue
        view = PeerView(name=hint.node, state=state, address=hint.address, source="mdns", detail=detail)
        views.append(replace(view, version=hint.version))
    missing = declared - {view.name for view in views if view.state not in ("foreign", "refused")}  # strangers
    absent = PeerView(name="", declared=True, state="missing", detail="in [[nodes]], never seen")
    views += [replace(absent, name=name) for name in missing]
    return sorted(views, key=lambda view: (view.state != "self", view.name))


def peer_view(peer: Peer, *, live: bool, declared: bool) -> PeerView:
    """A node that was heard of. One that nobody declared may go: that is not a fault."""
    hint = peer.at or next(reversed(peer.hints.values()), None)
    twin = f"two machines call themselves {peer.name}: {peer.twin.address} is ignored" if peer.twin else ""
    state = "live" if live else "unreachable" if peer.facts is None else "lost" if declared else "gone"
    return facts_view(
        peer.facts,
        name=peer.name,
        declared=declared,
        state=state,
        address=hint.address if hint else "",
        source=hint.source if hint else "",
        detail=twin or ("goes down" if live and peer.said.leaving else "" if live else peer.problem),
        rtt_ms=peer.rtt_ms if live else 0.0,
        silent_s=time.monotonic() - peer.last_seen if peer.last_seen else 0.0,
    )


def facts_view(facts: NodeFacts | None, **given: Any) -> PeerView:
    """The view of a node, with what it says of itself."""
    sizes = {"memory_bytes": facts.memory.available_bytes, "gpus": len(facts.gpus)} if facts else {}
    return view_of(PeerView, facts, **sizes, **given)


def own_copies(node: Node) -> tuple[CopyView, ...]:
    """What is being copied to this node, or read on it, and how copies to it ended."""
    reading = [reading.view() for reading in list(node.surveyor.readings.values())]
    return (*(replace(copy.view(), model=name) for name, copy in node.library.copies.items()), *reading)


def all_copies(node: Node) -> tuple[CopyView, ...]:
    """The same of every node, but for what has ended elsewhere."""
    others = [view for peer in node.peers.live() for view in peer.said.copies if view.state in ("copying", "reading")]
    return (*own_copies(node), *others)


def wrong_copies(model: ModelConfig, facts: Sequence[NodeFacts]) -> list[str]:
    """One warning for each node whose file is not what the others, the leader or the TOML say that it should be."""
    copies = {node.name: node.model(model.name) for node in facts}
    right = copies[model.leader].root if model.leader in copies and not copies[model.leader].problem else ""
    right = right or most_common_root(copies.values())
    wrong = {name: copy for name, copy in copies.items() if copy.root and (copy.problem or copy.root != right)}
    end = f"`shardbox pull {model.name} --replace` on that box mends it"
    if not right:
        end = "no other box has the right one: correct `sha256`, or put that file there"
    return [
        f"{name}: {copy.problem or f'{copy.path} has other bytes ({copy.root[:8]}, not {right[:8]})'}; {end}"
        for name, copy in wrong.items()
    ]


def exposures(node: Node) -> list[str]:
    """Which engines can be reached from outside, and from where."""
    told = {peer.name: peer.said.reached for peer in node.peers.live()} | {node.box.name: node.reached}
    sentences = []
    for name in sorted({node.box.name, *node.peers.known}):
        tellers = sorted(teller for teller, reached in told.items() if reached.get(name))
        ports = sorted({port for teller in tellers for port in told[teller][name]})
        if ports:
            where = f"engine ports {', '.join(map(str, ports))} of {name} can be reached from {', '.join(tellers)}"
            sentences.append(f"{where}: anybody there can corrupt answers")
    return sentences


def snapshot(node: Node) -> Snapshot:
    """Everything that `status` shows."""
    box, peers, api = node.box, peer_views(node), api_url(node.box.config, node.box.settings)
    held = {name: traffic.held for name, traffic in node.rings.traffic.items()}
    models = tuple(replace(best_view(node, model.name), held=held[model.name]) for model in box.config.models)
    differing = [view.name for view in peers if view.config_hash and view.config_hash != box.config.hash]
    ranks = [rank for view in models for rank in view.ranks if rank.isolation_problem]
    started = {name: run.started_as for name, run in node.host.runs.items() if run.rank == 0}
    changed = [m.name for m in box.config.models if m.name in started and as_started(m) != as_started(started[m.name])]
    opened = sorted({f"{rank.node}: {rank.isolation_problem}" for rank in ranks})
    warnings = [
        *node.warnings.values(),
        *(text for model in box.config.models for text in wrong_copies(model, node.peers.all_facts())),
        *([f"anybody who reaches {api} can use it: set [api] keys_file"] if box.config.api.open else []),
        *([f"shardbox.toml differs on {', '.join(differing)}"] if differing else []),
        *(f"the engine's ports are open on {text}" for text in opened),
        *(f"{name} was changed in shardbox.toml: `stop` and `start` apply it" for name in changed),
        *exposures(node),
    ]
    return Snapshot(
        cluster=box.config.cluster.name,
        node=box.name,
        version=VERSION,
        engine_kind=box.config.engine.kind,
        demo=node.demo,
        seconds_up=time.monotonic() - box.started,
        api=api,
        peers=tuple(peers),
        models=models,
        warnings=tuple(warnings),
        exits=tuple(node.host.exits),
        refusals=dict(node.mesh.refusals),
        copies=all_copies(node),
        last_refused=dict(node.mesh.last_refused),
    )


# ======================================================================================================
# 19. Endpoint: the OpenAI API on every node; a request goes to the ring's leader
# ======================================================================================================

MAX_BODY_BYTES = 32 * MIB  # of a client's request, also when a peer passes it on
MAX_CLIENTS = 512  # connections to the endpoint
MAX_REQUESTS = 64  # being answered or held at once; the engine queues what its slots cannot take
HOLD_POLL_S = 0.1  # between two looks for a ring that may answer a held request
REQUEST_TIMEOUT_S = 10.0  # from a client's connection to its first whole request header
BODY_TIMEOUT_S = 60.0  # for the body behind it
API_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


class ApiError(Exception):
    """An error for an OpenAI client. Whose fault it is follows from the status; a 503 says when to ask again."""

    def __init__(self, status: int, text: str, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.code = status, text, code

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        kind = "invalid_request_error" if self.status < 500 or self.status == 501 else "server_error"
        return {"error": {"message": self.text, "type": kind, "param": None, "code": self.code}}

    def response(self) -> web.Response:
        """The whole answer."""
        retry = {"Retry-After": "5"} if self.status in (429, 503) else None
        return web.json_response(self.body(), status=self.status, headers=retry)


class RingError(ApiError):
    """No ring answers now, or one broke before the client was sent anything: the request may be asked again."""


def need(condition: bool, text: str) -> None:
    """Raises ApiError (400) with the text where the condition does not hold."""
    if not condition:
        raise ApiError(400, text)


class Endpoint:
    """The OpenAI endpoint of this node: requests go to whichever node leads the model."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._keys: list[bytes] = []
        self.follow(node.box.config)
        node.followers.append(self.follow)
        self.silent: dict[int, asyncio.TimerHandle] = {}  # connection -> when it is closed if it asks nothing

    def app(self) -> web.Application:
        """The routes."""
        guard = web.middleware(functools.partial(self.guard))  # which a bound method does not let itself be marked as
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard])
        app.add_routes([web.get("/v1/models", self.models), web.get("/health", self.health)])
        app.add_routes([web.post(path, self.generate) for path in API_PATHS])
        return app

    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keys first; then every failure in OpenAI's shape."""
        if timer := self.silent.pop(id(request.protocol), None):
            timer.cancel()
        try:
            self._check_key(request)
            return await handler(request)
        except ApiError as failure:
            error = failure
        except web.HTTPNotFound:
            error = ApiError(404, f"no such path: {request.path}", "not_found")
        except web.HTTPMethodNotAllowed as wrong:
            error = ApiError(405, f"{request.path} takes {', '.join(sorted(wrong.allowed_methods))}")
        except web.HTTPRequestEntityTooLarge:
            error = ApiError(413, f"the request is larger than {format_size(MAX_BODY_BYTES)}")
        except (web.HTTPException, asyncio.CancelledError, ConnectionError):
            raise
        except Exception:
            log.exception("bug in %s %s", request.method, request.path)
            error = ApiError(500, "a bug in shardbox: its log has the traceback")
        return error.response()

    def follow(self, config: Config) -> None:
        """Read the keys again. Raises UsageError."""
        self._keys = read_api_keys(config)

    def _check_key(self, request: web.Request) -> None:
        if self._keys and request.path != "/health":
            text = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            given = hashlib.sha256(text.encode(errors="replace")).digest()
            if not any([hmac.compare_digest(given, key) for key in self._keys]):  # noqa: C419 - all, in constant time
                raise ApiError(401, "wrong or missing API key", "invalid_api_key")

    async def models(self, request: web.Request) -> web.StreamResponse:
        """The configured models, in OpenAI's shape, with their phase."""
        config, data = self._node.box.config, []
        for model in config.models:
            entry = {"id": model.name, "object": "model", "created": 0, "owned_by": config.cluster.name}
            phase = best_view(self._node, model.name).phase
            data.append({**entry, "aliases": list(model.aliases), "status": phase})
        return web.json_response({"object": "list", "data": data})

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 when every wanted model answers, else 503."""
        phases = {model.name: best_view(self._node, model.name).phase for model in self._node.box.config.models}
        good = all(phase in (Phase.SERVING, Phase.STOPPED) for phase in phases.values())
        body = {"status": "ok" if good else "loading", "models": phases}
        return web.json_response(body, status=200 if good else 503, headers=None if good else {"Retry-After": "5"})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A completion, chat completion or embedding."""
        node = self._node
        if node.stop.is_set():
            raise ApiError(503, f"{node.box.name} is going down: ask another node", "node_going_down")
        if node.asking >= MAX_REQUESTS:
            raise ApiError(429, f"{MAX_REQUESTS} requests are being answered here already", "too_many_requests")
        node.asking += 1
        try:
            return await answer_request(node, request, request.path)
        finally:
            node.asking -= 1


def read_given(path: str, where: str = "", hint: str = "", limit: int = -1) -> bytes:
    """The bytes of a file that a person named. Raises UsageError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=where or path, hint=hint) from None


def read_api_keys(config: Config) -> list[bytes]:
    """SHA-256 digests of the keys in [api] keys_file, which may hold them as "sha256:HEX" already. Raises UsageError
    where it cannot be read or holds none."""
    if not config.api.keys_file:
        return []
    path = os.path.join(config.folder, config.api.keys_file)
    where = f"api.keys_file: {path}"
    lines = read_given(path, where).splitlines()
    keys = [line.strip() for line in lines if line.strip() and not line.startswith(b"#")]
    if not keys:
        raise UsageError("holds no key", where=where, hint="one key a line")
    hashed = re.compile(rb"sha256:([0-9a-fA-F]{64})")
    return [
        bytes.fromhex(m[1].decode()) if (m := hashed.fullmatch(key)) else hashlib.sha256(key).digest() for key in keys
    ]


def api_tls(config: Config) -> ssl.SSLContext | None:
    """TLS for the endpoint, where [api] names a certificate. Raises UsageError where it cannot be used."""
    import ssl

    if not config.api.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    cert, key = (os.path.join(config.folder, path) for path in (config.api.tls_cert, config.api.tls_key))
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is one: not PEM, or not a pair
        raise UsageError(
            f"cannot be used: {error.strerror or error}",
            where=f"api.tls_cert, api.tls_key: {cert}, {key}",
            hint="a PEM certificate chain and its unencrypted private key",
        ) from None
    return context


class Door:
    """The protocol of a connection to the endpoint when too many are open: it is closed at once."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Hang up."""
        transport.abort()

    def connection_lost(self, error: BaseException | None) -> None:
        """Nothing is kept of it."""


async def read_request(config: Config, request: web.Request) -> tuple[ModelConfig, dict[str, Any]]:
    """The model and JSON object of a client's request. Raises ApiError."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = json.loads(await request.read())
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    except (ValueError, RecursionError, web.RequestPayloadError):
        body = None
    if not isinstance(body, dict):
        raise ApiError(400, "the request is not a JSON object")
    name, only = body.get("model"), config.models[0] if len(config.models) == 1 else None
    model = config.model(name) if isinstance(name, str) else only if name is None else None
    if model is None:
        names = ", ".join(other.name for other in config.models) or "none"
        text = f"the model {repr(name)[:100]} does not exist; there are: {names}"
        raise ApiError(404, text, "model_not_found")
    if request.path.endswith("/embeddings") != model.embeddings:
        wish = "completions: set embeddings = true for a model that embeds"
        raise ApiError(501, f"{model.name} serves {'embeddings only' if model.embeddings else wish}", "not_implemented")
    return model, body


async def answer_request(node: Node, request: web.Request, path: str) -> web.StreamResponse:
    """Answer a client's request. While its client has been sent nothing, it outlives the rings that break under it,
    within HELD_TRIES and [api] hold_s: the last one may be asked just before that, and takes its time, or stalls.
    Raises ApiError."""
    model, body = await read_request(node.box.config, request)
    held = Held(until=time.monotonic() + node.box.config.api.hold_s)
    while True:
        generation = best_view(node, model.name).generation
        try:
            return await ask_ring(node, request, path, model, body)
        except RingError as error:
            if error.code == "ring_lost":
                held = held.broken(generation, time.monotonic())
            if model.name not in node.proposer.formed:  # its first start may take minutes: the client is told at once
                raise
            await wait_for_ring(node, model.name, held, error)


async def wait_for_ring(node: Node, model: str, held: Held, error: RingError) -> None:
    """Hold a request until a ring may be asked. Raises the error, or a newer one, when it is not worth waiting."""
    traffic = node.rings.traffic[model]
    traffic.held += 1
    try:
        while True:
            view, now = best_view(node, model), time.monotonic()
            if node.stop.is_set() or held.gives_up(view.phase, now):
                raise error if held.breaks >= HELD_TRIES or view.phase == Phase.SERVING else not_ready(node, model)
            await asyncio.sleep(HOLD_POLL_S)  # also before the first: what is said of the ring may be some seconds old
            if held.may_ask(view.phase, view.generation, now):
                return
    finally:
        traffic.held -= 1


async def ask_ring(
    node: Node, request: web.Request, path: str, model: ModelConfig, body: dict[str, Any], passed_on: bool = False
) -> web.StreamResponse:
    """Answer a request here if this node leads the model, else through the mesh, once. Raises ApiError; RingError
    when the request may be asked again."""
    if node.rings.rings[model.name].phase == Phase.SERVING:
        return await answer_model(node, request, path, model, body)
    leader = "" if passed_on else node.proposer.leader_of(model.name)
    if not leader:
        raise not_ready(node, model.name)
    try:
        url = node.peers.url(node.peers.target(leader), f"/peer/api{path}")
        async with node.peers.session.post(url, json={**body, "model": model.name}) as reply:
            headers = {key: reply.headers[key] for key in ("Content-Type", "Retry-After") if key in reply.headers}
            if reply.content_type == "text/event-stream":
                response = web.StreamResponse(status=reply.status, headers=headers)
                return await pass_on(request, response, reply.content.iter_any(), model.name)
            whole = await reply.read()
    except MeshError as error:
        raise RingError(503, f"the leader {leader} cannot be reached: {error}", "model_not_ready") from None
    except (aiohttp.ClientError, OSError) as error:
        code = "model_not_ready" if isinstance(error.__cause__, MeshError) else "ring_lost"  # the former: not sent
        raise RingError(503, f"the leader {leader} was lost: {error}", code) from None
    if reply.status == 503:
        raise retold(whole)
    return web.Response(status=reply.status, headers=headers, body=whole)


def retold(body: bytes) -> ApiError:
    """The 503 that another node's endpoint has answered; a RingError where it was one there."""
    error: Any = {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = dict(json.loads(body)["error"])
    kind = RingError if error.get("code") in ("model_not_ready", "ring_lost") else ApiError
    return kind(503, str(error.get("message")), error.get("code"))


def not_ready(node: Node, model: str) -> RingError:
    """503 while a model does not answer: the phase, and why."""
    view = best_view(node, model)
    return RingError(503, f"{model} is {view.phase}" + (f": {text}" if (text := why(view)) else ""), "model_not_ready")


async def pass_on(
    request: web.Request, response: web.StreamResponse, chunks: AsyncIterator[bytes], model: str
) -> web.StreamResponse:
    """Send events as they come. A source that breaks before the first is an exception: nothing has been sent."""
    first = await anext(chunks, b"")
    with contextlib.suppress(ConnectionError):  # the client has gone
        await response.prepare(request)
        await response.write(first)
        async for chunk in ending_in_words(chunks, model):
            await response.write(chunk)
        await response.write_eof()
    return response


async def ending_in_words(chunks: AsyncIterator[bytes], model: str) -> AsyncIterator[bytes]:
    """The same; where their source breaks an error event is the last one: a stream never just stops."""
    try:
        async for chunk in chunks:
            yield chunk
    except (aiohttp.ClientError, EngineError) as error:
        lost = RingError(503, f"the answer of {model} broke off: {breakage(error)}", "ring_lost")
        yield b"data: " + json.dumps(lost.body()).encode() + b"\n\ndata: [DONE]\n\n"


def breakage(error: BaseException) -> str:
    """Why an answer ended early, for its reader."""
    return str(error) if isinstance(error, ShardboxError) else "the connection to its engine was lost"


async def answer_model(
    node: Node, request: web.Request, path: str, model: ModelConfig, body: dict[str, Any]
) -> web.StreamResponse:
    """Ask the engine on this node. It always streams to us, so that an answer nobody waits for can be dropped.
    Raises ApiError, RingError when the engine was lost before its client was sent anything."""
    run, traffic = node.host.runs.get(model.name), node.rings.traffic[model.name]
    if run is None or run.session is None or run.session.closed:
        raise not_ready(node, model.name)
    traffic.in_flight += 1
    try:
        if run.started_as.embeddings:  # they have no stream: passed through as they are
            async with run.session.post("http://engine/v1/embeddings", json=body) as reply:
                return web.Response(body=await reply.read(), status=reply.status, content_type="application/json")
        target = "/completion" if path == "/v1/completions" else path
        async with run.session.post(f"http://engine{target}", json=engine_request(path, model, body)) as reply:
            events = engine_events(reply)
            first = await anext(events, None)
            if first is None:
                raise EngineError("the engine sent nothing")
            if "error" in first:
                raise engine_refusal(reply.status, first)
            answer = Answer(path == "/v1/chat/completions", run.plan, run.started_as.slots, traffic)
            if body.get("stream"):
                headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
                response = web.StreamResponse(headers=headers)
                return await pass_on(request, response, answer.stream(first, events), model.name)
            return web.json_response(await answer.whole(first, events))
    except (aiohttp.ClientError, EngineError) as error:
        node.rings.doubt(model.name, f"an answer broke off: {breakage(error)}")
        text = f"the ring of {model.name} broke while it answered: {breakage(error)}"
        raise RingError(503, text, "ring_lost") from None
    finally:
        traffic.in_flight -= 1
        traffic.answered_at = time.monotonic()


def engine_request(path: str, model: ModelConfig, body: dict[str, Any]) -> dict[str, Any]:
    """The request as Prima's server takes it. Raises ApiError for what it would ignore or get wrong."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}, "model": model.name}
    need(body.get("n", 1) == 1 and body.get("best_of", 1) in (0, 1), "one choice a request: n and best_of must be 1")
    need(isinstance(body.get("stream", False), bool | None), "stream must be true or false")
    limits = [model.max_output] if model.max_output else []
    for key in ("max_completion_tokens", "max_tokens", "n_predict"):
        limit = asked.pop(key, None)
        need(limit is None or type(limit) is int, f"{key} must be a whole number")
        limits += [limit] if limit is not None and limit >= 0 else []
    if limits:
        asked["n_predict"] = min(limits)
    if path == "/v1/completions":
        return text_request(asked)
    talk = body.get("messages") or None
    whole = isinstance(talk, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) for item in talk
    )
    need(whole, "messages must be a list of objects, each with a role")
    return asked


def text_request(asked: dict[str, Any]) -> dict[str, Any]:
    """A text completion as Prima's `/completion` takes it. Raises ApiError."""
    prompt, stop = asked.get("prompt"), asked.get("stop")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    tokens = isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)
    need(isinstance(prompt, str) or tokens, "prompt must be one string, or one list of tokens")
    need(not asked.get("echo") and not asked.get("suffix"), "echo and suffix are not supported")
    return {**asked, "prompt": prompt, **({"stop": [stop]} if isinstance(stop, str) else {})}


async def engine_events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The engine's server-sent events as JSON objects; an error, in whatever form, as {"error": {...}}.
    Ends after the engine's [DONE] or its end of body."""
    if reply.content_type != "text/event-stream":
        data = json.loads(await reply.read() or b"{}")
        yield data if "error" in data else {"error": {"message": str(data)[:500], "code": reply.status}}
        return
    buffer = b""
    async for chunk in reply.content.iter_any():
        buffer += chunk
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            field, _, value = event.partition(b":")
            if field.strip() in (b"data", b"error") and value.strip() != b"[DONE]":
                data = json.loads(value)
                whole = "choices" in data or "content" in data or "error" in data
                yield data if whole else {"error": data}  # Prima sends its errors bare


def engine_refusal(status: int, event: dict[str, Any]) -> ApiError:
    """The engine's error, before any token, as OpenAI's."""
    error = event["error"]
    error = error if isinstance(error, dict) else {"message": error}
    text, code = str(error.get("message")), error.get("code")
    if "exceeds the available context size" in text or "context shift is disabled" in text:
        return ApiError(400, "the prompt is longer than the model's context", "context_length_exceeded")
    code = code if isinstance(code, int) else status
    return ApiError(code if 400 <= code < 600 else 500, text)


class Answer:
    """One answer on its way from the engine's events to OpenAI's, whole or streamed; measures its speed."""

    def __init__(self, chat: bool, plan: ModelPlan, slots: int, traffic: Traffic) -> None:
        self._chat, self._context, self._traffic = chat, plan.context // slots, traffic
        name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": name, "created": int(time.time()), "model": plan.model}
        self._first_at = 0.0
        self._tokens = 0

    def _note(self) -> None:
        now = time.monotonic()
        self._first_at = self._first_at or now
        self._tokens += 1
        self._traffic.answered_at = now
        if self._tokens > 4 and now > self._first_at:
            self._traffic.tokens_per_s = (self._tokens - 1) / (now - self._first_at)

    async def _openai(
        self, first: dict[str, Any], events: AsyncIterator[dict[str, Any]]
    ) -> AsyncIterator[dict[str, Any]]:
        """Every event in OpenAI's shape. Raises EngineError when the engine breaks off."""
        finished, event = False, first
        while True:
            self._note()
            full = "error" in event
            event = self._end_of_context(event["error"]) if full else event
            event = {**(event if self._chat else self._text_event(event)), **self._head}
            finished = finished or any(choice.get("finish_reason") for choice in event.get("choices", []))
            yield event
            following = None if full else await anext(events, None)
            if following is None:
                break
            event = following
        if not finished:
            raise EngineError("the engine's stream ended early")

    def _end_of_context(self, error: dict[str, Any]) -> dict[str, Any]:
        """The last event of an answer that filled its context, which Prima, told not to shift it, ends with an error.
        Raises EngineError for any other error."""
        if "context shift is disabled" not in str(error.get("message")):
            raise EngineError(str(error.get("message", error)))
        output = self._tokens - 1
        prompt = max(0, self._context - output)
        if not self._chat:
            return {"stop": True, "stopped_limit": True, "tokens_evaluated": prompt, "tokens_predicted": output}
        choice = {"index": 0, "delta": {}, "finish_reason": "length"}
        return {"object": "chat.completion.chunk", "choices": [choice], "usage": token_usage(prompt, output)}

    def _text_event(self, event: dict[str, Any]) -> dict[str, Any]:
        """Prima's own completion event (bdf9d8e7, examples/server) as OpenAI's text_completion."""
        choice = {"index": 0, "text": event.get("content", ""), "finish_reason": None, "logprobs": None}
        result: dict[str, Any] = {"object": "text_completion", "choices": [choice]}
        if event.get("stop"):
            choice["finish_reason"] = "length" if event.get("stopped_limit") else "stop"
            prompt, output = int(event.get("tokens_evaluated", 0)), int(event.get("tokens_predicted", 0))
            result["usage"] = token_usage(prompt, output)
        return result

    async def stream(self, first: dict[str, Any], events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        """Server-sent events, each as soon as it is there."""
        async for event in self._openai(first, events):
            yield b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def whole(self, first: dict[str, Any], events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
        """One object, as if it had not been streamed."""
        text, reason, more = [], None, {"usage": None}
        async for event in self._openai(first, events):
            more |= {key: event[key] for key in ("usage", "timings") if event.get(key)}
            for choice in event.get("choices", []):
                text.append((choice.get("delta", {}).get("content") if self._chat else choice.get("text")) or "")
                reason = choice.get("finish_reason") or reason
        content = "".join(text)
        choice = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": content}} if self._chat else {"text": content}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], **more}


def token_usage(prompt: int, output: int) -> dict[str, int]:
    """How many tokens an answer took, as OpenAI counts them."""
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


async def open_endpoint(node: Node, gate: Endpoint, runner: web.AppRunner) -> asyncio.Server:
    """Listen for clients. A connection too many, or one that asks nothing within REQUEST_TIMEOUT_S, is closed. Raises
    UsageError where the port or the certificate cannot be had."""
    bind, port, server = node.box.config.api.bind, node.box.settings.ports.api, runner.server
    assert server is not None
    loop = asyncio.get_running_loop()

    def admit() -> Any:
        if len(server.connections) >= MAX_CLIENTS:
            return Door()
        handler = server()
        gate.silent[id(handler)] = loop.call_later(REQUEST_TIMEOUT_S, hang_up, handler)
        return handler

    def hang_up(handler: Any) -> None:
        gate.silent.pop(id(handler), None)
        if handler.transport is not None:
            handler.transport.abort()

    try:
        return await loop.create_server(admit, bind, port, ssl=api_tls(node.box.config))
    except OSError as error:
        what = f"cannot listen on {bind}:{port}: {os.strerror(error.errno or 0)}"
        raise UsageError(what, where="ports.api", hint=port_owner_hint(port)) from None


# ======================================================================================================
# 20. Control: what the owner, other nodes, and any local user may ask
# ======================================================================================================

MAX_MESSAGE_BYTES = 8 * MIB  # of an owner's request
VERIFY_TIMEOUT_S = 6 * 3600.0  # for reading a whole model again
Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"
Asked: TypeAlias = "Callable[[web.Request], Awaitable[Any]]"  # a handler of control: its result goes out as JSON


def service_app(
    prefix: str, limit: int, gets: Iterable[Asked], posts: Iterable[Asked], *guards: Any
) -> web.Application:
    """Control routes named after their handlers, which return what is sent as JSON; failures: see control_errors.
    `guards` are middlewares in front."""
    app = web.Application(client_max_size=limit, middlewares=[*guards, web.middleware(control_errors)])
    app.add_routes([web.get(f"{prefix}/{handler.__name__}", answering(handler)) for handler in gets])
    app.add_routes([web.post(f"{prefix}/{handler.__name__}", answering(handler)) for handler in posts])
    return app


def answering(asked: Asked) -> Handler:
    """A handler that sends as JSON what `asked` returns."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(to_json(await asked(request)))

    return handler


async def control_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """ShardboxError becomes 409 with its words; a bug becomes 500 and a traceback in the log."""
    try:
        return await handler(request)
    except ShardboxError as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        body = {"what": what, "hint": error.hint, "kind": getattr(error, "kind", "")}
        return web.json_response({"error": body}, status=409)
    except ApiError as error:
        return error.response()
    except (web.HTTPException, asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        log.exception("bug in %s %s", request.method, request.path)
        body = {"what": f"bug: {error!r}", "hint": "that node's log has the traceback"}
        return web.json_response({"error": body}, status=500)


async def message(request: web.Request, *fields: str) -> dict[str, Any]:
    """The JSON object of a request, with these string fields. Raises MessageError."""
    try:
        data = json.loads(await request.read() or b"{}")
    except (ValueError, RecursionError, web.RequestPayloadError):
        raise MessageError("not JSON", where=request.path) from None
    if not isinstance(data, dict):
        raise MessageError("expected an object", where=request.path)
    for field in fields:
        if not isinstance(data.get(field), str):
            raise MessageError("expected a string", where=f"{request.path}: {field}")
    return data


class PeerService:
    """What other nodes may ask. Only a proven member reaches it, and its name is known."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._told: tuple[NodeFacts | None, str] = None, ""  # facts, and their digest

    def app(self) -> web.Application:
        """The routes, all under /peer."""
        gets, posts = (self.state, self.bound, self.pairs, self.logs, self.verify), (self.trouble, self.news, self.down)
        counting = web.middleware(functools.partial(self.counting))
        app = service_app("/peer", MAX_BODY_BYTES, gets, posts, counting)
        for verb in ("fetch", "prepare", "launch", "lease", "release"):
            app.router.add_post(f"/peer/{verb}", answering(functools.partial(self.rank, verb)))
        app.add_routes([web.post(f"/peer/api{path}", self.api) for path in API_PATHS])
        return app

    async def counting(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Orders that were refused are counted for `status`."""
        reply = await handler(request)
        if reply.status == 409:
            self._node.mesh.refuse("order", self._caller(request))
        return reply

    def _caller(self, request: web.Request) -> str:
        assert request.transport is not None
        return self._node.callers.get(request.transport.get_extra_info("socket").fileno(), "")

    async def state(self, request: web.Request) -> Any:
        """This node's facts (unless the caller has them), rings and ranks."""
        node, query = self._node, request.query
        try:
            uptime_s = float(query.get("uptime") or 0)
        except ValueError:
            raise MessageError("expected a number", where="/peer/state: uptime") from None
        node.peers.check_twin(self._caller(request), query.get("machine", ""), uptime_s)
        facts = node.box.facts
        if facts is not self._told[0]:
            self._told = facts, digest(facts)
        known = self._told[1]
        return PeerState(
            facts=None if query.get("have") == known else facts,
            digest=known,
            uptime=time.monotonic() - node.box.started,
            wall=time.time(),
            desired=dict(node.desired),
            models=tuple(model_view(node, model.name) for model in node.box.config.models),
            leaving=node.stop.is_set(),
            copies=own_copies(node),
            reached=dict(node.reached),
        )

    async def rank(self, verb: str, request: web.Request) -> Any:
        """Prepare, start or stop this node's rank of a ring, or renew its lease; see RankHost.answer."""
        data = await message(request, "generation", *(["model"] if verb != "prepare" else []))
        return await self._node.host.answer(verb, data, self._caller(request))

    async def bound(self, request: web.Request) -> Any:
        """Whether this node's engine listens; waits up to 10 s for it."""
        run = self._node.host.get(request.query.get("model", ""), request.query.get("generation", ""))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run.bound.wait(), 10.0)
        return {"bound": run.bound.is_set() and not run.exited.is_set()}

    async def trouble(self, request: web.Request) -> Any:
        """A rank of a ring that this node leads is broken, or its node goes."""
        data = await message(request, "model", "generation", "reason")
        ring = self._node.rings.rings.get(data["model"])
        if ring and ring.plan and ring.plan.rank_of(self._caller(request)):
            kind = data["kind"] if data.get("kind") in ("leaving", "lost") else "trouble"
            reason = printable(data["reason"])[:1000]
            grace_s = self._node.box.config.api.drain_s
            event = Event(kind=kind, generation=data["generation"] or "-", reason=reason, grace_s=grace_s)
            self._node.rings.post(ring.model, event)
        return {}

    async def news(self, request: web.Request) -> Any:
        """The caller's rings changed: ask it now."""
        self._node.peers.ask_now(self._caller(request))
        return {}

    async def down(self, request: web.Request) -> Any:
        """`down --all` on another box."""
        log.info("%s asks this node to end (down --all)", self._caller(request))
        self._node.stop.set()
        return {}

    async def pairs(self, request: web.Request) -> Any:
        """Whom this node reaches, for `check` on another."""
        return await self._node.reach_all()

    async def verify(self, request: web.Request) -> Any:
        """Read this box's copy of a model again, every byte."""
        model = self._node.box.model(request.query.get("model", ""))
        return await self._node.library.reread(model)

    async def logs(self, request: web.Request) -> Any:
        """The last lines of this node's engines."""
        return read_logs(self._node, *log_query(request))

    async def api(self, request: web.Request) -> web.StreamResponse:
        """A client's request that another node's endpoint passes on to this one, the leader."""
        model, body = await read_request(self._node.box.config, request)
        path = request.path.removeprefix("/peer/api")
        return await ask_ring(self._node, request, path, model, body, passed_on=True)


def log_query(request: web.Request) -> tuple[str, int]:
    """Of which model, and how many log lines are asked for: 1 to 10,000. Raises UsageError."""
    text = request.query.get("lines", "")
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 10000:
        raise UsageError(f"lines must be 1-10000, got {text[:20]!r}")
    return request.query.get("model", ""), int(text)


def read_logs(node: Node, model: str, lines: int) -> dict[str, str]:
    """The last lines of this node's engine logs, by file name. Raises UsageError for an unknown model."""
    config, result = node.box.config, {}
    for name in [find_configured(config, model).name] if model else [entry.name for entry in config.models]:
        path = node.host.log_path(name)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 400 * lines))
            tail = file.read().decode("utf-8", "replace").splitlines()[-lines:]
            result[f"{node.box.name}/{os.path.basename(path)}"] = "\n".join(printable(line) for line in tail)
    return result


class OwnerService:
    """The control socket's service: for whoever owns this node, on this box."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def app(self) -> web.Application:
        """The routes."""
        guard = web.middleware(functools.partial(self.guard))
        gets = (self.nodes, self.logs, self.check, self.copies, self.verify)
        posts = (self.down, self.want, self.pull)
        return service_app("", MAX_MESSAGE_BYTES, gets, posts, guard)

    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The socket's mode keeps other users out; should somebody change it, this does."""
        uid = peer_uid(request.get_extra_info("socket"))
        if uid in (None, 0, os.geteuid()):
            return await handler(request)
        self._node.mesh.refuse("other_user", f"user {uid}")
        what, hint = f"user {uid} is neither root nor the owner of this node", "`chmod 600` its control socket"
        return web.json_response({"error": {"what": what, "hint": hint}}, status=403)

    async def down(self, request: web.Request) -> Any:
        """End this node, or with ?all every one that is reached."""
        told = await self._node.peers.call_all("POST", "/peer/down") if request.query.get("all") else {}
        self._node.stop.set()
        words = {name: said.what if isinstance(said, ShardboxError) else "stopping" for name, said in told.items()}
        return {"told": words}

    async def want(self, request: web.Request) -> Any:
        """Start or stop a model on the whole cluster."""
        data = await message(request, "model")
        model = find_configured(self._node.box.config, data["model"])
        if not isinstance(data.get("wanted"), bool):
            raise MessageError("expected true or false", where="/want: wanted")
        self._node.want(model.name, data["wanted"])
        return {"model": model.name}

    async def pull(self, request: web.Request) -> Any:
        """Fetch a model, or all that the TOML names, to this box."""
        node, data = self._node, await message(request, "model", "from")
        config, only = node.box.config, data["from"]
        models = [find_configured(config, data["model"])] if data["model"] else config.models
        return [node.library.pull(model, only, data.get("replace") is True) for model in models]

    async def copies(self, request: web.Request) -> Any:
        """What is on its way to any box or read there, and what has come to this one since it is up."""
        return all_copies(self._node)

    async def verify(self, request: web.Request) -> Any:
        """What every box finds when it reads its copy of a model again: all at once."""
        node, model = self._node, find_configured(self._node.box.config, request.query.get("model", ""))
        query = urllib.parse.urlencode({"model": model.name})

        async def ask(name: str) -> dict[str, str]:
            try:
                call = node.peers.call(name, "GET", f"/peer/verify?{query}", None, VERIFY_TIMEOUT_S)
                return {str(key): str(value) for key, value in (await call).items()}
            except ShardboxError as error:
                return {"problem": error.what}

        names = [peer.name for peer in node.peers.live()]
        found = await asyncio.gather(node.library.reread(model), *map(ask, names))
        return dict(zip([node.box.name, *names], found, strict=True))

    async def nodes(self, request: web.Request) -> Any:
        """Every node that is known, and the facts of those that are live."""
        node = self._node
        return {"nodes": peer_views(node), "facts": node.peers.all_facts()}

    async def logs(self, request: web.Request) -> Any:
        """Engine logs of one node or of all."""
        peers, own = self._node.peers, self._node.box.name
        (model, lines), only = log_query(request), request.query.get("node", "")
        path = f"/peer/logs?{urllib.parse.urlencode({'model': model, 'lines': lines})}"
        if only not in ("", own):
            return await peers.call(only, "GET", path)
        result = read_logs(self._node, model, lines)
        for name, said in ({} if only else await peers.call_all("GET", path)).items():
            result |= {name: f"it does not tell them: {said.what}"} if isinstance(said, ShardboxError) else said
        return result

    async def check(self, request: web.Request) -> Any:
        """What `check` needs of the cluster: every pair dialled in both directions."""
        node = self._node
        reaches = await node.reach_all()
        await node.knock()
        for name, found in (await node.peers.call_all("GET", "/peer/pairs", 4 * CALL_TIMEOUT_S)).items():
            try:
                if isinstance(found, ShardboxError):
                    raise found
                reaches += [from_json(Reach, item, "pairs") for item in found]
            except ShardboxError as error:
                reaches.append(Reach(source=name, target="-", address="-", problem=error.what, hint=error.hint))
        skew_s = {peer.name: peer.wall_skew_s for peer in node.peers.live()}
        body = {"pairs": reaches, "facts": node.peers.all_facts(), "clock_skew_s": skew_s}
        return {**body, "exposures": exposures(node), "discovery": node.discovery.problem}


def find_configured(config: Config, name: str) -> ModelConfig:
    """The model with this name or alias. Raises UsageError with the names that there are."""
    model = config.model(name)
    if model is None:
        names = ", ".join(other.name for other in config.models) or "none"
        raise UsageError(f"no model {name!r}", hint=f"there are: {names}")
    return model


# --- the status socket: anybody on this box may read it, nobody can say anything -------------------------


def status_address(cluster: str, node: str) -> str:
    """Where `status` asks: depends on cluster and node alone. Linux: an abstract socket, else a path."""
    name = f"shardbox/{cluster}/{node}"
    if len(name) > 90:  # the kernel takes 107 bytes, macOS 103
        name = f"shardbox/{digest([cluster, node])}"
    return f"\0{name}" if sys.platform == "linux" else f"/tmp/{name.replace('/', '-')}.status"


async def start_status_service(node: Node, closing: contextlib.AsyncExitStack) -> None:
    """Serve the snapshot as JSON to whoever connects; the connection is then closed. Raises UsageError."""
    address = status_address(node.box.config.cluster.name, node.box.name)
    is_path = not address.startswith("\0")

    def unlink() -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, TimeoutError):  # it went away
            writer.write(json.dumps(to_json(snapshot(node))).encode())
            async with asyncio.timeout(5):
                await writer.drain()

    sock = closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    if is_path:
        unlink()
        closing.callback(unlink)
    try:
        sock.bind(address)
    except OSError as error:
        what = f"another process serves the status of node {node.box.name}: {error.strerror}"
        raise UsageError(what, hint="is a second shardbox up on this box? `shardbox down` ends it") from None
    if is_path:
        os.chmod(address, 0o666)
    closing.callback((await asyncio.start_unix_server(serve, sock=sock)).close)


async def start_services(node: Node, closing: contextlib.AsyncExitStack) -> None:
    """Open the peers' service, the owner's control socket, the endpoint and the status socket; `closing` closes them.
    Raises ShardboxError where a port or path cannot be had."""
    gate = Endpoint(node)
    runners = [
        web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        for app in (PeerService(node).app(), OwnerService(node).app(), gate.app())
    ]
    for runner in runners:
        await runner.setup()
        closing.push_async_callback(runner.cleanup)
    peers, owner, endpoint = runners
    node.control = peers.server
    with short_socket_path(control_path(node.box.folder)) as path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        mask = os.umask(0o177)
        try:
            await web.UnixSite(owner, path).start()
        finally:
            os.umask(mask)
    closing.callback((await open_endpoint(node, gate, endpoint)).close)
    await start_status_service(node, closing)


# ======================================================================================================
# 21. Status: Snapshot -> exit code, one line for a pager, and a table. Pure.
# ======================================================================================================

OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3
STATUS_WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
MAX_LISTED = 40  # lines of one kind in a text for people


def judge_model(view: ModelView) -> tuple[int, str]:
    """The code for one model and the words for it."""
    ranks = f"{view.alive}/{view.world} ranks, leader {view.leader}" if view.world else ""
    if view.phase == Phase.SERVING and view.alive == view.world:
        words = f"{view.model} {ranks}" + (f", {view.tokens_per_s:.1f} tok/s" if view.tokens_per_s else "")
        if not view.restarts:
            return OK, words
        times = f"{view.restarts} restart{'s' * (view.restarts > 1)}"
        return WARNING, f"{words}, {times} in the last 15 min ({view.last_trouble})"
    if view.phase == Phase.STOPPED:
        return OK, f"{view.model} {view.reason or 'stopped'}"
    reason = why(view) or "no reason known"
    if view.phase == Phase.FAILED:
        return CRITICAL, f"{view.model} failed: {reason}"
    if view.phase == Phase.SERVING:
        reason = f"only {ranks}"
    words = f"{view.model} {view.phase} for {format_duration(view.seconds)}: {reason}"
    return (CRITICAL if view.overdue or view.phase == Phase.SERVING else WARNING), words


def judge(snapshot: Snapshot) -> tuple[int, list[str]]:
    """The worst code and one phrase for each model and warning, worst first."""
    found = [judge_model(view) for view in snapshot.models] or [(OK, "no models configured")]
    found += [
        (WARNING, f"node {peer.name} is {peer.state}" + (f": {peer.detail}" if peer.detail else ""))
        for peer in snapshot.peers
        if peer.declared and peer.state in ("missing", "lost", "unreachable")
    ]
    found += [(WARNING, warning) for warning in snapshot.warnings]
    if snapshot.engine_kind == "rehearsal" and not snapshot.demo:
        found.append((WARNING, "rehearsal engines: no model is loaded"))
    found.sort(key=lambda item: -item[0])
    return found[0][0], [words for _, words in found]


def status_line(snapshot: Snapshot) -> tuple[int, str]:
    """Exit code and first line, after the monitoring-plugins convention: text | performance data."""
    code, phrases = judge(snapshot)
    ranks = sum(view.alive for view in snapshot.models)
    speed = max((view.tokens_per_s for view in snapshot.models), default=0.0)
    flying, held = (sum(getattr(view, name) for view in snapshot.models) for name in ("in_flight", "held"))
    live = sum(peer.state in ("self", "live") for peer in snapshot.peers)
    data = f"ranks={ranks} tok_s={speed:.1f} nodes={live} in_flight={flying} held={held}"
    text = "".join(char if char.isprintable() else " " for char in "; ".join(phrases)).replace("|", "/")
    return code, f"SHARDBOX {STATUS_WORDS[code]} - {text} | {data}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns padded with spaces; no trailing blanks."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[n]) for row in cells) for n in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def peers_table(peers: Sequence[PeerView]) -> str:
    """One line a node, or stranger, that this node knows of."""
    return table(
        ("NODE", "STATE", "ADDRESS", "FOUND BY", "RTT", "MEMORY", "GPUS", "CORES", "VERSION", "NOTE"),
        [
            (
                peer.name,
                peer.state,
                peer.address or "-",
                peer.source or "-",
                f"{peer.rtt_ms:.1f} ms" if peer.rtt_ms else "-",
                format_size(peer.memory_bytes) if peer.memory_bytes else "-",
                peer.gpus,
                peer.cores or "-",
                peer.version or "-",
                peer.detail or ("" if peer.state in ("self", "live") else "-"),
            )
            for peer in peers
        ],
    )


def ranks_table(view: ModelView) -> str:
    """One line a rank: where it runs, what it holds, and what its wires moved."""
    return table(
        ("  RANK", "NODE", "STATE", "LAYERS", "PID", "MEMORY", "CLOSED IN", "SENT", "RECEIVED", "NOTE"),
        [
            (
                f"  {rank.rank}",
                rank.node,
                rank.phase,
                rank.layers,
                rank.pid or "-",
                format_size(rank.rss_bytes) if rank.rss_bytes else "-",
                "yes" if rank.isolated else "no",
                format_size(sum(wire.sent_bytes for wire in rank.wires)),
                format_size(sum(wire.received_bytes for wire in rank.wires)),
                rank.problem or (f"exit {rank.exit_code}" if rank.exit_code is not None else ""),
            )
            for rank in view.ranks
        ],
    )


def format_token(seconds: float) -> str:
    """The time of a token: 0.0383 -> "38.3 ms a token (26.1 tok/s)"."""
    return f"{seconds * 1000:.3g} ms a token ({1 / seconds:.3g} tok/s)"


def speed_text(plan: ModelPlan) -> str:
    """What a token would take, beside the same on one box; "" where nothing is known."""
    if plan.paged_bytes:
        mode = f"in cycles of {plan.cycles} rounds" if plan.cycles > 1 else "from one box"
        return f"{mode}: {format_size(plan.paged_bytes)} of weights come from disk for every token"
    if not plan.token_s:
        return ""
    text = f"predicted {format_token(plan.token_s)}"
    if plan.world == 1:
        return text
    hops = sum(rank.hop_s for rank in plan.ranks) * plan.cycles
    text += f", {hops * 1000:.3g} ms of it the network"
    return text + (f"; on {plan.alone} alone, where it fits there, {format_token(plan.alone_s)}" if plan.alone else "")


def status_text(snapshot: Snapshot, verbose: bool = True) -> str:
    """The whole answer of `status`: the line, then models, ranks, nodes and last exits."""
    lines = [status_line(snapshot)[1]]
    if not verbose:
        return lines[0]
    lines.append(
        f"node {snapshot.node} of cluster {snapshot.cluster}, shardbox {snapshot.version}, "
        f"up {format_duration(snapshot.seconds_up)}, endpoint {snapshot.api}"
    )
    for view in snapshot.models:
        told = "" if view.phase in (Phase.SERVING, Phase.STOPPED) else why(view)
        lines += ["", f"model {view.model}: {view.phase}" + (f", {told or view.reason}" if told or view.reason else "")]
        if view.plan:
            seen = f"; seen {view.tokens_per_s:.1f} tok/s" if view.tokens_per_s else ""
            lines += [f"  {view.plan.reason}", *(f"  {text}{seen}" for text in [speed_text(view.plan)] if text or seen)]
        if view.ranks:
            lines.append(ranks_table(view))
    copies = [f"  {view.model or 'engines'}: {copy_text(view)}" for view in snapshot.copies if view.state != "done"]
    lines += ["", "files:", *copies] if copies else []
    lines += ["", peers_table(snapshot.peers)]
    if snapshot.exits:
        lines += ["", "last exits, newest first:", *(f"  {text}" for text in snapshot.exits)]
    refused = [(kind, n, snapshot.last_refused.get(kind, "-")) for kind, n in sorted(snapshot.refusals.items())]
    if refused:
        lines += ["", table(("REFUSED", "TIMES", "LAST"), refused)]
    return "\n".join(lines)


def layers_text(rank: RankPlan) -> str:
    """Which layers: "0-9", or how many in windows of what size."""
    if rank.layers != rank.window:
        return f"{rank.layers} in {rank.window}s"
    return f"{rank.first_layer}-{rank.first_layer + rank.layers - 1}"


def plan_text(plan: ModelPlan | PlanError, name: str) -> str:
    """What `plan` prints for one model: the table with reasons, or why there is none."""
    if isinstance(plan, PlanError):
        return f"model {name}: no plan\n  {plan.what}" + (f"\n  hint: {plan.hint}" if plan.hint else "")
    kind = f"a ring of {plan.world}" if plan.world > 1 else "one node"
    window = plan.shape.sliding_window
    note = f"the header's sliding window of {window} tokens saves nothing: the engine keeps them all" if window else ""
    body = table(
        ("  RANK", "NODE", "LAYERS", "ON GPU", "WEIGHTS", "KV CACHE", "BUFFERS", "FREE AFTER", "A TOKEN", "WHY"),
        [
            (
                f"  {rank.rank}",
                rank.node,
                layers_text(rank),
                rank.gpu_layers * -(-rank.layers // rank.window),
                format_size(rank.weights_bytes),
                format_size(rank.kv_bytes),
                format_size(rank.buffer_bytes),
                f"{format_size(rank.paged_bytes)} short" if rank.paged_bytes else format_size(rank.free_bytes),
                f"{rank.compute_s * 1000:.3g} ms" if rank.compute_s else "-",
                rank.why,
            )
            for rank in plan.ranks
        ],
    )
    head = f"model {name}: {plan.layers} layers, context {plan.context}, {kind}"
    lines = [head, *(f"  {text}" for text in (plan.reason, speed_text(plan), note) if text), body]
    unused = [f"  not {node}: {why}" for node, why in sorted(plan.left_out.items())]
    more = [f"  and {len(unused) - MAX_LISTED} more nodes (--json has all)"] if len(unused) > MAX_LISTED else []
    return "\n".join([*lines, *unused[:MAX_LISTED], *more])


def losses(
    config: Config, facts: Sequence[NodeFacts], plans: Mapping[str, ModelPlan | PlanError]
) -> dict[str, dict[str, ModelPlan | PlanError]]:
    """For each node that holds a rank: the plans of all models without it. Without any other nothing changes."""
    used = {rank.node for plan in plans.values() if isinstance(plan, ModelPlan) for rank in plan.ranks}
    return {name: plan_all(config, [node for node in facts if node.name != name]) for name in sorted(used)}


def losses_text(
    plans: Mapping[str, ModelPlan | PlanError], lost: Mapping[str, Mapping[str, ModelPlan | PlanError]]
) -> str:
    """What the loss of each node would do to each model that it serves."""
    rows = []
    for node, without in lost.items():
        for name, plan in plans.items():
            if not isinstance(plan, ModelPlan):
                continue
            other = without[name]
            if isinstance(other, PlanError):
                rows.append((f"  {node}", name, "not served", "-", "-", other.what))
            elif plan.rank_of(node) or other.ranks != plan.ranks:
                slower = f"{other.token_s / plan.token_s:.2g}x" if other.token_s and plan.token_s else "not known"
                by = ", ".join(f"{rank.node} {rank.layers}" for rank in other.ranks) + " layers"
                by += " from disk" if other.paged_bytes else ""
                token = f"{other.token_s * 1000:.3g} ms" if other.token_s else "-"
                rows.append((f"  {node}", name, "served", token, slower, by))
    title = "what if a node is lost (one that is not named here changes nothing):"
    return f"{title}\n" + table(("  WITHOUT", "MODEL", "IS", "A TOKEN", "TIME", "BY, OR WHY NOT"), rows)


# ======================================================================================================
# 22. Running: configuration, names and secrets; `up`, its end, and asking this box's node
# ======================================================================================================

CONFIG_NAME = "shardbox.toml"


def load_config(path: str | None) -> Config:
    """The checked configuration: of `path`, SHARDBOX_CONFIG, or the first place that has one. Raises ConfigError or
    UsageError."""
    places = [CONFIG_NAME, os.path.join(os.path.dirname(own_file()), CONFIG_NAME), f"/etc/shardbox/{CONFIG_NAME}"]
    found = path or os.environ.get("SHARDBOX_CONFIG") or next(filter(os.path.exists, places), None)
    if found is None:
        hint = "give it with --config FILE; config.example.toml shows what goes in"
        raise UsageError("no configuration found", where=", ".join(places), hint=hint)
    data = read_given(found, hint="--config FILE names it", limit=MAX_CONFIG_BYTES + 1)
    return parse_config(data, file=found, folder=os.path.dirname(os.path.abspath(found)))


def node_name(config: Config, given: str | None) -> str:
    """This node's name: --node, SHARDBOX_NODE, or the hostname, short or full. Raises UsageError."""
    said = (given or os.environ.get("SHARDBOX_NODE") or "").lower()
    host = socket.gethostname().lower()
    candidates = [said] if said else [host, host.partition(".")[0]]
    declared = [node.name for node in config.nodes]
    exact = [name for name in candidates if name in declared]
    short = [name for name in declared if name.partition(".")[0] == candidates[-1] and not said]
    if exact or len(short) == 1:
        return (exact or short)[0]
    if declared:
        raise UsageError(
            f"no node {candidates[0]!r} in [[nodes]]; there are: {', '.join(declared)}",
            where=config.file,
            hint="say which one this box is: --node NAME or SHARDBOX_NODE",
        )
    name = candidates[-1]
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,62}", name):
        raise UsageError(f"{name!r} cannot be a node's name", hint="letters, digits, '-', '_', '.': give --node NAME")
    return name


def read_secret(config: Config) -> str:
    """The cluster secret. Raises UsageError that never shows it."""
    return config.cluster.secret or read_secret_file(config, "secret_file", config.cluster.secret_file)


def read_secret_file(config: Config, key: str, name: str) -> str:
    """The secret in a file that [cluster] names under `key`. Raises UsageError that never shows it."""
    path = os.path.join(config.folder, name)
    where = f"cluster.{key}: {path}"
    hint = f"make one with `shardbox secret > {name}` on one box, and copy it to every other"
    if key == "old_secret_file":
        hint = "leave it out once every box has the new secret"
    try:
        secret = read_given(path, where, hint, 4096).decode().strip()
    except UnicodeDecodeError:
        raise UsageError("cannot be read: not a text file", where=where, hint=hint) from None
    if len(secret) < SECRET_CHARACTERS:
        what, hint = f"has fewer than {SECRET_CHARACTERS} characters", "make a good one with `shardbox secret`"
        raise UsageError(what, where=where, hint=hint)
    return secret


def own_keys(config: Config, name: str, secret: str) -> MeshKeys:
    """What the node `name` of this box proves itself with. Raises ShardboxError."""
    path, old = os.path.join(state_folder(config.cluster.name, name), "node.key"), config.cluster.old_secret_file
    try:
        key = node_key(path)
    except OSError as error:
        raise UsageError(f"cannot be read or made: {error.strerror}", where=path) from None
    old_secret = read_secret_file(config, "old_secret_file", old) if old else ""
    pins = {node.name: node.key for node in config.nodes if node.key}
    cluster = config.cluster
    return mesh_keys(
        secret, cluster.name, name, old_secret=old_secret, key=key, pins=pins, encryption=cluster.encryption
    )


class NodeDown(ShardboxError):
    """The node on this box does not run or does not answer."""


class NotRunning(NodeDown):
    """No `up` runs under this name on this box."""

    def __init__(self, name: str) -> None:
        super().__init__(f"node {name} is not running on this box", hint="start it with `shardbox up`")


def ask_node(
    config: Config, name: str, method: str, path: str, body: Any = None, timeout_s: float = 60.0,
    meanwhile: Callable[[], None] | None = None,
) -> Any:  # fmt: skip
    """What this box's node answers to its owner; `meanwhile` is called while it thinks, about twice a second. Raises
    ShardboxError, also when it is not running."""
    from http.client import HTTPConnection, HTTPException  # with what it imports, too slow for `status`

    connection = HTTPConnection("shardbox")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(timeout_s)
    try:
        with short_socket_path(control_path(state_folder(config.cluster.name, name))) as short:
            connection.sock.connect(short)
        connection.request(method, path, json.dumps(body) if body is not None else None)
        while meanwhile and not select.select([connection.sock], [], [], 0.5)[0]:
            meanwhile()
        reply = connection.getresponse()
        data = json.loads(reply.read())
    except (FileNotFoundError, ConnectionRefusedError):
        raise NotRunning(name) from None
    except PermissionError:
        what, hint = "the control socket belongs to another user", "run this as the user who runs `shardbox up`"
        raise UsageError(what, hint=hint) from None
    except (OSError, ValueError, HTTPException) as error:
        raise NodeDown(f"node {name} does not answer: {error}", hint="see its log") from None
    finally:
        connection.close()
    if reply.status != 200:
        said = data.get("error", {})
        raise ShardboxError(str(said.get("what", f"answered {reply.status}")), hint=str(said.get("hint", "")))
    return data


def read_status(config: Config, name: str, timeout_s: float) -> Snapshot:
    """The snapshot of this box's node, as any user. Raises NodeDown, or UsageError for an impostor."""
    deadline, chunks = time.monotonic() + timeout_s, [b""]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(status_address(config.cluster.name, name))
            check_status_owner(sock, config)
            while len(chunks) == 1 or chunks[-1]:
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                chunks.append(sock.recv(1 << 16))
        return from_json(Snapshot, json.loads(b"".join(chunks)), "status")
    except (FileNotFoundError, ConnectionRefusedError):
        raise NotRunning(name) from None
    except TimeoutError:
        raise NodeDown(f"node {name} accepts but says nothing within {timeout_s:g} s") from None
    except OSError as error:
        raise NodeDown(f"node {name} broke off: {error.strerror}") from None
    except ValueError:
        raise NodeDown(f"node {name} broke off in the middle of its answer") from None


def check_status_owner(sock: socket.socket, config: Config) -> None:
    """Anybody can bind an abstract name: believe only root, ourselves, or the configuration's owner."""
    if (uid := peer_uid(sock)) not in (None, 0, os.geteuid(), os.stat(config.file).st_uid):
        hint = "run `status` as the user who runs `up`, or give that user the TOML"
        raise UsageError(f"user {uid} answers for this node, who owns neither it nor {config.file}", hint=hint)


def run_up(config: Config, name: str, detach: bool) -> int:
    """`up` with its configuration read."""
    secret = read_secret(config)
    folder = state_folder(config.cluster.name, name)
    make_state(folder)
    if detach:
        return detach_up(config, name, os.path.join(folder, "node.log"))
    with one_node_only(folder, name):
        stop_leftovers(folder)
        problem = isolation_problem()  # tried once in a child, before any thread
        if problem and config.node(name).engine.isolate == "always":
            hint = 'mend that, or set [engine] isolate = "auto"'
            raise ShardboxError(f"engines cannot be closed in: {problem}", where="engine.isolate", hint=hint)
        load_all("aiohttp", "asyncio", "ssl", "web")  # which the spawner does not need: 10 MB
        gc.freeze()  # what both share, no collector has to touch
        spawner = Spawner.start()  # likewise before any thread
        try:
            with ThreadPoolExecutor(1) as pool:
                keys = pool.submit(own_keys, config, name, secret)  # scrypt takes 100 ms, the imports 200
                load_all()
            asyncio.run(_run_node(config, name, folder, keys.result(), spawner))
        finally:
            spawner.close()
            with contextlib.suppress(OSError):  # it has gone, or the folder has become read-only
                os.unlink(control_path(folder))
    return 0


async def _run_node(config: Config, name: str, folder: str, keys: MeshKeys, spawner: Spawner) -> None:
    demo = bool(os.environ.get("SHARDBOX_DEMO"))
    node = Node(config=config, name=name, folder=folder, keys=keys, spawner=spawner, demo=demo)
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if node.stop.is_set():
            log.warning("second signal: ending at once")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(control_path(folder))
            os._exit(1)  # the engines die with the spawner
        node.stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)
    loop.add_signal_handler(signal.SIGHUP, node.reload, functools.partial(load_config, config.file))
    api = api_url(config, config.node(name))
    log.info("node %s of cluster %s, endpoint %s", name, config.cluster.name, api)
    if config.api.open:
        log.warning("anybody who reaches %s can use it: set [api] keys_file", api)
    if node.box.facts.isolation and config.node(name).engine.isolate == "auto" and sys.platform == "linux":
        log.warning("engines cannot be closed in, their ports are open: %s", node.box.facts.isolation)
    await node.run(start_services)


def make_state(folder: str) -> None:
    """The state folder and its lock file, both there. Raises UsageError where they cannot be."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.makedirs(os.path.join(folder, "logs"), mode=0o700, exist_ok=True)
        os.close(os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o644))
    except OSError as error:
        hint = "make room there, mend its permissions, or name another place with SHARDBOX_STATE"
        raise UsageError(f"the state folder cannot be used: {error.strerror}", where=folder, hint=hint) from None


@contextlib.contextmanager
def one_node_only(folder: str, name: str) -> Iterator[None]:
    """Hold the node's lock file. Raises ShardboxError when another `up` holds it."""
    with open(os.path.join(folder, "lock"), "a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            what = f"node {name} already runs on this box (pid {file.read().strip() or '?'})"
            raise ShardboxError(what, hint="`shardbox down` ends it") from None
        file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk: it is the lock that counts
            os.write(file.fileno(), b"%d" % os.getpid())
        yield


def has_ended(folder: str) -> bool:
    """Whether no `up` holds the lock file of this folder, which may be read-only, or deleted, by now."""
    try:
        with open(os.path.join(folder, "lock"), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def stop_leftovers(folder: str) -> None:
    """Stop engines that an earlier run left behind, recognised by their recorded identity."""
    try:
        with open(os.path.join(folder, "engines.json"), "rb") as file:
            record = json.load(file)
        left = [entry for entry in record["engines"] if stop_leftover(int(entry["pid"]), str(entry["identity"]))]
        count = len(left) + (stop_marked(record["mark"]) if re.fullmatch("[0-9a-f]{32}", record["mark"]) else 0)
        if count:
            log.warning("stopped %d processes of engines left over from an earlier run", count)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("engines.json of an earlier run cannot be read: %r", error)


def start_node(config: Config, name: str, log_path: str) -> subprocess.Popen[bytes]:
    """`up` as a process of its own that writes to a file."""
    command = [*self_command(), "up", "--config", config.file, "--node", name]
    with open(log_path, "ab") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)


def last_words(log_path: str, characters: int) -> str:
    """The end of a node's log."""
    with open(log_path, encoding="utf-8", errors="replace") as file:
        return file.read()[-characters:].strip()


def detach_up(config: Config, name: str, log_path: str) -> int:
    """Start `up` in the background and wait until it answers. Raises ShardboxError with its last words."""
    child = start_node(config, name, log_path)
    for _ in range(300):
        if child.poll() is not None:
            last = "; ".join(last_words(log_path, 2000).splitlines()[-3:])
            raise ShardboxError(last or f"it ended with {child.returncode}", where=log_path)
        with contextlib.suppress(ShardboxError):
            read_status(config, name, 1.0)
            print(f"node {name} runs in the background (pid {child.pid}), its log is {log_path}")
            return 0
        time.sleep(0.1)
    raise ShardboxError("it runs, but does not answer after 30 s", where=log_path)


class Meter:
    """Tells how far something is: a bar on a terminal, lines in a log, nothing at all in a pipe, as cron's is."""

    LINE_S = 10.0  # between two lines in a log

    def __init__(self, total_bytes: int = 0) -> None:
        """`total_bytes`: of all that add() tells of."""
        self._total, self._done = total_bytes, 0
        self._bar, self._said = sys.stdout.isatty(), 0.0
        with contextlib.suppress(OSError, ValueError):
            self._log = "JOURNAL_STREAM" in os.environ or stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)

    def show(self, share: float, text: str) -> None:
        """`share` of 1 is done; `text` says more."""
        if self._bar:
            width = max(20, os.get_terminal_size().columns - 1)
            filled = int(20 * share)
            print("\r" + f"[{'#' * filled:20}] {text}"[:width].ljust(width), end="", flush=True)
        elif self._log and time.monotonic() - self._said > self.LINE_S:
            self._said = time.monotonic()
            print(text, flush=True)

    def add(self, path: str, count: int) -> None:
        """So many bytes more are done, of a file."""
        self._done += count
        text = f"{format_size(self._done)} of {format_size(self._total)}: {path}"
        self.show(self._done / max(1, self._total), text)

    def end(self, text: str) -> None:
        """The last word."""
        if self._bar:
            print("\r" + text.ljust(max(20, os.get_terminal_size().columns - 1)))
        elif self._log:
            print(text, flush=True)


def with_config(run: Callable[..., int]) -> Callable[..., int]:
    """A command that is given the configuration and this node's name for --config and --node."""

    @functools.wraps(run)
    def command(config_path: str | None, node: str | None, **settings: Any) -> int:
        config = load_config(config_path)
        return run(config, node_name(config, node), **settings)

    return command


# ======================================================================================================
# 23. Commands: each returns its exit code; its docstring is its help
# ======================================================================================================


def cmd_up(config_path: str | None, node: str | None, detach: bool, stick: str) -> int:
    """Run this box's node until `down`, SIGTERM or Ctrl-C."""
    if stick:
        to = os.path.dirname(os.path.abspath(config_path or CONFIG_NAME))
        unpack_stick(stick, to, node, over=False)
        config_path = config_path or os.path.join(to, CONFIG_NAME)
    config = load_config(config_path)
    return run_up(config, node_name(config, node), detach)


@with_config
def cmd_down(config: Config, name: str, everywhere: bool) -> int:
    """End this box's node and the rings it is part of."""
    try:
        reply = ask_node(config, name, "POST", "/down?all=1" if everywhere else "/down")
    except NotRunning:
        print(f"node {name} is not running")
        return 0
    for peer, answer in reply["told"].items():
        print(f"{peer}: {answer}")
    patience_s = 30 + config.api.drain_s
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if has_ended(state_folder(config.cluster.name, name)):
            print(f"{name}: down")
            return 0
        time.sleep(0.1)
    raise ShardboxError(f"node {name} is still ending after {patience_s:.0f} s", hint="see its log")


def cmd_status(config_path: str | None, node: str | None, timeout_s: float, as_json: bool, brief: bool) -> int:
    """How the cluster is. Exit code: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN (the monitoring-plugins convention)."""
    data = {}
    try:
        if math.isnan(timeout_s):
            raise UsageError("--timeout must be a number of seconds")
        config = load_config(config_path)
        snapshot = read_status(config, node_name(config, node), timeout_s)
        code, line = status_line(snapshot)
        data, text = to_json(snapshot), status_text(snapshot, verbose=not brief)
    except ShardboxError as error:
        code = CRITICAL if isinstance(error, NodeDown) else UNKNOWN
        text = f"SHARDBOX {STATUS_WORDS[code]} - {error}"
        line = text.splitlines()[0]
    head = {"code": code, "status": STATUS_WORDS[code], "line": line}
    print(json.dumps({**head, **data}, indent=2) if as_json else text)
    return code


def cmd_plan(
    config_path: str | None, node: str | None, as_json: bool, facts_file: str | None, without: Sequence[str],
    what_if: bool,
) -> int:  # fmt: skip
    """Which node would hold which layers, and why; what it would cost, and what the loss of a node would do."""
    config = load_config(config_path)
    facts = read_facts(facts_file) if facts_file else live_facts(config, node_name(config, node))
    there, away = {each.name for each in facts}, [name.lower() for name in without]
    for name in away:
        if name not in there:
            near = difflib.get_close_matches(name, there, 1)
            hint = f'"{near[0]}"?' if near else f"there are {', '.join(sorted(there)[:MAX_LISTED])}"
            raise UsageError(f"no node {name} is known", where="--without", hint=hint)
    facts = [each for each in facts if each.name not in away]
    plans = plan_all(config, facts)
    lost = losses(config, facts, plans) if what_if else {}
    if as_json:
        body = {"facts": to_json(facts), "plans": plans_json(plans)}
        body |= {"what_if": {name: plans_json(its) for name, its in lost.items()}} if what_if else {}
        print(json.dumps(body, indent=2))
    else:
        texts = [plan_text(plan, model) for model, plan in plans.items()] or ["no models configured"]
        print("\n\n".join([*texts, *([losses_text(plans, lost)] if what_if else [])]))
    return 1 if any(isinstance(plan, PlanError) for plan in plans.values()) else 0


def plans_json(plans: Mapping[str, ModelPlan | PlanError]) -> dict[str, Any]:
    """Plans, or errors with their hints, as JSON values."""
    return {
        model: {"error": plan.what, "hint": plan.hint} if isinstance(plan, PlanError) else to_json(plan)
        for model, plan in plans.items()
    }


def live_facts(config: Config, name: str) -> list[NodeFacts]:
    """Facts of the running cluster, or of this box alone where no node is up."""
    try:
        reply = ask_node(config, name, "GET", "/nodes")
        return [from_json(NodeFacts, item, "facts") for item in reply["facts"]]
    except NodeDown:
        print(f"node {name} is not up: planning for this box alone", file=sys.stderr)
        return [survey_once(config, name)]


def survey_once(config: Config, name: str) -> NodeFacts:
    """This box's facts, without a running node; no model file is read."""
    folder = state_folder(config.cluster.name, name)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        hint = "run as the user who runs `up`, or set SHARDBOX_STATE"
        raise UsageError(f"cannot be written: {error.strerror}", where=folder, hint=hint) from None
    surveyor = Surveyor(config, name, folder, isolation_problem())
    surveyor.close()
    if surveyor.speedometer.is_alive():
        surveyor.speedometer.join()
    return surveyor.survey(own_bytes=0)


def read_facts(path: str) -> list[NodeFacts]:
    """Facts from a file: what `nodes --json` or `plan --json` prints. Raises UsageError."""
    hint = "`shardbox nodes --json` writes one"
    try:
        data = json.loads(read_given(path))
        items = data.get("facts") if isinstance(data, dict) else data
        if not isinstance(items, list):
            raise UsageError('has no list "facts"', where=path, hint=hint)
        facts = [from_json(NodeFacts, item, f"{path}: facts[{n}]") for n, item in enumerate(items)]
    except (ValueError, RecursionError):
        raise UsageError("is not JSON", where=path, hint=hint) from None
    except MessageError as error:
        raise UsageError(error.what, where=error.where, hint=hint) from None
    twice = [name for name, count in Counter(node.name for node in facts).items() if count > 1]
    if twice:
        raise UsageError(f"has node {twice[0]} twice", where=path)
    return facts


@with_config
def cmd_nodes(config: Config, name: str, as_json: bool) -> int:
    """Who was found, and what is wrong with those who do not take part."""
    reply = ask_node(config, name, "GET", "/nodes")
    views = [from_json(PeerView, item, "nodes") for item in reply["nodes"]]
    if as_json:
        print(json.dumps(reply, indent=2))
        return 0
    known = [from_json(NodeFacts, item, "facts") for item in reply["facts"]]
    keys = table(("NODE", "KEY, as [[nodes]] may pin it"), [(facts.name, facts.key) for facts in known])
    print(peers_table(views), keys, sep="\n\n")
    return 0


@with_config
def cmd_logs(config: Config, name: str, target: str, model: str, lines: int) -> int:
    """Engine logs of one node, or of all, from any box."""
    query = urllib.parse.urlencode({"node": target.lower(), "model": model, "lines": lines})
    reply = ask_node(config, name, "GET", f"/logs?{query}")
    print("\n\n".join(f"==> {path} <==\n{text}" for path, text in reply.items()) or "no engine has run yet")
    return 0


@with_config
def cmd_start(config: Config, name: str, model: str, wanted: bool = True) -> int:
    """Serve a model that was stopped, has failed, or does not start by itself."""
    reply = ask_node(config, name, "POST", "/want", {"model": model, "wanted": wanted})
    print(f"{reply['model']}: {'starting' if wanted else 'stopping'}; `shardbox status` shows how far it is")
    return 0


def cmd_stop(**settings: str) -> int:
    """Stop serving a model on the whole cluster; the nodes stay up."""
    return cmd_start(**settings, wanted=False)


def node_copies(config: Config, name: str, *, reading: bool) -> list[CopyView]:
    """What this box's node knows to be read on any box, or to be copied."""
    views = [from_json(CopyView, item, "copies") for item in ask_node(config, name, "GET", "/copies")]
    return [view for view in views if (view.state == "reading") == reading]


@with_config
def cmd_pull(config: Config, name: str, model: str, giver: str, over: bool) -> int:
    """Fetch a model, or all that the TOML names, from the boxes that have it to this one."""
    asked = {"model": model, "from": giver.lower(), "replace": over}
    meter = Meter()
    try:
        views = [from_json(CopyView, item, "pull") for item in ask_node(config, name, "POST", "/pull", asked)]
        while any(view.state == "copying" for view in views):
            time.sleep(0.3)
            found = {view.model: view for view in node_copies(config, name, reading=False) if view.node == name}
            views = [found[view.model] if view.state == "copying" else view for view in views]
            now = [view for view in views if view.state == "copying"]
            size, done = sum(view.size_bytes for view in views), sum(view.done_bytes for view in views)
            meter.show(done / max(1, size), "; ".join(f"{view.model}: {copy_text(view)}" for view in now))
    except KeyboardInterrupt:
        print(f"\nnode {name} goes on with it; `shardbox models` shows how far it is", file=sys.stderr)
        raise
    for view in views:
        if view.state == "failed":
            print(f"{view.problem}" + (f"\nhint: {view.hint}" if view.hint else ""), file=sys.stderr)
        else:
            meter.end(f"{view.model}: whole, {format_size(view.size_bytes)}")
    return 1 if any(view.state == "failed" for view in views) else 0


@with_config
def cmd_models(config: Config, name: str, as_json: bool, prune: bool, yes: bool) -> int:
    """Which box holds which model, and whether whole; what shardbox put here and nobody needs any more."""
    if prune:
        return prune_models(config, name, yes)
    facts = live_facts(config, name)
    held = [(node, model, node.model(model.name)) for model in config.models for node in facts]
    if as_json:
        rows = [{"node": node.name, **to_json(copy), "shape": None} for node, _, copy in held]
        print(json.dumps({"models": rows}, indent=2))
        return 0
    shown = [
        (model.name, node.name, copy_state(copy, most_common_root(other.model(model.name) for other in facts)),
         format_size(copy.size_bytes) if copy.size_bytes else "-", copy.root[:16] or "-", copy.path or model.path)
        for node, model, copy in held
    ]  # fmt: skip
    print(table(("MODEL", "NODE", "STATE", "SIZE", "CONTENT", "FILE"), shown))
    return 0


def copy_state(copy: ModelFacts, common: str) -> str:
    """One word or two for `models`."""
    if copy.receiving:
        return "copying"
    if copy.hashed_bytes:
        return f"reading, {100 * copy.hashed_bytes // max(1, copy.size_bytes)} %"
    if copy.problem:
        return "damaged" if copy.path else "missing"
    if not copy.root:
        return "not read"
    return "whole" if copy.root == common else "other bytes"


def prune_models(config: Config, name: str, yes: bool) -> int:
    """Show, then remove after a yes, what shardbox copied to this box and the TOML no longer names."""
    folder = state_folder(config.cluster.name, name)
    paths = to_prune(folder, config, config.node(name))
    for path in paths:
        print(f"{format_size(os.path.getsize(path)):>9}  {path}")
    if not paths:
        print("nothing that shardbox copied here is left over")
        return 0
    if not yes and not (sys.stdin.isatty() and input("remove these? [y/N] ").strip().lower() in ("y", "yes")):
        print("nothing was removed; --yes removes them")
        return 0
    for path in paths:
        with open(path, "rb") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by a copy that runs
            os.unlink(path)
            print(f"removed {path}")
    note_in_ledger(folder, ())
    return 0


@with_config
def cmd_verify(config: Config, name: str, model: str) -> int:
    """Read a model again on all boxes at once, and say whose copy is not right."""
    query, own, meter = urllib.parse.urlencode({"model": model}), config.model(model), Meter()

    def show() -> None:
        views = [view for view in node_copies(config, name, reading=True) if own and view.model == own.name]
        share = sum(view.done_bytes for view in views) / max(1, sum(view.size_bytes for view in views))
        meter.show(share, "; ".join(map(copy_text, views)))

    found = ask_node(config, name, "GET", f"/verify?{query}", timeout_s=VERIFY_TIMEOUT_S, meanwhile=show)
    meter.end(f"{model}: read on {len(found)} boxes")
    votes = Counter[str]()
    for entry in found.values():
        if entry.get("root") and not entry["problem"]:
            votes[entry["root"]] += 2 if entry["root"] == entry.get("before") else 1  # what did not change counts more
    common, wrong = min(votes, key=lambda root: (-votes[root], root), default=""), 0
    for node, entry in found.items():
        problem, root, before = entry["problem"], entry.get("root", ""), entry.get("before", "")
        if not problem and root != common:
            problem = f"has other bytes than most ({root[:16]}, not {common[:16]})"
        if before and root and before != root:
            problem = f"{problem or 'changed'}; it had {before[:16]} when it was read last"
        wrong += bool(problem)
        print(f"{node}: {problem or f'right, {root[:16]}'}" + (f" ({entry['path']})" if entry.get("path") else ""))
    return 1 if wrong or not found else 0


def check_total_room(files: Iterable[tuple[str, int]]) -> None:
    """Raises FileError where what is still missing of these files, each with its size, does not fit where it goes."""
    need, homes = Counter[int](), dict[int, str]()
    for path, size in files:
        device = os.stat(nearest_folder(path)).st_dev
        homes[device] = nearest_folder(path)
        if not os.path.isfile(path) or os.path.getsize(path) != size:
            draft = f"{path}.part"
            need[device] += size - (min(size, os.stat(draft).st_blocks * 512) if os.path.isfile(draft) else 0)
    for device, home in homes.items():
        found = os.statvfs(home)
        free = found.f_bavail * found.f_frsize
        if need[device] > free:
            what = f"has {format_size(free)} free, and {format_size(need[device])} are needed"
            raise FileError(what, where=home, hint=f"make room for {format_size(need[device] - free)}")


def toml_for_stick(config: Config, with_secret: bool) -> bytes:
    """The bytes of the TOML, a secret in it replaced by the name of a file. Raises UsageError where that fails."""
    data = read_given(config.file)
    secret = config.cluster.secret
    if with_secret or not secret:
        return data
    pattern = rb"""(?<![\w.])secret(\s*=\s*)("(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
    data = re.sub(pattern, rb'secret_file\1"cluster.secret"', data)
    with contextlib.suppress(ConfigError):
        rest = parse_config(data, file=config.file, folder=config.folder)
        if not rest.cluster.secret and secret.encode() not in data:
            return data
    hint = "use secret_file, or --with-secret"
    raise UsageError("the secret cannot be taken out of it", where=config.file, hint=hint)


@contextlib.contextmanager
def disk_errors(where: str, hint: str) -> Iterator[None]:
    """What the operating system says of a disk there, as FileError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "make room and type it again: it goes on from here" if full else hint
        raise FileError(f"cannot be used: {error.strerror}", where=where, hint=hint) from None


@with_config
def cmd_pack(config: Config, name: str, folder: str, with_secret: bool) -> int:
    """Write all that a box needs to a folder, such as a USB stick: program, TOML, engines, models."""
    state, settings = state_folder(config.cluster.name, name), config.node(name)
    facts = survey_once(config, name)
    secret_file = config.cluster.secret_file
    if with_secret and os.path.isabs(secret_file):
        raise UsageError("names a place outside the TOML's folder: carry it by hand", where="cluster.secret_file")
    with tempfile.TemporaryDirectory() as drafts:
        with open(os.path.join(drafts, CONFIG_NAME), "wb") as file:
            file.write(toml_for_stick(config, with_secret))
        work = [("toml", CONFIG_NAME, file.name, "")]
        if with_secret and secret_file:
            work.append(("secret", secret_file, os.path.join(config.folder, secret_file), ""))
        work += to_pack(config, facts.binaries, engine_places(config, settings, state)[1], settings.model_dirs)
        secret = "" if with_secret else f"write the cluster's secret into {secret_file or 'cluster.secret'}, beside it"
        text = functools.partial(STICK_TEXT.format, cluster=config.cluster.name, stick="STICK", secret=secret)
        with disk_errors(folder, STICK_BACK):
            entries = write_stick(folder, work, HashCache(state), text)
    size = format_size(sum(entry.size for entry in entries))
    if not getattr(sys, "frozen", False):
        print("its program is Python source, for boxes with Python and all packages: see `make build`", file=sys.stderr)
    print(f"{folder}: {len(entries)} files, {size}; README.txt there says what to type")
    return 0


def write_stick(
    folder: str, work: Sequence[tuple[str, str, str, str]], cache: HashCache, text: Callable[..., str]
) -> list[StickFile]:
    """Put files on a stick, beside those for other platforms; `work`: see to_pack. Raises FileError, OSError."""
    os.makedirs(folder, exist_ok=True)
    manifest, old = os.path.join(folder, MANIFEST_NAME), os.path.join(folder, f"{MANIFEST_NAME}.old")
    kept: list[StickFile] = []  # of boxes of other platforms, where pack has run before
    for name in (f"{MANIFEST_NAME}.old", MANIFEST_NAME):
        with contextlib.suppress(FileError):
            files = read_manifest(folder, name).files
            kept = [entry for entry in files if entry.platform not in ("", probe_platform())]
    planned = plan_stick(work, kept)
    check_total_room(
        (os.path.join(folder, name), piece.size)
        for entry in planned.values()
        for name, piece in zip(entry.pieces, piece_listing(entry.size, ()).files, strict=True)
    )
    with contextlib.suppress(FileNotFoundError):
        os.replace(manifest, old)  # until this has come to its end, there is no whole stick
    packed = pack_files(folder, planned, cache)
    entries = [*kept, *(replace(packed[path], path=target, model=model) for _, target, path, model in work)]
    platforms = ", ".join(sorted({entry.platform for entry in entries if entry.kind == "program"}))
    data = json.dumps(to_json(Manifest(format=STICK_FORMAT, files=tuple(entries))))
    for path, content in ((os.path.join(folder, "README.txt"), text(platforms=platforms)), (manifest, data)):
        with open(f"{path}.new", "w", encoding="utf-8") as written:
            written.write(content)
            written.flush()
            os.fsync(written.fileno())
        os.replace(f"{path}.new", path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(old)
    return entries


def plan_stick(work: Sequence[tuple[str, str, str, str]], kept: Sequence[StickFile]) -> dict[str, StickFile]:
    """Each file here with its names on the stick, once, also where several models share it; without its hashes yet."""
    names, planned = {piece.lower() for entry in kept for piece in entry.pieces}, dict[str, StickFile]()
    for kind, target, path, _ in work:
        if path not in planned:
            platform, size = probe_platform() if kind in ("program", "engine") else "", os.path.getsize(path)
            pieces = piece_names(stick_name(kind, target, platform, names), size)
            planned[path] = StickFile(kind=kind, path=target, size=size, hashes=(), pieces=pieces, platform=platform)
    return planned


def pack_files(folder: str, planned: Mapping[str, StickFile], cache: HashCache) -> dict[str, StickFile]:
    """Put these files on a stick, one after the other. Raises FileError, OSError."""
    meter, packed = Meter(sum(entry.size for entry in planned.values())), dict[str, StickFile]()
    for path, entry in planned.items():
        packed[path] = pack_file(folder, path, entry, cache, functools.partial(meter.add, path))
    meter.end("all of it is written")
    return packed


def cmd_unpack(node: str | None, stick: str, to: str, over: bool) -> int:
    """Install from a folder that `pack` wrote what this box needs, every byte checked."""
    unpack_stick(stick, os.path.abspath(to), node, over)
    return 0


def unpack_stick(stick: str, to: str, node: str | None, over: bool) -> None:
    """Install into the folder `to`: TOML and secret first, then what they say that this box needs. Raises
    ShardboxError."""
    manifest = read_manifest(stick)
    with disk_errors(to, "what is there is kept"):
        os.makedirs(to, exist_ok=True)
        if os.path.commonpath([os.path.realpath(to), os.path.realpath(stick)]) == os.path.realpath(stick):
            hint = "--to FOLDER, or go to the folder where it is to live"
            raise UsageError("is on the stick itself", where=to, hint=hint)
        for entry in manifest.files:
            if entry.kind in ("toml", "secret"):
                unpack_file(stick, entry, safe_place(entry.path, folder=to), over, lambda _: None)
        config = load_config(os.path.join(to, CONFIG_NAME))
        name = node_name(config, node)
        needed = [entry for entry in manifest.files if is_needed(entry, config, name)]
        dirs = config.node(name).model_dirs
        places = [safe_place(entry.path, folder=to, dirs=dirs) for entry in needed]
        check_total_room((path, entry.size) for path, entry in zip(places, needed, strict=True))
        install(stick, needed, places, over, state_folder(config.cluster.name, name))
        size = format_size(sum(entry.size for entry in needed))
        Meter().end(f"{to}: {len(needed)} files, {size}, every byte checked")


def install(stick: str, needed: Sequence[StickFile], places: Sequence[str], over: bool, state: str) -> None:
    """Bring files from a stick to their places; models are noted in the ledger. Raises FileError, OSError."""
    meter = Meter(sum(entry.size for entry in needed))
    for entry, path in zip(needed, places, strict=True):
        with disk_errors(path, "what is there is kept"):
            put = unpack_file(stick, entry, path, over, functools.partial(meter.add, path))
        if entry.kind == "model":
            os.makedirs(state, mode=0o700, exist_ok=True)
            note_in_ledger(state, put)


def is_needed(entry: StickFile, config: Config, name: str) -> bool:
    """Whether a box needs this file of a stick."""
    if entry.kind in ("program", "engine"):
        return entry.platform == probe_platform()
    model = config.model(entry.model)
    return model is not None and (not (model.nodes or model.layers) or name in (*model.nodes, *model.layers))


@with_config
def cmd_check(config: Config, name: str, as_json: bool) -> int:
    """Preflight: this box, and every pair of boxes in both directions."""
    secret = read_secret(config)
    try:
        reply = ask_node(config, name, "GET", "/check")
        found = check_box(config, *(from_json(NodeFacts, item, "facts") for item in reply["facts"]))
    except NodeDown:
        facts = survey_once(config, name)
        found = [*check_box(config, facts), *check_own_ports(config, facts)]
        problem = f"node {name} is not up: no other box could try to reach it"
        found.append(finding("", problem, hint="`shardbox up` here and there, then check again", level="warn"))
        reply = asyncio.run(reach_outward(config, facts, secret))
    found += check_pairs(config, reply)
    failed = any(item["level"] == "fail" for item in found)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": found}, indent=2))
        return 1 if failed else 0
    for item in found:
        print(f"{item['level']:4}  {item['what']}")
        if item["hint"] and item["level"] != "ok":
            print(f"      hint: {item['hint']}")
    return 1 if failed else 0


def finding(subject: str, problem: str, good: str = "", *, hint: str = "", level: str = "fail") -> dict[str, str]:
    """One line of `check`: the problem at this level (warn or fail); where there is none, what is ok."""
    return {"level": level if problem else "ok", "what": subject + (problem or good), "hint": hint}


def finding_of(subject: str, part: BinaryFacts | ModelFacts, good: str, givers: list[str] | None) -> dict[str, str]:
    """An engine or a model here. One that is not is no fault where `up` fetches it: from these, or, where there are
    none, from a box that is not up yet; None: it does not."""
    if part.path or givers is None:
        return finding(subject, part.problem, good, hint=part.hint)
    if givers:
        return finding(subject, "", f"not here; {' or '.join(givers)} gives it when it is needed")
    return finding(
        subject, part.problem, hint=f"`up` fetches it from a box that has it; else {part.hint}", level="warn"
    )


def check_box(config: Config, facts: NodeFacts, *others: NodeFacts) -> list[dict[str, str]]:
    """This box: binaries, models (which others may give it), memory, isolation, addresses."""
    rehearsal = config.engine.kind == "rehearsal"
    found = [finding(f"{config.file} is well-formed (hash {config.hash})", "")]
    for binary in facts.binaries:
        path = binary.path or ROLE_BINARIES[binary.role]
        alike = [node for node in others if node.platform == facts.platform and node.binary(binary.role).version]
        givers = [node.name for node in alike] if config.engine.share else None
        found.append(finding_of(f"{binary.role} binary {path}: ", binary, binary.version, givers))
    if rehearsal:
        found.append(finding('engine kind is "rehearsal": ', "no model will be loaded", level="warn"))
    for copy in facts.models:
        model = config.model(copy.name)
        good = f"{copy.path}, {format_size(copy.size_bytes)}"
        given = {node.name: node.model(copy.name) for node in others if not node.model(copy.name).problem}
        fits = config.cluster.copy_models and all(theirs.size_bytes <= copy.room_bytes for theirs in given.values())
        found.append(finding_of(f"model {copy.name}: ", copy, good, [*given] if fits else None))
        if not (copy.path or fits) and config.cluster.copy_models:
            needs = format_size(max(theirs.size_bytes for theirs in given.values()))
            found[-1]["hint"] = f"a copy needs {needs}, and {format_size(copy.room_bytes)} may be put there"
        if rehearsal and model is not None and model.rehearse is not None and copy.problem:
            found[-1]["level"] = "warn"
    memory, note = facts.memory, f" ({facts.gpu_note})" if facts.gpu_note else ""
    good = f"{format_size(memory.available_bytes)} of {format_size(memory.total_bytes)} available ({memory.source})"
    found.append(finding(f"memory: {good}; {len(facts.gpus)} GPUs{note}", ""))
    good = "engines can be closed in: only the forwarder reaches their ports"
    found.append(finding("", facts.isolation, good, level="warn"))
    shown = ", ".join(f"{a.address} ({a.interface}{', ' + a.note if a.note else ''})" for a in facts.addresses)
    hint = "name the interface in [cluster] interfaces"
    found.append(finding("addresses: ", "" if shown else "none that may be used", shown, hint=hint))
    return found + [finding(f"not used: {text}", "") for text in local_addresses(config.cluster.interfaces)[1]]


def check_own_ports(config: Config, facts: NodeFacts) -> list[dict[str, str]]:
    """Whether the ports that `up` will take are free."""
    found = []
    for key, bind, port in (("mesh", "0.0.0.0", facts.ports.mesh), ("api", config.api.bind, facts.ports.api)):
        problem = port_problem(bind, port)
        hint = port_owner_hint(port) if problem else ""
        found.append(finding(f"port {port} ({key})", problem and f": {problem}", " is free", hint=hint))
    return found


def port_problem(bind: str, port: int) -> str:
    """Why nobody can listen there now; "" where it is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((bind, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def check_pairs(config: Config, reply: dict[str, Any]) -> list[dict[str, str]]:
    """Every pair of nodes in both directions, versions, configurations, model contents and clocks."""
    found, hints = [], {}
    for pair in (from_json(Reach, item, "pairs") for item in reply["pairs"]):
        subject, good = f"{pair.source} -> {pair.target} at {pair.address}: ", "reached, secret proved, "
        found.append(finding(subject, pair.problem, f"{good}{pair.rtt_ms:.1f} ms", hint=pair.hint))
    facts = [from_json(NodeFacts, item, "facts") for item in reply["facts"]]
    compared = {
        "shardbox.toml": {node.name: node.config_hash for node in facts},
        "shardbox version": {node.name: node.version for node in facts},
    }
    for model in config.models:
        mend = f"`verify {model.name}` says whose is wrong, `pull {model.name} --replace` there mends it"
        hints[f"content of {model.path}"] = mend
        compared[f"content of {model.path}"] = {node.name: node.model(model.name).root for node in facts}
    for role in ENGINE_ROLES:
        compared[f"{role} binary's build"] = {node.name: node.binary(role).commit for node in facts}
    for label, given in compared.items():
        values = {node: value for node, value in sorted(given.items()) if value}
        listing = ", ".join(f"{node} {value}" for node, value in values.items())
        problem = f" differs: {listing}" if len(set(values.values())) > 1 else ""
        if len(values) > 1:
            hint = hints.get(label, "make them the same everywhere")
            found.append(finding(label, problem, f": the same on {', '.join(values)}", hint=hint))
    for name, skew in reply["clock_skew_s"].items():
        found.append(finding(f"clock of {name}: {skew:+.1f} s (nothing depends on it)", ""))
    hint = "let engines be closed in ([engine] isolate), or close these ports in that box's firewall"
    found += [finding("", text, hint=hint, level="warn") for text in reply["exposures"]]
    if reply["discovery"]:
        found.append(finding("", reply["discovery"], hint="give each node an `address`", level="warn"))
    return found


async def reach_outward(config: Config, facts: NodeFacts, secret: str) -> dict[str, Any]:
    """What `check` can find out about other boxes from one that is not up: who advertises, who can be reached."""
    hints = [
        Hint(node=node.name, address=node.address, port=node.ports.mesh, source="static")
        for node in config.nodes
        if node.address
    ]
    cluster, problem = config.cluster.name, ""
    if config.cluster.discovery == "mdns":
        discovery = Discovery(cluster, facts.name, facts.machine, facts.mesh_port, lambda: None, advertise=False)
        await discovery.announce(tuple(address.address for address in facts.addresses))
        await asyncio.sleep(SETTLE_S)
        problem = discovery.problem
        hints += [hint for hint in discovery.hints.values() if hint.cluster == cluster]
        await discovery.close()

    def refuse(peer: str, service: str) -> typing.NoReturn:
        raise MeshError("this node is not up", kind="refused")

    mesh = Mesh(keys=own_keys(config, facts.name, secret), open_service=refuse)
    with ThreadPoolExecutor(max_workers=16) as pool:
        pairs = await reach_all(config, facts.name, hints, mesh, pool)
    mesh.close()
    found = {"pairs": to_json(pairs), "facts": [to_json(facts)], "discovery": problem}
    return {**found, "clock_skew_s": {}, "exposures": []}


def cmd_secret() -> int:
    """Print a new random cluster secret."""
    print(secrets.token_urlsafe(32))
    return 0


# ======================================================================================================
# 24. Program: what it was built from, its demo, click's options; only main() ends it
# ======================================================================================================


def bundle_problems(path: str, folder: str) -> list[str]:
    """What is not as it was built, in the executable or the files unpacked from it. Raises UsageError without one."""
    data = read_given(path)
    layout = struct.Struct("<5Q32s8s8s32s")  # tools/launcher.c: struct trailer
    if len(data) < layout.size or data[-40:-32] != b"SHARDBX1":
        raise UsageError("is not an executable made by `make build`: nothing to verify", where=path)
    _, _, _, at, size, version, _, _, digest = layout.unpack_from(data, len(data) - layout.size)
    manifest, problems = data[at : at + size], []
    if hashlib.sha256(data[:-32]).digest() != digest or hashlib.sha256(manifest).hexdigest()[:32] != version.decode():
        problems.append(f"{path}: its content was changed")
    listed = {line.split(" ", 3)[3]: line.split(" ", 3)[2] for line in manifest.decode().splitlines()}
    present = {os.path.relpath(os.path.join(top, name), folder): os.path.join(top, name)
               for top, folders, names in os.walk(folder) for name in [*folders, *names]
               if name != ".whole" and (name in names or os.path.islink(os.path.join(top, name)))}  # fmt: skip
    for name in sorted(listed.keys() | present.keys()):
        if name not in present or name not in listed:
            problems.append(f"{folder}/{name}: {'is missing' if name in listed else 'does not belong there'}")
            continue
        if os.path.islink(present[name]):
            content = os.fsencode(os.readlink(present[name]))
        else:
            with open(present[name], "rb") as file:
                content = file.read()
        if hashlib.sha256(content).hexdigest() != listed[name]:
            problems.append(f"{folder}/{name}: was changed")
    return problems


def build_text() -> str:
    """What this program was made of, as build.spec noted it."""
    if not getattr(sys, "frozen", False):
        return f"run from source\npython     {platform.python_version()}"
    with open(os.path.join(os.path.dirname(sys.executable), "_internal", "build.json"), encoding="utf-8") as file:
        info = json.load(file)
    libraries = [f"  {name:24} {version:12} {licence}" for name, version, licence in info["libraries"]]
    texts = os.path.join(os.path.dirname(sys.executable), "_internal", "licences.txt")
    return "\n".join([f"commit     {info['commit']}", f"date       {info['date']}", f"python     {info['python']}",
                      "libraries", *libraries, f"licences   {texts}"])  # fmt: skip


def cmd_version(full: bool, verify: bool) -> int:
    """Print the version; what it was built from; whether the executable is as it was built."""
    print(f"shardbox {VERSION}")
    if full:
        print(build_text())
    if not verify:
        return 0
    problems = bundle_problems(own_file(), os.path.dirname(sys.executable))
    with open(own_file(), "rb") as file:
        whole = f"whole      {own_file()}, SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    print("\n".join(problems or [whole]))
    return 1 if problems else 0


# --- demo ------------------------------------------------------------------------------------------------

DEMO_TIMEOUT_S = 60
DEMO_NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
DEMO_TOML = """
cluster = {{name = "demo-{pid}", secret = "{secret}", discovery = "{discovery}", interfaces = ["{loopback}"]}}
engine = {{kind = "rehearsal"}}
[[models]]
name = "demo-32b"
path = "demo-32b.gguf"
context = 2048
rehearse = {{layers = 64, width = 5120, bytes = "20GiB"}}
"""
DEMO_NODE_TOML = """
[[nodes]]
name = "{name}"
memory = "9GiB"
gpu_memory = 0
address = "{address}"
ports = {{mesh = {ports[0]}, api = {ports[1]}, data = {ports[2]}, signal = {ports[3]}}}
"""


def multicast_works() -> bool:
    """Whether a multicast datagram on loopback comes back, as mDNS between nodes of one box needs."""
    group, address = "224.0.0.251", "127.0.0.1"
    member = socket.inet_aton(group) + socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind(("", 0))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
            sock.settimeout(0.5)
            sock.sendto(b"shardbox", (group, sock.getsockname()[1]))
            return sock.recv(16) == b"shardbox"
        except OSError:
            return False


def demo_config(count: int, mdns: bool, ports: Sequence[int], secret: str) -> str:
    """The TOML of the demo: `count` nodes of 9 GiB, and a model of 20 GiB that none of them could hold."""
    discovery, address = ("mdns", "") if mdns else ("static", "127.0.0.1")
    loopback = "lo" if sys.platform == "linux" else "lo0"
    head = DEMO_TOML.format(pid=os.getpid(), secret=secret, discovery=discovery, loopback=loopback)
    return head + "".join(
        DEMO_NODE_TOML.format(name=name, address=address, ports=ports[4 * n : 4 * n + 4])
        for n, name in enumerate(DEMO_NAMES[:count])
    )


def free_port_blocks(count: int) -> list[int]:
    """Four free ports or bases for each node: mesh, api, data and signal blocks of PORT_BLOCK."""
    result: list[int] = []
    size = 2 + 2 * PORT_BLOCK
    for base in range(20000 + (os.getpid() * 37) % 20000, 60000, size):
        if not any(port_problem("0.0.0.0", port) for port in range(base, base + size)):
            result += [base, base + 1, base + 2, base + 2 + PORT_BLOCK]
        if len(result) == 4 * count:
            return result
    raise ShardboxError("no block of free ports on this machine", hint="end what listens between 20000 and 60000")


def cmd_demo(once: bool, count: int) -> int:
    """A whole cluster on this machine with the rehearsal engine: no model needed."""
    mdns, names = multicast_works(), DEMO_NAMES[:count]
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="shardbox-demo-") as folder:
        path = os.path.join(folder, CONFIG_NAME)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(demo_config(count, mdns, free_port_blocks(count), secrets.token_urlsafe(32)))
        config = load_config(path)
        os.environ.update(SHARDBOX_STATE=os.path.join(folder, "state"), SHARDBOX_DEMO="1")
        way = "mDNS" if mdns else "static addresses (no multicast here)"
        print(f"{count} nodes on this machine, found by {way}, rehearsal engines (no model is loaded)", flush=True)
        try:
            children += (start_node(config, name, os.path.join(folder, f"{name}.log")) for name in names)
            watch_demo(config, folder, children)
            return show_demo(config, once or not sys.stdin.isatty())
        except KeyboardInterrupt:
            return 0
        finally:
            for child in children:
                child.terminate()
            for child in children:
                try:
                    child.wait(20)
                except subprocess.TimeoutExpired:
                    child.kill()


def watch_demo(config: Config, folder: str, children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Show progress until the model answers. Raises ShardboxError where it does not."""
    names, started, said, judged = [node.name for node in config.nodes], time.monotonic(), "", ""
    while time.monotonic() - started <= DEMO_TIMEOUT_S:
        for name, child in zip(names, children, strict=True):
            if child.poll() is not None:
                raise ShardboxError(f"{name} ended: {last_words(os.path.join(folder, f'{name}.log'), 1500)}")
        with contextlib.suppress(NodeDown):
            snapshot = read_status(config, names[0], 2.0)
            code, judged = status_line(snapshot)
            found = [peer.name for peer in snapshot.peers if peer.state in ("self", "live")]
            view = snapshot.models[0]
            reason = re.sub(r" \(\d+ s more\)", "", f" ({view.reason})" if view.reason else "")
            text = f"found {', '.join(found)}; {view.model} is {view.phase}{reason}"
            if text != said:
                print(f"{time.monotonic() - started:5.1f} s  {text}", flush=True)
                said = text
            if code == OK and len(found) == len(names):
                return
        time.sleep(0.1)
    raise ShardboxError(f"the demo's ring did not form within {DEMO_TIMEOUT_S} s", hint=judged)


def show_demo(config: Config, once: bool) -> int:
    """One streamed answer from the last node, which leads nothing, and the status; then wait for Ctrl-C."""
    from http.client import HTTPConnection

    last, path = config.nodes[-1], "/v1/chat/completions"
    url = f"http://127.0.0.1:{last.ports.api}{path}"
    print(f"\nasking {last.name}, which leads nothing: POST {url}\n", flush=True)
    question = {"messages": [{"role": "user", "content": "What is this?"}], "max_tokens": 48}
    body = json.dumps({"model": config.models[0].name, "stream": True, **question})
    with contextlib.closing(HTTPConnection("127.0.0.1", last.ports.api, timeout=60)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            said = reply.read()[:500].decode(errors="replace")
            raise ShardboxError(f"the endpoint answered {reply.status}: {said}")
        for line in reply:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {"choices": []}
            if "error" in event:
                raise ShardboxError(str(event["error"].get("message")))
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
    print("\n")
    snapshot = read_status(config, config.nodes[0].name, 5.0)
    print(status_text(snapshot), flush=True)
    if not once:
        print("\nCtrl-C ends the demo.")
        signal.pause()
    return status_line(snapshot)[0]


# --- the command line ------------------------------------------------------------------------------------


def build_cli() -> Any:
    """The click group. A command's first word in its example is its name, its function's docstring its help."""
    import click

    def option(*names: str, **more: Any) -> click.Option:
        return click.Option(names, **more)

    def add(run: Callable[..., int], example: str, *params: click.Parameter) -> None:
        epilog, name = f"Example: shardbox {example}", example.partition(" ")[0]
        group.add_command(click.Command(name, params=list(params), callback=run, help=run.__doc__, epilog=epilog))

    common = (
        option("--config", "config_path", metavar="FILE", help="The TOML (default: see the README)."),
        option("--node", metavar="NAME", help="Which [[nodes]] entry this box is (default: its hostname)."),
    )
    readable = (*common, option("--json", "as_json", is_flag=True, help="Print JSON."))
    detach = option("--detach", is_flag=True, help="Go on in the background, with a log file.")
    everywhere = option("--all", "everywhere", is_flag=True, help="On every box of the cluster.")
    help_timeout, seconds = "Then give up and say CRITICAL (default 10).", click.FloatRange(0.1, 3600)
    timeout = option("--timeout", "timeout_s", default=10.0, metavar="SECONDS", type=seconds, help=help_timeout)
    brief = option("--brief", is_flag=True, help="Only the first line.")
    facts = option("--facts", "facts_file", metavar="FILE", help="Plan from this file instead of the live cluster.")
    lost = option("--without", multiple=True, metavar="NODE", help="As if this node was away; may be given again.")
    what_if = option("--what-if", is_flag=True, help="For each node: what its loss would do.")
    target = click.Argument(["target"], required=False, default="", metavar="[NODE]")
    of_model = option("--model", default="", metavar="NAME", help="Only this model's engines.")
    lines_help, many = "Last lines of each log (default 100).", click.IntRange(1, 10000)
    lines = option("-n", "--lines", default=100, type=many, help=lines_help)
    model = click.Argument(["model"], metavar="MODEL")
    giver = option("--from", "giver", default="", metavar="NODE", help="Only from this box.")
    over = option("--replace", "over", is_flag=True, help="Also in the place of a file with other bytes.")
    prune = option("--prune", is_flag=True, help="Remove what was copied here and is not in the TOML any more.")
    yes = option("--yes", is_flag=True, help="Do not ask.")
    any_model = click.Argument(["model"], required=False, default="", metavar="[MODEL]")
    folder = click.Argument(["folder"], metavar="DIR")
    with_secret = option("--with-secret", is_flag=True, help="Also the cluster's secret.")
    stick = click.Argument(["stick"], metavar="DIR")
    onto = option("--to", default=".", metavar="FOLDER", help="Where shardbox is to live (default: here).")
    first = option("--from", "stick", default="", metavar="DIR", help="Unpack this folder first: see unpack.")
    once = option("--once", is_flag=True, help="End after one answer (also without a terminal).")
    count = option("--nodes", "count", default=3, type=click.IntRange(1, 8), help="How many nodes (default 3).")

    summary = "Run a language model that is too big for any one of your machines, on all of them together."
    group = click.Group("shardbox", help=summary, context_settings={"help_option_names": ["-h", "--help"]})
    add(cmd_up, "up --config /etc/shardbox/shardbox.toml", *common, detach, first)
    add(cmd_down, "down --all", *common, everywhere)
    add(cmd_status, "status --brief", *readable, timeout, brief)
    add(cmd_plan, "plan --without beta --what-if", *readable, facts, lost, what_if)
    add(cmd_nodes, "nodes --json > facts.json", *readable)
    add(cmd_logs, "logs beta --model qwq-32b -n 50", *common, target, of_model, lines)
    add(cmd_start, "start qwq-32b", *common, model)
    add(cmd_stop, "stop qwq-32b", *common, model)
    add(cmd_pull, "pull qwq-32b --from alpha", *common, any_model, giver, over)
    add(cmd_models, "models --prune", *readable, prune, yes)
    add(cmd_verify, "verify qwq-32b", *common, model)
    add(cmd_pack, "pack /media/stick", *common, folder, with_secret)
    add(cmd_unpack, "unpack /media/stick --to /opt/shardbox", common[1], stick, onto, over)
    add(cmd_check, "check", *readable)
    add(cmd_demo, "demo --once", once, count)
    add(cmd_secret, "secret > cluster.secret")
    full = option("--full", is_flag=True, help="Also commit, date, interpreter, libraries, licences.")
    verify = option("--verify", is_flag=True, help="Check the executable and what is unpacked from it.")
    add(cmd_version, "version --full", full, verify)
    return group


def hold_unpacked() -> None:
    """Keep a shared lock on the folder that this frozen program runs from until it ends, never inherited: the launcher
    sweeps, and systemd-tmpfiles cleans, only what nobody has locked."""
    given = os.environ.pop("_SHARDBOX_LOCK", "")
    with contextlib.suppress(OSError, ValueError):  # a file system without locks
        fd = int(given) if given else os.open(os.path.dirname(sys.executable), os.O_RDONLY)
        os.set_inheritable(fd, False)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def restore_environment() -> None:
    """A frozen program's own library path must not reach the engines (PyInstaller sets it for itself)."""
    if getattr(sys, "frozen", False):
        hold_unpacked()
        original = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
        os.environ.pop("LD_LIBRARY_PATH", None)
        if original is not None:
            os.environ["LD_LIBRARY_PATH"] = original
        for key in [key for key in os.environ if key.startswith("_PYI_")]:
            del os.environ[key]
        os.environ["PYINSTALLER_RESET_ENVIRONMENT"] = "1"  # for when we start ourselves


def main(argv: Sequence[str] | None = None) -> int:
    """The whole program; the only place that turns errors into exit codes."""
    args = list(sys.argv[1:] if argv is None else argv)
    restore_environment()
    if args[:1] == ["rehearse"]:
        return rehearse(args[1:], os.environ)
    for name in ("aiohttp.server", "zeroconf"):  # a client's broken HTTP or a vanished address is no bug of ours
        logging.getLogger(name).setLevel(logging.CRITICAL)
    level = os.environ.get("SHARDBOX_LOG", "INFO" if args[:1] == ["up"] else "WARNING").upper()
    logging.basicConfig(
        level=level if level in logging.getLevelNamesMapping() else "INFO",
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
    code = 1
    try:
        code = run_command(args)
        print(end="", flush=True)
    except BrokenPipeError:  # its reader has left: nobody to complain to, also not at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def plain_status(args: Sequence[str]) -> dict[str, Any] | None:
    """The settings of `status` that click would find in these arguments; None for anything out of the ordinary."""
    settings: dict[str, Any] = {"config_path": None, "node": None, "timeout_s": 10.0, "as_json": False, "brief": False}
    flags, values = {"--json": "as_json", "--brief": "brief"}, {"--config": "config_path", "--node": "node"}
    words = [*args]
    while words:
        word = words.pop(0)
        if word in flags:
            settings[flags[word]] = True
        elif word in values and words and words[0] and not words[0].startswith("-"):
            settings[values[word]] = words.pop(0)
        else:
            return None
    return settings


def run_command(args: list[str]) -> int:
    """The exit code of one command; an error is printed with its hint."""
    if args[:1] == ["status"] and (settings := plain_status(args[1:])) is not None:  # without click, which takes 20 ms
        with contextlib.suppress(KeyboardInterrupt):
            return cmd_status(**settings)
        return 130
    import click

    try:
        code = build_cli().main(args=args, prog_name="shardbox", standalone_mode=False)
        return int(code or 0)
    except click.ClickException as error:
        if args[:1] == ["status"]:
            print(f"SHARDBOX UNKNOWN - {error.format_message()}".replace("\n", " "))
            return UNKNOWN
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        return 130
    except ShardboxError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
