"""Constraints on the output, compiled on the host: regular expressions, JSON Schema, choices."""

from __future__ import annotations

from jaxdecode.constraints.compiling import check_source, choices, compiled_fields, json_schema, regex
from jaxdecode.constraints.grammar import Grammar, Vocabulary, vocabulary_of
from jaxdecode.constraints.importance import resample

__all__ = [
    "Grammar",
    "Vocabulary",
    "check_source",
    "choices",
    "compiled_fields",
    "json_schema",
    "regex",
    "resample",
    "vocabulary_of",
]
