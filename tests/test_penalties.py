"""Penalties and bans against oracles in float64, written from the definitions; each row has numbers and a history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdecode as jd
from jaxdecode import Context, LogitsTransform

ROWS, V, T = 96, 7, 14
NEG = -np.inf
RNG = np.random.default_rng(11)
LOGITS = RNG.normal(size=(ROWS, V)).astype(np.float32) * 2
LOGITS[::5, 2] = NEG
SMALL = RNG.integers(0, 3, (ROWS, T))  # three ids only: stretches repeat
TOKENS = np.where(np.arange(ROWS)[:, None] % 3 == 0, RNG.integers(0, V, (ROWS, T)), SMALL).astype(np.int32)
LENGTH = RNG.integers(1, T + 1, ROWS).astype(np.int32)
START = RNG.integers(1, LENGTH + 1).astype(np.int32)
LIMIT = (LENGTH - START + RNG.integers(0, 4, ROWS)).astype(np.int32)


@jax.jit
def _apply(t: LogitsTransform, z: Any, tokens: Any, length: Any, start: Any, limit: Any) -> jax.Array:
    return t(z, tokens, length, start=start, limit=limit)


def check(t: LogitsTransform, oracle: Callable[[int, np.ndarray, list[int], list[int]], np.ndarray]) -> np.ndarray:
    """``oracle(row, z, text, output)`` says what the logits become; returns how many rows it changes."""
    out = np.asarray(_apply(t, LOGITS, TOKENS, LENGTH, START, LIMIT))
    changed = np.zeros(ROWS, bool)
    for b in range(ROWS):
        text = TOKENS[b, : LENGTH[b]].tolist()
        want = oracle(b, LOGITS[b].astype(np.float64), text, text[START[b] :])
        np.testing.assert_array_equal(np.isneginf(out[b]), np.isneginf(want), f"row {b}")
        np.testing.assert_allclose(out[b], want, rtol=1e-5, atol=1e-6)
        changed[b] = not np.array_equal(out[b], LOGITS[b])
    assert changed.any()
    assert not changed.all()
    return changed


def per_row(values: list[Any]) -> np.ndarray:
    return np.resize(np.asarray(values), ROWS)


# ---------------------------------------------------------------- scores
@pytest.mark.parametrize("output_only", [False, True])
def test_repetition_penalty(output_only: bool) -> None:
    r = per_row([1.0, 1.3, 0.5, 4.0])

    def oracle(b: int, z: np.ndarray, text: list[int], output: list[int]) -> np.ndarray:
        for v in set(output if output_only else text):
            z[v] = z[v] * r[b] if z[v] < 0 else z[v] / r[b]
        return z

    changed = check(jd.repetition_penalty(r, output_only=output_only), oracle)
    assert not changed[r == 1].any()


def test_S9_1_a_repetition_penalty_changes_the_order_where_a_temperature_cannot() -> None:
    z, text = jnp.array([[2.0, 1.5, 0.0], [2.0, 1.5, 0.0]]), jnp.array([[0], [2]])
    assert jd.repetition_penalty(2.0)(z, text).argmax(axis=1).tolist() == [1, 0]
    for tau in (0.1, 10.0):
        assert jd.temperature(tau)(z).argmax(axis=1).tolist() == [0, 0]


def test_presence_and_frequency_penalty_count_output_only() -> None:
    a, b_ = per_row([0.0, 0.7, -1.5]), per_row([0.4, 0.0, -0.3, 2.0, 0.0])

    def presence(b: int, z: np.ndarray, text: list[int], output: list[int]) -> np.ndarray:
        return z - a[b] * np.isin(np.arange(V), output)

    def frequency(b: int, z: np.ndarray, text: list[int], output: list[int]) -> np.ndarray:
        return z - b_[b] * np.bincount(output, minlength=V)

    assert not check(jd.presence_penalty(a), presence)[a == 0].any()
    assert not check(jd.frequency_penalty(b_), frequency)[b_ == 0].any()


def longest(text: list[int], v: int, breakers: list[int]) -> int:
    """Of all places where ``v`` stands: the most tokens before it that equal the end of the text, without a breaker."""
    best = 0
    for j in (i for i, token in enumerate(text) if token == v and v not in breakers):
        n = 0
        while n < min(j, 50) and text[j - 1 - n] == text[-1 - n] and text[-1 - n] not in breakers:
            n += 1
        best = max(best, n)
    return best


@pytest.mark.parametrize("breakers", [[], [1], "per row"])
def test_dry(breakers: Any) -> None:
    multiplier, base, allowed = per_row([1.0, 0.0, 0.6]), per_row([1.75, 1.0, 3.0]), per_row([1, 2, 1, 4])
    mine = [[b % V, (b + 3) % V][: b % 3] for b in range(ROWS)] if breakers == "per row" else [breakers] * ROWS

    def oracle(b: int, z: np.ndarray, text: list[int], output: list[int]) -> np.ndarray:
        for v in range(V):
            n = longest(text, v, mine[b])
            z[v] -= multiplier[b] * base[b] ** (n - allowed[b]) if n >= allowed[b] else 0
        return z

    given = mine if breakers == "per row" else breakers
    changed = check(jd.dry(multiplier, base, allowed, given, V), oracle)
    assert not changed[multiplier == 0].any()


def test_dry_counts_at_most_fifty_tokens() -> None:
    z, text = jnp.zeros((2, 3)), jnp.array([[1] * 120, [2] * 40 + [0] * 80])
    out = jd.dry(0.5, 1.2, 2)(z, text, jnp.array([120, 40]))
    np.testing.assert_allclose(out[0], [0, -0.5 * 1.2**48, 0], rtol=1e-5)
    np.testing.assert_allclose(out[1], [0, 0, -0.5 * 1.2**37], rtol=1e-5)
    assert np.isfinite(jd.dry(0.0, 1e9, 1)(z, text)).all()  # off, however large the power


@pytest.mark.parametrize("form", ["mapping", "pairs", "array", "per row", "array per row"])
def test_logit_bias(form: str) -> None:
    one = {0: 1.5, 5: -2.0}
    rows = [{b % V: float(b), (b + 1) % V: -1.0} if b % 2 else {} for b in range(ROWS)]
    table = np.zeros((ROWS, V), np.float32)
    for b in range(ROWS):
        for i, x in (rows[b] if "per row" in form else one).items():
            table[b, i] = x
    bias: Any = {"mapping": one, "pairs": [[0, 1.5], (5, -2)], "array": table[0], "array per row": jnp.asarray(table)}
    t = jd.logit_bias(bias.get(form, [[*row.items()] if b % 3 else row for b, row in enumerate(rows)]), V)
    out = _apply(t, LOGITS, TOKENS, LENGTH, START, LIMIT)
    np.testing.assert_allclose(out, LOGITS + table, rtol=1e-6)


# ---------------------------------------------------------------- masks
def test_allowed_and_banned_ids() -> None:
    rows: list[Any] = [[b % V, (b + 2) % V] if b % 2 else None for b in range(ROWS)]
    none = [[] if row is None else row for row in rows]
    for allow, given, lists in (
        (True, [1, 2, 6], [[1, 2, 6]] * ROWS),
        (True, rows, rows),
        (False, (0, 2), [(0, 2)] * ROWS),
        (False, np.array([3]), [[3]] * ROWS),
        (False, none, none),
    ):
        out = (jd.allowed_ids if allow else jd.banned_ids)(given, V)(jnp.zeros((ROWS, V)))
        for b in range(ROWS):
            free = np.isin(np.arange(V), range(V) if lists[b] is None else lists[b]) == allow
            np.testing.assert_array_equal(out[b] == 0, free)


@pytest.mark.parametrize("each", [False, True])
def test_bad_words_match_in_prompt_and_output(each: bool) -> None:
    same = [[3], [0, 1], [1, 2, 1], [2, 2, 2, 2, 0], [6, 5]]
    rows = [[w for i, w in enumerate(same) if (b + i) % 2] for b in range(ROWS)] if each else [same] * ROWS

    def oracle(b: int, z: np.ndarray, text: list[int], output: list[int]) -> np.ndarray:
        for *before, last in rows[b]:
            if text[len(text) - len(before) :] == before and len(before) <= len(text):
                z[last] = NEG
        return z

    if not each:  # the word of one id changes all rows; keep one row that has nothing to change
        same.remove([3])
    check(jd.bad_words(rows if each else same, V), oracle)


def test_no_repeat_ngram() -> None:
    n = per_row([0, 1, 2, 3, 4, 9])

    def oracle(b: int, z: np.ndarray, text: list[int], output: list[int]) -> np.ndarray:
        if n[b] == 0:
            return z
        known = {tuple(text[i : i + n[b]]) for i in range(len(text) - n[b] + 1)}
        for v in range(V):
            if tuple([*text, v][-n[b] :]) in known:
                z[v] = NEG
        return z

    changed = check(jd.no_repeat_ngram(n), oracle)
    assert not changed[n == 0].any()


@pytest.mark.parametrize("each", [False, True])
def test_min_new_tokens_masks_all_end_ids_until_then(each: bool) -> None:
    n = per_row([0, 1, 3, 20, 5])
    eos = np.stack([per_row([0, 4]), per_row([-1, 6, 5])], 1) if each else np.array([1, 6])

    def oracle(b: int, z: np.ndarray, text: list[int], output: list[int]) -> np.ndarray:
        ends = eos[b] if each else eos
        if len(output) < n[b]:
            z[[e for e in ends if e >= 0]] = NEG
        return z

    check(jd.min_new_tokens(n, eos), oracle)


@pytest.mark.parametrize("each", [False, True])
def test_forced_tokens_at_places_of_the_output(each: bool) -> None:
    rows: list[Any] = [{0: b % V, 3: 1, -1: 5, 2**20: 3} if b % 2 else None for b in range(ROWS)]
    same = {1: 4, -2: 0, -(2**20): 3}

    def oracle(b: int, z: np.ndarray, text: list[int], output: list[int]) -> np.ndarray:
        keep = None
        for place, token in ((rows[b] or {}) if each else same).items():
            if len(output) == (place if place >= 0 else LIMIT[b] + place):
                keep = token
        return z if keep is None else np.where(np.arange(V) == keep, z, NEG)

    check(jd.forced(rows if each else same, V), oracle)


def test_masks_only_mask_and_masking_twice_is_masking_once() -> None:
    ctx = Context(*map(jnp.asarray, (TOKENS, START, LENGTH, LIMIT)), jax.random.split(jax.random.key(0), ROWS))
    masks = [
        jd.allowed_ids([1, 2, 3], V),
        jd.banned_ids([1], V),
        jd.bad_words([[0, 1], [2]], V),
        jd.no_repeat_ngram(np.full(ROWS, 2)),
        jd.forced({0: 1}, V),
        jd.min_new_tokens(np.full(ROWS, 3), [1, 6]),
    ]
    for t in masks:
        once = t.apply(jnp.asarray(LOGITS), ctx, ())
        np.testing.assert_array_equal(t.apply(once, ctx, ()), once)
        kept = np.asarray(once) > NEG
        np.testing.assert_array_equal(np.asarray(once)[kept], LOGITS[kept])


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        z = jnp.asarray(LOGITS, jnp.float64) / 3
        t = jd.chain(
            jd.repetition_penalty(jnp.asarray(1.3)),
            jd.frequency_penalty(jnp.asarray(0.1)),
            jd.dry(jnp.asarray(0.7), 1.75, 1),
            jd.logit_bias({1: 0.5}, V),
        )
        out = t(z, jnp.asarray(TOKENS), jnp.asarray(LENGTH))
        assert out.dtype == jnp.float64
        b = int(np.argmax(LENGTH))
        text = TOKENS[b, : LENGTH[b]].tolist()
        want = np.array(z[b])
        for v in range(V):
            if v in text:
                want[v] = want[v] * 1.3 if want[v] < 0 else want[v] / 1.3
            n = longest(text, v, [])
            want[v] -= 0.1 * text.count(v) + (0.7 * float(np.float32(1.75)) ** (n - 1) if n else 0)
        want[1] += 0.5
        np.testing.assert_allclose(out[b], want, rtol=1e-12)


def test_gradients_flow_through_scores_and_stop_at_masks() -> None:
    def total(z: jax.Array) -> jax.Array:
        t = jd.chain(jd.repetition_penalty(2.0), jd.presence_penalty(1.0), jd.dry(1.0, 2.0, 1), jd.no_repeat_ngram(2))
        out = t(z, jnp.array([[0, 1, 0], [2, 2, 2]]))
        return jnp.sum(jnp.where(jnp.isneginf(out), 0, out))

    slope = jax.grad(total)(jnp.array([[1.0, 1.0, -1.0], [1.0, 1.0, -1.0]]))
    np.testing.assert_array_equal(slope, np.array([[0.5, 0, 1], [1, 1, 0]]))
