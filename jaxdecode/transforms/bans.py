"""Masks before the temperature: ids, words, repeated n-grams, the minimum length, forced tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Shared
from jaxdecode.transforms import id_lists, recurrence
from jaxdecode.transforms.core import Context, LogitsTransform, State, per_row

__all__ = ["allowed_ids", "bad_words", "banned_ids", "forced", "min_new_tokens", "no_repeat_ngram"]

NOWHERE = -(2**31)  # a place that no token has


def _keep(table: Any, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    return jnp.where(id_lists.broadcast(table), logits, -jnp.inf)


def allowed_ids(ids: Any, vocab_size: int) -> LogitsTransform:
    """Mask all other ids. ``ids``: one list for all rows, or one per row; None in such a list allows all.

    >>> allowed_ids([[0, 2], None], 3)(jnp.zeros((2, 3))).tolist()
    [[0.0, -inf, 0.0], [0.0, 0.0, 0.0]]
    """
    return LogitsTransform(id_lists.id_table(ids, vocab_size, "allowed_ids", none=True), "mask", _keep)


def banned_ids(ids: Any, vocab_size: int) -> LogitsTransform:
    """Mask these ids. ``ids``: one list for all rows, or one per row.

    >>> banned_ids([1], 3)(jnp.zeros((2, 3))).tolist()
    [[0.0, -inf, 0.0], [0.0, -inf, 0.0]]
    """
    table = id_lists.id_table(ids, vocab_size, "banned_ids", none=False)
    table = Shared(~table.value) if isinstance(table, Shared) else ~table
    return LogitsTransform(table, "mask", _keep)


def _bad_words(words: Any, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    words = id_lists.broadcast(words)
    prefix, last = words[..., :-1], words[..., -1]
    back = prefix.shape[2]
    match = jnp.broadcast_to(last >= 0, (logits.shape[0], last.shape[1]))
    if back and ctx.tokens.shape[1]:
        place = ctx.length[:, None] - back + jnp.arange(back, dtype=jnp.int32)[None]
        recent = jnp.where(place >= 0, jnp.take_along_axis(ctx.tokens, jnp.maximum(place, 0), axis=1), -2)
        match &= jnp.all((prefix == recent[:, None]) | (prefix == -1), axis=2)
    elif back:
        match &= jnp.all(prefix == -1, axis=2)
    return recurrence.mask_ids(logits, jnp.where(match, last, -1))


def bad_words(words: Any, vocab_size: int) -> LogitsTransform:
    """Mask the last id of each sequence where the text ends in the ids before it; prompt and output count.

    ``words``: sequences of ids for all rows, or a list of them per row. A sequence of one id is a banned id.

    >>> bad_words([[2], [0, 1]], 3)(jnp.zeros((2, 3)), jnp.array([[1, 0], [0, 1]])).tolist()
    [[0.0, -inf, -inf], [0.0, 0.0, -inf]]
    """
    expected = "token sequences, or a list of them per row"
    rows, each = id_lists.sequence_rows(words, vocab_size, "bad_words", expected)
    arrays = id_lists.sequence_array(rows, powers=True)
    return LogitsTransform(id_lists.per_row_or_shared(arrays, each), "mask", _bad_words)


def _no_repeat(n: jax.Array, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    n = per_row(n, logits.shape[0], jnp.int32)
    length = recurrence.repeats(ctx.tokens, ctx.length, jnp.maximum(n, 1) - 1)
    inside = jnp.arange(ctx.tokens.shape[1], dtype=jnp.int32)[None] < ctx.length[:, None]
    hit = inside & (length >= n[:, None] - 1) & (n > 0)[:, None]
    out = recurrence.mask_ids(logits, jnp.where(hit, ctx.tokens, -1))
    return jnp.where((n < 0)[:, None], jnp.nan, out)


def no_repeat_ngram(n: Any) -> LogitsTransform:
    """Mask ids that would complete an n-gram which prompt and output hold already. 0 is off; 1 repeats no id.

    >>> no_repeat_ngram(2)(jnp.zeros((1, 3)), jnp.array([[0, 1, 0]])).tolist()
    [[0.0, -inf, 0.0]]
    """
    n = checks.whole(n, lambda x: x >= 0, "no_repeat_ngram", "a whole number >= 0")
    return LogitsTransform(n, "mask", _no_repeat)


def _min_new(params: tuple[Any, Any], logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    n, eos = params
    n, eos = per_row(n, logits.shape[0], jnp.int32), id_lists.broadcast(eos)
    early = ctx.length - ctx.start < n

    def mask(z: jax.Array) -> jax.Array:
        return recurrence.mask_ids(z, jnp.where(early[:, None], eos, -1))

    out = jax.lax.cond(jnp.any(early), mask, lambda z: z, logits)  # costs nothing once every row is long enough
    return jnp.where((n < 0)[:, None], jnp.nan, out)


def min_new_tokens(n: Any, eos: Any) -> LogitsTransform:
    """Mask all end ids until the row has ``n`` output tokens. ``eos``: ids for all rows, or [B,E] padded with -1.

    >>> min_new_tokens([1, 0], [2])(jnp.zeros((2, 3)), jnp.array([[0], [0]]), start=1).tolist()
    [[0.0, 0.0, -inf], [0.0, 0.0, 0.0]]
    """
    n = checks.whole(n, lambda x: x >= 0, "min_new_tokens", "a whole number >= 0")
    if checks.is_concrete(eos):
        eos = np.asarray(eos, np.int32)
        eos = eos if eos.ndim == 2 else Shared(eos.reshape(-1))
    return LogitsTransform((n, eos), "mask", _min_new)


def _forced(table: Any, logits: jax.Array, ctx: Context, state: State) -> jax.Array:
    table = id_lists.broadcast(table)
    place, token = table[..., 0], table[..., 1]
    place = jnp.where(place < 0, jnp.maximum(place, -ctx.limit[:, None] - 1) + ctx.limit[:, None], place)
    hit = place == (ctx.length - ctx.start)[:, None]
    number = jnp.arange(1, place.shape[1] + 1, dtype=jnp.int32)[None]
    which = jnp.max(jnp.where(hit, number, 0), axis=1, keepdims=True)
    token = jnp.broadcast_to(token, place.shape)
    wanted = jnp.take_along_axis(token, jnp.maximum(which - 1, 0), axis=1)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where((which > 0) & (ids != wanted), -jnp.inf, logits)


def forced(tokens: Any, vocab_size: int) -> LogitsTransform:
    """Mask all but one id at some places of the output: {place: id} or pairs, for all rows, or a list of such per row.

    Place 0 is the first output token, -1 the last that the row's limit allows; of two for one place the later counts.

    >>> forced({0: 2}, 3)(jnp.zeros((2, 3)), jnp.array([[0, 1], [0, 1]]), start=[2, 1]).tolist()
    [[-inf, -inf, 0.0], [0.0, 0.0, 0.0]]
    """
    expected = "{place: id} or pairs of them, or a list of such per row"
    rows, each = id_lists.pair_rows(tokens, "forced", expected)
    n = id_lists.power(max((len(places) for places, _ in rows), default=0))
    tables = []
    for places, ids in rows:
        table = np.full((n, 2), NOWHERE, np.int32)
        if len(places):
            checks.token_ids(ids, vocab_size, "forced")
            checks.require(bool(np.all(abs(places) < 2**30)), "forced", "places of the output", places)
            table[: len(places)] = np.stack([places, ids], axis=1)
        tables.append(table)
    return LogitsTransform(id_lists.per_row_or_shared(tables, each), "mask", _forced)
