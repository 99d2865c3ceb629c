"""Damaged files of every family: one error that names the file, and nothing allocated on its word."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tiny_families
import tiny_families_gguf
import tiny_gguf
import tiny_hf
from test_checkpoint_hostile import VALUES, attempt, checked, places, replaced

from jaxdecode.checkpoint import load

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "sliding_window", "n_embd")
SIZES += ("n_head", "n_layer", "n_positions", "num_local_experts", "num_experts", "num_experts_per_tok", "vocab_size")


@pytest.mark.parametrize("name", tiny_families.VARIANTS)
def test_any_value_of_a_config_may_be_hostile(tmp_path: Path, name: str) -> None:
    rng, folder = random.Random(name), tiny_hf.write(tmp_path / "model", tiny_families.tiny(name))
    sound = json.loads((folder / "config.json").read_text())
    assert attempt(folder) is None
    tracemalloc.start()
    try:
        for at in places(sound):
            (folder / "config.json").write_text(json.dumps(replaced(sound, at, rng.choice(VALUES), rng)))
            checked(attempt(folder), folder)
        for key in sound.keys() & set(SIZES):
            for huge in (2**31 - 2, 2**60):
                (folder / "config.json").write_text(json.dumps(sound | {key: huge}))
                checked(attempt(folder), folder)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


OPTIONAL = ("output.weight", "rope_freqs.weight")  # a file without it is one of another model
IN_GGUF = [name for name in tiny_families.VARIANTS if "dynamic" not in name]


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_damaged_gguf_file_of_any_family(tmp_path: Path, name: str) -> None:
    rng, path = random.Random(name), tmp_path / "m.gguf"
    sound = tiny_gguf.write(path, tiny_families_gguf.tiny(name)).read_bytes()
    assert attempt(path) is None
    begin, end = sound.index(b".block_count"), sound.index(b"tokenizer.ggml.model")
    for _ in range(12):
        data = bytearray(sound)
        for _ in range(rng.randrange(1, 3)):
            data[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        checked(attempt(path), path)
    for cut in (0, 3, begin, end, len(sound) // 2, len(sound) - 64):  # it may end in bytes that nobody reads
        path.write_bytes(sound[:cut])
        assert checked(attempt(path), path), cut


def kinds_of(tensors: dict[str, np.ndarray]) -> list[str]:
    """One tensor of each kind: of the last layer and the last expert, and all that stand outside the layers."""
    found: dict[str, str] = {}
    for name in tensors:
        found[re.sub(r"\d+", "#", name)] = name
    return list(found.values())


def damages(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """A name that the error must have, and the tensors with one missing, misshapen or too many."""
    for i, name in enumerate(kinds_of(tensors)):
        values = tensors[name]
        yield name, {key: x for key, x in tensors.items() if key != name}
        yield name, tensors | {name: np.ascontiguousarray(values[..., :-1] if i % 2 else np.concatenate([values] * 2))}
        more = re.sub(r"\d+", "7", name, count=1) if re.search(r"\d", name) else f"x.{name}"
        yield more, tensors | {more: values}


@pytest.mark.parametrize("name", tiny_families.VARIANTS)
def test_every_tensor_of_a_directory_is_missed_and_measured(tmp_path: Path, name: str) -> None:
    folder, tensors = tiny_hf.write(tmp_path / "model", tiny_families.tiny(name)), tiny_families.tiny(name).tensors
    for wrong, damaged in damages(tensors):
        safetensors.numpy.save_file(damaged, folder / "model.safetensors", {"format": "pt"})
        error = attempt(folder) or ""
        assert checked(error, folder), wrong
        assert wrong in error
    sound = (folder / "model.safetensors").read_bytes()
    for cut in (0, 9, len(sound) // 2, len(sound) - 1):
        (folder / "model.safetensors").write_bytes(sound[:cut])
        assert checked(attempt(folder), folder), cut


@pytest.mark.parametrize("name", IN_GGUF)
def test_every_tensor_of_a_gguf_file_is_missed_and_measured(tmp_path: Path, name: str) -> None:
    model, path = tiny_families_gguf.tiny(name), tmp_path / "m.gguf"
    for wrong, damaged in damages(model.tensors):
        tiny_gguf.write(path, dataclasses.replace(model, tensors=damaged))
        error = attempt(path)
        if wrong in OPTIONAL and wrong not in damaged:
            assert error is None
            continue
        assert checked(error, path), wrong
        said = wrong in (error or "") or (wrong == "token_embd.weight" and "tokens: expected 534" in (error or ""))
        assert said, (wrong, error)


def test_an_unknown_architecture_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    tiny, packed = tiny_families.tiny("qwen2"), tiny_families_gguf.tiny("qwen2")
    tiny.config["architectures"] = ["MambaForCausalLM"]
    packed.fields = {key.replace("qwen2.", "mamba."): value for key, value in packed.fields.items()}
    packed.fields["general.architecture"] = "mamba"
    folder, path = tiny_hf.write(tmp_path / "model", tiny), tiny_gguf.write(tmp_path / "m.gguf", packed)
    error = attempt(folder) or ""
    assert "architectures: expected one of LlamaForCausalLM, " in error
    assert "MambaForCausalLM" in error
    error = attempt(path) or ""
    assert "general.architecture: expected one of llama, " in error
    assert "'mamba'" in error


@pytest.mark.parametrize("name", ["mixtral", "gemma3", "gpt2"])
def test_a_load_that_fails_late_leaves_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is no number is found when the last tensor is converted."""
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    tiny, packed = tiny_families.tiny(name), tiny_families_gguf.tiny(name)
    for tensors in (tiny.tensors, packed.tensors):
        tensors[list(tensors)[-1]].reshape(-1)[-1] = np.nan
    for path in (tiny_hf.write(tmp_path / "model", tiny), tiny_gguf.write(tmp_path / "m.gguf", packed)):
        with pytest.raises(ValueError, match="finite") as caught:
            load(path)
        assert str(path) in str(caught.value)
    assert not list((tmp_path / "cache" / "checkpoints").iterdir())
