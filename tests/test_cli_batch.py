"""`jaxdecode batch`: what a line asks for is what it gets, whatever stands beside it, and nothing is lost."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cli_tools import N, Result, assert_bad, call, process

import jaxdecode as jd
from jaxdecode.cli import batch as batch_module
from jaxdecode.cli.batch_files import digest
from jaxdecode.keys import row_key, row_keys

LOADED = jd.load("toy")
BATCH = ("batch", "--model", "toy", "--max-new-tokens", str(N), "--slots", "4", "--no-compile-cache")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_lines(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), "utf-8")
    return path


def run(tmp_path: Path, lines: list[Any], *options: str, name: str = "out.jsonl") -> list[dict[str, Any]]:
    source = write_lines(tmp_path / "in.jsonl", lines)
    result = call(*BATCH, *options, str(source), str(tmp_path / name))
    assert (result.code, result.err) == (0, "")
    return lines_of(tmp_path / name)


def library(prompt: str, line_id: str, seed: int = 0, **settings: Any) -> jd.Generated:
    chosen = LOADED.settings(**{"max_new_tokens": N, "temperature": 0.0, **settings})
    ids = LOADED.tokenizer.encode(prompt)
    return jd.generate(LOADED.model, LOADED.params, [ids], key=jax.random.key(seed), row_ids=[line_id], settings=chosen)


def many(n: int) -> list[dict[str, Any]]:
    """Lines of many lengths, greedy and sampled ones."""
    rng = random.Random(3)
    words = ["a toy", "we want", "who would", "one bird", "work on", "the end"]
    return [
        {
            "id": f"r{i}",
            "prompt": " ".join(rng.choices(words, k=rng.randint(1, 5))),
            "max_new_tokens": rng.randint(0, N),
            "temperature": rng.choice([0, 0.7, 1.5]),
        }
        for i in range(n)
    ]


MANY = many(40)


def test_the_key_of_one_row_is_that_of_row_keys() -> None:
    key, ids = jax.random.key(7), ["a", "line-3", "ü"]
    one = [jax.random.key_data(row_key(key, i)) for i in ids]
    np.testing.assert_array_equal(one, jax.random.key_data(row_keys(key, 3, ids)))


def test_every_line_gets_what_generate_gives_for_it_alone(tmp_path: Path) -> None:
    told = run(tmp_path, MANY)
    assert [line["id"] for line in told] == [line["id"] for line in MANY]
    assert len({line["text"] for line in told}) > 20
    numbers = {name: [line[name] for line in MANY] for name in ("max_new_tokens", "temperature")}
    prompts = [LOADED.tokenizer.encode(line["prompt"]) for line in MANY]
    ids, settings = [line["id"] for line in MANY], LOADED.settings(**numbers)
    out = jd.generate(LOADED.model, LOADED.params, prompts, key=jax.random.key(0), row_ids=ids, settings=settings)
    for row, answer in enumerate(told):
        assert answer["tokens"] == out.to_lists()[row]
        assert answer["text"] == LOADED.tokenizer.decode(answer["tokens"])
        assert answer["finish"] == jd.Finish(int(out.finish[row])).name.lower()
        assert answer["completion_tokens"] == int(out.length[row])
        assert answer["prompt_tokens"] == len(prompts[row])
        assert set(answer) == {"id", "prompt_tokens", "text", "tokens", "finish", "completion_tokens"}


def test_lines_of_any_structure_stand_beside_each_other(tmp_path: Path) -> None:
    other = {"logit_bias": {"121": 50}, "bad_words": ["x"], "xtc": [0.5, 0.1], "repetition_penalty": 1.1}
    lines = [
        {"id": 1, "prompt": "hello "},
        {"id": 2, "prompt": "hello ", "temperature": 1.2, "num_samples": 3, "seed": 5},
        {"id": 3, "prompt": [104], "choices": ["yes", "no"], "temperature": 1, "top_logprobs": 2, **other},
        {"id": 4, "prompt": "hello ", "stop": "r", "temperature": 1.2},
        {"id": 5, "prompt": "hello ", "logprobs": True},
        {"prompt": "hello ", "temperature": 1.5},
        {"id": 7, "prompt": "hello ", "beams": 2},
        {"id": 8, "prompt": "hello ", "temperature": 1.2, "seed": 5, "best_of": 3},
    ]
    told = run(tmp_path, lines)
    assert [t["id"] for t in told] == [1, 2, 3, 4, 5, "line-6", 7, 8]
    assert told[0]["tokens"] == library("hello ", "1").to_lists()[0]
    expected = library("hello ", "2", 5, num_samples=3, temperature=1.2).to_lists()[0]
    assert [c["tokens"] for c in told[1]["choices"]] == expected
    assert told[2]["text"] == "yes"
    assert "log_weight" in told[2]
    assert [len(step) for step in told[2]["top_logprobs"]] == [2] * 4
    free = LOADED.tokenizer.decode(library("hello ", "4", temperature=1.2).to_lists()[0])
    assert "r" in free
    assert (told[3]["text"], told[3]["finish"]) == (free.split("r")[0], "stop")
    assert told[3]["tokens"] == list(free.split("r")[0].encode() + b"r")
    assert told[4]["tokens"] == told[0]["tokens"]
    np.testing.assert_allclose(told[4]["logprobs"], library("hello ", "1").logprob[0, : len(told[4]["tokens"])], 1e-5)
    assert told[5]["tokens"] == library("hello ", "line-6", temperature=1.5).to_lists()[0]
    assert [c["tokens"] for c in told[6]["choices"]] == library("hello ", "7", beams=2).to_lists()[0]
    assert told[7]["tokens"]
    assert "choices" not in told[7]


def test_options_are_the_defaults_of_the_lines(tmp_path: Path) -> None:
    lines = [{"id": "a", "prompt": "hello "}, {"id": "b", "prompt": "hello ", "temperature": 0}]
    told = run(tmp_path, lines, "--temperature", "1.2", "--seed", "9")
    assert told[0]["tokens"] == library("hello ", "a", 9, temperature=1.2).to_lists()[0]
    assert told[1]["tokens"] == library("hello ", "b").to_lists()[0]


def test_the_form_of_openai_goes_in_and_comes_out(tmp_path: Path) -> None:
    def line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "toy", **body}}

    lines = [
        line("a", prompt="hello ", max_tokens=N, temperature=1.2, n=1, logprobs=0, user="me", stream=False),
        line("b", prompt="hello ", max_tokens=5, frequency_penalty=None, stop=["\n"]),
        line("c", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]),
        line("d", prompt="hello ", model="another"),
        line("e", "/v1/embeddings", input="x"),
        line("f", prompt="hello ", tools=[]),
    ]
    told = run(tmp_path, lines)
    assert [t["custom_id"] for t in told] == ["a", "b", "c", "d", "e", "f"]
    body = told[0]["response"]["body"]
    (chosen,) = body["choices"]
    assert chosen["token_ids"] == library("hello ", "a", temperature=1.2).to_lists()[0]
    n = len(chosen["token_ids"])
    assert (body["object"], body["model"], told[0]["error"]) == ("text_completion", "toy", None)
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": n, "total_tokens": 6 + n}
    assert chosen["finish_reason"] in ("length", "stop")
    assert len(chosen["logprobs"]["token_logprobs"]) == n
    assert chosen["logprobs"]["text_offset"][:3] == [0, 1, 2]
    assert told[1]["response"]["body"]["choices"][0]["logprobs"] is None
    for t, words in zip(told[2:], ("chat template", "'toy'", "/v1/completions", "tools"), strict=True):
        assert t["response"] is None
        assert t["error"]["code"] == "invalid_request"
        assert words in t["error"]["message"]


BAD = {
    "{": "JSON object",
    "[1]": "JSON object",
    '{"id": 1}': "one of prompt and messages",
    '{"id": 2, "prompt": ""}': "prompt",
    '{"id": 3, "prompt": "x", "temprature": 1}': "temprature",
    '{"id": 4, "prompt": "x", "temperature": -1}': "temperature",
    '{"id": 5, "prompt": "x", "temperature": "hot"}': "a number",
    '{"id": 6, "prompt": "x", "max_new_tokens": 99999}': "context",
    '{"id": 7, "prompt": [999]}': "[0, 257)",
    '{"id": 8, "prompt": "x", "choices": ["a"], "stop": "b"}': "stop",
    '{"id": 9, "prompt": "x", "regex": "("}': "regex",
    '{"id": [], "prompt": "x"}': "id",
    '{"id": "good", "prompt": "x"}': "'good'",
    '{"id": 10, "messages": [{"role": "user", "content": "x"}]}': "chat template",
    '{"id": 11, "prompt": "x", "num_samples": 0}': "num_samples",
    '{"id": 12, "prompt": "x", "forced": {"a": 1}}': "whole numbers",
    '{"id": 13, "prompt": "x", "system": "y"}': "system",
    '{"id": 14, "prompt": "x", "seed": -1}': "seed",
}


def test_a_bad_line_becomes_an_error_and_the_rest_goes_on(tmp_path: Path) -> None:
    good = {"id": "good", "prompt": "hello "}
    told = run(tmp_path, [good, *BAD, "", {**good, "id": "last"}])
    assert [t["tokens"] for t in (told[0], told[-1])] == [library("hello ", "good").to_lists()[0]] * 2
    assert len(told) == len(BAD) + 2
    for number, (line, answer) in enumerate(zip(BAD, told[1:-1], strict=True), 2):
        assert set(answer) == {"id", "line", "error"}
        assert answer["line"] == number
        assert BAD[line] in answer["error"], line


def test_a_file_that_was_cut_anywhere_is_completed_to_the_same_bytes(tmp_path: Path) -> None:
    """What a kill leaves is a beginning of the file, since it is only appended to."""
    lines = [*MANY[:14], "{bad", *MANY[14:20]]
    run(tmp_path, lines)
    whole = (tmp_path / "out.jsonl").read_bytes()
    rng = random.Random(1)
    for at in (0, len(whole), *(rng.randrange(len(whole)) for _ in range(12))):
        (tmp_path / "out.jsonl").write_bytes(whole[:at])
        run(tmp_path, lines)
        assert (tmp_path / "out.jsonl").read_bytes() == whole, at


def test_results_as_they_finish_are_the_same_lines(tmp_path: Path) -> None:
    ordered = run(tmp_path, MANY)
    finished = run(tmp_path, MANY, "--order", "finished", name="finished.jsonl")
    assert finished != ordered
    assert sorted(finished, key=lambda t: t["id"]) == sorted(ordered, key=lambda t: t["id"])
    path = tmp_path / "finished.jsonl"
    kept = path.read_bytes()[: len(path.read_bytes()) // 2]
    path.write_bytes(kept)
    again = run(tmp_path, MANY, "--order", "finished", name="finished.jsonl")
    assert path.read_bytes().startswith(kept[: kept.rindex(b"\n") + 1])
    assert sorted(again, key=lambda t: t["id"]) == sorted(ordered, key=lambda t: t["id"])


def test_shards_are_the_parts_of_the_single_run(tmp_path: Path) -> None:
    lines = [*MANY[:9], "{bad", MANY[0], *MANY[9:16]]  # a second line with the id of the first, in another shard
    whole = run(tmp_path, lines)
    parts = [run(tmp_path, lines, "--shard", f"{i}/3", name=f"part{i}.jsonl") for i in (1, 2, 3)]
    assert [len(part) for part in parts] == [6, 6, 6]
    assert [parts[i % 3][i // 3] for i in range(18)] == whole
    assert "r0" in whole[10]["error"]


def test_it_goes_on_only_with_the_same_settings_and_file(tmp_path: Path) -> None:
    run(tmp_path, MANY[:3])
    arguments = (str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    before = (tmp_path / "out.jsonl").read_bytes()
    assert_bad(call(*BATCH, "--seed", "4", *arguments), "seed 0")
    assert_bad(call(*BATCH, "--shard", "1/2", *arguments), "shard")
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert "3 were done before" in call(*BATCH, *arguments).out
    assert call(*BATCH, "--seed", "4", "--no-resume", *arguments).code == 0
    assert len(lines_of(tmp_path / "out.jsonl")) == 3
    (tmp_path / "other.jsonl").write_text("something\n")
    assert_bad(call(*BATCH, arguments[0], str(tmp_path / "other.jsonl")), "other.jsonl")
    assert (tmp_path / "other.jsonl").read_text() == "something\n"


@pytest.mark.parametrize(
    ("options", "about"),
    [
        (["nothing.jsonl", "OUT"], "nothing.jsonl"),
        (["--shard", "3/2", "IN", "OUT"], "--shard"),
        (["--temperature", "-1", "IN", "OUT"], "temperature"),
        (["--seed", "-1", "IN", "OUT"], "--seed"),
        (["IN", "no/folder/out.jsonl"], "no/folder"),
        (["--no-resume", "IN", "IN"], "another file"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, options: list[str], about: str) -> None:
    write_lines(tmp_path / "in.jsonl", MANY[:1])
    places = {"IN": str(tmp_path / "in.jsonl"), "OUT": str(tmp_path / "out.jsonl")}
    assert_bad(call(*BATCH, *(places.get(word, word) for word in options)), about)
    assert not (tmp_path / "out.jsonl").exists()


def test_few_lines_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the file is."""
    most = 0
    give = batch_module.Results.give

    def counted(results: Any, number: int, record: Any) -> None:
        nonlocal most
        most = max(most, results.pending, len(results._ready))
        give(results, number, record)

    monkeypatch.setattr(batch_module, "AHEAD", 8)
    monkeypatch.setattr(batch_module.Results, "give", counted)
    told = run(tmp_path, MANY)
    assert [t["id"] for t in told] == [line["id"] for line in MANY]
    assert most == 8


