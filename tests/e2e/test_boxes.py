"""The executable on strange boxes: where it unpacks, what it refuses, what it leaves, and what it says. `make e2e`.

Everything here happens in folders and mount namespaces of the test's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

EXECUTABLE = os.environ.get("SHARDBOX_EXE", "")
NOBODY = 65534
pytestmark = pytest.mark.skipif(not EXECUTABLE, reason="SHARDBOX_EXE names no executable: run `make e2e`")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces and other users need root")

Done = subprocess.CompletedProcess[str]


@pytest.fixture
def exe(tmp_path: Path) -> Path:
    """A copy of the executable, as anybody may run it."""
    place = tmp_path / "copied"
    place.mkdir()
    shutil.copy(EXECUTABLE, place / "shardbox")
    for folder in (place, *tmp_path.parents[:3], tmp_path):
        if folder != Path("/") and folder.stat().st_uid == os.geteuid() and folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055) if folder != Path("/tmp") else None
    return place / "shardbox"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty home."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return folder


def run(
    exe: Path | str, *args: str, env: Mapping[str, str] | None = None, user: int | None = None, cwd: str = "/"
) -> Done:
    """The executable with exactly this environment."""
    groups: list[int] | None = None if user is None else []
    return subprocess.run(
        [str(exe), *(args or ("version",))], env=dict(env or {}), cwd=cwd, user=user, group=user, extra_groups=groups,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def boxed(script: str, exe: Path, *, env: Mapping[str, str] | None = None) -> Done:
    """A shell script in a mount namespace of its own; $EXE is the executable. Mounts end with it."""
    command = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-euc", script]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "EXE": str(exe), **(env or {})}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def worked(done: Done) -> None:
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith("shardbox "), done


def unpacked(cache: Path) -> list[str]:
    """What a cache folder holds: one whole version, when all is well."""
    return sorted(os.listdir(cache))


def versions(cache: Path) -> list[Path]:
    found = [cache / name for name in unpacked(cache)]
    assert found and all(len(path.name) == 32 for path in found), found
    return found


# --- where it unpacks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"SHARDBOX_CACHE_DIR": "{}/a/b", "XDG_CACHE_HOME": "{}/x", "HOME": "{}"}, "a/b"),
        ({"XDG_CACHE_HOME": "{}/x", "HOME": "{}"}, "x/shardbox"),
        ({"HOME": "{}"}, ".cache/shardbox"),
    ],
)
def test_first_run_unpacks_once_into_a_private_folder(
    exe: Path, home: Path, variables: dict[str, str], place: str
) -> None:
    env = {name: value.format(home) for name, value in variables.items()}
    worked(run(exe, env=env))
    (version,) = versions(home / place)
    before = version.stat().st_ino
    worked(run(exe, env=env))
    assert version.stat().st_ino == before
    assert stat.S_IMODE((home / place).stat().st_mode) == 0o700


@as_root
def test_home_unset_and_var_read_only_goes_to_tmpdir(exe: Path, home: Path) -> None:
    script = (
        'mount -t tmpfs -o ro tmpfs /var; exec "$EXE" version'  # an empty one: an earlier run may have left a version
    )
    worked(boxed(script, exe, env={"TMPDIR": str(home)}))
    assert versions(home / f"shardbox-{os.geteuid()}")


@as_root
def test_noexec_tmp_is_skipped(exe: Path, home: Path) -> None:
    hide = "mount -t tmpfs -o noexec tmpfs /var/cache; mount -t tmpfs -o noexec tmpfs /var/tmp; "
    place = home / "t"
    place.mkdir()
    script = f'{hide} mount -t tmpfs -o noexec tmpfs "{place}"; exec "$EXE" version'
    done = boxed(script, exe, env={"TMPDIR": str(place)})
    worked(done)  # in /tmp or /dev/shm
    assert list(place.iterdir()) == []


@as_root
def test_full_home_is_skipped_and_left_empty(exe: Path, home: Path, tmp_path: Path) -> None:
    next_one = tmp_path / "next"
    next_one.mkdir()
    script = (
        f'mount -t tmpfs -o size=2m tmpfs "{home}"; mount -t tmpfs -o size=2m tmpfs /var/cache;'
        f'mount --bind "{next_one}" /var/tmp; "$EXE" version; ls -A {home}/.cache/shardbox /var/cache/shardbox'
    )
    done = boxed(script, exe, env={"HOME": str(home)})
    assert done.returncode == 0, done
    assert done.stdout.split("\n", 1)[1].split() == [f"{home}/.cache/shardbox:", "/var/cache/shardbox:"], done
    assert versions(next_one / f"shardbox-{os.geteuid()}")


EVERYWHERE = "for d in /var/cache /var/tmp /tmp /dev/shm; do mount -t tmpfs -o {} tmpfs $d; done; "


@as_root
@pytest.mark.parametrize(
    ("options", "reason"),
    [("ro", "Read-only file system"), ("noexec", "is mounted noexec"), ("size=1m", "No space left")],
)
def test_nowhere_to_unpack_says_why_and_ends_with_125(home: Path, options: str, reason: str) -> None:
    place = Path(f"/opt/shardbox-e2e-{os.getpid()}")  # not below /tmp, which is hidden here
    place.mkdir()
    try:
        shutil.copy(EXECUTABLE, place / "shardbox")
        done = boxed(EVERYWHERE.format(options) + 'exec "$EXE" version', place / "shardbox")
    finally:
        shutil.rmtree(place)
    assert (done.returncode, done.stdout) == (125, ""), done
    first, *folders, hint = done.stderr.splitlines()
    assert first == "shardbox: nowhere to unpack to:"
    assert [line.split(": ", 1)[1].startswith(reason) for line in folders] == [True] * 4, done.stderr
    assert hint.startswith("hint: set SHARDBOX_CACHE_DIR to a folder of yours")


@as_root
def test_read_only_root_with_a_writable_run_works(exe: Path) -> None:
    script = (
        "mount -t tmpfs tmpfs /run; mount --rbind / /mnt; mount -o remount,bind,ro /mnt;"
        'mount -t tmpfs tmpfs /mnt/run; exec chroot /mnt "$EXE" version'
    )
    done = boxed(script, exe, env={"SHARDBOX_CACHE_DIR": "/run/shardbox"})
    worked(done)


@as_root
def test_without_proc_it_says_so(exe: Path) -> None:
    done = boxed('umount -l /proc; exec "$EXE" version', exe)
    assert (done.returncode, done.stderr.count("\n")) == (125, 1), done
    assert "/proc must be mounted" in done.stderr


@as_root
def test_root_without_glibc_is_told_apart(exe: Path, home: Path) -> None:
    """As on a system that has only musl."""
    for folder in ("proc", "tmp"):
        (home / folder).mkdir()
    shutil.copy(exe, home / "shardbox")
    script = f'mount -t proc proc "{home}/proc"; exec chroot "{home}" /shardbox version'
    done = boxed(script, exe)
    assert (done.returncode, done.stdout) == (125, ""), done
    assert "there is no loader of glibc (a musl-only system?)" in done.stderr


@as_root
def test_without_dev_shm_the_demo_works(exe: Path, home: Path) -> None:
    done = boxed('mount -t tmpfs -o ro,size=0 tmpfs /dev/shm; exec "$EXE" demo --once', exe, env={"HOME": str(home)})
    assert "SHARDBOX OK - demo-32b 3/3 ranks" in done.stdout, done


LANDLOCK = """
import ctypes, os, sys
def call(*args):
    if (got := libc.syscall(*args)) < 0:
        sys.exit(f"landlock: {os.strerror(ctypes.get_errno())}")
    return got
