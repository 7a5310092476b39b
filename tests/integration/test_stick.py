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
from fat import CLUSTER_BYTES, Stick, why_no_fat
from hosts import SECRET, Lan, eventually, hosts, program_file, shardbox_command
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
        return self.run("unpack", str(self.stick), "--to", str(self.new), *more, node=node, cwd=self.stick.parent)

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
    "content", ["", "[]", '{"format": 1, "files": []}', '{"format": 2, "files": [{"kind": 1}]}', "[" * 5000]
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


# --- a stick that is a real file system, as FAT32 is ---

STICK_BYTES = 96 * MIB


@pytest.fixture
def fat(kitchen: Kitchen) -> Stick:
    if reason := why_no_fat():
        pytest.skip(reason)
    return Stick(kitchen.home.parent / "on the stick", kitchen.stick, STICK_BYTES)


def same(kitchen: Kitchen, *paths: str) -> bool:
    return all((kitchen.new / path).read_bytes() == (kitchen.home / path).read_bytes() for path in paths)


def test_fat_takes_all_and_gives_it_back(kitchen: Kitchen, fat: Stick) -> None:
    (kitchen.home / "models/B.GGUF").write_bytes(os.urandom(MIB))  # FAT could not tell it from b.gguf
    more = '[[models]]\nname = "upper"\npath = "models/B.GGUF"\n[[models]]\nname = "too"\npath = "models/B.GGUF"\n'
    with (kitchen.home / "shardbox.toml").open("a") as file:
        file.write(more)
    with fat.plugged():
        kitchen.pack("--with-secret")
        size = sum(path.stat().st_size for path in kitchen.stick.rglob("*.*"))
    with fat.plugged():
        kitchen.pack("--with-secret")  # finds all of it there: there would be no room for more
        assert sum(path.stat().st_size for path in kitchen.stick.rglob("*.*")) == size
        done = kitchen.unpack()
        assert done.returncode == 0, done.stderr
        assert same(kitchen, MODEL, "models/B.GGUF", "shardbox.toml", "cluster.secret", "my engines/llama-cli")
        assert kitchen.unpack(node="alpha").returncode == 0 and same(kitchen, "models/b.gguf")
    assert (kitchen.new / "my engines/llama-cli").stat().st_mode & 0o777 == 0o755
    assert (kitchen.new / "cluster.secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("calls", [0, 7, 31, 74, 190])
def test_fat_pulled_out_at_any_moment_goes_on_when_it_is_back(kitchen: Kitchen, fat: Stick, calls: int) -> None:
    with fat.plugged(calls):
        cut = kitchen.run("pack", str(kitchen.stick))
    assert cut.returncode == 1 and "put the stick back" in cut.stderr and "Traceback" not in cut.stderr
    with fat.plugged():
        half = kitchen.unpack()
        assert half.returncode == 1 and "`pack` did not come to its end" in half.stderr
        kitchen.pack()
    with fat.plugged(min(calls, 74)):
        cut = kitchen.unpack()
    assert cut.returncode == 1 and "put the stick back" in cut.stderr and "Traceback" not in cut.stderr
    assert not (kitchen.new / MODEL).exists()
    with fat.plugged():
        done = kitchen.unpack()
        assert done.returncode == 0, done.stderr
    assert same(kitchen, MODEL)


def test_fat_without_room_is_named_first_and_stays_the_stick_that_it_was(kitchen: Kitchen, fat: Stick) -> None:
    with fat.plugged():
        kitchen.pack()
        before = kitchen.manifest()
        write_model(kitchen.home / "models/b.gguf", STICK_BYTES, seed=3)
        done = kitchen.run("pack", str(kitchen.stick))
        assert done.returncode == 1 and re.search("has .* free, and .* are needed", done.stderr), done.stderr
        assert "make room for" in done.stderr and kitchen.manifest() == before


def test_fat_that_fills_up_under_way_is_named_and_goes_on_with_room(kitchen: Kitchen, fat: Stick) -> None:
    packed = [path for path in kitchen.home.rglob("*") if path.is_file() and path.suffix != ".secret"]
    sizes = [path.stat().st_size for path in (*packed, program_file())]
    with fat.plugged():
        filler = kitchen.stick / "other"  # leaves room for all of them, but not for the manifest
        filler.write_bytes(bytes(STICK_BYTES - sum(-(-size // CLUSTER_BYTES) * CLUSTER_BYTES for size in sizes)))
        done = kitchen.run("pack", str(kitchen.stick))
        assert done.returncode == 1 and "No space left" in done.stderr and "make room and type it again" in done.stderr
        filler.unlink()
        kitchen.pack()
        assert kitchen.unpack().returncode == 0 and same(kitchen, MODEL)


def test_box_whose_disk_is_fat_and_full_is_named_and_takes_all_with_room(kitchen: Kitchen, fat: Stick) -> None:
    """Here the box's own disk is the FAT, and the stick a folder."""
    box, stick = kitchen.stick, kitchen.home.parent / "folder"
    assert kitchen.run("pack", str(stick)).returncode == 0
    with fat.plugged():
        (box / "other").write_bytes(bytes(STICK_BYTES - SIZE))
        full = kitchen.run("unpack", str(stick), "--to", str(box), node="beta")
        assert full.returncode == 1 and "Traceback" not in full.stderr, full.stderr
        assert "make room" in full.stderr and not (box / MODEL).exists()
        (box / "other").unlink()
        done = kitchen.run("unpack", str(stick), "--to", str(box), node="beta")
        assert done.returncode == 0, done.stderr
        assert (box / MODEL).read_bytes() == (kitchen.home / MODEL).read_bytes()


@pytest.mark.large
@pytest.mark.timeout(600)
def test_model_of_more_than_four_gib_goes_onto_fat_in_parts_and_comes_back_whole(kitchen: Kitchen, fat: Stick) -> None:
    size = (4 << 30) + 3 * CHUNK_BYTES + 5
    large = Stick(kitchen.home.parent / "large stick", kitchen.stick, 2 * size)
    with (kitchen.home / MODEL).open("r+b") as file:  # all but its first and last bytes are a hole
        file.truncate(size)
        file.seek(size - MIB)
        file.write(os.urandom(MIB))
    with large.plugged():
        packed = kitchen.pack()
        (entry,) = [entry for entry in kitchen.manifest()["files"] if entry["model"] == "big"]
        sizes = [(kitchen.stick / piece).stat().st_size for piece in entry["pieces"]]
        assert sizes == [PIECE_BYTES, size - PIECE_BYTES] and max(sizes) < 4 << 30, packed.stdout
        done = kitchen.unpack()
        assert done.returncode == 0, done.stderr
    assert subprocess.run(["cmp", kitchen.home / MODEL, kitchen.new / MODEL], check=False).returncode == 0


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
