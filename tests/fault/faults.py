"""Every fault that is tried, in words, with how it comes about and what status has to say of it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from engine import ABORTED, NO_LAYERS
from hosts import Host, eventually, model, serves, tool
from trial import MODEL, PATIENCE_S, Fault, Trial, kill, toml

DAY_S = 86400
CLOCK = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long offset(void) {
    char text[32] = "";
    int fd = open(getenv("FAULT_CLOCK"), O_RDONLY | O_CLOEXEC);
    if (fd >= 0) { if (read(fd, text, 31) < 0) text[0] = 0; close(fd); }
    return atol(text);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *kept) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (kept) *kept = exact.tv_sec;
    return exact.tv_sec;
}
"""


# --- processes ----------------------------------------------------------------------------------------------


def kill_engine(trial: Trial, host: Host) -> None:
    kill(trial.pids[host.name])


def kill_node(trial: Trial, host: Host) -> None:
    """The node alone; its helpers have to end what is below it."""
    assert host.up_process
    trial.dead.add(host.name)
    host.up_process.kill()
    host.up_process.wait(10)
    trial.gone(host)


def kill_box(trial: Trial, host: Host) -> None:
    """Node, helpers and engine at once."""
    trial.dead.add(host.name)
    for pid in host.pids():
        kill(pid)
    assert host.up_process
    host.up_process.wait(10)
    trial.gone(host)


def kill_all_nodes(trial: Trial) -> None:
    """Every node of the cluster; the clients find nobody."""
    for host in trial.cluster.hosts:
        kill_box(trial, host)
    for host in trial.cluster.hosts:  # nobody is left to say anything: status itself has to
        done = host.run("status", "--brief")
        assert (done.returncode, "is not running" in done.stdout) == (2, True), done.stdout
    up_again(trial)


def up_again(trial: Trial) -> None:
    for host in trial.cluster.hosts:
        if host.up_process is None or host.up_process.poll() is not None:
            host.up()


def power_cut(trial: Trial, host: Host) -> None:
    """The others hear no goodbye, not even of the kernel."""
    trial.lan.link(host.name, up=False)
    trial.cause.callback(trial.lan.link, host.name, up=True)
    kill_box(trial, host)


def power_back(trial: Trial) -> None:
    trial.cause.close()
    up_again(trial)


def second_up(trial: Trial) -> None:
    done = trial.worker.run("up")
    assert done.returncode == 1 and "already runs on this box" in done.stderr, done.stderr


def end_by(trial: Trial, host: Host, *signals: int) -> None:
    """Signal a node until it ends, which it has to."""
    process = host.up_process
    assert process
    trial.dead.add(host.name)
    for count, number in enumerate(signals):
        if count:
            eventually(lambda: "INFO stopping" in host.output(process), "it heard the first")
        process.send_signal(number)
    process.wait(PATIENCE_S)
    trial.gone(host)


def stop_and_start(trial: Trial) -> None:
    """The operator stops the model while it answers, and starts it again."""
    done = trial.worker.run("stop", "tiny")
    assert done.returncode == 0, done.stderr
    for host in trial.cluster.hosts:
        host.wait_status(lambda found: model(found).phase == "stopped", "the model is stopped")
    trial.cluster.start()


def hang_up(trial: Trial) -> None:
    """SIGHUP with a TOML that did not change."""
    process = trial.worker.up_process
    assert process
    before = trial.worker.output(process)
    process.send_signal(signal.SIGHUP)
    eventually(lambda: len(trial.worker.output(process)) > len(before), "it says what it did about SIGHUP")


def down_while_it_forms(trial: Trial) -> None:
    """The engine of rank 2 takes its time to load; meanwhile its neighbour's operator says `down`."""
    trial.order(trial.last, "barrier:1", "compute", 8)
    trial.cluster.start()
    host = trial.worker
    host.wait_status(lambda found: model(found).phase in ("preparing", "loading"), "the ring forms")
    trial.dead.add(host.name)
    trial.down(host)
    trial.gone(host, socket_file=True)


def suspend(trial: Trial, host: Host) -> None:
    """Every process of a box stands still, as when its lid is closed."""
    trial.dead.add(host.name)  # connections that came in meanwhile are reset by the others
    pids = [*host.pids()]

    def resume() -> None:
        for pid in pids:
            kill(pid, signal.SIGCONT)

    trial.cause.callback(resume)
    for pid in pids:
        kill(pid, signal.SIGSTOP)


def freeze_engine(trial: Trial, host: Host) -> None:
    pid = trial.pids[host.name]
    kill(pid, signal.SIGSTOP)
    trial.cause.callback(kill, pid, signal.SIGCONT)


def take_away(trial: Trial) -> None:
    """What `trial.cause` holds."""
    trial.cause.close()


