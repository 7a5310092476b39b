"""A small coverage-guided fuzzer for the GGUF reader, a part of `make fuzz`.

Inputs that reach a step from one line to another that no input has made before are kept, and changed further. Each run
may take RUN_S of a processor; all together the process may not grow by more than GROWTH_BYTES. An input that breaks
something is kept as build/broken.gguf.
"""

import contextlib
import io
import random
import resource
import signal
import struct
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from models import Value, llama_metadata, llama_tensors, write_gguf

import shardbox

RUN_S, GROWTH_BYTES, CORPUS = 3, 256 << 20, 400
SPLIT: dict[str, Value] = {"split.no": 0, "split.count": 2, "split.tensors.count": 4}
KV_HEADS: list[int] = [2, 0]
EXPERTS: dict[str, Value] = {
    "llama.expert_count": 4,
    "llama.expert_used_count": 2,
    "llama.attention.head_count_kv": KV_HEADS,
}
SEEDS = (
    write_gguf(llama_metadata(layers=2), llama_tensors(2)),
    write_gguf(llama_metadata(layers=2) | EXPERTS, [*llama_tensors(2), ("blk.1.ffn_up_exps.weight", (32, 4), "Q8_0")]),
    write_gguf(llama_metadata(layers=2) | SPLIT | {"long": list(range(2000))}, llama_tensors(2)),
    *(data + bytes(64) for data in (b"version https://git-lfs", b"<html>", bytes(8) + b'{"', b"")),
)
NUMBERS = (0, 1, 2, 8, 9, 31, 32, 255, 1 << 15, 1 << 31, (1 << 32) - 1, 1 << 62, 1 << 63, (1 << 64) - 1)

Step = tuple[types.CodeType, int, int]


def reader_code() -> frozenset[types.CodeType]:
    """Everything between the two ends of the module's section about GGUF, also what is nested in it."""
    found: set[types.CodeType] = set()
    names = ["read_gguf_header", "model_shape", "_read_preamble", "_read_key", "_read_tensor", "_key_counts"]
    names += ["_key_count", "_plain_text", "_all_tensors", "_layer_bytes"]
    waiting = [getattr(shardbox, name).__code__ for name in names]
    waiting += [it.__code__ for it in vars(shardbox._GgufReader).values() if isinstance(it, types.FunctionType)]
    while waiting:
        code = waiting.pop()
        found.add(code)
        waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return frozenset(found)


class Coverage:
    """Which steps between lines of the reader a run has made."""

    def __init__(self) -> None:
        self.codes, self.seen = reader_code(), set[Step]()
        self.lines = {(code, line) for code in self.codes for _, _, line in code.co_lines() if line}
        self._new = False

    def _enter(self, frame: types.FrameType, event: str, _: object) -> object:
        return self._follow(frame) if frame.f_code in self.codes else None

    def _follow(self, frame: types.FrameType) -> object:
        before = 0

        def line(frame: types.FrameType, event: str, _: object) -> object:
            nonlocal before
            step = (frame.f_code, before, frame.f_lineno)
            before = frame.f_lineno
            if step not in self.seen:
                self.seen.add(step)
                self._new = True
            return line

        return line

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._new = False
        sys.settrace(self._enter)  # type: ignore[arg-type]
        try:
            yield
        finally:
            sys.settrace(None)

    @property
    def found_more(self) -> bool:
        return self._new

    def share(self) -> float:
        """Of all lines."""
        reached = {(code, line) for code, _, line in self.seen}
        return len(reached & self.lines) / len(self.lines)


def mutated(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """The bytes with one to five changes of the kinds that break readers of formats with lengths in them."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 5)):
        at, length = chance.randrange(len(changed) + 1), chance.choice((1, 2, 4, 8, 8, 8, 32))
        match chance.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                near = struct.pack("<Q", (chance.choice(NUMBERS) + chance.randint(-2, 2)) % (1 << 64))
                changed[at : at + length] = near[:length]
            case 2:
                changed[at : at + length] = b""
            case 3:
                changed[at:at] = chance.randbytes(length)
            case 4:
                source = chance.choice(others)
                start = chance.randrange(len(source) + 1)
                changed[at : at + 8 * length] = source[start : start + 8 * length]
            case _:
                changed[at:at] = changed[at : at + 4 * length]
    return bytes(changed[: 1 << 16])


def out_of_time(*_: object) -> None:
    raise AssertionError(f"one input took more than {RUN_S} s")


def guided_gguf(seconds: float, seed: int) -> int:
    """Inputs tried in about so many seconds. Raises what broke."""
    chance, coverage, corpus = random.Random(seed), Coverage(), [*SEEDS]
    deadline, tried = time.monotonic() + seconds, 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGVTALRM, out_of_time)
    try:
        while tried < len(SEEDS) or time.monotonic() < deadline:
            data = corpus[tried] if tried < len(SEEDS) else mutated(chance.choice(corpus), corpus, chance)
            tried += 1
            signal.setitimer(signal.ITIMER_VIRTUAL, RUN_S)
            try:
                with contextlib.suppress(shardbox.GgufError), coverage.watching():
                    shape = shardbox.model_shape([shardbox.read_gguf_header(io.BytesIO(data), len(data), "m.gguf")])
                    shardbox.model_costs(shape, 4096)
            except BaseException as error:
                Path("build").mkdir(exist_ok=True)
                Path("build/broken.gguf").write_bytes(data)
                error.add_note(f"seed {seed}; the input is build/broken.gguf")
                raise
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if coverage.found_more:
                corpus = [*corpus[-CORPUS:], data]
    finally:
        signal.signal(signal.SIGVTALRM, old)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < GROWTH_BYTES, f"the process grew by {grown >> 20} MiB"
    steps, share = len(coverage.seen), 100 * coverage.share()
    print(
        f"GGUF, guided: {tried} inputs, {len(corpus)} kept, {steps} steps, {share:.0f} % of lines, +{grown >> 20} MiB"
    )
    return tried


if __name__ == "__main__":
    guided_gguf(float(sys.argv[1]), int(sys.argv[2]))
