#!/usr/bin/env python3
"""What schemes and methods do to a model: bytes, perplexity, KL divergence and agreement on a text, as a table.

    compare_quantization.py [--seconds 200] [SCHEME[:METHOD[:RANGE]][@OTHERS] ...]

METHOD: rounding, gptq, or tuned (gptq and a learned correction); OTHERS: the scheme of embedding and head
(int8_zero_g32). What is done is kept in --folder: after --seconds it stops, and the same command goes on. Products
are those of the dequantized weights in float32, which is what schemes that round weights alone compute; int8, which
rounds activations too, runs as it is.

The texts are public domain: "The Time Machine" to calibrate on, "The Adventures of Sherlock Holmes" to evaluate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxdecode as jd
from jaxdecode import calibration
from jaxdecode.calibration.tuning import CODE_RATE, RATE, tune
from jaxdecode.cli.compilation import keep_compiled_programs
from jaxdecode.evaluation import Evaluation, evaluate

TEXTS = Path(__file__).parents[1] / "tests" / "texts"
ENTRIES = ["int8", "int8_zero_g32", *(f"{s}:{m}" for s in ("int4", "int4_affine_g64", "int3_affine", "int2_affine")
                                      for m in ("rounding", "rounding:search", "gptq"))]  # fmt: skip
TOGETHER = 4  # models beside the reference in one pass
RESULTS = "results.jsonl"


class OutOfTime(Exception):
    pass


class Clock:
    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.longest, self.last = 0.0, time.monotonic()

    def __call__(self, text: str, fraction: float) -> None:
        """Raise between steps, before one as long as the longest so far would end too late."""
        now = time.monotonic()
        self.longest, self.last = max(self.longest, now - self.last), now
        print(f"\r{text} {fraction:.0%}   ", end="", file=sys.stderr, flush=True)  # noqa: T201
        if now + self.longest > self.end:
            raise OutOfTime


def parsed(entry: str) -> tuple[str, str, str, str]:
    """scheme, method, range, others."""
    what, _, others = entry.partition("@")
    scheme, method, span = [*what.split(":"), "", ""][:3]
    whole = scheme in ("int8", "int8_weights") and method in ("", "rounding")
    return scheme, method or "rounding", span or "max", others or (scheme if whole else calibration.OTHERS)


def quantized(entry: str, loaded: jd.Loaded, asked: Any, clock: Clock) -> Any:
    scheme, method, span, others = parsed(entry)
    if method in ("gptq", "tuned"):
        ids = loaded.tokenizer.encode(asked.calibration.read_text("utf-8"))
        tokens = calibration.windows_of(ids, asked.rows, asked.width, jax.random.key(0))
        how: Any = {"others": others, "range": span, "correction": asked.correction}
        how["folder"] = asked.folder / entry.replace(":", "-").replace("tuned", "gptq")
        found = calibration.calibrate(loaded.config, loaded.params, tokens, scheme, **how, progress=clock)
        if method == "gptq":
            return found.params
        if asked.tuning is not None:
            ids = loaded.tokenizer.encode(asked.tuning.read_text("utf-8"))
        tokens = calibration.windows_of(ids, min(asked.steps, len(ids) // asked.width), asked.width, jax.random.key(1))
        more: Any = {"steps": asked.steps, "rate": asked.rate, "code_rate": asked.code_rate, "key": jax.random.key(0)}
        more |= {"places": found.places, "progress": clock}
        folder = asked.folder / f"{entry.replace(':', '-')}-{asked.steps}-{asked.rate:g}-{asked.code_rate:g}"
        return tune(loaded.model, found.exact, found.params, tokens, **more, folder=folder)
    ends = ("embed", "head")
    return {
        name: jd.quantize(value, others) if name in ends else jd.quantize(value, scheme, range=span)
        for name, value in loaded.params.items()
    }


def runs_alone(entry: str) -> bool:
    """Whether products round activations too, which dequantized weights would not show."""
    return parsed(entry)[0] == "int8"


def loss(found: Evaluation) -> float:
    return float(np.log(found.perplexity)) * found.counted


def read(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {(line["entry"], line["unit"]): line for line in map(json.loads, lines)}


def measure(group: list[str], params: list[Any], loaded: jd.Loaded, ids: list[int], asked: Any, clock: Clock) -> None:
    """Every unit of the text that some entry lacks, each kept as soon as it is there."""
    results = asked.folder / RESULTS
    plain = [
        p if parsed(e)[0] in ("int8", "int8_weights") else jd.dequantize(p) for e, p in zip(group, params, strict=True)
    ]
    sizes = [sum(x.nbytes for x in jax.tree.leaves(p)) for p in params]
    for unit, first in enumerate(range(0, len(ids), asked.unit)):
        done = read(results)
        if all((entry, unit) in done for entry in group):
            continue
        clock(f"reading {', '.join(group)}", first / len(ids))
        models = [(loaded.model, p) for p in (loaded.params, *plain)]
        reference, *found = evaluate(models, ids[first : first + asked.unit], window=asked.window)
        with results.open("a") as file:
            for entry, one, size in zip(group, found, sizes, strict=True):
                assert one.kl is not None
                assert one.agreement is not None
                sums = {"count": one.counted, "kl": one.kl * one.counted, "agrees": round(one.agreement * one.counted)}
                losses = {
                    "loss": np.log(one.perplexity) * one.counted,
                    "reference": np.log(reference.perplexity) * one.counted,
                }
                file.write(json.dumps({"entry": entry, "unit": unit, "bytes": size, **sums, **losses}) + "\n")


def table(entries: list[str], asked: Any, whole: int) -> str:
    done = read(asked.folder / RESULTS)
    rows = [
        "| scheme | method | bytes | perplexity | change | KL, nats | same top token |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        parts = [line for (name, _), line in done.items() if name == entry]
        if not parts:
            continue
        total = {k: sum(p[k] for p in parts) for k in ("count", "kl", "agrees", "loss", "reference")}
        n = total["count"]
        own, reference = np.exp(total["loss"] / n), np.exp(total["reference"] / n)
        scheme, method, span, others = parsed(entry)
        name = f"{scheme}" + ("" if others in (calibration.OTHERS, scheme) else f", ends {others}")
        cells = [name, method + ("" if span == "max" else f", {span}"), f"{parts[0]['bytes'] / 1e6:.1f} MB"]
        cells += [f"{own:.3f}", f"{own / reference - 1:+.2%}", f"{total['kl'] / n:.4f}", f"{total['agrees'] / n:.1%}"]
        rows.append(f"| {' | '.join(cells)} |" + ("" if len(parts) == whole else f" {len(parts)}/{whole} of the text"))
    return "\n".join(rows)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("entries", nargs="*", default=ENTRIES)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--calibration", type=Path, default=TEXTS / "time_machine.txt")
    options.add_argument("--tuning", type=Path, help="the text to tune on, if that is another one")
    options.add_argument("--text", type=Path, default=TEXTS / "sherlock_holmes.txt")
    options.add_argument("--tokens", type=int, default=20_480)
    options.add_argument("--window", type=int, default=1024)
    options.add_argument("--unit", type=int, default=1024, help="tokens between two times that results are kept")
    options.add_argument("--rows", type=int, default=24, help="windows of the text to calibrate on")
    options.add_argument("--width", type=int, default=512, help="tokens of each")
    options.add_argument("--correction", type=float, default=calibration.CORRECTION, help="see calibrate")
    options.add_argument("--steps", type=int, default=32, help="of tuning")
    options.add_argument("--rate", type=float, default=RATE, help="of grids and norms")
    options.add_argument("--code-rate", type=float, default=CODE_RATE)
    options.add_argument("--folder", type=Path, default=Path(".compare_quantization"))
    options.add_argument("--seconds", type=float, default=1e9)
    asked = options.parse_args()
    entries = asked.entries or ENTRIES
    clock = Clock(asked.seconds)
    asked.folder.mkdir(parents=True, exist_ok=True)
    keep_compiled_programs()
    loaded = jd.load(asked.model)
    ids = loaded.tokenizer.encode(asked.text.read_text("utf-8"))[: asked.tokens]
    units = -(-len(ids) // asked.unit)
    code = 0
    try:
        open_ = [e for e in entries if any((e, u) not in read(asked.folder / RESULTS) for u in range(units))]
        alone = [e for e in open_ if runs_alone(e)]
        rest = [e for e in open_ if e not in alone]
        groups = [[e] for e in alone] + [rest[i : i + TOGETHER] for i in range(0, len(rest), TOGETHER)]
        for group in groups:
            params = [quantized(entry, loaded, asked, clock) for entry in group]
            measure(group, params, loaded, ids, asked, clock)
    except OutOfTime:
        code = 3
    print(f"\n{asked.model}, {len(ids):,} tokens of {asked.text.name}, windows of {asked.window}:\n")  # noqa: T201
    print(table(entries, asked, units))  # noqa: T201
    if code:
        print("\nnot all is done: the same command goes on")  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
