"""Every family against transformers, from Hugging Face directories and from GGUF files; what is refused by name."""

from __future__ import annotations

import dataclasses
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
import tiny_families
import tiny_families_gguf
import tiny_gguf
import tiny_hf
from tiny_families import POSITIONS, PROMPTS, VARIANTS
from tiny_hf import Tiny

from jaxdecode import kvcache
from jaxdecode.base import Model
from jaxdecode.checkpoint import Loaded, load, save
from jaxdecode.checkpoint.gguf_checkpoint import read_gguf_checkpoint
from jaxdecode.checkpoint.hf_directory import read_hf_directory
from jaxdecode.models.transformer import TransformerConfig, frequencies, transformer

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "families.json").read_text())["variants"]
DYNAMIC = "dynamic beyond its original context"  # another model for each length: one prompt of one length
LONGEST = max(map(len, PROMPTS))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))


def loaded_from(folder: Path, name: str, change: Callable[[Tiny], None] = lambda model: None) -> Loaded:
    context = {"phi3 beyond its original context": 128, DYNAMIC: LONGEST}.get(name)
    return load(tiny_hf.write(folder, tiny_families.tiny(name), change), context_length=context)


@functools.partial(jax.jit, static_argnums=0)
def apply(model: Model, params: Any, tokens: Any, cache: Any, lengths: Any) -> Any:
    return model.apply(params, tokens, cache, lengths=lengths)


