"""Faults on a ring of three with clients: each is seen, named and mended, no request is lost, nothing is left.

`make fault` tries all of them, FAULT_REPEAT times each; `make test` a few, once.
"""

from __future__ import annotations

import pytest
from trial import Cluster, Fault, Row, Trial

pytest_plugins = ["report"]  # which faults, how often, and the table
pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(300)]


def test_fault(fault: Fault, number: int, cluster: Cluster, rows: list[Row]) -> None:
    trial = Trial(cluster, fault)
    rows.append(trial.row)
    try:
        trial.run()
    except BaseException as error:
        trial.row.mended, trial.row.problem = False, str(error)[:2000]
        raise

    assert trial.row.silent == [] and trial.row.leftovers == []
