"""`jaxdecode generate`: one prompt, one continuation or several."""

from __future__ import annotations

import dataclasses
import json as json_text
import sys
from typing import TYPE_CHECKING, Any

import typer

from jaxdecode.cli import constraining, drafting
from jaxdecode.cli.choices import (
    CANCELLED,
    FAILURES,
    Request,
    Written,
    best,
    choice,
    log_probabilities,
    numbers,
)
from jaxdecode.cli.compilation import keep_compiled_programs
from jaxdecode.cli.decoding import TEXTS, fields
from jaxdecode.cli.files import check_target, write_json
from jaxdecode.cli.meshing import over_mesh
from jaxdecode.cli.processes import Joining, Place, together
from jaxdecode.cli.record import recorded
from jaxdecode.cli.terminal import BadInput, Progress, bad_input, deferred_interrupt, show, styled

if TYPE_CHECKING:
    from jaxdecode.base import Generated, Model, Params
    from jaxdecode.checkpoint import Loaded
    from jaxdecode.cli.writing import RowText
    from jaxdecode.text.tokenizer import Tokenizer

__all__ = ["run"]


def run(prompt: str | None, request: Request, joining: Joining) -> int:
    """Write to stdout what the model says. Returns the exit code."""
    check(request)
    if joining.coordinator is not None and request.mesh is None:
        raise BadInput("--coordinator: expected a --mesh of all processes' devices, over which they write one text")
    text = read_prompt(prompt)
    if request.compile_cache:
        keep_compiled_programs()
    return together(joining, lambda place: _run(text, request, place))


def _run(text: str, request: Request, place: Place) -> int:
    """All processes compute the same; the first one tells it."""
    progress = Progress()
    if place.process > 0:
        request = request._replace(stream=False, record=None)
        progress.stop()
    try:
        progress("starting")
        import jaxdecode

        with over_mesh(request.mesh) as spread, bad_input():
            target = None if request.record is None else check_target(request.record)
            numbers = {k: v for k, v in settings_of(request).items() if k not in TEXTS}
            jaxdecode.Settings(**numbers)  # a number out of range should not wait for the model
            request = request._replace(constraints=constraining.read(request.constraints))
            loading = {**request.loading, **spread}
            loaded = jaxdecode.load(request.model, **loading, progress=progress)
            draft = drafting.load_draft(loaded, request.model, request.draft, loading, progress)
            request = request._replace(settings=fields(request.settings, loaded.tokenizer))
            ids = encode(loaded, text, request)
            grammar = constraining.compiled(loaded, request.constraints, progress)
        with over_mesh(request.mesh):
            written = write(loaded, ids, grammar, request, progress, draft)
        if request.best_of is not None:
            written = best(written, request.num_samples or 1)
        choices = [choice(loaded.tokenizer, written, row, request) for row in range(len(written.texts))]
        if target is not None:
            with bad_input():
                write_json(target, recorded(loaded.tokenizer, text, ids, written, request, progress))
    finally:
        progress.stop()
    if place.process == 0:
        tell(loaded.tokenizer, choices, len(ids), request, written)
    failed = next((c["finish"] for c in choices if c["finish"] in FAILURES), None)
    if failed is not None:
        raise typer.TyperException(f"the text ends early ({failed}): {FAILURES[failed]}")
    return 130 if any(c["finish"] == CANCELLED for c in choices) else 0


def check(request: Request) -> None:
    """Refuse what is wrong whatever the model."""
    if request.system is not None and not request.chat:
        raise BadInput("--system needs --chat: raw text has no system message")
    if not 0 <= request.seed < 2**32:
        raise BadInput(f"--seed: expected a number in [0, 2^32), got {request.seed}")
    if request.settings["without_replacement"] and request.num_samples is None:
        raise BadInput("--without-replacement needs --num-samples: how many texts")
    if request.settings["without_replacement"] and request.settings["temperature"] == 0:
        raise BadInput("--without-replacement: expected a --temperature above 0 (1: the model's own law), got 0")
    if request.best_of is not None:
        if request.settings["beams"] is not None or request.settings["without_replacement"]:
            raise BadInput("--best-of: expected neither --beams nor --without-replacement, which rank by themselves")
        if request.best_of < (request.num_samples or 1):
            raise BadInput(f"--best-of: expected at least --num-samples {request.num_samples}, got {request.best_of}")
        if request.settings["temperature"] == 0:
            raise BadInput("--best-of: expected a --temperature above 0, without which all samples are the same")
    if "" in request.stops:
        raise BadInput("--stop: expected a text, got an empty one")
    constraining.check(request.constraints, request.stops)
    drafting.check(request.draft, request.settings)


def settings_of(request: Request) -> dict[str, Any]:
    """Fields of ``Settings``."""
    rows = request.best_of or request.num_samples or 1
    more = {"num_samples": rows, "top_logprobs": request.top_logprobs, "draft_length": request.draft.length}
    return {**request.settings, **more}


