"""Constraints inside the loop on table models: budgets, laws, weights, rows, programs, bad input."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grammars import GRAMMARS, check
from test_sequence_law import p_value

import jaxdecode as jd
from jaxdecode import constraints, transforms
from jaxdecode.constraints.grammar import NEVER, grammar_of_ids
from jaxdecode.constraints.rules import constraint_transforms
from jaxdecode.testing import count_compilations, markov_model

BYTES = [b"a", b"ab", b"b", b"\xc3", b"\xa9", b""]  # 5 is the end id; 3 and 4 are one character together
V, END = len(BYTES), 5
TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)
MODEL = markov_model()
PATTERNS = ["(ab|b)+a?", "a{2,3}|é*", "(é|ab)b?", "", "[^a]+b", "(a|ab)(b|abb)*"]


def outputs(n: int) -> list[tuple[int, ...]]:
    return [t for k in range(n + 1) for t in itertools.product(range(END), repeat=k)]


def text_of(ids: Any) -> bytes:
    return b"".join(BYTES[i] for i in ids)


def matches(pattern: str, data: bytes) -> bool:
    try:
        return re.fullmatch(pattern, data.decode()) is not None
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("pattern", PATTERNS)
def test_grammar_matches_the_token_sequences_whose_bytes_match(pattern: str) -> None:
    """Every sequence of up to five tokens; characters may be split across them."""
    grammar = constraints.regex(pattern, BYTES)
    for ids in outputs(5):
        assert grammar.matches(ids) == matches(pattern, text_of(ids)), ids


@pytest.mark.parametrize("pattern", PATTERNS)
def test_distances_are_the_shortest_ways(pattern: str) -> None:
    grammar = constraints.regex(pattern, BYTES)
    distances = grammar.distances(2)
    good = [ids for ids in outputs(5) if grammar.matches(ids)]
    for start in outputs(2):
        state = grammar.after(start)
        rest = [len(ids) - len(start) for ids in good if ids[: len(start)] == start]
        assert (state != 0) == bool(rest)
        for least in range(3):
            enough = [n for n in rest if n >= least]
            assert distances[least, state] == (min(enough) + 1 if enough else NEVER), (start, least)


def test_states_and_classes_are_few() -> None:
    vocabulary = [bytes([a, b]) for a in range(97, 123) for b in range(97, 123)]
    grammar = constraints.regex("[a-m]{2,8}", vocabulary)
    assert grammar.step.shape == (6, 2)  # dead, and after 0, 1, .. 4 pairs; pairs that fit and those that do not


def test_json_is_written_by_tokens_across_its_marks() -> None:
    grammar = constraints.json_schema({"enum": [{"a": 1}, [True]]}, [b'{"a', b'":', b" 1}", b"1", b"}", b"[true", b"]"])
    good = [ids for n in range(6) for ids in itertools.product(range(7), repeat=n) if grammar.matches(ids)]
    assert sorted(good) == [(0, 1, 2), (0, 1, 3, 4), (5, 6)]


# In the loop


@functools.lru_cache(maxsize=8)
def lawful(pattern: str, n: int, tau: float, first: int) -> dict[tuple[int, ...], float]:
    """Log probability, under the model at temperature tau, of every finished output of at most n tokens."""
    z = TABLE.astype(np.float64) / tau
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    out = {}
    for ids in outputs(n - 1):
        if matches(pattern, text_of(ids)):
            whole = (*ids, END)
            out[whole] = sum(log_p[a, b] for a, b in zip((first, *whole), whole, strict=False))
    return out


@pytest.mark.parametrize("pattern", ["(ab|b)+a?", "a{2,3}|é*"])
def test_S9_3_steps_condition_and_the_weight_restores_the_law(pattern: str) -> None:
    """Every finished output is drawn, none else; weight times drawn law is the model's own, sequence by sequence."""
    n, samples, tau = 4, 3000, 0.8
    settings = jd.Settings(
        max_new_tokens=n, temperature=tau, eos=[END], regex=constraints.regex(pattern, BYTES), num_samples=samples
    )
    out = jd.generate(MODEL, TABLE, [[0], [2, 1]], key=jax.random.key(3), settings=settings)
    assert (out.finish == jd.Finish.EOS).all()
    assert out.log_weight is not None
    for row, first in enumerate((0, 1)):
        law = lawful(pattern, n, tau, first)
        drawn = [tuple(ids) for ids in out.to_lists()[row]]
        assert set(drawn) <= set(law)
        log_q = np.asarray(out.processed_logprob[row]).sum(1)
        for ids, q, w in zip(drawn, log_q, np.asarray(out.log_weight[row]), strict=True):
            assert abs(q + w - law[ids]) < 1e-5
        probable = {ids: float(np.exp(q)) for ids, q in zip(drawn, log_q, strict=True)}
        assert abs(sum(probable.values()) - 1) < 0.02  # what was not drawn is rare
        for ids, q in probable.items():
            assert abs(drawn.count(ids) / samples - q) < 5 * np.sqrt(q / samples)
        again = jd.constraints.resample(jax.random.key(4), out)
        total = np.exp(list(law.values())).sum()
        assert abs(np.exp(again.log_weight[row, 0]) / total - 1) < 0.1
        redrawn = [tuple(ids) for ids in again.to_lists()[row]]
        error = sum(abs(redrawn.count(ids) / samples - np.exp(p) / total) for ids, p in law.items()) / 2
        assert error < 0.12
        assert sum(abs(drawn.count(ids) / samples - np.exp(p) / total) for ids, p in law.items()) / 2 > error


