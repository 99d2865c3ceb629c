"""Finished stages on disk: a kill loses the stage that was being computed, and what follows is the same bits."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxdecode import checks

__all__ = ["Steps"]

_ABOUT = "about.json"


class Steps:
    """A folder with one file for each finished stage, and the activations after the last one.

    about: what the work is, as JSON; a folder that holds other work is refused. Without a folder nothing is kept.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, about: dict[str, Any]) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / _ABOUT
        if not file.exists():
            _write(file, lambda made: made.write_text(json.dumps(about), "utf-8"))
        held = json.loads(file.read_text("utf-8"))
        checks.require(
            held == about, f"{self.folder}", "the same work, or a new folder", "other params, text or options"
        )

    def read(self, index: int) -> tuple[dict[str, np.ndarray], np.ndarray] | None:
        """What stage ``index`` gave, and the activations after it if it was the last to finish; None: not done yet."""
        if self.folder is None or not (done := self.folder / f"{index:04d}.npz").exists():
            return None
        with np.load(done) as file:
            arrays = {name: file[name] for name in file.files}
        after = self._after(index)
        return arrays, np.load(after) if after.exists() else np.zeros(0)

    def write(self, index: int, arrays: dict[str, np.ndarray], after: np.ndarray) -> None:
        """Keep a stage; once its file has its name, the stage is done."""
        if self.folder is None:
            return
        _write(self._after(index), lambda made: np.save(made, after))
        _write(self.folder / f"{index:04d}.npz", lambda made: np.savez(made, **arrays))  # type: ignore[arg-type]
        self._after(index - 1).unlink(missing_ok=True)

    def forget(self, index: int) -> None:
        """A stage that a later one made needless."""
        if self.folder is not None:
            (self.folder / f"{index:04d}.npz").unlink(missing_ok=True)

    def _after(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"after-{index:04d}.npy"


def _write(target: Path, write: Callable[[Path], Any]) -> None:
    """A file that is there when it is complete."""
    made = target.with_name(f".{secrets.token_hex(8)}{target.suffix}")  # NumPy adds a suffix that is missing
    try:
        write(made)
        os.replace(made, target)
    finally:
        made.unlink(missing_ok=True)
