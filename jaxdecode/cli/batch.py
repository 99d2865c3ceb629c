"""`jaxdecode batch`: every line of a file answered, in any number, by continuous batching."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import typer

from jaxdecode.cli import constraining
from jaxdecode.cli.batch_files import Results, digest, numbered_lines
from jaxdecode.cli.batch_lines import BadLine, Line, parse, same_program
from jaxdecode.cli.batch_records import answered, failed
from jaxdecode.cli.choices import Request
from jaxdecode.cli.compilation import keep_compiled_programs
from jaxdecode.cli.decoding import fields
from jaxdecode.cli.files import check_target, write_json
from jaxdecode.cli.generate import check, encode, settings_of
from jaxdecode.cli.meshing import over_mesh
from jaxdecode.cli.processes import Joining, Place, own, together
from jaxdecode.cli.record import recorded_batch
from jaxdecode.cli.terminal import BadInput, Progress, bad_input, deferred_interrupt

if TYPE_CHECKING:
    from jaxdecode import engine
    from jaxdecode.checkpoint import Loaded
    from jaxdecode.rulebook import Settings

__all__ = ["Asked", "Batch", "Translator", "run", "shard_of"]

AHEAD = 1024  # lines read and not yet written, at most
REMEMBERED = 256  # settings kept, so that equal lines are prepared once


class Asked(NamedTuple):
    """Where from, where to, and how. shard: (i, n), from 1."""

    source: str
    target: str
    slots: int
    shard: tuple[int, int]
    in_order: bool
    resume: bool
    share_prefixes: bool
    record: str | None = None

    def at(self, place: Place) -> Asked:
        """What one of several processes does: its own shard, into a file of its own."""
        if place.total == 1:
            return self
        record = None if self.record is None else own(self.record, place)
        shard = (place.process + 1, place.total)
        return self._replace(target=own(self.target, place), shard=shard, record=record)


def shard_of(text: str) -> tuple[int, int]:
    """(i, n) of "i/n", 1 <= i <= n."""
    first, slash, last = text.partition("/")
    if not (slash and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise BadInput(f"--shard: expected I/N with 1 <= I <= N, got {text!r}")
    return int(first), int(last)


def run(asked: Asked, defaults: Request, joining: Joining) -> int:
    """Answer every line of the file that has no answer yet. Returns the exit code."""
    check(defaults._replace(chat=True))  # a system message is for the lines that are chats
    if joining.coordinator is not None and asked.shard != (1, 1):
        raise BadInput("--shard: expected none beside --coordinator, whose processes take a shard each")
    if defaults.compile_cache:
        keep_compiled_programs()
    return together(joining, lambda place: _run(asked.at(place), defaults, place))


def _run(asked: Asked, defaults: Request, place: Place) -> int:
    progress = Progress()
    if place.process > 0:
        progress.stop()  # one line on a terminal is enough
    try:
        progress("starting")
        import jaxdecode

        with over_mesh(defaults.mesh, own=True) as spread, bad_input():
            source = Path(asked.source).expanduser()
            source.open("rb").close()  # before the model is loaded
            target = Path(asked.target).expanduser()
            if target.exists() and target.samefile(source):
                raise BadInput(f"OUT: expected another file than IN, got {asked.target}")
            record = None if asked.record is None else check_target(asked.record)
            defaults = defaults._replace(constraints=constraining.read(defaults.constraints))
            loaded = jaxdecode.load(defaults.model, **defaults.loading, **spread, progress=progress)
            Translator(loaded, progress).settings(defaults)  # a wrong default is no fault of the lines
            results = Results(asked.target, _same(asked, defaults), resume=asked.resume, in_order=asked.in_order)
        try:
            with over_mesh(defaults.mesh, own=True), deferred_interrupt() as interrupted:
                work = Batch(asked, defaults, loaded, source, results, progress)
                work.run(interrupted)
                drained = interrupted()
        finally:
            results.close()
        if record is not None and not drained:
            with bad_input():
                write_json(record, recorded_batch(source, target, _run_of(asked, defaults), defaults.model, progress))
    finally:
        progress.stop()
    typer.echo(work.summary())
    if drained:
        typer.echo("interrupted: the same command goes on from here", err=True)
    return 130 if drained else 0


def _same(asked: Asked, defaults: Request) -> dict[str, Any]:
    """What a run must have in common with the one that it goes on with."""
    ignored = ("record", "json", "stream", "compile_cache", "draft")
    request = {name: value for name, value in defaults._asdict().items() if name not in ignored}
    return {**request, "shard": asked.shard, "order": "input" if asked.in_order else "finished"}


def _run_of(asked: Asked, defaults: Request) -> dict[str, Any]:
    """The same with all that may change a bit."""
    return {**_same(asked, defaults), "slots": asked.slots, "share_prefixes": asked.share_prefixes}


class Translator:
    """Makes requests of the engine from lines."""

    def __init__(self, loaded: Loaded, progress: Progress) -> None:
        self.loaded, self._progress = loaded, progress
        self._settings: dict[str, Settings] = {}

    def __call__(self, line: Line) -> engine.Request:
        """ValueError: the line cannot be answered."""
        import jax

        from jaxdecode.engine import Request
        from jaxdecode.keys import row_key

        tokenizer, request = self.loaded.tokenizer, line.request
        if line.messages is not None:
            has_system = any(isinstance(m, dict) and m.get("role") == "system" for m in line.messages)
            system = [] if request.system is None or has_system else [{"role": "system", "content": request.system}]
            ids = tokenizer.chat([*system, *line.messages])
        elif isinstance(line.prompt, str):
            ids = encode(self.loaded, line.prompt, request)
        else:
            ids = line.prompt or []
        known = same_program(line)
        if known not in self._settings:
            if len(self._settings) >= REMEMBERED:
                self._settings.clear()
            self._settings[known] = self.settings(request)
        key = row_key(_seed_key(jax, request.seed), str(line.id))
        watch = functools.partial(self._watch, line) if request.stops else None
        return Request(line, ids, self._settings[known], key, watch)

    def settings(self, request: Request) -> Settings:
        """The settings of a line. ValueError: they are out of range."""
        grammar = constraining.compiled(self.loaded, request.constraints, self._progress)
        request = request._replace(settings=fields(request.settings, self.loaded.tokenizer))
        return self.loaded.settings(**settings_of(request), **grammar)

    def _watch(self, line: Line) -> Callable[[int], bool]:
        from jaxdecode.cli.writing import RowText

        text = RowText(self.loaded.tokenizer, stops=line.request.stops, continuation=not line.request.chat)

        def stopped(token: int) -> bool:
            text.push([token])
            return text.stopped

        return stopped


@functools.lru_cache(maxsize=64)
def _seed_key(jax: Any, seed: int) -> Any:
    return jax.random.key(seed)


class Sink(Protocol):
    """Where results go: a ``Results``, or what looks like one."""

    @property
    def done(self) -> Container[int]: ...

    @property
    def pending(self) -> int: ...

    def expect(self, number: int) -> None: ...

    def give(self, number: int, record: dict[str, Any]) -> None: ...


class Batch:
    """One run over the lines of a shard."""

    def __init__(
        self, asked: Asked, defaults: Request, loaded: Loaded, source: Path, results: Sink, progress: Progress
    ) -> None:
        self._asked, self._defaults, self._source = asked, defaults, source
        self._loaded, self._results, self._progress = loaded, results, progress
        self._translate = Translator(loaded, progress)
        self._answered = self._bad = self._skipped = self._tokens = 0
        self._total = sum(self._mine(number) for number, _ in numbered_lines(source))
        self._began = time.monotonic()

    def run(self, interrupted: Callable[[], bool]) -> None:
        """Write a result for every line that has none, until all have one or somebody interrupts."""
        from jaxdecode.engine import Engine, Options

        options = Options(slots=self._asked.slots, window=AHEAD, prefixes=2 if self._asked.share_prefixes else 0)
        self._progress("compiling")
        engine = Engine(self._loaded.model, self._loaded.params, options=options, on_turn=self._tell)
        self._began = time.monotonic()
        for result in engine.serve(self._requests(), draining=interrupted):
            line: Line = result.request.id
            if result.out is None:
                self._refuse(BadLine(line.number, line.id, line.url is not None, str(result.error)))
                continue
            self._tokens += int(result.out.length.sum())
            self._answered += 1
            self._answer(line, result)

    def _answer(self, line: Line, result: engine.Result) -> None:
        assert result.out is not None
        self._results.give(line.number, answered(self._loaded.tokenizer, line, len(result.request.prompt), result.out))

    def _requests(self) -> Iterator[engine.Request | None]:
        """A request for every line without a result, as far as there is room for more."""
        seen: set[int] = set()
        for number, raw in numbered_lines(self._source):
            found = self._parsed(number, raw, seen)
            if not self._mine(number):
                continue
            if digest(found.id) in self._results.done:
                self._skipped += 1
                continue
            while self._results.pending >= AHEAD:
                yield None
            self._results.expect(number)
            made = self._translated(found) if isinstance(found, Line) else found
            if isinstance(made, BadLine):
                self._refuse(made)
            else:
                yield made

    def _parsed(self, number: int, raw: bytes, seen: set[int]) -> Line | BadLine:
        """The line, or why there is no answer; ids are looked at in the whole file, whatever the shard."""
        try:
            line = parse(raw, number, self._defaults)
        except BadLine as bad:
            return bad
        if digest(line.id) in seen:
            reason = f"id: expected one that no line before has, got {line.id!r}"
            return BadLine(number, f"line-{number}", line.url is not None, reason)
        seen.add(digest(line.id))
        return line

    def _translated(self, line: Line) -> engine.Request | BadLine:
        try:
            return self._translate(line)
        except (ValueError, BadInput) as error:
            return BadLine(line.number, line.id, line.url is not None, str(error))

    def _refuse(self, bad: BadLine) -> None:
        self._bad += 1
        self._results.give(bad.number, failed(bad))

    def _mine(self, number: int) -> bool:
        i, n = self._asked.shard
        return number % n == i % n

    def _rate(self) -> float:
        return self._tokens / max(time.monotonic() - self._began, 1e-9)

    def _tell(self, turn: engine.Turn) -> None:
        """How far it is, how fast, and how long it will take if the lines to come are like those before."""
        here = self._answered + self._bad
        done = here + self._skipped
        left = (self._total - done) * (time.monotonic() - self._began) / here if here else float("nan")
        clock = f", {left // 60:.0f}:{left % 60:02.0f} left" if here else ""
        self._progress(f"{done} of {self._total} lines, {self._rate():.0f} tokens/s{clock}", done / max(self._total, 1))

    def summary(self) -> str:
        """What was done, on one line."""
        before = f", {self._skipped} were done before" if self._skipped else ""
        return (
            f"{self._answered} lines answered, {self._bad} bad{before}; "
            f"{self._tokens} tokens, {self._rate():.0f} tokens/s"
        )
