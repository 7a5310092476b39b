"""The GGUF reader: real shapes, split models, cut and hostile files."""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Tensor, Value, llama_metadata, llama_tensors, tensor_bytes, text, write_gguf

from shardbox import (
    MAX_ENTRIES,
    MAX_READ_BYTES,
    GgufError,
    GgufHeader,
    ModelShape,
    model_shape,
    read_gguf_header,
    split_parts,
)


def read(data: bytes, name: str = "m.gguf") -> GgufHeader:
    return read_gguf_header(io.BytesIO(data), len(data), name)


def shape_of(metadata: Mapping[str, Value], tensors: Sequence[Tensor]) -> ModelShape:
    return model_shape([read(write_gguf(metadata, tensors))])


# -- what a good file says -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma2"])
def test_shape_of_whole_model_is_read(version: int, arch: str) -> None:
    data = write_gguf(llama_metadata(arch), llama_tensors(), version=version)
    header = read(data)
    shape = model_shape([header])
    one_layer = 64 * 64 // 32 * 18 + 64 * 4
    assert (shape.architecture, shape.layers, shape.width, shape.vocab) == (arch, 3, 64, 32)
    assert (shape.heads, shape.kv_heads, shape.key_width, shape.value_width) == (4, 2, 16, 16)
    assert (shape.ff_width, shape.context_train) == (128, 2048)
    assert shape.layer_bytes == (one_layer,) * 3
    assert shape.embedding_bytes == 64 * 32 * 2
    assert shape.output_bytes == 64 * 4 + 64 * 32 * 2
    assert not shape.tied_output
    assert shape.name == "Tiny[2J"  # no escape sequence reaches the terminal
    assert header.data_offset + sum(tensor.bytes for tensor in header.tensors) == len(data)


def test_shape_without_output_tensor_and_kv_heads_has_defaults() -> None:
    tensors = [tensor for tensor in llama_tensors() if tensor[0] != "output.weight"]
    metadata = llama_metadata()
    del metadata["llama.attention.head_count_kv"]
    shape = shape_of(metadata, tensors)
    assert shape.tied_output
    assert shape.kv_heads == 4
    assert shape.output_bytes == 64 * 4


def test_shape_of_mixed_types_names_the_one_with_most_bytes() -> None:
    tensors = llama_tensors()
    tensors[1] = ("blk.0.attn_q.weight", (256, 256), "Q6_K")
    shape = shape_of(llama_metadata(), tensors)
    assert shape.quantisation == "Q6_K"
    assert shape.layer_bytes[0] > shape.layer_bytes[1]


def test_shape_with_values_per_layer_has_the_largest_and_the_kv_of_each() -> None:
    changes: dict[str, Value] = {
        "llama.attention.head_count_kv": [1, 0, 4],
        "llama.feed_forward_length": [100, 300, 200],
        "llama.attention.key_length": 48,
        "llama.attention.value_length": 24,
        "llama.attention.sliding_window": 512,
    }
    shape = shape_of(llama_metadata() | changes, llama_tensors())
    assert (shape.kv_heads, shape.ff_width, shape.key_width, shape.value_width) == (4, 300, 48, 24)
    assert shape.kv_values == (72, 0, 288)
    assert shape.sliding_window == 512


def test_shape_with_experts_reads_only_those_that_are_used() -> None:
    changes: dict[str, Value] = {"llama.expert_count": 4, "llama.expert_used_count": 1}
    experts: list[Tensor] = [("blk.1.ffn_up_exps.weight", (64, 128, 4), "F32"), ("blk.2.ffn_up.3.weight", (64,), "F32")]
    shape = shape_of(llama_metadata() | changes, [*llama_tensors(), *experts])
    one = shape.layer_bytes[0]
    assert shape.layer_bytes == (one, one + 4 * 64 * 128 * 4, one + 64 * 4)
    assert shape.active_bytes == (one, one + 64 * 128 * 4, one + 64)
    assert shape.experts_used == 1


@pytest.mark.parametrize(
    ("kind", "bits"), [("Q4_K", 4.5), ("Q6_K", 6.5625), ("Q8_0", 8.5), ("IQ4_XS", 4.25), ("TQ1_0", 1.6875)]
)
def test_bits_per_weight_are_the_published_ones(kind: str, bits: float) -> None:
    assert tensor_bytes((256,), kind) * 8 / 256 == bits


