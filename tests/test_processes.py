"""Several processes: each its part of a batch, all or none of them, and from any death on to the same files."""

from __future__ import annotations

import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from cli_tools import ROOT, Result, assert_bad, call, finish, finished, process
from test_cli_batch import BATCH, MANY, begun, write_lines

from jaxdecode.cli.processes import Joining, Place, own, reason_of

SLOW = """
import sys, time
from jaxdecode.engine.driver import Driver
turn, ended = Driver.turn, []
def slowly(driver):
    time.sleep(0.02 if len(ended) < 14 else 60)  # some lines, and then none before a death is noticed
    ended.extend(results := turn(driver))
    return results
Driver.turn = slowly
from jaxdecode.cli import main
main()
"""
ALONE = """
import sys, time
from jaxdecode.cli import exit_with, processes
processes.JOIN_SECONDS = int(sys.argv[4])
def work(place):
    from jax.experimental import multihost_utils
    seconds = float(sys.argv[3])
    if seconds < 0:
        multihost_utils.process_allgather(place.process)
    print("here", flush=True)
    while seconds < 0:
        multihost_utils.process_allgather(place.process)
    time.sleep(seconds)
    return 0
coordinator, number = sys.argv[1:3]
exit_with(lambda: processes.together(processes.Joining(coordinator, 2, int(number), 4), work))
"""


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("", 0))
        return int(trial.getsockname()[1])


def joined(number: int, port: int) -> tuple[str, ...]:
    where = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", str(number))
    return (*where, "--process-timeout", "4")


def part(tmp_path: Path, number: int) -> Path:
    return tmp_path / f"out-{number + 1}-of-2.jsonl"


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def killed(arguments: tuple[str, ...], tmp_path: Path, env: dict[str, str]) -> Result:
    """How the first of two processes ends whose second one is killed once each has written two lines."""
    port = free_port()
    with (
        process(*arguments, *joined(0, port), program=("-c", SLOW), env=env) as first,
        process(*arguments, *joined(1, port), program=("-c", SLOW), env=env) as second,
    ):
        for number in (0, 1):
            begun(part(tmp_path, number), 2)
        second.send_signal(signal.SIGKILL)
        return finish(first)


def ended(dead: int, other: int) -> Result:
    reason = f"process {dead} of 2 was killed or ended with an error, so process {other} ends too"
    return Result(1, "", f"jaxdecode: error: {reason}\n")


