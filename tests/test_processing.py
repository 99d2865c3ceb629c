"""Settings to chain: the documented order, every setting in one loop; shapes that share a program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from programs import result_shapes
from test_cutoffs import entropy, eta, typical
from test_penalties import longest
from test_sequence_law import softmax

import jaxdecode as jd
from jaxdecode import Finish, Settings, generate, processing, transforms
from jaxdecode.generation import start
from jaxdecode.testing import count_compilations, markov_model

V, B, N = 8, 6, 10
MODEL = markov_model()
TABLE = (np.random.default_rng(4).normal(size=(V, V)) * 2).astype(np.float32)
PROMPTS = [[1], [2, 3, 2], [4, 5], [0, 0, 0, 1], [6], [7, 6, 5, 7, 6]]
KEY = jax.random.key(2)
ORDER = [
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "dry",
    "logit_bias",
    "transform",
    "allowed_ids",
    "banned_ids",
    "bad_words",
    "no_repeat_ngram",
    "forced",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon",
    "eta",
    "top_n_sigma",
    "p_less",
    "xtc",
    "mirostat",
]
EVERYTHING: dict[str, Any] = {
    "min_new_tokens": [0, 2, 4, 10, 3, 1],
    "temperature": [1.0, 0.0, 2.0, 0.7, 0.0, 1.3],
    "top_k": [0, 3, 5, 6, 2, 7],
    "top_p": [1.0, 0.9, 0.95, 0.8, 0.5, 0.99],
    "min_p": [0.0, 0.1, 0.02, 0.05, 0.3, 0.01],
    "typical_p": [0.8, 1.0, 0.9, 0.95, 0.2, 1.0],
    "epsilon": [0.01, 0.0, 0.1, 0.02, 0.5, 0.0],
    "eta": [0.0, 0.2, 0.05, 0.1, 0.5, 0.3],
    "top_n_sigma": [2.0, 1.0, 0.0, 3.0, 1.0, 1.5],
    "p_less": [0, 1, 0, 0, 1, 1],
    "xtc": ([0.0] * B, 0.2),
    "dry": ([0.0, 0.5, 1.0, 0.8, 2.0, 0.3], 1.5, [1, 1, 2, 1, 1, 2], [5]),
    "dynamic_temperature": ([0.0, 0.0, 0.5, 0.3, 0.0, 1.0], [1, 1, 2, 1, 1, 0.5]),
    "repetition_penalty": [1.1, 1.0, 0.8, 1.5, 1.2, 1.0],
    "presence_penalty": [0.1, 0.5, 0.0, -0.2, 1.0, 0.3],
    "frequency_penalty": [0.0, 0.1, 0.3, 0.2, -0.1, 0.5],
    "no_repeat_ngram": [0, 2, 3, 0, 4, 2],
    "logit_bias": {1: 0.5, 6: -0.7},
    "allowed_ids": [None, [0, 1, 2, 3, 4, 5, 6], None, range(7), None, [7, 6, 5, 4, 3, 0]],
    "banned_ids": [[], [], [3], [], [1], []],
    "bad_words": [[0, 0], [2, 3, 4], [6, 1]],
    "forced": {2: 4, -1: 5},
}


def law(b: int, text: list[int], output: list[int], given: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Row b's logits before its temperature, and the law of its next token: all settings, in float64, in order."""

    def number(name: str, i: int | None = None) -> float:
        value = given[name] if i is None else given[name][i]
        return float(np.float32(np.broadcast_to(np.asarray(value), (B,))[b]))

    z, r = TABLE[text[-1]].astype(np.float64), number("repetition_penalty")
    for v in set(text):
        z[v] = z[v] * r if z[v] < 0 else z[v] / r
    counts = np.bincount(output, minlength=V)
    z -= number("frequency_penalty") * counts + number("presence_penalty") * (counts > 0)
    multiplier, base, allowed = (number("dry", i) for i in range(3))
    for v in range(V):
        n = longest(text, v, given["dry"][3])
        z[v] -= multiplier * base ** (n - allowed) if n >= allowed else 0
    for v, x in given["logit_bias"].items():
        z[v] += np.float32(x)
    banned = set(given["banned_ids"][b]) | ({0} if len(output) < number("min_new_tokens") else set())
    banned |= {v for *w, v in given["bad_words"] if text[-len(w) :] == w}
    if given["allowed_ids"][b] is not None:
        banned |= set(range(V)) - set(given["allowed_ids"][b])
    n = int(number("no_repeat_ngram"))
    banned |= {v for v in range(V) if n and any(text[i : i + n] == [*text, v][-n:] for i in range(len(text) - n + 1))}
    for place, v in given["forced"].items():
        if len(output) == (place if place >= 0 else N + place):
            banned |= set(range(V)) - {v}
    z[list(banned)] = -np.inf
    if np.isneginf(z).all():
        return z, np.zeros(V)
    tau, spread, power = number("temperature") or 1.0, *(number("dynamic_temperature", i) for i in range(2))
    p = softmax(z)
    low, support = max(tau - spread, 0), int((z > -np.inf).sum())
    tau = (
        low + (tau + spread - low) * ((entropy(p) / np.log(support)) ** power if support > 1 else 0) if spread else tau
    )
    x = (z - z.max()) / tau if tau > 0 else np.where(np.arange(V) == np.argmax(z), 0, -np.inf)
    return z, filtered(x, number)


