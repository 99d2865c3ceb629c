"""The commands and their options. What a command does stands in a module of its own, imported when it runs."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from jaxdecode._version import __version__

__all__ = ["MODELS", "app"]

MODELS = ("smollm2-135m", "toy")  # the catalogue's names, which completing a command line should not have to load


def complete_model(incomplete: str) -> list[str]:
    """Names of the catalogue; a shell completes files where none fits."""
    return [name for name in MODELS if name.startswith(incomplete)]


# Options that several commands have.
DtypeName = Literal["float32", "bfloat16", "float16"]
MODEL_HELP = "A model by name (smollm2-135m, toy), a .gguf file, a Hugging Face folder, or a hub id (owner/name)."
ModelOption = Annotated[str, typer.Option(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)]
Temperature = Annotated[
    float, typer.Option(metavar="T", help="0: always the most probable token; 1: the model's own law.")
]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Draw from the K most probable tokens.")]
TopP = Annotated[
    float | None, typer.Option(metavar="P", help="Draw from the fewest tokens with probability P together.")
]
MinP = Annotated[
    float | None, typer.Option(metavar="P", help="Draw from tokens with at least P times the largest probability.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="The same seed writes the same text.")]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="The most tokens to write.")]
Dtype = Annotated[DtypeName, typer.Option(help="Type of the weights.")]
NoCompileCache = Annotated[
    bool, typer.Option("--no-compile-cache", help="Do not keep compiled programs for the next call.")
]

app = typer.Typer(
    help="Text from language models, by exact decoding in JAX.",
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


def examples(*lines: str) -> str:
    """The end of a help page, its lines kept as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@app.command(
    epilog=examples(
        'jaxdecode generate "The capital of France is"',
        'jaxdecode generate --chat --temperature 0.7 --top-p 0.9 --seed 3 "Write a haiku about autumn."',
        'jaxdecode generate --num-samples 4 --temperature 1 --stop "." "Once upon a time"',
        'jaxdecode generate --max-new-tokens 5 --top-logprobs 3 "2 + 2 ="',
        'jaxdecode generate --chat --choices yes --choices no "Is the sky blue?"',
        "echo 'Once upon a time' | jaxdecode generate --model toy --json --record run.json",
    )
)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="A text; read from stdin if absent or '-'.")] = None,
    model: ModelOption = "smollm2-135m",
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    num_samples: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Write N texts, each with its own random numbers.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given several times.")
    ] = None,
    json_schema: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write JSON that the JSON Schema in this file accepts.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Write a text that this pattern matches as a whole.")
    ] = None,
    choices: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Write one of these texts; give it once for each.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask in the model's chat format; else continue the text.")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message in front; needs --chat.")] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Tell each token's log probability.")] = False,
    top_logprobs: Annotated[
        int, typer.Option(metavar="M", min=0, help="Tell also those of the M most probable tokens at each step.")
    ] = 0,
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write all that is needed to repeat this to a JSON file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end, nothing else.")] = False,
    stream: Annotated[bool, typer.Option(help="Print while writing, or all at the end.")] = True,
    dtype: Dtype = "float32",
    no_compile_cache: NoCompileCache = False,
) -> None:
    """Continue a text, or answer it (--chat).

    At temperature 0, the default, --top-k, --top-p, --min-p and --seed change nothing.
    """
    from jaxdecode.cli.choices import Request
    from jaxdecode.cli.generate import run

    request = Request(
        model=model,
        dtype=dtype,
        chat=chat,
        system=system,
        seed=seed,
        settings={
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
        },
        num_samples=num_samples,
        logprobs=logprobs or top_logprobs > 0,
        top_logprobs=top_logprobs,
        stops=tuple(stop or ()),
        constraints={"json_schema": json_schema, "regex": regex, "choices": choices or None},
        record=record,
        json=json,
        stream=stream,
        compile_cache=not no_compile_cache,
    )
    raise typer.Exit(run(prompt, request))


@app.command(
    epilog=examples(
        "jaxdecode chat",
        'jaxdecode chat --system "Answer in one sentence." --temperature 0.7 --top-p 0.9',
        "printf 'Hi!\\nWhat did I say?\\n' | jaxdecode chat --json",
    )
)
def chat(
    model: ModelOption = "smollm2-135m",
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message in front.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each line read.")] = False,
    dtype: Dtype = "float32",
    no_compile_cache: NoCompileCache = False,
) -> None:
    """Talk with a model, turn by turn.

    /help lists the commands: /undo, /edit, /settings, /save and more. Ctrl-C stops a reply, Ctrl-D ends. In a pipe
    each line is a message, and a line that is wrong ends it.
    """
    from jaxdecode.cli.chat import run

    numbers = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    code = run(model, dtype=dtype, system=system, numbers=numbers, json=json, compile_cache=not no_compile_cache)
    raise typer.Exit(code)


@app.command(
    epilog=examples(
        "jaxdecode inspect smollm2-135m",
        "jaxdecode inspect --dtype bfloat16 --json model.gguf",
    )
)
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)],
    dtype: Dtype = "float32",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
) -> None:
    """Tell what a model is made of and what it costs.

    Its config, its parameters, the bytes that its cache takes per token, the multiplications of a token, and how many
    rows of which length fit into the memory that is free. No weight is read.
    """
    from jaxdecode.cli.inspection import run

    raise typer.Exit(run(model, dtype=dtype, json=json))
