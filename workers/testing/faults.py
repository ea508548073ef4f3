"""Storages that count the calls they get, or reach their server over a bad connection.

`faulty` wraps any storage. Faults are given call by call (`Faults`), or drawn from a seed (`RandomFaults`):

    storage, faults = faulty(MemoryStorage())
    faults.replies_lost["settle"] = 2  # the next two settle the job, and nobody is told

Whatever a fault does, the caller sees only what the contract allows: an answer, or `StorageUnavailable`.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Final, TypeAlias, cast

from workers.errors import StorageUnavailable
from workers.storage.abilities import ExchangesJobs, KeepsCrons, KeepsLimits, TakesLeave
from workers.storage.base import Storage
from workers.testing.stand_in import Method, StandIn

Call: TypeAlias = Callable[[], Awaitable[object]]
Around: TypeAlias = Callable[[str, Call], Awaitable[object]]


class Fault(StrEnum):
    """What happens to one call."""

    DELAYED = "delayed"
    """It reaches the storage late."""
    REQUEST_LOST = "request lost"
    """It fails before it reaches the storage."""
    REPLY_LOST = "reply lost"
    """The storage does its work, but the caller is told that it did not answer."""
    DUPLICATED = "duplicated"
    """The storage is called twice, as by a client that repeats calls by itself; the caller gets the second answer."""
    CUT = "cut"
    """It is cut off under way: it may have had its effect, as a whole or not at all."""


_VERBS: Final = frozenset(
    name
    for protocol in (Storage, ExchangesJobs, TakesLeave, KeepsCrons, KeepsLimits)
    for name, member in vars(protocol).items()
    if inspect.iscoroutinefunction(member) and name not in ("connect", "disconnect")
)
"""The verbs of the contract whose repetition is safe; a lost `disconnect` would only leak in the test."""


class Faults:
    """How many of the next calls of each verb suffer which fault, in the order of the attributes.

    A delayed call comes `delay` late.
    """

    def __init__(self, *, delay: timedelta = timedelta(milliseconds=5)) -> None:
        self.delay = delay
        self.delayed: Counter[str] = Counter()
        self.requests_lost: Counter[str] = Counter()
        self.replies_lost: Counter[str] = Counter()
        self.duplicated: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()

    def next(self, verb: str) -> Fault | None:
        """Return the fault of the call that is about to be made; called once per call."""
        planned = (self.delayed, self.requests_lost, self.replies_lost, self.duplicated, self.cut)
        for fault, calls in zip(Fault, planned, strict=True):
            if calls[verb] > 0:
                calls[verb] -= 1
                return fault
        return None


class RandomFaults(Faults):
    """Gives any fault to a share `rate` of the calls of `verbs`, drawn from `seed`.

    `verbs` defaults to all but `connect` and `disconnect`. `happened` counts them. The same seed and the same order of
    calls give the same faults.
    """

    def __init__(
        self,
        seed: int,
        *,
        rate: float = 0.2,
        verbs: Collection[str] = _VERBS,
        delay: timedelta = timedelta(milliseconds=5),
    ) -> None:
        super().__init__(delay=delay)
        self.happened: Counter[Fault] = Counter()
        self._random = random.Random(seed)  # noqa: S311 - repeatable by its seed, protects nothing
        self._rate = rate
        self._verbs = frozenset(verbs)

    def next(self, verb: str) -> Fault | None:
        fault = super().next(verb)
        if fault is None and verb in self._verbs and self._random.random() < self._rate:
            fault = self._random.choice(list(Fault))
        if fault is not None:
            self.happened[fault] += 1
        return fault


class _Wrapped(StandIn):
    """A storage whose coroutine methods are all called through `around`; everything else is unchanged."""

    def __init__(self, storage: Storage, around: Around) -> None:
        super().__init__(storage)
        self._around = around

    async def _through(
        self, verb: str, method: Method, args: tuple[object, ...], options: Mapping[str, object]
    ) -> object:
        return await self._around(verb, lambda: method(*args, **options))


def counting(storage: Storage, *, ended: bool = False) -> tuple[Storage, Counter[str]]:
    """Wrap the storage, and count the calls of each verb made through it.

    With `ended`, calls are counted when they have ended.
    """
    calls: Counter[str] = Counter()

    async def around(verb: str, call: Call) -> object:
        calls[verb] += not ended
        try:
            return await call()
        finally:
            calls[verb] += ended

    return cast("Storage", _Wrapped(storage, around)), calls


def faulty(storage: Storage, faults: Faults | None = None) -> tuple[Storage, Faults]:
    """Wrap the storage in a connection on which calls suffer what `faults` says; by default nothing yet."""
    faults = Faults() if faults is None else faults

    async def around(verb: str, call: Call) -> object:
        fault = faults.next(verb)
        if fault is Fault.REQUEST_LOST:
            raise StorageUnavailable(f"{verb}: the request was lost")
        if fault is Fault.CUT:
            await _cut(call)
            raise StorageUnavailable(f"{verb}: the connection was cut")
        if fault is Fault.DELAYED:
            await asyncio.sleep(faults.delay.total_seconds())
        if fault is Fault.DUPLICATED:
            await call()
        answer = await call()
        if fault is Fault.REPLY_LOST:
            raise StorageUnavailable(f"{verb}: the reply was lost")
        return answer

    return cast("Storage", _Wrapped(storage, around)), faults


async def _cut(call: Call) -> None:
    """Begin the call and break it off where it first has to wait; its answer is lost."""
    under_way = asyncio.ensure_future(call())
    try:
        await asyncio.sleep(0)
    finally:
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)
