"""Which matrices are worth activations that are not rounded: a few of them take most of what that costs a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode.base import Model, Params
from jaxdecode.calibration.stages import name_of
from jaxdecode.observed import rounding_costs
from jaxdecode.quant import QTensor, is_quantized

__all__ = ["costs_of_rounding", "unrounded"]

ROWS = 4  # windows that the costs are measured on


def costs_of_rounding(model: Model, params: Params, tokens: np.ndarray, key: jax.Array) -> dict[str, float]:
    """What rounding the inputs of each matrix to bytes costs, by name: nats of KL divergence a token, as expected.

    From one gradient for each of the first rows of ``tokens`` [B,S], of the log probability of ids drawn with ``key``.
    """
    rows, total = tokens[:ROWS], None
    for i, row in enumerate(rows):
        found = _costs(model, params, row[None], jax.random.fold_in(key, i))
        total = found if total is None else jax.tree.map(jnp.add, total, found)
    leaves = jax.tree_util.tree_leaves_with_path(total)
    return {name_of(path): float(cost) / rows.size for path, cost in leaves}


@functools.partial(jax.jit, static_argnums=0)
def _costs(model: Model, params: Params, tokens: jax.Array, key: jax.Array) -> Any:
    def drawn(params: Params) -> jax.Array:
        logits = model.apply(params, tokens, model.init_cache(params, *tokens.shape))[0].astype(jnp.float32)
        ids = jax.random.categorical(key, jax.lax.stop_gradient(logits))
        return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], axis=-1).sum()

    return rounding_costs(drawn, params)


def unrounded(params: Params, costs: Mapping[str, float], above: float) -> Params:
    """``params`` in which the "int8" of matrices that cost more than ``above`` is "int8_weights": the same codes."""

    def leaf(path: tuple[Any, ...], w: Any) -> Any:
        if not isinstance(w, QTensor) or w.scheme != "int8" or costs.get(name_of(path), 0.0) <= above:
            return w
        return dataclasses.replace(w, scheme="int8_weights")

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_quantized)
