"""What a model says of texts that are there: log probabilities token by token, and the best of several samples."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks, transforms
from jaxdecode import keys as keys_
from jaxdecode.base import Finish, Generated, Model, Params, Rules
from jaxdecode.decoders import common
from jaxdecode.generation import as_prompt, vocab_size_of
from jaxdecode.rulebook import Settings
from jaxdecode.transforms import Context, LogitsTransform

__all__ = ["Plan", "Text", "best_of", "logprob_of", "over_text", "ranking", "score"]

LOGITS = 1 << 24  # logits that are in memory at a time, unless a caller chooses


def score(
    model: Model,
    params: Params,
    tokens: Any,
    *,
    lengths: Any = None,
    padding: Literal["right", "left"] = "right",
    start: Any = 1,
    settings: Settings | None = None,
    transform: LogitsTransform | None = None,
    key: jax.Array | None = None,
    row_ids: Any = None,
    chunk: int | None = None,
) -> jax.Array:
    """Teacher-forced log probabilities [B,T]: of every token, given those before it in its row.

    tokens: lists of ids, or int [B,T] with ``lengths[B]`` and ``padding``, as for ``generate``. The law is the model's
    own (``logprob`` of ``generate``); with ``settings`` or a ``transform`` it is the processed one
    (``processed_logprob``; in a greedy row 0 for the arg max and -inf for all else), with ``key`` and ``row_ids`` as
    there if it has coins. start: the first place that counts, a number or [B] (the prompt's length for penalties and
    constraints); what is before it, or padding, gives 0. chunk: tokens a row per call of the model, so that no more
    than [B,chunk,V] logits are held at once, also in a gradient. jits itself, and may be called under jit.

    >>> from jaxdecode.testing import markov_model
    >>> table = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))
    >>> jnp.exp(score(markov_model(), table, [[0, 1, 1], [1, 0]])).round(2).tolist()
    [[1.0, 0.5, 0.75], [1.0, 0.25, 1.0]]
    """
    vocab_size = vocab_size_of(model, params)
    width = max((len(row) for row in tokens), default=0) if isinstance(tokens, (list, tuple)) else np.shape(tokens)[1]
    given = as_prompt(tokens, lengths, padding, vocab_size)
    batch = given.tokens.shape[0]
    first = checks.whole(start, lambda n: n >= 1, "start", "whole numbers >= 1")
    checks.require(first.shape in ((), (batch,)), "start", f"a number or {batch} of them", f"shape {first.shape}")
    first = (np if checks.is_concrete(first) else jnp).broadcast_to(first, (batch,))
    text = Text(given.tokens, given.length, first)
    checks.require(chunk is None or (type(chunk) is int and chunk > 0), "chunk", "a whole number >= 1", chunk)
    if chunk is None:
        chunk = max(1, min(common.CHUNK, LOGITS // (batch * vocab_size)))
    if settings is None and transform is None:
        checks.require(key is None and row_ids is None, "key, row_ids", "none for the model's own law", "one")
        out = _raw(Plan(model, chunk), params, text)
    else:
        settings = Settings() if settings is None else settings
        _check(settings, text)
        rules = settings.rules(batch, vocab_size, transform=transform)
        keys = keys_.row_keys(jax.random.key(0) if key is None else key, batch, row_ids)
        out = _processed(Plan(model, chunk), params, text, rules, keys)
    out = out[:, :width]
    if padding == "right":
        return out
    at = (jnp.arange(width)[None, :] - (width - text.length)[:, None]) % width
    return jnp.take_along_axis(out, at, axis=1)


class Text(NamedTuple):
    """Right-padded texts: tokens[B,T], length[B], and the place start[B] of the first token that counts."""

    tokens: jax.Array
    length: jax.Array
    start: jax.Array


def _check(settings: Settings, text: Text) -> None:
    """Refuse what has no meaning for a text that is there."""
    for name, none in (("num_samples", 1), ("top_logprobs", 0)):
        value = getattr(settings, name)
        checks.require(value == none, f"score: settings.{name}", str(none), value)
    if checks.is_concrete(text.length) and checks.is_concrete(text.start):
        output = np.max(np.asarray(text.length) - np.asarray(text.start))
        ok = not settings.constrained or bool(output <= settings.size)
        checks.require(ok, "max_new_tokens", f"at least the {output} tokens after start", settings.size)


class Plan(NamedTuple):
    """What is static in a program."""

    model: Model
    chunk: int


def over_text(plan: Plan, params: Params, text: Text, body: Any, carry: Any) -> Any:
    """``body(carry, logits[B,C,V], place[C]) -> (carry, out[B,C])`` over chunks of all places but 0: out [B,T].

    ``place`` is the index of the token that the logits are about. ``out`` may be a pytree, and so may the logits of a
    model that gives one. Places that do not count have 0. Chunks of a gradient are computed again.
    """
    tokens, length, start = text
    batch, inputs = tokens.shape[0], tokens.shape[1] - 1
    if inputs == 0:
        return jnp.zeros((batch, 1), jnp.float32)
    width = min(plan.chunk, inputs)
    count = -(-inputs // width)
    padded = jnp.pad(tokens[:, :-1], ((0, 0), (0, count * width - inputs)))

    @jax.checkpoint
    def one(carry: Any, i: jax.Array) -> Any:
        cache, carry = carry
        part = jax.lax.dynamic_slice_in_dim(padded, i * width, width, axis=1)
        lengths = jnp.clip(length - 1 - i * width, 0, width)
        logits, cache = plan.model.apply(params, part, cache, lengths=lengths)
        place = i * width + jnp.arange(width, dtype=jnp.int32) + 1
        wide = jax.tree.map(lambda x: x.astype(np.promote_types(x.dtype, np.float32)), logits)
        carry, out = body(carry, wide, place)
        return (cache, carry), out

    cache = plan.model.init_cache(params, batch, inputs)
    _, out = jax.lax.scan(one, (cache, carry), jnp.arange(count, dtype=jnp.int32))
    place = jnp.arange(inputs + 1, dtype=jnp.int32)[None, :]
    counts = (place >= start[:, None]) & (place < length[:, None])

    def joined(out: jax.Array) -> jax.Array:
        out = out.swapaxes(0, 1).reshape(batch, count * width)[:, :inputs]
        out = jnp.pad(out, ((0, 0), (1, 0)))
        return jnp.where(counts, out, jnp.zeros_like(out))

    return jax.tree.map(joined, out)


def logprob_of(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """log softmax of logits[...,V] at ids[...]."""
    picked = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    top = jnp.where(jnp.isneginf(top), 0, top)
    total = jnp.log(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1)) + top
    return jnp.where(jnp.isneginf(picked) & ~jnp.isnan(total), -jnp.inf, picked - total)


@functools.partial(jax.jit, static_argnums=0)
def _raw(plan: Plan, params: Params, text: Text) -> jax.Array:
    def body(carry: None, logits: jax.Array, place: jax.Array) -> Any:
        ids = jnp.take(text.tokens, place, axis=1, mode="clip")
        return carry, logprob_of(logits, ids)

    return over_text(plan, params, text, body, None)


@functools.partial(jax.jit, static_argnums=0)
def _processed(plan: Plan, params: Params, text: Text, rules: Rules, keys: jax.Array) -> jax.Array:
    tokens, length, start = text
    ctx = Context(tokens, start, start, rules.limit, keys)

    def one(states: Any, inputs: tuple[jax.Array, jax.Array]) -> Any:
        raw, place = inputs
        took = (place >= start) & (place < length)
        now = dataclasses.replace(ctx, length=jnp.broadcast_to(place, length.shape))
        token = jnp.take(tokens, place, axis=1, mode="clip")
        logits = transforms.process(rules.transform, raw, now, states, rules.greedy | ~took).logits
        best = jnp.where(token == transforms.first_max(logits)[1], 0, -jnp.inf)
        broken = jnp.isnan(raw).any(axis=1) | jnp.isposinf(raw).any(axis=1) | jnp.isnan(logits).any(axis=1)
        out = jnp.where(rules.greedy, best, logprob_of(logits, token))
        out = jnp.where(broken | (rules.limit < 0), jnp.nan, out)
        return transforms.advance(rules.transform, states, token, jnp.where(took, out, 0), took), out

    def body(states: Any, logits: jax.Array, place: jax.Array) -> Any:
        states, out = jax.lax.scan(one, states, (logits.swapaxes(0, 1), place))
        return states, out.swapaxes(0, 1)

    return over_text(plan, params, text, body, transforms.init(rules.transform, ctx))


def ranking(generated: Generated, *, by: Literal["raw", "processed"] = "raw", length_penalty: Any = 0.0) -> jax.Array:
    """The samples of each prompt from the best to the worst, [B,K]; see ``best_of``."""
    shape = generated.length.shape
    checks.require(len(shape) == 2, "best_of", "the result of num_samples above 1", f"lengths of shape {shape}")
    checks.require(generated.count is None, "best_of", "samples", "beams, which are in order")
    checks.require(by in ("raw", "processed"), "by", "'raw' or 'processed'", by)
    penalty = checks.real(length_penalty, lambda x: x >= 0, "length_penalty", "a number >= 0")
    terms = generated.logprob if by == "raw" else generated.processed_logprob
    length = jnp.maximum(generated.length, 1).astype(terms.dtype)
    total = terms.sum(axis=2) / length ** jnp.asarray(penalty, terms.dtype)
    failed = jnp.isin(generated.finish, jnp.array([Finish.NO_TOKEN, Finish.NAN, Finish.INVALID]))
    total = jnp.where(failed | jnp.isnan(total), -jnp.inf, total)
    return jnp.argsort(-total, axis=1, stable=True)


def best_of(
    generated: Generated, k: int = 1, *, by: Literal["raw", "processed"] = "raw", length_penalty: Any = 0.0
) -> Generated:
    """The k best of the samples of each prompt, best first: every field [B,K,...] becomes [B,k,...].

    Best: the largest sum of log probabilities (``by``: of the raw or the processed law) divided by length to the power
    of ``length_penalty``; an empty output has 0; equal ones keep their order; rows that failed (``nan``, ``no_token``,
    ``invalid``) come last. ValueError without an axis of samples, or for a k beyond them.

    >>> from jaxdecode import Settings, generate
    >>> from jaxdecode.testing import markov_model
    >>> settings, key = Settings(max_new_tokens=3, num_samples=4), jax.random.key(0)
    >>> out = generate(markov_model(), jnp.eye(3), [[0], [1]], key=key, settings=settings)
    >>> best_of(out).tokens.shape
    (2, 1, 3)
    """
    order = ranking(generated, by=by, length_penalty=length_penalty)
    batch, samples = order.shape
    checks.require(type(k) is int and 1 <= k <= samples, "k", f"a whole number in [1, {samples}]", k)
    rows = jnp.arange(batch)[:, None]
    return jax.tree.map(lambda x: x[rows, order[:, :k]], generated)
