"""What every setting means, line by line: temperature, filters, limits, end ids, stop sequences, log probabilities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxdecode import Finish, Generated, Prompt, Settings, generate, run_until_done, sample
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import markov_model

V, B, N = 7, 8, 6
MODEL = markov_model()
TABLE = (np.random.default_rng(5).normal(size=(V, V)) * 4).round().astype(np.float32) / 2  # halves: many ties
COUNT = np.float32(9) * np.eye(V, dtype=np.float32)[(np.arange(V) + 1) % V]  # the arg max after v is v + 1 (mod V)
ROWS = [[b % V] * (1 + b % 3) for b in range(B)]


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = np.asarray(z, np.float64)
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def law(z: np.ndarray, tau: float, k: int, p: float, m: float) -> tuple[np.ndarray, float]:
    """The processed law in float64, in the documented order, and the distance of the nearest threshold."""
    z = np.asarray(z, np.float64)
    order = np.lexsort((np.arange(len(z)), -z))
    q = np.exp((z - z.max()) / tau)
    if k:
        q[order[k:]] = 0
    q /= q.sum()
    mass = np.cumsum(q[order])
    near = np.abs(mass - p).min() if p < 1 else 1.0
    if p < 1:
        q[order[1 + np.searchsorted(mass, p) :]] = 0
    q /= q.sum()
    near = min(near, np.abs(q / q.max() - m).min()) if m else near
    q[q < m * q.max()] = 0
    return q / q.sum(), float(near)


def rows_of(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=B, max_size=B)


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


TINY = float(np.finfo(np.float32).tiny)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tau=rows_of(st.sampled_from([0.0, TINY, 1e30]) | floats(0.0625, 8)),
    k=rows_of(st.integers(0, V + 2)),
    p=rows_of(st.just(1.0) | floats(0.0078125, 1)),
    m=rows_of(st.just(0.0) | floats(0, 1)),
    seed=st.integers(0, 2**32 - 1),
)
@example(tau=[0.0] * B, k=[2] * B, p=[0.5] * B, m=[0.1] * B, seed=0)
@example(tau=[0.0, 1.0] * 4, k=[0] * B, p=[1.0] * B, m=[0.0] * B, seed=0)
def test_every_row_draws_from_its_own_processed_law(tau: Any, k: Any, p: Any, m: Any, seed: int) -> None:
    """Support, raw and processed log probabilities of each token, and the arg max for rows of temperature 0."""
    chosen = Settings(max_new_tokens=N, temperature=tau, top_k=k, top_p=p, min_p=m)
    out = generate(MODEL, TABLE, ROWS, key=jax.random.key(seed), settings=chosen)
    assert out.finish.tolist() == [Finish.LENGTH] * B
    for b, tokens in enumerate(out.to_lists()):
        for t, token in enumerate(tokens):
            z = TABLE[([*ROWS[b], *tokens])[len(ROWS[b]) + t - 1]]
            np.testing.assert_allclose(out.logprob[b, t], log_softmax(z)[token], atol=2e-6)
            if tau[b] == 0:
                assert token == int(np.argmax(z))
                assert out.processed_logprob[b, t] == 0
                continue
            q, near = law(z, tau[b], k[b], p[b], m[b])
            if near > 1e-4:  # closer, float32 may rightly cut elsewhere
                assert q[token] > 0
                np.testing.assert_allclose(out.processed_logprob[b, t], np.log(q[token]), atol=1e-5)


def draw(**fields: Any) -> Generated:
    return generate(MODEL, TABLE, ROWS, key=jax.random.key(3), settings=Settings(max_new_tokens=N, **fields))


def same_tokens_and_laws(a: Generated, b: Generated) -> None:
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.processed_logprob, b.processed_logprob, atol=1e-6)


def test_off_values_are_the_identity() -> None:
    off = draw(top_k=0, top_p=1.0, min_p=0.0)
    same_tokens_and_laws(off, draw())
    same_tokens_and_laws(off, draw(top_k=V + 5, top_p=1, min_p=0))


def test_filters_at_their_tightest_are_greedy() -> None:
    greedy = draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    least = float(np.exp(TABLE - TABLE.max(1, keepdims=True)).sum(1).max() ** -1)  # <= every row's largest probability
    for fields in ({"top_k": 1}, {"top_p": 0.9 * least}, {"temperature": TINY, "top_k": 1}):
        tight = draw(**{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **fields})
        np.testing.assert_array_equal(tight.tokens, greedy.tokens)
        np.testing.assert_allclose(tight.processed_logprob, 0, atol=1e-6)


def test_min_p_keeps_equality() -> None:
    law = np.array([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25]], np.float32)
    table = np.log(law)[[0, 0, 1, 1]]  # after 0 and 1 the first law, after 2 and 3 the second
    half = np.asarray(jnp.exp(table[0, 1] - table[0, 0]))  # .25 / .5 as float32 computes it
    above = np.nextafter(half, np.float32(1))
    for m, kept in ((half, [2 / 3, 1 / 3]), (above, [1.0]), (1.0, [1.0])):
        chosen = Settings(max_new_tokens=N, top_k=0, top_p=1.0, min_p=m)
        out = generate(MODEL, table, [[0], [1], [2], [3]] * 2, key=jax.random.key(0), settings=chosen)
        first = np.exp(np.asarray(out.processed_logprob[:, 0]))
        for b in (0, 1, 4, 5):
            assert np.abs(first[b] - kept).min() < 1e-6
        np.testing.assert_allclose(first[[2, 3, 6, 7]], 1 / 4, atol=1e-6)  # the equal ones stay, even at 1


def count(prompts: Any, **fields: Any) -> Generated:
    """Greedy on the table that counts up."""
    chosen = Settings(**{"max_new_tokens": N, "temperature": 0, **fields})
    return generate(MODEL, COUNT, prompts, settings=chosen)


def check(out: Generated, tokens: list[list[int]], finish: list[Finish]) -> None:
    """Tokens and reasons; past the end -1, log probability 0, margins +inf; before it a real log probability."""
    assert out.to_lists() == tokens
    assert [Finish(f) for f in out.finish.tolist()] == finish
    past = np.arange(out.tokens.shape[1])[None] >= np.asarray(out.length)[:, None]
    assert (np.asarray(out.tokens)[past] == -1).all()
    assert (np.asarray(out.logprob)[past] == 0).all()
    assert (np.asarray(out.processed_logprob)[past] == 0).all()
    assert np.isposinf(np.asarray(out.margin)[past]).all()
    assert np.isposinf(np.asarray(out.set_margin)[past]).all()
    np.testing.assert_allclose(np.asarray(out.logprob)[~past], log_softmax(COUNT[0]).max(), atol=1e-6)


def test_max_new_tokens_counts_output_only_and_may_be_zero() -> None:
    out = count([[0, 1, 2], [3], [4, 5]], max_new_tokens=[0, 2, 3])
    assert out.tokens.shape == (3, 3)
    check(out, [[], [4, 5], [6, 0, 1]], [Finish.LENGTH] * 3)
    none = count([[0, 1], [3]], max_new_tokens=0)
    assert none.tokens.shape == (2, 0)
    check(none, [[], []], [Finish.LENGTH] * 2)


def test_max_new_tokens_up_to_a_full_context() -> None:
    out = generate(
        markov_model(context=7),
        COUNT,
        [[0, 1, 2], [3]],
        settings=Settings(max_new_tokens=4, temperature=0),
        cache_len=7,
    )
    assert out.to_lists() == [[3, 4, 5, 6], [4, 5, 6, 0]]


def test_each_row_fits_by_its_own_limit() -> None:
    """Context 8: 6 + 2 and 2 + 6 fit, though the longest prompt beside the largest limit would not."""
    chosen = Settings(max_new_tokens=[2, 6], temperature=0)
    out = generate(markov_model(context=8), COUNT, [[0] * 6, [1] * 2], settings=chosen)
    assert out.to_lists() == [[1, 2], [2, 3, 4, 5, 6, 0]]


def test_a_full_cache_ends_a_row_like_its_limit() -> None:
    """A KV cache with less room than the limit: each row stops when its own slots are used up."""
    config = TransformerConfig(
        vocab_size=V, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, d_mlp=8, context_length=64
    )
    model, params = transformer(config), init_params(config, jax.random.key(1))
    prompts: Any = np.array([[1, 2, 3, 4, 5], [6, 0, 0, 0, 0]], np.int32)
    lengths: Any = np.array([5, 1], np.int32)
    free = generate(model, params, prompts, lengths=lengths, settings=Settings(max_new_tokens=9, temperature=0))
    decoder = sample(model)
    rules = Settings(max_new_tokens=9, temperature=0).rules(2, V)

    @jax.jit
    def small(params: Any) -> Generated:
        prompt = Prompt(prompts, lengths, jnp.zeros(2, jnp.int32))
        keys = jax.random.split(jax.random.key(0), 2)
        state = decoder.init(params, keys, prompt, rules, max_new_tokens=9, cache=model.init_cache(params, 2, 8))
        return decoder.finish(run_until_done(decoder, params, state))

    out = small(params)
    assert out.length.tolist() == [3, 7]
    assert out.finish.tolist() == [Finish.LENGTH] * 2
    assert out.to_lists() == [row[:n] for row, n in zip(free.to_lists(), (3, 7), strict=True)]


ENDS = [
    # prompt, end ids, output: an end id is part of the output; in the prompt it ends nothing; -1 is none
    ([0], [-1, -1], [1, 2, 3, 4, 5, 6], Finish.LENGTH),
    ([0], [3, -1], [1, 2, 3], Finish.EOS),
    ([0], [-1, 3], [1, 2, 3], Finish.EOS),
    ([0], [5, 2], [1, 2], Finish.EOS),
    ([3], [3, -1], [4, 5, 6, 0, 1, 2], Finish.LENGTH),
    ([3, 3, 0], [3, -1], [1, 2, 3], Finish.EOS),
    ([0, 1], [2, 2], [2], Finish.EOS),
    ([5], [4, 4], [6, 0, 1, 2, 3, 4], Finish.EOS),  # at the limit as well: the end id is the reason
]


def test_eos_per_row_any_number_padded_with_minus_one() -> None:
    prompts, ends, tokens, finish = (list(x) for x in zip(*ENDS, strict=True))
    check(count(prompts, eos=np.array(ends)), tokens, finish)


@pytest.mark.parametrize("eos", [3, [3], (3,), np.array([3]), [[3]] * 3, np.int32(3)], ids=str)
def test_eos_for_all_rows_in_every_form(eos: Any) -> None:
    out = count([[0], [1, 3], [2]], eos=eos)
    check(out, [[1, 2, 3], [4, 5, 6, 0, 1, 2], [3]], [Finish.EOS, Finish.LENGTH, Finish.EOS])


STOPS = [
    # prompt, stop sequences, output: the sequence stays in the output
    ([0], [[2, 3]], [1, 2, 3], Finish.STOP),
    ([5, 6, 0], [[0, 1]], [1], Finish.STOP),  # begins in the prompt, ends in the output
    ([1, 2, 3], [[2, 3]], [4, 5, 6, 0, 1, 2], Finish.LENGTH),  # lies in the prompt alone
    ([0], [[4], [1, 2]], [1, 2], Finish.STOP),  # whichever comes first
    ([0], [], [1, 2, 3, 4, 5, 6], Finish.LENGTH),
    ([0], [[0, 0, 0, 1]], [1, 2, 3, 4, 5, 6], Finish.LENGTH),  # nothing stands before the first token
    ([0, 0, 0], [[0, 0, 0, 1], [6]], [1], Finish.STOP),
    ([0], [[5, 6]], [1, 2, 3, 4, 5, 6], Finish.STOP),  # at the limit as well: the sequence is the reason
]


def test_stop_sequences_per_row() -> None:
    for rows in (STOPS, STOPS[3:] + STOPS[:3]):  # whichever row comes first
        prompts, stops, tokens, finish = (list(x) for x in zip(*rows, strict=True))
        check(count(prompts, stop=stops), tokens, finish)


def test_stop_sequences_for_all_rows() -> None:
    out = count([[0], [0, 1], [2, 3]], stop=[[2, 3], [6, 6]])
    check(out, [[1, 2, 3], [2, 3], [4, 5, 6, 0, 1, 2]], [Finish.STOP, Finish.STOP, Finish.LENGTH])
    ragged = count([[0], [6, 0], [4]], stop=[[2, 3], [0]])
    check(ragged, [[1, 2, 3], [1, 2, 3], [5, 6, 0]], [Finish.STOP] * 3)


def test_an_end_id_beats_a_stop_sequence_beats_the_limit() -> None:
    out = count([[0], [0], [0]], max_new_tokens=[3, 3, 3], eos=[[3], [-1], [-1]], stop=[[[2, 3]], [[2, 3]], [[6, 6]]])
    check(out, [[1, 2, 3]] * 3, [Finish.EOS, Finish.STOP, Finish.LENGTH])


def test_the_end_token_has_both_log_probabilities() -> None:
    """Sampled at temperature 2 until id 0 ends the row: its raw and processed values are those of the table."""
    table = np.array([[0, 1, 2], [1, 0, 0], [2, 0, 1]], np.float32)
    prompts = [[1], [2]] * 4
    chosen = Settings(max_new_tokens=N, temperature=2.0, eos=0)
    out = generate(MODEL, table, prompts, key=jax.random.key(1), settings=chosen)
    ended = [b for b in range(B) if out.finish[b] == Finish.EOS]
    assert len(ended) >= 4
    for b in ended:
        tokens = out.to_lists()[b]
        z, last = table[[prompts[b][0], *tokens][-2]], len(tokens) - 1
        assert tokens[-1] == 0
        np.testing.assert_allclose(out.logprob[b, last], log_softmax(z)[0], atol=1e-6)
        np.testing.assert_allclose(out.processed_logprob[b, last], log_softmax(z / 2)[0], atol=1e-6)


def test_rows_without_any_stop_sequence() -> None:
    check(count([[0], [3]], stop=[[], []]), [[1, 2, 3, 4, 5, 6], [4, 5, 6, 0, 1, 2]], [Finish.LENGTH] * 2)


NUMBERS = [
    2,
    2.0,
    np.float16(2),
    np.float64(2),
    np.int8(2),
    jnp.float32(2),
    jnp.bfloat16(2),
    [2.0, 2],
    np.array([2, 2]),
]
WHOLE = [3, np.int8(3), np.uint64(3), jnp.int32(3), jnp.uint8(3), [3, 3], np.array([3, 3], np.int64)]


def test_numbers_of_every_kind_are_one_kind_inside() -> None:
    """float32 or int32 NumPy arrays [B]: one compiled program for all of them."""
    for tau in NUMBERS:
        (value,) = jax.tree.leaves(Settings(temperature=tau).rules(2, V).transform)
        assert (type(value), value.dtype, value.tolist()) == (np.ndarray, np.float32, [2.0, 2.0])
    for k in WHOLE:
        value = jax.tree.leaves(Settings(top_k=k).rules(2, V).transform)[1]
        assert (type(value), value.dtype, value.tolist()) == (np.ndarray, np.int32, [3, 3])
    for n in WHOLE:
        value = Settings(max_new_tokens=n).rules(2, V).limit
        assert value.dtype == np.int32
        assert value.tolist() == [3, 3]


def test_top_logprobs_are_the_likeliest_ids_of_the_raw_law() -> None:
    """At every step, whatever temperature and filters do; ties by id; past the end no id."""
    n = 3
    chosen = Settings(max_new_tokens=N, temperature=[0.0, 3.0] * 4, top_k=2, eos=0, top_logprobs=n)
    out = generate(MODEL, TABLE, ROWS, key=jax.random.key(3), settings=chosen)
    assert out.top_ids is not None
    assert out.top_logprobs is not None
    assert out.top_ids.shape == out.top_logprobs.shape == (B, N, n)
    assert Finish.EOS in out.finish.tolist()
    for b, tokens in enumerate(out.to_lists()):
        for t, token in enumerate(tokens):
            z = TABLE[[*ROWS[b], *tokens][len(ROWS[b]) + t - 1]]
            likeliest = np.lexsort((np.arange(V), -z))[:n]
            assert out.top_ids[b, t].tolist() == likeliest.tolist()
            np.testing.assert_allclose(out.top_logprobs[b, t], log_softmax(z)[likeliest], atol=2e-6)
            assert b % 2 or token == likeliest[0]
        assert (np.asarray(out.top_ids[b, len(tokens) :]) == -1).all()
        assert (np.asarray(out.top_logprobs[b, len(tokens) :]) == 0).all()


def test_top_logprobs_are_absent_unless_asked_for() -> None:
    out = draw()
    assert out.top_ids is None
    assert out.top_logprobs is None


def test_settings_are_frozen_keyword_only_and_know_their_size() -> None:
    assert Settings().size == 128
    assert Settings(max_new_tokens=[3, 9, 0]).size == 9
    with pytest.raises(AttributeError):
        Settings().temperature = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        Settings(5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="cache_len"):  # what is no setting is refused, not ignored
        Settings(cache_len=4)  # type: ignore[call-arg]
