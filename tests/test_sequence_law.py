"""The law of whole sequences: what comes out of the loop is distributed as the product of the conditionals.

The oracle enumerates every sequence in float64, with its own sorted and plainly written truncation rules.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chi2

from jaxdecode import Settings, generate, greedy
from jaxdecode import keys as keys_
from jaxdecode.base import Finish, Generated
from jaxdecode.testing import markov_model, second_order_model

Law = dict[tuple[int, ...], float]


class Rule(NamedTuple):
    """One row's settings; the defaults are off values."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def softmax(z: np.ndarray) -> np.ndarray:
    w = np.exp(z - z.max())
    return w / w.sum()


def processed(logits: np.ndarray, rule: Rule) -> np.ndarray:
    """The law one token is drawn from: temperature, top-k, top-p, min-p, each renormalised; float64."""
    z = np.asarray(logits, np.float64)
    if rule.temperature == 0:
        return np.eye(len(z))[np.argmax(z)]
    p = softmax(z / np.float32(rule.temperature))
    order = np.argsort(-z, kind="stable")
    if rule.top_k:
        p[order[rule.top_k :]] = 0
        p /= p.sum()
    mass = np.cumsum(p[order])
    if rule.top_p < 1:
        assert np.abs(mass - rule.top_p).min() > 1e-3, "a test law must keep its distance from the threshold"
        p[order[np.searchsorted(mass, rule.top_p) + 1 :]] = 0
        p /= p.sum()
    p[p < rule.min_p * p.max()] = 0
    return p / p.sum()


def sequences(table: np.ndarray, prompt: tuple[int, ...], rule: Rule, n: int, end: int = -1) -> Law:
    """Exact law of the output: of n tokens, or up to and with ``end``. ``table[V,V]`` or ``[V,V,V]``."""
    law: Law = {(): 1.0}
    for _ in range(n):
        longer: Law = {}
        for s, mass in law.items():
            if s and s[-1] == end:
                longer[s] = mass
                continue
            history = (*prompt, *s)
            row = table[history[-1]] if table.ndim == 2 else table[history[-2:] if len(history) > 1 else history * 2]
            for token, q in enumerate(processed(row, rule)):
                if q > 0:
                    longer[(*s, token)] = mass * q
        law = longer
    return law


def p_value(drawn: list[tuple[int, ...]], law: Law) -> float:
    """Chi-square test of ``drawn`` against ``law``; cells that expect fewer than 5 are pooled."""
    at = {s: i for i, s in enumerate(law)}
    counts = np.bincount([at.get(s, len(at)) for s in drawn], minlength=len(at) + 1)
    if counts[-1]:
        return 0.0  # a sequence of probability 0
    expected = np.fromiter(law.values(), float) * len(drawn)
    rare = expected < 5
    cells = [*zip(counts[:-1][~rare], expected[~rare], strict=True)]
    if rare.any():
        cells.append((counts[:-1][rare].sum(), expected[rare].sum()))
    statistic = sum((c - e) ** 2 / e for c, e in cells if e > 0)
    return float(chi2.sf(statistic, len(cells) - 1))


def outputs(out: Generated, rows: np.ndarray) -> list[tuple[int, ...]]:
    tokens, length = np.asarray(out.tokens)[rows], np.asarray(out.length)[rows]
    return [tuple(t[:n]) for t, n in zip(tokens.tolist(), length.tolist(), strict=True)]


def per_row(rules: list[Rule], group: np.ndarray, **more: Any) -> Settings:
    """Settings of rows that follow ``rules[group[row]]``."""
    return Settings(
        temperature=np.array([r.temperature for r in rules], np.float32)[group],
        top_k=np.array([r.top_k for r in rules])[group],
        top_p=np.array([r.top_p for r in rules], np.float32)[group],
        min_p=np.array([r.min_p for r in rules], np.float32)[group],
        **more,
    )


# ---------------------------------------------------------------- one batch of 200,000 sampled rows, settings mixed
TABLE = np.log(
    np.array([[0.42, 0.30, 0.17, 0.11], [0.10, 0.55, 0.15, 0.20], [0.24, 0.26, 0.27, 0.23], [0.07, 0.13, 0.31, 0.49]])
).astype(np.float32)
RULES = [
    Rule(),
    Rule(temperature=0.6),
    Rule(temperature=1.4, top_k=3),
    Rule(top_p=0.79),
    Rule(temperature=0.9, min_p=0.42),
    Rule(temperature=1.3, top_k=3, top_p=0.86, min_p=0.5),
    Rule(top_k=2, min_p=0.3),
    Rule(temperature=2.0, top_p=0.64),
    Rule(temperature=0.0, top_k=2, top_p=0.5),
]
PROMPTS = [(0,), (1, 2), (3,), (2, 0, 1), (2,), (0, 3), (1,), (3, 3, 2), (1, 0, 3)]
SAMPLED = 8
DRAWS = 200_000
N = 4


