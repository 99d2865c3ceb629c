"""The time of choosing tokens alone: a model whose logits cost nothing. Runs in a Python that has jaxdecode.

    sampling_alone.py SPEC      SPEC is JSON: batch, vocab_size, runs; prints JSON

The logits of a step are one of a few rows of a table, chosen by the last token, so nothing is the same at every step.
"flat": normal with deviation 0.1, top-p keeps nearly 9 ids of 10. "peaked": the id of rank r has mass as r^-2.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdecode import Model
from jaxdecode.benchmark import Case, measure

TABLE = 16  # rows


def _init_cache(params: Any, batch_size: int, max_len: int) -> jax.Array:
    return jnp.zeros((batch_size,), jnp.int32)


def _apply(params: Any, tokens: Any, cache: Any, *, lengths: Any = None, logits_at: Any = None) -> tuple[Any, Any]:
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape) if logits_at is None else logits_at
    return params[jnp.take_along_axis(tokens, at, axis=1) % TABLE], cache


MODEL = Model(_init_cache, _apply)


def tables(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    flat = rng.normal(0, 0.1, (TABLE, vocab_size))
    peaked = -2 * np.log(1 + rng.permuted(np.tile(np.arange(vocab_size), (TABLE, 1)), axis=1))
    return {"flat": flat.astype(np.float32), "peaked": peaked.astype(np.float32)}


def main() -> None:
    spec = json.loads(sys.argv[1])
    found = {}
    for name, table in tables(spec["vocab_size"]).items():
        case = Case("top_p", spec["batch"], 1, 64)
        times = measure(MODEL, jnp.asarray(table), spec["vocab_size"], case, runs=spec["runs"])
        found[f"{name}_seconds"] = times.step
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
