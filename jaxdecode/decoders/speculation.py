"""Speculative decoding: several tokens are drafted, one pass of the model judges them all, the law stays the model's.

A drafted token x with probability q(x) is kept if u q(x) < p(x), else one is drawn from max(p - q, 0); after as many
acceptances as drafts one more is drawn from p. Leviathan et al. 2022 (2211.17192), Chen et al. 2023 (2302.01318);
prompt lookup: Saxena 2023.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdecode import checks, kvcache, transforms
from jaxdecode import keys as keys_
from jaxdecode.base import Acceptance, Cache, Decoder, Finish, Generated, Model, Params, Prompt, Rules, StepInfo
from jaxdecode.decoders import common, drafters, pace, records
from jaxdecode.decoders.drafters import Drafter, Drafts, SpeculativeState
from jaxdecode.decoders.sampling import plain_step

__all__ = ["LENGTH", "SpeculativeState", "paired", "prompt_lookup", "speculative"]

LENGTH = 7  # tokens of a draft: with the one before it eight, of which XLA:CPU makes quicker products than of 2 to 7


@functools.lru_cache(maxsize=256)
def paired(model: Model, draft_model: Model) -> Model:
    """Both models as one: params and cache are pairs, the logits are those of ``model``."""

    def init_cache(params: Params, batch_size: int, max_len: int) -> Cache:
        return model.init_cache(params[0], batch_size, max_len), draft_model.init_cache(params[1], batch_size, max_len)

    def apply(params: Params, tokens: jax.Array, cache: Cache, **options: Any) -> tuple[jax.Array, Cache]:
        logits, own = model.apply(params[0], tokens, cache[0], **options)
        _, draft = draft_model.apply(params[1], tokens, cache[1], **options)
        return logits, (own, draft)

    return Model(init_cache, apply)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What is static: the model, where drafts come from, the most tokens of one, and whether there are two models."""

    model: Model
    drafter: Drafter
    size: int
    pair: bool

    def split(self, both: Any) -> tuple[Any, Any]:
        """Params or caches of the model and of the draft."""
        return tuple(both) if self.pair else (both, ())

    def join(self, own: Any, draft: Any) -> Any:
        return (own, draft) if self.pair else own


def _init(
    model: Model,
    draft_model: Model | None,
    top: int,
    weigh: bool,
    params: Params,
    keys: jax.Array,
    prompt: Prompt,
    rules: Rules,
    *,
    max_new_tokens: int,
    cache: Cache | None = None,
) -> SpeculativeState:
    both = model
    if draft_model is not None:
        pair = isinstance(params, tuple) and len(params) == 2
        checks.require(pair, "params", "(params, draft_params)", type(params).__name__)
        both = paired(model, draft_model)
        _check_vocabularies(model, draft_model, params)
    state = records.begin(both, top, weigh, params, keys, prompt, rules, max_new_tokens=max_new_tokens, cache=cache)
    zero = jnp.zeros_like(state.length)
    return SpeculativeState(
        **{field.name: getattr(state, field.name) for field in dataclasses.fields(state)},
        held=zero if draft_model is None else jnp.maximum(state.length - 1, 0),
        drafted=zero,
        accepted=zero,
        pace=pace.start(state.length, state.logprob.dtype),
    )


def _check_vocabularies(model: Model, draft_model: Model, params: Params) -> None:
    sizes = []
    for part, own in zip((model, draft_model), params, strict=True):
        sizes.append(common.logits_spec(part, own, common.cache_spec(part, own, 1, 1)).shape[-1])
    checks.require(sizes[0] == sizes[1], "draft_model", f"a vocabulary of {sizes[0]} ids like the model's", sizes[1])


