"""Modules of Flax and Equinox as models: what the module gives for a whole text is what decoding writes and reports."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from modules import PLACES, Cached, D, EquinoxLM, EquinoxRNN, LinenLM, NnxLM, V, empty_cache

import jaxdecode as jd
from jaxdecode import constraints, kvcache
from jaxdecode.adapters import StateCache
from jaxdecode.composition import TokenCache
from jaxdecode.testing import check_model, count_compilations

N, END = 5, 4
WORDS = [b"a", b"b", b"c", b"d", b""]
PROMPTS = [[1], [2, 0, 3, 1, 2], [0, 3, 3]]

ZERO = jnp.zeros((1, 4), jnp.int32)
LINEN = jax.tree.map(lambda x: x * 3, LinenLM().init(jax.random.key(0), ZERO))
NNX, NNX_DECODE = NnxLM(nnx.Rngs(1)), NnxLM(nnx.Rngs(1), decode=True)
STATE = jax.tree.map(lambda x: x * 3 if jnp.issubdtype(x.dtype, jnp.floating) else x, nnx.state(NNX))
EQUINOX, CELL = EquinoxLM(jax.random.key(2)), EquinoxRNN(jax.random.key(3))


def arrays(module: Any) -> Any:
    return jax.tree.map(lambda x: x * 2, eqx.filter(module, eqx.is_array))


def gru_step(params: Any, state: jax.Array, tokens: jax.Array) -> Any:
    return jax.vmap(eqx.combine(params, CELL_STATIC))(state, tokens)


CELL_STATIC = eqx.filter(CELL, eqx.is_array, inverse=True)


class Adapted(NamedTuple):
    """A model, its params, and the logits [B,T,V] of texts by the module alone."""

    model: jd.Model
    params: Any
    whole: Callable[[jax.Array], jax.Array]
    cache: type


@jax.jit
def by_linen(tokens: jax.Array) -> jax.Array:
    return LinenLM().apply(LINEN, tokens)


@jax.jit
def by_nnx(tokens: jax.Array) -> jax.Array:
    module = nnx.merge(nnx.graphdef(NNX), STATE)
    module.eval()
    return module(tokens)


@jax.jit
def by_equinox(tokens: jax.Array) -> jax.Array:
    return jax.vmap(eqx.nn.inference_mode(eqx.combine(arrays(EQUINOX), EQUINOX)))(tokens)


@jax.jit
def by_gru(tokens: jax.Array) -> jax.Array:
    module = eqx.combine(arrays(CELL), CELL_STATIC)

    def one(state: jax.Array, token: jax.Array) -> Any:
        return module(state, token)[::-1]

    return jax.vmap(lambda row: jax.lax.scan(one, jnp.zeros((D,)), row)[1])(tokens)


ADAPTED = {
    "linen": Adapted(jd.from_linen(LinenLM(), context=PLACES), LINEN, by_linen, TokenCache),
    "linen decode": Adapted(jd.from_linen(LinenLM(decode=True), context=PLACES), LINEN, by_linen, StateCache),
    "linen explicit": Adapted(jd.from_linen(Cached(), init_cache=empty_cache), LINEN, by_linen, kvcache.KVCache),
    "nnx": Adapted(jd.from_nnx(NNX), STATE, by_nnx, TokenCache),
    "nnx decode": Adapted(jd.from_nnx(NNX_DECODE), STATE, by_nnx, StateCache),
    "equinox": Adapted(jd.from_equinox(EQUINOX), arrays(EQUINOX), by_equinox, TokenCache),
    "equinox gru": Adapted(
        jd.recurrent(gru_step, lambda params, batch_size: jnp.zeros((batch_size, D))), arrays(CELL), by_gru, StateCache
    ),
}


def check_record(adapted: Adapted, out: Any, greedy: tuple[int, ...] = ()) -> None:
    """Log probabilities of every output, and the arg max in greedy rows, by the module alone on whole texts."""
    lists, logprob = out.to_lists(), np.asarray(out.logprob)
    if logprob.ndim == 2:
        lists, logprob = [[ids] for ids in lists], logprob[:, None]
    outputs = [(b, ids, logprob[b, k]) for b, several in enumerate(lists) for k, ids in enumerate(several)]
    texts = np.zeros((9, 16), np.int32)
    for text, (b, ids, _) in zip(texts, outputs, strict=False):
        text[: len(PROMPTS[b]) + len(ids)] = [*PROMPTS[b], *ids]
    laws = jax.nn.log_softmax(np.asarray(adapted.whole(texts)), axis=-1)
    for law, (b, ids, found) in zip(np.asarray(laws), outputs, strict=False):
        law = law[len(PROMPTS[b]) - 1 :][: len(ids)]
        np.testing.assert_allclose(found[: len(ids)], law[np.arange(len(ids)), ids], rtol=1e-3, atol=1e-4)
        assert b not in greedy or ids == law.argmax(-1).tolist()


def run(adapted: Adapted, **fields: Any) -> Any:
    settings = jd.Settings(max_new_tokens=N, **fields)
    out = jd.generate(adapted.model, adapted.params, PROMPTS, key=jax.random.key(3), settings=settings)
    return jax.device_get(out)


@pytest.mark.parametrize("name", ADAPTED)
def test_models_of_modules_keep_to_the_contract(name: str) -> None:
    """Causal, rows that are alone whatever the others do, one token at a time as many at once."""
    model, params, whole, cache = ADAPTED[name]
    assert isinstance(model.init_cache(params, 2, 8), cache)
    check_model(model, params, length=6)
    texts = np.random.default_rng(1).integers(0, V, (9, 16)).astype(np.int32)
    logits = jax.jit(lambda p, t: model.apply(p, t, model.init_cache(p, *t.shape))[0])(params, texts)
    np.testing.assert_allclose(logits, whole(texts), rtol=1e-3, atol=1e-4)


MIXED = np.array([0.0, 1.0, 0.7], np.float32)


def samples(adapted: Adapted) -> None:
    check_record(adapted, run(adapted, temperature=MIXED, num_samples=3, top_p=0.9, eos=[END]), greedy=(0,))


def beams(adapted: Adapted) -> None:
    out = run(adapted, beams=3)
    check_record(adapted, out)
    np.testing.assert_allclose(out.score, out.logprob.sum(2), atol=1e-4)


def constraint(adapted: Adapted) -> None:
    out = run(adapted, temperature=MIXED, eos=[END], regex=constraints.regex("(ab|c)+", WORDS))
    check_record(adapted, out)
    for ids in out.to_lists():
        assert re.fullmatch("(ab|c)+", b"".join(WORDS[i] for i in ids).decode())


CASES = [
    ("linen decode", samples),
    ("linen explicit", beams),
    ("nnx decode", constraint),
]


@pytest.mark.parametrize(("name", "strategy"), CASES, ids=[f"{name}, {fn.__name__}" for name, fn in CASES])
def test_what_is_written_is_what_the_module_says_of_the_whole_text(name: str, strategy: Any) -> None:
    strategy(ADAPTED[name])


# ---------------------------------------------------------------- what a model is, and when it is the same
def test_equal_modules_are_one_model_and_new_params_no_new_program() -> None:
    assert jd.from_linen(LinenLM(decode=True), context=PLACES) is ADAPTED["linen decode"].model
    assert jd.from_linen(LinenLM(), context=PLACES, train=False) is not ADAPTED["linen"].model
    assert jd.from_nnx(NnxLM(nnx.Rngs(7), decode=True)) is ADAPTED["nnx decode"].model
    assert jd.from_equinox(EquinoxLM(jax.random.key(9))) is ADAPTED["equinox"].model
    apply, tokens = jax.jit(ADAPTED["nnx decode"].model.apply), jnp.array([[1, 2], [0, 3]])
    cache = ADAPTED["nnx decode"].model.init_cache(STATE, 2, 4)
    apply(STATE, tokens, cache)
    other = nnx.state(NnxLM(nnx.Rngs(8)))
    with count_compilations() as count:
        apply(other, tokens, cache)
    assert int(count) == 0


class Unhashable(linen.Module):
    """A field without a hash makes another model at every call."""

    sizes: Any

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return linen.Dense(V)(linen.Embed(V, D)(tokens))


def test_a_module_without_a_hash_is_a_model_all_the_same() -> None:
    module = Unhashable(np.arange(3))
    model = jd.from_linen(module)
    assert model is not jd.from_linen(module)
    variables = module.init(jax.random.key(0), ZERO)
    logits = jax.jit(model.apply)(variables, ZERO, model.init_cache(variables, 1, 4))[0]
    np.testing.assert_allclose(logits, module.apply(variables, ZERO), rtol=1e-5, atol=1e-6)


def test_variables_of_init_may_hold_a_cache_that_was_filled() -> None:
    module = LinenLM(decode=True)
    variables = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 7), jnp.int32))
    assert "cache" in variables
    model = jd.from_linen(module, context=PLACES)
    dirty = {**variables, "cache": jax.tree.map(jnp.ones_like, variables["cache"])}
    tokens = jnp.array([[1, 2, 3]])
    apply = jax.jit(lambda v: model.apply(v, tokens, model.init_cache(v, 1, 4))[0])
    clean, found = (apply(v) for v in ({"params": variables["params"]}, dirty))
    np.testing.assert_array_equal(clean, found)


def mean_logprob(model: jd.Model, params: Any) -> jax.Array:
    return jd.score(model, params, PROMPTS).sum()


@pytest.mark.parametrize("name", ["nnx", "equinox"])
def test_params_are_a_pytree_for_grad_and_vmap(name: str) -> None:
    """The gradient is that of the module itself; an ensemble is a vmap."""
    model, params, whole, _ = ADAPTED[name]
    numbers, tree = jax.tree.flatten(params)
    places = [i for i, x in enumerate(numbers) if jnp.issubdtype(x.dtype, jnp.floating)]

    def with_floats(floats: list[Any]) -> Any:
        leaves = list(numbers)
        for i, x in zip(places, floats, strict=True):
            leaves[i] = x
        return jax.tree.unflatten(tree, leaves)

    floats = [numbers[i] for i in places]
    value = jax.jit(lambda f: mean_logprob(model, with_floats(f)))
    gradient = jax.jit(jax.grad(lambda f: mean_logprob(model, with_floats(f))))(floats)
    norm = np.sqrt(sum(float(jnp.sum(x**2)) for x in gradient))
    ends = [value([x + s / norm * g for x, g in zip(floats, gradient, strict=True)]) for s in (0.01, -0.01)]
    np.testing.assert_allclose((ends[0] - ends[1]) / 0.02, norm, rtol=0.05)
    two = [jnp.stack([x, x * 2]) for x in floats]
    tokens = jnp.array([[1, 2, 3, 0], [0, 3, 3, 1]])

    def logits(floats: list[Any]) -> jax.Array:
        made = with_floats(floats)
        return model.apply(made, tokens, model.init_cache(made, 2, 8))[0]

    both = jax.jit(jax.vmap(logits))(two)
    np.testing.assert_allclose(both[0], whole(tokens), rtol=1e-4, atol=1e-5)
    assert not np.allclose(both[0], both[1])


def numbers_of(module: nnx.Module) -> list[np.ndarray]:
    leaves = jax.tree.leaves(nnx.state(module))
    return [np.array(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


def test_the_state_of_an_nnx_module_stays_as_it_is() -> None:
    before = numbers_of(NNX)
    model = jd.from_nnx(NNX)
    jax.jit(model.apply)(nnx.state(NNX), ZERO, model.init_cache(nnx.state(NNX), 1, 4))
    for x, y in zip(before, numbers_of(NNX), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not NNX.dropout.deterministic


def test_annotations_of_sharding_stay_with_the_params() -> None:
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    with jax.set_mesh(mesh):
        module = nnx.Sequential(
            nnx.Embed(V, D, rngs=nnx.Rngs(0)), nnx.Linear(D, V, kernel_init=kernel, rngs=nnx.Rngs(1))
        )
        model, state = jd.from_nnx(module), nnx.state(module)
        gradient = jax.jit(jax.grad(lambda params: mean_logprob(model, params)))(state)
    for tree in (state, gradient):
        (spec,) = [x for x in jax.tree.leaves(nnx.get_partition_spec(tree)) if "model" in x]
        assert tuple(spec) == (None, "model")


# ---------------------------------------------------------------- what does not fit
class BatchNorm(linen.Module):
    @linen.compact
    def __call__(self, tokens: jax.Array, train: bool = True) -> jax.Array:
        return linen.Dense(V)(linen.BatchNorm(use_running_average=not train)(linen.Embed(V, D)(tokens)))


class Pair(linen.Module):
    @linen.compact
    def __call__(self, tokens: jax.Array) -> Any:
        return linen.Embed(V, V)(tokens), None


class LastOnly(linen.Module):
    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return linen.Embed(V, V)(tokens)[:, -1]


class OwnCache(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(V, V, rngs=rngs)
        self.last = nnx.Cache(jnp.zeros((1,), jnp.int32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed(tokens)


class Draws(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.rngs = nnx.Embed(V, V, rngs=rngs), rngs

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed(tokens) + jax.random.normal(self.rngs.noise(), (V,))[None, None]


class Counts(NnxLM):
    """Counts its calls beside the cache."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs, decode=True)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return super().__call__(tokens)


