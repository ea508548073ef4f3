"""Deliveries to an unknown server: all processes of a node discover it once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import select

from db import DeliveryJob, Server
from federation.base.queues.job_data import DISCOVERY_JOB
from federation.base.queues.queue import DISCOVERY_QUEUE_NAME
from federation.http.errors import BlockedUrl
from federation.runtime.composition import Federation
from federation.runtime.workers import FederationWorkers
from federation.sealed.peers.discovery import DiscoveryError
from federation.sealed.peers.discovery_queue import QueuedDiscovery
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import post_payload
from tests.misbehaving import Exchange, Received, hang, respond
from tests.patience import until
from tests.peer import DISCOVER_PATH, POSTS_PATH, UNKNOWN_SENDER, Peer
from workers import JobState, Worker

pytestmark = pytest.mark.spread("queue_settings")


@asynccontextmanager
async def process(make_settings: MakeSettings, **settings: object) -> AsyncIterator[Federation]:
    """What one process of the node holds, its workers running."""
    federation = Federation(make_settings(**settings))
    workers = FederationWorkers(federation)
    workers.start()
    yield federation
    workers.request_stop()
    await workers.stop()
    await federation.close()


@pytest.fixture
async def worker(federation: Federation) -> AsyncIterator[None]:
    """Only discoveries are worked on."""
    running = Worker(federation.worker_storage(DISCOVERY_QUEUE_NAME), {DISCOVERY_JOB: federation.discovery_processor})
    task = asyncio.create_task(running.run())
    yield
    running.stop()
    await task


async def owe(federation: Federation, peer: Peer, count: int) -> None:
    async with federation.outbox.transaction() as session:
        for number in range(count):
            payload = post_payload(f"p{number}")
            await federation.outbox.enqueue_delivery(session, "deliver-post", peer.url + POSTS_PATH, peer.url, payload)


async def test_a_hundred_deliveries_of_several_processes_discover_once(
    make_settings: MakeSettings, queue_settings: dict[str, object], peer: Peer
) -> None:
    """Three processes at once: one GET, one REGISTER, and each delivery arrives with its first attempt after that.

    Attempts wait for the REGISTER for two seconds. On a slow machine the peer does not know us yet by then.
    """
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(
                process(
                    make_settings,
                    federation_delivery_concurrency=40,
                    federation_per_server=40,
                    federation_lease="1m",  # whatever loses its lease on a slow machine is delivered twice
                    **queue_settings,
                )
            )
            for _ in range(3)
        ]
        await owe(processes[0], peer, 100)

        async def all_settled() -> bool:
            async with processes[0].database.read() as session:
                return (await session.execute(select(DeliveryJob.id))).first() is None

        await until(all_settled)

    assert peer.discoveries == ["GET", "REGISTER"]
    assert len(peer.applied) == 100
    assert set(peer.refused) <= {UNKNOWN_SENDER}
    assert len(peer.deliveries) - len(peer.refused) == 100


async def test_a_single_slot_does_not_wait_for_itself(make_settings: MakeSettings, peer: Peer) -> None:
    """One delivery at a time, one discovery at a time: the delivery waits for the discovery, which has a worker."""
    settings = {"federation_delivery_concurrency": 1, "federation_discovery_concurrency": 1}
    async with process(make_settings, **settings) as federation:
        await owe(federation, peer, 3)

        async def delivered() -> bool:
            return len(peer.applied) == 3

        await until(delivered)


async def test_a_server_that_hangs_keeps_no_other_from_being_discovered(
    make_settings: MakeSettings, peer: Peer
) -> None:
    """Its discovery leaves the only slot, and goes on."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with process(make_settings, federation_discovery_concurrency=1) as federation:
            hanging = asyncio.create_task(
                federation.queued_discovery(f"http://127.0.0.1:{silent.getsockname()[1]}"), name="hanging"
            )

            async def is_under_way() -> bool:
                return (await federation.discovery_queue.counts())[JobState.PROCESSING] == 1

            await until(is_under_way)
            assert (await federation.queued_discovery(peer.url)).url == peer.url
            assert not hanging.done()
            hanging.cancel()


