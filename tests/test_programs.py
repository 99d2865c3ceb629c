"""Programs as objects: new numbers compile nothing; export; more than one device."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdecode import Model, Settings, generate, greedy, sample, stream
from jaxdecode.generation import start
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import count_compilations, markov_model

V, B, N = 6, 3, 5
MODEL = markov_model()
TABLE = np.random.default_rng(1).normal(size=(V, V)).astype(np.float32)
PROMPTS = [[1], [2, 3, 0], [4, 5]]
ARRAY, LENGTHS = np.array([[1, 0, 0], [2, 3, 0], [4, 5, 0]], np.int32), np.array([1, 3, 2], np.int32)
KEY = jax.random.key(5)


def one_of_each(i: int) -> dict[str, Any]:
    """Settings as Python numbers, NumPy scalars, JAX scalars, or arrays [B], with new values each time."""
    kinds: list[tuple[Any, Any]] = [
        (lambda x: x, lambda x: x),
        (np.float64, np.int64),
        (np.float32, np.int32),
        (jnp.float32, jnp.int32),
        (lambda x: [x] * B, lambda x: [x] * B),
        (lambda x: np.full(B, x, np.float64), lambda x: np.full(B, x, np.int64)),
        (lambda x: jnp.full((B,), x, jnp.float32), lambda x: jnp.full((B,), x, jnp.int32)),
    ]
    real, whole = kinds[i]
    return {
        "temperature": real(0.5 + 0.1 * i),
        "top_k": whole(1 + i % 4),
        "top_p": real(0.9 - 0.05 * i),
        "min_p": real(0.01 * i),
    }


def test_new_numbers_keys_and_prompts_of_one_class_compile_nothing() -> None:
    prompts: list[Any] = [
        [[1], [2] * 17, [3]],
        [[1, 2], [3], [4]],
        [[0] * 9, [5, 4, 3], [2] * 16],
        np.full((B, 17), 3),
        np.full((B, 2), 4, np.int8),
        jnp.full((B, 12), 1),
        [np.array([1, 2, 3])] * B,
    ]
    keys = [jax.random.key(0), jax.random.key(1), *(jax.random.split(jax.random.key(i), B) for i in range(5))]
    ends = [[2], (3,), np.array([4]), [[1], [2], [-1]], [0], np.array([[5]] * B), 1]
    limits = [N, [N, 1, 0], np.array([0, N, 2]), N, np.int64(N), N, [N] * B]
    fields = [one_of_each(i) for i in range(7)]

    def call(i: int) -> list[list[int]]:
        settings = Settings(max_new_tokens=limits[i], eos=ends[i], stop=[[i % V, 1]], **fields[i])
        return generate(MODEL, TABLE, prompts[i], key=keys[i], settings=settings).to_lists()

    jax.clear_caches()  # nothing compiled by other tests may help
    call(0)
    with count_compilations() as compiled:
        outputs = [call(i) for i in range(7)]
    assert int(compiled) == 0
    assert len({str(o) for o in outputs}) > 1


def test_a_call_that_repeats_its_shapes_asks_the_model_nothing() -> None:
    """Not even for shapes: of 30 layers that is a sixth of a second of Python before anything runs."""
    asked = []

    def init_cache(*args: Any) -> Any:
        asked.append("init_cache")
        return MODEL.init_cache(*args)

    def apply(*args: Any, **more: Any) -> Any:
        asked.append("apply")
        return MODEL.apply(*args, **more)

    model = Model(init_cache, apply)
    for prompts in (PROMPTS, [[2], [0, 3, 0], [5, 1]]):
        before = len(asked)
        settings = Settings(max_new_tokens=N, temperature=0.0)
        generate(model, TABLE, prompts, settings=settings)
        decoder, state = start(model, TABLE, prompts, settings=settings)
        assert len(list(stream(decoder, TABLE, state))) == N
        assert prompts is PROMPTS or len(asked) == before


def test_a_stream_with_new_numbers_compiles_nothing() -> None:
    def text(tau: Any, seed: int) -> list[int]:
        settings = Settings(max_new_tokens=N, temperature=tau)
        decoder, state = start(MODEL, TABLE, PROMPTS, key=jax.random.key(seed), settings=settings)
        return [int(info.tokens[0, 0]) for info in stream(decoder, TABLE, state)]

    jax.clear_caches()
    text(1.0, 0)
    with count_compilations() as compiled:
        outputs = [text(tau, i) for i, tau in enumerate([0.5, np.float32(3), np.array([9.0] * B)])]
    assert int(compiled) == 0
    assert len({tuple(o) for o in outputs}) > 1


def test_equal_arguments_give_the_same_decoder() -> None:
    """Another object would be another program."""
    for factory in (greedy, sample):
        assert factory(MODEL) is factory(MODEL) is factory(MODEL, top_logprobs=0) is factory(markov_model())
        assert factory(MODEL, top_logprobs=2) is factory(MODEL, top_logprobs=2) is not factory(MODEL)
    settings = Settings(max_new_tokens=2, temperature=0)
    generate(MODEL, TABLE, PROMPTS, settings=settings)
    with count_compilations() as compiled:
        generate(MODEL, TABLE, PROMPTS, settings=settings, decoder=sample(MODEL))
    assert int(compiled) == 0


def test_the_counter_would_notice() -> None:
    settings = Settings(max_new_tokens=0, temperature=0)
    with count_compilations() as compiled:
        generate(MODEL, TABLE, PROMPTS, settings=settings)
    assert int(compiled) >= 1


def test_export_round_trip() -> None:
    """A program for three platforms, without Python; its arguments are plain arrays."""
    settings = Settings(max_new_tokens=N, top_p=0.9, temperature=[1.0, 0.0, 2.0])

    def plain(params: Any, tokens: Any, lengths: Any, key: Any) -> Any:
        out = generate(MODEL, params, tokens, lengths=lengths, key=jax.random.wrap_key_data(key), settings=settings)
        return out.tokens, out.processed_logprob, out.finish

    arguments = (TABLE, ARRAY, LENGTHS, jax.random.key_data(KEY))
    exported = jax.export.export(jax.jit(plain), platforms=["cpu", "cuda", "tpu"])(*arguments)
    if importlib.util.find_spec("flatbuffers"):
        exported = jax.export.deserialize(exported.serialize())
    for got, expected in zip(exported.call(*arguments), plain(*arguments), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


TWO_DEVICES = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxdecode import Model, Settings, generate
from jaxdecode.testing import markov_model

assert len(jax.devices()) == 2
model, table = markov_model(), np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)
tokens = np.random.default_rng(2).integers(0, 6, (4, 3)).astype(np.int32)
lengths, ids = np.array([1, 3, 2, 1], np.int32), np.arange(4, dtype=np.uint32)
tau, key = np.array([1, 0, 2, 1], np.float32), jax.random.key(3)

@jax.jit
def decode(table, tokens, lengths, ids, tau, key):
    settings = Settings(max_new_tokens=5, temperature=tau, top_p=0.9, eos=[2])
    return generate(model, table, tokens, lengths=lengths, row_ids=ids, key=key, settings=settings)

expected = decode(table, tokens, lengths, ids, tau, key)
mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda x: jax.device_put(x, NamedSharding(mesh, P("rows")))
everywhere = jax.device_put((table, key), NamedSharding(mesh, P()))
sharded = decode(everywhere[0], put(tokens), put(lengths), put(ids), put(tau), everywhere[1])
specs = (P(), P("rows"), P("rows"), P("rows"), P("rows"), P())
by_hand = jax.jit(jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=P("rows"), check_vma=False))
by_hand = by_hand(table, tokens, lengths, ids, tau, key)
assert len(expected.to_lists()[0]) > 0
for name, other in (("sharded batch", sharded), ("shard_map", by_hand)):
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=name)
    assert len(other.tokens.sharding.device_set) == 2, name
print("same")
"""


def test_rows_on_two_devices() -> None:
    """A sharded batch under jit, and shard_map, where each device stops by itself."""
    root = Path(__file__).parents[1]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", TWO_DEVICES]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "same", done.stderr[-2000:]


@pytest.mark.parametrize("batch", [2, 4])
def test_the_head_writes_its_product_as_it_comes(batch: int) -> None:
    """Drawn into the product, the transposition of the logits makes it ten times slower for 2 to 7 rows."""
    config = TransformerConfig(1000, 64, 1, 2, 2, 32, 64, 64)
    model, params = transformer(config), init_params(config, jax.random.key(0))
    tokens, cache = np.zeros((batch, 1), np.int32), model.init_cache(params, batch, 16)
    hlo = jax.jit(model.apply).lower(params, tokens, cache).compile().as_text()
    products = [line for line in hlo.splitlines() if re.search(r" dot\(", line) and "1000" in line.split(" dot(")[0]]
    assert products
    assert all(f"f32[1000,{batch}]" in line.split(" dot(")[0] for line in products)
