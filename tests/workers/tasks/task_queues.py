"""Tasks that do nothing, a foreign queue that can be more or less able, and stores that watch or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

from workers import EnqueueStatus, Job, StorageUnavailable, Task, Tasks
from workers.clock import Clock
from workers.kv import Key, MemoryKvStore
from workers.serde import JsonSerde, Serde
from workers.tasks.queue import EnqueueOptions, TaskMessage

HOUR = timedelta(hours=1)
PREFIX = ("_federation", "task_deduplication")
QUEUED, DUPLICATE = EnqueueStatus.QUEUED, EnqueueStatus.DUPLICATE


class Refused(Exception):
    """What a test's queue or task raises."""


def declared(tasks: Tasks, name: str = "digest", **settings: Any) -> Task:  # each test passes what the decorator takes
    """A task that does nothing."""

    @tasks.task(name, **settings)
    async def nothing(job: Job) -> None: ...

    return nothing


async def refuse() -> None:
    """What an enqueue may meet: see `ListQueue.before`."""
    raise Refused


class ListQueue:
    """A queue in a list; its consumer takes what is there. `before` runs before each enqueue has its effect."""

    def __init__(self, *, retrial: bool = False, deduplication: bool = False) -> None:
        self.native_retrial = retrial
        self.native_deduplication = deduplication
        self.serde: Serde = JsonSerde()
        self.sent: list[tuple[TaskMessage, EnqueueOptions]] = []
        self.before: Callable[[], Awaitable[None]] | None = None
        self._keys: dict[str, str] = {}

    async def enqueue(self, messages: Sequence[TaskMessage], options: EnqueueOptions) -> str | None:
        if self.before is not None:
            await self.before()
        await asyncio.sleep(0)
        key = options.deduplication_key
        if key is not None:
            if key in self._keys:
                return self._keys[key]
            self._keys[key] = messages[0].id
        self.sent.extend((message, options) for message in messages)
        return None

    @property
    def ids(self) -> list[str]:
        return [message.id for message, _ in self.sent]

    def take(self) -> TaskMessage:
        """The oldest message, which the queue has forgotten."""
        return self.sent.pop(0)[0]


class WatchedKvStore(MemoryKvStore):
    """Notes the verbs it is asked for, and can lose a request or an answer of each, or wait before it acts."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.asked: list[str] = []
        self.requests_lost: set[str] = set()
        self.answers_lost: set[str] = set()
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def set_if_absent(self, key: Key, value: bytes, *, ttl: timedelta) -> bytes | None:
        await self._ask("set_if_absent")
        found = await super().set_if_absent(key, value, ttl=ttl)
        self._answer("set_if_absent")
        return found

    async def compare_and_delete(self, key: Key, expected: bytes) -> bool:
        await self._ask("compare_and_delete")
        done = await super().compare_and_delete(key, expected)
        self._answer("compare_and_delete")
        return done

    async def _ask(self, verb: str) -> None:
        self.asked.append(verb)
        self.entered.set()
        await self.gate.wait()
        if verb in self.requests_lost:
            raise StorageUnavailable(f"{verb} was not heard")

    def _answer(self, verb: str) -> None:
        if verb in self.answers_lost:
            raise StorageUnavailable(f"{verb} was not answered")
