"""Llama-family GGUF files: fields to a config, tensors to parameters.

The file's tensors are named as llama.cpp names them. A llama's query and key rows are permuted for interleaved rotary
positions (feature 2i turns with 2i+1); ours follow the rotate-half convention (i with i + h/2), so the rows go back.
Those of its relatives are as they were.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxdecode.checkpoint.fields import Fields
from jaxdecode.checkpoint.gguf_file import GgufFile, GgufTensor, dequantized_rows, read_gguf
from jaxdecode.checkpoint.gguf_stored import stored_tensors
from jaxdecode.checkpoint.source import Checkpoint, Names, Param, named_shapes
from jaxdecode.checks import require
from jaxdecode.models.transformer import RopeScaling, TransformerConfig, frequencies
from jaxdecode.text.gguf_vocab import gguf_vocabulary

__all__ = ["part_paths", "read_llama_gguf"]

_NAMES = Names(
    whole={"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"},
    layer="blk.{}.",
    parts={
        "attn_norm": ("attn_norm.weight",),
        "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
        "qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        "q_norm": ("attn_q_norm.weight",),
        "k_norm": ("attn_k_norm.weight",),
        "out": ("attn_output.weight",),
        "mlp_norm": ("ffn_norm.weight",),
        "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
        "down": ("ffn_down.weight",),
    },
)
_ROPE_FREQS = "rope_freqs.weight"
# general.architecture -> fields of the config that are always so
_ARCHITECTURES: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
_LLAMA_3_1 = (
    1.0,
    4.0,
    8192,
)  # low_freq_factor, high_freq_factor, original context of every published model of its kind

# Fields under "llama.", or another architecture, that are used below, or say nothing that changes the model. Any other
# one is refused.
_KNOWN = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "attention.scale",
    "expert_count",
    "expert_used_count",
    "tensor_data_layout",
}
_BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")  # one number, or one a layer
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def part_paths(path: Path) -> list[Path]:
    """The files of a checkpoint that is split over several, by its first one's name; else just ``path``.

    ValueError for another part than the first.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    first = path.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf")
    require(match["number"] == "00001", str(path), f"the first part, {first.name}", path.name)
    return [
        path.with_name(f"{match['stem']}-{i:05d}-of-{match['count']}.gguf") for i in range(1, int(match["count"]) + 1)
    ]


def read_llama_gguf(path: Path) -> Checkpoint:
    """The checkpoint in a llama-family GGUF file; its weights are read when their blocks are asked for.

    ValueError, naming file and field or tensor: damaged header, another architecture, a missing, surplus or misshapen
    tensor, a feature that the model does not have.
    """
    try:
        import gguf  # noqa: F401 - asked for here, so that its absence is told before anything else
    except ImportError as error:
        raise ImportError(".gguf files need the gguf package: pip install 'jaxdecode[text]'") from error
    file, owners = _parts(path)
    architecture = file.fields.get("general.architecture")
    known = isinstance(architecture, str) and architecture in _ARCHITECTURES
    expected = " or ".join(map(repr, _ARCHITECTURES))
    require(known, f"{path}: general.architecture", expected, repr(architecture))
    config = _config(file, owners, str(architecture))
    vocabulary = gguf_vocabulary(file.fields, str(path))
    require(vocabulary.size == config.vocab_size, f"{path}: tokens", f"{config.vocab_size} of them", vocabulary.size)
    return Checkpoint(str(path), config, vocabulary, _params(owners, config, path, architecture == "llama"))


_Owners = dict[str, GgufFile]  # tensor name -> the file that has it


def _parts(path: Path) -> tuple[GgufFile, _Owners]:
    """The first file, and all tensors of all parts."""
    first = read_gguf(path)
    count = first.fields.get("split.count", 0)
    paths = part_paths(path) if count else [path]
    require(count in (0, len(paths)), f"{path}: split.count", f"{len(paths)} parts, by the file's name", count)
    owners: _Owners = {}
    for i, part in enumerate(paths):
        if not part.is_file():
            raise FileNotFoundError(f"{part}: expected part {i + 1} of {count}, got nothing there")
        file = read_gguf(part) if i else first
        numbered = not count or (file.fields.get("split.no"), file.fields.get("split.count")) == (i, count)
        require(numbered, f"{part}: split.no", f"part {i} of {count}", file.fields.get("split.no"))
        again = sorted(owners.keys() & file.tensors.keys())
        require(not again, f"{part}: tensors", "each tensor once", again)
        owners |= dict.fromkeys(file.tensors, file)
    return first, owners


