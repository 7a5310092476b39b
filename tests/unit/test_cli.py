"""The command line: exit codes, messages with a remedy, and that a secret is never shown."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from hosts import shardbox_command
from samples import NODES, box, config, copy_of, shape

import shardbox
from shardbox import (
    ROLE_BINARIES,
    BinaryFacts,
    ClusterConfig,
    NodeConfig,
    UsageError,
    has_ended,
    node_name,
    one_node_only,
)

SECRET = "hunter2-correct-horse-battery"
PROGRAM = shardbox_command()
CONFIG_COMMANDS = (
    *("up", "down", "status", "plan", "nodes", "logs", "start", "stop", "pull", "models", "verify", "pack", "check"),
)
COMMANDS = (*CONFIG_COMMANDS, "unpack", "demo", "secret", "version")
BODY = '[engine]\nkind = "rehearsal"\n[[nodes]]\nname = "alpha"\n[[models]]\nname = "m"\npath = "m.gguf"\n'
BODY += 'rehearse = {layers = 4, width = 128, bytes = "64MiB"}\n'


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with no configuration to be found, and state of its own."""
    for name in [name for name in os.environ if name.startswith("SHARDBOX")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SHARDBOX_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def toml(tmp_path: Path) -> str:
    """A good configuration of a cluster that nobody else has."""
    path = tmp_path / "box.toml"
    path.write_text(f'[cluster]\nname = "t{uuid.uuid4().hex[:12]}"\nsecret = "{SECRET}"\n{BODY}', encoding="utf-8")
    return str(path)


class Said:
    """What a command answered."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        self.all = out + err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command in this process."""

    def run(*args: str) -> Said:
        capsys.readouterr()
        code = shardbox.main(list(args))
        said = Said(code, *capsys.readouterr())
        assert "Traceback" not in said.all
        assert SECRET not in said.all
        return said

    return run


def spawn(*args: str, stdout: int = subprocess.PIPE, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a person would."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [*PROGRAM, *args],
        stdout=stdout,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=60,
        check=False,
        env={**clean, **env},
    )


# --- usage ---


@pytest.mark.parametrize(
    "args",
    [
        ["frobnicate"],
        ["--frobnicate"],
        ["up", "--frobnicate"],
        ["plan", "--facts"],
        ["plan", "surplus"],
        ["start"],
        ["stop", "a", "b"],
        ["logs", "-n", "many"],
        ["logs", "-n", "0"],
        ["demo", "--nodes", "99"],
        ["secret", "surplus"],
        ["version", "--json"],
        [],
    ],
    ids=" ".join,
)
def test_usage_bad_is_code_2(run: Any, args: list[str]) -> None:
    said = run(*args)
    assert said.code == 2
    assert said.err
    assert said.out == ""


@pytest.mark.parametrize("args", [["--frobnicate"], ["surplus"], ["--timeout", "soon"]], ids=" ".join)
def test_usage_bad_of_status_is_unknown(run: Any, args: list[str]) -> None:
    assert run("status", *args).code == 3


def test_usage_bad_of_status_prints_a_line_for_the_monitoring(run: Any) -> None:
    assert run("status", "--frobnicate").out.startswith("SHARDBOX UNKNOWN - ")


@pytest.mark.parametrize("seconds", ["-1", "0", "1e30", "inf", "nan"])
def test_status_with_a_timeout_that_cannot_be_is_unknown(run: Any, toml: str, seconds: str) -> None:
    """Exit code 1 of a traceback would read as WARNING."""
    assert run("status", "--config", toml, "--node", "alpha", "--timeout", seconds).code == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(run: Any, command: str) -> None:
    said = run(command, "--help")
    assert said.code == 0
    assert re.search(r"(?m)^ *Example: .*shardbox " + command, said.out)
    assert run(command, "-h").out == said.out


def test_help_lists_every_command(run: Any) -> None:
    said = run("--help")
    assert said.code == 0
    listed = re.findall(r"(?m)^  ([a-z]+)  ", said.out.partition("Commands:")[2])
    assert sorted(listed) == sorted(COMMANDS)


def test_version_prints_it(run: Any) -> None:
    said = run("version")
    assert (said.code, said.out) == (0, f"shardbox {shardbox.VERSION}\n")


def test_secret_is_long_and_new_each_time(run: Any) -> None:
    first, second = run("secret"), run("secret")
    assert first.code == second.code == 0
    for said in (first, second):
        assert re.fullmatch(r"[A-Za-z0-9_-]{40,}\n", said.out)
        assert said.err == ""
    assert first.out != second.out


@pytest.mark.parametrize("tail", ["", "\n"])
def test_secret_goes_into_a_file_that_is_accepted(run: Any, tmp_path: Path, tail: str) -> None:
    (tmp_path / "cluster.secret").write_text(run("secret").out.strip() + tail, encoding="utf-8")
    (tmp_path / "s.toml").write_text('[cluster]\nsecret_file = "cluster.secret"\n', encoding="utf-8")
    secret = shardbox.read_secret(shardbox.load_config("s.toml"))
    assert len(secret) >= 40
    assert secret == secret.strip()


def test_rehearse_tells_its_version(run: Any) -> None:
    said = run("rehearse", "--version")
    assert (said.code, said.out) == (0, "version: rehearsal (shardbox)\n")


def test_rehearse_without_arguments_is_bad_usage(run: Any) -> None:
    assert run("rehearse").code in (1, 2)


# --- no configuration, or none that can be read ---


@pytest.mark.parametrize("command", [c for c in CONFIG_COMMANDS if c != "status"])
def test_no_configuration_is_one_message_and_a_hint(run: Any, command: str) -> None:
    said = run(command, *(["m"] if command in ("start", "stop", "verify", "pack") else []))
    assert said.code == 2
    assert said.out == ""
    message, hint = said.err.splitlines()
    assert message.endswith("no configuration found")
    assert "shardbox.toml" in message
    assert hint.startswith("hint: give it with --config FILE")


def test_no_configuration_status_is_unknown(run: Any) -> None:
    said = run("status")
    assert said.code == 3
    assert re.match(r"SHARDBOX UNKNOWN - .*no configuration found\nhint: ", said.out)


def test_no_configuration_status_as_json_is_unknown(run: Any) -> None:
    said = run("status", "--json")
    data = json.loads(said.out)
    assert (said.code, data["code"], data["status"]) == (3, 3, "UNKNOWN")


def test_configuration_from_the_environment_is_named_when_missing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDBOX_CONFIG", "/nowhere/x.toml")
    said = run("plan")
    assert said.code == 2
    assert said.err.startswith("/nowhere/x.toml: cannot be read: No such file")


def test_configuration_that_is_a_folder_is_named(run: Any, tmp_path: Path) -> None:
    said = run("plan", "--config", str(tmp_path))
    assert said.code == 2
    assert said.err.startswith(f"{tmp_path}: cannot be read: Is a directory")
    assert run("status", "--config", str(tmp_path)).code == 3


GOOD = '[cluster]\nsecret = "x123456789012345678901"\n'
MODEL = GOOD + '[[models]]\nname = "m"\npath = "m.gguf"\n'
BROKEN: dict[str, str | bytes] = {
    "empty": "",
    "comment-only": "# nothing\n",
    "no-secret": '[cluster]\nname = "a"\n',
    "not-toml": "cluster {\n",
    "open-string": f'[cluster]\nsecret = "{SECRET}\n',
    "open-multiline": f'[cluster]\nsecret = """{SECRET}\n',
    "open-table": "[cluster\n",
    "twice-key": '[cluster]\nname = "a"\nname = "b"\n',
    "twice-table": "[cluster]\n[cluster]\n",
    "table-over-value": "cluster = 1\n[cluster]\n",
    "json": '{"cluster": {}}',
    "yaml": "cluster:\n  name: attic\n",
    "latin-1": b'[cluster]\nname = "caf\xe9"\n',
    "utf-16": GOOD.encode("utf-16"),
    "zeros": bytes(100),
    "binary": bytes(range(256)),
    "control": '[cluster]\nname = "a\x01b"\n',
    "too-long": b"# " + b"x" * (2 << 20),
    "deep": "a = " + "[" * 5000 + "]" * 5000,
    "many-digits": "[ports]\nmesh = " + "9" * 10000,
    "unknown-table": GOOD + "[clusters]\n",
    "unknown-key": GOOD + 'nmae = "x"\n',
    "secret-short": '[cluster]\nsecret = "short"\n',
    "secret-number": "[cluster]\nsecret = 12345678901234567890\n",
    "secret-list": f'[cluster]\nsecret = ["{SECRET}"]\n',
    "secret-misspelt": f'[cluster]\nsecrte = "{SECRET}"\n',
    "secret-at-top": f'secret = "{SECRET}"\n',
    "secret-twice": f'[cluster]\nsecret = "{SECRET}"\nsecret_file = "s"\n',
    "discovery": GOOD + 'discovery = "magic"\n',
    "static-without-nodes": GOOD + 'discovery = "static"\n',
    "static-without-address": GOOD + 'discovery = "static"\n[[nodes]]\nname = "a"\n',
    "interface": GOOD + 'interfaces = ["10.0.0.0/99"]\n',
    "wait-negative": GOOD + "form_wait_s = -1\n",
    "wait-nan": GOOD + "form_wait_s = nan\n",
    "port-zero": GOOD + "[ports]\nmesh = 0\n",
    "port-huge": GOOD + "[ports]\nmesh = 65536\n",
    "port-low": GOOD + "[ports]\ndata = 80\n",
    "port-string": GOOD + '[ports]\napi = "8080"\n',
    "ports-meet": GOOD + "[ports]\ndata = 9000\nsignal = 9001\n",
    "bind": GOOD + '[api]\nbind = "::1"\n',
    "engine-kind": GOOD + '[engine]\nkind = "vllm"\n',
    "engine-flag": GOOD + '[engine]\nargs = ["--world", "3"]\n',
    "engine-env": GOOD + f'[engine.env]\nHF_TOKEN = ["{SECRET}"]\n',
    "engine-path": GOOD + "[engine]\npath = [5]\n",
    "node-nameless": GOOD + "[[nodes]]\n",
    "node-twice": GOOD + '[[nodes]]\nname = "a"\n[[nodes]]\nname = "A"\n',
    "node-name": GOOD + '[[nodes]]\nname = "../etc"\n',
    "node-memory": GOOD + '[[nodes]]\nname = "a"\nmemory = "much"\n',
    "node-memory-small": GOOD + '[[nodes]]\nname = "a"\nmemory = 20\n',
    "nodes-table": GOOD + '[nodes]\nname = "a"\n',
    "model-pathless": GOOD + '[[models]]\nname = "m"\n',
    "model-twice": MODEL + '[[models]]\nname = "m"\npath = "n.gguf"\n',
    "model-context": MODEL + "context = 1\n",
    "model-slots": MODEL + "slots = 0\n",
    "model-layers": MODEL + "layers = {a = 0}\n",
    "model-autostart": MODEL + 'autostart = "yes"\n',
    "model-rehearse": MODEL + "rehearse = {layers = 3}\n",
    "model-name": GOOD + '[[models]]\nname = "../../etc/passwd"\npath = "m.gguf"\n',
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_configuration_is_code_2_and_names_the_file(run: Any, tmp_path: Path, case: str) -> None:
    assert len(BROKEN) >= 40
    text = BROKEN[case]
    path = tmp_path / "broken.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    said = run("plan", "--config", str(path), "--facts", str(NODES / "three-laptops.json"))
    assert said.code == 2
    assert said.out == ""
    for line in said.err.splitlines():
        assert line.startswith((f"{path}:", "hint: "))
        assert len(line) < 500
    assert "hunter2" not in said.all


@pytest.mark.parametrize("case", ["empty", "open-string", "secret-short", "port-zero", "deep"])
def test_broken_configuration_status_is_unknown(run: Any, tmp_path: Path, case: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(str(BROKEN[case]), encoding="utf-8")
    said = run("status", "--config", str(path))
    assert said.code == 3
    assert said.out.startswith(f"SHARDBOX UNKNOWN - {path}")


# --- the node is not up ---


def test_status_without_a_node_is_critical(run: Any, toml: str) -> None:
    said = run("status", "--config", toml, "--node", "alpha")
    assert said.code == 2
    assert said.out.startswith("SHARDBOX CRITICAL - node alpha is not running on this box\n")


def test_status_of_a_node_that_is_not_declared_is_unknown(run: Any, toml: str) -> None:
    said = run("status", "--config", toml, "--node", "omega")
    assert said.code == 3
    assert "no node 'omega' in [[nodes]]; there are: alpha" in said.out


def status_socket(toml: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(shardbox.status_address(shardbox.load_config(toml).cluster.name, "alpha"))
    sock.listen()
    return sock


def test_status_of_a_node_that_says_nothing_is_critical_in_time(run: Any, toml: str) -> None:
    with status_socket(toml):
        said = run("status", "--config", toml, "--node", "alpha", "--timeout", "0.2")
    assert said.code == 2
    assert "accepts but says nothing within 0.2 s" in said.out


@pytest.mark.parametrize(
    ("answer", "code"),
    [(b"", 2), (b"{", 2), (b"\xff\xfe", 2), (b"[]", 3), (b"{}", 3), (b'{"cluster": 5}', 3)],
    ids=repr,
)
def test_status_of_a_node_that_talks_nonsense_is_no_traceback(run: Any, toml: str, answer: bytes, code: int) -> None:
    with status_socket(toml) as sock:

        def serve() -> None:
            with sock.accept()[0] as client:
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        said = run("status", "--config", toml, "--node", "alpha", "--timeout", "5")
        thread.join(5)
    assert said.code == code
    assert said.out.startswith(f"SHARDBOX {shardbox.STATUS_WORDS[code]} - ")


def test_status_with_the_longest_names_still_finds_the_socket(run: Any, tmp_path: Path) -> None:
    cluster, node = "c" * 63, "n" * 63
    path = tmp_path / "long.toml"
    path.write_text(
        f'[cluster]\nname = "{cluster}"\nsecret = "{SECRET}"\n[[nodes]]\nname = "{node}"\n', encoding="utf-8"
    )
    said = run("status", "--config", str(path), "--node", node)
    assert "is not running on this box" in said.out


@pytest.mark.parametrize("args", [["nodes"], ["logs"], ["start", "m"], ["stop", "m"]], ids=" ".join)
def test_command_without_a_node_fails_with_a_hint(run: Any, toml: str, args: list[str]) -> None:
    said = run(*args, "--config", toml, "--node", "alpha")
    assert said.code == 1
    assert said.err == "node alpha is not running on this box\nhint: start it with `shardbox up`\n"


def test_down_without_a_node_is_done(run: Any, toml: str) -> None:
    said = run("down", "--config", toml, "--node", "alpha")
    assert (said.code, said.out) == (0, "node alpha is not running\n")


# --- plan ---


def facts_config(tmp_path: Path, model: str = "qwq-32b", context: int = 8192) -> str:
    path = tmp_path / "plan.toml"
    text = f'[cluster]\nsecret = "{SECRET}"\n[[models]]\nname = "{model}"\npath = "{model}.gguf"\ncontext = {context}\n'
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_plan_of_a_facts_file_prints_the_table(run: Any, tmp_path: Path) -> None:
    said = run("plan", "--config", facts_config(tmp_path), "--facts", str(NODES / "three-laptops.json"))
    assert said.code == 0
    assert said.out.startswith("model qwq-32b: 64 layers, context 8192, a ring of 2\n")
    assert "thinkpad" in said.out
    assert said.err == ""


def test_plan_of_a_facts_file_as_json_is_a_facts_file_again(run: Any, tmp_path: Path) -> None:
    config = facts_config(tmp_path)
    first = run("plan", "--config", config, "--json", "--facts", str(NODES / "three-laptops.json"))
    (tmp_path / "again.json").write_text(first.out, encoding="utf-8")
    again = run("plan", "--config", config, "--json", "--facts", "again.json")
    assert first.code == again.code == 0
    assert json.loads(again.out) == json.loads(first.out)
    assert [rank["node"] for rank in json.loads(first.out)["plans"]["qwq-32b"]["ranks"]] == ["thinkpad", "macbook"]


def test_plan_without_a_node_and_what_if_one_is_lost(run: Any, tmp_path: Path) -> None:
    args = ("plan", "--config", facts_config(tmp_path), "--facts", str(NODES / "three-laptops.json"))
    said = run(*args, "--what-if")
    assert said.code == 0
    lost = said.out[said.out.index("what if a node is lost") :].splitlines()
    assert [line.split()[0] for line in lost[2:]] == ["macbook", "thinkpad"]  # the netbook holds nothing
    assert all("not served" in line and "short by" in line for line in lost[2:])
    data = json.loads(run(*args, "--what-if", "--json").out)
    assert set(data["what_if"]) == {"macbook", "thinkpad"}
    assert "too big" in data["what_if"]["macbook"]["qwq-32b"]["error"]
    without = run(*args, "--without", "netbook")
    assert (without.code, "netbook" in without.out) == (0, False)
    assert run(*args, "--without", "netbook", "--without", "THINKPAD").code == 1
    wrong = run(*args, "--without", "netbok")
    assert (wrong.code, wrong.err) == (2, '--without: no node netbok is known\nhint: "netbook"?\n')


def test_plan_without_a_way_fails_and_says_why(run: Any, tmp_path: Path) -> None:
    config = facts_config(tmp_path, context=1 << 20)
    said = run("plan", "--config", config, "--facts", str(NODES / "three-laptops.json"))
    assert said.code == 1
    assert "model qwq-32b: no plan\n  too big for the nodes there are" in said.out
    assert "short by" in said.out
    assert "hint: " in said.out
    as_json = run("plan", "--config", config, "--json", "--facts", str(NODES / "three-laptops.json"))
    assert as_json.code == 1
    assert "short by" in json.loads(as_json.out)["plans"]["qwq-32b"]["error"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("\0", "is not JSON"),
        ("{}", 'has no list "facts"'),
        ("5", 'has no list "facts"'),
        ('{"facts": {}}', 'has no list "facts"'),
        ("[5]", "facts[0]: expected an object, got int"),
        ('[{"name": 5}]', "facts[0].name: expected str, got int"),
        ('{"facts": [{"name": "a"}]}', "facts[0].machine: missing"),
    ],
)
def test_plan_of_a_bad_facts_file_names_it(run: Any, tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "facts.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    said = run("plan", "--config", facts_config(tmp_path), "--facts", str(path))
    assert said.code in (1, 2)
    assert said.err.startswith(f"{path}: {words}")


def test_plan_of_a_facts_file_of_the_wrong_shape_is_bad_usage(run: Any, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text('[{"name": 5}]', encoding="utf-8")
    assert run("plan", "--config", facts_config(tmp_path), "--facts", "facts.json").code == 2


def test_plan_of_a_deep_facts_file_names_it(run: Any, tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text("[" * 100_000, encoding="utf-8")
    assert run("plan", "--config", facts_config(tmp_path), "--facts", "facts.json").code in (1, 2)


def test_plan_of_a_facts_file_with_one_name_twice_is_refused(run: Any, tmp_path: Path) -> None:
    data = json.loads((NODES / "three-laptops.json").read_text(encoding="utf-8"))
    data["facts"] = [data["facts"][0]] * 2
    (tmp_path / "facts.json").write_text(json.dumps(data), encoding="utf-8")
    assert run("plan", "--config", facts_config(tmp_path), "--facts", "facts.json").code in (1, 2)


def test_plan_of_this_box_alone_when_no_node_is_up(run: Any, toml: str) -> None:
    said = run("plan", "--config", toml, "--node", "alpha")
    assert said.code == 0
    assert said.err == "node alpha is not up: planning for this box alone\n"
    assert said.out.startswith("model m: 4 layers, context 4096, one node\n")


# --- a secret is never shown ---


@pytest.mark.parametrize(
    "args",
    [
        ["status"],
        ["status", "--json"],
        ["status", "--brief"],
        ["plan"],
        ["plan", "--json"],
        ["nodes"],
        ["nodes", "--json"],
        ["logs"],
        ["start", "m"],
        ["stop", "m"],
        ["check"],
        ["down"],
        ["down", "--all"],
        ["up", "--node", "omega"],
    ],
    ids=" ".join,
)
def test_secret_is_in_no_output(run: Any, toml: str, args: list[str]) -> None:
    said = run(*args, "--config", toml, *([] if "--node" in args else ["--node", "alpha"]))
    assert said.all
    assert SECRET not in said.all
    assert SECRET[:8] not in said.all


def test_secret_is_in_no_repr(toml: str) -> None:
    config = shardbox.load_config(toml)
    assert config.cluster.secret == SECRET
    assert SECRET not in repr(config)
    assert SECRET not in str(config)


@pytest.mark.parametrize("content", ["short-one", "", " \n", b"\xff" * 40])
def test_secret_file_that_will_not_do_is_named_not_shown(run: Any, tmp_path: Path, content: str | bytes) -> None:
    (tmp_path / "s.toml").write_text('[cluster]\nsecret_file = "the.secret"\n', encoding="utf-8")
    (tmp_path / "the.secret").write_bytes(content.encode() if isinstance(content, str) else content)
    said = run("up", "--config", "s.toml", "--node", "alpha")
    assert said.code == 2
    assert said.err.startswith("cluster.secret_file: ")
    assert "the.secret" in said.err
    assert "short-one" not in said.all


def test_secret_file_that_is_not_there_says_how_to_make_it(run: Any, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('[cluster]\nsecret_file = "the.secret"\n', encoding="utf-8")
    said = run("up", "--config", "s.toml", "--node", "alpha")
    assert said.code == 2
    assert "hint: make one with `shardbox secret > the.secret`" in said.err


def test_old_secret_file_that_is_not_there_is_named(run: Any, tmp_path: Path) -> None:
    lines = f'[cluster]\nsecret = "{SECRET}"\nold_secret_file = "old.secret"\ndiscovery = "static"\n'
    (tmp_path / "s.toml").write_text(lines + '[[nodes]]\nname = "alpha"\naddress = "127.0.0.1"\n', encoding="utf-8")
    said = run("check", "--config", "s.toml", "--node", "alpha")
    assert said.code == 2
    assert said.err.startswith("cluster.old_secret_file: ")
    assert "hint: leave it out once every box has the new secret" in said.err


# --- which node this is ---


@pytest.mark.parametrize(
    ("host", "declared", "given", "found"),
    [
        ("alpha", ["alpha", "beta"], "", "alpha"),
        ("ALPHA", ["alpha"], "", "alpha"),
        ("alpha.lan", ["alpha"], "", "alpha"),
        ("Alpha.Example.ORG", ["alpha.example.org"], "", "alpha.example.org"),
        ("alpha", ["alpha.lan", "beta.lan"], "", "alpha.lan"),
        ("alpha.lan", ["alpha", "alpha.lan"], "", "alpha.lan"),
        ("other", ["alpha", "beta"], "beta", "beta"),
        ("other", ["alpha", "beta"], "BETA", "beta"),
        ("alpha", ["alpha", "beta"], "beta", "beta"),
        ("alpha", [], "", "alpha"),
        ("alpha.lan", [], "", "alpha"),
        ("whatever", [], "Gamma", "gamma"),
    ],
)
@pytest.mark.parametrize("how", ["option", "environment"])
def test_node_name_is_found(
    monkeypatch: pytest.MonkeyPatch, host: str, declared: list[str], given: str, found: str, how: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    config = shardbox.Config(file="box.toml", folder="/", nodes=tuple(NodeConfig(name=name) for name in declared))
    if how == "environment" and given:
        monkeypatch.setenv("SHARDBOX_NODE", given)
    assert node_name(config, given if how == "option" else None) == found


@pytest.mark.parametrize(
    ("host", "declared", "given", "what"),
    [
        ("gamma", ["alpha", "beta"], "", "no node 'gamma' in [[nodes]]; there are: alpha, beta"),
        ("alpha", ["alpha"], "gamma", "no node 'gamma' in [[nodes]]; there are: alpha"),
        ("alpha", ["alpha.lan", "alpha.home"], "", "no node 'alpha' in [[nodes]]"),
        ("x", ["alpha.lan"], "alpha", "no node 'alpha' in [[nodes]]"),
        ("-bad-", [], "", "'-bad-' cannot be a node's name"),
        ("x", [], "a b", "'a b' cannot be a node's name"),
        ("x", [], "../../etc", "'../../etc' cannot be a node's name"),
        ("x", [], "a" * 64, "cannot be a node's name"),
        ("(none)", [], "", "'(none)' cannot be a node's name"),
    ],
)
def test_node_name_that_cannot_be_is_bad_usage(
    monkeypatch: pytest.MonkeyPatch, host: str, declared: list[str], given: str, what: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    config = shardbox.Config(file="box.toml", folder="/", nodes=tuple(NodeConfig(name=name) for name in declared))
    with pytest.raises(UsageError) as caught:
        node_name(config, given or None)
    assert what in caught.value.what
    assert "--node NAME" in caught.value.hint
    assert caught.value.exit_code == 2


# --- as a process ---


def test_process_exit_codes_are_those_of_main(toml: str) -> None:
    done = spawn("status", "--config", toml, "--node", "alpha", "--brief")
    assert done.returncode == 2
    assert done.stdout.startswith("SHARDBOX CRITICAL - ")
    assert spawn("status").returncode == 3
    assert spawn("plan").returncode == 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["secret", "status"])
def test_process_whose_reader_left_ends_quietly(toml: str, command: str, unbuffered: str) -> None:
    """Unbuffered: as with `status --json | head` where there is more than a buffer holds."""
    reading, writing = os.pipe()
    os.close(reading)
    args = ["--config", toml, "--node", "alpha"] if command == "status" else []
    try:
        done = spawn(command, *args, stdout=writing, PYTHONUNBUFFERED=unbuffered)
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode in (0, 1, 2)


def test_process_with_an_unknown_log_level_is_no_traceback() -> None:
    done = spawn("version", SHARDBOX_LOG="verbose")
    assert "Traceback" not in done.stderr


def test_process_with_an_empty_environment_answers_cron(toml: str) -> None:
    """Cron and Nagios give next to nothing; `status` needs neither HOME nor PATH."""
    done = subprocess.run(
        [*PROGRAM, "status", "--config", toml, "--node", "alpha"],
        env={},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout.startswith("SHARDBOX CRITICAL - node alpha is not running")
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["status", "version"])
def test_process_that_cron_starts_every_minute_imports_nothing_heavy(toml: str, command: str) -> None:
    args = [command, *(["--config", toml, "--node", "alpha"] if command == "status" else [])]
    heavy = {"aiohttp", "asyncio", "http.client", "zeroconf", "zmq", "cryptography", "pynvml"}
    code = f"import sys, shardbox; shardbox.main({args}); print(sorted({heavy} & set(sys.modules)))"
    folder = str(Path(shardbox.__file__).parent)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(("SHARDBOX CRITICAL", "shardbox "))
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "words",
    [
        "", "--json", "--brief --json", "--config a.toml", "--node alpha --config a.toml",
        "--brief --config a --config b",
        "--config=a", "--timeout 3", "--json=1", "--config", "--config --json", "--node -x", "surplus", "-- --json",
    ],
)  # fmt: skip
def test_status_read_without_click_is_read_as_click_does(words: str) -> None:
    args = words.split()
    found = shardbox.plain_status(args)
    if found is None:
        assert re.search(r"=|timeout|--config$|--config --json|-x|surplus|-- ", words)
    else:
        assert found == shardbox.build_cli().commands["status"].make_context("status", args).params


def test_end_of_a_node_is_seen_without_writing(tmp_path: Path) -> None:
    """`down` wrote the lock file of a node whose state folder had become read-only, and ended with a traceback."""
    assert has_ended(str(tmp_path))
    with one_node_only(str(tmp_path), "alpha"):
        before = (tmp_path / "lock").read_bytes()
        assert not has_ended(str(tmp_path))
        assert (tmp_path / "lock").read_bytes() == before == b"%d" % os.getpid()
    assert has_ended(str(tmp_path))


@pytest.mark.parametrize(
    ("others", "copy_models", "levels"),
    [
        (["whole"], True, {"ok"}),
        (["none", "whole"], True, {"ok"}),
        ([], True, {"warn"}),
        (["none"], True, {"warn"}),
        (["whole"], False, {"fail"}),
    ],
)
def test_check_of_a_box_that_others_give_to(others: list[str], copy_models: bool, levels: set[str]) -> None:
    """`bin/` and `models/` need to be on one box only: `check` called that a failure on all others."""
    setup = config(cluster=ClusterConfig(name="attic", secret="s" * 20, copy_models=copy_models))
    setup = dataclasses.replace(setup, engine=dataclasses.replace(setup.engine, share=copy_models))
    lacking = copy_of(None, room_bytes=2**40)
    none = tuple(BinaryFacts(role=role, problem="not there") for role in ROLE_BINARIES)
    bare = box("beta", 2**34, models=(lacking,), binaries=none)
    given = [box(f"box{n}", 2**34, shape()) if kind == "whole" else bare for n, kind in enumerate(others)]
    found = [item for item in shardbox.check_box(setup, bare, *given) if re.match("model|leader|worker", item["what"])]
    assert {item["level"] for item in found} == levels
    assert len(found) == 3


def test_check_says_that_there_is_no_room_for_a_copy() -> None:
    full = box("beta", 2**34, models=(copy_of(None, room_bytes=2**20),))
    [said] = [item for item in shardbox.check_box(config(), full, box("alpha", 2**34, shape())) if "m:" in item["what"]]
    assert said["level"] == "fail" and said["hint"] == "a copy needs 8 GiB, and 1 MiB may be put there"
