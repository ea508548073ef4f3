"""A storage that takes no ids but its own, made to take those of the cases.

Each id that a case chooses stands for one from the storage's `next_id`, in what goes in and in what comes out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Final, Protocol, TypeVar, cast

from workers.jobs import (
    Cancelled,
    Claim,
    Completed,
    Continued,
    EnqueueResult,
    Failed,
    JobEvent,
    JobRecord,
    JobRef,
    JobStatus,
    Moved,
    NewJob,
    Page,
    ProgressReport,
    Recovery,
    Released,
    Retried,
    Settlement,
)
from workers.storage.base import Storage, Subscription
from workers.testing.stand_in import Method, StandIn

T = TypeVar("T")

_NAMES_JOBS: Final = frozenset(
    [
        "enqueue",
        "renew",
        "settle",
        "progress",
        "cancel",
        "status",
        "read",
        "result",
        "retry",
        "remove",
        "complete",
        "continue_job",
        "followed",
        "followers",
        "outcomes",
        "promote",
        "update_result_ttl",
    ]
)
"""The verbs whose first argument is an id, or ids, or has some."""
_LONGEST_BYTES: Final = 512


class GivesIds(Protocol):
    """A storage that says which ids its jobs may have."""

    async def next_id(self) -> str: ...


class GivenIds:
    """The ids of one queue as its storage has them, by those that cases chose, for all clients of a harness."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._chosen: dict[str, str] = {}
        self._giving = asyncio.Lock()

    async def learn(self, chosen: str, storage: GivesIds) -> None:
        """Get an id for the chosen one, unless it has one or is impossible."""
        async with self._giving:
            if chosen not in self._given and 0 < len(chosen.encode(errors="replace")) <= _LONGEST_BYTES:
                given = await storage.next_id()
                self._given[chosen], self._chosen[given] = given, chosen

    def given(self, chosen: str) -> str:
        return self._given.get(chosen, chosen)

    def chosen(self, given: str) -> str:
        return self._chosen.get(given, given)


def numbered(storage: Storage, ids: GivenIds) -> Storage:
    """Wrap the storage, which has a `next_id`, so that it takes any id."""
    return cast("Storage", _Numbered(storage, ids))


class _Numbered(StandIn):
    def __init__(self, storage: Storage, ids: GivenIds) -> None:
        super().__init__(storage)
        self._ids = ids

    async def _through(
        self, verb: str, method: Method, args: tuple[object, ...], options: Mapping[str, object]
    ) -> object:
        if args and verb in _NAMES_JOBS:
            args = (await self._inside(args[0]), *args[1:])
        return _renamed(await method(*args, **options), self._ids.chosen)

    def events(self) -> AbstractAsyncContextManager[Subscription]:
        return self._heard(self._storage.events)

    def cancel_requests(self) -> AbstractAsyncContextManager[Subscription]:
        return self._heard(self._storage.cancel_requests)

    @asynccontextmanager
    async def subscribe(self, job_id: str) -> AsyncIterator[Subscription]:
        given = await self._inside(job_id)
        async with self._heard(lambda: self._storage.subscribe(given)) as subscription:
            yield subscription

    @asynccontextmanager
    async def _heard(
        self, subscribe: Callable[[], AbstractAsyncContextManager[Subscription]]
    ) -> AsyncIterator[Subscription]:
        async with subscribe() as subscription:
            yield _NumberedSubscription(subscription, self._ids)

    async def _inside(self, value: T) -> T:
        """Return the argument with ids of the storage."""
        chosen: list[str] = []

        def note(one: str) -> str:
            chosen.append(one)
            return one

        _renamed(value, note)
        for one in chosen:
            await self._ids.learn(one, cast("GivesIds", self._storage))
        return _renamed(value, self._ids.given)


class _NumberedSubscription:
    def __init__(self, subscription: Subscription, ids: GivenIds) -> None:
        self._subscription = subscription
        self._ids = ids

    async def get(self) -> JobEvent:
        return _renamed(await self._subscription.get(), self._ids.chosen)


def _renamed(value: T, rename: Callable[[str], str]) -> T:
    """Return the value with every id in it renamed; what has no ids is unchanged."""
    return cast("T", _any_renamed(value, rename))


def _any_renamed(value: object, rename: Callable[[str], str]) -> object:
    match value:
        case str():
            return rename(value)
        case Moved() | list() | tuple():
            return _each_renamed(value, rename)
        case NewJob() | JobStatus() | EnqueueResult():
            return replace(value, id=rename(value.id))
        case JobRecord():
            return replace(value, status=_renamed(value.status, rename))
        case Claim() | JobEvent():
            return replace(value, job_id=rename(value.job_id))
        case Completed() | Continued() | Retried() | Failed() | Cancelled() | Released() | ProgressReport():
            return _claim_renamed(value, rename)
        case Recovery():
            return replace(value, requeued=_renamed(value.requeued, rename), failed=_renamed(value.failed, rename))
        case Page():
            return replace(value, jobs=_renamed(value.jobs, rename))
        case dict() if all(isinstance(key, JobRef) for key in value):
            return {_renamed(key, rename): found for key, found in value.items()}
    return value


def _each_renamed(value: Moved | list[object] | tuple[object, ...], rename: Callable[[str], str]) -> object:
    match value:
        case Moved():
            return Moved(map(rename, value.ids))
        case JobRef():
            return value._replace(id=rename(value.id))
    return type(value)(_renamed(one, rename) for one in value)


def _claim_renamed(value: Settlement | ProgressReport, rename: Callable[[str], str]) -> Settlement | ProgressReport:
    claim = _renamed(value.claim, rename)
    match value:
        case Completed():
            return replace(value, claim=claim, then=_renamed(value.then, rename))
        case Continued():
            return replace(value, claim=claim, then=_renamed(value.then, rename))
    return replace(value, claim=claim)
