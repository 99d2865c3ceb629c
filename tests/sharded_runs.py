"""What `test_sharding.py` runs on 8 virtual devices, in a process of its own: the same on a mesh and on one device.

Prints a JSON object. ``python sharded_runs.py --all`` runs every strategy of every model on every mesh, ``--bits`` what
`test_bits_over_meshes.py` compares.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdecode as jd
from jaxdecode import transforms
from jaxdecode.arithmetic import PLAIN, STEADY
from jaxdecode.engine import Engine, Options, Request
from jaxdecode.generation import start
from jaxdecode.keys import row_keys
from jaxdecode.meshes import mesh_of, place
from jaxdecode.models.sharding import shard
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import markov_model
from jaxdecode.transforms import select

sys.path.insert(0, str(Path(__file__).parent))
import tiny_hf

MESHES = ("data=1,tensor=8", "data=2,tensor=4", "data=8,tensor=1")
LLAMA = TransformerConfig(256, 64, 1, 8, 8, 8, 256, 128)
EXPERTS = TransformerConfig(256, 64, 1, 8, 4, 8, 64, 128, n_experts=4, experts_per_token=2)
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12], [13, 14, 15], [16], [17, 18, 19], [20, 21], [22, 23, 24, 25]]
KEY = jax.random.key(7)
HALF = [0.0, 0.9] * 4  # every other row takes the arg max
STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": HALF, "top_p": 0.9, "top_logprobs": 2},
    "samples": {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.1, "num_samples": 2},
    "beams": {"beams": 3, "length_penalty": 0.5},
    "lookup": {"temperature": HALF, "prompt_lookup": 3},
    "choices": {"temperature": HALF, "choices": [[3, 4, 5], [3, 7], [8, 8, 8, 8]]},
}


def strategy(name: str, model: Any, params: Any) -> Any:
    """Tokens and margins of every row: [outputs, smallest margin at each of their tokens]."""
    if name == "engine":
        requests = [
            Request(i, prompt, jd.Settings(max_new_tokens=6, temperature=HALF[i], eos=[0]), key)
            for i, (prompt, key) in enumerate(zip(PROMPTS, row_keys(KEY, len(PROMPTS)), strict=True))
        ]
        served = Engine(model, params, options=Options(slots=8, staged=8, chunk=8)).serve(requests)
        outs = [result.out for result in sorted(served, key=lambda r: r.request.id)]
        assert all(out is not None for out in outs)
        return [[out.to_lists()[0], _margins(out)[0]] for out in outs if out is not None]
    settings = jd.Settings(max_new_tokens=8, eos=[0], **STRATEGIES[name])
    out = jd.generate(model, params, PROMPTS, key=KEY, settings=settings)
    return [list(pair) for pair in zip(out.to_lists(), _margins(out), strict=True)]


def _margins(out: jd.Generated) -> Any:
    return np.nan_to_num(np.minimum(out.margin, out.set_margin), nan=0.0, posinf=1e9).tolist()


def runs(which: dict[str, dict[str, tuple[str, ...]]]) -> Iterator[tuple[str, str, str, Any, Any]]:
    """Model, mesh, strategy, what it gives on one device, and what on the mesh; ``which``: model -> mesh -> names."""
    llama = init_params(LLAMA, jax.random.key(0))
    table: Any = (None, markov_model(), jax.random.normal(jax.random.key(1), (256, 256)))
    int8, int4 = jd.quantize(llama, "int8"), jd.quantize(llama, "int4")
    (first,), (last,) = int8["layers"], int4["layers"]
    codes = {**int8, "layers": ({**last, "qkv": first["qkv"], "out": first["out"]},)}  # int8 but for the MLP
    models = {
        "table": table,
        "llama": (LLAMA, transformer(LLAMA), llama),
        "codes": (LLAMA, transformer(LLAMA, cache_dtype="int8"), codes),
    }
    for model_name, meshes in which.items():
        config, model, params = models[model_name]
        alone = {name: strategy(name, model, params) for name in dict.fromkeys(n for m in meshes.values() for n in m)}
        for text, names in meshes.items():
            mesh = mesh_of(text)
            host = jax.tree.map(np.asarray, params)
            placed = place(host, mesh) if config is None else shard(config, host, mesh)
            with jax.set_mesh(mesh):
                for name in names:
                    yield model_name, text, name, alone[name], strategy(name, model, placed)


# ---------------------------------------------------------------- what is exchanged, and what each device holds
def exchanged(text: str) -> list[list[Any]]:
    """[operation, numbers in its largest result, how many of them] of a compiled program."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    found: collections.Counter[tuple[str, int]] = collections.Counter()
    for shapes, kind in re.findall(rf"= (\(?\w+\[.*?) ({kinds})(?:-start)?\(", text):
        sizes = [np.prod([int(n) for n in s.split(",") if n] or [1]) for s in re.findall(r"\w+\[([\d,]*)\]", shapes)]
        found[kind, int(max(sizes))] += 1
    return [[*key, count] for key, count in sorted(found.items())]


