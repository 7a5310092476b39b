"""What `status` says: the codes of the contract, one line for a pager, and tables."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import box, config, copy_of, model_config, plan_model, ring_plan, shape

from shardbox import (
    CRITICAL,
    GIB,
    OK,
    STATUS_WORDS,
    UNKNOWN,
    WARNING,
    CopyView,
    ModelView,
    PeerView,
    Phase,
    PlanError,
    RankView,
    Snapshot,
    WireView,
    copy_text,
    judge,
    judge_model,
    peers_table,
    plan_text,
    ranks_table,
    status_line,
    status_text,
    table,
    wrong_copies,
)

WIRE = WireView(kind="data", rank=1, node="beta", open=1, sent_bytes=3 << 20, received_bytes=1 << 20)


def rank_view(rank: int, **more: Any) -> RankView:
    fields = {"model": "qwq-32b", "generation": "g1", "rank": rank, "node": ("alpha", "beta", "gamma")[rank]}
    return RankView(**{**fields, "phase": "bound", "layers": 20, "pid": 100 + rank, "wires": (WIRE,), **more})


def model(phase: str = Phase.SERVING, **more: Any) -> ModelView:
    fields: dict[str, Any] = {"model": "qwq-32b", "phase": phase, "seconds": 75.0}
    if phase in Phase.ACTIVE:
        fields |= {"leader": "alpha", "world": 3, "alive": 3, "plan": ring_plan(24, 20, 20), "generation": "g1"}
        fields |= {"ranks": tuple(rank_view(rank) for rank in range(3))}
    return ModelView(**{**fields, **more})


PEERS = (
    PeerView(name="alpha", state="self", address="10.0.0.1", source="self", cores=8, memory_bytes=8 * GIB),
    PeerView(name="beta", state="live", address="10.0.0.2", source="mdns", rtt_ms=0.31, version="0.1.0"),
    PeerView(name="gamma", state="live", address="10.0.0.3", source="static", rtt_ms=12.5, gpus=1),
)


def snapshot(*models: ModelView, **more: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "cluster": "attic",
        "node": "alpha",
        "version": "0.1.0",
        "engine_kind": "prima",
        "demo": False,
        "seconds_up": 7300.0,
        "api": "http://127.0.0.1:8080/v1",
        "peers": PEERS,
        "models": models or (model(),),
        "warnings": (),
        "exits": (),
    }
    return Snapshot(**{**fields, **more})


def peer(state: str, **more: Any) -> tuple[PeerView, ...]:
    return (*PEERS[:2], PeerView(name="gamma", state=state, **{"declared": state != "gone", **more}))


# --- the contract's table ---

RESTARTED = model(restarts=2, last_trouble="beta was lost")
STOPPED = model(Phase.STOPPED, reason="stopped by the operator")
CASES = [
    ("ok-all-answer", OK, snapshot(), "qwq-32b 3/3 ranks, leader alpha"),
    ("ok-with-speed", OK, snapshot(model(tokens_per_s=11.24)), "leader alpha, 11.2 tok/s"),
    ("ok-stopped-by-operator", OK, snapshot(STOPPED), "qwq-32b stopped by the operator"),
    ("ok-no-models", OK, replace(snapshot(), models=()), "no models configured"),
    ("ok-demo", OK, snapshot(engine_kind="rehearsal", demo=True), "qwq-32b 3/3"),
    ("ok-stranger", OK, snapshot(peers=(*PEERS, PeerView(name="other", state="foreign"))), "qwq-32b 3/3"),
    ("ok-undeclared-node-lost", OK, snapshot(peers=peer("lost", declared=False)), "qwq-32b 3/3"),
    ("ok-undeclared-node-gone", OK, snapshot(peers=peer("gone")), "qwq-32b 3/3"),
    (
        "warn-node-missing",
        WARNING,
        snapshot(peers=peer("missing", detail="never seen")),
        "node gamma is missing: never",
    ),
    ("warn-node-lost", WARNING, snapshot(peers=peer("lost")), "node gamma is lost"),
    ("warn-node-unreachable", WARNING, snapshot(peers=peer("unreachable")), "node gamma is unreachable"),
    ("warn-restart", WARNING, snapshot(RESTARTED), "2 restarts in the last 15 min (beta was lost)"),
    ("warn-configurations-differ", WARNING, snapshot(warnings=("shardbox.toml differs on beta",)), "toml differs on"),
    ("warn-ports-open", WARNING, snapshot(warnings=("the engine's ports are open on beta: no",)), "ports are open"),
    ("warn-rehearsal", WARNING, snapshot(engine_kind="rehearsal"), "rehearsal engines: no model is loaded"),
    ("warn-forming", WARNING, snapshot(model(Phase.LOADING, reason="3 of 9 GiB")), "loading for 1 min 15 s: 3 of 9"),
    ("warn-waiting", WARNING, snapshot(model(Phase.WAITING, reason="beta")), "qwq-32b waiting for 1 min 15 s: beta"),
    ("crit-overdue", CRITICAL, snapshot(model(Phase.WAITING, reason="beta", overdue=True)), "waiting for 1 min 15 s"),
    ("crit-failed", CRITICAL, snapshot(model(Phase.FAILED, reason="out of memory")), "qwq-32b failed: out of memory"),
    ("crit-rank-gone", CRITICAL, snapshot(model(alive=2)), "qwq-32b serving"),
    ("crit-backoff-overdue", CRITICAL, snapshot(model(Phase.BACKOFF, reason="x", overdue=True)), "qwq-32b backoff"),
]


@pytest.mark.parametrize(("code", "given", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_status_gives_code_and_words(code: int, given: Snapshot, words: str) -> None:
    found, line = status_line(given)
    assert found == code
    assert line.startswith(f"SHARDBOX {STATUS_WORDS[code]} - ")
    assert words in line


@pytest.mark.parametrize("given", [case[2] for case in CASES], ids=[case[0] for case in CASES])
def test_status_first_line_is_for_a_pager(given: Snapshot) -> None:
    _, line = status_line(given)
    assert line.count("|") == 1
    assert line.splitlines() == [line]
    text, _, data = line.partition(" | ")
    assert text
    pairs = dict(pair.split("=") for pair in data.split(" "))
    assert set(pairs) == {"ranks", "tok_s", "nodes", "in_flight", "held"}
    assert all(float(value) >= 0 for value in pairs.values())
    assert status_text(given, verbose=False) == line
    assert status_text(given).splitlines()[0] == line


@pytest.mark.parametrize("given", [case[2] for case in CASES], ids=[case[0] for case in CASES])
def test_status_tables_have_no_trailing_blanks(given: Snapshot) -> None:
    for line in status_text(given).splitlines():
        assert line == line.rstrip()


def test_status_words_are_the_plugin_conventions() -> None:
    assert [STATUS_WORDS[code] for code in (OK, WARNING, CRITICAL, UNKNOWN)] == ["OK", "WARNING", "CRITICAL", "UNKNOWN"]
    assert (OK, WARNING, CRITICAL, UNKNOWN) == (0, 1, 2, 3)


def test_status_line_of_a_good_cluster_word_for_word() -> None:
    assert status_line(snapshot(model(tokens_per_s=11.24, in_flight=1))) == (
        OK,
        "SHARDBOX OK - qwq-32b 3/3 ranks, leader alpha, 11.2 tok/s | ranks=3 tok_s=11.2 nodes=3 in_flight=1 held=0",
    )


def test_judge_puts_the_worst_first() -> None:
    views = (model(), RESTARTED, replace(model(Phase.FAILED, reason="x"), model="other"))
    for order in itertools.permutations(views):
        code, phrases = judge(snapshot(*order, warnings=("careful",)))
        assert code == CRITICAL
        assert phrases[0] == "other failed: x"
        assert set(phrases[1:3]) == {"careful", judge_model(RESTARTED)[1]}
        assert phrases[3] == judge_model(model())[1]


def test_judge_one_restart_is_said_in_the_singular() -> None:
    assert "1 restart in the last" in judge_model(model(restarts=1))[1]


def test_judge_worker_that_left_without_layers_is_no_fault() -> None:
    """Its view counts as alive: the engine's own scheduler sent it away."""
    ranks = (rank_view(0), rank_view(1), rank_view(2, exit_code=0, pid=0))
    assert judge_model(model(ranks=ranks))[0] == OK


