"""One mesh over the devices of two processes: the tokens of one device, in both. `process_runs.py` does more."""

from __future__ import annotations

import process_runs
from cli_tools import TOY, Result, assert_bad, call, finish, process
from test_processes import free_port, joined


def test_two_processes_with_four_devices_each_give_the_tokens_of_one_device() -> None:
    for name, alone, parts in process_runs.compared(list(process_runs.SHORT)):
        assert parts == [alone, alone], name


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
