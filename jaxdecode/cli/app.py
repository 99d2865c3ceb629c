"""The commands and their options. What a command does stands in a module of its own, imported when it runs."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from jaxdecode._version import __version__

__all__ = ["app"]

app = typer.Typer(
    help="Text from language models, by exact decoding in JAX.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"jaxdecode {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(epilog="Example: jaxdecode generate --chat 'Why is the sky blue?'")
def generate(
    prompt: Annotated[str | None, typer.Argument(help="A text; read from stdin if absent or '-'.")] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="A model by name (smollm2-135m, toy), or a .gguf file.")
    ] = "smollm2-135m",
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="The most tokens to write.")] = 128,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0: always the most probable token; 1: the model's own law.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Draw from the K most probable tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(metavar="P", help="Draw from the fewest tokens with probability P together.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(metavar="P", help="Draw from tokens with at least P times the largest probability.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed writes the same text.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask in the model's chat format; else continue the text.")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message in front; needs --chat.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")] = False,
    stream: Annotated[bool, typer.Option(help="Print while writing, or all at the end.")] = True,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Type of the weights.")] = "float32",
    no_compile_cache: Annotated[
        bool, typer.Option("--no-compile-cache", help="Do not keep compiled programs for the next call.")
    ] = False,
) -> None:
    """Continue a text, or answer it (--chat).

    At temperature 0, the default, --top-k, --top-p, --min-p and --seed change nothing.
    """
    from jaxdecode.cli.generate import run

    settings = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    code = run(
        prompt,
        model=model,
        dtype=dtype,
        chat=chat,
        system=system,
        seed=seed,
        settings=settings,
        json=json,
        stream=stream,
        compile_cache=not no_compile_cache,
    )
    raise typer.Exit(code)
