"""Bad penalties, bans and filters: one clear error before any compute; what is known at run time ends its row."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdecode import Finish, Settings, generate
from jaxdecode.testing import count_compilations, markov_model

V, N = 8, 10
MODEL = markov_model()
TABLE = (np.random.default_rng(4).normal(size=(V, V)) * 2).astype(np.float32)
PROMPTS = [[1], [2, 3, 2], [4, 5]]
KEY = jax.random.key(2)

WRONG: dict[str, list[tuple[Any, str]]] = {
    "min_new_tokens": [
        (-1, ">= 0, got -1"),
        (2.5, "whole"),
        (11, "at most max_new_tokens = 10, got 11"),
        ([1, 2, 3], "2 rows"),
    ],
    "typical_p": [(0, r"\(0, 1\], got 0"), (1.5, "got 1.5"), ([0.5] * 3, "2 rows")],
    "epsilon": [(1, r"\[0, 1\), got 1"), (-0.1, "got -0.1")],
    "eta": [(1, r"\[0, 1\), got 1"), (float("nan"), "got nan")],
    "top_n_sigma": [(-1, "got -1"), (float("inf"), "finite.*, got inf")],
    "p_less": [(2, "0 or 1, got 2"), (0.5, "0 or 1, got 0.5")],
    "xtc": [
        (0.5, r"\(probability, threshold\), got 0.5"),
        ((0.5,), "got"),
        ((2, 0.1), "xtc probability: .*got 2"),
        ((0.5, 0), "xtc threshold: .*got 0"),
    ],
    "mirostat": [(5, r"\(tau, rate\), got 5"), ((-1, 0.1), "mirostat tau"), ((5, 2), "mirostat rate")],
    "dry": [
        (0.8, r"\(multiplier, base, allowed_length"),
        ((-1, 2, 2), "dry multiplier"),
        ((1, 0.5, 2), "dry base"),
        ((1, 2, 0), "dry allowed_length"),
        ((1, 2, 2, [8]), r"dry breakers: .*\[0, 8\), got \[8\]"),
        ((1, 2, 2, "."), "dry breakers"),
    ],
    "dynamic_temperature": [(0.5, r"\(spread, exponent\)"), ((-1, 1), "spread"), ((0.5, 0), "exponent")],
    "repetition_penalty": [(0, "> 0, got 0"), (-1, "got -1"), (float("inf"), "got inf")],
    "presence_penalty": [(float("nan"), "finite number, got nan"), ("1", "got 1")],
    "frequency_penalty": [(float("inf"), "finite number, got inf")],
    "no_repeat_ngram": [(-1, ">= 0, got -1"), (1.5, "whole")],
    "logit_bias": [
        ({8: 1.0}, r"\[0, 8\), got \[8\]"),
        ({1: float("inf")}, "finite"),
        ({1.5: 1}, "logit_bias: expected {id"),
        ("x", "logit_bias: expected {id"),
        (5, "expected {id"),
        (np.zeros(7), "shape"),
        ([{}, {}, {}], "2 rows"),
    ],
    "allowed_ids": [
        ([8], r"\[0, 8\), got \[8\]"),
        ([], "at least one id left"),
        ([[1], []], "at least one id left"),
        ("ab", "expected ids"),
        (5, "expected ids"),
        ([1.5], "integer"),
        ([[1]] * 3, "2 rows"),
    ],
    "banned_ids": [(range(8), "at least one id left"), ([-1], r"got \[-1\]"), ([[1], 2], "expected ids")],
    "bad_words": [
        ([1, 2], "token sequences"),
        ([[1], []], "non-empty"),
        ([[9]], r"got \[9\]"),
        ([[i] for i in range(8)], "at least one id left"),
        ("ab", "token sequences"),
        ([[[1]]] * 3, "2 rows"),
    ],
    "forced": [
        ({0: 8}, r"\[0, 8\), got \[8\]"),
        ({0: 1.5}, "integer"),
        ({2**31: 1}, "places"),
        ([1, 2], "forced: expected {place"),
        ([{}] * 3, "2 rows"),
    ],
}
CASES = [
    pytest.param(name, value, message, id=f"{name} {value}"[:40])
    for name, cases in WRONG.items()
    for value, message in cases
]


@pytest.mark.parametrize(("name", "value", "message"), CASES)
def test_one_clear_error(name: str, value: Any, message: str) -> None:
    with count_compilations() as compiled, pytest.raises(ValueError) as error:  # noqa: PT011 the message is checked below
        generate(MODEL, TABLE, [[1], [2]], key=KEY, settings=Settings(max_new_tokens=N, eos=0, **{name: value}))
    text = str(error.value)
    assert re.search(message, text), text
    assert name in text
    assert ": expected " in text
    assert ", got " in text
    assert "\n" not in text
    assert int(compiled) == 0


def test_lists_that_together_leave_nothing_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^allowed_ids, banned_ids, bad_words: expected at least one id left in every row"
    ):
        Settings(allowed_ids=[1, 2, 3], banned_ids=[[1], [2]], bad_words=[[3], [1], [7, 2]]).rules(2, V)
    Settings(allowed_ids=[1, 2, 3], banned_ids=[[1], [2]], bad_words=[[3], [7, 2]]).rules(2, V)


def test_mirostat_replaces_the_filters() -> None:
    """Both on in a row is refused; in different rows they share a program."""
    with pytest.raises(ValueError, match=r"^mirostat: expected all other filters off in its rows.*, got some on"):
        generate(MODEL, TABLE, PROMPTS, key=KEY, settings=Settings(mirostat=(3, 0.1), top_p=0.9))
    with pytest.raises(ValueError, match=r"^mirostat: "):
        Settings(mirostat=([0, 3], 0.1), xtc=([0.5, 0.1], 0.1)).rules(2, V)
    Settings(mirostat=([0, 3], 0.1), xtc=([0.5, 0], 0.1), top_k=[5, 0], top_p=[0.5, 1], typical_p=[0.2, 1]).rules(2, V)


# What is only known at run time ends its row; eight rows, the names as (setting, place in it).
NAN, INF = float("nan"), float("inf")
BAD: dict[tuple[str, int], tuple[list[Any], Any, list[int]]] = {
    ("min_new_tokens", 0): ([0, -1, 4, 5, 2**31 - 1, 1, -(2**31), 2], 0, [1, 3, 4, 6]),
    ("typical_p", 0): ([1.0, 0.0, -0.5, 1.5, NAN, 0.1, 0.5, INF], 1.0, [1, 2, 3, 4, 7]),
    ("epsilon", 0): ([0.0, 1.0, -0.5, 0.5, NAN, 0.1, 0.5, INF], 0.0, [1, 2, 4, 7]),
    ("eta", 0): ([0.0, 1.0, -0.5, 0.5, NAN, 0.1, 0.5, INF], 0.0, [1, 2, 4, 7]),
    ("top_n_sigma", 0): ([0.0, 1.0, -0.5, 0.5, NAN, 0.1, 0.5, INF], 0.0, [2, 4, 7]),
    ("p_less", 0): ([0, 1, 2, -1, 1, 0, 7, 0], 0, [2, 3, 6]),
    ("xtc", 0): ([0.0, 1.0, -0.5, 1.5, NAN, 0.1, 0.5, INF], 0.0, [2, 3, 4, 7]),
    ("xtc", 1): ([0.1, 1.0, 0.0, 1.5, NAN, 0.1, 0.5, INF], 0.1, [2, 3, 4, 7]),
    ("dry", 0): ([0.0, 1.0, -0.5, 1.5, NAN, 0.1, 0.5, INF], 0.0, [2, 4, 7]),
    ("dry", 1): ([1.0, 2.0, 0.5, 1.5, NAN, 1.0, 3.0, INF], 1.0, [2, 4, 7]),
    ("dry", 2): ([1, 2, 0, 3, -1, 1, 2, -(2**31)], 1, [2, 4, 7]),
    ("mirostat", 0): ([0.0, 0.0, -1.0, NAN, INF, 0.0, 0.0, 0.0], 0.0, [2, 3, 4]),
    ("mirostat", 1): ([0.0, 1.0, -1.0, NAN, INF, 0.5, 1.1, 0.1], 0.1, [2, 3, 4, 6]),
    ("dynamic_temperature", 0): ([0.0, 1.0, -0.5, 1.5, NAN, 0.1, 0.5, INF], 0.0, [2, 4, 7]),
    ("dynamic_temperature", 1): ([1.0, 0.5, 0.0, -1.0, NAN, 2.0, 1.0, INF], 1.0, [2, 3, 4, 7]),
    ("repetition_penalty", 0): ([1.0, 2.0, 0.0, -1.5, NAN, 0.1, 0.5, INF], 1.0, [2, 3, 4, 7]),
    ("presence_penalty", 0): ([1.0, -2.0, 0.0, -INF, NAN, 0.1, 0.5, INF], 0.0, [3, 4, 7]),
    ("frequency_penalty", 0): ([1.0, -2.0, 0.0, -INF, NAN, 0.1, 0.5, INF], 0.0, [3, 4, 7]),
    ("no_repeat_ngram", 0): ([0, 3, -1, 4, 5, 2, -(2**31), 2**31 - 1], 0, [2, 6]),
}
EIGHT: Any = np.tile(np.arange(4, dtype=np.int32), (8, 1))


@jax.jit
def traced(numbers: list[Any], warm: Any, bias: Any) -> Any:
    fields: dict[str, Any] = {}
    for (name, _), value in zip(BAD, numbers, strict=True):
        fields[name] = (*fields.get(name, ()), value)
    fields = {name: value if len(value) > 1 else value[0] for name, value in fields.items()}
    settings = Settings(max_new_tokens=4, temperature=warm, eos=0, logit_bias=bias, **fields)
    return generate(MODEL, TABLE, EIGHT, key=KEY, settings=settings)


def run_traced(name: tuple[str, int], values: list[Any], warm: float, bias: Any = None) -> Any:
    numbers = [
        np.broadcast_to(np.asarray(off, np.int32 if isinstance(off, int) else np.float32), (8,))
        for _, off, _ in BAD.values()
    ]
    at = [*BAD].index(name)
    numbers[at] = np.asarray(values, numbers[at].dtype)
    return traced(numbers, np.full(8, warm, np.float32), np.zeros((8, V), np.float32) if bias is None else bias)


def only_these_end(out: Any, ended: list[int], healthy: Any) -> None:
    for b in range(8):
        if b in ended:
            assert (out.finish[b], out.length[b]) == (Finish.INVALID, 0), b
        else:
            assert out.finish[b] != Finish.INVALID, b
            for name in ("tokens", "processed_logprob"):
                np.testing.assert_array_equal(getattr(out, name)[b], getattr(healthy, name)[b])


@pytest.mark.parametrize("name", BAD, ids=str)
@pytest.mark.parametrize("warm", [1.0, 0.0])
def test_a_traced_setting_out_of_range_ends_its_row(name: tuple[str, int], warm: float) -> None:
    values, off, ended = BAD[name]
    fixed = [off if b in ended else v for b, v in enumerate(values)]
    only_these_end(run_traced(name, values, warm), ended, run_traced(name, fixed, warm))


def test_a_traced_bias_that_is_not_finite_and_filters_beside_mirostat_end_their_rows() -> None:
    bias = np.zeros((8, V), np.float32)
    bias[2, 3], bias[5, 0], bias[6, 1] = NAN, INF, 2.0
    healthy = np.where(np.isfinite(bias), bias, 0)
    only_these_end(
        run_traced(("eta", 0), [0.0] * 8, 1.0, bias), [2, 5], run_traced(("eta", 0), [0.0] * 8, 1.0, healthy)
    )

    @jax.jit
    def both(tau: Any, k: Any) -> Any:
        return generate(
            MODEL, TABLE, EIGHT, key=KEY, settings=Settings(max_new_tokens=2, mirostat=(tau, 0.1), top_k=k)
        ).finish

    finish = both(np.array([0, 3, 0, 3] * 2, np.float32), np.array([0, 0, 2, 2] * 2, np.int32))
    assert (np.asarray(finish) == Finish.INVALID).tolist() == [False, False, False, True] * 2


@pytest.mark.parametrize("name", ["allowed_ids", "banned_ids", "bad_words", "forced"])
def test_lists_of_ids_must_be_known_before(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got a traced array"):
        jax.jit(lambda ids: Settings(**{name: ids}).rules(2, V).limit)(jnp.ones(2, jnp.int32))
