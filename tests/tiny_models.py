"""Small GGUF models for the real engine, made here: shapes and quantisations that differ, weights that mean nothing.

`PYTHONPATH=. python tests/tiny_models.py FOLDER` writes all of them.
"""

from __future__ import annotations

import random
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from models import Tensor, Value, write_gguf

from shardbox import GGML_TYPES

_BLOCK_HEADS = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}  # f16 numbers before the quants of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """What a model file is to have; everything else follows from it."""

    name: str
    architecture: str
    kind: str  # of the matrices
    layers: int
    width: int
    ff_width: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False
    biases: bool = False
    experts: int = 0


TINY = (
    Tiny(name="llama-f16-tied", architecture="llama", kind="F16", layers=12, width=768, ff_width=2048, heads=12,
         kv_heads=4, vocab=32000, tied=True),
    Tiny(name="llama-q8-untied", architecture="llama", kind="Q8_0", layers=16, width=1024, ff_width=2816, heads=16,
         kv_heads=16, vocab=32000),
    Tiny(name="qwen2-q4-biases", architecture="qwen2", kind="Q4_0", layers=24, width=896, ff_width=4864, heads=14,
         kv_heads=2, vocab=64000, tied=True, biases=True),
    Tiny(name="llama-q4-experts", architecture="llama", kind="Q4_0", layers=8, width=768, ff_width=2048, heads=12,
         kv_heads=4, vocab=32000, experts=4),
)  # fmt: skip


def _fill(kind: str, size: int) -> bytes:
    """Weights around zero; the same ones again and again."""
    chance = random.Random(kind)
    if kind in ("F32", "F16"):
        letter, mean = ("f", 1.0) if kind == "F32" else ("e", 0.0)
        unit = struct.pack(f"<4096{letter}", *(chance.gauss(mean, 0.02) for _ in range(4096)))
    else:
        block = next(block for name, _, block in GGML_TYPES.values() if name == kind)
        heads = _BLOCK_HEADS[kind]
        scales = struct.pack(f"<{heads}e", *(0.003, -0.02)[:heads])
        unit = b"".join(scales + chance.randbytes(block - 2 * heads) for _ in range(512))
    return (unit * (size // len(unit) + 1))[:size]


def _layer(model: Tiny, n: int) -> list[Tensor]:
    kv_width, kind = model.width // model.heads * model.kv_heads, model.kind
    matrices = {"attn_q": model.width, "attn_k": kv_width, "attn_v": kv_width, "attn_output": model.width}
    found: list[Tensor] = [(f"blk.{n}.{name}.weight", (model.width, rows), kind) for name, rows in matrices.items()]
    if model.biases:
        found += [(f"blk.{n}.{name}.bias", (matrices[name],), "F32") for name in ("attn_q", "attn_k", "attn_v")]
    found += [(f"blk.{n}.{name}.weight", (model.width,), "F32") for name in ("attn_norm", "ffn_norm")]
    tail, more = ("_exps", (model.experts,)) if model.experts else ("", ())
    if model.experts:
        found.append((f"blk.{n}.ffn_gate_inp.weight", (model.width, model.experts), "F32"))
    found += [
        (f"blk.{n}.ffn_{name}{tail}.weight", (model.width, model.ff_width, *more), kind) for name in ("gate", "up")
    ]
    return [*found, (f"blk.{n}.ffn_down{tail}.weight", (model.ff_width, model.width, *more), kind)]


def tiny_gguf(model: Tiny) -> bytes:
    """The whole file."""
    arch = model.architecture
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    tokens += [f"word{n}" for n in range(model.vocab - len(tokens))]
    metadata: dict[str, Value] = {
        "general.architecture": arch,
        "general.name": model.name,
        f"{arch}.block_count": model.layers,
        f"{arch}.context_length": 32768,
        f"{arch}.embedding_length": model.width,
        f"{arch}.feed_forward_length": model.ff_width,
        f"{arch}.attention.head_count": model.heads,
        f"{arch}.attention.head_count_kv": model.kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.dimension_count": model.width // model.heads,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if model.experts:
        metadata |= {f"{arch}.expert_count": model.experts, f"{arch}.expert_used_count": 2}
    ends: list[Tensor] = [("token_embd.weight", (model.width, model.vocab), model.kind)]
    ends.append(("output_norm.weight", (model.width,), "F32"))
    if not model.tied:
        ends.append(("output.weight", (model.width, model.vocab), model.kind))
    layers = [tensor for n in range(model.layers) for tensor in _layer(model, n)]
    return write_gguf(metadata, [*ends, *layers], fill=_fill)


def write_all(folder: Path) -> dict[str, Path]:
    """name -> file; a few hundred MB in all."""
    paths = {model.name: folder / f"{model.name}.gguf" for model in TINY}
    for model in TINY:
        paths[model.name].write_bytes(tiny_gguf(model))
    return paths


if __name__ == "__main__":
    print(*write_all(Path(sys.argv[1])).values(), sep="\n")
