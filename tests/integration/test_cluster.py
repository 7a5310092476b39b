"""Whole clusters: real nodes in namespaces of their own, found by mDNS, with rehearsal engines, and once with Prima.

Tests that need a healthy ring of three share one (`ring`, which mends what the test before broke); they run in
the order of the file, and the last one takes the cluster down.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hosts import (
    CHAT,
    CRITICAL,
    MEMBERS,
    OK,
    PATIENCE_S,
    SECRET,
    UNKNOWN,
    WARNING,
    Answer,
    Host,
    Lan,
    agree,
    chat,
    eventually,
    hosts,
    in_namespace,
    model,
    nodes_of,
    rank_on,
    serves,
    shardbox_command,
)

from shardbox import PROTOCOL, EngineConfig, Snapshot, status_line

__all__ = ["hosts"]  # a fixture, found by its name

MakeLan = Callable[..., contextlib.AbstractContextManager[Lan]]
pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(180)]

ONE_IN_THREE = "1450MiB"  # of a model of 3 GiB: no two of these hold it
HALF = "2500MiB"  # two of these do
ADVERT = """
import json, sys
from zeroconf import ServiceInfo, Zeroconf
said = json.loads(sys.argv[1])
zeroconf = Zeroconf(interfaces=[said["address"]])
label = said["node"] + "-0123abcd"
info = ServiceInfo("_shardbox._tcp.local.", label + "._shardbox._tcp.local.", port=7311,
                   parsed_addresses=[said["address"]], server=label + ".local.", properties=said)
zeroconf.register_service(info)
sys.stdin.read()
zeroconf.close()
"""


def cluster_toml(
    members: Sequence[str] = MEMBERS,
    *,
    memory: str = ONE_IN_THREE,
    form_wait_s: int = 30,
    addresses: dict[str, str] | None = None,
    name: str = "attic",
    api: str = "",
    engine: str = "",
) -> str:
    """The TOML of a rehearsed cluster; with addresses, it is a static one."""
    lines = ["[cluster]", f'name = "{name}"', 'secret_file = "cluster.secret"', f"form_wait_s = {form_wait_s}"]
    lines += ['discovery = "static"'] if addresses else []
    lines += ["[api]", api, "[engine]", 'kind = "rehearsal"', engine]
    for member in members:
        lines += ["[[nodes]]", f'name = "{member}"', f'memory = "{memory}"']
        lines += [f'address = "{addresses[member]}"'] if addresses else []
    lines += ["[[models]]", 'name = "tiny"', 'aliases = ["small"]', 'path = "tiny.gguf"', "context = 8192", "slots = 2"]
    lines += ['rehearse = {layers = 24, width = 256, bytes = "3GiB"}', ""]
    return "\n".join(lines)


def words_of(events: Sequence[Any]) -> str:
    """The text of streamed chat events."""
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@contextlib.contextmanager
def asked(host: Host, body: dict[str, Any]) -> Iterator[Future[Answer]]:
    """A request whose whole answer is awaited beside the block."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(host.http, "POST", CHAT, body, timeout_s=2 * PATIENCE_S)


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return (done.stdout + done.stderr).strip().splitlines()


@pytest.fixture(scope="module")
def attic(hosts: MakeLan) -> Iterator[Lan]:
    """Three members that are up, found by mDNS alone, and a fourth box, delta, which is not one of them."""
    with hosts(cluster_toml(), (*MEMBERS, "delta")) as lan:
        lan.up(*MEMBERS)
        yield lan


@pytest.fixture
def ring(attic: Lan) -> Lan:
    """The attic with all three up, whatever the test before has broken."""
    for name in MEMBERS:
        host = attic.hosts[name]
        if host.up_process is None or host.up_process.poll() is not None:
            host.up()
    if any(model(found).failures for name in MEMBERS if (found := attic.hosts[name].snapshot())):
        attic.hosts["alpha"].run("start", "tiny")  # the failures that these tests make are no reason to give up
    agree(attic)
    return attic


@pytest.fixture
def alpha(ring: Lan) -> Host:
    """The leader: all have the same room, and ties go by name."""
    return ring.hosts["alpha"]


@pytest.fixture
def beta(ring: Lan) -> Host:
    return ring.hosts["beta"]


@pytest.fixture
def gamma(ring: Lan) -> Host:
    return ring.hosts["gamma"]


@pytest.fixture
def delta(ring: Lan) -> Iterator[Host]:
    """The box that is no member; what a test started on it ends with the test."""
    host = ring.hosts["delta"]
    config = host.config
    yield host
    host.kill_all()
    host.config = config


# --- it is up: what each node says, and the endpoint --------------------------------------------------------


@pytest.mark.parametrize("name", MEMBERS)
def test_status_ring_of_three_serves_warns_of_rehearsal_only(ring: Lan, name: str) -> None:
    done = ring.hosts[name].run("status")

    first = done.stdout.splitlines()[0]
    assert done.returncode == WARNING, done.stdout
    assert first.startswith("SHARDBOX WARNING - ") and " | ranks=3 " in first
    assert "tiny 3/3 ranks, leader alpha" in first and "rehearsal engines: no model is loaded" in first
    assert "missing" not in done.stdout and "lost" not in done.stdout and "restart" not in first


def test_nodes_found_by_mdns_alone(alpha: Host) -> None:
    listed = {node["name"]: node for node in json.loads(alpha.run("nodes", "--json").stdout)["nodes"]}

    assert {name: (node["state"], node["source"]) for name, node in listed.items()} == {
        "alpha": ("self", "self"),
        "beta": ("live", "mdns"),
        "gamma": ("live", "mdns"),
    }


