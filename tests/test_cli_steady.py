"""`--steady`: arithmetic by which int8 gives the same bits whatever stands beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import tiny_hf
from cli_tools import assert_bad, call

import jaxdecode as jd
from jaxdecode.arithmetic import PLAIN, STEADY
from jaxdecode.models import transformer

FEW = ("--quantize", "int8", "--max-new-tokens", "4", "--no-compile-cache")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    return str(tiny_hf.write(tmp_path / "model", tiny_families.tiny("llama")))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each load asked for it."""
    seen, load = [], jd.load

    def watched(source: str, **how: Any) -> Any:
        seen.append(how.get("steady", False))
        return load(source, **how)

    monkeypatch.setattr(jd, "load", watched)
    return seen


def test_load_gives_the_model_with_that_arithmetic(model: str) -> None:
    for steady, arithmetic in ((False, PLAIN), (True, STEADY)):
        loaded = jd.load(model, steady=steady)
        assert loaded.model is transformer(loaded.config, arithmetic=arithmetic)
    assert_bad(call("generate", "--model", "toy", "--steady", "x"), "steady: expected False for toy")


def test_a_record_keeps_it(model: str, tmp_path: Path, asked: list[bool]) -> None:
    record = tmp_path / "run.json"
    assert call("generate", "--model", model, *FEW, "--steady", "--record", str(record), "the land").code == 0
    assert json.loads(record.read_text())["model"]["steady"] is True
    assert call("verify", str(record), "--no-compile-cache").code == 0
    assert asked == [True, True]


def test_a_batch_goes_on_only_with_the_same(model: str, tmp_path: Path, asked: list[bool]) -> None:
    source, target, record = (str(tmp_path / name) for name in ("in.jsonl", "out.jsonl", "run.json"))
    Path(source).write_text('{"id": 1, "prompt": "the land"}\n')
    arguments = ("batch", "--model", model, *FEW, source, target)
    assert call(*arguments, "--steady", "--record", record).code == 0
    assert call("verify", record, "--no-compile-cache").code == 0
    assert asked == [True, True]
    assert_bad(call(*arguments), "steady")
    assert call(*arguments, "--steady").code == 0


def test_nor_with_another_mesh(model: str, tmp_path: Path) -> None:
    source, target = (str(tmp_path / name) for name in ("in.jsonl", "out.jsonl"))
    Path(source).write_text('{"id": 1, "prompt": "the land"}\n')
    arguments = ("batch", "--model", model, *FEW, source, target)
    assert call(*arguments, "--mesh", "tensor=1").code == 0
    assert_bad(call(*arguments), "begun with mesh 'tensor=1', expected the same, got None")
