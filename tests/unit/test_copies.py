"""How a copy spreads, as a model in simulated time: each box's cable carries one chunk a second out and one in, flows
share cables fairly, and the choice of chunks is shardbox's own."""

from __future__ import annotations

import random
from statistics import median

import pytest

from shardbox import MAX_STREAMS, HandedOut

Flow = tuple[int, int]  # giver, taker


def fair_rates(flows: list[Flow]) -> list[float]:
    """Max-min fair: the tightest cable is shared evenly, then the tightest of the rest, and so on."""
    rates = [0.0] * len(flows)
    cables = [(("out", giver), ("in", taker)) for giver, taker in flows]
    users = {cable: {n for n, both in enumerate(cables) if cable in both} for both in cables for cable in both}
    room = dict.fromkeys(users, 1.0)
    while users:
        tightest = min(users, key=lambda cable: (room[cable] / len(users[cable]), cable))
        share = room[tightest] / len(users[tightest])
        for n in list(users[tightest]):
            rates[n] = share
            for cable in cables[n]:
                room[cable] -= share
                users[cable].discard(n)
        users = {cable: its for cable, its in users.items() if its}
    return rates


def spread_s(takers: int, chunks: int, seed: int, *, turns: int = 99, streams: int = MAX_STREAMS) -> float:
    """Seconds until so many takers have what box 0 has. `turns`: chunks that a giver sends at once."""
    whole, order, now = (1 << chunks) - 1, random.Random(seed), 0.0
    held, handed_out = [whole] + [0] * takers, [HandedOut() for _ in range(takers + 1)]
    givers = {t: [0, *order.sample([g for g in range(1, takers + 1) if g != t], takers - 1)][:streams]
              for t in range(1, takers + 1)}  # fmt: skip
    flows: dict[Flow, tuple[int, float]] = {}  # -> number of the chunk, what is left of it
    while any(mine != whole for mine in held):
        idle = [(giver, taker) for taker, its in givers.items() for giver in its if (giver, taker) not in flows]
        for giver, taker in order.sample(idle, len(idle)):
            coming = sum(1 << number for (_, to), (number, _) in flows.items() if to == taker)
            if sum(source == giver for source, _ in flows) < turns:
                number = handed_out[giver].pick(held[giver] & ~held[taker] & ~coming)
                if number >= 0:
                    flows[giver, taker] = number, 1.0
        rates = dict(zip(flows, fair_rates(list(flows)), strict=True))
        step = min(left / rates[flow] for flow, (_, left) in flows.items())
        now += step
        flows = {flow: (number, left - step * rates[flow]) for flow, (number, left) in flows.items()}
        for flow in [flow for flow, (_, left) in flows.items() if left < 1e-9]:
            held[flow[1]] |= 1 << flows.pop(flow)[0]
    return now


def growth(chunks: int, **limits: int) -> float:
    """How much longer eight takers need than two."""
    two, eight = (median(spread_s(takers, chunks, seed, **limits) for seed in range(3)) for takers in (2, 8))
    return eight / two


@pytest.mark.parametrize(("chunks", "most"), [(32, 1.2), (64, 1.1), (192, 1.05)])
def test_copies_to_eight_take_little_longer_than_to_two(chunks: int, most: float) -> None:
    assert spread_s(1, chunks, seed=1) == pytest.approx(chunks)
    assert growth(chunks) < most


def test_fewer_streams_or_turns_leave_cables_idle() -> None:
    assert growth(64, streams=4) > growth(64) + 0.1
    assert growth(64, turns=3) > growth(64) + 0.1
