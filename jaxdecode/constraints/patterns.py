"""Regular expressions in Python's syntax, read into a ``Language``; what a regular language cannot say is refused.

The whole output has to match, so anchors stand only at the ends. Two dialects differ in their classes: "python" is that
of ``re`` on text; "schema" that of JSON Schema's ``pattern``, where ECMA-262 and Python read some classes differently:
there a class holds what both let it hold.
"""

from __future__ import annotations

import functools
from typing import Literal, NoReturn

import numpy as np

from jaxdecode.checks import shorten
from jaxdecode.constraints.language import (
    ANY,
    EMPTY,
    LAST,
    Characters,
    Language,
    Ranges,
    Repeat,
    complement,
    either,
    intersection,
    ranges_where,
    sequence,
    union,
)

__all__ = ["Dialect", "parse_regex"]

Dialect = Literal["python", "schema"]
MOST_REPEATS = 10_000
_CONTROL = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7, "0": 0}
_HEX = {"x": 2, "u": 4, "U": 8}
_LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_ASCII: dict[str, Ranges] = {
    "d": ((48, 57),),
    "w": ((48, 57), (65, 90), (95, 95), (97, 122)),
}


@functools.cache
def _unicode_class(letter: str) -> Ranges:
    r"""What \d, \w and \s mean in Python's ``re`` on text."""
    test = {"d": str.isdecimal, "w": str.isalnum, "s": str.isspace}[letter]
    found = ranges_where(np.fromiter((test(chr(c)) for c in range(LAST + 1)), bool, LAST + 1))
    return union(found, ((95, 95),)) if letter == "w" else found


@functools.cache
def _class(letter: str, dialect: Dialect) -> Ranges:
    r"""The characters of \d, \D, \w, \W, \s or \S."""
    small = letter.lower()
    python = _unicode_class(small)
    # ECMA-262 counts U+FEFF as space, Python U+001C to U+001F and U+0085.
    ecma = union(complement(union(complement(python), ((28, 31), (0x85, 0x85)))), ((0xFEFF, 0xFEFF),))
    ecma = _ASCII.get(small, ecma)
    if letter != small:
        python, ecma = complement(python), complement(ecma)
    return python if dialect == "python" else intersection(python, ecma)


def parse_regex(pattern: str, dialect: Dialect = "python", *, whole: bool = True) -> Language:
    """The texts that match ``pattern``: as a whole, or (JSON Schema) anywhere in them.

    ValueError names what is wrong, or not supported, and where.
    """
    if not isinstance(pattern, str):
        raise ValueError(f"regex: expected a pattern, got {shorten(pattern)}")
    reader = _Reader(pattern, dialect, whole)
    try:
        return reader.all()
    except RecursionError:
        raise ValueError("regex: expected groups nested less deeply") from None


