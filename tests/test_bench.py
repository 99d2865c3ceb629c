"""`jaxdecode bench`: the table is complete and its counts are those of the formulas; no time is held to anything."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gguf
from cli_tools import ROOT, assert_bad, call

import jaxdecode as jd
from jaxdecode import benchmark
from jaxdecode.benchmark import Case, Machine, report, work
from jaxdecode.benchmark.texts import text_ids
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer

TIED = TransformerConfig(
    vocab_size=61, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_mlp=40, context_length=64
)
UNTIED = TransformerConfig(**{**vars(TIED), "tied": False, "n_kv_heads": 1})
CASES = [Case("top_p", 3, 5, 4), Case("greedy", 3, 5, 4), Case("greedy", 2, 1, 7, cache_len=48)]
TIMES = {"step_seconds", "first_token_seconds", "whole_seconds", "compile_seconds"}
MAY_BE_NONE = {"tokens_per_second", "step_seconds", "prefill_seconds", "prefill_tokens_per_second", "floor_fraction"}
MAY_BE_NONE |= {"times_greedy"}


@pytest.fixture(autouse=True)
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the bandwidth need not be exact here."""
    monkeypatch.setattr(report, "LEAST_READ", 1 << 20)


def loaded(config: TransformerConfig, dtype: Any = jnp.float32) -> jd.Loaded:
    params = init_params(config, jax.random.key(0), dtype)
    return jd.Loaded(transformer(config), params, None, config)  # type: ignore[arg-type]  # no text is needed


def block(config: TransformerConfig, t: int) -> int:
    """S7.5: multiplications of a layer at position t, gated MLP."""
    d, heads, kv, h = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    return 2 * t * heads * h + 2 * d * heads * h + 2 * d * kv * h + 3 * d * config.d_mlp


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_S7_5_S7_6_a_row_holds_the_counts_of_its_average_step(config: TransformerConfig) -> None:
    """Summed over the steps one by one, each over all the tokens that it attends to."""
    model = loaded(config)
    found = benchmark.bench(lambda scheme: model, CASES[1:], runs=1)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    read = held - (0 if config.tied else model.params["embed"].nbytes)
    for case, row in zip(CASES[1:], found["rows"], strict=True):
        positions = range(case.prompt, case.prompt + case.new)
        layers = sum(config.n_layers * block(config, t) for t in positions)
        head = case.new * config.d_model * config.vocab_size
        assert row["multiplications_per_step"] * case.new == case.batch * (layers + head)
        per_token = 2 * config.n_layers * config.n_kv_heads * config.head_dim * 4
        assert row["cache_bytes_per_step"] * case.new == case.batch * sum(positions) * per_token
        assert row["weight_bytes_per_step"] == read
        assert row["bytes_per_step"] == read + row["cache_bytes_per_step"]
        assert row["param_bytes"] == held
        assert row["cache_allocated_bytes"] == case.batch * (row["cache_len"] * per_token + 4)  # and the lengths
    assert found["rows"][1]["cache_len"] == 48


def test_the_table_is_complete_and_in_the_order_asked_for() -> None:
    model, schemes, said = loaded(TIED), [], []
    found = benchmark.bench(
        lambda scheme: schemes.append(scheme) or model,
        CASES,
        runs=2,
        floor=True,
        progress=lambda text, fraction: said.append((text, fraction)),
    )
    assert schemes == [None]
    assert [(row["mode"], row["batch"], row["prompt"], row["new"]) for row in found["rows"]] == [c[:4] for c in CASES]
    for row in found["rows"]:
        assert all(row[name] > 0 for name in TIMES - MAY_BE_NONE)
        assert {name for name, value in row.items() if value is None} <= MAY_BE_NONE | {"numpy_fraction"}
        assert row["products"] == "float32"
        slowest = max(
            row["bytes_per_step"] / row["read_bandwidth"], row["multiplications_per_step"] / row["multiply_rate"]
        )
        assert row["floor_seconds"] == slowest
        if (step := row["step_seconds"]) is not None:
            assert row["tokens_per_second"] == row["batch"] / step
            assert row["floor_fraction"] == slowest / step
            assert row["numpy_fraction"] == row["numpy_seconds"] / step
    assert found["rows"][2]["prefill_tokens_per_second"] is None, "one prompt token: nothing is prefilled"
    assert [fraction for _, fraction in said] == sorted(fraction for _, fraction in said)
    assert {"top_p, 3 x 5 + 4: compiling", "greedy, 2 x 1 + 7: run 2 of 2"} <= {text for text, _ in said}


