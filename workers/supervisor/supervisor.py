"""Several processes that work on the same queues, kept running by one that does no work of its own.

Theory of operation. The supervisor starts its own command again, once for each place; `Membership` is the child's side.
The first process goes ahead: if it refuses its settings, they are wrong for all, and the supervisor ends with its
status. A process that dies is started again after a pause. A process holds jobs only by leases in the storage, so
nothing is lost by any death, and another process of any machine takes its jobs over.

The supervisor reaps with `waitpid(-1)`: in a container it may be process 1, which inherits whoever loses its parent.
So nothing else in it may start processes. It runs no handler and connects to nothing, so it stays small and does not
fail with its children.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from workers.supervisor.child import ChildProcess, Command, StopReason
from workers.supervisor.http_port import HttpPort
from workers.supervisor.overview import Overview
from workers.supervisor.slot import Pace, Report, Slot

REFUSED: Final = 2
"""The status of a process that cannot work with its settings, or cannot reach what it needs, and has said so."""
FAILED: Final = 1
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a supervisor is to do.

    A process with more than `memory_limit` bytes is stopped and started again, one with twice as many is killed.
    `changed` says, when asked now and then, whether all are to be replaced.
    """

    processes: int
    memory_limit: int | None = None
    metrics_port: int | None = None
    changed: Callable[[], bool] = lambda: False
    pace: Pace = field(default_factory=Pace)


