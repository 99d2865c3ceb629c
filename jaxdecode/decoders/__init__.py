"""Decoding strategies, each three pure functions over any model."""

from jaxdecode.decoders.sampling import SamplingState, greedy, sample

__all__ = ["SamplingState", "greedy", "sample"]
