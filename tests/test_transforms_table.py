"""One table: every transform goes through the same checks. A new one is added to the table, and must pass them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdecode import (
    Context,
    LogitsTransform,
    allowed_ids,
    bad_words,
    banned_ids,
    chain,
    dry,
    dynamic_temperature,
    epsilon,
    eta,
    forced,
    frequency_penalty,
    logit_bias,
    min_new_tokens,
    min_p,
    mirostat,
    no_repeat_ngram,
    p_less,
    presence_penalty,
    repeat_rows,
    repetition_penalty,
    take_rows,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    transforms,
    typical_p,
    xtc,
)

V, B = 10, 4


def _odd_only(params: jax.Array, logits: jax.Array, ctx: Context, state: Any) -> jax.Array:
    """A user's mask: rows where ``params[B]`` is 1 lose their even ids."""
    even = (jnp.arange(logits.shape[1]) % 2 == 0)[None]
    return jnp.where(even & (params == 1)[:, None], -jnp.inf, logits)


ROWS_TAU = np.array([0.5, 1.0, 2.0, 1.0], np.float32)
ROWS_ODD = np.array([0, 1, 1, 0], np.int32)
# name -> the transform for B rows, one value each
TRANSFORMS: dict[str, LogitsTransform] = {
    "identity": chain(),
    "mask": LogitsTransform(ROWS_ODD, "mask", _odd_only),
    "temperature": temperature(ROWS_TAU),
    "top_k": top_k(np.array([0, 1, 3, V + 1])),
    "top_p": top_p(np.array([1.0, 0.1, 0.7, 0.9], np.float32)),
    "min_p": min_p(np.array([0.0, 0.2, 1.0, 0.05], np.float32)),
}
TRANSFORMS["chain"] = chain(*TRANSFORMS.values())
TRANSFORMS |= {
    "repetition_penalty": repetition_penalty([1.0, 1.3, 0.5, 2.0]),
    "repetition_penalty of the output": repetition_penalty([1.0, 1.3, 0.5, 2.0], output_only=True),
    "presence_penalty": presence_penalty([0.0, 1.0, -1.0, 3.0]),
    "frequency_penalty": frequency_penalty([0.0, 1.0, -1.0, 3.0]),
    "dry": dry([0.0, 1.0, 0.5, 2.0], [1.75] * B, [1, 1, 2, 1], [5], V),
    "dry with breakers per row": dry([1.0] * B, [1.0, 1.5, 2.0, 3.0], [1] * B, [[], [1], [2, 4], [9]], V),
    "logit_bias": logit_bias({1: 2.0, 7: -3.0}, V),
    "logit_bias per row": logit_bias([{}, {1: 1.0}, {2: -1.0, 3: 4.0}, {9: 0.5}], V),
    "allowed_ids": allowed_ids([1, 2, 3, 4, 8], V),
    "allowed_ids per row": allowed_ids([[0, 1], None, [5], [2, 9]], V),
    "banned_ids": banned_ids([0, 6], V),
    "banned_ids per row": banned_ids([[], [1], [2, 3, 4], [9]], V),
    "bad_words": bad_words([[0], [1, 2], [2, 1, 2]], V),
    "bad_words per row": bad_words([[], [[1]], [[5, 4], [4, 5]], [[3, 0, 3]]], V),
    "no_repeat_ngram": no_repeat_ngram([0, 1, 2, 3]),
    "forced": forced({2: 4, -1: 5}, V),
    "forced per row": forced([{}, {1: 1}, {-1: 2}, {3: 0, 2: 9}], V),
    "min_new_tokens": min_new_tokens([0, 1, 4, 9], [2, 3]),
    "min_new_tokens with end ids per row": min_new_tokens([3] * B, [[-1, -1], [1, -1], [0, 9], [4, 4]]),
    "dynamic_temperature": dynamic_temperature([1.0, 0.5, 2.0, 1.0], [0.0, 0.5, 1.0, 2.0], [1.0, 1.0, 2.0, 0.5]),
    "typical_p": typical_p([1.0, 0.2, 0.7, 0.9]),
    "epsilon": epsilon([0.0, 0.1, 0.5, 0.02]),
    "eta": eta([0.0, 0.1, 0.5, 0.02]),
    "top_n_sigma": top_n_sigma([0.0, 0.5, 1.0, 2.0]),
    "p_less": p_less([0, 1, 1, 1]),
    "xtc": xtc([0.0, 1.0, 0.5, 0.5], [0.1, 0.1, 0.05, 0.3]),
    "mirostat": mirostat([0.0, 0.5, 1.0, 2.0], [0.1] * B),
}
# Tokens 0 to 3 lead from state 1 to state 2, a match, where 2 to 5 are allowed too; id 0 ends in some rows, 7 in all.
# Rows of group 1 have no token 0.
STEP = np.array([[0, 0, 0, 0], [0, 2, 2, 0], [0, 2, 2, 2]], np.int32)
CLASS_OF_TOKEN = np.array([[1, 1, 2, 2, 3, 3, 0, 0, 0, 0], [0, 1, 2, 2, 3, 3, 0, 0, 0, 0]], np.int32)
DISTANCE = np.array([[[2**30, 2, 1], [2**30, 2, 2]]] * 2, np.int32)
AUTOMATON: dict[str, Any] = {
    "start": np.array([1, 2, 2, 1], np.int32),
    "eos": np.array([[7, -1], [0, 7], [7, -1], [0, 7]], np.int32),
    "least": np.array([0, 0, 0, 1]),
}
TRANSFORMS |= {
    "prefix": transforms.prefix(np.array([[5], [-1], [2], [-1]])),
    "automaton": transforms.automaton(STEP, CLASS_OF_TOKEN[:1], DISTANCE[:1], group=np.zeros(B, int), **AUTOMATON),
    "automaton of two groups": transforms.automaton(
        STEP, CLASS_OF_TOKEN, DISTANCE, group=np.array([1, 0, 1, 0]), **AUTOMATON
    ),
}
CUTS = {name: t for name, t in TRANSFORMS.items() if t.kind == "filter"}
# Those whose program has the tokens; to the others a buffer is nothing, however long.
READERS = [
    name for name, t in TRANSFORMS.items() if name.startswith(("rep", "pres", "freq", "dry", "bad", "no_", "auto"))
]
# name -> how a number makes the transform, and one
FACTORIES: dict[str, tuple[Callable[[Any], LogitsTransform], Any]] = {
    "temperature": (temperature, 0.7),
    "top_k": (top_k, 2),
    "top_p": (top_p, 0.6),
    "min_p": (min_p, 0.3),
    "repetition_penalty": (repetition_penalty, 1.5),
    "presence_penalty": (presence_penalty, 0.5),
    "frequency_penalty": (frequency_penalty, 0.5),
    "dry multiplier": (lambda x: dry(x, 2.0, 1), 0.5),
    "dry base": (lambda x: dry(1.0, x, 1), 1.5),
    "dry allowed_length": (lambda n: dry(1.0, 2.0, n), 1),
    "no_repeat_ngram": (no_repeat_ngram, 2),
    "min_new_tokens": (lambda n: min_new_tokens(n, [2, 3]), 4),
    "dynamic_temperature": (lambda x: dynamic_temperature(0.8, x), 0.5),
    "dynamic_temperature exponent": (lambda x: dynamic_temperature(0.8, 0.5, x), 2.0),
    "typical_p": (typical_p, 0.6),
    "epsilon": (epsilon, 0.1),
    "eta": (eta, 0.1),
    "top_n_sigma": (top_n_sigma, 1.0),
    "p_less": (p_less, 1),
    "xtc": (lambda x: xtc(x, 0.1), 1.0),
    "xtc threshold": (lambda x: xtc(1.0, x), 0.1),
    "mirostat": (lambda x: mirostat(x, 0.1), 0.7),
    "mirostat rate": (lambda x: mirostat(0.7, x), 0.1),
}
every_transform = pytest.mark.parametrize("name", TRANSFORMS)
LOGITS = np.random.default_rng(0).normal(size=(B, V)).astype(np.float32).round(1)
ALL = np.arange(B)
HISTORY = Context(  # what stands past each length is padding
    tokens=jnp.array([[1, 2, 1, 2, 7, 7, 7], [5, 5, 5, 9, 9, 9, 9], [4, 5, 4, 5, 4, 6, 6], [3, 0, 3, 0, 3, 0, 3]]),
    start=jnp.array([2, 3, 1, 5]),
    length=jnp.array([4, 3, 5, 7]),
    limit=jnp.array([4, 1, 5, 3]),
    key=jax.random.split(jax.random.key(0), B),
)


