"""An outage that outlasts all retries, and what a process that is killed in the middle of its end makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import func, select
from sqlmodel import col

from db import DeliveryJob, DeliveryState, HoldReason, LinkState
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from federation.servers.link_rules import Link
from tests import warm
from tests.acceptance.site import all_jobs_completed, job_states, numbered, owe
from tests.acceptance.worker_process import WorkerProcess
from tests.misbehaving import hang, reset, respond
from tests.patience import LONG_PATIENCE_SECONDS, PATIENCE_SECONDS, eventually, until
from tests.peer import Peer, acquaint
from workers import JobState

EARLY, LATE = 10, 50
MAINTENANCE = respond(502, {"Content-Type": "text/html"}, b"<h1>Bad Gateway</h1>")


@pytest.fixture
def environment(base_environment: dict[str, str], place: dict[str, object]) -> dict[str, str]:
    """Settings of a node whose retries and looks at servers follow each other quickly."""
    return {
        **base_environment,
        "FEDERATION_LEASE": "5s",
        "FEDERATION_DELIVERY_BACKOFF": "100ms",
        "FEDERATION_OUTBOX_INTERVAL": "1s",
        "FEDERATION_HEALTH_FIRST_DELAY": "100ms",
        "FEDERATION_HEALTH_STEP": "50ms",
        "FEDERATION_LONG_PROBE_FIRST": "1s",
        "FEDERATION_LONG_PROBE_MAXIMUM": "1s",
        "FEDERATION_PROBE_INTERVAL": "500ms",
        **{name.upper(): str(value) for name, value in place.items()},
    }


@pytest.mark.timeout(600)
async def test_an_outage_loses_nothing(federation: Federation, worker: WorkerProcess, peer: Peer) -> None:
    """A server resets connections, then answers as a proxy without what is behind it, then is back, and gets all once.

    What was owed to it is held as soon as its attempts are used up, what is new at once. It takes a delivery that gets
    through to show that it is back; the worker is killed while what was held goes out.
    """
    await acquaint(federation, peer)
    await worker.start()
    sent = await owe(federation, peer, ["before"])
    await until(lambda: len(peer.applied) == 1)

    healthy, discover = peer.server.default, dict(peer.server.routes)
    peer.server.default = reset()
    peer.server.routes.clear()
    sent += await owe(federation, peer, numbered("early", EARLY))
    await link_until(federation, peer, lambda link: link.state is LinkState.DOWN)
    sent += await owe(federation, peer, numbered("late", LATE))
    await eventually(lambda: waiting(federation), lambda found: found == {HoldReason.SERVER: EARLY + LATE})
    assert await federation.delivery_queue.storage.status(sent[1:]) == [None] * (EARLY + LATE)

    peer.server.default = MAINTENANCE
    peer.server.routes.update(discover)
    assert await look_now(worker, peer) == 0
    await until(lambda: canaries_failed(federation))
    await eventually(lambda: waiting(federation), lambda found: found == {HoldReason.SERVER: EARLY + LATE})
    assert (await federation.links.find(peer.url)).state is LinkState.DOWN
    assert len(peer.applied) == 1

    peer.server.default = healthy
    assert await look_now(worker, peer) == 0
    await until(lambda: len(peer.applied) > EARLY)
    worker.kill()
    assert len(peer.applied) < len(sent), "everything had gone out when it was killed"
    await worker.start()
    await eventually(lambda: waiting(federation), lambda found: not found, patience=LONG_PATIENCE_SECONDS)
    assert sorted(each.activity_id for each in peer.applied) == sorted(
        ["before", *numbered("early", EARLY), *numbered("late", LATE)]
    )
    assert peer.refused == []

    await all_jobs_completed(federation)
    assert worker.terminate() == 0
    assert await job_states(federation) == {JobState.COMPLETED}


@pytest.mark.spread("place")
@pytest.mark.timeout(600)
async def test_another_key_holds_what_is_owed(federation: Federation, worker: WorkerProcess, peer: Peer) -> None:
    """A server whose name somebody else has now gets nothing, and loses nothing: it waits for its own keys."""
    await acquaint(federation, peer)
    await worker.start()
    own, peer.keys = peer.keys, generate_own_keys()
    sent = numbered("owed", EARLY)
    await owe(federation, peer, sent)
    link = await link_until(federation, peer, lambda link: link.state is not LinkState.UP)
    assert (link.state, link.reason) == (LinkState.MISMATCH, "KEY_MISMATCH")
    await eventually(lambda: waiting(federation), lambda found: found == {HoldReason.SERVER: EARLY})
    assert await look_now(worker, peer) == 1
    assert (await federation.links.find(peer.url)).state is LinkState.MISMATCH

    peer.keys = own
    assert await look_now(worker, peer) == 0
    await eventually(lambda: waiting(federation), lambda found: not found)
    assert sorted(each.activity_id for each in peer.applied) == sorted(sent)
    assert worker.terminate() == 0


@pytest.mark.spread("place")
@pytest.mark.timeout(600)
async def test_a_server_that_says_nothing_loses_nothing(
    federation: Federation, worker: WorkerProcess, peer: Peer
) -> None:
    """It takes connections and is silent: its deliveries are held, another server's go out meanwhile, and it gets all
    of them, each once, when it speaks again."""
    async with Peer(generate_own_keys()) as other:
        await acquaint(federation, peer)
        await acquaint(federation, other)
        await worker.start()
        answer, discover = peer.server.default, dict(peer.server.routes)
        peer.server.default = hang()
        peer.server.routes.clear()
        sent = numbered("owed", EARLY)
        await owe(federation, peer, sent)
        await until(lambda: peer.server.requests)
        await owe(federation, other, sent)
        await until(lambda: len(other.applied) == EARLY)
        assert (await waiting(federation)).keys() <= {None, HoldReason.BUSY}, "others waited for its deadline"
        await link_until(federation, peer, lambda link: link.state is LinkState.DOWN)
        await eventually(lambda: waiting(federation), lambda found: found == {HoldReason.SERVER: EARLY})

        peer.server.default = answer
        peer.server.routes.update(discover)
        assert await look_now(worker, peer) == 0
        await eventually(lambda: waiting(federation), lambda found: not found)
        assert sorted(each.activity_id for each in peer.applied) == sorted(sent)
        assert worker.terminate() == 0


async def link_until(federation: Federation, peer: Peer, holds: Callable[[Link], bool]) -> Link:
    """The link to the peer as it was when it was so."""
    return await eventually(lambda: federation.links.find(peer.url), holds)


async def waiting(federation: Federation) -> dict[HoldReason | None, int]:
    """How many deliveries are left, by what they wait for; none has been given up."""
    query = select(col(DeliveryJob.state), col(DeliveryJob.held_reason), func.count())
    async with federation.database.read() as session:
        rows = await session.execute(query.group_by(col(DeliveryJob.state), col(DeliveryJob.held_reason)))
        found = {(state, reason): number for state, reason, number in rows}
    assert {state for state, _ in found} <= {DeliveryState.READY, DeliveryState.HELD}
    return {reason: number for (_, reason), number in found.items()}


async def canaries_failed(federation: Federation) -> int:
    """How many deliveries went ahead to a server that is away, and are held again."""
    query = select(func.count()).select_from(DeliveryJob)
    query = query.where(col(DeliveryJob.canary_at).is_not(None), col(DeliveryJob.state) == DeliveryState.HELD)
    async with federation.database.read() as session:
        return (await session.execute(query)).scalar_one()


async def look_now(worker: WorkerProcess, peer: Peer) -> int:
    """The exit status of `federation servers probe`, which brings the next look at the peer forward."""
    process = await asyncio.create_subprocess_exec(
        *(warm.PYTHON, "-m", "federation", "servers", "probe", peer.url),
        env=dict(worker.environment),
        cwd=worker.directory,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await process.wait()
