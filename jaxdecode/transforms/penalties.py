"""Penalties: scores that depend on the row's history, and a bias that does not. All act before the temperature."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Shared
from jaxdecode.transforms import id_lists, recurrence
from jaxdecode.transforms.core import Context, LogitsTransform, State, per_row

__all__ = ["dry", "frequency_penalty", "logit_bias", "presence_penalty", "repetition_penalty"]

TINY = float(np.finfo(np.float32).tiny)
LONGEST = 50  # tokens of a repeated stretch that ``dry`` counts, as its authors do: bounds the passes and the power


def _number(value: jax.Array, logits: jax.Array) -> jax.Array:
    return per_row(value, logits.shape[0], logits.dtype)[:, None]


def _output_counts(logits: jax.Array, ctx: Context) -> jax.Array:
    return recurrence.occurrences(ctx.tokens, ctx.start, ctx.length, logits.shape[1])


def _repetition(params: tuple[Any, Any], logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    r, output_only = params
    first = jnp.where(per_row(output_only, logits.shape[0], jnp.int32) == 1, ctx.start, 0)
    seen = recurrence.occurrences(ctx.tokens, first, ctx.length, logits.shape[1]) > 0
    r = _number(r, logits)
    return jnp.where(seen | jnp.isnan(r), jnp.where(logits < 0, logits * r, logits / r), logits)


def repetition_penalty(r: Any, *, output_only: bool = False) -> LogitsTransform:
    """Logits of the ids present in prompt and output: ``z * r`` if negative, else ``z / r``. 1 is off.

    output_only: only ids of the output count. Keskar et al. 2019 (1909.05858). ValueError unless r is finite and > 0.

    >>> repetition_penalty(2.0)(jnp.array([[1.0, -1.0, 3.0]]), jnp.array([[0, 1]])).tolist()
    [[0.5, -2.0, 3.0]]
    """
    r = checks.real(r, lambda x: (x >= TINY) & (x < np.inf), "repetition_penalty", "a finite number > 0")
    scope = np.full(np.shape(r), output_only, np.int32)  # a number of the row too
    return LogitsTransform((r, scope), "score", _repetition)


def _presence(a: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    return logits - jnp.where(_output_counts(logits, ctx) > 0, _number(a, logits), 0)


def presence_penalty(a: Any) -> LogitsTransform:
    """Subtract ``a`` from the logits of all ids in the output; negative favours them. 0 is off.

    >>> presence_penalty(1.0)(jnp.array([[1.0, 0.0]]), jnp.array([[0, 0]])).tolist()
    [[0.0, 0.0]]
    """
    a = checks.real(a, lambda x: abs(x) < np.inf, "presence_penalty", "a finite number")
    return LogitsTransform(a, "score", _presence)


def _frequency(b: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    return logits - _number(b, logits) * _output_counts(logits, ctx).astype(logits.dtype)


def frequency_penalty(b: Any) -> LogitsTransform:
    """Subtract ``b`` times their count from the logits of all ids in the output; negative favours them. 0 is off.

    >>> frequency_penalty(1.0)(jnp.array([[1.0, 0.0]]), jnp.array([[0, 0]])).tolist()
    [[-1.0, 0.0]]
    """
    b = checks.real(b, lambda x: abs(x) < np.inf, "frequency_penalty", "a finite number")
    return LogitsTransform(b, "score", _frequency)


def _dry(params: tuple[Any, ...], logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    multiplier, base, allowed, breakers = params
    rows = logits.shape[0]
    multiplier, base = _number(multiplier, logits), _number(base, logits)
    allowed = per_row(allowed, rows, jnp.int32)[:, None]
    table = id_lists.broadcast(breakers)
    known = jnp.clip(ctx.tokens, 0, table.shape[1] - 1)
    breaker = jnp.take_along_axis(jnp.broadcast_to(table, (rows, table.shape[1])), known, axis=1)
    breaker &= known == ctx.tokens
    most = jnp.where(multiplier[:, 0] == 0, 0, LONGEST).astype(jnp.int32)
    length = recurrence.repeats(ctx.tokens, ctx.length, most, breaker)
    above = (length - allowed).astype(logits.dtype)
    grown = jnp.minimum(base**above, jnp.finfo(logits.dtype).max)  # 0 * inf would be NaN
    penalty = jnp.where((above >= 0) & ~breaker, multiplier * grown, 0)
    where = jnp.arange(rows)[:, None], ctx.tokens
    penalty = jnp.zeros_like(logits).at[where].max(penalty, mode="drop")
    bad = jnp.isnan(multiplier) | jnp.isnan(base) | (allowed < 1)
    return jnp.where(bad, jnp.nan, logits - penalty)


def dry(multiplier: Any, base: Any, allowed_length: Any, breakers: Any = (), vocab_size: int = 1) -> LogitsTransform:
    """Penalise ids that would repeat a stretch of the text: subtract ``multiplier * base ** (n - allowed_length)``.

    n (at most 50) is the length of the longest end of the text that stood before the id already; below
    ``allowed_length`` nothing happens. breakers: ids that end a stretch and are never penalised themselves, for all
    rows or a list per row; they need ``vocab_size``. multiplier 0 is off. "Don't repeat yourself",
    text-generation-webui pull request 5677. ValueError unless multiplier >= 0, base >= 1, allowed_length >= 1.

    >>> dry(1.0, 2.0, 1)(jnp.zeros((1, 4)), jnp.array([[1, 2, 3, 1, 2]])).tolist()
    [[0.0, 0.0, 0.0, -2.0]]
    """
    multiplier = checks.real(multiplier, lambda x: (x >= 0) & (x < np.inf), "dry multiplier", "a finite number >= 0")
    base = checks.real(base, lambda x: (x >= 1) & (x < np.inf), "dry base", "a finite number >= 1")
    allowed = checks.whole(allowed_length, lambda n: n >= 1, "dry allowed_length", "a whole number >= 1")
    table = id_lists.id_table(breakers, vocab_size, "dry breakers", none=False)
    return LogitsTransform((multiplier, base, allowed, table), "score", _dry)


def _bias(table: Any, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    return logits + id_lists.broadcast(table).astype(logits.dtype)


def logit_bias(bias: Any, vocab_size: int) -> LogitsTransform:
    """Add numbers to logits: {id: number} or pairs (id, number) for all rows, a list of such per row, or an array.

    An array [V], or [B,V], may be traced. ValueError for ids outside [0, V) or numbers that are not finite.

    >>> logit_bias({1: 2.0}, 3)(jnp.zeros((2, 3))).tolist()
    [[0.0, 2.0, 0.0], [0.0, 2.0, 0.0]]
    """
    expected = "{id: finite number}, pairs of them, a list of such per row, or an array [V] or [B,V]"
    if isinstance(bias, (jax.Array, np.ndarray)):
        return LogitsTransform(_bias_array(bias, vocab_size, expected), "score", _bias)
    rows, each = id_lists.pair_rows(bias, "logit_bias", expected)
    tables = []
    for ids, values in rows:
        table = np.zeros(vocab_size, np.float32)
        if len(ids):
            checks.token_ids(ids, vocab_size, "logit_bias")
            table[ids] = checks.real(values, lambda x: abs(x) < np.inf, "logit_bias", "finite numbers")
        tables.append(table)
    return LogitsTransform(id_lists.per_row_or_shared(tables, each), "score", _bias)


def _bias_array(bias: Any, vocab_size: int, expected: str) -> Any:
    checks.require(bias.ndim in (1, 2) and bias.shape[-1] == vocab_size, "logit_bias", expected, f"shape {bias.shape}")
    flat = checks.real(bias.reshape(-1), lambda x: abs(x) < np.inf, "logit_bias", "finite numbers")
    table = flat.reshape(bias.shape)
    return table if table.ndim == 2 else Shared(table)
