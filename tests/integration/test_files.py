"""Models that one box fetches from others: the copying alone, with givers that misbehave, over sockets and files of
its own; then whole nodes in namespaces."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fat import Stick, why_no_fat
from hosts import Host, Lan, eventually, hosts, shardbox_command, why_no_hosts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import write_model

from shardbox import (
    CHUNK_BYTES,
    MIB,
    READ_BYTES_PER_S,
    ROLE_BINARIES,
    SILENT_S,
    Copy,
    EngineConfig,
    FileError,
    Giver,
    HandedOut,
    HashCache,
    Landing,
    ListedFile,
    Listing,
    NodeConfig,
    Pace,
    SealedStream,
    Snapshot,
    note_in_ledger,
    parse_config,
    place_in,
    to_prune,
)

__all__ = ["hosts"]  # a fixture, found by its name

MakeLan = Callable[..., contextlib.AbstractContextManager[Lan]]
Serve = Callable[[SealedStream], None]
SIZE = 2 * CHUNK_BYTES + MIB
NAME = "models/tiny.gguf"
FREELY = Pace(0, lambda: False)


def noise(path: Path, size: int = SIZE, seed: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(random.Random(seed).randbytes(size))
    return path


def listing_of(*paths: Path) -> Listing:
    """As the holder of these files lists them."""
    read = HashCache(str(paths[0].parent)).file_hashes
    return Listing(files=tuple(ListedFile(name=p.name, size=p.stat().st_size, hashes=read(str(p))) for p in paths))


class Hooked(Pace):
    """Calls `before(n)` before the n-th MiB is sent."""

    def __init__(self, before: Callable[[int], object]) -> None:
        super().__init__(0, lambda: False)
        self.sent, self.before = 0, before

    def spend(self, count: int) -> None:
        before, self.sent = self.sent // MIB, self.sent + count
        if self.sent // MIB > before:
            self.before(self.sent // MIB)


def giver(path: Path, listing: Listing, pace: Pace = FREELY) -> Giver:
    return Giver(listing, [str(path)], pace)


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def streams(keys: tuple[bytes, bytes] | None = None) -> tuple[SealedStream, SealedStream]:
    """Both ends of a connection."""
    near, far = connected()
    back = keys and keys[::-1]
    return (
        SealedStream(near, peer="near", service="file/x", keys=keys, dead_peer_s=20),
        SealedStream(far, peer="far", service="file/x", keys=back, dead_peer_s=20),
    )


def connecting(serves: Mapping[str, Serve]) -> Callable[[str], SealedStream]:
    """Connections to such givers, each answered in a thread."""

    def connect(name: str) -> SealedStream:
        near, far = streams()
        threading.Thread(target=serves[name], args=(near,), daemon=True).start()
        return far

    return connect


def copying(listing: Listing, to: Path, serves: Mapping[str, Serve], **more: Any) -> Copy:
    """A copy of one file from these givers, not begun."""
    return Copy(
        **{
            "model": "m", "node": "here", "root": listing.root, "place": lambda _: [str(to)], "pace": FREELY,
            "givers": lambda: list(serves), "connect": connecting(serves), **more,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noise(tmp_path_factory.mktemp("original") / "m.gguf")


@pytest.fixture(scope="module")
def listing(original: Path) -> Listing:
    return listing_of(original)


# --- who gives what ---


def times(handed_out: HandedOut, chunks: int) -> list[int]:
    return [handed_out.times(number) for number in range(chunks)]


def gave(giver: Giver) -> int:
    """Chunks that left it."""
    return sum(times(giver.handed_out, 64))


@given(st.lists(st.tuples(st.integers(0, (1 << 12) - 1), st.booleans()), max_size=60))
def test_pick_takes_one_that_is_offered_and_the_first_of_those_that_went_least(asked: list[tuple[int, bool]]) -> None:
    handed_out, counts = HandedOut(), [0] * 12
    for offered, kept in asked:
        wanted = min((n for n in range(12) if offered >> n & 1), key=lambda n: (counts[n], n), default=-1)
        assert handed_out.pick(offered) == wanted
        if wanted >= 0 and kept:
            counts[wanted] += 1
        elif wanted >= 0:
            handed_out.put_back(wanted)
        assert times(handed_out, 12) == counts


def test_takers_of_one_giver_get_each_chunk_once_before_any_twice() -> None:
    handed_out = HandedOut()
    assert [handed_out.pick((1 << 12) - 1) for _ in range(12)] == [*range(12)]


# --- streams ---

KEYS = (b"a" * 32, b"b" * 32)


@pytest.mark.parametrize("keys", [KEYS, None])
def test_stream_gives_what_went_in_and_then_its_end(keys: tuple[bytes, bytes] | None) -> None:
    data = random.Random(2).randbytes(3 * MIB + 17)
    near, far = streams(keys)

    def send() -> None:
        with near:
            near.sendall(data)
            near.sendall(b"")  # is no end

    sender = threading.Thread(target=send)
    sender.start()
    got = bytearray()
    with far:
        while len(got) < len(data):
            got += far.read(1 + len(got))
            assert len(got) <= len(data)
        sender.join()
        if keys is None:
            assert not far.read(1)
        else:  # bytes that just stop may have been cut off
            with pytest.raises(ConnectionResetError):
                far.read(1)
    assert got == data


def test_stream_whose_bytes_were_changed_delivers_none_of_them() -> None:
    near, far = connected()
    with near, SealedStream(far, peer="far", service="file/x", keys=KEYS, dead_peer_s=20) as stream:
        near.sendall(bytes(3) + b"\x05" + bytes(5 + 16))
        with pytest.raises(ConnectionAbortedError, match="changed on the way"):
            stream.read(10)


def test_stream_that_stands_still_says_so_and_one_that_is_closed_ends_its_reader() -> None:
    near, far = streams(KEYS)
    with near, far:
        near.silent_s = 0.5
        with pytest.raises(TimeoutError, match="nothing moved"):
            near.read(1)
        timer = threading.Timer(0.2, near.close, ["no longer wanted"])
        near.silent_s = 60
        timer.start()
        with pytest.raises(ConnectionAbortedError, match="no longer wanted"):
            near.read(1)
        timer.join()
        with pytest.raises(ConnectionAbortedError, match="no longer wanted"):
            near.sendall(bytes(64 * MIB))


# --- where files may go ---


@pytest.mark.parametrize("path", ["../m.gguf", "models/../../m.gguf", "/etc/m.gguf", "link/m.gguf", "~root/m.gguf"])
def test_path_that_leads_out_of_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "link").symlink_to(tmp_path)
    with pytest.raises(FileError, match="outside the TOML's folder") as error:
        place_in(path, folder=str(home), dirs=())
    assert "model_dirs" in error.value.hint


def test_path_through_a_link_to_a_folder_of_model_dirs_is_taken(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "disk").mkdir()
    (tmp_path / "home" / "models").symlink_to(tmp_path / "disk")
    found = place_in("models/m-00001-of-00002.gguf", folder=str(tmp_path / "home"), dirs=[str(tmp_path / "disk")])
    assert [Path(path).name for path in found] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert {Path(path).parent for path in found} == {tmp_path / "disk"}


# --- landing ---


def test_copy_has_every_byte_and_leaves_nothing_else(tmp_path: Path, original: Path, listing: Listing) -> None:
    target = tmp_path / "deep" / "er" / "m.gguf"
    copy = copying(listing, target, {"a": giver(original, listing).serve})
    copy.run()
    assert (copy.state, copy.problem) == ("landed", "")
    assert target.read_bytes() == original.read_bytes()
    assert [file.name for file in target.parent.iterdir()] == ["m.gguf"]


def test_copy_of_a_split_model_brings_all_parts_the_first_one_last(tmp_path: Path) -> None:
    names = [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    parts = [noise(tmp_path / "from" / name, size=CHUNK_BYTES + n, seed=n) for n, name in enumerate(names)]
    listed = listing_of(*parts)
    targets = [tmp_path / "to" / name for name in names]
    whole = Giver(listed, [str(part) for part in parts], FREELY)
    copy = copying(listed, targets[0], {"a": whole.serve}, place=lambda _: [str(target) for target in targets])
    copy.run()
    assert copy.state == "landed", copy.problem
    assert [target.read_bytes() for target in targets] == [part.read_bytes() for part in parts]
    assert targets[0].stat().st_ctime_ns == max(target.stat().st_ctime_ns for target in targets)


def test_file_with_other_bytes_stays_unless_it_may_be_replaced(
    tmp_path: Path, original: Path, listing: Listing
) -> None:
    target = tmp_path / "m.gguf"
    spoilt = bytearray(original.read_bytes())
    spoilt[CHUNK_BYTES + 7] ^= 1
    target.write_bytes(spoilt)
    serves = {"a": giver(original, listing).serve}
    refused = copying(listing, target, serves)
    refused.run()
    assert refused.state == "failed" and "is there with other bytes" in refused.problem and "--replace" in refused.hint
    assert target.read_bytes() == spoilt

    giving = giver(original, listing)
    replaced = copying(listing, target, {"a": giving.serve}, replace=True)
    replaced.run()
    assert replaced.state == "landed" and target.read_bytes() == original.read_bytes()
    assert times(giving.handed_out, 3) == [0, 1, 0]  # the chunks that were right were not fetched again


def test_file_that_appears_while_a_copy_runs_is_not_overwritten(
    tmp_path: Path, original: Path, listing: Listing
) -> None:
    target = tmp_path / "m.gguf"
    pace = Hooked(lambda n: target.write_bytes(b"mine") if n == 1 else None)
    copy = copying(listing, target, {"a": giver(original, listing, pace).serve})
    copy.run()
    assert copy.state == "failed" and "was put there meanwhile" in copy.problem
    assert target.read_bytes() == b"mine"


def test_link_in_the_place_of_a_draft_is_not_followed(tmp_path: Path, original: Path, listing: Listing) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * 100)
    target = tmp_path / "m.gguf"
    for make in (os.symlink, os.link):
        make(precious, f"{target}.part")
        copy = copying(listing, target, {"a": giver(original, listing).serve})
        copy.run()
        assert copy.state == "landed" and target.read_bytes() == original.read_bytes()
        assert precious.read_bytes() == b"x" * 100
        target.unlink()


def test_content_that_contradicts_the_toml_is_not_installed(tmp_path: Path, original: Path, listing: Listing) -> None:
    copy = copying(listing, tmp_path / "m.gguf", {"a": giver(original, listing).serve}, sha256=("0" * 64,))
    copy.run()
    assert copy.state == "failed" and "the copies there are have SHA-256" in copy.problem
    assert not (tmp_path / "m.gguf").exists()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    attempts=st.lists(
        st.tuples(
            st.integers(0, 2),  # chunks that land before it is killed
            st.tuples(st.integers(0, SIZE), st.integers(0, MIB)),  # bytes that a power cut leaves wrong
            st.none() | st.integers(0, SIZE + MIB),  # the length that it leaves
        ),
        max_size=3,
    )
)
def test_copy_killed_anywhere_is_right_in_the_end(
    tmp_path: Path, original: Path, listing: Listing, attempts: list[tuple[int, tuple[int, int], int | None]]
) -> None:
    target = tmp_path / "m.gguf"
    draft, data = Path(f"{target}.part"), original.read_bytes()
    for landed, (at, count), length in attempts:
        landing = Landing(listing, [str(target)])
        landing.open()
        for number in [n for n in range(3) if landing.missing >> n & 1][:landed]:
            start = number * CHUNK_BYTES
            landing.write(number, memoryview(data)[start : start + CHUNK_BYTES])
        landing.close()
        with draft.open("r+b") as file:
            file.seek(at)
            file.write(b"\xa5" * count)
            if length is not None:
                file.truncate(length)
        assert not target.exists()
    copy = copying(listing, target, {"a": giver(original, listing).serve})
    copy.run()
    assert copy.state == "landed", copy.problem
    assert target.read_bytes() == data and not draft.exists()
    target.unlink()


def test_what_has_landed_is_not_fetched_again(tmp_path: Path, original: Path, listing: Listing) -> None:
    landing = Landing(listing, [str(tmp_path / "m.gguf")])
    landing.open()
    landing.write(1, memoryview(original.read_bytes())[CHUNK_BYTES : 2 * CHUNK_BYTES])
    landing.close()
    giving = giver(original, listing)
    copying(listing, tmp_path / "m.gguf", {"a": giving.serve}).run()
    assert times(giving.handed_out, 3) == [1, 0, 1]


@pytest.mark.parametrize("missing", [True, False])
def test_split_model_with_one_part_wrong_or_missing_fetches_only_what_is_not_right(
    tmp_path: Path, missing: bool
) -> None:
    names = [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    parts = [noise(tmp_path / "from" / name, size=CHUNK_BYTES + n, seed=n) for n, name in enumerate(names)]
    targets = [noise(tmp_path / "to" / name, size=CHUNK_BYTES + n, seed=n) for n, name in enumerate(names)]
    if missing:
        targets[1].unlink()
    else:
        with targets[1].open("r+b") as file:
            file.write(b"rot")
    listed = listing_of(*parts)
    whole = Giver(listed, [str(part) for part in parts], FREELY)
    serves, more = {"a": whole.serve}, {"place": lambda _: [str(target) for target in targets]}
    before = [target.stat().st_ino for target in targets[::2]]
    if not missing:
        refused = copying(listed, targets[0], serves, **more)
        refused.run()
        assert refused.state == "failed" and str(targets[1]) in refused.problem
    copy = copying(listed, targets[0], serves, replace=not missing, **more)
    copy.run()
    assert copy.state == "landed", copy.problem
    assert [target.read_bytes() for target in targets] == [part.read_bytes() for part in parts]
    assert [target.stat().st_ino for target in targets[::2]] == before
    assert times(whole.handed_out, 5) == [0, 1, int(missing), 0, 0]  # the first part has one chunk, the others two
    assert len(list((tmp_path / "to").glob("*.gguf*"))) == 3


def test_folder_in_the_place_of_the_file_is_named_before_anything_is_fetched(
    tmp_path: Path, original: Path, listing: Listing
) -> None:
    giving = giver(original, listing)
    for place in ("m.gguf", "m.gguf.part"):
        (tmp_path / place).mkdir()
        copy = copying(listing, tmp_path / "m.gguf", {"a": giving.serve}, replace=True)
        copy.run()
        assert copy.state == "failed" and str(tmp_path / place) in copy.problem and not gave(giving)
        (tmp_path / place).rmdir()


def test_file_system_without_links_takes_a_copy_and_keeps_what_is_put_there(
    tmp_path: Path, original: Path, listing: Listing
) -> None:
    if reason := why_no_fat():
        pytest.skip(reason)
    target = tmp_path / "fat" / "Größe m.gguf"
    with Stick(tmp_path / "behind", target.parent, 4 * SIZE).plugged():
        copy = copying(listing, target, {"a": giver(original, listing).serve})
        copy.run()
        assert copy.state == "landed" and target.read_bytes() == original.read_bytes()
        assert [path.name for path in target.parent.iterdir()] == [target.name]
        target.unlink()
        pace = Hooked(lambda n: target.write_bytes(b"mine") if n == 1 else None)
        copy = copying(listing, target, {"a": giver(original, listing, pace).serve})
        copy.run()
        assert copy.state == "failed" and "was put there meanwhile" in copy.problem
        assert target.read_bytes() == b"mine"


def test_disk_that_is_gone_under_way_is_named_and_the_copy_goes_on_when_it_is_back(
    tmp_path: Path, original: Path, listing: Listing
) -> None:
    if reason := why_no_fat():
        pytest.skip(reason)
    target, stick = tmp_path / "fat" / "m.gguf", Stick(tmp_path / "behind", tmp_path / "fat", 4 * SIZE)
    with stick.plugged() as pull_out:
        pace = Hooked(lambda n: pull_out(0) if n == 7 else None)  # chunk 0 has landed, the others have not
        copy = copying(listing, target, {"a": giver(original, listing, pace).serve})
        copy.run()
        assert copy.state == "failed" and "cannot be written: Input/output error" in copy.problem
    with stick.plugged():
        giving = giver(original, listing)
        copy = copying(listing, target, {"a": giving.serve})
        copy.run()
        assert copy.state == "landed" and target.read_bytes() == original.read_bytes()
        assert gave(giving) == 2


# --- givers that fail ---


def test_giver_that_lies_is_left_alone_and_another_one_gives(tmp_path: Path, original: Path, listing: Listing) -> None:
    other = noise(tmp_path / "other", seed=2)
    serves = {"a liar": giver(other, listing).serve, "honest": giver(original, listing).serve}
    copy = copying(listing, tmp_path / "m.gguf", serves)
    copy.run()
    assert copy.state == "landed" and (tmp_path / "m.gguf").read_bytes() == original.read_bytes()
    assert "not those it promised" in copy._benched["a liar"][1] and "honest" not in copy._benched


def test_giver_with_a_list_of_other_content_is_left_alone(tmp_path: Path, original: Path, listing: Listing) -> None:
    wrong = replace(listing, files=(replace(listing.files[0], hashes=("0" * 64, *listing.files[0].hashes[1:])),))
    serves = {"a": giver(original, wrong).serve, "b": giver(original, listing).serve}
    copy = copying(listing, tmp_path / "m.gguf", serves)
    copy.run()
    assert copy.state == "landed" and "not that of" in copy._benched["a"][1]


def test_giver_that_dies_again_and_again_is_replaced_by_another(
    tmp_path: Path, original: Path, listing: Listing
) -> None:
    def die(n: int) -> None:
        if n % 10 == 0:
            raise ConnectionAbortedError("cut")

    mortal, second = giver(original, listing, Hooked(die)), giver(original, listing)
    copy = copying(listing, tmp_path / "m.gguf", {"a": mortal.serve, "b": second.serve})
    copy.run()
    assert copy.state == "landed" and (tmp_path / "m.gguf").read_bytes() == original.read_bytes()


def test_giver_that_stalls_holds_nobody_up(tmp_path: Path, original: Path, listing: Listing) -> None:
    never, begun = threading.Event(), time.monotonic()
    stalled = giver(original, listing, Hooked(lambda n: never.wait(60) and None if n == 3 else None))
    serves = {"a": stalled.serve, "b": giver(original, listing).serve}
    copy = copying(listing, tmp_path / "m.gguf", serves)
    copy.run()
    never.set()
    assert copy.state == "landed" and (tmp_path / "m.gguf").read_bytes() == original.read_bytes()
    assert time.monotonic() - begun < SILENT_S + 10


def test_bytes_that_come_after_a_chunk_was_whole_change_nothing(
    tmp_path: Path, original: Path, listing: Listing
) -> None:
    landing, first = Landing(listing, [str(tmp_path / "m.gguf")]), original.read_bytes()[:CHUNK_BYTES]
    with contextlib.closing(landing):
        landing.open()
        landing.write(0, memoryview(first[:MIB]))
        assert landing.missing & 1
        landing.write(0, memoryview(first[MIB:]), MIB)
        landing.write(0, memoryview(b"wrong"), 5)
    assert not landing.missing & 1
    assert (tmp_path / "m.gguf.part").read_bytes() == first


def test_giver_whose_file_changes_under_way_does_no_harm(tmp_path: Path, original: Path, listing: Listing) -> None:
    fickle = tmp_path / "fickle"
    fickle.write_bytes(original.read_bytes())

    def change(n: int) -> None:
        if n == 5:
            os.truncate(fickle, CHUNK_BYTES)
        if n == 6:
            fickle.write_bytes(noise(tmp_path / "new", seed=3).read_bytes())

    serves = {"a": giver(fickle, listing, Hooked(change)).serve, "b": giver(original, listing).serve}
    copy = copying(listing, tmp_path / "m.gguf", serves)
    copy.run()
    assert copy.state == "landed" and (tmp_path / "m.gguf").read_bytes() == original.read_bytes()


def test_copy_that_is_stopped_ends_soon_and_goes_on_later(tmp_path: Path, original: Path, listing: Listing) -> None:
    copy = copying(listing, tmp_path / "m.gguf", {})
    pace = Hooked(lambda n: copy.cancel() if n == 5 else None)
    serves = {"a": giver(original, listing, pace).serve}
    copy._givers, copy._connect = lambda: list(serves), connecting(serves)
    copy.run()
    assert copy.state == "failed" and "was stopped" in copy.problem and not (tmp_path / "m.gguf").exists()
    again = copying(listing, tmp_path / "m.gguf", serves)
    again.run()
    assert again.state == "landed" and (tmp_path / "m.gguf").read_bytes() == original.read_bytes()


# --- many takers ---


def test_eight_takers_pass_chunks_on_so_that_the_giver_sends_little_more_than_one_copy(tmp_path: Path) -> None:
    source = noise(tmp_path / "m.gguf", size=6 * CHUNK_BYTES)
    listed = listing_of(source)
    giving = giver(source, listed, Pace(64 * MIB, lambda: False))
    copies: dict[str, Copy] = {}

    def serve(name: str, stream: SealedStream) -> None:
        with stream:
            if (found := copies[name].giver) is not None:
                found.serve(stream)

    serves: dict[str, Serve] = {"source": giving.serve}
    for n in range(8):
        names = ["source", *(f"box{other}" for other in range(8) if other != n)]
        copies[f"box{n}"] = copying(listed, tmp_path / f"box{n}" / "m.gguf", serves, givers=lambda names=names: names)
        serves[f"box{n}"] = functools.partial(serve, f"box{n}")
    threads = [threading.Thread(target=copy.run) for copy in copies.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {copy.state for copy in copies.values()} == {"landed"}
    assert all((tmp_path / name / "m.gguf").read_bytes() == source.read_bytes() for name in copies)
    assert gave(giving) < 4 * len(listed.chunks)


# --- full disks ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of SIZE + 8 MiB."""
    if reason := why_no_hosts():
        pytest.skip(reason)
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE + 8 * MIB}", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.namespaces
def test_disk_without_room_is_named_first_with_what_is_missing(
    small_disk: Path, original: Path, listing: Listing
) -> None:
    (small_disk / "other").write_bytes(bytes(10 * MIB))
    giving = giver(original, listing)
    copy = copying(listing, small_disk / "m.gguf", {"a": giving.serve})
    copy.run()
    assert copy.state == "failed" and "needs 9 MiB more, and 7 MiB are free" in copy.problem
    assert "make room for 2 MiB" in copy.hint and gave(giving) == 0