def call(t: LogitsTransform, z: Any, ctx: Context) -> jax.Array:
    return t(jnp.asarray(z), ctx.tokens, ctx.length, start=ctx.start, limit=ctx.limit, key=ctx.key)


compiled = jax.jit(call)


def apply(t: LogitsTransform, z: Any, rows: Any = ALL) -> jax.Array:
    """The transform of rows ``rows`` of HISTORY, compiled."""
    return compiled(t, z, take_rows(HISTORY, jnp.asarray(rows)))


def assert_close(a: Any, b: Any) -> None:
    """The same ids masked, the others equal to rounding."""
    np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@every_transform
def test_transform_jit_is_no_jit(name: str) -> None:
    assert_close(call(TRANSFORMS[name], LOGITS, HISTORY), apply(TRANSFORMS[name], LOGITS))


@every_transform
def test_transform_row_alone_elsewhere_and_repeated(name: str) -> None:
    t, places = TRANSFORMS[name], jnp.array([2, 0, 3, 1])
    together = np.asarray(apply(t, LOGITS))
    np.testing.assert_array_equal(apply(take_rows(t, places), LOGITS[places], places), together[places])
    for b in range(B):
        np.testing.assert_array_equal(apply(take_rows(t, jnp.array([b])), LOGITS[b : b + 1], [b])[0], together[b])
    twice = np.repeat([3, 1], 2)  # as many rows as before: the program is there
    again = apply(repeat_rows(take_rows(t, jnp.array([3, 1])), 2), LOGITS[twice], twice)
    np.testing.assert_array_equal(again, together[twice])


