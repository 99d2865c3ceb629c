"""Counts from shapes: what one step of a transformer stores, multiplies and reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxdecode.base import Params
from jaxdecode.kvcache import create
from jaxdecode.models.transformer import TransformerConfig
from jaxdecode.quant import QTensor

__all__ = ["StepCounts", "cache_bytes", "layer_multiplications", "param_bytes", "param_count", "step_counts"]


def cache_bytes(config: TransformerConfig, tokens: int, dtype: DTypeLike, slack: int = 0) -> int:
    """Bytes of one row's cache that attention reads for ``tokens`` tokens: 2 L n K h numbers (S7.6).

    A layer with a window reads that many and its sinks, and stores ``slack`` more; int8 has a float32 scale for every
    key and value, int4 a bfloat16 one for 32 features.
    """
    tokens_read = sum(tokens if window is None else min(tokens, sum(window)) for window in config.windows(slack))
    block = jax.eval_shape(lambda: create(1, 1, 1, config.head_dim, 1, dtype)).layers[0][0]
    head = sum(x.size * x.dtype.itemsize for x in block) // 2
    return 2 * tokens_read * config.n_kv_heads * head


def layer_multiplications(config: TransformerConfig, t: int) -> int:
    """Multiplications of one layer at position t (1-based), with a cache: 2tHh + 2dHh + 2dKh + 3df (S7.5).

    Of a layer without a window; one with a window attends to no more than that.
    """
    d, heads = config.d_model, config.n_heads * config.head_dim
    return 2 * t * heads + 2 * d * heads + 2 * d * config.n_kv_heads * config.head_dim + 3 * d * config.d_mlp


def param_count(params: Params) -> int:
    """Numbers in all leaves; the scale of a quantized one is none."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QTensor))
    return sum(int(np.prod(leaf.shape)) for leaf in leaves)


def param_bytes(params: Params) -> int:
    """Bytes of all leaves as they are stored."""
    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(params))


class StepCounts(NamedTuple):
    """One decode step of ``batch`` rows, each at position t: multiplications, bytes of weights and of cache read."""

    multiplications: int
    weight_bytes: int
    cache_bytes: int


def step_counts(config: TransformerConfig, params: dict[str, Any], batch: int, t: int, dtype: DTypeLike) -> StepCounts:
    """Counts of one decode step; ``dtype`` is that of the cache.

    Weights are read once per step whatever the batch; of the embedding table only a tied head reads all of it.
    """
    per_row = config.n_layers * layer_multiplications(config, t) + config.d_model * config.vocab_size
    weights = param_bytes(params)
    if not config.tied:
        weights -= param_bytes(params["embed"])
    return StepCounts(batch * per_row, weights, batch * cache_bytes(config, t, dtype))