def test_judge_serving_without_a_rank_says_how_many_are_left() -> None:
    assert "2/3 ranks" in judge_model(model(alive=2))[1]


HOSTILE = ["a|b", "a\nb", "a\r\nb", "a\x0bb", "a\x0cb", "a\x1b[2Jb", "a\x85b", "a\u2028b", "\x00"]
HOSTILE_NOW = ["a|b", "a\nb"]


@pytest.mark.parametrize("text", [*HOSTILE_NOW, *(pytest.param(text) for text in HOSTILE if text not in HOSTILE_NOW)])
def test_status_line_with_hostile_words_stays_one_printable_line(text: str) -> None:
    """An engine's last line, or another node's words, end up here; a terminal must not obey them."""
    views = (model(Phase.FAILED, reason=text), model(restarts=1, last_trouble=text))
    _, line = status_line(snapshot(*views, warnings=(text,), peers=peer("lost", detail=text)))
    assert line.count("|") == 1
    assert line.splitlines() == [line]
    assert line.isprintable()


# --- tables ---


def test_table_pads_columns_and_ends_clean() -> None:
    assert table(("A", "LONG"), [("wide", 1), ("x", "")]) == "A     LONG\nwide  1\nx"
    assert table(("A", "B"), []) == "A  B"


@given(st.lists(st.tuples(*(st.text("ab ", max_size=6),) * 3), max_size=6))
def test_table_of_any_cells_is_aligned(rows: list[tuple[str, str, str]]) -> None:
    lines = table(("ONE", "TWO", "THREE"), rows).split("\n")
    assert len(lines) == len(rows) + 1
    second = lines[0].index("TWO")
    for line, row in zip(lines[1:], rows, strict=True):
        assert line == line.rstrip()
        assert line[: len(row[0])] == row[0][: len(line)]
        assert line[second:].startswith(row[1].rstrip()) or row[1].strip() == ""


