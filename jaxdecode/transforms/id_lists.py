"""Lists that a caller gives (ids, sequences of ids, numbers for ids), checked and turned into arrays of few shapes.

One list for all rows becomes one table in ``base.Shared``; a list of lists, one per row, becomes an array with the row
first, which row operations may pick and insert. Shapes depend on the vocabulary or are powers of two, so that calls
with similar lists share a compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxdecode import checks
from jaxdecode.base import Shared

__all__ = [
    "broadcast",
    "id_table",
    "numbers",
    "pair_rows",
    "per_row_or_shared",
    "power",
    "sequence_array",
    "sequence_rows",
]


def broadcast(table: Any) -> Any:
    """A table made here as an array whose first axis is B or 1."""
    return table.value[None] if isinstance(table, Shared) else table


def per_row_or_shared(rows: list[np.ndarray], per_row: bool) -> Any:
    """The arrays of the rows as one, or the only one of them in ``Shared``."""
    return np.stack(rows) if per_row else Shared(rows[0])


def numbers(value: Any, names: str, what: str) -> list[Any]:
    """The several numbers of one setting, each a scalar or [B]; ``names`` says what they are."""
    ok = isinstance(value, (tuple, list)) and len(value) == len(names.split(", "))
    checks.require(ok, what, f"({names})", value)
    return list(value)


def _entries(value: Any, kind: Callable[[Any], str], what: str, expected: str) -> tuple[list[Any], bool]:
    """``value`` as the lists of its rows, and whether every row has its own.

    ``kind(entry)`` is "item" for an entry of a list that holds for all rows, "row" for the list of one row, "any" for
    what may be either, and anything else for what is wrong.
    """
    checks.require(checks.is_concrete(value), what, expected, "a traced array")
    try:
        found = [] if isinstance(value, (str, bytes, Mapping)) else list(value)
        kinds = {kind(entry) for entry in found} | ({"wrong"} if isinstance(value, (str, bytes)) else set())
    except TypeError:
        found, kinds = [], {"wrong"}
    checks.require(kinds <= {"item", "any"} or kinds <= {"row", "any"}, what, expected, value)
    per_row = "item" not in kinds and len(found) > 0
    return (found, True) if per_row else ([found], False)


def _kind_of_id(entry: Any) -> str:
    return "wrong" if isinstance(entry, (str, bytes)) else "row" if entry is None or np.ndim(entry) else "item"


def id_table(ids: Any, vocab_size: int, what: str, none: bool) -> Any:
    """A bool table [V] of the ids in a list, in ``Shared``, or [B,V] for a list of such lists.

    The list of a row may be None: its table is then ``none`` everywhere.
    """
    rows, per_row = _entries(ids, _kind_of_id, what, "ids, or a list of them per row")
    tables = []
    for row in rows:
        table = np.full(vocab_size, row is None and none)
        if row is not None and len(row):
            array = np.asarray(row)
            checks.require(array.ndim == 1, what, "ids, or a list of them per row", row)
            checks.token_ids(array, vocab_size, what)
            table[array] = True
        tables.append(table)
    return per_row_or_shared(tables, per_row)


def _kind_of_sequence(entry: Any) -> str:
    if isinstance(entry, (str, bytes)):
        return "wrong"
    if len(entry) == 0:
        return "any"
    kinds = {"row" if np.ndim(x) else "item" for x in entry}
    return kinds.pop() if len(kinds) == 1 else "wrong"


def sequence_rows(value: Any, vocab_size: int, what: str, expected: str) -> tuple[list[list[np.ndarray]], bool]:
    """Sequences of ids for all rows (one list of them), or a list of them for each row, and which it is."""
    rows, per_row = _entries(value, _kind_of_sequence, what, expected)
    out = []
    for row in rows:
        for sequence in row:
            checks.require(len(sequence) > 0, what, "non-empty sequences", sequence)
            checks.token_ids(np.asarray(sequence), vocab_size, what)
        out.append([np.asarray(sequence) for sequence in row])
    return out, per_row


def sequence_array(rows: list[list[np.ndarray]], *, powers: bool) -> list[np.ndarray]:
    """For each row int32 [n,L]: its sequences aligned right, padded with -1. n and L as needed, or powers of two."""
    n = max((len(row) for row in rows), default=0)
    longest = max((len(s) for row in rows for s in row), default=0)
    if powers:
        n, longest = power(n), power(longest)
    out = []
    for row in rows:
        array = np.full((n, longest), -1, np.int32)
        for i, sequence in enumerate(row):
            array[i, longest - len(sequence) :] = sequence
        out.append(array)
    return out


def power(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def _kind_of_pair(entry: Any) -> str:
    if entry is None or isinstance(entry, Mapping):
        return "row"
    if isinstance(entry, (str, bytes)):
        return "wrong"
    return "item" if len(entry) == 2 and not any(np.ndim(x) for x in entry) else "row"


def pair_rows(value: Any, what: str, expected: str) -> tuple[list[tuple[np.ndarray, np.ndarray]], bool]:
    """A mapping, or a list of pairs, as (keys[n], values[n]); or one such per row. Keys must be whole numbers."""
    rows, per_row = ([value], False) if isinstance(value, Mapping) else _entries(value, _kind_of_pair, what, expected)
    out = []
    for row in rows:
        pairs = [] if row is None else [*row.items()] if isinstance(row, Mapping) else [*row]
        checks.require(all(np.shape(p) == (2,) for p in pairs), what, expected, row)
        keys, values = (np.asarray([p[i] for p in pairs]) for i in (0, 1))
        whole = len(pairs) == 0 or (np.issubdtype(keys.dtype, np.integer) and np.issubdtype(values.dtype, np.number))
        checks.require(bool(whole), what, expected, row)
        out.append((keys.astype(np.int64), values))
    return out, per_row
