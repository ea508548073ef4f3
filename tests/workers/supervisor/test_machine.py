"""What `--processes` and `--memory-limit` take, and whose metrics are whose."""

from __future__ import annotations

import os

import pytest

from workers.supervisor import parse_bytes, parse_processes, processors
from workers.supervisor.overview import merged
from workers.supervisor.supervisor import memory_of


def test_auto_is_one_process_for_each_processor() -> None:
    """Of those that this process may use."""
    assert parse_processes("auto") == processors()
    assert 1 <= processors() <= len(os.sched_getaffinity(0))
    assert parse_processes("3") == 3


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "many", "1001", "²"])
def test_other_numbers_of_processes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither auto nor a number from 1 to 1000"):
        parse_processes(text)


@pytest.mark.parametrize(("text", "size"), [("300M", 300 << 20), ("2g", 2 << 30), (str(64 << 20), 64 << 20)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "M", "300 M", "300MB", "-1G", "15M", "1T", "²M"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no size|less than 16M"):
        parse_bytes(text)


def test_memory_is_what_a_process_holds() -> None:
    held = memory_of(os.getpid())
    assert held is not None
    assert 10 << 20 < held < 10 << 30
    assert memory_of(2**22 + 1) is None


def test_metrics_of_processes_stand_together() -> None:
    """Below one head each, with the process as a label; values, times and braces in labels stay."""
    one = '# HELP a Of a.\n# TYPE a counter\na{x="}{ ,",y="1"} 1 1395066363000\na 2\n# EOF\nloose 1\n'
    two = "# HELP b Of b.\n# TYPE b gauge\nb{} 3\n# HELP a Of a.\n# TYPE a counter\na 4\n"
    assert merged({1: one, 2: two}).splitlines() == [
        "# HELP a Of a.",
        "# TYPE a counter",
        'a{process="1",x="}{ ,",y="1"} 1 1395066363000',
        'a{process="1"} 2',
        'loose{process="1"} 1',
        'a{process="2"} 4',
        "# HELP b Of b.",
        "# TYPE b gauge",
        'b{process="2"} 3',
    ]
