"""The command `batch` and its options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from jaxdecode.cli.app import (
    CacheDtype,
    ContextLength,
    Dtype,
    MaxNewTokens,
    MeshOption,
    MinP,
    ModelOption,
    NoCompileCache,
    Quantize,
    Seed,
    Steady,
    Temperature,
    TopK,
    TopP,
    app,
    examples,
)
from jaxdecode.cli.decoding import CONSTRAINTS, GroupedCommand, with_decoding
from jaxdecode.cli.processes import Coordinator, Joining, NumProcesses, ProcessId, ProcessTimeout

__all__ = ["batch"]

OrderName = Literal["input", "finished"]


@app.command(
    cls=GroupedCommand,
    epilog=examples(
        "jaxdecode batch prompts.jsonl answers.jsonl",
        "jaxdecode batch --chat --temperature 0.7 --top-p 0.9 --seed 3 questions.jsonl answers.jsonl",
        "jaxdecode batch --shard 1/2 prompts.jsonl first_half.jsonl",
        "srun jaxdecode batch --coordinator auto prompts.jsonl answers.jsonl",
    ),
)
@with_decoding
def batch(
    *,
    more: dict[str, Any],
    source: Annotated[str, typer.Argument(metavar="IN", help="A file with a JSON object on each line.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="The file for a JSON object of each line's result.")],
    model: ModelOption = "smollm2-135m",
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = 0,
    num_samples: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Write N texts for each line, each with its own numbers.")
    ] = None,
    without_replacement: Annotated[
        bool, typer.Option("--without-replacement", help="The N texts are all different; needs --num-samples.")
    ] = False,
    beams: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Beam search: the N best texts it finds, best first.")
    ] = None,
    length_penalty: Annotated[
        float, typer.Option(metavar="A", min=0, help="Beams are ranked by log probability / length^A.")
    ] = 0.0,
    best_of: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Write N texts, tell the most probable of them.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given several times.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages to answer; else texts to continue.")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message in front of messages.")] = None,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Tell each token's log probability.")] = False,
    top_logprobs: Annotated[
        int, typer.Option(metavar="M", min=0, help="Tell also those of the M most probable tokens at each step.")
    ] = 0,
    slots: Annotated[int, typer.Option(metavar="N", min=1, help="Rows that are decoded together.")] = 16,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Only every N-th line, beginning with line I.")] = "1/1",
    order: Annotated[OrderName, typer.Option(help="Results in the order of the lines, or as they finish.")] = "input",
    resume: Annotated[bool, typer.Option(help="Go on with the file that is there, or begin it anew.")] = True,
    share_prefixes: Annotated[bool, typer.Option(help="Compute what prompts have in common once.")] = True,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Each line's numbers to the last bit, whatever the others are.")
    ] = False,
    record: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write all that `verify` needs to repeat this to a JSON file.")
    ] = None,
    dtype: Dtype = "float32",
    quantize: Quantize = None,
    cache_dtype: CacheDtype = None,
    context_length: ContextLength = None,
    mesh: MeshOption = None,
    steady: Steady = False,
    no_compile_cache: NoCompileCache = False,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    process_timeout: ProcessTimeout = 30,
) -> None:
    """Answer every line of a file.

    A line is {"id": ..., "prompt": ...} or has messages, and any of these settings by name; or it is one of OpenAI's
    batch files. A kill loses nothing: the same command goes on.
    """
    from jaxdecode.cli.batch import Asked, run, shard_of
    from jaxdecode.cli.choices import Request

    constraints = {name: more.pop(name) for name in CONSTRAINTS if name in more}
    numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    search = {"beams": beams, "length_penalty": length_penalty, "without_replacement": without_replacement}
    request = Request(
        model=model,
        dtype=dtype,
        quantize=quantize,
        chat=chat,
        system=system,
        seed=seed,
        settings={"max_new_tokens": max_new_tokens, **numbers, **search, **more},
        num_samples=num_samples,
        best_of=best_of,
        logprobs=logprobs or top_logprobs > 0,
        top_logprobs=top_logprobs,
        stops=tuple(stop or ()),
        constraints=constraints,
        record=None,
        json=True,
        stream=False,
        compile_cache=not no_compile_cache,
        cache_dtype=cache_dtype,
        context_length=context_length,
        mesh=mesh,
        steady=steady,
    )
    asked = Asked(
        source, target, slots, shard_of(shard), order == "input", resume, share_prefixes and not invariant, record
    )
    joining = Joining(coordinator, num_processes, process_id, process_timeout)
    raise typer.Exit(run(asked, request, joining))
