"""Sizes and durations for people, and dataclasses as JSON between nodes that need not trust each other."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import box, card, copy_of, ring_plan, shape

from shardbox import (
    GIB,
    KIB,
    MIB,
    Lease,
    MessageError,
    ModelPlan,
    ModelShape,
    ModelView,
    NodeFacts,
    PeerView,
    RankView,
    Snapshot,
    WireView,
    digest,
    format_duration,
    format_size,
    from_json,
    parse_size,
    to_json,
)

# --- sizes ---


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1b", 1),
        ("1 B", 1),
        ("20GiB", 20 * GIB),
        ("20 gib", 20 * GIB),
        (" 512MiB ", 512 * MIB),
        ("1.5GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("2TiB", 2 << 40),
        ("3kb", 3000),
        ("7 MB", 7_000_000),
        ("1TB", 10**12),
    ],
)
def test_parse_size_good_gives_bytes(text: str, count: int) -> None:
    assert parse_size(text) == count


NO_SIZES = ["", " ", "GiB", "-1", "-1GiB", "+5GiB", "1.2.3GiB", "1GiBs", "1G", "1 K", "12 %", "nan", "inf", "1e400"]
NO_SIZES += [".5GiB", "1,5GiB", "0x10", "²", "½GiB", "1GiB 2MiB", "1\0GiB", "one", "9" * 400]


@pytest.mark.parametrize("text", NO_SIZES)
def test_parse_size_bad_says_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match=r'a size such as "20GiB"'):
        parse_size(text)


@given(st.text(max_size=20))
def test_parse_size_any_text_gives_bytes_or_value_error(text: str) -> None:
    try:
        count = parse_size(text)
    except ValueError:
        return
    assert type(count) is int
    assert count >= 0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (98_362_432, "93.8 MiB"),
        (20 * GIB, "20 GiB"),
        (-3 * MIB, "-3 MiB"),
        (5 << 40, "5 TiB"),
        (4096 << 40, "4096 TiB"),
    ],
)
def test_format_size_shows_three_digits(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize("count", [1000 * KIB, 1023 * KIB, 1000 * MIB, 1010 * GIB, int(999.7 * GIB)])
def test_format_size_just_below_next_unit_has_no_exponent(count: int) -> None:
    assert "e" not in format_size(count)


@given(st.integers(-(1 << 60), 1 << 60))
def test_format_size_any_count_is_close(count: int) -> None:
    number, unit = format_size(count).split()
    factor = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}[unit]
    assert abs(float(number) * factor - count) <= abs(count) * 0.006


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.25, "0.2 s"),
        (9.94, "9.9 s"),
        (12.4, "12 s"),
        (75, "1 min 15 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (7300, "2 h 1 min"),
        (47 * 3600 + 59 * 60, "47 h 59 min"),
        (48 * 3600, "2 days"),
        (365 * 86400, "365 days"),
    ],
)
def test_format_duration_shows_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# --- dataclasses as JSON ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One field of each kind that messages have."""

    word: str
    count: int
    share: float
    flag: bool
    maybe: int | None = None
    names: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    leaf: Leaf
    leaves: tuple[Leaf, ...] = ()
    other: Leaf | None = None
    anything: Any = None


WORDS = st.text(max_size=12)
COUNTS = st.integers(-(1 << 62), 1 << 62)
LEAVES = st.builds(
    Leaf,
    word=WORDS,
    count=COUNTS,
    share=st.floats(-1e200, 1e200),
    flag=st.booleans(),
    maybe=st.none() | COUNTS,
    names=st.lists(WORDS, max_size=3).map(tuple),
    sizes=st.dictionaries(WORDS, COUNTS, max_size=3),
)
TREES = st.builds(Tree, leaf=LEAVES, leaves=st.lists(LEAVES, max_size=3).map(tuple), other=st.none() | LEAVES)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@given(TREES)
def test_json_round_trip_gives_the_same(tree: Tree) -> None:
    assert from_json(Tree, json.loads(json.dumps(to_json(tree)))) == tree


MODEL = shape(layers=3)
MESSAGES = [
    box("alpha", 8 * GIB, MODEL, gpus=(card(GIB), card(None, index=1))),
    ring_plan(5, 2, 1),
    Lease(model="m", proposer="alpha", generation="g", expires=1.5),
    Snapshot(
        cluster="attic",
        node="alpha",
        version="0.1.0",
        engine_kind="prima",
        demo=False,
        seconds_up=3.5,
        api="http://127.0.0.1:8080/v1",
        peers=(PeerView(name="alpha", state="self", rtt_ms=0.5),),
        models=(
            ModelView(
                model="m",
                phase="serving",
                plan=ring_plan(3, 2),
                ranks=(
                    RankView(
                        model="m",
                        generation="g",
                        rank=0,
                        node="alpha",
                        phase="bound",
                        layers=3,
                        exit_code=-9,
                        wires=(
                            WireView(kind="data", rank=1, node="beta", open=1, sent_bytes=1 << 40, received_bytes=2),
                        ),
                    ),
                ),
            ),
        ),
        warnings=("careful",),
        exits=(),
        refusals={"wrong_secret": 2},
    ),
]


@pytest.mark.parametrize("value", MESSAGES, ids=lambda value: type(value).__name__)
def test_message_round_trip_gives_the_same(value: Any) -> None:
    data = json.loads(json.dumps(to_json(value)))
    assert from_json(type(value), data) == value
    assert to_json(from_json(type(value), data)) == data