def twin(trial: Trial) -> None:
    """Another box with a worker's name comes up; it has to end by itself."""
    box = trial.lan.hosts["delta"]
    process = box.popen("up", SHARDBOX_NODE=trial.worker.name)
    assert process.wait(PATIENCE_S) in (1, 2) and "another box" in box.output(process), box.output(process)
    trial.gone(box)


# --- network ------------------------------------------------------------------------------------------------


def bad_cable(trial: Trial, host: Host, **what: float) -> None:
    trial.cause.enter_context(trial.lan.cable(host, **what))  # type: ignore[arg-type]


def new_address(trial: Trial) -> None:
    trial.lan.set_address(trial.worker, trial.lan.free_address())


def lose_mdns(trial: Trial) -> None:
    """No multicast any more, and then a node starts anew: nobody hears of it, and it of nobody."""
    trial.lan.block_multicast()
    trial.cause.callback(trial.lan.block_multicast, False)
    kill_node(trial, trial.worker)
    trial.worker.up()


def mdns_back(trial: Trial) -> None:
    """Give the node time to be found without multicast; only then there is multicast again."""
    trial.worker.wait_status(lambda _: True, "the node is up")
    with contextlib.suppress(AssertionError):
        trial.worker.wait_status(serves(3), "found without multicast", 6)
    trial.cause.close()


# --- clock --------------------------------------------------------------------------------------------------


