"""Patterns and schemas as automata over bytes: exactly the texts that Python's ``re`` and jsonschema accept."""

from __future__ import annotations

import itertools
import json
import re
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from grammars import SCHEMAS
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdecode.constraints import numerals
from jaxdecode.constraints.automaton import ByteAutomaton, byte_automaton
from jaxdecode.constraints.patterns import parse_regex
from jaxdecode.constraints.schema import schema_language

ALPHABET = 'ab"\n0é€😀'  # one to four bytes each
TEXTS = ["".join(t) for n in range(4) for t in itertools.product(ALPHABET, repeat=n)]


def accepts(automaton: ByteAutomaton, text: str | bytes) -> bool:
    state = automaton.start
    for byte in text.encode() if isinstance(text, str) else text:
        state = automaton.step[state, byte]
    return bool(automaton.accept[state])


def accepted(automaton: ByteAutomaton) -> list[str]:
    return [text for text in TEXTS if accepts(automaton, text)]


def assert_python_agrees(pattern: str) -> None:
    expected = [text for text in TEXTS if re.fullmatch(pattern, text)]
    assert accepted(byte_automaton(parse_regex(pattern))) == expected, pattern


@pytest.mark.parametrize(
    "pattern",
    [
        *("a|ab", "(a|ab)(b|abb)*", "a*?b+", "", "()", "(a*)*b", '(?:a|b)?"{2,}', "(?P<x>a)b?", "a{2", "a{,2}b{1,}"),
        *("[^a]{2,3}", ".{2}", "[]a]", "[^]a]", "[a-é]*€", "[b-]+", r"[\d\n]*", r"[^\W\d]+", r"\s?\S*", r"\w+\D?"),
        *("^a|b$", "^$", r"\Aa\Z", "a??b", r"\u20ac[\U0001F600é]|\x61{,2}", r"\"\.?", "}]{", "a{x}", r"[\b]?a"),
    ],
)
def test_pattern_accepts_what_python_does(pattern: str) -> None:
    assert_python_agrees(pattern)


def patterns() -> Any:
    atom = st.sampled_from(["a", "b", "é", "€", ".", "[^a]", "[a-é]", r"\w", r"\s", "😀", '"'])
    return st.recursive(
        atom,
        lambda inner: st.one_of(
            st.builds("{}{}".format, inner, inner),
            st.builds("(?:{}|{})".format, inner, inner),
            st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"])),
        ),
        max_leaves=6,
    )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(patterns())
def test_random_pattern_accepts_what_python_does(pattern: str) -> None:
    assert_python_agrees(pattern)


def test_bytes_that_are_no_text_are_never_accepted() -> None:
    """Every sequence of up to three bytes of an alphabet with lead, continuation, overlong and surrogate bytes."""
    automaton = byte_automaton(parse_regex(r"(.|\n)*"))
    some = [0x00, 0x41, 0x7F, 0x80, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xF5, 0xFF]
    for n in range(4):
        for data in map(bytes, itertools.product(some, repeat=n)):
            try:
                data.decode("utf-8")
                text = True
            except UnicodeDecodeError:
                text = False
            assert accepts(automaton, data) == text, data
    for code in (0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x40000, 0xFFFFF, 0x100000, 0x10FFFF):
        assert accepts(automaton, chr(code))


@pytest.mark.parametrize("letter", "dDwWsS")
def test_classes_are_those_of_python(letter: str) -> None:
    automaton = byte_automaton(parse_regex(f"\\{letter}"))
    codes = [*range(0x3000), *range(0xFF00, 0x10000, 3), *range(0x10000, 0x1FFFF, 61)]
    for c in map(chr, codes):
        assert accepts(automaton, c) == bool(re.fullmatch(f"\\{letter}", c)), hex(ord(c))


@pytest.mark.parametrize(
    "pattern", ["a^", "(^a)", "(a$)", "$a", "(?=a)", "(?i)a", r"(a)\1", r"\b", "a++", "a**", r"\p{L}"]
)
def test_what_is_not_regular_or_not_supported_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^regex: .*(supported|repetition|nothing)"):
        parse_regex(pattern)


@pytest.mark.parametrize("pattern", ["(a", "a)", "[a", "*a", "a{3,2}", r"\x1", "[b-a]", "a{99999}", "(?P<1>a)", "a\\"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"^regex: expected"):
        parse_regex(pattern)


@pytest.mark.parametrize("pattern", [r"[^\s\S]", r"a[^\w\W]+"])
def test_a_pattern_that_nothing_matches_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"expected a grammar that some text matches"):
        byte_automaton(parse_regex(pattern))


