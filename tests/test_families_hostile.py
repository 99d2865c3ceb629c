"""Damaged files of every family: one error that names the file, and nothing allocated on its word."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path

import pytest
import tiny_families
import tiny_families_gguf
import tiny_gguf
import tiny_hf
from test_checkpoint_hostile import VALUES, attempt, checked, places, replaced

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


@pytest.mark.parametrize("name", ["gemma3", "phi3", "mixtral", "neox"])
def test_a_damaged_gguf_file_of_any_family(tmp_path: Path, name: str) -> None:
    rng, path = random.Random(name), tmp_path / "m.gguf"
    sound = tiny_gguf.write(path, tiny_families_gguf.tiny(name)).read_bytes()
    assert attempt(path) is None
    begin, end = sound.index(b".block_count"), sound.index(b"tokenizer.ggml.model")
    for _ in range(40):
        data = bytearray(sound)
        for _ in range(rng.randrange(1, 3)):
            data[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        checked(attempt(path), path)
