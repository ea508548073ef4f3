"""What a supervisor asks of the machine: how many processes it has room for, and how much memory one holds."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_LEAST_LIMIT: Final = 16 * 2**20


def processors() -> int:
    """Return how many processors this process may use: those it is bound to, and no more than its container's share."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(bound, _share(bound)))


def _share(otherwise: int) -> int:
    try:
        quota, period = _CPU_MAX.read_text().split()
        return otherwise if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no container, or another kind of one
        return otherwise


def parse_processes(text: str) -> int:
    """Return the number of processes that `--processes` says: a number, or `auto` for one on each processor.

    Raises:
        ValueError: it is neither.
    """
    if text == "auto":
        return processors()
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1_000:
        raise ValueError(f"{text!r} is neither auto nor a number from 1 to 1000")
    return int(text)


def parse_bytes(text: str) -> int:
    """Return the bytes that `300M` or `2G` means.

    Raises:
        ValueError: it is no such text, less than 16M, or this system does not tell how much memory a process has.
    """
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isascii() or not number.isdecimal() or unit not in _UNITS:
        raise ValueError(f"{text!r} is no size, such as 300M or 2G")
    if int(number) * _UNITS[unit] < _LEAST_LIMIT:
        raise ValueError(f"{text!r} is less than 16M, which Python alone needs")
    if memory_of(os.getpid()) is None:
        raise ValueError("there is no /proc here that tells how much memory a process has")
    return int(number) * _UNITS[unit]


def memory_of(pid: int) -> int | None:
    """Return the bytes of memory that a process has, or None if nobody knows."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
