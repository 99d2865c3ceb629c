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
    Settings,
    beam,
    greedy,
    prompt_lookup,
    run,
    sample,
    speculative,
    take_rows,
)
from jaxdecode.testing import count_compilations, markov_model

V, B, N, WIDTH = 10, 4, 4, 3
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
    "beam": beam(MODEL, width=WIDTH),
    "without_replacement": beam(MODEL, width=WIDTH, sampled=True),
}
WIDE = ("beam", "without_replacement")  # several outputs a row, none of them told before the end
DRAFT = TABLE[:, np.roll(np.arange(V), 1)] * np.float32(0.3) + TABLE  # where that is no NaN, and likes other tokens


def params_of(decoder: Decoder) -> Any:
    return (TABLE, DRAFT) if decoder is DECODERS["speculative"] else TABLE


def _mask(params: jax.Array, logits: jax.Array, ctx: Context, state: Any) -> jax.Array:
    """A user's mask: rows where ``params[B]`` is 1 lose their even ids, above that all but that id."""
    ids, rule = jnp.arange(logits.shape[1])[None], params[:, None]
    lost = ((rule == 1) & (ids % 2 == 0)) | ((rule > 1) & (ids != rule))
    return jnp.where(lost, -jnp.inf, logits)


ROWS_ODD = np.array([0, 1, 1, 0], np.int32)
every_decoder = pytest.mark.parametrize("name", DECODERS)
narrow_decoder = pytest.mark.parametrize("name", [name for name in DECODERS if name not in WIDE])

# Decoders. Every row of the batch below has its own transform settings, limit, end ids and stop sequence.

KEYS = jax.random.split(jax.random.key(42), B)
TOKENS: Any = np.array([[1, 0, 0], [2, 3, 0], [4, 5, 6], [6, 2, 0]], np.int32)
LENGTH: Any = np.array([1, 2, 3, 2], np.int32)
SETTINGS: dict[str, Any] = {
    "max_new_tokens": np.array([N, N - 1, N, N]),
    "eos": np.array([[-1], [-1], [-1], [2]]),
    "stop": [[], [], [[5, 3]], [[1]]],
    "temperature": np.array([0.5, 1.0, 0.0, 0.0], np.float32),
    "top_k": np.array([0, 1, 3, V + 1]),
    "top_p": np.array([1.0, 0.1, 0.7, 0.9], np.float32),
    "min_p": np.array([0.0, 0.2, 1.0, 0.05], np.float32),
}


def rules_of(name: str, mask: np.ndarray = ROWS_ODD, **changed: Any) -> Rules:
    """The rules of the table, or others; beams take no filters, and samples without replacement no greedy rows."""
    fields = SETTINGS | changed
    tau = np.array([0.5, 1.0, 2.0, 1.0], np.float32)
    if name == "beam":
        fields = {k: fields[k] for k in ("max_new_tokens", "eos", "stop")}
        alpha = np.array([0.0, 1.0, 0.5, 2.0], np.float32)
        fields |= {"beams": WIDTH, "temperature": tau, "length_penalty": alpha} | changed
    elif name == "without_replacement":
        fields |= {"num_samples": WIDTH, "without_replacement": True, "temperature": tau} | changed
    return Settings(**fields).rules(B, V, transform=LogitsTransform(mask, "mask", _mask))


RULES = {name: rules_of(name) for name in DECODERS}


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


def begin(name: str, rules: Rules | None = None) -> Any:
    return start(DECODERS[name], N, 16, TOKENS, LENGTH, RULES[name] if rules is None else rules, KEYS)


def whole(name: str, tokens: Any = TOKENS, length: Any = LENGTH, rows: Any = None, slots: int = 16) -> Generated:
    """N steps; ``rows`` picks some of them, in any order."""
    decoder, rules, keys = DECODERS[name], RULES[name], KEYS
    if rows is not None:
        rules, keys = take_rows((rules, keys), jnp.asarray(rows))
        tokens, length = tokens[np.asarray(rows)], length[np.asarray(rows)]
    return decoder.finish(steps(decoder, N, start(decoder, N, slots, tokens, length, rules, keys))[0])


