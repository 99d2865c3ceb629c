"""From a pattern, a schema or choices to a ``Grammar`` over a vocabulary; equal requests are compiled once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from jaxdecode.checks import require, shorten
from jaxdecode.constraints.automaton import byte_automaton
from jaxdecode.constraints.grammar import Grammar, Vocabulary, grammar_of_bytes, vocabulary_of
from jaxdecode.constraints.language import Language, either, text
from jaxdecode.constraints.patterns import parse_regex
from jaxdecode.constraints.schema import schema_language

if TYPE_CHECKING:
    from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["check_source", "choices", "compiled_fields", "json_schema", "regex"]

_VERSION = 1  # of what is compiled and how it is stored: raised whenever either changes


def regex(pattern: str, vocabulary: Tokenizer | Vocabulary | Sequence[bytes], *, folder: Path | None = None) -> Grammar:
    r"""Texts that ``pattern`` matches as a whole, in Python's syntax, as tokens of ``vocabulary``.

    vocabulary: a tokenizer, or the bytes of each id. folder: where compiled grammars are kept between processes.
    ValueError for what is no regular language (look-around, references back), and for what nothing matches.

    >>> grammar = regex("a+b?", [b"a", b"aa", b"b", b"c"])
    >>> [grammar.matches(ids) for ids in ([1, 0, 2], [0], [2], [3])]
    [True, True, False, False]
    """
    return _compiled("regex", pattern, vocabulary_of(vocabulary), folder)


def json_schema(
    schema: Any, vocabulary: Tokenizer | Vocabulary | Sequence[bytes], *, folder: Path | None = None
) -> Grammar:
    """JSON that ``schema`` accepts: JSON Schema 2020-12, as a mapping, or as JSON text. As ``regex`` else.

    ValueError names every keyword that cannot be enforced.

    >>> grammar = json_schema({"enum": ["a", 1]}, [b'"a', b'"', b"1", b"2"])
    >>> [grammar.matches(ids) for ids in ([0, 1], [2], [3])]
    [True, True, False]
    """
    return _compiled("json_schema", schema, vocabulary_of(vocabulary), folder)


def choices(
    options: Sequence[str], vocabulary: Tokenizer | Vocabulary | Sequence[bytes], *, folder: Path | None = None
) -> Grammar:
    """One of the texts ``options``, in any of the ways to write it as tokens. As ``regex`` else.

    >>> choices(["yes", "no"], [b"n", b"o", b"yes"]).matches([0, 1])
    True
    """
    return _compiled("choices", options, vocabulary_of(vocabulary), folder)


def check_source(kind: str, source: Any) -> None:
    """Raise what compiling ``source`` would say of it, whatever the vocabulary. kind: the name of the function."""
    language = _language(kind, _normal(kind, source))
    byte_automaton(language)


def compiled_fields(fields: Mapping[str, Any], tokenizer: Tokenizer, *, folder: Path | None = None) -> dict[str, Any]:
    """Fields of ``Settings`` with patterns, schemas and texts compiled for a tokenizer; what is compiled already stays.

    A ``prefix`` that is a text becomes the ids that encode it.
    """
    out = dict(fields)
    for kind, source in fields.items():
        compiled = source is None or isinstance(source, Grammar)
        if kind in _KINDS and not compiled and not (kind == "choices" and _are_ids(source)):
            out[kind] = _KINDS[kind](source, tokenizer, folder=folder)
        elif kind == "prefix" and isinstance(source, str):
            out[kind] = tokenizer.encode(source, special=False, bos=False)
    return out


def _are_ids(options: Any) -> bool:
    return isinstance(options, (list, tuple)) and not any(isinstance(x, str) for x in options)


_KINDS: dict[str, Callable[..., Grammar]] = {"regex": regex, "json_schema": json_schema, "choices": choices}


def _normal(kind: str, source: Any) -> str:
    """The request as one text, equal for equal ones."""
    if kind == "regex":
        require(isinstance(source, str), "regex", "a pattern", type(source).__name__)
        return source
    if kind == "choices":
        ok = isinstance(source, (list, tuple)) and len(source) > 0 and all(isinstance(x, str) for x in source)
        require(ok, "choices", "a list of texts", source)
        return json.dumps(list(source))
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except ValueError as error:
            raise ValueError(f"json_schema: expected JSON, got {error}: {shorten(source)}") from None
    try:
        return json.dumps(source)  # in its order: properties are written in it
    except (TypeError, ValueError) as error:
        raise ValueError(f"json_schema: expected a schema of JSON values, got {error}") from None


def _language(kind: str, source: str) -> Language:
    if kind == "regex":
        return parse_regex(source)
    if kind == "json_schema":
        return schema_language(json.loads(source))
    return either(map(text, json.loads(source)))


def _compiled(kind: str, source: Any, vocabulary: Vocabulary, folder: Path | None) -> Grammar:
    source = _normal(kind, source)
    if folder is None:
        return _compile(kind, source, vocabulary)
    key = hashlib.sha256(json.dumps([_VERSION, kind, source, vocabulary.digest]).encode()).hexdigest()
    path = folder / f"{key[:32]}.npz"
    grammar = _read(path, kind)
    if grammar is None:
        grammar = _compile(kind, source, vocabulary)
        _write(path, grammar)
    return grammar


@functools.lru_cache(maxsize=32)
def _compile(kind: str, source: str, vocabulary: Vocabulary) -> Grammar:
    return grammar_of_bytes(byte_automaton(_language(kind, source)), vocabulary, kind)


def _read(path: Path, kind: str) -> Grammar | None:
    """A stored grammar; None if there is none that is sound."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            step, classes, accept, start = (stored[name] for name in ("step", "class_of_token", "accept", "start"))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    grammar = Grammar(step, classes, accept, int(start), kind)
    sound = (
        step.ndim == 2
        and accept.shape == step.shape[:1]
        and all(a.dtype == np.int32 for a in (step, classes))
        and step.min() >= 0
        and step.max() < len(step)
        and classes.min() >= 0
        and classes.max() < step.shape[1]
        and 0 < grammar.start < len(step)
    )
    return grammar if sound else None


def _write(path: Path, grammar: Grammar) -> None:
    """Store it in one piece; a folder that cannot be written costs time, nothing else."""
    made = path.with_name(f".unfinished-{secrets.token_hex(8)}.npz")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            np.savez_compressed(
                made,
                step=grammar.step,
                class_of_token=grammar.class_of_token,
                accept=grammar.accept,
                start=np.int64(grammar.start),
            )
            os.replace(made, path)
        finally:
            made.unlink(missing_ok=True)
