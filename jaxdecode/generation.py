"""``Settings`` and ``generate``: one jitted call from prompts to results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks, kvcache, transforms
from jaxdecode import keys as keys_
from jaxdecode.base import Decoder, Generated, Model, Params, Prompt, Rules, Shared, repeat_rows
from jaxdecode.constraints.rules import check_constraints, constraint_transforms
from jaxdecode.decoders import common, sample
from jaxdecode.loop import run_until_done
from jaxdecode.transforms import LogitsTransform

__all__ = ["Settings", "generate", "start"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to decode. Numbers are scalars or one per row [B], and may be traced; None leaves a filter out.

    An off value (top_k=0, top_p=1, min_p=0) keeps the filter in the program, so changing numbers never recompiles.
    max_new_tokens: output tokens, 0 allowed; its maximum N is static. temperature: 0 is a greedy row. eos: end ids
    for all rows, or int [B,E] padded with -1. stop: token sequences for all rows, or one list of them per row.
    num_samples: outputs per prompt, one prefill for all of them. top_logprobs: likeliest ids to record at every step.
    regex, json_schema, choices: a compiled grammar (one of them; ``choices`` may be lists of ids) that the output,
    closed by an end id, has to match. prefix: ids that the output begins with, or one list of them per row.
    ValueError for anything out of range.
    """

    max_new_tokens: Any = 128
    temperature: Any = 1.0
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    eos: Any = ()
    stop: Any = ()
    num_samples: int = 1
    top_logprobs: int = 0
    regex: Any = None
    json_schema: Any = None
    choices: Any = None
    prefix: Any = None

    def __post_init__(self) -> None:
        checks.require(
            checks.is_concrete(self.max_new_tokens),
            "max_new_tokens",
            "concrete numbers (N is static)",
            "a traced value",
        )
        for name, least in (("num_samples", 1), ("top_logprobs", 0)):
            value = getattr(self, name)
            checks.require(type(value) is int and value >= least, name, f"a whole number >= {least}", value)
        check_constraints(self.regex, self.json_schema, self.choices, self.stop)
        self._chain()
        self._limit()

    @property
    def constrained(self) -> bool:
        """Whether something says what the output may be, so that its weight (S9.3) is of use."""
        return any(x is not None for x in (self.regex, self.json_schema, self.choices, self.prefix))

    def _limit(self) -> Any:
        return checks.whole(self.max_new_tokens, lambda n: n >= 0, "max_new_tokens", "whole numbers >= 0")

    @property
    def size(self) -> int:
        """N, the largest ``max_new_tokens``."""
        return int(np.max(self._limit(), initial=0))

    def _chain(self, masks: dict[str, LogitsTransform] | None = None) -> tuple[dict[str, LogitsTransform], Any]:
        """The transforms by name, in the documented order, and which rows are greedy."""
        warm = transforms.temperature(self.temperature)
        xp: Any = np if checks.is_concrete(warm.params) else jnp
        greedy = warm.params == 0
        parts = {} if masks is None else dict(masks)
        parts["temperature"] = dataclasses.replace(
            warm, params=xp.where(greedy, xp.ones_like(warm.params), warm.params)
        )
        for name, factory in (("top_k", transforms.top_k), ("top_p", transforms.top_p), ("min_p", transforms.min_p)):
            value = getattr(self, name)
            if value is not None:
                parts[name] = factory(value)
        return parts, greedy

    def rules(self, batch_size: int, vocab_size: int, *, transform: LogitsTransform | None = None) -> Rules:
        """These settings as ``Rules`` for B rows; ``transform`` comes before temperature and filters.

        ValueError for an array whose length is not B, or an id outside [0, V).
        """
        limit, eos = _rows(self._limit(), batch_size, "max_new_tokens"), _eos(self.eos, batch_size, vocab_size)
        first = {} if transform is None else {"transform": transforms.chain(transform)}
        if self.constrained:
            kinds = (self.regex, self.json_schema, self.choices, self.prefix)
            first |= constraint_transforms(*kinds, eos=eos, limit=limit, vocab_size=vocab_size)
        named, greedy = self._chain(first)
        rows = {
            name: jax.tree.map(lambda x, name=name: _rows(x, batch_size, name), part, is_leaf=_shared)
            for name, part in named.items()
        }
        traced = [checks.in_range(p.params) for name, p in rows.items() if name not in first and _traced(p.params)]
        if _traced(eos):
            traced.append(jnp.all((eos >= -1) & (eos < vocab_size), axis=1))
        for valid in traced:  # filters are skipped by greedy rows: their poison must show here
            limit = jnp.where(valid, limit, -1)
        return Rules(
            transform=transforms.chain(*rows.values()),
            greedy=_rows(greedy, batch_size, "temperature"),
            eos=eos,
            limit=limit,
            stop=_stop(self.stop, batch_size, vocab_size),
        )


