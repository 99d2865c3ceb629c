"""What beam search chooses from: the continuations of a row's hypotheses, in order, without a sort of them all."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdecode import transforms
from jaxdecode.base import Finish, Rules
from jaxdecode.decoders.hypotheses import Hypotheses

__all__ = ["Candidates", "Law", "Split", "candidates", "split"]


class Candidates(NamedTuple):
    """Continuations of a row, best first, [R,C].

    beam: the hypothesis continued; token; rank; total; logprob of the token; finish: what it ends with, or RUNNING.
    """

    beam: jax.Array
    token: jax.Array
    rank: jax.Array
    total: jax.Array
    logprob: jax.Array
    finish: jax.Array


class Law(NamedTuple):
    """The next token of every live hypothesis, rows of the model's batch: raw logits, values, scores [RW,V].

    values: what candidates are ordered by, -inf for none; scores - total[RW] are log probabilities. raw_total, fault,
    set_margin [RW].
    """

    raw: jax.Array
    raw_total: jax.Array
    values: jax.Array
    scores: jax.Array
    total: jax.Array
    fault: jax.Array
    set_margin: jax.Array


def _endings(live: Hypotheses, start: jax.Array, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Ids that would end each live hypothesis [RW,E], each once (-1: none), and how [E]."""
    width, back = live.rank.shape[1], rules.stop.shape[2]
    ids = jnp.repeat(rules.eos, width, axis=0)
    how = jnp.full((rules.eos.shape[1],), Finish.EOS, jnp.int32)
    if rules.stop.size:
        before = jnp.arange(1 - back, 0, dtype=jnp.int32)[None, None]
        at = (start[:, None] + live.length)[:, :, None] + before
        recent = jnp.where(at >= 0, jnp.take_along_axis(live.tokens, jnp.maximum(at, 0), axis=2), -1)
        stop = rules.stop[:, None]  # [R,1,n,L]
        begun = jnp.all((stop[..., :-1] == recent[:, :, None]) | (stop[..., :-1] == -1), axis=3)
        last = jnp.where(begun, stop[..., -1], -1).reshape(len(ids), -1)
        ids = jnp.concatenate([ids, last], axis=1)
        how = jnp.concatenate([how, jnp.full((last.shape[1],), Finish.STOP, jnp.int32)])
    earlier = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool), -1)
    again = jnp.any((ids[:, :, None] == ids[:, None, :]) & earlier[None], axis=2)
    return jnp.where(again, -1, ids), how


def candidates(law: Law, live: Hypotheses, start: jax.Array, rules: Rules, sampled: bool) -> Candidates:
    """Of every row all continuations that end it, and enough others to hold the W + 1 best, in order.

    The order: rank, then the lower hypothesis, the higher value, the lower id.
    """
    rows, width = live.rank.shape
    batch, size = law.values.shape
    ends, how = _endings(live, start, rules)
    at = jnp.maximum(ends, 0)
    ending = jnp.where(ends >= 0, jnp.take_along_axis(law.values, at, axis=1), -jnp.inf)
    every = jnp.arange(batch, dtype=jnp.int32)[:, None]
    rest = law.values.at[every, jnp.where(ends >= 0, ends, size)].set(-jnp.inf, mode="drop")
    values, ids = transforms.largest(rest, width + 1)
    values, ids = jnp.concatenate([ending, values], axis=1), jnp.concatenate([at, ids], axis=1)
    finish = jnp.concatenate([how, jnp.full((width + 1,), Finish.RUNNING, jnp.int32)])
    scores = jnp.take_along_axis(law.scores, ids, axis=1)
    logprob = jnp.minimum(scores - law.total[:, None], 0)
    total = live.total.reshape(-1)[:, None] + logprob
    rank = _conditioned(values - law.total[:, None], live.total, live.rank) if sampled else total
    dead = jnp.isneginf(live.rank.reshape(-1)) | (law.fault != Finish.RUNNING)
    rank = jnp.where(dead[:, None] | jnp.isneginf(values), -jnp.inf, rank)
    beam = jnp.broadcast_to(every % width, ids.shape)
    number = ids.shape[1]
    keys = tuple(x.reshape(rows, width * number) for x in (-rank, beam, -values, ids))
    place = jnp.broadcast_to(jnp.arange(width * number, dtype=jnp.int32)[None], keys[0].shape)
    order = lax.sort((*keys, place), num_keys=4)[-1]
    found = Candidates(beam, ids, rank, total, logprob, jnp.broadcast_to(finish[None], ids.shape))
    return Candidates(*(jnp.take_along_axis(x.reshape(rows, -1), order, axis=1) for x in found))


def _conditioned(perturbed: jax.Array, total: jax.Array, rank: jax.Array) -> jax.Array:
    """Ranks of continuations [RW,C] given that the largest of all is the rank of the hypothesis they continue.

    ``perturbed``: log probabilities with Gumbel noise, among them the largest. Appendix B.3 of the paper.
    """
    total, rank = total.reshape(-1)[:, None], rank.reshape(-1)[:, None]
    values = total + perturbed
    below = values - jnp.max(values, axis=1, keepdims=True)
    below = jnp.where(jnp.isnan(below), -jnp.inf, below)
    hidden = jnp.where(below > -0.6931472, jnp.log(-jnp.expm1(below)), jnp.log1p(-jnp.exp(below)))
    v = rank - values + hidden
    return rank - jnp.maximum(v, 0) - jnp.log1p(jnp.exp(-jnp.abs(v)))


class Split(NamedTuple):
    """Candidates [R,W] that live on and that end, the bound [R] of those that do neither, the margin [R]."""

    live: Candidates
    ended: Candidates
    bound: jax.Array
    margin: jax.Array


def split(found: Candidates, width: int, now: jax.Array, limit: jax.Array) -> Split:
    """The W best that go on, and those that end among the W best; ``now``, ``limit``: powers of these lengths."""

    def columns(index: jax.Array) -> Candidates:
        return Candidates(*(jnp.take_along_axis(x, index, axis=1) for x in found))

    ends = found.finish != Finish.RUNNING
    first = jnp.arange(ends.shape[1], dtype=jnp.int32)[None] < width
    admitted = ends & first & ~jnp.isneginf(found.rank)
    going = columns(jnp.argsort(ends, axis=1, stable=True)[:, : width + 1])
    ended = columns(jnp.argsort(~admitted, axis=1, stable=True)[:, :width])
    none = jnp.arange(width, dtype=jnp.int32)[None] >= jnp.sum(admitted, axis=1, keepdims=True, dtype=jnp.int32)
    ended = ended._replace(rank=jnp.where(none, -jnp.inf, ended.rank))
    refused = jnp.max(jnp.where(ends & ~admitted, found.rank, -jnp.inf), axis=1)
    pruned = going.rank[:, width]
    edge = jnp.where(ends[:, width - 1] | ends[:, width], _gap(found.rank[:, width - 1], found.rank[:, width]), jnp.inf)
    margin = jnp.minimum(edge, _gap(going.rank[:, width - 1], pruned))
    live = Candidates(*(x[:, :width] for x in going))
    return Split(live, ended, jnp.maximum(refused / now, pruned / limit), margin)


def _gap(kept: jax.Array, dropped: jax.Array) -> jax.Array:
    return jnp.where(jnp.isneginf(dropped), jnp.inf, kept - dropped)
