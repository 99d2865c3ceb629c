"""Toy models whose every answer is known in closed form, and a counter of compilations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode.base import Model, Params

__all__ = ["CompilationCount", "count_compilations", "markov_model", "second_order_model", "sequence_law"]


def _last_token_model(context: int, row: Any) -> Model:
    """A model whose cache is each row's last two tokens and length, and whose logits are ``row(params, tokens)``."""

    def init_cache(params: Params, batch_size: int, max_len: int) -> dict[str, jax.Array]:
        if max_len > context:
            raise ValueError(f"max_len: expected at most the context of {context} tokens, got {max_len}")
        return {"last": jnp.zeros((batch_size, 2), jnp.int32), "length": jnp.zeros((batch_size,), jnp.int32)}

    def apply(
        params: Params,
        tokens: jax.Array,
        cache: dict[str, jax.Array],
        *,
        lengths: jax.Array | None = None,
        logits_at: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        batch, size = tokens.shape
        lengths = jnp.full((batch,), size, jnp.int32) if lengths is None else lengths
        history = jnp.concatenate([cache["last"], tokens], axis=1)
        every = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (batch, size))
        at = every if logits_at is None else logits_at
        previous, last = (jnp.take_along_axis(history, at + i, axis=1) for i in (1, 2))
        known = cache["length"][:, None] + at > 0  # whether a token before this one exists
        logits = row(params, jnp.where(known, previous, last), last)
        end = jnp.stack([lengths, lengths + 1], axis=1)
        return logits, {"last": jnp.take_along_axis(history, end, axis=1), "length": cache["length"] + lengths}

    return Model(init_cache, apply)


@functools.cache
def markov_model(*, context: int = 1 << 20) -> Model:
    """A table model: params = logits [V,V], the next token's law is the row of the last token.

    >>> model = markov_model()
    >>> cache = model.init_cache(jnp.eye(2), 2, 8)
    >>> model.apply(jnp.eye(2), jnp.array([[0, 1], [1, 0]]), cache)[0][:, -1].tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    return _last_token_model(context, lambda params, previous, last: jnp.take(params, last, axis=0))


@functools.cache
def second_order_model(*, context: int = 1 << 20) -> Model:
    """params = logits [V,V,V]: the law depends on the last two tokens (a row's first token counts twice)."""
    return _last_token_model(context, lambda params, previous, last: params[previous, last])


def sequence_law(logits: np.ndarray, start: int, n: int) -> dict[tuple[int, ...], float]:
    """Exact law of all sequences of n tokens after ``start``, float64; ``logits[V,V]``."""
    table = np.asarray(logits, np.float64)
    law = np.exp(table - table.max(1, keepdims=True))
    law /= law.sum(1, keepdims=True)
    out: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n):
        out = {(*s, v): p * law[s[-1] if s else start, v] for s, p in out.items() for v in range(len(law))}
    return out


class CompilationCount:
    """Programs compiled so far; ``int(count)``."""

    def __init__(self) -> None:
        self.value = 0

    def __int__(self) -> int:
        return self.value


@contextlib.contextmanager
def count_compilations() -> Iterator[CompilationCount]:
    """Count the programs XLA compiles inside the block.

    >>> with count_compilations() as count:
    ...     _ = jax.jit(lambda x: x * 3)(jnp.ones(7))
    >>> int(count) >= 1
    True
    """
    count = CompilationCount()

    def listener(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            count.value += 1

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
