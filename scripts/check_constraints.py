"""Generations under every grammar of tests/grammars.py, each checked by an independent validator.

python scripts/check_constraints.py random           # 1,000 each, logits at random, SmolLM2's vocabulary
python scripts/check_constraints.py model [PART]     # 50 each with SmolLM2-135M; PART: part of a grammar's name
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdecode as jd

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from grammars import GRAMMARS, check

PROMPT = "Write something of the asked form, with a name, a number or a word in it: "
ROWS = 50


def random_model(vocab_size: int) -> jd.Model:
    """Logits without any sense: at each place of a text another stretch of ``params``, a long row of noise."""

    def init_cache(params: Any, batch_size: int, max_len: int) -> Any:
        return jnp.zeros((batch_size,), jnp.int32)

    def apply(params: Any, tokens: Any, cache: Any, *, lengths: Any = None, logits_at: Any = None) -> Any:
        at = jnp.zeros((tokens.shape[0], tokens.shape[1]), jnp.int32) if logits_at is None else logits_at
        last = jnp.take_along_axis(tokens, at, axis=1)
        begin = (last * 7919 + (cache[:, None] + at) * 104729) % vocab_size
        cut = jax.vmap(jax.vmap(lambda i: jax.lax.dynamic_slice(params, (i,), (vocab_size,))))
        return cut(begin), cache + (tokens.shape[1] if lengths is None else lengths)

    return jd.Model(init_cache, apply)


def main(how: str, part: str = "") -> None:
    loaded = jd.load("smollm2-135m")
    model, params, times, limit = loaded.model, loaded.params, 1, 64
    prompt = loaded.tokenizer.encode(PROMPT)
    if how == "random":
        size = loaded.tokenizer.vocab_size
        noise = np.random.default_rng(0).normal(size=2 * size).astype(np.float32) * 2
        model, params, times, limit = random_model(size), jnp.asarray(noise), 1000 // ROWS, 40
    for name, (kind, source) in GRAMMARS.items():
        if part not in name:
            continue
        begun = time.perf_counter()
        settings = loaded.settings(max_new_tokens=limit, **{kind: source})
        compiled = time.perf_counter() - begun
        reasons: dict[str, int] = {}
        lengths = []
        for i in range(times):
            out = jd.generate(model, params, [prompt] * ROWS, key=jax.random.key(i), settings=settings)
            for ids, finish in zip(out.to_lists(), out.finish.tolist(), strict=True):
                reason = jd.Finish(finish).name
                reasons[reason] = reasons.get(reason, 0) + 1
                lengths.append(len(ids))
                if reason == "EOS":
                    check(kind, source, loaded.tokenizer.decode(ids, continuation=True))
        seconds = time.perf_counter() - begun
        print(  # noqa: T201
            f"{name}: {reasons}, {np.mean(lengths):.1f} tokens, compiled in {compiled:.2f} s, {seconds:.1f} s in all",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
