"""Pure functions compose: vmap, grad, loops cut in two, a user's own model and transform."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdecode import (
    Context,
    Finish,
    Generated,
    LogitsTransform,
    Model,
    Prompt,
    Settings,
    Shared,
    StepInfo,
    chain,
    generate,
    run,
    run_until_done,
    sample,
    stream,
    temperature,
    top_k,
    top_p,
)
from jaxdecode.generation import start
from jaxdecode.testing import markov_model

V, B, N = 6, 3, 4
MODEL = markov_model()
DECODER = sample(MODEL)
RANDOM = np.random.default_rng(1)
TABLES = RANDOM.normal(size=(3, V, V)).astype(np.float32)
TABLE = TABLES[0]
PROMPTS = [[1], [2, 3, 0], [4, 5]]
ARRAY: Any = np.array([[1, 0, 0], [2, 3, 0], [4, 5, 0]], np.int32)
LENGTHS: Any = np.array([1, 3, 2], np.int32)
KEY = jax.random.key(5)
KEYS = jax.vmap(jax.random.fold_in, (None, 0))(KEY, np.arange(B))
NO_CACHED: Any = np.zeros(B, np.int32)


def softmax(z: Any) -> np.ndarray:
    e = np.exp(np.asarray(z, np.float64) - np.max(z, axis=-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def decode(params: Any = TABLE, **fields: Any) -> Generated:
    return generate(MODEL, params, PROMPTS, key=KEY, settings=Settings(max_new_tokens=N, **fields))


def begin(params: Any, n: int = N, **fields: Any) -> Any:
    rules = Settings(max_new_tokens=n, **fields).rules(B, V)
    return DECODER.init(params, KEYS, Prompt(ARRAY, LENGTHS, NO_CACHED), rules, max_new_tokens=n)


def same(a: Any, b: Any) -> None:
    """Equal pytrees; keys are compared by their data."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (jax.random.key_data(z) if jnp.issubdtype(z.dtype, jax.dtypes.prng_key) else z for z in (x, y))
        np.testing.assert_array_equal(x, y)


def test_vmap_over_params_is_an_ensemble() -> None:
    chosen = Settings(max_new_tokens=N, temperature=[1.0, 0.0, 0.5], top_p=0.9)
    together = jax.vmap(lambda t: generate(MODEL, t, PROMPTS, key=KEY, settings=chosen))(TABLES)
    for i, params in enumerate(TABLES):
        alone = generate(MODEL, params, PROMPTS, key=KEY, settings=chosen)
        np.testing.assert_array_equal(together.tokens[i], alone.tokens)
        np.testing.assert_allclose(together.processed_logprob[i], alone.processed_logprob, rtol=1e-5, atol=1e-6)


def test_vmap_over_keys_and_settings() -> None:
    taus, keys = np.array([0.5, 1.0, 3.0], np.float32), jax.random.split(KEY, 3)

    def one(tau: Any, key: Any) -> jax.Array:
        settings = Settings(max_new_tokens=N, temperature=tau, top_p=0.9)
        return generate(MODEL, TABLE, PROMPTS, key=key, settings=settings).tokens

    together = jax.vmap(one)(taus, keys)
    for tau, key, tokens in zip(taus, keys, together, strict=True):
        np.testing.assert_array_equal(tokens, one(tau, key))


@pytest.mark.parametrize("fields", [{}, {"temperature": [0.5, 2.0, 0.0]}, {"temperature": 2.0, "top_k": [2, 4, 1]}])
def test_grad_through_a_run_of_five_steps(fields: dict[str, Any]) -> None:
    """REINFORCE: the gradient of reward * sum of log probabilities, against its closed form on the table.

    The log probability of id v after id h has gradient (onehot(v) - law(h)) / tau with respect to row h.
    """
    reward = np.array([1.0, -2.0, 0.5], np.float32)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params: jax.Array, processed: jax.Array) -> Any:
        state, infos = run(DECODER, params, begin(params, 5, **fields), 5)
        total = jnp.where(processed, state.processed_logprob, infos.logprob[:, :, 0].T)
        return jnp.sum(total * reward[:, None]), state.tokens

    tau = np.broadcast_to(np.asarray(fields.get("temperature", 1.0), np.float64), (B,))
    k = np.broadcast_to(fields.get("top_k", V), (B,))
    for processed in (False, True):
        got, tokens = gradient(TABLE, processed)
        expected = np.zeros((V, V))
        for b in range(B):
            if processed and tau[b] == 0:
                continue  # a greedy row's law puts 1 on its token: a constant
            for t in range(LENGTHS[b], LENGTHS[b] + 5):
                last, token = tokens[b, t - 1], tokens[b, t]
                law = TABLE[last].astype(np.float64) / (tau[b] if processed else 1)
                if processed:
                    law[np.lexsort((np.arange(V), -TABLE[last]))[k[b] :]] = -np.inf
                step = np.eye(V)[token] - softmax(law)
                expected[last] += reward[b] * step / (tau[b] if processed else 1)
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(got, expected, atol=2e-6)


