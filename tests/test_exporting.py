"""Generation as a file: the same tokens without this library, every strategy for every platform, refusals by reason."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdecode as jd
from jaxdecode import testing
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer

CONFIG = TransformerConfig(40, 32, 2, 4, 2, 8, 48, 128)
MODEL, PARAMS = transformer(CONFIG), init_params(CONFIG, jax.random.key(3))
DRAFT = (testing.markov_model(), jax.random.normal(jax.random.key(4), (40, 40)))
TOKENS = np.random.default_rng(5).integers(0, 40, (2, 6)).astype(np.int32)
LENGTHS = np.array([6, 4], np.int32)
KEY = jax.random.key(7)

STRATEGIES: dict[str, dict[str, Any]] = {
    "sampling": {"temperature": 0.9, "top_k": 9, "top_p": 0.8, "repetition_penalty": 1.2, "min_p": 0.01},
    "greedy and others": {"temperature": 0.0, "num_samples": 2, "stop": [[5, 6]], "top_logprobs": 2},
    "beams": {"beams": 3, "length_penalty": 0.7},
    "without replacement": {"num_samples": 3, "without_replacement": True},
    "prompt lookup": {"temperature": 0.5, "prompt_lookup": 3},
    "draft": {"temperature": 0.5},
    "choices": {"temperature": 1.0, "choices": [[3, 4, 5], [3, 7], [8, 8, 8, 8]]},
}


def settings(name: str) -> jd.Settings:
    return jd.Settings(max_new_tokens=6, eos=[0], **STRATEGIES[name])


def inputs(name: str) -> dict[str, Any]:
    """Other numbers than those of the settings that were exported."""
    exported = settings(name)
    given: dict[str, Any] = {"tokens": TOKENS, "lengths": LENGTHS}
    if name != "choices":
        given["min_new_tokens"] = np.array([0, 2], np.int32)
    given["temperature"] = np.array([0.7, 0.0 if name in ("sampling", "greedy and others") else 1.1], np.float32)
    more = {"top_k": [5, 0], "top_p": [0.9, 0.7], "repetition_penalty": [1.0, 1.3], "min_p": [0.0, 0.1]}
    for option, values in more.items():
        if getattr(exported, option) is not None:
            given[option] = np.array(values, np.int32 if option == "top_k" else np.float32)
    if exported.beams is not None:
        given["length_penalty"] = np.array([0.0, 1.5], np.float32)
    return given


def made(name: str, **options: Any) -> jax.export.Exported:
    draft = DRAFT if name == "draft" else None
    return jd.export_generate(
        MODEL, PARAMS, batch_size=2, prompt_len=6, settings=settings(name), draft=draft, **options
    )


ALONE = """
import sys, numpy as np, jax, jax.export
call = jax.export.deserialize(bytearray(open(sys.argv[1] + ".bin", "rb").read())).call
arrays = np.load(sys.argv[1] + ".npz")
params = {k[2:]: v for k, v in arrays.items() if k.startswith("p:")}
inputs = {k[2:]: v for k, v in arrays.items() if k.startswith("i:")}
out = jax.jit(call)(params, inputs, jax.random.key(7))
assert not any(name.startswith("jaxdecode") for name in sys.modules)
np.savez(sys.argv[1] + ".out.npz", **out)
"""


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_file_for_every_platform_gives_the_same_tokens(name: str) -> None:
    given = inputs(name)
    whole = (PARAMS, DRAFT[1]) if name == "draft" else PARAMS
    program = made(name, platforms=("cpu", "cuda", "tpu"))
    assert program.platforms == ("cpu", "cuda", "tpu")
    got = jd.load_exported(program.serialize())(jd.named_params(whole), given, KEY)
    numbers = {k: v for k, v in given.items() if k not in ("tokens", "lengths")}
    here = jd.generate(
        MODEL,
        PARAMS,
        TOKENS,
        lengths=LENGTHS,
        key=KEY,
        settings=dataclasses.replace(settings(name), **numbers),
        draft=DRAFT if name == "draft" else None,
    )
    np.testing.assert_array_equal(got["tokens"], here.tokens)
    np.testing.assert_array_equal(got["finish"], here.finish)
    np.testing.assert_allclose(got["logprob"], here.logprob, atol=1e-5)
    absent = {f.name for f in dataclasses.fields(here) if getattr(here, f.name) is None}
    assert not absent & got.keys()


def test_a_process_without_this_library_runs_it(tmp_path: Path) -> None:
    """Quantized weights too: their leaves are arrays by name."""
    params = jd.quantize(PARAMS, "int8")
    file, given = tmp_path / "program", inputs("sampling")
    program = jd.export_generate(MODEL, params, batch_size=2, prompt_len=6, settings=settings("sampling"))
    file.with_suffix(".bin").write_bytes(program.serialize())
    named = {f"p:{k}": v for k, v in jd.named_params(params).items()} | {f"i:{k}": v for k, v in given.items()}
    np.savez(file.with_suffix(".npz"), **named)
    done = subprocess.run([sys.executable, "-c", ALONE, str(file)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = {k: v for k, v in given.items() if k not in ("tokens", "lengths")}
    chosen = dataclasses.replace(settings("sampling"), **numbers)
    here = jd.generate(MODEL, params, TOKENS, lengths=LENGTHS, key=KEY, settings=chosen)
    np.testing.assert_array_equal(np.load(f"{file}.out.npz")["tokens"], here.tokens)


@pytest.mark.parametrize("scheme", ["int8", "int8_weights", "int4"])
def test_quantized_weights_lower_for_every_platform(scheme: Any) -> None:
    shapes = jax.eval_shape(lambda: jd.quantize(PARAMS, scheme))
    chosen = settings("sampling")
    program = jd.export_generate(
        MODEL, shapes, batch_size=2, prompt_len=6, settings=chosen, platforms=("cpu", "cuda", "tpu")
    )
    assert len(program.platforms) == 3


def _unknown(file: jax.export.Exported) -> bytes:
    """Its program with an operation of a version to come."""
    code = file.mlir_module_serialized
    assert code.count(b"add_v1") >= 1
    return code.replace(b"add_v1", b"add_v9")


def test_refusals() -> None:
    file = made("sampling")
    named, given = jd.named_params(PARAMS), inputs("sampling")
    for bad, about in (
        (b"not a program", "what jax.export wrote"),
        (made("sampling", platforms=("tpu",)).serialize(), "a program for cpu, got one for tpu"),
        (dataclasses.replace(file, calling_convention_version=5).serialize(), "versions 9 to"),
        (dataclasses.replace(file, calling_convention_version=99).serialize(), "versions 9 to .*got 99"),
        (dataclasses.replace(file, mlir_module_serialized=_unknown(file)).serialize(), "operations that jax"),
    ):
        with pytest.raises(ValueError, match=about):
            jd.load_exported(bad)
    call = jd.load_exported(file.serialize())
    for params, numbers, about in (
        ({k: v for k, v in named.items() if k != "norm"}, given, "params: expected 'norm'"),
        (named | {"norm": jnp.zeros((3,))}, given, r"params\['norm'\]: expected float32\[32\], got float32\[3\]"),
        (named, given | {"top_k": [0.5, 1.0]}, r"inputs\['top_k'\]: expected int32\[2\]"),
        (named, given | {"topp": [0.5, 1.0]}, "inputs: expected only .*got topp"),
    ):
        with pytest.raises(ValueError, match=about):
            call(params, numbers, KEY)
    with pytest.raises(ValueError, match="batch_size"):
        jd.export_generate(MODEL, PARAMS, batch_size=0, prompt_len=6)


def test_the_example_runs(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "scripts" / "examples" / "export_generate.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "bytes for cpu" in done.stdout
