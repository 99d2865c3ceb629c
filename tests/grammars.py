"""Ten JSON schemas and ten patterns: nesting, enums, numbers within bounds, Unicode, bounded repeats."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema

__all__ = ["GRAMMARS", "PATTERNS", "SCHEMAS", "check"]

SCHEMAS: dict[str, Any] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"type": "string", "format": "email"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "user": {
                "type": "object",
                "properties": {
                    "id": {"type": "integer", "exclusiveMinimum": 0},
                    "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
                },
                "required": ["id", "tags"],
            },
            "active": {"type": "boolean"},
        },
        "required": ["user"],
    },
    "enum": {"enum": ["red", "grün", "青", 7, -1.5, None, True, {"rgb": [0, 0, 255]}]},
    "numbers": {
        "type": "array",
        "items": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 10},
        "minItems": 1,
        "maxItems": 3,
    },
    "unicode": {
        "type": "object",
        "properties": {"größe": {"type": "integer"}, "名前": {"type": "string", "pattern": "^[あ-ん]{1,4}$"}},
        "required": ["größe", "名前"],
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "format": "date"}, {"type": "boolean"}, {"type": "null"}],
        "items": {"type": "integer", "minimum": -9, "maximum": 99},
        "minItems": 2,
        "maxItems": 5,
    },
    "union": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}},
                "required": ["kind", "radius"],
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "square"}, "side": {"type": "integer", "minimum": 1}},
                "required": ["kind", "side"],
            },
        ]
    },
    "references": {
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "$defs": {
            "point": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 9},
                "minItems": 2,
                "maxItems": 2,
            }
        },
    },
    "map": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}, "maxProperties": 3},
    "anything": {"type": "object"},
}
PATTERNS: dict[str, str] = {
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "words": r"[A-Z][a-z]{1,8}( [a-z]{1,8}){0,4}\.",
    "prefix of another": r"(a|ab)(c|bcd)*(d*)",
    "unicode": r"[α-ω]{2,6}|[一-龥]{1,5}|😀+",
    "phone": r"\+\d{1,3} \(\d{3}\) \d{3}-\d{4}",
    "not": r'[^"\n]{0,20}!',
    "classes": r"\w+\s\W?\S{1,3}",
    "hexadecimal": r"(0x[0-9a-fA-F]{1,8},?){1,3}",
    "lazy": r"<b>.{0,12}?</b>",
    "lines": r"(- [^\n]{1,10}\n){1,3}",
}
GRAMMARS: dict[str, tuple[str, Any]] = {
    **{f"schema {name}": ("json_schema", schema) for name, schema in SCHEMAS.items()},
    **{f"regex {name}": ("regex", pattern) for name, pattern in PATTERNS.items()},
}


def check(kind: str, source: Any, text: str) -> None:
    """An independent validator says that ``text`` is a match."""
    if kind == "regex":
        assert re.fullmatch(source, text), text
    else:
        kind_of = jsonschema.Draft202012Validator
        kind_of(source, format_checker=kind_of.FORMAT_CHECKER).validate(json.loads(text))