def test_check_healthy_cluster_exits_0_and_tries_every_pair(beta: Host) -> None:
    done = beta.run("check")

    assert done.returncode == 0, done.stdout
    pairs = [f"{one} -> {other} at " for one in MEMBERS for other in MEMBERS if one != other]
    assert all(any(line.startswith(f"ok    {pair}") for line in done.stdout.splitlines()) for pair in pairs)


def test_plan_three_nodes_of_equal_room_names_all_and_why(gamma: Host) -> None:
    done = gamma.run("plan")

    assert done.returncode == 0 and "a ring of 3" in done.stdout
    assert "too much for any one node" in done.stdout and "leads: most room" in done.stdout


def test_nodes_have_measured_the_way_to_each_other_before_the_ring_formed(gamma: Host) -> None:
    facts = json.loads(gamma.run("nodes", "--json").stdout)["facts"]
    links = {(node["name"], other): link for node in facts for other, link in node["links"].items()}

    assert sorted(links) == [(one, other) for one in MEMBERS for other in MEMBERS if one < other]
    assert all(10_000 < link["rtt_ns"] < 100_000_000 and link["bytes_per_s"] > 10_000_000 for link in links.values())
    plan = json.loads(gamma.run("plan", "--json").stdout)["plans"]
    assert all(rank["hop_s"] > 0 for found in plan.values() for rank in found["ranks"])


@pytest.mark.parametrize("name", MEMBERS)
def test_chat_plain_answers_on_every_node(ring: Lan, name: str) -> None:
    answer = ring.hosts[name].http("POST", CHAT, chat(max_tokens=7))

    assert answer.status == 200 and answer.body["object"] == "chat.completion" and answer.body["model"] == "tiny"
    assert answer.body["choices"][0]["message"]["content"] == "This is a rehearsal: no model is"
    assert answer.body["choices"][0]["finish_reason"] == "length"


def test_chat_plain_counts_its_tokens(beta: Host) -> None:
    usage = beta.http("POST", CHAT, chat(max_tokens=7)).body["usage"]

    assert usage["completion_tokens"] == 7 and usage["total_tokens"] == usage["prompt_tokens"] + 7


@pytest.mark.parametrize("name", MEMBERS)
def test_chat_streamed_answers_on_every_node_and_ends_with_done(ring: Lan, name: str) -> None:
    with ring.hosts[name].stream(CHAT, chat(max_tokens=7)) as stream:
        assert stream.reply.status == 200 and stream.reply.headers["Content-Type"] == "text/event-stream"
        events = list(stream)

    assert events[-1] == "[DONE]" and words_of(events) == "This is a rehearsal: no model is"
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]][-1] == "length"


def test_completion_through_a_worker_has_openai_shape(gamma: Host) -> None:
    answer = gamma.http("POST", "/v1/completions", {"model": "small", "prompt": "The capital of", "max_tokens": 5})

    assert answer.status == 200 and answer.body["object"] == "text_completion"
    assert (
        answer.body["choices"][0]["text"] == "This is a rehearsal: no"
        and answer.body["usage"]["completion_tokens"] == 5
    )


@pytest.mark.parametrize("name", ["alpha", "gamma"])
def test_models_lists_name_and_alias(ring: Lan, name: str) -> None:
    [entry] = ring.hosts[name].http("GET", "/v1/models").body["data"]

    assert (entry["id"], entry["object"], entry["aliases"], entry["status"]) == ("tiny", "model", ["small"], "serving")


def test_chat_unknown_model_404_names_those_there_are(beta: Host) -> None:
    answer = beta.http("POST", CHAT, {**chat(), "model": "huge"})

    assert answer.status == 404 and answer.error["code"] == "model_not_found"
    assert "'huge'" in answer.error["message"] and "tiny" in answer.error["message"]


def test_embeddings_of_a_chat_model_501(beta: Host) -> None:
    answer = beta.http("POST", "/v1/embeddings", {"model": "tiny", "input": "Hi"})

    assert answer.status == 501 and "embeddings = true" in answer.error["message"]


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("streamed", [False, True])
def test_chat_prompt_longer_than_context_400(ring: Lan, name: str, streamed: bool) -> None:
    answer = ring.hosts[name].http("POST", CHAT, chat("word " * 9000, max_tokens=2, stream=streamed))

    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("name", ["alpha", "gamma"])
def test_health_serving_200(ring: Lan, name: str) -> None:
    answer = ring.hosts[name].http("GET", "/health")

    assert (answer.status, answer.body) == (200, {"status": "ok", "models": {"tiny": "serving"}})


# --- isolation: nobody but the forwarder reaches an engine -------------------------------------------------


def test_ports_only_mesh_and_loopback_api_listen(ring: Lan) -> None:
    for name in MEMBERS:
        assert ring.hosts[name].listening() == {"0.0.0.0:7311", "127.0.0.1:8080"}


def test_engine_ports_refused_from_both_sides(ring: Lan, alpha: Host, beta: Host) -> None:
    """Prima's data, signal and HTTP ports: of all ranks, from the same box and from another."""
    wanted = [base + rank for base in (9000, 10000) for rank in range(3)] + [9000 + 32, 8080]
    reached = []
    for source, target in ((beta, alpha.address), (alpha, alpha.address), (alpha, "127.0.0.1"), (alpha, beta.address)):
        for port in wanted:
            with contextlib.suppress(ConnectionRefusedError):
                source.connect(target, port).close()
                reached.append((source.name, target, port))

    assert reached == [("alpha", "127.0.0.1", 8080)]  # the endpoint itself, on loopback
    beta.connect(alpha.address, 7311).close()  # the mesh, so that a refusal above means something


# --- status, as monitoring asks it -------------------------------------------------------------------------


