"""`save`: what loads back bit for bit, what other libraries read, and a directory that is whole or not there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_gguf
import tiny_hf
import tokenizers
from tiny_gguf import KINDS

from jaxdecode.checkpoint import Loaded, load, safetensors_file, save, saving

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "smollm2_135m.json").read_text("utf-8"))
GREEDY = sorted(GOLDENS["greedy"], key=lambda golden: len(golden["prompt_ids"]))[:3]  # the short ones


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> Loaded:
    law = {"do_sample": True, "temperature": 0.7, "eos_token_id": [2, 0]}
    texts = {"generation_config.json": law}
    return load(tiny_hf.write(tmp_path / "tiny", tiny_hf.tiny(tied=False), lambda m: m.texts.update(texts)))


def leaves(loaded: Loaded) -> list[Any]:
    return jax.tree.leaves(loaded.params)


def same(a: Loaded, b: Loaded) -> bool:
    equal = [np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(leaves(a), leaves(b), strict=True)]
    return all(equal) and [x.dtype for x in leaves(a)] == [x.dtype for x in leaves(b)]


def speak_alike(a: Loaded, b: Loaded) -> bool:
    texts = ["the land and sea", "", "<|im_start|>x<|im_end|>", "日本 \u0301\x00", "  a"]
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "<|im_end|> hi"}]
    assert a.tokenizer.chat(chat) == b.tokenizer.chat(chat)
    for text in texts:
        for special in (True, False):
            assert a.tokenizer.encode(text, special) == b.tokenizer.encode(text, special)
    ours, theirs = a.tokenizer, b.tokenizer
    return (ours.table, ours.eos_ids, ours.bos_id, ours.add_bos) == (
        theirs.table,
        theirs.eos_ids,
        theirs.bos_id,
        theirs.add_bos,
    )


@pytest.mark.parametrize("limit", [None, 60_000, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loads_back_bit_for_bit(tiny: Loaded, tmp_path: Path, dtype: str, limit: int | None) -> None:
    loaded = tiny._replace(params=jax.tree.map(lambda x: x.astype(dtype), tiny.params))
    folder = save(loaded, tmp_path / "out" / dtype, max_shard_bytes=limit)
    again = load(folder, dtype=dtype)
    assert same(loaded, again)
    assert speak_alike(loaded, again)
    assert (again.config, dict(again.generation)) == (loaded.config, dict(loaded.generation))
    assert again.model is loaded.model
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert (len(files) > 1) == (limit is not None)
    if limit == 60_000:
        contents = [safetensors_file.read_safetensors(folder / name)[0].values() for name in files]
        assert all(len(arrays) == 1 or sum(a.nbytes for a in arrays) <= limit for arrays in contents)


def test_a_saved_directory_is_mapped_without_a_conversion(tiny: Loaded, tmp_path: Path, cache: Path) -> None:
    before = set((cache / "checkpoints").iterdir())
    for name, limit in {"one": None, "many": 30_000}.items():
        with jax.default_device(jax.devices("cpu")[0]):
            again = load(save(tiny, tmp_path / name, max_shard_bytes=limit))
        assert set((cache / "checkpoints").iterdir()) == before
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"/{name}/" in line]
        spans = [tuple(int(part, 16) for part in line.split()[0].split("-")) for line in maps]
        for leaf in leaves(again):
            assert any(begin <= leaf.unsafe_buffer_pointer() < end for begin, end in spans), "aliases the file"
    assert load(tmp_path / "one", dtype="bfloat16").params["embed"].dtype == jnp.bfloat16  # this one is converted
    assert len(set((cache / "checkpoints").iterdir()) - before) == 1


def test_other_libraries_find_the_names_and_values_of_hugging_face(tiny: Loaded, tmp_path: Path) -> None:
    folder = save(tiny, tmp_path / "out")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    expected = tiny_hf.tiny(tied=False).tensors
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name], values)
    config = json.loads((folder / "config.json").read_text())
    original = tiny_hf.tiny(tied=False).config
    assert {key: config[key] for key in original if key != "eos_token_id"} == {
        key: value for key, value in original.items() if key != "eos_token_id"
    }
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_an_index_places_every_tensor_once(tiny: Loaded, tmp_path: Path) -> None:
    folder = save(tiny, tmp_path / "out", max_shard_bytes=50_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= dict.fromkeys(safetensors.numpy.load_file(path), path.name)
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in leaves(tiny))


@pytest.mark.parametrize("name", [v for v in tiny_hf.VARIANTS if v != "untied"])
def test_every_kind_of_config_comes_back(tmp_path: Path, name: str) -> None:
    loaded = load(tiny_hf.write(tmp_path / "in", tiny_hf.tiny(**tiny_hf.VARIANTS[name])))
    assert load(save(loaded, tmp_path / "out")).config == loaded.config


@pytest.mark.parametrize("add_bos", [True, False])
def test_from_gguf_with_begin_of_sequence_as_the_tokenizers_package_reads_it(tmp_path: Path, add_bos: bool) -> None:
    fields = {"tokenizer.ggml.add_bos_token": add_bos}
    path = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.tiny(matrices=KINDS.Q8_0), lambda m: m.fields.update(fields))
    loaded = load(path)
    folder = save(loaded, tmp_path / "out")
    again = load(folder)
    assert same(loaded, again)
    assert speak_alike(loaded, again)
    assert again.tokenizer.add_bos is add_bos
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("the land", "<|im_start|>the<|im_end|>"):
        assert theirs.encode(text).ids[-3:] == again.tokenizer.encode(text)[-3:]
    assert theirs.encode("the land").ids == again.tokenizer.encode("the land")


def test_changed_params_are_what_is_written(tiny: Loaded, tmp_path: Path) -> None:
    tuned = tiny._replace(params=jax.tree.map(lambda x: x * 1.5, tiny.params))
    assert same(load(save(tuned, tmp_path / "out")), tuned)


def test_progress_rises_to_one(tiny: Loaded, tmp_path: Path) -> None:
    seen: list[float] = []
    save(tiny, tmp_path / "out", max_shard_bytes=30_000, progress=lambda text, fraction: seen.append(fraction))
    assert seen == sorted(seen)
    assert 0 < seen[0] < seen[-1] == 1.0


def test_an_empty_folder_is_filled_and_anything_else_is_left_alone(tiny: Loaded, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    load(save(tiny, tmp_path / "empty"))
    with pytest.raises(FileExistsError, match="empty: expected a new or empty folder"):
        save(tiny, tmp_path / "empty")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError, match=f"{name}: expected a new or empty folder"):
            save(tiny, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failure_leaves_nothing(tiny: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        safetensors_file.write_safetensors(*args, **kwargs)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_safetensors", fails)
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="No space left"):
        save(tiny, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_folder_has_the_usual_permissions(tiny: Loaded, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    folder = save(tiny, tmp_path / "out")
    assert folder.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_what_cannot_be_written_is_refused(tiny: Loaded, tmp_path: Path) -> None:
    mixed = {**tiny.params, "norm": tiny.params["norm"].astype(jnp.bfloat16)}
    odd = tiny.config.__class__(**{**vars(tiny.config), "rope_freqs": tuple(float(i) for i in range(1, 9))})
    cases = {
        "a transformer, got ToyConfig": load("toy"),
        "one dtype of": tiny._replace(params=mixed),
        "others for.*norm": tiny._replace(params={**tiny.params, "norm": jnp.ones(3)}),
        "others for.*surplus": tiny._replace(params={**tiny.params, "surplus": jnp.ones(3)}),
        "rope_freqs": tiny._replace(config=odd),
        "model.norm.weight: expected finite": tiny._replace(
            params={**tiny.params, "norm": tiny.params["norm"] * jnp.nan}
        ),
        "tokenizer": tiny._replace(tokenizer=load("toy").tokenizer),
    }
    for message, loaded in cases.items():
        with pytest.raises(ValueError, match=message):
            save(loaded, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    for limit in (0, -1, 1.5):
        with pytest.raises(ValueError, match="max_shard_bytes"):
            save(tiny, tmp_path / "out", max_shard_bytes=limit)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Loaded, Path, np.ndarray]]:
    """The model from its GGUF, a folder for what is written (deleted after, it takes a gigabyte), and its logits."""
    folder = tmp_path_factory.mktemp("smollm2")
    before = os.environ.get("JAXDECODE_CACHE")
    os.environ["JAXDECODE_CACHE"] = str(folder / "cache")
    try:
        loaded = load("smollm2-135m")
        yield loaded, folder, greedy_logits(loaded, 1)[0]
    finally:
        shutil.rmtree(folder)
        os.environ.pop("JAXDECODE_CACHE", None)
        if before is not None:
            os.environ["JAXDECODE_CACHE"] = before


NEW = 6  # tokens generated after each prompt


def greedy_logits(loaded: Loaded, steps: int) -> np.ndarray:
    """Logits [steps, B, V] of greedy decoding after the goldens' prompts; each step anew, in one compiled program."""
    length = np.array([len(golden["prompt_ids"]) for golden in GREEDY])
    tokens = np.zeros((len(GREEDY), length.max() + NEW), np.int32)
    for row, golden in zip(tokens, GREEDY, strict=True):
        row[: len(golden["prompt_ids"])] = golden["prompt_ids"]
    cache = loaded.model.init_cache(loaded.params, *tokens.shape)
    apply, logits = jax.jit(loaded.model.apply), []
    for _ in range(steps):
        out, _ = apply(loaded.params, tokens, cache, lengths=length, logits_at=length[:, None] - 1)
        logits.append(np.asarray(out[:, 0]))
        tokens[np.arange(len(tokens)), length] = logits[-1].argmax(1)
        length = length + 1
    return np.stack(logits)


