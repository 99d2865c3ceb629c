"""Toy models whose every answer is known in closed form, a check of any model, and a counter of compilations."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Model, Params

__all__ = [
    "CompilationCount",
    "check_model",
    "count_compilations",
    "markov_model",
    "second_order_model",
    "sequence_law",
]


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


def check_model(model: Model, params: Params, *, length: int = 8, tolerance: float = 1e-3) -> None:
    """Whether ``model`` keeps to its contract, on random texts of ``length`` tokens: ValueError that says what differs.

    That logits depend on no later token and on no other row; that one token at a time, unequal rows, and rows that take
    no token give the logits of one call; that ``logits_at`` picks among them. tolerance: of logits, relative to the
    largest. It runs small programs; nothing of it is needed to decode.

    >>> check_model(markov_model(), jnp.eye(3))
    """
    checks.require(type(length) is int and length >= 4, "length", "a whole number >= 4", length)
    apply = jax.jit(model.apply)
    empty = model.init_cache(params, 2, length)
    spec = jax.eval_shape(model.apply, params, jnp.zeros((2, length), jnp.int32), empty)[0]
    ok = len(spec.shape) == 3 and spec.shape[:2] == (2, length) and jnp.issubdtype(spec.dtype, jnp.floating)
    checks.require(ok, "model.apply", f"floating logits [2, {length}, V]", checks.described(spec))
    text = np.random.default_rng(0).integers(0, spec.shape[2], (2, length)).astype(np.int32)
    logits, half = np.asarray(apply(params, text, empty)[0]), length // 2
    scale = max(1.0, float(np.max(np.abs(np.where(np.isfinite(logits), logits, 0)))))

    def same(what: str, got: Any, expected: np.ndarray) -> None:
        close = np.isclose(got, expected, rtol=0, atol=tolerance * scale, equal_nan=True)
        if not close.all():
            row, place = (int(i) for i in np.argwhere(~close)[0][:2])
            worst = float(np.max(np.abs(np.asarray(got, np.float64) - expected)))
            raise ValueError(
                f"model: expected {what}, got logits that differ by {worst:.2g} (row {row}, place {place})"
            )

    other = text.copy()
    other[:, half:] = (other[:, half:] + 1) % spec.shape[2]
    later = np.asarray(apply(params, other, empty)[0])
    same("logits that depend on no later token (is a causal mask missing?)", later[:, :half], logits[:, :half])
    other = np.stack([text[0], (text[1] + 1) % spec.shape[2]])
    same("logits that depend on no other row", np.asarray(apply(params, other, empty)[0])[:1], logits[:1])
    cache = empty
    single: list[Any] = []
    for i in range(length):
        one, cache = apply(params, text[:, i : i + 1], cache)
        single.append(one)
    same("one token at a time to give the logits of one call", np.concatenate(single, axis=1), logits)
    _check_rows(apply, params, empty, text, logits, same)


def _check_rows(apply: Any, params: Params, empty: Any, text: np.ndarray, logits: np.ndarray, same: Any) -> None:
    """Rows of unequal lengths in three calls, one of which the longer row sits out; and ``logits_at``."""
    length = text.shape[1]
    few, last = length // 2 - 1, length - 1

    def call(cache: Any, starts: list[int], lengths: list[int]) -> tuple[np.ndarray, Any]:
        rows = np.stack([np.roll(row, -start) for row, start in zip(text, starts, strict=True)])
        got, cache = apply(params, rows, cache, lengths=np.array(lengths, np.int32))
        return np.asarray(got), cache

    got, cache = call(empty, [0, 0], [few, last])
    same("rows that take fewer tokens to have the logits of one call", got[:1, :few], logits[:1, :few])
    same("rows beside shorter ones to have the logits of one call", got[1:, :last], logits[1:, :last])
    got, cache = call(cache, [few, 0], [1, 0])
    same("rows of unequal lengths to go on from their own", got[:1, :1], logits[:1, few : few + 1])
    got, _ = call(cache, [few + 1, last], [last - few, 1])
    same("a row to go on after a call", got[:1, : last - few], logits[:1, few + 1 :])
    same("a row to go on after a call that it sat out", got[1:, :1], logits[1:, last:])
    at = np.array([[last], [0]], np.int32)
    picked, _ = apply(params, text, empty, logits_at=at)
    same("logits_at to pick among the logits", picked, np.take_along_axis(logits, at[:, :, None], axis=1))
    nothing = jax.eval_shape(apply, params, text, empty, logits_at=at[:, :0])[0]
    checks.require(nothing.shape == (2, 0, logits.shape[2]), "model.apply", "no logits for K = 0", nothing.shape)


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