def own_clock(trial: Trial) -> None:
    """The worker's box gets a clock that can be set."""
    source, library = trial.lan.folder / "clock.c", trial.lan.folder / "clock.so"
    if not library.exists():
        source.write_text(CLOCK)
        tool("gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source))
    host = trial.cluster.host("beta")
    trial.down(host)
    set_clock(trial, 0)
    host.up(LD_PRELOAD=str(library), FAULT_CLOCK=str(host.folder / "clock"))
    trial.undo.callback(trial.down, host)


def set_clock(trial: Trial, offset_s: int) -> None:
    (trial.cluster.host("beta").folder / "clock").write_text(str(offset_s))


def jump(trial: Trial, offset_s: int) -> None:
    """The wall clock of a node jumps while it runs."""
    set_clock(trial, offset_s)
    host = trial.cluster.host("beta")
    eventually(lambda: "clock" in host.run("check").stdout, "the neighbours see that its clock is off", 30)


# --- disk ---------------------------------------------------------------------------------------------------


def small_state(trial: Trial) -> None:
    """The worker's state folder gets a disk of its own, of 1 MiB."""
    host = trial.cluster.host("beta")
    trial.down(host)
    state = host.folder / "attic"
    state.mkdir(exist_ok=True)
    tool("mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(state))

    def unmount() -> None:
        trial.down(host)
        tool("umount", str(state))

    trial.undo.callback(unmount)
    host.up()


def fill(trial: Trial) -> None:
    """Not a byte is left, and the ring has to form again."""
    host = trial.cluster.host("beta")
    with contextlib.suppress(OSError), open(host.folder / "attic" / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    kill_engine(trial, host)


def read_only(trial: Trial) -> None:
    """From now on the node, in whose view of the disks it happens, can open nothing for writing there."""
    host = trial.cluster.host("beta")
    assert host.up_process
    inside, state = ("nsenter", "-t", str(host.up_process.pid), "-m", "mount"), str(host.folder / "attic")
    tool(*inside, "--bind", state, state)
    tool(*inside, "-o", "remount,bind,ro", state)
    kill_engine(trial, host)


def up_on_full_state(trial: Trial) -> None:
    """A start with a full state folder."""
    host = trial.cluster.host("beta")
    fill(trial)
    trial.down(host)
    trial.dead.add("beta")
    host.up()


def doomed_folder(trial: Trial) -> None:
    """The worker runs in a folder that can go."""
    host = trial.cluster.host("beta")
    trial.down(host)
    doomed = host.folder / "doomed"
    doomed.mkdir()
    host.up(cwd=doomed)
    trial.undo.callback(trial.down, host)


def delete_folder(trial: Trial) -> None:
    host = trial.cluster.host("beta")
    shutil.rmtree(host.folder / "doomed")
    shutil.rmtree(host.folder / "attic" / "beta" / "work")
    kill_engine(trial, host)


def delete_state(trial: Trial) -> None:
    """The whole state folder goes while the node runs."""
    host = trial.worker
    shutil.rmtree(host.folder / "attic")
    kill_engine(trial, host)
    trial.undo.callback(host.up)
    trial.undo.callback(lambda: end_by(trial, host, signal.SIGTERM))  # its control socket is gone


# --- what a rank refuses ------------------------------------------------------------------------------------


def other_bytes(trial: Trial) -> None:
    """One box's model has the same name and size, but another byte."""
    path = trial.last.folder / MODEL
    right = path.read_bytes()
    change(path, right[:-1] + bytes([right[-1] ^ 1]))
    trial.cause.callback(change, path, right)


def change(path: Path, data: bytes) -> None:
    """Put other bytes in a file's place, as a copy does."""
    draft = path.with_suffix(".new")
    draft.write_bytes(data)
    draft.replace(path)


def no_model(trial: Trial) -> None:
    """One box has no model, and may not fetch it: no room."""
    path = trial.last.folder / MODEL
    aside = path.with_suffix(".aside")
    path.rename(aside)
    trial.undo.callback(lambda: aside.unlink(missing_ok=True))


def cut_short(trial: Trial) -> None:
    """One box's model was not copied to its end."""
    path = trial.last.folder / MODEL
    right = path.read_bytes()
    change(path, right[: len(right) // 2])
    trial.cause.callback(change, path, right)


def open_engine(trial: Trial) -> None:
    """The worker's engine is not closed in, so that others can hold its ports."""
    host = trial.cluster.host("beta")
    trial.down(host)
    host.config.write_text(toml(isolate="never"))

    def restore() -> None:
        trial.down(host)
        host.config.write_text(toml())

    trial.undo.callback(restore)
    host.up()


def take_port(trial: Trial, host: Host, port: int) -> None:
    """Somebody else listens there."""
    script = f"import socket, sys; s = socket.create_server(('', {port})); print('taken', flush=True); sys.stdin.read()"
    process = host.spawn(sys.executable, "-c", script)
    eventually(lambda: "taken" in host.output(process), "the port is taken")

    def free() -> None:
        process.kill()
        process.wait(10)
        assert process.stdin
        process.stdin.close()

    trial.cause.callback(free)


def mesh_port_taken(trial: Trial) -> None:
    """`up` on a box whose mesh port somebody has."""
    host = trial.worker
    trial.dead.add(host.name)
    trial.down(host)
    trial.gone(host, socket_file=True)
    take_port(trial, host, 7311)
    done = host.run("up")
    assert done.returncode in (1, 2) and "7311" in done.stderr and "Traceback" not in done.stderr, done.stderr


def port_free(trial: Trial) -> None:
    trial.cause.close()
    up_again(trial)


def deaf_worker_is_stopped(trial: Trial) -> None:
    """Its engine ignores SIGTERM, and its neighbour's is killed: the ring has to get rid of it."""
    trial.order(trial.worker, "token", "deaf")
    orders = trial.worker.folder / "bin" / "orders.json"
    eventually(lambda: not orders.exists(), "it is deaf")
    kill_engine(trial, trial.last)


def on(who: str, act: Callable[..., None], *args: object, **options: object) -> Callable[[Trial], None]:
    """An act upon the leader, the worker or the last rank's box."""
    return lambda trial: act(trial, getattr(trial, who), *args, **options)


def told(who: str, *orders: object, **more: object) -> Callable[[Trial], None]:
    """An engine gets its orders: at, do, value."""
    return on(who, Trial.order, *orders, **more)


SEGV, KILL, TERM, INT = signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM, signal.SIGINT
HUNG, LOST_BETA, LOST_ALPHA = "stalled", "beta|stalled", "alpha|stalled"
SILENCE = {"hears": False, "heard": False}
FAULTS = (
    # engines that misbehave while the ring forms
    Fault(name="worker mute at barrier 1", starting=True, says=HUNG, act=told("worker", "barrier:1", "hang")),
    Fault(name="worker mute at barrier 2", starting=True, says=HUNG, act=told("worker", "barrier:2", "hang")),
    Fault(name="leader mute at barrier 1", starting=True, says=HUNG, act=told("leader", "barrier:1", "hang")),
    Fault(name="leader mute when loaded", starting=True, says=HUNG, act=told("leader", "loaded", "hang")),
    Fault(name="exit 0 without layers", starting=True, says="gamma|layers|stalled",
          act=told("last", "barrier:2", "exit", 0, says=NO_LAYERS)),
    Fault(name="exit 1 while it loads", starting=True, says="beta", act=told("worker", "barrier:1", "exit", 1)),
    Fault(name="exit 134 while it loads", starting=True, says="beta.*abort",
          act=told("worker", "barrier:2", "exit", 134, says=ABORTED)),
    Fault(name="exit 139 while it loads", starting=True, says="beta.*segmentation",
          act=told("worker", "loaded", "signal", SEGV)),
    Fault(name="slow start (12 s of work)", starting=True, act=told("worker", "loaded", "compute", 12)),
    # and while tokens flow
    Fault(name="worker dies at a token", says="beta", quick=True, act=told("worker", "token", "signal", KILL)),
    Fault(name="leader dies at a token", says="alpha", act=told("leader", "token", "signal", KILL)),
    Fault(name="worker stalls at a token", says=HUNG, quick=True, act=told("worker", "token", "hang")),
    Fault(name="leader stalls at a token", says=HUNG, act=told("leader", "token", "hang")),
    Fault(name="exit 0 at a token", says="gamma", act=told("last", "token", "exit", 0)),
    Fault(name="exit 1 at a token", says="beta", act=told("worker", "token", "exit", 1)),
    Fault(name="exit 134 at a token", says="alpha.*abort", act=told("leader", "token", "exit", 134, says=ABORTED)),
    Fault(name="exit 139 at a token", says="gamma.*segmentation", act=told("last", "token", "signal", SEGV)),
    Fault(name="deaf to SIGTERM", says="gamma", act=deaf_worker_is_stopped),
    Fault(name="chatter of 100 MB/s", act=told("worker", "token", "chatter", 8)),
    Fault(name="engine stopped (SIGSTOP)", says=HUNG, act=on("worker", freeze_engine)),
    # kill -9
    Fault(name="kill -9: worker's engine", says="beta", act=on("worker", kill_engine)),
    Fault(name="kill -9: leader's engine", says="alpha", act=on("leader", kill_engine)),
    Fault(name="kill -9: node of a worker", says="gamma", quick=True, act=on("last", kill_node), mend=up_again),
    Fault(name="kill -9: node of the leader", says="alpha", act=on("leader", kill_node), mend=up_again),
    Fault(name="kill -9: everything on a box", says="beta", act=on("worker", kill_box), mend=up_again),
    Fault(name="kill -9: everything everywhere", says="beta|gamma|starting|waiting", act=kill_all_nodes),
    # boxes and operators
    Fault(name="power cut of a worker's box", says="gamma", act=on("last", power_cut), mend=power_back),
    Fault(name="power cut of the leader's box", says="alpha", act=on("leader", power_cut), mend=power_back),
    Fault(name="box suspended, resumed", says=LOST_BETA, act=on("worker", suspend), mend=take_away),
    Fault(name="second up", act=second_up),
    Fault(name="another box with its name", act=twin),
    Fault(name="down while it forms", says="beta", starting=True, act=down_while_it_forms, mend=up_again),
    Fault(name="stop and start", says="stopped by the operator", quick=True, act=stop_and_start),
    Fault(name="SIGTERM", says="beta", act=on("worker", end_by, TERM), mend=up_again),
    Fault(name="SIGINT twice", says="beta", act=on("worker", end_by, INT, INT), mend=up_again),
    Fault(name="SIGHUP", act=hang_up),
    # networks
    Fault(name="200 ms more each way", act=on("worker", bad_cable, delay_s=0.2), mend=take_away),
    Fault(name="2 % of frames lost", act=on("worker", bad_cable, loss=0.02), mend=take_away),
    Fault(name="cable pulled (silence)", says=LOST_BETA, quick=True,
          act=on("worker", bad_cable, **SILENCE), mend=take_away),
    Fault(name="leader's cable pulled", says=LOST_ALPHA, act=on("leader", bad_cable, **SILENCE), mend=take_away),
    Fault(name="one way cut: it hears nothing", says=LOST_BETA,
          act=on("worker", bad_cable, hears=False), mend=take_away),
    Fault(name="one way cut: nobody hears it", says=LOST_BETA,
          act=on("worker", bad_cable, heard=False), mend=take_away),
    Fault(name="address change", says=LOST_BETA, act=new_address),
    Fault(name="mDNS lost, a node restarts", says="beta", act=lose_mdns, mend=mdns_back),
    # clocks
    Fault(name="clock a day ahead", before=own_clock, act=lambda trial: jump(trial, DAY_S)),
    Fault(name="clock a day back", before=own_clock, act=lambda trial: jump(trial, -DAY_S)),
    # disks
    Fault(name="state folder full", before=small_state, says="beta", act=fill),
    Fault(name="state folder full at a start", before=small_state, says="beta", act=up_on_full_state),
    Fault(name="state folder read-only", before=small_state, says="beta", act=read_only),
    Fault(name="working directory deleted", before=doomed_folder, says="beta", act=delete_folder),
    Fault(name="state folder deleted", says="beta", act=delete_state),
    # what a rank refuses
    Fault(name="model with other bytes", starting=True, says="gamma.*(has changed|other bytes)",
          act=other_bytes, mend=take_away),
    Fault(name="model cut short", starting=True, says="gamma", act=cut_short, mend=take_away),
    Fault(name="model missing, copied", starting=True, says="gamma.*has changed|cop", act=no_model),
    Fault(name="engine's port taken", starting=True, before=open_engine, says="port 9001 cannot be had",
          act=on("worker", take_port, 9001), mend=take_away),
    Fault(name="mesh port taken at a start", says="beta", act=mesh_port_taken, mend=port_free),
)  # fmt: skip
