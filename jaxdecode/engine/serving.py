"""Requests in, results out: any number of them, in bounded memory, grouped by the program they need."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxdecode import checks, generation, keys
from jaxdecode.base import Decoder, Model, Params, Rules, fetch
from jaxdecode.decoders.common import cache_spec
from jaxdecode.engine.driver import Driver, Options, Stats, Turn
from jaxdecode.engine.programs import Plan
from jaxdecode.engine.requests import Job, Request, Result, check, one_row, signature
from jaxdecode.rulebook import Settings

__all__ = ["Engine", "row_sizes"]

SMALLEST = 256  # tokens of a row at least: powers of two from here on, so that its cache's blocks are always the same
REMEMBERED = 256  # settings whose rules are kept
_END: Any = object()


@dataclasses.dataclass(slots=True)
class _Group:
    """Requests that can share a program, and the sizes of its rows so far."""

    decoder: Decoder
    waiting: deque[Job] = dataclasses.field(default_factory=deque)
    prompt: int = 0
    new: int = 0


def row_sizes(prompt: int, new: int, accepts: Callable[[int], bool]) -> tuple[int, int] | None:
    """(prompt, new) tokens that a row has room for: a power of two in all if the context allows it, else just these.

    accepts: whether the context has room for so many tokens. None: not even for these.
    """
    wide = max(16, 1 << (new - 1).bit_length() if new else 0)
    total = max(SMALLEST, 1 << (prompt + wide - 1).bit_length())
    if accepts(total):
        return total - wide, wide
    return (prompt, new) if accepts(prompt + new) else None


class Engine:
    """A model that serves requests with continuous batching.

    ``serve(requests)`` takes requests as it has room for them (at most ``options.window`` are in it at any time) and
    gives back results as they finish. Every row is what ``generate`` writes for this prompt alone with the row's key
    (S6.3 apart). Beams, which are no rows, are left to ``generate``, between the steps. decoder: makes the decoder for
    some settings; default: that of ``generate``. decoder_params: what its steps take as params, if not the model's own.

    >>> from jaxdecode.testing import markov_model
    >>> import jax.numpy as jnp
    >>> engine = Engine(markov_model(), jnp.eye(3), options=Options(slots=2))
    >>> three = [Request(i, [i], Settings(max_new_tokens=i + 1, temperature=0)) for i in range(3)]
    >>> {result.request.id: result.out.to_lists() for result in engine.serve(three)} == {
    ...     0: [[0]], 1: [[1, 1]], 2: [[2, 2, 2]]}
    True
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        options: Options | None = None,
        decoder: Callable[[Settings], Decoder] | None = None,
        decoder_params: Params | None = None,
        on_turn: Callable[[Turn], None] | None = None,
    ) -> None:
        self.model, self.params = model, params
        self.options = Options() if options is None else options
        for name in ("slots", "staged", "chunk", "passes", "steps", "window"):
            value = getattr(self.options, name)
            checks.require(isinstance(value, int) and value >= 1, name, "a whole number >= 1", value)
        checks.require(self.options.prefixes >= 0, "prefixes", "a whole number >= 0", self.options.prefixes)
        checks.require(0 <= self.options.refill <= 1, "refill", "a share in [0, 1]", self.options.refill)
        self._decoder = self._usual if decoder is None else decoder
        self._decoder_params = params if decoder_params is None else decoder_params
        self._on_turn = on_turn
        self.stats = Stats()
        self.vocab_size = generation.vocab_size_of(model, params)
        self._rules: dict[int, tuple[Settings, Rules, Hashable, Decoder]] = {}
        self._groups: dict[Hashable, _Group] = {}
        self._compiled: set[tuple[Hashable, Plan]] = set()
        self._alone: deque[Request] = deque()  # those whose decoder has no rows to put into slots
        self._lengths: dict[int, bool] = {}  # whether the model has room for so many tokens
        self._held = 0
        self._number = 0
        self._running: Driver | None = None
        self._cancelled: deque[Request] = deque()

    def cancel(self, id: Any) -> bool:
        """Give up the request of that ``id``: it comes back at once, with the error "cancelled", and its rows are free.

        To be called between the results of ``serve``, or where its requests come from. False: no such request is in the
        engine, or its result is on its way.
        """
        found = None if self._running is None else self._running.cancel(id)
        request = None if found is None else found.request
        for group in self._groups.values():
            if request is None and (job := next((j for j in group.waiting if j.request.id == id), None)) is not None:
                group.waiting.remove(job)
                request = job.request
        if request is None and (alone := next((r for r in self._alone if r.id == id), None)) is not None:
            self._alone = deque(r for r in self._alone if r is not alone)
            request = alone
        if request is None:
            return False
        self._cancelled.append(request)
        return True

    def serve(
        self, requests: Iterable[Request | None], *, draining: Callable[[], bool] = lambda: False
    ) -> Iterator[Result]:
        """Results as rows finish. ``None`` among the requests: there is none right now, ask again after some steps.

        draining: once it says so no more requests are taken, and those without a slot are dropped; the rest finishes.
        """
        self._drop(None)  # what an earlier call may have left when it was given up
        self._held = 0
        self._cancelled.clear()
        source, more = iter(requests), True
        driver: Driver | None = None
        key: Hashable = None
        while True:
            if draining():
                more = False
                self._drop(driver)
            more = more and (yield from self._take(source))
            while self._cancelled:
                self._held -= 1
                yield Result(self._cancelled.popleft(), None, "cancelled")
            if self._alone:
                self._held -= 1
                yield self._result(self._alone.popleft())
            if driver is None or not (driver.active or driver.waiting):
                driver = self._running = None  # the old one's memory goes first
                key = self._oldest()
                if key is None:
                    if more or self._alone or self._cancelled:
                        continue
                    return
                driver = self._running = self._driver(key)
            self._hand_over(self._groups[key], driver)
            if not more:
                driver.no_more()
            for result in driver.turn():
                self._held -= 1
                yield result

    def _take(self, source: Iterator[Request | None]) -> Generator[Result, None, bool]:
        """Take requests while there is room; those that cannot be served come back at once. Returns: are there more?"""
        while self._held < self.options.window:
            request = next(source, _END)
            if request is _END:
                return False
            if request is None:
                break
            try:
                self._accept(request)
                self._held += 1
            except ValueError as error:
                yield Result(request, None, str(error))
        return True

    def _accept(self, request: Request) -> None:
        """Check a request and put it into its group. ValueError: it cannot be served."""
        prompt = check(request, self.vocab_size)
        if request.settings.width is not None:
            self._alone.append(request)
            return
        rules, group_key, decoder = self._prepared(request.settings)
        if request.key is None:
            checks.require(bool(np.all(rules.greedy)), "key", "a jax.random.key, since the temperature is not 0", None)
        key = jax.random.key(0, impl="threefry2x32") if request.key is None else keys.check_key(request.key)
        job = Job(request, prompt, rules, key, self._number)
        self._number += 1
        self._sizes([job])
        group = self._groups.setdefault(group_key, _Group(decoder))
        group.waiting.append(job)

    def _result(self, request: Request) -> Result:
        """That of a request whose hypotheses belong together, by ``generate``: ``out`` has one row, with an axis K."""
        key = None if request.key is None else keys.check_key(request.key)[None]
        try:
            out = generation.generate(self.model, self.params, [request.prompt], key=key, settings=request.settings)
        except ValueError as error:
            return Result(request, None, str(error))
        return Result(request, jax.tree.map(np.array, fetch(out)))

    def _prepared(self, settings: Settings) -> tuple[Rules, Hashable, Decoder]:
        """The rules of one row, what makes its program another one, and its decoder; kept for equal objects."""
        found = self._rules.get(id(settings))
        if found is None:
            rules = one_row(settings, self.vocab_size)
            decoder = self._decoder(settings)
            if len(self._rules) >= REMEMBERED:
                self._rules.clear()
            found = self._rules[id(settings)] = (settings, rules, (decoder, signature(rules)), decoder)
        return found[1:]

    def _usual(self, settings: Settings) -> Decoder:
        return generation.decoder_of(self.model, settings)

    def _sizes(self, jobs: Iterable[Job], prompt: int = 0, new: int = 0) -> tuple[int, int]:
        """(prompt, new) of rows in which as many of the first jobs as possible fit, and more up to the sizes given.

        ValueError: not even the first one fits.
        """
        found: tuple[int, int] | None = None
        for job in jobs:
            prompt, new = max(prompt, len(job.prompt)), max(new, job.new)
            sizes = row_sizes(prompt, new, self._accepts)
            if sizes is None:
                break
            found = sizes
        if found is None:
            got = f"{prompt} + {new} = {prompt + new}"
            raise ValueError(f"prompt + max_new_tokens: expected at most the model's context, got {got} tokens")
        return found

    def _accepts(self, total: int) -> bool:
        if total not in self._lengths:
            try:
                cache_spec(self.model, self.params, 1, total)
                self._lengths[total] = True
            except ValueError:
                self._lengths[total] = False
        return self._lengths[total]

    def _oldest(self) -> Hashable | None:
        """The group whose first request has waited longest."""
        waiting = {key: group.waiting[0].number for key, group in self._groups.items() if group.waiting}
        return min(waiting, key=waiting.__getitem__, default=None)

    def _driver(self, key: Hashable) -> Driver:
        options, group = self.options, self._groups[key]
        try:
            prompt, new = self._sizes(group.waiting, group.prompt, group.new)
        except ValueError:  # its first request fits alone, not beside the longest prompt and output of those before
            prompt, new = self._sizes(group.waiting)
        group.prompt, group.new = prompt, new  # rows that only grow are few programs
        chunk = min(options.chunk, prompt + new - 2)
        plan = Plan(group.decoder, options.slots, prompt, new, options.staged, max(chunk, 1), options.prefixes)
        driver = Driver(plan, self._decoder_params, group.waiting[0], options, self.stats, self._on_turn)
        if (key, plan) not in self._compiled:
            driver.warm(group.waiting[0])
            self._compiled.add((key, plan))
        return driver

    def _hand_over(self, group: _Group, driver: Driver) -> None:
        """Give the driver the group's requests that fit its rows, up to the first that doesn't: it waits for others."""
        waiting = group.waiting
        while waiting and len(waiting[0].prompt) <= driver.plan.prompt and waiting[0].new <= driver.plan.new:
            driver.waiting.append(waiting.popleft())

    def _drop(self, driver: Driver | None) -> None:
        for group in self._groups.values():
            group.waiting.clear()
        self._alone.clear()
        if driver is not None:
            driver.drop_unstarted()
