"""A model as stages that follow each other, so that each is calibrated on what the rounded ones before it give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxdecode.base import Model, Params
from jaxdecode.models.transformer import TransformerConfig, layerwise

__all__ = ["Stage", "Stages", "name_of", "one_stage", "transformer_stages"]

Path = tuple[str | int, ...]


class Stage(NamedTuple):
    """``apply(part, x) -> x`` on the part of the params at ``path``; equal functions are the same object.

    config: of a stage that is a layer, whose channels can be divided (``channels.py``).
    """

    path: Path
    apply: Callable[[Params, Any], Any]
    config: TransformerConfig | None = None

    def get(self, params: Params) -> Params:
        for key in self.path:
            params = params[key]
        return params

    def put(self, params: Params, part: Params) -> Params:
        return _put(params, self.path, part)


class Stages(NamedTuple):
    """``start(params, tokens[B,S]) -> x``, which every stage changes in turn."""

    start: Callable[[Params, jax.Array], Any]
    stages: tuple[Stage, ...]


def _put(tree: Any, path: Path, part: Any) -> Any:
    if not path:
        return part
    key, rest = path[0], path[1:]
    if isinstance(tree, dict):
        return {**tree, key: _put(tree[key], rest, part)}
    return type(tree)(_put(x, rest, part) if i == key else x for i, x in enumerate(tree))


def name_of(path: tuple[Any, ...]) -> str:
    """What a leaf is called by its place in a tree: "layers.0.qkv"."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


@functools.lru_cache(maxsize=64)
def transformer_stages(config: TransformerConfig) -> Stages:
    """Every layer is a stage. x [B,D,S]; the output head, which nothing follows, is none."""
    parts, windows = layerwise(config), config.windows(0)

    def start(params: Params, tokens: jax.Array) -> jax.Array:
        return _rows(parts.embed(params, tokens), tokens.shape[0])

    def layer(first: int) -> Callable[[Params, Any], Any]:
        def apply(part: Params, x: jax.Array) -> jax.Array:
            batch, d, size = x.shape
            flat = x.transpose(1, 0, 2).reshape(d, batch * size)
            return _rows(parts.layer(first, part, flat, batch), batch)

        return apply

    distinct = {window: layer(windows.index(window)) for window in set(windows)}  # alike, they are compiled once
    return Stages(start, tuple(Stage(("layers", i), distinct[window], config) for i, window in enumerate(windows)))


def _rows(x: jax.Array, batch: int) -> jax.Array:
    return x.reshape(x.shape[0], batch, -1).transpose(1, 0, 2)


@functools.lru_cache(maxsize=64)
def one_stage(model: Model) -> Stages:
    """Any model whose products are `jaxdecode.linear`'s, as one stage over tokens [B,S]."""

    def apply(params: Params, tokens: jax.Array) -> jax.Array:
        return model.apply(params, tokens, model.init_cache(params, *tokens.shape))[0]

    return Stages(lambda params, tokens: tokens, (Stage((), apply),))
