"""`pack`, `unpack` and `up --from`: what a stick carries to a box, and engines that one box gives another."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hosts import SECRET, Lan, eventually, hosts, shardbox_command
from models import write_model

from shardbox import CHUNK_BYTES, MIB, PIECE_BYTES, piece_listing, probe_platform, read_ledger

__all__ = ["hosts"]  # a fixture, found by its name

MakeLan = Callable[..., AbstractContextManager[Lan]]
SIZE = CHUNK_BYTES + 3 * MIB
MODEL = "models/Größe 7b.gguf"
TOML = """
[cluster]
name = "kitchen"
{secret}
[engine]
path = "my engines"
[[nodes]]
name = "alpha"
[[nodes]]
name = "beta"
[[models]]
name = "big"
path = "models/Größe 7b.gguf"
[[models]]
name = "for-alpha"
path = "models/b.gguf"
nodes = ["alpha"]
"""
ENGINE = '#!/bin/sh\necho "version: 1 (abcdef01)"\n'


@dataclass
class Kitchen:
    """A box that is to be packed, a stick, and an empty box."""

    home: Path
    stick: Path
    new: Path

    def run(self, *args: str, node: str = "alpha", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A shardbox command on the first box, or on another."""
        env = {**os.environ, "SHARDBOX_STATE": str(self.home.parent / f"state of {node}"), "SHARDBOX_NODE": node}
        command = [*shardbox_command(), *args]
        return subprocess.run(
            command, env=env, cwd=cwd or self.home, capture_output=True, text=True, timeout=60, check=False
        )

    def pack(self, *more: str) -> subprocess.CompletedProcess[str]:
        done = self.run("pack", str(self.stick), *more)
        assert done.returncode == 0, done.stderr
        return done

    def unpack(self, *more: str, node: str = "beta") -> subprocess.CompletedProcess[str]:
        return self.run("unpack", str(self.stick), "--to", str(self.new), *more, node=node, cwd=self.stick)

    def manifest(self) -> Any:
        return json.loads((self.stick / "manifest.json").read_text())

    def piece(self, model: str) -> Path:
        """Where a model lies on the stick."""
        (entry,) = [entry for entry in self.manifest()["files"] if entry["model"] == model]
        return self.stick / str(entry["pieces"][0])


@pytest.fixture
def kitchen(tmp_path: Path) -> Kitchen:
    it = Kitchen(tmp_path / "Küche eins", tmp_path / "USB stick é", tmp_path / "neue Kiste")
    write_model(it.home / MODEL, SIZE)
    write_model(it.home / "models/b.gguf", 2 * MIB, seed=2)
    (it.home / "my engines").mkdir()
    for name in ("llama-server", "llama-cli"):
        (it.home / "my engines" / name).write_text(ENGINE)
        (it.home / "my engines" / name).chmod(0o755)
    (it.home / "shardbox.toml").write_text(TOML.format(secret='secret_file = "cluster.secret"'))
    (it.home / "cluster.secret").write_text(SECRET)
    it.stick.mkdir()
    return it


def test_stick_brings_a_box_what_it_needs_and_no_more(kitchen: Kitchen) -> None:
    kitchen.pack()
    done = kitchen.unpack()
    assert done.returncode == 0, done.stderr

    assert (kitchen.new / MODEL).read_bytes() == (kitchen.home / MODEL).read_bytes()
    assert not (kitchen.new / "models/b.gguf").exists()  # only alpha may hold it
    assert (kitchen.new / "my engines/llama-cli").stat().st_mode & 0o777 == 0o755
    assert (kitchen.new / "shardbox").stat().st_mode & 0o777 == 0o755
    assert (kitchen.new / "shardbox.toml").read_bytes() == (kitchen.home / "shardbox.toml").read_bytes()
    assert [*read_ledger(str(kitchen.home.parent / "state of beta/kitchen/beta"))] == [str(kitchen.new / MODEL)]
    assert not list(kitchen.new.rglob("*.part"))

    again = kitchen.unpack(node="alpha")
    assert again.returncode == 0 and (kitchen.new / "models/b.gguf").exists()


def test_stick_has_only_names_and_sizes_that_fat_can_have(kitchen: Kitchen) -> None:
    kitchen.pack()
    files = [path for path in kitchen.stick.rglob("*") if path.is_file()]
    assert len(files) == 8  # program, TOML, two engines, two models, manifest, text
    for path in files:
        assert re.fullmatch(r"[A-Za-z0-9._/-]+", str(path.relative_to(kitchen.stick))), path
        assert not path.is_symlink() and path.stat().st_size < 4 << 30
    names = [str(path.relative_to(kitchen.stick)).lower() for path in files]
    assert len(set(names)) == len(names)
    text = (kitchen.stick / "README.txt").read_text()
    assert f"shardbox-{probe_platform()}" in str(files) and probe_platform() in text and "unpack" in text


