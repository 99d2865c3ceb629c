"""JSON Schema as a ``Language``: every text of it is JSON that the schema accepts.

Every keyword is enforced, has no effect by the standard, or is refused by name and place. What is written is one plain
spelling of each value: properties in the schema's order, at most one space after a comma or a colon, no escape that is
not needed, numbers of at most 15 digits. So not every valid document is written, but every one written is valid.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NoReturn

from jaxdecode.checks import shorten
from jaxdecode.constraints import numerals
from jaxdecode.constraints.language import (
    ANY,
    EMPTY,
    Alternatives,
    Characters,
    Language,
    Repeat,
    complement,
    either,
    intersection,
    optional,
    separated,
    sequence,
    text,
)
from jaxdecode.constraints.patterns import parse_regex

__all__ = ["schema_language"]

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_NO_EFFECT = {
    *("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$defs", "definitions"),
}
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
_DEPTH = 3  # containers within one another, where the schema allows any value
_PLAIN = complement(((0, 31), (34, 34), (92, 92)))  # what a JSON string holds as it is
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_COMMA, _COLON = (sequence(text(mark), optional(text(" "))) for mark in ",:")
# Part of each format, where it is easy to say and every validator agrees.
_TO_28 = "(?:0[1-9]|1[0-9]|2[0-8])"
_DAY = rf"(?:(?:0[1-9]|1[0-2])-{_TO_28}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {
    "date": rf"[1-9][0-9]{{3}}-{_DAY}",
    "time": _TIME,
    "date-time": rf"[1-9][0-9]{{3}}-{_DAY}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "email": rf"[a-z0-9_+-]{{1,32}}(?:\.[a-z0-9_+-]{{1,16}})?@{_LABEL}(?:\.{_LABEL}){{1,3}}",
}


def schema_language(schema: Any) -> Language:
    """JSON texts that ``schema`` (JSON Schema 2020-12, parsed) accepts.

    ValueError names the keyword and the place of what is refused: what is unknown, recursive, or not regular.
    """
    try:
        language = _Reader(schema).value(schema, "#", ())
    except RecursionError:
        raise ValueError("json_schema: expected a schema nested less deeply") from None
    if _impossible(language):
        raise ValueError("json_schema: expected a schema that some value satisfies, got one that none does")
    return language


def _fail(place: str, what: str) -> NoReturn:
    raise ValueError(f"json_schema: {place}: {what}")


def _impossible(language: Language) -> bool:
    if isinstance(language, Alternatives):
        return all(map(_impossible, language.parts))
    if isinstance(language, Characters):
        return not language.ranges
    if isinstance(language, Repeat):
        return language.least > 0 and _impossible(language.part)
    return any(map(_impossible, language.parts))


def _escaped(language: Language) -> Language:
    """The language as it is spelled between the quotes of a JSON string."""
    if isinstance(language, Characters):
        parts: list[Language] = [Characters(intersection(language.ranges, _PLAIN))]
        for low, high in intersection(language.ranges, complement(_PLAIN)):
            parts += [text("\\" + _SHORT.get(code, f"u{code:04x}")) for code in range(low, high + 1)]
        return either(p for p in parts if p != Characters(()))
    if isinstance(language, Repeat):
        return Repeat(_escaped(language.part), language.least, language.most)
    return type(language)(tuple(map(_escaped, language.parts)))


def _string(inside: Language) -> Language:
    return sequence(text('"'), _escaped(inside), text('"'))


def _literal(value: Any) -> Language:
    """One JSON value, spelled as all others are."""
    if isinstance(value, dict):
        items = [sequence(_literal(k), _COLON, _literal(v)) for k, v in value.items()]
        return sequence(text("{"), separated(items, None, _COMMA, len(items), None), text("}"))
    if isinstance(value, list):
        items = [_literal(v) for v in value]
        return sequence(text("["), separated(items, None, _COMMA, len(items), None), text("]"))
    spelled = json.dumps(value, ensure_ascii=False, allow_nan=False)
    spelled.encode()  # a lone surrogate is no text
    return text(spelled)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    kinds = {dict: "object", list: "array", str: "string", int: "integer", type(None): "null"}
    return kinds[type(value)]


def _overlap(a: str, b: str) -> bool:
    return a == b or {a, b} == {"integer", "number"}


def _anything(depth: int) -> Language:
    """Any value, with at most ``depth`` containers within one another."""
    simple = [_string(Repeat(ANY, 0, None)), numerals.numbers(None, None), text("true"), text("false"), text("null")]
    if depth == 0:
        return either(simple)
    inner = _anything(depth - 1)
    member = sequence(_string(Repeat(ANY, 0, None)), _COLON, inner)
    array = sequence(text("["), separated([], inner, _COMMA, 0, None), text("]"))
    return either([*simple, array, sequence(text("{"), separated([], member, _COMMA, 0, None), text("}"))])


class _Reader:
    """Walks a schema; ``root`` is where references start, ``place`` names where the walk is."""

    def __init__(self, root: Any) -> None:
        self.root = root

    def value(self, schema: Any, place: str, refs: tuple[str, ...], depth: int = _DEPTH) -> Language:
        """The values that ``schema`` accepts. refs: the references that led here."""
        schema, place, refs = self.resolved(schema, place, refs)
        if isinstance(schema, bool):
            return _anything(depth) if schema else Alternatives(())
        for word in ("enum", "const"):
            if word in schema:
                return self.constants(schema, word, place)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                return self.combined(schema, word, place, refs, depth)
        kinds = self.kinds(schema, place)
        known = set().union(*(_OF_TYPE[kind] for kind in TYPES))
        self.only(schema, known | {"type"}, place)
        if kinds is None:
            return _anything(depth)
        read: dict[str, Callable[[], Language]] = {
            "object": lambda: self.object(schema, place, refs, depth),
            "array": lambda: self.array(schema, place, refs, depth),
            "string": lambda: self.string(schema, place),
            "integer": lambda: self.number(schema, place, whole=True),
            "number": lambda: self.number(schema, place, whole=False),
            "boolean": lambda: either([text("true"), text("false")]),
            "null": lambda: text("null"),
        }
        return either([read[kind]() for kind in kinds])

    def only(self, schema: Mapping[str, Any], words: set[str], place: str, beside: str = "") -> None:
        """Refuse the first keyword that is neither in ``words`` nor without effect."""
        for word in schema:
            if word not in words and word not in _NO_EFFECT and not (word == "$id" and place == "#"):
                _fail(place, f"{word!r} is not supported{beside}")

    def resolved(self, schema: Any, place: str, refs: tuple[str, ...]) -> tuple[Any, str, tuple[str, ...]]:
        """The schema that a chain of references ends at."""
        while True:
            if not isinstance(schema, (dict, bool)):
                _fail(place, f"expected a schema, got {shorten(schema)}")
            if isinstance(schema, bool) or "$ref" not in schema:
                return schema, place, refs
            self.only(schema, {"$ref"}, place, " beside '$ref'")
            ref = schema["$ref"]
            if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
                _fail(place, f"'$ref': expected a reference within the schema (#/...), got {shorten(ref)}")
            if ref in refs or ref == place:
                _fail(place, f"'$ref': {ref!r} contains itself, which is not supported (it has no end)")
            schema, place, refs = self.find(ref, place), ref, (*refs, ref)

    def find(self, ref: str, place: str) -> Any:
        found = self.root
        for part in ref[2:].split("/") if ref != "#" else []:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                _fail(place, f"'$ref': nothing is at {ref!r}")
        return found

    def kinds(self, schema: Mapping[str, Any], place: str) -> list[str] | None:
        """The types that are written; None: any value will do."""
        if "type" in schema:
            kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            if not isinstance(kinds, list) or not kinds or any(k not in TYPES for k in kinds):
                _fail(place, f"'type': expected one or some of {', '.join(TYPES)}, got {shorten(schema['type'])}")
            return [k for k in kinds if not (k == "integer" and "number" in kinds)]
        implied = [k for k in TYPES if k != "integer" and _OF_TYPE[k] & set(schema)]
        return implied or None

    def constants(self, schema: Mapping[str, Any], word: str, place: str) -> Language:
        self.only(schema, {word, "type"}, place, f" beside {word!r}")
        values = schema[word] if word == "enum" else [schema[word]]
        if not isinstance(values, list) or not values:
            _fail(place, f"'enum': expected a list of values, got {shorten(values)}")
        kinds = self.kinds(schema, place) if "type" in schema else None
        allowed = [v for v in values if kinds is None or any(self.is_kind(v, k) for k in kinds)]
        try:
            return either([_literal(v) for v in allowed])
        except (ValueError, TypeError, UnicodeEncodeError) as error:
            _fail(place, f"{word!r}: expected JSON values, got {error}")

    @staticmethod
    def is_kind(value: Any, kind: str) -> bool:
        return _type_of(value) == kind or (kind == "number" and _type_of(value) == "integer")

    def combined(self, schema: Mapping[str, Any], word: str, place: str, refs: tuple[str, ...], depth: int) -> Language:
        self.only(schema, {word}, place, f" beside {word!r}")
        parts = schema[word]
        if not isinstance(parts, list) or not parts:
            _fail(place, f"{word!r}: expected a list of schemas, got {shorten(parts)}")
        if word == "allOf" and len(parts) > 1:
            _fail(place, "'allOf' of several schemas is not supported")
        if word == "oneOf":
            resolved = [self.resolved(p, f"{place}/oneOf/{i}", refs) for i, p in enumerate(parts)]
            for i, (a, _, _) in enumerate(resolved):
                for j, (b, _, _) in enumerate(resolved[:i]):
                    if not self.disjoint(a, b, refs):
                        _fail(
                            place, f"'oneOf' is supported only where no value fits two schemas; {j} and {i} may overlap"
                        )
        return either([self.value(p, f"{place}/{word}/{i}", refs, depth) for i, p in enumerate(parts)])

    def disjoint(self, a: Any, b: Any, refs: tuple[str, ...]) -> bool:
        """Whether it is plain that no value fits both: by type, by constants, or by a property that both require."""
        if isinstance(a, bool) or isinstance(b, bool):
            return a is False or b is False
        values = [s.get("enum", [s["const"]] if "const" in s else None) for s in (a, b)]
        if all(isinstance(v, list) for v in values):
            return not any(x == y for x in values[0] for y in values[1])
        kinds = []
        for schema, constants in zip((a, b), values, strict=True):
            listed = schema.get("type", list(TYPES))
            listed = [listed] if isinstance(listed, str) else listed
            kinds.append([_type_of(v) for v in constants] if isinstance(constants, list) else listed)
        if not any(_overlap(x, y) for x in kinds[0] for y in kinds[1]):
            return True
        if kinds != [["object"], ["object"]]:
            return False
        both = set(a.get("required", ())) & set(b.get("required", ()))
        tags = [[s.get("properties", {}).get(name) for s in (a, b)] for name in sorted(both)]
        tags = [[self.resolved(t, "#", refs)[0] for t in pair] for pair in tags if None not in pair]
        return any(self.disjoint(x, y, refs) for x, y in tags)

    def count(self, schema: Mapping[str, Any], word: str, place: str) -> int | None:
        """A whole number >= 0, or None."""
        value = schema.get(word)
        whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value) and value >= 0
        if value is not None and not whole:
            _fail(place, f"{word!r}: expected a whole number >= 0, got {shorten(value)}")
        return None if value is None else int(value)

    def object(self, schema: Mapping[str, Any], place: str, refs: tuple[str, ...], depth: int) -> Language:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            _fail(place, f"'properties': expected an object of schemas, got {shorten(properties)}")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            _fail(place, f"'required': expected a list of names, got {shorten(required)}")
        other = schema.get("additionalProperties", True)
        least, most = self.count(schema, "minProperties", place) or 0, self.count(schema, "maxProperties", place)
        if depth == 0 and not properties and not required:
            return text("{}")
        if not properties and not required and other is not False:
            if least > 1:
                _fail(place, "'minProperties' above 1 is supported only beside enough 'required' names")
            value = self.value(other, f"{place}/additionalProperties", refs, depth - 1)
            member = sequence(_string(Repeat(ANY, 0, None)), _COLON, value)
            return sequence(text("{"), separated([], member, _COMMA, least, most), text("}"))
        names = [*properties, *(name for name in dict.fromkeys(required) if name not in properties)]
        if least > len(set(required)):
            _fail(place, "'minProperties' is supported only up to the number of 'required' names")
        if most is not None and most < len(names):
            _fail(place, "'maxProperties' is supported only from the number of named properties on")
        members = []
        for name in names:
            where = f"{place}/properties/{name.replace('~', '~0').replace('/', '~1')}"
            value = self.value(properties.get(name, other), where, refs, depth - 1 if name not in properties else depth)
            if name in required or not _impossible(value):
                members.append((sequence(_literal(name), _COLON, value), name in required))
        return sequence(text("{"), _members(members), text("}"))

    def array(self, schema: Mapping[str, Any], place: str, refs: tuple[str, ...], depth: int) -> Language:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        if not isinstance(first, list):
            _fail(place, f"'prefixItems': expected a list of schemas, got {shorten(first)}")
        least, most = self.count(schema, "minItems", place) or 0, self.count(schema, "maxItems", place)
        needs_rest = rest is not False and (most is None or most > len(first))
        if depth == 0 and (rest is True or "items" not in schema) and not first and least == 0:
            return text("[]")
        items = [self.value(s, f"{place}/prefixItems/{i}", refs, depth) for i, s in enumerate(first)]
        inner = depth - 1 if rest is True else depth
        other = self.value(rest, f"{place}/items", refs, inner) if needs_rest else None
        other = None if other is None or _impossible(other) else other
        items = items[: next((i for i, item in enumerate(items) if _impossible(item)), len(items))]
        return sequence(text("["), separated(items, other, _COMMA, least, most), text("]"))

    def string(self, schema: Mapping[str, Any], place: str) -> Language:
        least, most = self.count(schema, "minLength", place), self.count(schema, "maxLength", place)
        given = [w for w in ("pattern", "format") if w in schema]
        if len(given) + (least is not None or most is not None) > 1:
            _fail(place, f"{given[-1]!r} is not supported beside 'pattern', 'minLength' or 'maxLength'")
        if "pattern" in schema:
            try:
                return _string(parse_regex(schema["pattern"], "schema", whole=False))
            except ValueError as error:
                _fail(place, f"'pattern': {error}")
        if "format" in schema:
            if schema["format"] not in _FORMATS:
                _fail(place, f"'format': expected one of {', '.join(_FORMATS)}, got {shorten(schema['format'])}")
            return _string(parse_regex(_FORMATS[schema["format"]]))
        if most is not None and most < (least or 0):
            return Alternatives(())
        return _string(Repeat(ANY, least or 0, most))

    def number(self, schema: Mapping[str, Any], place: str, *, whole: bool) -> Language:
        bounds: dict[str, Decimal | None] = {}
        for word in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            value = schema.get(word)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                _fail(place, f"{word!r}: expected a number, got {shorten(value)}")
            bounds[word] = None if value is None else Decimal(repr(value))
            if value is not None and not Decimal(repr(value)).is_finite():
                _fail(place, f"{word!r}: expected a finite number, got {value}")
        low, open_low = _tighter(bounds["minimum"], bounds["exclusiveMinimum"], 1)
        high, open_high = _tighter(bounds["maximum"], bounds["exclusiveMaximum"], -1)
        try:
            if not whole:
                return numerals.numbers(low, high, open_low, open_high)
            return numerals.integers(_inside(low, open_low, 1), _inside(high, open_high, -1))
        except ValueError as error:
            _fail(place, f"'minimum', 'maximum': {error}")


def _tighter(closed: Decimal | None, opened: Decimal | None, sign: int) -> tuple[Decimal | None, bool]:
    """The bound that excludes more, and whether it is itself excluded. sign: 1 below, -1 above."""
    if opened is not None and (closed is None or sign * opened >= sign * closed):
        return opened, True
    return closed, False


def _inside(bound: Decimal | None, is_open: bool, sign: int) -> int | None:
    """The first integer from ``bound`` inwards."""
    if bound is None:
        return None
    floor = int(bound.to_integral_value("ROUND_FLOOR" if sign < 0 else "ROUND_CEILING"))
    return floor + sign if is_open and floor == bound else floor


def _members(members: Sequence[tuple[Language, bool]]) -> Language:
    """Members of an object in order, those that are not required written or not, with commas between."""
    after: Language = EMPTY  # what may follow once something is written
    whole: Language = EMPTY  # and while nothing is
    for member, needed in reversed(members):
        begun, more = sequence(member, after), sequence(_COMMA, member)
        whole = begun if needed else either([begun, whole])
        after = sequence(more if needed else optional(more), after)
    return whole