def first(x: Any) -> np.ndarray:
    """Of several outputs of a row the best: [B] of [B,K]."""
    return np.asarray(x).reshape(len(x), -1)[:, 0]


def each_field(a: Generated, b: Generated, compare: Any) -> None:
    assert (b.top_ids is None) == (b.score is not None)
    for field in dataclasses.fields(Generated):
        one, other = getattr(a, field.name), getattr(b, field.name)
        assert (one is None) == (other is None)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            compare(x, np.asarray(y), err_msg=field.name)


def assert_same(a: Generated, b: Generated, rows: Any = slice(None)) -> None:
    each_field(a, jax.tree.map(lambda x: np.asarray(x)[rows], b), np.testing.assert_array_equal)


def assert_close(a: Any, b: Any, err_msg: str = "") -> None:
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=err_msg)


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "beam"])  # whose code the other wide one runs
def test_decoder_jit_is_no_jit(name: str) -> None:
    decoder, state = DECODERS[name], begin(name)
    compiled, infos = two_steps(decoder, state)
    with jax.disable_jit():
        for i in range(2):
            state, info = decoder.step(params_of(decoder), state)
            jax.tree.map(assert_close, info, jax.tree.map(lambda x, i=i: x[i], infos))
    each_field(decoder.finish(state), decoder.finish(compiled), assert_close)


def padded(width: int, padding_id: int) -> np.ndarray:
    return np.array([[*p[:n], *[padding_id] * (width - n)] for p, n in zip(TOKENS.tolist(), LENGTH, strict=True)])


@every_decoder
def test_decoder_row_alone_and_elsewhere(name: str) -> None:
    """Alone also in a larger allocation, with other padding."""
    together = whole(name)
    if name in WIDE:
        assert set(np.unique(together.finish)) >= {Finish.LENGTH, Finish.STOP}
        assert together.count is not None
        assert min(together.count) < WIDTH or name == "beam"
    else:
        assert together.finish.tolist() == [Finish.LENGTH, Finish.LENGTH, Finish.STOP, Finish.EOS]
    assert_same(whole(name, rows=[3, 1, 0, 2]), together, np.array([3, 1, 0, 2]))
    for b in range(B):
        assert_same(whole(name, tokens=padded(6, [1, V - 1][b % 2]), rows=[b], slots=50), together, [b])


@every_decoder
def test_decoder_padding_changes_nothing(name: str) -> None:
    together = whole(name)
    for padding_id in (1, 5, V - 1):
        assert_same(whole(name, tokens=padded(3, padding_id)), together)


@every_decoder
def test_decoder_rows_that_cannot_go_on(name: str) -> None:
    """NaN, +inf, and nothing left: never a silent id 0; the others go on as if they were alone."""
    together = whole(name)
    for place in (1, 2):  # a sampled row, a greedy row
        for last, reason in ((NAN_ROW, Finish.NAN), (INF_ROW, Finish.NAN), (EMPTY_ROW, Finish.NO_TOKEN)):
            tokens = TOKENS.copy()
            tokens[place, LENGTH[place] - 1] = last
            out = whole(name, tokens=tokens)
            assert first(out.finish)[place] == reason
            assert (np.asarray(out.length[place]) == 0).all()
            assert out.count is None or out.count[place] == 1
            assert out.certified is None or not out.certified[place]
            assert (np.asarray(out.tokens[place]) == -1).all()
            assert (np.asarray(out.logprob[place]) == 0).all()
            assert np.isposinf(np.asarray(out.margin[place])).all()
            others = np.arange(B) != place
            assert_same(jax.tree.map(lambda x, keep=others: x[keep], out), together, others)


