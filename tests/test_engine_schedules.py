"""Thousands of random schedules on a table model: each row is what ``generate`` writes for its prompt alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from jaxdecode import Finish, Settings, generate
from jaxdecode.engine import Engine, Options, Request, Result
from jaxdecode.keys import row_keys
from jaxdecode.testing import second_order_model

SCHEDULES = 2000
V, ROWS, N = 7, 24, 10
RANDOM = np.random.default_rng(17)
MODEL = second_order_model()
TABLE = (RANDOM.normal(size=(V, V, V)) * 3).round().astype(np.float32) / 2  # halves: ties happen
KEYS = row_keys(jax.random.key(9), ROWS)
PREFIX = RANDOM.integers(0, V, 36).tolist()  # long enough to be shared


def prompt(row: int) -> list[int]:
    rest = RANDOM.integers(0, V, RANDOM.integers(2, 14)).tolist()
    return PREFIX + rest if row % 3 == 0 else rest


def chosen(row: int) -> Settings:
    return Settings(
        max_new_tokens=N,
        temperature=[0.0, 0.5, 1.0, 3.0][row % 4],
        repetition_penalty=[1.0, 1.3][row // 4 % 2],
        eos=[RANDOM.integers(-1, V).item()],
        stop=RANDOM.integers(0, V, (2, 2)).tolist(),
        num_samples=3 if row == 17 else 1,
    )


REQUESTS = [Request(row, prompt(row), chosen(row), KEYS[row]) for row in range(ROWS)]
LIMITED = [[dataclasses.replace(r.settings, max_new_tokens=n) for n in range(N + 1)] for r in REQUESTS]


class Alone(NamedTuple):
    """What ``generate`` gives for one prompt: the ids, reason and log probabilities of each sample."""

    ids: list[list[int]]
    finish: list[int]
    logprob: np.ndarray


@pytest.fixture(scope="module")
def alone() -> list[Alone]:
    found = []
    for r in REQUESTS:
        out = generate(MODEL, TABLE, [r.prompt], key=r.key[None], settings=r.settings)
        n = r.settings.num_samples
        ids = out.to_lists()[0] if n > 1 else out.to_lists()
        found.append(Alone(ids, np.reshape(out.finish, n).tolist(), np.reshape(out.logprob, (n, -1))))
    return found


def test_the_rows_end_in_every_way(alone: list[Alone]) -> None:
    """And at different lengths, so that schedules differ."""
    assert {reason for a in alone for reason in a.finish} == {Finish.EOS, Finish.STOP, Finish.LENGTH}
    assert len({len(ids) for a in alone for ids in a.ids}) > 5


PLANS = ((1, 1, 5, 0), (2, 3, 16, 2), (5, 2, 16, 1))  # slots, staged rows, chunk, kept prefixes: compiled once each
ENGINES: dict[int, Engine] = {}


class Asked(NamedTuple):
    """A row of the pool, its limit, turns waited before it comes, tokens after which it is cancelled (0: never)."""

    row: int
    limit: int
    wait: int
    cancel: int


class Schedule(NamedTuple):
    """ends: after how many results the caller drains the engine, or gives it up."""

    plan: int
    asked: list[Asked]
    passes: int
    steps: int
    refill: float
    window: int
    ends: tuple[str, int]


SCHEDULE = st.builds(
    Schedule,
    plan=st.integers(0, len(PLANS) - 1),
    asked=st.lists(
        st.builds(
            Asked,
            row=st.integers(0, ROWS - 1),
            limit=st.sampled_from([0, 1, 3, 7, N, N]),
            wait=st.sampled_from([0, 0, 1, 2]),
            cancel=st.sampled_from([0, 0, 0, 1, 2, 5]),
        ),
        min_size=1,
        max_size=8,
    ),
    passes=st.integers(1, 4),
    steps=st.sampled_from([1, 2, 5, 16]),
    refill=st.sampled_from([0.0, 0.3, 1.0]),
    window=st.sampled_from([1, 3, 8]),
    ends=st.tuples(st.sampled_from(["never", "never", "drained", "given up"]), st.integers(0, 5)),
)


def cancelled_after(n: int) -> Callable[[], Callable[[int], bool]]:
    def watch() -> Callable[[int], bool]:
        seen = itertools.count(1)
        return lambda token: next(seen) == n

    return watch


def requests(schedule: Schedule) -> Iterator[Request | None]:
    for place, (row, limit, wait, cancel) in enumerate(schedule.asked):
        yield from [None] * wait
        watch = cancelled_after(cancel) if cancel else None
        yield REQUESTS[row]._replace(id=place, settings=LIMITED[row][limit], watch=watch)


def assert_exact(result: Result, expected: Alone, limit: int, cancel: int) -> None:
    """The first ``limit`` ids of what the prompt gives alone, or the first ``cancel`` ones if it gets as far."""
    assert result.out is not None
    assert len(expected.ids) == len(result.out.length)
    for i, (ids, reason) in enumerate(zip(expected.ids, expected.finish, strict=True)):
        if limit < len(ids):
            ids, reason = ids[:limit], Finish.LENGTH
        if 0 < cancel <= len(ids):
            ids, reason = ids[:cancel], Finish.STOP
        n, tokens = len(ids), result.out.tokens[i].tolist()
        assert (tokens[:n], set(tokens[n:]), int(result.out.length[i])) == (ids, {-1}, n)
        assert int(result.out.finish[i]) == reason
        off = result.out.logprob[i, :n] - expected.logprob[i, :n]
        assert np.all(np.abs(off) < 1e-4)


@examples(max_examples=SCHEDULES, derandomize=True, deadline=None, database=None)
@given(schedule=SCHEDULE)
def test_rows_are_exact_in_any_schedule(schedule: Schedule, alone: list[Alone]) -> None:
    """Orders and times of arrival, lengths, slots, chunks, early ends, cancelled rows, and what was left from before.

    Engines are kept, so that each schedule begins in what the one before has left.
    """
    slots, staged, chunk, prefixes = PLANS[schedule.plan]
    made = ENGINES.setdefault(schedule.plan, Engine(MODEL, TABLE))
    numbers = {name: getattr(schedule, name) for name in ("passes", "steps", "refill", "window")}
    made.options = Options(slots=slots, staged=staged, chunk=chunk, prefixes=prefixes, **numbers)
    how, after = schedule.ends
    results: list[Result] = []
    served = made.serve(requests(schedule), draining=lambda: how == "drained" and len(results) >= after)
    for result in served if how != "given up" else itertools.islice(served, after):
        results.append(result)
    served.close()
    for result in results:
        row, limit, _, cancel = schedule.asked[result.request.id]
        assert_exact(result, alone[row], limit, cancel)
    ids = [result.request.id for result in results]
    assert len(set(ids)) == len(ids)
    assert len(ids) >= (len(schedule.asked) if how == "never" else min(after, len(schedule.asked)))