def test_a_pattern_that_grows_without_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected at most .* states"):
        byte_automaton(parse_regex("(a|b)*a(a|b){20}"))
    with pytest.raises(ValueError, match=r"expected at most .* parts"):
        byte_automaton(parse_regex("((a{1000}b){1000})"))


# Numbers


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-5, 17), (3, None), (None, -8), (99, 1203), (-1000, -10), (-1, 1)])
def test_integers_are_exactly_those_within_the_bounds(low: int | None, high: int | None) -> None:
    automaton = byte_automaton(numerals.integers(low, high))
    for n in range(-1500, 1500):
        inside = (low is None or n >= low) and (high is None or n <= high)
        assert accepts(automaton, str(n)) == inside
    assert not any(accepts(automaton, text) for text in ("-0", "01", "-01", "", "-", "1.0"))


@pytest.mark.parametrize(
    ("low", "high", "open_low", "open_high"),
    [
        ("0", "1", False, False),
        ("0", "1", True, True),
        ("-1.5", "2.25", False, True),
        ("0.1", "0.13", True, False),
        ("2.5", "2.5", False, False),
        (None, "-0.5", False, True),
        ("3.07", None, True, False),
        ("-3.2", "-1", True, True),
    ],
)
def test_numbers_are_exactly_those_within_the_bounds(low: Any, high: Any, open_low: bool, open_high: bool) -> None:
    a, b = (None if x is None else Decimal(x) for x in (low, high))
    automaton = byte_automaton(numerals.numbers(a, b, open_low, open_high))
    fractions = ["", *("." + "".join(d) for n in (1, 2, 3) for d in itertools.product("01257", repeat=n))]
    for text in (whole + f for whole in ("0", "1", "2", "3", "10", "-0", "-1", "-3") for f in fractions):
        x = Decimal(text)
        inside = (a is None or x > a or (x == a and not open_low)) and (
            b is None or x < b or (x == b and not open_high)
        )
        assert accepts(automaton, text) == (inside and not (x == 0 and text.startswith("-"))), text


# JSON Schema


def shortest_to_match(automaton: ByteAutomaton) -> np.ndarray:
    far = np.where(automaton.accept, 0, 10**6)
    while True:
        nearer = np.minimum(far, far[automaton.step].min(1) + 1)
        nearer[0] = 10**6
        if (nearer == far).all():
            return far
        far = nearer


def random_texts(automaton: ByteAutomaton, count: int, soft: int = 60) -> list[str]:
    """Random walks to a match; after ``soft`` bytes by the shortest way."""
    rng, far, out = np.random.default_rng(0), shortest_to_match(automaton), []
    while len(out) < count:
        state, text = automaton.start, b""
        while True:
            nexts = automaton.step[state]
            ways = np.flatnonzero(far[nexts] < 10**6)
            if len(text) > soft:
                ways = ways[far[nexts[ways]] == far[nexts[ways]].min(initial=10**6)]
            if automaton.accept[state] and (len(ways) == 0 or len(text) > soft or rng.random() < 0.2):
                out.append(text.decode())
                break
            byte = rng.choice(ways)
            text, state = text + bytes([byte]), nexts[byte]
    return out


MORE: list[Any] = [
    *({"type": "string", "minLength": 2, "maxLength": 3}, {"type": "string"}, {"type": "number"}, {}, True),
    {"type": "integer", "minimum": 3, "exclusiveMaximum": 120},
    {"type": "number", "minimum": 0.5, "exclusiveMinimum": 0.5, "maximum": 7, "exclusiveMaximum": 1e3},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "minItems": 4, "maxItems": 4},
    {"type": ["string", "null"], "maxLength": 2},
    {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": {"const": 'é"\\\n'}}},
    {
        "allOf": [
            {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2, "minProperties": 1}
        ]
    },
    {"type": "string", "pattern": 'b[^a]\\w"'},
    {"type": "string", "pattern": "\\S\\W$|^\\D"},
    *({"type": "string", "format": f} for f in ("date", "time", "date-time", "uuid", "ipv4", "email")),
    {"type": "object", "properties": {c: {"type": "boolean"} for c in "abcdefgh"}, "required": ["c", "f", "z"]},
    {"properties": {c: {"type": "null"} for c in "abcdefghijklmnopqrstuvwx"}, "type": "object"},
    {"type": "object", "properties": {"a": False, "b": {"type": "integer"}}},
    {"type": ["integer", "string"], "enum": ["a", 1, None, 2.5]},
    {"minimum": 3},
]


