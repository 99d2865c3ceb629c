"""What every checkpoint format is turned into before it is stored or loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxdecode.base import Params
from jaxdecode.models.transformer import TransformerConfig, param_shapes
from jaxdecode.text.backend import Vocabulary

__all__ = ["AS_STORED", "Checkpoint", "Names", "Param", "Stored", "named_shapes", "params_from_names"]

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


class Names(NamedTuple):
    """How a format names tensors: one for each parameter outside the layers, and those whose rows make one of a layer.

    layer: what stands before the names of a layer, with {} for its number. The order of a layer's tensors is that of
    their rows in the parameter.
    """

    whole: Mapping[str, str]
    layer: str
    parts: Mapping[str, tuple[str, ...]]

    def of(self, name: str, shape: tuple[int, ...], config: TransformerConfig) -> list[tuple[str, tuple[int, ...]]]:
        """The format's tensors behind the parameter ``name``, each with the shape that it must have."""
        if name in self.whole:
            return [(self.whole[name], shape)]
        _, number, kind = name.split(".")
        tensors = [self.layer.format(number) + part for part in self.parts[kind]]
        kv_rows = config.n_kv_heads * config.head_dim
        qkv = [config.n_heads * config.head_dim, kv_rows, kv_rows]
        rows = {
            "qkv": qkv,
            "qkv_bias": qkv,
            "gate_up": [config.d_mlp, config.d_mlp],
        }.get(kind, [shape[0]])
        return [(tensor, (n, *shape[1:])) for tensor, n in zip(tensors, rows, strict=True)]


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
