"""A row's result is its own: alone, beside any neighbours, in any place, with any padding and any allocation.

On table models this is exact: every field is compared number for number.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdecode import Generated, Settings, generate
from jaxdecode.testing import markov_model, second_order_model

V, B, N, WIDTH = 6, 8, 6, 9
MODELS = {"markov": markov_model(), "second_order": second_order_model()}
RANDOM = np.random.default_rng(7)
TABLES = {
    "markov": (RANDOM.normal(size=(V, V)) * 3).round().astype(np.float32) / 2,  # halves: ties happen
    "second_order": (RANDOM.normal(size=(V, V, V)) * 3).round().astype(np.float32) / 2,
}


STOP = [[[i % V, (3 * i) % V]] for i in range(B)]


class Batch(NamedTuple):
    """Eight ragged prompts with settings, end ids and stop sequences of their own."""

    prompts: list[list[int]]
    fields: dict[str, Any]
    eos: np.ndarray
    stop: list[list[list[int]]]
    row_ids: Any
    seed: int

    def rows(self, places: list[int]) -> Batch:
        """Some of the rows, in another order."""
        return Batch(
            [self.prompts[i] for i in places],
            {name: x[places] for name, x in self.fields.items()},
            self.eos[places],
            [self.stop[i] for i in places],
            self.row_ids[places],
            self.seed,
        )

    def settings(self) -> Settings:
        return Settings(**self.fields, eos=self.eos, stop=self.stop)

    def array(self, padding_id: int, padding: str, width: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
        out = np.full((len(self.prompts), width), padding_id, np.int32)
        for row, prompt in zip(out, self.prompts, strict=True):
            row[slice(len(prompt)) if padding == "right" else slice(width - len(prompt), width)] = prompt
        return out, np.array([len(p) for p in self.prompts], np.int32)


def column(values: st.SearchStrategy[Any], dtype: Any) -> st.SearchStrategy[np.ndarray]:
    return st.lists(values, min_size=B, max_size=B).map(lambda x: np.array(x, dtype))


ids = st.integers(0, V - 1)
# Every row has one stop sequence of two ids, and some row's limit is N: all batches share one compiled program.
batches = st.builds(
    Batch,
    prompts=st.lists(st.lists(ids, min_size=1, max_size=WIDTH), min_size=B, max_size=B),
    fields=st.fixed_dictionaries(
        {
            "temperature": column(st.sampled_from([0.0, 0.3, 1.0, 4.0]), np.float32),
            "top_k": column(st.integers(0, V), np.int32),
            "top_p": column(st.sampled_from([1.0, 0.9, 0.5, 0.05]), np.float32),
            "min_p": column(st.sampled_from([0.0, 0.1, 0.5]), np.float32),
            "max_new_tokens": column(st.integers(0, N), np.int32).map(lambda n: np.r_[N, n[1:]].astype(np.int32)),
        }
    ),
    eos=column(st.lists(st.integers(-1, V - 1), min_size=2, max_size=2), np.int32),
    stop=st.lists(st.lists(st.lists(ids, min_size=2, max_size=2), min_size=1, max_size=1), min_size=B, max_size=B),
    row_ids=column(st.integers(0, 2**32 - 1), np.uint32),
    seed=st.integers(0, 2**32 - 1),
)


def decode(name: str, batch: Batch, prompts: Any = None, **options: Any) -> Generated:
    return generate(
        MODELS[name],
        TABLES[name],
        batch.prompts if prompts is None else prompts,
        key=jax.random.key(batch.seed),
        settings=batch.settings(),
        row_ids=batch.row_ids,
        **options,
    )


def assert_same(a: Generated, b: Generated, rows: Any = slice(None)) -> None:
    """Every field of ``a`` is that of ``b``'s ``rows``, number for number; N may differ."""
    for field in dataclasses.fields(Generated):
        if getattr(b, field.name) is None:
            continue
        x, y = np.asarray(getattr(a, field.name)), np.asarray(getattr(b, field.name))[rows]
        if x.ndim == 2:
            size = max(x.shape[1], y.shape[1])
            past = {"tokens": -1, "margin": np.inf, "set_margin": np.inf}.get(field.name, 0)
            x, y = (np.pad(z, ((0, 0), (0, size - z.shape[1])), constant_values=past) for z in (x, y))
        np.testing.assert_array_equal(x, y, err_msg=field.name)


