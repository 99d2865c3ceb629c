"""`jaxdecode generate` on the toy model: what it prints, where, and how it ends."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import pytest
from cli_tools import TOY, N, Result, assert_bad, call, expected_text

import jaxdecode

# Text and JSON


def test_prints_what_the_library_generates() -> None:
    result = call(*TOY, "hello ")
    assert result == Result(0, expected_text("hello ") + "\n", "")
    assert len(result.out) > 2


@pytest.mark.parametrize("how", [["--no-stream"], ["--stream"]])
def test_settings_reach_the_draw(how: list[str]) -> None:
    options = ["--temperature", "1.5", "--top-k", "9", "--top-p", "0.95", "--min-p", "0.01", "--seed", "3"]
    text = expected_text("hello ", temperature=1.5, top_k=9, top_p=0.95, min_p=0.01, seed=3)
    assert call(*TOY, "hello ", *options, *how) == Result(0, text + "\n", "")


def test_same_seed_same_text_other_seed_other_text() -> None:
    one, again, other = (call(*TOY, "hello ", "--temperature", "1", "--seed", s).out for s in ("1", "1", "2"))
    assert one == again
    assert one != other


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_reads_stdin_and_drops_one_line_end(arguments: list[str]) -> None:
    assert call(*TOY, *arguments, stdin=b"two words, \n") == call(*TOY, "two words, ")


def test_json_is_one_object_and_nothing_else() -> None:
    result = call(*TOY, "hello ", "--json")
    told = json.loads(result.out)
    assert result == Result(0, json.dumps(told, ensure_ascii=False) + "\n", "")
    assert set(told) == {"model", "text", "tokens", "finish", "prompt_tokens", "completion_tokens"}
    assert told["model"] == "toy"
    assert told["text"] == expected_text("hello ")
    assert told["finish"] == "eos"
    assert told["tokens"] == [*told["text"].encode(), 256]
    assert (told["prompt_tokens"], told["completion_tokens"]) == (6, len(told["tokens"]))


def test_streamed_bytes_that_are_no_text_join_to_the_decoded_text() -> None:
    options = (*TOY, "hello ", "--temperature", "50", "--seed", "7")
    told = json.loads(call(*options, "--json").out)
    assert "�" in told["text"]
    assert told["text"] == jaxdecode.load("toy").tokenizer.decode(told["tokens"])
    assert call(*options).out == told["text"] + "\n"


def test_finish_is_told() -> None:
    told = json.loads(call(*TOY, "hello ", "--json", "--temperature", "50").out)
    assert (told["finish"], told["completion_tokens"]) == ("length", N)
    told = json.loads(call(*TOY, "hello ", "--json", "--max-new-tokens", "0").out)
    assert (told["finish"], told["completion_tokens"], told["text"]) == ("length", 0, "")


def test_dtype_reaches_the_params(monkeypatch: pytest.MonkeyPatch) -> None:
    load, seen = jaxdecode.load, []

    def watched(source: str, **options: Any) -> Any:
        seen.append(load(source, **options))
        return seen[-1]

    monkeypatch.setattr(jaxdecode, "load", watched)
    assert call(*TOY, "hello ", "--dtype", "bfloat16").code == 0
    assert [loaded.params.dtype for loaded in seen] == [jnp.bfloat16]


def test_chat_uses_the_template_and_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    load = jaxdecode.load
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"

    def with_template(source: str, **options: Any) -> Any:
        loaded = load(source, **options)
        return loaded._replace(tokenizer=dataclasses.replace(loaded.tokenizer, chat_template=template))

    monkeypatch.setattr(jaxdecode, "load", with_template)
    count = len("uhi;")
    assert json.loads(call(*TOY, "hi", "--chat", "--json").out)["prompt_tokens"] == count
    count += len("sbe kind;")
    told = json.loads(call(*TOY, "hi", "--chat", "--system", "be kind", "--json").out)
    assert told["prompt_tokens"] == count
    assert json.loads(call(*TOY, "hi", "--json").out)["prompt_tokens"] == 2


def test_a_broken_model_is_told_after_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    load = jaxdecode.load

    def broken(source: str, **options: Any) -> Any:
        loaded = load(source, **options)
        return loaded._replace(params=loaded.params.at[ord("o")].set(jnp.nan))

    monkeypatch.setattr(jaxdecode, "load", broken)
    result = call(*TOY, "hello w", "--json")
    told = json.loads(result.out)
    assert (result.code, told["finish"], told["text"][-1:]) == (1, "nan", "o")
    assert result.err == "jaxdecode: error: the text ends early (nan): the model's logits held NaN or infinity\n"


# Errors


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "warm"], "--temperature"),
        (["--top-k", "-1"], "top_k"),
        (["--top-k", "2.5"], "--top-k"),
        (["--top-p", "0"], "top_p"),
        (["--top-p", "1.01"], "top_p"),
        (["--min-p", "-0.1"], "min_p"),
        (["--max-new-tokens", "-1"], "max_new_tokens"),
        (["--max-new-tokens", "70000"], "context"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "4294967296"], "--seed"),
        (["--dtype", "int3"], "--dtype"),
        (["--model", "toys"], "toys"),
        (["--model", "nowhere.gguf"], "nowhere.gguf"),
        (["--system", "be kind"], "--chat"),
        (["--chat"], "chat template"),
        (["--frobnicate"], "--frobnicate"),
        (["another"], "another"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], about: str) -> None:
    assert_bad(call(*TOY, "hello", *arguments), about)


def test_bad_prompts() -> None:
    assert_bad(call(*TOY, ""), "PROMPT")
    assert_bad(call(*TOY, stdin=b""), "PROMPT")
    assert_bad(call(*TOY, stdin=b"\n"), "PROMPT")
    assert_bad(call(*TOY, stdin=b"\xff\xfe"), "UTF-8")
    assert_bad(call(*TOY, "a\udcff"), "surrogate")
    assert_bad(call(*TOY, stdin=b"a" * 65536), "context")


def test_unknown_command() -> None:
    assert_bad(call("genrate", "hello"), "genrate")