class _Reader:
    """A recursive-descent reader at position ``at`` of ``pattern``."""

    def __init__(self, pattern: str, dialect: Dialect, whole: bool) -> None:
        self.pattern, self.dialect, self.whole, self.at = pattern, dialect, whole, 0

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        place = self.at if at is None else at
        raise ValueError(f"regex: {what} at position {place} of {shorten(repr(self.pattern))}")

    def peek(self, word: str) -> bool:
        return self.pattern.startswith(word, self.at)

    def take(self, word: str) -> bool:
        found = self.peek(word)
        self.at += len(word) if found else 0
        return found

    def next(self) -> str:
        if self.at >= len(self.pattern):
            self.fail("expected more")
        self.at += 1
        return self.pattern[self.at - 1]

    def all(self) -> Language:
        branches = [self.top_branch()]
        while self.take("|"):
            branches.append(self.top_branch())
        if self.at < len(self.pattern):
            self.fail("expected a group that is open, got ')'")
        return either(branches)

    def top_branch(self) -> Language:
        """An alternative of the whole pattern: the only place where anchors may stand, at its ends."""
        anything = EMPTY if self.whole else Repeat(ANY, 0, None)
        before, after = anything, anything
        while self.take("^") or (self.dialect == "python" and self.take("\\A")):
            before = EMPTY
        parts = self.items()
        while self.take("$") or (self.dialect == "python" and self.take("\\Z")):
            after = EMPTY
        if self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            self.fail("expected nothing after '$'")
        return sequence(before, *parts, after)

    def branches(self) -> Language:
        found = [sequence(*self.items())]
        while self.take("|"):
            found.append(sequence(*self.items()))
        return either(found)

    def items(self) -> list[Language]:
        parts: list[Language] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)$" and not self.peek("\\Z"):
            parts.append(self.repeated(self.atom()))
        return parts

    def atom(self) -> Language:
        at, c = self.at, self.next()
        if c == "(":
            return self.group(at)
        if c == "[":
            return Characters(self.char_class(at))
        if c == ".":
            return Characters(complement(((10, 10),) if self.dialect == "python" else _LINE_ENDS))
        if c == "\\":
            return Characters(self.escape(in_class=False))
        if c in "*+?" or (c == "{" and self.bounds() is not None):
            self.fail(f"expected something to repeat before {c!r}", at)
        if c == "^":
            self.fail("'^' is supported only where the pattern begins", at)
        return Characters(((ord(c), ord(c)),))

    def group(self, at: int) -> Language:
        if self.take("?"):
            if self.take("P<"):
                end = self.pattern.find(">", self.at)
                if end < 0 or not self.pattern[self.at : end].isidentifier():
                    self.fail("expected a group's name")
                self.at = end + 1
            elif not self.take(":"):
                self.fail(f"'(?{self.pattern[self.at : self.at + 2]}' is not supported (plain groups are)", at)
        inside = self.branches()
        if not self.take(")"):
            if self.peek("$") or self.peek("\\Z"):
                self.fail("'$' is supported only where the pattern ends")
            self.fail("expected ')'")
        return inside

    def repeated(self, part: Language) -> Language:
        at = self.at
        if self.take("*"):
            bounds: tuple[int, int | None] | None = (0, None)
        elif self.take("+"):
            bounds = (1, None)
        elif self.take("?"):
            bounds = (0, 1)
        else:
            bounds = self.bounds() if self.take("{") else None
        if bounds is None:
            self.at = at  # a brace that counts nothing is a character
            return part
        if self.take("+"):
            self.fail("possessive repetition is not supported")
        self.take("?")  # lazy: the same texts match
        least, most = bounds
        if most is not None and most < least:
            self.fail(f"expected a repetition whose least is at most its most, got {least} and {most}", at)
        if max(least, most or 0) > MOST_REPEATS:
            self.fail(f"expected at most {MOST_REPEATS} repetitions", at)
        if self.at < len(self.pattern) and (self.pattern[self.at] in "*+?" or self.counts()):
            self.fail("expected no repetition of a repetition")
        return Repeat(part, least, most)

    def counts(self) -> bool:
        at = self.at
        found = self.take("{") and self.bounds() is not None
        self.at = at
        return found

    def bounds(self) -> tuple[int, int | None] | None:
        """What follows a brace, ``m}``, ``m,}``, ``,n}`` or ``m,n}``; None, and nothing read, if that is none."""
        end = self.pattern.find("}", self.at)
        parts = self.pattern[self.at : end].split(",") if end >= 0 else []
        digits = all(p == "" or (p.isascii() and p.isdigit()) for p in parts)
        if len(parts) not in (1, 2) or not digits or parts == [""]:
            return None
        if parts[0] == "" and self.dialect == "schema":
            self.fail("'{,' is not supported in a schema: ECMA-262 and Python read it differently")
        self.at = end + 1
        least = int(parts[0] or 0)
        return least, least if len(parts) == 1 else (int(parts[1]) if parts[1] else None)

    def escape(self, in_class: bool) -> Ranges:
        at, c = self.at - 1, self.next()
        if c in "dDwWsS":
            return _class(c, self.dialect)
        if c in _HEX:
            digits = self.pattern[self.at : self.at + _HEX[c]]
            if len(digits) < _HEX[c] or any(d not in "0123456789abcdefABCDEF" for d in digits):
                self.fail(f"expected {_HEX[c]} hexadecimal digits", at)
            if (code := int(digits, 16)) > LAST:
                self.fail("expected a code point up to 10FFFF", at)
            self.at += _HEX[c]
            return ((code, code),)
        if c == "b" and in_class:
            return ((8, 8),)
        if c in _CONTROL and not (c == "0" and self.pattern[self.at : self.at + 1].isdigit()):
            return ((_CONTROL[c], _CONTROL[c]),)
        if c.isascii() and c.isalnum():
            self.fail(f"'\\{c}' is not supported", at)
        return ((ord(c), ord(c)),)

    def char_class(self, at: int) -> Ranges:
        negated, found, first = self.take("^"), list[Ranges](), True
        while first or not self.peek("]"):
            if self.at >= len(self.pattern):
                self.fail("expected ']'", at)
            begin = self.at
            low = self.class_item()
            first = False
            if self.peek("-") and not self.pattern.startswith("-]", self.at) and self.at + 1 < len(self.pattern):
                self.at += 1
                high = self.class_item()
                if any(len(r) != 1 or r[0][0] != r[0][1] for r in (low, high)) or high < low:
                    self.fail("expected a range from a character to a later one", begin)
                low = ((low[0][0], high[0][0]),)
            found.append(low)
        self.at += 1
        ranges = union(*found)
        return complement(ranges) if negated else ranges

    def class_item(self) -> Ranges:
        c = self.next()
        return self.escape(in_class=True) if c == "\\" else ((ord(c), ord(c)),)
