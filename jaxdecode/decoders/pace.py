"""How many tokens a row drafts: from what became of its own drafts so far, and nothing else."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

__all__ = ["Pace", "start", "update", "wanted"]

JUDGE = 2.2  # a pass over a draft in plain steps: what it is on a CPU for one row, which is more than elsewhere
FORGET = 0.5  # weight that the past keeps at every draft: what counts is the last few
PAUSE, LONGEST_PAUSE = 32, 512  # tokens until a row that stopped tries again; twice as many after each vain try
TRY = 4  # tokens of such a try: fewer could not show that more are right


class Pace(NamedTuple):
    """Drafted tokens that were right and drafts that went wrong, old ones counting less; all [B].

    retry: the length from which a row where drafts do not pay tries again, 0 where they pay; pause: the tokens until
    the try after that.
    """

    right: jax.Array
    wrong: jax.Array
    retry: jax.Array
    pause: jax.Array


def start(length: jax.Array, dtype: DTypeLike) -> Pace:
    """Of rows about which nothing is known: half of the drafted tokens right, and a try at once."""
    one = jnp.ones(length.shape, dtype)
    return Pace(one, one, jnp.ones_like(length), jnp.full_like(length, PAUSE))


def _best(right: jax.Array, wrong: jax.Array, draft_length: int, cost: float) -> jax.Array:
    """The number of drafts that gives the most tokens for the time, [B]; 0 where a plain step does.

    With a share a of tokens right, k drafts give 1 + a + ... + a^k tokens for JUDGE + k ``cost`` plain steps.
    """
    share = right / (right + wrong)
    steps = jnp.arange(draft_length + 1, dtype=jnp.int32)
    tokens = jnp.cumsum(share[:, None] ** steps[None, :].astype(share.dtype), axis=1)
    time = jnp.where(steps == 0, 1, JUDGE + cost * steps.astype(share.dtype))
    return jnp.argmax(tokens / time[None, :], axis=1).astype(jnp.int32)


def wanted(pace: Pace, length: jax.Array, draft_length: int, cost: float) -> jax.Array:
    """Tokens to draft, [B]; ``cost``: of drafting one, in plain steps. Where it does not pay, a try now and then."""
    best = _best(pace.right, pace.wrong, draft_length, cost)
    attempt = min(TRY, draft_length) if cost else draft_length
    return jnp.where(pace.retry == 0, best, jnp.where(length >= pace.retry, attempt, 0))


def update(
    pace: Pace, length: jax.Array, drafted: jax.Array, accepted: jax.Array, draft_length: int, cost: float
) -> Pace:
    """After ``accepted[B]`` of ``drafted[B]`` tokens were right and the row has ``length[B]``; 0 drafted: unchanged."""
    right = FORGET * pace.right + accepted.astype(pace.right.dtype)
    wrong = FORGET * pace.wrong + (accepted < drafted).astype(pace.wrong.dtype)
    pays = _best(right, wrong, draft_length, cost) > 0
    new = Pace(
        right,
        wrong,
        jnp.where(pays, 0, length + pace.pause),
        jnp.where(pays, PAUSE, jnp.minimum(2 * pace.pause, LONGEST_PAUSE)),
    )
    return Pace(*(jnp.where(drafted > 0, x, old) for x, old in zip(new, pace, strict=True)))
