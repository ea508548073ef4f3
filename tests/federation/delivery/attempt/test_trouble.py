"""Trouble of our own: rows that are gone, jobs that come twice, a database or a key that does not work."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from db import DeliveryState, HoldReason
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings
from tests.federation.delivery.harness import Site, job_data, post_payload
from tests.peer import Peer, acquaint
from workers import JobState


@pytest.mark.usefixtures("queue_settings")
async def test_a_job_whose_row_is_gone_completes(site: Site, peer: Peer) -> None:
    """A crash after the row's end and before the job's runs the job again: the delivery is over, nothing is sent."""
    delivery = await site.owe_post(peer)
    await site.federation.ledger.gone(delivery)

    fate = await site.outcome(delivery)

    assert (fate.state, fate.row, fate.codes) == (JobState.COMPLETED, None, [])
    assert not peer.applied


@pytest.mark.usefixtures("queue_settings")
async def test_a_job_with_its_own_text_needs_no_row(site: Site, peer: Peer) -> None:
    """As a Node producer writes it: it is delivered, and completes."""
    fate = await site.outcome(await site.owe_raw(job_data("row-1", peer.url, payload=post_payload("post-1"))))

    assert fate.state is JobState.COMPLETED
    assert len(peer.applied) == 1


@pytest.mark.usefixtures("queue_settings")
async def test_a_repeated_delivery_answers_as_before(site: Site, peer: Peer) -> None:
    """The same job twice, as after a crash: both complete, the peer has applied it once."""
    data = job_data("row-1", peer.url, payload=post_payload("post-1"))
    await site.add_row("row-1", target_url=str(data["targetUrl"]), payload=str(data["payload"]))

    first, second = await site.owe_raw(data), await site.owe_raw(data)
    await site.ended(first, second)

    assert (await site.fate(first, row="row-1")).state is JobState.COMPLETED
    assert (await site.fate(second, row="row-1")).row is None
    assert (len(peer.applied), peer.replayed) == (1, 1)


async def test_database_trouble_is_tried_again(make_settings: MakeSettings, peer: Peer) -> None:
    """An attempt that cannot record itself sends nothing, costs nothing, and runs once the database takes it."""
    federation = Federation(make_settings(federation_delivery_backoff="100ms"))
    await acquaint(federation, peer)
    async with Site(federation) as site:
        delivery = await site.owe_post(peer)
        async with federation.database.transaction() as session:
            await session.execute(text("ALTER TABLE delivery_jobs RENAME TO hidden"))
        site.start()
        await site.until(lambda: site.failing)
        assert peer.deliveries == []
        async with federation.database.transaction() as session:
            await session.execute(text("ALTER TABLE hidden RENAME TO delivery_jobs"))

        fate = await site.outcome(delivery)
    await federation.close()

    assert (fate.state, fate.job.attempt, fate.row) == (JobState.COMPLETED, 1, None)
    assert fate.codes == [None]


async def test_a_row_that_the_database_refuses_costs_its_own_job_only(site: Site, peer: Peer) -> None:
    """Its attempts are counted and run out, nothing is sent, and it is held for an hour as a fault of ours."""
    async with site.federation.database.transaction() as session:
        await session.execute(
            text(
                "CREATE TRIGGER refuse_attempts BEFORE UPDATE OF last_attempted_at ON delivery_jobs "
                "BEGIN SELECT RAISE(FAIL, 'the disk is full'); END"
            )
        )

    fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt) == (JobState.FAILED, 5)
    assert fate.row is not None
    assert (fate.row.state, fate.row.held_reason, fate.row.attempts) == (DeliveryState.HELD, HoldReason.OURS, 0)
    assert fate.reason.startswith("the database did not take the attempt")
    assert peer.deliveries == []


async def test_an_unusable_registered_key_is_tried_again(federation: Federation, peer: Peer) -> None:
    """Key material can be repaired: the attempts run out, and the row says which key."""
    await federation.registry.register(
        url=peer.url, public_key=peer.keys.signing.public_text, encryption_public_key="AAAA"
    )
    async with Site(federation) as site:
        fate = await site.outcome(await site.owe_post(peer))

    assert (fate.state, fate.job.attempt, fate.codes) == (JobState.FAILED, 5, ["KEY_MATERIAL"] * 5)
    assert fate.row is not None
    assert peer.url in (fate.row.last_error or "")
    assert peer.deliveries == []


@pytest.mark.parametrize("spelled", ["{url}/", "{url}/inbox", "HTTP{rest}"])
async def test_a_server_that_is_spelled_otherwise_is_the_same(site: Site, peer: Peer, spelled: str) -> None:
    """A Node producer's job names it with a slash, a path or in capitals: it is delivered, and its link is the one."""
    url = spelled.format(url=peer.url, rest=peer.url.removeprefix("http"))
    data = {**job_data("row-1", peer.url, payload=post_payload("post-1")), "serverUrl": url}
    await site.add_row("row-1", target_url=str(data["targetUrl"]), payload=str(data["payload"]))

    fate = await site.outcome(await site.owe_raw(data), row="row-1")

    assert (fate.state, fate.row, fate.codes) == (JobState.COMPLETED, None, [None])
    assert (await site.federation.links.find(peer.url)).acknowledged
    assert fate.log[0].server_url == peer.url
