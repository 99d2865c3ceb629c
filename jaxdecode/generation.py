"""``generate``: one jitted call from prompts to results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks, kvcache
from jaxdecode import keys as keys_
from jaxdecode.base import Bounded, Cache, Decoder, Generated, Model, Params, Prompt, Rules, repeat_rows
from jaxdecode.decoders import beam, common, prompt_lookup, sample, speculative
from jaxdecode.decoders.speculation import paired
from jaxdecode.loop import run_until_done
from jaxdecode.meshes import over_data
from jaxdecode.rulebook import Settings
from jaxdecode.transforms import LogitsTransform

__all__ = ["Settings", "as_prompt", "decoder_of", "extend", "generate", "start", "vocab_size_of"]


def length_class(n: int) -> int:
    """The next of 0, 16, 24, 32, 48, 64, 96, 128, ...: prompts of one class share a compiled program."""
    if n <= 16:
        return 16 if n else 0
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 else power


def as_prompt(prompts: Any, lengths: Any, padding: str, vocab_size: int) -> Prompt:
    """Lists or arrays of ids as a right-padded Prompt; concrete ones are padded up to their length class."""
    checks.require(padding in ("right", "left"), "padding", "'right' or 'left'", padding)
    if isinstance(prompts, (list, tuple)):
        given = {k: v for k, v in (("lengths", lengths), ("padding", padding)) if v is not None and v != "right"}
        checks.require(not given, ", ".join(given), "none beside lists of ids", *given.values() or ("none",))
        rows = [_ids(p, f"prompts[{i}]") for i, p in enumerate(prompts)]
        checks.require(len(rows) > 0, "prompts", "at least one prompt", "none")
        for i, row in enumerate(rows):
            checks.require(row.size > 0, f"prompts[{i}]", "a non-empty list of ids", row.tolist())
            checks.token_ids(row, vocab_size, f"prompts[{i}]")
        tokens: Any
        lengths = np.array([len(r) for r in rows], np.int32)
        tokens = np.zeros((len(rows), int(lengths.max())), np.int32)
        for row, out in zip(rows, tokens, strict=True):
            out[: len(row)] = row
    else:
        tokens, lengths = _arrays(prompts, lengths, vocab_size, padding)
    if checks.is_concrete(tokens):
        extra = 1 + length_class(tokens.shape[1] - 1) - tokens.shape[1]
        tokens = np.pad(np.asarray(tokens), ((0, 0), (0, extra)))
    cached: Any = np.zeros((tokens.shape[0],), np.int32)
    return Prompt(tokens, lengths, cached)


def _ids(prompt: Any, what: str) -> np.ndarray:
    try:
        ids = np.asarray(prompt)
    except ValueError:  # ragged
        ids = None
    checks.require(ids is not None and ids.ndim == 1, what, "a list of ids", prompt)
    return np.asarray(ids)


def _arrays(tokens: Any, lengths: Any, vocab_size: int, padding: str) -> tuple[Any, Any]:
    """Array prompts [B,S] and lengths [B], right-padded."""
    shape = np.shape(tokens)
    checks.require(len(shape) == 2 and min(shape) > 0, "prompts", "lists of ids or an array [B, S]", f"shape {shape}")
    lengths = np.full(shape[:1], shape[1], np.int32) if lengths is None else lengths
    checks.require(np.shape(lengths) == shape[:1], "lengths", f"shape ({shape[0]},)", np.shape(lengths))
    for x, name in ((tokens, "prompts"), (lengths, "lengths")):
        dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
        checks.require(jnp.issubdtype(dtype, jnp.integer), name, "integers", dtype)
    if checks.is_concrete(lengths):
        lengths = np.asarray(lengths, np.int32)
        checks.require(bool(np.all((lengths >= 1) & (lengths <= shape[1]))), "lengths", f"in [1, {shape[1]}]", lengths)
    concrete = checks.is_concrete(tokens) and checks.is_concrete(lengths)
    xp: Any = np if concrete else jnp
    tokens = xp.asarray(tokens).astype(xp.int32)
    steps = xp.arange(shape[1])[None, :]
    if padding == "left":
        tokens = xp.take_along_axis(tokens, (steps + (shape[1] - lengths)[:, None]) % shape[1], axis=1)
    if concrete:  # padding may hold anything
        checks.token_ids(np.where(steps < lengths[:, None], tokens, 0), vocab_size, "prompts")
    return tokens, lengths


def _cache_len(model: Model, params: Params, prompt: Prompt, limit: Any, new: int, asked: int | None) -> int:
    """Slots per row: what was asked for, else a length class, or as much of it as the model's context allows."""
    batch, size = prompt.tokens.shape
    known = checks.is_concrete(prompt.length) and checks.is_concrete(limit)
    need = int(np.max(np.asarray(prompt.length) + np.asarray(limit))) if known else size + new

    def accepts(n: int) -> bool:
        try:
            common.cache_spec(model, params, batch, n)
        except ValueError:
            return False
        return True

    if asked is not None:
        checks.require(isinstance(asked, int), "cache_len", "a whole number", asked)
        checks.require(asked >= need, "cache_len", f"at least prompt + max_new_tokens = {need}", asked)
        common.cache_spec(model, params, batch, asked)
        return asked
    high = max(need, -(-(size + new) // 64) * 64)
    if accepts(high):
        return high
    common.cache_spec(model, params, batch, need)
    low, high = need, high - 1
    while low < high:  # the largest length in [need, high] that the model accepts
        middle = (low + high + 1) // 2
        low, high = (middle, high) if accepts(middle) else (low, middle - 1)
    return low


class _Plan(NamedTuple):
    """What is static in a program; cache_len 0: the decoder makes its cache."""

    decoder: Decoder
    model: Model
    size: int
    samples: int
    cache_len: int


@functools.partial(jax.jit, static_argnums=0)
def _begin(plan: _Plan, params: Params, given: Cache | None, keys: Any, prompt: Prompt, rules: Rules) -> Any:
    batch, size = prompt.tokens.shape
    keys, prompt, rules = over_data((keys, prompt, rules))
    cache = plan.model.init_cache(params, batch, plan.cache_len) if given is None and plan.cache_len else given
    state = plan.decoder.init(params, keys, prompt, rules, max_new_tokens=plan.size, cache=cache)
    if plan.samples == 1:
        return state
    if kvcache.only_nodes(state.cache):  # the prompt's keys and values are kept once, however many continue it
        state = dataclasses.replace(state, cache=kvcache.share(state.cache, max(plan.size, 1), size))
    state = repeat_rows(state, plan.samples)
    number = jnp.tile(jnp.arange(plan.samples, dtype=jnp.uint32), batch)
    return dataclasses.replace(state, keys=jax.vmap(jax.random.fold_in)(state.keys, number))


@functools.partial(jax.jit, static_argnums=0)
def _whole(plan: _Plan, params: Params, given: Cache | None, keys: Any, prompt: Prompt, rules: Rules) -> Generated:
    state = _begin(plan, params, given, keys, prompt, rules)
    result = plan.decoder.finish(run_until_done(plan.decoder, params, state))
    if plan.samples == 1:
        return result
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // plan.samples, plan.samples, *x.shape[1:]), result)


def _prepare(
    model: Model,
    params: Params,
    prompts: Any,
    *,
    key: jax.Array | None = None,
    settings: Settings | None = None,
    lengths: Any = None,
    padding: Literal["right", "left"] = "right",
    row_ids: Sequence[int | str] | jax.Array | None = None,
    cache_len: int | None = None,
    cache: Cache | None = None,
    cached: Any = None,
    transform: LogitsTransform | None = None,
    decoder: Decoder | None = None,
    draft: tuple[Model, Params] | None = None,
) -> tuple[_Plan, Params, Cache | None, jax.Array, Prompt, Rules]:
    """Check and convert the arguments of ``generate`` into those of the compiled program."""
    settings = Settings() if settings is None else settings
    vocab_size = vocab_size_of(model, params)
    prompt = as_prompt(prompts, lengths, padding, vocab_size)
    batch = prompt.tokens.shape[0]
    rules = settings.rules(batch, vocab_size, transform=transform)
    if key is None:
        cold = checks.is_concrete(rules.greedy) and bool(np.all(rules.greedy))
        cold |= settings.beams is not None
        checks.require(cold, "key", "a jax.random.key, since some row samples (temperature above 0)", "None")
        key = jax.random.key(0)
    top = settings.top_logprobs
    checks.require(top <= vocab_size, "top_logprobs", f"in [0, {vocab_size}]", top)
    if decoder is None:
        decoder = decoder_of(model, settings, None if draft is None else draft[0])
    else:
        for name, off in (("top_logprobs", 0), ("prompt_lookup", None), ("draft_length", None), ("width", None)):
            value = getattr(settings, name)
            what = name if name != "width" else "beams, without_replacement"
            checks.require(value == off, what, f"{off} beside a decoder (its factory takes it)", value)
    if draft is not None:
        size = vocab_size_of(*draft)
        checks.require(size == vocab_size, "draft", f"a model of the same {vocab_size} ids", size)
        model, params = paired(model, draft[0]), (params, draft[1])
    if cache is None:
        checks.require(cached is None, "cached", "none without a cache", cached)
        cache_len = _cache_len(model, params, prompt, rules.limit, settings.size, cache_len)
        cache_len = cache_len if settings.width is None else 0  # beams have a tail of their own
    else:
        checks.require(cache_len is None, "cache_len", "none beside a cache", cache_len)
        prompt, cache = _continued(model, params, prompt, cache, cached, rules.limit)
    keys = keys_.row_keys(key, batch, row_ids)
    samples = settings.num_samples if settings.width is None else 1  # beams of a row are no rows
    return _Plan(decoder, model, settings.size, samples, cache_len or 0), params, cache, keys, prompt, rules


def decoder_of(model: Model, settings: Settings, draft_model: Model | None = None) -> Decoder:
    """The decoder that ``settings`` ask for. ValueError for drafts from two places, or from none, or for beams."""
    extras: Any = {"top_logprobs": settings.top_logprobs, "log_weight": settings.constrained}
    size, looks, width = settings.draft_length, settings.prompt_lookup, settings.width
    if width is not None:
        given = "a draft model" if draft_model is not None else "prompt_lookup"
        checks.require(
            draft_model is None and looks is None, "beams, without_replacement", "no drafts beside it", given
        )
        return beam(model, width=width, sampled=settings.without_replacement)
    if draft_model is not None:
        checks.require(looks is None, "prompt_lookup", "None beside a draft model", looks)
        lengths: Any = {} if size is None else {"draft_length": size}
        return speculative(model, draft_model, **extras, **lengths)
    checks.require(size is None, "draft_length", "None without a draft model", size)
    if looks is not None:
        return prompt_lookup(model, draft_length=looks, **extras)
    return sample(model, **extras)


def _continued(
    model: Model, params: Params, prompt: Prompt, cache: Cache, cached: Any, limit: Any
) -> tuple[Prompt, Cache]:
    """The prompt beside a cache that holds it, all but the last token, if that can be known; checks what can be."""
    batch = prompt.tokens.shape[0]
    rows = common.logits_spec(model, params, cache).shape[0]
    checks.require(rows == batch, "cache", f"one of {batch} rows", f"{rows} rows")
    all_but_last = cached is None
    if cached is None:
        cached = prompt.length - 1
    else:
        cached = checks.whole(cached, lambda n: n >= 0, "cached", "whole numbers >= 0")
        ok = cached.shape in ((), (batch,))
        checks.require(ok, "cached", f"a number or {batch} of them", f"shape {cached.shape}")
        cached = (np if checks.is_concrete(cached) else jnp).broadcast_to(cached, (batch,))
    if checks.is_concrete(cached) and checks.is_concrete(prompt.length):
        checks.require(bool(np.all(cached < prompt.length)), "cached", "less than each prompt's length", cached)
    prompt = prompt._replace(cached=cached)
    nodes = jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, Bounded))
    first = nodes[0] if nodes else None
    held = first.total if isinstance(first, kvcache.KVCache) else first.length if isinstance(first, Bounded) else None
    if held is not None and checks.is_concrete(held) and checks.is_concrete(cached):
        checks.require(bool(np.all(held == cached)), "cached", f"as many tokens as the cache holds, {held}", cached)
    room = common.room(cache, prompt)
    if room is not None and checks.is_concrete(room) and checks.is_concrete(limit):
        fits = bool(np.all(np.asarray(room) >= np.asarray(limit)))
        checks.require(fits, "max_new_tokens", "what the cache has room for after each prompt", limit)
    rest = prompt.length - 1 - cached
    if checks.is_concrete(rest) and np.any(rest):  # here, and not in the decoder, which would go through all S places
        width = 1 + length_class(int(np.max(rest)))
        at = np.minimum(cached[:, None] + np.arange(width), prompt.tokens.shape[1] - 1)
        left = Prompt(jnp.take_along_axis(jnp.asarray(prompt.tokens), at, axis=1), rest + 1, jnp.zeros_like(rest))
        cache = extend(model, params, cache, left)
    if checks.is_concrete(rest) or all_but_last:
        prompt = prompt._replace(cached=None)
    return _widened(prompt, cache), cache