def _judged(
    state: SpeculativeState,
    drafts: Drafts,
    j: jax.Array,
    drafted: jax.Array,
    token: jax.Array,
    logits: jax.Array,
    weight: jax.Array,
) -> transforms.Drawn:
    """The token of each row by its processed ``logits``: the draft, another one in its place, or one more.

    The margin is that of S6.5. If no probability of an event moves by more than d, neither under p nor, where a model
    drafts, under q (``laws`` that move: 1 or 2), then u q - p moves by at most ``laws`` d, and the edges of a draw from
    the rest, of mass m, by less than 3 ``laws`` d / m.
    """
    logits = lax.stop_gradient(logits)
    uniform = functools.partial(keys_.uniform, state.keys, state.length, dtype=logits.dtype)
    weight = lax.stop_gradient(weight)
    p = weight / jnp.sum(weight, axis=-1, keepdims=True)
    if drafts.logits is None:
        q = (lax.broadcasted_iota(jnp.int32, p.shape, 1) == token[:, None]).astype(p.dtype)
        laws = 1.0
    else:
        law = _at(drafts.logits, j)
        q = jnp.exp(law - records.log_total(law)[:, None])
        laws = 2.0
    distance = uniform(stream=keys_.Stream.ACCEPT) * records.pick(q, token) - records.pick(p, token)
    rest = jnp.maximum(p - q, 0)
    mass = jnp.sum(rest, axis=-1)
    source = jnp.where((drafted & (mass > 0))[:, None], jnp.log(rest), logits)
    residual, plain = (uniform(stream=stream) for stream in (keys_.Stream.RESIDUAL, keys_.Stream.DRAW))
    drawn = transforms.draw(source, jnp.where(drafted, residual, plain))
    kept = drafted & (distance < 0)
    margin = jnp.where(kept, jnp.inf, drawn.margin * jnp.where(drafted, mass / (3 * laws), 1))
    compared = jnp.minimum(jnp.abs(distance) / laws, _at(drafts.margin, j))
    margin = jnp.where(drafted, jnp.minimum(margin, compared), margin)
    return transforms.Drawn(jnp.where(kept, token, drawn.token), margin)


def _at(x: jax.Array, j: jax.Array) -> jax.Array:
    """Place j of x[B,D,...], or its last one."""
    return lax.dynamic_index_in_dim(x, jnp.minimum(j, x.shape[1] - 1), 1, keepdims=False)


def _speculate(parts: _Parts, params: Params, state: SpeculativeState, count: jax.Array, hint: Any) -> SpeculativeState:
    """Draft, judge all drafts by one pass, take each row's tokens up to its first refusal and one more."""
    own_params, draft_params = parts.split(params)
    cache, draft_cache = parts.split(state.cache)
    drafts, draft_cache, held = parts.drafter.draft(draft_params, draft_cache, state.held, state, count, hint)
    running = state.finish == Finish.RUNNING
    pending = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    fed = jnp.concatenate([pending, drafts.tokens], axis=1)
    count = jnp.where(running, 1 + drafts.length, 0)
    raw, after = parts.model.apply(own_params, fed, cache, lengths=count)
    raw = raw.astype(np.promote_types(raw.dtype, np.float32))
    greedy = state.rules.greedy

    def take(carry: tuple[SpeculativeState, jax.Array], j: jax.Array) -> tuple[SpeculativeState, jax.Array]:
        state, active = carry
        drafted = active & (j < drafts.length)
        token = _at(drafts.tokens, j)
        old, law = records.law(state, _at(raw, j), greedy, active)
        judge = functools.partial(_judged, state, drafts, j, drafted, token)
        choice = records.choose(law, greedy, active, judge)
        new, took = records.append(old, law, choice, active)
        right = took & drafted & (choice.token == token)
        new = dataclasses.replace(new, accepted=state.accepted + right.astype(jnp.int32))
        return new, right & (new.finish == Finish.RUNNING)

    def position(carry: tuple[SpeculativeState, jax.Array], j: jax.Array) -> Any:
        return lax.cond(jnp.any(carry[1]), take, lambda carry, j: carry, carry, j), None

    bare = dataclasses.replace(state, cache=())
    places = jnp.arange(parts.size + 1, dtype=jnp.int32)
    (new, _), _ = lax.scan(position, (bare, running), places)
    taken = jnp.where(running, new.length - state.length, 0)
    cache = _kept(parts.model, own_params, cache, after, fed, count, taken)
    keep = jnp.minimum(held, new.length - 1)
    if kvcache.cuttable(draft_cache, parts.size + 1):
        draft_cache = kvcache.shorten(draft_cache, held - keep)
    cost = parts.drafter.cost(own_params, draft_params)
    return dataclasses.replace(
        new,
        cache=parts.join(cache, draft_cache),
        held=keep,
        drafted=state.drafted + drafts.length,
        pace=pace.update(state.pace, new.length, drafts.length, new.accepted - state.accepted, parts.size, cost),
    )


def _kept(
    model: Model, params: Params, before: Cache, after: Cache, fed: jax.Array, count: jax.Array, taken: jax.Array
) -> Cache:
    """The cache with ``taken[B]`` of the ``count[B]`` tokens fed: cut, or read again from before."""
    if kvcache.cuttable(after, fed.shape[1]):
        return kvcache.shorten(after, count - taken)
    return model.apply(params, fed, before, lengths=taken, logits_at=fed[:, :0])[1]


