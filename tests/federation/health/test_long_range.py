"""Probes of servers that have been down for long."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert, select, update
from sqlmodel import col

from db import BlacklistedServer, Server
from federation.runtime.composition import Federation
from federation.sealed.peers.health_checks import JITTER, MAX_SERVERS, ProbePlan
from federation.sealed.peers.registry import KnownServer
from tests.misbehaving import respond
from tests.peer import Peer, acquaint

NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)
PLAN = ProbePlan(checks=5, quick_first=timedelta(minutes=5), quick_step=timedelta(minutes=10))


def sick(failed: int, *, reason: str | None = "CONN_REFUSED", url: str = "https://b.example") -> KnownServer:
    return KnownServer(
        url=url,
        public_key="k",
        encryption_public_key="e",
        is_healthy=False,
        health_check_attempts=failed,
        unhealthy_reason=reason,
        created_at=NOW,
    )


@pytest.mark.parametrize(
    ("failed", "reason", "hours"),
    [
        (5, "CONN_REFUSED", 1),
        (6, "CONN_REFUSED", 2),
        (7, "CONN_REFUSED", 4),
        (9, "TIMEOUT", 16),
        (10, None, 24),
        (2_000_000_000, "UNKNOWN", 24),
        (0, "DNS_BLOCKED", 1),
        (3, "INVALID_RESPONSE_FROM_TARGET", 8),
        (0, "TLS_ERROR", 1),
        (4, "TLS_ERROR", 1.5),
    ],
)
def test_the_pause_doubles_up_to_a_day(failed: int, reason: str | None, hours: float) -> None:
    """Counted from the last look, a tenth more or less; quick probes are waited for until they are overdue."""
    wait = PLAN.due_at(sick(failed, reason=reason), NOW) - NOW
    assert abs(wait / HOUR - hours) <= hours * JITTER


def test_servers_are_spread_out() -> None:
    """That went down together are not probed together, and each has the same date whoever asks."""
    dates = {PLAN.due_at(sick(7, url=f"https://s{number}.example"), NOW) for number in range(100)}
    assert len(dates) > 90
    assert PLAN.due_at(sick(7), NOW) == PLAN.due_at(sick(7), NOW)


async def fall_ill(federation: Federation, url: str, *, reason: str, failed: int, hours_ago: float) -> None:
    values = {
        "is_healthy": False,
        "unhealthy_reason": reason,
        "health_check_attempts": failed,
        "updated_at": datetime.now(UTC) - hours_ago * HOUR,
    }
    async with federation.database.transaction() as session:
        await session.execute(update(Server).where(col(Server.url) == url).values(values))


async def server(federation: Federation, url: str) -> Server:
    async with federation.database.read() as session:
        return (await session.execute(select(Server).where(col(Server.url) == url))).scalar_one()


@pytest.mark.parametrize(("reason", "failed"), [("CONN_REFUSED", 5), ("DNS_BLOCKED", 0)])
async def test_a_server_that_is_back_is_healed(federation: Federation, peer: Peer, reason: str, failed: int) -> None:
    """Once it is due, also when its failure forbade direct probes."""
    await acquaint(federation, peer)
    await fall_ill(federation, peer.url, reason=reason, failed=failed, hours_ago=0.5)
    assert await federation.long_range_probes() == {"due": 0, "probed": 0, "healed": 0}
    await fall_ill(federation, peer.url, reason=reason, failed=failed, hours_ago=1.2)
    assert await federation.long_range_probes() == {"due": 1, "probed": 1, "healed": 1}
    assert (await server(federation, peer.url)).is_healthy


async def test_a_server_that_stays_away_is_probed_ever_more_rarely(federation: Federation, peer: Peer) -> None:
    """Its failed probe counts, and is the last look from which the next is counted."""
    await acquaint(federation, peer)
    peer.server.upcoming.append(respond(500))
    await fall_ill(federation, peer.url, reason="CONN_REFUSED", failed=5, hours_ago=1.2)
    assert await federation.long_range_probes() == {"due": 1, "probed": 1, "healed": 0}
    assert await federation.long_range_probes() == {"due": 0, "probed": 0, "healed": 0}
    row = await server(federation, peer.url)
    assert (row.is_healthy, row.health_check_attempts, row.unhealthy_reason) == (False, 6, "CONN_REFUSED")
    assert datetime.now(UTC) - row.updated_at < timedelta(minutes=1)


async def test_a_blacklisted_server_is_not_probed(federation: Federation, peer: Peer) -> None:
    """Nothing is sent to it."""
    await acquaint(federation, peer)
    async with federation.database.transaction() as session:
        session.add(BlacklistedServer(server_url=peer.url, reason="spam", created_at=NOW))
    await fall_ill(federation, peer.url, reason="CONN_REFUSED", failed=5, hours_ago=5)
    await federation.long_range_probes()
    assert peer.server.requests == []


async def test_a_run_is_bounded(federation: Federation) -> None:
    """Of many that are due, the longest due come first; the others wait for the next run."""
    async with federation.database.transaction() as session:
        await session.execute(
            insert(Server),
            [
                {
                    "id": str(number),
                    # Refused without a connection: the guard knows the address for what it is.
                    "url": f"http://10.0.{number // 250}.{number % 250 + 1}",
                    "public_key": f"k{number}",
                    "encryption_public_key": f"e{number}",
                    "last_seen": NOW,
                    "created_at": NOW,
                    "updated_at": NOW - (30 + number) * HOUR,
                    "is_healthy": False,
                    "health_check_attempts": 20,
                    "unhealthy_reason": "TIMEOUT",
                }
                for number in range(MAX_SERVERS + 5)
            ],
        )
    assert await federation.long_range_probes() == {"due": MAX_SERVERS + 5, "probed": MAX_SERVERS, "healed": 0}
    assert await federation.long_range_probes() == {"due": 5, "probed": 5, "healed": 0}
    async with federation.database.read() as session:
        counted = set((await session.execute(select(col(Server.health_check_attempts)))).scalars())
    assert counted == {21}
