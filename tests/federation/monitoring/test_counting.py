"""The parts of a node tell their meter what happened, once each."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta

import pytest
from structlog.testing import capture_logs

from db import Database, DeliveryJob, DeliveryState, HoldReason
from federation.admin import blacklist
from federation.base.settings.settings import Settings
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.http.pool import ConnectionPool
from federation.monitoring.prometheus import ProcessMetrics
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from federation.scheduler.leases import Leases
from federation.scheduler.runner import JobRunner, RecurringJob
from tests.federation.delivery.harness import Site, job_data, post_payload
from tests.federation.http.conftest import ScriptedResolver
from tests.federation.monitoring.test_prometheus import samples
from tests.misbehaving import respond
from tests.peer import acquaint, introduce
from tests.relaying_peer import RelayingPeer

UNREACHABLE = "http://c.example"


@pytest.fixture
async def federation(settings: Settings, ssl_context: ssl.SSLContext) -> AsyncIterator[Federation]:
    """A node with metrics, for which no name resolves."""
    guard = AddressGuard(settings.dev_allowed_hostnames)
    transport = ConnectionPool(guard, ssl_context=ssl_context, resolver=ScriptedResolver())
    node = Federation(settings, client=FederationClient(guard, transport), metrics=ProcessMetrics())
    yield node
    await node.close()


async def test_attempts_are_counted_by_outcome_code_and_route(federation: Federation) -> None:
    """Direct ones and relayed ones; peers that did not relay by code, and whether any did."""
    target = RelayingPeer(generate_own_keys())
    introduce(target, federation.own_url or "")
    await federation.registry.register(
        url=UNREACHABLE,
        public_key=target.keys.signing.public_text,
        encryption_public_key=target.keys.encryption.public_text,
    )
    async with RelayingPeer() as peer, Site(federation) as site:
        await acquaint(federation, peer)
        peer.reaches[UNREACHABLE] = target
        peer.server.upcoming += [respond(503), respond(404)]
        for number, url in enumerate([peer.url, UNREACHABLE]):
            data = job_data(f"row-{number}", url, payload=post_payload(f"post-{number}"))
            await site.ended(await site.owe_raw(data, row=f"row-{number}"))
        peer.server.upcoming.append(respond(504))
        data = job_data("row-2", UNREACHABLE, payload=post_payload("post-2"))
        await site.ended(await site.owe_raw(data, row="row-2"))

    metrics = federation.metrics
    assert isinstance(metrics, ProcessMetrics)
    counted = {labels: n for labels, n in samples(metrics, "federation_delivery_attempts_total").items() if n}
    assert counted == {
        ("HTTP_5xx", "retryable", "direct"): 1,
        ("HTTP_4xx", "retryable", "direct"): 1,
        ("none", "delivered", "direct"): 1,
        ("DNS_BLOCKED", "retryable", "direct"): 1,
        ("none", "delivered", "relayed"): 2,
    }
    assert samples(metrics, "federation_relays_total") == {("relayed",): 2, ("failed",): 1}
    assert samples(metrics, "federation_relay_refusals_total") == {("HTTP_5xx",): 1}


async def test_deliveries_that_fail_for_good_are_counted(federation: Federation) -> None:
    """Once each, by the last of their attempts; not what an operator's rule ends, which alarms nobody."""
    assert isinstance(federation.metrics, ProcessMetrics)
    async with RelayingPeer() as peer, RelayingPeer() as banned, Site(federation) as site:
        await acquaint(federation, peer)
        await blacklist.add(federation.database, banned.url, reason="spam")
        assert (await site.outcome(await site.owe_post(banned))).codes == ["BLACKLISTED"]
        assert samples(federation.metrics, "federation_deliveries_failed_total") == {(): 0}
        peer.server.default = respond(410)
        fate = await site.outcome(await site.owe_post(peer))
        assert len(fate.log) > 1
    assert samples(federation.metrics, "federation_deliveries_failed_total") == {(): 1}


async def test_recurring_jobs_are_counted(database: Database) -> None:
    """Every run by its outcome, and none for a job that was not taken."""
    metrics = ProcessMetrics()
    run = JobRunner(Leases(database, holder="p"), meter=metrics)
    works = True

    async def work() -> Mapping[str, object]:
        if not works:
            raise LookupError
        return {}

    job = RecurringJob(name="purge", does="something", interval=timedelta(hours=1), run=work)
    with capture_logs():
        await run(job)
        await run(job)
        works = False
        await run(job, at_once=True)
    assert samples(metrics, "federation_scheduler_runs_total") == {("done", "purge"): 1, ("failed", "purge"): 1}


async def test_released_and_expired_deliveries_are_counted(federation: Federation) -> None:
    """As the sweep moves them on; and what goes out because its server is up again."""
    now = datetime.now(UTC)
    held = {"target_url": "https://b.example/x", "server_url": "https://b.example", "payload": "{}", "job_name": "n"}
    ages = [(timedelta(days=8), HoldReason.SERVER), (timedelta(0), HoldReason.OURS), (timedelta(0), HoldReason.SERVER)]
    async with federation.database.transaction() as session:
        for age, reason in ages:
            row = DeliveryJob(**held, created_at=now - age, state=DeliveryState.HELD, held_reason=reason)
            row.next_attempt_at = now if reason is HoldReason.OURS else None
            session.add(row)
    await federation.held_sweeper.sweep()
    await federation.releaser.tick()
    assert isinstance(federation.metrics, ProcessMetrics)
    assert samples(federation.metrics, "federation_deliveries_expired_total") == {(): 1}
    assert samples(federation.metrics, "federation_deliveries_released_total") == {(): 2}
