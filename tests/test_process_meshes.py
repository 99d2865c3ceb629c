"""One mesh over the devices of two processes: the tokens of one device, in both. `process_runs.py --all` does more."""

from __future__ import annotations

import json
from pathlib import Path

import process_runs
from cli_tools import ROOT, TOY, Result, assert_bad, call, finish, process
from test_processes import free_port, joined


def test_two_processes_with_four_devices_each_give_the_tokens_of_one_device() -> None:
    coordinator, program = f"127.0.0.1:{free_port()}", (str(Path(process_runs.__file__)),)
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    env = {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    with (
        process(coordinator, "0", program=program, env=env) as first,
        process(coordinator, "1", program=program, env=env) as second,
    ):
        alone = [[m, name, process_runs.tokens(name, *process_runs.made(m)[1:])] for m, name in process_runs.SHORT]
        results = [finish(p) for p in (first, second)]
    assert [r.code for r in results] == [0, 0], results[0].err[-2000:]
    assert [json.loads(r.out) for r in results] == [alone, alone]


def test_two_processes_write_one_text_and_the_first_one_tells_it() -> None:
    asked = (*TOY[:-1], "hello ", "--num-samples", "2", "--temperature", "1", "--json")
    port = free_port()
    with (
        process(*asked, "--mesh", "data=2", *joined(0, port)) as first,
        process(*asked, "--mesh", "data=2", *joined(1, port)) as second,
    ):
        alone = call(*asked, "--no-compile-cache")
        assert finish(first) == alone
        assert finish(second) == Result(0, "", "")
    assert_bad(call(*asked, *joined(0, port)), "--coordinator: expected a --mesh")
