"""A process among several that a supervisor keeps: how it reports, answers, and ends when the supervisor is gone.

The supervisor holds one end of a socket, the child the other; what they say to each other are lines of JSON. The child
says `{"ready": {...}}` once its workers run. The supervisor asks `{"id": 1, "get": "/metrics"}` and is answered, and it
tells one child, `{"lead": true}`, to do what only one process of this machine has to do. When the socket's other end is
closed, by whatever ended the supervisor, `kill -9` too, the child stops by itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, Self

from workers.supervisor.http_port import Answers, HttpAnswer

logger = logging.getLogger(__name__)

VARIABLE: Final = "WORKERS_PROCESS"
"""The variable by which a child learns its number, how many there are, and its end of the socket."""

LAST_SECONDS: Final = 6.0
"""How long a worker without grace may take to end: it gives up after 5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a child tells of itself once it is ready.

    `grace_seconds` is how long a stop lets its handlers finish, `bind` the address at which the supervisor is to serve
    the metrics of all.
    """

    grace_seconds: float
    bind: str = "127.0.0.1"


class Membership:
    """This process's place among `of` processes, counted from 1."""

    def __init__(self, number: int, of: int, descriptor: int) -> None:
        self.number = number
        self.of = of
        self._descriptor = descriptor  # of this end of the socket
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    def inherited(cls) -> Self | None:
        """Return the place that this process was started for, once; None if no supervisor started it.

        The processes that this one starts do not inherit it.

        Raises:
            OSError: the variable was set by somebody else; there is no such socket.
        """
        told = os.environ.pop(VARIABLE, None)
        if told is None:
            return None
        number, of, descriptor = map(int, told.split("/"))
        os.set_inheritable(descriptor, False)
        return cls(number, of, descriptor)

    def end_with_parent(self, within: timedelta) -> None:
        """Stop this process as SIGTERM does when the supervisor is gone, and end it by force `within` from then.

        As from the supervisor itself, a request to skip the grace comes as SIGINT. A thread watches, so that a blocked
        event loop does not keep the process.
        """
        arguments = os.dup(self._descriptor), within.total_seconds()
        threading.Thread(target=_end_with, args=arguments, name="workers-supervisor", daemon=True).start()

    @asynccontextmanager
    async def joined(self, answers: Answers, *, lead: Callable[[], None]) -> AsyncIterator[None]:
        """Answer the supervisor while the block runs, and call `lead` if this process is told to lead."""
        reader, self._writer = await asyncio.open_connection(sock=socket.socket(fileno=self._descriptor))
        listening = asyncio.create_task(self._listen(reader, answers, lead), name="supervisor")
        try:
            yield
        finally:
            listening.cancel()
            await asyncio.wait([listening])
            self._writer.transport.abort()

    def tell_ready(self, introduction: Introduction) -> None:
        """Tell the supervisor that this process works."""
        self._send({"ready": asdict(introduction)})

    def _send(self, message: dict[str, object]) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader, answers: Answers, lead: Callable[[], None]) -> None:
        async with asyncio.TaskGroup() as answering:
            with suppress(OSError):  # the supervisor is gone; the thread sees to it
                async for line in reader:
                    asked = json.loads(line)
                    if "lead" in asked:
                        lead()
                    else:
                        answering.create_task(self._answer(asked["id"], asked["get"], answers))

    async def _answer(self, number: int, path: str, answers: Answers) -> None:
        answer = None
        try:
            answer = await answers(path)
        except Exception:  # one bad answer must not end the others
            logger.exception("%s could not be answered", path)
        told = None if answer is None else [answer.status, answer.content_type, answer.body.decode()]
        self._send({"id": number, "answer": told})


def read_answer(told: object) -> HttpAnswer | None:
    """Return the answer as `_answer` wrote it."""
    match told:
        case [int(status), str(content_type), str(body)]:
            return HttpAnswer(status=status, content_type=content_type, body=body.encode())
    return None


def _end_with(watched: int, seconds: float) -> None:
    poll = select.poll()
    poll.register(watched, 0)  # nothing but that the other end was closed
    poll.poll()
    until = time.monotonic() + seconds
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(max(seconds - LAST_SECONDS, seconds / 2))
    os.kill(os.getpid(), signal.SIGINT)  # without grace: the lease must not end before the process does
    time.sleep(max(until - time.monotonic(), 0))
    os._exit(1)