def test_two_processes_finish_after_a_kill_with_the_lines_of_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", MANY)
    env = {"JAXDECODE_CACHE": str(tmp_path / "cache"), "PYTHON": sys.executable}
    arguments = (str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), *BATCH[1:-1], "--mesh", "data=1")
    assert killed(("batch", *arguments), tmp_path, env) == ended(1, 0)
    before = [lines_in(part(tmp_path, number)) for number in (0, 1)]
    assert all(2 <= lines < 20 for lines in before), before
    script = str(ROOT / "scripts" / "batch_two_processes")
    again = finished(script, *arguments, program=("-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"), env=env)
    assert (again.code, again.err) == (0, "")
    assert sorted(re.findall(r"(\d+) were done before", again.out)) == sorted(map(str, before))
    assert call(*BATCH, str(tmp_path / "in.jsonl"), str(tmp_path / "whole.jsonl")).code == 0
    parts = [part(tmp_path, number).read_bytes().splitlines() for number in (0, 1)]
    whole = (tmp_path / "whole.jsonl").read_bytes().splitlines()
    assert [parts[i % 2][i // 2] for i in range(len(whole))] == whole
    assert sum(map(len, parts)) == len(MANY)


DEATHS = {"of the one that coordinates": (0, "60", "60"), "when the other is done": (1, "0", "60")}
DEATHS |= {"in the middle of a sum": (1, "-1", "-1")}


@pytest.mark.parametrize(("victim", "first_seconds", "second_seconds"), DEATHS.values(), ids=DEATHS)
def test_a_death_ends_the_others(victim: int, first_seconds: str, second_seconds: str) -> None:
    coordinator = f"127.0.0.1:{free_port()}"
    with (
        process(coordinator, "0", first_seconds, "60", program=("-c", ALONE)) as first,
        process(coordinator, "1", second_seconds, "60", program=("-c", ALONE)) as second,
    ):
        both = [first, second]
        assert [p.stdout.readline() for p in both] == ["here\n"] * 2
        both[victim].send_signal(signal.SIGKILL)
        assert finish(both[1 - victim]) == ended(victim, 1 - victim)


def test_one_that_is_done_waits_and_one_that_nobody_joins_does_not() -> None:
    coordinator, alone = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with (
        process(coordinator, "0", "0", "60", program=("-c", ALONE)) as first,
        process(coordinator, "1", "2", "60", program=("-c", ALONE)) as second,
        process(alone, "1", "0", "1", program=("-c", ALONE)) as third,
    ):
        assert [finish(p) for p in (first, second)] == [Result(0, "here\n", "")] * 2
        lonely = finish(third)
    assert (lonely.code, lonely.out) == (1, "")
    assert lonely.err.startswith(f"jaxdecode: error: --coordinator {alone}: expected all processes there within 1 s")
    assert lonely.err.count("\n") == 1


HEARTBEATS = """
F1130 13:37:27 5688 client.h:80] Terminating process because the JAX distributed service detected fatal errors. This
absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
1
3
The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. preemption) to debug.
"""
BARRIER = """
F1130 client.h:80] Terminating process because the JAX distributed service detected fatal errors. This most likely
absl::Status: INTERNAL: Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 12 heartbeat timeout. This
"""
LEADER = """
F1130 client.h:80] Terminating process because the JAX distributed service detected fatal errors. absl::Status:
UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted/died/restarted or not.
"""
OTHER = """
F1130 client.h:80] Terminating process because the JAX distributed service detected fatal errors. absl::Status: ABORTED:
a task
restarted
"""


@pytest.mark.parametrize(
    ("log", "about"),
    [
        (HEARTBEATS, "process 1, 3 of 20 was killed or ended with an error, so process 5 ends too"),
        (BARRIER, "process 12 of 20 was killed"),
        (LEADER, "process 0 of 20 was killed"),
        (OTHER, "process 5 of 20 ends with the others: ABORTED: a task restarted"),
    ],
)
def test_what_jax_logs_names_the_dead(log: str, about: str) -> None:
    joining, place = Joining("host:1", 20, 5), Place(5, 20)
    assert str(reason_of(log, joining, place)).startswith(about)
    assert "expected all processes there within 300 s" in str(reason_of(log, joining, None))
    assert reason_of("F1130 array.cc:7] Check failed: n > 0", joining, place) is None


def test_files_of_processes_have_names_of_their_own() -> None:
    assert own("a/out.jsonl", Place(0, 2)) == "a/out-1-of-2.jsonl"
    assert own("out", Place(11, 12)) == "out-12-of-12"


@pytest.mark.parametrize(
    ("options", "about"),
    [
        (["--process-id", "0"], "--coordinator: expected HOST:PORT"),
        (["--coordinator", "host", "--num-processes", "2", "--process-id", "0"], "got 'host'"),
        (["--coordinator", "127.0.0.1:PORT", "--num-processes", "2", "--process-id", "2"], "in [0, 2), got 2"),
        (["--coordinator", "127.0.0.1:TAKEN", "--num-processes", "2", "--process-id", "0"], "a port that is free"),
        (["--coordinator", "auto", "--shard", "1/2"], "--shard: expected none beside --coordinator"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, options: list[str], about: str) -> None:
    write_lines(tmp_path / "in.jsonl", MANY[:1])
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        ports = {"PORT": str(free_port()), "TAKEN": str(taken.getsockname()[1])}
        for name, port in ports.items():
            options = [word.replace(name, port) for word in options]
        assert_bad(call(*BATCH, *options, str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")), about)
    assert not list(tmp_path.glob("out*"))


def test_without_a_cluster_there_is_nothing_to_find(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", MANY[:1])
    asked = (*BATCH, "--coordinator", "auto", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    assert_bad(finished(*asked), "or a cluster that jax knows, got: coordinator_address should be defined.")