def test_S9_3_the_example() -> None:
    """S2.3 with "the second token is a": step by step (.6, .4), the conditional law (.478, .522); by chi-square."""
    z = np.log(np.array([[0.55, 0.45, 1e-9], [0.9, 0.1, 1e-9], [0.6, 0.4, 1e-9]], np.float32))
    settings = jd.Settings(max_new_tokens=3, eos=[2], choices=[[0, 0], [1, 0]], num_samples=48)
    out = jd.generate(MODEL, z, np.full((3000, 1), 2), key=jax.random.key(0), settings=settings)
    again = constraints.resample(jax.random.key(1), out)  # within a row draws depend on each other: one of each counts
    drawn, redrawn = ([tuple(row[0]) for row in x.to_lists()] for x in (out, again))
    a, b = 0.6 * 0.55, 0.4 * 0.9
    stepwise, conditional = ({(0, 0, 2): p, (1, 0, 2): 1 - p} for p in (0.6, a / (a + b)))
    assert p_value(drawn, stepwise) > 1e-3
    assert p_value(redrawn, conditional) > 1e-3
    assert p_value(redrawn, stepwise) < 1e-9
    assert p_value(drawn, conditional) < 1e-9


def test_S5_3_each_step_is_the_law_restricted_to_the_allowed_tokens() -> None:
    grammar = constraints.regex("(ab|b)+a?", BYTES)
    t = constraint_transforms(grammar, None, None, None, eos=np.array([[END]] * 2), limit=[4, 4], vocab_size=V)[
        "grammar"
    ]
    t = dataclasses.replace(t, params={**t.params, "start": np.full(2, grammar.start), "least": np.zeros(2, np.int32)})
    tokens = jnp.array([[0, 2, 0], [3, 1, 2]])
    out = np.asarray(
        t(jnp.asarray(TABLE[:2]), tokens, jnp.array([1, 3]), start=jnp.array([1, 1]), limit=jnp.array([4, 4]))
    )
    # Nothing is written yet: "a" (then "b"), "ab", "b". Then "abb" is written, two tokens are left: "a" or "ab" or "b".
    np.testing.assert_array_equal(np.isfinite(out), [[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 1]])
    np.testing.assert_array_equal(out[np.isfinite(out)], TABLE[:2][np.isfinite(out)])
    last = np.asarray(
        t(jnp.asarray(TABLE[:2]), tokens, jnp.array([1, 3]), start=jnp.array([1, 1]), limit=jnp.array([2, 3]))
    )
    np.testing.assert_array_equal(np.isfinite(last), [[0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]])


def random_table(size: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(size, size)).astype(np.float32) * 2


def padded(grammar: constraints.Grammar, states: int, classes: int) -> constraints.Grammar:
    """The same with states and classes of no use, so that all share one program."""
    more = (states - grammar.step.shape[0], classes - grammar.step.shape[1])
    assert min(more) >= 0
    step = np.pad(grammar.step, ((0, more[0]), (0, more[1])))
    return dataclasses.replace(grammar, step=step, accept=np.pad(grammar.accept, (0, more[0])))