def test_grad_with_respect_to_the_temperature() -> None:
    """d log p_tau(v) / d tau = (mean of z under p_tau - z_v) / tau^2, per row and traced."""

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(tau: jax.Array) -> Any:
        state, _ = run(DECODER, TABLE, begin(TABLE, temperature=tau), N)
        return jnp.sum(state.processed_logprob), state.tokens

    tau = np.array([0.7, 1.0, 2.0], np.float32)
    got, tokens = gradient(tau)
    for b in range(B):
        pairs = [(tokens[b, t - 1], tokens[b, t]) for t in range(LENGTHS[b], LENGTHS[b] + N)]
        expected = sum((softmax(TABLE[h] / tau[b]) @ TABLE[h] - TABLE[h, v]) / tau[b] ** 2 for h, v in pairs)
        np.testing.assert_allclose(got[b], expected, rtol=1e-4)


FIELDS: dict[str, Any] = {"temperature": [1.0, 0.0, 2.0], "top_k": 4, "eos": [[-1], [3], [0]]}


@functools.cache
def started() -> Any:
    return jax.jit(lambda: begin(TABLE, **FIELDS))()


@functools.partial(jax.jit, static_argnums=1)
def advance(state: Any, n: int) -> tuple[Any, StepInfo]:
    return run(DECODER, TABLE, state, n)


def test_a_run_cut_in_two_is_the_same_run() -> None:
    whole, infos = advance(started(), N)
    half, first = advance(started(), 2)
    rest, second = advance(half, 2)
    same(rest, whole)
    same(jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second), infos)


def test_run_until_done_is_enough_run() -> None:
    done = jax.jit(lambda s: run_until_done(DECODER, TABLE, s))(started())
    assert (np.asarray(done.finish) != Finish.RUNNING).all()
    same(DECODER.finish(done), DECODER.finish(advance(started(), N)[0]))
    same(DECODER.finish(done), decode(**FIELDS))
    same(DECODER.finish(advance(done, 2)[0]), DECODER.finish(done))  # more than enough changes nothing


def test_stream_is_run() -> None:
    """Its infos one by one, its return value the last state; it stops when all rows are done, and reads, not eats."""
    state = started()
    whole, infos = advance(state, N)
    seen, it = [], stream(DECODER, TABLE, state)
    while True:
        try:
            seen.append(next(it))
        except StopIteration as end:
            last = end.value
            break
    steps = int(np.asarray(DECODER.finish(whole).length).max())
    assert len(seen) == steps
    for i, info in enumerate(seen):
        same(info, jax.tree.map(lambda x, i=i: x[i], infos))
    same(DECODER.finish(last), DECODER.finish(whole))
    same(advance(state, N)[0], whole)  # the state handed in is still there
    text = [[int(info.tokens[b, 0]) for info in seen if info.count[b]] for b in range(B)]
    assert text == DECODER.finish(last).to_lists()


def test_stream_refuses_a_traced_state_and_ends_at_once_when_done() -> None:
    with pytest.raises(ValueError, match="stream: expected a concrete state, outside jit"):
        jax.jit(lambda s: next(stream(DECODER, TABLE, s)))(started())
    done = advance(started(), N)[0]
    assert list(stream(DECODER, TABLE, done)) == []


def test_start_gives_the_state_of_generate() -> None:
    chosen = Settings(max_new_tokens=N, **FIELDS)
    decoder, state = start(MODEL, TABLE, PROMPTS, key=KEY, settings=chosen)
    assert decoder is DECODER
    same(decoder.finish(jax.jit(lambda s: run_until_done(decoder, TABLE, s))(state)), decode(**FIELDS))


def test_a_prefix_the_cache_already_holds_is_not_needed_again() -> None:
    cached: Any = np.array([0, 2, 1], np.int32)

    @jax.jit
    def resumed() -> Generated:
        cache = MODEL.apply(TABLE, ARRAY, MODEL.init_cache(TABLE, B, 16), lengths=cached)[1]
        hidden: Any = np.where(np.arange(3)[None] < cached[:, None] - 1, 0, ARRAY)  # what it holds may be forgotten
        rules = Settings(max_new_tokens=N, **FIELDS).rules(B, V)
        prompt = Prompt(hidden, LENGTHS, cached)
        state = DECODER.init(TABLE, KEYS, prompt, rules, max_new_tokens=N, cache=cache)
        return DECODER.finish(run_until_done(DECODER, TABLE, state))

    same(resumed(), decode(**FIELDS))


# A user's own transform: numbers per row, state, a table for all rows.


def _counts(params: Any, ctx: Context) -> jax.Array:
    inside = jnp.arange(ctx.tokens.shape[1])[None] < ctx.length[:, None]
    return jnp.sum(jnp.where(inside[..., None], jax.nn.one_hot(ctx.tokens, V), 0), axis=1)


