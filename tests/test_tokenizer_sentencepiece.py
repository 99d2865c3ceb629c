"""GGUF's SentencePiece vocabularies: the ids that SentencePiece itself gives (goldens), BPE and unigram."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxdecode.text import Tokenizer
from jaxdecode.text.backend import open_tokenizer
from jaxdecode.text.gguf_vocab import gguf_vocabulary

MODELS = json.loads((Path(__file__).parent / "goldens" / "sentencepiece.json").read_text("utf-8"))["models"]
UNIGRAMS = [name for name in MODELS if name.startswith("unigram")]


def fields_of(name: str) -> dict[str, Any]:
    """The model as the metadata of a GGUF file."""
    model = MODELS[name]
    fields = {
        "model": "t5" if name in UNIGRAMS else "llama",
        "tokens": model["pieces"],
        "scores": np.array(model["scores"], np.float32),
        "token_type": np.array(model["types"], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": False,
        "add_space_prefix": model["add_space_prefix"],
        "remove_extra_whitespaces": model["remove_extra_whitespaces"],
        "precompiled_charsmap": np.array(model["charsmap"], np.uint8),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


@functools.cache
def made(name: str) -> Tokenizer:
    return open_tokenizer(gguf_vocabulary(fields_of(name), name), name)


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_texts_of_sentencepiece(name: str) -> None:
    tokenizer = made(name)
    cases = [case for case in MODELS[name]["cases"] if "[user]" not in case[0] or not tokenizer.space_prefix]
    assert len(cases) > 30
    for text, ids, decoded in cases:
        assert tokenizer.encode(text, special=False) == ids, text
        known = 0 not in ids  # an unknown character is written as U+2047 there, and is a control token here
        assert not known or tokenizer.decode(ids) == decoded, text


def test_a_text_after_a_token_has_its_own_space_in_front() -> None:
    """So llama.cpp and Hugging Face's legacy tokenizers do it; SentencePiece knows only the start of the whole text."""
    tokenizer = made("bpe")
    alone = tokenizer.encode("cat", special=False)
    assert tokenizer.encode("[user]cat", special=False) == [MODELS["bpe"]["pieces"].index("[user]"), *alone]
    assert tokenizer.encode("</s>cat") == [2, *alone]


def test_goldens_reach_every_kind_of_piece() -> None:
    for name, model in MODELS.items():
        used = {model["types"][i] for _, ids, _ in model["cases"] for i in ids}
        assert used == ({1, 2, 4} if "without bytes" in name else {1, 4, 6}), name


@pytest.mark.parametrize("name", ["bpe", "bpe without prefix", "unigram"])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text() | st.text(alphabet="the cats 日é\n") | st.sampled_from(["<0x41>", "</s><s>", "  [user]  "]))
@example(text="a\u0301\u200d\u202eשלום 👩\u200d👧\x00")
def test_exact_round_trip(name: str, text: str) -> None:
    text = text.replace("▁", "_").replace("[user]", "user")  # a space; a token that has a space after it
    assert made(name).decode(made(name).encode(text, special=False)) == text


@pytest.mark.parametrize("name", MODELS)
def test_control_and_byte_pieces_are_no_text(name: str) -> None:
    tokenizer = made(name)
    plain = tokenizer.encode("a</s>b<s>c<0x41>d", special=False)
    assert not {1, 2} & set(plain)
    if "without bytes" not in name:
        assert MODELS[name]["pieces"].index("<0x41>") not in plain
        assert tokenizer.decode(plain) == "a</s>b<s>c<0x41>d"
    assert tokenizer.encode("a</s>")[-1] == 2


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scores", np.full(3, 1.0), "scores: expected 293 entries"),
        ("scores", np.full(293, np.nan), "scores: expected finite numbers"),
        ("unknown_token_id", 10**6, "unknown_token_id"),
        ("precompiled_charsmap", np.arange(7, dtype=np.uint8), "precompiled_charsmap: expected a consistent"),
        ("precompiled_charsmap", "text", "precompiled_charsmap"),
        ("add_space_prefix", 1, "add_space_prefix"),
        ("remove_extra_whitespaces", "no", "remove_extra_whitespaces"),
    ],
)
def test_bad_fields_of_a_unigram_vocabulary(key: str, value: Any, message: str) -> None:
    fields = fields_of("unigram") | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ValueError, match=message):
        gguf_vocabulary(fields, "file")


def test_a_unigram_vocabulary_needs_an_unknown_token() -> None:
    fields = fields_of("unigram")
    del fields["tokenizer.ggml.unknown_token_id"]
    assert gguf_vocabulary(fields, "file").size == 293  # found by its type
    fields["tokenizer.ggml.token_type"] = np.where(fields["tokenizer.ggml.token_type"] == 2, 1, 1)
    with pytest.raises(ValueError, match="unknown_token_id"):
        gguf_vocabulary(fields, "file")


def test_defaults_of_a_unigram_vocabulary() -> None:
    fields = fields_of("unigram")
    for key in ("add_bos_token", "add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap"):
        del fields[f"tokenizer.ggml.{key}"]
    tokenizer = open_tokenizer(gguf_vocabulary(fields, "file"), "file")
    assert (tokenizer.add_bos, tokenizer.space_prefix) == (False, False)
    assert tokenizer.decode(tokenizer.encode(" the cat ")) == " the cat "
