"""The tokenizer and the chat template of every family: the ids and texts that transformers makes of the same files.

From Hugging Face directories, from GGUF files with the same words, and from what ``save`` writes. Goldens are made by
scripts/make_goldens_tokenizers.py; what stands in the files, by tests/tiny_tokenizers.py and tests/tiny_templates.py.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import FAMILIES, Words, files, gguf_fields, in_gguf
from tokenizer_texts import CHATS, TEXTS

from jaxdecode.checkpoint.hf_tokenizer import hf_vocabulary, tokenizer_files
from jaxdecode.text import Tokenizer
from jaxdecode.text.backend import open_tokenizer
from jaxdecode.text.gguf_vocab import gguf_vocabulary

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "tokenizers.json").read_text("utf-8"))
WORDS = Words(**GOLDENS["words"])
ANSWERS: dict[str, Any] = GOLDENS["families"]
WITH_TEMPLATE = [name for name in FAMILIES if "chats" in ANSWERS[name]]


def from_directory(written: dict[str, Any], name: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        for file, value in written.items():
            (Path(folder) / file).write_text(json.dumps(value), "utf-8")
        size = len(written["tokenizer.json"]["model"]["vocab"])
        return open_tokenizer(hf_vocabulary(Path(folder), {}, {}, size), name)


@functools.cache
def tokenizer(name: str, source: str = "directory") -> Tokenizer:
    if source == "gguf":
        return open_tokenizer(gguf_vocabulary(gguf_fields(name, WORDS), name), name)
    made = from_directory(files(name, WORDS), name)
    return made if source == "directory" else from_directory(tokenizer_files(made), name)


SOURCES = [(name, source) for name in FAMILIES for source in ("directory", "gguf", "saved")]
SOURCES = [(name, source) for name, source in SOURCES if source != "gguf" or in_gguf(name)]


@pytest.mark.parametrize(("name", "source"), SOURCES)
def test_ids_and_texts_are_those_of_transformers(name: str, source: str) -> None:
    made = tokenizer(name, source)
    for text, (ids, shown, plain) in zip(TEXTS, ANSWERS[name]["cases"], strict=True):
        if source == "gguf" and "\u2581" in text:
            continue  # there it is a space in a piece, but not in a token that is never split
        assert made.encode(text) == ids, text
        assert made.decode(ids, skip_special_tokens=False) == shown, text
        assert made.decode(ids) == plain, text


@pytest.mark.parametrize("name", WITH_TEMPLATE)
@pytest.mark.parametrize("chat", CHATS)
def test_chats_are_those_of_transformers(name: str, chat: str) -> None:
    case, golden = dict(CHATS[chat]), ANSWERS[name]["chats"][chat]
    messages, adds = case.pop("conversation"), case.pop("add_generation_prompt", False)
    tools, variables = case.pop("tools", None), case
    for source in ("directory", "gguf") if in_gguf(name) else ("directory",):
        made = tokenizer(name, source)
        if "refused" in golden:
            with pytest.raises(ValueError, match="chat template: ") as caught:
                made.chat(messages, adds, tools=tools, variables=variables)
            assert golden["refused"][:40] in str(caught.value)
            continue
        assert made.apply_chat_template(messages, adds, tools=tools, variables=variables) == golden["text"]
        assert made.chat(messages, adds, tools=tools, variables=variables) == golden["ids"]


def test_families_without_a_template_say_so() -> None:
    for name in FAMILIES.keys() - set(WITH_TEMPLATE):
        with pytest.raises(ValueError, match="expected a checkpoint with a chat template"):
            tokenizer(name).chat([{"role": "user", "content": "x"}])


def test_the_goldens_reach_what_they_should() -> None:
    """Merges, byte fallback, control tokens and tokens that are never split, refusals and calls of tools."""
    for name, family in FAMILIES.items():
        spec, used = files(name, WORDS)["tokenizer.json"], {i for case in ANSWERS[name]["cases"] for i in case[0]}
        vocab = spec["model"]["vocab"]
        special = {token["id"]: token["special"] for token in spec["added_tokens"]}
        assert True in {special.get(i) for i in used}, name
        assert (False in special.values()) == (False in {special.get(i) for i in used}), name
        if family.kind == "pieces":
            assert any(vocab[f"<0x{b:02X}>"] in used for b in range(256)), name
        assert len(used) > 150, name
    refused = {name for name in WITH_TEMPLATE if any("refused" in chat for chat in ANSWERS[name]["chats"].values())}
    assert refused >= {"llama2", "llama3", "mistral", "mistral v3", "mixtral", "gemma2", "gemma3"}
    called = {name for name in WITH_TEMPLATE if "Zürich" in ANSWERS[name]["chats"]["called"].get("text", "")}
    assert called >= {"llama3", "mistral v3", "qwen2", "qwen3"}
