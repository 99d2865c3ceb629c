"""Bad input: one clear error (what, expected, got), before anything is compiled; at run time the row ends `invalid`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdecode
from jaxdecode import Finish, Prompt, Settings, chain, generate, min_p, sample, temperature, top_k, top_p
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import count_compilations, markov_model

V = 7
CONTEXT = 32
MODEL = markov_model(context=CONTEXT)
TABLE = np.random.default_rng(2).normal(size=(V, V)).astype(np.float32)
KEY = jax.random.key(0)
TWO = [[1, 2], [3]]
NAN, INF = float("nan"), float("inf")


def call(prompts: Any = TWO, *, key: Any = KEY, model: Any = MODEL, options: Any = None, **fields: Any) -> Any:
    chosen = Settings(**{"max_new_tokens": 4, **fields})
    return generate(model, TABLE, prompts, key=key, settings=chosen, **(options or {}))


def with_options(prompts: Any = TWO, **options: Any) -> Callable[[], Any]:
    key = options.pop("key", KEY)
    return lambda: call(prompts, key=key, options=options)


def with_settings(**fields: Any) -> Callable[[], Any]:
    return lambda: call(**fields)


SMALL = TransformerConfig(
    vocab_size=V, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=4, d_mlp=8, context_length=16
)


def beyond_the_context_of_a_transformer() -> None:
    params = jax.eval_shape(lambda: init_params(SMALL, KEY))
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), params)
    generate(transformer(SMALL), zeros, [[1] * 13, [2]], key=KEY, settings=Settings(max_new_tokens=4))


# name of the case -> the call, and the pattern "what: expected ..., got ..." its message follows
SETTINGS = {
    "temperature negative": (with_settings(temperature=-0.5), "temperature: .*, got -0.5"),
    "temperature nan": (with_settings(temperature=NAN), "temperature: .*, got nan"),
    "temperature inf": (with_settings(temperature=INF), "temperature: .*, got inf"),
    "temperature beyond float32": (with_settings(temperature=1e39), "temperature: .*, got "),
    "temperature subnormal": (with_settings(temperature=1e-39), "temperature: .*, got 1e-39"),
    "temperature below float32": (with_settings(temperature=1e-50), "temperature: .*normal range, got 1e-50"),
    "temperature negative below float32": (with_settings(temperature=-1e-50), "temperature: .*, got -1e-50"),
    "temperature in one row": (with_settings(temperature=[1.0, -1.0]), r"temperature: .*, got \[ ?1"),
    "temperature text": (with_settings(temperature="1"), "temperature: .*, got 1"),
    "temperature none": (with_settings(temperature=None), "temperature: .*, got None"),
    "temperature complex": (with_settings(temperature=1j), "temperature: .*, got "),
    "temperature bool": (with_settings(temperature=True), "temperature: .*, got True"),
    "temperature rows": (with_settings(temperature=[1.0] * 3), r"temperature: .*2.*, got .*\(3,\)"),
    "temperature matrix": (with_settings(temperature=[[1.0, 1.0]]), r"temperature: .*, got .*\(1, 2\)"),
    "top_k negative": (with_settings(top_k=-1), "top_k: .*, got -1"),
    "top_k very negative": (with_settings(top_k=-(2**40)), "top_k: .*, got -"),
    "top_k fraction": (with_settings(top_k=2.5), "top_k: expected a whole number.*, got 2.5"),
    "top_k bool": (with_settings(top_k=True), "top_k: .*, got True"),
    "top_k rows": (with_settings(top_k=[1, 2, 3]), r"top_k: .*2.*, got .*\(3,\)"),
    "top_p zero": (with_settings(top_p=0), r"top_p: .*\(0, 1\], got 0"),
    "top_p above one": (with_settings(top_p=1.5), "top_p: .*, got 1.5"),
    "top_p barely above one": (with_settings(top_p=1 + 1e-9), "top_p: .*, got 1.000000001"),
    "top_p negative": (with_settings(top_p=-0.1), "top_p: .*, got -0.1"),
    "top_p nan": (with_settings(top_p=[0.5, NAN]), "top_p: .*, got .*nan"),
    "top_p rows": (with_settings(top_p=[0.5] * 3), r"top_p: .*2.*, got .*\(3,\)"),
    "min_p negative": (with_settings(min_p=-0.1), r"min_p: .*\[0, 1\], got -0.1"),
    "min_p negative below float32": (with_settings(min_p=-1e-50), "min_p: .*, got -1e-50"),
    "min_p above one": (with_settings(min_p=1.01), "min_p: .*, got 1.01"),
    "min_p rows": (with_settings(min_p=[0.5] * 3), r"min_p: .*2.*, got .*\(3,\)"),
    "limit negative": (with_settings(max_new_tokens=-1), "max_new_tokens: .*, got -1"),
    "limit fraction": (with_settings(max_new_tokens=2.5), "max_new_tokens: .*, got 2.5"),
    "limit none": (with_settings(max_new_tokens=None), "max_new_tokens: .*, got None"),
    "limit rows": (with_settings(max_new_tokens=[1, 2, 3]), r"max_new_tokens: .*2.*, got .*\(3,\)"),
    "eos beyond V": (with_settings(eos=V), rf"eos: .*\[0, {V}\).*, got {V}"),
    "eos below -1": (with_settings(eos=[1, -2]), r"eos: .*, got .*-2"),
    "eos fraction": (with_settings(eos=[1.5]), "eos: .*integer.*, got .*1.5"),
    "eos none": (with_settings(eos=None), "eos: .*, got None"),
    "eos ragged": (with_settings(eos=[[1], [2, 3]]), r"eos: expected .*, got \[\[1\], \[2, 3\]\]"),
    "eos rows": (with_settings(eos=[[1], [2], [3]]), r"eos: .*2.*, got \(3, 1\)"),
    "stop empty sequence": (with_settings(stop=[[1], []]), r"stop: .*non-empty.*, got \[\]"),
    "stop beyond V": (with_settings(stop=[[1, V]]), rf"stop: .*\[0, {V}\), got .*{V}"),
    "stop negative": (with_settings(stop=[[-1]]), r"stop: .*, got .*-1"),
    "stop flat": (with_settings(stop=[1, 2]), r"stop: expected .*sequences.*, got \[1, 2\]"),
    "stop none": (with_settings(stop=None), "stop: expected .*, got None"),
    "stop text": (with_settings(stop=["end"]), "stop: expected .*, got .*end"),
    "stop fraction": (with_settings(stop=[[1.5]]), "stop: expected integer.*, got float"),
    "stop rows": (with_settings(stop=[[[1]], [[2]], [[3]]]), "stop: .*2.*, got 3"),
    "samples zero": (with_settings(num_samples=0), "num_samples: .*>= 1, got 0"),
    "samples fraction": (with_settings(num_samples=1.5), "num_samples: .*, got 1.5"),
    "samples bool": (with_settings(num_samples=True), "num_samples: .*, got True"),
    "top_logprobs negative": (with_settings(top_logprobs=-1), "top_logprobs: .*>= 0, got -1"),
    "top_logprobs beyond V": (with_settings(top_logprobs=V + 1), rf"top_logprobs: .*\[0, {V}\], got {V + 1}"),
    "top_logprobs beside a decoder": (
        lambda: call(options={"decoder": sample(MODEL)}, top_logprobs=2),
        "top_logprobs: expected 0 beside a decoder.*, got 2",
    ),
}
PROMPTS = {
    "no prompt": (with_options([]), "prompts: .*at least one.*, got none"),
    "empty prompt": (with_options([[1], []]), r"prompts\[1\]: .*non-empty.*, got \[\]"),
    "empty array": (with_options(np.zeros((2, 0), int)), r"prompts: .*, got shape \(2, 0\)"),
    "id V": (with_options([[1], [2, V]]), rf"prompts\[1\]: .*\[0, {V}\), got \[{V}\]"),
    "id negative": (with_options([[-1], [2]]), r"prompts\[0\]: .*, got \[-1\]"),
    "id in an array": (with_options(np.array([[1, 99], [2, 3]])), rf"prompts: .*\[0, {V}\), got \[99\]"),
    "fractions": (with_options([[1.0], [2.0]]), r"prompts\[0\]: expected integer.*, got float64"),
    "fractions in an array": (with_options(np.ones((2, 2))), "prompts: expected integers, got float64"),
    "one flat list": (with_options([1, 2, 3]), r"prompts.*: expected .*lists? of ids, got "),
    "nested too deep": (with_options([[1], [2, [3]]]), "prompts.*: expected .*lists? of ids, got "),
    "vector": (
        with_options(np.array([1, 2])),
        r"prompts: expected lists of ids or an array \[B, S\], got shape \(2,\)",
    ),
    "text": (with_options("hello"), "prompts: expected lists of ids"),
    "none": (with_options(None), "prompts: expected lists of ids"),
    "lengths beside lists": (with_options(lengths=[2, 1]), r"lengths.*: expected none beside lists.*, got .*\[2, 1\]"),
    "padding beside lists": (with_options(padding="left"), "(lengths, )?padding: .*none beside lists.*, got .*left"),
    "padding": (with_options(np.ones((2, 2), int), padding="middle"), "padding: .*'right' or 'left', got middle"),
    "lengths zero": (with_options(np.ones((2, 2), int), lengths=[0, 2]), r"lengths: .*\[1, 2\], got \[0 2\]"),
    "lengths beyond": (with_options(np.ones((2, 2), int), lengths=[1, 3]), r"lengths: .*\[1, 2\], got \[1 3\]"),
    "lengths count": (with_options(np.ones((2, 2), int), lengths=[1]), r"lengths: .*\(2,\), got \(1,\)"),
    "lengths fractions": (with_options(np.ones((2, 2), int), lengths=[1.0, 2.0]), "lengths: .*integers, got float64"),
    "longer than the context": (with_options([[1] * (CONTEXT + 1)]), f"max_len: .*{CONTEXT} tokens, got {CONTEXT + 5}"),
    "prompt and output": (with_options([[1] * (CONTEXT - 3)]), f"max_len: .*{CONTEXT} tokens, got {CONTEXT + 1}"),
    "context of a transformer": (beyond_the_context_of_a_transformer, "max_len: .*16 tokens, got 17"),
    "cache too small": (with_options(cache_len=5), "cache_len: .*= 6, got 5"),
    "cache beyond the context": (
        with_options(cache_len=CONTEXT + 1),
        f"max_len: .*{CONTEXT} tokens, got {CONTEXT + 1}",
    ),
    "cache fraction": (with_options(cache_len=10.5), "cache_len: expected .*, got 10.5"),
}
KEYS = {
    "no key": (with_options(key=None), r"key: expected a jax.random.key.*temperature.*, got None"),
    "no key, one row": (lambda: call(key=None, temperature=[0, 1]), "key: .*, got None"),
    "seed": (with_options(key=0), "key: expected a jax.random.key.*, got int"),
    "key text": (with_options(key="0"), "key: expected a jax.random.key.*, got str 0"),
    "floats": (with_options(key=np.zeros(2)), r"key: expected a jax.random.key.*, got float"),
    "keys": (with_options(key=jax.random.split(KEY, 3)), "key: expected .*2.*, got 3"),
    "key matrix": (with_options(key=jax.random.split(KEY, (2, 2))), r"key: .*, got shape \(2, 2\)"),
    "ids beside keys": (
        with_options(key=jax.random.split(KEY, 2), row_ids=[0, 1]),
        "row_ids: expected none.*, got both",
    ),
    "ids count": (with_options(row_ids=[1]), r"row_ids: expected 2.*, got \[?1"),
    "ids negative": (with_options(row_ids=[0, -1]), r"row_ids: .*2\^32\), got \[ ?0 -1\]"),
    "ids too large": (with_options(row_ids=[0, 2**32]), r"row_ids: .*2\^32\), got .*4294967296"),
    "ids mixed": (with_options(row_ids=["a", 1]), "row_ids: .*all integers or all strings, got both"),
    "ids fractions": (with_options(row_ids=[0.0, 1.0]), "row_ids: expected integers.*, got "),
    "ids matrix": (with_options(row_ids=np.zeros((2, 2), int)), "row_ids: expected .*, got "),
    "ids alone": (with_options(row_ids=5), "row_ids: expected .*, got 5"),
}
TRANSFORMS = {
    "temperature()": (lambda: temperature(-1), "temperature: .*, got -1"),
    "top_k()": (lambda: top_k(-1), "top_k: .*, got -1"),
    "top_p()": (lambda: top_p(0.0), "top_p: .*, got 0"),
    "min_p()": (lambda: min_p(2), "min_p: .*, got 2"),
    "transform rows": (with_options(transform=top_k([1, 2, 3])), r"[\w.]+: .*2.*, got .*\(3,\)"),
}
CASES = {**SETTINGS, **PROMPTS, **KEYS, **TRANSFORMS}


@pytest.mark.parametrize("name", CASES)
def test_one_clear_error_before_any_compilation(name: str) -> None:
    attempt, message = CASES[name]
    jax.clear_caches()  # so that nothing compiled earlier hides a compilation
    with count_compilations() as compiled, pytest.raises(ValueError) as error:  # noqa: PT011 the message is checked below
        attempt()
    text = str(error.value)
    with_parts = message.replace(": .*", ": expected .*", 1)
    assert re.fullmatch(with_parts + ".*", text), text
    assert ", got " in text
    assert "\n" not in text
    assert len(text) < 250
    assert int(compiled) == 0


def test_what_chain_refuses() -> None:
    with pytest.raises(TypeError, match="chain: expected LogitsTransform, got function"):
        chain(top_k(1), lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected LogitsTransform, got function"):
        call(options={"transform": lambda x: x})


def decode(prompt: Prompt, n: int = 4, limit: Any = None, key: Any = None) -> Any:
    """The decoder alone, called with concrete arrays outside jit."""
    rules = Settings(max_new_tokens=n if limit is None else limit).rules(2, V)
    return sample(MODEL).init(TABLE, jax.random.split(KEY, 2) if key is None else key, prompt, rules, max_new_tokens=n)


TOKENS: Any = np.ones((2, 3), np.int32)
ONES: Any = np.ones(2, np.int32)
ZEROS: Any = np.zeros(2, np.int32)
DECODER = {
    "length": (lambda: decode(Prompt(TOKENS, ONES * 4, ZEROS)), r"prompt length: expected in \[1, 3\], got \[4 4\]"),
    "no length": (lambda: decode(Prompt(TOKENS, ZEROS, ZEROS)), r"prompt length: expected in \[1, 3\], got \[0 0\]"),
    "cached": (lambda: decode(Prompt(TOKENS, ONES, ONES)), r"cached: expected in \[0, length - 1\], got \[1 1\]"),
    "ids": (lambda: decode(Prompt(TOKENS * V, ONES, ZEROS)), rf"prompt ids: expected in \[0, {V}\), got .*{V}"),
    "shape": (lambda: decode(Prompt(TOKENS[0], ONES, ZEROS)), r"prompt.tokens: expected shape \[B, S\].*, got \(3,\)"),
    "rows": (lambda: decode(Prompt(TOKENS, ONES[:1], ZEROS)), r"length: expected shape \(2,\), got \(1,\)"),
    "keys": (lambda: decode(Prompt(TOKENS, ONES, ZEROS), key=jax.random.split(KEY, 3)), r"keys: .*\(2,\), got \(3,\)"),
    "limit": (lambda: decode(Prompt(TOKENS, ONES, ZEROS), limit=5), r"rules.limit: .*= 4, got \[5 5\]"),
    "context": (lambda: decode(Prompt(TOKENS, ONES, ZEROS), CONTEXT), f"max_len: .*, got {CONTEXT + 3}"),
}


@pytest.mark.parametrize("name", DECODER)
def test_a_decoder_checks_what_it_is_given(name: str) -> None:
    attempt, message = DECODER[name]
    with pytest.raises(ValueError, match="^" + message):
        attempt()


def test_a_model_that_breaks_the_contract_is_named() -> None:
    flat = jaxdecode.Model(MODEL.init_cache, lambda *a, **k: (MODEL.apply(*a, **k)[0][:, 0], a[2]))
    with pytest.raises(ValueError, match=r"model.apply logits: expected floating \[1, 1, V\], got"):
        generate(flat, TABLE, TWO, settings=Settings(max_new_tokens=1, temperature=0))


BAD: dict[str, Any] = {  # settings of eight rows known only at run time; where one is out of range the row ends
    "temperature": ([1.0, NAN, -1.0, INF, 1e-39, -1e-39, 0.0, 2.0], [1, 2, 3, 4, 5]),
    "top_k": ([0, -1, 3, -(2**31), 2**31 - 1, 1, 2, -5], [1, 3, 7]),
    "top_p": ([1.0, 0.0, -0.5, 1.5, NAN, 1e-30, 0.5, INF], [1, 2, 3, 4, 7]),
    "min_p": ([0.0, 1.0, -0.5, 1.5, NAN, 1e-30, 0.5, INF], [2, 3, 4, 7]),
}


@jax.jit
def traced(warm: jax.Array, fields: dict[str, Any], eos: jax.Array, prompts: jax.Array, lengths: jax.Array) -> Any:
    chosen = Settings(max_new_tokens=4, temperature=warm, eos=eos, **fields)
    return generate(MODEL, TABLE, prompts, lengths=lengths, key=KEY, settings=chosen)


OFF: dict[str, Any] = {
    "temperature": np.float32(1),
    "top_k": np.int32(0),
    "top_p": np.float32(1),
    "min_p": np.float32(0),
}
GOOD = (np.full((8, 1), -1), np.tile(np.arange(4, dtype=np.int32), (8, 1)) % V, np.array([1, 2, 3, 4] * 2))


def run_traced(bad: dict[str, Any], eos: Any = GOOD[0], prompts: Any = GOOD[1], lengths: Any = GOOD[2]) -> Any:
    fields = {name: np.broadcast_to(np.asarray(bad.get(name, off), off.dtype), (8,)) for name, off in OFF.items()}
    return traced(fields.pop("temperature"), fields, eos, prompts, lengths)


def only_these_end(out: Any, ended: list[int], healthy: Any) -> None:
    """Rows of ``ended`` are invalid with nothing written; every other row is the healthy run's, number for number."""
    for b in range(8):
        if b in ended:
            assert (out.finish[b], out.length[b]) == (Finish.INVALID, 0), b
            assert (np.asarray(out.tokens[b]) == -1).all()
        else:
            assert out.finish[b] == Finish.LENGTH
            for name in ("tokens", "logprob", "processed_logprob"):
                np.testing.assert_array_equal(getattr(out, name)[b], getattr(healthy, name)[b])