@pytest.mark.namespaces
def test_disk_that_fills_up_under_way_loses_nothing(small_disk: Path, original: Path, listing: Listing) -> None:
    filler = small_disk / "other"
    pace = Hooked(lambda n: filler.write_bytes(bytes(10 * MIB)) if n == 1 else None)
    copy = copying(listing, small_disk / "m.gguf", {"a": giver(original, listing, pace).serve})
    copy.run()
    assert copy.state == "failed" and "No space left" in copy.problem and "is kept" in copy.hint
    assert not (small_disk / "m.gguf").exists()
    filler.unlink()
    giving = giver(original, listing)
    again = copying(listing, small_disk / "m.gguf", {"a": giving.serve})
    again.run()
    assert again.state == "landed" and (small_disk / "m.gguf").read_bytes() == original.read_bytes()
    assert 0 < gave(giving) < 3


# --- whole nodes ---


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

        def on_way(snapshot: Snapshot) -> set[tuple[str, str]]:
            return {(view.node, view.model) for view in snapshot.copies if view.state == "copying"}

        seen = alpha.wait_status(lambda snapshot: on_way(snapshot) or serves(snapshot), "beta is copying")
        assert serves(seen) or on_way(seen) == {("beta", "tiny")}
        alpha.wait_status(serves, "the ring serves", 90)

        assert file_of(beta).read_bytes() == whole
        assert sorted(file.name for file in file_of(beta).parent.iterdir()) == ["tiny.gguf"]
        assert file_of(beta).stat().st_mode & 0o777 == 0o644
        assert "copy of tiny: whole, and in place" in beta.output(beta.started[0])