def as_nobody(host: Host, *args: str) -> subprocess.CompletedProcess[str]:
    """A command of another, unprivileged user with an empty environment."""
    dropped = ("env", "-i", "setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
    return host.run_tool(*dropped, *args)


def test_status_other_user_empty_environment_same_code(alpha: Host) -> None:
    command = shardbox_command()
    if as_nobody(alpha, *command, "version").returncode:
        pytest.skip("other users cannot enter the folder of this Python or of shardbox")
    own = alpha.run("status", "--brief")

    done = as_nobody(alpha, *command, "status", "--config", str(alpha.config), "--node", "alpha", "--brief")

    assert (done.returncode, done.stderr) == (own.returncode, "") and own.returncode == WARNING
    assert "tiny 3/3 ranks, leader alpha" in done.stdout
    assert as_nobody(alpha, "cat", str(alpha.config.parent / "cluster.secret")).returncode != 0


def test_status_stopped_process_critical_within_its_timeout(gamma: Host) -> None:
    assert gamma.up_process
    os.kill(gamma.up_process.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        done = gamma.run("status", "--timeout", "1")
        took_s = time.monotonic() - started
    finally:
        os.kill(gamma.up_process.pid, signal.SIGCONT)

    assert done.returncode == CRITICAL and "says nothing within 1 s" in done.stdout
    assert took_s < 4  # 1 s, and the start of Python on a slow machine


def test_status_node_not_running_critical(delta: Host) -> None:
    done = delta.run("status", "--node", "beta")

    assert done.returncode == CRITICAL
    assert lines_of(done)[0] == "SHARDBOX CRITICAL - node beta is not running on this box"


@pytest.mark.parametrize(
    ("text", "said"), [('[cluster]\nnam = "attic"\n', "cluster.nam"), ("[cluster\n", "bad.toml"), (None, "bad.toml")]
)
def test_status_bad_configuration_unknown(ring: Lan, alpha: Host, text: str | None, said: str) -> None:
    path = ring.folder / "bad.toml"
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)

    done = alpha.run("status", "--config", str(path))

    assert done.returncode == UNKNOWN
    assert done.stdout.startswith("SHARDBOX UNKNOWN - ") and said in done.stdout and "Traceback" not in done.stderr


def test_status_bad_usage_unknown(alpha: Host) -> None:
    assert alpha.run("status", "--nonsense").returncode == UNKNOWN


# --- names, and boxes that do not belong -------------------------------------------------------------------


def test_up_twice_on_one_box_exits_1_with_one_line(ring: Lan, alpha: Host) -> None:
    assert alpha.up_process
    before = agree(ring)

    done = alpha.run("up")

    assert done.returncode == 1
    assert lines_of(done)[0] == f"node alpha already runs on this box (pid {alpha.up_process.pid})"
    assert len(lines_of(done)) == 2 and lines_of(done)[1].strip().startswith("hint: ")
    assert agree(ring) == before


def test_up_name_of_another_box_ends_by_itself_and_says_so(ring: Lan, alpha: Host, delta: Host) -> None:
    twin = delta.popen("up", SHARDBOX_NODE="alpha")
    code = twin.wait(PATIENCE_S)

    said = delta.output(twin)
    assert code in (1, 2) and "Traceback" not in said, said
    assert "another box" in said and "already is node alpha" in said, said
    assert not delta.pids() and alpha.up_process and alpha.up_process.poll() is None
    agree(ring)


def test_up_name_of_another_box_that_it_cannot_meet_is_refused_by_others(ring: Lan, delta: Host) -> None:
    """The two boxes cannot reach each other (as between WLAN clients), only beta and gamma: the ring goes on."""
    before = agree(ring)
    ring.separate("alpha", "delta")
    try:
        twin = delta.popen("up", SHARDBOX_NODE="alpha")
        told = ring.hosts["beta"].wait_status(
            lambda found: twin.poll() is not None or model(found).generation != before, "an end, one way or the other"
        )
        assert model(told).generation == before
        assert twin.returncode in (1, 2) and "already is node alpha" in delta.output(twin)
        assert agree(ring) == before
    finally:
        ring.separate("alpha", "delta", apart=False)


@pytest.fixture
def wrong_secret(ring: Lan, delta: Host) -> Iterator[Host]:
    """delta is up, in a cluster of the same name with another secret."""
    folder = ring.folder / "elsewhere"
    folder.mkdir(exist_ok=True)
    (folder / "cluster.secret").write_text(SECRET + "!")
    delta.config = folder / "shardbox.toml"
    delta.config.write_text(cluster_toml((*MEMBERS, "delta")))
    process = delta.up()
    delta.wait_status(lambda snapshot: True, "it is up")
    yield delta
    process.terminate()  # with a goodbye to the LAN
    process.wait(PATIENCE_S)


def test_node_with_wrong_secret_never_joins_and_everybody_says_why(alpha: Host, wrong_secret: Host) -> None:
    told = alpha.wait_status(
        lambda found: any("another cluster secret" in peer.detail for peer in found.peers if peer.name == "delta"),
        "delta's reason",
    )
    [peer] = [peer for peer in told.peers if peer.name == "delta"]
    assert peer.state == "unreachable" and serves(3)(told)

    listed = alpha.run("nodes").stdout.splitlines()
    assert any(line.split()[:2] == ["delta", "unreachable"] and "another cluster secret" in line for line in listed)
    assert wrong_secret.up_process
    said = wrong_secret.output(wrong_secret.up_process)  # where its operator looks
    assert said.count("WARNING alpha takes no part: the other side has another cluster secret") == 1

    for host, target in ((alpha, "delta"), (wrong_secret, "alpha")):
        done = host.run("check")
        assert done.returncode == 1, done.stdout
        failed = f"fail  {host.name} -> {target} at "
        assert any(line.startswith(failed) and "another cluster secret" in line for line in lines_of(done)), done.stdout
        assert SECRET not in done.stdout + done.stderr

    found = wrong_secret.wait_status(lambda snapshot: True, "status")
    assert {peer.state for peer in found.peers if peer.name in MEMBERS} == {"unreachable"}
    assert model(found).phase != "serving"


def test_node_with_wrong_secret_that_has_gone_is_forgotten(alpha: Host, wrong_secret: Host) -> None:
    assert wrong_secret.up_process
    alpha.wait_status(lambda found: any(peer.name == "delta" for peer in found.peers), "delta is seen")

    wrong_secret.up_process.terminate()
    wrong_secret.up_process.wait(PATIENCE_S)

    alpha.wait_status(lambda found: all(peer.name != "delta" for peer in found.peers), "delta is forgotten", 5)


@contextlib.contextmanager
def advert(host: Host, **said: str) -> Iterator[None]:
    """Somebody's mDNS advert on the LAN, as long as the block lasts."""
    text = json.dumps({"address": host.address, "version": "0.0.9", **said})
    process = host.spawn(sys.executable, "-c", ADVERT, text)
    try:
        yield
    finally:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, host.output(process)


def test_advert_of_another_cluster_is_named_as_foreign(alpha: Host, delta: Host) -> None:
    with advert(delta, node="hermit", cluster="cellar", protocol=str(PROTOCOL)):
        found = alpha.wait_status(lambda found: any(p.name == "hermit" for p in found.peers), "hermit is seen")
        listed = alpha.run("nodes").stdout

    [peer] = [peer for peer in found.peers if peer.name == "hermit"]
    assert (peer.state, peer.address) == ("foreign", delta.address) and "'cellar'" in peer.detail
    assert any(line.split()[:2] == ["hermit", "foreign"] for line in listed.splitlines())
    alpha.wait_status(lambda found: all(p.name != "hermit" for p in found.peers), "its goodbye is heard")


def test_advert_of_a_stranger_under_a_members_name_changes_nothing(ring: Lan, alpha: Host, delta: Host) -> None:
    before, said = agree(ring), {"cluster": "attic", "protocol": str(PROTOCOL)}
    with (
        advert(delta, node="beta", **said),
        advert(delta, node="mallory", **said),
        advert(delta, node="z", cluster="c"),
    ):

        def heard(found: Snapshot) -> bool:  # mallory's reason takes a call, and z came after beta
            peers = {peer.name: peer for peer in found.peers}
            return "z" in peers and "mallory" in peers and bool(peers["mallory"].detail)

        peers = {peer.name: peer for peer in alpha.wait_status(heard, "all are heard").peers}
        assert peers["mallory"].state == "unreachable" and "refused" in peers["mallory"].detail
        assert (peers["beta"].state, peers["beta"].address) == ("live", ring.hosts["beta"].address)
        assert agree(ring) == before


def test_advert_with_another_protocol_is_named_as_refused(alpha: Host, delta: Host) -> None:
    with advert(delta, node="future", cluster="attic", protocol="99"):
        found = alpha.wait_status(lambda found: any(p.name == "future" for p in found.peers), "future is seen")

    [peer] = [peer for peer in found.peers if peer.name == "future"]
    assert peer.state == "refused" and peer.detail == f"speaks protocol 99, this box {PROTOCOL}"


# --- what breaks, and how it comes back --------------------------------------------------------------------


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def in_flight(host: Host, broken: Callable[[], None]) -> list[Any]:
    """The rest of a streamed answer after something broke in the middle of it."""
    with host.stream(CHAT, chat(max_tokens=8000)) as stream:
        assert len(stream.take(5)) == 5
        broken()
        return list(stream)


def assert_broken_off(events: Sequence[Any]) -> None:
    """The stream ended with an error event, and only once."""
    errors = [event["error"] for event in events if event != "[DONE]" and "error" in event]
    assert len(errors) == 1 and errors[0]["code"] == "ring_lost" and errors[0]["message"], events[-3:]
    assert [event for event in events if event != "[DONE]"][-1] == {"error": errors[0]}


@pytest.mark.parametrize(("victim", "asked"), [("beta", "gamma"), ("alpha", "beta")])
def test_engine_killed_stream_says_so_and_ring_forms_again(ring: Lan, alpha: Host, victim: str, asked: str) -> None:
    """A worker's and the leader's engine, with the client at another node."""
    generation = agree(ring)
    before = model(alpha.wait_status(serves(3), "serving"))
    told = json.loads(ring.hosts[asked].run("status", "--json").stdout)["models"][0]["ranks"]
    pids = {rank["node"]: rank["pid"] for rank in told}

    events = in_flight(ring.hosts[asked], lambda: kill(pids[victim]))

    assert_broken_off(events)
    for name in MEMBERS:  # everybody shows it, before and after it is mended
        ring.hosts[name].wait_status(
            lambda found: not serves(3)(found) or model(found).restarts > before.restarts, "trouble is shown"
        )
    agree(ring, but=generation)
    after = model(alpha.wait_status(serves(3), "serving again"))
    assert after.restarts == before.restarts + 1 and victim in after.last_trouble
    assert all(rank.pid not in pids.values() for rank in after.ranks)
    done = alpha.run("status")
    assert done.returncode == WARNING and "restart" in done.stdout.splitlines()[0]


@pytest.mark.parametrize(("victim", "entry"), [("beta", "gamma"), ("gamma", "alpha"), ("alpha", "beta")])
def test_engine_killed_request_that_has_sent_nothing_is_held_and_answered(ring: Lan, victim: str, entry: str) -> None:
    generation = agree(ring)
    host = ring.hosts[entry]
    with asked(host, chat(max_tokens=3000)) as answer:
        found = host.wait_status(lambda found: model(found).in_flight == 1, "it is being answered")
        kill(rank_on(found, victim).pid)
        host.wait_status(lambda found: model(found).held == 1, "it is held")

    assert answer.result().status == 200, answer.result().data
    assert answer.result().body["usage"]["completion_tokens"] == 3000
    agree(ring, but=generation)
    host.wait_status(lambda found: model(found).held == model(found).in_flight == 0, "nothing is held any more")


@pytest.mark.parametrize("victim", ["beta", "alpha"])
def test_engine_stopped_is_critical_within_the_stall_time_and_its_request_answered(ring: Lan, victim: str) -> None:
    """Nothing ends and no connection breaks: only that nothing moves tells."""
    generation, gamma = agree(ring), ring.hosts["gamma"]
    with asked(gamma, chat(max_tokens=3000)) as answer:
        found = gamma.wait_status(lambda found: model(found).in_flight == 1, "it is being answered")
        os.kill(rank_on(found, victim).pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        found = ring.hosts["alpha"].wait_status(lambda found: status_line(found)[0] == CRITICAL, "critical")
        assert time.monotonic() - stopped_at <= EngineConfig().stall_max_s
        assert "stalled: a request is in flight" in status_line(found)[1]

    assert answer.result().status == 200, answer.result().data
    agree(ring, but=generation)


def test_leader_stopped_its_request_is_held_and_forgotten_with_its_client(ring: Lan, alpha: Host, gamma: Host) -> None:
    """A stopped process keeps its connections: only that it says nothing tells that the answer will not come."""
    assert alpha.up_process
    os.kill(alpha.up_process.pid, signal.SIGSTOP)
    try:
        with contextlib.closing(gamma.connect("127.0.0.1", 8080)) as client:
            text = json.dumps(chat())
            client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            gamma.wait_status(lambda found: model(found).held == 1, "it is held")
        gamma.wait_status(lambda found: model(found).held == 0, "it is forgotten", 5)
    finally:
        os.kill(alpha.up_process.pid, signal.SIGCONT)


def test_stop_and_start_on_a_worker_end_and_restore_all_ranks(ring: Lan, alpha: Host, beta: Host) -> None:
    done = beta.run("stop", "small")
    assert done.returncode == 0 and "tiny: stopping" in done.stdout

    for name in MEMBERS:
        host = ring.hosts[name]
        host.wait_status(lambda found: model(found).phase == "stopped", "stopped")
        eventually(lambda host=host: not any("rehearse" in words for words in host.pids().values()), "no engine")  # type: ignore[misc]
    status = alpha.run("status")
    assert status.returncode in (OK, WARNING) and "tiny stopped by the operator" in status.stdout.splitlines()[0]
    assert beta.http("GET", "/health").status == 200
    answer = alpha.http("POST", CHAT, chat())
    assert answer.status == 503 and "stopped by the operator" in answer.error["message"]

    assert beta.run("start", "tiny").returncode == 0
    agree(ring)
    assert beta.http("POST", CHAT, chat(max_tokens=3)).status == 200


def test_stop_unknown_model_exits_1_and_names_those_there_are(alpha: Host) -> None:
    done = alpha.run("stop", "huge")

    assert done.returncode in (1, 2) and "no model 'huge'" in done.stderr and "there are: tiny" in done.stderr


def test_start_no_node_says_critical_on_the_way(ring: Lan, gamma: Host) -> None:
    before = agree(ring)
    assert gamma.run("stop", "tiny").returncode == 0
    for name in MEMBERS:
        ring.hosts[name].wait_status(lambda found: model(found).phase == "stopped", "stopped")
    assert gamma.run("start", "tiny").returncode == 0

    said: set[str] = set()

    def on_the_way() -> bool:
        found = [found for name in MEMBERS if (found := ring.hosts[name].snapshot())]
        said.update(line for code, line in map(status_line, found) if code == CRITICAL)
        return len(found) == 3 and all(serves(3)(one) and model(one).generation != before for one in found)

    eventually(on_the_way, "serving again")
    assert said == set()


def test_logs_of_another_box_are_shown(alpha: Host, beta: Host) -> None:
    """gamma's engine has been seen to end when its neighbours were killed: that it said something is not sure,
    so the log gets a line of its own here."""
    with open(alpha.folder / "attic" / "alpha" / "logs" / "tiny.log", "a") as log:
        log.write("a line of the engine on alpha\n")

    done = beta.run("logs", "alpha", "--model", "tiny")

    assert done.returncode == 0 and "==> alpha/tiny.log <==" in done.stdout
    assert "a line of the engine on alpha" in done.stdout and "beta/" not in done.stdout
    everywhere = beta.run("logs").stdout
    assert all(f"==> {name}/tiny.log <==" in everywhere for name in MEMBERS)


def test_logs_of_all_boxes_are_shown_although_one_hangs(alpha: Host, beta: Host, gamma: Host) -> None:
    """It took those of all others with it, when somebody wanted to know what was wrong."""
    assert gamma.up_process
    os.kill(gamma.up_process.pid, signal.SIGSTOP)
    try:
        done = beta.run("logs")
    finally:
        os.kill(gamma.up_process.pid, signal.SIGCONT)

    assert done.returncode == 0 and "==> alpha/tiny.log <==" in done.stdout
    assert "==> gamma <==\nit does not tell them: no answer within 5.0 s" in done.stdout
    alpha.wait_status(serves(3), "the ring serves")


def test_address_changes_same_node_and_ring_serves_again(ring: Lan, alpha: Host, beta: Host) -> None:
    old, new = beta.address, ring.free_address()
    assert beta.up_process
    pid = beta.up_process.pid

    ring.set_address(beta, new)

    def moved(found: Snapshot) -> bool:
        return any(p.name == "beta" and p.state == "live" and p.address == new for p in found.peers) and serves(3)(
            found
        )

    for host in (alpha, ring.hosts["gamma"]):
        found = host.wait_status(moved, f"beta is live at {new}, not {old}, and the ring serves", 90)
        assert [peer.name for peer in found.peers].count("beta") == 1
    assert beta.up_process.pid == pid and beta.up_process.poll() is None
    # the old ring may look whole until the first request finds its wires dead: an error, then a new ring
    eventually(lambda: beta.http("POST", CHAT, chat(max_tokens=3)).status == 200, "an answer")


# --- the end -----------------------------------------------------------------------------------------------


def assert_nothing_left(host: Host) -> None:
    assert host.pids() == {} and host.listening() == set() and host.abstract_sockets() == []
    assert not list(host.folder.rglob("control.sock"))


@pytest.mark.parametrize(("leaver", "entry"), [("beta", "gamma"), ("alpha", "alpha"), ("beta", "beta")])
def test_down_lets_a_stream_end_and_takes_no_new_requests(ring: Lan, leaver: str, entry: str) -> None:
    """A worker, the leader, and the node where the request entered."""
    host = ring.hosts[leaver]
    with ring.hosts[entry].stream(CHAT, chat(max_tokens=3000)) as stream:
        assert len(stream.take(5)) == 5
        with ThreadPoolExecutor(1) as thread:
            down = thread.submit(host.run, "down")
            ring.hosts["alpha"].wait_status(lambda found: model(found).phase == "draining", "it drains")
            refused = host.http("POST", CHAT, chat())
            events = list(stream)

    assert refused.status == 503 and f"{leaver} is going down" in refused.error["message"]
    assert events[-1] == "[DONE]" and len(events) > 2900 and not any("error" in event for event in events[:-1])
    assert down.result().returncode == 0 and f"{leaver}: down" in down.result().stdout
    assert host.up_process and host.up_process.wait(10) == 0
    assert_nothing_left(host)


def test_second_interrupt_ends_at_once_and_leaves_nothing(ring: Lan, beta: Host, gamma: Host) -> None:
    with gamma.stream(CHAT, chat(max_tokens=8000)) as stream:
        assert len(stream.take(5)) == 5
        assert beta.up_process
        beta.up_process.send_signal(signal.SIGINT)
        beta.wait_status(lambda found: model(found).phase == "draining", "it drains")
        beta.up_process.send_signal(signal.SIGINT)
        assert beta.up_process.wait(10) == 1
        assert_broken_off(list(stream))
    eventually(lambda: not beta.pids(), "no engine", 10)
    assert_nothing_left(beta)


def test_down_on_one_leaves_nothing_there_and_others_say_so(alpha: Host, gamma: Host) -> None:
    done = gamma.run("down")

    assert done.returncode == 0 and "gamma: down" in done.stdout
    assert gamma.up_process and gamma.up_process.wait(10) == 0
    assert_nothing_left(gamma)
    alpha.wait_status(
        lambda found: not serves(3)(found) and "gamma" in status_line(found)[1], "the ring is down, gamma is named"
    )
    again = gamma.run("down")
    assert again.returncode == 0 and "not running" in again.stdout


def test_down_all_leaves_nothing_anywhere(ring: Lan, beta: Host) -> None:
    done = beta.run("down", "--all")

    assert done.returncode == 0, done.stderr
    for name in MEMBERS:
        process = ring.hosts[name].up_process
        assert process and process.wait(PATIENCE_S) == 0
        assert_nothing_left(ring.hosts[name])
        assert ring.hosts[name].run("status").returncode == CRITICAL


# --- other clusters ----------------------------------------------------------------------------------------


def multicast_arrives(source: Host, target: Host) -> bool:
    """Whether a datagram to mDNS's group gets from one host to the other; a plain one after it ends the wait."""

    def listener() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("", 0))
        member = struct.pack("4s4s", socket.inet_aton("224.0.0.251"), socket.inet_aton(target.address))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        return sock

    def sender() -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(source.address))
        return sock

    with in_namespace(target.netns, listener) as far, in_namespace(source.netns, sender) as near:
        port = far.getsockname()[1]
        far.settimeout(10)
        near.sendto(b"to all", ("224.0.0.251", port))
        near.sendto(b"to you", (target.address, port))
        return far.recv(100) == b"to all"