def read_prompt(argument: str | None) -> str:
    """The prompt given as an argument, or stdin (UTF-8) without the line end that closes it."""
    if argument is not None and argument != "-":
        prompt = argument
    elif argument is None and sys.stdin.isatty():
        raise BadInput("PROMPT: expected a text, or one piped into stdin, got none")
    else:
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
        except UnicodeDecodeError as error:
            raise BadInput(f"PROMPT: expected UTF-8 text, got {error}") from None
    if not prompt:
        raise BadInput("PROMPT: expected a text, got an empty one")
    return prompt


def encode(loaded: Loaded, text: str, request: Request) -> list[int]:
    """The prompt as ids: in the model's chat format, or as raw text."""
    if not request.chat:
        return loaded.tokenizer.encode(text)
    system = [] if request.system is None else [{"role": "system", "content": request.system}]
    return loaded.tokenizer.chat([*system, {"role": "user", "content": text}])


def write(
    loaded: Loaded,
    ids: list[int],
    grammar: dict[str, Any],
    request: Request,
    progress: Progress,
    draft: tuple[Model, Params] | None = None,
) -> Written:
    """Decode after ``ids``, one step at a time, printing the pieces if it streams; Ctrl-C ends it early."""
    import jax

    from jaxdecode.base import Finish, fetch
    from jaxdecode.cli.writing import RowText
    from jaxdecode.generation import start
    from jaxdecode.session import Steps

    progress("compiling")
    stops, continuation = request.stops, not request.chat
    rows = request.rows
    texts = [RowText(loaded.tokenizer, stops=stops, continuation=continuation) for _ in range(rows)]

    def take(piece: str) -> None:
        if request.streams and piece:
            progress.stop()
            show(piece)

    with deferred_interrupt() as interrupted:
        with bad_input():
            settings = loaded.settings(**settings_of(request), **grammar)
            key = jax.random.key(request.seed)
            decoder, state = start(loaded.model, loaded.params, [ids], key=key, settings=settings, draft=draft)
        keys = fetch(jax.random.key_data(state.keys)).reshape(len(state.keys), -1).tolist()
        steps = Steps(decoder, loaded.params if draft is None else (loaded.params, draft[1]), state)
        for done, step in enumerate(steps, 1):
            info = fetch(step)
            alive = [f == Finish.RUNNING for f in info.finish]
            if settings.width is None:  # beams have no tokens before the end
                for row, text in enumerate(texts):
                    take(text.push(info.tokens[row, : info.count[row]].tolist()))
                    alive[row] &= not text.stopped
            if not request.streams:
                done = max(done, *(len(t.tokens) for t in texts))
                progress("writing", done / request.settings["max_new_tokens"])
            if interrupted() or not any(alive):
                break
    out = fetch(steps.result())
    if settings.width is not None:
        return hypotheses(texts, out, keys)
    for text in texts:
        take(text.flush())
    return Written(texts, [t.finish(int(f)) for t, f in zip(texts, out.finish, strict=True)], out, keys)


def hypotheses(texts: list[RowText], out: Generated, keys: list[list[int]]) -> Written:
    """The hypotheses of the one prompt that exist."""
    assert out.count is not None
    texts = texts[: int(out.count[0])]
    for text, ids in zip(texts, out.to_lists()[0], strict=True):
        text.push(ids)
        text.flush()
    finish = [text.finish(int(code)) for text, code in zip(texts, out.finish[0], strict=False)]
    known: dict[str, Any] = {} if out.certified is None else {"certified": bool(out.certified[0])}
    if out.certificate_gap is not None:
        known["certificate_gap"] = numbers(out.certificate_gap)[0]
    per_text = {f.name: getattr(out, f.name) for f in dataclasses.fields(out)}
    flat = {name: x[0] if x is not None and x.ndim > 1 else x for name, x in per_text.items()}
    return Written(texts, finish, dataclasses.replace(out, **flat), keys, **known)


def tell(
    tokenizer: Tokenizer, choices: list[dict[str, Any]], prompt_tokens: int, request: Request, written: Written
) -> None:
    """Print the result: what streaming did not print yet, or JSON."""
    if request.json:
        about = {"model": request.model, "prompt_tokens": prompt_tokens}
        if written.certified is not None:
            about |= {"certified": written.certified, "certificate_gap": written.certificate_gap}
        result = {**about, **choices[0]} if request.several is None else {**about, "choices": choices}
        show(json_text.dumps(result, ensure_ascii=False) + "\n")
        return
    for i, told in enumerate(choices):
        if request.several is not None:
            score = f", score {float(told['score']):.4f}" if "score" in told else ""
            proven = ", proven to be the best" if i == 0 and written.certified else ""
            typer.echo(styled(f"--- {i + 1} of {len(choices)}: {told['finish']}{score}{proven}", "bold"))
        show("\n" if request.streams else told["text"] + "\n")
        if request.logprobs:
            typer.echo("\n" + log_probabilities(tokenizer, told), nl=False)
    if (line := drafting.acceptance(choices)) is not None:
        typer.echo(line, err=True)
