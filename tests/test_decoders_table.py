"""One table: every decoder goes through the same checks. A new one is added to the table, and must pass them all."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdecode import (
    Context,
    Decoder,
    Finish,
    Generated,
    LogitsTransform,
    Prompt,
    Rules,
    chain,
    greedy,
    min_p,
    prompt_lookup,
    run,
    sample,
    speculative,
    take_rows,
    temperature,
    top_k,
    top_p,
)
from jaxdecode.testing import markov_model

V, B, N = 10, 4, 4
NAN_ROW, INF_ROW, EMPTY_ROW = 7, 8, 9  # tokens after which the model's logits are of no use


def table() -> np.ndarray:
    z = np.random.default_rng(3).normal(size=(V, V)).astype(np.float32) * 2
    z[:, 7:] = -np.inf  # no token leads there: only a prompt does
    z[NAN_ROW, 2], z[INF_ROW, 2], z[EMPTY_ROW] = np.nan, np.inf, -np.inf
    return z


TABLE = table()
MODEL = markov_model()
DECODERS: dict[str, Decoder] = {
    "greedy": greedy(MODEL, top_logprobs=2),
    "sample": sample(MODEL, top_logprobs=2, log_weight=True),
    "prompt_lookup": prompt_lookup(MODEL, draft_length=3, max_ngram=1, top_logprobs=2, log_weight=True),
    "speculative": speculative(MODEL, MODEL, draft_length=2, top_logprobs=2, log_weight=True),
}
DRAFT = TABLE[:, np.roll(np.arange(V), 1)] * np.float32(0.3) + TABLE  # where that is no NaN, and likes other tokens


def params_of(decoder: Decoder) -> Any:
    return (TABLE, DRAFT) if decoder is DECODERS["speculative"] else TABLE


def _odd_only(params: jax.Array, logits: jax.Array, ctx: Context, state: Any) -> jax.Array:
    """A user's mask: rows where ``params[B]`` is 1 lose their even ids."""
    even = (jnp.arange(logits.shape[1]) % 2 == 0)[None]
    return jnp.where(even & (params == 1)[:, None], -jnp.inf, logits)


ROWS_TAU = np.array([0.5, 1.0, 2.0, 1.0], np.float32)
ROWS_ODD = np.array([0, 1, 1, 0], np.int32)
TRANSFORM = chain(
    LogitsTransform(ROWS_ODD, "mask", _odd_only),
    temperature(ROWS_TAU),
    top_k(np.array([0, 1, 3, V + 1])),
    top_p(np.array([1.0, 0.1, 0.7, 0.9], np.float32)),
    min_p(np.array([0.0, 0.2, 1.0, 0.05], np.float32)),
)
every_decoder = pytest.mark.parametrize("name", DECODERS)

# Decoders. Every row of the batch below has its own transform settings, limit, end ids and stop sequence.

KEYS = jax.random.split(jax.random.key(42), B)
TOKENS: Any = np.array([[1, 0, 0], [2, 3, 0], [4, 5, 6], [6, 2, 0]], np.int32)
LENGTH: Any = np.array([1, 2, 3, 2], np.int32)
RULES = Rules(
    transform=TRANSFORM,
    greedy=jnp.array([False, False, True, True]),
    eos=jnp.array([[-1], [-1], [-1], [2]]),
    limit=jnp.array([N, N - 1, N, N]),
    stop=jnp.array([[[-1, -1]], [[-1, -1]], [[5, 3]], [[-1, 1]]]),
)


# These programs run once or twice, and compile in half the time so.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=QUICKLY)
def start(decoder: Decoder, n: int, slots: int, tokens: Any, length: Any, rules: Rules, keys: jax.Array) -> Any:
    cache, params = MODEL.init_cache(TABLE, tokens.shape[0], slots), params_of(decoder)
    cache = (cache, cache) if params is not TABLE else cache
    prompt = Prompt(tokens, length, jnp.zeros(tokens.shape[:1], jnp.int32))
    return decoder.init(params, keys, prompt, rules, max_new_tokens=n, cache=cache)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def two_steps(decoder: Decoder, state: Any) -> Any:
    return run(decoder, params_of(decoder), state, 2)


