"""The safetensors container against the safetensors package, and against damaged headers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdecode.checkpoint.safetensors_file import ALIGNMENT, Entry, read_safetensors, write_safetensors

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


def sample(dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(len(dtype)).integers(0, 2 if dtype == "bool" else 100, shape).astype(jnp.dtype(dtype))


def entry(name: str, values: np.ndarray, blocks: int = 1) -> Entry:
    def parts() -> Iterator[np.ndarray]:
        yield from np.array_split(values.reshape(-1), blocks)

    return Entry(name, values.dtype, values.shape, parts, "source.file")


TENSORS = {f"of {dtype}": sample(dtype, 3, 5) for dtype in DTYPES} | {
    "scalar": np.array(7.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    'näme with "quotes"': np.arange(6, dtype=np.int32),
}


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file(TENSORS, path, metadata={"format": "np"})
    tensors, metadata = read_safetensors(path)
    assert metadata == {"format": "np"}
    assert tensors.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert tensors[name].dtype == expected.dtype
        assert not tensors[name].flags.writeable
        np.testing.assert_array_equal(tensors[name], expected)


def test_writes_what_the_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "ours.safetensors"
    write_safetensors(path, [entry(name, values, 2) for name, values in TENSORS.items()], metadata={"by": "us"})
    theirs = {k: v for k, v in safetensors.numpy.load_file(path).items() if not k.startswith(".pad.")}
    ours, metadata = read_safetensors(path)
    assert metadata == {"by": "us"}
    assert theirs.keys() == ours.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(theirs[name], expected)
        np.testing.assert_array_equal(ours[name], expected)


def test_written_tensors_are_aligned_and_jax_uses_the_map_itself(tmp_path: Path) -> None:
    path = tmp_path / "ours.safetensors"
    write_safetensors(path, [entry(name, values) for name, values in TENSORS.items()])
    tensors, _ = read_safetensors(path)
    cpu = jax.devices("cpu")[0]
    for name, values in tensors.items():
        if values.size and values.dtype.itemsize < 8:  # 64-bit numbers become 32-bit ones in jax
            assert values.ctypes.data % ALIGNMENT == 0, name
            assert jax.device_put(values, cpu).unsafe_buffer_pointer() == values.ctypes.data, name


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=6), st.integers(1, 9))
def test_blocks_and_sizes_make_no_difference(sizes: list[int], blocks: int) -> None:
    import tempfile

    arrays = {f"t{i}": np.arange(n, dtype=np.float32) + i for i, n in enumerate(sizes)}
    seen: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        write_safetensors(path, [entry(k, v, blocks) for k, v in arrays.items()], written=seen.append)
        tensors, _ = read_safetensors(path)
        for name, expected in arrays.items():
            np.testing.assert_array_equal(tensors[name], expected)
    assert seen == sorted(seen)


@pytest.mark.parametrize("count", [5, 7])
def test_blocks_must_fill_the_shape(tmp_path: Path, count: int) -> None:
    wrong = Entry("w", np.dtype(np.float32), (2, 3), lambda: [np.ones(count)], "source.file")
    with pytest.raises(ValueError, match=rf"source\.file: w: expected 6 values, got {count}"):
        write_safetensors(tmp_path / "x", [wrong])


@pytest.mark.parametrize(("dtype", "value"), [("float16", 70000.0), ("float32", np.nan), ("bfloat16", np.inf)])
def test_values_must_fit_the_dtype(tmp_path: Path, dtype: str, value: float) -> None:
    wrong = Entry("w", np.dtype(jnp.dtype(dtype)), (1,), lambda: [np.array([value], np.float32)], "source.file")
    with pytest.raises(ValueError, match=rf"source\.file: w: expected finite values that fit {dtype}"):
        write_safetensors(tmp_path / "x", [wrong])


def build(header: Any, data: bytes = bytes(16)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(**changes: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


DAMAGED = {
    "empty file": b"",
    "seven bytes": bytes(7),
    "header longer than the file": (2**60).to_bytes(8, "little") + b"{}",
    "header cut": build(one())[:40],
    "not JSON": build(b"{..}"),
    "not UTF-8": build(b'{"\xff": 1}'),
    "not an object": build(b"[]"),
    "a deep nest": build(b"[" * 200_000),
    "a name twice": build(b'{"t": {}, "t": {}}'),
    "metadata of numbers": build({"__metadata__": {"a": 1}, **one()}),
    "metadata of another kind": build({"__metadata__": 3, **one()}),
    "an entry that is a list": build({"t": [1, 2]}),
    "a missing key": build({"t": {"dtype": "F32", "shape": [4]}}),
    "a surplus key": build(one(extra=1)),
    "an unknown dtype": build(one(dtype="F8_E4M3")),
    "a dtype that is a list": build(one(dtype=["F32"])),
    "a negative size": build(one(shape=[-2, -2])),
    "a fractional size": build(one(shape=[2.0, 2])),
    "a boolean size": build(one(shape=[True, 4])),
    "sizes of 2^62": build(one(shape=[2**62, 2**62])),
    "sizes past 64 bits": build(one(shape=[2**70])),
    "many dimensions": build(one(shape=[1] * 100 + [4])),
    "a shape that is a number": build(one(shape=4)),
    "three offsets": build(one(data_offsets=[0, 8, 16])),
    "offsets the wrong way round": build(one(data_offsets=[16, 0])),
    "offsets of another size": build(one(data_offsets=[0, 12])),
    "data past the end": build(one(), bytes(12)),
    "data left over": build(one(), bytes(20)),
    "a hole at the start": build(one(data_offsets=[4, 20]), bytes(20)),
    "an overlap": build({**one(), "u": {"dtype": "U8", "shape": [4], "data_offsets": [12, 16]}}),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_give_one_error_that_names_the_file(tmp_path: Path, case: str) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(DAMAGED[case])
    with pytest.raises(ValueError, match="expected") as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_truncated_anywhere_and_flipped_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, [entry(name, values) for name, values in TENSORS.items()])
    sound, expected = path.read_bytes(), read_safetensors(path)[0]
    for cut in range(0, len(sound), 13):
        path.write_bytes(sound[:cut])
        with pytest.raises(ValueError, match=r"m\.safetensors"):
            read_safetensors(path)
    rng = np.random.default_rng(5)
    length = int.from_bytes(sound[:8], "little")
    for _ in range(400):
        data = bytearray(sound)
        data[int(rng.integers(0, 8 + length))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
        error = str(path)
        try:  # sound after all: a letter of a name, or a dtype or shape of the same size
            tensors, _ = read_safetensors(path)
            assert sum(v.nbytes for v in tensors.values()) >= sum(v.nbytes for v in expected.values())
        except ValueError as caught:
            error = str(caught)
        assert str(path) in error