def test_static_discovery_multicast_blocked_ring_serves(hosts: MakeLan) -> None:
    names = ("alpha", "beta")
    with hosts("", names) as lan:
        alpha, beta = (lan.hosts[name] for name in names)
        addresses = {name: lan.hosts[name].address for name in names}
        lan.write("shardbox.toml", cluster_toml(names, memory=HALF, addresses=addresses))
        assert multicast_arrives(alpha, beta)
        lan.block_multicast()
        assert not multicast_arrives(alpha, beta) and not multicast_arrives(beta, alpha)

        lan.up(*names)

        for host in (alpha, beta):
            found = host.wait_status(serves(2), "a ring of 2")
            assert {peer.source for peer in found.peers} == {"self", "static"}
        assert beta.http("POST", CHAT, chat(max_tokens=3)).status == 200


def test_engines_not_closed_in_are_reached_from_outside_and_named(hosts: MakeLan) -> None:
    names = ("alpha", "beta")
    toml = cluster_toml(names, memory=HALF).replace('"rehearsal"', '"rehearsal"\nisolate = "never"')
    # the leader's HTTP port is only on its loopback: found closed, not assumed to be
    wanted = [
        f"engine ports {port}, {port + 1000} of {node} can be reached from {other}: anybody there can corrupt answers"
        for node, other, port in (("alpha", "beta", 9000), ("beta", "alpha", 9001))
    ]
    with hosts(toml, names) as lan:
        lan.up(*names)
        for name in names:
            lan.hosts[name].wait_status(serves(2), "a ring of 2")
            lan.hosts[name].wait_status(lambda found: set(wanted) <= {*found.warnings}, "both are told")
        beta = lan.hosts["beta"]
        assert all(text in beta.run("status", "--brief").stdout for text in wanted)
        found = lines_of(beta.run("check"))
        assert {f"warn  {text}" for text in wanted} <= {*found}

        assert beta.run("stop", "tiny").returncode == 0
        beta.wait_status(lambda found: not any("can be reached" in text for text in found.warnings), "they are gone")