def steps(decoder: Decoder, n: int, state: Any) -> Any:
    """An even number of steps: one program for all."""
    infos = []
    for _ in range(n // 2):
        state, info = two_steps(decoder, state)
        infos.append(info)
    return state, jax.tree.map(lambda *parts: jnp.concatenate(parts), *infos)


def whole(decoder: Decoder, tokens: Any = TOKENS, length: Any = LENGTH, rows: Any = None, slots: int = 16) -> Generated:
    """N steps; ``rows`` picks some of them, in any order."""
    rules, keys = (RULES, KEYS) if rows is None else take_rows((RULES, KEYS), jnp.asarray(rows))
    if rows is not None:
        tokens, length = tokens[np.asarray(rows)], length[np.asarray(rows)]
    return decoder.finish(steps(decoder, N, start(decoder, N, slots, tokens, length, rules, keys))[0])


def assert_same(a: Generated, b: Generated, rows: Any = slice(None)) -> None:
    assert b.top_ids is not None
    for field in dataclasses.fields(Generated):
        one, other = getattr(a, field.name), getattr(b, field.name)
        assert (one is None) == (other is None)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(x, np.asarray(y)[rows], field.name)


@every_decoder
def test_decoder_jit_is_no_jit(name: str) -> None:
    decoder = DECODERS[name]
    state = start(decoder, N, 16, TOKENS, LENGTH, RULES, KEYS)
    compiled, infos = steps(decoder, N, state)
    with jax.disable_jit():
        for i in range(2):
            state, info = decoder.step(params_of(decoder), state)
            np.testing.assert_array_equal(info.tokens, infos.tokens[i])
            np.testing.assert_array_equal(info.finish, infos.finish[i])
            np.testing.assert_allclose(info.logprob, infos.logprob[i], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(info.margin, infos.margin[i], rtol=1e-4, atol=1e-6)
    plain, fast = decoder.finish(state), decoder.finish(compiled)
    np.testing.assert_array_equal(plain.tokens[:, :2], fast.tokens[:, :2])
    np.testing.assert_allclose(plain.processed_logprob[:, :2], fast.processed_logprob[:, :2], rtol=1e-5, atol=1e-6)


@every_decoder
def test_decoder_row_alone_and_elsewhere(name: str) -> None:
    together = whole(DECODERS[name])
    assert together.finish.tolist() == [Finish.LENGTH, Finish.LENGTH, Finish.STOP, Finish.EOS]
    assert_same(whole(DECODERS[name], rows=[3, 1, 0, 2]), together, np.array([3, 1, 0, 2]))
    for b in range(B):
        assert_same(whole(DECODERS[name], rows=[b]), together, [b])


@every_decoder
def test_decoder_padding_and_allocation_change_nothing(name: str) -> None:
    together = whole(DECODERS[name])
    for padding_id in (1, V - 1):
        wide = np.full((B, 6), padding_id, np.int32)
        for row, prompt, n in zip(wide, TOKENS, LENGTH, strict=True):
            row[:n] = prompt[:n]
        assert_same(whole(DECODERS[name], tokens=wide, slots=50), together)


@every_decoder
def test_decoder_rows_that_cannot_go_on(name: str) -> None:
    """NaN, +inf, and nothing left: never a silent id 0; the others go on as if they were alone."""
    decoder, together = DECODERS[name], whole(DECODERS[name])
    for place in (1, 2):  # a sampled row, a greedy row
        for last, reason in ((NAN_ROW, Finish.NAN), (INF_ROW, Finish.NAN), (EMPTY_ROW, Finish.NO_TOKEN)):
            tokens = TOKENS.copy()
            tokens[place, LENGTH[place] - 1] = last
            out = whole(decoder, tokens=tokens)
            assert out.finish[place] == reason
            assert out.length[place] == 0
            assert (np.asarray(out.tokens[place]) == -1).all()
            assert (np.asarray(out.logprob[place]) == 0).all()
            assert np.isposinf(np.asarray(out.margin[place])).all()
            others = np.arange(B) != place
            assert_same(jax.tree.map(lambda x, keep=others: x[keep], out), together, others)


@every_decoder
def test_decoder_masks_that_leave_nothing(name: str) -> None:
    """The model knows ids 0 to 6; where only id 8 is allowed a row has nothing left."""
    only = LogitsTransform(np.array([-1, 8, -1, 8], np.int32), "mask", _only)
    rules = dataclasses.replace(RULES, transform=chain(only, top_p(np.full(B, 0.9, np.float32))))
    decoder = DECODERS[name]
    out = decoder.finish(steps(decoder, N, start(decoder, N, 16, TOKENS, LENGTH, rules, KEYS))[0])
    assert out.finish.tolist()[1::2] == [Finish.NO_TOKEN] * 2
    assert out.length.tolist()[1::2] == [0, 0]
    assert all(n > 0 for n in out.length.tolist()[::2])


def _only(params: jax.Array, logits: jax.Array, ctx: Context, state: Any) -> jax.Array:
    ids = jnp.arange(logits.shape[1])[None]
    return jnp.where((params[:, None] < 0) | (ids == params[:, None]), logits, -jnp.inf)


@every_decoder
def test_decoder_greedy_rows_take_the_arg_max_of_scores_and_masks(name: str) -> None:
    out = whole(DECODERS[name])
    for b in range(B) if name == "greedy" else (2, 3):
        history = TOKENS[b, : LENGTH[b]].tolist()
        for t, token in enumerate(out.to_lists()[b]):
            z = TABLE[history[-1]].astype(np.float64)
            z[::2] = -np.inf if ROWS_ODD[b] else z[::2]
            assert token == int(np.argmax(z))
            top = np.sort(z)[-2:]  # logits before temperature
            np.testing.assert_allclose(out.margin[b, t], top[1] - top[0], rtol=1e-5)
            assert out.processed_logprob[b, t] == 0
            history.append(token)


@every_decoder
def test_decoder_finished_rows_stay_as_they_are(name: str) -> None:
    decoder = DECODERS[name]
    state = steps(decoder, N, start(decoder, N, 16, TOKENS, LENGTH, RULES, KEYS))[0]
    assert (np.asarray(state.finish) != Finish.RUNNING).all()
    again, infos = steps(decoder, N, state)
    assert_same(decoder.finish(again), decoder.finish(state))
    assert (np.asarray(infos.count) == 0).all()
    assert (np.asarray(infos.tokens) == -1).all()


@every_decoder
def test_decoder_state_has_the_row_first(name: str) -> None:
    """Rows may be picked, moved and repeated between any two steps, by ``take_rows`` alone."""
    decoder, places = DECODERS[name], jnp.array([3, 0, 1, 2])
    state = start(decoder, N, 16, TOKENS, LENGTH, RULES, KEYS)
    straight = decoder.finish(steps(decoder, 2, steps(decoder, 2, state)[0])[0])
    moved = take_rows(steps(decoder, 2, state)[0], places)
    assert_same(decoder.finish(steps(decoder, 2, moved)[0]), straight, np.asarray(places))


@every_decoder
def test_decoder_infos_are_the_record(name: str) -> None:
    """Step by step and token by token; a step takes any number of tokens of a row."""
    decoder = DECODERS[name]
    state, infos = steps(decoder, N, start(decoder, N, 16, TOKENS, LENGTH, RULES, KEYS))
    out, infos = decoder.finish(state), jax.tree.map(np.asarray, infos)
    np.testing.assert_array_equal(infos.count.sum(0), out.length)
    np.testing.assert_array_equal(infos.finish[-1], out.finish)
    real = np.arange(infos.tokens.shape[2]) < infos.count[:, :, None]
    for b in range(B):
        for field, padding in (("tokens", -1), ("logprob", 0), ("margin", np.inf)):
            told, kept = getattr(infos, field)[:, b], np.asarray(getattr(out, field))[b]
            np.testing.assert_array_equal(told[real[:, b]], kept[: out.length[b]])
            assert (told[~real[:, b]] == padding).all()
            assert (kept[out.length[b] :] == padding).all()
