"""Drafts at the command line: the same text, what became of them, and what is refused."""

from __future__ import annotations

import json

import pytest
from cli_tools import assert_bad, call

import jaxdecode as jd
from jaxdecode.cli.drafting import _check_tokens
from jaxdecode.cli.writing import RowText

TOY = ("generate", "--model", "toy", "--max-new-tokens", "40")


def test_the_same_text_and_a_line_about_the_drafts() -> None:
    plain = json.loads(call(*TOY, "--json", "a word a word a wo").out)
    for how in (("--prompt-lookup", "5"), ("--draft-model", "toy", "--draft-length", "3")):
        told = json.loads(call(*TOY, "--json", *how, "a word a word a wo").out)
        counts = told.pop("acceptance")
        assert told == plain
        assert 0 < counts["accepted"] <= counts["drafted"]
        code, out, err = call(*TOY, *how, "a word a word a wo")
        assert (code, out) == (0, plain["text"] + "\n")
        line = f"{counts['accepted']} of {counts['drafted']} drafted tokens accepted, "
        assert err == line + f"{len(plain['tokens'])} written\n"


def test_a_stop_inside_a_draft_ends_the_tokens_there() -> None:
    loaded = jd.load("toy")
    text = RowText(loaded.tokenizer, stops=["cd"])
    assert text.push(list(b"abcdef")) == "ab"
    assert text.tokens == list(b"abcd")
    assert text.push(list(b"g")) == ""
    assert text.text == "ab"


def test_what_is_refused() -> None:
    assert_bad(call(*TOY, "--draft-length", "3", "x"), "--draft-length: expected --draft-model or --draft-quantize")
    assert_bad(call(*TOY, "--draft-model", "toy", "--prompt-lookup", "3", "x"), "--prompt-lookup: expected no draft")
    assert_bad(call(*TOY, "--prompt-lookup", "0", "x"), "prompt_lookup: expected a whole number >= 1")


def test_a_draft_model_must_have_the_same_tokens() -> None:
    loaded = jd.load("toy")
    _check_tokens(loaded, loaded)

    class Other:
        vocab_size = 257

        def id_to_bytes(self, token: int, skip_special_tokens: bool = True) -> bytes:
            return b"?" if token == 65 else bytes([token])

    with pytest.raises(ValueError, match="whose token 65 is b'A', got b'\\?'"):
        _check_tokens(loaded, loaded._replace(tokenizer=Other()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vocabulary of 257 tokens, got 5"):
        _check_tokens(loaded, loaded._replace(config=type("Config", (), {"vocab_size": 5})()))
