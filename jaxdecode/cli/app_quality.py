"""The commands `eval` and `quantize` and their options."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from jaxdecode.cli.app import (
    MODEL_HELP,
    CacheDtype,
    ContextLength,
    Dtype,
    NoCompileCache,
    Quantize,
    Seed,
    app,
    complete_model,
    examples,
)

__all__ = ["evaluate", "quantize"]

MethodName = Literal["rounding", "gptq"]
RangeName = Literal["max", "percentile", "search"]
Window = Annotated[int, typer.Option(metavar="N", min=2, help="Tokens of the text that are read together.")]
Stride = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="From one window to the next; as the window if not given.")
]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", min=2, help="Read no more than this of the text.")]


@app.command(
    "eval",
    epilog=examples(
        "jaxdecode eval smollm2-135m --text book.txt",
        "jaxdecode eval smollm2-135m --text book.txt --window 512 --stride 256 --table tokens.tsv",
        "jaxdecode eval smollm2-135m --text book.txt --quantize int8",
        "jaxdecode eval DIR --text book.txt --against smollm2-135m --json",
    ),
)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)],
    text: Annotated[str, typer.Option(metavar="FILE", help="The text, in UTF-8.")],
    window: Window = 1024,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Tell how far it is from this model.", autocompletion=complete_model),
    ] = None,
    table: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a line for every token to this file, with tabs.")
    ] = None,
    dtype: Dtype = "float32",
    quantize: Quantize = None,
    cache_dtype: CacheDtype = None,
    context_length: ContextLength = None,
    no_compile_cache: NoCompileCache = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
) -> None:
    """Measure what a model says of a text.

    Its perplexity; and with --against, or with --quantize against the same model unquantized, the mean KL divergence
    from that model's laws (nats) and how often both have the same most probable token.
    """
    from jaxdecode.cli.evaluating import Asked, run

    asked = Asked(
        model=model,
        text=text,
        window=window,
        stride=stride,
        max_tokens=max_tokens,
        against=against,
        table=table,
        dtype=dtype,
        quantize=quantize,
        cache_dtype=cache_dtype,
        context_length=context_length,
        compile_cache=not no_compile_cache,
        json=json,
    )
    raise typer.Exit(run(asked))


@app.command(
    "quantize",
    epilog=examples(
        "jaxdecode quantize smollm2-135m --scheme int4 -o DIR",
        "jaxdecode quantize smollm2-135m --scheme int4 --range search --eval other.txt -o DIR",
        "jaxdecode quantize smollm2-135m --scheme int8 --method gptq --text book.txt --eval other.txt -o DIR",
        "jaxdecode quantize smollm2-135m --scheme int3_affine --method gptq --tune 64 --text book.txt -o DIR",
    ),
)
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)],
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="A new or empty folder.")],
    scheme: Annotated[
        str,
        typer.Option(
            metavar="SCHEME", help="int8, int8_weights, or int{1 to 8}[_even|_zero|_affine][_g{size}|_channel|_tensor]."
        ),
    ],
    method: Annotated[
        MethodName,
        typer.Option(
            help="To the nearest, or calibrated on a text: row by row, or rows taking up each other's errors."
        ),
    ] = "rounding",
    range_: Annotated[
        RangeName, typer.Option("--range", help="How far a grid goes: to the largest, 99.9%, or the least error.")
    ] = "max",
    text: Annotated[str | None, typer.Option(metavar="FILE", help="The text to calibrate on.")] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Windows drawn from that text.")] = 16,
    window: Window = 512,
    tune: Annotated[
        int, typer.Option(metavar="N", min=0, help="After that, N steps that move grids and norms by gradient.")
    ] = 0,
    seed: Seed = 0,
    others: Annotated[
        str | None,
        typer.Option(metavar="SCHEME", help="Of embedding and output head; --scheme for rounding, else int8_zero_g32."),
    ] = None,
    eval_: Annotated[
        str | None, typer.Option("--eval", metavar="FILE", help="Another text, to measure the effect on.")
    ] = None,
    max_tokens: MaxTokens = None,
    dtype: Dtype = "float32",
    no_compile_cache: NoCompileCache = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Write a quantized copy of a model to a folder, which every command takes as a model.

    report.json in it, and the table printed, tell what that cost: bytes, errors of every matrix beside their bounds,
    and with --eval perplexity, KL divergence and agreement on a text. Calibration takes minutes; a kill loses at most
    one layer, or 16 steps: the same command goes on.
    """
    from jaxdecode.cli.quantizing import Asked, run

    asked = Asked(
        model=model,
        output=output,
        scheme=scheme,
        method=method,
        range=range_,
        text=text,
        rows=rows,
        window=window,
        tune=tune,
        seed=seed,
        others=others,
        eval=eval_,
        max_tokens=max_tokens,
        dtype=dtype,
        compile_cache=not no_compile_cache,
        json=json,
    )
    raise typer.Exit(run(asked))