@pytest.mark.parametrize("name", GRAMMARS)
def test_1000_generations_with_random_logits_all_match(name: str) -> None:
    """One token a byte; every row ends by an end id and an independent validator accepts it."""
    kind, source = GRAMMARS[name]
    tokenizer = jd.load("toy").tokenizer
    grammar = padded(getattr(constraints, kind)(source, tokenizer), 4096, 256)
    settings = jd.Settings(max_new_tokens=72, eos=[256], num_samples=500, **{kind: grammar})
    out = jd.generate(MODEL, random_table(257), [[65], [97, 32]], key=jax.random.key(0), settings=settings)
    assert (out.finish == jd.Finish.EOS).all()
    for ids in {tuple(ids) for row in out.to_lists() for ids in row}:
        check(kind, source, bytes(ids[:-1]).decode("utf-8"))


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_rows_are_the_same_elsewhere_and_their_budgets_their_own(tau: float) -> None:
    """Rows of unequal limits, prefixes and prompts; greedy and sampled."""
    grammar = constraints.regex("(ab|b)+a?", BYTES)
    limits, firsts, prompts = [2, 3, 8, 5], [[2], [0, 2], [], [1]], [[0], [2, 1], [3], [4, 4, 0]]

    def run(rows: list[int]) -> jd.Generated:
        settings = jd.Settings(
            max_new_tokens=np.array([limits[r] for r in rows]),
            temperature=tau,
            eos=[END],
            regex=grammar,
            prefix=[firsts[r] for r in rows],
        )
        keys = jax.random.split(jax.random.key(7), 4)[np.array(rows)]
        return jd.generate(MODEL, TABLE, [prompts[r] for r in rows], key=keys, settings=settings)

    together = run([0, 1, 2, 3])
    assert (together.finish == jd.Finish.EOS).all()
    elsewhere = run([3, 2, 1, 0])
    for r, ids in enumerate(together.to_lists()):
        assert len(ids) <= limits[r]
        assert ids[: len(firsts[r])] == firsts[r]
        assert grammar.matches(ids[:-1])
        assert elsewhere.to_lists()[3 - r] == ids
        np.testing.assert_array_equal(elsewhere.logprob[3 - r], together.logprob[r])
        np.testing.assert_array_equal(elsewhere.log_weight[3 - r], together.log_weight[r])
    assert np.isnan(np.asarray(together.log_weight)).all() == (tau == 0)


def test_under_the_callers_jit_it_is_the_same() -> None:
    settings = jd.Settings(max_new_tokens=4, eos=[END], regex=constraints.regex("(ab|b)+a?", BYTES))
    prompts = np.array([[0, 1], [2, 0]])
    expected = jd.generate(MODEL, TABLE, prompts, key=jax.random.key(2), settings=settings)
    inside = jax.jit(lambda table, key: jd.generate(MODEL, table, prompts, key=key, settings=settings))
    out = inside(TABLE, jax.random.key(2))
    assert out.to_lists() == expected.to_lists()
    np.testing.assert_allclose(out.log_weight, expected.log_weight, rtol=1e-6)


def test_other_grammars_and_limits_of_like_size_compile_nothing() -> None:
    def run(source: Any, limit: int) -> list[Any]:
        settings = jd.Settings(max_new_tokens=np.array([8, limit]), eos=[END], choices=source)
        return jd.generate(MODEL, TABLE, [[0], [1]], key=jax.random.key(0), settings=settings).to_lists()

    run([[0, 1]], 5)
    with count_compilations() as count:
        assert run([[2, 2, 2], [3, 4]], 4)[1][:-1] in ([2, 2, 2], [3, 4])
        run(constraints.regex("é*ab", BYTES), 6)
    assert int(count) == 0