@functools.cache
def mixed() -> tuple[Generated, np.ndarray]:
    """One ``generate`` call: 200,000 sampled rows of 8 settings, interleaved, and 1,000 greedy rows beside them."""
    group = np.resize(np.arange(SAMPLED), DRAWS)
    group = np.insert(group, np.arange(0, DRAWS, 200), SAMPLED)
    width = max(map(len, PROMPTS))
    padded = np.array([p + (0,) * (width - len(p)) for p in PROMPTS], np.int32)
    lengths = np.array([len(p) for p in PROMPTS])
    out = generate(
        markov_model(),
        jnp.asarray(TABLE),
        padded[group],
        lengths=lengths[group],
        key=jax.random.key(20260),
        settings=per_row(RULES, group, max_new_tokens=N),
    )
    assert out.logprob.dtype == jnp.float32
    return out, group


@pytest.mark.parametrize("g", range(SAMPLED))
def test_S1_2_sequences_follow_the_product_of_the_processed_conditionals(g: int) -> None:
    out, group = mixed()
    drawn = outputs(out, group == g)
    assert len(drawn) == DRAWS // SAMPLED
    law = sequences(TABLE, PROMPTS[g], RULES[g], N)
    assert p_value(drawn, law) > 1e-3
    if g:  # another rule is another law, and this test can tell
        assert p_value(drawn, sequences(TABLE, PROMPTS[g], Rule(), N)) < 1e-12
    else:
        assert len(law) == 4**N


def test_S1_2_the_chi_square_notices_a_slightly_warmer_law() -> None:
    out, group = mixed()
    warmer = sequences(TABLE, PROMPTS[0], Rule(temperature=1.1), N)
    assert p_value(outputs(out, group == 0), warmer) < 1e-12


def test_S1_2_log_probabilities_are_those_of_the_enumeration() -> None:
    out, group = mixed()
    for g in range(len(RULES)):
        rows = np.flatnonzero(group == g)[:200]
        for rule, logprob in ((Rule(), out.logprob), (RULES[g], out.processed_logprob)):
            law = sequences(TABLE, PROMPTS[g], rule, N)
            want = [np.log(law[s]) for s in outputs(out, rows)]
            np.testing.assert_allclose(np.asarray(logprob)[rows].sum(1), want, atol=3e-6)


def test_S2_1_greedy_rows_beside_sampled_rows_take_the_arg_max() -> None:
    out, group = mixed()
    (only,) = sequences(TABLE, PROMPTS[SAMPLED], RULES[SAMPLED], N)
    assert set(outputs(out, group == SAMPLED)) == {only}


# ---------------------------------------------------------------- end tokens, limits, second order
def test_S1_1_the_law_of_sequences_that_stop_at_an_end_token() -> None:
    group = np.resize([0, 1], 12_000)
    end, limits, rules = [3, 1], [4, 3], [Rule(), Rule(temperature=1.5, top_p=0.9)]
    options = per_row(rules, group, max_new_tokens=np.array(limits)[group], eos=np.array(end)[group][:, None])
    out = generate(
        markov_model(), jnp.asarray(TABLE), np.zeros((len(group), 1), int), key=jax.random.key(3), settings=options
    )
    for g in (0, 1):
        law = sequences(TABLE, (0,), rules[g], limits[g], end[g])
        assert {len(s) for s in law} == set(range(1, limits[g] + 1))
        assert p_value(outputs(out, group == g), law) > 1e-3
    ended = (
        np.take_along_axis(np.asarray(out.tokens), np.asarray(out.length)[:, None] - 1, 1)[:, 0] == np.array(end)[group]
    )
    np.testing.assert_array_equal(np.asarray(out.finish), np.where(ended, Finish.EOS, Finish.LENGTH))


def test_S1_2_law_of_a_second_order_model() -> None:
    table = np.random.default_rng(11).normal(size=(3, 3, 3)).astype(np.float32)
    rules, prompts = [Rule(), Rule(temperature=0.8, top_k=2), Rule(top_p=0.71)], [(2, 0), (1,), (0, 0, 1)]
    group = np.resize(np.arange(3), 18_000)
    padded = np.array([p + (0,) * (3 - len(p)) for p in prompts], np.int32)
    out = generate(
        second_order_model(),
        jnp.asarray(table),
        padded[group],
        lengths=np.array([len(p) for p in prompts])[group],
        key=jax.random.key(4),
        settings=per_row(rules, group, max_new_tokens=3),
    )
    for g in range(3):
        drawn = outputs(out, group == g)
        assert p_value(drawn, sequences(table, prompts[g], rules[g], 3)) > 1e-3
        # a model that forgot the token before the last one would fail
        first_order = sequences(table[0], prompts[g], rules[g], 3)
        assert p_value(drawn, first_order) < 1e-12