@pytest.mark.parametrize(
    ("name", "warm"), [("temperature", 1), *((name, warm) for name in ("top_k", "top_p", "min_p") for warm in (1, 0))]
)
def test_a_traced_setting_out_of_range_ends_its_row(name: str, warm: int) -> None:
    """In greedy rows too, although they skip filters: refused, not ignored."""
    values, ended = BAD[name]
    fixed = [OFF[name] if b in ended else v for b, v in enumerate(values)]
    base = {"temperature": np.float32(warm)}
    only_these_end(run_traced({**base, name: values}), ended, run_traced({**base, name: fixed}))


def test_traced_prompts_out_of_range_end_their_rows() -> None:
    ids = GOOD[1].copy()
    ids[1, 0], ids[2, 1], ids[3, 3], ids[5, 2] = -1, V, 2**31 - 1, V  # the last is padding: it may hold anything
    only_these_end(run_traced({}, prompts=ids), [1, 2, 3], run_traced({}))
    wrong = np.array([1, 0, 3, 5, 1, -1, 3, 4])
    only_these_end(run_traced({}, lengths=wrong), [1, 3, 5], run_traced({}))


def test_traced_end_ids_out_of_range_end_their_rows() -> None:
    eos = np.array([[-1], [V], [-1], [-2], [-1], [2**31 - 1], [-1], [-1]])
    only_these_end(run_traced({}, eos=eos), [1, 3, 5], run_traced({}))


@pytest.mark.parametrize("name", ["max_new_tokens", "stop"])
def test_what_must_be_known_before_is_refused_when_traced(name: str) -> None:
    prompts = np.ones((2, 2), np.int32)
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got .*"):
        jax.jit(lambda x: call(prompts, **{name: x}))(jnp.ones((2,) if name == "max_new_tokens" else (1, 2), jnp.int32))


def test_eos_of_another_shape_is_refused_when_traced() -> None:
    with pytest.raises(ValueError, match=r"^eos: expected integers \[2, E\], got int32\(2,\)"):
        jax.jit(lambda x: call(np.ones((2, 2), np.int32), eos=x))(jnp.ones((2,), jnp.int32))