class WantsKey(EquinoxLM):
    def __call__(self, tokens: jax.Array, *, key: jax.Array) -> jax.Array:
        return super().__call__(tokens)


class Scalar(EquinoxLM):
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return super().__call__(tokens).mean()


def with_state(module: nnx.Module) -> Any:
    return (lambda: jd.from_nnx(module)), nnx.state(module)


WANTS_KEY, SCALAR = WantsKey(jax.random.key(0)), Scalar(jax.random.key(0))
NORMED = BatchNorm().init(jax.random.key(0), ZERO)
EMBED = Pair().init(jax.random.key(0), ZERO)
BAD: dict[str, tuple[Any, Any, str]] = {
    "no module": (lambda: jd.from_linen(LinenLM), LINEN, "from_linen: module: expected a flax.linen.Module, got"),
    "dropout": (
        lambda: jd.from_linen(LinenLM(), train=True),
        LINEN,
        "from_linen: module: expected one that draws no random numbers .pass deterministic=True",
    ),
    "batch norm": (
        lambda: jd.from_linen(BatchNorm()),
        NORMED,
        "from_linen: module: expected one that changes nothing but its cache .pass use_running_average=True",
    ),
    "inner params": (
        lambda: jd.from_linen(LinenLM()),
        LINEN["params"],
        r'from_linen: params: expected the variables of module.init, \{"params": ...\}, got \[\'attention\'',
    ),
    "other params": (lambda: jd.from_linen(LinenLM()), EMBED, "from_linen: params: expected the variables of this"),
    "a pair": (lambda: jd.from_linen(Pair()), EMBED, r"module: expected floating logits \[1, 1, V\], got tuple"),
    "the last one": (
        lambda: jd.from_linen(LastOnly()),
        EMBED,
        r"expected floating logits \[1, 1, V\], got float32\[1, 5\]",
    ),
    "no cache given": (
        lambda: jd.from_linen(LinenLM(), init_cache=empty_cache),
        LINEN,
        "got an unexpected keyword argument 'lengths'",
    ),
    "nnx: no module": (lambda: jd.from_nnx(NnxLM), STATE, "from_nnx: module: expected a flax.nnx.Module, got"),
    "nnx: no state": (lambda: jd.from_nnx(NNX), {"embed": jnp.ones(3)}, "from_nnx: params: expected nnx.state"),
    "nnx: other state": (
        lambda: jd.from_nnx(NNX),
        nnx.state(OwnCache(nnx.Rngs(0))),
        "from_nnx: params: expected the state of such a module",
    ),
    "nnx: own cache": (*with_state(OwnCache(nnx.Rngs(0))), "expected no cache but that of nnx.MultiHeadAttention"),
    "nnx: draws": (*with_state(Draws(nnx.Rngs(0, noise=1))), "expected one that draws no random numbers, got one"),
    "nnx: counts": (*with_state(Counts(nnx.Rngs(0))), "numbers and changes nothing but its cache, got one"),
    "equinox: no module": (lambda: jd.from_equinox(jnp.tanh), (), "expected an equinox.Module that can be called"),
    "equinox: key": (
        lambda: jd.from_equinox(WANTS_KEY),
        arrays(WANTS_KEY),
        "needs no key and no state, got TypeError.*'key'",
    ),
    "equinox: params": (lambda: jd.from_equinox(EQUINOX), arrays(CELL), "from_equinox: params: expected eqx.filter"),
    "equinox: a number": (
        lambda: jd.from_equinox(SCALAR),
        arrays(SCALAR),
        r"from_equinox: module: expected floating logits \[1, 1, V\], got float32\[1\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_with_the_reason_before_any_compute(name: str) -> None:
    make, params, message = BAD[name]
    with count_compilations() as count, pytest.raises((ValueError, TypeError), match=message):
        jd.generate(make(), params, PROMPTS, settings=jd.Settings(max_new_tokens=2, temperature=0))
    assert int(count) == 0


def test_batch_statistics_that_are_only_read_are_params() -> None:
    model = jd.from_linen(BatchNorm(), train=False)
    logits = jax.jit(model.apply)(NORMED, ZERO, model.init_cache(NORMED, 1, 4))[0]
    np.testing.assert_allclose(logits, BatchNorm().apply(NORMED, ZERO, train=False), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("library", "extra", "make"),
    [("flax.linen", "flax", jd.from_linen), ("flax.nnx", "flax", jd.from_nnx), ("equinox", "equinox", jd.from_equinox)],
)
def test_a_library_that_is_missing_is_named(
    library: str, extra: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{make.__name__} needs {library}: pip install 'jaxdecode\[{extra}\]'"):
        make(None)
