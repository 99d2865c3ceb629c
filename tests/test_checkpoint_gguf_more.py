"""GGUF files as they are found: fields that are missing, scalings, files in parts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
from tiny_gguf import KINDS, Tiny, tiny, write

from jaxdecode.checkpoint import load
from jaxdecode.checkpoint.gguf_checkpoint import part_paths, read_gguf_checkpoint
from jaxdecode.models.transformer import RopeScaling, TransformerConfig, frequencies


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config_of(folder: Path, **fields: Any) -> TransformerConfig:
    """The config of a file with these llama fields changed; None: left out. "__" stands for a dot."""

    def change(model: Tiny) -> None:
        for key, value in fields.items():
            name = f"llama.{key.replace('__', '.')}"
            model.fields.pop(name, None)
            if value is not None:
                model.fields[name] = value

    return read_gguf_checkpoint(write(folder / "m.gguf", tiny(), change)).config


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_relatives_of_llama_have_their_rows_in_order_and_more_tensors(tmp_path: Path, kind: str) -> None:
    model = tiny()
    loaded = load(write(tmp_path / "m.gguf", model, lambda m: tiny_gguf.as_qwen(m, kind)))
    for i, layer in enumerate(loaded.params["layers"]):
        part = f"blk.{i}.attn_"
        expected = {"qkv": np.concatenate([model.tensors[f"{part}{x}.weight"] for x in "qkv"])}
        if kind == "qwen2":
            expected["qkv_bias"] = np.concatenate([model.tensors[f"{part}{x}.bias"] for x in "qkv"])
        else:
            expected |= {f"{x}_norm": model.tensors[f"{part}{x}_norm.weight"] for x in "qk"}
        for name, values in expected.items():
            np.testing.assert_array_equal(layer[name], values)
        assert len(layer) == len(expected) + 5
    assert (loaded.config.qkv_bias, loaded.config.qk_norm) == (kind == "qwen2", kind == "qwen3")

    def lacking(model: Tiny) -> None:
        tiny_gguf.as_qwen(model, kind)
        for name in [n for n in model.tensors if "attn_q" in n and not n.endswith("attn_q.weight")]:
            del model.tensors[name]

    path = write(tmp_path / "m2.gguf", tiny(), lacking)
    with pytest.raises(ValueError, match=r"m2\.gguf: blk\.0\.attn_q.*expected this tensor"):
        load(path)


def test_fields_that_are_missing_have_the_defaults_of_llama_cpp(tmp_path: Path) -> None:
    plain = config_of(tmp_path)
    assert config_of(tmp_path, rope__freq_base=None, rope__dimension_count=None, vocab_size=None) == plain
    with pytest.raises(ValueError, match=r"attn_k\.weight.*\(64, 64\)"):  # as many as query heads, of 64 / 2 features
        config_of(tmp_path, attention__head_count_kv=None, attention__head_count=2, rope__dimension_count=None)


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"rope__scaling__factor": 4.0}, 4.0),  # linear, if nothing else is said
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scale_linear": 2.0}, 2.0),  # of the oldest files
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({"rope__scaling__factor": 0.0}, None),
        ({"rope__scaling__factor": 1.0, "rope__scaling__attn_factor": 1.0, "attention__scale": 0.0}, None),
    ],
)
def test_linear_scaling(tmp_path: Path, fields: dict[str, Any], factor: float | None) -> None:
    assert config_of(tmp_path, **fields).rope_freqs == (None if factor is None else (factor,) * 8)


@pytest.mark.parametrize(
    "fields", [{"rope__scaling__attn_factor": 2.0}, {"attention__scale": 0.1}, {"rope__scaling__factor": -1.0}]
)
def test_other_scalings_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields)).replace("__", ".")):
        config_of(tmp_path, **fields)


def test_one_number_for_each_layer_counts_if_all_are_equal(tmp_path: Path) -> None:
    plain = config_of(tmp_path)
    lists = {"attention__head_count": [4, 4], "attention__head_count_kv": [2, 2], "feed_forward_length": [96, 96]}
    assert config_of(tmp_path, **lists) == plain
    with pytest.raises(ValueError, match="feed_forward_length"):
        config_of(tmp_path, feed_forward_length=[96, 48])


def test_the_divisors_of_llama_3_1_are_its_rule(tmp_path: Path) -> None:
    plain = config_of(tmp_path, rope__freq_base=500000.0)
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    scaled = TransformerConfig(**{**vars(plain), "rope_scaling": scaling})
    divisors = (frequencies(plain) / frequencies(scaled)).astype(np.float32)
    assert 1.0 == divisors[0] < divisors[4] < divisors[-1] == 8.0

    def change(model: Tiny) -> None:
        model.fields["llama.rope.freq_base"] = 500000.0
        model.tensors["rope_freqs.weight"] = divisors

    assert read_gguf_checkpoint(write(tmp_path / "m.gguf", tiny(), change)).config == scaled
    divisors = divisors * np.linspace(1, 1.001, 8, dtype=np.float32)  # nearly: kept as they are
    assert read_gguf_checkpoint(write(tmp_path / "m.gguf", tiny(), change)).config.rope_freqs == tuple(
        divisors.tolist()
    )


def split(folder: Path, *, count: int = 3, change: Callable[[int, Tiny], None] = lambda i, part: None) -> Path:
    """The tiny model in several files; ``change`` is told a part's number. Returns the first one."""
    whole = tiny(matrices=KINDS.Q8_0)
    names = sorted(whole.tensors)
    folder.mkdir(exist_ok=True)
    for i in range(count):
        fields = dict(whole.fields) if i == 0 else {"general.architecture": "llama"}
        fields |= {"split.no": i, "split.count": count, "split.tensors.count": len(names)}
        part = Tiny(fields, {name: whole.tensors[name] for name in names[i::count]}, whole.kinds)
        change(i, part)
        write(folder / f"m-{i + 1:05d}-of-{count:05d}.gguf", part)
    return folder / f"m-00001-of-{count:05d}.gguf"