libc, execute = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint64 * 1)(1)
rules = call(444, ctypes.byref(execute), 8, 0)
for path in ("/usr", "/lib", sys.argv[1]):
    rule = (1).to_bytes(8, "little") + os.open(path, os.O_PATH).to_bytes(4, "little")
    call(445, rules, 1, rule, 0)
libc.prctl(38, 1, 0, 0, 0)
call(446, rules, 0)
os.execv(sys.argv[2], [sys.argv[2], "version"])
"""


def test_system_that_forbids_to_run_what_was_unpacked_is_named(exe: Path, home: Path) -> None:
    """As SELinux or AppArmor do: the mount says nothing of it, only exec fails. Here by Landlock."""
    command = [sys.executable, "-c", LANDLOCK, str(exe.parent), str(exe)]
    done = subprocess.run(command, env={"HOME": str(home)}, capture_output=True, text=True, timeout=100, check=False)
    if done.stderr.startswith("landlock: "):
        pytest.skip(f"this kernel cannot do it: {done.stderr}")
    assert (done.returncode, done.stdout) == (125, ""), done
    assert f"{home}/.cache/shardbox: programs may not run from there" in done.stderr
    assert os.listdir(home / ".cache/shardbox") == []


# --- what it refuses ------------------------------------------------------------------------------------------


def test_ordered_folder_that_others_may_write_is_refused(exe: Path, home: Path) -> None:
    home.chmod(0o777)
    done = run(exe, env={"SHARDBOX_CACHE_DIR": str(home)})
    assert (done.returncode, done.stdout) == (125, "")
    assert f"{home}: others may write to it" in done.stderr


def test_folder_below_one_that_others_may_replace_is_refused(exe: Path, home: Path) -> None:
    (home / "c").mkdir(mode=0o700)
    home.chmod(0o777)
    done = run(exe, env={"SHARDBOX_CACHE_DIR": str(home / "c")})
    assert (done.returncode, done.stdout) == (125, "")
    assert "another user may replace it" in done.stderr


@as_root
def test_folder_of_another_user_is_refused(exe: Path, home: Path) -> None:
    os.chown(home, NOBODY, NOBODY)
    done = run(exe, env={"SHARDBOX_CACHE_DIR": str(home)})
    assert (done.returncode, "belongs to another user" in done.stderr) == (125, True), done


def test_link_to_an_unsafe_folder_is_refused(exe: Path, home: Path, tmp_path: Path) -> None:
    home.chmod(0o777)
    (tmp_path / "link").symlink_to(home)
    done = run(exe, env={"SHARDBOX_CACHE_DIR": str(tmp_path / "link")})
    assert (done.returncode, "others may write to it" in done.stderr) == (125, True), done


def test_relative_or_overlong_folder_is_refused(exe: Path) -> None:
    assert "must be an absolute path" in run(exe, env={"SHARDBOX_CACHE_DIR": "here"}).stderr
    done = run(exe, env={"SHARDBOX_CACHE_DIR": "/tmp" + "/x" * 2400})
    assert (done.returncode, "its name is too long" in done.stderr) == (125, True), done


@pytest.mark.parametrize("cut", [1, 200, 1 << 20])
def test_file_cut_short_is_named_as_such(exe: Path, home: Path, cut: int) -> None:
    os.truncate(exe, exe.stat().st_size - cut)
    done = run(exe, env={"HOME": str(home)})
    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr == f"shardbox: {exe} is damaged or cut short: copy it again\n"


def test_damaged_payload_is_never_run(exe: Path, home: Path) -> None:
    with exe.open("r+b") as file:
        file.seek(5_000_000)
        byte = file.read(1)
        file.seek(5_000_000)
        file.write(bytes([byte[0] ^ 1]))
    done = run(exe, env={"HOME": str(home)})
    assert (done.returncode, "is damaged" in done.stderr) == (125, True), done
    assert os.listdir(home / ".cache/shardbox") == []


# --- what it finds there --------------------------------------------------------------------------------------


@pytest.fixture
def cache(exe: Path, home: Path) -> Path:
    """The folder that a first run unpacked into."""
    worked(run(exe, env={"HOME": str(home)}))
    (version,) = versions(home / ".cache/shardbox")
    return version


def change_same_size(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"\0" * 64)
    os.utime(path, (1e9, 1e9))  # a time that looks innocent


@pytest.mark.parametrize(
    "harm", [os.unlink, change_same_size, lambda path: os.truncate(path, 100), lambda p: p.chmod(0o4755)]
)
@pytest.mark.parametrize("file", ["shardbox", "_internal/base_library.zip"])
def test_harmed_file_is_noticed_and_unpacked_again(exe: Path, home: Path, cache: Path, file: str, harm: object) -> None:
    harm(cache / file)  # type: ignore[operator]
    worked(run(exe, "version", "--verify", env={"HOME": str(home)}))
    assert unpacked(home / ".cache/shardbox") == [cache.name]


def test_content_is_compared_after_a_boot(exe: Path, home: Path, cache: Path) -> None:
    """What a power cut leaves: right sizes and times, zeros inside. The mark then names another boot."""
    change_same_size(cache / "_internal/base_library.zip")
    (cache / ".whole").write_text("another boot")  # its change time is the newest again
    worked(run(exe, "version", "--verify", env={"HOME": str(home)}))


def test_after_a_boot_good_files_stay(exe: Path, home: Path, cache: Path) -> None:
    (cache / ".whole").write_text("another boot")
    before = cache.stat().st_ino
    worked(run(exe, env={"HOME": str(home)}))
    assert cache.stat().st_ino == before
    assert (cache / ".whole").read_text() == Path("/proc/sys/kernel/random/boot_id").read_text()


def test_verify_finds_what_a_start_cannot(exe: Path, home: Path, cache: Path) -> None:
    (cache / "_internal/extra.py").write_text("")
    done = run(exe, "version", "--verify", env={"HOME": str(home)})
    assert done.returncode == 1
    assert f"{cache}/_internal/extra.py: does not belong there" in done.stdout


def test_leftovers_and_old_versions_are_swept_but_not_those_in_use(exe: Path, home: Path, cache: Path) -> None:
    top = cache.parent
    used, old = top / ("a" * 32), top / ("b" * 32)
    for folder in (used, old, top / ".new-1-killed", top / ".old-1-x", top / "mine"):
        folder.mkdir()
        (folder / "file").write_text("")
    holder = os.open(used, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_SH)
    shutil.rmtree(cache)
    worked(run(exe, env={"HOME": str(home)}))
    os.close(holder)
    assert unpacked(top) == sorted([used.name, cache.name, "mine"])


def test_first_runs_at_once_end_in_one_folder(exe: Path, home: Path) -> None:
    env = {"HOME": str(home)}
    crowd = [
        subprocess.Popen([exe, "version"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(6)
    ]
    assert {(process.communicate(timeout=60)[0], process.returncode) for process in crowd} == {(b"shardbox 0.1.0\n", 0)}
    assert len(versions(home / ".cache/shardbox")) == 1


def test_killed_while_unpacking_the_next_run_is_clean(exe: Path, home: Path) -> None:
    top, env = home / ".cache/shardbox", {"HOME": str(home)}
    for pause_s in (0.02, 0.05, 0.08, 0.12, 0.2):
        with subprocess.Popen([exe, "version"], env=env, stdout=subprocess.DEVNULL) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(pause_s)
            process.kill()
        worked(run(exe, "version", "--verify", env=env))
        assert len(versions(top)) == 1
        shutil.rmtree(top)


# --- as whom, from where, with what ---------------------------------------------------------------------------


@as_root
def test_unprivileged_user_without_a_home(exe: Path) -> None:
    done = run(exe, env={"HOME": "/nonexistent"}, user=NOBODY)
    worked(done)
    assert not Path("/nonexistent").exists()


def test_through_a_symbolic_link_the_configuration_beside_the_file_is_found(exe: Path, home: Path) -> None:
    (home / "sb").symlink_to(exe)
    done = run(home / "sb", "status", env={"HOME": str(home)})
    assert done.returncode == 3
    assert f"{exe.parent}/shardbox.toml" in done.stdout


def test_deleted_folder_as_working_directory(exe: Path, home: Path) -> None:
    gone = home / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["/bin/sh", "-c", 'cd "$1" && rmdir "$1" && exec "$2" version', "sh", gone, exe],
        env={"HOME": str(home)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    worked(done)


@as_root
def test_unreadable_folder_as_working_directory(exe: Path, home: Path) -> None:
    closed = home / "closed"
    closed.mkdir(mode=0)
    worked(run(exe, user=NOBODY, cwd=str(closed)))


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1", "nonsense"])
def test_any_locale_and_a_dumb_terminal(exe: Path, home: Path, locale: str) -> None:
    env = {"HOME": str(home), "LC_ALL": locale, "TERM": "dumb"}
    for args in (["version", "--full"], ["--help"], ["plan", "--help"]):
        done = run(exe, *args, env=env)
        assert (done.returncode, done.stderr) == (0, ""), done


def test_no_standard_streams(exe: Path, home: Path) -> None:
    script = 'exec 0<&- 1>&- 2>&-; exec "$1" version'
    done = subprocess.run(["/bin/sh", "-c", script, "sh", exe], env={"HOME": str(home)}, timeout=60, check=False)
    assert done.returncode == 0


def test_python_variables_have_no_say(exe: Path, home: Path) -> None:
    env = {
        "HOME": str(home),
        "PYTHONHOME": "/nowhere",
        "PYTHONPATH": "/nowhere",
        "PYTHONVERBOSE": "1",
        "PYTHONINSPECT": "1",
    }
    worked(run(exe, env=env))


# --- one process ----------------------------------------------------------------------------------------------


def configured(folder: Path, engine: str = 'kind = "rehearsal"') -> Path:
    """A cluster of this box alone, on free ports."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        mesh, api = one.getsockname()[1], two.getsockname()[1]
    path = folder / "shardbox.toml"
    path.write_text(
        f'[cluster]\nname = "e2e-{os.getpid()}"\nsecret = "a secret of the tests, long enough"\ndiscovery = "static"\n'
        f'[engine]\n{engine}\n[[nodes]]\nname = "alpha"\naddress = "127.0.0.1"\n'
        f"[nodes.ports]\nmesh = {mesh}\napi = {api}\n"
        '[[models]]\nname = "m"\npath = "m.gguf"\ncontext = 512\n'
        'rehearse = {layers = 4, width = 64, bytes = "1MiB"}\n'
    )
    path.chmod(0o600)
    return path


