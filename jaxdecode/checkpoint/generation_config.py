"""``generation_config.json``: the end ids, and the sampling that a checkpoint's authors recommend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxdecode.checks import require

__all__ = ["law_of", "settings_of"]

# A field that shapes the law of the next token -> our setting, and the value that leaves the law as it is.
_LAW: dict[str, tuple[str, Any]] = {
    "temperature": ("temperature", 1.0),
    "top_k": ("top_k", 0),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "typical_p": ("typical_p", 1.0),
    "epsilon_cutoff": ("epsilon", 0.0),
    "eta_cutoff": ("eta", 0.0),
    "repetition_penalty": ("repetition_penalty", 1.0),
    "no_repeat_ngram_size": ("no_repeat_ngram", 0),
}
_GREEDY_TOO = ("repetition_penalty", "no_repeat_ngram_size")
# Fields that change what is generated and have no setting that means the same -> the values that change nothing.
_OTHER: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "sequence_bias": ({}, []),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
}


def law_of(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields that change what is generated. ValueError, naming ``where`` and the field, for what is no number."""
    law = {key: values[key] for key in ("do_sample", *_LAW, *_OTHER) if values.get(key) is not None}
    sampled = law.get("do_sample", False)
    require(isinstance(sampled, bool), f"{where}: do_sample", "true or false", sampled)
    for key in _LAW.keys() & law.keys():
        number = isinstance(law[key], int | float) and not isinstance(law[key], bool)
        require(number, f"{where}: {key}", "a number", law[key])
    return law


def settings_of(law: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The law as fields of ``Settings``, of which there are those ``known``. ValueError for what none of them means.

    As in Hugging Face's transformers, a checkpoint that does not say ``do_sample`` is greedy, and has no use for the
    fields that shape a draw.
    """
    sampled = law.get("do_sample", False)
    settings: dict[str, Any] = {} if sampled else {"temperature": 0.0}
    for key, value in law.items():
        if key in _LAW:
            name, off = _LAW[key]
            needed = (sampled or key in _GREEDY_TOO) and value != off
            require(not needed or name in known, f"generation_config.json: {key}", f"{off} (not supported here)", value)
            settings |= {name: value} if needed else {}
        elif key in _OTHER:
            require(value in _OTHER[key], f"generation_config.json: {key}", "none (not supported here)", value)
    return settings