def test_a_filter_or_a_greedy_row_leaves_no_weight() -> None:
    grammar = constraints.regex("(ab|b)+a?", BYTES)
    settings = jd.Settings(
        max_new_tokens=4, temperature=[1, 0, 1], top_k=[1, 0, 0], eos=[END], regex=grammar, num_samples=2
    )
    out = jd.generate(MODEL, TABLE, [[0]] * 3, key=jax.random.key(0), settings=settings)
    np.testing.assert_array_equal(np.isnan(np.asarray(out.log_weight)), [[True] * 2, [True] * 2, [False] * 2])
    with pytest.raises(ValueError, match="resample: log_weight: expected weights"):
        constraints.resample(jax.random.key(0), out)
    plain = jd.generate(
        MODEL, TABLE, [[0]], key=jax.random.key(0), settings=jd.Settings(max_new_tokens=2, num_samples=2)
    )
    assert plain.log_weight is None
    with pytest.raises(ValueError, match="resample: expected the result of a constraint"):
        constraints.resample(jax.random.key(0), plain)


ASKED: dict[str, Any] = {"max_new_tokens": 4, "eos": [END], "regex": constraints.regex("(ab|b)+a?", BYTES)}


def test_bans_and_a_least_length_count_in_what_can_be_finished() -> None:
    """Each row is as it is alone: without "b" only "ab" and "a" are left, without "ab" none but "a" and "b" in turn."""
    rows: dict[str, Any] = {
        "banned_ids": [[2], [2], [1], []],
        "min_new_tokens": np.array([0, 3, 3, 0]),
        "bad_words": [[], [], [], [[2], [0]]],
    }
    settings = jd.Settings(**ASKED, **rows, num_samples=100)
    out = jd.generate(MODEL, TABLE, [[0], [0], [0], [0]], key=jax.random.key(0), settings=settings)
    assert (out.finish == jd.Finish.EOS).all()
    drawn = [{tuple(ids) for ids in row} for row in out.to_lists()]
    assert drawn[1] == {(1, 1, 0, END), (1, 1, 1, END)}
    assert drawn[0] == drawn[1] | {(1, END), (1, 0, END), (1, 1, END)}
    assert drawn[2] == {(0, 2, 0, END), (0, 2, 2, END), (2, 0, 2, END), (2, 2, 0, END), (2, 2, 2, END)}
    assert drawn[3] == {(1,) * n + (END,) for n in (1, 2, 3)}
    alone = jd.Settings(**ASKED, banned_ids=[1], min_new_tokens=3, num_samples=100)
    key = jax.random.fold_in(jax.random.key(0), 2)[None]
    assert jd.generate(MODEL, TABLE, [[0]], key=key, settings=alone).to_lists()[0] == out.to_lists()[2]


def test_a_transform_of_the_caller_acts_before_the_constraint_and_bans_hold_beside_it() -> None:
    bias = jd.logit_bias({0: 50.0}, V)
    chain = jd.Settings(**ASKED, prefix=[1], banned_ids=[2]).rules(2, V, transform=bias).transform
    kinds = [t.kind for t in transforms.flatten(chain)]
    assert kinds == ["score", "mask", "mask", "mask", "mask", "scale"]  # prefix, grammar, bans, minimum length
    allowed = jd.Settings(**ASKED, allowed_ids=[0, 1, END], temperature=0)
    out = jd.generate(MODEL, TABLE, [[0], [1]], settings=allowed, transform=bias)
    assert out.to_lists() == [[1, 0, END]] * 2  # "a" may not come first, but it is the best that may come then


def test_an_end_id_that_stands_for_text_only_ends() -> None:
    """Id 2 is "b" and the first row's end: then "b" is written by no token, and "ab" by one. In the other, text."""
    settings = jd.Settings(**{**ASKED, "eos": np.array([[2, -1], [END, -1]])}, num_samples=100)
    out = jd.generate(MODEL, TABLE, [[0], [1]], key=jax.random.key(0), settings=settings)
    assert (out.finish == jd.Finish.EOS).all()
    first, second = ({tuple(ids) for ids in row} for row in out.to_lists())
    assert first <= {(1,) * n + t for n in (1, 2, 3) for t in ((2,), (0, 2))}
    assert any(2 in ids[:-1] for ids in second)


