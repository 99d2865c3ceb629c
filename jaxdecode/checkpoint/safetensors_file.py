"""The safetensors container, memory-mapped, and written so that jax on a CPU can use the map as it is.

Format (the safetensors project): 8 bytes of header length, a JSON header ``{name: {"dtype", "shape", "data_offsets"}}``
with an optional ``__metadata__`` of texts, then the tensors without holes. jax aliases host memory only at multiples of
64 bytes, so files written here pad the header with spaces, and put a small ``U8`` tensor (``.pad.N``) wherever the next
tensor would start elsewhere.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

__all__ = ["ALIGNMENT", "Entry", "cast_blocks", "read_safetensors", "write_safetensors"]

ALIGNMENT = 64
_MAX_HEADER = 1 << 24  # the largest published headers have a few MiB
_PAD = ".pad."
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """A tensor to write: its values come in row-major order, in blocks of any shape, and are cast to ``dtype``.

    where: the file that the values come from, for errors. follows: it lies right behind the entry before it, so that
    both can be read as one; otherwise it is aligned.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[np.ndarray]]
    where: str
    follows: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors, as read-only views of the mapped file, and the metadata.

    Nothing is copied. ValueError, naming file and field, for a header that is damaged, too long (over 16 MiB), or whose
    tensors leave the file, overlap, or leave holes; and for number types that NumPy and jax do not share.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a safetensors file, got nothing there")
    size = path.stat().st_size
    if size < 8:
        raise ValueError(f"{path}: expected a safetensors file, got one of {size} bytes")
    data = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(_MAX_HEADER, size - 8):
        raise ValueError(f"{path}: header length: expected at most {min(_MAX_HEADER, size - 8)}, got {length}")
    header = _parsed(path, data[8 : 8 + length].tobytes())
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{path}: __metadata__: expected texts by name, got other values")
    tensors, spans = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _checked(path, name, entry)
        spans.append((begin, end, name))
        if end <= size - 8 - length:
            start = 8 + length + begin
            tensors[name] = data[start : start + end - begin].view(dtype).reshape(shape)
    _check_spans(path, sorted(spans), size - 8 - length)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_PAD)}, metadata


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name that occurs twice")
        return found

    try:
        header = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep, or a repeated name
        raise ValueError(f"{path}: header: expected JSON with each name once, got {str(error)[:80]}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: header: expected a JSON object, got {type(header).__name__}")
    return header


def _checked(path: Path, name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """dtype, shape, begin and end of one header entry, consistent with each other."""
    where = f"{path}: tensor {name[:80]!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: expected dtype, shape and data_offsets, got {str(entry)[:80]}")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{where}: dtype: expected one of {', '.join(_DTYPES)}, got {str(entry['dtype'])[:80]}")
    for field in ("shape", "data_offsets"):
        values = entry[field]
        if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 2**63 for v in values):
            raise ValueError(f"{where}: {field}: expected a list of whole numbers, got {str(values)[:80]}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if len(shape) > 32:
        raise ValueError(f"{where}: shape: expected at most 32 dimensions, got {len(shape)}")
    nbytes = math.prod(shape) * dtype.itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"{where}: data_offsets: expected a range of {nbytes} bytes, got {str(offsets)[:80]}")
    return dtype, tuple(shape), offsets[0], offsets[1]


def _check_spans(path: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    """The tensors cover the data exactly."""
    at = 0
    for begin, end, name in spans:
        if begin != at:
            raise ValueError(f"{path}: tensor {name[:80]!r}: expected its data to begin at byte {at}, got {begin}")
        at = end
    if at != size:
        raise ValueError(f"{path}: data: expected {at} bytes by the header, got {size}")


def write_safetensors(
    path: Path,
    entries: Sequence[Entry],
    *,
    metadata: dict[str, str] | None = None,
    written: Callable[[int], None] = lambda n: None,
) -> None:
    """Write the tensors and flush them to the disk; a tensor that follows no other starts at a multiple of 64 bytes.

    Holds one block at a time in memory. ``written`` is told the bytes of data written so far. ValueError if the blocks
    of a tensor are not as many values as its shape says, or become infinite in its dtype.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for i, entry in enumerate(entries):
        if pad := 0 if entry.follows else -at % ALIGNMENT:
            header[f"{_PAD}{i}"] = {"dtype": "U8", "shape": [pad], "data_offsets": [at, at + pad]}
            at += pad
        span = [at, at + entry.nbytes]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for entry in entries:
            file.write(bytes(0 if entry.follows else -(file.tell() - start) % ALIGNMENT))
            for block in cast_blocks(entry):
                file.write(block.reshape(-1).view(np.uint8).data)
                written(file.tell() - start)
        file.flush()
        os.fsync(file.fileno())


def cast_blocks(entry: Entry) -> Iterable[np.ndarray]:
    """The entry's blocks in its dtype, contiguous. ValueError: wrong number of values, or not finite ones."""
    where, count = f"{entry.where}: {entry.name}", 0
    for block in entry.blocks():
        count += block.size
        with np.errstate(over="ignore"):  # told below, with the tensor's name
            cast = np.ascontiguousarray(block, entry.dtype)
        if cast.dtype.kind not in "iub" and not bool(np.isfinite(cast).all()):
            got = "NaN, infinity, or a number out of range"
            raise ValueError(f"{where}: expected finite values that fit {entry.dtype.name}, got {got}")
        yield cast
    if count != math.prod(entry.shape):
        raise ValueError(f"{where}: expected {math.prod(entry.shape)} values, got {count}")
