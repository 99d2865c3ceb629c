"""Models that take one token at a time and keep a state: recurrent ones, and modules with a cache of their own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Model, Params

__all__ = ["StateCache", "recurrent", "stepwise"]

Step = Callable[[Params, Any, jax.Array], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateCache:
    """What such a model remembers: ``state``, whose leaves have the row first, after ``length[B]`` tokens.

    capacity: the most tokens that a row may take.
    """

    state: Any
    length: jax.Array
    capacity: int = dataclasses.field(metadata={"static": True})


@functools.lru_cache(maxsize=256)
def recurrent(step: Step, init_state: Callable[[Params, int], Any], *, context: int | None = None) -> Model:
    """The model of a recurrence ``step(params, state, tokens[B]) -> (logits[B,V], state)``: RNNs, state-space models.

    ``init_state(params, batch_size)`` is the state before the first token; its leaves have the row first. Several
    tokens go through ``lax.scan``; rows that have fewer keep their state. A state cannot be cut, so what was drafted
    and refused is undone by reading again from the state before. context: the most tokens a row may have (None: any
    number). Both functions are compared by identity. ValueError if ``step`` changes shapes or types of the state.

    >>> def step(params, state, tokens):  # counts the tokens so far; the next one is likely their number
    ...     return jax.nn.one_hot(state, 3), state + 1
    >>> model = recurrent(step, lambda params, batch_size: jnp.zeros((batch_size,), jnp.int32))
    >>> logits, cache = model.apply((), jnp.array([[1, 2], [0, 1]]), model.init_cache((), 2, 8))
    >>> logits[:, -1].tolist(), cache.state.tolist()
    ([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]], [2, 2])
    """
    return stepwise(step, lambda params, batch_size, max_len: init_state(params, batch_size), context, "recurrent")


def stepwise(step: Step, init: Callable[[Params, int, int], Any], context: int | None, what: str) -> Model:
    """``recurrent``, where ``init(params, batch_size, max_len)`` may give the state a size; ``what`` is in errors."""

    def init_cache(params: Params, batch_size: int, max_len: int) -> StateCache:
        fits = context is None or max_len <= context
        checks.require(fits, "max_len", f"at most the context of {context} tokens", max_len)
        state = jax.tree.map(jnp.asarray, init(params, batch_size, max_len))
        for leaf in jax.tree.leaves(state):
            first = leaf.shape[:1] == (batch_size,)
            checks.require(first, f"{what}: state", f"leaves of {batch_size} rows, [B, ...]", checks.described(leaf))
        return StateCache(state, jnp.zeros((batch_size,), jnp.int32), max_len)

    def apply(
        params: Params,
        tokens: jax.Array,
        cache: StateCache,
        *,
        lengths: jax.Array | None = None,
        logits_at: jax.Array | None = None,
    ) -> tuple[jax.Array, StateCache]:
        batch, size = tokens.shape
        tokens = tokens.astype(jnp.int32)
        spec = _check(step, params, cache.state, tokens[:, 0], what)
        wide = np.promote_types(spec.dtype, np.float32)
        lengths = jnp.full((batch,), size, jnp.int32) if lengths is None else lengths
        taken = jnp.minimum(lengths, cache.capacity - cache.length)
        wanted = logits_at is None or logits_at.shape[1] > 0

        def one(state: Any, part: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
            token, j = part
            logits, new = step(params, state, token)
            return _where(j < taken, new, state), logits.astype(wide) if wanted else None

        if size == 1:
            state, logits = one(cache.state, (tokens[:, 0], jnp.zeros((), jnp.int32)))
            logits = logits[:, None] if wanted else None
        else:
            parts = tokens.T, jnp.arange(size, dtype=jnp.int32)
            state, logits = jax.lax.scan(one, cache.state, parts)
            logits = logits.swapaxes(0, 1) if wanted else None
        new = StateCache(state, cache.length + taken, cache.capacity)
        if logits is None:
            return jnp.zeros((batch, 0, spec.shape[1]), wide), new
        if logits_at is not None:
            logits = jnp.take_along_axis(logits, logits_at[:, :, None], axis=1)
        return logits, new

    return Model(init_cache, apply)


def _where(rows: jax.Array, new: Any, old: Any) -> Any:
    """``new`` in the rows that say so, else ``old``."""
    return jax.tree.map(lambda x, y: jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, y), new, old)


def _check(step: Step, params: Params, state: Any, tokens: jax.Array, what: str) -> jax.ShapeDtypeStruct:
    """The shape of the logits of a step. ValueError, before any compute, if it is none that can be repeated."""
    out = jax.eval_shape(step, params, state, tokens)
    pair = isinstance(out, tuple) and len(out) == 2
    checks.require(pair, what, "a step that returns (logits, state)", type(out).__name__)
    logits, after = out
    ok = isinstance(logits, jax.ShapeDtypeStruct) and len(logits.shape) == 2 and logits.shape[0] == len(tokens)
    ok = ok and jnp.issubdtype(logits.dtype, jnp.floating)
    checks.require(ok, f"{what}: step", f"floating logits [{len(tokens)}, V]", checks.described(logits))
    given: Any = jax.tree.structure(state)
    made: Any = jax.tree.structure(after)
    checks.require(given == made, f"{what}: step", f"a state like {given}", made)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        like = x.shape == y.shape and x.dtype == y.dtype
        checks.require(like, f"{what}: step", f"a state of {checks.described(x)}", checks.described(y))
    return logits
