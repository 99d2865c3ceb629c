"""Speculative decoding: the law of whole sequences, whatever drafts; and the same greedy tokens as without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sequence_law import PROMPTS, RULES, SAMPLED, TABLE, Law, Rule, outputs, p_value, per_row, processed, sequences

import jaxdecode as jd
from jaxdecode.decoders import pace
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.session import Session
from jaxdecode.testing import markov_model

MODEL = markov_model()
N, ROWS = 4, 1500
RNG = np.random.default_rng(12)
DRAFTS = {
    "good": TABLE + RNG.normal(size=TABLE.shape).astype(np.float32) * np.float32(0.3),
    "bad": RNG.normal(size=TABLE.shape).astype(np.float32) * 3,
    # Never what the model likes best or third best, and nearly always what it likes least.
    "adversarial": np.where(np.argsort(np.argsort(-TABLE)) % 2 == 0, -np.inf, -2 * TABLE).astype(np.float32),
}


@pytest.fixture(autouse=True, scope="module")
def quick_programs_that_always_draft() -> Iterator[None]:
    """Programs that compile fast, and rows that try again at once however wrong their drafts are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "PAUSE", 0)
        patch.setattr(pace, "LONGEST_PAUSE", 0)
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


# ---------------------------------------------------------------- S9.4
GROUP = np.resize(np.arange(len(RULES)), ROWS * len(RULES))
PADDED = np.array([p + (0,) * (3 - len(p)) for p in PROMPTS], np.int32)
PENALTIES = [1.0, 1.6, 1.0, 1.3, 1.0, 1.0, 0.7, 1.0, 1.0]  # repetition, for each rule of RULES
FREQUENCY = [0.0, 0.4, 0.0, 0.0, 0.9, 0.0, 0.0, -0.5, 0.0]


def options() -> jd.Settings:
    penalties = {"repetition_penalty": PENALTIES, "frequency_penalty": FREQUENCY}
    numbers = {name: np.array(values, np.float32)[GROUP] for name, values in penalties.items()}
    return per_row(RULES, GROUP, max_new_tokens=N, **numbers)


@functools.cache
def drawn(draft: str, noise: float = 0.0) -> jd.Generated:
    """13,500 rows of nine rules; one compiled program for every draft model. noise: added to all logits."""
    table, own = (moved(x, noise) for x in (TABLE, DRAFTS.get(draft, TABLE)))
    lengths = np.array([len(p) for p in PROMPTS])[GROUP]
    how: Any = {"draft": (MODEL, own), "decoder": jd.speculative(MODEL, MODEL, draft_length=3)}
    if draft == "history":
        how = {"decoder": jd.prompt_lookup(MODEL, draft_length=3, max_ngram=1)}
    key = jax.random.key(77)
    return jd.generate(MODEL, table, PADDED[GROUP], lengths=lengths, key=key, settings=options(), **how)


def moved(table: np.ndarray, eps: float) -> np.ndarray:
    """Every logit moved by ``eps``, up or down."""
    return table + np.float32(eps) * np.random.default_rng(5).choice([-1, 1], table.shape).astype(np.float32)


def law_of(g: int) -> Law:
    """Every sequence of N tokens with its probability, penalties and all; float64."""
    law: Law = {(): 1.0}
    for _ in range(N):
        longer: Law = {}
        for s, mass in law.items():
            history = (*PROMPTS[g], *s)
            z = TABLE[history[-1]].astype(np.float64)
            seen = np.isin(np.arange(4), history)
            z = np.where(seen, np.where(z < 0, z * PENALTIES[g], z / PENALTIES[g]), z)
            z -= FREQUENCY[g] * np.bincount(np.array(s, int), minlength=4)
            for token, q in enumerate(processed(z, RULES[g])):
                if q > 0:
                    longer[(*s, token)] = mass * q
        law = longer
    return law


