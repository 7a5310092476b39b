"""Faults on a ring of three with clients: each is seen, named and mended, no request is lost, nothing is left.

`make fault` tries all of them, FAULT_REPEAT times each; `make test` a few, once.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hosts import shardbox_command, tool, why_no_hosts
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


@pytest.mark.parametrize(("options", "said"), [("ro", "Read-only"), ("size=16k,nr_inodes=3", "No space left")])
def test_up_state_folder_cannot_be_used_is_said_without_a_traceback(tmp_path: Path, options: str, said: str) -> None:
    if reason := why_no_hosts():
        pytest.skip(reason)
    config, state = tmp_path / "shardbox.toml", tmp_path / "state"
    config.write_text('[cluster]\nname = "attic"\nsecret = "a secret of the tests, long enough"\n')
    config.chmod(0o600)
    state.mkdir()
    tool("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(state))
    try:
        done = subprocess.run(
            [*shardbox_command(), "up", "--config", str(config), "--node", "alpha"],
            env={**os.environ, "SHARDBOX_STATE": str(state)}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        tool("umount", str(state))

    assert done.returncode == 2 and f"the state folder cannot be used: {said}" in done.stderr
    assert "Traceback" not in done.stderr
