"""Products with weights: the only code that multiplies by a weight.

Activations are feature-major, [features, rows]. A float weight is ``W[N,K] @ x[K,R]`` on every platform: on XLA:CPU
weights on the left are up to 4x faster than the other ways to write the product. ``jaxdecode.linear.int8`` and
``jaxdecode.linear.packed`` tell what the quantized types do. Over a mesh XLA cuts these products along the sides of W;
loops over blocks of its rows it cannot cut, so those run on every device by itself (``packed.product``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode import observed
from jaxdecode.linear import int8, packed
from jaxdecode.meshes import DATA, TENSOR, size_of
from jaxdecode.observed import Observed
from jaxdecode.quant import QRows, QTensor, dequantize, over_rows

__all__ = ["embed", "matmul", "split"]

_CONTRACT = (((1,), (0,)), ((), ()))


def matmul(w: jax.Array | QTensor | QRows | Observed, x: jax.Array, out_dtype: np.dtype | None = None) -> jax.Array:
    """``W[N,K] @ x[K,R]`` -> [N,R], summed in float32 or wider, in ``out_dtype`` (default: that of x)."""
    if isinstance(w, Observed):
        return observed.product(functools.partial(matmul, out_dtype=out_dtype), w.weight, w.moment, x)
    wide = np.promote_types(x.dtype, np.float32)
    if isinstance(w, QRows):
        return jnp.concatenate([matmul(part, x, out_dtype) for part in w.parts])
    if isinstance(w, QTensor) and w.form is None:
        out = int8.product(w, x.astype(wide))
    elif isinstance(w, QTensor) or w.dtype != x.dtype:
        out = packed.product(w, x.astype(wide))
    else:
        out = lax.dot_general(w, x, _CONTRACT, preferred_element_type=wide)
    return out.astype(out_dtype or x.dtype)


def split(w: jax.Array | QTensor | QRows | Observed, x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """``matmul`` in pieces of so many rows, [size,R] each; weights of these sizes below each other stay apart."""
    if isinstance(w, QRows) and [part.shape[0] for part in w.parts] == list(sizes):
        return [matmul(part, x) for part in w.parts]
    return jnp.split(matmul(w, x), np.cumsum(sizes)[:-1])


def embed(table: jax.Array | QTensor | QRows | Observed, ids: jax.Array) -> jax.Array:
    """Columns ``table[ids[R]]`` as feature-major activations [D,R]."""
    if isinstance(table, Observed):
        table = table.weight
    if isinstance(table, QRows):
        return _embed_parts(table, ids)
    values = dequantize(over_rows(lambda axis, x: jnp.take(x, ids, axis=axis, mode="clip"), table))
    return _feature_major(values)


def _feature_major(x: jax.Array) -> jax.Array:
    """x[R,D] as [D,R], in memory too.

    Over a mesh XLA would turn the axes alone, and so of all activations that come of it: an order for which it has no
    product of bytes, only one that first makes wider copies of the weights. What is put together lies as it says.
    """
    x = x.T
    return jnp.concatenate([x[:1], x[1:]]) if size_of(TENSOR) * size_of(DATA) > 1 else x


def _embed_parts(table: QRows, ids: jax.Array) -> jax.Array:
    first = table.parts[0].shape[0]
    out = embed(table.parts[0], ids).astype(table.dtype)
    for part in table.parts[1:]:
        out = jnp.where(ids >= first, embed(part, ids - first).astype(table.dtype), out)
        first += part.shape[0]
    return out
