"""Vocabularies of GGUF files as ``tokenizer.json`` text.

A GGUF file names its tokenizer by ``tokenizer.ggml.model``: "gpt2" is byte-level BPE, "llama" SentencePiece BPE, "t5"
SentencePiece unigram. For byte-level BPE ``tokenizer.ggml.pre`` says how text is cut into words first.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdecode.checks import require
from jaxdecode.text.backend import Vocabulary, guarded, import_tokenizers
from jaxdecode.text.pre_tokenizers import PRE_TOKENIZERS

__all__ = ["gguf_vocabulary"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type

_LONGEST = 256  # characters of a SentencePiece token; published vocabularies stay under 130

_NEVER_STRIP = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's control tokens

# Ends of a turn, which early files of chat models leave out of their metadata.
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


def gguf_vocabulary(fields: Mapping[str, Any], where: str) -> Vocabulary:
    """The vocabulary in the metadata ``fields`` of a GGUF file.

    ValueError, naming ``where`` and the field, for a tokenizer of another kind, an unknown pre-tokenizer, or
    inconsistent lists.
    """
    import_tokenizers()
    read = _Fields(fields, where)
    kind = read.one("model", str)
    tokens = read.many("tokens", str)
    require(len(set(tokens)) == len(tokens) > 0, read.name("tokens"), "different tokens, at least one", "repeated ones")
    types = read.many("token_type", int, len(tokens), [NORMAL] * len(tokens))
    if kind == "gpt2":
        backend, bos_default = _byte_level_bpe(read, tokens)
    elif kind == "llama":
        backend, bos_default = _sentencepiece_bpe(read, tokens, types), True
    elif kind == "t5":
        backend, bos_default = _sentencepiece_unigram(read, tokens, types), False
    else:
        raise ValueError(f"{read.name('model')}: expected 'gpt2', 'llama' or 't5', got {kind!r}")
    # A file does not say that control tokens take the white space after them along, as those of Phi-3 do.
    strips = kind == "llama" and fields.get("general.architecture") == "phi3"
    _add_tokens(backend, tokens, types, strips)
    bos_id = read.id("bos_token_id", len(tokens))
    if bos_id is None and kind == "llama":
        bos_id = tokens.index("<s>") if "<s>" in tokens else None
    template = fields.get("tokenizer.chat_template")
    require(isinstance(template, str | None), f"{where}: tokenizer.chat_template", "a text", template)
    return Vocabulary(
        json=backend.to_str(),
        eos_ids=_eos_ids(read, tokens, types),
        bos_id=bos_id,
        add_bos=read.one("add_bos_token", bool, bos_default and bos_id is not None),
        chat_template=template,
        size=len(tokens),
    )


class _Fields:
    """Typed access to ``tokenizer.ggml.*``."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self._where = fields, where

    def name(self, key: str) -> str:
        return f"{self._where}: tokenizer.ggml.{key}"

    def one(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._fields.get(f"tokenizer.ggml.{key}", default)
        good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        require(good, self.name(key), f"a value of type {kind.__name__}", value)
        return value

    def id(self, key: str, vocab_size: int) -> int | None:
        if f"tokenizer.ggml.{key}" not in self._fields:
            return None
        value = self.one(key, int)
        require(0 <= value < vocab_size, self.name(key), f"an id in [0, {vocab_size})", value)
        return int(value)

    def many(self, key: str, kind: type, length: int | None = None, default: list[Any] | None = None) -> list[Any]:
        values = self._fields.get(f"tokenizer.ggml.{key}", default)
        values = values.tolist() if hasattr(values, "tolist") else values
        good = isinstance(values, list) and all(isinstance(v, kind) for v in values[:1])
        require(good, self.name(key), f"a list of {kind.__name__}", values[:1] if isinstance(values, list) else values)
        assert values is not None
        require(length is None or len(values) == length, self.name(key), f"{length} entries", len(values))
        return values


def _eos_ids(read: _Fields, tokens: list[str], types: list[int]) -> tuple[int, ...]:
    declared = [read.id(key, len(tokens)) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    by_text = [i for i, token in enumerate(tokens) if token in _END_OF_TURN and types[i] == CONTROL]
    return tuple(dict.fromkeys(i for i in [*declared, *by_text] if i is not None))


def _byte_level_bpe(read: _Fields, tokens: list[str]) -> tuple[Any, bool]:
    """The backend, and whether texts begin with begin-of-sequence if the file does not say."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    word = read.one("pre", str, "default")  # files from before the field existed mean this one
    known = PRE_TOKENIZERS.get(word)
    near = difflib.get_close_matches(word[:64], PRE_TOKENIZERS) or ["llama-bpe", "qwen2", "gpt-2"]
    expected = f"one of the {len(PRE_TOKENIZERS)} that are known, such as {', '.join(near)}"
    require(known is not None, read.name("pre"), expected, repr(word))
    assert known is not None
    merges = []
    for merge in read.many("merges", str):
        left, space, right = merge.partition(" ")
        require(bool(left and space and right), read.name("merges"), "two tokens with a space between them", merge)
        merges.append((left, right))
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(_made(BPE, read.name("merges"), vocab, merges, ignore_merges=known.whole_words))
    if known.composed:
        backend.normalizer = normalizers.NFC()
    cut = [pre_tokenizers.Split(Regex(split), "isolated") for split in known.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, known.add_bos


def _sentencepiece_bpe(read: _Fields, tokens: list[str], types: list[int]) -> Any:
    from tokenizers import Tokenizer, normalizers
    from tokenizers.models import BPE

    scores = read.many("scores", float, len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    longest = max(tokens, key=len)  # the search for merges takes the square of it
    require(len(longest) <= _LONGEST, read.name("tokens"), f"pieces of at most {_LONGEST} characters", longest)
    merges = _merges_from_scores(vocab, types, scores)
    model = _made(BPE, read.name("tokens"), vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    backend = Tokenizer(model)
    spaces = [normalizers.Replace(" ", "\u2581")]
    prefix = read.one("add_space_prefix", bool, True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *spaces] if prefix else spaces)
    backend.decoder = _sentencepiece_decoder(prefix)
    return backend


def _sentencepiece_decoder(prefix: bool) -> Any:
    from tokenizers import decoders

    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


def _sentencepiece_unigram(read: _Fields, tokens: list[str], types: list[int]) -> Any:
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import Unigram

    scores = read.many("scores", float, len(tokens))
    require(all(map(math.isfinite, scores)), read.name("scores"), "finite numbers", "others")
    unknown = read.id("unknown_token_id", len(tokens))
    if unknown is None:
        unknown = next((i for i, kind in enumerate(types) if kind == UNKNOWN), None)
    require(unknown is not None, read.name("unknown_token_id"), "an id for what has no token", None)
    # SentencePiece takes its byte, control and unused pieces for no text: here they have no better score than another,
    # and either a name that is in no text, or a cut through their names.
    least = min((score for score, kind in zip(scores, types, strict=True) if kind == NORMAL), default=0.0)
    vocab = [
        (f" \0{i}" if kind == UNUSED else token, score if kind in (NORMAL, USER_DEFINED) else least)
        for i, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True))
    ]
    backend = Tokenizer(_made(Unigram, read.name("tokens"), vocab, unknown, byte_fallback=BYTE in types))
    if BYTE in types:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated")
    steps: list[Any] = []
    if charsmap := read.many("precompiled_charsmap", int, default=[]):
        steps.append(
            _made(normalizers.Precompiled, read.name("precompiled_charsmap"), bytes(n % 256 for n in charsmap))
        )
    if read.one("remove_extra_whitespaces", bool, False):
        steps += [normalizers.Replace(Regex(" +"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
    prefix = read.one("add_space_prefix", bool, False)
    steps += [normalizers.Prepend("\u2581")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    backend.decoder = _sentencepiece_decoder(prefix)
    return backend


def _merges_from_scores(vocab: dict[str, int], types: list[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union has the best score: as a list of merges, best first."""
    plain = {token: i for token, i in vocab.items() if types[i] == NORMAL}
    merges = []
    for token, i in plain.items():
        for cut in range(1, len(token)):
            left, right = plain.get(token[:cut]), plain.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[i], i, left, right, token[:cut], token[cut:]))
    return [(left, right) for *_, left, right in sorted(merges)]


def _made(kind: Any, where: str, *values: Any, **options: Any) -> Any:
    """A part of the backend. ValueError for what the ``tokenizers`` package refuses."""
    return guarded(lambda: kind(*values, **options), f"{where}: expected a consistent vocabulary")


def _add_tokens(backend: Any, tokens: list[str], types: list[int], strips: bool) -> None:
    """Control tokens, and user-defined ones, which are text that is never split."""
    from tokenizers import AddedToken

    for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        chosen = [t for t, kind in zip(tokens, types, strict=True) if kind in kinds and t]
        right = {token for token in chosen if strips and token not in _NEVER_STRIP and (special or token == "</s>")}
        added = [AddedToken(t, special=special, normalized=False, rstrip=t in right) for t in chosen]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
