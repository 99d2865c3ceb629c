"""`jaxdecode inspect`: counts against the formulas of S7.5 and S7.6, and against the params themselves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny_gguf
from cli_tools import Result, assert_bad, call

import jaxdecode as jd
from jaxdecode.cli import batch_memory, inspection
from jaxdecode.engine import programs
from jaxdecode.engine.programs import Plan
from jaxdecode.engine.requests import one_row

MEMORY = 10**9
FREE_BYTES = inspection.free_bytes


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXDECODE_CACHE", str(folder / "cache"))
        tiny = tiny_gguf.tiny(tied=request.param)
        tiny.fields["llama.context_length"] = 2048
        yield str(tiny_gguf.write(folder / "tiny.gguf", tiny))


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "free_bytes", lambda: MEMORY)


def inspect(*arguments: str) -> dict[str, Any]:
    result = call("inspect", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("\n") == 1
    return json.loads(result.out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_those_that_load(model: str, dtype: str) -> None:
    told, loaded = inspect(model, "--dtype", dtype), jd.load(model, dtype=dtype)
    params = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(loaded.params):
        name = ".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path)
        params[name] = (list(leaf.shape), leaf.dtype.name, leaf.nbytes)
    assert {p["name"]: (p["shape"], p["dtype"], p["bytes"]) for p in told["parameter_table"]} == params
    assert told["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
    assert told["parameter_bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    assert told["config"] == json.loads(json.dumps(vars(loaded.config)))
    assert told["files"] == [{"file": "tiny.gguf", "bytes": Path(model).stat().st_size}]


def test_no_weight_is_read_and_nothing_kept(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jd, "load", None)
    inspect(model)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"cache_dtype": "int8"}, {"cache_dtype": "int4"}]
)
def test_S7_6_cache_bytes_are_those_of_a_cache(model: str, options: Any) -> None:
    loaded = jd.load(model, **options)
    cache = loaded.model.init_cache(loaded.params, 1, 128)
    held = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert inspect(model, *words)["cache_bytes_per_token"] == held // 128


def test_S7_5_multiplications_of_a_token(model: str) -> None:
    told = inspect(model)["multiplications_per_token"]
    d, f, h = tiny_gguf.D, tiny_gguf.MLP, tiny_gguf.HEAD_DIM
    heads, kv, vocab = tiny_gguf.HEADS, tiny_gguf.KV_HEADS, len(tiny_gguf.TOKENS)
    assert [row["position"] for row in told] == [1, 128, 1024, 2048]
    for row in told:
        attention = 2 * row["position"] * heads * h
        layer = attention + 2 * d * heads * h + 2 * d * kv * h + 3 * d * f
        assert row["attention"] == tiny_gguf.LAYERS * attention
        assert row["layers"] == tiny_gguf.LAYERS * layer
        assert row["head"] == d * vocab
        assert row["all"] == row["layers"] + row["head"]


def test_what_fits_fits_and_one_more_does_not(model: str) -> None:
    told = inspect(model)
    memory, per_token = told["memory"], told["cache_bytes_per_token"]
    assert memory["free_bytes"] == MEMORY
    assert memory["left_bytes"] == MEMORY - told["parameter_bytes"]
    assert [row["context"] for row in memory["fits"]] == [2048, 1024, 512, 256, 128]
    for row in memory["fits"]:
        assert row["bytes_per_row"] > row["context"] * per_token
        assert row["largest_batch"] * row["bytes_per_row"] <= memory["left_bytes"]
        assert (row["largest_batch"] + 1) * row["bytes_per_row"] > memory["left_bytes"]


@pytest.mark.parametrize("free", [None, 10])
def test_little_or_unknown_memory(model: str, monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    monkeypatch.setattr(inspection, "free_bytes", lambda: free)
    memory = inspect(model)["memory"]
    assert memory is None if free is None else {row["largest_batch"] for row in memory["fits"]} == {0}
    assert call("inspect", model).code == 0


def test_text_says_the_same_with_equal_layers_on_one_line(model: str) -> None:
    told, result = inspect(model), call("inspect", model)
    assert (result.code, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()]
    assert ["n_layers", "2"] in lines
    assert f"{told['parameters']:,} parameters" in result.out
    assert f"cache: {told['cache_bytes_per_token']:,} bytes per token" in result.out
    (qkv,) = [line for line in lines if line[:1] == ["layers.0-1.qkv"]]
    total = sum(p["bytes"] for p in told["parameter_table"] if p["name"].endswith("qkv"))
    assert qkv[1:] == ["2", "x", "[128,", "64]", "float32", f"{total / 1000:.1f}", "kB"]
    for row in told["multiplications_per_token"]:
        assert [f"{n:,}" for n in row.values()] in lines
    assert [f"{2048:,}"] == [
        line[0] for line in lines if line[-1:] == [f"{told['memory']['fits'][0]['largest_batch']:,}"]
    ]


def test_the_toy_is_a_table() -> None:
    told = inspect("toy")
    assert told["parameter_table"] == [
        {"name": "table", "shape": [257, 257], "dtype": "float32", "bytes": 257 * 257 * 4}
    ]
    assert (told["parameters"], told["cache_bytes_per_token"], told["memory"]) == (257 * 257, 0, None)
    assert "table" in call("inspect", "toy").out


def test_free_memory_is_that_of_this_machine() -> None:
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < (FREE_BYTES() or 0) <= everything


def test_bytes_for_a_reader() -> None:
    assert [inspection.in_bytes(n) for n in (999, 1000, 538_060_032)] == ["999 B", "1.0 kB", "538.1 MB"]


def test_memory_of_a_batch_run_is_that_of_the_engine(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_memory, "base_bytes", lambda: 10**8)
    options = ("--slots", "5", "--longest-prompt", "300", "--max-new-tokens", "30")
    told, loaded = inspect(model, *options), jd.load(model)
    batch = told["batch"]
    settings = jd.Settings(max_new_tokens=30)
    plan = Plan(jd.sample(loaded.model), 5, batch["tokens_per_row"] - 32, 32, 8, 32, 2)
    rules = one_row(settings, loaded.config.vocab_size)
    state = jax.eval_shape(lambda: programs.init(plan, loaded.params, rules))
    held = sum(x.size * 4 for x in jax.tree.leaves((state.rows.cache.layers, state.staged.layers, state.kept.layers)))
    assert (batch["rows"], batch["tokens_per_row"], batch["cache_bytes"]) == (16, 512, held)
    assert batch["weight_bytes"] == told["parameter_bytes"]
    names = ("weight", "cache", "work", "program", "base")
    assert batch["bytes"] == sum(batch[f"{name}_bytes"] for name in names)
    lines = [line.split() for line in call("inspect", model, *options).out.splitlines()]
    assert ["all", *inspection.in_bytes(batch["bytes"]).split()] in lines
    assert "batch" not in inspect(model)
    assert_bad(call("inspect", model, "--slots", "1", "--longest-prompt", "3000"), "context of 2048")


@pytest.mark.parametrize(
    ("arguments", "about"),
    [(["toys"], "toys"), (["nowhere.gguf"], "nowhere.gguf"), ([], "model"), (["toy", "--dtype", "int3"], "--dtype")],
)
def test_bad_input(arguments: list[str], about: str) -> None:
    result: Result = call("inspect", *arguments)
    assert_bad(result._replace(err=result.err.lower()), about)


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    assert_bad(call("inspect", str(path)), "bad.gguf")
