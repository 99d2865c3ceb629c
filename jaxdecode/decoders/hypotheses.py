"""What beam search keeps of each row: some hypotheses, best first, with their record."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdecode.base import Finish

__all__ = ["Hypotheses", "append", "best", "empty", "pick", "where"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """W hypotheses of each of R rows; ``rank`` -inf: none there.

    tokens[R,W,T] prompt and output, length[R,W] output tokens, rank[R,W] what they are in the order of, total[R,W] sum
    of their log probabilities; logprob, processed_logprob, margin, set_margin [R,W,N]; finish[R,W].
    """

    tokens: jax.Array
    length: jax.Array
    rank: jax.Array
    total: jax.Array
    logprob: jax.Array
    processed_logprob: jax.Array
    margin: jax.Array
    set_margin: jax.Array
    finish: jax.Array


def empty(tokens: jax.Array, width: int, size: int, dtype: DTypeLike) -> Hypotheses:
    """No hypotheses: room for ``width`` of each row of the prompts ``tokens[R,T]``, with up to ``size`` tokens."""
    rows = (len(tokens), width)
    zeros, infinite = jnp.zeros((*rows, size), dtype), jnp.full((*rows, size), jnp.inf, dtype)
    return Hypotheses(
        tokens=jnp.broadcast_to(tokens[:, None], (*rows, tokens.shape[1])),
        length=jnp.zeros(rows, jnp.int32),
        rank=jnp.full(rows, -jnp.inf, dtype),
        total=jnp.zeros(rows, dtype),
        logprob=zeros,
        processed_logprob=zeros,
        margin=infinite,
        set_margin=infinite,
        finish=jnp.full(rows, Finish.NO_TOKEN, jnp.int32),
    )


def pick(some: Hypotheses, index: jax.Array) -> Hypotheses:
    """Hypotheses ``index[R,K]`` of each row."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1), some
    )


def append(
    some: Hypotheses,
    start: jax.Array,
    token: jax.Array,
    record: dict[str, jax.Array],
    *,
    rank: jax.Array,
    total: jax.Array,
    finish: jax.Array,
) -> Hypotheses:
    """Each with one more ``token[R,W]`` after a prompt of ``start[R]``, and what is to be recorded of it [R,W]."""
    rows = jnp.arange(len(start), dtype=jnp.int32)[:, None]
    beams = jnp.arange(token.shape[1], dtype=jnp.int32)[None]
    at = some.length
    fields = {name: getattr(some, name).at[rows, beams, at].set(x, mode="drop") for name, x in record.items()}
    tokens = some.tokens.at[rows, beams, start[:, None] + at].set(token, mode="drop")
    return Hypotheses(tokens=tokens, length=at + 1, rank=rank, total=total, finish=finish, **fields)


def where(rows: jax.Array, a: Hypotheses, b: Hypotheses) -> Hypotheses:
    """Those of ``a`` in the rows that ``rows[R]`` says, of ``b`` in the others."""
    return jax.tree.map(lambda x, y: jnp.where(rows.reshape((-1,) + (1,) * (x.ndim - 1)), x, y), a, b)


def best(width: int, *some: Hypotheses) -> tuple[Hypotheses, jax.Array]:
    """The ``width`` best of all, and the rank [R] of the best one dropped; of equals those given earlier stay."""
    every: Hypotheses = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *some)
    order = jnp.argsort(-every.rank, axis=1, stable=True)
    rank = jnp.take_along_axis(every.rank, order, axis=1)
    left = rank[:, width] if rank.shape[1] > width else jnp.full_like(rank[:, 0], -jnp.inf)
    return pick(every, order[:, :width]), left
