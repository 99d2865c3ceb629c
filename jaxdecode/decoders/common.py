"""What every strategy does with a model: ask for its vocabulary, check it, prefill, run one call."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Bounded, Cache, Finish, Model, Params, Prompt, Rules
from jaxdecode.transforms import Context

__all__ = [
    "Begun",
    "begin",
    "cache_spec",
    "check_prompt",
    "check_rules",
    "forward",
    "logits_spec",
    "prefill",
    "room",
    "settled",
]

CHUNK = 512  # prompt tokens per prefill pass: bounds its memory, and costs nothing on the machines measured


@functools.partial(jax.jit, static_argnums=0)
def _probe(model: Model, params: Params, cache: Cache) -> jax.Array:
    """The logits of one token of each row; only its shape is asked for, and jit remembers that."""
    batch = jax.tree.leaves(cache)[0].shape[0] if jax.tree.leaves(cache) else 1
    tokens, one = jnp.zeros((batch, 1), jnp.int32), jnp.ones((batch,), jnp.int32)
    return model.apply(params, tokens, cache, lengths=one, logits_at=tokens)[0]


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _empty(model: Model, params: Params, batch_size: int, max_len: int) -> Cache:
    return model.init_cache(params, batch_size, max_len)


def cache_spec(model: Model, params: Params, batch_size: int, max_len: int) -> Cache:
    """Shapes of an empty cache; jit remembers them. ValueError: more than the model's context."""
    return _empty.eval_shape(model, params, batch_size, max_len)


def logits_spec(model: Model, params: Params, cache: Cache) -> jax.ShapeDtypeStruct:
    """Shape [B,1,V] and dtype of the model's logits, without running it. ValueError if it breaks the contract."""
    batch = jax.tree.leaves(cache)[0].shape[0] if jax.tree.leaves(cache) else 1
    spec = _probe.eval_shape(model, params, cache)
    ok = len(spec.shape) == 3 and spec.shape[:2] == (batch, 1) and jnp.issubdtype(spec.dtype, jnp.floating)
    checks.require(ok, "model.apply logits", f"floating [{batch}, 1, V]", f"{spec.dtype}{list(spec.shape)}")
    wide = np.promote_types(spec.dtype, np.float32)
    return jax.ShapeDtypeStruct(spec.shape, wide)


def check_prompt(prompt: Prompt, keys: jax.Array, vocab_size: int) -> jax.Array:
    """Check a prompt; returns valid[B], false for rows whose traced values are out of range."""
    tokens, length, cached = prompt
    batch, size = tokens.shape
    for name, x in (("length", length), ("cached", cached), ("keys", keys)):
        if x is not None:
            checks.require(x.shape == (batch,), name, f"shape ({batch},)", x.shape)
    cached = jnp.zeros_like(length) if cached is None else cached
    checks.require(jnp.issubdtype(tokens.dtype, jnp.integer), "prompt.tokens", "integers", tokens.dtype)
    inside = jnp.arange(size, dtype=jnp.int32)[None, :] < length[:, None]
    tests = (
        ("prompt length", (length >= 1) & (length <= size), f"in [1, {size}]", length),
        ("cached", (cached >= 0) & (cached < jnp.maximum(length, 1)), "in [0, length - 1]", cached),
        ("prompt ids", jnp.all((tokens >= 0) & (tokens < vocab_size) | ~inside, 1), f"in [0, {vocab_size})", tokens),
    )
    valid = jnp.ones((batch,), bool)
    for what, ok, expected, got in tests:
        if checks.is_concrete(ok):
            checks.require(bool(np.all(ok)), what, expected, got)
        valid &= ok
    return valid


def check_rules(rules: Rules, batch: int, max_new_tokens: int) -> jax.Array:
    """Check rules; returns valid[B], false for rows whose traced values are out of range."""
    checks.require(isinstance(max_new_tokens, int) and max_new_tokens >= 0, "max_new_tokens", ">= 0", max_new_tokens)
    for name, ndim in (("greedy", 1), ("eos", 2), ("limit", 1), ("stop", 3)):
        x = getattr(rules, name)
        ok = x.ndim == ndim and x.shape[0] == batch
        checks.require(ok, f"rules.{name}", f"{ndim} axes, the first of size {batch}", x.shape)
    if checks.is_concrete(rules.limit):
        over = int(np.max(rules.limit)) > max_new_tokens
        checks.require(not over, "rules.limit", f"at most max_new_tokens = {max_new_tokens}", rules.limit)
    return (rules.limit >= 0) & (rules.limit <= max_new_tokens)


