"""`jaxdecode eval`: what a model says of a text, alone or beside another."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from jaxdecode.cli.choices import token_text
from jaxdecode.cli.compilation import keep_compiled_programs
from jaxdecode.cli.files import check_target
from jaxdecode.cli.terminal import Progress, bad_input, styled, visible

if TYPE_CHECKING:
    from jaxdecode.checkpoint import Loaded
    from jaxdecode.evaluation import Evaluation

__all__ = ["Asked", "described", "read_ids", "run"]

FORMAT, VERSION = "jaxdecode-eval", 1


class Asked(NamedTuple):
    """What the options of the command say."""

    model: str
    text: str
    window: int
    stride: int | None
    max_tokens: int | None
    against: str | None
    table: str | None
    dtype: str
    quantize: Any
    cache_dtype: str | None
    context_length: int | None
    compile_cache: bool
    json: bool


def run(asked: Asked) -> int:
    """Measure and print. Returns the exit code."""
    progress = Progress()
    try:
        progress("starting")
        if asked.compile_cache:
            keep_compiled_programs()
        import jaxdecode
        from jaxdecode.cli.record import versions
        from jaxdecode.evaluation import evaluate

        with bad_input():
            target = None if asked.table is None else check_target(asked.table)
            names = ("dtype", "cache_dtype", "context_length")
            how: Any = {name: getattr(asked, name) for name in names}
            loaded = jaxdecode.load(asked.model, **how, quantize=asked.quantize, progress=progress)
            source = asked.model if asked.against is None and asked.quantize is not None else asked.against
            reference = None if source is None else jaxdecode.load(source, **how, progress=progress)
            ids, digest = read_ids(asked.text, loaded, asked.max_tokens)
            if reference is not None and read_ids(asked.text, reference, asked.max_tokens)[0] != ids:
                raise ValueError(
                    f"--against: expected a model with the tokens of {asked.model}, got others in {source}"
                )
            models = [(one.model, one.params) for one in (reference, loaded) if one is not None]
            found = evaluate(models, ids, window=asked.window, stride=asked.stride, progress=progress)
            if target is not None:
                _write_table(target, loaded, ids, found)
    finally:
        progress.stop()
    about = {"format": FORMAT, "version": VERSION, "model": asked.model, "dtype": asked.dtype}
    about |= {"quantize": None if asked.quantize is None else str(asked.quantize), "cache_dtype": asked.cache_dtype}
    about |= {"context_length": asked.context_length}
    where = {"text": asked.text, "sha256": digest, "tokens": len(ids), "window": asked.window}
    where |= {"stride": asked.stride or asked.window, "against": source}
    told = {**about, **where, **described(found), "versions": versions()}
    typer.echo(json_text.dumps(told, ensure_ascii=False) if asked.json else as_text(told), nl=asked.json)
    return 0


def read_ids(file: str, loaded: Loaded, most: int | None) -> tuple[list[int], str]:
    """The first ids of a text file, and the file's SHA-256. ValueError, OSError: no such text, or fewer than 2 ids."""
    import hashlib

    path = Path(file).expanduser()
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, got {error}") from None
    ids = loaded.tokenizer.encode(text, special=False)[:most]
    if len(ids) < 2:
        raise ValueError(f"{path}: expected a text of at least 2 tokens, got {len(ids)}")
    return ids, hashlib.sha256(data).hexdigest()


def described(found: list[Evaluation]) -> dict[str, Any]:
    """The last of one or two evaluations as JSON, the first being its reference."""
    last = found[-1]
    told: dict[str, Any] = {"counted": last.counted, "perplexity": last.perplexity}
    if len(found) > 1:
        told |= {"reference_perplexity": found[0].perplexity, "kl": last.kl, "agreement": last.agreement}
    return told


def as_text(told: dict[str, Any]) -> str:
    """The same for a reader."""
    rows = [["perplexity", f"{told['perplexity']:.4f}"]]
    if "kl" in told:
        change = told["perplexity"] / told["reference_perplexity"] - 1
        rows += [[f"perplexity of {told['against']}", f"{told['reference_perplexity']:.4f}"]]
        rows += [["change", f"{change:+.2%}"], ["KL divergence", f"{told['kl']:.5f} nats a token"]]
        rows += [["same most probable token", f"{told['agreement']:.2%}"]]
    name = f"{told['model']} in {told['quantize'] or told['dtype']}"
    wide = max(len(label) for label, _ in rows)
    lines = "".join(f"  {visible(label):<{wide}}  {value}\n" for label, value in rows)
    read = f"{told['counted']:,} of {told['tokens']:,} tokens, windows of {told['window']}, stride {told['stride']}"
    return f"{styled(visible(name), 'bold')} on {visible(told['text'])}: {read}\n{lines}"


def _write_table(path: Path, loaded: Loaded, ids: list[int], found: list[Evaluation]) -> None:
    """A line for every token that counts: place, id, text as JSON, log probability, and beside a reference more."""
    last, first = found[-1].tokens, found[0].tokens
    header = ["place", "id", "token", "logprob"]
    with path.open("w", encoding="utf-8") as file:
        beside = last.kl is not None
        file.write("\t".join([*header, "reference_logprob", "kl", "agrees"] if beside else header) + "\n")
        for i, place in enumerate(last.place.tolist()):
            token = ids[place]
            text = json_text.dumps(token_text(loaded.tokenizer, token), ensure_ascii=False)
            cells = [str(place), str(token), text, f"{last.logprob[i]:.6f}"]
            if last.kl is not None and last.agrees is not None:
                cells += [f"{first.logprob[i]:.6f}", f"{last.kl[i]:.6g}", str(int(last.agrees[i]))]
            file.write("\t".join(cells) + "\n")
