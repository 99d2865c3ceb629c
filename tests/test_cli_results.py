"""What `jaxdecode generate` can tell beside one text: samples, log probabilities, stop strings, and the record."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from cli_tools import TOY, N, assert_bad, call

import jaxdecode as jd
from jaxdecode.cli.files import check_target, write_json
from jaxdecode.cli.terminal import show, styled, table, visible

LOADED = jd.load("toy")
WARM = ("--temperature", "1.2", "--top-p", "0.9", "--seed", "5")


def library(prompt: str, **settings: Any) -> jd.Generated:
    chosen = LOADED.settings(**{"max_new_tokens": N, "temperature": 1.2, "top_p": 0.9, **settings})
    return jd.generate(
        LOADED.model, LOADED.params, [LOADED.tokenizer.encode(prompt)], key=jax.random.key(5), settings=chosen
    )


# Samples


def test_samples_are_those_of_the_library_in_a_list() -> None:
    out = library("hello ", num_samples=3)
    told = json.loads(call(*TOY, *WARM, "--num-samples", "3", "--json", "hello ").out)
    assert set(told) == {"model", "prompt_tokens", "choices"}
    assert [c["tokens"] for c in told["choices"]] == out.to_lists()[0]
    assert [c["finish"] for c in told["choices"]] == [jd.Finish(f).name.lower() for f in out.finish[0].tolist()]
    assert [c["text"] for c in told["choices"]] == [LOADED.tokenizer.decode(ids) for ids in out.to_lists()[0]]
    assert [c["completion_tokens"] for c in told["choices"]] == out.length[0].tolist()
    assert len({c["text"] for c in told["choices"]}) == 3


def test_samples_are_printed_below_each_other() -> None:
    arguments = (*TOY, *WARM, "--num-samples", "3", "hello ")
    choices = json.loads(call(*arguments, "--json").out)["choices"]
    expected = "".join(f"--- {i + 1} of 3: {c['finish']}\n{c['text']}\n" for i, c in enumerate(choices))
    assert call(*arguments) == (0, expected, "")


def test_one_sample_is_the_plain_completion_in_a_list_of_one() -> None:
    plain = json.loads(call(*TOY, *WARM, "--json", "hello ").out)
    listed = json.loads(call(*TOY, *WARM, "--json", "--num-samples", "1", "hello ").out)
    (only,) = listed.pop("choices")
    assert listed | only == plain


@pytest.mark.parametrize("k", [None, 2])
def test_the_best_of_several_are_those_that_the_model_finds_most_probable(k: int | None) -> None:
    """A stop string cuts text and sum, though the row goes on until all rows have ended."""
    arguments = (*TOY, *WARM, "--json", "--logprobs", "--stop", "or", "hello ")
    every = json.loads(call(*arguments, "--num-samples", "6").out)["choices"]
    order = sorted(range(6), key=lambda i: -sum(every[i]["logprobs"]))
    few = () if k is None else ("--num-samples", str(k))
    told = json.loads(call(*arguments, "--best-of", "6", *few).out)
    best = [{name: told[name] for name in every[0]}] if k is None else told["choices"]
    assert best == [every[i] for i in order[: k or 1]]


# Log probabilities


def test_log_probabilities_are_those_of_the_library() -> None:
    out = library("hello ", top_logprobs=2)
    told = json.loads(call(*TOY, *WARM, "--top-logprobs", "2", "--json", "hello ").out)
    n = told["completion_tokens"]
    np.testing.assert_allclose(told["logprobs"], out.logprob[0, :n], rtol=1e-6)
    np.testing.assert_allclose(told["processed_logprobs"], out.processed_logprob[0, :n], rtol=1e-6)
    assert [[x["id"] for x in step] for step in told["top_logprobs"]] == out.top_ids[0, :n].tolist()
    values = [[x["logprob"] for x in step] for step in told["top_logprobs"]]
    np.testing.assert_allclose(values, out.top_logprobs[0, :n], rtol=1e-6)
    for step in told["top_logprobs"]:
        assert [x["token"] for x in step] == [LOADED.tokenizer.decode([x["id"]], False) for x in step]
    law = np.exp(np.float64(np.asarray(LOADED.params)[ord(" ")]))
    assert math.exp(told["logprobs"][0]) == pytest.approx(law[told["tokens"][0]] / law.sum(), rel=1e-5)


def test_without_top_logprobs_the_numbers_are_there_and_the_lists_are_not() -> None:
    told = json.loads(call(*TOY, "--logprobs", "--json", "hello ").out)
    assert {"logprobs", "processed_logprobs"} <= set(told)
    assert "top_logprobs" not in told
    assert told["processed_logprobs"] == [0.0] * told["completion_tokens"]  # greedy


def test_a_table_follows_the_text() -> None:
    told = json.loads(call(*TOY, *WARM, "--top-logprobs", "2", "--json", "hello ").out)
    result = call(*TOY, *WARM, "--top-logprobs", "2", "hello ")
    text, blank, header, *rows = result.out.splitlines()
    assert (result.code, result.err, text, blank) == (0, "", told["text"], "")
    assert header.split("  ")[0] == "token"
    assert len(rows) == told["completion_tokens"]
    for row, token, logprob, best in zip(rows, told["tokens"], told["logprobs"], told["top_logprobs"], strict=True):
        shown = json.dumps(LOADED.tokenizer.decode([token], False))
        assert row.startswith(shown)
        assert f" {token} " in row
        assert f"{logprob:.4f}" in row
        assert row.count("%") == 3
        assert row.rstrip().endswith(f"{json.dumps(best[1]['token'])} {100 * math.exp(best[1]['logprob']):.1f}%")
    assert len({row.index("%") for row in rows}) == 1
    assert "most probable" not in call(*TOY, "--logprobs", "hello ").out


# Stop strings


def test_text_is_trimmed_at_the_first_stop_and_tokens_are_not() -> None:
    free = json.loads(call(*TOY, *WARM, "--json", "hello ").out)
    stop = free["text"][3:6]
    at = free["text"].index(stop)
    told = json.loads(call(*TOY, *WARM, "--json", "--stop", "never", "--stop", stop, "hello ").out)
    assert (told["text"], told["finish"]) == (free["text"][:at], "stop")
    assert told["tokens"] == free["tokens"][: at + 3]  # the toy's tokens are bytes
    for how in ("--stream", "--no-stream"):
        assert call(*TOY, *WARM, "--stop", stop, how, "hello ") == (0, told["text"] + "\n", "")


def test_a_stop_that_never_comes_changes_nothing() -> None:
    assert call(*TOY, *WARM, "--stop", "never", "hello ") == call(*TOY, *WARM, "hello ")


def test_a_row_that_stopped_leaves_the_others_alone() -> None:
    arguments = (*TOY, *WARM, "--num-samples", "3", "--json", "hello ")
    free = json.loads(call(*arguments).out)["choices"]
    told = json.loads(call(*arguments, "--stop", "r").out)["choices"]
    hit = ["r" in c["text"] for c in free]
    assert any(hit)
    assert not all(hit)
    for a, b, cut in zip(free, told, hit, strict=True):
        assert b["text"] == a["text"].split("r")[0]
        assert b["finish"] == ("stop" if cut else a["finish"])
        assert b["tokens"] == a["tokens"][: a["text"].index("r") + 1 if cut else None]


# The record


def replay(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Run it again from nothing but the record."""
    chosen, loaded = record["settings"], jd.load(record["model"]["source"], dtype=record["model"]["dtype"])
    names = [name for name in chosen if name not in ("num_samples", "top_logprobs", "stop_strings")]
    keys = jax.random.wrap_key_data(np.array(record["keys"]["words"], np.uint32), impl=record["keys"]["impl"])
    out = jd.generate(
        loaded.model,
        loaded.params,
        [record["prompt"]["ids"]] * len(keys),
        key=keys,
        settings=loaded.settings(**{name: chosen[name] for name in names}),
    )
    return [{"tokens": ids, "logprobs": out.logprob[i, : len(ids)]} for i, ids in enumerate(out.to_lists())]


