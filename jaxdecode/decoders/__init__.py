"""Decoding strategies, each three pure functions over any model."""

from __future__ import annotations

from jaxdecode.decoders.sampling import SamplingState, greedy, sample

__all__ = ["SamplingState", "greedy", "sample"]
