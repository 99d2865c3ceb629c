"""``score``: teacher-forced log probabilities are those that decoding reports; ``best_of`` ranks by their sums."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdecode as jd
from jaxdecode import Finish, Generated, Settings, generate
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import count_compilations, markov_model

V, N = 9, 7
RANDOM = np.random.default_rng(11)
TABLE = RANDOM.normal(size=(V, V)).astype(np.float32) * 2
MODEL = markov_model()
PROMPTS = [[1], [2, 3, 0, 6], [4, 5]]
STARTS = [len(p) for p in PROMPTS]
KEY = jax.random.key(4)
CONFIG = TransformerConfig(
    vocab_size=V, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, d_mlp=8, context_length=64
)
SMALL = transformer(CONFIG)
WEIGHTS = init_params(CONFIG, jax.random.key(1))


def texts(out: Generated) -> list[list[int]]:
    return [[*p, *ids] for p, ids in zip(PROMPTS, out.to_lists(), strict=True)]


def output(scores: Any, out: Generated) -> np.ndarray:
    """The scores of the output tokens, laid out like the fields of ``Generated``; zeros elsewhere are checked."""
    found, scores = np.zeros(out.tokens.shape, np.float32), np.asarray(scores)
    for row, (begin, n) in enumerate(zip(STARTS, out.length.tolist(), strict=True)):
        found[row, :n] = scores[row, begin : begin + n]
        assert (scores[row, begin + n :] == 0).all()
    return found


def log_law(tokens: Any) -> np.ndarray:
    """log p of every token after the first, of the table, in float64."""
    z = TABLE.astype(np.float64)
    law = z - np.log(np.exp(z).sum(1, keepdims=True))
    return law[tokens[:-1], tokens[1:]]


def test_scores_are_the_law_of_the_table_in_any_layout_and_chunk() -> None:
    rows = [[1, 4, 4, 0, 8], [2], [3, 3, 7]]
    expected = np.zeros((3, 5))
    for row, ids in zip(expected, rows, strict=True):
        row[1 : len(ids)] = log_law(np.array(ids))
    for chunk in (1, 3, None):
        np.testing.assert_allclose(jd.score(MODEL, TABLE, rows, chunk=chunk), expected, rtol=1e-5, atol=1e-6)
    wide, left, mirrored = np.full((3, 7), V - 1), np.zeros((3, 7), int), np.zeros((3, 7))
    lengths = np.array([len(ids) for ids in rows])
    for i, ids in enumerate(rows):
        wide[i, : len(ids)] = ids
        left[i, 7 - len(ids) :] = ids
        mirrored[i, 7 - len(ids) :] = expected[i, : len(ids)]
    options: Any = {"lengths": lengths, "chunk": 3}
    np.testing.assert_allclose(jd.score(MODEL, TABLE, wide, **options)[:, :5], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jd.score(MODEL, TABLE, left, padding="left", **options), mirrored, rtol=1e-5, atol=1e-6)
    later = np.where(np.arange(5)[None] >= np.array([[3], [1], [2]]), expected, 0)
    np.testing.assert_allclose(jd.score(MODEL, TABLE, rows, start=[3, 1, 2]), later, rtol=1e-5, atol=1e-6)


def test_scores_are_what_decoding_reports() -> None:
    """A model with a KV cache, rows that end early; jit = no jit of the caller; one program for other numbers."""
    settings = Settings(max_new_tokens=[N, 2, N], temperature=[1.0, 1.0, 0.0])
    out = jax.device_get(generate(SMALL, WEIGHTS, PROMPTS, key=KEY, settings=settings))
    rows = texts(out)
    np.testing.assert_allclose(output(jd.score(SMALL, WEIGHTS, rows), out), out.logprob, rtol=1e-4, atol=1e-5)
    wide: Any = np.array([[*row, *[0] * (11 - len(row))] for row in rows])
    lengths = np.array([len(row) for row in rows])
    inside = jax.jit(lambda p, t, n: jd.score(SMALL, p, t, lengths=n, chunk=4))(WEIGHTS, wide, lengths)
    np.testing.assert_allclose(output(inside, out), out.logprob, rtol=1e-4, atol=1e-5)


CHAINS: dict[str, dict[str, Any]] = {
    "all": {
        "temperature": [0.7, 1.0, 0.0],
        "top_k": [3, 0, 6],
        "top_p": [1.0, 0.6, 0.9],
        "repetition_penalty": [1.5, 2.0, 1.3],
        "frequency_penalty": 0.5,
        "no_repeat_ngram": 2,
        "xtc": (0.5, 0.1),
        "min_new_tokens": 3,
        "eos": [7, 8],
        "stop": [[5, 5]],
        "prefix": [[1, 2], [3], [4, 4, 4]],
    },
    "states": {"mirostat": (3.0, 0.3), "temperature": [0.9, 1.1, 1.3]},
}


@pytest.mark.parametrize("name", CHAINS)
def test_scores_of_a_processed_law_are_what_decoding_reports(name: str) -> None:
    settings = Settings(max_new_tokens=N, **CHAINS[name])
    out = jax.device_get(generate(MODEL, TABLE, PROMPTS, key=KEY, settings=settings))
    options: Any = {"start": STARTS, "settings": settings, "key": KEY, "chunk": 4}
    scores = jd.score(MODEL, TABLE, texts(out), **options)
    np.testing.assert_allclose(output(scores, out), out.processed_logprob, rtol=1e-4, atol=1e-5)
    assert (np.asarray(scores)[1, : STARTS[1]] == 0).all()


def test_what_a_processed_law_forbids_has_no_probability() -> None:
    rows, tau = [[0, 1, 2], [0, 1, 2]], np.array([0.0, 1.0], np.float32)
    best = np.argmax(TABLE, axis=1)
    scores = np.asarray(jd.score(MODEL, TABLE, rows, settings=Settings(temperature=tau, banned_ids=[2])))
    assert scores[0].tolist() == [0, 0 if best[0] == 1 else -np.inf, -np.inf]
    z = np.delete(TABLE[0].astype(np.float64), 2)
    np.testing.assert_allclose(scores[1, 1], z[1] - np.log(np.exp(z).sum()), rtol=1e-5)
    assert np.isneginf(scores[1, 2])
    scores = np.asarray(jd.score(MODEL, TABLE, rows, transform=jd.temperature(np.float32(2.0))))
    expected = log_law(np.array(rows[0])) * 0
    for i, (last, token) in enumerate([(0, 1), (1, 2)]):
        z = TABLE[last].astype(np.float64) / 2
        expected[i] = z[token] - np.log(np.exp(z).sum())
    np.testing.assert_allclose(scores[0, 1:], expected, rtol=1e-5)


def test_broken_logits_and_traced_settings_show_as_nan() -> None:
    """NaN at the places that see it, as decoding would end there; the other row is as it was."""
    table = TABLE.copy()
    table[4, 1] = np.nan
    rows = [[1, 4, 2, 3], [1, 2, 3, 5]]
    for options in ({}, {"settings": Settings(temperature=2.0)}):
        scores = np.asarray(jd.score(MODEL, table, rows, **options))
        assert np.isnan(scores).tolist() == [[False, False, True, False], [False] * 4]
    one = jax.jit(lambda tau: jd.score(MODEL, TABLE, np.array(rows), settings=Settings(temperature=tau)))
    assert np.isnan(one(jnp.array([-1.0, 1.0]))[:, 1:]).tolist() == [[True] * 3, [False] * 3]


def test_gradient_of_a_score_is_the_closed_form() -> None:
    """d log p(v | h) / d row h = onehot(v) - law(h); the same in any chunk, and through a KV cache."""
    ids = np.array([[1, 4, 4, 0, 8], [2, 2, 0, 3, 3]])
    expected = np.zeros((V, V))
    law = np.exp(TABLE.astype(np.float64))
    law /= law.sum(1, keepdims=True)
    for row in ids:
        for h, v in itertools.pairwise(row):
            expected[h] += np.eye(V)[v] - law[h]
    for chunk in (2, 16):
        got = jax.grad(lambda p, chunk=chunk: jd.score(MODEL, p, ids, chunk=chunk).sum())(jnp.asarray(TABLE))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    direction = init_params(CONFIG, jax.random.key(9))

    @jax.jit
    def both(weights: Any, direction: Any) -> Any:
        value, pull = jax.vjp(lambda w: jd.score(SMALL, w, ids, chunk=2).sum(), weights)
        far, near = (
            jd.score(SMALL, jax.tree.map(lambda w, d, s=s: w + s * d, weights, direction), ids, chunk=2).sum()
            for s in (1e-2, -1e-2)
        )
        slope = sum(
            jnp.vdot(g, d)
            for g, d in zip(*map(jax.tree.leaves, (pull(jnp.ones_like(value))[0], direction)), strict=True)
        )
        return slope, (far - near) / 2e-2

    slope, measured = both(WEIGHTS, direction)
    np.testing.assert_allclose(slope, measured, rtol=2e-2)


def test_numbers_change_without_recompiling() -> None:
    rows = [[1, 4, 4, 0], [2, 3, 3, 7]]
    jd.score(MODEL, TABLE, rows, settings=Settings(temperature=1.0, top_k=3))
    with count_compilations() as count:
        for tau, k in ((0.5, 2), (0.0, 0)):
            jd.score(MODEL, TABLE, rows, settings=Settings(temperature=tau, top_k=k))
    assert int(count) == 0


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "ids": ([[0, V]], {}, r"prompts\[0\]: expected token ids in \[0, 9\), got \[9\]"),
    "start": ([[0, 1]], {"start": 0}, "start: expected whole numbers >= 1, got 0"),
    "starts": ([[0, 1]], {"start": [1, 2]}, "start: expected a number or 1 of them"),
    "chunk": ([[0, 1]], {"chunk": 0}, "chunk: expected a whole number >= 1, got 0"),
    "key": ([[0, 1]], {"key": KEY}, "key, row_ids: expected none for the model's own law"),
    "samples": ([[0, 1]], {"settings": Settings(num_samples=2)}, "score: settings.num_samples: expected 1, got 2"),
    "top": ([[0, 1]], {"settings": Settings(top_logprobs=2)}, "score: settings.top_logprobs: expected 0, got 2"),
    "budget": (
        [[0, 1, 1, 1]],
        {"settings": Settings(max_new_tokens=2, prefix=[1], eos=[0])},
        "max_new_tokens: expected at least the 3 tokens after start, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    tokens, options, message = BAD[name]
    with count_compilations() as count, pytest.raises(ValueError, match=message):
        jd.score(MODEL, TABLE, tokens, **options)
    assert int(count) == 0


# best_of


def made(logprob: Any, length: Any, finish: Any = Finish.LENGTH) -> Generated:
    """A result with these numbers; the first token of every row is its own number."""
    logprob, length = np.asarray(logprob, np.float32), np.asarray(length)
    rows = np.arange(length.size).reshape(length.shape)
    tokens = np.where(np.arange(logprob.shape[2]) < length[..., None], rows[..., None], -1)
    fill = np.full_like(logprob, np.inf)
    return Generated(tokens, length, logprob, -logprob, fill, fill, np.broadcast_to(finish, length.shape))


def test_best_of_ranks_by_sums_of_log_probabilities() -> None:
    logprob = [[[-1, -1, -1], [-2, -0.5, 0], [-2.5, 0, 0]], [[-1, 0, 0], [-1, 0, 0], [-0.5, -0.4, -0.05]]]
    out = made(logprob, [[3, 2, 1], [1, 1, 3]])

    def order(*args: Any, **options: Any) -> list[list[int]]:
        return np.asarray(jd.best_of(out, *args, **options).tokens)[:, :, 0].tolist()

    assert order(3) == [[1, 2, 0], [5, 3, 4]]  # the first pair is a tie: in their order
    assert order() == [[1], [5]]
    assert order(2, by="processed") == [[0, 1], [3, 4]]
    assert order(3, length_penalty=1.0) == [[0, 1, 2], [5, 3, 4]]
    two = jax.jit(jd.best_of, static_argnums=1)(out, 2)
    assert two.length.tolist() == [[2, 1], [3, 1]]
    for field in dataclasses.fields(Generated):
        value = getattr(two, field.name)
        assert value is None or value.shape[:2] == (2, 2)


def test_best_of_puts_failures_last_and_an_empty_output_at_zero() -> None:
    finish = [[Finish.NAN, Finish.EOS, Finish.NO_TOKEN, Finish.EOS]]
    out = made([[[0], [-9], [0], [0]]], [[0, 1, 0, 0]], finish)
    assert jd.best_of(out, 4).finish.tolist() == [[Finish.EOS, Finish.EOS, Finish.NAN, Finish.NO_TOKEN]]
    assert jd.best_of(out, 2).length.tolist() == [[0, 1]]


def test_best_of_real_samples_has_the_best_score() -> None:
    out = generate(MODEL, TABLE, PROMPTS, key=KEY, settings=Settings(max_new_tokens=4, num_samples=6))
    best = jd.best_of(out)
    rows = [[*p, *samples[0]] for p, samples in zip(PROMPTS, best.to_lists(), strict=True)]
    totals = np.asarray(jd.score(MODEL, TABLE, rows, start=STARTS)).sum(axis=1)
    np.testing.assert_allclose(totals, np.asarray(out.logprob).sum(axis=2).max(axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, r"k: expected a whole number in \[1, 2\], got 0"),
        ({"k": 3}, "k: expected"),
        ({"by": "score"}, "by: expected 'raw' or 'processed', got score"),
        ({"length_penalty": -1.0}, "length_penalty: expected a number >= 0, got -1.0"),
    ],
)
def test_best_of_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jd.best_of(made([[[0.0], [0.0]]], [[1, 1]]), **options)
    with pytest.raises(ValueError, match=r"best_of: expected the result of num_samples above 1"):
        jd.best_of(Generated(*[np.zeros(2, np.float32)] * 7))