@every_transform
def test_transform_padding_and_allocation_change_nothing(name: str) -> None:
    wide = np.pad(HISTORY.tokens, ((0, 0), (0, 5)))
    for padding_id in (1, V - 1):
        tokens = np.where(np.arange(12)[None] < np.asarray(HISTORY.length)[:, None], wide, padding_id)
        for size in (7, 12) if name in READERS else (7,):
            ctx = dataclasses.replace(HISTORY, tokens=jnp.asarray(tokens[:, :size]))
            np.testing.assert_array_equal(compiled(TRANSFORMS[name], LOGITS, ctx), apply(TRANSFORMS[name], LOGITS))


@pytest.mark.parametrize("name", READERS)
def test_transform_of_no_history(name: str) -> None:
    """Tokens [B,0], as the shorthand for logits alone has them, are as good as a buffer in which nothing stands."""
    empty = dataclasses.replace(HISTORY, start=HISTORY.start * 0, length=HISTORY.length * 0)
    t = TRANSFORMS[name]
    none = jax.jit(lambda t, z: t(z, limit=HISTORY.limit, key=HISTORY.key))(t, LOGITS)
    np.testing.assert_array_equal(np.isneginf(none), np.isneginf(compiled(t, LOGITS, empty)))
    assert_close(none, compiled(t, LOGITS, empty))


@every_transform
def test_transform_is_not_disturbed_by_bad_neighbours(name: str) -> None:
    """Rows of NaN, +inf or nothing beside a row change none of its numbers; a row of nothing stays one."""
    together = np.asarray(apply(TRANSFORMS[name], LOGITS))
    for bad in (np.nan, np.inf, -np.inf):
        for place in range(B):
            z = LOGITS.copy()
            z[place] = bad
            out = np.asarray(apply(TRANSFORMS[name], z))
            others = np.arange(B) != place
            np.testing.assert_array_equal(out[others], together[others])
            if bad == -np.inf:
                assert np.isneginf(out[place]).all()


