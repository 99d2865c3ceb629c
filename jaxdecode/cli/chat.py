"""`jaxdecode chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from jaxdecode.cli import constraining
from jaxdecode.cli.compilation import keep_compiled_programs
from jaxdecode.cli.terminal import Progress, bad_input, styled

if TYPE_CHECKING:
    from jaxdecode.quant import Scheme

__all__ = ["run"]


def run(
    model: str,
    *,
    dtype: str,
    quantize: Scheme | None,
    cache_dtype: str | None,
    context_length: int | None,
    system: str | None,
    numbers: dict[str, Any],
    json: bool,
    compile_cache: bool,
) -> int:
    """Talk until the input ends; ``numbers``: those of ``conversation.NUMBERS``, and others given. The exit code."""
    progress = Progress()
    try:
        progress("starting")
        if compile_cache:
            keep_compiled_programs()
        import jaxdecode
        from jaxdecode.checkpoint.converted import cache_folder
        from jaxdecode.cli.chat_loop import COMMANDS, ChatLoop
        from jaxdecode.cli.conversation import Conversation, check_numbers
        from jaxdecode.cli.decoding import CONSTRAINTS, TEXTS
        from jaxdecode.cli.lines import Lines

        texts, given = ({n: numbers.pop(n) for n in names if n in numbers} for names in (TEXTS, CONSTRAINTS))
        constraining.check(given)
        with bad_input():
            check_numbers(numbers)
            sources = constraining.read(given)
            how: Any = {"dtype": dtype, "quantize": quantize, "cache_dtype": cache_dtype}
            loaded = jaxdecode.load(model, **how, context_length=context_length, progress=progress)
            constraint = constraining.compiled(loaded, sources, progress)
            loaded.tokenizer.chat([{"role": "user", "content": "?"}])  # no template: better told now
    finally:
        progress.stop()
    lines = Lines(cache_folder() / "chat_history", [*COMMANDS])
    fixed = {"texts": texts, "constraint": constraint}
    loop = ChatLoop(loaded, model, Conversation(numbers, system), json=json, interactive=lines.interactive, **fixed)
    if lines.interactive and not json:
        about = f"{model}, a context of {loaded.config.context_length} tokens. /help lists the commands."
        typer.echo(styled(about, "dim"))
    return loop.run(lines.read)
