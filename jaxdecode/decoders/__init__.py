"""Decoding strategies, each three pure functions over any model."""

from __future__ import annotations

from jaxdecode.decoders.sampling import SamplingState, greedy, sample
from jaxdecode.decoders.speculation import SpeculativeState, prompt_lookup, speculative

__all__ = ["SamplingState", "SpeculativeState", "greedy", "prompt_lookup", "sample", "speculative"]
