"""One ring as a state machine, driven with a clock of our own; and leases."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from samples import ring_plan

from shardbox import (
    BACKOFF_BASE_S,
    BACKOFF_CAP_S,
    COPY_STALL_S,
    HELD_TRIES,
    LEASE_S,
    LOAD_BASE_S,
    LOAD_BYTES_PER_S,
    LOOK_GAP_S,
    PAUSES,
    PREPARE_TIMEOUT_S,
    PROBE_TIMEOUT_S,
    QUICK_FAILURES,
    RESTART_MEMORY_S,
    SAME_RING_S,
    STEADY_S,
    WATCH_S,
    Effect,
    Event,
    Held,
    Lease,
    Phase,
    PlanError,
    Pulse,
    Ring,
    grant,
    step,
)

PLAN = ring_plan(5, 3)
GRACE_S = 20.0
TIMED = (Phase.COPYING, Phase.PREPARING, Phase.LOADING, Phase.PROBING, Phase.DRAINING, Phase.BACKOFF)
LACKING = replace(PLAN, ranks=(PLAN.ranks[0], replace(PLAN.ranks[1], copy_bytes=100)))
EVENTS = (
    *("tick", "plan", "want", "unwant", "yield", "copied", "provisioned", "granted", "refused", "loaded", "answered"),
    *("replan", "trouble", "stalled", "lost", "leaving", "stopped"),
)
PHASES = tuple(value for name, value in vars(Phase).items() if name.isupper() and isinstance(value, str))


class Driver:
    """A ring, a clock, and every effect so far."""

    def __init__(self) -> None:
        self.ring = Ring(model="m")
        self.now = 1000.0
        self.effects: list[Effect] = []
        self.tokens = (f"g{n}" for n in itertools.count(1))

    def send(self, kind: str, **more: Any) -> tuple[Effect, ...]:
        if kind.startswith("plan"):
            more = {"plan": PLAN if kind == "plan" else LACKING, "token": next(self.tokens), **more}
            kind = "plan"
        self.ring, effects = step(self.ring, Event(kind=kind, **more), self.now)
        self.effects += effects
        return effects

    def wait(self, seconds: float) -> tuple[Effect, ...]:
        self.now += seconds
        return self.send("tick")

    def to(self, phase: str) -> Driver:
        """The usual way to a phase."""
        if phase == Phase.DRAINING:
            self.to(Phase.SERVING).send("leaving", grace_s=GRACE_S, reason="beta goes down")
            return self
        ways: dict[str, tuple[str, ...]] = {
            Phase.WAITING: (),
            Phase.COPYING: ("plan to copy",),
            Phase.PREPARING: ("plan",),
            Phase.LOADING: ("plan", "granted"),
            Phase.PROBING: ("plan", "granted", "loaded"),
            Phase.SERVING: ("plan", "granted", "loaded", "answered"),
            Phase.STOPPING: ("plan", "granted", "trouble"),
            Phase.BACKOFF: ("plan", "granted", "trouble", "stopped"),
            Phase.STOPPED: ("unwant",),
            Phase.FAILED: ("plan", "granted", "trouble", "stopped"),
        }
        for _ in range(QUICK_FAILURES if phase == Phase.FAILED else 1):
            if self.ring.phase == Phase.BACKOFF:
                self.wait(BACKOFF_CAP_S * 2)
            for kind in ways[phase]:
                self.send(kind, reason=f"because of {kind}")
        assert self.ring.phase == phase
        return self


def at(phase: str) -> Driver:
    return Driver().to(phase)


# --- the way up ---


def test_ring_goes_up_one_proof_at_a_time() -> None:
    it = Driver()
    assert it.ring.phase == Phase.WAITING
    for kind, effect, phase in (
        ("plan", "prepare", Phase.PREPARING),
        ("granted", "launch", Phase.LOADING),
        ("loaded", "probe", Phase.PROBING),
    ):
        (done,) = it.send(kind)
        assert (done.kind, done.generation, done.plan) == (effect, "g1", PLAN)
        assert it.ring.phase == phase
        assert it.ring.since == it.now
    assert it.send("answered") == ()
    assert (it.ring.phase, it.ring.served_since, it.ring.deadline) == (Phase.SERVING, it.now, 0.0)


def test_ring_with_a_rank_that_lacks_the_model_copies_first() -> None:
    it = Driver()
    (effect,) = it.send("plan to copy")
    assert (effect.kind, effect.plan, it.ring.phase) == ("provision", LACKING, Phase.COPYING)
    assert it.ring.reason == "beta fetch it"
    (effect,) = it.send("provisioned")
    assert (effect.kind, it.ring.phase) == ("prepare", Phase.PREPARING)


def test_ring_that_copies_has_a_deadline_that_follows_progress() -> None:
    it = at(Phase.COPYING)
    for count in range(5):
        it.wait(COPY_STALL_S - 1)
        assert it.ring.phase == Phase.COPYING
        it.send("copied", reason=f"beta has {count} %")
        assert it.ring.reason == f"beta has {count} %"
    it.wait(COPY_STALL_S)
    assert it.ring.phase == Phase.STOPPING and "the start deadline ran out while copying" in it.ring.last_trouble


def test_ring_whose_copies_fail_is_never_given_up() -> None:
    it = Driver()
    for _ in range(2 * QUICK_FAILURES):
        it.wait(BACKOFF_CAP_S * 2)
        for kind in ("plan to copy", "trouble", "stopped"):
            it.send(kind, reason="no room")
    assert it.ring.phase == Phase.BACKOFF


def test_ring_without_a_plan_says_what_it_waits_for() -> None:
    it = Driver()
    assert it.send("plan", plan=None, reason="waits for beta") == ()
    assert (it.ring.phase, it.ring.reason, it.ring.plan) == (Phase.WAITING, "waits for beta", None)


ENDS = ("trouble", "stalled", "refused", "lost", "leaving", "yield", "unwant")
# What each event does in each phase: the phase after it. What is not here changes nothing at all.
NEXT = {
    (Phase.WAITING, "plan"): Phase.PREPARING,
    (Phase.COPYING, "copied"): Phase.COPYING,
    (Phase.COPYING, "provisioned"): Phase.PREPARING,
    (Phase.PREPARING, "granted"): Phase.LOADING,
    (Phase.LOADING, "loaded"): Phase.PROBING,
    (Phase.PROBING, "answered"): Phase.SERVING,
    (Phase.STOPPING, "stopped"): Phase.BACKOFF,
    **{(phase, kind): Phase.STOPPING for phase in sorted(Phase.ACTIVE) for kind in ENDS},
    (Phase.DRAINING, "leaving"): Phase.DRAINING,
    (Phase.SERVING, "replan"): Phase.STOPPING,
    **{(phase, "unwant"): Phase.STOPPED for phase in (Phase.WAITING, Phase.BACKOFF, Phase.FAILED)},
    **{(phase, "want"): Phase.WAITING for phase in (Phase.STOPPED, Phase.FAILED, Phase.BACKOFF)},
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", EVENTS)
def test_event_in_each_phase_moves_as_the_table_says(phase: str, kind: str) -> None:
    it = at(phase)
    before = it.ring
    effects = it.send(kind, reason="why")
    assert it.ring.phase == NEXT.get((phase, kind), phase)
    if (phase, kind) not in NEXT:
        assert effects == ()
        failures = 0 if kind == "want" else before.failures  # an operator's word counts from zero
        assert replace(it.ring, wanted=True, failures=failures) == replace(before, wanted=True, failures=failures)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", EVENTS)
def test_event_of_another_generation_changes_nothing(phase: str, kind: str) -> None:
    it = at(phase)
    before = it.ring
    assert it.send(kind, generation="g0") == ()
    assert it.ring is before


def test_event_that_is_not_known_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no such event"):
        Driver().send("surprise")


def test_event_of_a_generation_that_was_stopped_is_late() -> None:
    it = at(Phase.BACKOFF)
    for kind in ("trouble", "stopped", "granted", "loaded", "answered", "refused"):
        before = it.ring
        assert it.send(kind, generation="g1") == ()
        assert it.ring == before


# --- deadlines ---


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [
        (Phase.PREPARING, PREPARE_TIMEOUT_S),
        (Phase.LOADING, LOAD_BASE_S + sum(rank.weights_bytes for rank in PLAN.ranks) / LOAD_BYTES_PER_S),
        (Phase.PROBING, PROBE_TIMEOUT_S),
    ],
)
def test_deadline_of_a_start_stops_the_ring(phase: str, seconds: float) -> None:
    it = at(phase)
    assert it.wait(seconds - 0.01) == ()
    assert it.ring.phase == phase
    (effect,) = it.wait(0.02)
    assert (effect.kind, effect.generation, effect.orderly) == ("teardown", "g1", False)
    assert it.ring.phase == Phase.STOPPING
    assert f"the start deadline ran out while {phase}" in it.ring.last_trouble


def test_deadline_names_the_rank_that_the_tick_names() -> None:
    it = at(Phase.LOADING)
    it.now += 1e6
    it.send("tick", reason="beta still reads the model")
    assert it.ring.reason == "the start deadline ran out while loading: beta still reads the model"


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.SERVING, Phase.STOPPING, Phase.STOPPED, Phase.FAILED])
def test_deadline_is_not_for_phases_without_one(phase: str) -> None:
    it = at(phase)
    assert it.wait(1e9) == ()
    assert it.ring.phase == phase


# --- failing, and trying again ---


def fail_once(it: Driver, jitter: float = 0.0) -> float:
    """One more start that fails; the pause after it in seconds, 0 where there is none."""
    it.send("plan")
    it.send("granted")
    it.send("trouble", reason="an engine died")
    it.send("stopped", jitter=jitter)
    return it.ring.deadline - it.now if it.ring.phase == Phase.BACKOFF else 0.0


def test_backoff_doubles_then_the_model_has_failed() -> None:
    it, pauses = Driver(), []
    while it.ring.phase != Phase.FAILED:
        pauses.append(fail_once(it))
        it.wait(BACKOFF_CAP_S)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 0.0]
    assert len(pauses) == QUICK_FAILURES
    assert it.ring.reason == "an engine died"
    assert it.ring.plan is None
    assert it.wait(1e6) == ()


def test_refusals_alone_never_fail_a_model() -> None:
    """Nothing was started: a rank that is taken, or a file that is still read, may be there at the next try."""
    it = Driver()
    for _ in range(3 * QUICK_FAILURES):
        it.send("plan")
        it.send("refused", reason="its lease belongs to beta")
        it.send("stopped")
        assert it.ring.phase == Phase.BACKOFF
        it.wait(BACKOFF_CAP_S)
    assert it.ring.failures < QUICK_FAILURES


@pytest.mark.parametrize("kind", ["lost", "leaving"])
def test_loss_of_a_node_alone_never_fails_a_model(kind: str) -> None:
    """No engine is to blame: a box that comes and goes may stay the next time."""
    it = Driver()
    for _ in range(3 * QUICK_FAILURES):
        it.to(Phase.SERVING).send(kind, reason="beta is gone")
        it.send("stopped")
        assert it.ring.phase == Phase.BACKOFF
        it.wait(BACKOFF_CAP_S)


@pytest.mark.parametrize("phase", sorted(Phase.ACTIVE - {Phase.DRAINING}))
def test_leaving_node_lets_a_whole_ring_end_in_order(phase: str) -> None:
    (effect,) = at(phase).send("leaving", reason="beta leaves")
    assert effect.orderly == (phase in (Phase.PROBING, Phase.SERVING, Phase.DRAINING))
    (effect,) = at(phase).send("lost", reason="beta is lost")
    assert not effect.orderly


def test_replan_is_no_failure_and_no_restart() -> None:
    it = at(Phase.SERVING)
    (effect,) = it.send("replan", reason="a better plan")
    assert (effect.kind, effect.orderly) == ("teardown", True)
    it.send("stopped")
    assert (it.ring.phase, it.ring.failures, it.ring.restarts) == (Phase.WAITING, 0, ())


def test_leaving_node_lets_answers_end_then_the_ring() -> None:
    it = at(Phase.DRAINING)
    assert it.ring.reason == "beta goes down"
    assert it.wait(GRACE_S - 1) == it.send("leaving", grace_s=GRACE_S) == ()
    (effect,) = it.send("tick", idle=True)
    assert (effect.kind, effect.orderly, it.ring.reason) == ("teardown", True, "beta goes down")
    it.send("stopped")
    assert (it.ring.phase, len(it.ring.restarts)) == (Phase.BACKOFF, 1)


def test_leaving_node_waits_for_answers_no_longer_than_its_grace() -> None:
    it = at(Phase.DRAINING)
    assert it.wait(GRACE_S - 0.01) == ()
    (effect,) = it.wait(0.02)
    assert effect.kind == "teardown"


def test_yield_to_another_leader_is_no_failure() -> None:
    it = at(Phase.LOADING)
    (effect,) = it.send("yield", reason="beta leads")
    assert (effect.kind, effect.reason) == ("teardown", "beta leads")
    it.send("stopped")
    assert (it.ring.phase, it.ring.failures, it.ring.restarts) == (Phase.WAITING, 0, ())


def test_backoff_ends_at_its_deadline_and_not_before() -> None:
    it = Driver()
    pause = fail_once(it)
    it.wait(pause - 0.01)
    assert it.ring.phase == Phase.BACKOFF
    it.wait(0.02)
    assert (it.ring.phase, it.ring.reason) == (Phase.WAITING, "an engine died")


def test_backoff_jitter_lengthens_by_half_at_most() -> None:
    assert fail_once(Driver(), jitter=1.0) == pytest.approx(1.5 * BACKOFF_BASE_S)


@pytest.mark.parametrize("failures", range(1, QUICK_FAILURES))
def test_backoff_never_exceeds_its_cap(failures: int) -> None:
    ring = Ring(model="m", phase=Phase.STOPPING, failures=failures, generation="g")
    after, _ = step(ring, Event(kind="stopped", jitter=1.0), 0.0)
    assert 0 < after.deadline <= 1.5 * BACKOFF_CAP_S


def test_steady_ring_that_breaks_counts_as_the_first_failure() -> None:
    it = Driver()
    for _ in range(QUICK_FAILURES - 1):
        fail_once(it)
        it.wait(BACKOFF_CAP_S)
    it.to(Phase.SERVING)
    it.now += STEADY_S
    it.send("trouble", reason="beta is lost")
    it.send("stopped")
    assert (it.ring.phase, it.ring.failures) == (Phase.BACKOFF, 1)
    assert it.ring.deadline == it.now + BACKOFF_BASE_S


def test_unsteady_ring_that_breaks_goes_on_counting() -> None:
    it = Driver()
    for _ in range(QUICK_FAILURES):
        it.to(Phase.SERVING)
        it.now += STEADY_S - 1
        it.send("trouble", reason="again")
        it.send("stopped")
        it.wait(BACKOFF_CAP_S * 2)
    assert it.ring.phase == Phase.FAILED


def test_restart_is_remembered_for_a_while_and_only_of_a_ring_that_served() -> None:
    it = Driver()
    fail_once(it)
    assert it.ring.restarts == ()
    it.wait(BACKOFF_CAP_S)
    it.to(Phase.SERVING).send("trouble", reason="x")
    it.send("stopped")
    assert list(it.ring.restarts) == [it.now]
    it.wait(RESTART_MEMORY_S)
    assert len(it.ring.restarts) == 1
    it.wait(1)
    assert it.ring.restarts == ()


def test_trouble_is_forgotten_with_its_restart_once_the_ring_serves() -> None:
    it = at(Phase.SERVING)
    it.send("trouble", reason="x")
    it.send("stopped")
    it.wait(BACKOFF_CAP_S)
    it.to(Phase.SERVING)
    assert it.ring.last_trouble == "x"
    it.wait(RESTART_MEMORY_S + 1)
    assert it.ring.last_trouble == ""


def test_trouble_twice_tears_down_once() -> None:
    it = at(Phase.SERVING)
    assert [effect.kind for effect in it.send("trouble", generation="g1", reason="first")] == ["teardown"]
    assert it.send("trouble", generation="g1", reason="second") == ()
    assert it.ring.last_trouble == "first"


# --- the operator ---


@pytest.mark.parametrize("phase", PHASES)
def test_unwant_from_every_phase_ends_stopped(phase: str) -> None:
    it = at(phase)
    effects = it.send("unwant")
    assert [effect.kind for effect in effects] == (["teardown"] if phase in Phase.ACTIVE else [])
    assert all(effect.orderly == (phase in (Phase.PROBING, Phase.SERVING, Phase.DRAINING)) for effect in effects)
    it.send("stopped")
    assert (it.ring.phase, it.ring.wanted, it.ring.generation) == (Phase.STOPPED, False, "")
    assert it.ring.plan is None
    assert it.ring.reason == "stopped by the operator"
    assert it.send("plan") == ()
    assert it.wait(1e6) == ()
    assert it.ring.phase == Phase.STOPPED


@pytest.mark.parametrize("phase", PHASES)
def test_want_from_every_phase_leads_to_service(phase: str) -> None:
    it = at(phase)
    it.send("want")
    it.send("tick", idle=True)
    it.send("stopped")
    if it.ring.phase == Phase.BACKOFF:
        it.wait(BACKOFF_CAP_S * 2)
    for kind in ("plan", "provisioned", "granted", "loaded", "answered"):
        it.send(kind)
    assert (it.ring.phase, it.ring.wanted) == (Phase.SERVING, True)


def test_want_after_failure_counts_from_zero() -> None:
    it = at(Phase.FAILED)
    it.send("want")
    assert (it.ring.phase, it.ring.failures, it.ring.deadline) == (Phase.WAITING, 0, 0.0)
    assert fail_once(it) == BACKOFF_BASE_S


def test_want_while_the_ring_still_stops_starts_it_again() -> None:
    it = at(Phase.SERVING)
    it.send("unwant")
    it.send("want")
    assert it.ring.phase == Phase.STOPPING
    it.send("stopped")
    assert (it.ring.phase, it.ring.wanted) == (Phase.WAITING, True)


def test_want_while_the_last_failure_is_torn_down_is_tried_afresh() -> None:
    it = Driver()
    for _ in range(QUICK_FAILURES - 1):
        fail_once(it)
        it.wait(BACKOFF_CAP_S)
    it.send("plan")
    it.send("granted")
    it.send("trouble", reason="again")
    it.send("want")
    it.send("stopped")
    assert it.ring.phase != Phase.FAILED


# --- any sequence of events ---


class AnySequence(RuleBasedStateMachine):
    """Whatever happens, in whatever order: what must always hold."""

    def __init__(self) -> None:
        super().__init__()
        self.it = Driver()
        self.launched: list[str] = []

    def send(self, kind: str, **more: Any) -> None:
        before = self.it.ring
        effects = self.it.send(kind, **more)
        after = self.it.ring
        for effect in effects:
            assert effect.generation
            assert effect.generation == after.generation
            assert effect.plan == after.plan
            if effect.kind == "launch":
                assert effect.generation not in self.launched
                self.launched.append(effect.generation)
        torn = [effect for effect in effects if effect.kind == "teardown"]
        lost = before.phase in Phase.ACTIVE and after.phase not in Phase.ACTIVE
        assert lost == (len(torn) == 1) == bool(torn)
        if lost:
            assert (after.phase, torn[0].generation) == (Phase.STOPPING, before.generation)
        if before.phase == Phase.STOPPING and kind != "stopped":
            assert after.phase == Phase.STOPPING  # nothing starts before all of it is gone
        if after.phase != before.phase:
            assert after.since == self.it.now

    @rule(kind=st.sampled_from(EVENTS), current=st.booleans(), jitter=st.floats(0, 1))
    def event(self, kind: str, current: bool, jitter: float) -> None:
        self.send(kind, generation=self.it.ring.generation if current else "", jitter=jitter, reason="r")

    @rule(kind=st.sampled_from(EVENTS))
    def late_event(self, kind: str) -> None:
        before = self.it.ring
        self.send(kind, generation="long-ago", reason="late")
        assert self.it.ring is before

    @rule()
    def no_plan(self) -> None:
        self.send("plan", plan=None, reason="waits")

    @rule()
    def go_up(self) -> None:
        for kind in ("plan", "provisioned", "granted", "loaded", "answered"):
            self.send(kind)

    @rule(seconds=st.sampled_from((0.5, 1, 15, 60, 130, 1000)))
    def time_passes(self, seconds: float) -> None:
        self.it.now += seconds
        self.send("tick")

    @invariant()
    def active_has_plan_and_generation(self) -> None:
        ring = self.it.ring
        assert ring.phase in PHASES
        if ring.phase in Phase.ACTIVE or ring.phase == Phase.STOPPING:
            assert ring.plan is not None
            assert ring.generation
        else:
            assert ring.plan is None
            assert ring.generation == ""
        assert ring.wanted or ring.phase in (Phase.STOPPED, Phase.STOPPING)
        assert ring.phase != Phase.STOPPED or not ring.wanted
        assert (ring.deadline > 0) == (ring.phase in TIMED)
        assert 0 <= ring.failures <= QUICK_FAILURES


AnySequence.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnySequence = AnySequence.TestCase


# --- leases ---


def ask(held: Lease | None, proposer: str = "alpha", generation: str = "g1", now: float = 100.0) -> Lease:
    return grant(held, model="m", proposer=proposer, generation=generation, now=now)


def test_grant_when_free_runs_out_on_the_own_clock() -> None:
    assert ask(None) == Lease(model="m", proposer="alpha", generation="g1", expires=100.0 + LEASE_S)


def test_grant_again_to_the_holder_renews() -> None:
    assert ask(ask(None), now=105.0).expires == 105.0 + LEASE_S


@pytest.mark.parametrize(("proposer", "generation"), [("beta", "g2"), ("alpha", "g2")])
def test_grant_to_another_while_held_names_the_holder(proposer: str, generation: str) -> None:
    held = ask(None)
    with pytest.raises(PlanError, match=r"its lease belongs to alpha \(generation g1\)"):
        ask(held, proposer, generation, now=held.expires - 0.01)


def test_grant_to_another_after_it_ran_out() -> None:
    held = ask(None)
    assert ask(held, "beta", "g2", now=held.expires).proposer == "beta"


def test_grant_after_it_ran_out_to_the_former_holder() -> None:
    held = ask(None)
    assert ask(held, now=held.expires + 5).generation == "g1"


def test_grant_of_the_same_generation_to_another_proposer_is_refused() -> None:
    with pytest.raises(PlanError, match="belongs to alpha"):
        ask(ask(None), proposer="beta")


# --- requests that are held ---

GENERATIONS = st.sampled_from(("", "g1", "g2"))
HELD = st.builds(
    Held, until=st.floats(0, 100), breaks=st.integers(0, HELD_TRIES), generation=GENERATIONS, broke_at=st.floats(0, 100)
)


@given(held=HELD, phase=st.sampled_from(PHASES), generation=GENERATIONS, now=st.floats(0, 200))
def test_held_request_only_asks_a_ring_that_serves_and_always_ends(
    held: Held, phase: str, generation: str, now: float
) -> None:
    if held.may_ask(phase, generation, now):
        assert phase == Phase.SERVING
    assert held.gives_up(phase, held.until)
    assert held.gives_up(phase, max(now, held.until))
    if phase == Phase.SERVING:  # it is never stuck in front of one that serves on
        assert held.may_ask(phase, generation, held.broke_at + SAME_RING_S + 1e-6)  # up to rounding


@given(times=st.lists(st.floats(0, 1000), min_size=HELD_TRIES, max_size=HELD_TRIES))
def test_held_request_gives_up_when_too_many_rings_broke_under_it(times: list[float]) -> None:
    held = Held(until=1e9)
    for tries, now in enumerate(times):
        assert not held.gives_up(Phase.SERVING, now), tries
        held = held.broken(f"g{tries}", now)
    assert held.gives_up(Phase.SERVING, 0.0)


def test_held_request_waits_for_another_ring_than_the_one_that_broke() -> None:
    held = Held(until=60.0).broken("g1", 10.0)
    assert not held.may_ask(Phase.SERVING, "g1", 10.1)  # its end is not known everywhere yet
    assert held.may_ask(Phase.SERVING, "g2", 10.1)
    assert held.may_ask(Phase.SERVING, "g1", 10.0 + SAME_RING_S)


@pytest.mark.parametrize("phase", [Phase.STOPPED, Phase.FAILED])
def test_held_request_does_not_wait_for_what_only_an_operator_starts(phase: str) -> None:
    assert Held(until=60.0).gives_up(phase, 0.0)
    assert not Held(until=60.0).gives_up(Phase.WAITING, 0.0)


def test_ring_that_hung_says_so_until_it_answers() -> None:
    it = at(Phase.SERVING)
    it.send("stalled", reason="nothing moved")
    it.send("stopped")
    assert it.ring.stalled
    it.wait(BACKOFF_CAP_S)
    for kind in ("plan", "granted", "loaded"):
        it.send(kind)
        assert it.ring.stalled
    it.send("answered")
    assert not it.ring.stalled


def test_ring_that_hangs_again_and_again_has_failed() -> None:
    it = Driver()
    for _ in range(QUICK_FAILURES):
        it.to(Phase.SERVING).send("stalled", reason="nothing moved")
        it.send("stopped")
        it.wait(BACKOFF_CAP_S * 2)
    assert it.ring.phase == Phase.FAILED


# --- pace ---

BOUNDS = st.tuples(st.floats(5, 100), st.floats(5, 100)).map(sorted)
LOOK = st.tuples(st.floats(0.5, LOOK_GAP_S), st.booleans(), st.booleans())  # seconds, it moved, it has something to do


def looked(pace: Pulse, looks: Sequence[tuple[float, bool, bool]]) -> tuple[Pulse, float]:
    """The pace after a first look and these, and the time."""
    now, number = 100.0, 0
    pace = pace.seen("0", now, asked=True)
    for seconds, moved, asked in looks:
        now, number = now + seconds, number + moved
        pace = pace.seen(str(number), now, asked=asked)
    return pace, now


@given(looks=st.lists(LOOK), bounds=BOUNDS)
def test_stall_time_stays_within_its_bounds(looks: list[tuple[float, bool, bool]], bounds: list[float]) -> None:
    pace, _ = looked(Pulse(), looks)
    assert bounds[0] <= pace.stall_s(*bounds) <= bounds[1]


@given(looks=st.lists(LOOK), bounds=BOUNDS, step_s=st.floats(0.5, WATCH_S))
def test_hang_is_seen_within_one_stall_time_and_never_at_once(
    looks: list[tuple[float, bool, bool]], bounds: list[float], step_s: float
) -> None:
    """The ring stops right after a look that found it moving."""
    pace, now = looked(Pulse(), [*looks, (1.0, True, True)])
    stall_s, hung_at = pace.stall_s(*bounds), now
    assert not pace.hangs(stall_s)
    while not pace.hangs(stall_s):
        now += step_s
        pace = pace.seen(pace.sign, now, asked=True)
        assert pace.stall_s(*bounds) == stall_s  # silence teaches nothing
    assert stall_s - 2 * WATCH_S < now - hung_at <= stall_s


@given(looks=st.lists(LOOK), pause_s=st.integers(1, 100), bounds=BOUNDS)
def test_ring_that_pauses_as_it_has_just_done_does_not_hang(
    looks: list[tuple[float, bool, bool]], pause_s: int, bounds: list[float]
) -> None:
    quiet = [(1.0, False, True)] * pause_s
    pace, now = looked(Pulse(), [*looks, (1.0, True, True), *quiet, (0.0, True, True)])
    stall_s = pace.stall_s(*bounds)
    assert stall_s >= min(bounds[1], PAUSES * pause_s) - 1e-6  # times are sums
    for seconds, _, _ in quiet:
        now += seconds
        pace = pace.seen(pace.sign, now, asked=True)
    assert not pace.hangs(stall_s) or pause_s > bounds[1] - 2 * WATCH_S


@given(looks=st.lists(LOOK), idle_s=st.lists(st.floats(0, 1e6)))
def test_idle_ring_never_hangs(looks: list[tuple[float, bool, bool]], idle_s: list[float]) -> None:
    pace, now = looked(Pulse(), looks)
    for seconds in [*idle_s, 1.0]:
        now += seconds
        pace = pace.seen(pace.sign, now, asked=False)
        assert not pace.hangs(5.0)


def test_watcher_that_slept_saw_no_hang() -> None:
    """A box that was suspended for an hour, or whose clock jumped."""
    pace, now = looked(Pulse(), [(1.0, True, True)])
    assert not pace.seen(pace.sign, now + 3600, asked=True).hangs(10.0)


def test_stall_time_forgets_a_long_pause() -> None:
    pace, _ = looked(Pulse(), [*[(1.0, False, True)] * 9, (1.0, True, True)])
    assert pace.stall_s(5, 100) == 40.0
    pace, _ = looked(pace, [(1.0, True, True)] * 60)
    assert pace.stall_s(5, 100) == 5.0


def test_stall_time_is_the_longest_while_the_pace_is_unknown() -> None:
    assert Pulse().stall_s(5, 100) == 100