@pytest.mark.usefixtures("worker")
async def test_a_failed_discovery_says_why_and_can_be_tried_again(federation: Federation, peer: Peer) -> None:
    """Each asker gets the worker's reason; the next one starts a new discovery."""
    works = peer.server.routes[DISCOVER_PATH]
    peer.server.routes[DISCOVER_PATH] = respond(500)
    with pytest.raises(DiscoveryError, match="/discover answered with status 500"):
        await federation.queued_discovery(peer.url)

    peer.server.routes[DISCOVER_PATH] = works
    assert (await federation.queued_discovery(peer.url)).public_key == peer.keys.signing.public_text


@pytest.mark.usefixtures("worker")
async def test_a_refused_address_is_refused_through_the_queue(federation: Federation) -> None:
    """What the worker's guard refuses is permanent for the delivery that asked."""
    with pytest.raises(BlockedUrl):
        await federation.queued_discovery("http://10.0.0.1")


async def test_patience_ends(federation: Federation, peer: Peer) -> None:
    """Without a worker nobody is held up for longer than agreed, and the job stays for the one that comes."""
    impatient = QueuedDiscovery(federation.discovery_queue, federation.registry, patience=timedelta(seconds=0.5))
    with pytest.raises(DiscoveryError, match=r"not discovered within 3(\.5)? s"):
        await impatient(peer.url)
    assert (await federation.discovery_queue.counts())[JobState.QUEUED] == 1


async def test_who_waits_behind_others_here_is_not_out_of_patience(federation: Federation, peer: Peer) -> None:
    """The time until a worker of ours begins with a server says nothing of the server."""
    patient = QueuedDiscovery(federation.discovery_queue, federation.registry, patience=timedelta(seconds=1))
    asking = asyncio.create_task(patient(peer.url))
    await asyncio.wait([asking], timeout=1.5)
    running = Worker(federation.worker_storage(DISCOVERY_QUEUE_NAME), {DISCOVERY_JOB: federation.discovery_processor})
    task = asyncio.create_task(running.run())
    assert (await asking).url == peer.url
    running.stop()
    await task


@pytest.mark.usefixtures("worker")
async def test_a_server_registered_in_time_is_used_though_its_discovery_goes_on(
    federation: Federation, peer: Peer
) -> None:
    """The peer never answers our REGISTER; its keys are there before that."""
    document, forever = peer.server.routes[DISCOVER_PATH], hang()
    peer.server.routes[DISCOVER_PATH] = lambda request, exchange: (
        document(request, exchange) if request.method == "GET" else forever(request, exchange)
    )
    patient = QueuedDiscovery(federation.discovery_queue, federation.registry, patience=timedelta(seconds=1))
    assert (await patient(peer.url)).url == peer.url


async def test_a_delivery_waits_until_the_server_has_registered_us(make_settings: MakeSettings, peer: Peer) -> None:
    """Though its keys are in the registry by then: the peer would refuse a stranger's delivery."""
    answer, registering, answers = peer.server.routes[DISCOVER_PATH], asyncio.Event(), asyncio.Event()

    async def register_late(request: Received, exchange: Exchange) -> None:
        if request.method == "POST":
            registering.set()
            await answers.wait()
        await answer(request, exchange)

    peer.server.routes[DISCOVER_PATH] = register_late
    async with process(make_settings) as one, process(make_settings) as other:
        discovery = asyncio.create_task(one.queued_discovery(peer.url))
        await registering.wait()
        await owe(other, peer, 1)
        begun = asyncio.create_task(other.queued_discovery.until_introduced(peer.url))
        asyncio.get_running_loop().call_later(0.3, answers.set)
        await begun
        assert answers.is_set()
        await discovery

        async def delivered() -> bool:
            return len(peer.applied) == 1

        await until(delivered)
    assert len(peer.deliveries) == 1


@pytest.mark.usefixtures("worker")
async def test_malformed_jobs_fail_at_once(federation: Federation) -> None:
    """Somebody else's job is refused by name, and not tried again."""
    await federation.discovery_queue.enqueue({"server": "x"}, name=DISCOVERY_JOB, id="odd", max_attempts=5)

    async def failed() -> bool:
        status = await federation.discovery_queue.get_status("odd")
        return status is not None and status.state is JobState.FAILED and "serverUrl" in str(status.last_error)

    await until(failed)
    async with federation.database.read() as session:
        assert (await session.execute(select(Server))).first() is None
