"""The record that grows by one token per row: what decoders that write token by token keep, check and add to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxdecode import checks, transforms
from jaxdecode.base import Cache, Finish, Generated, Model, Params, Prompt, Rules
from jaxdecode.decoders import common
from jaxdecode.meshes import by_rows
from jaxdecode.transforms import Context, Drawn, Processed

__all__ = [
    "Choice",
    "Law",
    "SamplingState",
    "append",
    "begin",
    "choose",
    "context",
    "faults",
    "finish",
    "law",
    "log_total",
    "weighted",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """What the next step needs, and the record so far; every leaf has the row first.

    tokens[B,S+N] prompt and output side by side, start[B] prompt length, length[B] tokens so far (the last one is not
    yet in ``cache``), finish[B]; logprob, processed_logprob, margin, set_margin [B,N];
    top_ids, top_logprobs [B,N,n] if n > 0 are recorded; log_weight[B] if asked for.
    """

    cache: Cache
    tokens: jax.Array
    start: jax.Array
    length: jax.Array
    finish: jax.Array
    keys: jax.Array
    rules: Rules
    states: tuple[Any, ...]
    logprob: jax.Array
    processed_logprob: jax.Array
    margin: jax.Array
    set_margin: jax.Array
    top_ids: jax.Array | None
    top_logprobs: jax.Array | None
    log_weight: jax.Array | None


State = TypeVar("State", bound=SamplingState)


class Choice(NamedTuple):
    """token[B], and for each its raw and processed log probability and margins [B]."""

    token: jax.Array
    logprob: jax.Array
    processed_logprob: jax.Array
    margin: jax.Array
    set_margin: jax.Array


def context(state: SamplingState) -> Context:
    return Context(state.tokens, state.start, state.length, state.rules.limit, state.keys)


def begin(
    model: Model,
    top: int,
    weigh: bool,
    params: Params,
    keys: jax.Array,
    prompt: Prompt,
    rules: Rules,
    *,
    max_new_tokens: int,
    cache: Cache | None = None,
) -> SamplingState:
    """Check everything that is known now, then prefill all but each row's last prompt token."""
    begun = common.begin(model, params, keys, prompt, rules, max_new_tokens, cache)
    ctx, dtype, vocab_size = begun.context, begun.spec.dtype, begun.spec.shape[-1]
    checks.require(0 <= top <= vocab_size, "top_logprobs", f"in [0, {vocab_size}]", top)
    batch = len(ctx.start)
    zeros = jnp.zeros((batch, max_new_tokens), dtype)
    infinite = jnp.full_like(zeros, jnp.inf)
    return SamplingState(
        cache=begun.cache,
        tokens=ctx.tokens,
        start=ctx.start,
        length=ctx.length,
        finish=begun.finish,
        keys=keys,
        rules=begun.rules,
        states=transforms.init(rules.transform, ctx),
        logprob=zeros,
        processed_logprob=zeros,
        margin=infinite,
        set_margin=infinite,
        top_ids=jnp.full((batch, max_new_tokens, top), -1, jnp.int32) if top else None,
        top_logprobs=jnp.zeros((batch, max_new_tokens, top), dtype) if top else None,
        log_weight=jnp.zeros((batch,), dtype) if weigh else None,
    )


def pick(x: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, token[:, None], axis=1)[:, 0]


