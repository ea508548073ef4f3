"""One text for many servers: stored once, referred to by each delivery, gone with the last of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlmodel import col

from db import AttemptOutcome, Database, DeliveryJob, DeliveryPayload, DeliveryState
from federation.base.queues.queue import delivery_queue
from federation.base.settings.settings import Settings
from federation.delivery.job_origins import DeliveryQueues
from federation.delivery.ledger.entries import Begin, Begun, Ended
from federation.delivery.ledger.ledger import Ledger
from federation.delivery.outbox.insert import BATCH
from federation.delivery.outbox.outbox import Outbox
from federation.retention import Purge
from federation.runtime.composition import Federation
from tests.federation.delivery.entries import any_activity
from tests.federation.delivery.harness import Site, post_payload
from tests.federation.delivery.outbox.conftest import PAYLOAD, Place
from tests.peer import POSTS_PATH, Peer, acquaint
from workers import JobState
from workers.storage.memory import MemoryStorage

pytestmark = pytest.mark.spread("queue_settings", always=("sqlite", "postgres"))

NAME, PATH = "deliver-post", "/api/auth/social/posts"


class Interrupted(Exception):
    """What a test raises in a transaction."""


def servers(number: int) -> list[str]:
    return [f"https://s{index}.example" for index in range(number)]


async def fan_out(place: Place, session: AsyncSession, number: int) -> tuple[str, ...]:
    return await place.outbox.enqueue_fanout(session, NAME, PATH, servers(number), PAYLOAD)


@pytest.fixture
async def site(federation: Federation) -> AsyncIterator[Site]:
    async with Site(federation) as running:
        yield running


async def test_a_fan_out_stores_its_text_once(place: Place) -> None:
    """Each server has a row and a job of its own, in more than one batch, and neither holds a copy."""
    number = BATCH + 5
    async with place.outbox.transaction() as session:
        ids = await fan_out(place, session, number)
    rows = await place.rows()
    assert [(rows[row].server_url, rows[row].target_url) for row in ids] == [
        (server, server + PATH) for server in servers(number)
    ]
    assert {row.payload for row in rows.values()} == {""}
    assert await place.texts() == [(PAYLOAD, number)]
    assert await place.jobs() == set(ids)


async def test_a_server_named_twice_gets_one_delivery(place: Place) -> None:
    """In whatever spelling; without servers nothing at all is written."""
    async with place.outbox.transaction() as session:
        ids = await place.outbox.enqueue_fanout(
            session, NAME, PATH, ["https://b.example", "HTTPS://B.example:443/", "https://c.example"], PAYLOAD
        )
        assert await place.outbox.enqueue_fanout(session, NAME, PATH, [], PAYLOAD) == ()
    assert len(ids) == 2
    assert await place.texts() == [(PAYLOAD, 2)]


async def test_a_savepoint_rolled_back_takes_its_fan_out_with_it(place: Place) -> None:
    """Text, rows and jobs of it; what was enqueued beside it stays."""
    async with place.outbox.transaction() as session:
        kept = await fan_out(place, session, 2)
        with suppress(Interrupted):
            async with session.begin_nested():
                await fan_out(place, session, 3)
                raise Interrupted
    assert await place.jobs() == (await place.rows()).keys() == set(kept)
    assert await place.texts() == [(PAYLOAD, 2)]


async def test_a_fan_out_in_the_callers_own_session_follows_its_commit(place: Place) -> None:
    """Nothing of it is there before, all of it after."""
    await place.queue.start()
    async with place.database.transaction() as session:
        ids = await fan_out(place, session, 3)
        assert await place.jobs() == set()
    await place.outbox.close()
    assert await place.jobs() == (await place.rows()).keys() == set(ids)


@pytest.mark.parametrize(
    ("name", "path", "server", "payload"),
    [
        ("", PATH, "https://b.example", PAYLOAD),
        (NAME, "inbox", "https://b.example", PAYLOAD),
        (NAME, "@c.example/inbox", "https://b.example", PAYLOAD),
        (NAME, PATH + "/\u00e9", "https://b.example", PAYLOAD),
        (NAME, "/" + "x" * 2048, "https://b.example", PAYLOAD),
        (NAME, PATH, "b.example", PAYLOAD),
        (NAME, PATH, "ftp://b.example", PAYLOAD),
        (NAME, PATH, "https://b.example", '{"method":"s3cret"}'),
    ],
)
async def test_what_cannot_be_fanned_out_is_refused_whole(
    place: Place, name: str, path: str, server: str, payload: str
) -> None:
    """One bad server refuses all; nothing is written, and the error quotes no payload."""
    async with place.outbox.transaction() as session:
        with pytest.raises(ValueError, match=r".") as error:
            await place.outbox.enqueue_fanout(session, name, path, ["https://fine.example", server], payload)
    assert "s3cret" not in str(error.value)
    assert await place.rows() == {}
    assert await place.texts() == []
    assert await place.jobs() == set()


async def test_the_text_goes_with_its_last_delivery(database: Database) -> None:
    """Delivered ones and those that fail without a trace take their reference along, repeated reports none."""
    ids = await rows_of_one_text(database, 3)
    ledger = Ledger(database)
    now = datetime.now(UTC)
    await ledger.gone(ids[0])
    await ledger.gone(ids[0])
    assert await texts_of(database) == [2]
    await ledger.gone(ids[1])
    begun = await ledger.begin(
        Begin(delivery_id=ids[2], job_id=ids[2], job_name=NAME, server_url=servers(3)[2], attempt=1, at=now)
    )
    assert isinstance(begun, Begun)
    await ledger.ended(
        Ended(
            series=begun.series,
            state=DeliveryState.FAILED,
            at=now,
            code="NO_ACK",
            error="no",
            outcome=AttemptOutcome.PERMANENT,
        )
    )
    assert await texts_of(database) == [1]
    await ledger.gone(ids[2])
    assert await texts_of(database) == []
    await ledger.close()


async def test_a_purged_row_takes_its_reference_along(database: Database) -> None:
    """So a text goes when the last row that failed is purged."""
    ids = await rows_of_one_text(database, 2)
    long_ago = datetime.now(UTC) - timedelta(days=8)
    async with database.transaction() as session:
        await session.execute(
            update(DeliveryJob)
            .where(col(DeliveryJob.id) == ids[0])
            .values(created_at=long_ago, settled_at=long_ago, outcome=AttemptOutcome.PERMANENT)
        )
    await Purge(database)()
    assert await texts_of(database) == [1]
    async with database.transaction() as session:
        settled = {"created_at": long_ago, "settled_at": long_ago, "outcome": AttemptOutcome.PERMANENT}
        await session.execute(update(DeliveryJob).values(**settled))
    await Purge(database)()
    assert await texts_of(database) == []


async def test_a_fan_out_is_delivered(site: Site, peer: Peer) -> None:
    """Sealed and signed from the shared text; then rows and text are gone."""
    await acquaint(site.federation, peer)
    async with site.federation.outbox.transaction() as session:
        (delivery,) = await site.federation.outbox.enqueue_fanout(
            session, NAME, POSTS_PATH, [peer.url], post_payload("post-1")
        )
    fate = await site.outcome(delivery)
    assert (fate.state, fate.row) == (JobState.COMPLETED, None)
    assert len(peer.applied) == 1
    assert await texts_of(site.federation.database) == []


async def rows_of_one_text(database: Database, number: int) -> tuple[str, ...]:
    """Deliveries of one fan-out, without a queue that matters."""
    queues = DeliveryQueues(delivery_queue(Settings.from_values({}), MemoryStorage()))
    outbox = Outbox(database, queues, check=any_activity, joins=False)
    async with outbox.transaction() as session:
        return await outbox.enqueue_fanout(session, NAME, PATH, servers(number), PAYLOAD)


async def texts_of(database: Database) -> list[int]:
    """The numbers of references of the texts that are stored."""
    async with database.read() as session:
        return list((await session.execute(select(col(DeliveryPayload.refs)))).scalars())