def check(got: Any, row: int, golden: dict[str, Any], positions: range) -> None:
    """Logits ``got[S,V]`` of ``positions`` of a row, at those of them that the golden has."""
    for i, at in enumerate(POSITIONS[row]):
        if at in positions:
            logits = np.asarray(got[at - positions.start], np.float64)
            np.testing.assert_allclose(logits[: tiny_families.KEPT], golden["logits"][i], atol=1e-4)
            np.testing.assert_allclose(np.log(np.exp(logits).sum()), golden["logsumexp"][i], atol=1e-4)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != DYNAMIC])
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Two rows of unequal lengths in one pass, token by token, and on from there; windows are rings that wrap."""
    loaded, golden = loaded_from(tmp_path / "model", name), GOLDENS[name]
    model, params = transformer(loaded.config, window_slack=2), loaded.params
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    tokens = np.array([prompt + [3] * (LONGEST - len(prompt)) for prompt in PROMPTS], np.int32)
    empty = model.init_cache(params, 2, LONGEST + tiny_families.NEW)
    logits, filled = apply(model, params, tokens, empty, lengths)
    for row, n in enumerate(lengths):
        check(logits[row], row, golden[row], range(n))

    steps = empty
    for at in range(LONGEST):
        logits, steps = apply(model, params, tokens[:, at : at + 1], steps, np.minimum(lengths - at, 1).clip(0))
        for row in np.flatnonzero(at < lengths):
            check(logits[row], row, golden[row], range(at, at + 1))
    assert steps.length.tolist() == filled.length.tolist() == lengths.tolist()

    assert min(row["gap"] for row in golden) > 1e-4, "the test needs clear choices"
    last = np.array([prompt[-1:] for prompt in PROMPTS], np.int32)
    state, written = kvcache.truncate(filled, lengths - 1), []
    for _ in range(tiny_families.NEW):
        logits, state = apply(model, params, last, state, np.ones(2, np.int32))
        last = np.asarray(jnp.argmax(logits[:, -1:], axis=-1), np.int32)
        written.append(last[:, 0].tolist())
    assert np.transpose(written).tolist() == [row["greedy"] for row in golden]


@pytest.mark.parametrize("parts", [kvcache.fork, kvcache.branch], ids=["fork", "branch"])
def test_rows_that_share_a_prompt_see_what_rows_alone_see(tmp_path: Path, parts: Callable[..., Any]) -> None:
    """Shared segments and beams, with soft caps, local layers and a ring."""
    loaded, golden = loaded_from(tmp_path / "model", "gemma2"), GOLDENS["gemma2"]
    model, params = transformer(loaded.config, window_slack=2), loaded.params
    tokens = np.array([prompt[:-1] + [3] * (LONGEST - len(prompt)) for prompt in PROMPTS], np.int32)
    lengths = np.array([len(prompt) - 1 for prompt in PROMPTS], np.int32)
    _, cache = apply(model, params, tokens, model.init_cache(params, 2, LONGEST), lengths)
    state, written = parts(cache, 2, tiny_families.NEW), []
    last = np.repeat(np.array([prompt[-1:] for prompt in PROMPTS], np.int32), 2, axis=0)
    for _ in range(tiny_families.NEW):
        logits, state = apply(model, params, last, state, np.ones(4, np.int32))
        last = np.asarray(jnp.argmax(logits[:, -1:], axis=-1), np.int32)
        written.append(last[:, 0].tolist())
    assert np.transpose(written).tolist() == [row["greedy"] for row in golden for _ in range(2)]


def test_dynamic_scaling_is_that_of_the_context_it_is_loaded_for(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path / "model", DYNAMIC)
    tokens = np.array([PROMPTS[0]], np.int32)
    cache = loaded.model.init_cache(loaded.params, *tokens.shape)
    logits, _ = apply(loaded.model, loaded.params, tokens, cache, np.array([LONGEST], np.int32))
    check(logits[0], 0, GOLDENS[DYNAMIC][0], range(LONGEST))
    plain = load(tmp_path / "model")
    assert plain.config.context_length == 40
    with pytest.raises(ValueError, match=r"context of 40 tokens \(for more, load it with context_length=\)"):
        plain.model.init_cache(plain.params, 1, 41)


def test_longrope_is_loaded_for_its_original_context(tmp_path: Path) -> None:
    name = "phi3 beyond its original context"
    loaded = load(tiny_hf.write(tmp_path / "model", tiny_families.tiny(name)))
    assert loaded.config.context_length == 32
    assert loaded_from(tmp_path / "again", name).config == loaded.config.with_context(128)
    with pytest.raises(ValueError, match="context_length: expected a whole number from 1 to 128, got 129"):
        load(tmp_path / "model", context_length=129)


def single(config: TransformerConfig) -> Any:
    """The fields, with numbers as a file of float32 has them."""

    def rounded(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: rounded(value) for key, value in x.items()}
        if isinstance(x, tuple):
            return [rounded(value) for value in x]
        return float(np.float32(x)) if isinstance(x, float) else x

    return rounded(dataclasses.asdict(config))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != DYNAMIC])
def test_a_gguf_file_is_the_same_model(tmp_path: Path, name: str) -> None:
    """The same config and, bit for bit, the same parameters: so the same logits."""
    ours = load(tiny_hf.write(tmp_path / "model", tiny_families.tiny(name)))
    theirs = load(tiny_gguf.write(tmp_path / "m.gguf", tiny_families_gguf.tiny(name)))
    expected = ours.config
    if name == "gemma2":  # a file has no scale: llama.cpp knows those of the published models
        expected = dataclasses.replace(expected, attention_scale=None)
    if name in ("mistral", "mixtral"):  # nor a window
        expected = dataclasses.replace(expected, sliding_window=None)
    if name == "qwen3 moe":  # nor whether the weights of experts are normed, as those of the published models are
        expected = dataclasses.replace(expected, norm_expert_weights=True)
    if name.startswith("neox, one"):  # nor an activation
        expected = dataclasses.replace(expected, activation="gelu")
    if name == "llama 3":  # it has the result of the scaling alone
        np.testing.assert_allclose(frequencies(theirs.config), frequencies(expected), rtol=1e-6)
        expected = dataclasses.replace(expected, rope_scaling=None, rope_freqs=theirs.config.rope_freqs)
    assert single(theirs.config) == single(expected)
    assert jax.tree.structure(ours.params) == jax.tree.structure(theirs.params)
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert theirs.tokenizer.encode("the land<|im_end|>") == ours.tokenizer.encode("the land<|im_end|>")


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_saved_is_what_transformers_wrote(tmp_path: Path, name: str) -> None:
    loaded = load(tiny_hf.write(tmp_path / "in", tiny_families.tiny(name)))
    again = load(save(loaded, tmp_path / "out"))
    assert again.config == loaded.config
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)
    original, config = tiny_families.tiny(name), json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == original.config["architectures"]
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == original.tensors.keys()
    for key, values in original.tensors.items():
        np.testing.assert_allclose(written[key], values, atol=1e-7 if "gemma" in name and "norm" in key else 0)


def config_of(folder: Path, name: str, change: Callable[[Tiny], None]) -> TransformerConfig:
    return read_hf_directory(tiny_hf.write(folder, tiny_families.tiny(name), change)).config


def put(**values: Any) -> Callable[[Tiny], None]:
    """Fields of config.json; None: without it."""

    def change(model: Tiny) -> None:
        model.config.update(values)
        model.texts["config.json"] = {k: v for k, v in model.config.items() if v is not None}

    return change


THE_SAME: dict[str, tuple[str, Callable[[Tiny], None]]] = {
    "rotary positions by kind of layer": (
        "gemma3",
        put(
            rope_scaling=None,
            rope_theta=None,
            rope_local_base_freq=None,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        ),
    ),
    "a pattern of windows": ("gemma3", put(layer_types=None, sliding_window_pattern=2)),
    "the pattern of the family": ("gemma2", put(layer_types=None)),
    "longrope by its new name": ("phi3", put(rope_scaling={"rope_type": "longrope", **tiny_families.FACTORS})),
    "longrope by its oldest name": ("phi3", put(rope_scaling={"type": "su", **tiny_families.FACTORS})),
    "experts by their other name": ("qwen3 moe", put(num_experts=None, num_local_experts=tiny_families.EXPERTS)),
    "rotary positions of new files": (
        "neox",
        put(
            rotary_pct=None,
            rotary_emb_base=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5},
        ),
    ),
    "rotary positions by both names": ("neox", put(rope_theta=10000, partial_rotary_factor=0.5)),
}


@pytest.mark.parametrize("case", THE_SAME)
def test_other_words_for_the_same_model(tmp_path: Path, case: str) -> None:
    name, change = THE_SAME[case]
    assert config_of(tmp_path / "a", name, change) == config_of(tmp_path / "b", name, lambda model: None)


def test_gpt2_as_its_authors_published_it(tmp_path: Path) -> None:
    """Without the head's prefix, with the masks of attention, and without the width of the MLP."""

    def bare(model: Tiny) -> None:
        model.tensors = {key.removeprefix("transformer."): value for key, value in model.tensors.items()}
        model.tensors |= {f"h.{i}.attn.bias": np.ones((1, 1, 8, 8), np.float32) for i in range(tiny_families.LAYERS)}

    ours, bared = loaded_from(tmp_path / "a", "gpt2"), loaded_from(tmp_path / "b", "gpt2", bare)
    assert ours.config == bared.config
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(bared.params), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"c_fc\.weight.*\(48, 192\)"):
        config_of(tmp_path / "c", "gpt2", put(n_inner=None))


