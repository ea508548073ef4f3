"""The recurring jobs of a node, each run by one of its processes at a time, under a lease.

What every process does beside its workers is in `FederationWorkers`, as ticks of `tending`: it looks at absent servers
each second, and releases what was held for them four times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from federation.activitypub.actors import reseal_all
from federation.base.own_keys import drop_old_pair
from federation.retention import Purge
from federation.rollups.job import INTERVAL, Rollups
from federation.scheduler.analytics import NightlyAnalytics
from federation.scheduler.runner import JobFailed, RecurringJob
from federation.sealed.peers.key_rotation import KeyRotation
from federation.sealed.purge import SealedPurge
from workers import Queue

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

SWEPT_AT_ONCE: Final = 200
PAUSE: Final = timedelta(milliseconds=5)


def recurring_jobs(federation: Federation) -> tuple[RecurringJob, ...]:
    """Return the recurring jobs of this node."""
    return (*_of_every_node(federation), *_of_some_nodes(federation))


def _of_every_node(federation: Federation) -> Iterator[RecurringJob]:
    settings, database = federation.settings, federation.database
    yield RecurringJob(
        name="outbox-sweep",
        does="adds the jobs of ready deliveries that have none, and moves held ones on whose time has come",
        interval=settings.federation_outbox_interval,
        run=_outbox_sweep(federation),
    )
    yield RecurringJob(
        name="long-range-probes",
        does="probes servers that have been down for hours",
        interval=settings.federation_probe_interval,
        run=federation.long_range_probes,
    )
    yield RecurringJob(
        name="purge",
        does="deletes settled deliveries, attempts, rotations, news of follows and unused registrations in time",
        interval=timedelta(hours=1),
        run=Purge(
            database,
            of_wires=[SealedPurge(database), *([federation.activitypub.purge] if federation.activitypub else [])],
            sweeps=federation.sweeps,
            keep_attempts=settings.federation_keep_attempts,
            clock=federation.clock,
        ),
    )
    yield RecurringJob(
        name="rollups",
        does="counts attempts by minute, and deliveries by server and state, for those who look",
        interval=INTERVAL,
        run=Rollups(database, clock=federation.clock),
    )
    ours = (*federation.delivery_queues.all, federation.health_check_queue, federation.discovery_queue)
    yield RecurringJob(
        name="storage-sweep",
        does="removes expired jobs and results, also from queues that no worker works on",
        interval=timedelta(minutes=10),
        run=_storage_sweep([*ours, federation.tasks_queue]),
    )


def _of_some_nodes(federation: Federation) -> Iterator[RecurringJob]:
    settings = federation.settings
    if (rotation := federation.key_rotation) is not None:
        yield RecurringJob(
            name="key-rotation",
            does="asks servers that do not know our new keys again, and drops the old ones when nobody needs them",
            interval=timedelta(minutes=5),
            run=_key_rotation(rotation, settings.key_file(), partial(reseal_all, federation.database, federation.keys)),
        )
    if (activitypub := federation.activitypub) is not None:
        yield RecurringJob(
            name="received-sweep",
            does="adds the jobs of activities that others sent and that have none",
            interval=timedelta(minutes=1),
            run=activitypub.received.sweep,
        )
    if settings.federation_analytics_out is not None:
        yield RecurringJob(
            name="analytics",
            does="computes scorecards, relay ranking and report, once a day",
            interval=timedelta(minutes=20),
            run=NightlyAnalytics(settings.federation_analytics_out),
            timeout=timedelta(hours=6),
        )


def _key_rotation(
    rotation: KeyRotation, file: Path | None, reseal: Callable[[], Awaitable[object]]
) -> Callable[[], Awaitable[Mapping[str, object]]]:
    async def rotate() -> Mapping[str, object]:
        done = {**await rotation(), "dropped": file is not None and await _drop_old_pair(rotation, file, reseal)}
        if missing := await rotation.missing():
            told = f"{missing} servers know this node by keys that this process has not: restart it, or set them"
            raise JobFailed(told)
        return done

    return rotate


async def _drop_old_pair(rotation: KeyRotation, file: Path, reseal: Callable[[], Awaitable[object]]) -> bool:
    """Drop the old pair if nobody needs it any more. Return whether it was dropped."""
    newest = rotation.newest
    if not await rotation.is_over():
        return False
    await reseal()  # keys of actors that were made since by who had not seen the new pair yet
    await rotation.forget_old(newest)  # blacklisted servers still needed it, and may not stay blacklisted for ever
    try:
        return drop_old_pair(file, newest=newest)
    except OSError as error:
        raise JobFailed(f"the old keys stay in {file}: {type(error).__name__}") from None


def _outbox_sweep(federation: Federation) -> Callable[[], Awaitable[Mapping[str, object]]]:
    async def sweep() -> Mapping[str, object]:
        return {**asdict(await federation.outbox_sweeper.sweep()), **await federation.held_sweeper.sweep()}

    return sweep


def _storage_sweep(queues: Sequence[Queue]) -> Callable[[], Awaitable[Mapping[str, object]]]:
    async def sweep() -> Mapping[str, object]:
        removed = 0
        for queue in queues:
            await queue.start()
            gone = SWEPT_AT_ONCE
            while gone >= SWEPT_AT_ONCE:
                gone = await queue.storage.sweep(SWEPT_AT_ONCE)
                removed += gone
                await asyncio.sleep(PAUSE.total_seconds())  # let claims have their turn
        return {"removed": removed}

    return sweep
