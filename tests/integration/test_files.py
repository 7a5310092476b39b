"""Models that one box fetches from others: whole nodes in namespaces of their own, and givers that misbehave."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hosts import Host, Lan, hosts
from models import write_model

from shardbox import CHUNK_BYTES, MIB, Snapshot

__all__ = ["hosts"]  # a fixture, found by its name

MakeLan = Callable[..., contextlib.AbstractContextManager[Lan]]
SIZE = 2 * CHUNK_BYTES + 5 * MIB
NAME = "models/tiny.gguf"


def toml(nodes: Sequence[str], model: str = "", cluster: str = "") -> str:
    """A cluster that rehearses a model of which there is a file: it must be on every box that holds a rank."""
    names = "".join(f'[[nodes]]\nname = "{name}"\n' for name in nodes)
    windows = ", ".join(f"{name} = {1 if n else 4 - len(nodes)}" for n, name in enumerate(nodes))
    entry = f'[[models]]\nname = "tiny"\npath = "{NAME}"\ncontext = 256\nlayers = {{{windows}}}\n{model}\n'
    head = f'[cluster]\nname = "copies"\nsecret_file = "cluster.secret"\n{cluster}\n'
    return f'{head}[engine]\nkind = "rehearsal"\n{names}{entry}'


def at_home(lan: Lan) -> None:
    """Each box has its own TOML and secret, in its own folder, as boxes have."""
    for host in lan.hosts.values():
        for file in ("shardbox.toml", "cluster.secret"):
            (host.folder / file).write_bytes((lan.folder / file).read_bytes())
        host.config = host.folder / "shardbox.toml"


def serves(snapshot: Snapshot) -> bool:
    return snapshot.models[0].phase == "serving"


def file_of(host: Host) -> Path:
    return host.folder / NAME


@pytest.mark.namespaces
def test_box_without_the_model_fetches_it_before_the_ring_forms(hosts: MakeLan) -> None:
    with hosts(toml(("alpha", "beta")), ("alpha", "beta")) as lan:
        at_home(lan)
        alpha, beta = lan.up("alpha", "beta")
        whole = write_model(file_of(alpha), SIZE).read_bytes()

        seen = alpha.wait_status(lambda snapshot: snapshot.copies or serves(snapshot), "beta is copying")
        assert serves(seen) or (seen.copies[0].node, seen.copies[0].model) == ("beta", "tiny")
        alpha.wait_status(serves, "the ring serves", 90)

        assert file_of(beta).read_bytes() == whole
        assert sorted(file.name for file in file_of(beta).parent.iterdir()) == ["tiny.gguf"]
        assert file_of(beta).stat().st_mode & 0o777 == 0o644
        assert "copy of tiny: whole, and in place" in beta.output(beta.started[0])
