"""The GGUF container: a header of typed fields and tensor descriptions, then tensor data.

The header is read by bounds-checked steps of our own rather than by the ``gguf`` package's reader: a hostile file must
give one error at once, before anything is allocated by a number that it claims. Format: the GGUF specification of the
ggml project, versions 2 and 3, little-endian. Block types are dequantized by the ``gguf`` package.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["GgufFile", "GgufTensor", "dequantized_rows", "raw_rows", "read_gguf"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_STRINGS = 1 << 21  # in the whole file; the largest vocabularies have a quarter of this, merges included
_MAX_ENTRIES = 1 << 16  # fields, or tensors
_MAX_DIMS, _MAX_NESTING = 4, 4
_BLOCK_VALUES = 1 << 21  # values dequantized at a time: 8 MiB of float32


class GgufTensor(NamedTuple):
    """Where one tensor lies. shape is [rows..., values of a row], as NumPy counts; offset is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: Any  # gguf.GGMLQuantizationType
    offset: int
    nbytes: int


class GgufFile(NamedTuple):
    """A file whose header is sound: every tensor lies inside it, none on another. data: its bytes, memory-mapped."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: np.ndarray


def read_gguf(path: Path) -> GgufFile:
    """Header of the file at ``path``; tensor data stays on disk. ValueError, naming file and field, if unsound."""
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: expected a GGUF file, got an empty file")
    data = np.memmap(path, np.uint8, "r")
    head = _Header(data, path)
    magic, version = head.raw(4, "magic"), head.number("I", "version")
    if magic != b"GGUF":
        raise head.error("magic", "a GGUF file", magic)
    if version not in (2, 3):
        raise head.error("version", "2 or 3, little-endian", version)
    n_tensors, n_fields = head.count("tensor count", 24, _MAX_ENTRIES), head.count("field count", 13, _MAX_ENTRIES)
    fields: dict[str, Any] = {}
    for i in range(n_fields):
        key = head.string(f"name of field {i}")
        if key in fields:
            raise head.error(key, "each field once", "it twice")
        fields[key] = head.value(head.number("I", key), key)
    described = [_description(head, i) for i in range(n_tensors)]
    return GgufFile(path, fields, _placed(head, described, fields.get("general.alignment", 32)), data)


class _Header:
    """A cursor over the header. Every read checks first that the file has the bytes."""

    def __init__(self, data: np.ndarray, path: Path) -> None:
        self.bytes, self.path = memoryview(data.data), path
        self.at, self.strings_left = 0, _MAX_STRINGS

    def error(self, what: str, expected: Any, got: Any) -> ValueError:
        return ValueError(f"{self.path}: {what[:80]!r}: expected {expected}, got {got}")

    @property
    def left(self) -> int:
        return len(self.bytes) - self.at

    def raw(self, n: int, what: str) -> bytes:
        if n > self.left:
            raise self.error(what, f"{n} more bytes", f"a file that ends after {self.left}")
        self.at += n
        return bytes(self.bytes[self.at - n : self.at])

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.raw(struct.calcsize("<" + code), what))[0]

    def count(self, what: str, least_bytes: int, limit: int) -> int:
        """A number of things that take at least so many bytes each."""
        n = self.number("Q", what)
        most = min(limit, self.left // least_bytes)
        if n > most:
            raise self.error(what, f"at most {most} in a file of this size", n)
        return n

    def string(self, what: str) -> str:
        n = self.count(f"length of {what}", 1, self.left)
        try:
            return self.raw(n, what).decode()
        except UnicodeDecodeError:
            raise self.error(what, "UTF-8", "other bytes") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _BOOL:
            return self.flags(1, what)[0]
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY and depth < _MAX_NESTING:
            return self.array(what, depth)
        raise self.error(what, f"a value of a known type, nested at most {_MAX_NESTING} deep", f"type {kind}")

    def array(self, what: str, depth: int) -> Any:
        """Numbers as an array, everything else as a list."""
        kind = self.number("I", what)
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind])
            n = self.count(what, dtype.itemsize, self.left)
            return np.frombuffer(self.raw(n * dtype.itemsize, what), dtype)
        if kind == _BOOL:
            return self.flags(self.count(what, 1, self.left), what)
        if kind == _STRING:
            return self.strings(self.count(what, 8, self.strings_left), what)
        self.strings_left -= (n := self.count(what, 12, self.strings_left))
        return [self.value(kind, what, depth + 1) for _ in range(n)]

    def flags(self, n: int, what: str) -> list[bool]:
        flags = self.raw(n, what)
        if flags.strip(b"\0\1"):
            raise self.error(what, "0 or 1", "another byte")
        return [flag == 1 for flag in flags]

    def strings(self, n: int, what: str) -> list[str]:
        """The many strings of a vocabulary: `string` without its overhead."""
        self.strings_left -= n
        data, at, end, out = self.bytes, self.at, len(self.bytes), []
        length_at = struct.Struct("<Q").unpack_from
        try:
            for _ in range(n):
                stop = at + 8 + length_at(data, at)[0]
                if stop > end:
                    raise self.error(what, f"{n} texts", "a text that goes past the end of the file")
                out.append(str(data[at + 8 : stop], "utf-8"))
                at = stop
        except struct.error:
            raise self.error(what, f"{n} texts", f"a file that ends after {len(out)}") from None
        except UnicodeDecodeError:
            raise self.error(what, "UTF-8", f"other bytes in text {len(out)}") from None
        self.at = at
        return out


def _description(head: _Header, i: int) -> GgufTensor:
    """One tensor's entry; its offset still counts from the start of the data."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = head.string(f"name of tensor {i}")
    n_dims = head.number("I", name)
    if not 1 <= n_dims <= _MAX_DIMS:
        raise head.error(name, f"1 to {_MAX_DIMS} dimensions", n_dims)
    shape = tuple(head.number("Q", name) for _ in range(n_dims))[::-1]
    number, offset = head.number("I", name), head.number("Q", name)
    try:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise head.error(name, "a known block type", number) from None
    if shape[-1] % block:
        raise head.error(name, f"rows of a multiple of {block} values ({kind.name})", shape[-1])
    return GgufTensor(name, shape, kind, offset, math.prod(shape) // block * block_bytes)


def _placed(head: _Header, described: list[GgufTensor], alignment: Any) -> dict[str, GgufTensor]:
    """The tensors with offsets from the file's start, by name; checked against the file and each other."""
    if not isinstance(alignment, int) or alignment not in {1 << k for k in range(3, 21)}:
        raise head.error("general.alignment", "a power of two from 8", alignment)
    start = -(-head.at // alignment) * alignment
    placed: dict[str, GgufTensor] = {}
    end = start
    for tensor in sorted(described, key=lambda t: (t.offset, t.nbytes)):
        at = start + tensor.offset
        if tensor.name in placed:
            raise head.error(tensor.name, "each tensor once", "it twice")
        if tensor.offset % alignment or at < end or at + tensor.nbytes > len(head.bytes):
            place = f"bytes {at} to {at + tensor.nbytes}"
            raise head.error(tensor.name, f"aligned bytes from {end} to at most {len(head.bytes)}", place)
        end = at + tensor.nbytes
        placed[tensor.name] = tensor._replace(offset=at)
    return placed


def raw_rows(file: GgufFile, tensor: GgufTensor, order: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """The tensor's bytes [n, bytes of a row], of a few million values at a time; ``order``: rows in this order."""
    n_rows = math.prod(tensor.shape[:-1])
    raw = file.data[tensor.offset : tensor.offset + tensor.nbytes].reshape(n_rows, tensor.nbytes // max(n_rows, 1))
    step = max(1, _BLOCK_VALUES // max(tensor.shape[-1], 1))
    for first in range(0, n_rows, step):
        rows = slice(first, first + step)
        yield np.ascontiguousarray(raw[rows] if order is None else raw[order[rows]])


def dequantized_rows(file: GgufFile, tensor: GgufTensor, order: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """The tensor's values as float blocks [n, values of a row], a few MiB at a time; ``order``: rows in this order.

    ValueError for a block type that the ``gguf`` package cannot dequantize.
    """
    from gguf import dequantize

    for block in raw_rows(file, tensor, order):
        try:
            with np.errstate(all="ignore"):  # damaged scales: whoever uses the values checks that they are finite
                yield dequantize(block, tensor.type)
        except NotImplementedError:
            kind = f"got {tensor.type.name}"
            raise ValueError(f"{file.path}: {tensor.name}: expected a type with floating values, {kind}") from None
