"""The record of a run: a JSON file with all that is needed to repeat it, and what came out. docs/command-line.md."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdecode._version import __version__
from jaxdecode.cli.choices import Request, Written, numbers

if TYPE_CHECKING:
    from jaxdecode.text.tokenizer import Tokenizer

__all__ = [
    "FORMAT",
    "VERSION",
    "changed_versions",
    "check_files",
    "check_hash",
    "described_files",
    "expecting_fields",
    "files_of",
    "first_difference",
    "recorded",
    "recorded_batch",
    "versions",
]

FORMAT, VERSION = "jaxdecode-record", 1
_PIECE = 1 << 22  # bytes hashed at a time

Report = Callable[[str, float], None]


def recorded(
    tokenizer: Tokenizer, text: str, ids: list[int], written: Written, request: Request, progress: Report
) -> dict[str, Any]:
    """The record; docs/command-line.md says what each field means. OSError: a file of the model cannot be read."""
    outputs = []
    for row, row_text in enumerate(written.texts):
        n = len(row_text.tokens)
        fields = ("logprob", "processed_logprob", "margin", "set_margin")
        values: dict[str, Any] = {f"{name}s": numbers(getattr(written.out, name)[row, :n]) for name in fields}
        for name in ("score", "gumbel"):
            if (found := getattr(written.out, name)) is not None:
                values[name] = numbers(found[row : row + 1])[0]
        outputs.append({"text": row_text.text, "tokens": row_text.tokens, "finish": written.finish[row], **values})
    samples = {"num_samples": request.num_samples or 1, "top_logprobs": request.top_logprobs}
    ends = {"eos": list(tokenizer.eos_ids), "stop_strings": list(request.stops)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "versions": versions(),
        "model": {"source": request.model, **request.loading, "files": files_of(request.model, progress)},
        "prompt": {"text": text, "system": request.system, "chat": request.chat, "ids": ids},
        "settings": {**request.settings, **samples, **ends, **request.constraints},
        **_drafted(request, progress),
        **({} if request.best_of is None else {"best_of": request.best_of}),
        **({} if request.mesh is None else {"mesh": request.mesh}),
        "seed": request.seed,
        "keys": {"impl": "threefry2x32", "words": written.keys},
        "outputs": outputs,
    }


def recorded_batch(source: Path, target: Path, run: dict[str, Any], model: str, progress: Report) -> dict[str, Any]:
    """The record of a batch that is done: how it ran, and its two files. OSError: one cannot be read."""
    (lines,), (results,) = described_files([source], progress), described_files([target], progress)
    return {
        "format": FORMAT,
        "version": VERSION,
        "kind": "batch",
        "versions": versions(),
        "model": {"source": model, "files": files_of(model, progress)},
        "input": {**lines, "path": str(source.resolve())},
        "output": {**results, "path": str(target.resolve())},
        "run": run,
    }


def _drafted(request: Request, progress: Report) -> dict[str, Any]:
    """Of a draft model the same as of the model, if there is one."""
    draft = request.draft
    if not draft.wanted:
        return {}
    source = request.model if draft.model is None else draft.model
    about = {"source": source, **request.loading, "quantize": draft.quantize, "length": draft.length}
    return {"draft": {**about, "files": files_of(source, progress)}}


def versions() -> dict[str, str]:
    """What computed it: with the same of these, and the same number of threads, the same comes out again (S6.3)."""
    import jax

    device = jax.devices()[0]
    return {
        "jaxdecode": __version__,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"{device.platform}: {device.device_kind}",
    }


def changed_versions(record: Mapping[str, Any]) -> dict[str, list[str | None]]:
    """Of all that is not as it was: what the record says, and what is here."""
    here = versions()
    return {name: [then, here.get(name)] for name, then in record["versions"].items() if here.get(name) != then}


def first_difference(then: Sequence[int], now: Sequence[int]) -> tuple[int, int | None, int | None] | None:
    """The first place at which two outputs differ, and the token of each there (None: it has none)."""
    for t in range(max(len(then), len(now))):
        before, after = (x[t] if t < len(x) else None for x in (then, now))
        if before != after:
            return t, before, after
    return None


@contextlib.contextmanager
def expecting_fields() -> Iterator[None]:
    """ValueError for a record that lacks a field, or has another thing in its place."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"record: expected the fields of a record, got {type(error).__name__}: {error}") from None


def described_files(files: Sequence[Path], progress: Report) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of every file."""
    sizes = [file.stat().st_size for file in files]
    total, done, found = max(1, sum(sizes)), 0, []
    for file, size in zip(files, sizes, strict=True):
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
                done += len(piece)
                progress("hashing the model", min(1.0, done / total))
        found.append({"file": file.name, "bytes": size, "sha256": digest.hexdigest()})
    return found


def files_of(model: str, progress: Report) -> list[dict[str, Any]]:
    """``described_files`` of a source of ``load``. OSError: one cannot be read."""
    from jaxdecode.checkpoint import find
    from jaxdecode.checkpoint.catalogue import TOY

    return [] if model == TOY else described_files(find(model, progress).files, progress)


def check_files(record: Mapping[str, Any], progress: Report) -> None:
    """ValueError unless the models' files are those that were recorded, byte for byte."""
    for name in ("model", "draft"):
        if name not in record:
            continue
        now = {f["file"]: f["sha256"] for f in files_of(record[name]["source"], progress)}
        for file in record[name]["files"]:
            check_hash(f"{name}: {file['file']}", file["sha256"], now.get(file["file"]))


def check_hash(what: str, expected: str, got: str | None) -> None:
    if got != expected:
        raise ValueError(f"{what}: expected the SHA-256 {expected}, got {got or 'no such file'}")
