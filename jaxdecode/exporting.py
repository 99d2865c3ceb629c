"""Generation as a file: a program that runs where this library, the model's code or Python settings are not.

The file is what ``jax.export`` makes of one ``generate``: ``jax.export.deserialize(bytes).call(params, inputs, key)``
runs it with nothing but jax. Params, inputs and results are dicts of arrays by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Decoder, Generated, Model, Params
from jaxdecode.generation import generate
from jaxdecode.keys import check_key
from jaxdecode.rulebook import Settings
from jaxdecode.transforms import LogitsTransform

__all__ = ["INPUTS", "Call", "export_generate", "load_exported", "named_params"]

INPUTS = {  # settings that become inputs if they are given, and the dtype of one number of each row
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "typical_p": np.float32,
    "epsilon": np.float32,
    "eta": np.float32,
    "top_n_sigma": np.float32,
    "p_less": np.int32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "length_penalty": np.float32,
    "min_new_tokens": np.int32,
}

Call = Callable[[Mapping[str, Any], Mapping[str, Any], jax.Array], dict[str, jax.Array]]


def named_params(params: Params) -> dict[str, jax.Array]:
    """Every array of ``params`` by its path, as "layers.0.qkv"; params that are one array are called "params"."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator=".") or "params": leaf for path, leaf in leaves}


