"""The engine's host side for requests of one program: who is staged, who gets a slot, who is done."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxdecode import kvcache
from jaxdecode.base import Finish, Params, fetch
from jaxdecode.engine import programs
from jaxdecode.engine.prefixes import LEAST, Prefixes, common
from jaxdecode.engine.programs import Newcomer, Plan
from jaxdecode.engine.requests import Job, Result, Watch, cut

__all__ = ["Driver", "Options", "Stats", "Turn"]

LOOK = 32  # waiting requests looked at for common prefixes
LAST = 4  # times the slots: so many of the last requests are taken longest first


class Options(NamedTuple):
    """Numbers of the engine. None of them changes what a row writes, up to S6.3.

    slots: rows that run together. staged: rows whose prompts are computed together, ``chunk`` tokens of each in one
    pass. passes: the most passes between two steps of the running rows. steps: the most steps between two looks at the
    rows. refill: the share of the slots whose end makes the engine look at once. window: the most requests taken in and
    not given back. prefixes: how many common prefixes are kept; 0: every prompt is computed as a whole.
    """

    slots: int = 16
    staged: int = 8
    chunk: int = 32
    passes: int = 4
    steps: int = 16
    refill: float = 1 / 16
    window: int = 1024
    prefixes: int = 2


class Turn(NamedTuple):
    """What happened between two looks: prefill passes, steps, and each slot's request and sample during the steps."""

    passes: int
    steps: int
    slots: tuple[tuple[Any, int] | None, ...]


@dataclasses.dataclass
class Stats:
    """Counts so far. busy: the tokens written, which slots were busy with. queued: of steps and busy those while
    requests were waiting. computed, shared: prompt tokens that passes computed and that prefixes saved."""

    steps: int = 0
    busy: int = 0
    queued_steps: int = 0
    queued_busy: int = 0
    passes: int = 0
    computed: int = 0
    shared: int = 0


@dataclasses.dataclass(slots=True)
class _Staged:
    """A staged row: the tokens to compute, how many of them are done, its place in the order of staging, samples that
    have got a slot.

    job None: a prefix to keep.
    """

    job: Job | None
    tokens: np.ndarray
    done: int
    order: int
    seated: int = 0

    @property
    def ready(self) -> bool:
        return self.done == len(self.tokens)


@dataclasses.dataclass(slots=True)
class _Seat:
    """A slot that is taken: by which sample, and how many of its tokens were looked at."""

    job: Job
    sample: int
    watch: Watch | None
    seen: int = 0


