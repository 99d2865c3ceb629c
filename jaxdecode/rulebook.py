"""``Settings``: how to decode, in numbers and lists, and their translation into ``Rules``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks, processing, transforms
from jaxdecode.base import Rules, Shared
from jaxdecode.constraints.rules import check_constraints
from jaxdecode.transforms import LogitsTransform, id_lists

__all__ = ["Settings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to decode. Numbers are scalars or one per row [B], and may be traced; None leaves a transform out.

    An off value (top_k=0, top_p=1, min_p=0) keeps a transform in the program, so changing numbers never recompiles.
    max_new_tokens: output tokens, 0 allowed; its maximum N is static. min_new_tokens: no end id before. temperature:
    0 is a greedy row. eos: end ids for all rows, or int [B,E] padded with -1. stop: token sequences for all rows, or
    one list of them per row. num_samples: outputs per prompt, one prefill for all of them; ``without_replacement``:
    all different. beams: beam search, for as many outputs, best first by log probability / length^length_penalty.
    top_logprobs: likeliest ids
    to record at every step. regex, json_schema, choices: a compiled grammar (one of them; ``choices`` may be lists of
    ids) that the output, closed by an end id, has to match. prefix: ids that the output begins with, or one list of
    them per row. prompt_lookup: the most tokens to draft from a row's own history, None: no drafts; draft_length: the
    most that a draft model drafts. docs/settings.md defines all others and their order. ValueError for anything out of
    range.
    """

    max_new_tokens: Any = 128
    min_new_tokens: Any = 0
    temperature: Any = 1.0
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    typical_p: Any = None
    epsilon: Any = None
    eta: Any = None
    top_n_sigma: Any = None
    p_less: Any = None
    xtc: Any = None
    dry: Any = None
    mirostat: Any = None
    dynamic_temperature: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    no_repeat_ngram: Any = None
    logit_bias: Any = None
    allowed_ids: Any = None
    banned_ids: Any = None
    bad_words: Any = None
    forced: Any = None
    regex: Any = None
    json_schema: Any = None
    choices: Any = None
    prefix: Any = None
    eos: Any = ()
    stop: Any = ()
    num_samples: int = 1
    without_replacement: bool = False
    beams: int | None = None
    length_penalty: Any = 0.0
    top_logprobs: int = 0
    prompt_lookup: int | None = None
    draft_length: int | None = None

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
        for name in ("prompt_lookup", "draft_length"):
            value = getattr(self, name)
            known = value is None or (type(value) is int and value >= 1)
            checks.require(known, name, "a whole number >= 1, or None", value)
        check_constraints(self.regex, self.json_schema, self.choices, self.stop)
        processing.check_numbers(self)
        self._check_beams()
        least, most = self._least(), self._limit()
        if checks.is_concrete(least) and (np.ndim(least) == 0 or np.ndim(most) == 0 or least.shape == most.shape):
            few = bool(np.all(least <= most))
            checks.require(few, "min_new_tokens", f"at most max_new_tokens = {most}", self.min_new_tokens)

    def _check_beams(self) -> None:
        beams, alpha = self.beams, self.length_penalty
        checks.require(beams is None or (type(beams) is int and beams >= 1), "beams", "a whole number >= 1", beams)
        several = {"num_samples": self.num_samples > 1, "without_replacement": self.without_replacement}
        given = ", ".join(name for name, there in several.items() if there and beams is not None)
        checks.require(not given, "beams", "neither num_samples nor without_replacement beside it", given)
        known = not checks.is_concrete(alpha) or bool(np.all((np.asarray(alpha) >= 0) & np.isfinite(alpha)))
        checks.require(known, "length_penalty", "finite numbers >= 0", alpha)
        used = checks.is_concrete(alpha) and not np.any(alpha)
        checks.require(beams is not None or used, "length_penalty", "beams beside it, or 0", alpha)
        top = self.top_logprobs
        checks.require(self.width is None or top == 0, "top_logprobs", "0 beside beams or without_replacement", top)

    @property
    def width(self) -> int | None:
        """How many hypotheses beam search or sampling without replacement keeps per row; None for other strategies."""
        return self.num_samples if self.without_replacement else self.beams

    @property
    def constrained(self) -> bool:
        """Whether something says what the output may be, so that its weight (S9.3) is of use."""
        return any(x is not None for x in (self.regex, self.json_schema, self.choices, self.prefix))

    def _limit(self) -> Any:
        return checks.whole(self.max_new_tokens, lambda n: n >= 0, "max_new_tokens", "whole numbers >= 0")

    def _least(self) -> Any:
        return checks.whole(self.min_new_tokens, lambda n: n >= 0, "min_new_tokens", "whole numbers >= 0")

    @property
    def size(self) -> int:
        """N, the largest ``max_new_tokens``."""
        return int(np.max(self._limit(), initial=0))

    def rules(self, batch_size: int, vocab_size: int, *, transform: LogitsTransform | None = None) -> Rules:
        """These settings as ``Rules`` for B rows; ``transform`` comes between the bias and the constraints.

        ValueError for an array whose length is not B, or an id outside [0, V).
        """
        eos = _eos(self.eos, batch_size, vocab_size)
        limit, least = (
            _rows(x, batch_size, name)
            for x, name in ((self._limit(), "max_new_tokens"), (self._least(), "min_new_tokens"))
        )
        named, greedy = processing.build(self, vocab_size, eos, limit, transform)
        rows = {
            name: jax.tree.map(lambda x, name=name: _rows(x, batch_size, name), part, is_leaf=_shared)
            for name, part in named.items()
        }
        known = ("transform", "grammar")  # the caller's own, and what is concrete
        traced = [valid for name, part in rows.items() if name not in known for valid in _valid(part.params)]
        if _traced(eos):
            traced.append(jnp.all((eos >= -1) & (eos < vocab_size), axis=1))
        if _traced(least):
            traced.append((least >= 0) & (least <= limit))
        traced += processing.check_mirostat(rows)
        if self.beams is not None:
            rows, traced = _without_filters(rows, traced)
            greedy = np.zeros((), bool)  # temperature 0 is read as 1
        if self.without_replacement and checks.is_concrete(greedy):
            checks.require(not np.any(greedy), "temperature", "above 0 to draw without replacement", self.temperature)
        powers = None
        if self.beams is not None:
            powers, valid = _powers(self.length_penalty, batch_size, self.size)
            traced += valid
        for valid in traced:  # filters are skipped by greedy rows: their poison must show here
            limit = jnp.where(valid, limit, -1)
        return Rules(
            transform=transforms.chain(*rows.values()),
            greedy=_rows(greedy, batch_size, "temperature"),
            eos=eos,
            limit=limit,
            stop=_stop(self.stop, batch_size, vocab_size),
            length_power=powers,
        )