def test_one_program_makes_all_tokens_whatever_the_model_would_end_with() -> None:
    """Markov params that would end every row at once, if the case had end ids."""
    case = Case("greedy", 2, 3, 5)
    times = benchmark.measure(jd.testing.markov_model(), jnp.eye(7), 7, case, runs=2)
    assert times.cache_len >= 8
    with jd.testing.count_compilations() as count:
        again = benchmark.measure(jd.testing.markov_model(), jnp.eye(7), 7, case, runs=2)
    assert int(count) <= 1
    assert again.whole > 0
    with pytest.raises(RuntimeError, match="row 0 ended early: nan"):
        benchmark.measure(jd.testing.markov_model(), jnp.full((7, 7), jnp.nan), 7, case, runs=1)


def test_numpy_multiplies_by_each_matrix_once() -> None:
    """All that S7.5 counts but attention, and the head."""
    for config in (TIED, UNTIED):
        model = loaded(config)
        matrices = work._matrices(config, model.params)
        assert sum(w.size for w in matrices) == config.n_layers * block(config, 0) + config.d_model * config.vocab_size
        assert benchmark.numpy_seconds(config, model.params, 2, runs=1) > 0
    with pytest.raises(ValueError, match="float32 weights, got bfloat16"):
        benchmark.numpy_seconds(TIED, loaded(TIED, jnp.bfloat16).params, 2)


@pytest.mark.skipif(not hasattr(jd, "quantize"), reason="no quantized weights yet")
def test_int8_is_loaded_once_and_counted_by_its_own_bytes() -> None:
    model, schemes = loaded(TIED), []

    def load(scheme: str | None) -> jd.Loaded:
        schemes.append(scheme)
        return model if scheme is None else model._replace(params=jd.quantize(model.params, scheme))

    cases = [Case("int8", 2, 5, 4), Case("greedy", 2, 5, 4), Case("int8", 3, 5, 4)]
    rows = benchmark.bench(load, cases, runs=1, floor=True)["rows"]
    assert schemes == ["int8", None]
    assert [row["products"] for row in rows] == ["int8", "float32", "int8"]
    assert [row["numpy_seconds"] is None for row in rows] == [True, False, True]
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(jd.quantize(model.params, "int8"))), rows[1]["param_bytes"]]
    assert rows[0]["weight_bytes_per_step"] == rows[0]["param_bytes"] == sizes[0] < sizes[1] / 3
    assert rows[0]["multiplications_per_step"] == rows[1]["multiplications_per_step"]


def test_the_floor_is_the_slower_of_reading_and_multiplying() -> None:
    machine = Machine(10.0, {"float32": 4.0, "bfloat16": 1.0, "int8": 2.0})
    assert machine.floor_seconds(100, 8, "float32") == 10
    assert machine.floor_seconds(10, 80, "float32") == 20
    assert machine.floor_seconds(10, 80, "int8") == 40
    assert machine.rate("bfloat16") == 4, "it may be widened to float32"
    found = benchmark.measure_machine(["int8"], read=1 << 20, tries=1)
    assert found.read_bandwidth > 0
    assert set(found.multiply_rate) == {"float32", "int8"}
    assert all(rate > 0 for rate in found.multiply_rate.values())


def test_the_peak_of_memory_starts_again() -> None:
    if not benchmark.reset_peak():
        pytest.skip("this system keeps the peak")
    size = 1 << 27
    before = benchmark.peak_bytes() or 0
    held = np.ones(size, np.uint8)
    assert (benchmark.peak_bytes() or 0) >= before + 0.9 * size
    del held
    benchmark.reset_peak()
    assert (benchmark.peak_bytes() or math.inf) < before + 0.5 * size


def test_prompts_are_the_same_everywhere_and_hold_no_special_token() -> None:
    spec = importlib.util.spec_from_file_location("systems", ROOT / "scripts" / "peers" / "systems.py")
    assert spec is not None
    assert spec.loader is not None
    systems = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(systems)
    ids = benchmark.prompt_ids(3, 40, 49152)
    assert ids == systems.prompt_ids(3, 40, 49152).tolist()
    assert 49152 // 4 <= min(map(min, ids)) <= max(map(max, ids)) < 3 * 49152 // 4
    assert benchmark.prompt_ids(2, 3, 1) == [[0, 0, 0]] * 2


def bench(*arguments: str) -> dict[str, Any]:
    result = call("bench", "--json", "--runs", "1", *arguments)
    assert (result.code, result.err) == (0, "")
    assert result.out.count("\n") == 1
    return json.loads(result.out)


def without_times(told: dict[str, Any]) -> dict[str, Any]:
    """What is the same at every call."""
    measured = ("seconds", "per_second", "fraction", "bandwidth", "rate")
    measured = (*measured, "peak_bytes", "base_bytes")
    rows = [{k: v for k, v in row.items() if not k.endswith(measured)} for row in told["rows"]]
    return {**{k: v for k, v in told.items() if k != "base_bytes"}, "rows": rows}