@pytest.mark.parametrize("draft", [*DRAFTS, "history"])
def test_S9_4_sequences_follow_the_processed_law_of_the_model(draft: str) -> None:
    out = drawn(draft)
    assert out.acceptance is not None
    tried, kept = (np.asarray(x) for x in out.acceptance)
    assert (kept <= tried).all()
    for g in range(SAMPLED):
        rows = g == GROUP
        assert p_value(outputs(out, rows), law_of(g)) > 1e-3, g
        assert tried[rows].sum() > ROWS / 2, g
    (only,) = law_of(SAMPLED)
    assert set(outputs(out, GROUP == SAMPLED)) == {only}
    share = kept.sum() / tried.sum()
    assert share > 0.6 if draft == "good" else 0.02 < share < 0.6


def test_S9_4_the_chi_square_notices_a_draft_that_is_never_refused() -> None:
    law = sequences(DRAFTS["good"], PROMPTS[0], Rule(), N)
    assert p_value(outputs(drawn("good"), GROUP == 0), law) < 1e-12


@pytest.mark.parametrize("draft", ["good", "history"])
def test_S6_5_tokens_stay_while_the_margin_exceeds_what_logits_moved(draft: str) -> None:
    """The logits of both models move by at most eps; rows whose penalties would scale that are left out."""
    eps = 0.004
    one, other = drawn(draft), drawn(draft, eps)
    tau = np.array([r.temperature or 1 for r in RULES])[GROUP]
    bound = np.where(GROUP == SAMPLED, 2 * eps, np.tanh(eps / (2 * tau)) + 1e-6)
    both = np.isin(GROUP, [g for g, r in enumerate(PENALTIES) if r == 1])
    safe = np.minimum(np.asarray(one.margin), np.asarray(one.set_margin)) > bound[:, None]
    safe = np.logical_and.accumulate(safe, axis=1) & both[:, None]
    assert 0.5 < safe[both].mean() < 1
    same = np.asarray(one.tokens) == np.asarray(other.tokens)
    assert same[safe].all()
    assert not same[both].all()


@pytest.mark.parametrize("draft", ["good", "bad", "adversarial", "history"])
def test_S9_4_constrained_sequences_and_their_weights(draft: str) -> None:
    """Each step's law is the model's conditional on the tokens that a choice goes on with (S9.3)."""
    end, start, choices = 3, 1, [(0, 1, 2), (0, 2), (1, 1, 1, 0), (2,)]
    how: Any = {} if draft == "history" else {"draft": (MODEL, DRAFTS[draft])}
    more: Any = {"prompt_lookup": 3} if draft == "history" else {"draft_length": 3}
    settings = jd.Settings(max_new_tokens=6, eos=[end], choices=[list(c) for c in choices], **more)
    prompts = np.tile(np.array([[0, 1, 1, 1, 0, 1]], np.int32), (3000, 1))
    out = jd.generate(MODEL, jnp.asarray(TABLE), prompts, key=jax.random.key(8), settings=settings, **how)
    law, weight = {}, {}
    for c in choices:
        chance, mass, history = 1.0, 0.0, start
        for i, token in enumerate([*c, end]):
            p = np.exp(np.float64(TABLE[history]))
            p /= p.sum()
            on = {(*o, end)[i] for o in choices if o[:i] == c[:i]}
            chance, mass, history = chance * p[token] / p[list(on)].sum(), mass + np.log(p[list(on)].sum()), token
        law[(*c, end)], weight[(*c, end)] = chance, mass
    found = outputs(out, np.ones(3000, bool))
    assert p_value(found, law) > 1e-3
    np.testing.assert_allclose(out.log_weight, [weight[s] for s in found], atol=1e-5)
    assert out.acceptance is not None
    assert np.asarray(out.acceptance.drafted).sum() > 0
    assert np.asarray(out.acceptance.accepted).sum() > 0


# ---------------------------------------------------------------- greedy rows: token for token
CIRCLE = np.full((6, 6), -4, np.float32)
CIRCLE[np.arange(6), (np.arange(6) + 1) % 6] = 4  # greedy counts up, and round


def circle(settings: jd.Settings, prompts: Any = ((0,), (5, 0)), **how: Any) -> jd.Generated:
    return jd.generate(MODEL, jnp.asarray(CIRCLE), prompts, settings=settings, **how)