@pytest.mark.parametrize("value", MESSAGES, ids=lambda value: type(value).__name__)
def test_message_of_another_version_with_unknown_keys_is_read(value: Any) -> None:
    assert from_json(type(value), {**to_json(value), "from_the_future": [{"x": 1}]}) == value


def test_message_without_optional_keys_gets_defaults() -> None:
    data = to_json(MESSAGES[0])
    for name in ("gpus", "gpu_note", "models", "own_bytes"):
        del data[name]
    facts = from_json(NodeFacts, data)
    assert (facts.gpus, facts.gpu_note, facts.models, facts.own_bytes) == ((), "", (), 0)


PATH = "facts.models[0].shape."


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        ({"name": None}, "facts.name", "expected str, got NoneType"),
        ({"name": 5}, "facts.name", "expected str, got int"),
        ({"cores": "8"}, "facts.cores", "expected int, got str"),
        ({"cores": True}, "facts.cores", "expected int, got bool"),
        ({"cores": 8.0}, "facts.cores", "expected int, got float"),
        ({"memory": []}, "facts.memory", "expected an object, got list"),
        ({"memory": {}}, "facts.memory.total_bytes", "missing"),
        ({"memory": {"total_bytes": 1, "available_bytes": [2]}}, "facts.memory.available_bytes", "expected int"),
        ({"gpus": {}}, "facts.gpus", "expected"),
        ({"gpus": "none"}, "facts.gpus", "expected"),
        ({"gpus": [None]}, "facts.gpus[0]", "expected an object, got NoneType"),
        ({"gpus": [{"index": 0, "name": "a"}, {"index": 0}]}, "facts.gpus[1].name", "missing"),
        ({"gpus": [{"index": 0, "name": "a", "free_bytes": "much"}]}, "facts.gpus[0].free_bytes", "expected int"),
        ({"ports": {"mesh": "7311"}}, "facts.ports.mesh", "expected int, got str"),
        ({"models": [{"name": "m", "shape": "big"}]}, "facts.models[0].shape", "expected an object, got str"),
        ({"models": [{"name": "m", "shape": {"layers": 1}}]}, PATH + "architecture", "missing"),
        (
            {"models": [{"name": "m", "shape": {**to_json(MODEL), "layer_bytes": [1, 2, "3"]}}]},
            PATH + "layer_bytes[2]",
            "expected int, got str",
        ),
    ],
)
def test_from_json_hostile_message_names_the_field(change: dict[str, Any], where: str, what: str) -> None:
    with pytest.raises(MessageError) as caught:
        from_json(NodeFacts, {**to_json(MESSAGES[0]), **change}, "facts")
    assert caught.value.where == where
    assert caught.value.what.startswith(what)


@pytest.mark.parametrize("name", [one.name for one in fields(NodeFacts)])
def test_from_json_field_of_wrong_type_is_named(name: str) -> None:
    """A set is no JSON value: it fits no field of any message."""
    with pytest.raises(MessageError) as caught:
        from_json(NodeFacts, {**to_json(MESSAGES[0]), name: {1, 2}}, "facts")
    assert caught.value.where == f"facts.{name}"


@given(JSON, st.sampled_from([NodeFacts, ModelPlan, Snapshot, ModelView, Leaf, Tree]))
def test_from_json_any_json_is_read_or_message_error(data: Any, kind: type[Any]) -> None:
    try:
        value = from_json(kind, data, "there")
    except MessageError as error:
        assert error.where.startswith("there")
        assert "\n" not in error.what
    else:
        assert is_dataclass(value)


@given(st.data())
def test_from_json_one_field_replaced_is_read_or_names_it(data: st.DataObject) -> None:
    """One value somewhere in a good message becomes something else: the error is at that place or further in."""
    body, where = to_json(data.draw(st.sampled_from(MESSAGES[:2]))), "there"
    kind = NodeFacts if "memory" in body else ModelPlan
    parent, key = body, data.draw(st.sampled_from(sorted(body)))
    where += f".{key}"
    while isinstance(parent[key], (dict, list)) and parent[key] and data.draw(st.booleans()):
        parent = parent[key]
        key = data.draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
        where += f".{key}" if isinstance(parent, dict) else f"[{key}]"
    parent[key] = data.draw(JSON)
    try:
        from_json(kind, body, "there")
    except MessageError as error:
        assert error.where.startswith(where)


def test_from_json_huge_integer_for_a_float_names_the_field() -> None:
    with pytest.raises(MessageError, match="rtt_ms"):
        from_json(PeerView, {"name": "a", "state": "live", "rtt_ms": 10**400})


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_from_json_number_that_is_none_names_the_field(text: str) -> None:
    """`status` would print "nan tok/s", and json.dumps a token that no other reader takes."""
    with pytest.raises(MessageError, match="rtt_ms"):
        from_json(PeerView, json.loads(f'{{"name": "a", "state": "live", "rtt_ms": {text}}}'))


def test_digest_of_equal_values_is_equal_whatever_the_order() -> None:
    assert digest({"a": 1, "b": (2, 3)}) == digest({"b": [2, 3], "a": 1})
    assert len(digest(MODEL)) == 16
    assert digest(MODEL) != digest(replace(MODEL, layers=4))
    assert digest(copy_of(MODEL)) == digest(to_json(copy_of(MODEL)))


def test_shape_round_trip_keeps_tuples() -> None:
    assert isinstance(from_json(ModelShape, to_json(MODEL)).layer_bytes, tuple)
