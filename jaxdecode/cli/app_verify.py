"""The command `verify` and its options."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxdecode.cli.app import NoCompileCache, app, examples

__all__ = ["verify"]


@app.command(
    epilog=examples(
        'jaxdecode generate --temperature 0.8 --seed 7 --record run.json "Once upon a time"',
        "jaxdecode verify run.json",
    )
)
def verify(
    record: Annotated[str, typer.Argument(metavar="RECORD", help="A file that `generate --record` wrote.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
    no_compile_cache: NoCompileCache = False,
) -> None:
    """Run again what a record tells of, and name the first token that differs.

    Exit code 0: every token is the same; 1: one differs, and its margin says how near the choice was; 2: it cannot be
    repeated, because the model's files are others.
    """
    from jaxdecode.cli.verify import run

    raise typer.Exit(run(record, json=json, compile_cache=not no_compile_cache))