class Supervisor:
    """Runs `command` in as many processes as planned, from `run` until it is told to stop."""

    def __init__(self, command: Command, plan: Plan, *, report: Report) -> None:
        self._command = command
        self._plan = plan
        self._report = _written(report)
        self._children: dict[int, ChildProcess] = {}  # by process id; only `_reap` removes one
        self._slots = [self._slot(number) for number in range(1, plan.processes + 1)]
        self._overview = Overview(self._slots)
        self._leader: ChildProcess | None = None
        self._bind = ""  # where the metrics are served, as the first process that was ready said
        self._stops = 0
        self._ending = asyncio.Event()
        self._status = 0
        self._any_ready = asyncio.Event()
        self._restart = asyncio.Event()
        self._has_terminal = os.isatty(0)

    async def run(self) -> int:
        """Keep the processes running until a signal, and return the status to end with.

        0: all ended as asked. 1: they died in a loop, or had to be killed. 2: the first refused to work, or the port of
        the metrics cannot be opened.
        """
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGCHLD: self._reap, signal.SIGHUP: self._hang_up}
        handlers |= dict.fromkeys(STOP_SIGNALS, self._stop)
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        port = HttpPort(self._overview)
        tasks = [
            asyncio.create_task(self._keep_all(), name="keep"),
            asyncio.create_task(self._replace_when_asked(), name="replace"),
            asyncio.create_task(self._look(), name="look"),
            asyncio.create_task(self._serve(port), name="serve"),
        ]
        for task in tasks:
            task.add_done_callback(self._note_failure)
        try:
            await self._ending.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_all()
            await port.close()
            for number in handlers:
                loop.remove_signal_handler(number)
        self._report(logging.INFO, "supervisor_stopped", status=self._status)
        return self._status

    def _slot(self, number: int) -> Slot:
        return Slot(number, self._start, pace=self._plan.pace, report=self._report, note=self._note)

    def _start(self, number: int) -> ChildProcess:
        child = ChildProcess.start(self._command, number, self._plan.processes, forced=self._plan.pace.forced)
        self._children[child.pid] = child
        return child

    # What happens

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            child = self._children.pop(pid, None)
            if child is not None:  # else somebody's orphan, and this is process 1
                child.note_end(status)
                self._overview.note_end(child)
                if child.is_late:
                    told = "it did not stop in time"
                    self._report(logging.ERROR, "process_killed", process=child.number, pid=pid, error=told)

    def _hang_up(self) -> None:
        if self._has_terminal and not os.isatty(0):  # it went away, and nobody asks for a restart
            self._stop()
        else:
            self._report(logging.INFO, "restarting", processes=len(self._slots))
            self._restart.set()

    def _stop(self) -> None:
        self._stops += 1
        if self._stops == 1:
            self._report(logging.INFO, "stopping", again="send the signal again to skip the grace")
            self._ending.set()
        for child in self._children.values():
            if self._stops > 2:
                child.kill(StopReason.LATE)
            elif self._stops > 1 or child.stopping is None:  # one that stops already keeps its grace at first
                child.stop(StopReason.ASKED)

    def _end(self, status: int, event: str, **fields: object) -> None:
        if not self._ending.is_set():
            self._status = status
            self._report(logging.ERROR, event, status=status, **fields)
            self._stop()

    def _note(self) -> None:
        """Look at the places after something has changed in one."""
        if self._leader is None or not self._leader.is_ready:
            working = [slot.child for slot in self._slots if slot.child is not None and slot.child.is_ready]
            self._leader = working[0] if working else None
            if self._leader is not None:
                self._leader.lead()
                self._bind = self._bind or self._leader.bind
        if self._leader is not None:
            self._any_ready.set()
        elif not self._any_ready.is_set() and self._slots[0].last_status == REFUSED:
            self._end(REFUSED, "process_refused")
        begun = self._slots if self._any_ready.is_set() else self._slots[:1]
        if all(slot.deaths >= self._plan.pace.deaths for slot in begun):
            ends = ", ".join(sorted({slot.last_end for slot in begun}))
            self._end(FAILED, "gave_up", deaths_in_a_row=min(slot.deaths for slot in begun), last=ends)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """End with a bug of ours: children that nobody keeps would be worse."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logging.getLogger(__name__).error("the supervisor failed", exc_info=error)
            self._end(FAILED, "supervisor_failed", error=type(error).__name__)

    # What goes on

    async def _keep_all(self) -> None:
        async with asyncio.TaskGroup() as keeping:
            first, *others = self._slots
            keeping.create_task(first.keep())
            await self._any_ready.wait()
            for slot in others:
                keeping.create_task(slot.keep())

    async def _serve(self, port: HttpPort) -> None:
        if self._plan.metrics_port is None:
            return
        await self._any_ready.wait()
        address = self._bind
        try:
            await port.start(address, self._plan.metrics_port)
        except OSError as error:
            problem = f"--metrics-port: cannot listen on {address}:{self._plan.metrics_port}: {error.strerror}"
            self._end(REFUSED, "metrics_not_served", error=problem)
        else:
            self._report(logging.INFO, "metrics_serving", address=address, port=self._plan.metrics_port)

    async def _replace_when_asked(self) -> None:
        """Replace the processes one after the other: so the others work on, and a version that fails replaces none."""
        while True:
            await self._restart.wait()
            self._restart.clear()
            for slot in self._slots:
                if not await slot.replace():
                    self._report(logging.ERROR, "restart_given_up", advice="the processes that run were left alone")
                    break
            else:
                self._report(logging.INFO, "restarted", processes=len(self._slots))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._plan.pace.look.total_seconds())
            if self._plan.changed():
                self._report(logging.INFO, "sources_changed")
                self._restart.set()
            if self._plan.memory_limit is not None:
                for child in list(self._children.values()):
                    self._limit(child, self._plan.memory_limit)

    def _limit(self, child: ChildProcess, limit: int) -> None:
        held = memory_of(child.pid) or 0
        if held > 2 * limit:
            self._report(logging.ERROR, "process_killed", process=child.number, memory=held, limit=limit)
            child.kill(StopReason.MEMORY)
        elif held > limit and child.stopping is None:
            self._report(logging.WARNING, "process_too_large", process=child.number, memory=held, limit=limit)
            child.stop(StopReason.MEMORY)

    async def _end_all(self) -> None:
        """Wait for the processes; those that do not end in time are killed."""
        ending = list(self._children.values())
        if not ending:
            return
        for child in ending:
            if child.stopping is None:  # it was started as the stop began
                child.stop(StopReason.ASKED)
        await asyncio.wait([child.ended for child in ending])
        if any(child.ended_badly for child in ending):
            self._status = self._status or FAILED


def _written(report: Report) -> Report:
    """Return the same, but for a log that cannot be written any more: a terminal is gone, or a disk is full."""

    def write(level: int, event: str, **fields: object) -> None:
        with suppress(OSError):
            report(level, event, **fields)

    return write


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