def test_long_arrays_are_skipped_and_short_ones_kept() -> None:
    header = read(write_gguf({"short": [1, 2, 3], "long": list(range(5000)), "after": 7}))
    assert header.metadata == {"short": (1, 2, 3), "after": 7}


def test_alignment_moves_the_data() -> None:
    data = write_gguf({"general.alignment": 64}, [("t", (8,), "F32")])
    header = read(data + bytes(64))
    assert header.data_offset % 64 == 0
    assert 0 <= header.data_offset - len(data.rstrip(b"\0")) <= 128


# -- split models --------------------------------------------------------------------------------------


def split_in_three() -> list[GgufHeader]:
    groups: list[list[Tensor]] = [[], llama_tensors()[:4], llama_tensors()[4:]]  # the first: metadata only
    headers = []
    for number, group in enumerate(groups):
        metadata = llama_metadata() if number == 0 else {}
        metadata |= {"split.no": number, "split.count": 3, "split.tensors.count": len(llama_tensors())}
        headers.append(read(write_gguf(metadata, group), f"x-0000{number + 1}-of-00003.gguf"))
    return headers


def test_shape_of_split_model_equals_the_whole() -> None:
    assert model_shape(split_in_three()) == shape_of(llama_metadata(), llama_tensors())


@pytest.mark.parametrize(
    ("order", "words"),
    [((0,), "part 1 of 3"), ((0, 2, 1), "part 3 of 3"), ((0, 1, 1), "part 2 of 3"), ((1, 0, 2), "part 2 of 3")],
)
def test_shape_of_wrong_parts_is_refused(order: tuple[int, ...], words: str) -> None:
    headers = split_in_three()
    with pytest.raises(GgufError, match=words):
        model_shape([headers[number] for number in order])


def test_shape_with_a_part_of_another_model_is_refused() -> None:
    headers = split_in_three()
    other = write_gguf({"split.no": 2, "split.count": 3}, llama_tensors()[4:-1])
    with pytest.raises(GgufError, match="hold 8 tensors, 9 were announced"):
        model_shape([*headers[:2], read(other)])
    again = write_gguf({"split.no": 2, "split.count": 3}, llama_tensors()[3:])
    with pytest.raises(GgufError, match="is there twice"):
        model_shape([*headers[:2], read(again)])


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("a/x-00001-of-00003.gguf", 3),
        ("x-00002-of-00003.gguf", 3),
        ("x-00004-of-00003.gguf", 1),
        ("x-00000-of-00003.gguf", 1),
        ("x-1-of-3.gguf", 1),
        ("x.gguf", 1),
        ("", 1),
    ],
)
def test_split_parts_lists_all_names(name: str, count: int) -> None:
    parts = split_parts(name)
    assert len(parts) == count
    assert name in parts
    assert count == 1 or parts[0].endswith("x-00001-of-00003.gguf")


# -- cut short -----------------------------------------------------------------------------------------


def test_file_cut_anywhere_is_refused_with_its_size() -> None:
    data = write_gguf(llama_metadata(), llama_tensors())
    for size in [*range(0, len(data), 64), len(data) - 1]:
        with pytest.raises(GgufError) as caught:
            read(data[:size])
        assert caught.value.where == "m.gguf"
        assert caught.value.hint
        assert size < 4 or re.fullmatch(
            rf"cut short: it needs at least \d+ bytes, the file has {size}", caught.value.what
        )
    with pytest.raises(GgufError, match=f"needs at least {len(data)} bytes, the file has {len(data) - 1}"):
        read(data[:-1])
    assert read(data).tensors


def test_file_that_shrinks_while_being_read_is_refused() -> None:
    data = write_gguf(llama_metadata(), llama_tensors())
    with pytest.raises(GgufError, match="while being read"):
        read_gguf_header(io.BytesIO(data[:200]), len(data), "m.gguf")


# -- hostile and other files ---------------------------------------------------------------------------

HUGE = (1 << 63) + 5