def test_ids_of_many_lines_are_told_apart() -> None:
    assert len({digest(f"line {i}") for i in range(10000)}) == 10000
    assert digest(5) == digest("5") != digest("05")


# Processes of their own: killed, interrupted.


@pytest.fixture
def slow(tmp_path: Path) -> tuple[str, ...]:
    """A command whose run takes a few seconds, and that waits a little at every turn."""
    write_lines(tmp_path / "in.jsonl", MANY)
    program = """
import sys, time
from jaxdecode.engine.driver import Driver
turn = Driver.turn
def slowly(driver):
    time.sleep(0.02)
    return turn(driver)
Driver.turn = slowly
from jaxdecode.cli import main
main()
"""
    return ("-c", program)


def begun(path: Path, lines: int) -> None:
    """Wait until some lines are there."""
    for _ in range(6000):
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.01)
    raise AssertionError("nothing was written")


def test_killed_in_the_middle_it_goes_on_and_interrupted_it_drains(tmp_path: Path, slow: tuple[str, ...]) -> None:
    expected = run(tmp_path, MANY, name="expected.jsonl")
    out = tmp_path / "out.jsonl"
    env = {"JAXDECODE_CACHE": str(tmp_path / "cache")}
    arguments = (*BATCH[:-1], str(tmp_path / "in.jsonl"), str(out))
    with process(*arguments, program=slow, env=env) as p:
        begun(out, 5)
        assert_bad(call(*arguments, "--no-compile-cache"), "locked")
        p.send_signal(signal.SIGKILL)
        assert p.wait(timeout=60) == -signal.SIGKILL
    killed = out.read_bytes()
    assert 5 <= killed.count(b"\n") < len(MANY)
    with process(*arguments, program=slow, env=env) as p:
        begun(out, killed.count(b"\n") + 3)
        p.send_signal(signal.SIGINT)
        text, err = p.communicate(timeout=60)
    assert p.returncode == 130
    assert "lines answered" in text
    assert "goes on from here" in err
    drained = out.read_bytes()
    assert drained.startswith(killed[: killed.rindex(b"\n") + 1])
    assert drained.endswith(b"\n")
    assert drained.count(b"\n") < len(MANY)
    result = call(*arguments, "--no-compile-cache")
    assert isinstance(result, Result)
    assert result.code == 0
    assert lines_of(out) == expected