def weighted(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``exp(logits - max)`` [B,V], and log sum exp over the vocabulary, [B].

    The log is 0 where every id is masked, NaN where some logit is NaN or +inf.
    """
    top = lax.stop_gradient(jnp.max(logits, axis=-1))
    top = jnp.where(jnp.isneginf(top), 0, top)
    weight = jnp.exp(logits - top[:, None])
    total = jnp.sum(weight, axis=-1)
    return weight, jnp.log(jnp.where(total == 0, 1, total)) + top


def log_total(logits: jax.Array) -> jax.Array:
    """log sum exp over the vocabulary, [B], as ``weighted`` says."""
    return weighted(logits)[1]


def faults(raw_total: jax.Array, logits: jax.Array, total: jax.Array) -> jax.Array:
    """Finish code [B] of rows that can't go on: NAN (raw NaN or +inf), INVALID (a poisoned setting), NO_TOKEN.

    NaN shows in sums (``raw_total``, and ``total`` of the processed ``logits``); a vectorized maximum may lose it.
    """
    code = jnp.where(jnp.isneginf(jnp.max(logits, axis=-1)), Finish.NO_TOKEN, Finish.RUNNING)
    code = jnp.where(jnp.isnan(total), Finish.INVALID, code)
    return jnp.where(jnp.isnan(raw_total), Finish.NAN, code).astype(jnp.int32)


def _ended(state: SamplingState, tokens: jax.Array, token: jax.Array, length: jax.Array) -> jax.Array:
    """Finish code [B] after each row took ``token``: an end id, a stop sequence, its limit, or RUNNING."""
    rules = state.rules
    code = jnp.where(length - state.start >= rules.limit, Finish.LENGTH, Finish.RUNNING)
    back = rules.stop.shape[2]
    at = length[:, None] - back + jnp.arange(back, dtype=jnp.int32)[None, :]
    recent = jnp.where(at >= 0, jnp.take_along_axis(tokens, jnp.maximum(at, 0), axis=1), -1)
    match = jnp.all((rules.stop == recent[:, None]) | (rules.stop == -1), axis=2) & jnp.any(rules.stop != -1, axis=2)
    code = jnp.where(jnp.any(match, axis=1), Finish.STOP, code)
    return jnp.where(jnp.any(rules.eos == token[:, None], axis=1), Finish.EOS, code).astype(jnp.int32)


def _record_top(state: State, raw: jax.Array, output: jax.Array) -> State:
    """Note the likeliest ids of the raw law [B,V] at place ``output[B]``, if the state keeps them."""
    if state.top_ids is None or state.top_logprobs is None:
        return state
    values, ids = transforms.largest(raw, state.top_ids.shape[2])
    values = values - log_total(raw)[:, None]
    return dataclasses.replace(
        state, top_ids=_put(state.top_ids, output, ids), top_logprobs=_put(state.top_logprobs, output, values)
    )


def _put(x: jax.Array, at: jax.Array, value: jax.Array) -> jax.Array:
    """x[B,T,...] with ``value[B,...]`` at place ``at[B]`` of each row; places out of range are dropped."""

    def put(x: jax.Array, at: jax.Array, value: jax.Array) -> jax.Array:
        return x.at[jnp.arange(len(at), dtype=jnp.int32), at].set(value, mode="drop")

    return by_rows(put, x, at, value)


def _weighed(state: State, processed: Processed, greedy: jax.Array, running: jax.Array) -> State:
    """Add the step's log of the mass that the masks left (S9.3), if the state keeps the sum.

    NaN for greedy rows, and where a filter removed something: their law is no proposal for the model's.
    """
    if state.log_weight is None:
        return state
    allowed = processed.unfiltered > -jnp.inf
    mass = log_total(jnp.where(allowed, processed.unmasked, -jnp.inf)) - log_total(processed.unmasked)
    mass = jnp.where(jnp.any(allowed, axis=-1), jnp.minimum(mass, 0), -jnp.inf)
    cut = jnp.any(allowed & jnp.isneginf(processed.logits), axis=-1)
    new = state.log_weight + jnp.where(greedy | cut, jnp.nan, mass)
    return dataclasses.replace(state, log_weight=jnp.where(running, new, state.log_weight))


class Law(NamedTuple):
    """The law of one token of each row: raw[B,V], its log total[B], what processing left, and the fault code [B].

    weight[B,V], weight_total[B]: ``weighted`` of the processed logits.
    """

    raw: jax.Array
    total: jax.Array
    processed: Processed
    weight: jax.Array
    weight_total: jax.Array
    fault: jax.Array


def law(state: State, raw: jax.Array, greedy: jax.Array, active: jax.Array) -> tuple[State, Law]:
    """The processed law of the next token of ``active[B]`` rows, its weight noted; 0 in place of a faulty row's."""
    processed = transforms.process(state.rules.transform, raw, context(state), state.states, greedy | ~active)
    total = log_total(raw)
    weight, weight_total = weighted(processed.logits)
    fault = faults(total, processed.logits, weight_total)
    state = _weighed(state, processed, greedy, active)
    good = fault == Finish.RUNNING
    processed = processed._replace(logits=jnp.where(good[:, None], processed.logits, 0))
    weight, weight_total = jnp.where(good[:, None], weight, 1), jnp.where(good, weight_total, 0)
    return state, Law(raw, total, processed, weight, weight_total, fault)


def choose(law: Law, greedy: jax.Array, active: jax.Array, draw: Callable[[jax.Array, jax.Array], Drawn]) -> Choice:
    """The arg max for greedy rows, ``draw(logits, weight)`` for the others; each only if an active row asks for it."""
    processed, logits = law.processed, law.processed.logits

    def arg_max(_: None) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, best = transforms.first_max(logits)
        ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        second = jnp.max(jnp.where(ids == best[:, None], -jnp.inf, logits), axis=-1)
        return best, jnp.zeros_like(top), jnp.where(jnp.isneginf(second), jnp.inf, top - second)

    def sampled(_: None) -> tuple[jax.Array, jax.Array, jax.Array]:
        drawn = draw(logits, law.weight)
        return drawn.token, pick(logits, drawn.token) - law.weight_total, drawn.margin

    def nothing(_: None) -> tuple[jax.Array, jax.Array, jax.Array]:
        zero = jnp.zeros(logits.shape[:1], logits.dtype)
        return jnp.zeros(logits.shape[:1], jnp.int32), zero, zero

    best = lax.cond(jnp.any(greedy & active), arg_max, nothing, None)
    drawn = lax.cond(jnp.any(~greedy & active), sampled, nothing, None)
    token, lp, margin = (jnp.where(greedy, a, b) for a, b in zip(best, drawn, strict=True))
    return Choice(
        token=token,
        logprob=pick(law.raw, token) - law.total,
        processed_logprob=lp,
        margin=lax.stop_gradient(jnp.minimum(margin, processed.token_margin)),
        set_margin=lax.stop_gradient(processed.set_margin),
    )


def append(state: State, law: Law, choice: Choice, active: jax.Array) -> tuple[State, jax.Array]:
    """Each ``active[B]`` row takes its token, or ends by its fault; all others stay as they are. Also who took[B]."""
    took = active & (law.fault == Finish.RUNNING)
    output = jnp.where(took, state.length - state.start, state.logprob.shape[1])
    tokens = _put(state.tokens, jnp.where(took, state.length, state.tokens.shape[1]), choice.token)
    length = state.length + took.astype(jnp.int32)
    finish = jnp.where(took, _ended(state, tokens, choice.token, length), law.fault)
    new = dataclasses.replace(
        _record_top(state, law.raw, output),
        tokens=tokens,
        length=length,
        finish=jnp.where(active, finish, state.finish),
        states=transforms.advance(state.rules.transform, state.states, choice.token, choice.processed_logprob, took),
        logprob=_put(state.logprob, output, choice.logprob),
        processed_logprob=_put(state.processed_logprob, output, choice.processed_logprob),
        margin=_put(state.margin, output, choice.margin),
        set_margin=_put(state.set_margin, output, choice.set_margin),
    )
    return new, took


def finish(state: SamplingState) -> Generated:
    n = state.logprob.shape[1]
    steps = jnp.arange(n, dtype=jnp.int32)[None, :]
    at = jnp.minimum(state.start[:, None] + steps, state.tokens.shape[1] - 1)
    length = state.length - state.start
    tokens = jnp.where(steps < length[:, None], jnp.take_along_axis(state.tokens, at, axis=1), -1)
    return Generated(
        tokens,
        length,
        state.logprob,
        state.processed_logprob,
        state.margin,
        state.set_margin,
        state.finish,
        state.top_ids,
        state.top_logprobs,
        state.log_weight,
    )