def head(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def one_tensor(dims: Sequence[int], number: int = 0, offset: int = 0, name: str = "t") -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", number, offset)


PAD = bytes(4096)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "two bytes": (b"GG", "not a GGUF"),
    "version 1": (head(version=1), "version 1"),
    "version 4": (head(version=4), "version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648: only 2 and 3, little endian"),
    "many tensors": (head(tensors=MAX_ENTRIES + 1) + PAD, "claims 100001 tensors"),
    "2^63 tensors": (head(tensors=HUGE) + PAD, f"claims {HUGE} tensors"),
    "2^63 keys": (head(keys=HUGE) + PAD, f"claims {HUGE} keys"),
    "more tensors than bytes": (head(tensors=MAX_ENTRIES) + PAD, "cut short"),
    "endless key": (head(keys=1) + struct.pack("<Q", HUGE) + PAD, "cut short"),
    "key beyond the file": (head(keys=1) + struct.pack("<Q", 9999) + PAD, "cut short"),
    "unknown value type": (head(keys=1) + text("k") + struct.pack("<I", 13) + PAD, "value type 13"),
    "unknown long array": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 77, 9999) + PAD, "type 77"),
    "nested arrays": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 2) + PAD, "value type 9"),
    "2^63 numbers": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 10, HUGE) + PAD, "cut short"),
    "2^63 strings": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, HUGE) + PAD, "cut short"),
    "string in array": (head(keys=1) + text("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE) + PAD, "cut short"),
    "alignment 0": (write_gguf({"general.alignment": 0}) + PAD, "'general.alignment' is 0"),
    "alignment 24": (write_gguf({"general.alignment": 24}) + PAD, "'general.alignment' is 24"),
    "alignment text": (write_gguf({"general.alignment": "32"}) + PAD, "'general.alignment' is '32'"),
    "five dimensions": (head(tensors=1) + one_tensor((1,) * 5) + PAD, "has 5 dimensions"),
    "zero dimension": (head(tensors=1) + one_tensor((4, 0)) + PAD, "cannot have the shape 4 x 0"),
    "overflow": (head(tensors=1) + one_tensor((1 << 32, 1 << 32)) + PAD, "cannot have the shape"),
    "overflow to zero": (head(tensors=1) + one_tensor((1 << 63, 2)) + PAD, "cannot have the shape"),
    "half a block": (head(tensors=1) + one_tensor((33,), 2) + PAD, "type Q4_0 cannot have the shape 33"),
    "unknown type": (head(tensors=1) + one_tensor((4,), 4711) + PAD, "'t' has type 4711"),
    "type of a newer ggml": (head(tensors=1) + one_tensor((32,), 39) + PAD, r"type 39 \(MXFP4\)"),
    "shared bytes": (head(tensors=2) + one_tensor((16,)) + one_tensor((4,), name="u") + PAD, "'u' cannot start"),
    "not aligned": (head(tensors=1) + one_tensor((4,), offset=8) + PAD, "cannot start at 8"),
    "offset 2^63": (head(tensors=1) + one_tensor((4,), offset=1 << 63) + PAD, "cut short: it needs at least 922"),
    "large tensor": (head(tensors=1) + one_tensor((1 << 40,)) + PAD, "cut short: it needs at least 439804"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer"),
    "html": (b"\n<!DOCTYPE html><html><head>", "a web page"),
    "login answer": (b'{"error":"Invalid credentials"}', "an error message"),
    "safetensors": (struct.pack("<Q", 800) + b'{"__metadata__":{"format":"pt"}', "safetensors"),
    "zeros": (PAD, "zeros only"),
    "noise": (b"\xde\xad\xbe\xef" * 4, "first bytes de ad be ef"),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
@pytest.mark.timeout(5)
def test_hostile_header_is_refused_in_words(case: str) -> None:
    data, words = HOSTILE[case]
    with pytest.raises(GgufError, match=words) as caught:
        read(data)
    assert caught.value.where == "m.gguf"
    assert caught.value.hint


@pytest.mark.timeout(20)
@pytest.mark.parametrize("many", ["long values", "token texts"])
def test_header_with_too_much_to_read_is_refused_before_it_is_held(many: str) -> None:
    if many == "long values":
        data = write_gguf({f"key{number}": "x" * (1 << 20) for number in range(17)})
    else:
        count = MAX_READ_BYTES // 8
        data = head(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, count) + bytes(8 * count)
    with pytest.raises(GgufError, match="more than 16 MiB"):
        read(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"general.architecture": None}, "'general.architecture' is missing"),
        ({"general.architecture": 5}, "'general.architecture' is missing"),
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.embedding_length": None}, "'llama.embedding_length' is missing"),
        ({"llama.block_count": True}, "must be a whole number, got True"),
        ({"llama.block_count": 1.5}, "must be a whole number"),
        ({"llama.attention.head_count_kv": []}, r"got \(\)"),
        ({"llama.attention.head_count_kv": [2, 2]}, "has 2 values for 3 layers"),
        ({"llama.attention.head_count_kv": [-1, 2]}, r"got \(-1, 2\)"),
        ({"split.count": "3"}, "'split.count' must be a whole number, got '3'"),
        ({"llama.block_count": 0}, "0 layers are announced, there are tensors of 3"),
        ({"llama.block_count": 4}, "4 layers are announced, there are tensors of 3, up to 2"),
        ({"llama.block_count": 2}, "2 layers are announced, there are tensors of 3, up to 2"),
        ({"llama.block_count": 0xFFFFFFFF}, "must be a whole number"),
        ({"llama.block_count": 0x7FFFFFFF}, "2147483647 layers are announced"),
    ],
)
def test_shape_of_incomplete_metadata_names_the_key(change: Mapping[str, Value | None], words: str) -> None:
    metadata = {key: value for key, value in (llama_metadata() | dict(change)).items() if value is not None}
    with pytest.raises(GgufError, match=words):
        shape_of(metadata, llama_tensors())