TOY = ("toy", "--batch-sizes", "2", "--prompt-lengths", "4", "--new-tokens", "8", "--modes", "greedy, top_p")


def test_json_is_one_object_equal_but_for_what_is_measured() -> None:
    told = bench(*TOY)
    assert (told["format"], told["version"], told["model"], told["dtype"]) == ("jaxdecode-bench", 1, "toy", "float32")
    assert told["versions"]["jax"] == jax.__version__
    assert [(row["mode"], row["batch"]) for row in told["rows"]] == [("greedy", 2), ("top_p", 2)]
    assert {row["bytes_per_step"] for row in told["rows"]} == {None}, "a table has no such counts"
    assert without_times(bench(*TOY)) == without_times(told)


def test_prompt_lookup_is_held_against_greedy_on_prompts_of_its_own() -> None:
    told = bench("toy", "--batch-sizes", "2", "--prompt-lengths", "4,5", "--new-tokens", "8", "--modes", "speculative")
    assert [row["mode"] for row in told["rows"]] == ["lookup_copy", "lookup_fresh"]
    asked = [len(text_ids(jd.load("toy").tokenizer, name, 257)) for name in ("copy", "fresh")]
    assert [row["prompt"] for row in told["rows"]] == asked
    assert all(row["times_greedy"] is None or row["times_greedy"] > 0 for row in told["rows"])


def test_beams_and_json_are_held_against_greedy() -> None:
    told = bench("toy", "--batch-sizes", "2", "--prompt-lengths", "4", "--new-tokens", "12", "--modes", "beam,json")
    assert [row["mode"] for row in told["rows"]] == ["beam", "json"]
    assert all(row["times_greedy"] is None or row["times_greedy"] > 0 for row in told["rows"])
    assert [row["cache_len"] for row in told["rows"]] == [16, 64]


def test_the_table_for_a_reader_has_a_line_a_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    path = str(tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.tiny()))
    sizes = ("--batch-sizes", "2", "--prompt-lengths", "3,9", "--new-tokens", "4")
    told = bench(path, *sizes, "--floor")
    result = call("bench", path, *sizes, "--runs", "1", "--floor")
    assert (result.code, result.err) == (0, "")
    head, _, *lines = result.out.splitlines()
    assert head == f"{path} in float32"
    assert lines[0].split()[:4] == ["mode", "rows", "prompt", "new"]
    assert [line.split()[:4] for line in lines[1:3]] == [["greedy", "2", "3", "4"], ["greedy", "2", "9", "4"]]
    for line, row in zip(lines[1:3], told["rows"], strict=True):
        counts = f"{row['bytes_per_step'] / 1e3:,.1f} kB {row['multiplications_per_step'] / 1e3:,.1f} k"
        assert counts in " ".join(line.split())
    assert "of NumPy" in lines[0]
    assert any(line.startswith("this machine: reads ") for line in lines)
    longer = call("bench", path, "--prompt-lengths", "125", "--new-tokens", "4")
    assert_bad(longer, "prompt + new tokens, or cache slots: expected at most the context of 128, got 129")


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["toys"], "toys"),
        (["--modes", "greedy,fast"], "mode: expected one of greedy, top_p, int8"),
        (["--batch-sizes", "0"], "batch size: expected a number >= 1, got 0"),
        (["--batch-sizes", "1,x"], "--batch-sizes: expected whole numbers with commas between, got '1,x'"),
        (["--prompt-lengths", "0"], "prompt length"),
        (["--new-tokens", "1"], "new tokens: expected a number >= 2"),
        (["--new-tokens", ""], "--new-tokens"),
        (["--runs", "0"], "--runs"),
        (["--cache-len", "50"], "cache slots: expected at least prompt + new tokens = 80, got 50"),
        (["--dtype", "int3"], "--dtype"),
    ],
)
def test_bad_input(arguments: list[str], about: str) -> None:
    assert_bad(call("bench", *(arguments if arguments[0] == "toys" else ["toy", *arguments])), about)


def test_a_model_whose_logits_are_nan_fails_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = jd.load("toy")
    monkeypatch.setattr(jd, "load", lambda *args, **options: toy._replace(params=toy.params * jnp.nan))
    result = call("bench", *TOY)
    assert (result.code, result.out, result.err) == (1, "", "jaxdecode: error: row 0 ended early: nan\n")


def test_the_help_names_every_mode() -> None:
    text = " ".join(call("bench", "--help").out.split())
    assert f"Of: {', '.join(benchmark.MODES)}." in text