def _traced(x: Any) -> bool:
    return not checks.is_concrete(x)


def _shared(x: Any) -> bool:
    return isinstance(x, Shared)


def _rows(x: Any, batch_size: int, what: str) -> Any:
    """A scalar as [B]; an array must have B rows already."""
    if _shared(x):
        return x
    if np.ndim(x) == 0:
        xp: Any = np if checks.is_concrete(x) and not isinstance(x, jax.Array) else jnp
        return xp.broadcast_to(x, (batch_size,))
    checks.require(np.shape(x)[0] == batch_size, what, f"a scalar or {batch_size} rows", f"shape {np.shape(x)}")
    return x


def _eos(eos: Any, batch_size: int, vocab_size: int) -> Any:
    if not checks.is_concrete(eos):
        ok = eos.ndim == 2 and eos.shape[0] == batch_size and jnp.issubdtype(eos.dtype, jnp.integer)
        checks.require(ok, "eos", f"integers [{batch_size}, E]", f"{eos.dtype}{eos.shape}")
        return eos.astype(jnp.int32)
    try:
        array = np.asarray(eos)
    except ValueError:  # ragged
        array = np.asarray([None])
    array = np.zeros((0,), np.int32) if array.size == 0 else array
    checks.require(array.size == 0 or np.issubdtype(array.dtype, np.integer), "eos", "integer ids", eos)
    checks.require(bool(np.all((array >= -1) & (array < vocab_size))), "eos", f"ids in [0, {vocab_size}), or -1", eos)
    array = array.astype(np.int32)
    if array.ndim <= 1:
        return np.broadcast_to(array.reshape(1, -1), (batch_size, array.size))
    checks.require(array.ndim == 2 and len(array) == batch_size, "eos", f"ids, or [{batch_size}, E]", array.shape)
    return array


def _stop(stop: Any, batch_size: int, vocab_size: int) -> Any:
    checks.require(checks.is_concrete(stop), "stop", "concrete sequences", "a traced array")
    expected = f"token sequences, or {batch_size} lists of them"
    try:  # a bare sequence of ids, a list of sequences, or an empty list, which is either
        bare = [len(r) > 0 and not any(np.ndim(t) for t in r) for r in stop]
        nested = [len(r) > 0 and all(np.ndim(t) for t in r) for r in stop]
    except TypeError:
        raise ValueError(f"stop: expected {expected}, got {checks.shorten(stop)}") from None
    clear = all(b or n or len(r) == 0 for b, n, r in zip(bare, nested, stop, strict=True))
    one_kind = not (any(bare) and any(nested)) and not any(isinstance(r, str) for r in stop)
    checks.require(clear and one_kind, "stop", expected, stop)
    rows = [list(r) for r in stop]
    per_row = [rows] * batch_size if any(bare) or not rows else rows
    checks.require(len(per_row) == batch_size, "stop", expected, len(per_row))
    n = max((len(r) for r in per_row), default=0)
    longest = max((len(s) for r in per_row for s in r), default=0)
    out = np.full((batch_size, n, longest), -1, np.int32)
    for b, sequences in enumerate(per_row):
        for i, sequence in enumerate(sequences):
            checks.require(len(sequence) > 0, "stop", "non-empty sequences", sequence)
            ids = np.asarray(sequence)
            checks.token_ids(ids, vocab_size, "stop")
            out[b, i, longest - len(ids) :] = ids
    return out


def length_class(n: int) -> int:
    """The next of 0, 16, 24, 32, 48, 64, 96, 128, ...: prompts of one class share a compiled program."""
    if n <= 16:
        return 16 if n else 0
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if n <= power * 3 // 4 else power