def test_file_too_large_for_fat_goes_in_pieces_that_give_it_back() -> None:
    size = 2 * PIECE_BYTES + 5
    hashes = [f"{n:064}" for n in range(2 * 255 + 1)]
    pieces = piece_listing(size, hashes).files
    assert [piece.size for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, 5]
    assert [digest for piece in pieces for digest in piece.hashes] == hashes
    assert piece_listing(0, ()).files[0].size == 0


@pytest.mark.parametrize("inline", [True, False])
def test_stick_has_no_secret_unless_asked(kitchen: Kitchen, inline: bool) -> None:
    if inline:
        (kitchen.home / "shardbox.toml").write_text(TOML.format(secret=f'secret = "{SECRET}"'))
    kitchen.pack()
    for path in kitchen.stick.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path
    assert "write the cluster's secret into cluster.secret" in (kitchen.stick / "README.txt").read_text()
    assert kitchen.unpack().returncode == 0
    assert 'secret_file = "cluster.secret"' in (kitchen.new / "shardbox.toml").read_text()

    kitchen.pack("--with-secret")
    assert kitchen.unpack("--replace").returncode == 0
    if inline:
        assert SECRET in (kitchen.new / "shardbox.toml").read_text()
    else:
        secret = kitchen.new / "cluster.secret"
        assert secret.read_text() == SECRET and secret.stat().st_mode & 0o777 == 0o600


def test_stick_that_rotted_is_named_and_nothing_wrong_is_installed(kitchen: Kitchen) -> None:
    kitchen.pack()
    with kitchen.piece("big").open("r+b") as file:
        file.seek(SIZE - 10)
        file.write(b"rot")
    done = kitchen.unpack()
    assert done.returncode == 1 and "other bytes than were written" in done.stderr and "7b.gguf" in done.stderr
    assert not (kitchen.new / MODEL).exists()

    kitchen.pack()  # puts the right bytes there again
    assert kitchen.unpack().returncode == 0
    assert (kitchen.new / MODEL).read_bytes() == (kitchen.home / MODEL).read_bytes()


def test_stick_pulled_out_while_unpacking_goes_on_when_it_is_back(kitchen: Kitchen) -> None:
    kitchen.pack()
    piece = kitchen.piece("big")
    whole = piece.read_bytes()
    with piece.open("r+b") as file:  # the first chunk can still be read
        file.truncate(CHUNK_BYTES)
    assert kitchen.unpack().returncode == 1
    piece.unlink()
    gone = kitchen.unpack()
    assert gone.returncode == 1 and "put the stick back" in gone.stderr and "Traceback" not in gone.stderr
    assert Path(f"{kitchen.new / MODEL}.part").stat().st_size == CHUNK_BYTES
    piece.write_bytes(whole)
    assert kitchen.unpack().returncode == 0
    assert (kitchen.new / MODEL).read_bytes() == (kitchen.home / MODEL).read_bytes()


def test_stick_pulled_out_while_packing_is_no_stick_until_packed_again(kitchen: Kitchen) -> None:
    kitchen.pack()
    (kitchen.stick / "manifest.json").unlink()
    done = kitchen.unpack()
    assert done.returncode == 1 and "`pack` did not come to its end" in done.stderr
    before = (kitchen.stick / "models/b.gguf").stat().st_mtime_ns
    kitchen.pack()
    assert (kitchen.stick / "models/b.gguf").stat().st_mtime_ns == before  # what is right is not written again
    assert kitchen.unpack().returncode == 0


def test_pack_keeps_what_boxes_of_other_platforms_put_there(kitchen: Kitchen) -> None:
    kitchen.pack()
    text = json.dumps(kitchen.manifest()).replace(probe_platform(), "linux-sparc")
    (kitchen.stick / "manifest.json").write_text(text)
    kitchen.pack()
    platforms = [entry["platform"] for entry in kitchen.manifest()["files"] if entry["kind"] == "engine"]
    assert sorted(platforms) == sorted([probe_platform(), "linux-sparc"] * 2)