def _widened(prompt: Prompt, cache: Cache) -> Prompt:
    """The prompt with S >= the tokens in every node: where rows are forked, the first S slots are what they share."""
    nodes = jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, Bounded))
    held = [
        int(np.max(node.length)) if checks.is_concrete(node.length) else node.capacity
        for node in nodes
        if isinstance(node, Bounded)
    ]
    more = max(length_class(max(held, default=0)) - prompt.tokens.shape[1], 0)
    xp: Any = np if checks.is_concrete(prompt.tokens) else jnp
    return prompt._replace(tokens=xp.pad(prompt.tokens, ((0, 0), (0, more))))


def vocab_size_of(model: Model, params: Params) -> int:
    cache = common.cache_spec(model, params, 1, 1)
    return int(common.logits_spec(model, params, cache).shape[-1])


def generate(
    model: Model,
    params: Params,
    prompts: Any,
    *,
    key: jax.Array | None = None,
    settings: Settings | None = None,
    lengths: Any = None,
    padding: Literal["right", "left"] = "right",
    row_ids: Sequence[int | str] | jax.Array | None = None,
    cache_len: int | None = None,
    cache: Cache | None = None,
    cached: Any = None,
    transform: LogitsTransform | None = None,
    decoder: Decoder | None = None,
    draft: tuple[Model, Params] | None = None,
) -> Generated:
    """Decode a batch of prompts; jits itself, and may be called under jit (array prompts).

    prompts: lists of ids, or int [B,S] with ``lengths[B]`` and ``padding``. key: one, or one per row; None only if
    every temperature is concretely 0. row_ids: what each row's key is folded with (default 0 .. B-1), so that a row's
    output does not depend on its place. cache_len: slots per row. cache: one that ``prefill`` made, of the first
    ``cached[B]`` tokens of each prompt (default: all but the last), so that these are not processed again.
    transform: stands before temperature and filters. draft: a model over the same ids, and its params, that drafts what
    this one then judges (``speculative``).
    ValueError for bad input, before any compute. Settings that are traced and out of range end their row ``invalid``.

    >>> from jaxdecode.testing import markov_model
    >>> table = jnp.log(jnp.array([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1]]))
    >>> settings = Settings(max_new_tokens=3, temperature=0, eos=[0])
    >>> generate(markov_model(), table, [[0], [0, 1]], settings=settings).to_lists()
    [[1, 2, 0], [2, 0]]
    """
    prepared = _prepare(
        model,
        params,
        prompts,
        key=key,
        settings=settings,
        lengths=lengths,
        padding=padding,
        row_ids=row_ids,
        cache_len=cache_len,
        cache=cache,
        cached=cached,
        transform=transform,
        decoder=decoder,
        draft=draft,
    )
    return _whole(*prepared)


def start(model: Model, params: Params, prompts: Any, **options: Any) -> tuple[Decoder, Any]:
    """The decoder and its prefilled state for the arguments of ``generate``, to hand to ``run`` or ``stream``."""
    prepared = _prepare(model, params, prompts, **options)
    return prepared[0].decoder, _begin(*prepared)


@functools.partial(jax.jit, static_argnums=0)
def extend(model: Model, params: Params, cache: Cache, prompt: Prompt) -> Cache:
    """``cache`` with all but the last token of each row's ``prompt``, of which it holds ``prompt.cached``."""
    return common.prefill(model, params, cache, prompt, jnp.ones_like(prompt.length, bool))
