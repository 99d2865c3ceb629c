"""Models of some twenty lines under every strategy, in the engine and the bench: as recomputed from scratch."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdecode as jd
from jaxdecode import benchmark, constraints
from jaxdecode.benchmark import Case, Machine, report
from jaxdecode.decoders import pace
from jaxdecode.engine import Engine, Options, Request
from jaxdecode.testing import check_model

V, D, N, END = 5, 6, 4, 4
WORDS = [b"a", b"b", b"c", b"d", b""]
PROMPTS = [[1], [2, 0, 3, 1, 2], [0, 3, 3]]
RANDOM = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


# ---------------------------------------------------------------- the models, as a user would write them
def table_cache(params: Any, batch_size: int, max_len: int) -> jax.Array:
    return jnp.zeros((batch_size,), jnp.int32)


def table_apply(params: Any, tokens: Any, cache: Any, *, lengths: Any = None, logits_at: Any = None) -> Any:
    batch, size = tokens.shape
    lengths = jnp.full((batch,), size, jnp.int32) if lengths is None else lengths
    every = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    at = every if logits_at is None else logits_at
    last = jnp.take_along_axis(tokens, jnp.maximum(lengths - 1, 0)[:, None], axis=1)[:, 0]
    return params[jnp.take_along_axis(tokens, at, axis=1)], jnp.where(lengths > 0, last, cache)


def rnn_step(params: Any, state: Any, tokens: jax.Array) -> Any:
    state = jnp.tanh(params["embed"][tokens] + state @ params["mix"])
    return state @ params["embed"].T, state


def rnn_state(params: Any, batch_size: int) -> jax.Array:
    return jnp.zeros((batch_size, D), params["embed"].dtype)


def mean_of_the_past(params: Any, tokens: jax.Array) -> jax.Array:
    count = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.float32)[None, :, None]
    return jnp.cumsum(params["embed"][tokens], axis=1) / count @ params["embed"].T


MODELS: dict[str, tuple[jd.Model, Any]] = {
    "table": (jd.Model(table_cache, table_apply), normal(V, V) * 2),
    "rnn": (jd.recurrent(rnn_step, rnn_state), {"embed": normal(V, D), "mix": normal(D, D) / 2}),
    "uncached": (jd.uncached(mean_of_the_past), {"embed": normal(V, D)}),
}


def any_of(models: list[jd.Model]) -> jd.Model:
    """All of them side by side, each with its cache; params = (which one speaks, the params of each): one program."""

    def init_cache(params: Any, batch_size: int, max_len: int) -> Any:
        return tuple(m.init_cache(p, batch_size, max_len) for m, p in zip(models, params[1], strict=True))

    def apply(params: Any, tokens: jax.Array, cache: Any, **more: Any) -> Any:
        each = zip(models, params[1], cache, strict=True)
        logits, caches = zip(*(m.apply(p, tokens, c, **more) for m, p, c in each), strict=True)
        return jnp.stack(logits)[params[0]], caches

    return jd.Model(init_cache, apply)


ALL = any_of([model for model, _ in MODELS.values()])
PARAMS = tuple(params for _, params in MODELS.values())
OTHERS = jax.tree.map(lambda x: x + normal(*x.shape) / 2, PARAMS)  # that draft


def model_and_params(name: str, params: Any = PARAMS) -> tuple[jd.Model, Any]:
    return ALL, (np.int32(list(MODELS).index(name)), params)


# ---------------------------------------------------------------- the same in float64, from scratch
def logits_of(name: str, text: list[int]) -> np.ndarray:
    """The logits [V] after ``text``."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), MODELS[name][1])
    if name == "table":
        return params[text[-1]]
    if name == "uncached":
        return params["embed"][text].mean(0) @ params["embed"].T
    state = np.zeros(D)
    for token in text:
        state = np.tanh(params["embed"][token] + state @ params["mix"])
    return state @ params["embed"].T


def law_of(name: str, text: list[int]) -> np.ndarray:
    z = logits_of(name, text)
    z = z - z.max()
    return z - np.log(np.exp(z).sum())


