"""One place of a supervisor's: it has a process, or starts one again, with growing pauses while that does not last."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

from workers.clock import monotonic
from workers.supervisor.child import ChildProcess, StopReason


class Report(Protocol):
    """Writes one line of the supervisor's log; the values are numbers and texts of our own."""

    def __call__(self, level: int, event: str, **fields: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How patient a supervisor is.

    After a process died there is a pause, `first_pause`, which doubles with each further death in a row up to
    `longest_pause`. A process that worked for `settled` ends the row. If the last `deaths` of every place were in a
    row, the supervisor gives up. A process that is not ready after `start` is killed, and so is one that has not ended
    `forced` after the grace of its stop. `look` is how often it looks at their memory, and at sources.
    """

    first_pause: timedelta = timedelta(seconds=0.5)
    longest_pause: timedelta = timedelta(seconds=60)
    settled: timedelta = timedelta(seconds=60)
    deaths: int = 5
    start: timedelta = timedelta(seconds=120)
    forced: timedelta = timedelta(seconds=15)
    look: timedelta = timedelta(seconds=1)


class Slot:
    """The place `number`. `start` starts a process for it, and `note` is called when something changed."""

    def __init__(
        self, number: int, start: Callable[[int], ChildProcess], *, pace: Pace, report: Report, note: Callable[[], None]
    ) -> None:
        self.number = number
        self.child: ChildProcess | None = None  # written by `keep` and `replace`
        self.deaths = 0
        """How many of its processes have died in a row."""
        self.last_end = ""
        self.last_status: int | None = None
        """How the last one ended, for people and by its exit status."""
        self._start = start
        self._pace = pace
        self._report = report
        self._note = note
        self._wake = asyncio.Event()
        self._starting = asyncio.Lock()  # held by who starts a process, and decides whether it is the one to keep

    async def keep(self) -> None:
        """Keep a process running until cancelled; the processes are left to whoever cancels this."""
        while True:
            async with self._starting:
                child = self.child or await self._begin()
            if child is not None:
                await self._until_settled(child)
                await asyncio.wait([child.ended])
                if self.child is not child:  # another one has replaced it
                    continue
                self.child = None
                self._note_death(child)
            await self._pause()

    async def replace(self) -> bool:
        """Start another process, and stop the present one once the other works. Return whether it does."""
        async with self._starting:
            old = self.child
            if old is None:  # it is between two starts: no pause any longer
                self.deaths = 0
                self._wake.set()
                return True
            new = await self._begin(replacing=True)
            if new is None or new.ended.done():
                return False
            self.child, self.deaths = new, 0
        if old.stopping is None:
            old.stop(StopReason.REPLACED)
        self._note()
        await asyncio.wait([old.ended])
        return True

    async def _begin(self, *, replacing: bool = False) -> ChildProcess | None:
        """Start a process, and wait until it works or has ended."""
        try:
            child = self._start(self.number)
        except OSError as error:
            self.deaths, self.last_end = self.deaths + 1, f"not started: {error.strerror}"
            self._report(logging.ERROR, "process_not_started", process=self.number, error=error.strerror)
            self._note()
            return None
        if not replacing:
            self.child = child
        if await self._is_ready(child):
            self._report(logging.INFO, "process_ready", process=self.number, pid=child.pid)
            self._note()
        elif replacing:
            self._report(logging.ERROR, "process_not_replaced", process=self.number, end=child.told_end)
        return child

    async def _is_ready(self, child: ChildProcess) -> bool:
        """Wait until the process says that it works. If it does not in time, it is killed."""
        ready = asyncio.create_task(child.ready.wait())
        try:
            either: list[asyncio.Future[int] | asyncio.Task[Literal[True]]] = [child.ended, ready]
            timeout = self._pace.start.total_seconds()
            done, _ = await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not done:
            child.kill(StopReason.LATE)
            await asyncio.wait([child.ended])
        return not child.ended.done()

    async def _until_settled(self, child: ChildProcess) -> None:
        """Wait until the process has worked for a while, or has ended."""
        if child.ready_since is not None:
            await asyncio.wait([child.ended], timeout=self._pace.settled.total_seconds())
            if not child.ended.done():
                self.deaths = 0

    def _note_death(self, child: ChildProcess) -> None:
        self.deaths, self.last_end, self.last_status = self.deaths + 1, child.told_end, child.ended.result()
        lived = 0.0 if child.ready_since is None else monotonic() - child.ready_since
        told = {"process": self.number, "pid": child.pid, "end": child.told_end, "after_seconds": round(lived, 1)}
        if child.stopping is not None:
            self._report(logging.WARNING, "process_ended", reason=child.stopping.value, **told)
        else:
            self._report(logging.ERROR, "process_died", in_a_row=self.deaths, **told)
        self._note()

    async def _pause(self) -> None:
        """Wait before the next start, each time a little differently, so that processes do not start together."""
        doubled = self._pace.first_pause * 2.0 ** min(max(self.deaths - 1, 0), 30)
        seconds = min(doubled, self._pace.longest_pause).total_seconds() * random.uniform(0.8, 1)  # noqa: S311 - spreads load, guards nothing
        self._wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
