"""Checkpoints by their id on the Hugging Face hub, through ``huggingface_hub`` and its cache.

What is there already is used without asking the network. Only the files that a checkpoint is made of are downloaded:
JSON, templates and safetensors by name, never code and never pickled weights.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jaxdecode.checkpoint.converted import Progress
from jaxdecode.checkpoint.fields import is_offline
from jaxdecode.checkpoint.hf_directory import CONFIG, GENERATION, INDEX, WEIGHTS, weight_files
from jaxdecode.checkpoint.hf_tokenizer import TOKENIZER, TOKENIZER_FILES
from jaxdecode.checks import require, shorten

__all__ = ["hub_folder", "is_hub_id"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_TEXTS = [CONFIG, GENERATION, INDEX, *TOKENIZER_FILES]


def is_hub_id(source: str) -> bool:
    """Whether this has the form "owner/name"."""
    return _ID.fullmatch(source) is not None


def hub_folder(name: str, progress: Progress) -> Path:
    """The folder in the hub's cache with the checkpoint ``name``, downloaded if it is not there.

    FileNotFoundError: no such model, one that may not be read, or no network (HF_HUB_OFFLINE and JAXDECODE_OFFLINE
    forbid it); ImportError: no ``huggingface_hub``.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError("models of the hub need huggingface_hub: pip install 'jaxdecode[text]'") from error
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=_TEXTS, local_files_only=True))
        if _is_complete(folder):
            return folder
    except Exception:  # not in the cache, or only a part of it; which error tells that depends on the package's version
        pass
    if is_offline():
        raise FileNotFoundError(
            f"{name}: expected it in the hub's cache, since this is offline; got nothing complete there"
        )
    bar = _bar(f"downloading {name}", progress)
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=_TEXTS, tqdm_class=bar))
        weights = list(weight_files(folder)) if (folder / INDEX).exists() else [WEIGHTS]
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=weights, tqdm_class=bar))
    except Exception as error:
        raise _explained(name, error) from None
    found = "a repository without them, or with other formats alone"
    require(_is_complete(folder), name, f"{CONFIG}, {TOKENIZER} and {WEIGHTS} or {INDEX}", found)
    return folder


def _is_complete(folder: Path) -> bool:
    try:
        names = [CONFIG, TOKENIZER, *weight_files(folder)]
    except FileNotFoundError:
        return False
    return all((folder / name).is_file() for name in names)


def _bar(text: str, progress: Progress) -> Any:
    """A progress bar as the hub makes them, which draws nothing and tells ``progress``."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):
        done = 0.0

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.done += n or 0
            if self.total:
                progress(text, min(1.0, self.done / self.total))

    return Bar


def _explained(name: str, error: Exception) -> Exception:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, ValueError) and not kinds & {"HTTPError", "HfHubHTTPError"}:
        return error
    if "GatedRepoError" in kinds:
        got = "one whose terms must be accepted on its page first, with a token in HF_TOKEN"
    elif "RepositoryNotFoundError" in kinds:
        got = "an unknown or private one"
    elif kinds & {"LocalEntryNotFoundError", "ConnectionError", "ConnectError", "TransportError", "TimeoutException"}:
        got = "no answer (offline?), and nothing complete in the cache"
    else:
        got = f"{type(error).__name__}: {shorten(error)}"
    return FileNotFoundError(f"{name}: expected a model of the hub, got {got}")
