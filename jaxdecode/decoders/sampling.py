"""Greedy decoding and sampling: one token per row and step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode import checks, transforms
from jaxdecode import keys as keys_
from jaxdecode.base import Cache, Decoder, Finish, Generated, Model, Params, Prompt, Rules, StepInfo
from jaxdecode.decoders import common
from jaxdecode.transforms import Context, Processed

__all__ = ["SamplingState", "greedy", "sample"]


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


class Choice(NamedTuple):
    """token[B], and for each its raw and processed log probability and margins [B]."""

    token: jax.Array
    logprob: jax.Array
    processed_logprob: jax.Array
    margin: jax.Array
    set_margin: jax.Array


def _context(state: SamplingState) -> Context:
    return Context(state.tokens, state.start, state.length, state.rules.limit, state.keys)


def _init(
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
    shape = np.shape(prompt.tokens)
    checks.require(len(shape) == 2 and shape[1] >= 1, "prompt.tokens", "shape [B, S], S >= 1", shape)
    batch, size = shape
    prompt = Prompt(prompt.tokens.astype(jnp.int32), *(x.astype(jnp.int32) for x in prompt[1:]))
    rows = common.check_rules(rules, batch, max_new_tokens)
    if cache is None:
        cache = model.init_cache(params, batch, size + max_new_tokens)
    spec = common.logits_spec(model, params, cache)
    rows &= common.check_prompt(prompt, keys, spec.shape[-1])
    held = common.room(cache)
    if held is not None:  # a full buffer ends a row like a limit does
        rules = dataclasses.replace(
            rules, limit=jnp.where(rows, jnp.clip(rules.limit, 0, held - prompt.length), rules.limit)
        )
    checks.require(0 <= top <= spec.shape[-1], "top_logprobs", f"in [0, {spec.shape[-1]}]", top)
    finish = common.settled(rows, rules.limit)
    tokens = jnp.pad(prompt.tokens, ((0, 0), (0, max_new_tokens)))
    zeros = jnp.zeros((batch, max_new_tokens), spec.dtype)
    infinite = jnp.full_like(zeros, jnp.inf)
    ctx = Context(tokens, prompt.length, prompt.length, rules.limit, keys)
    return SamplingState(
        cache=common.prefill(model, params, cache, prompt, finish == Finish.RUNNING),
        tokens=tokens,
        start=prompt.length,
        length=prompt.length,
        finish=finish,
        keys=keys,
        rules=rules,
        states=transforms.init(rules.transform, ctx),
        logprob=zeros,
        processed_logprob=zeros,
        margin=infinite,
        set_margin=infinite,
        top_ids=jnp.full((batch, max_new_tokens, top), -1, jnp.int32) if top else None,
        top_logprobs=jnp.zeros((batch, max_new_tokens, top), spec.dtype) if top else None,
        log_weight=jnp.zeros((batch,), spec.dtype) if weigh else None,
    )


def _pick(x: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, token[:, None], axis=1)[:, 0]


def _law(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``exp(logits - max)`` [B,V], and log sum exp over the vocabulary, [B].

    The log is 0 where every id is masked, NaN where some logit is NaN or +inf.
    """
    top = lax.stop_gradient(jnp.max(logits, axis=-1))
    top = jnp.where(jnp.isneginf(top), 0, top)
    weight = jnp.exp(logits - top[:, None])
    total = jnp.sum(weight, axis=-1)
    return weight, jnp.log(jnp.where(total == 0, 1, total)) + top


def _log_total(logits: jax.Array) -> jax.Array:
    return _law(logits)[1]


def _choose(
    raw: jax.Array,
    raw_total: jax.Array,
    processed: Processed,
    law: tuple[jax.Array, jax.Array],
    greedy: jax.Array,
    state: SamplingState,
) -> Choice:
    """The arg max for greedy rows, one inverse-CDF draw for the others; each computed only if some row asks for it.

    raw_total: log sum exp of the raw logits, [B]; law: weights and log sum exp of the processed ones.
    """
    logits = processed.logits
    running = state.finish == Finish.RUNNING

    def arg_max(_: None) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, best = transforms.first_max(logits)
        ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        second = jnp.max(jnp.where(ids == best[:, None], -jnp.inf, logits), axis=-1)
        return best, jnp.zeros_like(top), jnp.where(jnp.isneginf(second), jnp.inf, top - second)

    def sampled(_: None) -> tuple[jax.Array, jax.Array, jax.Array]:
        u = keys_.uniform(state.keys, state.length, keys_.Stream.DRAW, logits.dtype)
        drawn = transforms.draw(logits, u, law[0])
        return drawn.token, _pick(logits, drawn.token) - law[1], drawn.margin

    def nothing(_: None) -> tuple[jax.Array, jax.Array, jax.Array]:
        zero = jnp.zeros(logits.shape[:1], logits.dtype)
        return jnp.zeros(logits.shape[:1], jnp.int32), zero, zero

    best = lax.cond(jnp.any(greedy & running), arg_max, nothing, None)
    drawn = lax.cond(jnp.any(~greedy & running), sampled, nothing, None)
    token, lp, margin = (jnp.where(greedy, a, b) for a, b in zip(best, drawn, strict=True))
    return Choice(
        token=token,
        logprob=_pick(raw, token) - raw_total,
        processed_logprob=lp,
        margin=lax.stop_gradient(jnp.minimum(margin, processed.token_margin)),
        set_margin=lax.stop_gradient(processed.set_margin),
    )


