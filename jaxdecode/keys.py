"""Keys: one per row, one named stream per use, so that a row's numbers depend on nothing but the row.

The number used at position t (counted from the row's own first real token) for a purpose is drawn from
``fold_in(fold_in(row_key, t), stream)``. Two rows never share noise, and a row's noise does not depend on its place in
the batch, its padding or its neighbours.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdecode import checks

__all__ = ["Stream", "check_key", "row_key", "row_keys", "uniform"]


class Stream(enum.IntEnum):
    """Named noise streams of one position; users' transforms take 16 and up."""

    DRAW = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    XTC = 4
    GUMBEL = 5


def check_key(key: jax.Array) -> jax.Array:
    """A typed threefry key (array); legacy uint32 keys are wrapped.

    Raises ValueError for other generators: under ``vmap`` "rbg" keys draw one block for the whole batch, so a row's
    numbers would depend on its neighbours (documented in ``jax.random``).
    """
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise ValueError(f"key: expected a jax.random.key, or an array of them, got {_kind(key)}")
    array = key
    if not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        if array.dtype != jnp.uint32 or array.ndim < 1 or array.shape[-1] != 2:
            raise ValueError(f"key: expected a jax.random.key, or an array of them, got {array.dtype}{array.shape}")
        array = jnp.asarray(array)
        return jax.random.wrap_key_data(array, impl="threefry2x32")
    impl = str(jax.random.key_impl(array))
    if "threefry" not in impl and "fry" not in impl:
        raise ValueError(
            f"key: expected a threefry2x32 key (its numbers do not depend on the batch), got impl {impl}; "
            "use jax.random.key(seed, impl='threefry2x32')"
        )
    return array


def _kind(key: object) -> str:
    return f"{type(key).__name__} {checks.shorten(key)}"


def row_keys(key: jax.Array, batch_size: int, row_ids: Sequence[int | str] | jax.Array | None = None) -> jax.Array:
    """Keys [B]: ``key`` itself if it is an array of B keys, else ``fold_in(key, row id)``.

    ``row_ids``: integers in [0, 2^32) or strings (the first 8 bytes of their SHA-256, folded in as two words); default
    0 .. B-1. Raises ValueError for wrong counts, ranges, or ids beside per-row keys.
    """
    key = check_key(key)
    if key.ndim == 1:
        if row_ids is not None:
            raise ValueError("row_ids: expected none beside one key per row, got both")
        if key.shape[0] != batch_size:
            raise ValueError(f"key: expected one key or {batch_size} of them, got {key.shape[0]}")
        return key
    if key.ndim != 0:
        raise ValueError(f"key: expected one key or an array [B] of them, got shape {key.shape}")
    if row_ids is None:
        return _fold_all(key, np.arange(batch_size, dtype=np.uint32))
    count = np.shape(row_ids)
    if count != (batch_size,):
        checks.require(len(count) == 1, "row_ids", f"{batch_size} ids", row_ids)
        raise ValueError(f"row_ids: expected {batch_size}, got {len(row_ids)}")
    if isinstance(row_ids, jax.core.Tracer):
        return _fold_all(key, row_ids)
    kinds = {isinstance(i, str) for i in row_ids}
    if kinds == {True, False}:
        raise ValueError("row_ids: expected all integers or all strings, got both")
    if kinds == {True}:
        words = np.array([_words(str(i)) for i in row_ids])
        return jax.vmap(jax.random.fold_in)(_fold_all(key, words[:, 0]), words[:, 1])
    ids = np.asarray(row_ids)
    checks.require(
        np.issubdtype(ids.dtype, np.integer) and bool(np.all((ids >= 0) & (ids < 2**32))),
        "row_ids",
        "integers in [0, 2^32)",
        ids,
    )
    return _fold_all(key, ids.astype(np.uint32))


def row_key(key: jax.Array, row_id: str) -> jax.Array:
    """The key of one row: that of ``row_keys(key, 1, [row_id])``, by one small compiled program."""
    return _fold_words(check_key(key), _words(row_id))


def _words(row_id: str) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(row_id.encode()).digest()[:8], ">u4").astype(np.uint32)


@jax.jit
def _fold_words(key: jax.Array, words: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])


def _fold_all(key: jax.Array, ids: Any) -> jax.Array:
    return jax.vmap(jax.random.fold_in, (None, 0))(key, ids)


def uniform(keys: jax.Array, position: jax.Array, stream: int, dtype: DTypeLike) -> jax.Array:
    """One uniform number in [0, 1) per row, [B]: ``keys[B]``, ``position[B]`` the index of the token being drawn.

    float32 numbers lie on a grid of 2^-23.
    """

    def one(key: jax.Array, t: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, t), stream), (), dtype)

    return jax.vmap(one)(keys, position)
