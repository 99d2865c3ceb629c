"""Tokenizers from the ``tokenizers`` package's JSON form (``tokenizer.json``).

What each id stands for is read from the JSON: byte-level vocabularies write every byte as a printable character
(GPT-2's alphabet), SentencePiece ones write spaces as U+2581 and single bytes as ``<0xE3>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxdecode.checks import require, shorten
from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["Vocabulary", "byte_alphabet", "import_tokenizers", "open_tokenizer"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def import_tokenizers() -> Any:
    """The ``tokenizers`` package, or an ImportError that says how to get it."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("tokenizers of checkpoints need the package: pip install 'jaxdecode[text]'") from error
    return tokenizers


class Vocabulary(NamedTuple):
    """A tokenizer as JSON text, its number of ids, and what a checkpoint says beside it; see ``Tokenizer``."""

    json: str
    size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    chat_template: str | None


def open_tokenizer(vocabulary: Vocabulary, where: str) -> Tokenizer:
    """The tokenizer of a vocabulary. ValueError, naming ``where`` it came from, if it is damaged.

    Added tokens marked special are the control tokens; other added tokens are ordinary text that is never split.
    """
    tokenizers = import_tokenizers()
    try:
        spec = json.loads(vocabulary.json)
        backend = tokenizers.Tokenizer.from_str(vocabulary.json)
    except Exception as error:  # the package raises a bare Exception
        raise ValueError(f"{where}: expected a tokenizer as JSON, got an error: {shorten(error)}") from None
    backend.encode_special_tokens = True  # control tokens are found by Tokenizer, never by the backend
    backend.no_padding()
    backend.no_truncation()

    def encode_text(part: str) -> list[int]:
        return backend.encode(part, add_special_tokens=False).ids

    added = {token["id"]: token for token in spec.get("added_tokens") or []}
    kinds = _kinds(spec.get("decoder"))
    table = _table(backend.get_vocab(), added, _unescape(kinds, where), where)
    require(len(table) == vocabulary.size, f"{where}: tokenizer", f"{vocabulary.size} ids", len(table))
    return Tokenizer(
        table=table,
        encode_text=encode_text,
        controls={token["content"]: i for i, token in added.items() if token["special"]},
        eos_ids=vocabulary.eos_ids,
        bos_id=vocabulary.bos_id,
        add_bos=vocabulary.add_bos,
        space_prefix="Strip" in kinds,
        chat_template=vocabulary.chat_template,
    )


def _kinds(decoder: Any) -> set[str]:
    """Names of the steps of the decoder."""
    decoder = decoder or {}
    return {decoder.get("type", "")} | {step["type"] for step in decoder.get("decoders", [])}


def _table(vocab: dict[str, int], added: dict[int, Any], unescape: Callable[[str], bytes], where: str) -> list[bytes]:
    """The bytes of each id 0..V-1; every id must be there."""
    by_id = sorted((i, token) for token, i in vocab.items())
    complete = [i for i, _ in by_id] == list(range(len(by_id)))
    require(complete, f"{where}: tokenizer", f"ids 0 to {len(by_id) - 1}, each once", "other ids")
    return [token.encode() if i in added else unescape(token) for i, token in by_id]


def _unescape(kinds: set[str], where: str) -> Callable[[str], bytes]:
    """How a vocabulary entry of this kind is turned into the bytes it stands for."""
    if "ByteLevel" in kinds:
        return _byte_level
    require("ByteFallback" in kinds, f"{where}: tokenizer", "a byte-level or byte-fallback decoder", sorted(kinds))
    return _sentencepiece


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the character that stands for each byte -> the byte.

    Printable bytes of Latin-1 stand for themselves, the others are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_ALPHABET = byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an entry that no text produces, such as a placeholder: it stands for itself
        return token.encode()