@pytest.mark.parametrize("path", ["../../evil", "/etc/evil", "my engines/../../evil"])
def test_manifest_that_leads_out_of_the_folder_is_refused(kitchen: Kitchen, path: str) -> None:
    kitchen.pack()
    manifest = kitchen.manifest()
    for entry in manifest["files"]:
        entry["path"] = path if entry["kind"] == "engine" else entry["path"]
    (kitchen.stick / "manifest.json").write_text(json.dumps(manifest))
    done = kitchen.unpack()
    assert done.returncode == 1 and "outside the TOML's folder" in done.stderr
    assert not (kitchen.new.parent / "evil").exists()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 2, "files": []}', '{"format": 1, "files": [{"kind": 1}]}', "[" * 5000]
)
def test_manifest_that_is_none_is_one_message(kitchen: Kitchen, content: str) -> None:
    (kitchen.stick / "manifest.json").write_text(content)
    done = kitchen.unpack()
    assert done.returncode == 1 and "Traceback" not in done.stderr and "manifest.json" in done.stderr


def test_file_of_the_box_with_other_bytes_stays_unless_replaced(kitchen: Kitchen) -> None:
    kitchen.pack()
    kitchen.new.mkdir()
    (kitchen.new / "shardbox.toml").write_text("# mine\n")
    done = kitchen.unpack()
    assert done.returncode == 1 and "is there with other bytes" in done.stderr
    assert (kitchen.new / "shardbox.toml").read_text() == "# mine\n"
    assert kitchen.unpack("--replace").returncode == 0


def test_unpack_onto_the_stick_is_refused(kitchen: Kitchen) -> None:
    kitchen.pack()
    done = kitchen.run("unpack", ".", node="beta", cwd=kitchen.stick)
    assert done.returncode == 2 and "is on the stick itself" in done.stderr


@pytest.mark.namespaces
def test_up_from_a_stick_installs_and_serves(hosts: MakeLan, tmp_path: Path) -> None:
    toml = '[cluster]\nname = "fresh"\nsecret_file = "s"\nform_wait_s = 1\n[engine]\nkind = "rehearsal"\n'
    toml += '[[models]]\nname = "tiny"\npath = "tiny.gguf"\ncontext = 256\n'
    home, stick = tmp_path / "home", tmp_path / "stick"
    write_model(home / "tiny.gguf", 2 * MIB)
    (home / "shardbox.toml").write_text(toml)
    (home / "s").write_text(SECRET)
    with hosts(toml, ("alpha",)) as lan:
        alpha = lan.hosts["alpha"]
        packed = alpha.run("pack", str(stick), "--with-secret", "--config", str(home / "shardbox.toml"))
        assert packed.returncode == 0, packed.stderr
        alpha.config = alpha.folder / "box" / "shardbox.toml"
        alpha.config.parent.mkdir()
        alpha.up_process = alpha.popen("up", "--from", str(stick), "--config", str(alpha.config))
        alpha.wait_status(lambda found: found.models[0].phase == "serving", "it serves")
        assert (alpha.folder / "box/tiny.gguf").read_bytes() == (home / "tiny.gguf").read_bytes()


@pytest.mark.namespaces
@pytest.mark.parametrize("share", [True, False])
def test_box_without_engines_takes_them_from_another_if_they_are_shared(hosts: MakeLan, share: bool) -> None:
    toml = f'[cluster]\nname = "engines"\nsecret_file = "cluster.secret"\n[engine]\nshare = {str(share).lower()}\n'
    with hosts(toml, ("alpha", "beta")) as lan:
        for host in lan.hosts.values():
            for name in ("shardbox.toml", "cluster.secret"):
                (host.folder / name).write_bytes((lan.folder / name).read_bytes())
            host.config = host.folder / "shardbox.toml"
        alpha, beta = lan.hosts["alpha"], lan.hosts["beta"]
        (alpha.folder / "bin").mkdir()
        for name in ("llama-server", "llama-cli"):
            (alpha.folder / "bin" / name).write_text(ENGINE)
            (alpha.folder / "bin" / name).chmod(0o755)
        lan.up("alpha", "beta")

        def binaries() -> list[dict[str, Any]]:
            said = beta.run("nodes", "--json").stdout
            facts = json.loads(said)["facts"] if said else []
            return facts[0]["binaries"] if len(facts) == 2 else []

        if not share:
            assert all(binary["problem"] for binary in eventually(binaries, "both are up"))
            return
        eventually(lambda: binaries() and not any(b["problem"] for b in binaries()), "beta has engines")
        assert {b["path"] for b in binaries()} == {
            str(beta.folder / "engines/beta/engines" / name) for name in ("llama-server", "llama-cli")
        }
        assert {b["commit"] for b in binaries()} == {"abcdef01"}
