"""Where a round's queue lives, and what can go wrong there while it is used."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

import psycopg
from redis import Redis

from tests.servers import ValkeyProcess, postgres_process, valkey
from workers.storage.sql import SqlStorage

Fault: TypeAlias = Callable[[Sequence[int]], None]
"""Happens, and is over, when called with the process ids of all that use the queue."""

HOUR: Final = 3600.0
DISK_BYTES: Final = 64 << 20
LEDGER_BYTES: Final = 256 << 10
"""More than the ledger of a child has before it is killed: those have no room of their own where sizes are limited."""
DOWN_SECONDS: Final = (0.05, 0.4)
FULL_SECONDS: Final = (0.2, 0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A fresh place for a queue."""

    url: str
    faults: Mapping[str, Fault]
    """By what they are."""
    silence: Fault | None = None
    """Cuts off whoever listens for wake-ups, and nobody else."""
    skews: Sequence[float] = (0,)
    """By how many seconds its clients' clocks may be wrong."""
    check: Callable[[], list[str]] = field(default=list)
    """What is wrong with the place itself in the end."""
    notes: Sequence[str] = ()
    """What could not be done here as it should."""


@contextlib.contextmanager
def redis_place(chance: random.Random) -> Iterator[Place]:
    with valkey() as server, Redis.from_url(server.url) as client:

        def cut_all(_: Sequence[int]) -> None:
            client.execute_command("CLIENT KILL TYPE normal SKIPME yes")
            client.execute_command("CLIENT KILL TYPE pubsub")

        yield Place(
            url=server.url,
            faults={
                "server restarted": lambda _: _restart(server, server.stop, chance),
                "server killed": lambda _: _restart(server, server.kill, chance),
                "scripts flushed": lambda _: client.script_flush(),
                "connections cut": cut_all,
                "listeners cut": lambda _: client.execute_command("CLIENT KILL TYPE pubsub"),
            },
            silence=lambda _: client.execute_command("CLIENT KILL TYPE pubsub"),
            skews=(0, HOUR, -HOUR),
        )


def _restart(server: ValkeyProcess, stop: Callable[[], None], chance: random.Random) -> None:
    stop()
    time.sleep(chance.uniform(*DOWN_SECONDS))
    server.start()


@contextlib.contextmanager
def bull_place(chance: random.Random) -> Iterator[Place]:
    with redis_place(chance) as place:
        yield replace(place, url=f"bull+{place.url}")


_TERMINATE: Final = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"


@contextlib.contextmanager
def postgres_place(chance: random.Random) -> Iterator[Place]:
    with postgres_process() as server:

        def terminate(which: str) -> Fault:
            def fault(_: Sequence[int]) -> None:
                with psycopg.connect(server.url.replace("+psycopg", "")) as admin:
                    admin.execute(f"{_TERMINATE} AND backend_type = 'client backend' AND {which}")

            return fault

        def restart(stop: Callable[[], None]) -> Fault:
            def fault(_: Sequence[int]) -> None:
                stop()
                time.sleep(chance.uniform(*DOWN_SECONDS))
                server.start()

            return fault

        yield Place(
            url=server.url,
            faults={
                "server restarted": restart(server.stop),
                "server crashed": restart(server.crash),
                "connections cut": terminate("true"),
                "listeners cut": terminate("query LIKE 'LISTEN%'"),
            },
            silence=terminate("query LIKE 'LISTEN%'"),
            skews=(0, HOUR, -HOUR),
        )


@contextlib.contextmanager
def sqlite_place(chance: random.Random) -> Iterator[Place]:
    with _disk(chance) as disk:
        path = disk.directory / "queue.sqlite3"

        def check() -> list[str]:
            with contextlib.closing(sqlite3.connect(path)) as database:
                [found] = database.execute("PRAGMA integrity_check").fetchone()
            return [] if found == "ok" else [f"SQLite finds its file damaged: {found}"]

        yield Place(url=f"sqlite:///{path}", faults={"disk full": disk.fill}, check=check, notes=disk.notes)


@contextlib.contextmanager
def file_place(chance: random.Random) -> Iterator[Place]:
    with _disk(chance) as disk:
        yield Place(url=f"file://{disk.directory}/queues", faults={"disk full": disk.fill}, notes=disk.notes)


PLACES: Final[Mapping[str, Callable[[random.Random], AbstractContextManager[Place]]]] = {
    "redis": redis_place,
    "bull": bull_place,
    "sqlite": sqlite_place,
    "postgres": postgres_place,
    "file": file_place,
}


async def prepare(url: str) -> None:
    """The place has the tables it needs, if any."""
    if "sql" in url.partition(":")[0]:
        await SqlStorage(url).migrate()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Disk:
    """A directory on a disk that can be filled for a moment."""

    directory: Path
    mounted: bool
    chance: random.Random

    @property
    def notes(self) -> list[str]:
        wanted = "mounting a small file system is not permitted here: full disks were played by limits of file sizes"
        return [] if self.mounted else [wanted]

    def fill(self, pids: Sequence[int]) -> None:
        """Nobody finds room for a while."""
        with self._filled() if self.mounted else self._limited(pids):
            time.sleep(self.chance.uniform(*FULL_SECONDS))

    @contextlib.contextmanager
    def _filled(self) -> Iterator[None]:
        ballast = self.directory / "ballast"
        descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT)
        try:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        os.write(descriptor, bytes(size))
            yield
        finally:
            os.close(descriptor)
            ballast.unlink()

    @contextlib.contextmanager
    def _limited(self, pids: Sequence[int]) -> Iterator[None]:
        """Nothing can be written to the second half of the queue's largest file, nor behind it."""
        sizes = [file.stat().st_size for file in self.directory.rglob("*") if file.is_file()]
        limit = max([size // 2 for size in sizes] + [LEDGER_BYTES])
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, hard))
        try:
            yield
        finally:
            for pid in pids:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


@contextlib.contextmanager
def _disk(chance: random.Random) -> Iterator[_Disk]:
    """A small file system in memory, or, where mounting is not permitted, a directory."""
    directory = Path(tempfile.mkdtemp(prefix="fd-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(directory)]
    try:
        mounted = shutil.which("mount") is not None and not subprocess.run(mount, capture_output=True).returncode
        try:
            yield _Disk(directory=directory, mounted=mounted, chance=chance)
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", str(directory)], check=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