def test_tokens_after_an_end_a_stop_or_the_limit_are_dropped() -> None:
    """Rows that a limit, an end id (soon, and no sooner than allowed) or a stop sequence cuts inside a draft."""
    cold: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": np.array([20, 13, 1, 20, 20, 20, 20]),
        "eos": np.array([[-1], [-1], [-1], [4], [1], [-1], [-1]]),
        "min_new_tokens": np.array([0, 0, 0, 0, 9, 0, 0]),
        "stop": [[], [], [], [], [], [[3, 4]], [[5, 5], [1, 2, 3]]],
    }
    prompts = [[0, 1, 2, 3, 4, 5, 0], [2], [5, 0, 1, 2]] * 2 + [[1, 2, 3, 4, 5, 0, 1]]
    plain = circle(jd.Settings(**cold), prompts)
    assert len(set(plain.length.tolist())) > 4
    wrong = np.roll(CIRCLE, 1, axis=1)
    looked = circle(jd.Settings(**cold, prompt_lookup=5), prompts)
    drafted = [circle(jd.Settings(**cold), prompts, draft=(MODEL, jnp.asarray(d))) for d in (CIRCLE, wrong)]
    for out in (looked, *drafted):
        for field in ("tokens", "length", "finish", "logprob", "processed_logprob", "margin", "set_margin"):
            np.testing.assert_array_equal(getattr(out, field), getattr(plain, field), field)


def test_no_token_at_all() -> None:
    out = circle(jd.Settings(temperature=0, max_new_tokens=0, prompt_lookup=2))
    assert out.to_lists() == [[], []]
    assert out.finish.tolist() == [jd.Finish.LENGTH] * 2


def test_a_draft_that_is_the_model_is_always_accepted_and_a_useless_one_hardly_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "PAUSE", 32)
    monkeypatch.setattr(pace, "LONGEST_PAUSE", 512)
    prompts = np.resize(np.arange(4), (64, 1))
    settings = jd.Settings(
        max_new_tokens=200, temperature=np.resize(np.array([0, 1, 2], np.float32), 64), draft_length=6
    )
    steps = {}
    for name, table, draft in (
        ("same", TABLE, TABLE),
        ("other", CIRCLE[:4, :4], np.roll(CIRCLE[:4, :4], 1, axis=1)),
        ("nan", TABLE, np.full_like(TABLE, np.nan)),
    ):
        how: Any = {"key": jax.random.key(1), "settings": settings, "draft": (MODEL, jnp.asarray(draft))}
        out = jd.generate(MODEL, jnp.asarray(table), prompts, **how)
        assert (np.asarray(out.length) == 200).all()
        assert out.acceptance is not None
        steps[name] = np.stack(out.acceptance)
    tried, kept = steps["same"]
    np.testing.assert_array_equal(tried, kept)
    assert tried.min() > 200 * 5 / 7
    assert steps["nan"].max() == 0
    assert steps["other"][1].max() < 20


def test_settings_that_are_traced_and_out_of_range_end_their_row() -> None:
    @jax.jit
    def traced(tau: jax.Array) -> jd.Generated:
        settings = jd.Settings(max_new_tokens=3, temperature=tau, prompt_lookup=2)
        prompts, key = jnp.array([[0, 1, 0], [1, 2, 1]]), jax.random.key(0)
        return jd.generate(MODEL, jnp.asarray(TABLE), prompts, key=key, settings=settings)

    out = traced(jnp.array([1.0, -1.0]))
    assert out.finish.tolist() == [jd.Finish.LENGTH, jd.Finish.INVALID]
    assert out.length.tolist() == [3, 0]


# ---------------------------------------------------------------- a KV cache that is cut, shared and caught up with
CONFIG = TransformerConfig(
    vocab_size=24, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_mlp=24, context_length=256
)


