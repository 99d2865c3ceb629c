"""Rotary positions as ``config.json`` states them: "rope_parameters" of newer files, "rope_scaling" of older ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdecode.checkpoint.fields import Fields
from jaxdecode.checks import require
from jaxdecode.models.transformer import (
    DynamicScaling,
    LongRope,
    RopeScaling,
    Scaling,
    TransformerConfig,
    YarnScaling,
)

__all__ = ["LOCAL", "Rope", "read_rope", "rope_to_json"]

LOCAL = "rope_local_base_freq"  # base of layers with a window
_ORIGINAL = "original_max_position_embeddings"
_ALWAYS = {"rope_type", "type", "rope_theta", "factor", "partial_rotary_factor"}
_FIELDS = {
    "default": set(),
    "linear": set(),
    "dynamic": {_ORIGINAL},
    "llama3": {"low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": {_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {_ORIGINAL, "attention_factor", "short_factor", "long_factor"},
}


class Rope(NamedTuple):
    """How a family states its rotary positions: its names of base and turning part, and what holds without them.

    part: the name of the part of a head that turns; None: all of it does. kinds: other names of kinds of scaling.
    by_kind: layers with a window have a base of their own.
    """

    theta: str = "rope_theta"
    default: float = 10000.0
    part: str | None = None
    default_part: float = 1.0
    kinds: Mapping[str, str] = {}
    by_kind: bool = False
    default_local: float = 10000.0


def read_rope(read: Fields, family: Rope, context: int, head_dim: int) -> dict[str, Any]:
    """The fields of the config. ValueError, naming the field, for what is not supported."""
    new, old = read.get("rope_parameters", dict, {}), read.get("rope_scaling", dict, {})
    local: dict[str, Any] = {}
    if family.by_kind:
        if "full_attention" in new or "sliding_attention" in new:
            surplus = sorted(new.keys() - {"full_attention", "sliding_attention"})
            require(not surplus, read.name("rope_parameters"), "full_attention and sliding_attention", surplus)
            kinds = Fields(new, read.name("rope_parameters."))
            new, inner = (kinds.get(f"{kind}_attention", dict, {}) for kind in ("full", "sliding"))
        else:
            inner = {}
        local = {"local_rope_theta": _local_theta(read, inner, family)}
    require(not (new and old) or new == old, read.name("rope_scaling"), "the same as rope_parameters", old)
    rope = Fields(new or old, read.name("rope_parameters." if new else "rope_scaling."))
    theta = _agreed([(rope, "rope_theta"), (read, family.theta), (read, "rope_theta")], family.default)
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    rope.only("type", rope.get("type", str, kind), kind)
    kind = family.kinds.get(kind, kind)
    rope.only("rope_type", kind, *_FIELDS)
    unknown = sorted(rope.values.keys() - _ALWAYS - _FIELDS[kind])
    require(not unknown, rope.where.rstrip("."), f"the fields of {kind!r}", unknown)
    turning = _turning(read, rope, family, head_dim)
    found = {"rope_theta": theta, "rotary_dim": None if turning == head_dim else turning, **local}
    return found | _scaling(read, rope, kind, context, turning)


def _agreed(places: list[tuple[Fields, str]], default: float) -> float:
    """The number that is stated in one place, or in several alike."""
    stated = [(fields.name(key), fields.real(key)) for fields, key in places if fields.values.get(key) is not None]
    for name, value in stated[1:]:
        require(value == stated[0][1], name, f"the {stated[0][1]} of {stated[0][0]}", value)
    return stated[0][1] if stated else default


def _local_theta(read: Fields, inner: Mapping[str, Any], family: Rope) -> float:
    """The base of layers with a window, which are never scaled."""
    rope = Fields(inner, read.name("rope_parameters.sliding_attention."))
    rope.only("rope_type", rope.get("rope_type", str, "default"), "default")
    unknown = sorted(inner.keys() - {"rope_type", "rope_theta"})
    require(not unknown, rope.where.rstrip("."), "the fields of 'default'", unknown)
    return rope.real("rope_theta", read.real(LOCAL, family.default_local))


def _turning(read: Fields, rope: Fields, family: Rope, head_dim: int) -> int:
    """Features of a head that turn."""
    if family.part is None:
        rope.only("partial_rotary_factor", rope.get("partial_rotary_factor", float, 1), 1)
        return head_dim
    name = "partial_rotary_factor"
    part = _agreed([(rope, name), (read, family.part), (read, name)], family.default_part)
    turning = int(head_dim * part) if part <= 1 else 0
    good = turning >= 2 and turning % 2 == 0
    require(good, read.name(family.part), f"an even part of the {head_dim} features of a head", part)
    return turning


def _scaling(read: Fields, rope: Fields, kind: str, context: int, turning: int) -> dict[str, Any]:
    if kind in ("default", "linear"):
        factor = rope.real("factor", 1.0) if kind == "default" else rope.real("factor")
        if kind == "default":
            rope.only("factor", factor, 1.0)
        return {} if factor == 1.0 else {"rope_freqs": (factor,) * (turning // 2)}
    if kind == "dynamic":
        original = rope.size(_ORIGINAL, context)
        rope.only(_ORIGINAL, original, context)
        return {"rope_scaling": DynamicScaling(rope.real("factor"), context)}
    outer = read.values.get(_ORIGINAL)
    original = rope.size(_ORIGINAL, context if outer is None else read.size(_ORIGINAL))
    require(outer in (None, original), read.name(_ORIGINAL), f"the {original} of {rope.where}{_ORIGINAL}", outer)
    if kind == "llama3":
        scaling = RopeScaling(
            rope.real("factor"), rope.real("low_freq_factor"), rope.real("high_freq_factor"), original
        )
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        require(low < high, rope.name("high_freq_factor"), f"more than low_freq_factor = {low}", high)
        return {"rope_scaling": scaling}
    return _yarn(rope, original) if kind == "yarn" else _longrope(rope, original, context, turning)


def _yarn(rope: Fields, original: int) -> dict[str, Any]:
    factor = rope.real("factor")

    def wider(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weights = [rope.get(key, float, 0) for key in ("mscale", "mscale_all_dim")]
    scale = wider(weights[0]) / wider(weights[1]) if all(weights) else wider()
    fast, slow = rope.real("beta_fast", 32.0), rope.real("beta_slow", 1.0)
    truncate = rope.get("truncate", bool, True)
    return {"rope_scaling": YarnScaling(factor, original, rope.real("attention_factor", scale), fast, slow, truncate)}


def _longrope(rope: Fields, original: int, context: int, turning: int) -> dict[str, Any]:
    """Scaled for short texts, with the context of these, until ``with_context`` says otherwise."""
    factor = rope.real("factor", context / original)
    require(original > 1, rope.name(_ORIGINAL), "more than 1", original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (_divisors(rope, key, turning // 2) for key in ("short_factor", "long_factor"))
    scaling = LongRope(short, long, original, context, rope.real("attention_factor", scale))
    return {"rope_scaling": scaling, "context_length": min(context, original)}


def _divisors(rope: Fields, key: str, count: int) -> tuple[float, ...]:
    values = rope.get(key, list)
    good = len(values) == count and all(type(x) in (int, float) and 0 < x < 1e300 for x in values)
    require(good, rope.name(key), f"{count} positive numbers", values if len(values) == count else len(values))
    return tuple(float(x) for x in values)


def rope_to_json(config: TransformerConfig, family: Rope) -> dict[str, Any]:
    """The fields of ``config.json``. ValueError for what none can state."""
    stated: dict[str, Any] = {family.theta: config.rope_theta, "rope_scaling": _scaling_to_json(config)}
    if family.part is not None:
        stated[family.part] = config.rotary / config.head_dim
    if family.by_kind and config.local_rope_theta is not None:
        stated[LOCAL] = config.local_rope_theta
    return stated


def _scaling_to_json(config: TransformerConfig) -> dict[str, Any] | None:
    scaling, freqs = config.rope_scaling, config.rope_freqs
    if freqs is not None:
        alone = scaling is None and len(set(freqs)) == 1
        expected = "one divisor for all frequencies, or a scaling: no others can be written to a config.json"
        require(alone, "save: config.rope_freqs", expected, freqs)
        return {"rope_type": "linear", "factor": freqs[0]}
    return None if scaling is None else _stated(scaling)


def _stated(scaling: Scaling) -> dict[str, Any]:
    if isinstance(scaling, DynamicScaling):
        return {"rope_type": "dynamic", "factor": scaling.factor}
    original = {_ORIGINAL: scaling.original_context}
    if isinstance(scaling, RopeScaling):
        factors = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        return {"rope_type": "llama3", "factor": scaling.factor, **factors, **original}
    scale = {"attention_factor": scaling.attention_factor}
    if isinstance(scaling, LongRope):
        factors_of = {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
        return {"rope_type": "longrope", **factors_of, **scale, **original}
    ramp = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    return {"rope_type": "yarn", "factor": scaling.factor, **ramp, **scale, **original}