def filtered(x: np.ndarray, number: Callable[[str], float]) -> np.ndarray:
    def cut(keep: np.ndarray) -> None:
        x[~keep] = -np.inf

    order = np.lexsort((np.arange(V), -x))
    if number("top_k"):
        cut(np.isin(np.arange(V), order[: int(number("top_k"))]))
    if number("top_p") < 1:
        cut(np.isin(np.arange(V), order[: 1 + int(np.sum(np.cumsum(softmax(x)[order]) < number("top_p")))]))
    cut(softmax(x) >= number("min_p") * softmax(x).max())
    if number("typical_p") < 1:
        cut(typical(x, number("typical_p"))[0])
    best = np.arange(V) == np.argmax(x)
    if number("epsilon"):
        cut((softmax(x) >= number("epsilon")) | best)
    if number("eta"):
        cut(eta(x, number("eta"))[0])
    if number("top_n_sigma"):
        cut(x >= x.max() - number("top_n_sigma") * x[x > -np.inf].std())
    if number("p_less"):
        cut(softmax(x) >= np.sum(softmax(x) ** 2) - 1e-12)
    return softmax(x)


def run(seed: int, given: dict[str, Any]) -> Any:
    settings = Settings(max_new_tokens=N, eos=0, **given)
    return generate(MODEL, TABLE, PROMPTS, key=jax.random.key(seed), settings=settings)


def test_every_setting_in_one_loop_against_the_law_in_float64() -> None:
    """Greedy rows take the arg max of the processed logits, sampled ones draw from the law; in the documented order."""
    checked = np.zeros(B, int)
    for seed in range(12):
        out = run(seed, EVERYTHING)
        for b, output in enumerate(out.to_lists()):
            for t, token in enumerate(output):
                z, p = law(b, PROMPTS[b] + output[:t], output[:t], EVERYTHING)
                checked[b] += 1
                if EVERYTHING["temperature"][b] == 0:
                    assert token == int(np.argmax(z))
                    assert out.processed_logprob[b, t] == 0
                else:
                    np.testing.assert_allclose(np.exp(out.processed_logprob[b, t]), p[token], rtol=2e-4)
            if len(output) < N and output[-1:] != [0]:
                assert out.finish[b] == Finish.NO_TOKEN
                assert np.isneginf(law(b, PROMPTS[b] + output, output, EVERYTHING)[0]).all()
    assert (checked >= 12).all()


def test_the_chain_has_the_documented_order() -> None:
    given = {**EVERYTHING, "mirostat": (0.0, 0.1)}
    settings = Settings(max_new_tokens=N, eos=0, **given)
    parts = transforms.flatten(settings.rules(B, V, transform=jd.top_k(3)).transform)
    assert [*processing.build(settings, V, np.zeros((B, 1), int), np.full(B, N), jd.top_k(3))[0]] == ORDER
    assert len(parts) == len(ORDER)


