"""Slots of one shape: a row is the same to the last bit in any of them, beside any neighbours, whenever it comes.

``scripts/check_invariance.py`` runs as many schedules as wanted, on any model; this is a small part of them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from cli_tools import TOY, call

from jaxdecode import generate
from jaxdecode.base import Model

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_invariance.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("check_invariance", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_invariance"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "count"), [("random", 8), ("random-int8", 4)])
def test_rows_are_bitwise_the_same_in_any_schedule(script: Any, name: str, count: int) -> None:
    model, params, vocab_size = script.model_of(name)
    requests = script.requests_of(vocab_size)
    found = list(script.schedules(script.engines(model, params), requests, count))
    assert found == [(script.ROWS, 0)] * count
    by_itself = generate(model, params, [requests[3].prompt], key=requests[3].key[None], settings=requests[3].settings)
    (again,) = script.engines(model, params)({}).serve([requests[3]])
    assert again.out.to_lists() == by_itself.to_lists()


def test_notes_go_on_where_they_were_torn(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = tmp_path / "notes"
    assert script.check("random", 2, str(notes), float("inf")) == 0
    whole = notes.read_bytes()
    notes.write_bytes(whole[:-4])
    assert script.check("random", 2, str(notes), 0.0) == 3  # no time: what is noted is told
    assert '"schedules": 1, "of": 2' in capsys.readouterr().out
    assert script.check("random", 2, str(notes), float("inf")) == 0
    assert notes.read_bytes() == whole
    with pytest.raises(SystemExit, match="expected"):
        script.check("random-int8", 2, str(notes), 0.0)


def test_a_long_neighbour_changes_no_bit(script: Any) -> None:
    """It makes all rows longer, whose first blocks stay as they are."""
    model, params, vocab_size = script.model_of("random")
    requests = script.requests_of(vocab_size)[:12]
    long = requests[0]._replace(id="long", prompt=list(range(290)))
    few = {r.request.id: r.out for r in script.engines(model, params)({}).serve(requests)}
    more = {r.request.id: r.out for r in script.engines(model, params)({}).serve([*requests[:6], long, *requests[6:]])}
    for name, out in few.items():
        np.testing.assert_array_equal(out.tokens, more[name].tokens)
        np.testing.assert_array_equal(out.logprob, more[name].logprob)


def test_a_row_that_looks_at_its_neighbours_is_found(script: Any) -> None:
    """The check can fail: with a model whose logits move by the last bit with the batch."""
    model, params, vocab_size = script.model_of("random")

    def apply(*arguments: Any, **options: Any) -> Any:
        logits, cache = model.apply(*arguments, **options)
        return logits + jnp.mean(logits, axis=0, keepdims=True) * 1e-6, cache

    engine_of = script.engines(Model(model.init_cache, apply), params)
    found = list(script.schedules(engine_of, script.requests_of(vocab_size), 3))
    assert sum(unequal for _, unequal in found) > 0


def test_a_batch_command_is_invariant_if_asked(tmp_path: Path) -> None:
    """Prefixes are then not looked for; nothing else differs."""
    source = tmp_path / "in.jsonl"
    lines = [{"id": str(i), "prompt": "the same beginning " * 4 + str(i)} for i in range(6)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = {}
    for flag in ("--no-share-prefixes", "--invariant"):
        target = tmp_path / f"out{flag}.jsonl"
        assert call("batch", *TOY[1:], flag, "--temperature", "1", str(source), str(target)).code == 0
        told[flag] = target.read_text()
    assert told["--invariant"] == told["--no-share-prefixes"]
