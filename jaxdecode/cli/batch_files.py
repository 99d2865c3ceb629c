"""The files of a batch: lines in, and a file of results that a kill at any instant leaves whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxdecode.cli.files import check_target, read_json, write_json

__all__ = ["Results", "digest", "numbered_lines"]

SYNC_SECONDS = 1.0  # between two fsyncs: what a power cut may cost
FORMAT, VERSION = "jaxdecode-batch", 1
LATER = {"steady": False}  # what holds for files that were begun before there was this option


def digest(line_id: str | int) -> int:
    """64 bits that stand for an id: a set of them is all that is kept of a million lines."""
    return int.from_bytes(hashlib.blake2b(str(line_id).encode(), digest_size=8).digest(), "big")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, each with its number from 1."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


class Results:
    """The file of results, a JSON object a line: opened by one process at a time, and only ever appended to.

    path: the file; beside it PATH.run.json says how it was made. run: what must be the same to go on with it. resume:
    keep what is there; a line that a kill has torn is cut off. in_order: results are written in the order in which
    their lines were ``expect``ed, else as they come. ValueError or OSError: the file cannot be gone on with.
    """

    def __init__(self, path: str, run: dict[str, Any], *, resume: bool, in_order: bool) -> None:
        self._path = check_target(path)
        about = self._path.with_name(self._path.name + ".run.json")
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self.done: set[int] = set()
        self._in_order = in_order
        self._expected: deque[int] = deque()
        self._ready: dict[int, str] = {}
        try:
            _lock(self._file, self._path)
            if not resume:
                os.ftruncate(self._file, 0)
            elif os.fstat(self._file).st_size:
                self._check(about, run)
                self._recover()
            write_json(about, {"format": FORMAT, "version": VERSION, **run})
        except BaseException:
            os.close(self._file)
            raise
        self._synced = time.monotonic()

    def _check(self, about: Path, run: dict[str, Any]) -> None:
        if not about.exists():
            raise ValueError(f"{self._path}: expected an empty file, or one beside {about.name}, got one without it")
        before = {**LATER, **read_json(about, FORMAT, VERSION)}
        now = json.loads(json.dumps(run))
        for name, value in now.items():
            if before.get(name) != value:
                raise ValueError(
                    f"{self._path}: begun with {name} {before.get(name)!r}, expected the same, got {value!r}; "
                    "--no-resume begins anew"
                )

    def _recover(self) -> None:
        """Note what is done, and cut off a last line without an end."""
        whole = 0
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break
                self.done.add(digest(_id_of(raw, self._path, number)))
                whole += len(raw)
        os.ftruncate(self._file, whole)

    @property
    def pending(self) -> int:
        """Lines that are expected and not written."""
        return len(self._expected)

    def expect(self, number: int) -> None:
        """A result of this line will come."""
        self._expected.append(number)

    def give(self, number: int, record: dict[str, Any]) -> None:
        """The result of a line that was expected: written now, or once those before it are."""
        text = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        if not self._in_order:
            self._expected.remove(number)
            self._write(text)
            return
        self._ready[number] = text
        while self._expected and self._expected[0] in self._ready:
            self._write(self._ready.pop(self._expected.popleft()))

    def _write(self, text: str) -> None:
        data = memoryview(text.encode("utf-8"))
        while data:
            data = data[os.write(self._file, data) :]
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Everything on disk."""
        self._sync()
        os.close(self._file)


def _id_of(raw: bytes, path: Path, number: int) -> str | int:
    record = None
    with contextlib.suppress(ValueError):
        record = json.loads(raw)
    found = record.get("custom_id", record.get("id")) if isinstance(record, dict) else None
    if not isinstance(found, str | int):
        raise ValueError(f"{path}: line {number}: expected a result with its id, got {raw[:60]!r}")
    return found


def _lock(file: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # not a Unix
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"{path}: expected a file that no other process writes, got one that is locked") from None
