"""The common part of storages whose every transition is a script on a Redis or Valkey server."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from workers.errors import LossReason, StorageError, StorageFull, WorkersError
from workers.jobs import (
    UNCOUNTED_RETRIES,
    CancelResult,
    Claim,
    JobState,
    Moved,
    Released,
    Renewal,
    Settlement,
    SettleOutcome,
    SettleStatus,
)
from workers.storage.abilities import Exchange
from workers.storage.on_redis.batches import AT_ONCE, in_steps, portions
from workers.storage.on_redis.claiming import claimed, exchanged
from workers.storage.on_redis.messages import STATES, pack, unpack
from workers.storage.rules import check_claim, refuse_transaction, weight
from workers.storage.unread import Unread

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from datetime import timedelta

    from workers.jobs import Repaired, SetAside
    from workers.storage.abilities import ServerFault
    from workers.storage.base import Capabilities
    from workers.storage.on_redis.quarantine import Quarantine
    from workers.storage.on_redis.scripts import ScriptCall
    from workers.storage.on_redis.server import RedisServer
    from workers.storage.on_redis.subscribers import ChannelSubscribers
    from workers.storage.on_redis.wire import Reply
    from workers.storage.subscribers import BufferedSubscription

RESULTS_AT_ONCE: Final = 100
"""How many results are read in one step at most, when many are asked for at the same time."""
CORRUPT: Final = "what Redis has in place of the job is no record of this queue"

CANCEL_REQUESTED: Final = 6
OUTCOMES: Final[Mapping[int, SettleOutcome]] = {
    0: SettleOutcome(status=SettleStatus.APPLIED),
    1: SettleOutcome(status=SettleStatus.ALREADY_APPLIED),
    2: SettleOutcome(status=SettleStatus.LOST, reason=LossReason.TAKEN),
    3: SettleOutcome(status=SettleStatus.LOST, reason=LossReason.COMPLETED),
    4: SettleOutcome(status=SettleStatus.LOST, reason=LossReason.NOT_FOUND),
    5: SettleOutcome(status=SettleStatus.ERROR, detail=CORRUPT),
}
"""The meaning of the codes that scripts return for a settlement or renewal."""


Settling: TypeAlias = "tuple[Sequence[object], Callable[[Sequence[int]], Sequence[SettleOutcome]]]"
Claiming: TypeAlias = "tuple[tuple[str | bytes | int, ...], Callable[[Reply], Sequence[Claim]]]"


def outcomes_of_codes(faults: Sequence[SettleOutcome | None], codes: Sequence[int]) -> list[SettleOutcome]:
    """Return an outcome for each settlement: its fault, or what the next of the codes means."""
    rest = iter(codes)
    return [fault or OUTCOMES[next(rest)] for fault in faults]


HEAD: Final = 1
"""Which of the arguments of a script `claim` the tokens begin with."""
RELEASED: Final = 4
"""The kind of a settlement that gives a job back, as scripts take it."""


class Scripts(Protocol):
    """The scripts of one layout, of one queue."""

    server: RedisServer

    async def run(self, name: str, *arguments: str | bytes | int) -> Reply:
        """Run the script and return its answer."""

    async def run_all(self, *calls: ScriptCall) -> list[Reply]:
        """Run several scripts in one round trip, each for itself; one that failed answers a `StorageError`."""


class ScriptedStorage(ABC):
    """One queue: the methods that are the same whatever the layout of its keys.

    Its layout sets the scripts before this part is made, and the quarantine after.
    """

    ids_at_once: int = AT_ONCE
    """How many jobs one script of an operator handles at most."""

    capabilities: Capabilities
    """What is known of the server comes with `connect`."""

    exchanges_at_once: Final = 2

    _lua: Scripts
    _quarantine: Quarantine

    def __init__(self, name: str, subscribers: ChannelSubscribers, *, allow_eviction: bool) -> None:
        self._name = name
        self._server = self._lua.server
        self._allow_eviction = allow_eviction
        self._subscribers = subscribers
        self._declared = self.capabilities
        self._unread = Unread[str | bytes | int]()

    @abstractmethod
    async def _look(self, names: Collection[str]) -> float | None:
        """Return None when a claim for these names may succeed, else for how many seconds to rely on being woken."""

    @abstractmethod
    def _packed_ids(self, ids: Sequence[str]) -> bytes:
        """Pack the ids of several jobs as scripts take them."""

    @abstractmethod
    def _held(self, claim: Claim) -> tuple[bytes, bytes, int]:
        """Return the job's id in Redis, the token and the lease, as scripts take them."""

    @abstractmethod
    def _settling(self, settlements: Sequence[Settlement]) -> Settling:
        """Return what the script `settle` takes, and what makes the outcomes of its codes."""

    @abstractmethod
    def _claiming(self, worker_id: str, leases: Mapping[str, timedelta], limit: int) -> Claiming:
        """Return the arguments of the script `claim`, and what makes the claims of its answer."""

    @abstractmethod
    async def settle(
        self, settlements: Sequence[Settlement], *, connection: object | None = None
    ) -> list[SettleOutcome]:
        """See `Storage.settle`."""

    @property
    def queue(self) -> str:
        return self._name

    async def claim(self, worker_id: str, *, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        """See `Storage.claim`; if it is cancelled meanwhile, what it claimed is released.

        At most 1 000 jobs at once.
        """
        check_claim(worker_id, leases)
        if not leases:
            return []
        await self._unread.give_back(self._give_back)
        return await claimed(self._claim(worker_id, leases, limit), self.settle)

    async def settle_and_claim(
        self, settlements: Sequence[Settlement], worker_id: str, *, leases: Mapping[str, timedelta], limit: int
    ) -> Exchange:
        """See `ExchangesJobs.settle_and_claim`; if it is cancelled meanwhile, what it claimed is released."""
        check_claim(worker_id, leases)
        # What is claimed must not be lost with a confirmation of what is settled.
        if not leases or self._server.confirms or len(list(portions(settlements, weight))) > 1:
            return Exchange(outcomes=await self.settle(settlements))
        await self._unread.give_back(self._give_back)
        return await exchanged(self._exchange(settlements, self._claiming(worker_id, leases, limit)), self.settle)

    async def _give_back(self, head: str | bytes | int) -> None:
        """Release, uncounted, the jobs whose claims have tokens that begin with `head`."""
        found = unpack(await self._lua.run("unread", head))
        if found:
            released = [(job_id, token, RELEASED) for job_id, token in zip(found[::2], found[1::2], strict=True)]
            await self._lua.run("settle", pack(released), UNCOUNTED_RETRIES)

    async def _claim(self, worker_id: str, leases: Mapping[str, timedelta], limit: int) -> list[Claim]:
        claims: list[Claim] = []
        while limit > len(claims):
            arguments, claims_of = self._claiming(worker_id, leases, limit - len(claims))
            with self._unread.claiming(arguments[HEAD]):
                answer = await self._run_claim(arguments)
            brought = claims_of(unpack(answer))
            claims += brought
            if len(brought) < AT_ONCE:
                break
        return claims

    async def _run_claim(self, arguments: tuple[str | bytes | int, ...]) -> Reply:
        return await self._lua.run("claim", *arguments)

    async def _run_exchange(self, settlements: bytes, wanted: tuple[str | bytes | int, ...]) -> Sequence[Reply]:
        """Return what `settle` and `claim` answer, in one round trip; of one that failed, a `StorageError`."""
        return await self._lua.run_all(("settle", (settlements, UNCOUNTED_RETRIES)), ("claim", wanted))

    async def _exchange(self, settlements: Sequence[Settlement], claiming: Claiming) -> Exchange:
        encoded, outcomes = self._settling(settlements)
        wanted, claims = claiming
        try:
            with self._unread.claiming(wanted[HEAD]):
                settled, brought = await self._run_exchange(pack(encoded), wanted)
        except StorageFull:  # for settlements there is a way, and for claims as well
            return Exchange(outcomes=await self.settle(settlements))
        taken = None if isinstance(brought, StorageError) else claims(unpack(brought))
        if not isinstance(settled, StorageError):
            return Exchange(outcomes=outcomes(unpack(settled)), claims=taken)
        try:
            return Exchange(outcomes=await self.settle(settlements), claims=taken)
        except BaseException:
            with suppress(WorkersError):  # the leases will run out
                await self.settle([Released(claim=claim) for claim in taken or ()])
            raise

    async def connect(self) -> None:
        await self._server.open()
        self.capabilities = self._server.seen.known(self._declared)

    async def examine(self) -> None:
        """Look at the server again, unless that was done a moment ago: another may have taken its place."""
        await self._server.examine()
        self.capabilities = self._server.seen.known(self._declared)

    def faults(self) -> list[ServerFault]:
        return self._server.seen.faults(allow_eviction=self._allow_eviction)

    async def disconnect(self) -> None:
        if self._server.in_last_use:
            await self._subscribers.close()
        await self._server.close()

    def forget_loop(self) -> None:
        self._subscribers.forget()
        self._server.forget()

    async def wait(self, names: Collection[str], *, timeout: timedelta) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout.total_seconds()
        with self._subscribers.woken(names) as woken:
            while not woken.is_set():
                await self._subscribers.hear_wake_ups()
                trusted = await self._look(names)
                left = deadline - clock()
                if trusted is None or left <= 0:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, trusted)):
                        await woken.wait()

    async def renew(self, claims: Sequence[Claim]) -> Renewal:
        lost: dict[str, LossReason] = {}
        cancel_requested: set[str] = set()
        for some in portions(claims):
            workers = {one.worker_id.encode() for one in some}
            answer = unpack(await self._lua.run("renew", pack([self._held(one) for one in some]), *workers))
            for at, code in zip(answer[::2], answer[1::2], strict=True):
                token = some[at - 1].token
                if code == CANCEL_REQUESTED:
                    cancel_requested.add(token)
                else:
                    lost[token] = OUTCOMES[code].reason or LossReason.ERROR
        return Renewal(lost=lost, cancel_requested=frozenset(cancel_requested))

    def events(self) -> AbstractAsyncContextManager[BufferedSubscription]:
        return self._subscribers.subscribe(None)

    def cancel_requests(self) -> AbstractAsyncContextManager[BufferedSubscription]:
        return self._subscribers.cancel_requests()

    def subscribe(self, job_id: str) -> AbstractAsyncContextManager[BufferedSubscription]:
        return self._subscribers.subscribe(job_id)

    async def farewell(self, worker_id: str) -> None:
        await self._lua.run("farewell", worker_id.encode())

    async def pause(self) -> None:
        await self._lua.run("pause", 1)

    async def resume(self) -> None:
        await self._lua.run("pause", 0)

    async def is_paused(self) -> bool:
        return bool(await self._lua.run("paused"))

    async def retry(self, ids: Sequence[str]) -> Moved:
        moved: list[str] = []
        for some in portions(ids, at_once=self.ids_at_once):
            places = await self._lua.run("retry", self._packed_ids(some))
            moved += [some[place - 1] for place in places]
        return Moved(moved)

    async def remove(self, ids: Sequence[str], *, running: bool = False, connection: object | None = None) -> int:
        refuse_transaction(connection, type(self).__name__)
        return await self._each("remove", ids, int(running))

    async def promote(self, ids: Sequence[str]) -> int:
        return await self._each("promote", ids)

    async def drain(self) -> int:
        return await in_steps(lambda some: self._lua.run("drain", some))

    def news(self) -> list[SetAside]:
        return self._quarantine.news()

    async def quarantine(self) -> list[SetAside]:
        return await self._quarantine.entries()

    async def repair(self, *, drop: bool = False) -> list[Repaired]:
        return await self._quarantine.repair(drop=drop)

    async def _each(self, script: str, ids: Sequence[str], *how: int) -> int:
        count = 0
        for some in portions(ids, at_once=self.ids_at_once):
            count += int(await self._lua.run(script, self._packed_ids(some), *how))
        return count


def cancel_result(code: Reply) -> CancelResult:
    """Return the result of a cancel, from the state that its script found the job in."""
    if code not in STATES:
        return CancelResult.NOT_FOUND
    state = STATES[code]
    return CancelResult(state.value) if state.is_final or state is JobState.PROCESSING else CancelResult.CANCELLED
