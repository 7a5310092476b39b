"""The probes, over recorded trees and stand-ins; the real box is asked only for what every box has."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal
from unittest import mock

import pytest
from models import llama_metadata, llama_tensors, write_gguf

from shardbox import (
    CHUNK_BYTES,
    CHUNKS,
    GIB,
    AddressFacts,
    BinaryFacts,
    GgufError,
    HashCache,
    ShardboxError,
    choose_addresses,
    find_model,
    keep_speed,
    known_speed,
    local_addresses,
    machine_identity,
    macos_memory,
    measure_speed,
    probe_binary,
    probe_cores,
    probe_gpus,
    probe_memory,
    probe_model,
    probe_platform,
    program_problem,
    root_hash,
    version_error,
)


def put(root: Path, files: dict[str, str]) -> str:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return str(root)


# -- memory and cores ----------------------------------------------------------------------------------


def put_groups(root: Path, cgroup: str, files: dict[str, str]) -> str:
    return put(root, {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}})


@pytest.mark.parametrize(
    ("cgroup", "values", "total_gib", "free_gib", "source"),
    [  # values are memory.* files of a group, in GiB
        ("", "", 16, 12, "meminfo"),
        ("0::/", "", 16, 12, "meminfo"),
        # the limit of a group above; file pages count as free
        ("0::/a/b", "a/max=8 a/current=6 a/inactive=1 a/b/max=max a/b/current=1", 8, 3, "cgroup v2 /sys/fs/cgroup/a"),
        # in a container the path is the host's, and the mount the container's
        ("0::/../../docker/0123", "/max=4 /high=2 /current=1", 2, 1, "cgroup v2 /sys/fs/cgroup"),
        ("0::/x", "x/max=64 x/current=0", 16, 12, "meminfo"),  # a roomy limit on a full box
        ("0::/x", "x/max=2 x/current=3", 2, 0, "cgroup v2 /sys/fs/cgroup/x"),  # the limit was lowered
        (
            "9:name=systemd:/\n4:cpu,memory:/box\n0::/",
            "memory/limit_in_bytes=9000000 memory/usage_in_bytes=9 "
            "memory/box/limit_in_bytes=5 memory/box/usage_in_bytes=4 memory/box/total_inactive=2",
            5,
            3,
            "cgroup v1 /sys/fs/cgroup/memory/box",
        ),
    ],
)
def test_memory_is_the_tightest_of_kernel_and_groups(
    tmp_path: Path, cgroup: str, values: str, total_gib: int, free_gib: int, source: str
) -> None:
    files = {}
    for folder, name, text in re.findall(r"(\S*)/(\w+)=(\S+)", values):
        content = str(int(text) * GIB) if text.isdecimal() else text
        is_stat = name.endswith("inactive")
        files[f"{folder}/memory.stat" if is_stat else f"{folder}/memory.{name}"] = (
            f"anon 5\n{name}_file {content}\nactive_file 7" if is_stat else content
        )
    root = put_groups(tmp_path, cgroup, {name.lstrip("/"): text for name, text in files.items()})
    put(tmp_path, {"proc/meminfo": "MemTotal:   16777216 kB\nMemFree:  1 kB\nMemAvailable:   12582912 kB\nHuge(x):  0"})
    facts = probe_memory(root)
    assert (facts.total_bytes, facts.available_bytes) == (total_gib * GIB, free_gib * GIB)
    assert facts.source == source


def test_memory_without_proc_says_so(tmp_path: Path) -> None:
    facts = probe_memory(str(tmp_path))
    assert facts.available_bytes == 0
    assert facts.source.startswith("unknown")


def test_macos_memory_counts_free_and_droppable_pages() -> None:
    vm_stat = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:    1000.\n"
        "Pages active:  999999.\nPages inactive:   500.\nPages speculative:   24.\nPages purgeable:    0.\n"
    )
    assert macos_memory(16 * GIB, vm_stat).available_bytes == 1524 * 16384
    assert macos_memory(16 * GIB, "").available_bytes == 0


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("", {}, 8),
        ("0::/a", {"a/cpu.max": "250000 100000"}, 2),
        ("0::/a", {"a/cpu.max": "50000 100000"}, 1),
        ("0::/a", {"a/cpu.max": "max 100000"}, 8),
        ("0::/a/b", {"a/b/cpu.max": "max 1", "a/cpu.max": "3 1"}, 3),
        ("1:cpu,cpuacct:/q", {"cpu/q/cpu.cfs_quota_us": "400000", "cpu/q/cpu.cfs_period_us": "100000"}, 4),
        ("1:cpu,cpuacct:/q", {"cpu/q/cpu.cfs_quota_us": "-1", "cpu/q/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_cores_respect_quota(tmp_path: Path, cgroup: str, files: dict[str, str], cores: int) -> None:
    assert probe_cores(put_groups(tmp_path, cgroup, files), affinity=8) == cores


def test_this_box_has_memory_cores_and_platform() -> None:
    assert 0 < probe_memory().available_bytes <= probe_memory().total_bytes
    assert 1 <= probe_cores() <= (os.cpu_count() or 1)
    assert re.fullmatch(r"(linux|darwin)-\w+", probe_platform())


# -- identity ------------------------------------------------------------------------------------------


def test_identity_is_stable_and_hides_the_id(tmp_path: Path) -> None:
    raw = "0123456789abcdef0123456789abcdef"
    first = machine_identity(put(tmp_path / "a", {"etc/machine-id": raw}))
    assert first == machine_identity(put(tmp_path / "b", {"var/lib/dbus/machine-id": raw}))
    assert re.fullmatch(r"[0-9a-f]{16}", first)
    assert first not in (raw[:16], hashlib.sha256(raw.encode()).hexdigest()[:16])
    assert first != machine_identity(put(tmp_path / "c", {"etc/machine-id": raw[::-1]}))


def test_identity_without_machine_id_falls_back(tmp_path: Path) -> None:
    one = machine_identity(put(tmp_path / "a", {"etc/machine-id": "uninitialized"}))
    assert one == machine_identity(str(tmp_path / "none"))
    assert re.fullmatch(r"[0-9a-f]{16}", one)


# -- GPUs ----------------------------------------------------------------------------------------------


class NVMLError(Exception):
    pass


def fake_nvml(*cards: tuple[object, object, object], init: Exception | None = None) -> mock.Mock:
    """pynvml with cards given as (handle, name, memory); an exception for a reading that fails."""
    nvml = mock.Mock(NVMLError=NVMLError)
    nvml.nvmlInit.side_effect = init
    nvml.nvmlDeviceGetCount.return_value = len(cards)
    for number, name in enumerate(("HandleByIndex", "Name", "MemoryInfo")):
        answers = [card[number] for card in cards if card[number] is not None]
        getattr(nvml, f"nvmlDeviceGet{name}").side_effect = answers
    nvml.nvmlDeviceGetMaxClockInfo.return_value, nvml.nvmlDeviceGetMemoryBusWidth.return_value = 9751, 384
    return nvml


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (None, "the Python package nvidia-ml-py is not installed"),
        (fake_nvml(init=NVMLError("NVML Shared Library Not Found")), "NVML Shared Library Not Found"),
        (fake_nvml(), "the NVIDIA driver sees no card"),
    ],
)
def test_no_gpu_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvml: mock.Mock | None, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # None: the import fails
    assert probe_gpus(str(tmp_path)) == ((), f"no GPU: {reason}")
    assert not nvml or nvml.nvmlShutdown.called


def test_gpu_on_the_bus_without_driver_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for slot, vendor, kind in (("01:00.0", "10de", "0300"), ("01:00.1", "10de", "0403"), ("00:02.0", "8086", "0300")):
        put(tmp_path / "sys/bus/pci/devices" / slot, {"vendor": f"0x{vendor}", "class": f"0x{kind}00"})
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(init=NVMLError("Driver Not Loaded")))
    assert probe_gpus(str(tmp_path)) == ((), "the NVIDIA card (PCI 01:00.0) has no driver: Driver Not Loaded")


def test_gpus_two_cards_one_jetson_one_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    big, small = (mock.Mock(total=total * GIB, free=GIB) for total in (24, 6))
    jetson, lost = NVMLError("Not Supported"), NVMLError("GPU is lost")
    nvml = fake_nvml((0, "RTX 3090", big), (1, "RTX 2060", small), (2, "Orin", jetson), (lost, None, None))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpus, reason = probe_gpus()
    assert [(gpu.index, gpu.name, gpu.total_bytes, gpu.free_bytes) for gpu in gpus] == [
        (0, "RTX 3090", 24 * GIB, GIB),
        (1, "RTX 2060", 6 * GIB, GIB),
        (2, "Orin", None, None),
    ]
    assert [round(gpu.bytes_per_s / 1e9) for gpu in gpus] == [936, 936, 0]  # as published for the RTX 3090
    assert "Not Supported" in gpus[2].note
    assert not gpus[0].note
    assert reason == "GPU 3 cannot be used: GPU is lost"
    assert nvml.nvmlShutdown.called


# -- speed ---------------------------------------------------------------------------------------------


def test_speed_is_measured_and_kept_for_this_box_alone(tmp_path: Path) -> None:
    speed = measure_speed(2, GIB)
    assert 1e8 < speed.memory_bytes_per_s < 1e13
    assert 1e8 < speed.core_bytes_per_s < 1e13
    assert known_speed(str(tmp_path), "here", 2) is None
    keep_speed(str(tmp_path), "here", 2, speed)
    assert known_speed(str(tmp_path), "here", 2) == speed
    assert known_speed(str(tmp_path), "elsewhere", 2) is None  # a copied state folder
    assert known_speed(str(tmp_path), "here", 4) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"machine": "here", "cores": 2, "speed": {"core_bytes_per_s": "x"}}'])
def test_speed_file_that_is_damaged_is_measured_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "speed.json").write_text(text, encoding="utf-8")
    assert known_speed(str(tmp_path), "here", 2) is None


# -- hashes --------------------------------------------------------------------------------------------


def hashes_of(cache: HashCache, path: Path, seen: list[int] | None = None) -> tuple[str, ...]:
    return cache.file_hashes(str(path), (seen if seen is not None else []).append)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(os.urandom(1 << 20) * 9 + b"end")
    return path


def test_hashes_are_of_chunks_in_order(tmp_path: Path, model: Path) -> None:
    data, seen = model.read_bytes(), list[int]()
    starts = (0, CHUNK_BYTES, 2 * CHUNK_BYTES)
    cache = HashCache(str(tmp_path / "state"))
    assert list(hashes_of(cache, model, seen)) == [
        hashlib.sha256(data[start : start + CHUNK_BYTES]).hexdigest() for start in starts
    ]
    assert sum(seen) == len(data) and max(seen) == 1 << 20
    assert cache.file_sha256(str(model)) == hashlib.sha256(data).hexdigest()
    assert hashes_of(cache, Path(os.devnull)) == ()


def test_hashes_are_kept_until_the_file_changes(tmp_path: Path, model: Path) -> None:
    state, seen = tmp_path / "state", list[int]()
    first = hashes_of(HashCache(str(state)), model)
    stamp = model.stat()
    with model.open("r+b") as file:  # other bytes, but the same size, inode and time: the cache must answer
        file.write(b"other bytes")
    os.utime(model, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert hashes_of(HashCache(str(state)), model, seen) == first
    assert not seen
    assert HashCache(str(state)).file_hashes(str(model), again=True)[0] != first[0]
    assert hashes_of(HashCache(str(state)), model)[0] != first[0]  # which is kept
    os.utime(model, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    assert hashes_of(HashCache(str(state)), model)[0] != first[0]
    assert [path.name for path in state.iterdir()] == ["hashes.json"]


@pytest.mark.parametrize("content", ["", "{", "\xff", "[]", '{"KIND PATH": 4}', '{"KIND PATH": ["x"]}'])
def test_broken_cache_is_replaced(tmp_path: Path, model: Path, content: str) -> None:
    (tmp_path / "hashes.json").write_text(
        content.replace("KIND", CHUNKS).replace("PATH", str(model)), encoding="latin-1"
    )
    assert len(hashes_of(HashCache(str(tmp_path)), model)) == 3
    assert f"{CHUNKS} {model}" in json.loads((tmp_path / "hashes.json").read_text())


def test_cache_that_cannot_be_saved_still_answers(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = HashCache(str(tmp_path / "file" / "state"))
    assert len(hashes_of(cache, model)) == 3
    with pytest.raises(GgufError, match="No such file"):
        hashes_of(cache, tmp_path / "none")


def test_hashing_stops_when_told(tmp_path: Path, model: Path) -> None:
    asked: list[int] = []

    def spend(count: int) -> None:
        asked.append(count)
        if len(asked) > 5:  # of 10: in the middle
            raise ShardboxError("stopped")

    with pytest.raises(ShardboxError, match="stopped"):
        HashCache(str(tmp_path / "state")).file_hashes(str(model), spend)
    assert len(asked) < 10 and not (tmp_path / "state").exists()


def test_hashing_is_done_by_several_threads_at_once(tmp_path: Path, model: Path) -> None:
    meeting = threading.Barrier(min(3, os.cpu_count() or 1))  # of three chunks: breaks unless all are begun

    def spend(count: int) -> None:
        if not meeting.broken and threading.get_ident() not in met:
            met.add(threading.get_ident())
            meeting.wait(30)

    met: set[int] = set()
    assert len(HashCache(str(tmp_path / "state")).file_hashes(str(model), spend)) == 3
    assert not meeting.broken


@pytest.mark.parametrize("change", ["grow", "shrink", "touch"])
def test_file_that_changes_while_hashed_is_refused(tmp_path: Path, model: Path, change: str) -> None:
    stamp = model.stat()

    def disturb(_: int) -> None:
        if change == "touch":
            os.utime(model, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 5))
        else:
            os.truncate(model, stamp.st_size + (9 if change == "grow" else -9))

    with pytest.raises(GgufError, match="changed while"):
        HashCache(str(tmp_path / "state")).file_hashes(str(model), disturb)
    assert not (tmp_path / "state").exists()


def test_cache_is_safe_for_threads(tmp_path: Path) -> None:
    cache, files = HashCache(str(tmp_path / "state")), [tmp_path / f"file{number}" for number in range(8)]
    for number, path in enumerate(files):
        path.write_bytes(bytes([number]) * 1000)
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda path: hashes_of(cache, path), files))) == 8
    assert len(json.loads((tmp_path / "state" / "hashes.json").read_text())) == 8


def test_root_hash_is_the_documented_construction() -> None:
    a, b = "a" * 64, "b" * 64
    text = f"shardbox-model-2\n20 2\n{a}\n{b}\n5 1\n{a}\n"
    assert root_hash([(20, [a, b]), (5, [a])]) == hashlib.sha256(text.encode()).hexdigest()
    assert root_hash([(20, [a, b]), (5, [a])]) != root_hash([(5, [a]), (20, [a, b])])
    assert root_hash([(20, [a]), (5, [b, a])]) != root_hash([(20, [a, b]), (5, [a])])


# -- binaries ------------------------------------------------------------------------------------------


def program(folder: Path, body: str, name: str = "llama-server") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def elf(machine: int, order: Literal["little", "big"] = "little") -> bytes:
    return b"\x7fELF\x02" + (b"\x01" if order == "little" else b"\x02") + bytes(12) + machine.to_bytes(2, order)


def probe(*folders: Path, role: str = "leader", lib: str = "", env: dict[str, str] | None = None) -> BinaryFacts:
    with tempfile.TemporaryDirectory() as state:
        paths, cache = [str(folder) for folder in folders], HashCache(state)
        return probe_binary(role, paths, lib=lib, env=env or {}, cache=cache, timeout_s=1)


def test_binary_that_runs_gives_version_commit_and_hash(tmp_path: Path) -> None:
    body = 'test "$1" = --version && echo "version: 4231 (bdf9d8e7)" >&2; echo "built with cc" >&2'
    path = program(tmp_path / "bin", body)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert probe(tmp_path / "bin") == BinaryFacts(
        role="leader", path=str(path), version="version: 4231 (bdf9d8e7)", commit="bdf9d8e7", sha256=sha256
    )


def test_binary_runs_with_library_path_in_another_folder(tmp_path: Path) -> None:
    program(tmp_path / "bin", f'echo "$LD_LIBRARY_PATH $X" > {tmp_path}/seen; pwd >> {tmp_path}/seen', "llama-cli")
    env = {"X": "x", "LD_LIBRARY_PATH": "/other", "DYLD_LIBRARY_PATH": "/other"}
    assert not probe(tmp_path / "bin", role="worker", lib="/my/lib", env=env).problem
    first, folder = (tmp_path / "seen").read_text().splitlines()
    assert first in ("/my/lib:/other x", "/other x")  # macOS's shell drops the variable that counts there
    assert "shardbox-" in folder
    assert not Path(folder).exists()


def test_binary_for_another_machine_is_passed_over(tmp_path: Path) -> None:
    other = program(tmp_path / "s390x", "")
    other.write_bytes(elf(22, "big"))
    assert probe(other.parent).problem
    good = program(tmp_path / "bin", "echo hello")
    facts = probe(other.parent, tmp_path / "bin")
    assert (facts.path, facts.version, facts.commit, facts.problem) == (str(good), "hello", "", "")


@pytest.mark.parametrize(
    ("body", "words", "hint"),
    [
        (
            "echo 'x: error while loading shared libraries: libzmq.so.5: cannot open' >&2; exit 127",
            "y libzmq.so.5 is",
            "",
        ),
        ("echo boom; exit 3", "failed (exit 3): boom", "by hand"),
        ("exit 3", "nothing printed", "by hand"),
        ("kill -4 $$", "instructions this CPU does not have", "-march=native"),
    ],
)
def test_binary_that_fails_says_why(tmp_path: Path, body: str, words: str, hint: str) -> None:
    program(tmp_path / "bin", body)
    facts = probe(tmp_path / "bin")
    assert words in facts.problem
    assert hint in facts.hint


def test_binary_that_hangs_is_given_up(tmp_path: Path) -> None:
    program(tmp_path / "bin", f"sleep 60 & echo $! > {tmp_path}/child; wait")
    assert "did not end" in probe(tmp_path / "bin").problem
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        os.sched_yield()
    assert not _runs(child)  # what the binary started is gone too


def _runs(pid: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False).stdout
    return state.strip()[:1] not in (b"", b"Z")


def test_binary_that_is_none_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "llama-server"
    assert probe(tmp_path).problem == f"no llama-server in {tmp_path}"
    assert probe().problem == "no llama-server in engine.path, which is empty"
    path.mkdir()
    assert probe(tmp_path).problem == "cannot be run: Is a directory"
    path.rmdir()
    path.write_text("#!/bin/sh\n")
    assert probe(tmp_path).problem == "cannot be run: Permission denied"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    assert probe(tmp_path).problem == "cannot be run: No such file or directory"
    path.unlink()
    path.symlink_to("nowhere")
    assert probe(tmp_path).problem == "cannot be run: No such file or directory"


@pytest.mark.parametrize(
    ("first", "machine", "words"),
    [
        (elf(62), "x86_64", ""),
        (elf(183), "aarch64", ""),
        (elf(40), "armv7l", ""),
        (elf(40), "aarch64", ""),
        (elf(62), "aarch64", "built for x86_64, this machine is aarch64"),
        (elf(183), "x86_64", "built for aarch64, this machine is x86_64"),
        (elf(9999), "x86_64", "ELF machine 9999"),
        (b"MZ" + bytes(18), "x86_64", "not a program for Linux"),
        (b"#!/bin/sh", "x86_64", ""),
        (b"", "x86_64", "not a program"),
        (elf(62)[:10], "x86_64", "not a program"),
    ],
)
def test_program_is_compared_with_the_machine(first: bytes, machine: str, words: str) -> None:
    problem = program_problem(first, "Linux", machine)
    assert words in problem
    assert bool(problem) == bool(words)
    assert program_problem(first, "Darwin", "arm64") == ""  # where running it tells


def test_newer_system_library_and_macos_library_are_named() -> None:
    output = "./llama-cli: /lib/libc.so.6: version `GLIBC_2.38' not found (required by ./llama-cli)"
    assert "GLIBC_2.38" in version_error(1, output).what
    assert "libzmq.5.dylib is missing" in version_error(-6, "dyld[1]: Library not loaded: @rpath/libzmq.5.dylib").what


# -- models --------------------------------------------------------------------------------------------


def test_model_is_found_in_order(tmp_path: Path) -> None:
    home, stick = tmp_path / "home", tmp_path / "stick"
    (stick / "sub").mkdir(parents=True)
    home.mkdir()

    def found(path: str = "sub/m.gguf") -> str:
        return find_model(path, folder=str(home), dirs=["../stick"])

    assert found() == ""
    (stick / "m.gguf").write_text("x")
    assert found() == str(stick / "m.gguf")
    (stick / "sub" / "m.gguf").write_text("x")
    assert found() == str(stick / "sub" / "m.gguf")
    (home / "sub" / "m.gguf").mkdir(parents=True)
    assert found() == str(stick / "sub" / "m.gguf")  # a folder of that name does not hide the file
    (home / "sub" / "m.gguf").rmdir()
    (home / "sub" / "m.gguf").write_text("x")
    assert found() == str(home / "sub" / "m.gguf")
    assert found(str(stick / "m.gguf")) == str(stick / "m.gguf")
    (stick / "x-00001-of-00002.gguf").write_text("x")
    assert found("x-00002-of-00002.gguf") == str(stick / "x-00001-of-00002.gguf")


def test_model_is_read_with_its_shape(tmp_path: Path) -> None:
    data = write_gguf(llama_metadata(), llama_tensors())
    (tmp_path / "m.gguf").write_bytes(data)
    facts = probe_model("tiny", "m.gguf", folder=str(tmp_path), dirs=[])
    assert (facts.name, facts.path, facts.parts) == ("tiny", str(tmp_path / "m.gguf"), 1)
    assert (facts.size_bytes, facts.problem, facts.root) == (len(data), "", "")
    assert facts.shape
    assert facts.shape.layers == 3


def test_split_model_with_missing_part_names_it(tmp_path: Path) -> None:
    tensors = llama_tensors()
    common = {"split.count": 2, "split.tensors.count": len(tensors)}
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(write_gguf({**llama_metadata(), **common, "split.no": 0}, tensors[:5]))
    facts = probe_model("m", first.name, folder=str(tmp_path), dirs=[])
    assert facts.problem == f"{second}: this part of the model is missing"
    second.write_bytes(write_gguf({**common, "split.no": 1}, tensors[5:]))
    facts = probe_model("m", first.name, folder=str(tmp_path), dirs=[])
    assert (facts.problem, facts.parts) == ("", 2)
    assert facts.size_bytes == first.stat().st_size + second.stat().st_size
    second.write_bytes(second.read_bytes()[:-40])
    facts = probe_model("m", first.name, folder=str(tmp_path), dirs=[])
    assert facts.problem.startswith(f"{second}: cut short")


def test_model_that_is_none_says_why(tmp_path: Path) -> None:
    def problem() -> str:
        return probe_model("m", "m.gguf", folder=str(tmp_path), dirs=["extra"]).problem

    path = tmp_path / "m.gguf"
    assert problem() == f"not found: tried {path}, {tmp_path}/extra/m.gguf"
    os.mkfifo(path)
    assert problem() == f"{path}: not a regular file"  # and does not wait for a writer
    path.unlink()
    path.write_bytes(b"")
    assert problem() == f"{path}: the file is empty"


def test_model_without_permission_says_so() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "m.gguf"
        path.write_bytes(b"GGUF")
        path.chmod(0)
        user = os.geteuid()
        try:
            if user == 0:  # root may read everything, so be nobody for a moment
                os.seteuid(65534)
            facts = probe_model("m", "m.gguf", folder=folder, dirs=[])
        finally:
            os.seteuid(user)
        assert facts.problem == f"{path}: cannot be read: Permission denied"
        assert "owner and mode" in facts.hint


# -- addresses -----------------------------------------------------------------------------------------

NETWORKS = {  # interface -> its addresses, what /sys says of it, what is said of it when it is not used
    "br-lan": ("10.0.0.5/24", "bridge lower_enp6s0", ""),
    "enp3s0": ("192.168.1.20/24", "device", ""),
    "enp3s0:1": ("192.168.7.20/24", "", ""),
    "wlp2s0": ("192.168.1.21/24", "device", ""),
    "vlan7": ("10.7.0.1/24", "lower_bond0", ""),
    "eth0": ("10.1.0.2/24", "", ""),  # of a container, one end of a veth pair
    "lo": ("127.0.0.1/8", "", "loopback"),
    "docker0": ("172.17.0.1/16", "bridge", "containers"),
    "incusbr0": ("10.66.0.1/24", "bridge lower_veth12ab", "containers"),
    "virbr0": ("192.168.122.1/24", "", "containers"),
    "veth12ab": ("10.2.0.2/24", "brport", "containers"),
    "office": ("10.8.0.2/24", "uevent=DEVTYPE=wireguard", "VPN"),
    "home": ("10.8.1.2/24", "tun_flags", "VPN"),
    "tailscale0": ("100.64.0.7/32", "", "VPN"),
    "enp4s0": ("169.254.7.7/16", "device", "link-local"),
    "enp5s0": ("10.9.0.1/24", "device operstate=down", "no link"),
}
GOOD = ["br-lan", "enp3s0", "enp3s0:1", "vlan7", "wlp2s0", "eth0"]  # cards first


@pytest.fixture
def sys_root(tmp_path: Path) -> str:
    """A tree with the /sys of NETWORKS; beside them a card in a bond, and one in a bridge."""
    net, bare = tmp_path / "sys/class/net", {"enp6s0": "device", "bond0": "lower_enp3s0"}
    for name, files in {**bare, **{name: row[1] for name, row in NETWORKS.items()}}.items():
        (net / name).mkdir(parents=True)
        for file, _, content in (word.partition("=") for word in files.split()):
            if file.startswith("lower_"):
                (net / name / file).symlink_to(net / file.removeprefix("lower_"))
            else:
                (net / name / file).write_text(content)
    return str(tmp_path)


def choose(root: str, names: Iterable[str], allowed: Sequence[str] = ()) -> tuple[list[AddressFacts], list[str]]:
    split = [(name, *NETWORKS[name][0].split("/")) for name in names]
    usable, left_out = choose_addresses(root, [(name, ip, int(prefix)) for name, ip, prefix in split], allowed)
    return list(usable), list(left_out)


def test_addresses_are_real_ones_cards_first(sys_root: str) -> None:
    usable, left_out = choose(sys_root, NETWORKS)
    assert [facts.interface for facts in usable] == GOOD
    assert (usable[0].address, usable[0].prefix, usable[0].note) == ("10.0.0.5", 24, "")
    assert len(left_out) == len(NETWORKS) - len(GOOD)
    for name, (address, _, words) in NETWORKS.items():
        said = [line for line in left_out if line.startswith(f"{name} {address.partition('/')[0]}: ")]
        assert len(said) == bool(words)
        assert all(words in line for line in said)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in (*GOOD, "enp4s0")])
def test_address_is_left_out_unless_named(sys_root: str, name: str) -> None:
    assert choose(sys_root, [name])[0] == []
    for entry in (name, NETWORKS[name][0], name[:2] + "*"):
        assert [facts.interface for facts in choose(sys_root, [name], [entry])[0]] == [name]


def test_named_interfaces_exclude_the_others(sys_root: str) -> None:
    usable, left_out = choose(sys_root, ["lo", "enp3s0", "wlp2s0"], ["192.168.1.20/32", "eth9", "10.0.0.0/8"])
    assert [facts.address for facts in usable] == ["192.168.1.20"]
    assert "wlp2s0 192.168.1.21: not in cluster.interfaces" in left_out
    assert "cluster.interfaces: nothing here matches eth9" in left_out
    assert "cluster.interfaces: nothing here matches 10.0.0.0/8" in left_out
    assert [facts.interface for facts in choose(sys_root, GOOD, ["enp3s0"])[0]] == ["enp3s0", "enp3s0:1"]


def test_link_local_is_used_when_alone_and_said(sys_root: str) -> None:
    usable, _ = choose(sys_root, ["lo", "enp4s0", "docker0"])
    assert [(facts.address, facts.note) for facts in usable] == [
        ("169.254.7.7", "link-local, nothing better was found")
    ]
    assert choose(sys_root, []) == ([], [])


def test_this_box_has_a_loopback() -> None:
    usable, _ = local_addresses(["127.0.0.0/8"])
    assert "127.0.0.1" in [facts.address for facts in usable]
    assert all(not facts.address.startswith("127.") for facts in local_addresses([])[0])
