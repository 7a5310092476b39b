"""Every command, option and exit code stands in the README."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from shardbox import build_cli

README = Path(__file__).parents[2] / "README.md"
CLI: Any = build_cli()
OPTIONS = [
    (name, option)
    for name, command in CLI.commands.items()
    for parameter in command.params
    for option in parameter.opts
    if option.startswith("-")
]


def readme() -> str:
    return README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(CLI.commands))
def test_readme_names_every_command(name: str) -> None:
    assert re.search(rf"`(shardbox )?{name}\b", readme()) or re.search(rf"(?m)^\s*\$? ?shardbox {name}\b", readme())


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=[f"{name} {option}" for name, option in OPTIONS])
def test_readme_names_every_option(name: str, option: str) -> None:
    assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", readme())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("0", "OK|done"),
        ("1", "WARNING"),
        ("1", "fail"),
        ("2", "CRITICAL"),
        ("2", "usage|configuration"),
        ("3", "UNKNOWN"),
    ],
)
def test_readme_says_what_every_exit_code_means(code: str, words: str) -> None:
    lines = readme().splitlines()
    assert any(re.search(rf"(?<![\w.]){code}(?![\w.])", line) and re.search(words, line) for line in lines)


@pytest.mark.parametrize("name", ["SHARDBOX_CONFIG", "SHARDBOX_NODE", "SHARDBOX_STATE", "SHARDBOX_LOG"])
def test_readme_names_every_environment_variable(name: str) -> None:
    assert name in readme()


def test_options_are_found() -> None:
    """A test over an empty list cannot fail."""
    assert len(OPTIONS) > 25
    assert ("plan", "--facts") in OPTIONS
