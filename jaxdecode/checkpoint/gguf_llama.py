"""Llama-family GGUF files: fields to a config, tensors to parameters.

The file's tensors are named as llama.cpp names them. Its query and key rows are permuted for interleaved rotary
positions (feature 2i turns with 2i+1); ours follow the rotate-half convention (i with i + h/2), so the rows go back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxdecode.checkpoint.gguf_file import GgufFile, GgufTensor, dequantized_rows, read_gguf
from jaxdecode.checkpoint.source import Checkpoint, Param, named_shapes
from jaxdecode.checks import require
from jaxdecode.models.transformer import TransformerConfig
from jaxdecode.text.gguf_vocab import gguf_vocabulary

__all__ = ["read_llama_gguf"]

# Our name -> the file's tensors, whose rows stand below each other.
_GLOBAL = {"embed": ("token_embd.weight",), "norm": ("output_norm.weight",), "head": ("output.weight",)}
_LAYER = {
    "attn_norm": ("attn_norm.weight",),
    "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "out": ("attn_output.weight",),
    "mlp_norm": ("ffn_norm.weight",),
    "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
    "down": ("ffn_down.weight",),
}
_ROPE_FREQS = "rope_freqs.weight"

# Fields under "llama." that are used below, or say nothing that changes the model. Any other one is refused.
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
    "expert_count",
    "expert_used_count",
    "tensor_data_layout",
}


def read_llama_gguf(path: Path) -> Checkpoint:
    """The checkpoint in a llama-family GGUF file; its weights are read when their blocks are asked for.

    ValueError, naming file and field or tensor: damaged header, another architecture, a missing, surplus or misshapen
    tensor, a feature that the model does not have.
    """
    try:
        import gguf  # noqa: F401 - asked for here, so that its absence is told before anything else
    except ImportError as error:
        raise ImportError(".gguf files need the gguf package: pip install 'jaxdecode[text]'") from error
    file = read_gguf(path)
    architecture = file.fields.get("general.architecture")
    require(architecture == "llama", f"{path}: general.architecture", "'llama'", repr(architecture))
    config = _config(file)
    vocabulary = gguf_vocabulary(file.fields, str(path))
    require(vocabulary.size == config.vocab_size, f"{path}: tokens", f"{config.vocab_size} of them", vocabulary.size)
    return Checkpoint(str(path), config, vocabulary, _params(file, config))


class _Fields:
    """Typed access to ``llama.*``."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.file.fields.get(f"llama.{key}", default)
        good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        require(good, f"{self.file.path}: llama.{key}", f"a value of type {kind.__name__}", value)
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        require(1 <= value < 2**31, f"{self.file.path}: llama.{key}", "a positive 32-bit number", value)
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, float, default)
        require(0 < value < np.inf, f"{self.file.path}: llama.{key}", "a positive number", value)
        return float(value)

    def only(self, key: str, got: Any, *supported: Any) -> None:
        expected = " or ".join(map(repr, supported))
        require(got in supported, f"{self.file.path}: llama.{key}", f"{expected} (others are not supported)", repr(got))


