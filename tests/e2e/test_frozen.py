"""The frozen executable, as people copy it: from an empty folder, with an empty environment. `make e2e` runs this."""

import os
import subprocess
from pathlib import Path

import pytest

EXECUTABLE = os.environ.get("SHARDBOX_EXE", "")
pytestmark = pytest.mark.skipif(not EXECUTABLE, reason="SHARDBOX_EXE names no executable: run `make e2e`")


def run(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The executable in an empty environment, started in `folder`."""
    command = [str(Path(EXECUTABLE).resolve()), *args]
    return subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True, timeout=110, check=False)


def test_demo_from_empty_folder_and_environment_is_ok(tmp_path: Path) -> None:
    done = run("demo", "--once", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(line.startswith("SHARDBOX OK - demo-32b 3/3 ranks") for line in done.stdout.splitlines()), done.stdout
    assert "This is a rehearsal" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_status_without_configuration_is_unknown(tmp_path: Path) -> None:
    done = run("status", folder=tmp_path)
    assert (done.returncode, done.stdout.startswith("SHARDBOX UNKNOWN - ")) == (3, True), done.stdout + done.stderr


def test_version_and_secret_print_one_line_each(tmp_path: Path) -> None:
    assert run("version", folder=tmp_path).stdout.startswith("shardbox ")
    assert len(run("secret", folder=tmp_path).stdout.strip()) >= 40
