"""One run by several processes of `jax.distributed`: finding each other, waiting for each other, ending together.

jax ends a process by ``abort()``, with a trace of its C++ frames, when another one is dead or does not come. Here that
becomes one line on stderr and exit code 1.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TextIO

import typer

from jaxdecode.cli.terminal import BadInput, Progress, bad_input

__all__ = ["AUTO", "Coordinator", "Joining", "NumProcesses", "Place", "ProcessId", "ProcessTimeout", "own", "together"]

AUTO = "auto"
PANEL = "Several processes, each of which gets the same command"
JOIN_SECONDS = 300  # until all processes must be there: a cluster may start them minutes apart
INTERRUPTED = 130
LINGER_SECONDS = 1.0  # process 0 stays a little, so that jax can tell the others who is dead

Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        envvar="JAX_COORDINATOR_ADDRESS",
        help="Where process 0 listens; auto: as Slurm, Open MPI, Kubernetes or Cloud TPU say.",
        rich_help_panel=PANEL,
    ),
]
NumProcesses = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, envvar="JAX_NUM_PROCESSES", help="How many there are.", rich_help_panel=PANEL),
]
ProcessId = Annotated[
    int | None,
    typer.Option(metavar="I", min=0, envvar="JAX_PROCESS_ID", help="Which this one is.", rich_help_panel=PANEL),
]
ProcessTimeout = Annotated[
    int,
    typer.Option(metavar="SECONDS", min=2, help="One that is not heard of for so long is dead.", rich_help_panel=PANEL),
]


class Joining(NamedTuple):
    """What the options say. coordinator: None for a process alone."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    timeout: int = 30


class Place(NamedTuple):
    """Which process this is, from 0, and of how many."""

    process: int = 0
    total: int = 1


def own(path: str, place: Place) -> str:
    """``path`` for one of several processes: "out.jsonl" is "out-1-of-2.jsonl" for the first of two."""
    file = Path(path)
    return str(file.with_name(f"{file.stem}-{place.process + 1}-of-{place.total}{file.suffix}"))


def together(asked: Joining, work: Callable[[Place], int]) -> int:
    """The exit code of ``work``, done at this process's place among all.

    One that is done waits for the others. If one ends otherwise, by an error or a kill, the others end within about
    ``asked.timeout`` seconds. Before this, nothing may have computed with jax.
    """
    if asked.coordinator is None:
        if asked.num_processes is not None or asked.process_id is not None:
            raise BadInput("--coordinator: expected HOST:PORT, or auto, beside --num-processes and --process-id")
        return work(Place())
    import jax

    with _aborts_told(asked) as told:
        place = told.place = _join(jax, asked, asked.coordinator)
        try:
            code = work(place)
            if code in (0, INTERRUPTED):  # one that was interrupted has not the time for what others may still do
                _wait(jax, asked, place, float("inf") if code == 0 else asked.timeout)
        except BaseException as error:
            if _lacks_a_process(jax, error):
                time.sleep(2 * asked.timeout)  # an abort tells which
            _leave_at_exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1))
            raise
        if code:
            _leave_at_exit(code)
    return code


def _lacks_a_process(jax: Any, error: BaseException) -> bool:
    """Whether that may be why a sum over devices failed; on CPUs Gloo says so, in errors of several types."""
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)
    return of_jax or "gloo" in str(error).lower()


def _join(jax: Any, asked: Joining, address: str) -> Place:
    count, process = asked.num_processes, asked.process_id
    if address != AUTO:
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise BadInput(f"--coordinator: expected HOST:PORT, or auto, got {address!r}")
        if process == 0:
            _check_free(int(port))
    if process is not None and count is not None and process >= count:
        raise BadInput(f"--process-id: expected a number in [0, {count}), got {process}")
    known = address != AUTO and process is not None and count is not None
    try:
        jax.distributed.initialize(
            None if address == AUTO else address,
            count,
            process,
            cluster_detection_method="deactivate" if known else None,
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=asked.timeout,
        )
    except ValueError as error:
        raise BadInput(
            "--coordinator: expected --num-processes and --process-id beside it, or a cluster that jax knows, "
            f"got: {error}"
        ) from error
    return Place(jax.process_index(), jax.process_count())


