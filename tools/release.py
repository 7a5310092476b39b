"""`make release`: the last commit as dist/shardbox for old systems, tried in some, and build/release.json about it.

    release.py BIN

BIN is the folder of the virtual environment. What is made once is kept in build/release; needs root and a Debian.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pack import glibc_needed

HERE = Path(__file__).resolve().parents[1]
KEPT = HERE / "build/release"
RUNTIME = KEPT / "root"
FOLDERS = ("one", "another folder, deeper/two")  # as tools/build-check: nothing of the folder's name may show
GLIBC = (2, 28)  # the newest that may be needed: Debian 10, RHEL 8
WHEELS = ("2_28", "2_27", "2_26", "2_24", "2_17", "2_12", "2_5", "2014", "2010", "1")
TOML = """
cluster = {name = "release", secret = "nobody but this trial uses this secret"}
engine = {kind = "rehearsal"}
[[models]]
name = "m"
path = "m.gguf"
rehearse = {layers = 64, width = 5120, bytes = "1GiB"}
"""
IN_ROOT = (
    'ip link set lo up; mount -t proc proc "$1/proc"; mkdir -p "$1/dev"; mount --rbind /dev "$1/dev"; exec chroot "$@"'
)


def run(argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
    """A step of the build; its output is shown."""
    subprocess.run(argv, check=True, env={**os.environ, **(env or {})})


def inside(root: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """A program in another root, alone with its processes and without a network."""
    alone = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "sh", "-euc", IN_ROOT, "sh", str(root)]
    env = {"PATH": "/opt/runtime/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    return subprocess.run([*alone, *argv], env=env, capture_output=True, text=True, check=False, timeout=1200)


def runtime() -> None:
    """The root that is built in, with the packages that requirements-dev.txt pins."""
    run([HERE / "tools/release-root", RUNTIME])
    pinned = (HERE / "requirements-dev.txt").read_bytes()
    mark = RUNTIME / f"opt/runtime/packages-{hashlib.sha256(pinned).hexdigest()[:16]}"
    if mark.exists():
        return
    target = RUNTIME / "opt/runtime/lib/python3.11/dist-packages"  # a patch of Debian's
    shutil.rmtree(target, ignore_errors=True)
    platforms = [f"--platform=manylinux{'' if tag.isdigit() else '_'}{tag}_x86_64" for tag in WHEELS]
    pip = f"{sys.executable} -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps"
    kinds = "--only-binary=:all: --implementation=cp --python-version=3.11 --abi=cp311 --abi=abi3 --abi=none"
    given = [f"--target={target}", "-r", str(HERE / "requirements-dev.txt")]
    run([*pip.split(), *kinds.split(), *platforms, *given])
    mark.touch()


def cloned(name: str) -> Path:
    """The last commit in the folder `name` of that root."""
    folder = RUNTIME / "build" / name
    run(["git", "clone", "--quiet", HERE, folder])
    (folder / ".venv").mkdir()
    (folder / ".venv/bin").symlink_to("/opt/runtime/bin")
    (folder / ".venv/.ready").touch()
    return folder


def build(folder: Path) -> None:
    """`make build` in a folder of that root."""
    place = f"/{folder.relative_to(RUNTIME)}"
    done = inside(RUNTIME, "make", "-s", "-C", place, "build", "PYTHON=/opt/runtime/bin/python")
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nthe build in {RUNTIME} failed")


def root_of(suite: str, mirror: str) -> Path:
    """A minimal Debian of this suite, made once."""
    root = KEPT / suite
    if not (root / "made").exists():
        shutil.rmtree(root, ignore_errors=True)
        run(["debootstrap", "--variant=minbase", suite, root, mirror])
        (root / "made").touch()
    return root


def bare_root() -> Path:
    """A root with a shell and the libraries of glibc, taken from Debian 11, and nothing else."""
    root, source = KEPT / "bare", RUNTIME
    shutil.rmtree(root, ignore_errors=True)
    listed = (source / "var/lib/dpkg/info/libc6:amd64.list").read_text().split()
    wanted = ["/bin/sh", "/lib64/ld-linux-x86-64.so.2", *(name for name in listed if re.search(r"\.so(\.\d+)*$", name))]
    for folder in ("tmp", "proc", "dev"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    files = subprocess.run(["chroot", source, "tar", "-ch", *wanted], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", root], input=files, check=True)
    return root


def tried(executable: Path, root: Path) -> list[str]:
    """What does not work in this root; it gets the executable and a TOML in /try."""
    place = root / "try"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    shutil.copy2(executable, place / "shardbox")
    (place / "shardbox.toml").write_text(TOML)
    wanted = {
        "version --verify": r"whole +/try/shardbox",
        "plan --node here --config /try/shardbox.toml": r"m: |\bm\b.*here",
        "demo --once": "SHARDBOX OK - demo-32b 3/3 ranks",
    }
    problems = []
    for command, words in wanted.items():
        done = inside(root, "/try/shardbox", *command.split())
        if done.returncode or not re.search(words, done.stdout):
            problems.append(f"{root.name}: {command}: {done.returncode}\n{done.stdout}{done.stderr}")
    return problems


def start_up(executable: Path) -> dict[str, float]:
    """What `make bench` says of the executable's start, as ratios to `python3 -c pass`."""
    code = "import bench, json; print(json.dumps(bench.start_up()))"
    env = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE / 'tests'}", "SHARDBOX_EXE": str(executable)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=HERE, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Build twice, compare, check, try, measure, tell."""
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        raise SystemExit("make release needs root, debootstrap and iproute2 (names as in Debian)")
    KEPT.mkdir(parents=True, exist_ok=True)
    runtime()
    shutil.rmtree(RUNTIME / "build", ignore_errors=True)
    one, two = [cloned(name) for name in FOLDERS]  # both before the first is built: a commit may come meanwhile
    build(one)
    build(two)
    executable = HERE / "dist/shardbox"
    executable.parent.mkdir(exist_ok=True)
    for name in ("shardbox", "SHA256SUMS"):
        shutil.copy2(one / "dist" / name, executable.parent / f"{name}.new")
        (executable.parent / f"{name}.new").replace(executable.parent / name)
    reproducible = executable.read_bytes() == (two / "dist/shardbox").read_bytes()
    glibc = glibc_needed(one / "build/folder/shardbox")
    (mirror,) = re.findall(r"(?m)^deb (\S+) bullseye main", (RUNTIME / "etc/apt/sources.list").read_text())
    roots = {f"Debian {suite}": root_of(suite, mirror) for suite in ("bullseye", "bookworm")}
    roots["a shell and glibc only"] = bare_root()
    failed = {name: tried(executable, root) for name, root in roots.items()}
    problems = [problem for found in failed.values() for problem in found]
    if not reproducible:
        problems.append("two builds of the same commit differ")
    if tuple(map(int, glibc.split("."))) > GLIBC:
        problems.append(f"it needs glibc {glibc}")
    ratios = start_up(executable)
    report = {
        "size_mb": round(executable.stat().st_size / 1e6, 2),
        "glibc": glibc,
        "version_ratio": round(ratios["version"], 2),
        "status_ratio": round(ratios["status (not running)"], 2),
        "up_ratio": round(ratios["up until it listens"], 2),
        "reproducible": reproducible,
        "roots": [name for name, found in failed.items() if not found],
    }
    (HERE / "build/release.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
