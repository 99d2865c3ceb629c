"""`jaxdecode verify`: a record is repeated to the last token, and the first one that differs is named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cli_tools import TOY, assert_bad, call
from tiny_gguf import tiny, write

RUNS: dict[str, tuple[str, ...]] = {
    "greedy, ends at a text": ("--stop", "e"),
    "samples": ("--temperature", "1", "--num-samples", "3", "--seed", "9", "--top-logprobs", "2"),
    "best of": ("--temperature", "1", "--best-of", "4", "--num-samples", "2"),
    "beams": ("--beams", "3", "--length-penalty", "1"),
    "without replacement": ("--temperature", "1", "--num-samples", "3", "--without-replacement"),
    "lookup": ("--temperature", "0.5", "--prompt-lookup", "3"),
    "settings": (
        *("--temperature", "0.9", "--top-p", "0.9", "--dry", "0.8,1.75,2", "--dry-breakers", "."),
        *("--bad-words", "we", "--logit-bias", "97=-2", "--regex", "[a-z ]+", "--prefix", "h"),
    ),
}


def recorded(path: Path, *options: str) -> Path:
    assert call(*TOY, *options, "--record", str(path), "hello ").code == 0
    return path


def changed(path: Path, to: Path, **fields: Any) -> Path:
    to.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return to


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_repeated(name: str, tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.json", *RUNS[name])
    record = json.loads(path.read_text())
    told = call("verify", "--no-compile-cache", "--json", str(path))
    assert told.code == 0, told.err
    tokens = sum(len(output["tokens"]) for output in record["outputs"])
    assert json.loads(told.out) == {"same": True, "tokens": tokens, "difference": None, "versions_changed": {}}
    assert tokens > len(record["outputs"])


def test_the_first_difference_is_named_with_its_margins(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.json", "--temperature", "1", "--num-samples", "2")
    record = json.loads(path.read_text())
    first, second = record["outputs"]
    was = second["tokens"][3]
    second["tokens"][3], second["tokens"][5] = was ^ 1, second["tokens"][5] ^ 1
    second["margins"][3] = 0.125
    other = changed(path, tmp_path / "b.json", outputs=[first, second], versions=record["versions"] | {"jax": "0.0.1"})
    told = call("verify", "--no-compile-cache", "--json", str(other))
    assert told.code == 1
    difference = json.loads(told.out)["difference"]
    now = difference.pop("margin_now")
    assert difference == {"output": 1, "token": 3, "recorded": was ^ 1, "got": was, "margin": 0.125}
    assert now == json.loads(path.read_text())["outputs"][1]["margins"][3]
    assert json.loads(told.out)["versions_changed"] == {"jax": ["0.0.1", record["versions"]["jax"]]}
    told = call("verify", "--no-compile-cache", str(other))
    assert told.out.startswith(f"different: output 2, token 4: {was ^ 1} ")
    assert "margin in the record 0.125, now " in told.out
    assert told.err == f"jax: 0.0.1 in the record, {record['versions']['jax']} here\n"


def test_lengths_count_and_what_was_cancelled_may_go_on(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.json", "--temperature", "1")
    (output,) = json.loads(path.read_text())["outputs"]
    assert len(output["tokens"]) > 5
    cut = output | {"tokens": output["tokens"][:4]}
    told = call("verify", "--no-compile-cache", "--json", str(changed(path, tmp_path / "b.json", outputs=[cut])))
    assert json.loads(told.out)["difference"] == {
        "output": 0,
        "token": 4,
        "recorded": None,
        "got": output["tokens"][4],
        "margin": None,
        "margin_now": output["margins"][4],
    }
    cancelled = changed(path, tmp_path / "c.json", outputs=[cut | {"finish": "cancelled"}])
    assert call("verify", "--no-compile-cache", str(cancelled)).out == "the same: 4 tokens of 1 outputs\n"


def test_other_files_of_the_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    model, path = write(tmp_path / "tiny.gguf", tiny()), tmp_path / "run.json"
    arguments = ("--model", str(model), "--max-new-tokens", "4", "--no-compile-cache", "--draft-quantize", "int8")
    assert call("generate", *arguments, "--record", str(path), "the end").code == 0
    tokens = len(json.loads(path.read_text())["outputs"][0]["tokens"])
    assert call("verify", "--no-compile-cache", str(path)).out == f"the same: {tokens} tokens of 1 outputs\n"
    model.write_bytes(model.read_bytes() + b"\0")
    assert_bad(call("verify", str(path)), "model: tiny.gguf: expected the SHA-256 ")


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run.json")
    record = json.loads(path.read_text())
    for fields, about in (
        ({"format": "x"}, "format: expected 'jaxdecode-record'"),
        ({"version": 99}, "version: expected 1 to 1"),
        ({"outputs": [{"tokens": [1]}]}, "record: expected the fields of a record, got KeyError: 'margins'"),
        ({"versions": None}, "record: expected the fields of a record"),
        ({"kind": "batch"}, "record: expected the fields of a record, got KeyError: 'input'"),
        ({"settings": {}}, "record: expected the fields of a record"),
        ({"settings": record["settings"] | {"eos": [5]}}, "eos: expected the recorded ids [5]"),
    ):
        assert_bad(call("verify", str(changed(path, tmp_path / "b.json", **fields))), about)
    assert_bad(call("verify", str(tmp_path / "none.json")), "none.json")


BATCH = ("--model", "toy", "--no-compile-cache", "--max-new-tokens", "12", "--temperature", "1", "--seed", "4")


def test_a_batch_is_repeated_and_the_first_difference_named(tmp_path: Path) -> None:
    source, target, record = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "run.json"))
    body = {"model": "toy", "prompt": "we ", "max_tokens": 5, "n": 2}
    lines: list[dict[str, Any]] = [{"id": f"a{i}", "prompt": "hello "[: i + 2], "temperature": i % 2} for i in range(5)]
    lines += [{"id": "bad"}, {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("batch", *BATCH, "--slots", "2", "--stop", "e", "--record", str(record), str(source), str(target))
    assert call(*arguments).code == 0
    told = call("verify", "--json", str(record))
    tokens = sum(len(c["tokens"]) for c in map(json.loads, target.read_text().splitlines()) if "tokens" in c) + 10
    same = {"same": True, "lines": 6, "lost": 0, "difference": None, "versions_changed": {}}
    assert (told.code, json.loads(told.out)) == (0, {**same, "tokens": tokens})
    results = [json.loads(line) for line in target.read_text().splitlines()]
    was = results[3]["tokens"][1]
    results[3]["tokens"][1] = was ^ 1
    results[6]["response"]["body"]["choices"][1]["token_ids"][0] ^= 1
    target.write_text("".join(json.dumps(line) + "\n" for line in results))
    assert_bad(call("verify", str(record)), f"output: {target}: expected the SHA-256 ")
    told_of = json.loads(record.read_text())
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    changed(record, record, output=told_of["output"] | {"sha256": digest})
    told = call("verify", str(record))
    assert told.code == 1
    assert told.out.startswith(f"different: line 4 (a3), output 1, token 2: {was ^ 1} ")
    assert "; margin now " in told.out
    more = [*results, results[0] | {"id": "of no line"}]
    target.write_text("".join(json.dumps(line) + "\n" for line in more))
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    was_jax = told_of["versions"] | {"jax": "0.0.1"}
    changed(record, record, output=told_of["output"] | {"sha256": digest}, versions=was_jax)
    told = call("verify", str(record))
    assert told.code == 1
    assert told.out.startswith("different: 1 lines that have an answer in the record have none now\ndifferent: line 4 ")
    assert told.err == f"jax: 0.0.1 in the record, {told_of['versions']['jax']} here\n"
