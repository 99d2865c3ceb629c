"""The commands and their options. What a command does stands in a module of its own, imported when it runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from jaxdecode._version import __version__
from jaxdecode.cli.decoding import CONSTRAINTS, DRAFTS, GroupedCommand, with_decoding
from jaxdecode.cli.processes import Coordinator, Joining, NumProcesses, ProcessId, ProcessTimeout

__all__ = ["MODELS", "app"]

# The catalogue's names, which completing a command line should not have to load.
MODELS = ("smollm2-135m", "gemma3-270m", "toy")


def complete_model(incomplete: str) -> list[str]:
    """Names of the catalogue; a shell completes files where none fits."""
    return [name for name in MODELS if name.startswith(incomplete)]


# Options that several commands have.
DtypeName = Literal["float32", "bfloat16", "float16"]
MODEL_HELP = f"A model by name ({', '.join(MODELS)}), a .gguf file, a Hugging Face folder, or a hub id (owner/name)."
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
SCHEME_HELP = (
    "int8 (rounds activations too), int8_weights, or int1 to int8 with _even, _zero or _affine and _g32 (any size), "
    "_channel or _tensor"
)
Quantize = Annotated[
    str | None,
    typer.Option(metavar="SCHEME", help=f"Weights in few bits: {SCHEME_HELP}; as_stored: as a GGUF file has them."),
]
CacheDtypeName = Literal["float32", "bfloat16", "float16", "int8", "int4"]
CacheDtype = Annotated[
    CacheDtypeName | None, typer.Option(help="Type of keys and values in the cache; as the weights if not given.")
]
ContextLength = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Tokens of the longest text, prompt and output; as the file says if not given."
    ),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh", metavar="AXES", help="Many devices: data=N for rows, tensor=N for weights, or both with ','."
    ),
]
Steady = Annotated[
    bool,
    typer.Option("--steady", help="Arithmetic by which int8 on CPUs gives the same over other meshes; a tenth slower."),
]
NoCompileCache = Annotated[
    bool, typer.Option("--no-compile-cache", help="Do not keep compiled programs for the next call.")
]

MODES_HELP = "Of: greedy, top_p, int8, int8_weights, beam, json, lookup_copy, lookup_fresh. speculative: the last two."

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
    cls=GroupedCommand,
    epilog=examples(
        'jaxdecode generate "The capital of France is"',
        'jaxdecode generate --chat --temperature 0.7 --top-p 0.9 --seed 3 "Write a haiku about autumn."',
        'jaxdecode generate --num-samples 4 --temperature 1 --stop "." "Once upon a time"',
        'jaxdecode generate --beams 4 --length-penalty 1 --max-new-tokens 20 "The three primary colours are"',
        'jaxdecode generate --num-samples 8 --without-replacement --temperature 1 "My favourite colour is"',
        'jaxdecode generate --temperature 0.8 --best-of 8 "Once upon a time"',
        'jaxdecode generate --max-new-tokens 5 --top-logprobs 3 "2 + 2 ="',
        'jaxdecode generate --chat --choices yes --choices no "Is the sky blue?"',
        'jaxdecode generate --repetition-penalty 1.2 --no-repeat-ngram 3 "Once upon a time"',
        'jaxdecode generate --chat --prompt-lookup 7 "Repeat this text: ..."',
        'jaxdecode generate --draft-quantize int8 "The capital of France is"',
        "echo 'Once upon a time' | jaxdecode generate --model toy --json --record run.json",
    ),
)
@with_decoding
def generate(
    *,
    more: dict[str, Any],
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
    without_replacement: Annotated[
        bool, typer.Option("--without-replacement", help="The N texts are all different; needs --num-samples.")
    ] = False,
    beams: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Beam search: the N best texts it finds, best first."),
    ] = None,
    length_penalty: Annotated[
        float, typer.Option(metavar="A", min=0, help="Beams are ranked by log probability / length^A.")
    ] = 0.0,
    best_of: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Write N texts, print the --num-samples (1) most probable of them."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given several times.")
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
    quantize: Quantize = None,
    cache_dtype: CacheDtype = None,
    context_length: ContextLength = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A smaller model of the same vocabulary that drafts.",
            autocompletion=complete_model,
            rich_help_panel=DRAFTS,
        ),
    ] = None,
    draft_quantize: Annotated[
        str | None,
        typer.Option(
            metavar="SCHEME",
            help="Weights of the draft; alone: the model itself drafts with them.",
            rich_help_panel=DRAFTS,
        ),
    ] = None,
    draft_length: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The most tokens a model drafts at once (7).", rich_help_panel=DRAFTS),
    ] = None,
    mesh: MeshOption = None,
    steady: Steady = False,
    no_compile_cache: NoCompileCache = False,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    process_timeout: ProcessTimeout = 30,
) -> None:
    """Continue a text, or answer it (--chat).

    At temperature 0, the default, --seed and what cuts the law (--top-k, --top-p, --min-p, ...) change nothing.
    """
    from jaxdecode.cli.choices import Request
    from jaxdecode.cli.drafting import Draft
    from jaxdecode.cli.generate import run

    constraints = {name: more.pop(name) for name in CONSTRAINTS if name in more}
    request = Request(
        model=model,
        dtype=dtype,
        quantize=quantize,
        chat=chat,
        system=system,
        seed=seed,
        settings={
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "beams": beams,
            "length_penalty": length_penalty,
            "without_replacement": without_replacement,
            **more,
        },
        num_samples=num_samples,
        best_of=best_of,
        logprobs=logprobs or top_logprobs > 0,
        top_logprobs=top_logprobs,
        stops=tuple(stop or ()),
        constraints=constraints,
        record=record,
        json=json,
        stream=stream,
        compile_cache=not no_compile_cache,
        draft=Draft(draft_model, draft_quantize, draft_length),
        cache_dtype=cache_dtype,
        context_length=context_length,
        mesh=mesh,
        steady=steady,
    )
    joining = Joining(coordinator, num_processes, process_id, process_timeout)
    raise typer.Exit(run(prompt, request, joining))


@app.command(
    cls=GroupedCommand,
    epilog=examples(
        "jaxdecode chat",
        'jaxdecode chat --system "Answer in one sentence." --temperature 0.7 --top-p 0.9',
        "printf 'Hi!\\nWhat did I say?\\n' | jaxdecode chat --json",
    ),
)
@with_decoding
def chat(
    *,
    more: dict[str, Any],
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
    quantize: Quantize = None,
    cache_dtype: CacheDtype = None,
    context_length: ContextLength = None,
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
        **more,
    }
    how: Any = {"dtype": dtype, "quantize": quantize, "cache_dtype": cache_dtype, "context_length": context_length}
    code = run(model, compile_cache=not no_compile_cache, system=system, numbers=numbers, json=json, **how)
    raise typer.Exit(code)


@app.command(
    epilog=examples(
        "jaxdecode inspect smollm2-135m",
        "jaxdecode inspect --dtype bfloat16 --json model.gguf",
        "jaxdecode inspect smollm2-135m --slots 16 --longest-prompt 300 --max-new-tokens 200",
    )
)
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)],
    dtype: Dtype = "float32",
    quantize: Quantize = None,
    cache_dtype: CacheDtype = None,
    context_length: ContextLength = None,
    slots: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tell the memory of `jaxdecode batch` with N slots too.")
    ] = None,
    longest_prompt: Annotated[int, typer.Option(metavar="N", min=1, help="Of all lines of that batch.")] = 128,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Most new tokens of a line of it.")] = 128,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
) -> None:
    """Tell what a model is made of and what it costs.

    Its config, its parameters, the bytes that its cache takes per token, the multiplications of a token, and how many
    rows of which length fit into the memory that is free. No weight is read.
    """
    from jaxdecode.cli.batch_memory import Run
    from jaxdecode.cli.inspection import run

    batch = None if slots is None else Run(slots, longest_prompt, max_new_tokens)
    how: Any = {"dtype": dtype, "quantize": quantize, "cache_dtype": cache_dtype, "context_length": context_length}
    raise typer.Exit(run(model, **how, batch=batch, json=json))


@app.command(
    epilog=examples(
        "jaxdecode bench",
        "jaxdecode bench --batch-sizes 1,8,32 --modes greedy,top_p --floor",
        "jaxdecode bench --batch-sizes 1 --modes speculative",
        "jaxdecode bench --prompt-lengths 16,512 --new-tokens 64 --runs 5 --json model.gguf",
    )
)
def bench(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)
    ] = "smollm2-135m",
    batch_sizes: Annotated[str, typer.Option(metavar="B,...", help="Rows decoded together.")] = "1,8",
    prompt_lengths: Annotated[str, typer.Option(metavar="S,...", help="Tokens of every prompt.")] = "16",
    new_tokens: Annotated[str, typer.Option(metavar="N,...", help="Tokens written by every row, at least 2.")] = "64",
    modes: Annotated[str, typer.Option(metavar="MODE,...", help=MODES_HELP)] = "greedy",
    cache_len: Annotated[
        int | None, typer.Option(metavar="T", min=1, help="Slots a row in the cache; enough if not given.")
    ] = None,
    runs: Annotated[int, typer.Option(metavar="N", min=1, help="Timed runs, of which the median counts.")] = 3,
    floor: Annotated[
        bool, typer.Option("--floor", help="Time the same products alone by NumPy too (float32 weights).")
    ] = False,
    dtype: Dtype = "float32",
    quantize: Quantize = None,
    cache_dtype: CacheDtype = None,
    context_length: ContextLength = None,
    compile_cache: Annotated[
        bool, typer.Option("--compile-cache", help="Take compiled programs from the cache; else each is compiled.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
) -> None:
    """Measure how fast a model decodes, beside what its shapes and this machine allow.

    Each mode with each batch size, prompt length and number of new tokens is a line: tokens per second, time of a step,
    prefill, bytes and multiplications counted from the shapes, and the part reached of the floor that they set at the
    read bandwidth and multiply rate measured in the same run.
    """
    from jaxdecode.cli.bench import Asked, run

    asked = Asked(
        model=model,
        batch_sizes=batch_sizes,
        prompt_lengths=prompt_lengths,
        new_tokens=new_tokens,
        modes=modes,
        cache_len=cache_len,
        runs=runs,
        floor=floor,
        dtype=dtype,
        quantize=quantize,
        cache_dtype=cache_dtype,
        context_length=context_length,
        compile_cache=compile_cache,
        json=json,
    )
    raise typer.Exit(run(asked))


import jaxdecode.cli.app_batch  # noqa: E402  # commands more, which need the options above
import jaxdecode.cli.app_quality  # noqa: E402
import jaxdecode.cli.app_verify  # noqa: E402, F401
