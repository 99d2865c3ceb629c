"""What every checkpoint format is turned into before it is stored or loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxdecode.base import Params
from jaxdecode.models.transformer import TransformerConfig, param_shapes
from jaxdecode.text.backend import Vocabulary

__all__ = ["Checkpoint", "Param", "named_shapes", "params_from_names"]


class Param(NamedTuple):
    """One parameter: its name ("layers.3.qkv"), shape, and its values in row-major order, a few rows at a time."""

    name: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[np.ndarray]]


class Checkpoint(NamedTuple):
    """A checkpoint as its file describes it: checked, but with no weight read yet. where: the file, for errors."""

    where: str
    config: TransformerConfig
    vocabulary: Vocabulary
    params: tuple[Param, ...]


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