BUDGET = {"max_new_tokens": 2, "eos": [END]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {**BUDGET, "choices": [[0, 1]]},
            "max_new_tokens: expected at least 3, the shortest match and an end id, got 2",
        ),
        ({**BUDGET, "regex": constraints.regex("aaab?", BYTES)}, "max_new_tokens: expected at least 4"),
        ({**BUDGET, "choices": [[0]], "prefix": [1]}, "prefix: expected one that begins a match of choices"),
        ({**BUDGET, "prefix": [1, 1, 1]}, "prefix: expected one within max_new_tokens"),
        ({**BUDGET, "prefix": [9]}, "prefix: expected token ids"),
        ({**BUDGET, "prefix": [[1], [2], [3]]}, "prefix: expected ids, or 2 lists"),
        ({**BUDGET, "choices": [[9]]}, "choices: expected token ids"),
        ({**BUDGET, "choices": []}, "choices: expected at least one"),
        ({**BUDGET, "choices": ["a"]}, "choices: expected lists of ids"),
        ({"max_new_tokens": 2, "choices": [[0]]}, "eos: expected an end id beside choices"),
        ({**BUDGET, "regex": constraints.regex("a", [b"a"] * 9)}, "regex: expected a grammar over at most"),
        ({**BUDGET, "eos": [2], "regex": constraints.regex("b", BYTES)}, "regex: expected a match without"),
        ({**ASKED, "banned_ids": [END]}, "eos: expected an end id beside regex that is not banned"),
        ({**ASKED, "banned_ids": [1, 2]}, "regex: expected a match without the tokens that are banned"),
        ({**ASKED, "min_new_tokens": [0, 4]}, "max_new_tokens: expected at least 5"),
        ({**ASKED, "banned_ids": [[], [2]], "max_new_tokens": [1, 2]}, "max_new_tokens: expected at least 2"),
        ({**BUDGET, "choices": [[0]], "min_new_tokens": 2}, "min_new_tokens: expected one that some match"),
    ],
)
def test_what_cannot_be_finished_is_refused_before_any_compute(fields: dict[str, Any], message: str) -> None:
    with count_compilations() as count, pytest.raises(ValueError, match="^" + re.escape(message)):
        jd.generate(MODEL, TABLE, [[0], [1]], key=jax.random.key(0), settings=jd.Settings(**fields))
    assert int(count) <= 1  # the shape of the logits may be asked for


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a+"}, "regex: expected a compiled grammar"),
        ({"json_schema": {}}, "json_schema: expected a compiled grammar"),
        ({"choices": [[0]], "regex": constraints.regex("a", BYTES)}, "regex and choices: expected one of them"),
        ({"choices": [[0]], "stop": [[1]]}, "stop: expected none beside choices"),
    ],
)
def test_settings_refuse_what_is_no_constraint(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        jd.Settings(**fields)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: constraints.regex("c", BYTES), "regex: expected a grammar that some text of this vocabulary"),
        (lambda: constraints.regex(3, BYTES), "regex: expected a pattern"),  # type: ignore[arg-type]
        (lambda: constraints.regex("a", [1, 2]), "vocabulary: expected a tokenizer"),  # type: ignore[list-item]
        (lambda: constraints.json_schema("{", BYTES), "json_schema: expected JSON"),
        (lambda: constraints.json_schema({"enum": {1}}, BYTES), "json_schema: expected a schema of JSON"),
        (lambda: constraints.choices([], BYTES), "choices: expected a list of texts"),
        (lambda: transforms.prefix(np.zeros((2, 0))), "prefix: expected ids"),
        (lambda: grammar_of_ids([[0]], 3, "choices").without(np.zeros(2, bool)), "banned: expected bool"),
    ],
)
def test_what_cannot_be_compiled_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call()


def test_equal_requests_are_compiled_once_and_kept_on_disk(tmp_path: Path) -> None:
    one = constraints.regex("(ab|b)+", BYTES)
    assert constraints.regex("(ab|b)+", list(BYTES)) is one
    kept = constraints.regex("(ab|b)+", BYTES, folder=tmp_path)
    (path,) = tmp_path.glob("*.npz")
    again = constraints.regex("(ab|b)+", BYTES, folder=tmp_path)
    for grammar in (kept, again):
        for name in ("step", "class_of_token", "accept"):
            np.testing.assert_array_equal(getattr(grammar, name), getattr(one, name))
        assert grammar.start == one.start
    assert again is not one
    path.write_bytes(path.read_bytes()[:99])  # damaged: compiled anew
    np.testing.assert_array_equal(constraints.regex("(ab|b)+", BYTES, folder=tmp_path).step, one.step)
    constraints.regex("(ab|b)+", [*BYTES, b"c"], folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert constraints.regex("(ab|b)+", BYTES, folder=blocked).start == one.start
