"""GGUF files for tests: small whole ones, with a header that is real and weights that need not be."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardbox import GGML_TYPES, MIB

TYPE_NUMBERS = {name: number for number, (name, _, _) in GGML_TYPES.items()}
Value = int | float | bool | str | bytes | list[str] | list[int] | list[float]
Tensor = tuple[str, tuple[int, ...], str]


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def encode(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(str(item)) for item in value)
    if value and isinstance(value[0], float):
        return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def tensor_bytes(dims: Sequence[int], kind: str) -> int:
    _, block, size = GGML_TYPES[TYPE_NUMBERS[kind]]
    count = 1
    for dim in dims:
        count *= dim
    return count // block * size


def write_gguf(
    metadata: Mapping[str, Value],
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    fill: Callable[[str, int], bytes] = lambda _, size: bytes(size),
) -> bytes:
    """A whole GGUF file; `fill` gives the bytes of a tensor by its type and size."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    out += b"".join(text(key) + encode(value) for key, value in metadata.items())
    data = bytearray()
    for name, dims, kind in tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", TYPE_NUMBERS[kind], len(data))
        data += fill(kind, tensor_bytes(dims, kind))
        data += bytes(-len(data) % 32)
    return out + bytes(-len(out) % 32) + data if tensors else out


def llama_metadata(arch: str = "llama", layers: int = 3) -> dict[str, Value]:
    return {
        "general.architecture": arch,
        "general.name": "Tiny\x1b[2J",
        f"{arch}.block_count": layers,
        f"{arch}.context_length": 2048,
        f"{arch}.embedding_length": 64,
        f"{arch}.feed_forward_length": 128,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        "tokenizer.ggml.tokens": [f"token{n}" for n in range(32)],
        "tokenizer.ggml.scores": 1.5,
    }


def layer(number: int, kind: str = "Q4_0") -> list[Tensor]:
    return [(f"blk.{number}.attn_q.weight", (64, 64), kind), (f"blk.{number}.attn_norm.weight", (64,), "F32")]


def llama_tensors(layers: int = 3) -> list[Tensor]:
    middle = [tensor for number in range(layers) for tensor in layer(number)]
    ends: list[Tensor] = [("output_norm.weight", (64,), "F32"), ("output.weight", (64, 32), "F16")]
    return [("token_embd.weight", (64, 32), "F16"), *middle, *ends]


def write_model(path: Path, size: int, seed: int = 1) -> Path:
    """A model of about `size` bytes, whose weights are noise, so that no two of its chunks are alike."""
    tensors = [("token_embd.weight", (64, size // 128), "F16"), *llama_tensors()[1:]]
    data = write_gguf(llama_metadata(), tensors)
    source, left = random.Random(seed), size - MIB
    noise = b"".join(source.randbytes(min(64 * MIB, left - at)) for at in range(0, left, 64 * MIB))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[: len(data) - len(noise)] + noise)
    return path
