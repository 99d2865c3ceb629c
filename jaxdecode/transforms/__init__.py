"""Logits transforms: penalties, masks and filters, and the draw."""

from __future__ import annotations

from jaxdecode.transforms.automaton import automaton, prefix
from jaxdecode.transforms.core import Context, LogitsTransform, Processed, advance, chain, flatten, init, process
from jaxdecode.transforms.filters import min_p, temperature, top_k, top_p
from jaxdecode.transforms.select import draw, first_max

__all__ = [
    "Context",
    "LogitsTransform",
    "Processed",
    "advance",
    "automaton",
    "chain",
    "draw",
    "first_max",
    "flatten",
    "init",
    "min_p",
    "prefix",
    "process",
    "temperature",
    "top_k",
    "top_p",
]