def programs(text: str, vocab_size: int) -> dict[str, Any]:
    """What a call of the model and a step of sampling exchange, and bytes of their arguments on a device."""
    config = TransformerConfig(vocab_size, 64, 2, 8, 8, 8, 128, 128)
    mesh, model, told = mesh_of(text), transformer(config), {}
    params = init_params(config, jax.random.key(0))
    whole = _bytes(params, lambda x: x.shape)
    with jax.set_mesh(mesh):
        placed = shard(config, jax.tree.map(np.asarray, params), mesh)
        settings = jd.Settings(max_new_tokens=8, eos=[0], temperature=0.9)
        decoder, state = start(model, placed, PROMPTS, key=KEY, settings=settings)
        step = jax.jit(decoder.step).lower(placed, state).compile()
        tokens, one = np.ones((8, 1), np.int32), np.ones((8,), np.int32)
        apply = jax.jit(lambda p, c: model.apply(p, tokens, c, lengths=one, logits_at=tokens - 1))
        call = apply.lower(placed, state.cache).compile()
    told["step"], told["call"] = exchanged(step.as_text()), exchanged(call.as_text())
    told["arguments"] = call.memory_analysis().argument_size_in_bytes
    told["expected"] = _bytes((placed, state.cache), lambda x: x.sharding.shard_shape(x.shape))
    told["params"] = [whole, _bytes(placed, lambda x: x.sharding.shard_shape(x.shape))]
    told["cache"] = [_bytes(state.cache, f) for f in (lambda x: x.shape, lambda x: x.sharding.shard_shape(x.shape))]
    return told


def experts(text: str) -> dict[str, Any]:
    """Of a mixture of experts: how far its logits are from those on one device, and what a call exchanges."""
    params, mesh, model = init_params(EXPERTS, jax.random.key(2)), mesh_of(text), transformer(EXPERTS)
    tokens = jnp.arange(16, dtype=jnp.int32).reshape(8, 2)
    apply = jax.jit(lambda p: model.apply(p, tokens, model.init_cache(p, 8, 2))[0])
    alone = np.asarray(apply(params))
    with jax.set_mesh(mesh):
        call = apply.lower(placed := shard(EXPERTS, jax.tree.map(np.asarray, params), mesh)).compile()
        found = np.asarray(call(placed))
    stack = placed["layers"][0]["expert_gate"]
    part = [list(stack.shape), list(stack.sharding.shard_shape(stack.shape))]
    return {"off": float(np.abs(alone - found).max()), "exchanged": exchanged(call.as_text()), "gate": part}


