"""The planner measured: how long plans take, and what they predict against what Prima really takes.

`make bench-plan` prints tables and writes build/plan.json. Where SHARDBOX_PRIMA (folder of the binaries) and
SHARDBOX_MODEL (a GGUF) are set, that model and four made here (tiny_models.py) run, one engine at a time; as root on
Linux also as rings of two and three through shardbox, between network namespaces.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import tracemalloc
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hosts import Lan, a_lan, why_no_hosts
from tiny_models import write_all

import shardbox
from shardbox import GIB, MIB, ModelPlan, NodeFacts

SIZES, MODELS = (4, 32, 256, 2000), (1, 50)
CONTEXT, PORT, TOKENS, TRIES = 1024, 7999, 48, int(os.environ.get("BENCH_TRIES", "4"))

# --- how long a plan takes ------------------------------------------------------------------------------------------


def crowd(nodes: int, models: int) -> tuple[shardbox.Config, list[NodeFacts]]:
    """A 70B-like model so many times, on boxes of 4 to 32 GiB: some lead alone, most need others."""
    head = '[cluster]\nsecret = "a bench needs no better secret than this"\n[engine]\nisolate = "always"\n'
    entries = [f'[[models]]\nname = "m{n}"\npath = "m{n}.gguf"\n' for n in range(models)]
    entries += [f'[[nodes]]\nname = "n{n:04}"\n' for n in range(nodes)]
    config = shardbox.parse_config((head + "".join(entries)).encode(), file="bench.toml", folder="/")
    layer = 480 * MIB
    shape = shardbox.ModelShape(
        architecture="llama", layers=80, width=8192, vocab=128256, heads=64, kv_heads=8, key_width=128,
        value_width=128, ff_width=28672, context_train=131072, layer_bytes=(layer,) * 80, embedding_bytes=GIB // 2,
        output_bytes=GIB // 2, tied_output=False, quantisation="Q4_K",
    )  # fmt: skip
    copies = tuple(shardbox.ModelFacts(name=f"m{n}", path=f"/m{n}.gguf", parts=1, shape=shape) for n in range(models))
    binaries = tuple(shardbox.BinaryFacts(role=role, path="/bin/true") for role in shardbox.ENGINE_ROLES)
    facts = [
        NodeFacts(
            name=f"n{n:04}", machine=f"machine {n}", start=1, protocol=shardbox.PROTOCOL, version=shardbox.VERSION,
            config_hash="", platform="linux-x86_64", cores=8, binaries=binaries, models=copies,
            memory=shardbox.MemoryFacts(total_bytes=64 * GIB, available_bytes=(4 + n % 29) * GIB),
            speed=shardbox.SpeedFacts(memory_bytes_per_s=40e9, core_bytes_per_s=90e9),
        )
        for n in range(nodes)
    ]  # fmt: skip
    return config, facts


def plan_cost(nodes: int, models: int) -> dict[str, float]:
    """Seconds of one core, and the most memory that was held for it."""
    config, facts = crowd(nodes, models)
    started = time.process_time()
    plans = shardbox.plan_all(config, facts)
    seconds = time.process_time() - started
    tracemalloc.start()
    shardbox.plan_all(config, facts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    planned = sum(isinstance(plan, ModelPlan) for plan in plans.values())
    return {"seconds": seconds, "peak_bytes": peak, "planned": planned}


# --- what an engine really takes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One model, on one engine or a ring. Bytes: of the leader."""

    model: str
    world: int
    predicted_bytes: int
    real_bytes: int  # with all that was allocated for the model, also pages that a full context did not touch
    resident_bytes: int  # the most that was in memory
    predicted_buffers: int  # compute and output buffers
    real_buffers: int  # as the engine's log says
    predicted_kv: int
    real_kv: int
    predicted_token_s: float
    real_token_s: float  # the best of some answers
    busy_token_s: float  # what of a processor all ranks together used for one: without what others take of this box


def ask(path: str, body: object = None) -> Any:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)