def test_engines_that_cannot_be_closed_in_are_open_and_named_or_refused(hosts: MakeLan) -> None:
    """A user namespace that may make no network namespace, as containers and some distributions have it."""
    refused = "the kernel refuses a network namespace"
    unable = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'
    within = ("unshare", "--user", "--map-root-user", "sh", "-c", unable, "-", *shardbox_command())
    with hosts(cluster_toml(("alpha",), memory="4GiB"), ("alpha",)) as lan:
        alpha = lan.hosts["alpha"]
        found = alpha.run_tool(*within, "check")
        assert any(line.startswith(f"warn  {refused}") for line in lines_of(found))

        process = alpha.spawn(*within, "up")
        served = alpha.wait_status(serves(1), "it serves")
        assert not rank_on(served, "alpha").isolated
        code, line = status_line(served)
        assert code == WARNING
        assert f"the engine's ports are open on alpha: {refused}" in line
        assert "WARNING engines cannot be closed in" in alpha.output(process)
        assert alpha.run("down").returncode == OK

        alpha.config.write_text(cluster_toml(("alpha",), memory="4GiB", engine='isolate = "always"'))
        told = alpha.run_tool(*within, "up")
        assert told.returncode == 1
        assert told.stderr.startswith("engine.isolate: engines cannot be closed in: " + refused)


