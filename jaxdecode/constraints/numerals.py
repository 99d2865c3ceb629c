"""Numbers as JSON writes them, within bounds: each as decimal digits that every reader of doubles keeps apart."""

from __future__ import annotations

from decimal import Decimal

from jaxdecode.constraints.language import (
    EMPTY,
    Alternatives,
    Characters,
    Language,
    Repeat,
    either,
    optional,
    sequence,
    text,
)

__all__ = ["DIGITS", "LARGEST", "integers", "numbers"]

DIGITS = 15  # decimal digits that a double tells apart
LARGEST = 10**DIGITS - 1


def _digit(low: int, high: int) -> Language:
    return Characters(((48 + low, 48 + high),)) if low <= high else Alternatives(())


_ANY_DIGIT = _digit(0, 9)


def _same_width(low: str, high: str) -> Language:
    """Digit strings of one width from ``low`` to ``high``."""
    if low > high:
        return Alternatives(())
    if set(low) <= {"0"} and set(high) <= {"9"}:
        return Repeat(_ANY_DIGIT, len(low), len(low))
    a, b, rest = int(low[0]), int(high[0]), len(low) - 1
    if a == b:
        return sequence(_digit(a, a), _same_width(low[1:], high[1:]))
    return either(
        [
            sequence(_digit(a, a), _same_width(low[1:], "9" * rest)),
            *([sequence(_digit(a + 1, b - 1), Repeat(_ANY_DIGIT, rest, rest))] if a + 1 < b else []),
            sequence(_digit(b, b), _same_width("0" * rest, high[1:])),
        ]
    )


def _naturals(low: int, high: int) -> Language:
    """Integers low .. high, both >= 0, without leading zeros."""
    parts = []
    for width in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 0 if width == 1 else 10 ** (width - 1))
        last = min(high, 10**width - 1)
        parts += [_same_width(str(first), str(last))] if first <= last else []
    return either(parts)


def integers(low: int | None, high: int | None) -> Language:
    """Integers from ``low`` to ``high`` (None: as far as ``DIGITS`` digits go); nothing matches if there are none."""
    low, high = -LARGEST if low is None else low, LARGEST if high is None else high
    if max(abs(low), abs(high)) > LARGEST:
        raise ValueError(f"expected bounds of at most {DIGITS} digits, got {low} and {high}")
    parts = []
    if low < 0 and low <= high:
        parts.append(sequence(text("-"), _naturals(max(1, -high), -low)))
    if high >= 0 and low <= high:
        parts.append(_naturals(max(0, low), high))
    return either(parts)


def numbers(low: Decimal | None, high: Decimal | None, open_low: bool = False, open_high: bool = False) -> Language:
    """Numbers from ``low`` to ``high``, the bounds themselves excluded where open; nothing matches if there are none.

    Without bounds: at most ``DIGITS`` digits in front of the point and as many after it, and an exponent of up to two.
    With one: plain decimals of at most ``DIGITS`` digits in all.
    """
    if low is None and high is None:
        whole = sequence(optional(text("-")), _naturals(0, LARGEST), optional(_fraction(DIGITS)))
        exponent = sequence(Characters(((69, 69), (101, 101))), optional(Characters(((43, 43), (45, 45)))))
        return sequence(whole, optional(sequence(exponent, Repeat(_ANY_DIGIT, 1, 2))))
    if max(abs(x) for x in (low, high) if x is not None) > LARGEST:
        raise ValueError(f"expected bounds of at most {DIGITS} digits, got {low} and {high}")
    wide = Decimal(10 ** (DIGITS * 3 // 5) - 1)  # where a bound is missing, so that some digits are left for fractions
    if low is None or high is None:
        wide = wide if abs(low if high is None else high) < wide else Decimal(LARGEST)  # type: ignore[arg-type]
    low, open_low = (-wide, False) if low is None else (low, open_low)
    high, open_high = (wide, False) if high is None else (high, open_high)
    zero = Decimal(0)
    parts = []
    if low < 0:
        top = min(high, zero)
        magnitudes = _decimals(-top, -low, open_high if top == high else True, open_low)
        parts.append(sequence(text("-"), magnitudes))
    if high >= 0:
        bottom = max(low, zero)
        parts.append(_decimals(bottom, high, open_low if bottom == low else False, open_high))
    return either(parts)


def _fraction(most: int) -> Language:
    return sequence(text("."), Repeat(_ANY_DIGIT, 1, most))


def _decimals(low: Decimal, high: Decimal, open_low: bool, open_high: bool) -> Language:
    """Decimals between two bounds >= 0."""
    if low > high or (low == high and (open_low or open_high)):
        return Alternatives(())
    first, last = int(low), int(high)
    places = DIGITS - len(str(last))
    a, b = (_places(x, places) for x in (low, high))
    if first == last:
        return sequence(text(str(first)), _between(a, b, open_low, open_high, places))
    parts = [
        sequence(text(str(first)), _between(a, None, open_low, False, places)),
        sequence(text(str(last)), _between("", b, False, open_high, places)),
    ]
    if first + 1 < last:
        parts.append(sequence(_naturals(first + 1, last - 1), optional(_fraction(places)) if places else EMPTY))
    return either(parts)


def _places(x: Decimal, most: int) -> str:
    """The digits after the point, without trailing zeros."""
    digits = format(x, "f").partition(".")[2].rstrip("0")
    if len(digits) > most:
        raise ValueError(f"expected bounds of at most {DIGITS} digits, got {x}")
    return digits


def _between(low: str, high: str | None, open_low: bool, open_high: bool, places: int) -> Language:
    """What may follow the whole part: nothing or a point and digits, whose value is from 0.low to 0.high (None: 1)."""
    parts: list[Language] = []
    if low == "" and not open_low and (high or not open_high):
        parts.append(EMPTY)
    if places:
        parts.append(sequence(text("."), _digits(low, high, open_low, open_high, places, first=True)))
    return either(parts)


def _digits(low: str, high: str | None, open_low: bool, open_high: bool, places: int, first: bool) -> Language:
    """Digits left, at most ``places``, between two bounds given as digits that zeros may follow.

    high None: no bound. low "" and not open: none either.
    """
    if low == "" and not open_low and high is None:
        return Repeat(_ANY_DIGIT, 1 if first else 0, places)
    parts: list[Language] = []
    over_low, under_high = low == "" and not open_low, high is None or bool(high) or not open_high
    if not first and over_low and under_high:
        parts.append(EMPTY)  # the value ends here
    if places == 0:
        return either(parts)
    least = int(low[0]) if low else 0
    most = 9 if high is None else int(high[0]) if high else 0
    for digit in range(least, most + 1):
        on_low, on_high = digit == least and (low != "" or open_low), high is not None and digit == most
        rest = _digits(
            low[1:] if on_low else "",
            (high or "")[1:] if on_high else None,
            open_low and on_low,
            open_high and on_high,
            places - 1,
            first=False,
        )
        parts.append(sequence(_digit(digit, digit), rest))
    return either(parts)