def _once(
    when: jax.Array, fn: Callable[[SpeculativeState], SpeculativeState], state: SpeculativeState
) -> SpeculativeState:
    """``fn(state)`` if ``when``. A loop keeps the cache in place, where XLA:CPU copies what a conditional hands on."""
    return lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(when), fn(c[1])), (when, state))[1]


def _plain(parts: _Parts, params: Params, state: SpeculativeState) -> SpeculativeState:
    """One token of each row, as ``sample`` does it: the draft model rests."""
    own_params, _ = parts.split(params)
    cache, draft_cache = parts.split(state.cache)
    new, _, _ = plain_step(parts.model, False, own_params, dataclasses.replace(state, cache=cache))
    return dataclasses.replace(new, cache=parts.join(new.cache, draft_cache))


def _step(parts: _Parts, params: Params, state: SpeculativeState) -> tuple[SpeculativeState, StepInfo]:
    """As many drafts as each row's own past and limit allow; where no row drafts, a plain step."""
    running = state.finish == Finish.RUNNING
    room = state.rules.limit - (state.length - state.start) - 1
    wanted = pace.wanted(state.pace, state.length, parts.size, parts.drafter.cost(*parts.split(params)))
    wanted = jnp.where(running, jnp.minimum(wanted, room), 0)
    count, hint = parts.drafter.find(state, wanted)
    drafting = jnp.any(count > 0)
    new = _once(drafting, lambda s: _speculate(parts, params, s, count, hint), state)
    new = _once(~drafting, lambda s: _plain(parts, params, s), new)
    steps = jnp.arange(parts.size + 1, dtype=jnp.int32)[None, :]
    taken = new.length - state.length
    real = steps < taken[:, None]
    at = jnp.minimum(state.length[:, None] + steps, new.tokens.shape[1] - 1)
    place = jnp.minimum(at - state.start[:, None], max(new.logprob.shape[1] - 1, 0))
    logprob, margin = (
        jnp.take_along_axis(x, place, axis=1) if x.shape[1] else jnp.zeros(at.shape, x.dtype)
        for x in (new.logprob, new.margin)
    )
    info = StepInfo(
        tokens=jnp.where(real, jnp.take_along_axis(new.tokens, at, axis=1), -1),
        count=taken,
        logprob=jnp.where(real, logprob, 0),
        margin=jnp.where(real, margin, jnp.inf),
        finish=new.finish,
    )
    return new, info


def _finish(state: SpeculativeState) -> Generated:
    return dataclasses.replace(records.finish(state), acceptance=Acceptance(state.drafted, state.accepted))


@functools.lru_cache(maxsize=256)
def _decoder(model: Model, draft_model: Model | None, size: int, max_ngram: int, top: int, weigh: bool) -> Decoder:
    if draft_model is not None:
        parts = _Parts(model, drafters.from_model(draft_model, size), size, True)
    else:
        parts = _Parts(model, drafters.from_history(size, max_ngram), size, False)
    init = functools.partial(_init, model, draft_model, top, weigh)
    return Decoder(init, functools.partial(_step, parts), _finish)


def _positive(value: int, what: str) -> int:
    checks.require(type(value) is int and value >= 1, what, "a whole number >= 1", value)
    return value


def speculative(
    model: Model, draft_model: Model, *, draft_length: int = LENGTH, top_logprobs: int = 0, log_weight: bool = False
) -> Decoder:
    """``sample`` with drafts of another model over the same ids: the same law, in fewer passes of ``model``.

    params: ``(params, draft_params)``; a cache given to ``init`` is such a pair too. draft_length: the most tokens of
    a draft; each row drafts fewer, or none for a while, where its own drafts turn out wrong. top_logprobs, log_weight:
    as for ``sample``. ValueError for vocabularies of different sizes.
    """
    _positive(draft_length, "draft_length")
    return _decoder(model, draft_model, draft_length, 0, top_logprobs, log_weight)


def prompt_lookup(
    model: Model, *, draft_length: int = LENGTH, max_ngram: int = 3, top_logprobs: int = 0, log_weight: bool = False
) -> Decoder:
    """``sample`` with drafts from the row's own prompt and output: what followed where its last tokens stood before.

    max_ngram: the most last tokens that are looked for; fewer, at least two, will do while drafts are right. The rest
    as for ``speculative``, without a second model: params are those of ``model``.
    """
    _positive(max_ngram, "max_ngram")
    return _decoder(model, None, _positive(draft_length, "draft_length"), max_ngram, top_logprobs, log_weight)