def test_forming_declared_node_missing_503_then_without_it(hosts: MakeLan) -> None:
    with hosts(cluster_toml(memory=HALF, form_wait_s=10, api="hold_s = 1"), MEMBERS) as lan:
        alpha, beta = lan.up("alpha", "beta")
        for host in (alpha, beta):
            host.wait_status(lambda found: "waiting for gamma" in model(found).reason, "it waits")
        answers = [host.http("POST", CHAT, chat()) for host in (alpha, beta)]
        health = beta.http("GET", "/health")
        status = beta.run("status")

        for answer in answers:
            assert answer.status == 503 and int(answer.headers["Retry-After"]) > 0
            assert answer.error["code"] == "model_not_ready" and "waiting for gamma" in answer.error["message"]
        assert health.status == 503 and health.body["models"] == {"tiny": "waiting"}
        assert status.returncode == WARNING and "gamma" in status.stdout.splitlines()[0]

        found = beta.wait_status(serves(2), "a ring of 2")
        assert nodes_of(found) == ["alpha", "beta"]
        done = beta.run("status", "--brief")
        assert done.returncode == WARNING and "node gamma is missing" in done.stdout
        assert beta.http("POST", CHAT, chat(max_tokens=3)).status == 200

        gamma = lan.hosts["gamma"]
        gamma.up()
        late = gamma.wait_status(serves(2), "it comes late, and sees the ring")
        assert model(late).generation == model(found).generation
        assert gamma.http("POST", CHAT, chat(max_tokens=3)).status == 200

        assert alpha.up_process
        alpha.up_process.kill()
        alpha.up_process.wait(10)
        answer = beta.http("POST", CHAT, chat())  # held for a second, in which nobody can know that alpha is lost
        assert answer.status == 503 and answer.error["message"] and int(answer.headers["Retry-After"]) > 0
        for host in (beta, gamma):
            found = host.wait_status(
                lambda found: nodes_of(found) == ["beta", "gamma"] and serves(2)(found), "no alpha"
            )
        assert gamma.http("POST", CHAT, chat(max_tokens=3)).status == 200

        alpha.up()  # it led once, and would again: but there is a ring
        back = alpha.wait_status(serves(2), "it sees the ring of the others")
        assert model(back).generation == model(found).generation and model(back).leader == "beta"


