"""Random faults on one cluster for a long time, with clients: no request may be lost, and nothing may leak.

SOAK_S: how long (600). SOAK_SEED: which faults, in which order; printed. Exit code 1 where something was lost or leaks.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from faults import FAULTS
from hosts import model, why_no_hosts
from trial import Clients, Cluster, Outcome, Trial, a_cluster

SOAK_S = float(os.environ.get("SOAK_S", "600"))
SEED = int(os.environ.get("SOAK_SEED") or random.randrange(1 << 32))
ENDS_NODES = ("kill -9: node", "kill -9: everything", "power cut", "SIGTERM", "SIGINT", "mDNS", "mesh port", "state")
FRESH_PART = 1 / 3  # of the time in which nodes may end; then each has to last, and is measured from there on
CALM_S = 5.0  # without a fault, before anything is measured
PROVEN_EVERY = 4  # faults, before the operator starts the model afresh: six quick failures, and it waits for that
SLACK = {"descriptors": 8, "threads": 8, "memory_kib": 12 * 1024}  # what clients and threads that come and go may add
REPORT = Path(__file__).parents[2] / "build" / "soak.json"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one node uses."""

    pid: int
    descriptors: int
    threads: int
    memory_kib: int
    processes: int  # on its box


def sample(cluster: Cluster) -> dict[str, Sample]:
    """Every node, now."""
    found = {}
    for host in cluster.hosts:
        assert host.up_process
        pid = host.up_process.pid
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        found[host.name] = Sample(
            pid=pid,
            descriptors=len(os.listdir(f"/proc/{pid}/fd")),
            threads=int(status["Threads"]),
            memory_kib=int(status["VmRSS"].split()[0]),
            processes=len(host.pids()),
        )
    return found


def leaks(before: dict[str, Sample], after: dict[str, Sample]) -> list[str]:
    """What grew more than it may."""
    found = []
    for name, old in before.items():
        new = after[name]
        if new.pid != old.pid:
            found.append(f"{name}: ended by itself, pid {old.pid} is now {new.pid}")
        for key, slack in SLACK.items():
            if getattr(new, key) > getattr(old, key) + slack:
                found.append(f"{name}: {key} {getattr(old, key)} -> {getattr(new, key)}")
        if new.processes != old.processes:
            found.append(f"{name}: processes {old.processes} -> {new.processes}")
    return found


def calm(cluster: Cluster, clients: Clients) -> dict[str, Sample]:
    """Let the ring serve a while, then measure."""
    cluster.serving()
    begun = time.monotonic()
    while time.monotonic() < begun + CALM_S or len(clients.answered(begun)) < len(cluster.hosts):
        time.sleep(0.5)
    return sample(cluster)


def restart(cluster: Cluster) -> None:
    """The operator stops and starts the model."""
    cluster.settle()
    cluster.start()
    cluster.serving()


class Soak:
    """The run, and what it has found."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.random = cluster, random.Random(SEED)
        self.tried: Counter[str] = Counter()
        self.problems: list[str] = []
        self.dead: list[tuple[str, float, float]] = []  # node, from, to: its own clients were cut off

    def run(self, clients: Clients) -> tuple[dict[str, Sample], dict[str, Sample]]:
        """Faults until the time is over; what the nodes used when all had to last, and at the end."""
        start, before = time.monotonic(), dict[str, Sample]()
        while (gone_s := time.monotonic() - start) < SOAK_S:
            lasting = gone_s > SOAK_S * FRESH_PART
            if lasting and not before:
                before = calm(self.cluster, clients)
            self.one(clients, lasting)
        return before, calm(self.cluster, clients)

    def one(self, clients: Clients, lasting: bool) -> None:
        """One random fault."""
        chosen = [fault for fault in FAULTS if not fault.before and not fault.starting]
        chosen = [fault for fault in chosen if not lasting or not fault.name.startswith(ENDS_NODES)]
        fault = self.random.choice(chosen)
        if self.tried.total() % PROVEN_EVERY == 0:
            restart(self.cluster)
        trial, begun = Trial(self.cluster, fault), time.monotonic()
        self.tried[fault.name] += 1
        problem = ""
        try:
            with trial.undo, trial.cause:
                trial.strike(clients)
        except AssertionError as error:
            problem = f"{fault.name}: {error}"[:4000]
            self.problems.append(problem)
        self.dead += [(name, begun, time.monotonic() + 1) for name in trial.dead]
        self.problems += [f"{fault.name}: left {left}" for left in trial.row.leftovers]
        seen, served = trial.row.seen_after_s, trial.row.served_after_s
        times = f"seen {seen:.1f} s, served {served:.1f} s" if seen is not None and served is not None else "unnoticed"
        print(f"{fault.name:36} {problem or times}", flush=True)
        if problem:
            restart(self.cluster)

    def lost(self, outcomes: list[Outcome]) -> list[str]:
        """Requests that ended without an answer or a word."""

        def excused(o: Outcome) -> bool:
            return o.kind == "cut" and any(name == o.node and a <= o.ended <= b for name, a, b in self.dead)

        return [
            f"{o.node}: {o.kind} {o.says}" for o in outcomes if o.kind in ("cut", "short", "hung") and not excused(o)
        ]


def main() -> int:
    """The exit code."""
    if reason := why_no_hosts():
        print(f"no soak here: {reason}")
        return 1
    print(f"SOAK_SEED={SEED} SOAK_S={SOAK_S:g}", flush=True)
    with a_cluster() as cluster:
        for host in cluster.hosts:
            host.up()
        restart(cluster)
        soak = Soak(cluster)
        with Clients(cluster.hosts) as clients:
            before, after = soak.run(clients)
        for host in cluster.hosts:
            found = host.snapshot()
            assert found and model(found).phase == "serving", cluster.told()
        left = cluster.close()
    kinds = Counter(outcome.kind for outcome in clients.outcomes)
    lost, leaking = soak.lost(clients.outcomes), leaks(before, after)
    for name, old in before.items():
        print(f"{name}: {old}\n    -> {after[name]}")
    report = {"seed": SEED, "seconds": SOAK_S, "faults": dict(soak.tried), "requests": dict(kinds)}
    report |= {"silent_losses": lost, "leaks": leaking, "leftovers": left, "problems": soak.problems}
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({**report, "faults": soak.tried.total()}, indent=1))
    return int(bool(lost or leaking or left or soak.problems))


if __name__ == "__main__":
    sys.exit(main())