class Up:
    """A node that runs: its process, and how to ask it."""

    def __init__(self, exe: Path, home: Path, more: Mapping[str, str], *, through: Sequence[str] = ()) -> None:
        self.exe, self.env = exe, {"HOME": str(home), "SHARDBOX_STATE": str(home / "state"), **more}
        self.config = configured(home)
        self.log = (home / "log").open("wb+")
        command = [*through, str(exe), "up", "--config", str(self.config), "--node", "alpha"]
        self.process = subprocess.Popen(command, env=self.env, stdout=self.log, stderr=self.log, cwd="/")

    def ask(self, *args: str) -> Done:
        return run(self.exe, *args, "--config", str(self.config), "--node", "alpha", env=self.env)

    def until(self, code: int, words: str = "") -> str:
        """The status when it has this exit code and these words."""
        deadline = time.monotonic() + 40
        while (done := self.ask("status")).returncode != code or words not in done.stdout:
            assert self.process.poll() is None and time.monotonic() < deadline, done.stdout + self.said()
            time.sleep(0.1)  # nothing announces a status
        return done.stdout

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode()


@pytest.fixture
def up(exe: Path, home: Path) -> Iterator[Up]:
    node = Up(exe, home, {"LD_LIBRARY_PATH": "/mine", "LD_LIBRARY_PATH_ORIG": "/not/mine"})
    yield node
    node.process.kill()
    node.process.wait()
    node.log.close()


