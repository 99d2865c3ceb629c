"""What a row's history says: how often each id came, and how far the text before each place repeats its end.

Both scan ``ctx.tokens`` at every step, and the transforms that use them keep no state. A state would be counts [B,V]:
beams would gather it by parent, speculation would keep one for each draft position and continuous batching would
have to insert it, all to save a scatter of T numbers: at B=8, T=2048, V=49152 on two CPU cores about 0.1 ms beside the
masking pass that both need. The tokens already move with their hypothesis.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["mask_ids", "occurrences", "repeats"]

Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def occurrences(tokens: jax.Array, first: jax.Array, last: jax.Array, vocab_size: int) -> jax.Array:
    """How often each id stands at places ``first[B]`` <= i < ``last[B]`` of ``tokens[B,T]``: int32 [B,V]."""
    rows, size = tokens.shape
    places = jnp.arange(size, dtype=jnp.int32)[None]
    inside = (places >= first[:, None]) & (places < last[:, None])
    ids = jnp.where(inside, tokens, vocab_size)
    counts = jnp.zeros((rows, vocab_size), jnp.int32)
    return counts.at[jnp.arange(rows)[:, None], ids].add(1, mode="drop")


def mask_ids(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """``logits[B,V]`` with -inf at ``ids[B,n]``; ids outside [0, V) mask nothing."""
    rows, size = logits.shape
    ids = jnp.where(ids < 0, size, ids)  # a negative index would count from the end
    return logits.at[jnp.arange(rows)[:, None], ids].set(-jnp.inf, mode="drop")


def repeats(tokens: jax.Array, length: jax.Array, most: jax.Array, breaker: jax.Array | None = None) -> jax.Array:
    """How many tokens before each place equal the last ones of the text, at most ``most[B]``: int32 [B,T].

    Only places before ``length[B]`` count. A match does not reach over an end token that ``breaker[B,T]`` marks. As
    many passes over [B,T] as the longest match has tokens, so nearly always one or two.
    """
    rows, size = tokens.shape
    if size == 0:
        return jnp.zeros((rows, 0), jnp.int32)
    before = jnp.full((rows, 1), -1, tokens.dtype)
    start = jnp.arange(size, dtype=jnp.int32)[None] < length[:, None]

    def turn(carry: Carry) -> Carry:
        k, shifted, alive, found = carry
        place = jnp.maximum(length - 1 - k, 0)[:, None]
        goes_on = (k < length) & (k < most)
        if breaker is not None:
            goes_on &= ~jnp.take_along_axis(breaker, place, axis=1)[:, 0]
        alive &= (shifted == jnp.take_along_axis(tokens, place, axis=1)) & goes_on[:, None]
        shifted = jnp.concatenate([before, shifted[:, :-1]], axis=1)
        return k + 1, shifted, alive, found + alive.astype(jnp.int32)

    shifted = jnp.concatenate([before, tokens[:, :-1]], axis=1)
    first = (jnp.zeros((), jnp.int32), shifted, start, jnp.zeros((rows, size), jnp.int32))
    return lax.while_loop(lambda c: jnp.any(c[2]) & (c[0] < jnp.max(most)), turn, first)[3]