# --- by hand: one pair of boxes, the tests run in order ---

FIVE = 4 * CHUNK_BYTES + MIB


@pytest.fixture(scope="module")
def pair(hosts: MakeLan) -> Iterator[Lan]:
    """Two boxes of which alpha has the model, and which do not start it; copies take their time."""
    with hosts(toml(("alpha", "beta"), "autostart = false", 'copy_limit = "24MiB"'), ("alpha", "beta")) as lan:
        at_home(lan)
        write_model(file_of(lan.hosts["alpha"]), FIVE)
        lan.up("alpha", "beta")
        yield lan


def states(host: Host, model: str = "tiny") -> dict[str, str]:
    """What `models` says of each node's copy."""
    lines = [line for line in host.run("models").stdout.splitlines() if line.startswith(model)]
    return {line.split()[1]: line.split("  ")[2].strip() for line in (re.sub(r" {2,}", "  ", line) for line in lines)}


@pytest.mark.namespaces
def test_pull_killed_under_way_goes_on_and_the_file_is_right(pair: Lan) -> None:
    alpha, beta = pair.hosts["alpha"], pair.hosts["beta"]
    eventually(lambda: states(beta) == {"alpha": "whole", "beta": "missing"}, "alpha has read its copy")
    pulling = beta.popen("pull", "tiny")
    seen = beta.wait_status(lambda found: found.copies and found.copies[0].done_bytes, "a chunk has landed")
    assert beta.up_process and seen.copies[0].givers == ("alpha",)
    beta.up_process.kill()
    assert pulling.wait(20) == 1 and not file_of(beta).exists()

    beta.up()
    eventually(lambda: states(beta).get("alpha") == "whole", "beta is up again")
    done = beta.run("pull", "tiny")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr  # in a pipe, as cron's, it says nothing
    assert file_of(beta).read_bytes() == file_of(alpha).read_bytes()
    assert states(beta) == {"alpha": "whole", "beta": "whole"}

    file_of(beta).unlink()  # and at once, before the next look at the files: `pull` said "whole"
    assert alpha.up_process
    alpha.up_process.send_signal(signal.SIGSTOP)
    pulling = beta.spawn("env", "--default-signal=INT", *shardbox_command(), "pull", "tiny")
    beta.wait_status(lambda found: any(copy.state == "copying" for copy in found.copies), "it is fetched again")
    pulling.send_signal(signal.SIGINT)
    alpha.up_process.send_signal(signal.SIGCONT)
    assert pulling.wait(20) == 130
    assert "beta goes on with it" in (beta.folder / f"{beta.started.index(pulling)}.log").read_text()
    assert beta.run("pull", "tiny").returncode == 0
    assert file_of(beta).read_bytes() == file_of(alpha).read_bytes()


