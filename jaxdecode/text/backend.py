"""Tokenizers from the ``tokenizers`` package's JSON form (``tokenizer.json``).

What each id stands for is read from the JSON: byte-level vocabularies write every byte as a printable character
(GPT-2's alphabet), SentencePiece ones write spaces as U+2581 and single bytes as ``<0xE3>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxdecode.checks import require, shorten
from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["Vocabulary", "byte_alphabet", "guarded", "import_tokenizers", "open_tokenizer", "parse_tokenizer"]

_LONG = 1 << 16  # characters
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def import_tokenizers() -> Any:
    """The ``tokenizers`` package, or an ImportError that says how to get it."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("tokenizers of checkpoints need the package: pip install 'jaxdecode[text]'") from error
    return tokenizers


class Vocabulary(NamedTuple):
    """A tokenizer as JSON text, how many ids its model has, and what a checkpoint says beside it; see ``Tokenizer``."""

    json: str
    size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool
    chat_template: str | None


def guarded(call: Callable[[], Any], expected: str) -> Any:
    """What ``call`` returns; whatever goes wrong in the ``tokenizers`` package becomes one ValueError."""
    try:
        return call()
    except Exception as error:  # the package raises a bare Exception
        raise ValueError(f"{expected}, got: {shorten(error)}") from None
    except BaseException as error:  # and, where its own code fails, one that is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{expected}, got: {shorten(error)}") from None


def open_tokenizer(vocabulary: Vocabulary, where: str) -> Tokenizer:
    """The tokenizer of a vocabulary. ValueError, naming ``where`` it came from, if it is damaged or not supported.

    Added tokens marked special are the control tokens; other added tokens are ordinary text that is never split.
    """
    tokenizers = import_tokenizers()
    expected = f"{where}: expected a tokenizer as JSON"
    spec = parse_tokenizer(vocabulary.json, where)
    backend = guarded(lambda: _opened(tokenizers, vocabulary.json), expected)
    added = {token["id"]: token for token in spec["added_tokens"]}
    controls = {token["content"]: i for i, token in added.items() if token["special"]}
    if hidden := _hide(spec, controls):
        backend = guarded(lambda: _opened(tokenizers, json.dumps(spec)), expected)
    rest = None
    if _first_part_differs(spec):
        rest = guarded(lambda: _opened(tokenizers, json.dumps(spec)), expected)
    decoding = _decoding(spec.get("decoder"), where)
    shown = {token: content for content, token in hidden.items()}
    by_id = {i: shown.get(token, token) for token, i in backend.get_vocab().items()}
    return Tokenizer(
        table=_table(by_id, len(backend.get_vocab()), added, decoding.unescape, vocabulary.size, where),
        encode_text=_encoder(backend, where),
        encode_rest=None if rest is None else _encoder(rest, where),
        controls=controls,
        marks={token["content"]: marks for token in added.values() if token["special"] and (marks := _marks(token))},
        eos_ids=vocabulary.eos_ids,
        bos_id=vocabulary.bos_id,
        add_bos=vocabulary.add_bos,
        space_prefix=decoding.space_prefix,
        chat_template=vocabulary.chat_template,
        json=vocabulary.json,
    )


def parse_tokenizer(text: str, where: str) -> dict[str, Any]:
    """A ``tokenizer.json`` whose parts that are used here are what they should be. ValueError, naming the part."""
    try:
        spec = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected a tokenizer as JSON, got an error: {shorten(error)}") from None
    require(isinstance(spec, dict) and isinstance(spec.get("model"), dict), where, "a tokenizer with a model", spec)
    model = spec["model"]
    kind = model.get("type")
    require(kind in ("BPE", "Unigram"), f"{where}: model.type", "'BPE' or 'Unigram'", repr(kind))
    vocab = model.get("vocab")
    require(_is_vocab(vocab, kind), f"{where}: model.vocab", "tokens with ids, or pieces with scores", "others")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        value = model.get(option)
        require(not value, f"{where}: model.{option}", "none (it is not supported)", value)
    spec["added_tokens"] = spec.get("added_tokens") or []
    for token in spec["added_tokens"] if isinstance(spec["added_tokens"], list) else [None]:
        require(_is_added(token), f"{where}: added_tokens", "entries with id, content and special", token)
    ids = [token["id"] for token in spec["added_tokens"]]
    require(len(set(ids)) == len(ids), f"{where}: added_tokens", "each id once", "one again")
    return spec


def _is_vocab(vocab: Any, kind: str) -> bool:
    if kind == "BPE":
        return isinstance(vocab, dict) and all(type(i) is int for i in vocab.values())
    return isinstance(vocab, list) and all(
        isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in vocab
    )


def _is_added(token: Any) -> bool:
    text = token.get("content") if isinstance(token, dict) else None
    if not isinstance(text, str) or not text:
        return False
    return type(token.get("id")) is int and token["id"] >= 0 and isinstance(token.get("special"), bool)


def _opened(tokenizers: Any, text: str) -> Any:
    backend = tokenizers.Tokenizer.from_str(text)
    backend.encode_special_tokens = True  # control tokens are found by Tokenizer, never by the backend
    backend.no_padding()
    backend.no_truncation()
    return backend


