"""Rotary frequencies, and the rules by which models stretch them over longer texts."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxdecode.models.config import TransformerConfig

__all__ = ["DynamicScaling", "LongRope", "RopeScaling", "Scaling", "YarnScaling", "frequencies", "turn_scale"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling of Llama 3.1: slow frequencies divided by ``factor``, fast ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): divided where a pair makes fewer than ``beta_slow`` turns in the original context.

    Kept where it makes more than ``beta_fast``, with a ramp over the pairs between, whose ends are rounded outwards if
    ``truncate``. Queries and keys are multiplied by ``attention_factor``.
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv:2402.13753): one divisor for each pair, others for contexts beyond the original one.

    longest: the largest context. Queries and keys are multiplied by ``attention_factor``.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    longest: int
    attention_factor: float


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """A larger base, by the context as a part of the original one: none up to that."""

    factor: float
    original_context: int


Scaling = RopeScaling | YarnScaling | LongRope | DynamicScaling


def frequencies(config: TransformerConfig, local: bool = False) -> np.ndarray:
    """Rotary angles per position, [rotary_dim/2], float64. ``local``: of layers with a window of their own base."""
    theta = config.rope_theta
    own = local and config.local_rope_theta is not None
    if own:
        theta = config.local_rope_theta or theta
    scaling, dim = (None if own else config.rope_scaling), config.rotary
    if isinstance(scaling, DynamicScaling):
        longer = max(config.context_length / scaling.original_context, 1.0)
        theta = theta * (scaling.factor * longer - (scaling.factor - 1)) ** (dim / (dim - 2))
    inverse = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if config.rope_freqs is not None and not own:
        inverse = inverse / np.asarray(config.rope_freqs, np.float64)
    if isinstance(scaling, RopeScaling):
        turns = scaling.original_context * inverse / (2 * math.pi)  # full turns within the original context
        ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        ramp = np.clip(ramp, 0, 1)
        inverse = inverse * ramp + inverse / scaling.factor * (1 - ramp)
    elif isinstance(scaling, YarnScaling):
        kept = 1 - _yarn_ramp(scaling, theta, dim)
        inverse = inverse * kept + inverse / scaling.factor * (1 - kept)
    elif isinstance(scaling, LongRope):
        divisors = scaling.long if config.context_length > scaling.original_context else scaling.short
        inverse = inverse / np.asarray(divisors, np.float64)
    return inverse


def turn_scale(config: TransformerConfig, local: bool = False) -> float:
    """What queries and keys are multiplied by as they turn."""
    if local and config.local_rope_theta is not None:
        return 1.0
    return config.rope_scaling.attention_factor if isinstance(config.rope_scaling, YarnScaling | LongRope) else 1.0


def _yarn_ramp(scaling: YarnScaling, theta: float, dim: int) -> np.ndarray:
    """From 0, where frequencies are kept, to 1, where they are divided, [dim/2]."""

    def pair(turns: float) -> float:  # the pair that makes so many turns in the original context
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    return np.clip((np.arange(dim // 2, dtype=np.float64) - first) / width, 0, 1)
