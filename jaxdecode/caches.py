"""Caches as values: prefill one, change what it holds from some place on, keep it in a file."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import __version__, base, checks, kvcache
from jaxdecode.base import Bounded, Cache, Model, Params, Prompt
from jaxdecode.decoders.common import cache_spec
from jaxdecode.generation import as_prompt, extend, vocab_size_of
from jaxdecode.session import common_prefix

__all__ = ["load_cache", "params_digest", "prefill", "refill", "save_cache"]

Prompts = Sequence[Sequence[int]]
_FORMAT, _VERSION = "jaxdecode-cache", "1"


def prefill(model: Model, params: Params, prompts: Prompts, *, max_len: int) -> Cache:
    """A cache that holds ``prompts`` (lists of ids, which may be empty), with slots for ``max_len`` tokens a row.

    It may be continued any number of times (``generate(..., cache=...)``), repeated for many rows (``kvcache.fork``,
    ``repeat_rows``), and joined to another one for a model made by ``combine``. ValueError for bad ids, or more than
    fits.

    >>> from jaxdecode.testing import markov_model
    >>> cache = prefill(markov_model(), jnp.eye(2), [[0, 1], []], max_len=8)
    >>> cache["length"].tolist()
    [2, 0]
    """
    prompt = _whole(model, params, prompts)
    most = int(np.max(prompt.length)) - 1
    ok = type(max_len) is int and max_len >= most
    checks.require(ok, "max_len", f"a whole number >= {most}, the longest prompt", max_len)
    return extend(model, params, model.init_cache(params, len(prompts), max_len), prompt)


def _whole(model: Model, params: Params, prompts: Prompts) -> Prompt:
    """Prompts and one more token each: a prompt's last one is left to the first step."""
    return as_prompt([[*prompt, 0] for prompt in prompts], None, "right", vocab_size_of(model, params))


def refill(model: Model, params: Params, cache: Cache, held: Prompts, prompts: Prompts) -> Cache:
    """``cache``, which holds ``held``, made to hold ``prompts``: only what follows a row's first change is computed.

    Keys and values before it stay (S7.4). Rows whose cache cannot be cut there are filled from the start: those of
    models whose cache is no KV cache, and of a sliding window whose ring has gone on further than its slack. ValueError
    for another number of rows, other tokens than the cache holds, bad ids, or more than fits.

    >>> from jaxdecode.testing import markov_model
    >>> model, params = markov_model(), jnp.eye(3)
    >>> cache = prefill(model, params, [[0, 1, 2]], max_len=8)
    >>> refill(model, params, cache, [[0, 1, 2]], [[0, 2]])["length"].tolist()
    [2]
    """
    prompt = _whole(model, params, prompts)
    _check_held(cache, held)
    checks.require(len(prompts) == len(held), "prompts", f"{len(held)} of them, one a row", len(prompts))
    kept = np.array([common_prefix(a, b) for a, b in zip(held, prompts, strict=True)], np.int32)
    whole = np.array([len(row) for row in held], np.int32)
    if kvcache.only_nodes(cache):
        kept = np.where(kvcache.reaches_back(cache, kept), kept, 0)
        cache = kvcache.truncate(cache, kept)
    elif np.any(kept < whole):
        again: Any = np.flatnonzero(kept < whole)
        rooms = _capacities(cache) or [int(np.max(prompt.length))]
        cache = base.put_rows(cache, again, model.init_cache(params, len(again), min(rooms)))
        kept = np.where(kept < whole, 0, kept)
    rest = np.asarray(prompt.length) - 1 - kept
    taken = [node.length for node in _bounded(cache)]
    for capacity, length in zip(_capacities(cache), taken, strict=True):
        fits = bool(np.all(np.asarray(length) + rest <= capacity))
        checks.require(fits, "prompts", f"at most {capacity} tokens a row, which the cache has room for", rest + kept)
    if not np.any(rest):
        return cache
    left = [[*row[n:], 0] for row, n in zip(prompts, kept, strict=True)]
    return extend(model, params, cache, as_prompt(left, None, "right", vocab_size_of(model, params)))


def _bounded(cache: Cache) -> list[Bounded]:
    nodes = jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, Bounded))
    return [node for node in nodes if isinstance(node, Bounded)]


def _capacities(cache: Cache) -> list[int]:
    return [node.capacity for node in _bounded(cache)]


def _check_held(cache: Cache, held: Prompts) -> None:
    """ValueError unless every node that says how many tokens it has says as many as ``held``."""
    lengths = [len(row) for row in held]
    for node in _bounded(cache):
        got = np.asarray(node.total if isinstance(node, kvcache.KVCache) else node.length).tolist()
        checks.require(got == lengths, "held", f"the tokens of the cache, {got} of them", lengths)