@every_decoder
def test_decoder_masks_that_leave_nothing(name: str) -> None:
    """The model knows ids 0 to 6; where only id 8 is allowed a row has nothing left."""
    decoder = DECODERS[name]
    out = decoder.finish(steps(decoder, N, begin(name, rules_of(name, np.array([0, 8, 1, 8], np.int32))))[0])
    assert first(out.finish).tolist()[1::2] == [Finish.NO_TOKEN] * 2
    assert first(out.length).tolist()[1::2] == [0, 0]
    assert (first(out.length)[::2] > 0).all()


@narrow_decoder
def test_decoder_greedy_rows_take_the_arg_max_of_scores_and_masks(name: str) -> None:
    out = whole(name)
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


def test_beams_read_temperature_0_as_1() -> None:
    rules = [rules_of("beam", temperature=np.array([0.5, x, 2.0, x], np.float32)) for x in (0.0, 1.0)]
    cold, warm = (steps(DECODERS["beam"], N, begin("beam", r))[0] for r in rules)
    assert_same(DECODERS["beam"].finish(cold), DECODERS["beam"].finish(warm))


def test_samples_without_replacement_end_greedy_rows() -> None:
    decoder, name = DECODERS["without_replacement"], "without_replacement"
    rules = dataclasses.replace(RULES[name], greedy=np.array([False, True, False, False]))
    out = decoder.finish(steps(decoder, N, begin(name, rules))[0])
    assert first(out.finish)[1] == Finish.INVALID
    others = np.array([0, 2, 3])
    assert_same(jax.tree.map(lambda x: x[others], out), whole(name), others)


@every_decoder
def test_decoder_finished_rows_stay_as_they_are(name: str) -> None:
    decoder = DECODERS[name]
    state = steps(decoder, N, begin(name))[0]
    assert (np.asarray(state.finish) != Finish.RUNNING).all()
    again, infos = steps(decoder, N, state)
    assert_same(decoder.finish(again), decoder.finish(state))
    assert (np.asarray(infos.count) == 0).all()
    assert (np.asarray(infos.tokens) == -1).all()


@every_decoder
def test_decoder_state_has_the_row_first(name: str) -> None:
    """Rows may be picked, moved and repeated between any two steps, by ``take_rows`` alone."""
    decoder, places = DECODERS[name], jnp.array([3, 0, 1, 2])
    state = begin(name)
    straight = decoder.finish(steps(decoder, 2, steps(decoder, 2, state)[0])[0])
    moved = take_rows(steps(decoder, 2, state)[0], places)
    assert_same(decoder.finish(steps(decoder, 2, moved)[0]), straight, np.asarray(places))


@narrow_decoder
def test_decoder_infos_are_the_record(name: str) -> None:
    """Step by step and token by token; a step takes any number of tokens of a row."""
    decoder = DECODERS[name]
    state, infos = steps(decoder, N, begin(name))
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


@every_decoder
def test_decoder_numbers_change_without_compiling(name: str) -> None:
    """Settings of every row, the ends and limits among them, and keys."""
    decoder, before = DECODERS[name], whole(name)
    changed: dict[str, Any] = {
        "max_new_tokens": np.array([N - 1, N, N, 1]),
        "min_new_tokens": np.array([0, 1, 2, 0]),
        "eos": np.array([[1], [-1], [5], [0]]),
        "stop": [[[1, 1]], [], [[2]], []],
        "temperature": np.array([1.5, 0.3, 1.0, 3.0], np.float32),
    }
    filters = {"top_k": np.array([1, 2, 0, 4]), "top_p": np.array([0.9, 1.0, 0.8, 0.3], np.float32), "min_p": 0.1}
    changed |= {"length_penalty": 0.7} if name == "beam" else filters
    keys = KEYS[::-1]
    with count_compilations() as count:
        state = start(decoder, N, 16, TOKENS, LENGTH, rules_of(name, **changed), keys)
        out = decoder.finish(steps(decoder, N, state)[0])
    assert int(count) == 0
    assert first(out.length).tolist() != first(before.length).tolist()