def _as_prompt(prompts: Any, lengths: Any, padding: str, vocab_size: int) -> Prompt:
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

    def allocate(n: int) -> None:
        jax.eval_shape(lambda p: model.init_cache(p, batch, n), params)

    if asked is not None:
        checks.require(isinstance(asked, int), "cache_len", "a whole number", asked)
        checks.require(asked >= need, "cache_len", f"at least prompt + max_new_tokens = {need}", asked)
        allocate(asked)
        return asked
    allocate(need)
    low, high = need, max(need, -(-(size + new) // 64) * 64)
    while low < high:  # the largest length in [need, high] that the model accepts
        middle = (low + high + 1) // 2
        try:
            allocate(middle)
            low = middle
        except ValueError:
            high = middle - 1
    return low


class _Plan(NamedTuple):
    """What is static in a program."""

    decoder: Decoder
    model: Model
    size: int
    samples: int
    cache_len: int


@functools.partial(jax.jit, static_argnums=0)
def _begin(plan: _Plan, params: Params, keys: Any, prompt: Prompt, rules: Rules) -> Any:
    batch, size = prompt.tokens.shape
    cache = plan.model.init_cache(params, batch, plan.cache_len)
    state = plan.decoder.init(params, keys, prompt, rules, max_new_tokens=plan.size, cache=cache)
    if plan.samples == 1:
        return state
    if kvcache.only_nodes(state.cache):  # the prompt's keys and values are kept once, however many continue it
        state = dataclasses.replace(state, cache=kvcache.share(state.cache, max(plan.size, 1), size))
    state = repeat_rows(state, plan.samples)
    number = jnp.tile(jnp.arange(plan.samples, dtype=jnp.uint32), batch)
    return dataclasses.replace(state, keys=jax.vmap(jax.random.fold_in)(state.keys, number))


@functools.partial(jax.jit, static_argnums=0)
def _whole(plan: _Plan, params: Params, keys: Any, prompt: Prompt, rules: Rules) -> Generated:
    state = _begin(plan, params, keys, prompt, rules)
    result = plan.decoder.finish(run_until_done(plan.decoder, params, state))
    if plan.samples == 1:
        return result
    return jax.tree.map(lambda x: x.reshape(-1, plan.samples, *x.shape[1:]), result)


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
    transform: LogitsTransform | None = None,
    decoder: Decoder | None = None,
) -> tuple[_Plan, Params, jax.Array, Prompt, Rules]:
    """Check and convert the arguments of ``generate`` into those of the compiled program."""
    settings = Settings() if settings is None else settings
    vocab_size = _vocab_size(model, params)
    prompt = _as_prompt(prompts, lengths, padding, vocab_size)
    batch = prompt.tokens.shape[0]
    rules = settings.rules(batch, vocab_size, transform=transform)
    if key is None:
        cold = checks.is_concrete(rules.greedy) and bool(np.all(rules.greedy))
        checks.require(cold, "key", "a jax.random.key, since some row samples (temperature above 0)", "None")
        key = jax.random.key(0)
    top = settings.top_logprobs
    checks.require(top <= vocab_size, "top_logprobs", f"in [0, {vocab_size}]", top)
    if decoder is None:
        decoder = sample(model, top_logprobs=settings.top_logprobs, log_weight=settings.constrained)
    else:
        checks.require(top == 0, "top_logprobs", "0 beside a decoder (its factory takes it)", top)
    cache_len = _cache_len(model, params, prompt, rules.limit, settings.size, cache_len)
    keys = keys_.row_keys(key, batch, row_ids)
    return _Plan(decoder, model, settings.size, settings.num_samples, cache_len), params, keys, prompt, rules


def _vocab_size(model: Model, params: Params) -> int:
    cache = jax.eval_shape(lambda p: model.init_cache(p, 1, 1), params)
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
    transform: LogitsTransform | None = None,
    decoder: Decoder | None = None,
) -> Generated:
    """Decode a batch of prompts; jits itself, and may be called under jit (array prompts).

    prompts: lists of ids, or int [B,S] with ``lengths[B]`` and ``padding``. key: one, or one per row; None only if
    every temperature is concretely 0. row_ids: what each row's key is folded with (default 0 .. B-1), so that a row's
    output does not depend on its place. cache_len: slots per row. transform: stands before temperature and filters.
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
        transform=transform,
        decoder=decoder,
    )
    return _whole(*prepared)


def start(model: Model, params: Params, prompts: Any, **options: Any) -> tuple[Decoder, Any]:
    """The decoder and its prefilled state for the arguments of ``generate``, to hand to ``run`` or ``stream``."""
    prepared = _prepare(model, params, prompts, **options)
    return prepared[0].decoder, _begin(*prepared)