@pytest.mark.parametrize(
    "options", [("--regex", "[a-h]{3}x?", "--banned-ids", "97", "--prefix", "b"), ("--num-samples", "3")], ids=str
)
def test_a_record_is_enough_to_run_it_again(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "run.json"
    arguments = (*TOY, *WARM, *options, "hello ")
    told = call(*arguments, "--record", str(path))
    assert told == call(*arguments)
    record = json.loads(path.read_text())
    again = replay(record)
    assert [r["tokens"] for r in again] == [o["tokens"] for o in record["outputs"]]
    for mine, theirs in zip(again, record["outputs"], strict=True):
        np.testing.assert_allclose(mine["logprobs"], np.float32(theirs["logprobs"]), atol=1e-6)
    assert (
        len({tuple(o["tokens"]) for o in record["outputs"]}) == len(again) == (3 if "--num-samples" in options else 1)
    )


def test_the_fields_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    call(*TOY, *WARM, "--stop", "qqq", "--record", str(path), "hello ")
    record, out = json.loads(path.read_text()), library("hello ")
    assert list(record) == [
        *("format", "version", "versions", "model", "prompt", "settings", "seed", "keys", "outputs")
    ]
    assert (record["format"], record["version"], record["seed"]) == ("jaxdecode-record", 1, 5)
    assert record["versions"]["jaxdecode"] == jd.__version__
    assert record["versions"]["jax"] == jax.__version__
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    kinds = {"dtype": "float32", "quantize": None, "cache_dtype": None, "context_length": None, "steady": False}
    assert record["model"] == {"source": "toy", **kinds, "files": []}
    ids = LOADED.tokenizer.encode("hello ")
    assert record["prompt"] == {"text": "hello ", "system": None, "chat": False, "ids": ids}
    assert record["settings"]["stop_strings"] == ["qqq"]
    (output,) = record["outputs"]
    n = len(output["tokens"])
    for name in ("logprob", "processed_logprob", "margin", "set_margin"):
        np.testing.assert_allclose([float(x) for x in output[f"{name}s"]], getattr(out, name)[0, :n], rtol=1e-5)
    assert record == json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))  # strict JSON


