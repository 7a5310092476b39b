"""An engine that can be told to misbehave: the built-in rehearsal, under the names of Prima's two binaries.

`install(folder)` makes the binaries. What one has to do stands in `orders.json` beside them (see `Orders`), and is read
at every point that the rehearsal's hook tells of, so that an order reaches an engine that runs already.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import shardbox

LAYERS, WIDTH = 30, 64
PACE_S = 0.02  # a token, so that an answer takes its time and the machine is not busy
NO_LAYERS = "No layer is assigned to me, exit."
ABORTED = 'GGML_ASSERT(!strcmp(key, "n_layer_window")) failed'


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What an engine is to do, once it comes to a point: barrier:1, barrier:2, loaded, token, stop."""

    role: str  # of llama-server and llama-cli, whose name contains it
    at: str
    do: str  # hang | exit | signal | compute | chatter | deaf
    value: float = 0  # exit code, signal, or seconds
    says: str = ""  # its last words
    once: bool = True  # the next engine behaves


def install(folder: Path) -> None:
    """Both binaries."""
    folder.mkdir(exist_ok=True)
    paths = [str(Path(__file__).parent), str(Path(shardbox.__file__).parent)]
    for name in ("llama-server", "llama-cli"):
        script = (
            f"#!{sys.executable}\nimport sys\nsys.path[:0] = {paths}\nimport engine\nsys.exit(engine.main(sys.argv))\n"
        )
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)


def order(folder: Path, orders: Orders | None) -> None:
    """Give the engines of a folder their orders; None: behave."""
    path = folder / "orders.json"
    if orders is None:
        path.unlink(missing_ok=True)
        return
    draft = folder / "orders.new"
    draft.write_text(json.dumps(asdict(orders)))
    draft.replace(path)


def main(argv: Sequence[str]) -> int:
    """Be an engine; its exit code."""
    path = Path(argv[0])
    if "--version" in argv:
        print("version: 4700 (bdf9d8e7)")
        return 0
    sizes = json.dumps({"layers": LAYERS, "width": WIDTH, "name": "tiny"})
    environ = {**os.environ, "SHARDBOX_REHEARSE": sizes}
    return shardbox.rehearse([path.name, *argv[1:]], environ, hook=lambda point, _: obey(path, point))


def obey(path: Path, point: str) -> None:
    """Do what is ordered for this point, if anything is. May not return."""
    if point == "token" and path.name == "llama-server":
        time.sleep(PACE_S)
    source = path.parent / "orders.json"
    try:
        orders = Orders(**json.loads(source.read_text()))
    except FileNotFoundError:
        return
    if orders.at != point or orders.role not in path.name:
        return
    if orders.once:
        source.unlink()
    if orders.says:
        print(orders.says, flush=True)
    act(orders)


def act(orders: Orders) -> None:
    """One misbehaviour."""
    if orders.do == "hang":
        threading.Event().wait()
    elif orders.do == "exit":
        os._exit(int(orders.value))
    elif orders.do == "signal":
        os.kill(os.getpid(), int(orders.value))
    elif orders.do == "compute":
        end = time.monotonic() + orders.value
        while time.monotonic() < end:
            pass
    elif orders.do == "chatter":
        threading.Thread(target=chatter, args=(orders.value,), daemon=True).start()
    else:
        assert orders.do == "deaf", orders
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def chatter(seconds: float) -> None:
    """100 MB/s of output."""
    line, start, end = b"x" * 99 + b"\n", time.monotonic(), time.monotonic() + seconds
    for number in range(int(seconds * 100)):
        data = line * 10_000
        while data:
            data = data[os.write(1, data) :]
        time.sleep(max(0.0, start + number / 100 - time.monotonic()))
        if time.monotonic() > end:
            return