def _bytes(tree: Any, shape: Any) -> int:
    return int(sum(np.prod(shape(x), dtype=int) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


# ---------------------------------------------------------------- bits
def bits() -> dict[str, dict[str, list[int]]]:
    """Of float32, and of int8 with steady arithmetic, by mesh: logits of a prefill and a loop that differ from those of
    one device in any bit, of how many; bytes that the program needs beside its arguments, and of the codes on a device.
    """
    config = TransformerConfig(2048, 256, 2, 8, 8, 32, 768, 64)
    given = init_params(config, jax.random.key(5))
    prompt = jax.random.randint(jax.random.key(6), (8, 5), 0, 2048)

    def run(model: Any, params: Any) -> jax.Array:
        def step(state: Any, _: None) -> Any:
            tokens, cache = state
            logits, cache = model.apply(params, tokens, cache)
            return (jnp.argmax(logits[:, -1:], -1).astype(jnp.int32), cache), logits[:, -1]

        cache = model.init_cache(params, 8, 16)
        first, cache = model.apply(params, prompt, cache)
        (_, _), logits = jax.lax.scan(step, (jnp.argmax(first[:, -1:], -1).astype(jnp.int32), cache), length=6)
        return jnp.concatenate([first[:, -1][None], logits])

    found: dict[str, dict[str, list[int]]] = {}
    for name, params in {"float32": given, "int8": jd.quantize(given, "int8")}.items():
        call = jax.jit(functools.partial(run, transformer(config, arithmetic=PLAIN if name == "float32" else STEADY)))
        alone, found[name] = np.asarray(call(params)), {}
        for text in MESHES:
            mesh = mesh_of(text)
            with jax.set_mesh(mesh):
                placed = shard(config, jax.tree.map(np.asarray, params), mesh)
                program = call.lower(placed).compile()
                logits = np.asarray(program(placed))
            codes = [x for x in jax.tree.leaves(placed) if x.dtype == jnp.int8]
            sizes = [
                program.memory_analysis().temp_size_in_bytes,
                _bytes(codes, lambda x: x.sharding.shard_shape(x.shape)),
            ]
            found[name][text] = [int((alone != logits).sum()), logits.size, *sizes]
    return found


# ---------------------------------------------------------------- filters and draws over a vocabulary in parts
def filters(text: str) -> dict[str, Any]:
    """Ids that filters keep of logits in parts and of whole ones where these differ, and how near to the threshold."""
    logits = 4 * jax.random.normal(jax.random.key(3), (8, 8320))
    logits = logits.at[0].set(0.0)  # a flat row
    every = {
        "top_k": transforms.top_k(50),
        "top_p": transforms.top_p(0.9),
        "min_p": transforms.min_p(0.02),
        "p_less": transforms.p_less(),
    }
    u = jax.random.uniform(jax.random.key(4), (8,))
    none = jnp.zeros((8, 1), jnp.int32), jnp.ones((8,), jnp.int32)

    @jax.jit
    def run(logits: jax.Array) -> tuple[dict[str, jax.Array], Any, Any]:
        kept = {name: t(logits, *none) > -jnp.inf for name, t in every.items()}
        return kept, select.draw(logits, u), transforms.largest(logits, 5)

    alone = jax.tree.map(np.asarray, run(logits))
    mesh = mesh_of(text)
    with jax.set_mesh(mesh):
        spread = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data", "tensor")))
        parts = jax.tree.map(np.asarray, run(spread))
    law = np.asarray(jax.nn.softmax(logits, -1), np.float64)
    mass = {n: np.abs((alone[0][n] * law).sum(1) - (parts[0][n] * law).sum(1)).max() for n in every}
    same = {"token": bool((alone[1].token == parts[1].token).all()), "margin": float(alone[1].margin.min())}
    same["largest"] = bool((alone[2][1] == parts[2][1]).all())
    return {"mass": mass, "differ": {n: int((alone[0][n] != parts[0][n]).sum()) for n in every}, **same}


# ---------------------------------------------------------------- what loading reads
def reading(text: str) -> dict[str, Any]:
    """Of a saved model: [bytes that each call for a part of an array got, bytes of that part] by shape."""
    asked: list[list[Any]] = []
    make = jax.make_array_from_callback

    def watched(shape: Any, sharding: Any, callback: Any, **more: Any) -> jax.Array:
        part = sharding.shard_shape(shape)

        def one(index: Any) -> np.ndarray:
            got = callback(index)
            asked.append([list(shape), list(part), list(got.shape), got.flags.owndata])
            return got

        return make(shape, sharding, one, **more)

    with tempfile.TemporaryDirectory() as folder:
        tiny_hf.write(Path(folder) / "given", tiny_hf.tiny(heads=8, kv_heads=8, head_dim=8))
        jd.save(jd.load(Path(folder) / "given"), Path(folder) / "saved")  # which is mapped as it is
        with mock.patch.object(jax, "make_array_from_callback", watched):
            loaded = jd.load(Path(folder) / "saved", mesh=mesh_of(text))
        whole = jd.load(Path(folder) / "saved").params
        same = jax.tree.map(
            lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), jd.dequantize(loaded.params), whole
        )
        try:
            jd.save(loaded, Path(folder) / "again")
            refused = ""
        except ValueError as error:
            refused = str(error)
    return {"asked": asked, "same": all(jax.tree.leaves(same)), "refused": refused}


def whole_or_parts(mesh: Mesh) -> list[Any]:
    """A model whose heads and vocabulary do not divide: which of its arrays are in parts."""
    config = TransformerConfig(250, 60, 1, 6, 3, 10, 96, 64)
    placed = shard(config, jax.tree.map(np.asarray, init_params(config, jax.random.key(0))), mesh)
    names = jax.tree_util.tree_leaves_with_path(placed, is_leaf=jd.quant.is_quantized)
    return sorted(
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, x in names
        if not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(x))
    )


ALL = (*STRATEGIES, "engine")
SHORT = {
    "table": {MESHES[1]: ("plain",), MESHES[2]: ("lookup",)},
    "llama": {MESHES[0]: ("choices",), MESHES[1]: ("beams", "engine"), MESHES[2]: ("samples",)},
    "codes": {MESHES[0]: ("plain",)},
}


def main() -> None:
    if "--bits" in sys.argv:
        with contextlib.redirect_stdout(sys.stderr):
            found = bits()
        sys.stdout.write(json.dumps(found))
        return
    which = SHORT
    if "--all" in sys.argv:
        which = {name: dict.fromkeys(MESHES, ALL) for name in SHORT}
    told: dict[str, Any] = {"runs": []}
    with contextlib.redirect_stdout(sys.stderr):
        told["runs"] += runs(which)
        told["programs"] = programs(MESHES[0], 8192)
        told["experts"] = experts(MESHES[1])
        told["filters"] = filters(MESHES[1])
        told["reading"] = reading(MESHES[0])
        told["parts"] = whole_or_parts(mesh_of(MESHES[1]))
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
