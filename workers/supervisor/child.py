"""One process of a supervisor's, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Final, Self

from workers.clock import monotonic
from workers.supervisor.http_port import HttpAnswer
from workers.supervisor.membership import VARIABLE, Introduction, read_answer

LONGEST_ANSWER_BYTES: Final = 64 * 1024 * 1024
DEFAULT_GRACE_SECONDS: Final = 30.0


class StopReason(StrEnum):
    """Why a supervisor ended a process."""

    ASKED = "asked"
    REPLACED = "replaced"
    MEMORY = "memory"
    LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What each child runs: a program with its arguments, in this process's directory."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


class ChildProcess:
    """A process that was started as number `number`; `ended` has its exit status, below zero for a signal."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], *, forced: timedelta) -> None:
        self.number = number
        self.pid = process.pid
        self.introduction: Introduction | None = None
        self.ready_since: float | None = None
        """When it said that it works, by the event loop's clock."""
        self.stopping: StopReason | None = None
        """Why it was asked to stop, first."""
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.ready = asyncio.Event()
        self.is_late = False
        """Whether it was killed because it did not end in time after it was asked to."""
        self._forced = forced.total_seconds()
        self._deadline: asyncio.TimerHandle | None = None
        self._is_hurried = False
        self._process = process
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[HttpAnswer | None]] = {}
        self._questions = 0

    @classmethod
    def start(cls, command: Command, number: int, of: int, *, forced: timedelta) -> Self:
        """Start the process, in a process group of its own: Ctrl-C in a terminal is for the supervisor alone.

        Once it was asked to stop, it is killed `forced` after its grace. It is another program, and no fork of this
        one: it has the code and the settings of now, and shares nothing.

        Raises:
            OSError: it cannot be started; there is no memory, say.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**command.environment, VARIABLE: f"{number}/{of}/{theirs.fileno()}"}
            try:
                process = subprocess.Popen(  # noqa: S603 - this process's own command once more
                    command.arguments,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
        child = cls(number, process, forced=forced)
        child._listening = asyncio.create_task(child._listen(ours), name=f"process-{number}")
        return child

    @property
    def is_ready(self) -> bool:
        """Whether it works, and was not asked to stop."""
        return self.ready_since is not None and self.stopping is None and not self.ended.done()

    @property
    def ended_badly(self) -> bool:
        """Whether it did not end as asked. A signal itself may end it before it is ready, and when it is done."""
        status = self.ended.result()
        return status == -signal.SIGKILL or (status != 0 and self.ready_since is not None and not self._is_hurried)

    @property
    def bind(self) -> str:
        return "127.0.0.1" if self.introduction is None else self.introduction.bind

    @property
    def grace_seconds(self) -> float:
        return DEFAULT_GRACE_SECONDS if self.introduction is None else self.introduction.grace_seconds

    @property
    def told_end(self) -> str:
        """How it ended, for people."""
        status = self.ended.result()
        if status >= 0:
            return f"exit status {status}"
        if status == -signal.SIGKILL and self.stopping is None:
            return "killed, perhaps for lack of memory"
        return f"ended by {signal.strsignal(-status) or 'signal'} ({-status})"

    def stop(self, reason: StopReason) -> None:
        """Ask the process to stop, and to skip the grace if it was asked before."""
        if self._deadline is None:
            deadline = self.grace_seconds + self._forced
            self._deadline = asyncio.get_running_loop().call_later(deadline, self._end_late)
        # Two signals of one kind may arrive as one.
        self._is_hurried = self.stopping is not None
        self.stopping = self.stopping or reason
        self._signal(signal.SIGINT if self._is_hurried else signal.SIGTERM)

    def kill(self, reason: StopReason) -> None:
        """End the process at once."""
        self.stopping = self.stopping or reason
        self._signal(signal.SIGKILL)

    def note_end(self, wait_status: int) -> None:
        """Take what `waitpid` returned for it."""
        status = os.waitstatus_to_exitcode(wait_status)
        self._process.returncode = status  # else subprocess would wait for it
        if self._deadline is not None:
            self._deadline.cancel()
        if not self.ended.done():
            self.ended.set_result(status)

    async def get(self, path: str, seconds: float) -> HttpAnswer | None:
        """Return the process's answer to a GET, or None if it has none within that time."""
        if self._writer is None or self.ended.done():
            return None
        self._questions += 1
        number = self._questions
        answer: asyncio.Future[HttpAnswer | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._send({"id": number, "get": path})
            async with asyncio.timeout(seconds):
                return await answer
        except (TimeoutError, OSError):
            return None
        finally:
            del self._asked[number]

    def lead(self) -> None:
        """Tell the process that it is the one to do what one process of the machine has to do."""
        with contextlib.suppress(OSError):
            self._send({"lead": True})

    def _end_late(self) -> None:
        self.is_late = True
        self.kill(StopReason.LATE)

    def _signal(self, number: signal.Signals) -> None:
        if not self.ended.done():
            os.kill(self.pid, number)  # not reaped yet, so the id is not anybody else's

    def _send(self, message: Mapping[str, object]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self, ours: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LONGEST_ANSWER_BYTES)
        try:
            async for line in reader:
                self._hear(json.loads(line))
        except (OSError, ValueError):  # it died while it wrote, or wrote too much
            pass
        finally:
            self._writer.transport.abort()
            for unanswered in self._asked.values():
                if not unanswered.done():
                    unanswered.set_result(None)

    def _hear(self, message: Mapping[str, object]) -> None:
        match message:
            case {"ready": dict(told)}:
                self.introduction = Introduction(**told)
                self.ready_since = monotonic()
                self.ready.set()
            case {"id": int(number), "answer": told} if number in self._asked:
                if not self._asked[number].done():
                    self._asked[number].set_result(read_answer(told))