def logprobs_of(name: str, prompt: list[int], ids: list[int]) -> list[float]:
    return [law_of(name, [*prompt, *ids[:i]])[token] for i, token in enumerate(ids)]


@functools.cache
def greedy_of(name: str) -> list[list[int]]:
    rows = [list(prompt) for prompt in PROMPTS]
    for row in rows:
        for _ in range(N):
            row.append(int(np.argmax(logits_of(name, row))))
    return [row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]


def check_record(name: str, out: Any) -> None:
    """Log probabilities of every output, those of several outputs of a row too."""
    lists, logprob = out.to_lists(), np.asarray(out.logprob)
    for b, prompt in enumerate(PROMPTS):
        several = [(lists[b], logprob[b])] if logprob.ndim == 2 else zip(lists[b], logprob[b], strict=False)
        for ids, found in several:
            np.testing.assert_allclose(found[: len(ids)], logprobs_of(name, prompt, ids), rtol=1e-4, atol=1e-5)


def run(name: str, **fields: Any) -> Any:
    more = {name: fields.pop(name) for name in ("draft",) if name in fields}
    settings = jd.Settings(**{"max_new_tokens": N, **fields})
    return jax.device_get(
        jd.generate(*model_and_params(name), PROMPTS, key=jax.random.key(3), settings=settings, **more)
    )


# ---------------------------------------------------------------- strategies
def check_rows(name: str) -> None:
    """Greedy and sampled rows side by side; a sampled row is what it is under the model that recomputes all."""
    out = run(name, temperature=np.array([0.0, 1.0, 0.7], np.float32))
    check_record(name, out)
    assert out.to_lists()[0] == greedy_of(name)[0]
    uniform = [float(jax.random.uniform(_draw_key(b, len(PROMPTS[b]) + i))) for b in (1, 2) for i in range(N)]
    for place, tau in ((1, 1.0), (2, 0.7)):
        ids = out.to_lists()[place]
        for i, token in enumerate(ids):
            z = logits_of(name, [*PROMPTS[place], *ids[:i]]) / tau
            law = np.exp(z - z.max())
            edges = np.cumsum(law / law.sum())
            assert token == int(np.searchsorted(edges, uniform[(place - 1) * N + i], side="right"))


def _draw_key(row: int, position: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(3), row)
    return jax.random.fold_in(jax.random.fold_in(key, position), 0)


def check_beams(name: str) -> None:
    """25 beams of the four tokens: the best one is proven to be so, and the others tell the truth about themselves."""
    out = run(name, beams=25)
    check_record(name, out)
    np.testing.assert_allclose(out.score, out.logprob.sum(2), rtol=1e-5)
    best = {(): 0.0}
    for _ in range(N):
        best = {(*s, v): score + p for s, score in best.items() for v, p in enumerate(law_of(name, [*PROMPTS[0], *s]))}
    assert out.certified[0]
    assert tuple(out.to_lists()[0][0]) == max(best, key=best.__getitem__)


def check_without_replacement(name: str) -> None:
    out = run(name, num_samples=4, without_replacement=True)
    check_record(name, out)
    assert all(len({tuple(ids) for ids in row}) == 4 for row in out.to_lists())


def check_speculation(name: str) -> None:
    """A model of the same kind drafts: greedy rows are those of the model alone."""
    out = run(name, temperature=np.array([0.0, 1.0, 0.0], np.float32), draft=model_and_params(name, OTHERS))
    check_record(name, out)
    assert out.to_lists()[::2] == greedy_of(name)[::2]
    assert out.acceptance.drafted.sum() > out.acceptance.accepted.sum() > 0


def check_lookup(name: str) -> None:
    out = run(name, max_new_tokens=12, temperature=0.0, prompt_lookup=3)
    check_record(name, out)
    assert [ids[:N] for ids in out.to_lists()] == greedy_of(name)
    assert out.acceptance.accepted.sum() > 0