def _config(file: GgufFile, owners: _Owners, architecture: str) -> TransformerConfig:
    prefix = f"{architecture}."
    values = {k.removeprefix(prefix): v for k, v in file.fields.items() if k.startswith(prefix)}
    for key in _BY_LAYER:
        if isinstance(values.get(key), np.ndarray) and len(set(values[key].tolist())) == 1:
            values[key] = int(values[key][0])
    read = Fields(values, f"{file.path}: {prefix}")
    for key, value in values.items():
        require(key in _KNOWN, read.name(key), "only fields that are supported", repr(value))
    d_model, n_heads = read.size("embedding_length"), read.size("attention.head_count")
    head_dim = read.size("attention.key_length", max(1, d_model // n_heads), most=1 << 16)
    read.only("attention.value_length", read.size("attention.value_length", head_dim), head_dim)
    read.only("attention.scale", read.get("attention.scale", float, 0.0), 0.0)
    read.only("attention.causal", read.get("attention.causal", bool, True), True)
    read.only("rope.dimension_count", read.size("rope.dimension_count", head_dim), head_dim)
    read.only("expert_count", read.get("expert_count", int, 0), 0)
    n_layers = read.size("block_count")
    require(n_layers <= len(owners), read.name("block_count"), "layers that are in the file", n_layers)
    fields: dict[str, Any] = {
        "vocab_size": read.size("vocab_size", _tensor(owners, "token_embd.weight", 2, file.path).shape[0]),
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": read.size("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "d_mlp": read.size("feed_forward_length"),
        "context_length": read.size("context_length"),
        "norm_eps": read.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.real("rope.freq_base", 10000.0),
        "tied": "output.weight" not in owners,
        **_ARCHITECTURES[architecture],
    }
    try:
        return _with_rope_scaling(TransformerConfig(**fields), read, owners, file.path)
    except ValueError as error:
        if str(error).startswith(str(file.path)):
            raise
        raise ValueError(f"{file.path}: {error}") from None  # numbers that do not fit each other


def _with_rope_scaling(config: TransformerConfig, read: Fields, owners: _Owners, path: Path) -> TransformerConfig:
    """The config with the divisors of the rotary frequencies: from a tensor (Llama 3.1), or one for all (linear)."""
    kind = read.get("rope.scaling.type", str, "linear")  # what a file means that gives a factor alone
    read.only("rope.scaling.type", kind, "none", "linear")
    read.only("rope.scaling.attn_factor", read.get("rope.scaling.attn_factor", float, 1.0), 1.0)
    old = read.get("rope.scale_linear", float, 0.0)
    factor = read.get("rope.scaling.factor", float, old) if kind == "linear" else 0.0
    require(0 <= factor < np.inf, read.name("rope.scaling.factor"), "a positive number, or 0 for none", factor)
    factor = float(factor) or 1.0
    half = config.head_dim // 2
    if _ROPE_FREQS not in owners:
        return config if factor == 1.0 else dataclasses.replace(config, rope_freqs=(factor,) * half)
    require(factor == 1.0, f"{path}: {_ROPE_FREQS}", "no other rope scaling beside it", factor)
    tensor = _tensor(owners, _ROPE_FREQS, 1, path)
    require(tensor.shape == (half,), f"{path}: {_ROPE_FREQS}", f"shape ({half},)", tensor.shape)
    values = np.concatenate([block.reshape(-1) for block in dequantized_rows(owners[_ROPE_FREQS], tensor)])
    good = bool(np.all(np.isfinite(values) & (values > 0)))
    require(good, f"{path}: {_ROPE_FREQS}", "positive numbers", values)
    return _named_scaling(config, values) or dataclasses.replace(config, rope_freqs=tuple(values.tolist()))


def _named_scaling(config: TransformerConfig, divisors: np.ndarray) -> TransformerConfig | None:
    """The config with the rule of Llama 3.1, whose result the file holds, if these divisors are that result.

    With the rule instead of its rounded result a file computes what the original checkpoint computes.
    """
    factor = float(divisors.max())
    scaled = dataclasses.replace(config, rope_scaling=RopeScaling(factor, *_LLAMA_3_1))
    made = frequencies(config) / frequencies(scaled)
    return scaled if np.allclose(made, divisors, rtol=1e-6, atol=0) else None


def _tensor(owners: _Owners, name: str, n_dims: int, path: Path) -> GgufTensor:
    if name not in owners:
        raise ValueError(f"{path}: {name}: expected this tensor, got a file without it")
    tensor = owners[name].tensors[name]
    require(len(tensor.shape) == n_dims, f"{owners[name].path}: {name}", f"{n_dims} dimensions", tensor.shape)
    return tensor


def _params(owners: _Owners, config: TransformerConfig, path: Path, permuted: bool) -> tuple[Param, ...]:
    """Every parameter, from tensors whose presence and shape are checked; every tensor must be used.

    permuted: the rows of queries and keys are.
    """
    used = {_ROPE_FREQS}
    params = []
    for name, shape in named_shapes(config).items():
        parts = []
        for source, part_shape in _NAMES.of(name, shape, config):
            tensor = _tensor(owners, source, len(part_shape), path)
            require(tensor.shape == part_shape, f"{owners[source].path}: {source}", f"shape {part_shape}", tensor.shape)
            used.add(source)
            parts.append((owners[source], tensor, _row_order(source, config) if permuted else None))
        stored = functools.partial(stored_tensors, parts) if len(shape) == 2 else None
        params.append(Param(name, shape, functools.partial(_blocks, parts), stored=stored))
    surplus = sorted(owners.keys() - used)
    require(not surplus, f"{path}: tensors", "none beyond those of the model", surplus)
    return tuple(params)


def _row_order(source: str, config: TransformerConfig) -> np.ndarray | None:
    """Rows of queries and keys in rotate-half order: within a head, first the even rows, then the odd ones."""
    if not source.endswith(("attn_q.weight", "attn_k.weight")):
        return None
    heads = config.n_heads if source.endswith("attn_q.weight") else config.n_kv_heads
    return np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _blocks(parts: list[tuple[GgufFile, GgufTensor, np.ndarray | None]]) -> Iterator[np.ndarray]:
    return itertools.chain.from_iterable(dequantized_rows(*part) for part in parts)
