"""The processor time of what runs beside this process: a PostgreSQL or Redis server, or SQLite, which runs inside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Protocol

from redis import Redis
from sqlalchemy import create_engine, text

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_NANOSECONDS: Final = 1e9


class Cpu(Protocol):
    """The processor time of a server so far."""

    def seconds(self) -> float:
        """Return it."""


def cpu_of(url: str) -> Cpu:
    """Return the processor time of the server with this URL."""
    if url.startswith("postgres"):
        return PostgresCpu(url)
    return RedisCpu(url) if url.startswith("redis") else NoServer()


class PostgresCpu:
    """The processor time of a PostgreSQL server on this machine, with all its processes."""

    def __init__(self, url: str) -> None:
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
        with engine.connect() as connection:
            directory = connection.execute(text("SHOW data_directory")).scalar_one()
        engine.dispose()
        self._postmaster = int(Path(directory, "postmaster.pid").read_text().split()[0])

    def seconds(self) -> float:
        """Return it, of processes that have ended to a hundredth of a second."""
        ended = sum(map(int, _stat(self._postmaster)[13:15])) / _TICKS
        return ended + sum(_ran(pid) for pid in (self._postmaster, *_children(self._postmaster)))


class RedisCpu:
    """The processor time of a Redis server."""

    def __init__(self, url: str) -> None:
        self._client = Redis.from_url(url)

    def seconds(self) -> float:
        """Return it, as the server tells it."""
        told = self._client.info("cpu")
        return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


class NoServer:
    """SQLite: all of it is this process's."""

    def seconds(self) -> float:
        """Return nothing."""
        return 0.0


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int(_stat(int(path.name))[1]) == parent:
                found.append(int(path.name))
        except OSError:  # it has ended
            continue
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of a process behind its name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _ran(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / _NANOSECONDS
    except OSError:
        return 0.0