def test_the_record_names_the_models_file_and_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    import tiny_gguf

    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    model, path = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.tiny()), tmp_path / "run.json"
    arguments = ("generate", "--model", str(model), "--max-new-tokens", "4", "--no-compile-cache", "the")
    assert call(*arguments, "--record", str(path)).code == 0
    (file,) = json.loads(path.read_text())["model"]["files"]
    data = model.read_bytes()
    assert file == {"file": "tiny.gguf", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_a_record_that_cannot_be_written_is_told_before_the_model_runs(tmp_path: Path) -> None:
    assert_bad(call(*TOY, "--record", str(tmp_path), "hello "), "got a folder")
    assert_bad(call(*TOY, "--record", str(tmp_path / "no" / "run.json"), "hello "), "no folder")
    with mock.patch.object(os, "access", return_value=False), pytest.raises(PermissionError, match="written"):
        check_target(str(tmp_path / "run.json"))
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1, "b": [{"c": "é"}, {}]})
    assert path.read_text("utf-8") == '{\n "a": 1,\n "b": [\n  {"c": "é"},\n  {}\n ]\n}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"a": math.nan})
    with mock.patch.object(os, "replace", side_effect=OSError("no")), pytest.raises(OSError, match="no"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text("utf-8"))["a"] == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--num-samples", "0"], "--num-samples"),
        (["--top-logprobs", "-1"], "--top-logprobs"),
        (["--top-logprobs", "258"], "top_logprobs"),
        (["--stop", ""], "--stop"),
        (["--best-of", "4"], "--best-of: expected a --temperature above 0"),
        (["--num-samples", "2", "--without-replacement"], "--without-replacement: expected a --temperature above 0"),
        (
            ["--best-of", "2", "--num-samples", "3", "--temperature", "1"],
            "--best-of: expected at least --num-samples 3",
        ),
    ],
)
def test_bad_input(arguments: list[str], about: str) -> None:
    assert_bad(call(*TOY, "hello", *arguments), about)


# The terminal


