"""Which faults are tried, how often, and the table at the end."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from faults import FAULTS
from hosts import why_no_hosts
from trial import Cluster, Row, a_cluster

ROWS: list[Row] = []
REPEAT = int(os.environ.get("FAULT_REPEAT", "0"))  # 0: only the quick ones, once
REPORT = Path(__file__).parents[2] / "build" / "fault.json"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each fault, REPEAT times."""
    if "fault" in metafunc.fixturenames:
        chosen = [fault for fault in FAULTS if REPEAT or fault.quick]
        pairs = [(fault, number) for number in range(max(1, REPEAT)) for fault in chosen]
        ids = [f"{fault.name} {number + 1}" for fault, number in pairs]
        metafunc.parametrize(("fault", "number"), pairs, ids=ids)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One for all faults. What it leaves at its end is told."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    with a_cluster() as made:
        yield made
        ROWS.append(Row(fault="down, at the end", leftovers=made.close(), mended=True))


@pytest.fixture
def rows() -> list[Row]:
    """Where a trial's outcome goes."""
    return ROWS


def merged(name: str) -> Row:
    """All trials of one fault: the slowest times, the sum of the counts."""
    found = [row for row in ROWS if row.fault == name]

    def slowest(times: Iterable[float | None]) -> float | None:
        return max((time_s for time_s in times if time_s is not None), default=None)

    return Row(
        fault=name,
        seen_after_s=slowest(row.seen_after_s for row in found),
        served_after_s=slowest(row.served_after_s for row in found),
        held=sum(row.held for row in found),
        errors=sum(row.errors for row in found),
        silent=[text for row in found for text in row.silent],
        leftovers=[text for row in found for text in row.leftovers],
        mended=all(row.mended for row in found),
        critical=any(row.critical for row in found),
        says=next((row.says for row in found if row.says), ""),
        problem=next((row.problem for row in found if row.problem), ""),
    )


def seconds(value: float | None) -> str:
    """For the table."""
    return "-" if value is None else f"{value:.1f} s"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table, and build/fault.json after a whole run."""
    table = [merged(name) for name in dict.fromkeys(row.fault for row in ROWS)]
    if not table:
        return
    write = terminalreporter.write_line
    write("")
    write(f"{'fault':38} {'seen after':>10} {'served again':>12} {'held':>5} {'errors':>6} {'silent':>6} {'left':>5}")
    for row in table:
        seen, served = seconds(row.seen_after_s), seconds(row.served_after_s) if row.mended else "NOT"
        counts = f"{row.held:5} {row.errors:6} {len(row.silent):6} {len(row.leftovers):5}"
        write(f"{row.fault:38} {seen:>10} {served:>12} {counts}  {row.says[:90]}")
    tried = [row for row in table if row.fault != "down, at the end"]
    report = {
        "faults": len(tried),
        "mended": sum(row.mended for row in tried),
        "repeat": max(1, REPEAT),
        "silent_losses": sum(len(row.silent) for row in table),
        "leftovers": sum(len(row.leftovers) for row in table),
    }
    write(", ".join(f"{key}: {value}" for key, value in report.items()))
    if REPEAT:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(json.dumps({**report, "rows": [dataclasses.asdict(row) for row in table]}, indent=1) + "\n")