def test_a_transformer_writes_the_same_with_any_draft() -> None:
    """Two samples of each prompt, so that its keys and values are shared by both, in both caches."""
    model, params = transformer(CONFIG), init_params(CONFIG, jax.random.key(3))
    prompts = [[1, 2, 3, 4, 1, 2, 3], [5], [7, 8, 7, 8, 9]]
    rules: Any = {"max_new_tokens": np.array([40, 30, 40]), "temperature": 0, "num_samples": 2}
    plain = jd.generate(model, params, prompts, settings=jd.Settings(**rules))
    drafts: dict[str, Any] = {
        "history": {},
        "int8": {"draft": (model, jd.quantize(params, "int8"))},
        "table": {"draft": (MODEL, jax.random.normal(jax.random.key(5), (24, 24)))},
    }
    for name, how in drafts.items():
        settings = jd.Settings(**rules, **({} if how else {"prompt_lookup": 5}))
        out = jd.generate(model, params, prompts, settings=settings, **how)
        np.testing.assert_array_equal(out.tokens, plain.tokens, name)
        np.testing.assert_array_equal(out.finish, plain.finish)
        for field in ("logprob", "margin"):
            np.testing.assert_allclose(getattr(out, field), getattr(plain, field), atol=2e-5, rtol=1e-4)
        assert out.acceptance is not None
        tried, kept = (np.asarray(x) for x in out.acceptance)
        assert tried.shape == plain.length.shape == (3, 2)
        assert tried.sum() > 0
        assert name != "int8" or kept.sum() > tried.sum() / 2


def test_a_table_judges_what_a_transformer_drafts() -> None:
    """The other way round: a cache that is read again, a draft's that is cut."""
    model, params = transformer(CONFIG), init_params(CONFIG, jax.random.key(3))
    table = jax.random.normal(jax.random.key(5), (24, 24)) * 3
    cold, prompts = jd.Settings(max_new_tokens=30, temperature=0), [[1, 2], [3]]
    plain = jd.generate(MODEL, table, prompts, settings=cold)
    out = jd.generate(MODEL, table, prompts, settings=cold, draft=(model, params))
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    np.testing.assert_array_equal(out.margin, plain.margin)


# ---------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jd.prompt_lookup(MODEL, draft_length=0), "draft_length: expected a whole number >= 1, got 0"),
        (lambda: jd.prompt_lookup(MODEL, max_ngram=0), "max_ngram: expected a whole number >= 1, got 0"),
        (lambda: jd.speculative(MODEL, MODEL, draft_length=1.5), "draft_length: expected a whole number >= 1, got 1.5"),
        (lambda: jd.Settings(prompt_lookup=0), "prompt_lookup: expected a whole number >= 1, or None, got 0"),
        (
            lambda: circle(jd.Settings(temperature=0, draft_length=2)),
            "draft_length: expected None without a draft model",
        ),
        (
            lambda: circle(jd.Settings(temperature=0, prompt_lookup=2), draft=(MODEL, jnp.asarray(CIRCLE))),
            "prompt_lookup: expected None beside a draft model, got 2",
        ),
        (
            lambda: circle(jd.Settings(temperature=0, prompt_lookup=2), decoder=jd.greedy(MODEL)),
            "prompt_lookup: expected None beside a decoder",
        ),
        (
            lambda: circle(jd.Settings(temperature=0), draft=(MODEL, jnp.asarray(TABLE))),
            "draft: expected a model of the same 6 ids, got 4",
        ),
        (
            lambda: jd.speculative(MODEL, MODEL).init(
                (CIRCLE, TABLE), None, jd.Prompt(np.zeros((1, 1), int), None, None), None, max_new_tokens=1
            ),
            "draft_model: expected a vocabulary of 6 ids like the model's, got 4",
        ),
        (
            lambda: jd.speculative(MODEL, MODEL).init(CIRCLE, None, None, None, max_new_tokens=1),
            r"params: expected \(params, draft_params\), got ndarray",
        ),
    ],
)
def test_bad_input(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_session_drafts_from_its_own_text_and_refuses_a_draft_length() -> None:
    session = Session(MODEL, jnp.asarray(CIRCLE), context=64)
    steps = session.reply([0, 1, 2, 3, 4, 5, 0], settings=jd.Settings(max_new_tokens=9, temperature=0, prompt_lookup=4))
    counts = [int(info.count[0]) for info in steps]
    assert sum(counts) == 9
    assert len(counts) < 5
    assert steps.result().to_lists() == [[1, 2, 3, 4, 5, 0, 1, 2, 3]]
    with pytest.raises(ValueError, match="draft_length"):
        session.reply([0], settings=jd.Settings(temperature=0, draft_length=2))
