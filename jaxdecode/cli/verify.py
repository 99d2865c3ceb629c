"""`jaxdecode verify`: run again what a record tells of, and compare token by token."""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdecode.cli import constraining, drafting, generate
from jaxdecode.cli.choices import CANCELLED, Request, Written, best, numbers, token_text
from jaxdecode.cli.compilation import keep_compiled_programs
from jaxdecode.cli.drafting import Draft
from jaxdecode.cli.files import read_json
from jaxdecode.cli.meshing import over_mesh
from jaxdecode.cli.record import FORMAT, VERSION, changed_versions, check_files, expecting_fields, first_difference
from jaxdecode.cli.terminal import Progress, bad_input, show
from jaxdecode.cli.verify_batch import tell_versions, verify_batch

__all__ = ["Difference", "compared", "request_of", "run"]

_NO_SETTINGS = ("num_samples", "top_logprobs", "eos", "stop_strings")
_CONSTRAINTS = ("regex", "json_schema", "choices", "prefix")


class Difference(NamedTuple):
    """The first token of an output that is not what was recorded; None: that output has none there.

    margin: how far the recorded choice was from another one, as the record says and as it is now.
    """

    output: int
    token: int
    recorded: int | None
    got: int | None
    margin: float | None
    margin_now: float | None


def request_of(record: Mapping[str, Any]) -> Request:
    """What was asked for. ValueError, naming the field, if the record does not say so."""
    with expecting_fields():
        model, prompt, settings = record["model"], record["prompt"], dict(record["settings"])
        draft = record.get("draft")
        constraints = {name: settings.pop(name) for name in _CONSTRAINTS if name in settings}
        told = {name: settings.pop(name) for name in _NO_SETTINGS}
        several = settings.get("without_replacement") or (told["num_samples"] > 1 and settings.get("beams") is None)
        return Request(
            model=model["source"],
            dtype=model["dtype"],
            quantize=model["quantize"],
            cache_dtype=model["cache_dtype"],
            context_length=model.get("context_length"),
            chat=prompt["chat"],
            system=prompt["system"],
            seed=record["seed"],
            settings=settings,
            num_samples=told["num_samples"] if several else None,
            best_of=record.get("best_of"),
            logprobs=False,
            top_logprobs=told["top_logprobs"],
            stops=tuple(told["stop_strings"]),
            constraints=constraints,
            record=None,
            json=True,
            stream=False,
            compile_cache=True,
            draft=Draft() if draft is None else _draft(model["source"], draft),
            mesh=record.get("mesh"),
            steady=model.get("steady", False),
        )


def _outputs(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The recorded outputs. ValueError: a field of theirs is missing."""
    with expecting_fields():
        return [{name: output[name] for name in ("tokens", "margins", "finish")} for output in record["outputs"]]


def _draft(source: str, draft: Mapping[str, Any]) -> Draft:
    return Draft(None if draft["source"] == source else draft["source"], draft["quantize"], draft["length"])


def run(path: str, *, json: bool, compile_cache: bool) -> int:
    """Replay the record in ``path`` and tell what differs. Returns the exit code: 0 the same, 1 not."""
    progress = Progress()
    try:
        progress("starting")
        if compile_cache:
            keep_compiled_programs()
        import jaxdecode

        with bad_input():
            record = read_json(Path(path).expanduser(), FORMAT, VERSION)
            if record.get("kind") == "batch":
                return verify_batch(record, progress, json=json)
            request, outputs = request_of(record), _outputs(record)
            with expecting_fields():
                ids, changed = record["prompt"]["ids"], changed_versions(record)
                check_files(record, progress)
            with over_mesh(request.mesh) as spread:
                loading = {**request.loading, **spread}
                loaded = jaxdecode.load(request.model, **loading, progress=progress)
                draft = drafting.load_draft(loaded, request.model, request.draft, loading, progress)
            eos = list(loaded.tokenizer.eos_ids)
            if record["settings"]["eos"] != eos:
                raise ValueError(f"eos: expected the recorded ids {record['settings']['eos']}, got {eos} of the model")
            grammar = constraining.compiled(loaded, request.constraints, progress)
        with over_mesh(request.mesh):
            written = generate.write(loaded, ids, grammar, request, progress, draft)
        if request.best_of is not None:
            written = best(written, request.num_samples or 1)
    finally:
        progress.stop()
    if written.finish and CANCELLED in written.finish:
        return 130
    difference = compared(outputs, written)
    _tell(outputs, difference, changed, lambda i: token_text(loaded.tokenizer, i), json)
    return 0 if difference is None else 1


def compared(outputs: Sequence[Mapping[str, Any]], written: Written) -> Difference | None:
    """The first difference from the recorded outputs, if there is one. An output that was cancelled may be longer."""
    for i, output in enumerate(outputs):
        now = written.texts[i].tokens if i < len(written.texts) else []
        if output["finish"] == CANCELLED:
            now = now[: len(output["tokens"])]
        if (found := first_difference(output["tokens"], now)) is not None:
            at, then, got = found
            before = None if then is None else float(output["margins"][at])
            after = None if got is None else float(numbers(written.out.margin[i, at : at + 1])[0])
            return Difference(i, at, then, got, before, after)
    return None


def _tell(
    outputs: Sequence[Mapping[str, Any]],
    difference: Difference | None,
    changed: Mapping[str, Any],
    text_of: Callable[[int], str],
    json: bool,
) -> None:
    tokens = sum(len(output["tokens"]) for output in outputs)
    if json:
        found = None
        if difference is not None:
            margins = {n: None if (m := getattr(difference, n)) is None else numbers([m])[0] for n in _MARGINS}
            found = {**difference._asdict(), **margins}
        told = {"same": difference is None, "tokens": tokens, "difference": found, "versions_changed": changed}
        show(json_text.dumps(told, ensure_ascii=False) + "\n")
        return
    tell_versions(changed)
    if difference is None:
        show(f"the same: {tokens} tokens of {len(outputs)} outputs\n")
        return
    recorded, got = (
        "none" if i is None else f"{i} {json_text.dumps(text_of(i), ensure_ascii=False)}"
        for i in (difference.recorded, difference.got)
    )
    near = ", ".join(
        f"{name} {value:.6g}"
        for name, value in (("in the record", difference.margin), ("now", difference.margin_now))
        if value is not None
    )
    show(
        f"different: output {difference.output + 1}, token {difference.token + 1}: {recorded} in the record, "
        f"{got} now; margin {near}\n"
    )


_MARGINS = ("margin", "margin_now")