class Terminal:
    """A stdout that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    show("a\x1b[2Jb\tc\n\x9b\x07\x7fé字")
    assert terminal.text == "a␛[2Jb\tc\n�␇␡é字"
    assert visible("\r") == "␍"


def test_a_pipe_gets_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show("a\x1b[2J")
    assert capsys.readouterr().out == "a\x1b[2J"


@pytest.mark.parametrize(
    ("variables", "colours"), [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False), ({}, False)]
)
def test_colours_only_where_they_are_wanted(variables: dict[str, str], colours: bool) -> None:
    with mock.patch.dict(os.environ, variables, clear=True):
        assert styled("x", "bold", Terminal()) == ("\x1b[1mx\x1b[0m" if colours else "x")  # type: ignore[arg-type]
        assert styled("x", "bold") == "x"


def test_a_table_is_aligned_by_cells() -> None:
    lines = table(("a", "n"), [("字", "1"), ("b", "22")]).splitlines()
    assert lines == ["a    n", "字   1", "b   22"]


# Penalties, bans, and more ways to cut the law

MANY = (
    *("--temperature", "0.9", "--repetition-penalty", "1.2", "--presence-penalty", "0.1", "--frequency-penalty", "0.2"),
    *("--dry", "0.8,1.75,2", "--dry-breakers", "\n", "--dry-breakers", "a b", "--logit-bias", "101=1.5,104=-1"),
    *("--no-repeat-ngram", "4", "--banned-ids", "120,122", "--bad-words", "wor", "--bad-words", "q"),
    *("--min-new-tokens", "6"),
    *("--forced", "0=104,-1=33", "--typical-p", "0.95", "--epsilon", "0.001", "--eta", "0.001", "--top-n-sigma", "3"),
    *("--p-less", "0", "--xtc", "0.3,0.2", "--dynamic-temperature", "0.2,1", "--seed", "5"),
)
FIELDS: dict[str, Any] = {
    "temperature": 0.9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "dry": (0.8, 1.75, 2, [10, 98]),
    "logit_bias": {101: 1.5, 104: -1.0},
    "no_repeat_ngram": 4,
    "top_p": None,
    "banned_ids": [120, 122],
    "bad_words": [[*b"wor"], [*b"q"]],
    "min_new_tokens": 6,
    "forced": {0: 104, -1: 33},
    "typical_p": 0.95,
    "epsilon": 0.001,
    "eta": 0.001,
    "top_n_sigma": 3.0,
    "p_less": 0,
    "xtc": (0.3, 0.2),
    "dynamic_temperature": (0.2, 1.0),
}


def test_every_setting_has_an_option_and_reaches_the_library(tmp_path: Path) -> None:
    """The same tokens as the library's, and the record alone is enough to get them again."""
    path = tmp_path / "run.json"
    told = json.loads(call(*TOY, *MANY, "--json", "--record", str(path), "hello ").out)
    assert told["tokens"] == library("hello ", **FIELDS).to_lists()[0]
    assert told["tokens"][0] == 104
    record = json.loads(path.read_text())
    assert [r["tokens"] for r in replay(record)] == [told["tokens"]]
    options = {name.replace("_", "-") for name in jd.Settings.__dataclass_fields__ if name != "eos"}  # from the model
    listed = call("generate", "--help").out
    assert [name for name in sorted(options) if f"--{name} " not in listed] == []
    for section in (
        "What the whole text may be:",
        "Penalties:",
        "Bans and forced tokens:",
        "More ways to cut the law:",
    ):
        assert listed.count(section) == 1


def test_mirostat_from_the_command_line() -> None:
    told = json.loads(call(*TOY, "--temperature", "1", "--mirostat", "2,0.1", "--seed", "5", "--json", "hello ").out)
    assert told["tokens"] == library("hello ", temperature=1.0, top_p=None, mirostat=(2.0, 0.1)).to_lists()[0]


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--xtc", "0.5"], "xtc: expected P,T, got 0.5"),
        (["--xtc", "0.5,x"], "xtc: expected P,T, got 0.5,x"),
        (["--xtc", "2,0.1"], "xtc probability"),
        (["--dry", "0.8,1.75,2.5"], "dry: expected M,BASE,LEN, got 0.8,1.75,2.5"),
        (["--dry-breakers", "x"], "dry_breakers: expected dry beside it"),
        (["--bad-words", ""], "bad_words: expected a text"),
        (["--logit-bias", "5"], "logit_bias: expected ID=X,..., got 5"),
        (["--banned-ids", "1,a"], "banned_ids: expected ID,..., got 1,a"),
        (["--banned-ids", "257"], "banned_ids: expected token ids in [0, 257), got [257]"),
        (["--min-new-tokens", "33"], "min_new_tokens: expected at most max_new_tokens = 32, got 33"),
        (["--mirostat", "3,0.1", "--top-k", "5"], "mirostat: expected all other filters off"),
        (["--typical-p", "0"], "typical_p"),
    ],
    ids=str,
)
def test_a_setting_that_is_wrong_is_told(arguments: list[str], about: str) -> None:
    assert_bad(call(*TOY, "hello", *arguments), about)