def check_constraint(name: str) -> None:
    """Two samples of each prompt, from one prefill."""
    grammar = constraints.regex("(ab|c)+", WORDS)
    warm = np.array([0.0, 1.0, 0.7], np.float32)
    out = run(name, temperature=warm, eos=[END], regex=grammar, num_samples=2)
    check_record(name, out)
    for ids in [ids for several in out.to_lists() for ids in several]:
        assert ids[-1] == END
        assert re.fullmatch("(ab|c)+", b"".join(WORDS[i] for i in ids).decode())


def check_engine(name: str) -> None:
    """More requests than slots, of unequal lengths, each cut to its own limit."""
    engine = Engine(*model_and_params(name), options=Options(slots=2, staged=1, chunk=2))
    settings = [jd.Settings(max_new_tokens=n, temperature=0) for n in (N, 2)]
    requests = [Request((b, s), PROMPTS[b], settings[s]) for b in range(3) for s in range(2)]
    found = {result.request.id: result.out.to_lists()[0] for result in engine.serve(requests)}
    assert found == {(b, s): greedy_of(name)[b][: (N, 2)[s]] for b in range(3) for s in range(2)}


def check_bench(name: str) -> None:
    modes = ("greedy", "top_p", "beam")  # all but those that need a tokenizer or a transformer's weights
    cases = [Case(mode, 3, 5, N) for mode in modes]
    rows = benchmark.bench_model(*model_and_params(name), cases, runs=1)["rows"]
    assert tuple(row["mode"] for row in rows) == modes
    for row in rows:
        assert row["param_bytes"] == 4 + sum(x.nbytes for x in jax.tree.leaves(PARAMS))
        assert row["whole_seconds"] > 0
        assert row["bytes_per_step"] is None


def check_scores_and_refills(name: str) -> None:
    """Scores of texts, and a cache that is made to hold other texts."""
    model, params = model_and_params(name)
    texts = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, greedy_of(name), strict=True)]
    scores = np.asarray(jd.score(model, params, texts))
    for b, text in enumerate(texts):
        exact = logprobs_of(name, text[:1], text[1:])
        np.testing.assert_allclose(scores[b, 1 : len(text)], exact, rtol=1e-4, atol=1e-5)
    held = [text[:4] for text in texts]
    cache = jd.prefill(model, params, held, max_len=16)
    cache = jd.refill(model, params, cache, held, [text[:-2] for text in texts])
    settings = jd.Settings(max_new_tokens=1, temperature=0)
    out = jd.generate(model, params, [text[:-1] for text in texts], settings=settings, cache=cache)
    assert [ids[0] for ids in out.to_lists()] == [text[-1] for text in texts]


STRATEGIES = {
    "rows": check_rows,
    "beams": check_beams,
    "without_replacement": check_without_replacement,
    "speculation": check_speculation,
    "lookup": check_lookup,
    "constraint": check_constraint,
    "engine": check_engine,
    "bench": check_bench,
    "scores": check_scores_and_refills,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_that_of_the_model_recomputed(
    name: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "measure_machine", lambda *_, **__: Machine(1.0, {"float32": 1.0}))
    monkeypatch.setattr(pace, "PAUSE", 0)
    STRATEGIES[strategy](name)


@pytest.mark.parametrize("name", MODELS)
def test_the_models_keep_to_the_contract(name: str) -> None:
    check_model(*MODELS[name])


def test_modes_that_need_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="mode: expected one of greedy, top_p, beam for a model without a tokenizer"):
        benchmark.bench_model(*MODELS["table"], [Case("json", 1, 2, 4)])


# ---------------------------------------------------------------- models that break the contract
def not_causal(params: Any, tokens: jax.Array) -> jax.Array:
    whole = params[tokens].mean(axis=1, keepdims=True)
    return jnp.broadcast_to(whole, (*tokens.shape, params.shape[1]))


def forgets_lengths(params: Any, tokens: Any, cache: Any, *, lengths: Any = None, logits_at: Any = None) -> Any:
    return table_apply(params, tokens, cache, logits_at=logits_at)[0], cache + tokens.shape[1]


