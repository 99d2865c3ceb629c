"""`jaxdecode quantize`: a quantized copy of a model in a folder, and a report of what that cost."""

from __future__ import annotations

import json as json_text
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from jaxdecode.cli.compilation import keep_compiled_programs
from jaxdecode.cli.evaluating import described, read_ids
from jaxdecode.cli.files import write_json
from jaxdecode.cli.inspection import in_bytes
from jaxdecode.cli.terminal import BadInput, Progress, bad_input, styled, table, visible

if TYPE_CHECKING:
    from jaxdecode.checkpoint import Loaded

__all__ = ["Asked", "run"]

FORMAT, VERSION = "jaxdecode-quantization", 1
REPORT = "report.json"


class Asked(NamedTuple):
    """What the options of the command say."""

    model: str
    output: str
    scheme: str
    method: str
    range: Any
    text: str | None
    rows: int
    window: int
    tune: int
    seed: int
    others: str | None
    eval: str | None
    max_tokens: int | None
    dtype: str
    compile_cache: bool
    json: bool


def run(asked: Asked) -> int:
    """Quantize, measure, write, tell. Returns the exit code."""
    if asked.method != "rounding" and asked.text is None:
        raise BadInput(f"--method {asked.method}: expected a text to calibrate on (--text FILE), got none")
    if asked.method == "rounding" and asked.text is not None:
        raise BadInput("--text: expected --method gptq, which reads it, got rounding")
    if asked.method == "rounding" and asked.tune:
        raise BadInput("--tune: expected --method gptq, which it follows, got rounding")
    progress = Progress()
    folder = Path(asked.output).expanduser()
    work = folder.with_name(f".{folder.name}.calibration")  # what is finished, until all is
    try:
        progress("starting")
        if asked.compile_cache:
            keep_compiled_programs()
        with bad_input():
            report = _quantized(asked, folder, work, progress)
            write_json(folder / REPORT, report)
            shutil.rmtree(work, ignore_errors=True)
    finally:
        progress.stop()
    typer.echo(json_text.dumps(report, ensure_ascii=False) if asked.json else as_text(report, folder), nl=asked.json)
    return 0


def _quantized(asked: Asked, folder: Path, work: Path, progress: Progress) -> dict[str, Any]:
    """The folder but for the report, which is returned."""
    import jax

    import jaxdecode
    from jaxdecode.cli.record import versions
    from jaxdecode.models.transformer import TransformerConfig
    from jaxdecode.quant import is_quantized
    from jaxdecode.quantization_report import described_matrices

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder}: expected a new or empty folder, got one with files in it")
    loaded = jaxdecode.load(asked.model, dtype=asked.dtype, progress=progress)
    if not isinstance(loaded.config, TransformerConfig):
        raise ValueError(f"MODEL: expected a model with matrices, got {asked.model}")
    if any(map(is_quantized, jax.tree.leaves(loaded.params, is_leaf=is_quantized))):
        raise ValueError(f"MODEL: expected float weights, got quantized ones in {asked.model}")
    effect_ids = None if asked.eval is None else read_ids(asked.eval, loaded, asked.max_tokens)
    made = _rounded(asked, loaded) if asked.text is None else _calibrated(asked, loaded, work, progress)
    params, exact, costs, notes = made
    progress("measuring the errors")
    report: dict[str, Any] = {"format": FORMAT, "version": VERSION, "model": asked.model, **notes}
    matrices = described_matrices(exact, params, costs, inside=asked.text is None and asked.range == "max")
    report["bytes"] = {"before": _bytes(loaded.params), "after": _bytes(params)}
    report["effect"] = None
    if effect_ids is not None:
        report["effect"] = _effect(asked, loaded, params, effect_ids, progress)
    report |= {"versions": versions(), "matrices": matrices}
    jaxdecode.save(loaded._replace(params=params), folder, notes=notes, progress=progress)
    return report


