"""Keys and values in 4 bits: 16 even levels for every 32 features of a token, and nothing hangs on another token."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdecode.quant import Uniform, grid_of, nearest_codes
from jaxdecode.quant.grids import round_bits

__all__ = ["GROUP", "Int4Block", "empty_int4", "int4_block", "int4_values"]

GROUP = 32  # features of a head that share a scale, where they come out even; else all of them


class Int4Block(NamedTuple):
    """Keys [R,K,h/2,T] and values [R,K,T,h/2] of T slots, feature i beside feature i + h/2 in a byte.

    Scales [R,K,T,G] in bfloat16 are half of the step: code j stands for (2j - 15) of them.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array
    v_scale: jax.Array


def _groups(head_dim: int) -> int:
    return head_dim // GROUP if head_dim % GROUP == 0 else 1


def empty_int4(rows: tuple[int, ...], head_dim: int, slots: int) -> Int4Block:
    """A block of zeros for ``rows`` = [R,K]."""
    k, v = jnp.zeros((*rows, head_dim // 2, slots), jnp.uint8), jnp.zeros((*rows, slots, head_dim // 2), jnp.uint8)
    scale = jnp.zeros((*rows, slots, _groups(head_dim)), jnp.bfloat16)
    return Int4Block(k, v, scale, scale)


def int4_block(k: jax.Array, v: jax.Array) -> Int4Block:
    """``k[B,S,K,h]`` and ``v[B,S,K,h]``, rounded, as a block of S slots."""
    (k, k_scale), (v, v_scale) = _rounded(k), _rounded(v)
    return Int4Block(k.transpose(0, 2, 3, 1), *(x.transpose(0, 2, 1, 3) for x in (v, k_scale, v_scale)))


def _rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bytes [...,h/2] and scales [...,G] of x[...,h]."""
    head = x.shape[-1]
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], _groups(head), -1)
    half = round_bits(grid_of(groups, Uniform(4))[0] * np.float32(0.5), 8, "up")
    codes = nearest_codes(groups, half * 2, half * -15, 4).reshape(x.shape)
    low, high = jnp.split(codes, 2, axis=-1)
    return low | (high << np.uint8(4)), half.astype(jnp.bfloat16)


def int4_values(block: Int4Block, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Keys [R,K,h,T] and values [R,K,T,h] of a block, as numbers of ``dtype``."""

    def numbers(codes: jax.Array, scale: jax.Array, axis: int) -> jax.Array:
        whole = jnp.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis).astype(jnp.int8)
        return (2 * whole - 15).astype(dtype) * jnp.repeat(
            scale.astype(dtype), whole.shape[axis] // scale.shape[axis], axis
        )

    return numbers(block.k, block.k_scale.swapaxes(2, 3), 2), numbers(block.v, block.v_scale, 3)