def test_none_leaves_out_and_an_off_value_keeps_in_and_changes_nothing() -> None:
    off: dict[str, Any] = {
        "typical_p": 1,
        "epsilon": 0,
        "eta": 0,
        "top_n_sigma": 0,
        "p_less": 0,
        "xtc": (0, 0.1),
        "mirostat": (0, 0.1),
        "dry": (0, 1, 1),
        "dynamic_temperature": (0, 1),
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "no_repeat_ngram": 0,
        "logit_bias": {},
        "allowed_ids": [None] * B,
        "banned_ids": [],
        "bad_words": [],
        "forced": {},
    }
    plain = generate(MODEL, TABLE, PROMPTS, key=KEY, settings=Settings(max_new_tokens=N))
    same = generate(MODEL, TABLE, PROMPTS, key=KEY, settings=Settings(max_new_tokens=N, **off))
    np.testing.assert_array_equal(plain.tokens, same.tokens)
    np.testing.assert_allclose(plain.processed_logprob, same.processed_logprob, atol=1e-6)
    np.testing.assert_allclose(plain.set_margin, same.set_margin)
    assert len(transforms.flatten(Settings().rules(B, V).transform)) == 1
    assert len(transforms.flatten(Settings(**off).rules(B, V).transform)) == 1 + len(off) - 1


def test_other_numbers_and_similar_lists_compile_nothing() -> None:
    first = {k: v for k, v in EVERYTHING.items() if k not in ("allowed_ids", "banned_ids")} | {"banned_ids": [1]}
    others: list[dict[str, Any]] = [
        {"logit_bias": {3: 1.0}, "banned_ids": [1, 2, 3], "bad_words": [[4, 4], [1, 2], [3, 3, 3], [2, 2]]},
        {"logit_bias": [(1, 0.5), (2, 0.5), (4, 1)], "banned_ids": (), "forced": [(0, 1), (1, 2)], "typical_p": 0.3},
        {
            "dry": (1, 1.1, 3, [1, 2, 3]),
            "xtc": (np.float64(0.5), jnp.float32(0.1)),
            "p_less": True,
            "min_new_tokens": 1,
        },
    ]
    jax.clear_caches()
    run(0, first)
    with count_compilations() as compiled:
        outputs = [str(run(i, first | other).to_lists()) for i, other in enumerate(others)]
    assert int(compiled) == 0
    assert len(set(outputs)) == 3


def test_memory_is_of_the_order_of_the_logits() -> None:
    """No array of the compiled step has rows times history times vocabulary, nor a quarter of it."""
    size, slots = 300, 512
    decoder, state = start(
        MODEL,
        jnp.zeros((size, size)),
        [[1] * 5] * B,
        key=KEY,
        settings=Settings(max_new_tokens=slots, eos=0, **EVERYTHING),
    )
    text = jax.jit(decoder.step).lower(jnp.zeros((size, size)), state).compile().as_text() or ""
    largest = max(math.prod(shape) for shape in result_shapes(text))
    assert B * size <= largest < B * size * slots / 4


def test_a_row_is_the_same_alone_and_in_another_batch() -> None:
    keys = jax.random.split(KEY, B)
    given = EVERYTHING | {"allowed_ids": range(7), "banned_ids": [3]}
    together = generate(MODEL, TABLE, PROMPTS, key=keys, settings=Settings(max_new_tokens=N, eos=0, **given))
    for b in range(B):
        mine = {k: [v[b]] if isinstance(v, list) and len(v) == B else v for k, v in given.items()}
        mine |= {
            k: tuple([x[b]] if isinstance(x, list) and len(x) == B else x for x in given[k])
            for k in ("xtc", "dry", "dynamic_temperature")
        }
        alone = generate(
            MODEL, TABLE, [PROMPTS[b]], key=keys[b : b + 1], settings=Settings(max_new_tokens=N, eos=0, **mine)
        )
        assert alone.to_lists()[0] == together.to_lists()[b]
        np.testing.assert_allclose(alone.processed_logprob[0], together.processed_logprob[b], atol=1e-6)


def test_a_row_whose_masks_leave_nothing_ends_no_token() -> None:
    out = generate(
        MODEL,
        TABLE,
        [[1, 2], [3]],
        settings=Settings(max_new_tokens=N, temperature=0, no_repeat_ngram=[1, 0], allowed_ids=[[0, 1, 2], None]),
    )
    assert [Finish(f) for f in out.finish.tolist()] == [Finish.NO_TOKEN, Finish.LENGTH]
    assert out.to_lists()[0] == [0]