class Driver:
    """Runs the requests of ``waiting``, a turn at a time. ``warm`` compiles all programs, before the first."""

    def __init__(
        self,
        plan: Plan,
        params: Params,
        first: Job,
        options: Options,
        stats: Stats,
        on_turn: Callable[[Turn], None] | None = None,
    ) -> None:
        self.plan, self.params, self.options, self.stats, self._on_turn = plan, params, options, stats, on_turn
        self.waiting: deque[Job] = deque()
        self._seats: list[_Seat | None] = [None] * plan.slots
        self._staged: list[_Staged | None] = [None] * plan.staged
        self._order = itertools.count()
        self.state = programs.init(plan, params, first.rules)
        self._weighs = getattr(self.state.rows, "log_weight", None) is not None
        self._prefixes = Prefixes(plan.kept, kvcache.cuttable(self.state.kept))

    def warm(self, first: Job) -> None:
        """Compile every program, by calls that change nothing."""
        zero = np.int32(0)
        self._change(staged=programs.begin(self.state.staged, self.state.kept, zero, zero, zero))
        if self.plan.kept:
            self._change(kept=programs.keep(self.state.kept, self.state.staged, zero, np.int32(self.plan.kept + 1)))
        self._pass({})
        self._insert(0, self.plan.slots, first, 0)
        self._run(0, 0)
        self.state = programs.stop(self.state, np.zeros((self.plan.slots,), bool))
        programs.collect(self.plan.decoder, self.state, 0)

    def _change(self, **parts: Any) -> None:
        self.state = dataclasses.replace(self.state, **parts)

    @property
    def active(self) -> bool:
        """Whether some request is between waiting and done."""
        return any(x is not None for x in itertools.chain(self._seats, self._staged))

    def drop_unstarted(self) -> None:
        """Forget the requests of which no sample has a slot."""
        self.waiting.clear()
        self._staged = [s if s is not None and s.seated else None for s in self._staged]

    def cancel(self, id: Any) -> Job | None:
        """Give up the request of that ``id``, wherever it is; None: it is not here."""
        held = [seat.job for seat in self._seats if seat is not None]
        held += [s.job for s in self._staged if s is not None and s.job is not None]
        found = next((job for job in [*self.waiting, *held] if job.request.id == id), None)
        if found is None:
            return None
        if found in self.waiting:
            self.waiting.remove(found)
        rows = np.array([seat is not None and seat.job is found for seat in self._seats])
        if rows.any():
            self.state = programs.stop(self.state, rows)
        self._staged = [None if s is not None and s.job is found else s for s in self._staged]
        self._seats = [None if seat is not None and seat.job is found else seat for seat in self._seats]
        return found

    def no_more(self) -> None:
        """All requests are here: of the last ones the longest begin first, so that no slot runs on alone for long."""
        if len(self.waiting) <= LAST * self.plan.slots:
            self.waiting = deque(sorted(self.waiting, key=lambda job: -job.new))

    def turn(self) -> list[Result]:
        """Some prefill, some steps; what ended meanwhile."""
        passes = self.stats.passes
        self._fill()
        self._prefill()
        steps = self._step()
        if self._on_turn is not None:
            taken = tuple(None if s is None else (s.job.request.id, s.sample) for s in self._seats)
            self._on_turn(Turn(self.stats.passes - passes, steps, taken))
        return self._collect()

    def _fill(self) -> None:
        """Seat who is ready and stage who waits, as long as that makes room for more."""
        waiting = -1
        while waiting != len(self.waiting):
            waiting = len(self.waiting)
            self._seat_ready()
            self._stage()
        self._seat_ready()

    def _stage(self) -> None:
        """Give free staged rows to waiting requests, and to prefixes that several of them share."""
        while self.waiting and None in self._staged:
            row = self._staged.index(None)
            coming = [s.tokens for s in self._staged if s is not None and s.job is None]
            number, place, n = self._next(coming)
            if number < 0:
                return
            job = self.waiting[number]
            if len(coming) < self.plan.kept:
                others = itertools.islice((other.prompt for other in self.waiting if other is not job), LOOK)
                size = self._prefixes.worth(job.prompt, others)
                if size >= n + LEAST:
                    self._begin(row, _Staged(None, job.prompt[:size], n, -1), place)
                    continue
            del self.waiting[number]
            self.stats.shared += n
            self._begin(row, _Staged(job, job.prompt[:-1], n, next(self._order)), place)

    def _next(self, coming: list[np.ndarray]) -> tuple[int, int, int]:
        """Which waiting request is next, and the kept row and length it begins with.

        One that would save by a prefix that is being computed waits for it. (-1, 0, 0): all of them do.
        """
        for number, job in enumerate(itertools.islice(self.waiting, LOOK)):
            place, n = self._prefixes.match(job.prompt)
            if all(common(prefix, job.prompt[:-1]) < n + LEAST for prefix in coming):
                return number, place, n
        return -1, 0, 0

    def _begin(self, row: int, staged: _Staged, place: int) -> None:
        self._staged[row] = staged
        numbers = (np.int32(x) for x in (row, place, staged.done))
        self._change(staged=programs.begin(self.state.staged, self.state.kept, *numbers))

    def _prefill(self) -> None:
        """Passes over the staged rows: several while slots are free, else one at most, and only a full one.

        A pass takes as long for one row as for all of them, and a prompt that is ready before a slot is gains nothing.
        """
        for done in range(self.options.passes):
            work = [(row, s) for row, s in enumerate(self._staged) if s is not None and not s.ready]
            ahead = None not in self._seats
            if not work or (ahead and (done or len(work) < self.plan.staged)):
                return
            parts = {row: s.tokens[s.done : s.done + self.plan.chunk] for row, s in work}
            for row, s in work:
                s.done += len(parts[row])
            self._pass(parts)
            self.stats.passes += 1
            self.stats.computed += sum(map(len, parts.values()))
            self._fill()

    def _pass(self, parts: dict[int, np.ndarray]) -> None:
        """One pass of prefill: the next tokens of some staged rows."""
        tokens = np.zeros((self.plan.staged, self.plan.chunk), np.int32)
        count = np.zeros((self.plan.staged,), np.int32)
        for row, part in parts.items():
            tokens[row, : len(part)], count[row] = part, len(part)
        self._change(staged=programs.prefill(self.plan.decoder, self.params, self.state.staged, tokens, count))

    def _seat_ready(self) -> None:
        """Move rows whose prompt is computed into free slots, in the order of staging; keep prefixes."""
        ready = [(row, s) for row, s in enumerate(self._staged) if s is not None and s.ready]
        for row, s in sorted(ready, key=lambda x: x[1].order):
            if s.job is None:
                place = self._prefixes.store(s.tokens)
                self._change(kept=programs.keep(self.state.kept, self.state.staged, np.int32(row), np.int32(place)))
                self._staged[row] = None
                continue
            while s.seated < s.job.samples and None in self._seats:
                slot = self._seats.index(None)
                watch = s.job.request.watch
                self._seats[slot] = _Seat(s.job, s.seated, None if watch is None else watch())
                self._insert(row, slot, s.job, s.seated)
                s.seated += 1
            if s.seated == s.job.samples:
                self._staged[row] = None

    def _insert(self, row: int, slot: int, job: Job, sample: int) -> None:
        tokens = np.zeros((1, self.plan.prompt), np.int32)
        tokens[0, : len(job.prompt)] = job.prompt
        number = np.int32(sample if job.samples > 1 else -1)
        new = Newcomer(tokens, np.array([len(job.prompt)], np.int32), job.key, number, job.rules)
        where = np.int32(row), np.int32(slot)
        rows = programs.insert(self.plan.decoder, self.params, self.state.rows, self.state.staged, *where, new)
        self._change(rows=rows)

    def _run(self, n: int, enough: int) -> tuple[int, int]:
        """At most n steps; how many, and the tokens they wrote."""
        limits = np.int32(n), np.int32(enough)
        rows, counts = programs.step(self.plan.decoder, self.params, self.state.rows, *limits)
        self._change(rows=rows)
        steps, written = fetch(counts)
        return int(steps), int(written)

    def _step(self) -> int:
        """Some steps of the running rows; fewer while slots are free for rows that are being staged."""
        if all(seat is None for seat in self._seats):
            return 0
        watched = any(seat is not None and seat.watch is not None for seat in self._seats)
        coming = bool(self.waiting) or any(s is not None for s in self._staged)
        n = self.options.steps
        if self._weighs and watched:
            n = 1  # a weight counts every token, those after a stop too
        elif coming and None in self._seats:
            n = max(1, n // 4)
        enough = max(1, math.ceil(self.options.refill * self.plan.slots)) if coming else self.plan.slots
        steps, busy = self._run(n, enough)
        self.stats.steps += steps
        self.stats.busy += busy
        if self.waiting:
            self.stats.queued_steps += steps
            self.stats.queued_busy += busy
        return steps

    def _collect(self) -> list[Result]:
        """Free the slots of rows that ended, by themselves or because their watch says so."""
        if all(seat is None for seat in self._seats):
            return []
        rows = self.state.rows
        finish, start, length = (np.array(x) for x in fetch((rows.finish, rows.start, rows.length)))
        ended = self._stopped(start, length)
        results, early = [], np.zeros((self.plan.slots,), bool)
        for slot, seat in enumerate(self._seats):
            if seat is None or (finish[slot] == Finish.RUNNING and slot not in ended):
                continue
            out = programs.collect(self.plan.decoder, self.state, slot)
            seat.job.outs[seat.sample] = cut(out, ended[slot]) if slot in ended else out
            early[slot] = finish[slot] == Finish.RUNNING
            self._seats[slot] = None
            if len(seat.job.outs) == seat.job.samples:
                results.append(seat.job.result())
        if early.any():
            self.state = programs.stop(self.state, early)
        return results

    def _stopped(self, start: np.ndarray, length: np.ndarray) -> dict[int, int]:
        """Slots whose watch ended them, and after how many tokens."""
        found: dict[int, int] = {}
        watched = [(slot, seat) for slot, seat in enumerate(self._seats) if seat is not None and seat.watch is not None]
        tokens = np.array(fetch(self.state.rows.tokens)) if watched else None
        for slot, seat in watched:
            assert tokens is not None
            assert seat.watch is not None
            for token in tokens[slot, start[slot] + seat.seen : length[slot]].tolist():
                seat.seen += 1
                if seat.watch(token):
                    found[slot] = seat.seen
                    break
        return found