def _input_specs(settings: Settings, batch_size: int, prompt_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the inputs: tokens, lengths, and a number a row of every setting that has a number."""
    specs: dict[str, Any] = {"tokens": ((batch_size, prompt_len), np.int32), "lengths": ((batch_size,), np.int32)}
    grammar = any(getattr(settings, name) is not None for name in ("regex", "json_schema", "choices"))
    absent = {"length_penalty": settings.beams is None, "min_new_tokens": grammar}  # a grammar counts what is left
    for name, dtype in INPUTS.items():
        if getattr(settings, name) is not None and not absent.get(name, False):
            specs[name] = ((batch_size,), dtype)
    return {name: jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for name, (shape, dtype) in specs.items()}


def export_generate(
    model: Model,
    params: Params,
    *,
    batch_size: int,
    prompt_len: int,
    settings: Settings | None = None,
    platforms: Sequence[str] | None = None,
    transform: LogitsTransform | None = None,
    decoder: Decoder | None = None,
    draft: tuple[Model, Params] | None = None,
) -> jax.export.Exported:
    """``generate`` for B prompts of at most S tokens, as a ``jax.export.Exported``; its ``serialize()`` is the file.

    It is called with ``named_params(params)``, a dict of inputs and a key, and returns the fields of ``Generated`` that
    are not None. Inputs: ``tokens`` int32 [B,S] (padded on the right), ``lengths`` int32 [B], and for every setting of
    ``INPUTS`` that ``settings`` gives, its name and one number a row (but no ``min_new_tokens`` beside a grammar). All
    else (N, end ids, grammars, beams, ...) is part of the program. platforms: of "cpu", "cuda", "rocm", "tpu" (default:
    the one here). With a draft, params are ``named_params((params, draft's params))``. Arrays of params may be
    ``jax.ShapeDtypeStruct``. ValueError as from ``generate``.

    >>> from jaxdecode.testing import markov_model
    >>> table = jnp.log(jnp.array([[0.1, 0.9], [0.8, 0.2]]))
    >>> settings = Settings(max_new_tokens=3, temperature=0)
    >>> made = export_generate(markov_model(), table, batch_size=1, prompt_len=2, settings=settings)
    >>> call = load_exported(made.serialize())
    >>> inputs = {"tokens": [[0, 0]], "lengths": [1], "temperature": [0], "min_new_tokens": [0]}
    >>> call(named_params(table), inputs, jax.random.key(0))["tokens"].tolist()
    [[1, 0, 1]]
    """
    settings = Settings() if settings is None else settings
    for name, value in (("batch_size", batch_size), ("prompt_len", prompt_len)):
        checks.require(type(value) is int and value >= 1, name, "a whole number >= 1", value)
    whole = params if draft is None else (params, draft[1])
    given, tree = named_params(whole), jax.tree.structure(whole)

    def run(named: dict[str, Any], inputs: dict[str, Any], key: jax.Array) -> dict[str, Any]:
        own = jax.tree.unflatten(tree, [named[name] for name in given])
        own, other = (own, None) if draft is None else (own[0], (draft[0], own[1]))
        numbers = {name: x for name, x in inputs.items() if name in INPUTS}
        out = generate(
            model,
            own,
            inputs["tokens"],
            lengths=inputs["lengths"],
            key=key,
            settings=dataclasses.replace(settings, **numbers),
            transform=transform,
            decoder=decoder,
            draft=other,
        )
        return _fields(out)

    specs = {name: jax.ShapeDtypeStruct(np.shape(x), x.dtype) for name, x in given.items()}
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    program = jax.export.export(jax.jit(run), platforms=platforms)
    return program(specs, _input_specs(settings, batch_size, prompt_len), key)


def _fields(out: Generated) -> dict[str, Any]:
    """The arrays of a result by name, without its types."""
    found = {field.name: getattr(out, field.name) for field in dataclasses.fields(out)}
    acceptance = found.pop("acceptance")
    if acceptance is not None:
        found |= acceptance._asdict()
    return {name: x for name, x in found.items() if x is not None}


def load_exported(file: bytes | bytearray) -> Call:
    """The function in the bytes of an exported program: ``call(params, inputs, key)``; see ``export_generate``.

    Load only what you trust: it is a program. Extra params are left out; arrays of a wrong shape, or of numbers that
    are not whole where they must be, are refused. ValueError: no such file, one of a version of ``jax.export`` that
    this jax cannot run, or for other platforms than the one here.
    """
    try:
        exported = jax.export.deserialize(bytearray(file))
    except ImportError as error:
        raise ImportError("exported programs need flatbuffers: pip install 'jaxdecode[export]'") from error
    except Exception as error:
        raise ValueError(f"file: expected what jax.export wrote, got {type(error).__name__}: {error}") from None
    low = jax.export.minimum_supported_calling_convention_version
    high = jax.export.maximum_supported_calling_convention_version
    version = exported.calling_convention_version
    checks.require(
        low <= version <= high,
        "file",
        f"a calling convention of versions {low} to {high}",
        version,
    )
    here = jax.default_backend()
    names = {"gpu": ("cuda", "rocm")}.get(here, (here,))
    platforms = exported.platforms
    checks.require(
        any(n in platforms for n in names), "file", f"a program for {here}", "one for " + ", ".join(platforms)
    )
    arguments, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    specs, inputs, _ = arguments
    run = jax.jit(exported.call)
    try:
        run.lower(*arguments)  # reads the operations, each of which is of some version
    except Exception as error:
        expected = f"operations that jax {jax.__version__} knows"
        raise ValueError(f"file: expected {expected}, got {type(error).__name__}: {error}") from None

    def call(params: Mapping[str, Any], given: Mapping[str, Any], key: jax.Array) -> dict[str, jax.Array]:
        surplus = given.keys() - inputs.keys()
        checks.require(not surplus, "inputs", f"only {', '.join(inputs)}", ", ".join(sorted(surplus)))
        named = _checked(params, specs, "params"), _checked(given, inputs, "inputs")
        return dict(run(*named, check_key(key)))

    return call


def _checked(given: Mapping[str, Any], specs: Mapping[str, Any], what: str) -> dict[str, jax.Array]:
    """The arrays that ``specs`` ask for."""
    found = {}
    for name, spec in specs.items():
        checks.require(name in given, what, f"{name!r}, {spec.dtype}{list(spec.shape)}", "none of that name")
        x = given[name] if hasattr(given[name], "dtype") else np.asarray(given[name])
        ok = x.shape == spec.shape and (x.dtype == spec.dtype or not hasattr(given[name], "dtype"))
        ok &= jnp.issubdtype(x.dtype, jnp.integer) or not jnp.issubdtype(spec.dtype, jnp.integer)
        checks.require(ok, f"{what}[{name!r}]", f"{spec.dtype}{list(spec.shape)}", f"{x.dtype}{list(x.shape)}")
        found[name] = jnp.asarray(x, spec.dtype)
    return found
