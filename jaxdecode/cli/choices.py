"""One run of `jaxdecode generate`: what was asked for, what came out, and how that is told."""

from __future__ import annotations

import dataclasses
import json as json_text
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxdecode.cli.drafting import Draft
from jaxdecode.cli.terminal import table, visible

if TYPE_CHECKING:
    from jaxdecode.base import Generated
    from jaxdecode.cli.writing import RowText
    from jaxdecode.quant import Scheme
    from jaxdecode.text.tokenizer import Tokenizer

__all__ = [
    "CANCELLED",
    "FAILURES",
    "Request",
    "Written",
    "best",
    "choice",
    "log_probabilities",
    "numbers",
    "token_text",
]

CANCELLED = "cancelled"  # beside the names of ``Finish``: Ctrl-C ended it
FAILURES = {
    "nan": "the model's logits held NaN or infinity",
    "no_token": "no token was left to choose from",
    "invalid": "a setting was out of range",
}


class Request(NamedTuple):
    """What the options of the command say. ``settings``: fields of ``jaxdecode.Settings``.

    num_samples: None for one completion in no list, unless there are beams. best_of: write so many, tell the best.
    constraints: what was given of them, by name: a schema's file (once read, the schema), a pattern, texts. logprobs:
    tell them; top_logprobs: beside those of this many ids. draft: another model that drafts. mesh: None for one device.
    """

    model: str
    dtype: str
    quantize: Scheme | None
    chat: bool
    system: str | None
    seed: int
    settings: dict[str, Any]
    num_samples: int | None
    best_of: int | None
    logprobs: bool
    top_logprobs: int
    stops: tuple[str, ...]
    constraints: dict[str, Any]
    record: str | None
    json: bool
    stream: bool
    compile_cache: bool
    draft: Draft = Draft()
    cache_dtype: str | None = None
    context_length: int | None = None
    mesh: str | None = None
    steady: bool = False

    @property
    def loading(self) -> dict[str, Any]:
        """How a model is loaded: arguments of ``jaxdecode.load``."""
        names = ("dtype", "quantize", "cache_dtype", "context_length", "steady")
        return {name: getattr(self, name) for name in names}

    @property
    def several(self) -> int | None:
        """How many completions were asked for; None for one in no list."""
        beams: int | None = self.settings["beams"]
        return self.num_samples if beams is None else beams

    @property
    def streams(self) -> bool:
        """Whether text is printed while it grows: only a single one is."""
        return self.stream and not self.json and self.several is None and self.best_of is None

    @property
    def rows(self) -> int:
        """Texts to write."""
        return self.best_of or self.several or 1


class Written(NamedTuple):
    """The rows' texts, how each ended, their numbers (a row each), and the words of the keys.

    certified, certificate_gap: of beams, about the first of them.
    """

    texts: list[RowText]
    finish: list[str]
    out: Generated
    keys: list[list[int]]
    certified: bool | None = None
    certificate_gap: float | None = None


def best(written: Written, k: int) -> Written:
    """The k texts with the largest sums of log probabilities under the model's own law, best first.

    Only tokens of the text count: a row goes on after a stop string, until all rows have ended.
    """
    import jax

    from jaxdecode.scoring import ranking

    out = written.out
    length: Any = np.array([len(text.tokens) for text in written.texts])
    logprob: Any = np.where(np.arange(out.logprob.shape[1]) < length[:, None], out.logprob, 0)
    one = dataclasses.replace(out, length=length, logprob=logprob)
    order = np.asarray(ranking(jax.tree.map(lambda x: x[None], one)))[0, :k]
    return Written(
        [written.texts[i] for i in order],
        [written.finish[i] for i in order],
        jax.tree.map(lambda x: x[order], out),
        [written.keys[i] for i in order],
    )


def choice(tokenizer: Tokenizer, written: Written, row: int, request: Request) -> dict[str, Any]:
    """One completion as JSON."""
    text, out = written.texts[row], written.out
    n = len(text.tokens)
    told = {"text": text.text, "tokens": text.tokens, "finish": written.finish[row], "completion_tokens": n}
    if out.log_weight is not None and request.settings["temperature"] > 0:
        told["log_weight"] = numbers(out.log_weight[row : row + 1])[0]
    for name in ("score", "gumbel"):
        if (values := getattr(out, name)) is not None:
            told[name] = numbers(values[row : row + 1])[0]
    if out.acceptance is not None:
        told["acceptance"] = {name: int(x[row]) for name, x in out.acceptance._asdict().items()}
    if request.logprobs:
        told["logprobs"] = numbers(out.logprob[row, :n])
        told["processed_logprobs"] = numbers(out.processed_logprob[row, :n])
    if request.top_logprobs:
        assert out.top_ids is not None
        assert out.top_logprobs is not None
        steps = zip(out.top_ids[row, :n].tolist(), out.top_logprobs[row, :n], strict=True)
        told["top_logprobs"] = [
            [
                {"id": i, "token": token_text(tokenizer, i), "logprob": p}
                for i, p in zip(ids, numbers(values), strict=True)
            ]
            for ids, values in steps
        ]
    return told


def log_probabilities(tokenizer: Tokenizer, told: dict[str, Any]) -> str:
    """A line for each token of a choice: its text, id, log probability, probability, and the most probable ids."""
    rows = []
    for i, (token, logprob) in enumerate(zip(told["tokens"], told["logprobs"], strict=True)):
        row = [_quoted(token_text(tokenizer, token)), str(token), f"{float(logprob):.4f}", _percent(logprob)]
        if "top_logprobs" in told:
            row.append("  ".join(f"{_quoted(b['token'])} {_percent(b['logprob'])}" for b in told["top_logprobs"][i]))
        rows.append(row)
    header = ["token", "id", "log probability", "probability"]
    return table([*header, "most probable"] if "top_logprobs" in told else header, rows, left=(0, 4))


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """What one id stands for; bytes that are no text alone become U+FFFD."""
    return tokenizer.id_to_bytes(token, skip_special_tokens=False).decode("utf-8", "replace")


def numbers(values: Any) -> list[float | str]:
    """Floats as JSON can hold them: each as the shortest text of its own width, and "inf", "-inf" or "nan"."""
    found = [float(str(x)) for x in np.asarray(values)]
    return [x if math.isfinite(x) else str(x) for x in found]


def _quoted(text: str) -> str:
    return visible(json_text.dumps(text, ensure_ascii=False))


def _percent(logprob: float | str) -> str:
    return f"{100 * math.exp(float(logprob)):.1f}%"