def _encoder(backend: Any, where: str) -> Callable[[str], list[int]]:
    def ids(text: str) -> list[int]:
        if len(text) < _LONG:
            return backend.encode(text, add_special_tokens=False).ids
        # Keeps no offsets, which takes half the time; but it starts threads, which a later fork complains of.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return lambda text: guarded(lambda: ids(text), f"{where}: expected text with tokens")


def _hide(spec: dict[str, Any], controls: Mapping[str, int]) -> dict[str, str]:
    """Rename, in ``spec``, the control tokens that plain text could be encoded to; the new names are in no text.

    Such are pieces of a unigram model, results of merges, and words that are looked up whole. The new names hold a
    space, which the alphabet of a byte-level model lacks and SentencePiece replaces. Returns new names by content.
    """
    model = spec["model"]
    vocab = model["vocab"]
    if model["type"] == "Unigram":
        found = {piece for piece, _ in vocab if piece in controls}
        names = {token: f" \0{controls[token]}" for token in found}
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab] if names else vocab
    else:
        found = {token for token in controls if token in vocab}
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or [] if found]
        if not model.get("ignore_merges"):
            found &= {"".join(merge) for merge in merges} | {token for token in found if len(token) == 1}
        names = {token: f" \0{controls[token]}" for token in found}
        if names:
            model["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
            model["merges"] = [merge for merge in merges if not found & {*merge, "".join(merge)}]
            model["unk_token"] = names.get(model.get("unk_token"), model.get("unk_token"))
    spec["added_tokens"] = [t | {"content": names.get(t["content"], t["content"])} for t in spec["added_tokens"]]
    return names


def _first_part_differs(spec: dict[str, Any]) -> bool:
    """Whether only the start of a text gets a space in front; ``spec`` then is changed to that of all other parts."""
    step = spec.get("pre_tokenizer") or {}
    parts = step.get("pretokenizers", []) if step.get("type") == "Sequence" else [step]
    first = [part for part in parts if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first"]
    for part in first:
        part["prepend_scheme"] = "never"
    return bool(first)


def _marks(token: Mapping[str, Any]) -> str:
    rules = {"l": "lstrip", "r": "rstrip", "w": "single_word"}
    return "".join(letter for letter, rule in rules.items() if token.get(rule))


class _Decoding(NamedTuple):
    """How a token becomes bytes, and whether a text begins with a space that was not in it."""

    unescape: Callable[[str], bytes]
    space_prefix: bool


def _decoding(decoder: Any, where: str) -> _Decoding:
    """What the decoder's steps do. ValueError for steps that no byte-level or SentencePiece vocabulary has."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    found: set[str] = set()
    for step in steps:
        known = _known_step(step) if isinstance(step, dict) else None
        require(known is not None, f"{where}: decoder", "that of a byte-level or SentencePiece vocabulary", step)
        found |= set(known or ())
    if "bytes" in found:
        return _Decoding(_byte_level, False)
    require("spaces" in found, f"{where}: decoder", "that of a byte-level or SentencePiece vocabulary", decoder)
    return _Decoding(_sentencepiece if "fallback" in found else _spaced, "prefix" in found)


def _known_step(step: dict[str, Any]) -> tuple[str, ...] | None:
    kind = step.get("type")
    if kind in ("ByteLevel", "ByteFallback", "Fuse"):
        return {"ByteLevel": ("bytes",), "ByteFallback": ("fallback",), "Fuse": ()}[kind]
    if kind == "Replace" and (step.get("pattern"), step.get("content")) == ({"String": "\u2581"}, " "):
        return ("spaces",)
    if kind == "Strip" and (step.get("content"), step.get("stop")) == (" ", 0) and step.get("start") in (0, 1):
        return ("prefix",) if step["start"] else ()
    if kind == "Metaspace" and step.get("replacement") == "\u2581":
        bare = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
        return ("spaces",) if bare else ("spaces", "prefix")
    return None


def _table(
    by_id: Mapping[int, str],
    count: int,
    added: Mapping[int, Any],
    unescape: Callable[[str], bytes],
    size: int,
    where: str,
) -> list[bytes]:
    """The bytes of each id of the model; b"" for one that the tokenizer does not have.

    Added tokens are their text; but one that is no control token may have U+2581 for a space, as Gemma's runs of them.
    """
    require(len(by_id) == count, f"{where}: tokenizer", "each id once", f"{count - len(by_id)} of them again")
    require(max(by_id, default=0) < size, f"{where}: tokenizer", f"ids below {size}", max(by_id, default=0))
    wrong = [i for i, token in added.items() if by_id.get(i) != token["content"]]
    require(not wrong, f"{where}: added_tokens", "the ids that their contents have", wrong)
    table = [b""] * size
    for i, token in by_id.items():
        whole = i in added and (added[i]["special"] or unescape is _byte_level)
        table[i] = token.encode() if whole else unescape(token)
    return table


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _spaced(token)


def _spaced(token: str) -> bytes:
    return token.replace("\u2581", " ").encode()


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