@pytest.mark.namespaces
def test_verify_names_the_box_whose_copy_has_rotted_and_only_replace_mends_it(pair: Lan) -> None:
    alpha, beta = pair.hosts["alpha"], pair.hosts["beta"]
    assert alpha.run("verify", "tiny").returncode == 0
    before = file_of(beta).stat()
    with file_of(beta).open("r+b") as file:
        file.seek(CHUNK_BYTES + 5)
        byte = file.read(1)[0]
        file.seek(CHUNK_BYTES + 5)
        file.write(bytes([byte ^ 1]))
    os.utime(file_of(beta), ns=(before.st_atime_ns, before.st_mtime_ns))  # as a disk would do it: unseen

    done = alpha.run("verify", "tiny")
    assert done.returncode == 1
    assert re.search(r"(?m)^beta: .* when it was read last", done.stdout) and "alpha: right" in done.stdout

    refused = beta.run("pull", "tiny")
    assert refused.returncode == 1 and "is there with other bytes" in refused.stderr and "--replace" in refused.stderr
    assert file_of(beta).read_bytes() != file_of(alpha).read_bytes()
    assert beta.run("pull", "tiny", "--replace").returncode == 0
    assert file_of(beta).read_bytes() == file_of(alpha).read_bytes()
    assert alpha.run("verify", "tiny").returncode == 0


