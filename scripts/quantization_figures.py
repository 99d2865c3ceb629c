#!/usr/bin/env python3
"""The tables of uniform quantization (S8.3, S8.6), and two pictures: error against bits, and the choice of the range.

    quantization_figures.py [--folder docs]

Prints the tables as Markdown and writes quantization_bits.svg and quantization_range.svg.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdecode.quant import Uniform, bounds, grid_of, nearest_codes, quantize_matrix, unpack, value_of

N, K = 64, 48
BITS = range(1, 9)
INK = ["#1b6ca8", "#c2452d", "#3d8b40", "#7d4fa0", "#8a6d1f"]


def matrix() -> np.ndarray:
    """The matrix of S8.6."""
    return np.random.default_rng(20261010).normal(0, 0.05, (N, K))


def rounded(w: np.ndarray, a: float, bits: int) -> tuple[np.ndarray, int]:
    """``w`` on the even grid of [-a, a], and how many of its levels are used."""
    scale, offset = np.float32(2 * a / (2**bits - 1)), np.float32(-a)
    codes = nearest_codes(w.astype(np.float32), np.asarray(scale), np.asarray(offset), bits)
    return value_of(codes, scale, offset).astype(np.float64), len(np.unique(codes))


def by_scheme(w: np.ndarray, uniform: Uniform) -> tuple[float, float, float]:
    """Frobenius error, bound and model of a scheme of this library."""
    q = quantize_matrix(w.astype(np.float32), uniform)
    codes, scale, offset = unpack(q)
    size = K if uniform.group in ("tensor", "channel") else int(uniform.group)
    wide = [np.repeat(np.broadcast_to(g, (N, g.shape[1])), size, axis=1)[:, :K] for g in (scale, offset)]
    limits = bounds(q)
    return float(np.linalg.norm(w - value_of(codes, *wide))), float(limits.frobenius), float(limits.model)


def steps_table() -> str:
    """S8.3: how much smaller a step is with one bit more."""
    rows = ["| bits | step D for a = 1 | largest error | D of one bit more / D |", "|---|---|---|---|"]
    for b in BITS:
        step, finer = 2 / (2**b - 1), 2 / (2 ** (b + 1) - 1)
        rows.append(f"| {b} | {step:.5f} | {step / 2:.4f} | {finer / step:.4f} |")
    return "\n".join(rows)


def errors_table() -> str:
    """S8.6: measured error, bound and model."""
    w = matrix()
    rows = ["| bits | error | bound | model | error / bound |", "|---|---|---|---|---|"]
    for b in (8, 4, 2):
        error, bound, model = by_scheme(w, Uniform(b, "even", "tensor"))
        rows.append(f"| {b} | {error:.5f} | {bound:.5f} | {model:.5f} | {error / bound:.3f} |")
    return "\n".join(rows)


def outlier_table() -> str:
    """S8.6: one entry of 1.0, 4 bits."""
    w = matrix()
    a = float(np.abs(w).max())
    w[0, 0] = 1.0
    rows = ["| range | a | error | levels used | error of the outlier |", "|---|---|---|---|---|"]
    for name, end in (("max", 1.0), ("largest of the others", a)):
        q, levels = rounded(w, end, 4)
        rows.append(f"| {name} | {end:.4f} | {np.linalg.norm(w - q):.3f} | {levels} of 16 | {abs(w - q)[0, 0]:.3f} |")
    for span in ("percentile", "search"):
        _, offset = grid_of(w.astype(np.float32).reshape(1, -1), Uniform(4, "even", "tensor", span))  # type: ignore[arg-type]
        q, levels = rounded(w, float(-offset[0]), 4)
        rows.append(
            f"| {span} | {-offset[0]:.4f} | {np.linalg.norm(w - q):.3f} | {levels} of 16 | {abs(w - q)[0, 0]:.3f} |"
        )
    return "\n".join(rows)


class Line(NamedTuple):
    label: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def picture(title: str, x_label: str, y_label: str, lines: list[Line], ticks: Sequence[float], log: bool) -> str:
    """Curves as SVG, y on a logarithmic axis if asked."""
    width, height, left, right, top, bottom = 720, 400, 70, 190, 44, 50
    ys = [y for line in lines for y in line.y]
    scale: Any = math.log10 if log else float
    low, high = scale(min(ys)), scale(max(ys))
    low, high = (math.floor(low), math.ceil(high)) if log else (0.0, high * 1.05)
    first, last = min(ticks), max(ticks)

    def px(x: float) -> float:
        return left + (x - first) / (last - first) * (width - left - right)

    def py(y: float) -> float:
        return height - bottom - (scale(y) - low) / (high - low) * (height - top - bottom)

    marks = [10.0**e for e in range(int(low), int(high) + 1)] if log else np.linspace(0, high, 6).tolist()
    box = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}>']
    out += [
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="24" font-size="16">{title}</text>',
    ]
    for mark in marks:
        y = py(mark)
        out += [f'<path d="M{left} {y:.1f}H{width - right}" stroke="#ddd"/>']
        out += [f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{mark:.3g}</text>']
    for tick in ticks:
        out += [f'<text x="{px(tick):.1f}" y="{height - bottom + 18}" text-anchor="middle" fill="#555">{tick:g}</text>']
    middle = (left + width - right) / 2
    out += [f'<text x="{middle:.0f}" y="{height - 10}" text-anchor="middle" fill="#555">{x_label}</text>']
    out += [f'<text x="{left - 60}" y="{top - 6}" fill="#555" font-size="11">{y_label}</text>']
    labels = sorted((py(line.y[-1]), i) for i, line in enumerate(lines))
    places: dict[int, float] = {}
    for y, i in labels:  # no label on top of another
        places[i] = max(y, max(places.values(), default=-99.0) + 16)
    for i, line in enumerate(lines):
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in zip(line.x, line.y, strict=True))
        ink, dash = INK[i % len(INK)], ' stroke-dasharray="5 4"' if line.dashed else ""
        out += [f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="2"{dash}/>']
        out += [f'<text x="{width - right + 8}" y="{places[i] + 4:.1f}" fill="{ink}">{line.label}</text>']
    return "\n".join([*out, "</svg>", ""])


def bits_picture() -> str:
    w = matrix()
    norm = float(np.linalg.norm(w))
    kinds: list[tuple[str, Any, Any]] = [("tensor", "even", "tensor"), ("groups", "affine", 16)]
    found = {name: [np.array(by_scheme(w, Uniform(b, *kind))) / norm for b in BITS] for name, *kind in kinds}
    bits = list(BITS)
    tensor = found["tensor"]
    lines = [
        Line("bound, per tensor", bits, [f[1] for f in tensor], dashed=True),
        Line("model, per tensor", bits, [f[2] for f in tensor], dashed=True),
        Line("measured, per tensor", bits, [f[0] for f in tensor]),
        Line("measured, affine of 16", bits, [f[0] for f in found["groups"]]),
    ]
    return picture(
        "Error against bits: a 64 x 48 matrix of normal numbers", "bits", "‖W − Q‖ / ‖W‖", lines, bits, log=True
    )


def range_picture() -> str:
    w = matrix()
    largest = float(np.abs(w).max())
    with_outlier = w.copy()
    with_outlier[0, 0] = 1.0
    parts = np.linspace(0.1, 1.0, 181)
    lines = []
    for bits in (2, 3, 4):
        errors = [float(np.linalg.norm(w - rounded(w, largest * p, bits)[0]) / np.linalg.norm(w)) for p in parts]
        lines.append(Line(f"{bits} bits", parts.tolist(), errors))
    errors = [float(np.linalg.norm(with_outlier - rounded(with_outlier, p, 4)[0]) / np.linalg.norm(w)) for p in parts]
    lines.append(Line("4 bits, one entry of 1.0", parts.tolist(), errors, dashed=True))
    ticks = [0.1, 0.2, 0.4, 0.6, 0.8, 1.0]
    return picture(
        "The choice of the range", "end of the grid / largest entry", "‖W − Q‖ / ‖W‖", lines, ticks, log=False
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "docs")
    folder = options.parse_args().folder
    for make in (steps_table, errors_table, outlier_table):
        print(f"{make.__doc__}\n\n{make()}\n")  # noqa: T201
    (folder / "quantization_bits.svg").write_text(bits_picture(), "utf-8")
    (folder / "quantization_range.svg").write_text(range_picture(), "utf-8")


if __name__ == "__main__":
    main()