def of_the_number(params: Any, tokens: Any, cache: Any, *, lengths: Any = None, logits_at: Any = None) -> Any:
    """Logits by the number of tokens so far, as ``forgets_lengths`` counts them."""
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if logits_at is None else logits_at
    logits, after = forgets_lengths(params, tokens, cache, logits_at=logits_at)
    number = (cache[:, None] + at)[:, :, None].astype(jnp.float32)
    return logits + number * jnp.arange(V, dtype=jnp.float32)[None, None], after


def mixes_rows(params: Any, tokens: Any, cache: Any, *, lengths: Any = None, logits_at: Any = None) -> Any:
    logits, cache = table_apply(params, tokens, cache, lengths=lengths, logits_at=logits_at)
    return logits - logits.mean(axis=0, keepdims=True), cache


BROKEN = {
    "later tokens": (jd.uncached(not_causal), "expected logits that depend on no later token .is a causal mask"),
    "lengths": (jd.Model(table_cache, of_the_number), "expected rows of unequal lengths to go on from their own"),
    "rows": (jd.Model(table_cache, mixes_rows), "expected logits that depend on no other row"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_model_finds_what_is_wrong(name: str) -> None:
    model, message = BROKEN[name]
    with pytest.raises(ValueError, match=f"model: {message}"):
        check_model(model, MODELS["table"][1])


# ---------------------------------------------------------------- recurrent
def constant(params: Any, state: Any, tokens: jax.Array) -> Any:
    return params[tokens], state


BAD_STEPS: dict[str, tuple[Any, Any, str]] = {
    "no pair": (
        lambda p, s, t: p["embed"][t],
        rnn_state,
        "recurrent: expected a step that returns .logits, state., got Shape",
    ),
    "logits": (
        lambda p, s, t: (p["embed"], s),
        rnn_state,
        r"recurrent: step: expected floating logits \[1, V\], got float32\[5, 6\]",
    ),
    "integers": (lambda p, s, t: (t[:, None], s), rnn_state, r"floating logits \[1, V\], got int32\[1, 1\]"),
    "shape": (
        lambda p, s, t: (p["embed"][t], s[:, :2]),
        rnn_state,
        r"expected a state of float32\[1, 6\], got float32",
    ),
    "structure": (lambda p, s, t: (p["embed"][t], (s,)), rnn_state, "recurrent: step: expected a state like"),
    "rows": (constant, lambda p, n: jnp.zeros((3,)), r"recurrent: state: expected leaves of 1 rows, \[B, ...\], got"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_steps_that_cannot_be_repeated_are_refused_before_any_compute(name: str) -> None:
    step, init_state, message = BAD_STEPS[name]
    with pytest.raises(ValueError, match=message):
        jd.generate(jd.recurrent(step, init_state), MODELS["rnn"][1], PROMPTS, settings=jd.Settings(temperature=0))


def test_a_recurrent_model_with_a_context_ends_there() -> None:
    model = jd.recurrent(rnn_step, rnn_state, context=8)
    assert model is jd.recurrent(rnn_step, rnn_state, context=8)
    with pytest.raises(ValueError, match="max_len: expected at most the context of 8 tokens"):
        jd.generate(model, MODELS["rnn"][1], PROMPTS, settings=jd.Settings(max_new_tokens=5, temperature=0))
    assert model.init_cache(MODELS["rnn"][1], 2, 8).capacity == 8


def test_a_recurrence_may_be_differentiated_and_mapped_over_params() -> None:
    model, params = MODELS["rnn"]
    several = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
    gradient = jax.jit(jax.grad(lambda p: jd.score(model, p, PROMPTS).sum()))(params)
    assert all(np.isfinite(x).all() and np.any(x != 0) for x in jax.tree.leaves(gradient))

    @jax.jit
    def logits(params: Any) -> jax.Array:
        return model.apply(params, jnp.array([[1, 2], [0, 3]]), model.init_cache(params, 2, 4))[0]

    both = jax.jit(jax.vmap(logits))(several)
    np.testing.assert_allclose(both[0], logits(params), rtol=1e-5, atol=1e-6)
    assert not np.allclose(both[0], both[1])