@pytest.mark.namespaces
def test_reading_is_told_by_status_and_models_and_goes_slowly_while_a_ring_answers(hosts: MakeLan) -> None:
    more = '[[models]]\nname = "large"\npath = "models/large.gguf"\nautostart = false'
    with hosts(toml(("alpha", "beta"), more), ("alpha", "beta")) as lan:
        at_home(lan)
        for host in lan.hosts.values():
            write_model(file_of(host), MIB)
        alpha, beta = lan.up("alpha", "beta")
        alpha.wait_status(serves, "the ring serves", 90)
        size = write_model(beta.folder / "models/large.gguf", 96 * MIB).stat().st_size
        ended = threading.Event()

        def ask_on() -> None:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
            while not ended.is_set():
                alpha.http("POST", "/v1/chat/completions", body)

        asking = threading.Thread(target=ask_on)
        asking.start()
        try:
            eventually(lambda: states(alpha, "large")["beta"].startswith("reading, "), "`models` tells of it")
            seen = alpha.wait_status(lambda found: any(view.bytes_per_s for view in found.copies), "status does")
            text = alpha.run("status").stdout
        finally:
            ended.set()
            asking.join()
        (view,) = seen.copies
        assert (view.state, view.model, view.node, view.size_bytes) == ("reading", "large", "beta", size)
        assert view.bytes_per_s < 1.5 * READ_BYTES_PER_S
        assert re.search(r"large: beta has read \d+ % of 96.* MiB, .*/s, .* left", text), text
        assert beta.run("verify", "large").returncode == 1  # alpha has none
        assert states(alpha, "large") == {"alpha": "missing", "beta": "whole"}


