"""`jaxdecode generate`: one prompt, one continuation."""

from __future__ import annotations

import json as json_text
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from jaxdecode.cli.compilation import keep_compiled_programs
from jaxdecode.cli.terminal import BadInput, Progress, bad_input, deferred_interrupt

if TYPE_CHECKING:
    from jaxdecode.checkpoint import Loaded

__all__ = ["run"]

CANCELLED = "cancelled"
FAILURES = {
    "nan": "the model's logits held NaN or infinity",
    "no_token": "no token was left to choose from",
    "invalid": "a setting was out of range",
}


class Written(NamedTuple):
    """The text, the ids it was decoded from, and the name of a ``Finish`` or "cancelled"."""

    text: str
    tokens: list[int]
    finish: str


def run(
    prompt: str | None,
    *,
    model: str,
    dtype: str,
    chat: bool,
    system: str | None,
    seed: int,
    settings: dict[str, Any],
    json: bool,
    stream: bool,
    compile_cache: bool,
) -> int:
    """Write to stdout what the model says; ``settings`` are fields of ``jaxdecode.Settings``. Returns the exit code."""
    if system is not None and not chat:
        raise BadInput("--system needs --chat: raw text has no system message")
    if not 0 <= seed < 2**32:
        raise BadInput(f"--seed: expected a number in [0, 2^32), got {seed}")
    text = read_prompt(prompt)
    progress = Progress()
    try:
        progress("starting")
        if compile_cache:
            keep_compiled_programs()
        import jaxdecode

        with bad_input():
            jaxdecode.Settings(**settings)  # a number out of range should not wait for the model
            loaded = jaxdecode.load(model, dtype=dtype, progress=progress)
            messages = [] if system is None else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": text})
            ids = loaded.tokenizer.chat(messages) if chat else loaded.tokenizer.encode(text)
        stream = stream and not json
        written = write(loaded, ids, settings=settings, seed=seed, chat=chat, stream=stream, progress=progress)
    finally:
        progress.stop()
    if json:
        counts = {"prompt_tokens": len(ids), "completion_tokens": len(written.tokens)}
        show(json_text.dumps({"model": model, **written._asdict(), **counts}, ensure_ascii=False) + "\n")
    else:
        show("\n" if stream else written.text + "\n")
    if written.finish in FAILURES:
        raise typer.TyperException(f"the text ends early ({written.finish}): {FAILURES[written.finish]}")
    return 130 if written.finish == CANCELLED else 0


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


def write(
    loaded: Loaded,
    ids: list[int],
    *,
    settings: dict[str, Any],
    seed: int,
    chat: bool,
    stream: bool,
    progress: Progress,
) -> Written:
    """Decode after ``ids``, one step at a time, printing the pieces if ``stream``; Ctrl-C ends it early."""
    import jax

    import jaxdecode
    from jaxdecode.generation import start
    from jaxdecode.text import StreamDecoder

    progress("compiling")
    decoder = StreamDecoder(loaded.tokenizer, continuation=not chat)
    tokens: list[int] = []
    pieces: list[str] = []

    def take(piece: str) -> None:
        pieces.append(piece)
        if stream and piece:
            progress.stop()
            show(piece)

    with deferred_interrupt() as interrupted:
        with bad_input():
            strategy, state = start(
                loaded.model, loaded.params, [ids], key=jax.random.key(seed), settings=loaded.settings(**settings)
            )
        finish = int(state.finish[0])
        steps = jaxdecode.stream(strategy, loaded.params, state)
        while not interrupted() and (step := next(steps, None)) is not None:
            info = jax.device_get(step)
            new = info.tokens[0, : info.count[0]].tolist()
            tokens += new
            if not stream:
                progress("writing", len(tokens) / settings["max_new_tokens"])
            take(decoder.push(new))
            finish = int(info.finish[0])
    take(decoder.flush())
    running = finish == jaxdecode.Finish.RUNNING
    return Written("".join(pieces), tokens, CANCELLED if running else jaxdecode.Finish(finish).name.lower())


def show(text: str) -> None:
    """Print now: a reader follows the text while it grows."""
    sys.stdout.write(text)
    sys.stdout.flush()
