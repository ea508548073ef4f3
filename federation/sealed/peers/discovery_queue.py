"""Discovery on behalf of deliveries, done once for all processes of a node.

Theory of operation. A delivery to an unknown server enqueues a job whose id is derived from the server, and waits for
its end; the discovery worker of any process runs it. Other deliveries, here or elsewhere, find the same job and wait
for the same end. The result is the row in the registry; the job's record is kept only until those who wait have seen
it. Deliveries and discoveries have workers of their own, so no slot ever waits for itself.

A discovery that takes longer than usual leaves its slot and goes on in overtime. Otherwise ten servers that hang would
keep all others from being discovered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Final

from pydantic import ValidationError

from federation.base.cache import SingleFlight
from federation.base.queues.job_data import DISCOVERY_JOB, DiscoveryJob
from federation.http.errors import BlockedUrl
from federation.sealed.peers.discovery import (
    INTRODUCTION_PATIENCE,
    DiscoverServer,
    DiscoveryError,
    DiscoveryPage,
    DiscoveryRefused,
    ServerBlacklisted,
    ServerRests,
)
from federation.sealed.peers.registry import KnownServer, Registry
from workers import (
    Job,
    JobCancelledError,
    JobFailedError,
    JobGoneError,
    JobState,
    JobTimeoutError,
    Queue,
    StorageUnavailable,
    UnrecoverableError,
)
from workers.specs import content_id

PATIENCE: Final = timedelta(seconds=10)
"""How long a delivery waits for a discovery; its next attempt finds the result."""
QUEUED_PATIENCE: Final = 6
"""How many times as long it waits for a discovery that has not begun: a queue of ours is not the server's fault."""
QUICK: Final = timedelta(milliseconds=250)
"""How long a discovery may hold its slot."""
SLOWER: Final = 2
"""How many times the usual duration it may hold the slot, where that is longer. Then this machine is slow, and more
discoveries at once would make it slower."""
LONGEST_STAY: Final = timedelta(seconds=5)


class QueuedDiscovery:
    """Callable as `Discovery` is; the node's discovery workers read `queue`."""

    def __init__(self, queue: Queue, registry: Registry, *, patience: timedelta = PATIENCE) -> None:
        self._queue = queue
        self._registry = registry
        self._patience = patience
        self._asking: SingleFlight[KnownServer] = SingleFlight()
        self._introducing: SingleFlight[None] = SingleFlight()

    async def __call__(self, server_url: str) -> KnownServer:
        """Have a worker discover the server, and return its row in the registry.

        Raises:
            DiscoveryError: it could not be discovered, or no worker finished within the patience.
            BlockedUrl: the guard refuses the URL; trying again cannot help.
        """
        return await self._asking.run(server_url, lambda: self._ask(server_url))

    async def until_introduced(self, server_url: str) -> None:
        """Wait a short time for the end of a discovery under way in any process; see `SharedDiscovery`."""
        await self._introducing.run(server_url, lambda: self._join(_job_id(server_url)))

    async def _join(self, job_id: str) -> None:
        with suppress(JobFailedError, JobCancelledError, JobGoneError, JobTimeoutError, StorageUnavailable):
            await self._queue.wait_for_job_chain_completion(job_id, INTRODUCTION_PATIENCE)

    async def close(self) -> None:
        """Stop waiting for discoveries."""
        await self._asking.close()
        await self._introducing.close()

    async def _ask(self, server_url: str) -> KnownServer:
        trouble = await self._wait_for(server_url)
        # Read after a failure, too: the server may be registered although asking it to register us took too long.
        known = await self._registry.find(server_url)
        if known is None:
            raise trouble or DiscoveryError(f"{server_url} was removed from the registry right after its discovery")
        return known

    async def _wait_for(self, server_url: str) -> DiscoveryError | None:
        """Wait until the discovery ends, or the patience does. Return what went wrong.

        Raises:
            BlockedUrl: the worker's guard refused the URL.
        """
        job, job_id = _job(server_url), _job_id(server_url)
        waits = begun = 0
        try:
            # Waits once more after the discovery has begun: that may be a moment ago, and it has a deadline of its own.
            while waits - begun < QUEUED_PATIENCE and begun < 2:
                try:
                    await self._queue.enqueue_and_wait(job, id=job_id, name=DISCOVERY_JOB, timeout=self._patience)
                except JobTimeoutError:
                    waits += 1
                    begun += await self._has_begun(job_id)
                else:
                    return None
        except JobFailedError as failure:
            return _trouble(failure, server_url)
        except (JobCancelledError, JobGoneError, StorageUnavailable) as error:
            return DiscoveryError(f"{server_url} was not discovered: {error}")
        seconds = waits * self._patience.total_seconds()
        return DiscoveryError(f"{server_url} was not discovered within {seconds:g} s; does a worker of ours run?")

    async def _has_begun(self, job_id: str) -> bool:
        """Tell whether one of our workers has the job, or had it, so that it does not wait behind others."""
        status = await self._queue.get_status(job_id)
        return status is None or status.state is not JobState.QUEUED


def _job(server_url: str) -> dict[str, object]:
    return DiscoveryJob(server_url=server_url).to_wire()


def _job_id(server_url: str) -> str:
    return content_id(_job(server_url))


def _trouble(failure: JobFailedError, server_url: str) -> DiscoveryError:
    if failure.original is None:
        return DiscoveryError(f"{server_url} could not be discovered")
    if failure.original.type == BlockedUrl.__name__:
        raise BlockedUrl(failure.original.message)
    return _TROUBLES.get(failure.original.type, DiscoveryError)(failure.original.message)


_TROUBLES: Final[Mapping[str, type[DiscoveryError]]] = {
    kind.__name__: kind for kind in (DiscoveryPage, DiscoveryRefused, ServerRests, ServerBlacklisted)
}


class DiscoveryProcessor:
    """Callable with a job of the discovery queue."""

    def __init__(self, discover: DiscoverServer) -> None:
        self._discover = discover
        self._usual = timedelta(0)  # about how long successful discoveries take

    async def __call__(self, job: Job) -> None:
        """Discover the server that the job names, and register it.

        Raises:
            DiscoveryError, BlockedUrl: as `Discovery`.
            UnrecoverableError: the job's data is malformed.
        """
        try:
            server_url = DiscoveryJob.model_validate(job.payload).server_url
        except ValidationError:
            raise UnrecoverableError(f"the data of job {job.id!r} is malformed: serverUrl must be a text") from None
        loop = asyncio.get_running_loop()
        started = loop.time()
        timer = loop.call_later(self._stay.total_seconds(), job.leave_slot)
        try:
            await self._discover(server_url)
        finally:
            timer.cancel()
        self._usual += (timedelta(seconds=loop.time() - started) - self._usual) / 20

    @property
    def _stay(self) -> timedelta:
        """How long the next discovery may hold its slot."""
        return max(QUICK, min(SLOWER * self._usual, LONGEST_STAY))