@pytest.mark.namespaces
def test_verify_shows_a_bar_on_a_terminal_and_only_the_findings_in_a_pipe(pair: Lan) -> None:
    alpha = pair.hosts["alpha"]
    near, far = os.openpty()
    with open(near, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            alpha.command(*shardbox_command(), "verify", "tiny"), env=alpha.environment(), stdout=far, stderr=far
        )
        os.close(far)
        shown = bytearray()
        with contextlib.suppress(OSError):  # EIO: nobody holds the other end any more
            while data := screen.read(4096):
                shown += data
        assert process.wait(30) == 0
    assert "tiny: read on 2 boxes" in shown.decode() and "alpha: right" in shown.decode()
    lines = alpha.run("verify", "tiny").stdout.splitlines()
    assert [line.split(",")[0] for line in lines] == ["alpha: right", "beta: right"]


@pytest.mark.namespaces
def test_pull_from_a_box_that_has_none_says_so(pair: Lan) -> None:
    done = pair.hosts["alpha"].run("pull", "tiny", "--from", "nobody")
    assert done.returncode == 1 and "no other box has a whole copy (nobody)" in done.stderr


def test_prune_keeps_the_engines_that_this_box_runs(tmp_path: Path) -> None:
    """They were offered, and removed while the node had no others; but not those that its own have taken over from."""
    state, own = tmp_path / "state", tmp_path / "bin"
    (state / "engines").mkdir(parents=True)
    fetched = [str(state / "engines" / name) for name in ROLE_BINARIES.values()]
    for path in fetched:
        Path(path).write_bytes(b"engine")
    note_in_ledger(str(state), fetched)
    node = NodeConfig(name="beta", engine=EngineConfig(path=("bin",)))
    setup = parse_config(b'[cluster]\nsecret = "%s"\n' % (b"s" * 20), file="t.toml", folder=str(tmp_path))
    assert to_prune(str(state), setup, node) == []
    own.mkdir()
    (own / "llama-cli").write_bytes(b"engine")
    assert to_prune(str(state), setup, node) == sorted(fetched)


