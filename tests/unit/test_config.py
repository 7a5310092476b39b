"""The configuration: what a file may say, and that every mistake is named once, in its place."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardbox import (
    MAX_CONFIG_BYTES,
    MAX_PROBLEMS,
    ApiConfig,
    ClusterConfig,
    Config,
    ConfigError,
    EngineConfig,
    ModelConfig,
    NodeConfig,
    PortsConfig,
    RehearseConfig,
    parse_config,
    reloaded,
)

EXAMPLE = (Path(__file__).parents[2] / "config.example.toml").read_text(encoding="utf-8")
UNCOMMENTED = re.sub(r"(?m)^#(?=[^\s#])", "", EXAMPLE)
SECRET = "hunter2-correct-horse-battery"

OK = '[cluster]\nsecret_file = "s"\n'  # two lines; what a case adds begins at line 3
NODE = OK + '[[nodes]]\nname = "alpha"\n'  # then line 5
TWO = NODE + '[[nodes]]\nname = "beta"\n'  # then line 7
MODEL = OK + '[[models]]\nname = "m"\npath = "m.gguf"\n'  # then line 6
RING = TWO + '[[models]]\nname = "m"\npath = "m.gguf"\n'  # then line 10


def parse(text: str | bytes) -> Config:
    data = text.encode() if isinstance(text, str) else text
    return parse_config(data, file="box.toml", folder="/etc/box")


def mistakes(text: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.exit_code == 2
    assert caught.value.__cause__ is None  # it would carry the text of the file
    assert caught.value.__context__ is None
    return [str(problem) for problem in caught.value.problems]


# (id, file, how each message must begin after "box.toml", and what it must also hold)
Case = tuple[str, "str | bytes", list[tuple[str, str]]]


def one(name: str, text: str | bytes, start: str, also: str = "") -> Case:
    return name, text, [(start, also)]


TYPES: list[Case] = [
    one("table-is-string", OK + "ports = 5\n", ":3: cluster.ports: unknown key"),
    one("table-is-number", "ports = 5\n" + OK, ":1: ports: must be a table, got 5"),
    one("table-is-array", OK + "[[api]]\n", ":3: api: must be a table, got a list"),
    one("array-is-table", OK + '[nodes]\nname = "a"\n', ":3: nodes: must be a list of tables, [[nodes]]"),
    one("string-is-int", OK + "name = 7\n", ":3: cluster.name: must be 1-63 letters", "got 7"),
    one("int-is-string", OK + '[ports]\nmesh = "7311"\n', ":4: ports.mesh: must be a whole number", "'7311'"),
    one("int-is-bool", OK + "[ports]\nmesh = true\n", ":4: ports.mesh: must be a whole number", "got true"),
    one("int-is-float", MODEL + "slots = 1.5\n", ":6: models[0].slots: must be a whole", "got 1.5"),
    one("int-is-huge", MODEL + "slots = 0x" + "f" * 9000, ":6: models[0].slots: must be 1-64", "got a number"),
    one("bool-is-int", MODEL + "autostart = 1\n", ":6: models[0].autostart: must be true or false, got 1"),
    one("list-is-string", OK + 'interfaces = "eth0"\n', ":3: cluster.interfaces: must be a list, got 'eth0'"),
    one("list-item", OK + '[engine]\nargs = ["-v", 3]\n', ":4: engine.args[1]: must be one line", "got a number"),
    one("float-is-bool", OK + "form_wait_s = true\n", ":3: cluster.form_wait_s: must be a number 0-", "got true"),
    one("size-is-list", NODE + "memory = [1]\n", ':5: nodes[0].memory: must be "auto", 0 or a size', "a list"),
    one("map-is-list", OK + "[engine]\nenv = []\n", ":4: engine.env: must be a table, got a list"),
    one("env-value", OK + "[engine.env]\nA = 12345\n", ":4: engine.env.A: must be one line", "got a number"),
    one("env-name", OK + '[engine.env]\n"A=B" = "c"\n', ":3: engine.env.A=B: must be a variable's name"),
    one("path-is-int", OK + "[engine]\npath = 1\n", ":4: engine.path: must be a folder or a list", "got 1"),
    one("layers-item", RING + 'layers = {alpha = "4"}\n', ":10: models[0].layers.alpha: must be a whole"),
]

KEYS: list[Case] = [
    one("key", OK + "[ports]\ndate = 9000\n", ":4: ports.date: unknown key", 'did you mean "data"?'),
    one("key-far", OK + "[api]\nzzz = 1\n", ":4: api.zzz: unknown key", "valid: bind, keys_file"),
    one("key-in-node", TWO + 'adress = "a"\n', ":7: nodes[1].adress: unknown", '"address"'),
    one("key-inline", NODE + "ports = {mesh = 1, dat = 9000}\n", ":5: nodes[0].ports.dat: unknown key", '"data"'),
    one("table", OK + "[portz]\nmesh = 1\n", ":3: portz: unknown key", 'did you mean "ports"?'),
    one("table-of-secret", '[clutser]\nsecret_file = "s"\n', ":1: clutser: unknown key", '"cluster"'),
    one("secret-misspelt", f'[cluster]\nsecrt = "{SECRET}"\n', ":2: cluster.secrt: unknown key", '"secret"'),
    one("missing-name", OK + '[[nodes]]\naddress = "10.0.0.1"\n', ":3: nodes[0].name: missing"),
    one("missing-path", OK + '[[models]]\nname = "m"\n', ":3: models[0].path: missing"),
    one("kind-of-node", NODE + '[nodes.engine]\nkind = "x"\n', ":6: nodes[0].engine.kind: unknown", "valid: path, lib"),
]

VALUES: list[Case] = [
    one("discovery", OK + 'discovery = "mDNS"\n', ':3: cluster.discovery: must be "mdns" or "static"', "'mDNS'"),
    one("kind", OK + '[engine]\nkind = "rehersal"\n', ":4: engine.kind: must be", '"prima" or "rehearsal"'),
    one("isolate", OK + '[engine]\nisolate = "sometimes"\n', ":4: engine.isolate: must be", "got 'sometimes'"),
    one("port-low", OK + "[ports]\ndata = 80\n", ":4: ports.data: must be 1024-65471, got 80", "leave it out"),
    one("port-high", OK + "[ports]\nsignal = 65472\n", ":4: ports.signal: must be 1024-65471, got 65472"),
    one("wait-nan", OK + "form_wait_s = nan\n", ":3: cluster.form_wait_s: must be 0-86400", "a number"),
    one("wait-inf", OK + "form_wait_s = inf\n", ":3: cluster.form_wait_s: must be 0-86400", "a number"),
    one("size-empty", NODE + 'memory = ""\n', ':5: nodes[0].memory: must be "auto", 0 or a size'),
    one("size-float", NODE + "memory = 1.5\n", ':5: nodes[0].memory: must be "auto", 0 or a size', "got 1.5"),
    one("size-no-unit", NODE + "memory = 20\n", ':5: nodes[0].memory: must be "auto", 0 or a', "got 20"),
    one("node-name-huge", OK + "[[nodes]]\nname = 0x" + "f" * 9000, ":4: nodes[0].name: must be 1-63", "got a number"),
    one("shape", MODEL + "rehearse = {layers=1, width=1, bytes=0}\n", ":6: models[0].rehearse.bytes: must be a size"),
    one("slots-zero", MODEL + "slots = 0\n", ":6: models[0].slots: must be 1-64, got 0"),
    one("context-zero", MODEL + "context = 0\n", ":6: models[0].context: must be 64-16777216, got 0"),
    one("threads", OK + "[engine]\nthreads = -1\n", ":4: engine.threads: must be 0-1024, got -1"),
    one("path-empty", OK + '[engine]\npath = ""\n', ":4: engine.path[0]: must be a path, got ''"),
    one("path-nul", MODEL.replace("m.gguf", "m\\u0000"), ":5: models[0].path: must be", "got a string"),
    one("model-path-empty", MODEL.replace("m.gguf", ""), ":5: models[0].path: must be a path"),
    one("path-long", MODEL.replace("m.gguf", "x" * 5000), ":5: models[0].path: must be a path", "..."),
    one("node-name", OK + '[[nodes]]\nname = "a b"\n', ":4: nodes[0].name: must be 1-63", "got 'a b'"),
    one("node-name-dots", OK + '[[nodes]]\nname = ".."\n', ":4: nodes[0].name: must be 1-63", "got '..'"),
    one("cluster-name", OK + 'name = "../etc"\n', ":3: cluster.name: must be 1-63", "got '../etc'"),
    one("model-name", MODEL.replace('"m"', '"a b"'), ":4: models[0].name: must be 1-128", "got 'a b'"),
    one("model-name-dots", MODEL.replace('"m"', '"a/../b"'), ":4: models[0].name: must be 1-128"),
    one("alias", MODEL + 'aliases = ["ok", "no!"]\n', ":6: models[0].aliases[1]: must be 1-128", "'no!'"),
    one("address", NODE + 'address = "not a host"\n', ":5: nodes[0].address: must be an IPv4 address"),
    one("address-300", NODE + 'address = "10.0.0.300"\n', ":5: nodes[0].address: must", "10.0.0.300"),
    one("address-ipv6", NODE + 'address = "fe80::1"\n', ":5: nodes[0].address: must", "without a port"),
    one("address-port", NODE + 'address = "10.0.0.1:80"\n', ":5: nodes[0].address: must", "without a port"),
    one("bind", OK + '[api]\nbind = ""\n', ":4: api.bind: must be an IPv4 address or a host name", "got ''"),
    one("cidr", OK + 'interfaces = ["eth0", "10.0.0.0/33"]\n', ":3: cluster.interfaces[1]: must be an interface"),
    one("encryption", OK + 'encryption = "no"\n', ':3: cluster.encryption: must be "on" or "off"', "got 'no'"),
    one("key", NODE + 'key = "short"\n', ":5: nodes[0].key: must be the 43 characters that", "got 'short'"),
    one("old-secret-file", OK + f'old_secret_file = ["{SECRET}"]\n', ":3: cluster.old_secret_file: must be one line"),
    one("secret-short", '[cluster]\nsecret = "hunter2"\n', ":2: cluster.secret: must be 20 characters or more"),
    one("secret-number", "[cluster]\nsecret = 8675309\n", ":2: cluster.secret: must be 20 char", "got a number"),
]

OWN_FLAGS = """--world --rank --master --next --data-port --signal-port -m --model --host --port -lw --n-layer-window
    -c --ctx-size -np --parallel -t --threads --embedding"""
FLAGS = [
    one(f"flag{flag}", OK + f'[engine]\nargs = ["-v", "{flag}", "{SECRET}"]\n', f":4: engine.args[1]: {flag} is set")
    for flag in OWN_FLAGS.split()
] + [
    one("flag-equals", OK + f'[engine]\nargs = ["--model={SECRET}"]\n', ":4: engine.args[0]: --model is set"),
    one("flag-underscore", OK + '[engine]\nargs = ["--ctx_size"]\n', ":4: engine.args[0]: --ctx-size is set"),
]

TOGETHER: list[Case] = [
    one("secret-both", OK + f'secret = "{SECRET}"\n', ":3: cluster.secret: given beside secret_file"),
    one("secret-neither", "[ports]\nmesh = 1\n", ": cluster.secret_file: missing", "shardbox secret"),
    one("secret-empty", '[cluster]\nsecret = ""\n', ":1: cluster.secret_file: missing"),
    one("static", OK + 'discovery = "static"\n', ':3: cluster.discovery: "static" needs [[nodes]]'),
    one("static-address", '[cluster]\ndiscovery = "static"' + NODE[9:], ":4: nodes[0].address: missing"),
    one("node-twice", NODE + '[[nodes]]\nname = "alpha"\n', ':6: nodes[1].name: "alpha" is taken by'),
    one("model-twice", MODEL + '[[models]]\nname = "m"\npath = "x"\n', ':7: models[1].name: "m" is taken by'),
    one("alias", MODEL + MODEL[len(OK) :].replace('"m"', '"x"') + 'aliases = ["m"]\n', ':9: models[1].aliases: "m" is'),
    one("mesh-api", OK + "[ports]\nmesh = 8080\n", ":4: ports.mesh: 8080 meets api, 8080"),
    one("data-signal", OK + "[ports]\nsignal = 9063\n", ":4: ports.signal: 9063-9126 meets data, 9000-9063"),
    one(
        "past-end", MODEL + '[[models]]\nname="n"\npath="n"\n[ports]\ndata=65450\n', ":10: ports.data: takes", "-65577"
    ),
    one("ports-of-node", TWO + "[nodes.ports]\ndata = 10001\n", ":8: nodes[1].ports.data: 10001-10064 meets signal"),
    one("unknown", RING + 'nodes = ["alpha", "betta"]\n', ':10: models[0].nodes: "betta" is not', 'mean "beta"?'),
    one("leader-unknown", RING + 'leader = "gamma"\n', ':10: models[0].leader: "gamma" is not in [[nodes]]'),
    one("not-held", RING + 'nodes = ["alpha"]\nleader = "beta"\n', ':11: models[0].leader: "beta" is not in nodes of'),
    one("no-layer", RING + 'layers = {alpha = 1}\nleader = "beta"\n', ':11: models[0].leader: "beta" is not in layers'),
    one("layers-unknown", RING + "layers = {gamma = 1}\n", ':10: models[0].layers: "gamma" is not in [[n'),
    one("layers-zero", RING + "[models.layers]\nalpha = 0\n", ":11: models[0].layers.alpha: must be 1-4096"),
    one("layers-twice", RING + "layers = {alpha = 1, Alpha = 2}\n", ":10: models[0].layers: a name is given twice"),
    one(
        "layers-33",
        MODEL + "layers = {" + ", ".join(f"n{n} = 1" for n in range(33)) + "}\n",
        ":6: models[0].layers: 33 nodes; a ring has at most 32",
    ),
    (
        "secret-at-top",
        f'secret = "{SECRET}"\n',
        [(": cluster.secret_file: missing", ""), (":1: secret: unknown key", "valid: cluster")],
    ),
    (
        "all-at-once",
        "[cluster]\nname = 1\n[ports]\nmesh = 8080\n[[nodes]]\nname = 'a'\nmemory = 'x'\nzz = 1\n",
        [
            (":1: cluster.secret_file: missing", ""),
            (":2: cluster.name: must", ""),
            (":4: ports.mesh: 8080 meets", ""),
            (":7: nodes[0].memory: must", ""),
            (":8: nodes[0].zz: unknown key", ""),
        ],
    ),
    (
        "no-cascade",
        OK + "[ports]\nmesh = 8080\napi = 'x'\n[[nodes]]\nname = '!'\n[[models]]\nname='m'\npath='m'\nnodes=['b']\n",
        [(":5: ports.api: must", ""), (":7: nodes[0].name: must", "")],
    ),
]

FILES: list[Case] = [
    one("empty", "", ": cluster.secret_file: missing", "shardbox secret"),
    one("only-comment", "# hello\n", ": cluster.secret_file: missing"),
    one("not-utf8", OK.encode() + b'name = "\xff"\n', ":3: not UTF-8 text (byte 0xff)"),
    one("utf16", OK.encode("utf-16"), ":1: not UTF-8 text"),
    one("nul", OK + 'name = "a\0b"\n', ":3:10: not TOML:"),
    one("binary", b"\x7fELF\x02\x01\x01\x00", ":1:1: not TOML:"),
    one("10-MB", b"#" * 10_000_000, ": is 9.54 MiB; a configuration has at most 1 MiB"),
    one("syntax", OK + "name == 1\n", ":3:7: not TOML: Invalid value"),
    one("open-string", OK + f'secret = "{SECRET}\n', ":3:"),
    one("bare-secret", OK + f"secret = {SECRET}\n", ":3:"),
    one("table-twice", OK + "[ports]\n[ports]\n", ":4:7: not TOML: Cannot declare"),
    one("key-twice", OK + 'secret_file = "t"\n', ":3:18: not TOML: Cannot overwrite"),
    one("deep", "a = " + "[" * 50_000, ": not a configuration: nested too deeply"),
    one("deep-key", "a" + ".a" * 50_000 + " = 1", ": not a configuration: nested too deeply"),
    one("long-number", "a = " + "9" * 5000, ": not a configuration: nested too deeply, or a number"),
]

CASES = TYPES + KEYS + VALUES + FLAGS + TOGETHER + FILES


@pytest.mark.parametrize(("text", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_mistake_is_named_once_at_its_place(text: str | bytes, wanted: list[tuple[str, str]]) -> None:
    found = mistakes(text)
    assert len(found) == len(wanted), found
    for message, (start, also) in zip(found, wanted, strict=True):
        assert message.startswith(f"box.toml{start}"), message
        assert also in message
        assert "hunter2" not in message and "8675309" not in message and "12345" not in message
        assert max(map(len, message.splitlines())) < 300
        assert message.replace("\nhint: ", "").isprintable()


def keys_of(table: str) -> set[str]:
    """The keys that the parser says are valid there."""
    hints = [message.partition("hint: valid: ")[2] for message in mistakes(f"{table}\n'' = 1\n")]
    return set("".join(hints).split(", "))


KEYS_OF = {
    "[cluster]": ClusterConfig, "[ports]": PortsConfig, "[api]": ApiConfig, "[engine]": EngineConfig,
    "[[nodes]]": NodeConfig, "[[models]]": ModelConfig, "[[models]]\n[models.rehearse]": RehearseConfig,
}  # fmt: skip


@pytest.mark.parametrize("table", KEYS_OF)
def test_every_key_has_a_field_and_every_field_a_key(table: str) -> None:
    fields = {field.name.replace("memory_bytes", "memory") for field in dataclasses.fields(KEYS_OF[table])}
    assert keys_of(table) == fields


def test_example_equals_the_defaults() -> None:
    config = parse(EXAMPLE)
    assert config.cluster == ClusterConfig(secret_file="cluster.secret")
    assert (config.ports, config.api, config.engine) == (PortsConfig(), ApiConfig(), EngineConfig())
    assert config.nodes == ()
    assert config.models == (ModelConfig(name="qwq-32b", path="models/qwq-32b-q4_k_m.gguf"),)
    assert (config.file, config.folder) == ("box.toml", "/etc/box")


def test_example_shows_every_key_and_its_samples_parse() -> None:
    parse(UNCOMMENTED)
    said = tomllib.loads(UNCOMMENTED)
    node, model = said["nodes"][0], said["models"][0]
    assert set(said["cluster"]) | {"secret"} == keys_of("[cluster]")
    assert "# secret = " in EXAMPLE
    shown = {name: said[name] for name in ("ports", "api", "engine")} | {
        "[nodes]": node, "nodes.ports": node["ports"], "nodes.engine": node["engine"],
        "[models]": model, "models.rehearse": model["rehearse"],
    }  # fmt: skip
    for name, table in shown.items():
        around = f"[[{name.split('.')[0]}]]\n" if "." in name else ""
        assert set(table) == keys_of(f"{around}[{name}]"), name


def test_node_engine_and_ports_are_merged_over_the_cluster() -> None:
    config = parse(
        OK + '[engine]\nkind = "rehearsal"\nargs = ["-v"]\nenv = {A = "1", B = "2"}\n[ports]\nmesh = 7000\n'
        '[[nodes]]\nname = "Beta"\nmemory = "20GiB"\ngpu_memory = 0\nmodel_dirs = ["/mnt"]\n'
        '[nodes.engine]\npath = ["x", "y"]\nargs = ["-q"]\nenv = {B = "3"}\nthreads = 4\n'
        "[nodes.ports]\ndata = 9500\n"
        '[[nodes]]\nname = "alpha"\nmemory = "auto"\n'
    )
    beta, alpha = config.nodes
    assert beta == NodeConfig(
        name="beta", memory_bytes=20 << 30, gpu_memory_bytes=0, model_dirs=("/mnt",),
        ports=PortsConfig(mesh=7000, data=9500),
        engine=EngineConfig(
            kind="rehearsal", path=("x", "y"), args=("-q",), env={"A": "1", "B": "3"}, threads=4,
        ),
    )  # fmt: skip
    assert alpha == NodeConfig(name="alpha", engine=config.engine, ports=config.ports)
    assert config.engine.env == {"A": "1", "B": "2"}


def test_hash_does_not_depend_on_the_old_secret() -> None:
    """The boxes change one after the other, and none is out meanwhile."""
    assert parse(OK + 'old_secret_file = "s2"\n').hash == parse(OK).hash
    assert parse(OK + 'encryption = "off"\n').hash != parse(OK).hash


def test_model_values_arrive() -> None:
    config = parse(
        RING.replace('"m"', '"org/m:q4"') + 'aliases = ["q"]\ncontext = 8192\nslots = 4\nmax_output = 10\n'
        'nodes = ["ALPHA", "beta"]\nleader = "Beta"\nlayers = {Alpha = 40, beta = 24}\nautostart = false\n'
        'embeddings = true\nrehearse = {layers = 64, width = 5120, bytes = "20GiB"}\n'
    )
    assert config.models == (
        ModelConfig(
            name="org/m:q4", path="m.gguf", aliases=("q",), context=8192, slots=4, max_output=10,
            nodes=("alpha", "beta"), leader="beta", layers={"alpha": 40, "beta": 24}, autostart=False,
            embeddings=True, rehearse=RehearseConfig(layers=64, width=5120, bytes=20 << 30),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("address", ["192.168.1.20", "127.0.0.2", "alpha", "alpha.lan", "a-1.b_c.example", "3com"])
def test_address_of_ipv4_or_host_name_is_accepted(address: str) -> None:
    assert parse(NODE + f'address = "{address}"\n').nodes[0].address == address


def test_undeclared_node_names_are_accepted_without_nodes() -> None:
    assert parse(MODEL + 'leader = "x"\nnodes = ["x", "y"]\nlayers = {x = 1, y = 2}\n').models[0].leader == "x"


def test_ports_that_every_node_replaces_do_not_matter() -> None:
    text = OK + '[ports]\nmesh = 8080\n[[nodes]]\nname = "a"\nports = {mesh = 7000}\n'
    assert parse(text).nodes[0].ports.mesh == 7000


def test_blocks_that_touch_are_accepted() -> None:
    assert parse(OK + "[ports]\ndata = 9000\nsignal = 9064\nmesh = 8999\napi = 9128\n").ports.signal == 9064
    assert parse(OK + "[ports]\ndata = 65471\n").ports.data == 65471


def test_byte_order_mark_and_windows_line_ends_are_accepted() -> None:
    assert parse(b"\xef\xbb\xbf" + OK.replace("\n", "\r\n").encode()).cluster.secret_file == "s"
    assert mistakes((OK + "[api]\nx = 1\n").replace("\n", "\r\n"))[0].startswith("box.toml:4: api.x: ")


def test_interfaces_are_names_or_networks() -> None:
    assert parse(OK + 'interfaces = ["eth0.5", "192.168.1.7/24"]\n').cluster.interfaces == ("eth0.5", "192.168.1.0/24")


def test_file_of_one_mib_is_read_and_one_byte_more_is_not() -> None:
    text = OK.ljust(MAX_CONFIG_BYTES, "\n")
    assert parse(text).cluster.secret_file == "s"
    assert mistakes(text + "\n") == ["box.toml: is 1 MiB; a configuration has at most 1 MiB"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('x = """\n[ports]\nmesh = 1\n"""\n[ports]\nmesh = 0\n', 6),
        ("x = '''\n[ports]''''\n[ports]\nmesh = 0\n", 4),
        ("# [ports]\n  [ ports ]  # ]\n  mesh=0 # x\n", 3),
        ("[engine]\nargs = [ # [\n '#',\n \"]\",\n]\n[ports]\nmesh = 0\n", 7),
        ("ports.api = 1\nports.mesh = 0\n", 2),
        ("ports = {api = 1, mesh = 0}\n", 1),
    ],
)
def test_line_is_found_among_strings_comments_and_brackets(text: str, line: int) -> None:
    assert any(problem.startswith(f"box.toml:{line}: ports.mesh: must be") for problem in mistakes(text))


def test_secret_is_nowhere_in_the_error_or_the_repr() -> None:
    text = f'[cluster]\nsecret = "{SECRET}"\n'
    assert SECRET not in repr(parse(text))
    with pytest.raises(ConfigError) as caught:
        parse(text + "[")
    seen: list[Any] = [caught.value, caught.value.args, vars(caught.value), caught.value.__context__]
    assert "hunter2" not in "".join(map(repr, seen))


def many(unit: str) -> str:
    return "".join(unit.format(n) for n in range(150_000 // len(unit)))


@pytest.mark.parametrize(
    "text",
    [
        OK + many("a{}=1\n"),
        OK + many("[[nodes]]\nname='a'\n"),
        OK + "[engine]\nargs=[" + many("1,") + "]\n",
        OK + many("[[nodes]]\nname='a{}'\n") + MODEL[len(OK) :] + "nodes=[" + many("'b{}',") + "]\n",
    ],
    ids=["keys", "nodes", "items", "names"],
)
@pytest.mark.timeout(30)
def test_file_of_nothing_but_mistakes_tells_fifty_and_counts_the_others(text: str) -> None:
    *told, rest = mistakes(text)
    assert len(told) == MAX_PROBLEMS
    assert re.fullmatch(r"box\.toml: and \d{4,} more problems", rest)


def quietly(data: bytes) -> list[str]:
    """The problems of a file, none for a good one. Anything but ConfigError is a failure of the test."""
    try:
        parse(data)
    except ConfigError as error:
        assert error.problems
        return [str(problem) for problem in error.problems]
    return []


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_but_config_error(data: bytes) -> None:
    quietly(data)


PIECES = st.sampled_from(
    ["", "\n", '"', "'", '"""', "[", "]", "{", "}", "=", "#", ".", ",", "\\", "-", "0", "1e999", "nan", "true",
     "\0", "[[nodes]]\n", "[[models]]\n", "[ports]\n", "name = 1\n", "\r", "é"]
) | st.text(max_size=4)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mutated_example_raises_nothing_but_config_error_and_keeps_the_secret(data: st.DataObject) -> None:
    text = UNCOMMENTED.replace('secret_file = "cluster.secret"', f'secret = "{SECRET}"')
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        text = text[:start] + data.draw(PIECES) + text[start + data.draw(st.integers(0, 12)) :]
    assert "horse" not in "".join(quietly(text.encode("utf-8", "surrogateescape")))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(["a", "auto"])


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(char):08x}" for char in value) + '"'
    return str(value).lower() if isinstance(value, bool) else "1979-05-27" if value is None else repr(value)


