"""Keys: one per row, folded with the row's id and the token's own position, so that a row's place never matters."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdecode import Generated, Settings, generate, keys
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import markov_model

V, B, N = 7, 4, 5
MODEL = markov_model()
TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)
PROMPTS = [[1], [2, 3, 4], [5, 6], [0]]
SETTINGS = Settings(max_new_tokens=N)


def tokens(key: Any, prompts: Any = PROMPTS, **options: Any) -> list[list[int]]:
    return generate(MODEL, TABLE, prompts, key=key, settings=SETTINGS, **options).to_lists()


def by_hand(row_key: jax.Array, prompt: list[int]) -> list[int]:
    """The inverse CDF in float64, with the uniform number the documents promise for each position."""
    history = list(prompt)
    for t in range(len(prompt), len(prompt) + N):
        u = float(jax.random.uniform(jax.random.fold_in(jax.random.fold_in(row_key, t), 0)))
        law = np.exp(TABLE[history[-1]].astype(np.float64))
        edges = np.cumsum(law / law.sum())
        assert np.abs(edges[:-1] - u).min() > 1e-6, "too near an edge to say"
        history.append(int(np.searchsorted(edges, u, side="right")))
    return history[len(prompt) :]


def test_each_token_comes_from_the_documented_number() -> None:
    """fold_in(fold_in(row key, t), 0), t the index of the token in its own row; row key = fold_in(key, row)."""
    key = jax.random.key(11)
    expected = [by_hand(jax.random.fold_in(key, b), prompt) for b, prompt in enumerate(PROMPTS)]
    assert tokens(key) == expected


def test_an_array_of_keys_is_taken_as_it_is() -> None:
    row_keys = jax.random.split(jax.random.key(5), B)
    assert tokens(row_keys) == [by_hand(k, prompt) for k, prompt in zip(row_keys, PROMPTS, strict=True)]


def test_positions_count_from_the_rows_first_real_token() -> None:
    """Left padding, whatever it holds, moves no position."""
    key, width = jax.random.key(2), 9
    array = np.full((B, width), 3, np.int32)
    lengths = np.array([len(p) for p in PROMPTS])
    for row, prompt in zip(array, PROMPTS, strict=True):
        row[width - len(prompt) :] = prompt
    assert tokens(key, array, lengths=lengths, padding="left") == tokens(key)


ids = st.lists(st.integers(0, 2**32 - 1), min_size=B, max_size=B)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(ids, st.permutations(range(B)), st.integers(0, 2**32 - 1))
def test_a_row_follows_its_id_to_any_place(row_ids: list[int], places: list[int], seed: int) -> None:
    key = jax.random.key(seed)
    here = tokens(key, row_ids=row_ids)
    there = tokens(key, [PROMPTS[i] for i in places], row_ids=[row_ids[i] for i in places])
    assert there == [here[i] for i in places]


@pytest.mark.parametrize("kind", [list, tuple, np.uint32, np.int64, jax.numpy.uint32], ids=lambda k: k.__name__)
def test_row_ids_are_folded_into_the_key(kind: Any) -> None:
    key, values = jax.random.key(3), [7, 0, 2**31 - 1, 12]
    by_id = jax.numpy.stack([jax.random.fold_in(key, i) for i in values])
    row_ids = kind(values) if kind in (list, tuple) else np.asarray(values).astype(kind)
    assert tokens(key, row_ids=row_ids) == tokens(by_id)


def test_the_largest_row_id_is_in_range() -> None:
    key = jax.random.key(3)
    (row_key,) = keys.row_keys(key, 1, [2**32 - 1])
    assert row_key == jax.random.fold_in(key, np.uint32(2**32 - 1))


def test_default_row_ids_count_up() -> None:
    key = jax.random.key(4)
    assert tokens(key) == tokens(key, row_ids=range(B)) == tokens(key, row_ids=np.arange(B))


def test_string_ids_are_two_words_of_their_sha256() -> None:
    key, names = jax.random.key(9), ["line-1", "Zeile zwei", "三", ""]

    def folded(name: str) -> jax.Array:
        digest = hashlib.sha256(name.encode()).digest()
        first, second = (np.uint32(int.from_bytes(digest[i : i + 4], "big")) for i in (0, 4))
        return jax.random.fold_in(jax.random.fold_in(key, first), second)

    assert tokens(key, row_ids=names) == tokens(jax.numpy.stack([folded(n) for n in names]))
    back = [3, 1, 0, 2]
    moved = tokens(key, [PROMPTS[i] for i in back], row_ids=[names[i] for i in back])
    assert moved == [tokens(key, row_ids=names)[i] for i in back]


def test_equal_ids_share_their_numbers_and_others_do_not() -> None:
    prompts = [[1]] * B
    a, b, c, d = tokens(jax.random.key(0), prompts, row_ids=[5, 5, 6, 5])
    assert a == b == d != c


def test_legacy_keys_are_the_same_keys() -> None:
    assert tokens(jax.random.PRNGKey(8)) == tokens(jax.random.key(8, impl="threefry2x32"))
    legacy = jax.random.split(jax.random.PRNGKey(8), B)
    assert tokens(legacy) == tokens(jax.random.split(jax.random.key(8), B))
    assert tokens(np.asarray(jax.random.PRNGKey(8))) == tokens(jax.random.key(8))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
@pytest.mark.parametrize("legacy", [False, True], ids=["typed", "legacy"])
def test_generators_that_look_at_the_batch_are_refused(impl: str, legacy: bool) -> None:
    key = jax.random.PRNGKey(0, impl=impl) if legacy else jax.random.key(0, impl=impl)
    with pytest.raises(
        ValueError, match=r"^key: expected .*threefry2x32|^key: expected a jax.random.key, .*uint32\(4,\)"
    ):
        tokens(key)
    if not legacy:
        with pytest.raises(ValueError, match="rbg"):
            tokens(jax.random.split(key, B))


def test_keys_and_row_ids_may_be_traced() -> None:
    key, values = jax.random.key(6), np.array([4, 9, 1, 0], np.uint32)
    array, lengths = np.zeros((B, 3), np.int32), np.array([len(p) for p in PROMPTS])
    for row, prompt in zip(array, PROMPTS, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def both(key: jax.Array, row_ids: jax.Array) -> jax.Array:
        return generate(MODEL, TABLE, array, lengths=lengths, key=key, row_ids=row_ids, settings=SETTINGS).tokens

    assert both(key, values).tolist() == tokens(key, row_ids=values)


def test_streams_are_fixed_numbers_and_differ() -> None:
    """Their numbers are part of the contract: changing one changes every sampled output."""
    assert {s.name: s.value for s in keys.Stream} == {
        "DRAW": 0,
        "DRAFT": 1,
        "ACCEPT": 2,
        "RESIDUAL": 3,
        "XTC": 4,
        "GUMBEL": 5,
    }
    row_keys = jax.random.split(jax.random.key(1), 3)
    position = jax.numpy.array([4, 4, 9])
    drawn = [np.asarray(keys.uniform(row_keys, position, s, np.float32)) for s in keys.Stream]
    assert len({float(u) for row in drawn for u in row}) == 3 * len(keys.Stream)
    assert all((u >= 0).all() and (u < 1).all() for u in drawn)
    one = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(row_keys[2], 9), 3))
    assert drawn[3][2] == one


def samples(k: int, key: Any, temperature: Any = 1.0, model: Any = MODEL, params: Any = TABLE) -> Generated:
    chosen = Settings(max_new_tokens=[N, 1, 3, N], temperature=temperature, eos=[[-1], [-1], [2], [6]], num_samples=k)
    return generate(model, params, PROMPTS, key=key, settings=chosen)


def test_sample_i_of_a_prompt_has_its_row_key_folded_with_i() -> None:
    """K samples of B prompts, with an axis K after B, are B * K rows with those keys."""
    k, key = 3, jax.random.key(21)
    out = samples(k, key, [1.0, 0.5, 0.0, 2.0])
    assert out.tokens.shape == (B, k, N)
    assert out.length.shape == out.finish.shape == (B, k)
    row_keys = [jax.random.fold_in(jax.random.fold_in(key, b), i) for b in range(B) for i in range(k)]
    chosen = Settings(
        max_new_tokens=np.repeat([N, 1, 3, N], k),
        temperature=np.repeat([1.0, 0.5, 0.0, 2.0], k),
        eos=np.repeat([[-1], [-1], [2], [6]], k, axis=0),
    )
    prompts = [p for p in PROMPTS for _ in range(k)]
    rows = generate(MODEL, TABLE, prompts, key=jax.numpy.stack(row_keys), settings=chosen)
    for got, expected in zip(jax.tree.leaves(out), jax.tree.leaves(rows), strict=True):
        np.testing.assert_array_equal(got.reshape(B * k, *got.shape[2:]), expected)
    assert out.to_lists() == [rows.to_lists()[b * k : b * k + k] for b in range(B)]
    assert len({tuple(row) for row in out.to_lists()[0]}) == k


def test_one_sample_has_no_axis_and_keeps_the_row_key() -> None:
    assert samples(1, jax.random.key(2)).tokens.shape == (B, N)
    assert by_hand(jax.random.fold_in(jax.random.key(2), 0), PROMPTS[0]) == samples(1, jax.random.key(2)).to_lists()[0]


def test_samples_of_a_transformer_share_their_prompt() -> None:
    """Its cache keeps the prompt once; the tokens are those of rows that each keep their own."""
    config = TransformerConfig(
        vocab_size=V, d_model=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, d_mlp=8, context_length=64
    )
    model, params = transformer(config), init_params(config, jax.random.key(0))
    key, k = jax.random.key(1), 2
    shared = samples(k, key, 1.0, model, params).to_lists()
    for i in range(k):
        row_keys = jax.numpy.stack([jax.random.fold_in(jax.random.fold_in(key, b), i) for b in range(B)])
        assert samples(1, row_keys, 1.0, model, params).to_lists() == [row[i] for row in shared]


def test_same_key_same_output_and_another_key_another_one() -> None:
    """S6.2 as a user sees it."""
    assert tokens(jax.random.key(1)) == tokens(jax.random.key(1)) != tokens(jax.random.key(2))