def _rounded(asked: Asked, loaded: Loaded) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Every matrix by itself: params, the exact ones, costs, notes.

    ValueError: an unknown scheme, or a matrix that it cannot hold.
    """
    import jaxdecode

    others = asked.others or asked.scheme
    ends = {name: value for name, value in loaded.params.items() if name in ("embed", "head")}
    rest = {name: value for name, value in loaded.params.items() if name not in ends}
    params = jaxdecode.quantize(rest, asked.scheme, range=asked.range)
    ends = jaxdecode.quantize(ends, others, range=asked.range if others == asked.scheme else "max")
    notes = {"method": "rounding", "scheme": asked.scheme, "others": others, "range": asked.range}
    return {name: {**params, **ends}[name] for name in loaded.params}, loaded.params, {}, notes


def _calibrated(
    asked: Asked, loaded: Loaded, work: Path, progress: Progress
) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """All matrices of the layers on a text. ValueError: no such scheme, or too short a text."""
    import jax

    from jaxdecode import calibration
    from jaxdecode.calibration.tuning import tune
    from jaxdecode.models.transformer import TransformerConfig

    assert asked.text is not None
    assert isinstance(loaded.config, TransformerConfig)
    ids, digest = read_ids(asked.text, loaded, None)
    key = jax.random.key(asked.seed)
    tokens = calibration.windows_of(ids, asked.rows, asked.window, key)
    how: Any = {"others": asked.others or calibration.OTHERS, "range": asked.range}
    found = calibration.calibrate(
        loaded.config, loaded.params, tokens, asked.scheme, **how, folder=work, progress=progress
    )
    params, let_off = found.params, sorted(n for n, x in found.activations.items() if x > calibration.UNROUNDED_ABOVE)
    if asked.tune:
        more: Any = {"steps": asked.tune, "folder": work / "tuning", "progress": progress}
        count = min(asked.tune, len(ids) // asked.window)
        tokens = calibration.windows_of(ids, count, asked.window, jax.random.fold_in(key, 1))
        params = tune(loaded.model, found.exact, params, tokens, key=key, **more)
    text = {"file": Path(asked.text).name, "sha256": digest, "rows": asked.rows, "window": asked.window}
    notes = {
        "method": asked.method,
        "scheme": asked.scheme,
        **how,
        **({"activations_not_rounded": let_off} if found.activations else {}),
        "text": text,
        "tune": asked.tune,
        "seed": asked.seed,
    }
    return params, found.exact, dict(found.costs), notes


def _effect(
    asked: Asked, loaded: Loaded, params: Any, read: tuple[list[int], str], progress: Progress
) -> dict[str, Any]:
    from jaxdecode.evaluation import evaluate

    ids, digest = read
    window = min(1024, loaded.config.context_length)
    models = [(loaded.model, loaded.params), (loaded.model, params)]
    found = evaluate(models, ids, window=window, progress=progress)
    about = {"text": Path(asked.eval or "").name, "sha256": digest, "tokens": len(ids), "window": window}
    return {**about, "stride": window, **described(found)}


def _bytes(params: Any) -> int:
    import jax

    return sum(int(leaf.nbytes) for leaf in jax.tree.leaves(params))


def as_text(report: dict[str, Any], folder: Path) -> str:
    """The report for a reader: matrices of one kind together."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for matrix in report["matrices"]:
        kinds.setdefault(matrix["name"].rpartition(".")[2], []).append(matrix)
    rows = [_row(kind, group) for kind, group in kinds.items()]
    header = ["matrix", "number", "scheme", "bytes", "error", "largest", "bound", "outliers", "product", "by rounding"]
    before, after = (report["bytes"][when] for when in ("before", "after"))
    lines = [f"{visible(report['model'])} by {report['method']}, {report['scheme']} -> {visible(str(folder))}"]
    lines[0] = styled(lines[0], "bold")
    lines += [f"{in_bytes(before)} -> {in_bytes(after)} ({after / before:.1%})", ""]
    text = "\n".join(lines) + "\n" + table(header, rows, left=(0, 2))
    text += "error: ||W - Q|| / ||W||; outliers: entries beyond 6 standard deviations; product: the same of W x.\n"
    if (effect := report["effect"]) is None:
        return text
    change = effect["perplexity"] / effect["reference_perplexity"] - 1
    text += f"\non {visible(effect['text'])}, {effect['counted']:,} tokens: "
    text += f"perplexity {effect['reference_perplexity']:.4f} -> {effect['perplexity']:.4f} ({change:+.2%}), "
    return text + f"KL {effect['kl']:.5f} nats, same most probable token {effect['agreement']:.2%}\n"


def _row(kind: str, group: list[dict[str, Any]]) -> list[str]:
    def mean(name: str) -> str:
        found = [m[name] for m in group if m[name] is not None]
        return f"{sum(found) / len(found):.4f}" if found else "-"

    schemes = sorted({m["scheme"] for m in group})
    cells = [kind, str(len(group)), ", ".join(schemes), in_bytes(sum(m["bytes"] for m in group))]
    cells += [mean("error"), f"{max(m['error'] for m in group):.4f}", mean("bound")]
    return [*cells, f"{sum(m['outliers'] for m in group):,}", mean("product"), mean("product_by_rounding")]
