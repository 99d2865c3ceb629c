"""`jaxdecode verify` of a batch: every line answered again, and compared with the file of results."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from jaxdecode.cli.batch import Asked, Batch
from jaxdecode.cli.batch_files import digest
from jaxdecode.cli.batch_records import written
from jaxdecode.cli.choices import Request, numbers, token_text
from jaxdecode.cli.meshing import over_mesh
from jaxdecode.cli.record import (
    changed_versions,
    check_files,
    check_hash,
    described_files,
    expecting_fields,
    first_difference,
)
from jaxdecode.cli.terminal import Progress, deferred_interrupt, show

if TYPE_CHECKING:
    from jaxdecode import engine
    from jaxdecode.cli.batch_lines import Line

__all__ = ["tell_versions", "verify_batch"]


class _Difference(NamedTuple):
    """The first token that differs, of the first such line."""

    line: int
    id: str | int
    output: int
    token: int
    recorded: int | None
    got: int | None
    margin_now: float | None


class _Nothing:
    """Where a repeated run writes its results: nowhere. Bad lines are left out: they are no tokens."""

    done: frozenset[int] = frozenset()
    pending = 0

    def expect(self, number: int) -> None:
        pass

    def give(self, number: int, record: dict[str, Any]) -> None:
        pass


class _Replay(Batch):
    """A batch that compares each answer with what was written. ``then``: the outputs' tokens, by the id's digest;
    what is left of them at the end has no answer any more."""

    then: dict[int, list[list[int]]]
    difference: _Difference | None = None
    lines = tokens = 0

    def _answer(self, line: Line, result: engine.Result) -> None:
        assert result.out is not None
        rows = written(self._loaded.tokenizer, line, result.out)
        then = self.then.pop(digest(line.id), [])
        self.lines += 1
        for i in range(max(len(then), len(rows.texts))):
            before, now = (x[i] if i < len(x) else [] for x in (then, [text.tokens for text in rows.texts]))
            self.tokens += len(before)
            found = first_difference(before, now)
            if found is None or (self.difference is not None and self.difference.line <= line.number):
                continue
            at, recorded, got = found
            margin = None if got is None else float(rows.out.margin[i, at])
            self.difference = _Difference(line.number, line.id, i, at, recorded, got, margin)


def _outputs(path: Path) -> Iterator[tuple[int, list[list[int]]]]:
    """Of every line of results that is an answer: its id's digest, and the tokens of its outputs."""
    with path.open("rb") as file:
        for raw in file:
            told = json_text.loads(raw)
            body = (told.get("response") or {}).get("body", told)
            choices = body.get("choices", [body])
            found = [c.get("token_ids", c.get("tokens")) for c in choices]
            if None not in found:
                yield digest(told.get("custom_id", told.get("id"))), found


def verify_batch(record: Mapping[str, Any], progress: Progress, *, json: bool) -> int:
    """Replay a batch and tell what differs. Returns the exit code. ValueError, OSError: it cannot be repeated."""
    import jaxdecode

    with expecting_fields():
        changed = changed_versions(record)
        check_files(record, progress)
        for name in ("input", "output"):
            file = record[name]
            (now,) = described_files([Path(file["path"])], progress)
            check_hash(f"{name}: {file['path']}", file["sha256"], now["sha256"])
        run = dict(record["run"])
        shard, in_order = tuple(run.pop("shard")), run.pop("order") == "input"
        source, target = record["input"]["path"], record["output"]["path"]
        asked = Asked(source, target, run.pop("slots"), shard, in_order, False, run.pop("share_prefixes"))
        more: dict[str, Any] = {"record": None, "json": True, "stream": False, "compile_cache": True}
        request = Request(**{**run, "stops": tuple(run["stops"])}, **more)
    with over_mesh(request.mesh) as spread:
        loaded = jaxdecode.load(request.model, **request.loading, **spread, progress=progress)
    work = _Replay(asked, request, loaded, Path(source), _Nothing(), progress)
    work.then = dict(_outputs(Path(target)))
    with over_mesh(request.mesh), deferred_interrupt() as interrupted:
        work.run(interrupted)
        if interrupted():
            return 130
    progress.stop()
    _tell(changed, work, lambda i: json_text.dumps(token_text(loaded.tokenizer, i), ensure_ascii=False), json)
    return int(work.difference is not None or bool(work.then))


def tell_versions(changed: Mapping[str, Any]) -> None:
    """What is not as it was when the record was written, on stderr."""
    for name, (then, here) in changed.items():
        typer.echo(f"{name}: {then} in the record, {here} here", err=True)


def _tell(changed: Mapping[str, Any], work: _Replay, text_of: Any, json: bool) -> None:
    found, lost = work.difference, len(work.then)
    if json:
        margin = None if found is None or found.margin_now is None else numbers([found.margin_now])[0]
        difference = None if found is None else {**found._asdict(), "margin_now": margin}
        counts = {"lines": work.lines, "lost": lost, "tokens": work.tokens}
        told = {"same": found is None and not lost, **counts, "difference": difference, "versions_changed": changed}
        show(json_text.dumps(told, ensure_ascii=False) + "\n")
        return
    tell_versions(changed)
    if lost:
        show(f"different: {lost} lines that have an answer in the record have none now\n")
    if found is not None:
        then, now = ("none" if i is None else f"{i} {text_of(i)}" for i in (found.recorded, found.got))
        margin = "" if found.margin_now is None else f"; margin now {found.margin_now:.6g}"
        where = f"line {found.line} ({found.id}), output {found.output + 1}, token {found.token + 1}"
        show(f"different: {where}: {then} in the record, {now} now{margin}\n")
    elif not lost:
        show(f"the same: {work.tokens} tokens of {work.lines} lines\n")
