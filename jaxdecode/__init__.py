"""jaxdecode: autoregressive decoding for language models, as pure functions in JAX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxdecode._version import __version__

if TYPE_CHECKING:
    from jaxdecode import constraints, testing
    from jaxdecode.adapters import from_equinox, from_linen, from_nnx, recurrent
    from jaxdecode.base import (
        Acceptance,
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
    from jaxdecode.caches import load_cache, prefill, refill, save_cache
    from jaxdecode.checkpoint import Loaded, load, save
    from jaxdecode.composition import combine, contrastive, guidance, product, uncached
    from jaxdecode.decoders import beam, greedy, prompt_lookup, sample, speculative
    from jaxdecode.exporting import export_generate, load_exported, named_params
    from jaxdecode.generation import generate
    from jaxdecode.loop import run, run_until_done, stream
    from jaxdecode.quant import QTensor, dequantize, quantize
    from jaxdecode.rulebook import Settings
    from jaxdecode.scoring import best_of, score
    from jaxdecode.transforms import (
        Context,
        LogitsTransform,
        allowed_ids,
        bad_words,
        banned_ids,
        chain,
        dry,
        dynamic_temperature,
        epsilon,
        eta,
        forced,
        frequency_penalty,
        logit_bias,
        min_new_tokens,
        min_p,
        mirostat,
        no_repeat_ngram,
        p_less,
        presence_penalty,
        repetition_penalty,
        temperature,
        top_k,
        top_n_sigma,
        top_p,
        typical_p,
        xtc,
    )

__all__ = [
    "Acceptance",
    "Context",
    "Decoder",
    "Finish",
    "Generated",
    "Loaded",
    "LogitsTransform",
    "Model",
    "Params",
    "Prompt",
    "QTensor",
    "Rules",
    "Settings",
    "Shared",
    "StepInfo",
    "__version__",
    "allowed_ids",
    "bad_words",
    "banned_ids",
    "beam",
    "best_of",
    "chain",
    "combine",
    "constraints",
    "contrastive",
    "dequantize",
    "dry",
    "dynamic_temperature",
    "epsilon",
    "eta",
    "export_generate",
    "forced",
    "frequency_penalty",
    "from_equinox",
    "from_linen",
    "from_nnx",
    "generate",
    "greedy",
    "guidance",
    "load",
    "load_cache",
    "load_exported",
    "logit_bias",
    "min_new_tokens",
    "min_p",
    "mirostat",
    "named_params",
    "no_repeat_ngram",
    "p_less",
    "prefill",
    "presence_penalty",
    "product",
    "prompt_lookup",
    "put_rows",
    "quantize",
    "recurrent",
    "refill",
    "repeat_rows",
    "repetition_penalty",
    "run",
    "run_until_done",
    "sample",
    "save",
    "save_cache",
    "score",
    "speculative",
    "stream",
    "take_rows",
    "temperature",
    "testing",
    "top_k",
    "top_n_sigma",
    "top_p",
    "typical_p",
    "uncached",
    "xtc",
]

# Where each name lives. It is imported when first used, so that `jaxdecode --help` and the version cost no jax.
_HOME = {
    "adapters": "from_equinox from_linen from_nnx recurrent",
    "base": (
        "Acceptance Decoder Finish Generated Model Params Prompt Rules Shared StepInfo put_rows repeat_rows take_rows"
    ),
    "checkpoint": "Loaded load save",
    "composition": "combine contrastive guidance product uncached",
    "decoders": "beam greedy prompt_lookup sample speculative",
    "caches": "load_cache prefill refill save_cache",
    "exporting": "export_generate load_exported named_params",
    "generation": "generate",
    "loop": "run run_until_done stream",
    "quant": "QTensor dequantize quantize",
    "rulebook": "Settings",
    "scoring": "best_of score",
    "transforms": (
        "Context LogitsTransform allowed_ids bad_words banned_ids chain dry dynamic_temperature epsilon "
        "eta forced frequency_penalty logit_bias min_new_tokens min_p mirostat no_repeat_ngram p_less "
        "presence_penalty repetition_penalty temperature top_k top_n_sigma top_p typical_p xtc"
    ),
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
