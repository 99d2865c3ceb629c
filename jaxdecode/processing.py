"""From settings to the chain of transforms: which factory makes what of a setting, and in which order they act.

The order is documented in docs/settings.md: repetition, frequency and presence penalty, DRY, bias; a transform of the
caller; prefix and grammar; bans and the minimum length; temperature; top-k, top-p, min-p, typical, epsilon, eta,
top-n-sigma, p-less, XTC, or mirostat in their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxdecode import checks, transforms
from jaxdecode.constraints.rules import constraint_transforms
from jaxdecode.transforms import LogitsTransform, id_lists

if TYPE_CHECKING:
    from jaxdecode.rulebook import Settings

__all__ = ["build", "check_mirostat", "check_numbers", "split_filters"]

Parts = dict[str, LogitsTransform]


def _xtc(value: Any) -> LogitsTransform:
    return transforms.xtc(*id_lists.numbers(value, "probability, threshold", "xtc"))


def _mirostat(value: Any) -> LogitsTransform:
    return transforms.mirostat(*id_lists.numbers(value, "tau, rate", "mirostat"))


PENALTIES: dict[str, Callable[[Any], LogitsTransform]] = {
    "repetition_penalty": transforms.repetition_penalty,
    "frequency_penalty": transforms.frequency_penalty,
    "presence_penalty": transforms.presence_penalty,
}
FILTERS: dict[str, Callable[[Any], LogitsTransform]] = {
    "top_k": transforms.top_k,
    "top_p": transforms.top_p,
    "min_p": transforms.min_p,
    "typical_p": transforms.typical_p,
    "epsilon": transforms.epsilon,
    "eta": transforms.eta,
    "top_n_sigma": transforms.top_n_sigma,
    "p_less": transforms.p_less,
    "xtc": _xtc,
    "mirostat": _mirostat,
}
LISTS = ("allowed_ids", "banned_ids", "bad_words")
AT_ONE = ("top_p", "typical_p")  # off at 1; all others at 0


def _given(settings: Settings, table: dict[str, Callable[[Any], LogitsTransform]]) -> Parts:
    return {name: make(getattr(settings, name)) for name, make in table.items() if getattr(settings, name) is not None}


def _dry(settings: Settings, vocab_size: int | None) -> Parts:
    """``dry`` = (multiplier, base, allowed_length) or with the breakers as a fourth; None: check the numbers alone."""
    value = settings.dry
    if value is None:
        return {}
    short = isinstance(value, (tuple, list)) and len(value) == 3
    names = "multiplier, base, allowed_length" + ("" if short else ", breakers")
    multiplier, base, allowed, *breakers = id_lists.numbers(value, names, "dry")
    known = () if vocab_size is None or short else breakers[0]
    return {"dry": transforms.dry(multiplier, base, allowed, known, vocab_size or 1)}


def _temperature(settings: Settings) -> tuple[LogitsTransform, Any]:
    """The temperature, 1 in greedy rows, and which rows these are."""
    warm = transforms.temperature(settings.temperature)
    xp: Any = np if checks.is_concrete(warm.params) else jnp
    greedy = warm.params == 0
    tau = xp.where(greedy, xp.ones_like(warm.params), warm.params)
    if settings.dynamic_temperature is None:
        return dataclasses.replace(warm, params=tau), greedy
    numbers = id_lists.numbers(settings.dynamic_temperature, "spread, exponent", "dynamic_temperature")
    made = transforms.dynamic_temperature(1.0, *numbers)
    return dataclasses.replace(made, params=(tau, *made.params[1:])), greedy


def check_numbers(settings: Settings) -> None:
    """ValueError for a number out of range; lists are checked by ``build``, which knows the vocabulary."""
    _given(settings, PENALTIES)
    _dry(settings, None)
    if settings.no_repeat_ngram is not None:
        transforms.no_repeat_ngram(settings.no_repeat_ngram)
    _temperature(settings)
    _given(settings, FILTERS)


def _bans(settings: Settings, vocab_size: int, eos: Any) -> Parts:
    parts: Parts = {}
    for name in LISTS:
        if getattr(settings, name) is not None:
            parts[name] = getattr(transforms, name)(getattr(settings, name), vocab_size)
    left = _left(parts, vocab_size)
    if left is not None:
        checks.require(bool(left.any(axis=1).all()), ", ".join(parts), "at least one id left in every row", "none")
    if settings.no_repeat_ngram is not None:
        parts["no_repeat_ngram"] = transforms.no_repeat_ngram(settings.no_repeat_ngram)
    if settings.forced is not None:
        parts["forced"] = transforms.forced(settings.forced, vocab_size)
    if eos.shape[1]:  # without end ids there is nothing to mask
        parts["min_new_tokens"] = transforms.min_new_tokens(settings.min_new_tokens, eos)
    return parts


def _left(parts: Parts, vocab_size: int) -> np.ndarray | None:
    """bool[B or 1,V]: the ids that lists leave at every step; None if they are for different numbers of rows."""
    left: Any = np.ones((1, vocab_size), bool)
    tables = {name: id_lists.broadcast(parts[name].params) for name in LISTS if name in parts}
    if len({len(table) for table in tables.values()} - {1}) > 1:
        return None  # refused where B is known
    for name, table in tables.items():
        if name == "bad_words":
            alone = np.where(np.all(table[..., :-1] == -1, axis=2), table[..., -1], -1)
            banned = np.zeros((len(table), vocab_size + 1), bool)
            np.put_along_axis(banned, alone, True, axis=1)  # -1 is the last column, which stands for no id
            table = ~banned[:, :-1]
        left = left & table
    return left


def _constraints(settings: Settings, bans: Parts, vocab_size: int, eos: Any, limit: Any) -> Parts:
    """Prefix and grammar, which count with the ids that ``bans`` leaves, the minimum length and the limit[B]."""
    if not settings.constrained:
        return {}
    left = _left(bans, vocab_size)
    if left is None or len(left) not in (1, len(limit)):
        return {}  # refused for their rows
    return constraint_transforms(
        settings.regex,
        settings.json_schema,
        settings.choices,
        settings.prefix,
        eos=eos,
        limit=limit,
        vocab_size=vocab_size,
        banned=~left,
        least=bans["min_new_tokens"].params[0] if "min_new_tokens" in bans else 0,
    )


def build(
    settings: Settings, vocab_size: int, eos: Any, limit: Any, extra: LogitsTransform | None = None
) -> tuple[Parts, Any]:
    """The transforms by name, in the documented order, for eos[B,E] and limit[B], and which rows are greedy."""
    parts = _given(settings, PENALTIES) | _dry(settings, vocab_size)
    if settings.logit_bias is not None:
        parts["logit_bias"] = transforms.logit_bias(settings.logit_bias, vocab_size)
    if extra is not None:
        parts["transform"] = transforms.chain(extra)
    bans = _bans(settings, vocab_size, eos)
    parts |= _constraints(settings, bans, vocab_size, eos, limit) | bans
    parts["temperature"], greedy = _temperature(settings)
    return parts | _given(settings, FILTERS), greedy


def _on(name: str, part: LogitsTransform) -> Any:
    """Which rows [B], or one for all, the filter of this name is on in."""
    first = part.params[0] if name in ("xtc", "mirostat") else part.params
    return first < 1 if name in AT_ONE else first > 0


def split_filters(parts: Parts) -> tuple[Parts, Any]:
    """The parts that are no filters, and which rows [B] have a filter on (False: there is none)."""
    found: Any = False
    for name in FILTERS.keys() & parts.keys():
        found = found | _on(name, parts[name])
    return {name: part for name, part in parts.items() if name not in FILTERS}, found


def check_mirostat(parts: Parts) -> list[Any]:
    """Mirostat replaces the filters: a row may not have both on. ValueError, or the rows [B] that are right."""
    if "mirostat" not in parts:
        return []
    _, others = split_filters({name: part for name, part in parts.items() if name != "mirostat"})
    valid = ~(_on("mirostat", parts["mirostat"]) & others)
    if not checks.is_concrete(valid):
        return [valid]
    checks.require(
        bool(np.all(valid)), "mirostat", "all other filters off in its rows, since it replaces them", "some on"
    )
    return []