def test_peers_table_names_every_node_and_what_is_unknown() -> None:
    lines = peers_table((*PEERS, PeerView(name="delta", state="missing", detail="in [[nodes]], never seen"))).split(
        "\n"
    )
    assert " ".join(lines[0].split()) == "NODE STATE ADDRESS FOUND BY RTT MEMORY GPUS CORES VERSION NOTE"
    assert lines[1].split() == ["alpha", "self", "10.0.0.1", "self", "-", "8", "GiB", "0", "8", "-"]
    assert "0.3 ms" in lines[2]
    assert lines[4].endswith("in [[nodes]], never seen")


def test_ranks_table_adds_up_wires_and_shows_exits() -> None:
    view = model(
        ranks=(
            rank_view(0, isolated=True, rss_bytes=2 * GIB, wires=(WIRE, WIRE)),
            rank_view(1, exit_code=-9, pid=0),
            rank_view(2, problem="its port is taken"),
        )
    )
    rows = [line.split() for line in ranks_table(view).split("\n")]
    assert rows[1] == ["0", "alpha", "bound", "20", "100", "2", "GiB", "yes", "6", "MiB", "2", "MiB"]
    assert rows[2][-2:] == ["exit", "-9"]
    assert rows[3][-4:] == ["its", "port", "is", "taken"]


def test_status_text_shows_all_that_there_is() -> None:
    given = snapshot(
        model(),
        exits=("12:00 killed", "11:00 died"),
        refusals={"wrong_secret": 3, "a": 1},
        last_refused={"a": "10.0.0.9"},
    )
    text = status_text(given)
    assert "node alpha of cluster attic, shardbox 0.1.0, up 2 h 1 min, endpoint http://127.0.0.1:8080/v1" in text
    assert "model qwq-32b: serving\n  windows set by hand in `layers`\n  RANK" in text
    assert text.index("12:00 killed") < text.index("11:00 died")
    assert text.endswith("\nREFUSED       TIMES  LAST\na             1      10.0.0.9\nwrong_secret  3      -")


def test_plan_text_shows_ranges_reasons_and_who_is_left_out() -> None:
    text = plan_text(ring_plan(5, 3), "m")
    assert text.startswith("model m: 8 layers, context 128, a ring of 2\n  windows set by hand in `layers`\n")
    rows = [line.split() for line in text.splitlines()[3:5]]
    assert [row[:3] for row in rows] == [["0", "alpha", "3-7"], ["1", "beta", "0-2"]]
    entry, eight = model_config(), shape(layers=8)
    found = plan_model(config(entry), entry, [box("alpha", 16 * GIB, eight), box("beta", GIB)])
    assert plan_text(found, "m").splitlines()[0] == "model m: 8 layers, context 128, one node"
    assert plan_text(found, "m").splitlines()[-1] == "  not beta: not in this node's configuration"
    for line in (text + plan_text(found, "m")).splitlines():
        assert line == line.rstrip()


def test_plan_text_without_a_plan_says_why() -> None:
    assert plan_text(PlanError("too big", hint="add a box"), "m") == "model m: no plan\n  too big\n  hint: add a box"
    assert plan_text(PlanError("too big"), "m") == "model m: no plan\n  too big"


def test_copies_that_all_contradict_the_toml_are_not_to_be_pulled_from_each_other() -> None:
    """`pull --replace` was the advice, though no box had the content that `sha256` asks for."""
    wrong, right = copy_of(shape(), root="bbbb", problem="has SHA-256 bb, the TOML says aa"), copy_of(shape())
    of = [box(name, 2**34, models=(copy,)) for name, copy in (("alpha", wrong), ("beta", wrong), ("gamma", right))]
    assert all("correct `sha256`" in text for text in wrong_copies(model_config(), of[:2]))
    assert all("pull m --replace" in text for text in wrong_copies(model_config(), of))
    assert len(wrong_copies(model_config(), of)) == 2


@pytest.mark.parametrize(
    ("state", "done", "rate", "text"),
    [
        ("copying", 0, 0.0, "beta has 0 % of 2 GiB"),
        ("copying", GIB, GIB / 2, "beta has 50 % of 2 GiB, 512 MiB/s, 2.0 s left"),
        ("copying", 2 * GIB, 0.0, "beta has all of 2 GiB, and puts it in place"),
        ("reading", GIB, GIB / 2, "beta has read 50 % of 2 GiB, 512 MiB/s, 2.0 s left"),
    ],
)
def test_copy_text_says_how_far_and_how_long(state: str, done: int, rate: float, text: str) -> None:
    view = CopyView(model="m", node="beta", state=state, done_bytes=done, size_bytes=2 * GIB, bytes_per_s=rate)
    assert copy_text(view) == text