@contextlib.contextmanager
def engine(path: str, log: Path) -> Iterator[int]:
    """Prima's server alone, ready; its pid."""
    argv = [os.path.join(os.environ["SHARDBOX_PRIMA"], "llama-server"), "-m", path, "-c", str(CONTEXT)]
    with log.open("wb") as out:
        process = subprocess.Popen([*argv, "-t", "1", "--port", str(PORT)], stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text(errors="replace")[-2000:]
            with contextlib.suppress(OSError):
                ask("/health")
                break
            time.sleep(0.1)
        yield process.pid
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def logged(text: str) -> tuple[int, int]:
    """(KV cache, compute and output buffers) in bytes, as the engine's log has them in MiB."""
    kv = re.findall(r"KV self size +=\s*([\d.]+) MiB", text)
    buffers = re.findall(r"(?:compute|output) buffer size =\s*([\d.]+) MiB", text)
    return int(float(kv[-1]) * MIB), int(sum(map(float, buffers)) * MIB)


def memory_of(pid: int, path: str) -> tuple[int, int]:
    """(resident, pages of the model's file that are mapped but not in memory) in bytes."""
    resident = missing = 0
    text = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace")
    for head, body in re.findall(r"(?m)^([0-9a-f]+-[0-9a-f]+ .*)\n((?:\w+:.*\n)+)", text):
        sizes = {key: int(number) << 10 for key, number in re.findall(r"(?m)^(\w+):\s+(\d+) kB", body)}
        size, pss, rss = sizes["Size"], sizes["Pss"], sizes["Rss"]
        if head.endswith(os.path.realpath(path)):
            resident, missing = resident + rss, missing + size - rss  # others may map the file too
        else:
            resident += pss
    return resident, missing


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time of these processes so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def shape_of(path: str) -> shardbox.ModelShape:
    found = shardbox.probe_model("m", path, folder="/", dirs=())
    assert found.shape, found.problem
    return found.shape


def own_facts() -> NodeFacts:
    """This box with its measured speed."""
    cores, free = shardbox.probe_cores(), shardbox.probe_memory()
    (facts,) = crowd(1, 1)[1]
    return replace(facts, speed=shardbox.measure_speed(cores, free.available_bytes), memory=free, cores=cores)


def alone(name: str, path: str, facts: NodeFacts, folder: Path) -> Outcome:
    """One engine with everything: memory after a prompt that fills the context, time of a token early in it."""
    shape = shape_of(path)
    costs = shardbox.model_costs(shape, CONTEXT)
    with engine(path, folder / "log") as pid:
        body = {"prompt": [300], "n_predict": TOKENS, "ignore_eos": True, "temperature": 1, "cache_prompt": False}
        ask("/completion", body)
        before = cpu_s([pid])
        times = [ask("/completion", body)["timings"]["predicted_per_token_ms"] / 1000 for _ in range(TRIES)]
        busy_s = (cpu_s([pid]) - before) / (TRIES * TOKENS)
        prompt = [300 + n % 200 for n in range(CONTEXT - 4)]
        ask("/completion", {"prompt": prompt, "n_predict": 1, "cache_prompt": False})
        resident, missing = memory_of(pid, path)
    kv, buffers = logged((folder / "log").read_text(errors="replace"))
    logits = 4 * (min(CONTEXT, shardbox.PREFILL_BATCH) - 1) * shape.vocab  # reserved for a batch, used for one token
    return Outcome(
        model=name, world=1, predicted_bytes=costs.total_bytes, real_bytes=resident + missing + logits,
        resident_bytes=resident, predicted_buffers=costs.graph_bytes + costs.leader_buffer_bytes, real_buffers=buffers,
        predicted_kv=sum(costs.kv_bytes), real_kv=kv, real_token_s=min(times), busy_token_s=busy_s,
        predicted_token_s=shardbox.compute_s(shape, facts, 1, range(shape.layers), 0, leads=True),
    )  # fmt: skip


# --- rings, through shardbox ----------------------------------------------------------------------------------------


def ring(path: str, names: tuple[str, ...]) -> Outcome:
    """A ring over network namespaces, as the planner orders it; equal windows by hand, since all share one memory."""
    layers = shape_of(path).layers
    windows = shardbox.largest_remainder(layers, [1] * len(names))
    text = '[cluster]\nname = "bench"\nsecret_file = "cluster.secret"\n'
    text += f'[engine]\nthreads = 1\npath = "{os.environ["SHARDBOX_PRIMA"]}"\n'
    text += "".join(f'[[nodes]]\nname = "{name}"\n' for name in names)
    pairs = ", ".join(f"{name} = {window}" for name, window in zip(names, windows, strict=True))
    text += f'[[models]]\nname = "m"\npath = "{path}"\ncontext = {CONTEXT}\nlayers = {{{pairs}}}\n'
    with a_lan(text, names) as lan:
        return measured_ring(lan, path, names)


def measured_ring(lan: Lan, path: str, names: tuple[str, ...]) -> Outcome:
    lan.up(*names)
    first = lan.hosts[names[0]]
    status = first.wait_status(lambda found: found.models[0].phase == "serving", "a ring", 180)
    plan = status.models[0].plan
    assert plan
    body = {"model": "m", "prompt": "One, two,", "max_tokens": TOKENS, "temperature": 1, "ignore_eos": True}
    speeds = []
    leader = lan.hosts[plan.leader]
    pids, before = [rank.pid for rank in status.models[0].ranks], 0.0
    for n in range(2 * TRIES + 1):
        before = cpu_s(pids) if n == 1 else before
        answer = leader.http("POST", "/v1/completions", body)
        assert answer.status == 200, answer.data
        found = leader.snapshot()
        assert found
        speeds.append(found.models[0].tokens_per_s)
    busy_s = (cpu_s(pids) - before) / (2 * TRIES * TOKENS)
    answer = leader.http("POST", "/v1/completions", body | {"prompt": " one" * (CONTEXT - 40), "max_tokens": 1})
    assert answer.status == 200, answer.data
    rank = next(rank for rank in status.models[0].ranks if rank.rank == 0)
    resident, missing = memory_of(rank.pid, path)
    kv, buffers = logged(next(leader.folder.rglob("logs/m.log")).read_text(errors="replace"))
    mine = plan.ranks[0]
    costs = shardbox.model_costs(plan.shape, plan.context)
    logits = 4 * (min(CONTEXT, shardbox.PREFILL_BATCH) - 1) * plan.shape.vocab
    return Outcome(
        model=Path(path).stem, world=plan.world, real_bytes=resident + missing + logits, resident_bytes=resident,
        predicted_bytes=mine.weights_bytes + mine.kv_bytes + mine.buffer_bytes,
        predicted_buffers=costs.graph_bytes + costs.leader_buffer_bytes, real_buffers=buffers,
        predicted_kv=mine.kv_bytes, real_kv=kv, predicted_token_s=plan.token_s, real_token_s=1 / max(speeds),
        busy_token_s=busy_s,
    )  # fmt: skip


def outcomes() -> list[Outcome]:
    """Everything that the environment allows."""
    path, found = os.environ.get("SHARDBOX_MODEL", ""), []
    if not path or not os.environ.get("SHARDBOX_PRIMA"):
        print("SHARDBOX_PRIMA and SHARDBOX_MODEL are not set: no engine is run")
        return []
    facts = own_facts()
    print("this box:", facts.speed)
    with tempfile.TemporaryDirectory() as scratch:
        paths = {Path(path).stem: path} | {name: str(its) for name, its in write_all(Path(scratch)).items()}
        for name, its in paths.items():
            found.append(alone(name, its, facts, Path(scratch)))
            print(line(found[-1]), flush=True)
        if problem := why_no_hosts():
            print("no rings:", problem)
            return found
        for names in (("alpha", "beta"), ("alpha", "beta", "gamma")):
            found.append(ring(path, names))
            print(line(found[-1]), flush=True)
    return found


def line(one: Outcome) -> str:
    """A row of the table, sizes in MiB and times in ms."""
    sizes = (one.predicted_bytes, one.real_bytes, one.resident_bytes)
    parts = (one.predicted_buffers, one.real_buffers, one.predicted_kv, one.real_kv)
    mib = " | ".join(f"{size / MIB:.1f}" for size in (*sizes, *parts))
    times = " | ".join(f"{t * 1e3:.1f}" for t in (one.predicted_token_s, one.real_token_s, one.busy_token_s))
    ratio = one.real_token_s / max(1e-9, one.predicted_token_s)
    size_ratio = one.predicted_bytes / one.real_bytes
    return f"| {one.model} | {one.world} | {mib} | {times} | {size_ratio:.3f} | {ratio:.2f} |"


HEADER = (
    *("model", "ranks", "predicted MiB", "real", "resident", "buffers", "logged", "KV", "logged"),
    *("ms a token", "real", "busy", "bytes", "time"),
)


def main() -> None:
    """Measure, print, write build/plan.json."""
    result: dict[str, object] = {}
    for nodes in SIZES:
        for models in MODELS:
            cost = plan_cost(nodes, models)
            result[f"seconds_{nodes}_nodes_{models}_models"] = cost["seconds"]
            result[f"peak_bytes_{nodes}_nodes_{models}_models"] = cost["peak_bytes"]
            print(f"{nodes:5} nodes, {models:2} models: {cost['seconds']:7.4f} s, {cost['peak_bytes'] / MIB:6.1f} MiB, "
                  f"{cost['planned']} planned")  # fmt: skip
    print(f"\n| {' | '.join(HEADER)} |\n" + "|---" * len(HEADER) + "|")
    result["models"] = [asdict(one) for one in outcomes()]
    Path("build").mkdir(exist_ok=True)
    Path("build/plan.json").write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
