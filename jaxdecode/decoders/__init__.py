"""Decoding strategies, each three pure functions over any model."""

from __future__ import annotations

from jaxdecode.decoders.beam_search import BeamState, beam
from jaxdecode.decoders.sampling import SamplingState, greedy, sample

__all__ = ["BeamState", "SamplingState", "beam", "greedy", "sample"]
