"""Beams and samples without replacement through ``generate``: settings, constraints, faults, laws, programs."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beam_oracle import log_law
from programs import large_instructions
from scipy.stats import chi2

import jaxdecode as jd
from jaxdecode import Finish, Settings, generate, generation, transforms
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import markov_model

MODEL = markov_model()
V = 6
TABLE = np.random.default_rng(4).normal(size=(V, V)).astype(np.float32) * 2
PROMPTS = [[0, 1, 2], [3], [5, 4]]


def search(prompts: Any = PROMPTS, table: Any = TABLE, **settings: Any) -> Any:
    chosen = Settings(**{"max_new_tokens": 4, "beams": 3, "eos": [5], **settings})
    return jax.device_get(generate(MODEL, table, prompts, settings=chosen, key=jax.random.key(1)))


def test_penalties_act_on_each_hypothesis_as_in_sampling() -> None:
    """Log probabilities are the log-softmax, over all ids, of what the same transforms make of that history."""
    options: dict[str, Any] = {
        "repetition_penalty": np.array([1.5, 1.0, 2.0], np.float32),
        "presence_penalty": 0.5,
        "temperature": np.array([0.0, 0.5, 1.0], np.float32),
        "logit_bias": [(3, 0.5)],
    }
    out = search(**options)
    for b, prompt in enumerate(PROMPTS):
        tau = [1.0, 0.5, 1.0][b]  # 0 is read as 1
        chain = transforms.chain(
            jd.repetition_penalty(options["repetition_penalty"][b : b + 1]),
            jd.presence_penalty(0.5),
            jd.logit_bias([(3, 0.5)], V),
        )
        for k in range(int(out.count[b])):
            ids = out.tokens[b, k, : out.length[b, k]].tolist()
            for t, token in enumerate(ids):
                history = np.array([prompt + ids[:t]], np.int32)
                logits = chain(jnp.asarray(TABLE[history[:, -1]]), history, start=len(prompt))
                law = log_law(np.asarray(logits, np.float64)[0] / tau)
                np.testing.assert_allclose(out.processed_logprob[b, k, t], law[token], atol=1e-5)
                np.testing.assert_allclose(out.logprob[b, k, t], log_law(TABLE[history[0, -1]])[token], atol=1e-5)


def test_masks_remove_candidates_and_renormalise_nothing() -> None:
    """Against all sequences that a mask leaves, scored by the law without it; each hypothesis has its own history."""
    out = search(no_repeat_ngram=1, banned_ids=[1], beams=40, max_new_tokens=3)
    for b, prompt in enumerate(PROMPTS):
        expected = {}
        for ids in itertools.chain.from_iterable(itertools.product(range(V), repeat=n) for n in (1, 2, 3)):
            ended = 5 in ids
            if (ended and ids.index(5) != len(ids) - 1) or (not ended and len(ids) < 3):
                continue
            if 1 in ids or len({*prompt, *ids}) < len(set(prompt)) + len(ids):
                continue
            steps = zip([prompt[-1], *ids], ids, strict=False)
            expected[ids] = sum(float(log_law(TABLE[last])[v]) for last, v in steps)
        best = sorted(expected.items(), key=lambda x: -x[1])
        assert out.count[b] == len(best)  # 40 beams hold all there are
        found = [tuple(out.tokens[b, k, : out.length[b, k]].tolist()) for k in range(len(best))]
        assert found == [ids for ids, _ in best]
        np.testing.assert_allclose(out.score[b, : len(best)], [s for _, s in best], atol=1e-5)
        assert out.certified[b]
    assert len(out.to_lists()[1]) == out.count[1]


def test_constraints_hold_for_every_hypothesis() -> None:
    pattern = "(ab|b)+a?"
    grammar = jd.constraints.regex(pattern, [b"a", b"ab", b"b", b"c", b"ba", b""])
    out = search(regex=grammar, max_new_tokens=6)
    assert np.all(out.finish == Finish.EOS)
    for row in out.to_lists():
        assert len({tuple(ids) for ids in row}) == 3
        for ids in row:
            assert re.fullmatch(pattern, "".join(["a", "ab", "b", "c", "ba", ""][i] for i in ids))
    assert np.all(out.certificate_gap < np.inf)


def test_stop_sequences_end_hypotheses() -> None:
    plain, stopped = search(eos=()), search(eos=(), stop=[[2, 3], [4]])
    assert np.all(plain.finish == Finish.LENGTH)
    for b, prompt in enumerate(PROMPTS):
        for k in range(3):
            ids = stopped.tokens[b, k, : stopped.length[b, k]].tolist()
            ends = [
                t for t in range(1, len(ids) + 1) if (prompt + ids)[: len(prompt) + t][-2:] == [2, 3] or ids[t - 1] == 4
            ]
            assert (stopped.finish[b, k] == Finish.STOP) == bool(ends)
            assert not ends or ends == [len(ids)]
    assert np.any(stopped.finish == Finish.STOP)


def test_minimum_length_and_limits_per_row() -> None:
    out = search(min_new_tokens=np.array([0, 2, 2]), max_new_tokens=np.array([0, 2, 4]))
    assert out.count.tolist() == [1, 3, 3]
    assert out.finish[0].tolist() == [Finish.LENGTH, Finish.NO_TOKEN, Finish.NO_TOKEN]
    assert out.score[0, 0] == 0
    assert np.all(out.length[1] == 2)
    assert np.all(out.length[2] >= 2)
    for b in (1, 2):
        alone = search(PROMPTS[b : b + 1], min_new_tokens=2, max_new_tokens=[0, 2, 4][b])
        n = alone.tokens.shape[-1]
        np.testing.assert_array_equal(out.tokens[b, :, :n], alone.tokens[0])
        np.testing.assert_array_equal(out.score[b], alone.score[0])


def test_length_penalty_per_row_and_traced() -> None:
    alpha = np.array([0.0, 1.0, 2.0], np.float32)
    out = search(length_penalty=alpha)
    for b in range(3):
        alone = search(PROMPTS[b : b + 1], length_penalty=float(alpha[b]))
        np.testing.assert_array_equal(out.tokens[b], alone.tokens[0])
        np.testing.assert_allclose(out.score[b], alone.score[0], rtol=1e-6)

    @jax.jit
    def traced(alpha: jax.Array, top_p: jax.Array) -> Any:
        settings = Settings(max_new_tokens=4, beams=3, eos=[5], length_penalty=alpha, top_p=top_p)
        tokens = jnp.array([[0, 1, 2], [3, 0, 0], [5, 4, 0]])
        return generate(MODEL, TABLE, tokens, lengths=jnp.array([3, 1, 2]), settings=settings)

    inside = traced(alpha, jnp.ones(3))
    np.testing.assert_array_equal(inside.tokens, out.tokens)
    wrong = traced(jnp.array([0.0, -1.0, jnp.nan]), jnp.array([0.5, 1.0, 1.0]))
    assert np.all(wrong.finish[:, 0] == Finish.INVALID)
    assert not np.any(wrong.certified)


def test_a_fault_on_the_way_ends_a_row() -> None:
    """Every best way leads to it."""
    table = TABLE.copy()
    table[3, 2], table[0, 3] = np.nan, 50
    out = search([[0], [1]], table)
    assert out.finish[0, 0] == Finish.NAN
    assert out.tokens[0, 0, 0] == 3
    assert not out.certified[0]


def test_what_does_not_fit_is_refused() -> None:
    for settings, words in (
        ({"top_k": 5}, "top_k on"),
        ({"top_p": np.array([1.0, 0.9, 1.0])}, "top_p on"),
        ({"num_samples": 2}, "num_samples"),
        ({"beams": 0}, "whole number"),
        ({"beams": None, "length_penalty": 1.0}, "beams beside it"),
        ({"length_penalty": -1.0}, ">= 0"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"beams": None, "num_samples": 2, "without_replacement": True, "temperature": 0.0}, "above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            search(**settings)
    decoder = jd.beam(MODEL, width=2)
    with pytest.raises(ValueError, match="no drafts"):
        search(prompt_lookup=3)
    with pytest.raises(ValueError, match="beside a decoder"):
        generate(MODEL, TABLE, PROMPTS, decoder=decoder, settings=Settings(beams=2))
    with pytest.raises(ValueError, match="no filters"):
        generate(MODEL, TABLE, PROMPTS, decoder=decoder, settings=Settings(top_k=2), key=jax.random.key(0))
    with pytest.raises(ValueError, match="width"):
        jd.beam(MODEL, width=0)
    _, state = generation.start(MODEL, TABLE, PROMPTS, settings=Settings(beams=2))
    with pytest.raises(ValueError, match="steps yield tokens"):
        next(jd.stream(decoder, TABLE, state))
    off = search(top_k=0, top_p=1.0, min_p=0.0)
    np.testing.assert_array_equal(off.tokens, search().tokens)


CONFIG = TransformerConfig(40, 32, 2, 4, 2, 16, 48, 512)


def test_a_beam_step_copies_no_cache_and_reads_the_prompt_once() -> None:
    model, params = transformer(CONFIG), init_params(CONFIG, jax.random.key(0))
    settings = Settings(max_new_tokens=128, beams=4)
    decoder, state = generation.start(model, params, np.ones((2, 200), int), settings=settings)
    tail, shared = state.cache.value.layers[0], state.cache.value.shared[0].layers[0]
    slots = sum(block.k.shape[0] * block.k.shape[3] for block in shared)
    assert slots == 2 * 257  # once for each prompt, which is padded to its length class
    assert tail[0].k.shape == (8, 2, 16, 128)
    loop = jax.jit(lambda params, state: jd.run_until_done(decoder, params, state), donate_argnums=1)
    hlo = loop.lower(params, state).compile().as_text()
    assert large_instructions(hlo, tail[0].k.size) == []


def test_samples_without_replacement_follow_the_law_and_are_different() -> None:
    """Ordered pairs of different sequences: p(a) p(b) / (1 - p(a)), by chi-square; log probabilities are exact."""
    table = np.array([[0.5, 0.0, 0.3], [0.0, 1.0, -0.5], [0.0, 0.0, 0.0]], np.float32)
    law = np.exp(log_law(table))
    sequences = {(2,): law[0, 2]} | {(a, b): law[0, a] * law[a, b] for a in (0, 1) for b in range(3)}
    rows = 20_000
    settings = Settings(max_new_tokens=2, num_samples=2, without_replacement=True, eos=[2])
    out = jax.device_get(generate(MODEL, table, np.zeros((rows, 1), int), settings=settings, key=jax.random.key(0)))
    assert np.all(out.count == 2)
    assert np.all(np.diff(out.gumbel, axis=1) <= 0)
    pairs = [tuple(tuple(ids) for ids in row) for row in out.to_lists()]
    expected = {(a, b): p * q / (1 - p) for (a, p), (b, q) in itertools.permutations(sequences.items(), 2)}
    assert set(pairs) <= set(expected)
    counts = dict.fromkeys(expected, 0)
    for pair in pairs:
        counts[pair] += 1
    statistic = sum((counts[x] - rows * p) ** 2 / (rows * p) for x, p in expected.items())
    assert statistic < chi2.ppf(1 - 1e-4, len(expected) - 1)
    exact = np.log([[sequences[ids] for ids in pair] for pair in pairs])
    np.testing.assert_allclose(out.score, exact, atol=1e-5)
    assert out.certified is None


def test_all_sequences_are_drawn_if_there_are_no_more() -> None:
    table = np.array([[0.0, 1.0], [0.5, 0.0]], np.float32)
    settings = Settings(max_new_tokens=3, num_samples=12, without_replacement=True, top_k=2, temperature=0.7)
    out = generate(MODEL, table, [[0], [1]], settings=settings, key=jax.random.key(0))
    assert out.count.tolist() == [8, 8]
    for row, scores in zip(out.to_lists(), np.asarray(out.score), strict=True):
        assert len({tuple(ids) for ids in row}) == 8
        np.testing.assert_allclose(np.exp(scores[:8]).sum(), 1, rtol=1e-5)
