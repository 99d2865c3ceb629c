"""The constraint fields of ``Settings`` as transforms of a batch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jaxdecode.checks import is_concrete, require, shorten, token_ids
from jaxdecode.constraints.grammar import NEVER, Grammar, grammar_of_ids
from jaxdecode.transforms import LogitsTransform, id_lists
from jaxdecode.transforms.automaton import automaton, prefix

__all__ = ["check_constraints", "constraint_transforms"]

Tables = tuple[np.ndarray, np.ndarray, np.ndarray]


def check_constraints(regex: Any, json_schema: Any, choices: Any, stop: Any) -> None:
    """At most one of them, of the right kind, and no stop sequences, which would cut a match."""
    given = [n for n, v in (("regex", regex), ("json_schema", json_schema), ("choices", choices)) if v is not None]
    require(len(given) <= 1, " and ".join(given), "one of them", "several")
    if given:
        require(
            not is_concrete(stop) or len(stop) == 0, "stop", f"none beside {given[0]}, whose match it would cut", stop
        )
    for name, value in (("regex", regex), ("json_schema", json_schema)):
        if value is not None and not isinstance(value, Grammar):
            raise ValueError(
                f"{name}: expected a compiled grammar, constraints.{name}(..., tokenizer), got {shorten(value)}; "
                "the settings method of a loaded model compiles it"
            )


def constraint_transforms(
    regex: Any,
    json_schema: Any,
    choices: Any,
    first: Any,
    *,
    eos: Any,
    limit: Any,
    vocab_size: int,
    banned: np.ndarray | None = None,
    least: Any = 0,
) -> dict[str, LogitsTransform]:
    """Masks by name, for eos[B,E] and limit[B].

    banned: bool[V] or [B,V], tokens that other masks forbid at every step. least: tokens before an end id is allowed,
    scalar or [B]. Both count in what can still be finished, for each row alone. ValueError if nothing would match
    within the limit, after the prefix, or without an end id.
    """
    out: dict[str, LogitsTransform] = {}
    ids = None if first is None else _rows_of_ids(first, len(eos), vocab_size)
    if ids is not None and ids.shape[1]:
        out["prefix"] = prefix(ids)
        require(bool(np.all((ids >= 0).sum(axis=1) <= np.asarray(limit))), "prefix", "one within max_new_tokens", limit)
    grammar = regex if regex is not None else json_schema
    if choices is not None:
        grammar = choices if isinstance(choices, Grammar) else _trie(_options(choices), vocab_size)
    if grammar is None:
        return out
    if not (is_concrete(eos) and is_concrete(least)):
        raise ValueError(f"eos, min_new_tokens: expected concrete ones beside {grammar.name}, got a traced array")
    known = grammar.vocab_size
    require(known <= vocab_size, grammar.name, f"a grammar over at most the model's {vocab_size} ids", known)
    eos, rows = np.asarray(eos), np.arange(len(eos))[:, None]
    never = np.zeros((len(eos), vocab_size), bool) | (False if banned is None else banned)
    eos = np.where(never[rows, eos], -1, eos)  # where eos is -1 it stays -1
    require(
        bool(np.all(np.any(eos >= 0, axis=1))), "eos", f"an end id beside {grammar.name} that is not banned", "none"
    )
    for row, ends in zip(never, eos, strict=True):  # end ids that stand for text too only end
        row[ends[ends >= 0]] = True
    never = never[:, :known] & (grammar.class_of_token > 0)
    # One size class for few numbers of tokens: they are data of one program.
    most = (1 << int(np.max(least, initial=0)).bit_length()) - 1
    bans, group = np.unique(np.packbits(never, axis=1), axis=0, return_inverse=True)
    group = group.reshape(-1).astype(np.int32)
    tables = _tables(grammar, tuple(row.tobytes() for row in bans), most, vocab_size)
    _check_budget(grammar, tables, group, ids, limit, np.broadcast_to(least, (len(eos),)))
    out["grammar"] = automaton(*tables, start=np.int32(grammar.start), eos=eos, least=least, group=group)
    return out


def _rows_of_ids(first: Any, batch_size: int, vocab_size: int) -> np.ndarray:
    """A list of ids for all rows, or one list per row, as [B,L] padded with -1."""
    nested = any(np.ndim(x) for x in first)
    rows = [list(r) for r in first] if nested else [list(first)] * batch_size
    require(len(rows) == batch_size, "prefix", f"ids, or {batch_size} lists of them", len(rows))
    out = np.full((batch_size, max(map(len, rows), default=0)), -1, np.int32)
    for row, ids in zip(out, rows, strict=True):
        if ids:
            token_ids(np.asarray(ids), vocab_size, "prefix")
            row[: len(ids)] = ids
    return out


def _options(choices: Any) -> tuple[tuple[int, ...], ...]:
    ok = isinstance(choices, (list, tuple)) and all(isinstance(o, (list, tuple, np.ndarray)) for o in choices)
    require(ok, "choices", "lists of ids, or a compiled grammar", choices)
    for option in choices:
        token_ids(np.asarray(option, None if len(option) else np.int32), 2**31, "choices")
    return tuple(tuple(int(i) for i in option) for option in choices)


@functools.lru_cache(maxsize=32)
def _trie(options: tuple[tuple[int, ...], ...], vocab_size: int) -> Grammar:
    return grammar_of_ids(options, vocab_size, "choices")


def _check_budget(
    grammar: Grammar, tables: Tables, group: np.ndarray, first: np.ndarray | None, limit: Any, least: np.ndarray
) -> None:
    """Every row can finish: the prefix begins a match, and the rest of the shortest one fits, end id included."""
    step, classes, distances = tables
    for row, (most, owed, g) in enumerate(zip(np.asarray(limit), least, group, strict=True)):
        distance = distances[g]
        require(distance[0, grammar.start] < NEVER, grammar.name, "a match without the tokens that are banned", "none")
        ids = [] if first is None else [int(i) for i in first[row] if i >= 0]
        state = grammar.start
        for token in ids:
            state = int(step[state, classes[g, token]])
        require(state != 0, "prefix", f"one that begins a match of {grammar.name}", ids)
        needed = len(ids) + int(distance[max(0, int(owed) - len(ids)), state])
        require(needed < NEVER, "min_new_tokens", f"one that some match of {grammar.name} reaches", int(owed))
        require(needed <= most, "max_new_tokens", f"at least {needed}, the shortest match and an end id", int(most))


@functools.lru_cache(maxsize=32)
def _tables(grammar: Grammar, bans: tuple[bytes, ...], least: int, vocab_size: int) -> Tables:
    """The tables of the automaton in a size class, so that grammars of like size share a compiled program.

    bans: the packed bool[V] of each group of rows; what is banned alone is another class, and so another distance.
    """
    states, classes = (max(64, 1 << (n - 1).bit_length()) for n in grammar.step.shape)
    more = (states - grammar.step.shape[0], classes - grammar.step.shape[1])
    groups = [
        grammar.without(np.unpackbits(np.frombuffer(ban, np.uint8), count=grammar.vocab_size).astype(bool))
        for ban in bans
    ]
    groups += groups[:1] * (id_lists.power(len(groups)) - len(groups))
    return (
        np.pad(grammar.step, ((0, more[0]), (0, more[1]))),
        np.stack([np.pad(g.class_of_token, (0, vocab_size - g.vocab_size)) for g in groups]),
        np.stack([np.pad(g.distances(least), ((0, 0), (0, more[0])), constant_values=NEVER) for g in groups]),
    )