@pytest.mark.namespaces
def test_file_that_two_models_share_comes_once_and_read_only_folder_is_named(hosts: MakeLan) -> None:
    more = '[[models]]\nname = "twin"\npath = "models/./tiny.gguf"\nautostart = false'
    with hosts(toml(("alpha", "beta"), f"autostart = false\n{more}"), ("alpha", "beta")) as lan:
        at_home(lan)
        alpha, beta = lan.hosts["alpha"], lan.hosts["beta"]
        write_model(file_of(alpha), SIZE)
        folder = file_of(beta).parent
        folder.mkdir()
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
            lan.up("alpha", "beta")
            eventually(lambda: states(beta).get("alpha") == "whole", "it is known")
            refused = beta.run("pull", "tiny")
        finally:
            subprocess.run(["umount", folder], check=True)
        assert beta.up_process
        beta.up_process.kill()
        beta.up()
        for model in ("tiny", "twin"):
            eventually(lambda model=model: states(beta, model).get("alpha") == "whole", "it is known")  # type: ignore[misc]
        assert refused.returncode == 1 and f"{file_of(beta)}.part cannot be written: Read-only" in refused.stderr

        done = beta.run("pull")
        assert done.returncode == 0, done.stderr
        assert file_of(beta).read_bytes() == file_of(alpha).read_bytes()
        assert beta.up_process and beta.output(beta.up_process).count("whole, and in place") == 1
        for model in ("tiny", "twin"):
            assert states(beta, model) == {"alpha": "whole", "beta": "whole"}


