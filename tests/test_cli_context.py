"""`--context-length`: how long texts may be, on every command that loads a model to run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import tiny_hf
from cli_tools import assert_bad, call

import jaxdecode as jd

LONGROPE = "phi3 beyond its original context"  # 32 tokens of 128
PROMPT = "the land and the sea " * 3  # 36 tokens


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))


def written(folder: Path, name: str) -> str:
    return str(tiny_hf.write(folder, tiny_families.tiny(name)))


def test_longer_texts_than_the_original_context(tmp_path: Path) -> None:
    model, record = written(tmp_path / "model", LONGROPE), tmp_path / "run.json"
    arguments = ("generate", "--model", model, "--max-new-tokens", "8", "--no-compile-cache", "--json")
    assert_bad(call(*arguments, PROMPT), "context of 32 tokens")
    result = call(*arguments, "--context-length", "100", "--record", str(record), PROMPT)
    assert (result.code, result.err) == (0, "")
    loaded = jd.load(model, context_length=100)
    settings = loaded.settings(max_new_tokens=8, temperature=0)
    out = jd.generate(loaded.model, loaded.params, [loaded.tokenizer.encode(PROMPT)], settings=settings)
    assert json.loads(result.out)["tokens"] == out.to_lists()[0]
    assert json.loads(record.read_text())["model"]["context_length"] == 100
    assert call("verify", str(record), "--no-compile-cache").code == 0

    told = json.loads(call("inspect", model, "--context-length", "100", "--json").out)
    assert told["config"]["context_length"] == told["multiplications_per_token"][-1]["position"] == 100
    assert_bad(call("inspect", model, "--context-length", "129"), "from 1 to 128, got 129")


@pytest.mark.parametrize("command", ["generate", "chat", "batch", "eval", "bench"])
def test_every_command_loads_the_model_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    seen: dict[str, Any] = {}

    def load(source: str, **how: Any) -> Any:
        seen.update(how, source=source)
        raise ValueError("loaded")

    monkeypatch.setattr(jd, "load", load)
    (tmp_path / "in").write_text("x")
    more = {
        "generate": ("--model", "toy", "x"),
        "chat": ("--model", "toy"),
        "batch": ("--model", "toy", str(tmp_path / "in"), str(tmp_path / "out")),
        "eval": ("toy", "--text", str(tmp_path / "in")),
        "bench": ("toy",),
    }[command]
    options = () if command == "bench" else ("--no-compile-cache",)
    assert_bad(call(command, *more, *options, "--context-length", "77"), "loaded")
    assert (seen["source"], seen["context_length"]) == ("toy", 77)


def test_models_that_cannot_say_so(tmp_path: Path) -> None:
    learned = written(tmp_path / "model", "gpt2")
    cases = (("toy", "None for toy"), (learned, "expected 128, since positions are learned, got 64"))
    for model, about in cases:
        for command in (("generate", "x", "--model"), ("inspect",)):
            assert_bad(call(*command, model, "--context-length", "64"), about)