def drop(name: str) -> Callable[[Tiny], None]:
    def change(model: Tiny) -> None:
        del model.tensors[name]

    return change


def misshape(name: str) -> Callable[[Tiny], None]:
    return lambda model: model.tensors.update({name: model.tensors[name][..., :-1]})


def more(name: str) -> Callable[[Tiny], None]:
    return lambda model: model.tensors.update({name: np.ones(3, np.float32)})


LAYER = "model.layers.1."
REFUSED: dict[str, tuple[str, Callable[[Tiny], None], str]] = {
    "a bias of attention": ("gemma3", put(attention_bias=True), "attention_bias"),
    "both directions": ("gemma3", put(use_bidirectional_attention=True), "use_bidirectional_attention"),
    "the model with eyes": ("gemma3", put(architectures=["Gemma3ForConditionalGeneration"]), "architectures"),
    "a kind of layer": ("gemma2", put(layer_types=["full_attention", "chunked"]), "layer_types.*chunked"),
    "kinds of too few layers": ("gemma2", put(layer_types=["full_attention"]), "layer_types"),
    "a cap of zero": ("gemma2", put(final_logit_softcapping=0.0), "final_logit_softcapping"),
    "another activation": ("gemma2", put(hidden_activation="relu"), "hidden_activation.*relu"),
    "local positions that are scaled": (
        "gemma3",
        put(rope_scaling=None, rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
        "sliding_attention",
    ),
    "a third kind of positions": (
        "gemma3",
        put(rope_scaling=None, rope_parameters={"full_attention": {}, "other": {}}),
        "rope_parameters.*other",
    ),
    "too few factors": ("phi3", put(rope_scaling={"type": "longrope", "short_factor": [1.0]}), "short_factor"),
    "a factor of zero": (
        "phi3",
        put(rope_scaling={"type": "longrope", **tiny_families.FACTORS, "long_factor": [0.0] * 6}),
        "long_factor",
    ),
    "an odd part of a head": ("neox", put(rotary_pct=0.25), "rotary_pct"),
    "more than a head": ("neox", put(rotary_pct=1.5), "rotary_pct"),
    "two bases": ("neox", put(rope_theta=5.0), "rope_theta"),
    "an unknown scaling": ("yarn", put(rope_scaling={"rope_type": "ntk", "factor": 2.0}), "rope_type.*ntk"),
    "yarn without a factor": ("yarn", put(rope_scaling={"rope_type": "yarn"}), "rope_scaling.factor"),
    "yarn with a base of one": ("yarn", put(rope_theta=1.0), "rope_theta"),
    "layers without experts": ("qwen3 moe", put(mlp_only_layers=[0]), "mlp_only_layers"),
    "experts in some layers": ("qwen3 moe", put(decoder_sparse_step=2), "decoder_sparse_step"),
    "more experts than there are": ("mixtral", put(num_experts_per_tok=6), "experts_per_token"),
    "experts that are not in the file": ("mixtral", put(num_local_experts=2**31 - 1), "experts"),
    "layers that are not in the file": ("gemma2", put(num_hidden_layers=2**31 - 1), "num_hidden_layers"),
    "scores by layer": ("gpt2", put(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    "heads that do not divide": ("gpt2", put(n_head=5), "n_embd"),
    "a missing norm": ("gemma2", drop(f"{LAYER}pre_feedforward_layernorm.weight"), "pre_feedforward_layernorm"),
    "a missing expert": ("mixtral", drop(f"{LAYER}block_sparse_moe.experts.4.w2.weight"), r"experts\.4\.w2"),
    "a surplus expert": ("mixtral", more(f"{LAYER}block_sparse_moe.experts.5.w2.weight"), r"experts\.5\.w2"),
    "a misshapen router": ("qwen3 moe", misshape(f"{LAYER}mlp.gate.weight"), r"mlp\.gate\.weight.*\(5, 48\)"),
    "a missing bias": ("neox", drop("gpt_neox.layers.0.attention.dense.bias"), r"dense\.bias"),
    "misshapen positions": ("gpt2", misshape("transformer.wpe.weight"), r"wpe\.weight.*\(128, 48\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, case: str) -> None:
    name, change, message = REFUSED[case]
    folder = tmp_path / "model"
    with pytest.raises(ValueError, match=message) as caught:
        config_of(folder, name, change)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


GGUF_REFUSED: dict[str, tuple[str, str, Any, str]] = {
    "a field of other families": ("olmo2", "olmo2.attention.sliding_window", 4, "sliding_window"),
    "no experts": ("qwen3 moe", "qwen3moe.expert_count", 0, "expert_count"),
    "experts in a family without": ("olmo2", "olmo2.expert_count", 2, "expert_count"),
    "more experts than there are": ("mixtral", "llama.expert_used_count", 9, "experts_per_token"),
    "an odd part of a head": ("neox", "gptneox.rope.dimension_count", 5, "rotary_dim"),
    "a part of a head elsewhere": ("gemma2", "gemma2.rope.dimension_count", 8, "dimension_count"),
    "yarn without a factor": ("neox", "gptneox.rope.scaling.type", "yarn", "rope.scaling.factor"),
    "longrope without factors": ("neox", "gptneox.rope.scaling.type", "longrope", "rope_factors_short"),
    "a pattern of too few layers": ("gemma3", "gemma3.attention.sliding_window_pattern", [True], "pattern"),
}


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_what_is_not_supported_in_a_gguf_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    name, key, value, message = GGUF_REFUSED[case]
    model = tiny_families_gguf.tiny(name)
    model.fields[key] = value
    with pytest.raises(ValueError, match=message) as caught:
        read_gguf_checkpoint(tiny_gguf.write(tmp_path / "m.gguf", model))
    assert "m.gguf" in str(caught.value)