def test_better_plan_is_taken_at_a_quiet_moment_only(hosts: MakeLan) -> None:
    """gamma, which comes late, could hold all that alpha and beta hold together."""
    text = cluster_toml(memory=HALF, form_wait_s=1).replace("form_wait_s = 1", "form_wait_s = 1\nreplan_s = 10")
    text = text.replace(f'name = "gamma"\nmemory = "{HALF}"', 'name = "gamma"\nmemory = "4500MiB"')
    with hosts(text, MEMBERS) as lan:
        alpha, _ = lan.up("alpha", "beta")
        before = model(alpha.wait_status(serves(2), "a ring of 2")).generation
        gamma = lan.hosts["gamma"]
        gamma.up()
        gamma.wait_status(lambda found: model(found).generation == before, "gamma sees the ring")
        asked_until = time.monotonic() + 15
        while time.monotonic() < asked_until:  # longer than replan_s
            assert alpha.http("POST", CHAT, chat(max_tokens=100)).status == 200
            assert model(alpha.wait_status(serves(2), "the ring that was there")).generation == before

        after = alpha.wait_status(lambda found: serves(1)(found) and nodes_of(found) == ["gamma"], "gamma alone")
        assert time.monotonic() - asked_until >= 9
        assert model(after).restarts == 0 and alpha.http("POST", CHAT, chat(max_tokens=3)).status == 200


