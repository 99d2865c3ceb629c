"""GGUF files: what is read from sound ones, and that unsound ones give one error."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_gguf
from tiny_gguf import KINDS, Tiny, quantized, tiny, write

from jaxdecode.checkpoint import gguf_file
from jaxdecode.checkpoint.gguf_checkpoint import read_gguf_checkpoint
from jaxdecode.checkpoint.gguf_file import GgufFile, GgufTensor, dequantized_rows, read_gguf
from jaxdecode.checkpoint.source import Checkpoint


def values(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {p.name: np.concatenate([b.reshape(-1) for b in p.blocks()]).reshape(p.shape) for p in checkpoint.params}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_1])
def test_every_param_is_the_hugging_face_one(tmp_path: Path, kind: gguf.GGMLQuantizationType, tied: bool) -> None:
    model = tiny(tied=tied, matrices=kind)
    checkpoint = read_gguf_checkpoint(write(tmp_path / "m.gguf", model))
    got = values(checkpoint)
    assert checkpoint.config.tied is tied
    expected = {"embed": ["token_embd"], "norm": ["output_norm"]} | ({} if tied else {"head": ["output"]})
    for i in range(tiny_gguf.LAYERS):
        expected |= {
            f"layers.{i}.attn_norm": [f"blk.{i}.attn_norm"],
            f"layers.{i}.qkv": [f"blk.{i}.attn_q", f"blk.{i}.attn_k", f"blk.{i}.attn_v"],
            f"layers.{i}.out": [f"blk.{i}.attn_output"],
            f"layers.{i}.mlp_norm": [f"blk.{i}.ffn_norm"],
            f"layers.{i}.gate_up": [f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up"],
            f"layers.{i}.down": [f"blk.{i}.ffn_down"],
        }
    assert got.keys() == expected.keys()
    for name, parts in expected.items():
        # Blocks lie within rows, so quantizing commutes with the permutation of the rows.
        np.testing.assert_array_equal(got[name], np.concatenate([quantized(model, f"{p}.weight") for p in parts]))


def test_config_is_what_the_fields_say(tmp_path: Path) -> None:
    config = read_gguf_checkpoint(write(tmp_path / "m.gguf", tiny())).config
    got = (config.vocab_size, config.d_model, config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim)
    assert got == (len(tiny_gguf.TOKENS), 64, 2, 4, 2, 16)
    assert (config.d_mlp, config.context_length, config.rope_theta) == (96, 128, 10000.0)
    assert config.norm_eps == np.float32(1e-5)
    assert config.rope_freqs is None


def test_rope_divisors_of_llama_3_1_are_kept(tmp_path: Path) -> None:
    freqs = np.linspace(1, 8, tiny_gguf.HEAD_DIM // 2, dtype=np.float32)
    path = write(tmp_path / "m.gguf", tiny(), lambda m: m.tensors.update({"rope_freqs.weight": freqs}))
    assert read_gguf_checkpoint(path).config.rope_freqs == tuple(freqs.tolist())


def test_linear_rope_scaling_is_one_divisor_for_all(tmp_path: Path) -> None:
    fields = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write(tmp_path / "m.gguf", tiny(), lambda m: m.fields.update(fields))
    assert read_gguf_checkpoint(path).config.rope_freqs == (4.0,) * 8


def put(key: str, value: Any) -> Callable[[Tiny], None]:
    return lambda model: model.fields.update({key: value})


def drop(key: str) -> Callable[[Tiny], None]:
    def change(model: Tiny) -> None:
        model.fields.pop(key, None)
        model.tensors.pop(key, None)

    return change


def reshape(name: str, *shape: int) -> Callable[[Tiny], None]:
    return lambda model: model.tensors.update({name: np.ones(shape, np.float32)})


UNSUPPORTED = {
    "another architecture": (put("general.architecture", "gemma"), "general.architecture.*gemma"),
    "a missing field": (drop("llama.block_count"), "llama.block_count"),
    "a field of another type": (put("llama.block_count", "two"), "llama.block_count"),
    "a boolean for a number": (put("llama.context_length", True), "llama.context_length"),
    "a size of zero": (put("llama.attention.head_count", 0), "llama.attention.head_count"),
    "more layers than tensors": (put("llama.block_count", 2**31 - 1), "llama.block_count"),
    "one layer too many": (put("llama.block_count", 3), r"blk\.2\.attn_norm\.weight"),
    "one layer too few": (put("llama.block_count", 1), r"tensors.*blk\.1"),
    "heads per layer": (put("llama.attention.head_count_kv", [2, 4]), "head_count_kv"),
    "heads that do not divide": (put("llama.attention.head_count_kv", 3), "n_kv_heads"),
    "an odd head size": (put("llama.attention.key_length", 15), "value_length|dimension_count|head_dim"),
    "partial rotary": (put("llama.rope.dimension_count", 8), "rope.dimension_count"),
    "an unknown scaling": (put("llama.rope.scaling.type", "ntk"), "rope.scaling.type.*ntk"),
    "yarn without a factor": (put("llama.rope.scaling.type", "yarn"), "rope.scaling.factor"),
    "experts, none of them chosen": (put("llama.expert_count", 8), "expert_used_count"),
    "an unknown field": (put("llama.attention.sliding_window", 64), "sliding_window"),
    "an epsilon of NaN": (put("llama.attention.layer_norm_rms_epsilon", float("nan")), "rms_epsilon"),
    "a missing tensor": (drop("blk.1.ffn_up.weight"), r"blk\.1\.ffn_up\.weight"),
    "no embedding": (drop("token_embd.weight"), r"token_embd\.weight"),
    "a surplus tensor": (reshape("blk.0.attn_q.bias", 64), r"blk\.0\.attn_q\.bias"),
    "a misshapen matrix": (reshape("blk.0.ffn_down.weight", 96, 64), r"blk\.0\.ffn_down\.weight.*\(64, 96\)"),
    "a misshapen norm": (reshape("output_norm.weight", 32), r"output_norm\.weight"),
    "a matrix of three axes": (reshape("blk.0.attn_v.weight", 32, 64, 1), r"blk\.0\.attn_v\.weight"),
    "another vocabulary size": (put("llama.vocab_size", 7), "token"),
    "rope divisors of another size": (reshape("rope_freqs.weight", 5), "rope_freqs"),
    "rope divisors of zero": (
        lambda m: m.tensors.update({"rope_freqs.weight": np.zeros(8, np.float32)}),
        "rope_freqs.*positive",
    ),
    "an unknown tokenizer": (put("tokenizer.ggml.model", "rwkv"), "tokenizer.ggml.model.*rwkv"),
    "an unknown pre-tokenizer": (put("tokenizer.ggml.pre", "nobody"), "tokenizer.ggml.pre.*nobody"),
    "a repeated token": (put("tokenizer.ggml.tokens", ["a"] * len(tiny_gguf.TOKENS)), "tokenizer.ggml.tokens"),
    "too few types": (put("tokenizer.ggml.token_type", [1, 1]), "tokenizer.ggml.token_type"),
    "a merge of unknown tokens": (put("tokenizer.ggml.merges", ["q qq"]), "tokenizer.ggml.merges"),
    "half a merge": (put("tokenizer.ggml.merges", ["th"]), "tokenizer.ggml.merges"),
    "an end id out of range": (put("tokenizer.ggml.eos_token_id", 10**6), "tokenizer.ggml.eos_token_id"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, case: str) -> None:
    change, message = UNSUPPORTED[case]
    path = write(tmp_path / "m.gguf", tiny(), change)
    with pytest.raises(ValueError, match=message) as caught:
        read_gguf_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf", tiny()).read_bytes()


def refused(path: Path, data: bytes) -> str:
    """The one error that these bytes give, at once."""
    path.write_bytes(data)
    start = time.monotonic()
    with pytest.raises(ValueError, match="expected") as caught:
        read_gguf_checkpoint(path)
    assert time.monotonic() - start < 30  # a hang, not a measurement
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_truncated_anywhere(tmp_path: Path, sound: bytes) -> None:
    header = sound.index(b"ffn_down")
    cuts = [0, 1, 3, 4, 7, 8, 16, 23, 24, *range(25, header, 301), *np.linspace(header, len(sound) - 1, 40).astype(int)]
    for cut in cuts:
        refused(tmp_path / "cut.gguf", sound[:cut])


def header(*, tensors: int = 0, fields: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = 2**60
HOSTILE = {
    "another format": b"PK\3\4" + bytes(100),
    "version 1": header(version=1, rest=bytes(100)),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(100),
    "tensor count": header(tensors=HUGE, rest=bytes(200)),
    "field count": header(fields=HUGE, rest=bytes(200)),
    "length of a name": header(fields=1, rest=struct.pack("<Q", HUGE) + bytes(200)),
    "length of a text": header(fields=1, rest=text("a") + struct.pack("<IQ", 8, HUGE) + bytes(200)),
    "length of an array of texts": header(fields=1, rest=text("a") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(200)),
    "length of an array of numbers": header(fields=1, rest=text("a") + struct.pack("<IIQ", 9, 4, HUGE) + bytes(200)),
    "length of an array of arrays": header(fields=1, rest=text("a") + struct.pack("<IIQ", 9, 9, HUGE) + bytes(200)),
    "a text in an array": header(fields=1, rest=text("a") + struct.pack("<IIQQ", 9, 8, 2, HUGE) + bytes(200)),
    "deep nesting": header(fields=1, rest=text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000),
    "an unknown type": header(fields=1, rest=text("a") + struct.pack("<I", 77) + bytes(200)),
    "a boolean of 2": header(fields=1, rest=text("a") + struct.pack("<IB", 7, 2) + bytes(200)),
    "a name that is not UTF-8": header(fields=1, rest=struct.pack("<Q", 2) + b"\xff\xfe" + bytes(200)),
    "a field twice": header(fields=2, rest=(text("a") + struct.pack("<IB", 7, 1)) * 2 + bytes(200)),
    "an alignment of 3": header(fields=1, rest=text("general.alignment") + struct.pack("<II", 4, 3) + bytes(99)),
    "dimensions": header(tensors=1, rest=text("t") + struct.pack("<I", 2**31) + bytes(200)),
    "a huge tensor": header(tensors=1, rest=text("t") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0) + bytes(99)),
    "a huge offset": header(tensors=1, rest=text("t") + struct.pack("<IQIQ", 1, 4, 0, HUGE) + bytes(99)),
    "an unaligned offset": header(tensors=1, rest=text("t") + struct.pack("<IQIQ", 1, 4, 0, 4) + bytes(99)),
    "an unknown block type": header(tensors=1, rest=text("t") + struct.pack("<IQIQ", 1, 4, 4711, 0) + bytes(99)),
    "half a block": header(tensors=1, rest=text("t") + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(99)),
    "a tensor twice": header(
        tensors=2,
        rest=text("t") + struct.pack("<IQIQ", 1, 4, 0, 0) + text("t") + struct.pack("<IQIQ", 1, 4, 0, 32) + bytes(99),
    ),
    "overlapping tensors": header(
        tensors=2,
        rest=text("t") + struct.pack("<IQIQ", 1, 4, 0, 0) + text("u") + struct.pack("<IQIQ", 1, 4, 0, 0) + bytes(99),
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    assert len(refused(tmp_path / "hostile.gguf", HOSTILE[case])) < 300 + len(str(tmp_path))


def test_flipped_bytes_give_a_value_error_or_a_sound_header(tmp_path: Path, sound: bytes) -> None:
    rng = np.random.default_rng(1)
    path = tmp_path / "flipped.gguf"
    for _ in range(150):
        data = bytearray(sound)
        for at in rng.integers(0, sound.index(b"ffn_down"), size=3):
            data[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        error = str(path)
        try:
            assert read_gguf_checkpoint(path).config.d_model == tiny_gguf.D
        except ValueError as caught:
            error = str(caught)
        assert str(path) in error


def test_header_of_a_sound_file_equals_the_gguf_packages_reading(tmp_path: Path, sound: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(sound)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            expected, got = field.contents(), ours.fields[name]
            assert (got.tolist() if isinstance(got, np.ndarray) else got) == expected
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        got = ours.tensors[tensor.name]
        assert (got.offset, got.nbytes, got.type) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type)
        assert got.shape == tuple(int(n) for n in tensor.shape[::-1])


def dequantizable() -> list[gguf.GGMLQuantizationType]:
    found = []
    for kind in KINDS:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


@pytest.mark.parametrize("kind", dequantizable(), ids=lambda kind: kind.name)
def test_every_block_type_in_blocks_equals_the_whole(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "_BLOCK_VALUES", 1024)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    width = max(256, block)
    data = np.random.default_rng(2).integers(0, 256, (11, width // block * block_bytes), np.uint8)
    file = GgufFile(tmp_path, {}, {}, data.reshape(-1))
    tensor = GgufTensor("t", (11, width), kind, 0, data.nbytes)
    order = np.random.default_rng(3).permutation(11)
    with np.errstate(all="ignore"):
        whole = gguf.dequantize(data, kind)
    np.testing.assert_array_equal(np.concatenate(list(dequantized_rows(file, tensor))), whole)
    np.testing.assert_array_equal(np.concatenate(list(dequantized_rows(file, tensor, order))), whole[order])


def test_a_type_without_floating_values_is_refused(tmp_path: Path) -> None:
    file = GgufFile(tmp_path / "m.gguf", {}, {}, np.zeros(64, np.uint8))
    with pytest.raises(ValueError, match=r"m\.gguf: t: .*I32"):
        list(dequantized_rows(file, GgufTensor("t", (2, 8), KINDS.I32, 0, 64)))
