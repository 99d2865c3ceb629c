"""Damaged and hostile files: whatever is in them, one error that names the file, and nothing allocated on its word."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
import tiny_hf

from jaxdecode.checkpoint import converted, load
from jaxdecode.checkpoint.gguf_checkpoint import read_gguf_checkpoint
from jaxdecode.checkpoint.hf_directory import read_hf_directory
from jaxdecode.text.backend import open_tokenizer

JSON_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
INDEX = "model.safetensors.index.json"
DEEP: Any = json.loads("[" * 200 + "]" * 200)
VALUES = [2**60, 2**31 - 1, -1, 0, 1.5, -1e300, True, None, "", "x", "\ud800", [], {}, [1, "a"], {"a": {}}, DEEP]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model in two shards, with every file that there can be."""
    law = {"do_sample": True, "temperature": 0.5, "top_k": 5, "eos_token_id": [2, 0]}
    options = {"rope_scaling": {"rope_type": "llama3", **tiny_hf.LLAMA3}}
    model = tiny_hf.tiny(**options)
    model.tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    about = {"added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": True}}, "additional_special_tokens": []}
    model.texts["tokenizer_config.json"] |= about
    model.texts["generation_config.json"] = law
    return tiny_hf.write(tmp_path / "model", model, shards=2)


def attempt(path: Path) -> str | None:
    """Open the checkpoint as ``load`` does, without its weights; the error, if that is one that it may give."""
    try:
        checkpoint = read_hf_directory(path) if path.is_dir() else read_gguf_checkpoint(path)
        tokenizer = open_tokenizer(checkpoint.vocabulary, str(path))
        tokenizer.encode("the land <|im_end|> \u00e9 1")
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    assert sum(np.prod(param.shape) for param in checkpoint.params) < 200_000
    return None


def checked(error: str | None, path: Path) -> bool:
    """Whether it was refused, in one short line that names a file of the checkpoint."""
    if error is None:
        return False
    assert str(path) in error, error
    assert "\n" not in error
    assert len(error) < 400 + 2 * len(str(path)), error
    return True


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values in a JSON value; of a long list or mapping only some."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in [*items[:6], *items[-2:]] if len(items) > 8 else items:
        yield (*at, key)
        yield from places(item, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any, rng: random.Random) -> Any:
    """A copy with another value at this place, or without it."""
    value = copy.deepcopy(value)
    parent = value
    for key in at[:-1]:
        parent = parent[key]
    if rng.random() < 0.15:
        del parent[at[-1]]
    else:
        parent[at[-1]] = new
    return value


@pytest.mark.parametrize("name", [*JSON_FILES, INDEX])
def test_any_value_of_a_json_file_may_be_hostile(folder: Path, name: str) -> None:
    rng = random.Random(name)
    sound = json.loads((folder / name).read_text())
    assert attempt(folder) is None
    everywhere = list(places(sound))
    refused = 0
    cases = [(at, VALUES[(i + rng.randrange(3)) % len(VALUES)]) for i in range(3) for at in everywhere]
    for at, new in rng.sample(cases, min(len(cases), 160)):
        (folder / name).write_text(json.dumps(replaced(sound, at, new, rng)))
        refused += checked(attempt(folder), folder)
    assert refused > 5


@pytest.mark.parametrize("name", [*JSON_FILES, INDEX])
def test_truncated_and_flipped_json(folder: Path, name: str) -> None:
    rng = random.Random(name)
    sound = (folder / name).read_bytes()
    for cut in [0, 1, *(rng.randrange(len(sound)) for _ in range(12)), len(sound) - 1]:
        (folder / name).write_bytes(sound[:cut])
        assert checked(attempt(folder), folder), cut
    for _ in range(60):
        data = bytearray(sound)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(data)
        checked(attempt(folder), folder)


@pytest.mark.parametrize("name", [*JSON_FILES, INDEX])
@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"a":' * 200_000,
        "{}",
        "[]",
        "null",
        '"x"',
        "1" * 10_000,
        '{"a": 1e999}',
        "\ufeff{}",
        "{" + " " * 99999,
    ],
)
def test_json_that_is_deep_or_of_another_kind(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, "utf-8")
    empty = text in ("{}", '{"a": 1e999}') and name in ("generation_config.json", "tokenizer_config.json")
    assert checked(attempt(folder), folder) is not empty


@pytest.mark.parametrize("name", [*JSON_FILES, INDEX, "model-00001-of-00002.safetensors"])
def test_files_that_are_no_files(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    assert name.split(".")[0] in (attempt(folder) or "")
    (folder / name).rmdir()
    (folder / name).symlink_to(folder / name)  # a link to itself
    if name not in ("generation_config.json", "tokenizer_config.json"):  # which need not be there
        assert checked(attempt(folder), folder)


def test_truncated_and_flipped_weights(folder: Path) -> None:
    rng = random.Random(5)
    path = folder / "model-00001-of-00002.safetensors"
    sound = path.read_bytes()
    header = 8 + int.from_bytes(sound[:8], "little")
    for cut in [0, 7, 8, 9, header - 1, header, len(sound) // 2, len(sound) - 1]:
        path.write_bytes(sound[:cut])
        assert checked(attempt(folder), folder), cut
    for _ in range(150):
        data = bytearray(sound)
        data[rng.randrange(header)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        checked(attempt(folder), folder)


def test_nothing_is_allocated_on_a_files_word(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    tracemalloc.start()
    try:
        for key in ("hidden_size", "num_hidden_layers", "head_dim", "vocab_size", "intermediate_size"):
            for huge in (2**31 - 2, 2**60, 10**400):
                (folder / "config.json").write_text(json.dumps(config | {key: huge}))
                assert checked(attempt(folder), folder), key
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000


def test_a_failed_load_leaves_no_copy(folder: Path, cache: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-2:] = b"\xc0\x7f"  # NaN
    path.write_bytes(data)
    with pytest.raises(ValueError, match="finite"):
        load(folder)
    assert list((cache / "checkpoints").iterdir()) == []


def test_hostile_values_of_gguf_fields(tmp_path: Path) -> None:
    rng = random.Random(11)
    path = tmp_path / "m.gguf"
    refused = 0
    values: list[Any] = [2**32 - 1, 0, 1, True, 1.5, float("nan"), -1e30, "", "x", [1], ["a", "b"], [0.5] * 3, [[1]]]
    for key in tiny_gguf.FIELDS:
        if key == "general.architecture":
            continue
        for value in rng.sample(values, 6):
            tiny_gguf.write(path, tiny_gguf.tiny(), lambda m, key=key, value=value: m.fields.update({key: value}))  # type: ignore[misc]
            refused += checked(attempt(path), path)
    assert refused > 60


def test_hostile_copies_are_made_again(folder: Path, cache: Path) -> None:
    rng = random.Random(3)
    first = load(folder)
    (copy_folder,) = (cache / "checkpoints").iterdir()
    for name in ("config.json", "tokenizer.json"):
        sound = (copy_folder / name).read_text()
        for at in rng.sample(list(places(json.loads(sound))), 12):
            (copy_folder / name).write_text(json.dumps(replaced(json.loads(sound), at, DEEP, rng)))
            opened = converted.read_copy(copy_folder)
            if opened is not None:
                assert opened.leaves["embed"].shape == first.params["embed"].shape
        (copy_folder / name).write_text(sound)