VALUES_OF_ANY_KIND = st.recursive(
    SCALARS.filter(lambda value: not isinstance(value, str) or value.isascii()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "name", "mesh"]), inner, max_size=2)
    ),
    max_leaves=3,
)
EVERY_KEY = [(table.strip("[]"), key) for table in list(KEYS_OF)[:6] for key in sorted(keys_of(table))]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(EVERY_KEY), VALUES_OF_ANY_KIND, max_size=6))
def test_any_value_under_any_key_raises_nothing_but_config_error(values: dict[tuple[str, str], Any]) -> None:
    document: dict[str, Any] = {}
    for (table, key), value in values.items():
        document.setdefault(table, {})[key] = value
    for table in {"nodes", "models"} & set(document):
        document[table] = [document[table]] * 2
    quietly("\n".join(f"{table} = {as_toml(body)}" for table, body in document.items()).encode())


# --- a changed file, while the node runs ---

RUNNING = """
[cluster]
name = "attic"
secret_file = "s"
[[nodes]]
name = "alpha"
[nodes.ports]
mesh = 7400
[[nodes]]
name = "beta"
[[models]]
name = "m"
path = "m.gguf"
"""


def test_reload_of_the_same_file_changes_nothing() -> None:
    assert reloaded(parse(RUNNING), parse(RUNNING), "alpha") == (parse(RUNNING), ())


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        ('name = "attic"', 'name = "cellar"', ("cluster.name",)),
        ('secret_file = "s"', 'secret_file = "t"', ("cluster.secret_file",)),
        ('secret_file = "s"', f'secret = "{SECRET}"', ("cluster.secret", "cluster.secret_file")),
        ("[[nodes]]", '[engine]\nkind = "rehearsal"\n[[nodes]]', ("engine.kind",)),
        ("mesh = 7400", "mesh = 7401", ("ports",)),
        ('name = "beta"', f'name = "beta"\nkey = "{"k" * 43}"', ("nodes.key",)),
    ],
)
def test_reload_leaves_what_needs_a_restart(old: str, new: str, left: tuple[str, ...]) -> None:
    config, named = reloaded(parse(RUNNING), parse(RUNNING.replace(old, new, 1)), "alpha")
    assert named == left
    before = parse(RUNNING)
    assert (config.cluster, config.engine.kind, config.node("alpha").ports) == (
        before.cluster,
        before.engine.kind,
        before.node("alpha").ports,
    )
    assert SECRET not in str(named)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('path = "m.gguf"', 'path = "m.gguf"\ncontext = 8192\naliases = ["n"]'),
        ('name = "m"', 'name = "other"'),
        ('name = "beta"', 'name = "beta"\nmemory = "8GiB"\naddress = "10.0.0.2"'),
        ("[[nodes]]", '[api]\nkeys_file = "k"\nhold_s = 5\n[engine]\nstall_min_s = 7\n[[nodes]]'),
        ('secret_file = "s"', 'secret_file = "s"\nform_wait_s = 5\nreplan_s = 0'),
    ],
)
def test_reload_takes_what_needs_no_restart(old: str, new: str) -> None:
    changed = parse(RUNNING.replace(old, new, 1))
    assert changed != parse(RUNNING)
    assert reloaded(parse(RUNNING), changed, "alpha") == (changed, ())


def test_reload_on_two_boxes_ends_with_one_fingerprint() -> None:
    changed = parse(RUNNING.replace('name = "attic"', 'name = "cellar"').replace('name = "m"', 'name = "n"'))
    hashes = {reloaded(parse(RUNNING), changed, name)[0].hash for name in ("alpha", "beta")}
    assert len(hashes) == 1 and hashes != {changed.hash}


def test_ports_of_engines_that_are_closed_in_need_one_block() -> None:
    """Fifty models: their engines have ports of their own, so that nothing of ours is met."""
    many = "".join(f'[[models]]\nname = "m{n}"\npath = "m{n}.gguf"\n' for n in range(50))
    secret = '[cluster]\nsecret = "0123456789abcdefghij0123"\n'
    with pytest.raises(ConfigError, match="9000-12199"):
        parse(secret + many)
    assert len(parse(secret + '[engine]\nisolate = "always"\n' + many).models) == 50
    with pytest.raises(ConfigError, match="meets"):
        parse(secret + '[engine]\nisolate = "always"\n[ports]\nsignal = 9001\n' + many)