def test_shape_with_a_tensor_twice_or_a_layer_without_number_is_refused() -> None:
    with pytest.raises(GgufError, match=r"'output\.weight' is there twice"):
        shape_of(llama_metadata(), [*llama_tensors(), llama_tensors()[-1]])
    moved = [(name.replace("blk.1.", "blk.7."), dims, kind) for name, dims, kind in llama_tensors()]
    with pytest.raises(GgufError, match="tensors of 3, up to 7"):
        shape_of(llama_metadata(), moved)


def test_shape_of_merged_model_with_split_count_0_is_whole() -> None:
    assert shape_of(llama_metadata() | {"split.count": 0}, llama_tensors()).layers == 3


def test_shape_without_embedding_is_refused() -> None:
    with pytest.raises(GgufError, match=r"'token_embd\.weight' is missing"):
        shape_of(llama_metadata(), llama_tensors()[1:])


SMALL = write_gguf(llama_metadata(layers=2), llama_tensors(2))
HEADER_END = read(SMALL).data_offset


@settings(max_examples=400, deadline=500)
@given(st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.binary(min_size=1, max_size=9)), max_size=5))
def test_changed_bytes_give_a_header_or_a_gguf_error(changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(SMALL)
    for position, new in changes:
        data[position : position + len(new)] = new
    with contextlib.suppress(GgufError):
        shape = model_shape([read(bytes(data))])
        assert sum(shape.layer_bytes) + shape.embedding_bytes + shape.output_bytes <= len(data)


@settings(max_examples=200, deadline=500)
@given(st.binary(max_size=300))
def test_any_bytes_after_the_magic_give_a_header_or_a_gguf_error(tail: bytes) -> None:
    data = b"GGUF\x03\0\0\0" + tail
    with contextlib.suppress(GgufError):
        header = read(data)
        assert not header.tensors or header.data_offset <= len(data)


@pytest.mark.skipif("SHARDBOX_MODEL" not in os.environ, reason="SHARDBOX_MODEL names a real model")
def test_real_model_adds_up_to_its_size() -> None:
    path = os.environ["SHARDBOX_MODEL"]
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        header = read_gguf_header(stream, size, path)
    shape = model_shape([header])
    stored = sum(shape.layer_bytes) + shape.embedding_bytes + shape.output_bytes
    assert stored == sum(tensor.bytes for tensor in header.tensors)
    assert size - 32 * len(header.tensors) <= header.data_offset + stored <= size
