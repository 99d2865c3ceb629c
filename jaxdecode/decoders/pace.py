"""How many tokens a row drafts: from what became of its own drafts so far, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

__all__ = ["Cost", "Pace", "start", "update", "wanted"]

FORGET = 0.5  # weight that the past keeps at every draft: what counts is the last few
PAUSE, LONGEST_PAUSE = 16, 512  # tokens until a row that stopped tries again; twice as many after each vain try


class Cost(NamedTuple):
    """In steps of plain decoding: share of drafted tokens that must be right for drafts to pay; cost of one more."""

    least: float
    each: float


class Pace(NamedTuple):
    """Drafted tokens that were right and that were wrong, old ones counting less; when to try again; all [B]."""

    right: jax.Array
    wrong: jax.Array
    retry: jax.Array
    pause: jax.Array


def start(length: jax.Array, dtype: DTypeLike) -> Pace:
    """Of rows about which nothing is known: two of three drafted tokens right."""
    one = jnp.ones(length.shape, dtype)
    return Pace(one, one / 2, jnp.zeros_like(length), jnp.full_like(length, PAUSE))


def wanted(pace: Pace, length: jax.Array, draft_length: int, cost: Cost) -> jax.Array:
    """Tokens to draft, [B]: 0 where drafts do not pay, unless it is time for another try.

    With a share ``a`` of tokens right, the k-th of a draft counts with probability a^k: worth it while that is above
    its cost.
    """
    share = pace.right / (pace.right + pace.wrong)
    most = jnp.log(jnp.asarray(cost.each, share.dtype)) / jnp.log(share)
    count = jnp.floor(jnp.clip(jnp.where(jnp.isnan(most), draft_length, most), 1, draft_length)).astype(jnp.int32)
    return jnp.where((share >= cost.least) | (length >= pace.retry), count, 0)


def update(pace: Pace, length: jax.Array, drafted: jax.Array, accepted: jax.Array, cost: Cost) -> Pace:
    """After ``accepted[B]`` of ``drafted[B]`` tokens were right and the row has ``length[B]``; 0 drafted: unchanged."""
    right = FORGET * pace.right + accepted.astype(pace.right.dtype)
    wrong = FORGET * pace.wrong + (accepted < drafted).astype(pace.wrong.dtype)
    pays = right / (right + wrong) >= cost.least
    new = Pace(
        right,
        wrong,
        jnp.where(pays, 0, length + pace.pause),
        jnp.where(pays, PAUSE, jnp.minimum(2 * pace.pause, LONGEST_PAUSE)),
    )
    return Pace(*(jnp.where(drafted > 0, x, old) for x, old in zip(new, pace, strict=True)))