@pytest.mark.parametrize("schema", [*SCHEMAS.values(), *MORE], ids=lambda s: json.dumps(s)[:50])
def test_schema_every_text_is_valid(schema: Any) -> None:
    kind = jsonschema.Draft202012Validator
    kind.check_schema(schema)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    texts = random_texts(byte_automaton(schema_language(schema)), 60)
    for text in texts:
        validator.validate(json.loads(text))
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        ({"type": "string", "minLength": 1, "maxLength": 2}, ["é", "😀€", '"\\', "\x00\n"], ["", "abc"]),
        ({"type": "string", "pattern": "^a.c$"}, ["abc", 'a"c', "a\tc"], ["ab", "xabc", "a\nc"]),
        ({"type": "string", "pattern": "b"}, ["abc", "b", "\nb\n"], ["", "a"]),
        ({"type": "number", "maximum": 0.3}, [0.3, -5, 0, 0.25], [0.30001, 1, 12]),
        ({"type": "integer"}, [0, -12, 10**14], []),
        ({"enum": [1, "1", [1, {"a": None}]]}, [1, "1", [1, {"a": None}]], [2, None]),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, [[], [True, False]], [[1], [True] * 3]),
        ({"type": "object"}, [{}, {"a": [1.5, {"b": "x"}, None]}], [1, {"a": [[[]]]}]),
        (SCHEMAS["nested"], [{"user": {"id": 7, "tags": ["a", "c"]}, "active": True}], [{"active": True}]),
    ],
)
def test_schema_writes_these_values_and_not_those(schema: Any, values: list[Any], others: list[Any]) -> None:
    """As ``json.dumps`` writes them, with a space after commas and colons or without."""
    automaton = byte_automaton(schema_language(schema))
    for separators in ((",", ":"), (", ", ": ")):
        dumped = [json.dumps(v, ensure_ascii=False, separators=separators) for v in values + others]
        assert [accepts(automaton, text) for text in dumped] == [True] * len(values) + [False] * len(others)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        *(({word: {}}, f"#: '{word}'") for word in ("not", "if", "patternProperties", "propertyNames", "contains")),
        *(({word: True}, f"#: '{word}'") for word in ("uniqueItems", "unevaluatedProperties", "nonsense")),
        (
            {"properties": {"a": {"properties": {"x/y": {"multipleOf": 2}}}}},
            "#/properties/a/properties/x~1y: 'multipleOf'",
        ),
        ({"type": "array", "items": {"dependentRequired": {}}}, "#/items: 'dependentRequired'"),
        ({"$ref": "#"}, "'#' contains itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}}, "'#/$defs/a' contains itself"),
        ({"$ref": "#/$defs/b"}, "nothing is at"),
        ({"$ref": "http://elsewhere"}, "within the schema"),
        ({"$ref": "#/$defs/a", "minLength": 1, "$defs": {"a": {}}}, "'minLength' is not supported beside '$ref'"),
        ({"enum": [1], "minimum": 0}, "'minimum' is not supported beside 'enum'"),
        ({"anyOf": [{}], "type": "string"}, "'type' is not supported beside 'anyOf'"),
        ({"allOf": [{}, {}]}, "'allOf' of several"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "0 and 1 may overlap"),
        ({"type": "string", "format": "hostname"}, "'format'"),
        ({"type": "string", "minLength": 1, "pattern": "a"}, "'pattern'"),
        ({"type": "string", "pattern": "(?=a)"}, "'pattern': regex"),
        ({"type": "number", "minimum": 1e300}, "'minimum'"),
        ({"type": "object", "minProperties": 2}, "'minProperties'"),
        ({"type": "array", "minItems": 1.5}, "'minItems'"),
        ({"type": "strin"}, "'type'"),
        ({"enum": []}, "'enum'"),
        ({"enum": ["\ud800"]}, "'enum'"),
        ({"items": [{}]}, "#/items: expected a schema"),
        ({"properties": {"a": {"$id": "b"}}}, "#/properties/a: '$id'"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "some value satisfies"),
        ({"required": ["a"], "additionalProperties": False}, "some value satisfies"),
        (False, "some value satisfies"),
    ],
)
def test_schema_what_cannot_be_enforced_is_refused_by_name_and_place(schema: Any, place: str) -> None:
    with pytest.raises(ValueError, match=r"^json_schema: ") as raised:
        schema_language(schema)
    assert place in str(raised.value)