@every_transform
def test_transform_only_masks_or_rescales_and_never_empties_a_row(name: str) -> None:
    z = LOGITS.copy()
    z[:, 3] = -np.inf
    out = np.asarray(apply(TRANSFORMS[name], z))
    assert not np.isnan(out).any()
    assert np.isneginf(out[:, 3]).all()
    assert (out > -np.inf).any(axis=1).all()
    if TRANSFORMS[name].kind in ("mask", "filter"):
        kept = out > -np.inf
        np.testing.assert_array_equal(out[kept], z[kept])


@pytest.mark.parametrize("name", CUTS)
def test_filters_keep_one_of_many_equal_or_far_apart_logits(name: str) -> None:
    for z in (np.zeros((B, V)), np.full((B, V), -1e30), np.tile(np.arange(V) * 1e4, (B, 1))):
        out = np.asarray(apply(CUTS[name], z.astype(np.float32)))
        assert not np.isnan(out).any()
        assert (out > -np.inf).any(axis=1).all()


@pytest.mark.parametrize("name", ["chain", "top_n_sigma", "dry", "bad_words", "mirostat"])
def test_transform_works_in_float32(name: str) -> None:
    z = LOGITS.astype(jnp.float16 if name == "chain" else jnp.bfloat16)
    out = apply(TRANSFORMS[name], z)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, apply(TRANSFORMS[name], z.astype(np.float32)))


@pytest.mark.parametrize("name", FACTORIES)
def test_transform_number_is_a_column_of_it_and_may_be_traced(name: str) -> None:
    factory, value = FACTORIES[name]

    def one(x: Any, z: Any, ctx: Context) -> jax.Array:
        return call(factory(x), z[None], jax.tree.map(lambda leaf: leaf[None], ctx))[0]

    def traced(column: Any, z: Any, ctx: Context) -> Any:
        return call(factory(column), z, ctx), jax.vmap(one)(column, z, ctx)

    expected = np.asarray(apply(factory([value] * B), LOGITS))
    for out in jax.jit(traced)(jnp.asarray([value] * B), jnp.asarray(LOGITS), HISTORY):
        assert_close(out, expected)
    given, wanted = (jax.tree.leaves(factory(x).params) for x in ([value] * B, value))
    for x, y in zip(given, wanted, strict=True):
        np.testing.assert_array_equal(x, np.broadcast_to(y, x.shape))


@every_transform
def test_transform_margins_are_as_its_kind_says(name: str) -> None:
    """+inf for scores and masks; for filters a finite distance or +inf, never NaN or negative."""
    for t in transforms.flatten(TRANSFORMS[name]):
        z, state = jnp.asarray(LOGITS), t.init(HISTORY)
        for margin in t.margin(z, t.apply(z, HISTORY, state), HISTORY, state):
            assert margin.shape == (B,)
            if name == "dynamic_temperature":  # a temperature that moves with the logits has no bound: unknown
                assert np.isnan(margin).tolist() == [False, True, True, True]
                assert np.isposinf(margin[0])
                continue
            assert (np.asarray(margin) >= 0).all()
            if t.kind != "filter":
                assert np.isposinf(margin).all()


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("rows", [[1, 0, 1, 0], [1, 1, 1, 1]], ids=["some", "all"])
def test_greedy_rows_skip_filters(name: str, rows: list[int]) -> None:
    skip = jnp.array(rows, bool)
    part = chain(CUTS[name])
    out = transforms.process(part, jnp.asarray(LOGITS), HISTORY, transforms.init(part, HISTORY), skip)
    expected = np.where(skip[:, None], LOGITS, apply(CUTS[name], LOGITS))
    np.testing.assert_array_equal(out.logits, expected)
    assert np.isposinf(np.asarray(out.token_margin)[np.asarray(skip)]).all()