def _check_free(port: int) -> None:
    """jax would join whoever listens there."""
    with bad_input(), socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            raise BadInput(f"--coordinator: expected a port that is free, got {port}: {error.strerror}") from None


def _wait(jax: Any, asked: Joining, place: Place, seconds: float) -> None:
    """Until all processes are here, or so long; in a thread, so that Ctrl-C is heard."""
    from jax.experimental import multihost_utils

    dead: set[int] = set()
    arrived = False

    def arrive() -> None:
        nonlocal arrived
        with multihost_utils.live_devices(jax.devices()) as devices:  # a barrier that waits however long
            dead.update(set(range(place.total)) - {device.process_index for device in devices})
        if not dead:
            jax.distributed.shutdown()
            arrived = True

    def arrive_or_not() -> None:
        with contextlib.suppress(Exception):  # of which jax.distributed tells the reason, by an abort
            arrive()

    progress = Progress()
    progress("waiting for the other processes")
    thread = threading.Thread(target=arrive_or_not, daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < end:
        thread.join(0.2)
    progress.stop()
    if not thread.is_alive() and not arrived:
        if not dead:
            time.sleep(2 * asked.timeout)
        raise typer.TyperException(_ended(map(str, sorted(dead)), place))


def _leave_at_exit(code: int) -> None:
    """Once the error is told, end without waiting for the others, which jax would do at exit."""
    atexit.register(_leave, code)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class _Told:
    """What an abort needs to know."""

    place: Place | None = None

    def __init__(self, asked: Joining, log: int, stderr: int) -> None:
        self._asked, self._log, self._stderr = asked, log, stderr

    def on_abort(self, _: int) -> None:
        """Runs on the thread that aborts, not on one that was interrupted, so that Python may run here."""
        log = os.pread(self._log, os.fstat(self._log).st_size, 0).decode("utf-8", "replace")
        reason = reason_of(log, self._asked, self.place)
        if reason is None:  # nothing of jax.distributed: the abort goes on
            os.write(self._stderr, log.encode())
            return
        os.write(self._stderr, f"jaxdecode: error: {reason}\n".encode())
        if self.place is not None and self.place.process == 0:
            time.sleep(LINGER_SECONDS)
        _leave(1)


def reason_of(log: str, asked: Joining, place: Place | None) -> str | None:
    """Why jax.distributed ends the process at ``place``, by what it logged; None: it does not."""
    _, found, status = log.rpartition("the JAX distributed service detected fatal errors")
    if not found:
        return None
    if place is None:
        return (
            f"--coordinator {asked.coordinator}: expected all processes there within {JOIN_SECONDS} s, got not all of "
            "them; was each started, with a number of its own and the same --num-processes?"
        )
    listed = re.search(r"stopped sending heartbeats\):\s*([\d\s,]+)", status)
    dead = set(re.findall(r"\d+", listed[1]) if listed else re.findall(r"Task (\d+) heartbeat timeout", status))
    if not dead and "Failed to send RPC to coordination service" in status:
        dead = {"0"}  # which has that service
    if not dead:
        what = " ".join(status.partition("absl::Status: ")[2].split())
        return f"process {place.process} of {place.total} ends with the others: {what[:300]}"
    return _ended(sorted(dead, key=int), place)


def _ended(dead: Iterable[str], place: Place) -> str:
    names = ", ".join(dead) or "another one"
    return f"process {names} of {place.total} was killed or ended with an error, so process {place.process} ends too"


@contextlib.contextmanager
def _aborts_told(asked: Joining) -> Iterator[_Told]:
    """What C++ prints goes to a file, and SIGABRT to ``_Told``; what Python prints goes where it went."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    python = sys.stdout, sys.stderr
    with tempfile.TemporaryFile() as log, _copy(1, sys.stdout) as stdout, _copy(2, sys.stderr) as stderr:
        told = _Told(asked, log.fileno(), stderr.fileno())
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(told.on_abort)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = stdout, stderr
        before = libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
        try:
            yield told
        finally:
            libc.signal(signal.SIGABRT, before)
            sys.stdout, sys.stderr = python
            for number, stream in ((1, stdout), (2, stderr)):
                stream.flush()
                os.dup2(stream.fileno(), number)


def _copy(number: int, stream: TextIO) -> TextIO:
    """A stream to where ``number`` leads now."""
    stream.flush()
    return os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8", errors=stream.errors)
