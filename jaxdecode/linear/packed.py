"""Products with packed codes and a grid for each group."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxdecode.quant import QTensor, dequantize

__all__ = ["product"]

_CONTRACT = (((1,), (0,)), ((), ()))
_BLOCK = 1 << 17  # weights that are floats at a time: 512 KiB


def product(w: QTensor, x: jax.Array) -> jax.Array:
    """``W[N,K] @ x[K,R]`` -> [N,R] in the dtype of x, float32 or wider."""
    return lax.platform_dependent(w, x, cpu=_blocks, default=_whole)


def _whole(w: QTensor, x: jax.Array) -> jax.Array:
    return lax.dot_general(dequantize(w).astype(x.dtype), x, _CONTRACT, preferred_element_type=x.dtype)


def _blocks(w: QTensor, x: jax.Array) -> jax.Array:
    """A few rows of W at a time; the last block reaches back where they do not come out even."""
    n, k = w.shape
    size = min(n, max(8, _BLOCK // k))
    w, x = lax.optimization_barrier((w, x))
    if size == n:
        return _whole(w, x)

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        at = jnp.minimum(i * size, n - size)
        rows = jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, at, size), w)
        return lax.dynamic_update_slice_in_dim(out, _whole(rows, x), at, 0)

    return lax.fori_loop(0, -(-n // size), block, jnp.zeros((n, x.shape[1]), x.dtype))
