"""Hugging Face directories: what is read from sound ones, and that others are refused by file and field."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_hf
from tiny_hf import Tiny, tiny, write

from jaxdecode.checkpoint import converted, hf_directory, load
from jaxdecode.checkpoint.hf_directory import read_hf_directory
from jaxdecode.models.transformer import RopeScaling

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "tiny_hf.json").read_text())["variants"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def leaves(params: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(params)}


@pytest.mark.parametrize("name", tiny_hf.VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    loaded = load(write(tmp_path / "model", tiny(**tiny_hf.VARIANTS[name])))
    tokens = jnp.array(tiny_hf.PROMPTS)
    cache = loaded.model.init_cache(loaded.params, *tokens.shape)
    last = jnp.full((len(tokens), 1), tokens.shape[1] - 1)
    logits = np.asarray(loaded.model.apply(loaded.params, tokens, cache, logits_at=last)[0][:, 0], np.float64)
    for row, golden in zip(logits, GOLDENS[name], strict=True):
        np.testing.assert_allclose(row[: tiny_hf.KEPT], golden["logits"], atol=1e-4)
        np.testing.assert_allclose(np.log(np.exp(row).sum()), golden["logsumexp"], atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_param_is_made_of_its_tensors(tmp_path: Path, dtype: str, shards: int, tied: bool) -> None:
    model = tiny(tied=tied)
    params = load(write(tmp_path / "model", model, shards=shards), dtype=dtype).params
    tensors = {name: values.astype(jnp.dtype(dtype)) for name, values in model.tensors.items()}
    expected = {"['embed']": tensors["model.embed_tokens.weight"], "['norm']": tensors["model.norm.weight"]}
    if not tied:
        expected["['head']"] = tensors["lm_head.weight"]
    for i in range(tiny_hf.LAYERS):
        part = functools.partial("model.layers.{}.{}.weight".format, i)
        qkv = [tensors[part(f"self_attn.{x}_proj")] for x in "qkv"]
        expected |= {
            f"['layers'][{i}]['attn_norm']": tensors[part("input_layernorm")],
            f"['layers'][{i}]['qkv']": np.concatenate(qkv),
            f"['layers'][{i}]['out']": tensors[part("self_attn.o_proj")],
            f"['layers'][{i}]['mlp_norm']": tensors[part("post_attention_layernorm")],
            f"['layers'][{i}]['gate_up']": np.concatenate([tensors[part(f"mlp.{x}_proj")] for x in ("gate", "up")]),
            f"['layers'][{i}]['down']": tensors[part("mlp.down_proj")],
        }
    got = leaves(params)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert got[name].dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(got[name], values)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
def test_stored_dtypes_are_cast(tmp_path: Path, stored: str) -> None:
    def change(model: Tiny) -> None:
        model.tensors = {name: values.astype(jnp.dtype(stored)) for name, values in model.tensors.items()}

    model = tiny()
    params = load(write(tmp_path / "model", model, change)).params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    embed = model.tensors["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(np.asarray(params["embed"]), embed)


def test_second_load_opens_the_converted_copy_alone(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "model", tiny(), lambda m: m.texts.update({"generation_config.json": SAMPLING}))
    first = load(folder)
    monkeypatch.setattr(hf_directory, "read_hf_directory", lambda path: pytest.fail("read again"))
    second = load(str(folder))
    assert second.model is first.model
    assert second.generation == first.generation
    assert second.tokenizer.encode("the sea<|im_end|>") == first.tokenizer.encode("the sea<|im_end|>")
    second_leaves = leaves(second.params)
    assert all(np.array_equal(values, second_leaves[name]) for name, values in leaves(first.params).items())
    assert len(list((cache / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors"])
def test_a_change_of_any_file_is_seen(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model", tiny())
    load(folder)
    other = write(tmp_path / "other", tiny(seed=1, rope_theta=777.0))
    about = json.loads((other / "tokenizer_config.json").read_text()) | {"chat_template": "{{ messages[0].content }}"}
    (other / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / name).write_bytes((other / name).read_bytes())
    changed = load(folder)
    embed = tiny(seed=int(name == "model.safetensors")).tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(changed.params["embed"]), embed)
    assert changed.config.rope_theta == (777.0 if name == "config.json" else 10000.0)
    plain = changed.tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "x"
    assert plain == (name == "tokenizer_config.json")


def test_conversion_is_bounded_by_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_directory, "_BLOCK_VALUES", 640)
    checkpoint = read_hf_directory(write(tmp_path / "model", tiny()))
    for param in checkpoint.params:
        blocks = list(param.blocks())
        assert max(block.size for block in blocks) <= 640
        assert sum(block.size for block in blocks) == np.prod(param.shape)


def test_config_is_what_the_file_says(tmp_path: Path) -> None:
    config = load(write(tmp_path / "a", tiny(**tiny_hf.VARIANTS["llama3 scaling"]))).config
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)
    assert (config.norm_eps, config.rope_theta, config.context_length) == (1e-5, 10000.0, 128)
    config = load(write(tmp_path / "b", tiny(rope_scaling={"type": "linear", "factor": 2}))).config
    assert config.rope_freqs == (2.0,) * 8


def test_defaults_of_fields_that_are_missing(tmp_path: Path) -> None:
    def change(model: Tiny) -> None:
        for key in (
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "rope_theta",
            "tie_word_embeddings",
            "hidden_act",
        ):
            del model.config[key]
        model.config["head_dim"] = None

    config = load(write(tmp_path / "model", tiny(kv_heads=4, tied=False), change)).config
    assert (config.n_kv_heads, config.head_dim, config.norm_eps, config.rope_theta) == (4, 16, 1e-6, 10000.0)
    assert not config.tied


def test_what_says_off_or_is_for_training_alone_is_accepted(tmp_path: Path) -> None:
    off = {
        "attention_bias": False,
        "sliding_window": 128,
        "use_sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        "partial_rotary_factor": 1.0,
        "attention_dropout": 0.1,
        "pretraining_tp": 2,
        "rope_interleaved": False,
        "quantization_config": None,
        "some_training_note": {"a": 1},
    }
    load(write(tmp_path / "model", tiny(**off)))


def test_buffers_and_a_head_that_repeats_the_embedding_are_accepted(tmp_path: Path) -> None:
    def change(model: Tiny) -> None:
        model.tensors["lm_head.weight"] = model.tensors["model.embed_tokens.weight"].copy()
        model.tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    loaded = load(write(tmp_path / "model", tiny(), change))
    assert set(loaded.params) == {"embed", "layers", "norm"}

    def differ(model: Tiny) -> None:
        change(model)
        model.tensors["lm_head.weight"][3, 3] += 1

    with pytest.raises(ValueError, match=r"lm_head\.weight: expected the embedding's values"):
        load(write(tmp_path / "other", tiny(), differ))


SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [2, 0], "max_length": 99}


def test_generation_config_gives_ends_and_on_request_the_law(tmp_path: Path) -> None:
    loaded = load(write(tmp_path / "m", tiny(), lambda m: m.texts.update({"generation_config.json": SAMPLING})))
    assert loaded.tokenizer.eos_ids == (2, 0)
    plain = loaded.settings(max_new_tokens=3)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.eos) == (1.0, None, None, (2, 0))
    chosen = loaded.settings(defaults="model", top_p=0.5)
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.eos) == (0.6, 0.5, 20, (2, 0))
    with pytest.raises(ValueError, match="defaults: expected 'library' or 'model'"):
        loaded.settings(defaults="modell")  # type: ignore[arg-type]


def test_a_model_that_does_not_sample_recommends_greedy(tmp_path: Path) -> None:
    quiet = {"temperature": 0.6, "top_p": 0.9, "penalty_alpha": 0}
    loaded = load(write(tmp_path / "m", tiny(), lambda m: m.texts.update({"generation_config.json": quiet})))
    chosen = loaded.settings(defaults="model")
    assert (chosen.temperature, chosen.top_p) == (0.0, None)
    assert load(write(tmp_path / "bare", tiny())).settings(defaults="model").temperature == 0.0


@pytest.mark.parametrize("field", [{"num_beams": 4}, {"suppress_tokens": [1]}, {"guidance_scale": 1.5}])
def test_recommendations_without_a_setting_are_refused_when_asked_for(tmp_path: Path, field: dict[str, Any]) -> None:
    loaded = load(write(tmp_path / "m", tiny(), lambda m: m.texts.update({"generation_config.json": field})))
    loaded.settings()
    with pytest.raises(ValueError, match=f"{next(iter(field))}.*not supported"):
        loaded.settings(defaults="model")


def put(**fields: Any) -> Callable[[Tiny], None]:
    return lambda model: model.config.update(fields)


def drop(name: str) -> Callable[[Tiny], None]:
    def change(model: Tiny) -> None:
        model.config.pop(name, None)
        model.tensors.pop(name, None)

    return change


def replace(name: str, values: np.ndarray) -> Callable[[Tiny], None]:
    return lambda model: model.tensors.update({name: values})


Q, EMBED = "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"
REFUSED: dict[str, tuple[Callable[[Tiny], None], str]] = {
    "another architecture": (put(architectures=["GemmaForCausalLM"]), "architectures.*GemmaForCausalLM"),
    "no architecture": (drop("architectures"), "architectures"),
    "two architectures": (put(architectures=["LlamaForCausalLM", "X"]), "architectures"),
    "another model type": (put(model_type="mistral"), "model_type.*mistral"),
    "a missing size": (drop("hidden_size"), "hidden_size"),
    "a size that is a text": (put(hidden_size="64"), "hidden_size"),
    "a size that is a boolean": (put(num_hidden_layers=True), "num_hidden_layers"),
    "a size of zero": (put(num_attention_heads=0), "num_attention_heads"),
    "a size of 2^60": (put(intermediate_size=2**60), "intermediate_size"),
    "more layers than tensors": (put(num_hidden_layers=2**31 - 1), "num_hidden_layers"),
    "a huge head": (put(head_dim=2**31 - 2), "head_dim"),
    "a fractional size": (put(hidden_size=64.0), "hidden_size"),
    "heads that do not divide": (put(num_key_value_heads=3), "n_kv_heads"),
    "heads that do not divide the width": (put(head_dim=None, num_attention_heads=3), "hidden_size"),
    "an odd head": (put(head_dim=15), "head_dim"),
    "another activation": (put(hidden_act="gelu"), "hidden_act.*gelu"),
    "attention bias": (put(attention_bias=True), "attention_bias"),
    "mlp bias": (put(mlp_bias=True), "mlp_bias"),
    "a sliding window": (put(sliding_window=64), "sliding_window"),
    "sliding layers": (put(layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    "a quantized file": (put(quantization_config={"quant_method": "gptq"}), "quantization_config"),
    "code of its own": (put(auto_map={"AutoModelForCausalLM": "m.M"}), "auto_map"),
    "soft caps": (put(final_logit_softcapping=30.0), "final_logit_softcapping"),
    "experts": (put(num_local_experts=8), "num_local_experts"),
    "partial rotary": (put(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "an epsilon of zero": (put(rms_norm_eps=0), "rms_norm_eps"),
    "a tie that is a text": (put(tie_word_embeddings="yes"), "tie_word_embeddings"),
    "an unknown scaling": (put(rope_scaling={"rope_type": "mrope", "factor": 2.0}), "rope_type.*mrope"),
    "dynamic scaling without a factor": (put(rope_scaling={"type": "dynamic"}), "rope_scaling.factor"),
    "two rope types": (put(rope_scaling={"rope_type": "linear", "type": "llama3", "factor": 2.0}), "rope_scaling.type"),
    "no factor": (put(rope_scaling={"rope_type": "linear"}), "rope_scaling.factor"),
    "a factor without a type": (put(rope_scaling={"factor": 2.0}), "rope_scaling.factor"),
    "an unknown rope field": (put(rope_scaling={"type": "linear", "factor": 2.0, "beta": 1}), "rope_scaling.*beta"),
    "llama3 without its fields": (put(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "low_freq_factor"),
    "llama3 turned round": (
        put(rope_scaling={"rope_type": "llama3", **tiny_hf.LLAMA3, "high_freq_factor": 1.0}),
        "high_freq_factor",
    ),
    "two rope scalings": (
        put(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
        "rope_scaling.*rope_parameters",
    ),
    "two thetas": (put(rope_parameters={"rope_type": "default", "rope_theta": 5.0}), "rope_theta"),
    "rope by kind of layer": (put(rope_parameters={"full_attention": {"rope_type": "default"}}), "full_attention"),
    "an end id out of range": (put(eos_token_id=10**6), r"config\.json: eos_token_id"),
    "an end id of another type": (put(eos_token_id=[2, "x"]), r"config\.json: eos_token_id"),
    "another vocabulary size": (put(vocab_size=100), "tokenizer|embed_tokens"),
    "a missing tensor": (drop(Q), Q),
    "no embedding": (drop(EMBED), EMBED),
    "a surplus tensor": (replace("model.layers.1.self_attn.q_proj.bias", np.ones(64, np.float32)), "q_proj.bias"),
    "one layer too few": (put(num_hidden_layers=1), r"tensors.*layers\.1"),
    "a misshapen tensor": (replace(Q, np.ones((64, 63), np.float32)), rf"model\.safetensors: {Q}.*\(64, 64\)"),
    "a tensor of one axis more": (replace(Q, np.ones((64, 64, 1), np.float32)), Q),
    "whole numbers": (replace(Q, np.ones((64, 64), np.int32)), rf"{Q}.*int32"),
    "no head": (put(tie_word_embeddings=False), r"lm_head\.weight"),
    "NaN weights": (replace(Q, np.full((64, 64), np.nan, np.float32)), r"layers\.1\.qkv.*finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    folder = write(tmp_path / "model", tiny(), change)
    with pytest.raises(ValueError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache" / "checkpoints").iterdir())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model", tiny())
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load(folder)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tiny())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin \(pickled weights are never opened\)"):
        load(folder)


def test_a_sentencepiece_model_alone_is_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tiny())
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model, which is not supported"):
        load(folder)


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    return folder


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no map": (lambda index: index.pop("weight_map"), "weight_map"),
    "a map that is a list": (lambda index: index.update(weight_map=[1]), "weight_map"),
    "a file elsewhere": (lambda index: index["weight_map"].update({Q: "../x.safetensors"}), "q_proj"),
    "another kind of file": (lambda index: index["weight_map"].update({Q: "x.bin"}), "q_proj"),
    "a file that is a number": (lambda index: index["weight_map"].update({Q: 5}), "q_proj"),
    "a tensor that is not there": (
        lambda index: index["weight_map"].update({"ghost": "model-00001-of-00002.safetensors"}),
        r"model-00001-of-00002\.safetensors.*ghost",
    ),
    "a tensor that is not listed": (lambda index: index["weight_map"].pop(Q), "q_proj"),
    "a tensor in another file": (
        lambda index: index["weight_map"].update({Q: "model-00001-of-00002.safetensors"}),
        "q_proj",
    ),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_must_fit_its_files(tmp_path: Path, case: str) -> None:
    change, message = INDEXES[case]
    model = tiny()
    names = sorted(model.tensors)
    assert names.index(Q) % 2 == 1, "in the second file"
    folder = edit_index(write(tmp_path / "model", model, shards=2), change)
    with pytest.raises(ValueError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tiny(), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors"):
        load(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", tiny(), shards=2)
    path = folder / "model-00001-of-00002.safetensors"
    tensors = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file({**tensors, Q: np.ones((64, 64), np.float32)}, path)
    with pytest.raises(ValueError, match=r"00001-of-00002\.safetensors: tensors: expected none beyond"):
        load(folder)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a memory map can be used as it is on a CPU alone")
def test_only_aligned_neighbours_of_the_dtype_are_mapped(tmp_path: Path) -> None:
    checkpoint = read_hf_directory(write(tmp_path / "model", tiny()))
    assert (
        converted.mapped(checkpoint, np.dtype(np.float32)) is None
    )  # the safetensors package neither aligns nor joins