def _penalise(params: Any, logits: jax.Array, ctx: Context, state: jax.Array) -> jax.Array:
    strength, bias = params
    return logits + bias.value[None] - strength[:, None] * state


def _count(params: Any, state: jax.Array, token: jax.Array, logprob: jax.Array) -> jax.Array:
    return state + jax.nn.one_hot(token, V)


def penalty(strength: Any, bias: np.ndarray) -> LogitsTransform:
    params = (np.asarray(strength, np.float32), Shared(bias))
    return LogitsTransform(params, "score", _penalise, _counts, _count)


def test_a_users_transform_with_state_and_numbers_per_row() -> None:
    """It stands before temperature and filters, sees prompt and output, and differs by row."""
    strength, bias = [0.0, 0.7, 5.0], np.linspace(-1, 1, V).astype(np.float32)
    tau = np.array([0.0, 0.5, 2.0])
    chosen = Settings(max_new_tokens=N, temperature=tau, top_k=3)
    out = generate(MODEL, TABLE, PROMPTS, key=KEY, settings=chosen, transform=penalty(strength, bias))
    for b in range(B):
        history = list(PROMPTS[b])
        for t, token in enumerate(out.to_lists()[b]):
            z = TABLE[history[-1]].astype(np.float64) + bias - strength[b] * np.bincount(history, minlength=V)
            if tau[b] == 0:
                assert token == int(np.argmax(z))
            else:
                z[np.argsort(-z)[3:]] = -np.inf
                np.testing.assert_allclose(np.exp(out.processed_logprob[b, t]), softmax(z / tau[b])[token], rtol=1e-4)
            history.append(token)


def test_a_chain_applies_left_to_right_and_nests() -> None:
    z = jnp.log(jnp.array([[0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.3, 0.5]]))
    apply = jax.jit(lambda t, z: t(z))
    for t, kept in (
        (chain(temperature(5.0), top_p(0.6)), 3),  # at temperature 5 the masses are .302 .272 .213 .213
        (chain(top_p(0.6), temperature(5.0)), 2),
    ):
        out = apply(t, z)
        assert (np.asarray(out) > -np.inf).sum(1).tolist() == [kept, kept]
        law = np.sort(softmax(np.asarray(z) / 5))[:, -kept:]
        np.testing.assert_allclose(np.sort(softmax(out))[:, -kept:], law / law.sum(1, keepdims=True), rtol=1e-5)
    a, b, c = temperature(2.0), top_k(3), top_p(0.6)
    for nested in (chain(chain(a, b), c), chain(a, chain(b, c)), chain(chain(), a, chain(b, chain(c)))):
        assert str(jax.tree.structure(nested)) == str(jax.tree.structure(chain(a, b, c)))
        np.testing.assert_array_equal(apply(nested, z), apply(chain(a, b, c), z))
    np.testing.assert_array_equal(apply(chain(), z), z)


# A user's own model: two plain functions. Its logits are the sum of one table row per token so far.


def bag_of_words() -> Model:
    def init_cache(params: Any, batch_size: int, max_len: int) -> jax.Array:
        return jnp.zeros((batch_size, params.shape[1]))

    def apply(params: Any, tokens: Any, cache: Any, *, lengths: Any = None, logits_at: Any = None) -> Any:
        sums = cache[:, None] + jnp.cumsum(params[tokens], axis=1)
        lengths = jnp.full(tokens.shape[:1], tokens.shape[1]) if lengths is None else lengths
        held = jnp.concatenate([cache[:, None], sums], axis=1)
        cache = jnp.take_along_axis(held, lengths[:, None, None], axis=1)[:, 0]
        return (sums if logits_at is None else jnp.take_along_axis(sums, logits_at[..., None], axis=1)), cache

    return Model(init_cache, apply)


def test_a_users_model_is_two_functions() -> None:
    params = np.round(TABLE * 8) / 8  # exact sums in any order
    out = generate(bag_of_words(), params, PROMPTS, settings=Settings(max_new_tokens=N, temperature=0))
    for b, prompt in enumerate(PROMPTS):
        history = list(prompt)
        for t, token in enumerate(out.to_lists()[b]):
            z = params[history].sum(0)
            assert token == int(np.argmax(z))
            np.testing.assert_allclose(out.logprob[b, t], np.log(softmax(z)[token]), atol=1e-5)
            history.append(token)


def test_a_model_without_any_cache() -> None:
    """One law for every position: nothing to remember."""

    def apply(params: Any, tokens: Any, cache: Any, *, lengths: Any = None, logits_at: Any = None) -> Any:
        shape = tokens.shape if logits_at is None else logits_at.shape
        return jnp.broadcast_to(params, (*shape, V)), cache

    model = Model(lambda params, batch_size, max_len: (), apply)
    out = generate(model, np.arange(V, dtype=np.float32), PROMPTS, settings=Settings(max_new_tokens=2, temperature=0))
    assert out.to_lists() == [[V - 1] * 2] * B