def test_a_checkpoint_in_parts_is_the_whole(tmp_path: Path) -> None:
    whole = load(write(tmp_path / "m.gguf", tiny(matrices=KINDS.Q8_0)))
    parts = load(split(tmp_path / "parts"))
    assert parts.config == whole.config
    for name in ("embed", "norm"):
        np.testing.assert_array_equal(np.asarray(parts.params[name]), np.asarray(whole.params[name]))
    for a, b in zip(parts.params["layers"], whole.params["layers"], strict=True):
        for key in a:
            np.testing.assert_array_equal(np.asarray(a[key]), np.asarray(b[key]))


def test_a_change_of_any_part_is_seen(tmp_path: Path) -> None:
    first = split(tmp_path / "parts")
    before = load(first)

    def other(i: int, part: Tiny) -> None:
        part.tensors = {name: values + 1 for name, values in part.tensors.items()}

    second = part_paths(first)[1]
    shutil.copy(part_paths(split(tmp_path / "other", change=other))[1], second)
    after = load(first)
    assert sum(
        not np.array_equal(np.asarray(a[key]), np.asarray(b[key]))
        for a, b in zip(before.params["layers"], after.params["layers"], strict=True)
        for key in a
    )


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    first = split(tmp_path / "a")
    with pytest.raises(ValueError, match=r"00002-of-00003\.gguf: expected the first part, m-00001-of-00003\.gguf"):
        load(part_paths(first)[1])
    part_paths(first)[2].unlink()
    with pytest.raises(FileNotFoundError, match=r"m-00003-of-00003\.gguf: expected part 3 of 3"):
        load(first)

    def number(i: int, part: Tiny) -> None:
        part.fields["split.no"] = 0

    with pytest.raises(ValueError, match=r"00002-of-00003\.gguf: split\.no: expected part 1 of 3"):
        load(split(tmp_path / "b", change=number))

    def again(i: int, part: Tiny) -> None:
        part.tensors["output_norm.weight"] = np.ones(tiny_gguf.D, np.float32)

    with pytest.raises(ValueError, match=r"tensors: expected each tensor once.*output_norm"):
        load(split(tmp_path / "c", change=again))

    def counts(i: int, part: Tiny) -> None:
        part.fields["split.count"] = 2**16

    with pytest.raises(ValueError, match=r"split\.count: expected 3 parts"):
        load(split(tmp_path / "d", change=counts))
    alone = tmp_path / "alone.gguf"
    shutil.copy(split(tmp_path / "e"), alone)
    with pytest.raises(ValueError, match=r"alone\.gguf: split\.count: expected 1 parts, by the file's name, got 3"):
        load(alone)


def test_a_name_like_a_part_is_just_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "m-00001-of-99999.gguf", tiny())
    assert load(path).config.d_model == tiny_gguf.D
