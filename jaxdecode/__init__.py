"""jaxdecode: autoregressive decoding for language models, as pure functions in JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxdecode._version import __version__

if TYPE_CHECKING:
    from jaxdecode import constraints, testing
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
    from jaxdecode.checkpoint import Loaded, load, save
    from jaxdecode.decoders import greedy, sample
    from jaxdecode.generation import Settings, generate
    from jaxdecode.loop import run, run_until_done, stream
    from jaxdecode.transforms import Context, LogitsTransform, chain, min_p, temperature, top_k, top_p

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
    "constraints",
    "generate",
    "greedy",
    "load",
    "min_p",
    "put_rows",
    "repeat_rows",
    "run",
    "run_until_done",
    "sample",
    "save",
    "stream",
    "take_rows",
    "temperature",
    "testing",
    "top_k",
    "top_p",
]

# Where each name lives. It is imported when first used, so that `jaxdecode --help` and the version cost no jax.
_HOME = {
    "base": "Decoder Finish Generated Model Params Prompt Rules Shared StepInfo put_rows repeat_rows take_rows",
    "checkpoint": "Loaded load save",
    "decoders": "greedy sample",
    "generation": "Settings generate",
    "loop": "run run_until_done stream",
    "transforms": "Context LogitsTransform chain min_p temperature top_k top_p",
}
_HOME_OF = {name: f"jaxdecode.{module}" for module, names in _HOME.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A public name, imported from its module and kept."""
    if name in ("constraints", "testing"):
        return importlib.import_module(f"jaxdecode.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jaxdecode' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
