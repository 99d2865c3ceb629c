"""The options of `jaxdecode generate` that name a draft model: checked, and the model loaded beside the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jaxdecode.cli.terminal import BadInput, Progress, bad_input

if TYPE_CHECKING:
    from jaxdecode.base import Model, Params
    from jaxdecode.checkpoint import Loaded
    from jaxdecode.quant import Scheme

__all__ = ["Draft", "acceptance", "check", "load_draft"]


class Draft(NamedTuple):
    """A model by name (None: the same one), the scheme of its weights, and the most tokens that it drafts at once."""

    model: str | None = None
    quantize: Scheme | None = None
    length: int | None = None

    @property
    def wanted(self) -> bool:
        return self.model is not None or self.quantize is not None


def check(draft: Draft, settings: dict[str, Any]) -> None:
    """Refuse a length without a model, and two places to draft from."""
    if draft.length is not None and not draft.wanted:
        raise BadInput("--draft-length: expected --draft-model or --draft-quantize beside it, got none")
    if draft.wanted and settings.get("prompt_lookup") is not None:
        raise BadInput("--prompt-lookup: expected no draft model beside it, got one")


def load_draft(
    loaded: Loaded, name: str, draft: Draft, loading: dict[str, Any], progress: Progress
) -> tuple[Model, Params] | None:
    """The draft model and its params, or None if none is wanted. Bad input: its tokens are not those of ``loaded``."""
    if not draft.wanted:
        return None
    import jaxdecode

    source = name if draft.model is None else draft.model
    with bad_input():
        other = jaxdecode.load(source, **{**loading, "quantize": draft.quantize}, progress=progress)
        if source != name:
            _check_tokens(loaded, other)
    return other.model, other.params


def _check_tokens(loaded: Loaded, other: Loaded) -> None:
    """ValueError unless every id is the same token."""
    sizes = [x.config.vocab_size for x in (loaded, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"--draft-model: expected the model's vocabulary of {sizes[0]} tokens, got {sizes[1]}")
    for i in range(min(loaded.tokenizer.vocab_size, sizes[0])):
        mine, its = (x.tokenizer.id_to_bytes(i, skip_special_tokens=False) for x in (loaded, other))
        if mine != its:
            raise ValueError(f"--draft-model: expected a vocabulary whose token {i} is {mine!r}, got {its!r}")


def acceptance(choices: list[dict[str, Any]]) -> str | None:
    """A line about what became of the drafts; None if nothing drafts."""
    told = [c["acceptance"] for c in choices if "acceptance" in c]
    if not told:
        return None
    drafted, accepted = (sum(a[name] for a in told) for name in ("drafted", "accepted"))
    return f"{accepted} of {drafted} drafted tokens accepted, {sum(c['completion_tokens'] for c in choices)} written"
