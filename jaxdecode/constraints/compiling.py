"""From a pattern, a schema or choices to a ``Grammar`` over a vocabulary; equal requests are compiled once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from jaxdecode.checks import require, shorten
from jaxdecode.constraints.automaton import byte_automaton
from jaxdecode.constraints.grammar import Grammar, Vocabulary, grammar_of_bytes, vocabulary_of
from jaxdecode.constraints.language import either, text
from jaxdecode.constraints.regex import parse_regex
from jaxdecode.constraints.schema import schema_language

if TYPE_CHECKING:
    from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["choices", "json_schema", "regex"]

_VERSION = 1  # of what is compiled and how it is stored: raised whenever either changes


def regex(
    pattern: str, vocabulary: Tokenizer | Vocabulary | Sequence[bytes], *, folder: Path | None = None
) -> Grammar:
    r"""Texts that ``pattern`` matches as a whole, in Python's syntax, as tokens of ``vocabulary``.

    vocabulary: a tokenizer, or the bytes of each id. folder: where compiled grammars are kept between processes.
    ValueError for what is no regular language (look-around, references back), and for what nothing matches.

    >>> grammar = regex("a+b?", [b"a", b"aa", b"b", b"c"])
    >>> [grammar.matches(ids) for ids in ([1, 0, 2], [0], [2], [3])]
    [True, True, False, False]
    """
    require(isinstance(pattern, str), "regex", "a pattern", type(pattern).__name__)
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
    if isinstance(schema, str):
        source = schema
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"json_schema: expected JSON, got {error}: {shorten(source)}") from None
    try:
        source = json.dumps(schema)  # in its order: properties are written in it
    except (TypeError, ValueError) as error:
        raise ValueError(f"json_schema: expected a schema of JSON values, got {error}") from None
    return _compiled("json_schema", source, vocabulary_of(vocabulary), folder)


def choices(
    options: Sequence[str], vocabulary: Tokenizer | Vocabulary | Sequence[bytes], *, folder: Path | None = None
) -> Grammar:
    """One of the texts ``options``, in any of the ways to write it as tokens. As ``regex`` else.

    >>> choices(["yes", "no"], [b"n", b"o", b"yes"]).matches([0, 1])
    True
    """
    ok = isinstance(options, (list, tuple)) and len(options) > 0 and all(isinstance(x, str) for x in options)
    require(ok, "choices", "a list of texts", options)
    return _compiled("choices", json.dumps(list(options)), vocabulary_of(vocabulary), folder)


def _compiled(kind: str, source: str, vocabulary: Vocabulary, folder: Path | None) -> Grammar:
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
    if kind == "regex":
        language = parse_regex(source)
    elif kind == "json_schema":
        language = schema_language(json.loads(source))
    else:
        language = either(map(text, json.loads(source)))
    return grammar_of_bytes(byte_automaton(language), vocabulary, kind)


def _read(path: Path, kind: str) -> Grammar | None:
    """A stored grammar; None if there is none that is sound."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            step, classes, accept, start = (stored[name] for name in ("step", "class_of_token", "accept", "start"))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    grammar = Grammar(step, classes, accept, int(start), kind)
    sound = (
        step.ndim == 2
        and accept.shape == step.shape[:1]
        and all(a.dtype == np.int32 for a in (step, classes))
        and 0 <= step.min()
        and step.max() < len(step)
        and 0 <= classes.min()
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
