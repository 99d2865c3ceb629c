"""Products with weights: the only code that multiplies by a weight.

Activations are feature-major, [features, rows]: on XLA:CPU ``W[N,K] @ x[K,R]`` is up to 4x faster than the other ways
to write the same product, and it suits every other platform.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["embed", "matmul"]


def matmul(w: jax.Array, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """``W[N,K] @ x[K,R]`` -> [N,R], summed in float32 or wider, in ``out_dtype`` (default: that of x)."""
    wide = np.promote_types(x.dtype, np.float32)
    out = lax.dot_general(w, x, (((1,), (0,)), ((), ())), preferred_element_type=wide)
    return out.astype(out_dtype or x.dtype)


def embed(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Columns ``table[ids[R]]`` as feature-major activations [D,R]."""
    return jnp.take(table, ids, axis=0, mode="clip").T
