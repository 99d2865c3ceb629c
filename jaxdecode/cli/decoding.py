"""The settings beyond temperature, top-k, top-p and min-p: their options, how they are written, and what they mean.

`generate` and `chat` have the same ones. No jax here: a help page should not wait for it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from jaxdecode.cli.terminal import bad_input

if TYPE_CHECKING:
    from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["CONSTRAINTS", "DRAFTS", "SETTINGS", "TEXTS", "GroupedCommand", "fields", "parse", "shown", "with_decoding"]

CUTS, PENALTIES, BANS = "More ways to cut the law", "Penalties", "Bans and forced tokens"
SHAPE = "What the whole text may be"
DRAFTS = "Drafts: the same law, sooner where much is copied"


class Kind(NamedTuple):
    """How a setting is written: ``size`` numbers of type ``of`` with commas (0: any), or pairs KEY=NUMBER."""

    of: type[int] | type[float] = float
    size: int = 1
    pairs: bool = False


class Option(NamedTuple):
    """A setting of ``Settings`` as an option."""

    kind: Kind
    panel: str
    metavar: str
    help: str


FLOAT, WHOLE = Kind(), Kind(int)
SETTINGS = {
    "typical_p": Option(FLOAT, CUTS, "P", "Draw from the tokens of the most typical surprise, P together."),
    "epsilon": Option(FLOAT, CUTS, "E", "Draw from tokens with at least probability E."),
    "eta": Option(FLOAT, CUTS, "E", "The same, with a lower limit where the law is flat."),
    "top_n_sigma": Option(FLOAT, CUTS, "N", "Draw from logits within N standard deviations of the largest."),
    "p_less": Option(WHOLE, CUTS, "0|1", "1: draw from tokens at least as probable as that two draws agree."),
    "xtc": Option(Kind(size=2), CUTS, "P,T", "With probability P, drop all but the last token of at least T."),
    "mirostat": Option(Kind(size=2), CUTS, "TAU,RATE", "Mirostat 2: a surprise of TAU bits; no other cut beside it."),
    "dynamic_temperature": Option(
        Kind(size=2), CUTS, "SPREAD,EXP", "Temperature up to SPREAD lower or higher, as the entropy is."
    ),
    "repetition_penalty": Option(FLOAT, PENALTIES, "R", "Divide logits of tokens seen by R (multiply negative ones)."),
    "presence_penalty": Option(FLOAT, PENALTIES, "A", "Subtract A from logits of tokens written."),
    "frequency_penalty": Option(FLOAT, PENALTIES, "B", "Subtract B each time a token was written."),
    "dry": Option(
        Kind(size=3), PENALTIES, "M,BASE,LEN", "Subtract M * BASE^(n - LEN) where n tokens would be repeated."
    ),
    "logit_bias": Option(Kind(size=0, pairs=True), PENALTIES, "ID=X,...", "Add X to the logit of a token."),
    "no_repeat_ngram": Option(WHOLE, BANS, "N", "Never repeat N tokens in a row."),
    "allowed_ids": Option(Kind(int, 0), BANS, "ID,...", "Only these tokens."),
    "banned_ids": Option(Kind(int, 0), BANS, "ID,...", "None of these tokens."),
    "forced": Option(Kind(int, 0, True), BANS, "PLACE=ID,...", "This token at that place (0 first, -1 last)."),
    "min_new_tokens": Option(WHOLE, BANS, "N", "No end before N tokens."),
    "prompt_lookup": Option(WHOLE, DRAFTS, "N", "Draft up to N tokens from what stood in prompt and output before."),
}
TEXTS = {  # given as texts, which need the tokenizer; each may be given several times
    "bad_words": Option(FLOAT, BANS, "TEXT", "Never write these tokens in a row; may be given several times."),
    "dry_breakers": Option(FLOAT, PENALTIES, "TEXT", "The last token of TEXT ends a stretch that --dry counts."),
}
CONSTRAINTS = {  # texts too, which are compiled for the tokenizer
    "json_schema": Option(FLOAT, SHAPE, "FILE", "Write JSON that the JSON Schema in this file accepts."),
    "regex": Option(FLOAT, SHAPE, "PATTERN", "Write a text that this pattern matches as a whole."),
    "choices": Option(FLOAT, SHAPE, "TEXT", "Write one of these texts; give it once for each."),
    "prefix": Option(FLOAT, SHAPE, "TEXT", "Begin with this text."),
}
REPEATED = {*TEXTS, "choices"}  # options that may be given several times


def parse(name: str, text: str) -> Any:
    """The value of the setting ``name`` as ``Settings`` takes it. ValueError for what is written in another way."""
    kind = SETTINGS[name].kind
    try:
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        if kind.pairs:
            split = [part.split("=", 1) for part in parts]
            return tuple((int(key), kind.of(value)) for key, value in split)
        values = tuple(kind.of(part) for part in parts)
        if kind.size == 3:  # dry: the last one is a length
            values = (*values[:2], *(int(part) for part in parts[2:]))
    except ValueError:
        raise ValueError(f"{name}: expected {SETTINGS[name].metavar}, got {text}") from None
    if kind.size and len(values) != kind.size:
        raise ValueError(f"{name}: expected {SETTINGS[name].metavar}, got {text}")
    return values[0] if kind.size == 1 else values


def shown(value: Any) -> str:
    """A value as ``parse`` reads it."""
    if value is None:
        return "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join("=".join(map(str, x)) if isinstance(x, Sequence) else str(x) for x in value)
    return str(value)


def fields(settings: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """``settings`` with texts as ids: fields of ``jaxdecode.Settings`` that JSON can hold."""
    found = dict(settings)
    breakers = found.pop("dry_breakers", None)
    if found.get("bad_words"):
        found["bad_words"] = [tokenizer.encode(text, special=False, bos=False) for text in found["bad_words"]]
    if breakers and found.get("dry"):
        found["dry"] = (*found["dry"], [tokenizer.encode(text, special=False, bos=False)[-1] for text in breakers])
    return found


def with_decoding(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option for each of these settings; it gets what was given as ``more``."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "more"]
    added = []
    for name, option in (SETTINGS | TEXTS | CONSTRAINTS).items():
        kind: Any = list[str] | None if name in REPEATED else str | None
        info = typer.Option(metavar=option.metavar, help=option.help, rich_help_panel=option.panel)
        added.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info])
        )

    @functools.wraps(command)
    def run(**given: Any) -> None:
        more: dict[str, Any] = {}
        with bad_input():
            for name in (p.name for p in added):
                value = given.pop(name)
                if name in TEXTS and "" in (value or ()):
                    raise ValueError(f"{name}: expected a text, got an empty one")
                if value is not None:
                    more[name] = (
                        tuple(value) if name in REPEATED else value if name in CONSTRAINTS else parse(name, value)
                    )
            if "dry_breakers" in more and "dry" not in more:
                raise ValueError("dry_breakers: expected dry beside it, got none")
        command(**given, more=more)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return run


class GroupedCommand(TyperCommand):
    """A command whose help lists its options in groups, by ``rich_help_panel``, without rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            title = "Arguments" if parameter.param_type_name == "argument" else None
            if record is not None:
                groups.setdefault(title or getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