everything = pytest.mark.parametrize("name", MODELS)
by_hypothesis = settings(max_examples=12, deadline=None, derandomize=True)


@everything
@by_hypothesis
@given(batch=batches, places=st.permutations(range(B)))
def test_another_place(name: str, batch: Batch, places: list[int]) -> None:
    assert_same(decode(name, batch.rows(places)), decode(name, batch), places)


@everything
@by_hypothesis
@given(batch=batches)
def test_alone(name: str, batch: Batch) -> None:
    """Without its neighbour of limit N the row's program is a shorter one, with another N."""
    limits = np.array([N, *[4] * (B - 1)], np.int32)
    batch = batch._replace(fields={**batch.fields, "max_new_tokens": limits})
    together = decode(name, batch)
    for b in range(1, B):
        assert_same(decode(name, batch.rows([b])), together, [b])


@everything
@by_hypothesis
@given(batch=batches, other=batches)
def test_other_neighbours(name: str, batch: Batch, other: Batch) -> None:
    """Rows 0 to 3 stay, the others become somebody else's."""
    left, right = [*range(4)], [*range(4, B)]
    a, b = batch.rows(left), other.rows(right)
    mixed = Batch(
        a.prompts + b.prompts,
        {k: np.concatenate([a.fields[k], b.fields[k]]) for k in a.fields},
        np.concatenate([a.eos, b.eos]),
        a.stop + b.stop,
        np.concatenate([a.row_ids, b.row_ids]),
        batch.seed,
    )
    assert_same(jax.tree.map(lambda x: x[:4], decode(name, mixed)), decode(name, batch), left)


@everything
@by_hypothesis
@given(batch=batches, where=st.sampled_from(["right", "left"]))
def test_padding_id_and_side(name: str, batch: Batch, where: Any) -> None:
    """Padded with 0, with an end id, with V - 1, on either side, to any width."""
    plain = decode(name, batch)
    for padding_id in (0, int(max(0, batch.eos[0, 0])), V - 1):
        for width in (WIDTH, 16):
            tokens, lengths = batch.array(padding_id, where, width)
            assert_same(decode(name, batch, tokens, lengths=lengths, padding=where), plain)


@everything
@by_hypothesis
@given(batch=batches)
def test_a_larger_allocation(name: str, batch: Batch) -> None:
    """More slots, and prompts padded to another length class."""
    wide, lengths = batch.array(V - 1, "right", 40)
    assert_same(decode(name, batch, wide, lengths=lengths, cache_len=200), decode(name, batch))


@functools.partial(jax.jit, static_argnames=("name", "padding"))
def traced(
    name: str, padding: Any, tokens: Any, lengths: Any, fields: Any, eos: Any, key: Any, row_ids: Any
) -> Generated:
    """Everything that may be known only at run time is."""
    return generate(
        MODELS[name],
        TABLES[name],
        tokens,
        lengths=lengths,
        padding=padding,
        key=key,
        settings=Settings(**fields, max_new_tokens=N, eos=eos, stop=STOP),
        row_ids=row_ids,
    )


@by_hypothesis
@given(batch=batches)
def test_under_jit(batch: Batch) -> None:
    name = "second_order"
    batch = batch._replace(fields={**batch.fields, "max_new_tokens": np.full(B, N, np.int32)}, stop=STOP)
    plain = decode(name, batch)
    fields = {k: x for k, x in batch.fields.items() if k != "max_new_tokens"}
    for where in ("right", "left"):
        tokens, lengths = batch.array(V - 1, where)
        key = jax.random.key(batch.seed)
        assert_same(traced(name, where, tokens, lengths, fields, batch.eos, key, batch.row_ids), plain)
