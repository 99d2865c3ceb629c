"""Beam search with a certificate, and sampling without replacement, which is beam search over perturbed scores.

A row has ``width`` live hypotheses, which are rows of the model's batch, and as many finished ones. Every step looks at
all continuations of the live ones, keeps the best, and notes the best score that anything it dropped could still have
reached (S2.8). Sampling without replacement is stochastic beam search (Kool et al. 2019, arXiv:1903.06059): a
hypothesis' rank is its log probability plus Gumbel noise, drawn so that the rank of a prefix is the largest rank of all
sequences that begin with it; then the best ranks are an exact sample without replacement.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdecode import base, checks, kvcache, transforms
from jaxdecode import keys as keys_
from jaxdecode.base import Cache, Decoder, Finish, Generated, Grouped, Model, Params, Prompt, Rules, StepInfo
from jaxdecode.decoders import common, hypotheses
from jaxdecode.decoders.candidates import Candidates, Law, candidates, split
from jaxdecode.decoders.hypotheses import Hypotheses
from jaxdecode.decoders.records import faults, log_total
from jaxdecode.transforms import Context

__all__ = ["BeamState", "beam"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamState:
    """What the next step needs, rows first: ``cache`` and transform ``states`` of the live hypotheses, as groups.

    start[R] prompt length; live, finished: W hypotheses each; bound[R]: the best score that anything pruned so far
    could have reached; finish[R]: RUNNING, or that of the best hypothesis.
    """

    cache: Grouped
    states: Grouped
    start: jax.Array
    live: Hypotheses
    finished: Hypotheses
    bound: jax.Array
    finish: jax.Array
    keys: jax.Array
    rules: Rules


def _init(
    model: Model,
    width: int,
    sampled: bool,
    params: Params,
    keys: jax.Array,
    prompt: Prompt,
    rules: Rules,
    *,
    max_new_tokens: int,
    cache: Cache | None = None,
) -> BeamState:
    kinds = [t.kind for t in transforms.flatten(rules.transform)]
    checks.require(sampled or "filter" not in kinds, "beam", "no filters: they cut a law that is drawn from", "filter")
    begun = common.begin(model, params, keys, prompt, rules, max_new_tokens, cache)
    ctx, dtype, rules = begun.context, begun.spec.dtype, begun.rules
    finish = begun.finish
    if sampled and not (checks.is_concrete(rules.greedy) and not rules.greedy.any()):
        finish = jnp.where(rules.greedy, Finish.INVALID, finish)
    running = finish == Finish.RUNNING
    none = hypotheses.empty(ctx.tokens, width, max_new_tokens, dtype)
    rank = _root(keys, ctx.start, dtype) if sampled else jnp.zeros(running.shape, dtype)
    live = dataclasses.replace(none, rank=none.rank.at[:, 0].set(jnp.where(running, rank, -jnp.inf)))
    ended = dataclasses.replace(  # rows that end before their first token have the empty output
        none,
        rank=none.rank.at[:, 0].set(jnp.where(running, -jnp.inf, 0)),
        finish=none.finish.at[:, 0].set(jnp.where(running, Finish.NO_TOKEN, finish)),
    )
    kept = prompt.tokens.shape[1] if cache is None else None  # of a cache that is given nobody knows what it holds
    tail = kvcache.branch(begun.cache, width, max(max_new_tokens, 1), kept)
    return BeamState(
        cache=Grouped(tail, width),
        states=Grouped(base.repeat_rows(transforms.init(rules.transform, ctx), width), width),
        start=ctx.start,
        live=live,
        finished=ended,
        bound=jnp.full(running.shape, -jnp.inf, dtype),
        finish=finish,
        keys=keys,
        rules=rules,
    )


def _root(keys: jax.Array, start: jax.Array, dtype: Any) -> jax.Array:
    """The largest rank of all sequences, a Gumbel number of each row [R]."""
    return jax.vmap(lambda key, t: jax.random.gumbel(_noise_key(key, t, 0), (), dtype, mode="high"))(keys, start)


def _noise_key(key: jax.Array, position: jax.Array, number: Any) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, position), keys_.Stream.GUMBEL), number)


def _law(model: Model, sampled: bool, params: Params, state: BeamState) -> tuple[Law, Cache]:
    """Run the model on every live hypothesis and process its logits."""
    width = state.live.rank.shape[1]
    flat: Hypotheses = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state.live)
    rules, keys, start, active = base.repeat_rows(
        (state.rules, state.keys, state.start, state.finish == Finish.RUNNING), width
    )
    length = start + flat.length
    pending = jnp.take_along_axis(flat.tokens, length[:, None] - 1, axis=1)[:, 0]
    raw, cache = common.forward(model, params, pending, state.cache.value, active)
    ctx = Context(flat.tokens, start, length, rules.limit, keys)
    processed = transforms.process(rules.transform, raw, ctx, state.states.value, ~active & sampled)
    raw_total = log_total(raw)
    fault = faults(raw_total, processed.logits, log_total(processed.logits))
    fault = jnp.where(jnp.isneginf(flat.rank) | (fault == Finish.NO_TOKEN), Finish.RUNNING, fault)
    values = jnp.where(jnp.isnan(processed.logits), -jnp.inf, processed.logits)
    scores = values if sampled else processed.unmasked
    law = Law(raw, raw_total, values, scores, log_total(scores), fault, processed.set_margin)
    if not sampled:
        return law, cache

    def noise(key: jax.Array, t: jax.Array, number: jax.Array) -> jax.Array:
        return jax.random.gumbel(_noise_key(key, t, number), raw.shape[1:], raw.dtype, mode="high")

    number = 1 + jnp.arange(len(raw), dtype=jnp.int32) % width
    return law._replace(values=values + jax.vmap(noise)(keys, length, number)), cache


def _grown(
    law: Law, state: BeamState, some: Candidates, rank: jax.Array, margin: jax.Array, finish: jax.Array
) -> Hypotheses:
    """The hypotheses that candidates [R,W] stand for."""
    width = state.live.rank.shape[1]
    row = jnp.arange(len(rank), dtype=jnp.int32)[:, None] * width + some.beam
    record = {
        "logprob": law.raw[row, some.token] - law.raw_total[row],
        "processed_logprob": some.logprob,
        "margin": jnp.broadcast_to(margin[:, None], row.shape),
        "set_margin": law.set_margin[row],
    }
    parents = hypotheses.pick(state.live, some.beam)
    return hypotheses.append(parents, state.start, some.token, record, rank=rank, total=some.total, finish=finish)


def _powers(state: BeamState, length: jax.Array) -> jax.Array:
    """What scores of ``length[R]`` tokens are divided by."""
    table = state.rules.length_power
    if table is None:
        return jnp.ones((len(length),), state.bound.dtype)
    at = jnp.clip(length, 0, table.shape[1] - 1)[:, None]
    return jnp.take_along_axis(jnp.asarray(table), at, axis=1)[:, 0].astype(state.bound.dtype)


def _step(model: Model, sampled: bool, params: Params, state: BeamState) -> tuple[BeamState, StepInfo]:
    """Look at all continuations of all live hypotheses, keep the best; rows that ended stay as they are."""
    rows, width = state.live.rank.shape
    running = state.finish == Finish.RUNNING
    law, cache = _law(model, sampled, params, state)
    now, most = _powers(state, state.live.length[:, 0] + 1), _powers(state, state.rules.limit)
    parts = split(candidates(law, state.live, state.start, state.rules, sampled), width, now, most)
    fault = jnp.max(law.fault.reshape(rows, width), axis=1)
    moved = running & (fault == Finish.RUNNING)
    going = _grown(law, state, parts.live, parts.live.rank, parts.margin, jnp.zeros_like(parts.live.token))
    ended = _grown(law, state, parts.ended, parts.ended.rank / now[:, None], parts.margin, parts.ended.finish)
    ended = dataclasses.replace(ended, rank=jnp.where(moved[:, None], ended.rank, -jnp.inf))
    closing, shut = _closing(state, going, ended, fault, now)
    finished, dropped = lax.cond(
        jnp.any(~jnp.isneginf(closing.rank) | ~jnp.isneginf(ended.rank)),
        lambda: hypotheses.best(width, state.finished, ended, closing),
        lambda: (state.finished, jnp.full_like(state.bound, -jnp.inf)),
    )
    reach, worst = going.rank[:, 0] / most, finished.rank[:, -1]
    stop = ~shut & ((reach <= worst) & ~jnp.isneginf(worst) | jnp.isneginf(reach))
    bound = functools.reduce(jnp.maximum, (state.bound, dropped, parts.bound, jnp.where(stop, reach, -jnp.inf)))
    bound = jnp.where(moved, bound, jnp.where(running, jnp.nan, state.bound))  # a fault leaves nothing certain
    parent = jnp.where(moved[:, None], parts.live.beam, jnp.arange(width, dtype=jnp.int32)[None])
    row = (jnp.arange(rows, dtype=jnp.int32)[:, None] * width + parent).reshape(-1)
    states = transforms.advance(
        base.repeat_rows(state.rules.transform, width),
        base.take_rows(state.states.value, row),
        parts.live.token.reshape(-1),
        parts.live.logprob.reshape(-1),
        jnp.repeat(moved, width),
    )
    new = dataclasses.replace(
        state,
        cache=Grouped(kvcache.reorder(cache, row), width),
        states=Grouped(states, width),
        live=hypotheses.where(moved, going, state.live),
        finished=finished,
        bound=bound,
        finish=jnp.where(running & (shut | stop), finished.finish[:, 0], state.finish),
    )
    nothing = jnp.zeros((rows, 0), state.bound.dtype)
    return new, StepInfo(nothing.astype(jnp.int32), jnp.zeros((rows,), jnp.int32), nothing, nothing, new.finish)


def _closing(
    state: BeamState, going: Hypotheses, ended: Hypotheses, fault: jax.Array, now: jax.Array
) -> tuple[Hypotheses, jax.Array]:
    """Live hypotheses that end in this step without an end token, and the rows [R] in which they do.

    At the limit those just made; at a fault, or where nothing else exists and nothing can follow, those before.
    """
    lost = fault != Finish.RUNNING
    nothing = jnp.isneginf(jnp.maximum(ended.rank, state.finished.rank)).all(axis=1)
    alone = jnp.all(jnp.isneginf(going.rank), axis=1) & nothing
    cut = dataclasses.replace(going, rank=going.rank / now[:, None], finish=jnp.full_like(going.finish, Finish.LENGTH))
    code = jnp.where(lost, fault, Finish.NO_TOKEN).astype(jnp.int32)
    before = _powers(state, state.live.length[:, 0])[:, None]
    old = dataclasses.replace(
        state.live, rank=state.live.rank / before, finish=jnp.broadcast_to(code[:, None], going.finish.shape)
    )
    full = state.live.length[:, 0] + 1 >= state.rules.limit
    shut = (state.finish == Finish.RUNNING) & (lost | alone | full)
    closing = hypotheses.where(lost | alone, old, cut)
    return dataclasses.replace(closing, rank=jnp.where(shut[:, None], closing.rank, -jnp.inf)), shut


def _finish(sampled: bool, state: BeamState) -> Generated:
    rows, width = state.live.rank.shape
    running = (state.finish == Finish.RUNNING)[:, None]
    now = _powers(state, state.live.length[:, 0])[:, None]
    unended = dataclasses.replace(
        state.live,
        rank=jnp.where(running, state.live.rank / now, -jnp.inf),
        finish=jnp.full_like(state.live.finish, Finish.RUNNING),
    )
    found, _ = hypotheses.best(width, state.finished, unended)
    exists = ~jnp.isneginf(found.rank)
    size = found.logprob.shape[2]
    steps = jnp.arange(size, dtype=jnp.int32)[None, None]
    length = jnp.where(exists, found.length, 0)
    inside = steps < length[:, :, None]
    at = jnp.minimum(state.start[:, None, None] + steps, found.tokens.shape[2] - 1)
    tokens = jnp.take_along_axis(found.tokens, jnp.broadcast_to(at, (rows, width, size)), axis=2)
    proven = (found.finish[:, 0] != Finish.RUNNING) & (found.finish[:, 0] <= Finish.LENGTH) & ~running[:, 0]
    gap = jnp.where(proven, found.rank[:, 0] - state.bound, jnp.nan)
    return Generated(
        tokens=jnp.where(inside, tokens, -1),
        length=length,
        logprob=jnp.where(inside, found.logprob, 0),
        processed_logprob=jnp.where(inside, found.processed_logprob, 0),
        margin=jnp.where(inside, found.margin, jnp.inf),
        set_margin=jnp.where(inside, found.set_margin, jnp.inf),
        finish=jnp.where(exists, found.finish, Finish.NO_TOKEN),
        score=jnp.where(exists, found.total if sampled else found.rank, -jnp.inf),
        count=jnp.sum(exists, axis=1, dtype=jnp.int32),
        certified=None if sampled else gap >= 0,
        certificate_gap=None if sampled else gap,
        gumbel=found.rank if sampled else None,
    )


@functools.lru_cache(maxsize=256)
def beam(model: Model, *, width: int = 4, sampled: bool = False) -> Decoder:
    """Beam search: the ``width`` best hypotheses of every row, by log probability over a power of the length.

    The power is ``Rules.length_power`` (none: 1, so that the score is the log probability). Results have an axis K =
    width after B, best first; see ``Generated``. ``sampled``: draw ``width`` different sequences without replacement
    instead, with their exact log probabilities, in the order drawn. ValueError for filters unless ``sampled``.
    """
    checks.require(type(width) is int and width >= 1, "width", "a whole number >= 1", width)
    init, step = functools.partial(_init, model, width, sampled), functools.partial(_step, model, sampled)
    return Decoder(init, step, functools.partial(_finish, sampled))
