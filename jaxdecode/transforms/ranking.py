"""The first ids in order, without a sort of the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxdecode.transforms.search import BLOCK, blocks_of

__all__ = ["largest"]


def largest(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The ``k`` largest of values[R,V] and their ids [R,k]: value descending, equal values by ascending id.

    Places beyond V hold -inf and id 0. One pass finds the largest of every block of ids: only the k first blocks, in
    the same order, can hold one of the k first ids, since each block before another holds an id that comes before it.
    """
    rows, size = values.shape
    missing = max(k - size, 0)
    if missing:
        top, ids = lax.top_k(values, size)
        return (
            jnp.pad(top, ((0, 0), (0, missing)), constant_values=-jnp.inf),
            jnp.pad(ids, ((0, 0), (0, missing))),
        )
    if -(-size // BLOCK) <= 2 * k:
        return lax.top_k(values, k)
    grid = blocks_of(values, -jnp.inf)
    first = jnp.sort(lax.top_k(jnp.max(grid, axis=2), k)[1], axis=1)  # in the order of ids, for the ties
    found = jnp.take_along_axis(grid, first[:, :, None], axis=1).reshape(rows, k * BLOCK)
    top, at = lax.top_k(found, k)
    ids = jnp.take_along_axis(first, at // BLOCK, axis=1) * BLOCK + at % BLOCK
    return top, jnp.minimum(ids, size - 1)