def test_hangup_takes_the_changed_file_over_and_leaves_the_ring_alone(hosts: MakeLan) -> None:
    names = ("alpha", "beta")
    text = cluster_toml(names, memory=HALF)
    second = '[[models]]\nname = "mini"\npath = "mini.gguf"\nrehearse = {layers = 4, width = 64, bytes = "64MiB"}\n'
    with hosts(text, names) as lan:
        alpha, beta = lan.up(*names)
        before = model(beta.wait_status(serves(2), "a ring of 2")).generation

        def hang_up(text: str, *who: Host) -> None:
            lan.write("shardbox.toml", text)
            for host in who:
                assert host.up_process
                host.up_process.send_signal(signal.SIGHUP)

        def says(*words: str) -> Callable[[Snapshot], bool]:
            return lambda found: all(any(word in text for text in found.warnings) for word in words)

        hang_up(text.replace("slots = 2", "slots = two"), alpha)
        alpha.wait_status(says("is not taken over"), "the mistake")
        assert alpha.run("status").returncode in (UNKNOWN, WARNING)

        hang_up(
            text.replace("context = 8192", "context = 4096").replace("[api]", "[ports]\nmesh = 7411\n[api]") + second,
            alpha,
        )
        alpha.wait_status(says("ports needs a restart", "differs on beta", "tiny was changed"), "what is left")
        mini = {**chat(max_tokens=3), "model": "mini"}
        eventually(lambda: alpha.http("POST", CHAT, mini).status == 200, "the new model answers")
        assert beta.http("POST", CHAT, mini).status == 404
        assert beta.http("POST", CHAT, chat(max_tokens=3)).status == 200

        hang_up(text + second, alpha, beta)
        alpha.wait_status(lambda found: not found.warnings, "all is taken over, by both")
        eventually(lambda: beta.http("POST", CHAT, mini).status == 200, "the new model answers through beta")

        hang_up(text, alpha, beta)
        alpha.wait_status(lambda found: [view.model for view in found.models] == ["tiny"], "the model is gone")
        eventually(lambda: not any("mini" in words for words in alpha.pids().values()), "its engine too")
        assert model(beta.wait_status(serves(2), "the first ring")).generation == before


# --- the real engine ---------------------------------------------------------------------------------------

PROMPTS = ("The capital of France is", "Water boils at", "Once upon a time")


def prima_toml(folder: str, path: str) -> str:
    lines = ["[cluster]", 'name = "attic"', 'secret_file = "cluster.secret"']
    lines += ["[engine]", f'path = "{folder}"', f'lib = "{os.environ.get("SHARDBOX_PRIMA_LIB", "")}"', "threads = 1"]
    lines += [line for name in MEMBERS for line in ("[[nodes]]", f'name = "{name}"')]
    lines += ["[[models]]", 'name = "smol"', f'path = "{path}"', "context = 512"]
    lines += ["layers = {alpha = 10, beta = 10, gamma = 10}", ""]
    return "\n".join(lines)


def completion(ask: Callable[..., Answer], prompt: str) -> str:
    body = {"model": "smol", "prompt": prompt, "max_tokens": 24, "temperature": 0, "seed": 1}
    answer = ask("POST", "/v1/completions", body)
    assert answer.status == 200, answer.data
    return str(answer.body["choices"][0]["text"] if "choices" in answer.body else answer.body["content"])


def plain_server(host: Host, folder: str, path: str) -> dict[str, str]:
    """What Prima's server says alone, without a ring or shardbox."""
    server = host.spawn(
        os.path.join(folder, "llama-server"), *("-m", path, "-c", "512", "-t", "1", "--port", "8080"),
        LD_LIBRARY_PATH=os.environ.get("SHARDBOX_PRIMA_LIB", ""),
    )  # fmt: skip

    def ready() -> bool:
        assert server.poll() is None, host.output(server)[-2000:]
        with contextlib.suppress(OSError):
            return host.http("GET", "/health").status == 200
        return False

    eventually(ready, "the plain server is ready")
    try:
        return {prompt: completion(host.http, prompt) for prompt in PROMPTS}
    finally:
        server.kill()
        server.wait(10)


@pytest.mark.prima
def test_prima_ring_of_three_says_what_one_server_says_and_recovers(hosts: MakeLan) -> None:
    folder, path = os.environ.get("SHARDBOX_PRIMA", ""), os.environ.get("SHARDBOX_MODEL", "")
    if not folder or not path:
        pytest.skip("SHARDBOX_PRIMA (folder of the binaries) and SHARDBOX_MODEL (a GGUF of 30 layers) are not set")
    with hosts(prima_toml(folder, path), MEMBERS) as lan:
        alpha, beta, gamma = (lan.hosts[name] for name in MEMBERS)
        expected = plain_server(alpha, folder, path)
        lan.up(*MEMBERS)
        before = alpha.wait_status(serves(3), "a ring of 3", 90)
        assert [rank.layers for rank in model(before).ranks] == [10, 10, 10] and all(
            rank.isolated for rank in model(before).ranks
        )
        gamma.wait_status(serves(3), "gamma knows")
        assert alpha.run("status").returncode == OK
        assert {prompt: completion(gamma.http, prompt) for prompt in PROMPTS} == expected

        victim = next(rank.node for rank in model(before).ranks if rank.rank == 1)
        kill(rank_on(before, victim).pid)

        alpha.wait_status(
            lambda found: serves(3)(found) and model(found).generation != model(before).generation, "serving again", 90
        )
        beta.wait_status(serves(3), "beta knows")
        assert completion(beta.http, PROMPTS[0]) == expected[PROMPTS[0]]
        assert "llama" in beta.run("logs", "alpha").stdout
        assert alpha.run("down", "--all").returncode == 0
        for host in (alpha, beta, gamma):
            assert host.up_process and host.up_process.wait(PATIENCE_S) == 0
            assert_nothing_left(host)
