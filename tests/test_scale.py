"""The page on scale says what its script calculates, and the script counts what a device has."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "scale.md").read_text()
SHOWN = re.findall(r"^\$ python scripts/scale\.py ([^\n]*)\n```\n\n```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("scale", ROOT / "scripts" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("arguments", "table"), SHOWN, ids=[arguments for arguments, _ in SHOWN])
def test_the_page_shows_what_the_script_prints(
    script: Any, arguments: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(shlex.split(arguments))
    assert capsys.readouterr().out == table
    assert len(table.splitlines()) > 8


def test_there_are_tables_on_the_page() -> None:
    assert [arguments.split("--machine ")[1].split()[0] for arguments, _ in SHOWN] == ["h100", "v5p"]


def test_shares_add_up_to_the_model(script: Any) -> None:
    """Of 8B, 8 devices hold all matrices once and the norms 8 times; multiplications are an eighth."""
    config, machine = script.MODELS["llama-3-8b"], script.MACHINES["h100"]
    params = script.shapes(config, "float32")
    assert sum(x.size for x in jax.tree.leaves(params)) == 8_030_261_248
    norms = 4 * config.d_model * (2 * config.n_layers + 1)
    one, eight = (script.planned(config, machine, 1, t, 5, 100, "float32") for t in (1, 8))
    assert one.weights == 4 * 8_030_261_248
    assert eight.weights == (one.weights - norms) // 8 + norms
    assert (eight.cache, eight.multiply) == (one.cache / 8, one.multiply / 8)
    assert one.links == 0
    assert script.sums(config, 8, 5)[:66] == [2 * 5 * config.d_model] * 65 + [4 * 5]


def test_sums_are_those_of_the_compiled_step(script: Any) -> None:
    """In numbers, as ``test_sharding`` finds them in a step of this model with 8 rows over 8 devices."""
    config = script.TransformerConfig(8192, 64, 2, 8, 8, 8, 128, 128)
    found = script.sums(config, 8, 8)
    assert found[:5] == [2 * 8 * 64] * 5
    assert found[5:] == [4 * 8] * 11 + [4 * 8 * 128] + [4 * 8 * 8192 // 128 // 2] * 2


def test_what_does_not_divide_is_whole(script: Any) -> None:
    small = script.MODELS["smollm2-135m"]
    own = script.share(small, 2)
    assert (own.n_heads, own.n_kv_heads, own.d_mlp, own.vocab_size) == (9, 3, 768, 24576)
    assert len(script.sums(small, 2, 1)) == 31 + script.REDUCTIONS + 3
    assert script.share(small, 3).n_kv_heads == 1


def test_rows_that_fit_do_and_one_more_does_not(script: Any) -> None:
    config, machine = script.MODELS["llama-3-70b"], script.MACHINES["h100"]
    rows = script.most_rows(config, machine, 8, 4096, "bfloat16")
    (plan, more) = (script.planned(config, machine, 1, 8, n, 4096, "bfloat16") for n in (rows, rows + 1))
    logits = script.LOGITS_COPIES * 4 * config.vocab_size // 8
    assert plan.weights + plan.cache + rows * logits <= 0.9 * machine.memory
    assert more.weights + more.cache + (rows + 1) * logits > 0.9 * machine.memory
    assert script.most_rows(config, script.MACHINES["v5e"], 8, 4096, "bfloat16") == 0
