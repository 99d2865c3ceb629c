"""``combine`` and ``uncached``: models from models, and from functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdecode as jd
from jaxdecode import Settings, generate
from jaxdecode.composition import TokenCache
from jaxdecode.generation import start
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import count_compilations, markov_model, second_order_model

V, N = 7, 5
RANDOM = np.random.default_rng(7)
A = RANDOM.normal(size=(V, V)).astype(np.float32) * 2
B2 = RANDOM.normal(size=(V, V, V)).astype(np.float32) * 2  # the second model looks two tokens back
PROMPTS = [[1], [2, 3, 0, 6], [4, 5]]
FIRST, SECOND = markov_model(), second_order_model()
CONFIG = TransformerConfig(
    vocab_size=V, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, d_mlp=8, context_length=64
)
SMALL = transformer(CONFIG)
WEIGHTS = [init_params(CONFIG, jax.random.key(i)) for i in (1, 2)]
GUIDED = jd.combine(SMALL, SMALL, jd.guidance)


def log_softmax(z: Any) -> np.ndarray:
    z = np.asarray(z, np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def published(name: str, a: np.ndarray, b: np.ndarray, *numbers: float) -> np.ndarray:
    """Log probabilities as the papers write them, in float64."""
    lp, lq = log_softmax(a), log_softmax(b)
    if name == "guidance":  # arXiv 2306.17806, eq. 7
        return log_softmax(lq + numbers[0] * (lp - lq))
    if name == "product":
        law = np.exp(lp) ** numbers[0] * np.exp(lq) ** numbers[1]
        return np.log(law / law.sum(-1, keepdims=True))
    alpha, beta = numbers  # arXiv 2309.09117, section 2
    valid = np.exp(lp) >= alpha * np.exp(lp).max(-1, keepdims=True)
    return log_softmax(np.where(valid, (1 + beta) * lp - beta * lq, -np.inf))


FUNCTIONS: dict[str, tuple[Any, list[tuple[float, ...]]]] = {
    "guidance": (jd.guidance, [(0.0,), (1.0,), (1.5,), (4.0,)]),
    "contrastive": (jd.contrastive, [(0.1, 0.5), (0.0, 2.0), (1.0, 0.0), (0.4, 1.0)]),
    "product": (jd.product, [(1.0, 1.0), (0.5, 0.5), (2.0, -0.5), (1.0, 0.0)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ready_functions_are_the_published_formulas(name: str) -> None:
    """Of logits, not of log probabilities: what is added to all logits of a model changes nothing."""
    fn, cases = FUNCTIONS[name]
    a, b = RANDOM.normal(size=(2, 3, 4, 50)) * 4
    for numbers in cases:
        got = fn(jnp.asarray(a, jnp.float32), jnp.asarray(b + 5, jnp.float32), *numbers)
        expected = published(name, a, b, *numbers)
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(log_softmax(got), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ready_functions_and_what_a_model_masks(name: str) -> None:
    """What a masks stays masked; NaN of either always shows; gradients stay finite."""
    fn, ((*numbers,), *_) = FUNCTIONS[name]
    a, b = jnp.array([[1.0, -jnp.inf, 0.0, 2.0]]), jnp.array([[0.0, -jnp.inf, 1.0, 0.5]])
    assert jnp.isneginf(fn(a, b, *numbers)).tolist()[0][1]
    for place in (0, 1, 3):
        assert jnp.isnan(fn(a.at[0, place].set(jnp.nan), b, *numbers)).any()
        assert jnp.isnan(fn(a, b.at[0, place].set(jnp.nan), *numbers)).any()
    gradient = jax.grad(lambda a: jax.nn.log_softmax(fn(a, b, *numbers))[0, 3])(a)
    assert np.isfinite(gradient).all()
    with np.errstate(invalid="ignore"):
        alone = fn(a, b.at[0, 3].set(-jnp.inf), *FUNCTIONS[name][1][-1])
    assert jnp.isneginf(alone[0, 3]) if name == "product" else not jnp.isfinite(alone[0, 3])


@pytest.mark.parametrize(
    ("fn", "numbers", "message"),
    [
        (jd.guidance, (-1.0,), r"guidance: scale: expected a finite number >= 0, got -1.0"),
        (jd.guidance, (np.nan,), "guidance: scale"),
        (jd.guidance, (np.ones(3),), r"guidance: scale: expected one number for all rows, got shape \(3,\)"),
        (jd.contrastive, (1.5,), r"contrastive: alpha: expected a number in \[0, 1\]"),
        (jd.contrastive, (0.1, -1), "contrastive: beta"),
        (jd.product, (np.inf,), "product: weight_a: expected finite"),
    ],
)
def test_numbers_out_of_range(fn: Any, numbers: tuple[Any, ...], message: str) -> None:
    """Concrete ones raise; traced ones end every row as ``nan``."""
    with pytest.raises(ValueError, match=message):
        fn(A, A, *numbers)
    if np.ndim(numbers[0]) == 0:
        out = jax.jit(fn)(A, A, *(np.float32(x) for x in numbers))
        assert np.isnan(out).any(axis=-1).all()


def oracle(prompt: list[int], scale: float) -> tuple[list[int], list[float]]:
    """Greedy tokens under guidance of the two tables, and their log probabilities, in float64."""
    tokens, logprobs = list(prompt), []
    for _ in range(N):
        a, b = A[tokens[-1]], B2[tokens[-2] if len(tokens) > 1 else tokens[-1], tokens[-1]]
        law = published("guidance", a, b, scale)
        tokens.append(int(np.argmax(law)))
        logprobs.append(law[tokens[-1]])
    return tokens[len(prompt) :], logprobs


def test_a_combined_model_decodes_by_its_law_and_numbers_never_recompile() -> None:
    model, settings = jd.combine(FIRST, SECOND, jd.guidance), Settings(max_new_tokens=N, temperature=0)
    assert model is jd.combine(FIRST, SECOND, jd.guidance)
    generate(model, (A, B2, np.float32(0.5)), PROMPTS, settings=settings)
    with count_compilations() as count:
        for scale in (0.0, 1.0, 2.5):
            out = jax.device_get(generate(model, (A, B2, np.float32(scale)), PROMPTS, settings=settings))
            for row, prompt in enumerate(PROMPTS):
                tokens, logprobs = oracle(prompt, scale)
                assert out.to_lists()[row] == tokens
                np.testing.assert_allclose(out.logprob[row], logprobs, rtol=1e-4, atol=1e-5)
    assert int(count) == 0


PARAMS = (*WEIGHTS, np.float32(1.5))
COLD = Settings(max_new_tokens=N, temperature=0)


def test_samples_share_both_caches_of_a_combined_model() -> None:
    """One prefill, its keys and values kept once per prompt in both; sample i is what it is alone."""
    key, settings = jax.random.key(3), Settings(max_new_tokens=N, num_samples=2)
    cache = jax.eval_shape(lambda p: start(GUIDED, p, PROMPTS, key=key, settings=settings)[1].cache, PARAMS)
    assert [node.shared[0].layers[0][0].k.shape[0] for node in cache] == [len(PROMPTS)] * 2
    together = jax.device_get(generate(GUIDED, PARAMS, PROMPTS, key=key, settings=settings))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(3))
    for i in range(2):
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
        alone = generate(GUIDED, PARAMS, PROMPTS, key=own, settings=Settings(max_new_tokens=N))
        np.testing.assert_array_equal(together.tokens[:, i], alone.tokens)
        np.testing.assert_allclose(together.logprob[:, i], alone.logprob, rtol=1e-4, atol=1e-5)


@jax.jit
def whole_texts(tokens: jax.Array) -> list[jax.Array]:
    """The logits of both models for texts alone."""
    return [SMALL.apply(w, tokens, SMALL.init_cache(w, len(tokens), 32))[0] for w in WEIGHTS]


def test_two_prompts_by_two_caches() -> None:
    """Guidance with a negative prompt: each model continues its own; both see the last token of the prompt."""
    negative = [[2, 2, 5] * 7, [0], []]
    held = ([p[:-1] for p in PROMPTS], negative)
    cache = tuple(jd.prefill(SMALL, w, rows, max_len=32) for w, rows in zip(WEIGHTS, held, strict=True))
    out = jax.device_get(generate(GUIDED, PARAMS, PROMPTS, settings=COLD, cache=cache))
    for several in (dataclasses.replace(COLD, num_samples=2), dataclasses.replace(COLD, beams=1)):
        again = generate(GUIDED, PARAMS, PROMPTS, settings=several, cache=cache)
        np.testing.assert_array_equal(again.tokens[:, -1], out.tokens)
    for row, tokens in enumerate(out.to_lists()):
        laws = []
        texts = np.zeros((2, 27), int)
        ends = [len(before[row]) for before in held]
        for text, before, end in zip(texts, held, ends, strict=True):
            text[: end + 1 + N] = [*before[row], PROMPTS[row][-1], *tokens]
        for i, (logits, end) in enumerate(zip(whole_texts(texts), ends, strict=True)):
            laws.append(np.asarray(logits)[i, end : end + N])
        law = published("guidance", laws[0], laws[1], 1.5)
        np.testing.assert_allclose(out.logprob[row], law[np.arange(N), tokens], rtol=1e-3, atol=1e-4)
        assert tokens == np.argmax(law, axis=-1).tolist()


def test_a_cache_that_holds_a_prefix_changes_nothing() -> None:
    """Part of the prompt, or all but its last token, or nothing: as if all were processed anew."""
    plain = generate(GUIDED, PARAMS, PROMPTS, settings=COLD)
    for held in ([0, 3, 1], [0, 1, 1], [0, 0, 0]):
        cache = jd.prefill(GUIDED, PARAMS, [p[:n] for p, n in zip(PROMPTS, held, strict=True)], max_len=16)
        cached = None if held[1] == 3 else held
        again = generate(GUIDED, PARAMS, PROMPTS, settings=COLD, cache=cache, cached=cached)
        np.testing.assert_array_equal(again.tokens, plain.tokens)
        np.testing.assert_allclose(again.logprob, plain.logprob, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(continued(cache, np.asarray(held)), plain.tokens)


@jax.jit
def continued(cache: Any, held: jax.Array) -> jax.Array:
    """The same with traced values."""
    options: Any = {"lengths": _lengths(), "settings": COLD, "cache": cache, "cached": held}
    return generate(GUIDED, PARAMS, _array(), **options).tokens


def _array() -> np.ndarray:
    return np.array([[1, 0, 0, 0], [2, 3, 0, 6], [4, 5, 0, 0]])


def _lengths() -> np.ndarray:
    return np.array([1, 4, 2])


BAD_CACHES: dict[str, tuple[dict[str, Any], str]] = {
    "other rows": ({"rows": [[1], [2]]}, "cache: expected one of 3 rows, got 2 rows"),
    "other tokens": ({"cached": [0, 2, 1]}, "cached: expected as many tokens as the cache holds"),
    "all of it": ({"rows": PROMPTS, "cached": [1, 4, 2]}, "cached: expected less than each prompt's length"),
    "negative": ({"cached": -1}, "cached: expected whole numbers >= 0, got -1"),
    "shape": ({"cached": [0, 1]}, r"cached: expected a number or 3 of them"),
    "too small": ({"slots": 6}, "max_new_tokens: expected what the cache has room for"),
    "cache_len": ({"cache_len": 30}, "cache_len: expected none beside a cache"),
}


@pytest.mark.parametrize("name", BAD_CACHES)
def test_caches_that_do_not_fit_are_refused(name: str) -> None:
    asked, message = BAD_CACHES[name]
    options = {**asked}
    cache = jd.prefill(
        SMALL, WEIGHTS[0], options.pop("rows", [p[:-1] for p in PROMPTS]), max_len=options.pop("slots", 16)
    )
    with pytest.raises(ValueError, match=message):
        generate(SMALL, WEIGHTS[0], PROMPTS, settings=COLD, cache=cache, **options)


def test_bad_combinations_are_refused_before_any_compute() -> None:
    settings = Settings(max_new_tokens=2, temperature=0)
    other = RANDOM.normal(size=(V + 1, V + 1)).astype(np.float32)
    model = jd.combine(FIRST, FIRST, jd.guidance)
    with count_compilations() as count:
        with pytest.raises(ValueError, match="combine: expected two models of one vocabulary, got 7 and 8 ids"):
            generate(model, (A, other, 1.0), PROMPTS, settings=settings)
        with pytest.raises(ValueError, match=r"combine: params: expected \(params_a, params_b, \*numbers of fn\)"):
            generate(model, {"a": A}, PROMPTS, settings=settings)
        with pytest.raises(ValueError, match=r"combine: fn: expected logits \[1, 1, 7\], got float32\[1, 7\]"):
            generate(jd.combine(FIRST, FIRST, _wrong), (A, A), PROMPTS, settings=settings)
        with pytest.raises(ValueError, match="cached: expected none without a cache"):
            generate(model, (A, A, 1.0), PROMPTS, settings=settings, cached=0)
        with pytest.raises(ValueError, match="max_len: expected a whole number >= 4, the longest prompt, got 3"):
            jd.prefill(SMALL, WEIGHTS[0], PROMPTS, max_len=3)
    assert int(count) == 0


def _wrong(a: jax.Array, b: jax.Array) -> jax.Array:
    return a[:, 0]


# uncached


def causal(params: Any, tokens: jax.Array) -> jax.Array:
    """Any causal function: a table over the token and the mean of those up to it. Half precision logits are widened."""
    count = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.float32)[None, :, None]
    seen = jnp.cumsum(params["embed"][tokens], axis=1) / count
    return jnp.tanh(seen) @ params["out"] + params["table"][tokens]


TABLES = {
    "embed": RANDOM.normal(size=(V, 4)).astype(np.float32),
    "out": RANDOM.normal(size=(4, V)).astype(np.float32),
    "table": A,
}
PLAIN = jd.uncached(causal, context=40)
jitted = jax.jit(causal)
apply = jax.jit(PLAIN.apply)


def test_uncached_takes_tokens_in_pieces_of_any_size_and_ragged_rows() -> None:
    """Logits at every place are those of the whole row at once, whatever the pieces, padding and allocation."""
    text = RANDOM.integers(0, V, (3, 12))
    whole = np.asarray(causal(TABLES, jnp.asarray(text)))
    for slots, pieces in ((12, ([5, 0, 1], [4, 7, 2], [3, 5, 9])), (20, ([12, 12, 12],))):
        cache, at = PLAIN.init_cache(TABLES, 3, slots), np.zeros(3, int)
        for counts in map(np.array, pieces):
            size = counts.max() + 1  # at least one place is padding, which may hold anything
            tokens = np.full((3, size), V - 1)
            for row, n in enumerate(counts):
                tokens[row, :n] = text[row, at[row] : at[row] + n]
            logits, new = apply(TABLES, jnp.asarray(tokens), cache, lengths=jnp.asarray(counts, jnp.int32))
            few = PLAIN.apply(
                TABLES, jnp.asarray(tokens), cache, lengths=jnp.asarray(counts), logits_at=counts[:, None]
            )
            none = apply(TABLES, jnp.asarray(tokens), cache, logits_at=np.zeros((3, 0), int))[0]
            assert none.shape == (3, 0, V)
            for row, n in enumerate(counts):
                np.testing.assert_allclose(logits[row, :n], whole[row, at[row] : at[row] + n], rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(few[0][row, 0], logits[row, min(n, size - 1)], rtol=1e-5, atol=1e-5)
            cache, at = new, at + counts
        np.testing.assert_array_equal(cache.tokens[:, :12], text)
        assert cache.length.tolist() == [12] * 3


def test_uncached_goes_back_by_lengths_and_never_writes_past_its_end() -> None:
    cache = PLAIN.init_cache(TABLES, 2, 4)
    cache = apply(TABLES, jnp.array([[1, 2], [3, 4]]), cache, lengths=jnp.array([2, 1]))[1]
    tokens = jnp.array([[5, 6], [5, 6]])
    for accepted in ([0, 0], [1, 2], [2, 0]):
        again = apply(TABLES, tokens, cache, lengths=jnp.array(accepted))[1]
        assert again.length.tolist() == [2 + accepted[0], 1 + accepted[1]]
        held = [[1, 2, *[5, 6][: accepted[0]]], [3, *[5, 6][: accepted[1]]]]
        assert [row[:n] for row, n in zip(again.tokens.tolist(), again.length.tolist(), strict=True)] == held
    full = apply(TABLES, jnp.array([[5, 6, 0], [5, 6, 0]]), cache)[1]
    assert isinstance(full, TokenCache)
    assert full.length.tolist() == [4, 4]
    assert full.tokens.tolist() == [[1, 2, 5, 6], [3, 5, 6, 0]]


def test_uncached_generates_what_the_function_says() -> None:
    """Greedy against recomputation; a full buffer ends a row; differentiable."""
    settings = Settings(max_new_tokens=N, temperature=0)
    out = generate(PLAIN, TABLES, PROMPTS, settings=settings)
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for t in range(N):
            z = np.asarray(jitted(TABLES, np.array([[*text, *[0] * (12 - len(text))]])), np.float64)[0, len(text) - 1]
            text.append(int(np.argmax(z)))
            np.testing.assert_allclose(out.logprob[row, t], log_softmax(z)[text[-1]], rtol=1e-4, atol=1e-5)
        assert out.to_lists()[row] == text[len(prompt) :]
    decoder = jd.sample(PLAIN)
    prompt = jd.Prompt(jnp.asarray(_array()), jnp.asarray(_lengths()), jnp.zeros(3, jnp.int32))
    rules = settings.rules(3, V)
    keys = jax.random.split(jax.random.key(0), 3)
    state = decoder.init(TABLES, keys, prompt, rules, max_new_tokens=N, cache=PLAIN.init_cache(TABLES, 3, 6))
    assert decoder.finish(jax.jit(jd.run_until_done, static_argnums=0)(decoder, TABLES, state)).length.tolist() == [
        5,
        2,
        4,
    ]
    gradient = jax.grad(lambda p: jd.score(PLAIN, p, PROMPTS).sum())(TABLES)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


def test_functions_that_are_no_model_are_refused() -> None:
    settings = Settings(max_new_tokens=2, temperature=0)
    with pytest.raises(ValueError, match=r"uncached: fn: expected floating logits \[1, 1, V\], got int32\[1, 1\]"):
        generate(jd.uncached(_identity), TABLES, PROMPTS, settings=settings)
    with pytest.raises(ValueError, match="max_len: expected at most the context of 40 tokens, got 41"):
        generate(PLAIN, TABLES, PROMPTS, settings=Settings(max_new_tokens=37, temperature=0))


def _identity(params: Any, tokens: jax.Array) -> jax.Array:
    return tokens
