"""Logits transforms: penalties, masks and filters, and the draw."""

from __future__ import annotations

from jaxdecode.transforms.adaptive import dynamic_temperature, mirostat, xtc
from jaxdecode.transforms.automaton import automaton, prefix
from jaxdecode.transforms.bans import allowed_ids, bad_words, banned_ids, forced, min_new_tokens, no_repeat_ngram
from jaxdecode.transforms.core import Context, LogitsTransform, Processed, advance, chain, flatten, init, process
from jaxdecode.transforms.cutoffs import epsilon, eta, p_less, top_n_sigma, typical_p
from jaxdecode.transforms.filters import min_p, temperature, top_k, top_p
from jaxdecode.transforms.penalties import dry, frequency_penalty, logit_bias, presence_penalty, repetition_penalty
from jaxdecode.transforms.ranking import largest
from jaxdecode.transforms.select import Drawn, draw, first_max

__all__ = [
    "Context",
    "Drawn",
    "LogitsTransform",
    "Processed",
    "advance",
    "allowed_ids",
    "automaton",
    "bad_words",
    "banned_ids",
    "chain",
    "draw",
    "dry",
    "dynamic_temperature",
    "epsilon",
    "eta",
    "first_max",
    "flatten",
    "forced",
    "frequency_penalty",
    "init",
    "largest",
    "logit_bias",
    "min_new_tokens",
    "min_p",
    "mirostat",
    "no_repeat_ngram",
    "p_less",
    "prefix",
    "presence_penalty",
    "process",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_n_sigma",
    "top_p",
    "typical_p",
    "xtc",
]
