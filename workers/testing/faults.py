"""Storages that count what is asked of them, or fail when told to."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeAlias, cast

from workers.errors import StorageUnavailable
from workers.storage.base import Storage

Call: TypeAlias = Callable[[], Awaitable[object]]
Around: TypeAlias = Callable[[str, Call], Awaitable[object]]


class _Wrapped:
    """Every coroutine method of a storage goes through `around`; everything else is the storage's own."""

    def __init__(self, storage: Storage, around: Around) -> None:
        self._storage = storage
        self._around = around

    def __getattr__(self, verb: str) -> object:
        member = getattr(self._storage, verb)
        if not inspect.iscoroutinefunction(member):
            return member

        async def call(*args: object, **options: object) -> object:
            return await self._around(verb, lambda: member(*args, **options))

        return call


def counting(storage: Storage) -> tuple[Storage, Counter[str]]:
    """The same storage, and how often each of its verbs was called through it."""
    calls: Counter[str] = Counter()

    async def around(verb: str, call: Call) -> object:
        calls[verb] += 1
        return await call()

    return cast("Storage", _Wrapped(storage, around)), calls


class Faults:
    """How many of the next calls of each verb fail: before they reach the storage, or after it did its work."""

    def __init__(self) -> None:
        self.requests_lost: Counter[str] = Counter()
        self.replies_lost: Counter[str] = Counter()


def faulty(storage: Storage) -> tuple[Storage, Faults]:
    """The same storage behind a connection that loses requests and replies as `Faults` says."""
    faults = Faults()

    async def around(verb: str, call: Call) -> object:
        if faults.requests_lost[verb] > 0:
            faults.requests_lost[verb] -= 1
            raise StorageUnavailable(f"{verb}: the request was lost")
        answer = await call()
        if faults.replies_lost[verb] > 0:
            faults.replies_lost[verb] -= 1
            raise StorageUnavailable(f"{verb}: the reply was lost")
        return answer

    return cast("Storage", _Wrapped(storage, around)), faults