def test_smollm2_float32_in_shards_is_the_gguf(smollm2: tuple[Loaded, Path, np.ndarray]) -> None:
    loaded, folder, exact = smollm2
    again = load(save(loaded, folder / "model", max_shard_bytes=150_000_000))
    try:
        assert len(list((folder / "model").glob("*.safetensors"))) == 4
        assert same(loaded, again)
        assert speak_alike(loaded, again)
        logits = greedy_logits(again, NEW)
        np.testing.assert_array_equal(logits[0], exact)
        assert logits.argmax(2).T.tolist() == [golden["output_ids"][:NEW] for golden in GREEDY]
    finally:
        shutil.rmtree(folder / "model")


def test_smollm2_bfloat16_is_the_gguf_within_its_rounding(smollm2: tuple[Loaded, Path, np.ndarray]) -> None:
    loaded, folder, exact = smollm2
    half = loaded._replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), loaded.params))
    again = load(save(half, folder / "model"), dtype="bfloat16")
    try:
        assert same(half, again)
        got = greedy_logits(again, 1)[0]
        spread = exact.std(axis=1, keepdims=True)
        assert float(np.max(np.abs(got - exact) / spread)) < 0.25  # 30 layers that round to 2^-8
        clear = np.array([golden["top2_gap"][0] > 0.5 for golden in GREEDY])  # not tossed up by the rounding
        assert clear.sum() == 2
        np.testing.assert_array_equal(got.argmax(1)[clear], exact.argmax(1)[clear])
    finally:
        shutil.rmtree(folder / "model")
