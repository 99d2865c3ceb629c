"""jaxdecode: autoregressive decoding for language models, as pure functions in JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxdecode import testing
from jaxdecode._version import __version__
from jaxdecode.base import (
    Decoder,
    Finish,
    Generated,
    Model,
    Params,
    Prompt,
    Rules,
    Shared,
    StepInfo,
    put_rows,
    repeat_rows,
    take_rows,
)
from jaxdecode.decoders import greedy, sample
from jaxdecode.generation import Settings, generate
from jaxdecode.loop import run, run_until_done, stream
from jaxdecode.transforms import Context, LogitsTransform, chain, min_p, temperature, top_k, top_p

if TYPE_CHECKING:
    from jaxdecode.checkpoint import Loaded, load

__all__ = [
    "Context",
    "Decoder",
    "Finish",
    "Generated",
    "Loaded",
    "LogitsTransform",
    "Model",
    "Params",
    "Prompt",
    "Rules",
    "Settings",
    "Shared",
    "StepInfo",
    "__version__",
    "chain",
    "generate",
    "greedy",
    "load",
    "min_p",
    "put_rows",
    "repeat_rows",
    "run",
    "run_until_done",
    "sample",
    "stream",
    "take_rows",
    "temperature",
    "testing",
    "top_k",
    "top_p",
]


def __getattr__(name: str) -> Any:
    """``load`` and ``Loaded`` bring file formats along: imported when first used."""
    if name in ("load", "Loaded"):
        return getattr(importlib.import_module("jaxdecode.checkpoint"), name)
    raise AttributeError(f"module 'jaxdecode' has no attribute {name!r}")
