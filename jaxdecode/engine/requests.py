"""What goes into the engine and comes out of it, and which requests can share a program."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdecode import checks
from jaxdecode.base import Finish, Generated, Rules, Shared
from jaxdecode.rulebook import Settings
from jaxdecode.transforms import id_lists

__all__ = ["Job", "Request", "Result", "Watch", "check", "cut", "one_row", "signature"]

# Called with each new id of a row, in order; true: the row ends with this one.
Watch = Callable[[int], bool]
_LISTS = ("logit_bias", "allowed_ids", "banned_ids", "bad_words", "forced", "prefix")


class Request(NamedTuple):
    """A prompt (ids) and how to continue it: ``settings`` of one row, and its row key (None: a greedy row).

    watch: makes a ``Watch`` for each sample, to end it early.
    """

    id: Any
    prompt: Sequence[int]
    settings: Settings
    key: jax.Array | None = None
    watch: Callable[[], Watch] | None = None


class Result(NamedTuple):
    """What became of a request: ``out``, a row for each sample, as NumPy arrays; or an ``error``, what was wrong.

    With beams, or samples without replacement, ``out`` is what ``generate`` gives: one row, with an axis K.
    """

    request: Request
    out: Generated | None
    error: str | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """A request that was checked: its prompt as an array, its rules [1], its number among all that came before, and the
    samples that ended, by number."""

    request: Request
    prompt: np.ndarray
    rules: Rules
    key: jax.Array
    number: int
    outs: dict[int, Generated] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> int:
        return self.request.settings.num_samples

    @property
    def new(self) -> int:
        """Most new tokens."""
        return self.request.settings.size

    def result(self) -> Result:
        """All samples in order, once they have ended."""
        rows = [self.outs[i] for i in range(self.samples)]
        return Result(self.request, jax.tree.map(lambda *x: np.concatenate(x), *rows))


def one_row(settings: Settings, vocab_size: int) -> Rules:
    """Rules [1] of one request, its lists as numbers of the row, so that rows with other lists share the program."""
    lists: dict[str, Any] = {}
    for name in _LISTS:
        value = getattr(settings, name)
        if value is not None:
            lists[name] = value[None] if isinstance(value, (jax.Array, np.ndarray)) else [value]
    if settings.dry is not None and len(settings.dry) == 4:
        lists["dry"] = (*settings.dry[:3], [settings.dry[3]])
    rules = dataclasses.replace(settings, **lists).rules(1, vocab_size)
    ends, stops = np.asarray(rules.eos), np.asarray(rules.stop)
    more = [id_lists.power(n) - n for n in (ends.shape[1], *stops.shape[1:])]
    padded: dict[str, Any] = {
        "eos": np.pad(ends, ((0, 0), (0, more[0])), constant_values=-1),
        "stop": np.pad(stops, ((0, 0), (0, more[1]), (more[2], 0)), constant_values=-1),
    }
    return dataclasses.replace(rules, **padded)


def signature(rules: Rules) -> Hashable:
    """Equal for rules whose rows may stand in one program: the same transforms, shapes, and shared tables."""
    leaves, tree = jax.tree.flatten(rules, is_leaf=lambda x: isinstance(x, Shared))
    return tree, tuple(_described(leaf) for leaf in leaves)


def _described(leaf: Any) -> Hashable:
    if isinstance(leaf, Shared):
        digest = hashlib.sha256()
        for table in jax.tree.leaves(leaf):
            array = np.ascontiguousarray(table)
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        return digest.digest()
    return np.shape(leaf)[1:], str(leaf.dtype)


def check(request: Request, vocab_size: int) -> np.ndarray:
    """The prompt as an array. ValueError for what no engine can take."""
    prompt = np.asarray(request.prompt)
    checks.require(prompt.ndim == 1 and prompt.size > 0, "prompt", "a non-empty list of ids", request.prompt)
    checks.token_ids(prompt, vocab_size, "prompt")
    checks.require(
        request.settings.top_logprobs <= vocab_size, "top_logprobs", f"in [0, {vocab_size}]", request.settings
    )
    return prompt.astype(np.int32)


def cut(out: Generated, n: int) -> Generated:
    """``out`` (one row, NumPy) ended by a stop after its first ``n`` tokens."""
    past = np.arange(out.tokens.shape[1]) >= n

    def fill(x: Any, value: Any) -> Any:
        return (
            None if x is None else np.where(past.reshape((1, -1) + (1,) * (x.ndim - 2)), np.asarray(value, x.dtype), x)
        )

    length: Any = np.full_like(out.length, n)
    finish: Any = np.full_like(out.finish, Finish.STOP)
    return dataclasses.replace(
        out,
        tokens=fill(out.tokens, -1),
        length=length,
        logprob=fill(out.logprob, 0),
        processed_logprob=fill(out.processed_logprob, 0),
        margin=fill(out.margin, np.inf),
        set_margin=fill(out.set_margin, np.inf),
        finish=finish,
        top_ids=fill(out.top_ids, -1),
        top_logprobs=fill(out.top_logprobs, 0),
    )
