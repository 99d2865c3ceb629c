"""Beam search: against its definition in float64, against exhaustive search, and its certificate (S2)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beam_oracle import exhaustive, log_law, search

from jaxdecode import Finish, Generated, Model, Prompt, Rules, chain, greedy, run, run_until_done
from jaxdecode.decoders import beam


def _init_cache(params: Any, batch_size: int, max_len: int) -> jax.Array:
    return jnp.zeros((batch_size,), jnp.int32)


def _apply(params: Any, tokens: Any, cache: Any, *, lengths: Any = None, logits_at: Any = None) -> Any:
    every = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    at = every if logits_at is None else logits_at
    place = jnp.clip(cache[:, None] + at, 0, len(params) - 1)
    logits = jnp.asarray(params)[place, jnp.take_along_axis(tokens, at, axis=1)]
    return logits, cache + (tokens.shape[1] if lengths is None else lengths)


MODEL = Model(_init_cache, _apply)  # params [N,V,V]: the law of each place, by the last token; prompts are one token
TABLES = 40
ALPHAS = (0.0, 0.5, 1.0, 2.0)
ERROR = 2e-6  # of a float32 score of up to 6 terms


def rules(batch: int, n: int, *, limit: Any = None, eos: Any = (), alpha: Any = 0.0) -> Rules:
    steps = np.arange(n + 1, dtype=np.float64)[None]
    powers = np.where(steps == 0, 1, steps) ** np.broadcast_to(alpha, (batch,))[:, None]
    ends = np.broadcast_to(np.asarray(eos, np.int32).reshape(1, -1), (batch, np.size(eos)))
    return Rules(
        transform=chain(),
        greedy=np.zeros(batch, bool),
        eos=ends,
        limit=np.full(batch, n, np.int32) if limit is None else np.asarray(limit, np.int32),
        stop=np.zeros((batch, 0, 0), np.int32),
        length_power=powers.astype(np.float32),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def tables_search(width: int, n: int, tables: jax.Array, start: jax.Array, rules: Rules) -> Generated:
    """Every row of ``start[B]`` under every table [T,N,V,V]: fields [T,B,K,...]."""
    decoder = beam(MODEL, width=width)
    keys = jax.random.split(jax.random.key(0), len(start))
    prompt = Prompt(start[:, None], jnp.ones_like(start), jnp.zeros_like(start))

    def one(table: jax.Array) -> Generated:
        state = decoder.init(table, keys, prompt, rules, max_new_tokens=n)
        return decoder.finish(run_until_done(decoder, table, state))

    return jax.vmap(one)(tables)


def some_tables(n: int, v: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(TABLES, n, v, v)) * rng.choice([0.5, 2.0, 5.0], (TABLES, 1, 1, 1))).astype(np.float32)


CASES = [  # V, N, B, end ids
    (2, 6, 1, ()), (2, 4, 8, (1,)), (3, 5, 2, (2,)), (3, 3, 9, (1, 2)),
    (4, 4, 3, (3,)), (5, 3, 5, ()), (6, 6, 3, (2, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("v", "n", "width", "ends"), CASES)
def test_S2_2_to_S2_8_against_the_definition_and_exhaustion(v: int, n: int, width: int, ends: tuple[int, ...]) -> None:
    tables = some_tables(n, v, 100 * v + 10 * n + width)
    start = np.arange(len(ALPHAS), dtype=np.int32) % v
    limit = np.array([n, n, n - 1, n], np.int32)
    out = jax.device_get(
        tables_search(width, n, tables, start, rules(4, n, limit=limit, eos=ends, alpha=np.array(ALPHAS)))
    )
    compared = 0
    for t, table in enumerate(tables):
        law = log_law(table)
        for b, alpha in enumerate(ALPHAS):
            expected = search(law, int(start[b]), width, int(limit[b]), alpha, frozenset(ends))
            best = exhaustive(law, int(start[b]), int(limit[b]), alpha, frozenset(ends))
            count, scores = out.count[t, b], out.score[t, b]
            assert count == len(expected.tokens)
            np.testing.assert_allclose(scores[0], expected.scores[0], atol=2 * ERROR)  # ties or not
            assert np.all(scores[count:] == -np.inf)
            assert np.all(out.length[t, b, count:] == 0)
            if out.certified[t, b]:
                assert scores[0] >= best - 2 * ERROR
            else:
                assert width < v ** (limit[b] - 1)
            if width >= v ** (limit[b] - 1):
                np.testing.assert_allclose(scores[0], best, atol=2 * ERROR)
            if expected.closest > 2 * ERROR:
                compared += 1
                tokens = [tuple(x[:m]) for x, m in zip(out.tokens[t, b, :count], out.length[t, b], strict=False)]
                assert tokens == expected.tokens
                np.testing.assert_allclose(scores[:count], expected.scores, atol=2 * ERROR)
                gap = expected.scores[0] - expected.bound
                np.testing.assert_allclose(out.certificate_gap[t, b], gap, atol=2 * ERROR)
    assert compared > 0.8 * TABLES * len(ALPHAS)


def table_of(first: list[float], after: list[list[float]]) -> np.ndarray:
    """Logits [2,5,5], the same at both places: the prompt is the last id, from which ``first`` leads on."""
    law = np.zeros((5, 5))
    law[: len(after), : len(first)], law[-1, : len(first)] = after, first
    with np.errstate(divide="ignore"):
        return np.log(law).astype(np.float32)[None].repeat(2, 0)


def one_search(table: np.ndarray, width: int, n: int, **options: Any) -> Any:
    start = np.array([table.shape[1] - 1] * 2, np.int32)
    out = tables_search(width, n, table[None], start, rules(2, n, **options))
    return jax.device_get(jax.tree.map(lambda x: x[0, 0], out))


def test_S2_3_greedy_need_not_find_the_best() -> None:
    table = table_of([0.6, 0.4], [[0.55, 0.45], [0.9, 0.1]])
    out = one_search(table, 2, 2)
    assert out.tokens[0].tolist() == [1, 0]
    np.testing.assert_allclose(np.exp(out.score[0]), 0.36, rtol=1e-6)
    assert one_search(table, 1, 2).tokens[0].tolist() == [0, 0]
    every = one_search(table, 4, 2)
    np.testing.assert_allclose(np.exp(every.score), [0.36, 0.33, 0.27, 0.04], rtol=1e-5)


def test_S2_6_a_beam_may_miss_the_best() -> None:
    table = table_of([0.4, 0.35, 0.25], [[0.4, 0.3, 0.3], [0.4, 0.3, 0.3], [0.9, 0.05, 0.05]])
    out = one_search(table, 2, 2)
    np.testing.assert_allclose(np.exp(out.score[0]), 0.16, rtol=1e-6)
    assert not out.certified
    wider = one_search(table, 3, 2)
    np.testing.assert_allclose(np.exp(wider.score[0]), 0.225, rtol=1e-6)
    assert wider.certified


def test_S2_8_certified_need_not_be_unique() -> None:
    out = one_search(table_of([0.5, 0.5], [[0.5, 0.5]] * 2), 1, 1)
    assert out.certified
    assert out.certificate_gap == 0


def test_S2_8_plain_log_probabilities_would_lie() -> None:
    law = [[0.4, 0.3, 0.3], [0.0005, 0.0005, 0.999], [0.3, 0.3, 0.4]]
    out = one_search(table_of([0.31, 0.29, 0.40], law), 1, 2, eos=[2], alpha=1.0)
    assert out.tokens[0, 0] == 2
    assert out.length[0] == 1
    np.testing.assert_allclose(out.score[0], -0.916, atol=1e-3)
    assert not out.certified
    np.testing.assert_allclose(out.certificate_gap, -0.916 - np.log(0.29) / 2, atol=1e-3)


@pytest.mark.parametrize("ends", [(), (3,), (0, 2)])
def test_S2_4_one_beam_is_greedy(ends: tuple[int, ...]) -> None:
    table = np.round(some_tables(5, 6, 5)[0] * 2) / 2  # with many ties
    start, n = np.arange(6, dtype=np.int32), 5
    decoder, keys = greedy(MODEL), jax.random.split(jax.random.key(0), 6)
    prompt = Prompt(start[:, None], np.ones(6, np.int32), np.zeros(6, np.int32))
    state = decoder.init(table, keys, prompt, rules(6, n, eos=ends), max_new_tokens=n)
    expected = decoder.finish(run_until_done(decoder, table, state))
    out = jax.tree.map(lambda x: x[0], tables_search(1, n, table[None], start, rules(6, n, eos=ends)))
    np.testing.assert_array_equal(out.tokens[:, 0], expected.tokens)
    np.testing.assert_array_equal(out.finish[:, 0], expected.finish)
    np.testing.assert_allclose(out.logprob[:, 0], expected.logprob, atol=1e-6)


def test_scores_can_be_computed_from_the_parts() -> None:
    tables, alpha = some_tables(5, 5, 9), np.array(ALPHAS)
    out = jax.device_get(tables_search(3, 5, tables, np.arange(4, dtype=np.int32), rules(4, 5, eos=[4], alpha=alpha)))
    power = np.maximum(out.length, 1) ** alpha[None, :, None]
    exists = np.arange(3)[None, None] < out.count[:, :, None]
    np.testing.assert_allclose(np.where(exists, out.processed_logprob.sum(-1) / power, -np.inf), out.score, atol=1e-5)
    np.testing.assert_allclose(out.processed_logprob, out.logprob, atol=1e-6)  # nothing is processed here
    assert np.all(np.diff(out.score, axis=-1)[exists[..., 1:]] <= 0)


def test_ties_go_to_the_lower_beam_then_the_lower_id() -> None:
    out = one_search(np.zeros((2, 5, 5), np.float32), 3, 2)
    assert out.tokens.tolist() == [[0, 0], [0, 1], [0, 2]]


def test_a_row_is_the_same_alone_and_beside_a_slow_one() -> None:
    table = some_tables(5, 6, 3)[:1]
    both = rules(2, 5, limit=[2, 5], eos=[5])
    out = tables_search(3, 5, table, np.array([1, 2], np.int32), both)
    for b in (0, 1):
        one = jax.tree.map(lambda x, b=b: x[b : b + 1], both)
        alone = tables_search(3, 5, table, np.array([b + 1], np.int32), one)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, b=b: x[:, b : b + 1], out), alone)


def test_steps_can_be_taken_one_by_one_and_running_rows_are_told() -> None:
    table, n = some_tables(4, 4, 1)[0], 4
    start = np.array([0, 1], np.int32)
    decoder, keys = beam(MODEL, width=2), jax.random.split(jax.random.key(0), 2)
    prompt = Prompt(start[:, None], np.ones(2, np.int32), np.zeros(2, np.int32))
    state = decoder.init(table, keys, prompt, rules(2, n), max_new_tokens=n)
    state, infos = run(decoder, table, state, 2)
    assert infos.tokens.shape == (2, 2, 0)
    part = decoder.finish(state)
    assert np.all(part.finish == Finish.RUNNING)
    assert not np.any(part.certified)
    assert np.all(part.length == 2)
    state, _ = run(decoder, table, state, 2)
    full = jax.tree.map(lambda x: x[0], tables_search(2, n, table[None], start, rules(2, n)))
    jax.tree.map(np.testing.assert_array_equal, decoder.finish(state), full)