def _without_filters(
    rows: dict[str, LogitsTransform], traced: list[Any]
) -> tuple[dict[str, LogitsTransform], list[Any]]:
    """The chain of beams. ValueError for a filter that is on: beams take the best, and cut no law."""
    kept, on = processing.split_filters(rows)
    if not checks.is_concrete(on):
        return kept, [*traced, ~on]
    names = ", ".join(rows.keys() - kept.keys())
    checks.require(not np.any(on), "beams", "all filters off", f"{names} on in some row")
    return kept, traced


def _powers(alpha: Any, batch_size: int, size: int) -> tuple[Any, list[Any]]:
    """length^alpha of each row and length 0 .. size (1 of the empty one), and which rows of a traced alpha hold."""
    alpha = _rows(alpha, batch_size, "length_penalty")
    steps = np.maximum(np.arange(size + 1, dtype=np.float64), 1)[None]
    if checks.is_concrete(alpha):
        return (steps ** np.asarray(alpha, np.float64)[:, None]).astype(np.float32), []
    alpha = alpha.astype(jnp.float32)
    valid = (alpha >= 0) & (alpha < jnp.inf)
    return jnp.exp(jnp.where(valid, alpha, 0)[:, None] * np.log(steps).astype(np.float32)), [valid]


def _valid(params: Any) -> list[Any]:
    """For every traced array of a transform which rows, [B] or one for all, hold no poison."""
    found = []
    for leaf in jax.tree.leaves(params, is_leaf=_shared):
        array = id_lists.broadcast(leaf)
        if _traced(array):
            ok = checks.in_range(array)
            found.append(jnp.all(ok.reshape(ok.shape[0], -1), axis=1))
    return found


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
    expected = f"token sequences, or {batch_size} lists of them"
    rows, per_row = id_lists.sequence_rows(stop, vocab_size, "stop", expected)
    checks.require(not per_row or len(rows) == batch_size, "stop", expected, len(rows))
    arrays = id_lists.sequence_array(rows, powers=False)
    return np.stack(arrays) if per_row else np.broadcast_to(arrays[0], (batch_size, *arrays[0].shape))