def params_digest(params: Params) -> str:
    """SHA-256 of all leaves: their places, types, shapes and bytes."""
    state = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(leaf)
        state.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape};".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def save_cache(path: str | os.PathLike[str], model: Model, params: Params, cache: Cache, prompts: Prompts) -> Path:
    """Write ``cache``, which holds ``prompts``, to a safetensors file; ``load_cache`` reads it.

    Of a KV cache only the slots in use are written. The file names its params by a digest, and is there when it is
    complete, or not at all. ValueError: other tokens than the cache holds, or rows that share a past.
    """
    from jaxdecode.checkpoint.safetensors_file import Entry, write_safetensors

    _check_held(cache, prompts)
    size = max([1, *(len(row) for row in prompts)])
    if kvcache.only_nodes(cache):
        size = max([size, *(_most(node) for node in _kv_nodes(cache))])
        cache = kvcache.resize(cache, size)
    else:
        size = min([*_capacities(cache)], default=size)
    leaves = {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(cache)}
    entries = [Entry(name, x.dtype, x.shape, functools.partial(_alone, x), "save_cache") for name, x in leaves.items()]
    about = {"rows": len(prompts), "max_len": size, "prompts": [list(map(int, row)) for row in prompts]}
    told = {"format": _FORMAT, "version": _VERSION, "jaxdecode": __version__, "params": params_digest(params)}
    target = Path(path).expanduser()
    made = target.with_name(f".{target.name}.unfinished-{secrets.token_hex(8)}")
    try:
        write_safetensors(made, entries, metadata={**told, "cache": json.dumps(about)})
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)
    return target


def _alone(x: np.ndarray) -> list[np.ndarray]:
    return [x]


def _kv_nodes(cache: Cache) -> list[kvcache.KVCache]:
    nodes = jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, kvcache.KVCache))
    return [node for node in nodes if isinstance(node, kvcache.KVCache)]


def _most(node: kvcache.KVCache) -> int:
    """The most tokens that a row of it has held: no ring can be made smaller than that."""
    return int(np.max(node.length if node.furthest is None else node.furthest, initial=0))


def _about(source: Path, text: str) -> dict[str, Any]:
    """What a file says of its cache."""
    try:
        about = json.loads(text)
        rows, size, prompts = about["rows"], about["max_len"], about["prompts"]
        ok = type(rows) is int and type(size) is int and rows == len(prompts) > 0 and size > 0
        ok = (
            ok and all(type(i) is int for row in prompts for i in row) and all(isinstance(row, list) for row in prompts)
        )
    except (ValueError, RecursionError, TypeError, KeyError):
        ok = False
    checks.require(ok, f"{source}: cache", "rows, max_len and the prompts in it", text)
    return dict(about)


def load_cache(
    path: str | os.PathLike[str], model: Model, params: Params, *, max_len: int | None = None
) -> tuple[Cache, list[list[int]]]:
    """The cache in a file that ``save_cache`` wrote, with slots for ``max_len`` tokens a row, and what it holds.

    max_len: None for those that are filled. ValueError: no such file, one of another model, of other params or of
    another type of cache, or less room than it needs (or, where the cache is no KV cache, more).
    """
    from jaxdecode.checkpoint.safetensors_file import read_safetensors

    source = Path(path).expanduser()
    tensors, told = read_safetensors(source)
    kind = (told.get("format"), told.get("version"))
    checks.require(kind == (_FORMAT, _VERSION), f"{source}", f"a cache written by save_cache, version {_VERSION}", kind)
    digest = params_digest(params)
    expected = f"the params that the cache was made with, {told.get('params')}"
    checks.require(told.get("params") == digest, f"{source}: params", expected, digest)
    about = _about(source, told.get("cache", ""))
    like = cache_spec(model, params, about["rows"], about["max_len"])
    paths, tree = jax.tree_util.tree_flatten_with_path(like)
    found = {name: (x.dtype, x.shape) for name, x in tensors.items()}
    wanted = {jax.tree_util.keystr(p): (x.dtype, x.shape) for p, x in paths}
    wrong = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    checks.require(not wrong, f"{source}", "a cache of this model, of the same type", f"others for {wrong}")
    cache = jax.tree.unflatten(tree, [jnp.array(tensors[jax.tree_util.keystr(p)]) for p, _ in paths])
    if max_len is not None and kvcache.only_nodes(cache):
        cache = kvcache.resize(cache, max_len)
    elif max_len is not None:
        expected = f"{about['max_len']}, as it was saved: this is no KV cache"
        checks.require(max_len == about["max_len"], "max_len", expected, max_len)
    return cache, about["prompts"]
