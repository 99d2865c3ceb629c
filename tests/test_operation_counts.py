"""The work a step does, counted in the traced functions and read from the compiled program; no timings."""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from programs import large_instructions, loop_instructions, multiplications

import jaxdecode as jd
from jaxdecode import generation, kvcache, linear
from jaxdecode.models.transformer import TransformerConfig, init_params, param_shapes, transformer


class Plain(NamedTuple):
    """The model of S7.5: L layers of width d, one head per KV head, a plain MLP of two matrices, ReLU, no norms."""

    layers: int
    d: int
    f: int
    heads: int

    def shapes(self) -> list[dict[str, Any]]:
        d, f = self.d, self.f
        shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "out": (d, d), "up": (f, d), "down": (d, f)}
        return [{k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}] * self.layers

    def cache(self, rows: int, capacity: int) -> kvcache.KVCache:
        return kvcache.create(self.layers, rows, self.heads, self.d // self.heads, capacity)

    def apply(self, params: Any, x: jax.Array, cache: kvcache.KVCache) -> tuple[jax.Array, kvcache.KVCache]:
        """x[B,S,d], the blocks alone."""
        rows, size, _ = x.shape
        plan, layers = kvcache.plan(cache, size), []
        flat = x.reshape(rows * size, self.d).T

        def split(y: jax.Array) -> jax.Array:  # [d, B*S] -> [B,S,K,h]
            return y.T.reshape(rows, size, self.heads, -1)

        for i, p in enumerate(params):
            q, k, v = (split(linear.matmul(p[n], flat)) for n in "qkv")
            q = q.transpose(0, 2, 1, 3)[:, :, None]
            out, layer = kvcache.extend(q, k, v, kvcache.one_layer(cache, i), plan)
            layers.append(layer)
            out = out[:, :, 0].transpose(0, 2, 1, 3).reshape(rows * size, self.d).T
            flat = flat + linear.matmul(p["out"], out)
            flat = flat + linear.matmul(p["down"], jax.nn.relu(linear.matmul(p["up"], flat)))
        return flat.T.reshape(rows, size, self.d), kvcache.advance(cache, layers, plan)

    def cached(self, t: int) -> int:
        """Counted: one token at position t (from 1), over a cache of exactly t slots, so attention reads exactly t."""
        return self._count(1, t)

    def uncached(self, t: int) -> int:
        """Counted: all t positions again."""
        return self._count(t, t)

    def _count(self, size: int, capacity: int) -> int:
        x = jax.ShapeDtypeStruct((1, size, self.d), jnp.float32)
        cache = jax.eval_shape(lambda: self.cache(1, capacity))
        return multiplications(jax.make_jaxpr(self.apply)(self.shapes(), x, cache).jaxpr)


SMALL = Plain(layers=2, d=32, f=128, heads=4)


def test_the_plain_model_is_right_with_a_cache() -> None:
    """What is counted computes: step by step, in one pass, and after a longer prefix, the same activations."""
    keys = jax.random.split(jax.random.key(0), 7)
    params = [
        {n: jax.random.normal(k, s.shape) / 6 for k, (n, s) in zip(keys, shapes.items(), strict=False)}
        for shapes in SMALL.shapes()
    ]
    x, apply = jax.random.normal(keys[6], (2, 6, 32)), jax.jit(SMALL.apply)
    whole, _ = apply(params, x, SMALL.cache(2, 6))
    cache, steps = SMALL.cache(2, 6), []
    for t in range(6):
        out, cache = apply(params, x[:, t : t + 1], cache)
        steps.append(out)
    np.testing.assert_allclose(jnp.concatenate(steps, 1), whole, rtol=2e-5, atol=2e-5)
    one = SMALL._replace(layers=1)
    q, k, v = (np.float64(x[0] @ params[0][n].T).reshape(6, 4, 8) for n in "qkv")
    scores = np.einsum("shi,thi->hst", q, k) / math.sqrt(8) + np.where(np.tri(6), 0, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    y = np.float64(x[0]) + np.einsum("hst,thi->shi", weights, v).reshape(6, 32) @ np.float64(params[0]["out"]).T
    y = y + np.maximum(y @ np.float64(params[0]["up"]).T, 0) @ np.float64(params[0]["down"]).T
    np.testing.assert_allclose(jax.jit(one.apply)(params[:1], x, one.cache(2, 6))[0][0], y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("n", "with_cache", "without"),
    [(8, 201_216, 910_848), (16, 410_624, 3_533_824), (32, 854_016, 14_440_448), (64, 1_839_104, 62_566_400)],
)
def test_S7_5_the_table_of_counts(n: int, with_cache: int, without: int) -> None:
    """Every t up to n is traced and counted; the sums are the closed forms."""
    d, f, layers = 32, 128, 2
    steps = [SMALL.cached(t) for t in range(1, n + 1)]
    passes = [SMALL.uncached(t) for t in range(1, n + 1)]
    for t in range(1, n + 1):
        assert steps[t - 1] == layers * (2 * t * d + 4 * d * d + 2 * d * f)
        assert passes[t - 1] == layers * (2 * t * t * d + t * (4 * d * d + 2 * d * f))
    linear_part = 4 * d * d + 2 * d * f
    assert sum(steps) == layers * (d * n * (n + 1) + n * linear_part) == with_cache
    quadratic = d * n * (n + 1) * (2 * n + 1) // 3
    assert sum(passes) == layers * (quadratic + n * (n + 1) // 2 * linear_part) == without
    if n == 64:
        assert without / with_cache == pytest.approx(34.02, abs=0.005)


def test_S7_5_a_thousand_positions_of_width_1000() -> None:
    """Counted at some t (the last block ends at the capacity, so all of them are t slots), then summed."""
    n = d = 1000
    model, linear_part = Plain(layers=1, d=d, f=4 * d, heads=10), 12 * d * d
    for t in (1, 128, 129, 500, n):
        assert model.cached(t) == 2 * t * d + linear_part
        assert model.uncached(t) == 2 * t * t * d + t * linear_part
    steps = sum(2 * t * d + linear_part for t in range(1, n + 1))
    passes = sum(2 * t * t * d + t * linear_part for t in range(1, n + 1))
    assert steps == d * n * (n + 1) + 12 * n * d * d == pytest.approx(1.30e10, rel=2e-3)
    assert passes == pytest.approx(6.67e12, rel=1e-3)
    assert passes / steps == pytest.approx(513, abs=0.5)
    attention, rest = d * (12 * d) * (12 * d + 1), 12 * (12 * d) * d * d
    assert attention / rest == pytest.approx(1, abs=1e-3), "attention passes the linear part near n = 12 d"


def test_S7_5_all_cached_steps_cost_about_one_full_pass() -> None:
    steps, one = sum(SMALL.cached(t) for t in range(1, 65)), SMALL.uncached(64)
    assert one - steps == 2 * 32 * 64 * 63  # the masked triangle
    assert steps == pytest.approx(one, rel=0.15)


def test_S7_6_one_layer_at_1024() -> None:
    model = Plain(layers=1, d=768, f=4 * 768, heads=12)
    assert model.cached(1024) == 8_650_752
    assert 2 * 1024 * 768 / model.cached(1024) == pytest.approx(0.18, abs=0.005)


BASE: dict[str, Any] = {
    "vocab_size": 61,
    "d_model": 32,
    "n_layers": 2,
    "head_dim": 8,
    "d_mlp": 40,
    "context_length": 8192,
}
CONFIGS = [
    TransformerConfig(**BASE, n_heads=4, n_kv_heads=2),
    TransformerConfig(**BASE, n_heads=6, n_kv_heads=1, tied=False),
    TransformerConfig(**BASE, n_heads=4, n_kv_heads=4),
]


def block(config: TransformerConfig, t: int) -> int:
    """S7.5, one layer and one token over t entries: 2tHh + 2dHh + 2dKh + gdf with a gated MLP, g = 3."""
    d, heads, kv, h = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    return 2 * t * heads * h + 2 * d * heads * h + 2 * d * kv * h + 3 * d * config.d_mlp


def traced(config: TransformerConfig, rows: int, size: int, capacity: int, heads_at: int | None = 0) -> core.Jaxpr:
    """The jaxpr of one call of ``size`` tokens; the head runs at ``heads_at`` positions a row (None: all)."""
    model = transformer(config)
    params = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
    cache = jax.eval_shape(lambda: kvcache.create(config.n_layers, rows, config.n_kv_heads, config.head_dim, capacity))
    tokens = jax.ShapeDtypeStruct((rows, size), jnp.int32)
    at = None if heads_at is None else jax.ShapeDtypeStruct((rows, heads_at), jnp.int32)
    return jax.make_jaxpr(lambda p, t, c, a: model.apply(p, t, c, logits_at=a))(params, tokens, cache, at).jaxpr


@pytest.mark.parametrize("config", CONFIGS, ids=["grouped", "one_kv", "many"])
def test_S7_5_the_transformer_does_no_more_than_the_formula(config: TransformerConfig) -> None:
    """Two rows, so twice; capacity t, so attention over exactly t entries; head 0, 1 or all positions."""
    layers, head = config.n_layers, config.vocab_size * config.d_model
    for t in (1, 7, 128, 300):
        assert multiplications(traced(config, 2, 1, t)) == 2 * layers * block(config, t)
        assert multiplications(traced(config, 2, 1, t, 1)) == 2 * (layers * block(config, t) + head)
        assert multiplications(traced(config, 2, t, t)) == 2 * t * layers * block(config, t)
    assert multiplications(traced(config, 2, 7, 7, None)) == 2 * 7 * (layers * block(config, 7) + head)
    assert multiplications(traced(config, 2, 7, 7, 1)) == 2 * (7 * layers * block(config, 7) + head)


def held(t: int) -> int:
    """Slots of the blocks (128, 128, 256, 512, ...) that hold t tokens."""
    return 128 if t <= 128 else 1 << (t - 1).bit_length()


def test_S7_7_attention_reads_the_blocks_that_some_row_has_reached_and_no_others() -> None:
    """4096 slots allocated: at t tokens a step costs what a cache of the blocks up to t would."""
    config = CONFIGS[0]
    jaxpr = traced(config, 2, 1, 4096)
    cache = kvcache.create(1, 3, 1, 2, 4096)
    reach = jax.jit(lambda length, new: kvcache.plan(kvcache.KVCache(cache.layers, length), 3, new).reach)
    for longest in (0, 1, 125, 126, 127, 128, 129, 253, 254, 255, 256, 257, 1021, 1024, 1025, 4093, 4094, 4096):
        for new in (0, 1, 3):
            after = min(longest + new, 4096)
            got = int(reach(np.array([0, longest, 5], np.int32), np.array([1, new, 0], np.int32)))
            assert got == max(after, 5)
            assert multiplications(jaxpr, got) == 2 * 2 * block(config, held(after))


def test_S7_7_n_steps_follow_S7_5_up_to_block_rounding_whatever_is_allocated() -> None:
    """The cost of steps 1 .. 600 by the blocks really read: equal for 1024 and 8192 slots, within the rounding."""
    config, n = CONFIGS[0], 600
    costs = [
        sum(multiplications(jaxpr, t) for t in range(1, n + 1))
        for jaxpr in (traced(config, 1, 1, capacity) for capacity in (1024, 8192))
    ]
    exact = sum(2 * block(config, t) for t in range(1, n + 1))
    assert costs[0] == costs[1]
    rounding = 2 * 2 * 32 * sum(max(128, 2 * t) - t for t in range(1, n + 1))
    assert exact <= costs[0] <= exact + rounding


def compiled_flops(config: TransformerConfig, capacity: int) -> float:
    model, cache = transformer(config), kvcache.create(config.n_layers, 2, config.n_kv_heads, config.head_dim, capacity)
    shapes = param_shapes(config)
    params = jax.tree.map(
        lambda s: jnp.zeros(s), shapes, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int)
    )
    step = jax.jit(lambda p, t, c: model.apply(p, t, c, logits_at=t))
    return step.lower(params, jnp.zeros((2, 1), jnp.int32), cache).compile().cost_analysis()["flops"]


def test_S7_7_the_compilers_own_count_follows_t() -> None:
    """Programs of one branch: 2 operations a multiplication, the rest (softmax, norms, masks) a small part."""
    config = CONFIGS[0]
    counted = {t: 2 * (2 * block(config, t) + 61 * 32) for t in (32, 64, 128)}
    flops = {t: compiled_flops(config, t) for t in counted}
    for t in counted:
        assert 2 * counted[t] <= flops[t] <= 2.6 * counted[t]
    assert flops[128] - flops[64] == pytest.approx(2 * (flops[64] - flops[32]), rel=0.15)


def state_of(config: TransformerConfig, slots: int, decoder: Any = None) -> tuple[jd.Decoder, Any, Any]:
    """A greedy decoder, params, and the state of two ragged prompts in a cache of ``slots``, 8 tokens to go."""
    params = init_params(config, jax.random.key(0))
    chosen = jd.Settings(max_new_tokens=8, temperature=0.0)
    prompts = [[1, 2, 3], [4, 5]]
    decoder, state = generation.start(
        transformer(config), params, prompts, settings=chosen, cache_len=slots, decoder=decoder
    )
    return decoder, params, state


def test_S7_8_a_step_is_one_row_and_a_prefill_runs_no_head() -> None:
    """Counted in the decoder's own functions: the prompt but its last token in one pass, then one token a step."""
    config, model = CONFIGS[0], transformer(CONFIGS[0])
    decoder, params, state = state_of(config, 100, jd.greedy(model))
    per_token = config.n_layers * block(config, 100)
    step = jax.make_jaxpr(decoder.step)(params, state).jaxpr
    assert multiplications(step) == 2 * (per_token + config.vocab_size * config.d_model)

    prompt = jd.Prompt(np.ones((2, 9), np.int32), np.array([9, 4], np.int32), np.zeros(2, np.int32))
    rules = jd.Settings(max_new_tokens=91, temperature=0.0).rules(2, config.vocab_size)
    keys = jax.random.split(jax.random.key(0), 2)
    init = jax.make_jaxpr(lambda p: decoder.init(p, keys, prompt, rules, max_new_tokens=91))(params).jaxpr
    assert multiplications(init) == 2 * 8 * per_token


def test_no_head_means_no_head_in_the_compiled_program() -> None:
    """With logits_at [B,0] nothing of the vocabulary's size is computed but the embedding's rows."""
    config = CONFIGS[1]
    model, params = transformer(config), init_params(config, jax.random.key(0))
    cache = model.init_cache(params, 2, 8)

    def products(at: Any) -> list[str]:
        call = jax.jit(lambda p, t, c, a: model.apply(p, t, c, logits_at=a))
        text = call.lower(params, np.ones((2, 4), np.int32), cache, at).compile().as_text()
        assert " dot(" in text
        return [
            line for line in text.splitlines() if " dot(" in line and "61" in re.findall(r"[\[,](\d+)(?=[,\]])", line)
        ]

    assert products(np.zeros((2, 1), np.int32))
    assert not products(np.zeros((2, 0), np.int32))


SLOTS = 2048


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the program of XLA:CPU")
@pytest.mark.parametrize("loop", [jd.run, jd.run_until_done], ids=["run", "run_until_done"])
def test_S7_7_the_compiled_loop_never_copies_the_cache(loop: Any) -> None:
    """Neither the loop nor a branch of attention copies, transposes or rebuilds an array of the cache's size."""
    decoder, params, state = state_of(CONFIGS[0], SLOTS)
    steps = (8,) if loop is jd.run else ()
    compiled = jax.jit(lambda p, s: loop(decoder, p, s, *steps)).lower(params, state).compile()
    one = state.cache.layers[0][-1].k  # the largest block
    hlo = compiled.as_text()
    assert any(f"[{','.join(map(str, one.shape))}]" in line for line in loop_instructions(hlo))
    assert large_instructions(hlo, one.size) == []
    cache = sum(x.nbytes for x in jax.tree.leaves(state.cache))
    assert compiled.memory_analysis().temp_size_in_bytes < cache / 2, "scratch for one branch at most"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the program of XLA:CPU")
def test_the_reader_of_compiled_loops_would_notice() -> None:
    def body(_: Any, x: jax.Array) -> jax.Array:
        return jnp.cumsum(x[::-1].T, axis=0) @ x

    hlo = jax.jit(lambda x: jax.lax.fori_loop(0, 9, body, x)).lower(jnp.ones((64, 64))).compile().as_text()
    assert large_instructions(hlo, 64 * 64)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads the program of XLA:CPU")
def test_S7_7_a_donated_state_is_updated_in_place() -> None:
    """What ``stream`` runs: every array of the cache is aliased, and the scratch stays below half of it."""
    decoder, params, state = state_of(CONFIGS[0], SLOTS)
    step = jax.jit(decoder.step, donate_argnums=1).lower(params, state).compile()
    memory, cache = step.memory_analysis(), sum(x.nbytes for x in jax.tree.leaves(state.cache))
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < cache / 2