@given(limits=arrays(np.int32, 8, elements=st.integers(0, 6)), seed=st.integers(0, 2**31 - 1))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_S1_1_the_loop_equals_one_written_out(limits: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, starts = rng.normal(size=(5, 5)).astype(np.float32) * 2, rng.integers(0, 5, 8)
    tau, eos = rng.choice([0.0, 0.7, 1.0], 8).astype(np.float32), np.full((8, 1), 4)
    limits[0] = 6
    key = jax.random.key(seed)
    options = Settings(max_new_tokens=limits, temperature=tau, eos=eos)
    out = generate(markov_model(), jnp.asarray(table), starts[:, None], key=key, settings=options)
    keys = keys_.row_keys(key, 8)
    uniform = np.stack([keys_.uniform(keys, jnp.full(8, t), keys_.Stream.DRAW, jnp.float32) for t in range(1, 7)], 1)
    for b, (tokens, margin) in enumerate(zip(out.to_lists(), np.asarray(out.margin), strict=True)):
        last, want = int(starts[b]), list[int]()
        while len(want) < limits[b] and (last != 4 or not want):
            p = processed(table[last], Rule(temperature=float(tau[b])))
            last = int(np.argmax(np.cumsum(p) > uniform[b, len(want)]))
            want.append(last)
        safe = np.flatnonzero(margin[: len(tokens)] < 1e-5)
        n = safe[0] if len(safe) else len(tokens)
        assert tokens[:n] == want[:n]
        assert len(safe) or len(tokens) == len(want)


def test_S1_1_always_ends_at_the_limit_when_no_end_token_comes() -> None:
    table = jnp.asarray(np.where(np.arange(4) == 3, -np.inf, TABLE), jnp.float32)
    limits = np.array([0, 1, 5, 2, 5, 3])
    for tau in (0.0, 1.0):
        options = Settings(max_new_tokens=limits, temperature=tau, eos=[3])
        out = generate(markov_model(), table, np.zeros((6, 1), int), key=jax.random.key(0), settings=options)
        np.testing.assert_array_equal(out.length, limits)
        np.testing.assert_array_equal(out.finish, np.full(6, Finish.LENGTH))
        assert (np.asarray(out.tokens) == -1).sum() == (5 - limits).sum()


# ---------------------------------------------------------------- S2.1
TIES = st.sampled_from([-1.0, -0.0, 0.0, 1.0, 1.0 + 2**-23, 7.0, -np.inf])


@given(table=arrays(np.float32, (6, 6), elements=TIES))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_S2_1_greedy_is_the_arg_max_and_equal_maxima_give_the_smallest_id(table: np.ndarray) -> None:
    table[:, 5] = np.where(np.isneginf(table).all(1), 0, table[:, 5])
    starts = np.arange(6)
    want = [[int(np.argmax(table[s]))] for s in starts]
    for row in want:
        row += [int(np.argmax(table[row[0]]))]
    params, prompts = jnp.asarray(table), starts[:, None]
    cold = generate(markov_model(), params, prompts, settings=Settings(max_new_tokens=2, temperature=0))
    by_decoder = generate(
        markov_model(),
        params,
        prompts,
        key=jax.random.key(0),
        decoder=greedy(markov_model()),
        settings=Settings(max_new_tokens=2, temperature=1.7, top_k=1),
    )
    assert cold.to_lists() == by_decoder.to_lists() == want
    np.testing.assert_array_equal(cold.processed_logprob, np.zeros((6, 2)))


def test_S2_1_ties_among_many_ids() -> None:
    size = 1024
    table = np.zeros((size, size), np.float32)
    best = [(7, 1000), (0, 1023), (511, 512), (1022, 1023)]
    for row, ids in enumerate(best):
        table[row, list(ids)] = np.float32(1e-30)
    out = generate(
        markov_model(), jnp.asarray(table), [[0], [1], [2], [3]], settings=Settings(max_new_tokens=1, temperature=0)
    )
    assert out.to_lists() == [[ids[0]] for ids in best]
    assert list(itertools.chain(*out.to_lists())) == np.argmax(table[:4], 1).tolist()
