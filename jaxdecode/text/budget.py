"""What a chat template may spend: steps and characters, charged before anything is built.

Every loop, call, filter, test, operator and output of a template pays here first, so a hostile one ends with one error
long before it has filled memory or taken noticeable time. The prices follow what an operation touches or makes, not
the time it takes, so that the same template always ends at the same place. What could be far larger written out than
it is in memory (a list that holds the same list twice, and so on) is walked, and the walk is paid step by step.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

__all__ = [
    "METHODS",
    "Exhausted",
    "binary",
    "copied",
    "limited",
    "listed",
    "made",
    "pay",
    "pay_method",
    "scanned",
    "weigh",
    "weighed",
]

_STEPS, _CHARS = 250_000, 16_000_000  # a template's own; real ones take some thousands of each
_STEPS_PER_VALUE, _STEPS_PER_CHAR, _CHARS_PER_CHAR = 64, 1, 32  # and more for every value and character of a chat
_MAX_BITS = 4096  # of a whole number
_COPIED = 8  # items of a list that are copied for one step
_SCANNED = 16  # characters that are looked through for one that is written

_SEQUENCES = (list, tuple, KeysView, ItemsView, ValuesView)
_LEAVES = (int, float, type(None))


class Exhausted(Exception):
    """The template took more than its budget."""


class _Budget:
    def __init__(self, steps: int, chars: int) -> None:
        self.steps, self.chars = steps, chars


_BUDGET: contextvars.ContextVar[_Budget] = contextvars.ContextVar("budget of a chat template")


@contextlib.contextmanager
def limited(inputs: Any) -> Iterator[None]:
    """A budget for one rendering of ``inputs``, which are trusted to be plain data without cycles."""
    whole = 1 << 62
    count = _Budget(whole, whole)
    token = _BUDGET.set(count)
    try:
        weigh(inputs)
        values, chars = whole - count.steps, whole - count.chars
        steps = _STEPS + _STEPS_PER_VALUE * values + _STEPS_PER_CHAR * chars
        _BUDGET.set(_Budget(steps, _CHARS + _CHARS_PER_CHAR * chars))
        yield
    finally:
        _BUDGET.reset(token)


def pay(steps: int = 1, chars: int = 0) -> None:
    """Take from the budget. ``Exhausted`` if it does not hold as much."""
    budget = _BUDGET.get()
    budget.steps -= steps
    budget.chars -= chars
    if budget.steps < 0 or budget.chars < 0:
        what = "steps" if budget.steps < 0 else "characters"
        raise Exhausted(f"expected a template that ends, got one that takes more {what} than any chat needs")


def weigh(value: Any) -> None:
    """Pay for everything in ``value``, as if it were written out. TypeError for what is not plain data."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            pay(1, len(item))
        elif isinstance(item, Mapping):
            pay(1 + len(item))
            todo += item.keys()
            todo += item.values()
        elif isinstance(item, _SEQUENCES):
            pay(1 + len(item))
            todo += item
        elif isinstance(item, _LEAVES):
            pay()
        elif type(item).__module__ != "jinja2.runtime":  # undefined values and macros write themselves shortly
            raise TypeError(f"expected plain data, got a {type(item).__name__}")


def listed(value: Any) -> Any:
    """``value`` to iterate over, paid for: one step an item. Generators become lists."""
    if isinstance(value, (str, Mapping, *_SEQUENCES)):
        pay(len(value))
        return value
    if not isinstance(value, Iterable):
        raise TypeError(f"expected values to go through, got {type(value).__name__}")
    items = []
    for item in value:
        pay()
        items.append(item)
    return items


def copied(value: Any) -> Any:
    """``value``, of which a slice will be taken."""
    if isinstance(value, str):
        pay(1, len(value))
    elif isinstance(value, list | tuple):
        pay(1 + len(value) // _COPIED)
    return value


def scanned(value: Any) -> Any:
    """``value``, to be compared."""
    if isinstance(value, str):
        pay(1, len(value) // _SCANNED)
    else:
        weigh(value)
    return value


def weighed(value: Any) -> Any:
    """``value``, weighed."""
    weigh(value)
    return value


def made(value: Any) -> Any:
    """``value``, made just now by something that cannot make it large from small."""
    if isinstance(value, str):
        pay(1, len(value))
    elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise Exhausted(f"expected whole numbers of at most {_MAX_BITS} bits, got a larger one")
    elif isinstance(value, list | tuple | dict):
        pay(1 + len(value))
    return value


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
    "%": operator.mod,
}


def binary(sign: str, left: Any, right: Any) -> Any:
    """The operator applied, after its price."""
    pay()
    if isinstance(left, str | list | tuple) and sign == "%":
        raise TypeError("expected numbers around %, got a text to be formatted")
    if sign == "**" and not (abs(left) < 1 << 31 and abs(right) < 128):
        raise Exhausted("expected small numbers around **, got large ones")
    for a, b in ((left, right), (right, left)) if sign in "+*" else ():
        if isinstance(a, str | list | tuple):
            if sign == "*" and isinstance(b, int):
                _pay_for(a, len(a) * max(b, 0))
            elif sign == "+":
                _pay_for(a, len(a))
    result = _BINARY[sign](left, right)
    return made(result) if isinstance(result, int) else result


def _pay_for(kind: Any, length: int) -> None:
    if isinstance(kind, str):
        pay(1, length)
    else:
        pay(1 + length // _COPIED)


def _copy(text: str, args: tuple[Any, ...]) -> None:
    pay(1, len(text))


def _scan(text: str, args: tuple[Any, ...]) -> None:
    pay(1, len(text) // _SCANNED)


def _replace(text: str, args: tuple[Any, ...]) -> None:
    old, new = args[:2]
    times = text.count(old) if old else len(text) + 1
    pay(1, len(text) + times * len(new))


def _split(text: str, args: tuple[Any, ...]) -> None:
    separator = next((arg for arg in args if isinstance(arg, str)), "")
    pay(2 + (text.count(separator) if separator else len(text) // 2), len(text))


def _split_lines(text: str, args: tuple[Any, ...]) -> None:
    pay(1 + len(text) // 2, len(text))


def _join(text: str, args: tuple[Any, ...]) -> None:
    for arg in args:
        listed(arg)
        weigh(arg)
        pay(1, len(text) * len(arg))


def _compare(values: Any, args: tuple[Any, ...]) -> None:
    weigh(values)
    weigh(args)


def _look_up(mapping: Any, args: tuple[Any, ...]) -> None:
    pay()
    weigh(args)  # a key is hashed through


_Price = Callable[[Any, tuple[Any, ...]], None]

_SCANS = "startswith endswith find rfind index rindex count isalpha isalnum isdigit isdecimal isnumeric isspace isascii"
_COPIES = (
    "strip lstrip rstrip upper lower title capitalize swapcase casefold removeprefix removesuffix partition rpartition"
)
_LIST: dict[str, _Price] = {"index": _compare, "count": _compare}
# The methods of plain data that a template may call, each with its price.
METHODS: dict[type, dict[str, _Price]] = {
    str: dict.fromkeys(_SCANS.split(), _scan)
    | dict.fromkeys(_COPIES.split(), _copy)
    | {"replace": _replace, "split": _split, "rsplit": _split, "splitlines": _split_lines, "join": _join},
    list: _LIST,
    tuple: _LIST,
    dict: dict.fromkeys(("get", "items", "keys", "values"), _look_up),
}


def pay_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The price of a method of plain data; keyword arguments count as positional ones (``split(sep="x")``)."""
    METHODS[type(owner)][name](owner, (*args, *kwargs.values()))