def _config(file: GgufFile) -> TransformerConfig:
    read = _Fields(file)
    for key in file.fields:
        known = not key.startswith("llama.") or key.removeprefix("llama.") in _KNOWN
        require(known, f"{file.path}: {key}", "only fields that are supported", repr(file.fields[key]))
    d_model, n_heads = read.size("embedding_length"), read.size("attention.head_count")
    head_dim = read.size("attention.key_length", max(1, d_model // n_heads))
    read.only("attention.value_length", read.size("attention.value_length", head_dim), head_dim)
    read.only("rope.dimension_count", read.size("rope.dimension_count", head_dim), head_dim)
    read.only("expert_count", read.get("expert_count", int, 0), 0)
    read.only("attention.causal", read.get("attention.causal", bool, True), True)
    embed = _tensor(file, "token_embd.weight", 2)
    n_layers = read.size("block_count")
    require(n_layers <= len(file.tensors), f"{file.path}: llama.block_count", "layers that are in the file", n_layers)
    fields: dict[str, Any] = {
        "vocab_size": read.size("vocab_size", embed.shape[0]),
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": read.size("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "d_mlp": read.size("feed_forward_length"),
        "context_length": read.size("context_length"),
        "norm_eps": read.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.real("rope.freq_base", 10000.0),
        "rope_freqs": _rope_freqs(read, head_dim),
        "tied": "output.weight" not in file.tensors,
    }
    try:
        return TransformerConfig(**fields)
    except ValueError as error:  # numbers that do not fit each other
        raise ValueError(f"{file.path}: {error}") from None


def _rope_freqs(read: _Fields, head_dim: int) -> tuple[float, ...] | None:
    """Divisors of the rotary frequencies: from a tensor (Llama 3.1), or one for all (linear scaling)."""
    file = read.file
    kind = read.get("rope.scaling.type", str, "none")
    read.only("rope.scaling.type", kind, "none", "linear")
    old = read.real("rope.scale_linear", 1.0)
    factor = read.real("rope.scaling.factor", old) if kind == "linear" else old
    if _ROPE_FREQS not in file.tensors:
        return None if factor == 1.0 else (factor,) * (head_dim // 2)
    require(factor == 1.0, f"{file.path}: {_ROPE_FREQS}", "no other rope scaling beside it", factor)
    tensor = _tensor(file, _ROPE_FREQS, 1)
    require(tensor.shape == (head_dim // 2,), f"{file.path}: {_ROPE_FREQS}", f"shape ({head_dim // 2},)", tensor.shape)
    values = np.concatenate([block.reshape(-1) for block in dequantized_rows(file, tensor)])
    good = bool(np.all(np.isfinite(values) & (values > 0)))
    require(good, f"{file.path}: {_ROPE_FREQS}", "positive numbers", values)
    return tuple(values.tolist())


def _tensor(file: GgufFile, name: str, n_dims: int) -> GgufTensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ValueError(f"{file.path}: {name}: expected this tensor, got a file without it")
    require(len(tensor.shape) == n_dims, f"{file.path}: {name}", f"{n_dims} dimensions", tensor.shape)
    return tensor


def _params(file: GgufFile, config: TransformerConfig) -> tuple[Param, ...]:
    """Every parameter, from tensors whose presence and shape are checked; every tensor must be used."""
    used = {_ROPE_FREQS}
    params = []
    for name, shape in named_shapes(config).items():
        parts = []
        for source, part_shape in _sources(name, shape, config):
            tensor = _tensor(file, source, len(part_shape))
            require(tensor.shape == part_shape, f"{file.path}: {source}", f"shape {part_shape}", tensor.shape)
            used.add(source)
            parts.append((tensor, _row_order(source, config)))
        params.append(Param(name, shape, lambda parts=parts: _blocks(file, parts)))  # type: ignore[misc]
    surplus = sorted(file.tensors.keys() - used)
    require(not surplus, f"{file.path}: tensors", "none beyond a llama model's", surplus)
    return tuple(params)


def _sources(name: str, shape: tuple[int, ...], config: TransformerConfig) -> list[tuple[str, tuple[int, ...]]]:
    """The file's tensors behind one parameter, each with the shape it must have."""
    if name in _GLOBAL:
        return [(_GLOBAL[name][0], shape)]
    _, layer, kind = name.split(".")
    sources = [f"blk.{layer}.{source}" for source in _LAYER[kind]]
    kv_rows = config.n_kv_heads * config.head_dim
    rows = {
        "qkv": [config.n_heads * config.head_dim, kv_rows, kv_rows],
        "gate_up": [config.d_mlp, config.d_mlp],
    }.get(kind, [shape[0]])
    return [(source, (n, *shape[1:])) for source, n in zip(sources, rows, strict=True)]


def _row_order(source: str, config: TransformerConfig) -> np.ndarray | None:
    """Rows of queries and keys in rotate-half order: within a head, first the even rows, then the odd ones."""
    if not source.endswith(("attn_q.weight", "attn_k.weight")):
        return None
    heads = config.n_heads if source.endswith("attn_q.weight") else config.n_kv_heads
    return np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _blocks(file: GgufFile, parts: list[tuple[GgufTensor, np.ndarray | None]]) -> Iterator[np.ndarray]:
    return itertools.chain.from_iterable(dequantized_rows(file, tensor, order) for tensor, order in parts)