def room(cache: Cache, prompt: Prompt) -> jax.Array | None:
    """Tokens that may follow each row's prompt, [B], until some node of the cache is full; None if none says."""
    nodes = jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, Bounded))
    left = [node.capacity - node.length for node in nodes if isinstance(node, Bounded)]
    if not left:
        return None
    rest = 1 if prompt.cached is None else prompt.length - prompt.cached
    return jnp.min(jnp.stack(left), axis=0) - rest


def settled(valid: jax.Array, limit: jax.Array) -> jax.Array:
    """The finish code of each row before its first token."""
    started = jnp.where(limit > 0, Finish.RUNNING, Finish.LENGTH)
    return jnp.where(valid, started, Finish.INVALID).astype(jnp.int32)


class Begun(NamedTuple):
    """Checked and prefilled: the cache, what transforms see, rules whose limits fit the cache, finish[B], logits."""

    cache: Cache
    context: Context
    rules: Rules
    finish: jax.Array
    spec: jax.ShapeDtypeStruct


def begin(
    model: Model,
    params: Params,
    keys: jax.Array,
    prompt: Prompt,
    rules: Rules,
    max_new_tokens: int,
    cache: Cache | None,
) -> Begun:
    """Check everything that is known now, then prefill all but each row's last prompt token."""
    shape = np.shape(prompt.tokens)
    checks.require(len(shape) == 2 and shape[1] >= 1, "prompt.tokens", "shape [B, S], S >= 1", shape)
    batch, size = shape
    cached = None if prompt.cached is None else prompt.cached.astype(jnp.int32)
    prompt = Prompt(prompt.tokens.astype(jnp.int32), prompt.length.astype(jnp.int32), cached)
    rows = check_rules(rules, batch, max_new_tokens)
    if cache is None:
        cache = model.init_cache(params, batch, size + max_new_tokens)
    spec = logits_spec(model, params, cache)
    rows &= check_prompt(prompt, keys, spec.shape[-1])
    left = room(cache, prompt)
    if left is not None:  # a full buffer ends a row like a limit does
        limit = jnp.where(rows, jnp.clip(rules.limit, 0, left), rules.limit)
        rules = dataclasses.replace(rules, limit=limit)
    finish = settled(rows, rules.limit)
    tokens = jnp.pad(prompt.tokens, ((0, 0), (0, max_new_tokens)))
    context = Context(tokens, prompt.length, prompt.length, rules.limit, keys)
    cache = prefill(model, params, cache, prompt, finish == Finish.RUNNING)
    return Begun(cache, context, rules, finish, spec)


def prefill(model: Model, params: Params, cache: Cache, prompt: Prompt, active: jax.Array) -> Cache:
    """Put all but the last prompt token of each ``active[B]`` row into the cache, in passes of ``CHUNK`` tokens.

    The last one is left to the first step, so no output head runs here. A pass that has nothing to do is skipped.
    """
    tokens, length, cached = prompt
    if cached is None:
        return cache
    batch, size = tokens.shape[0], tokens.shape[1] - 1
    count = jnp.where(active, length - 1 - cached, 0)
    if size == 0 or (checks.is_concrete(count) and not np.any(count)):  # the cache holds it all
        return cache
    passes = -(-size // CHUNK)
    width = min(size, CHUNK)
    at = jnp.minimum(cached[:, None] + jnp.arange(passes * width, dtype=jnp.int32)[None, :], size)
    tokens = jnp.take_along_axis(tokens, at, axis=1)
    nowhere = jnp.zeros((batch, 0), jnp.int32)

    def some(cache: Cache, part: jax.Array, lengths: jax.Array) -> Cache:
        return model.apply(params, part, cache, lengths=lengths, logits_at=nowhere)[1]

    def one(cache: Cache, i: jax.Array) -> tuple[Cache, None]:
        part = jax.lax.dynamic_slice_in_dim(tokens, i * width, width, axis=1)
        lengths = jnp.clip(count - i * width, 0, width)
        return jax.lax.cond(jnp.any(lengths > 0), some, lambda cache, *_: cache, cache, part, lengths), None

    if passes == 1:
        return one(cache, jnp.zeros((), jnp.int32))[0]
    return jax.lax.scan(one, cache, jnp.arange(passes, dtype=jnp.int32))[0]


def forward(
    model: Model, params: Params, tokens: jax.Array, cache: Cache, active: jax.Array
) -> tuple[jax.Array, Cache]:
    """One token ``tokens[B]`` of each ``active[B]`` row: logits [B,V] in float32 or wider, and the cache."""
    lengths, at = active.astype(jnp.int32), jnp.zeros((tokens.shape[0], 1), jnp.int32)
    logits, cache = model.apply(params, tokens[:, None], cache, lengths=lengths, logits_at=at)
    return logits[:, 0].astype(np.promote_types(logits.dtype, np.float32)), cache
