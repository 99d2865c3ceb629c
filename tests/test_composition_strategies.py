"""Combined models under every strategy: drafts and beams against exact laws, and a cache for each of two prompts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models_from_models import published
from test_sequence_law import Rule, outputs, p_value, sequences

import jaxdecode as jd
from jaxdecode import Settings, generate
from jaxdecode.decoders import pace
from jaxdecode.generation import start
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import markov_model, second_order_model

V, N, END, ROWS = 4, 3, 3, 1500
RANDOM = np.random.default_rng(21)
A = RANDOM.normal(size=(V, V)).astype(np.float32)
B2 = RANDOM.normal(size=(V, V, V)).astype(np.float32)  # the second model looks two tokens back
FIRST, SECOND = markov_model(), second_order_model()
MIXES = {  # contrastive masks what the first model finds implausible
    "guidance": (jd.guidance, (1.5, 0.0)),
    "contrastive": (jd.contrastive, (0.3, 0.5)),
    "product": (jd.product, (0.6, 0.9)),
}
every_mix = pytest.mark.parametrize("name", MIXES)


def one_of_them(a: jax.Array, b: jax.Array, kind: Any, x: Any, y: Any) -> jax.Array:
    """Any of the three, as a number says: one program for all."""
    return jax.lax.switch(
        kind, [lambda: jd.guidance(a, b, x), lambda: jd.contrastive(a, b, x, y), lambda: jd.product(a, b, x, y)]
    )


MIXED, OTHER = jd.combine(FIRST, SECOND, one_of_them), jd.combine(SECOND, FIRST, one_of_them)


def mixed(name: str, first: Any = A, second: Any = B2) -> Any:
    return (first, second, np.int32(list(MIXES).index(name)), *map(np.float32, MIXES[name][1]))


@pytest.fixture(autouse=True, scope="module")
def quick_programs_that_always_draft() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "PAUSE", 0)
        patch.setattr(pace, "LONGEST_PAUSE", 0)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def law(name: str) -> np.ndarray:
    """log p(next | the last two tokens) of the combination [V,V,V], float64."""
    with np.errstate(divide="ignore"):
        return published(name, np.broadcast_to(A, B2.shape), B2, *MIXES[name][1])


# ---------------------------------------------------------------- drafts
TAUS = np.array([1.0, 0.6, 0.0], np.float32)
STARTS = [(0,), (1, 2), (2, 0, 1)]
GROUP = np.resize(np.arange(len(TAUS)), ROWS * len(TAUS))
PADDED = np.array([p + (0,) * (3 - len(p)) for p in STARTS], np.int32)


@pytest.mark.parametrize("source", ["history", "model"])
@every_mix
def test_S9_4_drafts_keep_the_law_of_a_combined_model(name: str, source: str) -> None:
    """The draft model is a combination too, another one: contrastive drafts lack tokens that guidance may write."""
    decoder = jd.prompt_lookup(MIXED, draft_length=2, max_ngram=1)
    draft = None
    if source == "model":
        decoder = jd.speculative(MIXED, OTHER, draft_length=2)
        other = {"guidance": "contrastive", "contrastive": "product", "product": "guidance"}[name]
        draft = (OTHER, mixed(other, B2, A))
    settings = Settings(max_new_tokens=N + 1, temperature=TAUS[GROUP], eos=[END])
    lengths = np.array([len(p) for p in STARTS])[GROUP]
    options: Any = {"key": jax.random.key(5), "settings": settings, "decoder": decoder, "draft": draft}
    out = jax.device_get(generate(MIXED, mixed(name), PADDED[GROUP], lengths=lengths, **options))
    for g, tau in enumerate(TAUS):
        expected = sequences(law(name), STARTS[g], Rule(temperature=tau), N + 1, END)
        found = outputs(out, g == GROUP)
        assert p_value(found, expected) > 1e-3 if len(expected) > 1 else set(found) == set(expected), g
    assert 0 < out.acceptance.accepted.sum() < out.acceptance.drafted.sum()


def test_steps_of_drafts_outside_jit_take_plain_numbers_in_params() -> None:
    params: Any = ((A, jnp.asarray(B2), 0, 0.5, 0.0), A)
    options: Any = {"settings": Settings(max_new_tokens=N, temperature=0), "draft": (FIRST, A)}
    decoder = jd.speculative(MIXED, FIRST)
    state = jax.eval_shape(lambda: start(MIXED, params[0], [[0], [1, 2]], **options)[1])
    assert jax.eval_shape(lambda s: decoder.step(params, s)[0], state) == state


# ---------------------------------------------------------------- beams
@every_mix
def test_beams_of_a_combined_model_are_all_its_sequences_in_order(name: str) -> None:
    alpha = np.array([0.0, 1.0, 0.5])
    settings = Settings(max_new_tokens=N, eos=[END], beams=40, length_penalty=alpha)
    out = jax.device_get(generate(MIXED, mixed(name), [list(p) for p in STARTS], settings=settings))
    for b, prompt in enumerate(STARTS):
        exact = sequences(law(name), prompt, Rule(), N, END)
        score = {s: np.log(p) / len(s) ** alpha[b] for s, p in exact.items()}
        best = sorted(score, key=lambda s: -score[s])
        assert [tuple(ids) for ids in out.to_lists()[b]] == best
        np.testing.assert_allclose(out.score[b, : len(best)], [score[s] for s in best], atol=1e-5)
        assert out.certified[b]


# ---------------------------------------------------------------- KV caches: two prompts, and two kinds of cache
CONFIG = TransformerConfig(
    vocab_size=7, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, d_mlp=8, context_length=64
)
SMALL = transformer(CONFIG)
WEIGHTS = [jax.tree.map(lambda x: x * 2, init_params(CONFIG, jax.random.key(i))) for i in (1, 2)]
GUIDED = jd.combine(SMALL, SMALL, jd.guidance)
PARAMS = (*WEIGHTS, np.float32(1.5))
PROMPTS = [[1], [2, 3, 0, 6], [4, 5, 4, 5, 4]]
NEGATIVE = [[2, 2, 5] * 4, [0], []]  # all but the last token, which is that of the prompt


def two_prompts() -> Any:
    held = ([p[:-1] for p in PROMPTS], NEGATIVE)
    return tuple(jd.prefill(SMALL, w, rows, max_len=48) for w, rows in zip(WEIGHTS, held, strict=True))


@jax.jit
def read(weights: Any, tokens: jax.Array) -> jax.Array:
    return SMALL.apply(weights, tokens, SMALL.init_cache(weights, *tokens.shape))[0]


def guided(row: int, outputs: np.ndarray) -> np.ndarray:
    """log p of each token of ``outputs[R,N]`` after the two prompts of ``row``, from whole texts read at once."""
    laws, n = [], outputs.shape[1]
    for weights, before in zip(WEIGHTS, (PROMPTS[row][:-1], NEGATIVE[row]), strict=True):
        texts = np.zeros((len(outputs), 21 + n), int)
        first = len(before)
        texts[:, :first], texts[:, first], texts[:, first + 1 : first + 1 + n] = before, PROMPTS[row][-1], outputs
        laws.append(np.asarray(read(weights, texts))[:, first : first + n])
    return published("guidance", laws[0], laws[1], 1.5)


def test_drafts_with_a_prompt_for_each_model() -> None:
    """What is drafted and refused leaves all four caches, however many tokens each holds."""
    draft, cache = (GUIDED, (*WEIGHTS, np.float32(1.0))), two_prompts()
    cold = Settings(max_new_tokens=24, temperature=0)
    out = jax.device_get(generate(GUIDED, PARAMS, PROMPTS, settings=cold, cache=(cache, cache), draft=draft))
    for b in range(3):
        law = guided(b, out.tokens[b : b + 1])[0]
        assert out.tokens[b].tolist() == law.argmax(-1).tolist()
        np.testing.assert_allclose(out.logprob[b], law.max(-1), rtol=1e-3, atol=1e-4)
    assert out.acceptance.accepted.sum() > 10
    assert (out.acceptance.accepted < out.acceptance.drafted).any()


def test_beams_with_a_prompt_for_each_model() -> None:
    """49 beams of three tokens of seven ids find the best there is, and tell its log probability."""
    settings = Settings(max_new_tokens=3, beams=49)
    out = jax.device_get(generate(GUIDED, PARAMS, PROMPTS, settings=settings, cache=two_prompts()))
    every = np.stack(np.meshgrid(*[np.arange(7)] * 3, indexing="ij"), -1).reshape(-1, 3)
    for b in range(3):
        score = np.take_along_axis(guided(b, every), every[..., None], 2).sum((1, 2))
        np.testing.assert_allclose(out.score[b], score[out.tokens[b] @ [49, 7, 1]], atol=1e-4)
        np.testing.assert_allclose(out.score[b, 0], score.max(), atol=1e-4)
        assert out.certified[b]


def test_a_cache_of_two_kinds() -> None:
    """A transformer and a table: the one could be cut and shared, with the other it is read again and repeated."""
    table = RANDOM.normal(size=(7, 7)).astype(np.float32)
    model, params = jd.combine(SMALL, FIRST, jd.product), (WEIGHTS[0], table, np.float32(1), np.float32(0.7))
    drafts = Settings(max_new_tokens=16, temperature=0, prompt_lookup=3)
    looked = jax.device_get(generate(model, params, PROMPTS, settings=drafts))
    beams = jax.device_get(generate(model, params, PROMPTS, settings=Settings(max_new_tokens=6, beams=4)))
    rows = [[*p, *ids] for p, ids in zip(PROMPTS, looked.to_lists(), strict=True)]
    rows += [[*p, *ids] for p, several in zip(PROMPTS, beams.to_lists(), strict=True) for ids in several]
    first = [len(p) for p in PROMPTS] + [len(p) for p in PROMPTS for _ in range(4)]
    scores = np.asarray(jd.score(model, params, rows, start=first))
    for b, n in enumerate(first[:3]):
        np.testing.assert_allclose(scores[b, n : n + 16], looked.logprob[b], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(beams.score.reshape(-1), scores[3:].sum(1), atol=1e-4)
    assert 0 < looked.acceptance.accepted.sum() < looked.acceptance.drafted.sum()
