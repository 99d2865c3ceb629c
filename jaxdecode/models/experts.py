"""Mixtures of experts: every token through the few MLPs that a router prefers, with static shapes.

Tokens are sorted by expert and dealt into blocks of one expert each, so the work follows the experts that are chosen,
never those that there are. The matrices of all experts of a layer stand below each other in one ("expert_gate":
[E*F, D]), which is quantized and stored as any other is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode import linear
from jaxdecode.arithmetic import PLAIN, Arithmetic
from jaxdecode.base import Params
from jaxdecode.models.config import TransformerConfig
from jaxdecode.quant import QRows, over_rows

__all__ = ["mix", "route"]

_LARGEST_BLOCK = 128


def route(
    config: TransformerConfig, params: Params, x: jax.Array, arithmetic: Arithmetic = PLAIN
) -> tuple[jax.Array, jax.Array]:
    """For x[D,R]: the experts of each token, by number, and their weights, [R,k] each; of equals the lower number."""
    wide = np.promote_types(x.dtype, np.float32)
    law = arithmetic.softmax(linear.matmul(params["router"], x, wide), 0)
    weight, chosen = lax.top_k(law.T, config.experts_per_token)
    if config.norm_expert_weights:
        weight = weight * (1 / arithmetic.sum(weight, 1))
    order = jnp.argsort(chosen, axis=1)  # sums then do not depend on which expert is preferred
    return jnp.take_along_axis(chosen, order, axis=1), jnp.take_along_axis(weight, order, axis=1).astype(x.dtype)


def mix(
    config: TransformerConfig,
    params: Params,
    x: jax.Array,
    activation: Callable[[jax.Array], jax.Array],
    arithmetic: Arithmetic = PLAIN,
) -> jax.Array:
    """The experts' outputs [D,R] for x[D,R], weighted and summed."""
    chosen, weight = route(config, params, x, arithmetic)
    rows, k = chosen.shape
    if rows == 0:
        return x
    size = _block_size(rows * k, config.n_experts)
    token, expert, place = _deal(chosen.reshape(-1), config.n_experts, size)

    def block(_: None, dealt: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        number, members = dealt
        gate, up, down = (_of(params[f"expert_{name}"], number, config.n_experts) for name in ("gate", "up", "down"))
        inputs = jnp.take(x, members // k, axis=1, mode="clip")
        return None, linear.matmul(down, activation(linear.matmul(gate, inputs)) * linear.matmul(up, inputs))

    _, out = lax.scan(block, None, (expert, token))  # [blocks, D, size]
    out = jnp.moveaxis(out, 1, 0).reshape(len(x), -1)
    out = jnp.take(out, place, axis=1).reshape(len(x), rows, k)
    return arithmetic.sum(arithmetic.product(out * weight[None]), 2)[:, :, 0]


def _block_size(pairs: int, n_experts: int) -> int:
    """Tokens of a block: 1 where experts get no more each, else about what they get on average, a power of two."""
    return min(1 << max(0, (pairs // n_experts).bit_length() - 1), _LARGEST_BLOCK)


def _deal(expert: jax.Array, n_experts: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pairs of token and expert[T] in blocks of ``size``: pairs [blocks, size], experts [blocks], and places [T].

    Places without a pair name pair T, and blocks without one the last expert.
    """
    pairs = len(expert)
    blocks = (pairs + min(n_experts, pairs) * (size - 1)) // size  # an expert leaves at most one block unfilled
    count = jnp.zeros((n_experts,), jnp.int32).at[expert].add(1)
    needed = (count + size - 1) // size
    last = jnp.cumsum(needed).astype(jnp.int32)  # the first block after those of an expert
    every = jnp.arange(pairs, dtype=jnp.int32)
    inside = jnp.zeros_like(every).at[jnp.argsort(expert)].set(every)  # the place among all, sorted by expert
    inside = inside - (jnp.cumsum(count).astype(jnp.int32) - count)[expert]
    place = (last - needed)[expert] * size + inside
    token = jnp.full((blocks * size,), pairs, jnp.int32).at[place].set(every)
    number = jnp.searchsorted(last, jnp.arange(blocks, dtype=jnp.int32), side="right").astype(jnp.int32)
    return token.reshape(blocks, size), jnp.minimum(number, n_experts - 1), place


def _of(stack: Any, number: jax.Array, n_experts: int) -> Any:
    """The matrix of one expert, an array or a quantized one, out of those below each other, or of a stack [E,N,K]."""
    if isinstance(stack, QRows):
        if len(stack.parts) != 1:
            raise ValueError("experts: expected weights of one type for all experts of a layer, got several")
        return dataclasses.replace(stack, parts=(_of(stack.parts[0], number, n_experts),))
    if stack.ndim == 3:
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, number, 0, keepdims=False), stack)
    each = stack.shape[0] // n_experts
    return over_rows(lambda axis, leaf: lax.dynamic_slice_in_dim(leaf, number * each, each, axis), stack)
