"""What every checkpoint format is turned into before it is stored or loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxdecode.base import Params
from jaxdecode.models.transformer import TransformerConfig, param_shapes
from jaxdecode.text.backend import Vocabulary

__all__ = ["AS_STORED", "Checkpoint", "Names", "Param", "Part", "Stored", "named_shapes", "params_from_names"]

AS_STORED = "as_stored"  # stands where a scheme does: every weight as its file has it


class Param(NamedTuple):
    """One parameter: its name ("layers.3.qkv"), shape, and its values in row-major order, a few rows at a time.

    mapped: the values as they lie in a memory-mapped file, if they lie there so that jax can use them as they are.
    stored: the leaf as the file has it, quantized or not, for activations of a dtype; None: a float of that dtype.
    """

    name: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[np.ndarray]]
    mapped: np.ndarray | None = None
    stored: Callable[[np.dtype[Any]], Stored] | None = None


class Stored(NamedTuple):
    """A leaf of params: its arrays' shapes and dtypes (a ``jax.ShapeDtypeStruct`` each), and how to make it."""

    spec: Any
    make: Callable[[], Any]


class Checkpoint(NamedTuple):
    """A checkpoint as its files describe it: checked, but with no weight read yet. where: the file, for errors.

    generation: the fields of a ``generation_config.json`` that change what is generated. scheme: by what the files'
    own weights are quantized, if `save` wrote them so: then every param is ``stored``.
    """

    where: str
    config: TransformerConfig
    vocabulary: Vocabulary
    params: tuple[Param, ...]
    generation: Mapping[str, Any] = {}
    scheme: str | None = None


class Part(NamedTuple):
    """One tensor behind a parameter: its name and shape in the file, and how its values become rows of the parameter.

    order: gives the row of the tensor that each row of the parameter is (None: the same). transposed: the file has
    outputs as columns. plus: what is added to every value.
    """

    name: str
    shape: tuple[int, ...]
    order: Callable[[], np.ndarray] | None = None
    transposed: bool = False
    plus: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is the parameter's rows as they are."""
        return self.order is None and not self.transposed and not self.plus


class Names(NamedTuple):
    """How a family's files name tensors: one for each parameter outside the layers, and those that make one of a layer.

    layer: what stands before the names of a layer, with {} for its number; {} in a part's name counts experts. The
    order of a layer's tensors is that of their rows in the parameter. transposed: matrices of layers have outputs as
    columns. plus_one: norms are stored less 1. heads: "interleaved" rows of queries and keys follow the convention in
    which feature 2i turns with 2i+1; "by head" has the queries, keys and values of each head together. stacked:
    experts are the first axis of one tensor.
    """

    whole: Mapping[str, str]
    layer: str
    parts: Mapping[str, tuple[str, ...]]
    transposed: bool = False
    plus_one: bool = False
    heads: Literal["", "interleaved", "by head"] = ""
    stacked: bool = False

    def of(self, name: str, shape: tuple[int, ...], config: TransformerConfig) -> list[Part]:
        """The file's tensors behind the parameter ``name``, in the order of its rows."""
        kind = name.rpartition(".")[2]
        plus = 1.0 if self.plus_one and kind.endswith("norm") else 0.0
        if name in self.whole:
            return [Part(self.whole[name], shape, plus=plus)]
        tensors = [self.layer.format(name.split(".")[1]) + part for part in self.parts[kind]]
        if kind.startswith("expert"):
            return self._experts(tensors, shape, config)
        rows = self._rows(kind, len(tensors), shape, config)
        orders = self._orders(kind, config) or [None] * len(tensors)
        transposed = self.transposed and len(shape) == 2
        return [
            Part(tensor, (*shape[1:], n) if transposed else (n, *shape[1:]), order, transposed, plus)
            for tensor, n, order in zip(tensors, rows, orders, strict=True)
        ]

    def _experts(self, tensors: list[str], shape: tuple[int, ...], config: TransformerConfig) -> list[Part]:
        each = (shape[0] // config.n_experts, *shape[1:])
        if self.stacked:
            return [Part(tensors[0], (config.n_experts, *each))]
        return [Part(tensors[0].format(i), each) for i in range(config.n_experts)]

    def _rows(self, kind: str, count: int, shape: tuple[int, ...], config: TransformerConfig) -> list[int]:
        if kind in ("qkv", "qkv_bias") and count == 3:
            keys = config.n_kv_heads * config.head_dim
            return [config.n_heads * config.head_dim, keys, keys]
        return [shape[0] // count] * count

    def _orders(self, kind: str, config: TransformerConfig) -> list[Callable[[], np.ndarray] | None]:
        """Of each tensor that makes queries, keys and values. Nothing is made before the sizes are checked."""
        if self.heads == "by head" and kind in ("qkv", "qkv_bias"):
            return [functools.partial(_by_head, config.n_heads, config.head_dim)]
        if self.heads == "interleaved" and kind == "qkv":
            counts = (config.n_heads, config.n_kv_heads)
            return [*(functools.partial(_halves, count, config.head_dim) for count in counts), None]
        return []


def _by_head(heads: int, head_dim: int) -> np.ndarray:
    """Rows of all queries, then all keys, then all values, where they lie head by head."""
    return np.arange(3 * heads * head_dim).reshape(heads, 3, head_dim).swapaxes(0, 1).reshape(-1)


def _halves(heads: int, head_dim: int) -> np.ndarray:
    """Rows in rotate-half order: within a head, first the even rows, then the odd ones."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def named_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of a model, in the order of the file."""
    shapes = param_shapes(config)
    layers = {f"layers.{i}.{k}": shape for i, layer in enumerate(shapes["layers"]) for k, shape in layer.items()}
    return {k: v for k, v in shapes.items() if k != "layers"} | layers


def params_from_names(config: TransformerConfig, arrays: Mapping[str, Any]) -> Params:
    """The pytree of params from arrays by name."""
    shapes = param_shapes(config)
    layers = tuple({k: arrays[f"layers.{i}.{k}"] for k in layer} for i, layer in enumerate(shapes["layers"]))
    return {k: arrays[k] for k in shapes if k != "layers"} | {"layers": layers}