def _faults(raw_total: jax.Array, logits: jax.Array, total: jax.Array) -> jax.Array:
    """Finish code [B] of rows that can't go on: NAN (raw NaN or +inf), INVALID (a poisoned setting), NO_TOKEN.

    NaN shows in sums (``raw_total``, ``total``); a vectorized maximum may lose it.
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


def _record_top(state: SamplingState, raw: jax.Array, output: jax.Array) -> SamplingState:
    """Note the likeliest ids of the raw law [B,V] at place ``output[B]``, if the state keeps them."""
    if state.top_ids is None or state.top_logprobs is None:
        return state
    values, ids = lax.top_k(raw, state.top_ids.shape[2])
    rows = jnp.arange(raw.shape[0])
    values = values - _log_total(raw)[:, None]
    return dataclasses.replace(
        state,
        top_ids=state.top_ids.at[rows, output].set(ids, mode="drop"),
        top_logprobs=state.top_logprobs.at[rows, output].set(values, mode="drop"),
    )


def _weighed(state: SamplingState, processed: Processed, greedy: jax.Array, running: jax.Array) -> SamplingState:
    """Add the step's log of the mass that the masks left (S9.3), if the state keeps the sum.

    NaN for greedy rows, and where a filter removed something: their law is no proposal for the model's.
    """
    if state.log_weight is None:
        return state
    allowed = processed.unfiltered > -jnp.inf
    mass = _log_total(jnp.where(allowed, processed.unmasked, -jnp.inf)) - _log_total(processed.unmasked)
    mass = jnp.where(jnp.any(allowed, axis=-1), jnp.minimum(mass, 0), -jnp.inf)
    cut = jnp.any(allowed & jnp.isneginf(processed.logits), axis=-1)
    new = state.log_weight + jnp.where(greedy | cut, jnp.nan, mass)
    return dataclasses.replace(state, log_weight=jnp.where(running, new, state.log_weight))


def _step(model: Model, all_greedy: bool, params: Params, state: SamplingState) -> tuple[SamplingState, StepInfo]:
    """Compute p(. | x_<t), choose a token, append it; rows that ended stay as they are."""
    running = state.finish == Finish.RUNNING
    pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)[:, 0]
    raw, cache = common.forward(model, params, pending, state.cache, running)
    greedy = jnp.ones_like(running) if all_greedy else state.rules.greedy
    processed = transforms.process(state.rules.transform, raw, _context(state), state.states, greedy | ~running)
    raw_total = _log_total(raw)
    weight, total = _law(processed.logits)
    fault = _faults(raw_total, processed.logits, total)
    state = _weighed(state, processed, greedy, running)
    good = fault == Finish.RUNNING
    processed = processed._replace(logits=jnp.where(good[:, None], processed.logits, 0))
    law = jnp.where(good[:, None], weight, 1), jnp.where(good, total, 0)
    choice = _choose(raw, raw_total, processed, law, greedy, state)
    took = running & good

    rows = jnp.arange(took.shape[0], dtype=jnp.int32)
    output = jnp.where(took, state.length - state.start, state.logprob.shape[1])
    tokens = state.tokens.at[rows, jnp.where(took, state.length, state.tokens.shape[1])].set(choice.token, mode="drop")
    length = state.length + took.astype(jnp.int32)
    finish = jnp.where(took, _ended(state, tokens, choice.token, length), fault)
    new = dataclasses.replace(
        _record_top(state, raw, output),
        cache=cache,
        tokens=tokens,
        length=length,
        finish=jnp.where(running, finish, state.finish),
        states=transforms.advance(state.rules.transform, state.states, choice.token, choice.processed_logprob, took),
        logprob=state.logprob.at[rows, output].set(choice.logprob, mode="drop"),
        processed_logprob=state.processed_logprob.at[rows, output].set(choice.processed_logprob, mode="drop"),
        margin=state.margin.at[rows, output].set(choice.margin, mode="drop"),
        set_margin=state.set_margin.at[rows, output].set(choice.set_margin, mode="drop"),
    )
    info = StepInfo(
        tokens=jnp.where(took, choice.token, -1)[:, None],
        count=took.astype(jnp.int32),
        logprob=jnp.where(took, choice.logprob, 0)[:, None],
        margin=jnp.where(took, choice.margin, jnp.inf)[:, None],
        finish=new.finish,
    )
    return new, info


def _finish(state: SamplingState) -> Generated:
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


@functools.lru_cache(maxsize=256)
def _decoder(model: Model, all_greedy: bool, top_logprobs: int, log_weight: bool) -> Decoder:
    init, step = functools.partial(_init, model, top_logprobs, log_weight), functools.partial(_step, model, all_greedy)
    return Decoder(init, step, _finish)


def greedy(model: Model, *, top_logprobs: int = 0) -> Decoder:
    """Every row takes the arg max of its processed logits (lowest id of equals), whatever its temperature.

    top_logprobs: how many of the likeliest ids to record at every step.
    """
    return _decoder(model, True, top_logprobs, False)


def sample(model: Model, *, top_logprobs: int = 0, log_weight: bool = False) -> Decoder:
    """Rows draw from their processed law by one uniform number each; rows of ``Rules.greedy`` take the arg max.

    top_logprobs: how many of the likeliest ids to record at every step. log_weight: sum the log of the mass that the
    masks left of each step's law (S9.3).
    """
    return _decoder(model, False, top_logprobs, log_weight)