@pytest.fixture
def hardened(exe: Path, home: Path) -> Iterator[Up]:
    """A node as systemd's ProtectSystem=strict leaves it: everything read-only but its cache and state."""
    (home / "state").mkdir()
    (home / "cache").mkdir()
    keep = f'for d in "{home}/state" "{home}/cache"; do mount --bind "$d" "$d"; done'
    script = f"{keep}; mount -o remount,bind,ro /"
    through = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-euc", f'{script}; exec "$@"', "sh"]
    more = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SHARDBOX_CACHE_DIR": f"{home}/cache"}
    node = Up(exe, home, more, through=through)
    yield node
    node.process.kill()
    node.process.wait()
    node.log.close()


def below(pid: int) -> list[int]:
    """Every process below this one."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in map(int, children) for found in (child, *below(child))]


def environment(pid: int) -> set[str]:
    return {line.split("=")[0] for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if line}


def rehearsing(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if b"\0rehearse\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_up_is_one_process_whose_engines_inherit_nothing_of_the_bundle(up: Up) -> None:
    up.until(1, "1/1 ranks")
    assert Path(f"/proc/{up.process.pid}/comm").read_text() == "shardbox\n"
    (engine,) = rehearsing(below(up.process.pid))
    assert not [name for name in environment(engine) if name.startswith(("_SHARDBOX", "PYTHON"))]
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(20) == 0
    assert "second signal:" not in up.said()  # which ends at once; the first one drains


@as_root
def test_up_with_everything_read_only_but_cache_and_state(hardened: Up, home: Path) -> None:
    hardened.until(1, "1/1 ranks")
    written = Path(f"/proc/{hardened.process.pid}/root{home}/new")
    with pytest.raises(OSError, match="Read-only"):
        written.touch()
    assert hardened.ask("down").returncode == 0
    assert hardened.process.wait(20) == 0
    assert "Traceback" not in hardened.said()


@as_root
def test_status_by_cron_as_another_user(up: Up) -> None:
    up.until(1, "1/1 ranks")
    config = up.exe.parent / "shardbox.toml"
    shutil.copy(up.config, config)
    config.chmod(0o644)
    env = {"SHELL": "/bin/sh", "PATH": "/usr/bin:/bin", "LOGNAME": "nobody", "HOME": "/nonexistent"}
    done = run(up.exe, "status", "--brief", "--node", "alpha", env=env, user=NOBODY)
    assert (done.returncode, done.stderr) == (1, ""), done
    assert re.match("SHARDBOX WARNING - .*m 1/1 ranks, leader alpha", done.stdout), done
    assert done.stdout.count("\n") == 1


STUB = """#!/bin/sh
{ env; ls -l /proc/self/fd | grep -v 'null\\|pipe\\|/proc/'; } >> "$(dirname "$0")/seen"
echo 'version: 1 (bdf9d8e7)'
"""


def test_engine_programs_see_no_library_path_and_no_descriptor(exe: Path, home: Path) -> None:
    for name in ("llama-server", "llama-cli"):
        (home / name).write_text(STUB)
        (home / name).chmod(0o755)
    config = configured(home, f'path = "{home}"')
    env = {"HOME": str(home), "LD_LIBRARY_PATH": "/mine", "SHARDBOX_STATE": str(home / "state")}
    run(exe, "check", "--config", str(config), "--node", "alpha", env=env)
    seen = (home / "seen").read_text()
    assert not re.findall(r"(?m)^(?:_PYI|PYTHON|LD_LIBRARY|_SHARDBOX).*", seen)
    assert ".cache/shardbox/" not in seen, seen


def test_sigkill_leaves_no_process(up: Up) -> None:
    up.until(1, "1/1 ranks")
    family = below(up.process.pid)
    assert rehearsing(family)
    up.process.kill()
    up.process.wait()
    deadline = time.monotonic() + 10
    while left := [pid for pid in family if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_up_outlives_the_loss_of_its_unpacked_files(up: Up, home: Path) -> None:
    up.until(1, "1/1 ranks")
    shutil.rmtree(home / ".cache/shardbox")
    assert up.ask("stop", "m").returncode == 0
    up.until(1, "stopped by the operator")
    shutil.rmtree(home / ".cache/shardbox")  # which `stop` unpacked again
    assert up.ask("start", "m").returncode == 0
    up.until(1, "1/1 ranks")
    shutil.rmtree(home / ".cache/shardbox")
    assert up.ask("check").returncode in (0, 1)
    assert up.ask("down").returncode == 0
    assert up.process.wait(20) == 0
    assert "Traceback" not in up.said() and "ImportError" not in up.said()


def test_version_in_use_is_locked_also_in_a_process_that_it_started_itself(up: Up, home: Path) -> None:
    up.until(1, "1/1 ranks")
    (version,) = versions(home / ".cache/shardbox")
    fd = os.open(version, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


@pytest.mark.skipif(not shutil.which("systemd-tmpfiles"), reason="there is no systemd-tmpfiles here")
def test_systemds_cleaner_spares_a_version_in_use(up: Up, home: Path) -> None:
    up.until(1, "1/1 ranks")
    top = home / ".cache/shardbox"
    files = [path for path in top.rglob("*") if path.is_file()]
    for path in [*top.rglob("*"), top]:
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    (home / "cleaner.conf").write_text(f"e {top} - - - am:1d\n")
    clean = ["systemd-tmpfiles", "--clean", str(home / "cleaner.conf")]
    subprocess.run(clean, check=True, timeout=60)
    assert [path for path in files if not path.exists()] == []
    up.process.kill()
    up.process.wait()
    deadline = time.monotonic() + 10
    while files[0].exists():  # the engine, which dies with the node, holds the lock too
        assert time.monotonic() < deadline
        subprocess.run(clean, check=True, timeout=60)


def test_exit_codes_and_signals_are_its_own(exe: Path, home: Path) -> None:
    env = {"HOME": str(home)}
    assert [run(exe, *args, env=env).returncode for args in (["version"], ["nonsense"], ["status"])] == [0, 2, 3]
    env["LD_LIBRARY_PATH"] = "/mine"
    with subprocess.Popen([exe, "demo"], env=env, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.stdout.readline()
        nodes = [pid for pid in below(process.pid) if b"\0up\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert nodes
        for pid in nodes:  # what the demo passed on, which the node's own start-up then keeps under this name
            assert "\0LD_LIBRARY_PATH_ORIG=/mine\0" in Path(f"/proc/{pid}/environ").read_text()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 0


# --- the rest of the box --------------------------------------------------------------------------------------


@as_root
@pytest.mark.skipif(not shutil.which("ip"), reason="needs iproute2")
def test_no_packet_leaves_the_box_but_for_the_cluster(exe: Path, home: Path) -> None:
    """The demo lives on loopback: a network with a default route and a name server must count no packet at all."""
    script = """
        for on in all default; do echo 1 > /proc/sys/net/ipv6/conf/$on/disable_ipv6; done
        ip link set lo up; ip link add out type veth peer name far; ip link set far up
        ip address add 192.0.2.1/24 dev out; ip link set out up
        ip route add default via 192.0.2.2; ip neighbour add 192.0.2.2 lladdr 02:00:00:00:00:02 dev out
        "$EXE" demo --once; "$EXE" version --full --verify; cat /sys/class/net/out/statistics/tx_packets
        "$PYTHON" -c '
import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"seen?", ("198.51.100.1", 53))'
        cat /sys/class/net/out/statistics/tx_packets"""
    command = ["unshare", "--net", "--mount", "/bin/sh", "-euc", f"mount -t sysfs sysfs /sys;{script}"]
    env = {"PATH": os.environ["PATH"], "EXE": str(exe), "HOME": str(home), "PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[-2:] == ["0", "1"], done.stdout[-500:]  # and the counter does count


NVML = """
#include <fcntl.h>
#include <stdlib.h>
int nvmlInit_v2(void) { return open(getenv("NVML_SEEN"), O_CREAT | O_WRONLY, 0600) < 0; }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 0; return 0; }
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="the stand-in for NVIDIA's library is compiled here")
def test_the_boxs_own_nvml_is_loaded(exe: Path, home: Path) -> None:
    (home / "nvml.c").write_text(NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", home / "libnvidia-ml.so.1", home / "nvml.c"], check=True)
    env = {"HOME": str(home), "LD_LIBRARY_PATH": str(home), "NVML_SEEN": str(home / "seen")}
    env["SHARDBOX_STATE"] = str(home / "state")
    run(exe, "check", "--config", str(configured(home)), "--node", "alpha", env=env)
    assert (home / "seen").exists()