@pytest.mark.namespaces
def test_prune_removes_only_what_was_copied_here_and_after_a_yes(pair: Lan) -> None:
    alpha, beta = pair.hosts["alpha"], pair.hosts["beta"]
    kept = beta.run("models", "--prune", "--yes")
    assert "nothing that shardbox copied" in kept.stdout, kept.stderr
    for host in (alpha, beta):
        host.config.write_text(host.config.read_text().replace(NAME, "models/new.gguf"))
    assert "nothing that shardbox copied" in alpha.run("models", "--prune", "--yes").stdout
    assert str(file_of(beta)) in beta.run("models", "--prune").stdout and file_of(beta).exists()
    assert f"removed {file_of(beta)}" in beta.run("models", "--prune", "--yes").stdout
    assert not file_of(beta).exists() and file_of(alpha).exists()


# --- nine boxes, the tests run in order ---

NINE = tuple(f"box{n}" for n in range(9))


def knows_whole(box: Host, *whole: str) -> bool:
    """Whether a box knows that these, and no others, have the model whole."""
    return {name for name, state in states(box).items() if state == "whole"} == {*whole}


@pytest.fixture(scope="module")
def nine(hosts: MakeLan) -> Iterator[list[Host]]:
    """Nine boxes of which the first has the model; copies take their time."""
    head = '[cluster]\nname = "copies"\nsecret_file = "cluster.secret"\ncopy_limit = "24MiB"\n'
    text = f'{head}[engine]\nkind = "rehearsal"\n[[models]]\nname = "tiny"\npath = "{NAME}"\nautostart = false\n'
    with hosts(text, NINE) as lan:
        at_home(lan)
        write_model(file_of(lan.hosts["box0"]), FIVE)
        boxes = lan.up(*NINE)
        for box in boxes:
            eventually(functools.partial(knows_whole, box, "box0"), f"{box.name} knows of box0's copy")
        yield boxes


def begins(box: Host) -> subprocess.Popen[str]:
    """A `pull` of which a chunk has landed."""
    pulling = box.popen("pull", "tiny")
    box.wait_status(lambda found: any(view.node == box.name and view.done_bytes for view in found.copies), "a chunk")
    return pulling


@pytest.mark.namespaces
def test_eight_boxes_get_the_file_also_the_one_that_is_killed_under_way(nine: list[Host]) -> None:
    source, victim, others = nine[0], nine[1], nine[2:]
    pulling = [box.popen("pull", "tiny") for box in others]
    cut = begins(victim)
    assert victim.up_process
    victim.up_process.kill()
    assert cut.wait(20) == 1 and not file_of(victim).exists()
    victim.up()
    eventually(lambda: states(victim).get("box0") == "whole", "the victim is up again")
    assert victim.run("pull", "tiny").returncode == 0
    assert [process.wait(60) for process in pulling] == [0] * 7
    whole = file_of(source).read_bytes()
    assert all(file_of(box).read_bytes() == whole for box in nine)
    assert not [path for box in nine for path in box.folder.rglob("*.part")]


@pytest.mark.namespaces
def test_source_that_is_killed_under_way_is_replaced_by_another(nine: list[Host]) -> None:
    source, taker, others = nine[0], nine[8], nine[2:8]
    for box in (taker, *others):  # box1 alone has it too
        file_of(box).unlink()
    eventually(lambda: knows_whole(taker, "box0", "box1"), "two have it")
    pulling = begins(taker)
    assert source.up_process
    source.up_process.kill()
    assert pulling.wait(60) == 0, taker.output(pulling)
    assert file_of(taker).read_bytes() == file_of(source).read_bytes()


@pytest.mark.large
@pytest.mark.namespaces
@pytest.mark.timeout(600)
def test_copy_of_several_gib_that_is_killed_under_way_goes_on_from_there(hosts: MakeLan) -> None:
    with hosts(toml(("alpha", "beta"), "autostart = false"), ("alpha", "beta")) as lan:
        at_home(lan)
        alpha, beta = lan.hosts["alpha"], lan.hosts["beta"]
        with write_model(file_of(alpha), 2 * CHUNK_BYTES).open("r+b") as file:  # the rest is a hole, but for its end
            file.seek((4 << 30) + 5)
            file.write(b"end")
        size = file_of(alpha).stat().st_size
        lan.up("alpha", "beta")
        eventually(lambda: states(beta).get("alpha") == "whole", "alpha has read its copy", 300)
        pulling = beta.popen("pull", "tiny")
        beta.wait_status(lambda found: any(view.done_bytes > size // 3 for view in found.copies), "a third", 300)
        assert beta.up_process
        beta.up_process.kill()
        assert pulling.wait(20) == 1 and not file_of(beta).exists()
        beta.up()
        eventually(lambda: states(beta).get("alpha") == "whole", "beta is up again")
        pulling = beta.popen("pull", "tiny")
        begun = beta.wait_status(lambda found: any(view.bytes_per_s for view in found.copies), "it goes on", 300)
        assert begun.copies[0].done_bytes > size // 3 - CHUNK_BYTES
        assert pulling.wait(300) == 0
        assert subprocess.run(["cmp", file_of(alpha), file_of(beta)], check=False).returncode == 0
