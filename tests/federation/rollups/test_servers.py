"""What lists show of servers, against counts of the rows; on SQLite and PostgreSQL."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from sqlalchemy import delete, insert, select, update
from sqlmodel import col

from db import (
    Database,
    DeliveryJob,
    DeliveryState,
    HoldReason,
    LinkState,
    Server,
    ServerLink,
    ServerScorecard,
    ServerSummary,
)
from federation.admin.overview import owed
from federation.rollups import job
from federation.rollups.job import DeliveryTotals, Rollups
from federation.rollups.servers import ServerSummaries

NOW = datetime.now(UTC).replace(microsecond=0)
A, B, C, D = (f"https://{name}.example" for name in "abcd")


async def know(database: Database, *urls: str) -> None:
    async with database.transaction() as session:
        for url in urls:
            keys = {"public_key": f"s{url}", "encryption_public_key": f"e{url}"}
            times = {"last_seen": NOW, "created_at": NOW, "updated_at": NOW}
            await session.execute(insert(Server).values(id=url, url=url, is_healthy=True, **keys, **times))


async def owe(database: Database, *deliveries: tuple[str | None, DeliveryState, HoldReason | None, datetime]) -> None:
    rows = [
        {
            "id": f"{number}-{url}",
            "target_url": "x",
            "payload": "",
            "server_url": url,
            "state": state,
            "held_reason": why,
            "created_at": made,
        }
        for number, (url, state, why, made) in enumerate(deliveries)
    ]
    async with database.transaction() as session:
        await session.execute(insert(DeliveryJob), rows)


async def summaries(database: Database) -> dict[str, ServerSummary]:
    async with database.read() as session:
        return {row.server_url: row for row in (await session.execute(select(ServerSummary))).scalars()}


async def test_a_server_has_its_link_advice_and_counts(database: Database) -> None:
    """Servers that only deliveries, or only links, know of as well."""
    await know(database, A)
    old = NOW - timedelta(days=1)
    ready, held, failed, expired = DeliveryState
    await owe(
        database,
        (A, ready, None, NOW),
        (A, held, HoldReason.SERVER, old),
        (A, failed, None, old - timedelta(days=1)),
        (A, expired, None, NOW),
        (B, ready, None, NOW),
        (None, ready, None, NOW),
    )
    card = {"generation": 1, "attempts": 1, "delivered": 1, "reasons": [], "as_of": NOW.date(), "score": 71.5}
    async with database.transaction() as session:
        session.add(ServerLink(server_url=C, state=LinkState.DOWN, since=old))
        for days, advice in ((7, "watch"), (30, "keep")):
            await session.execute(insert(ServerScorecard).values(server_url=A, window_days=days, action=advice, **card))
    assert await ServerSummaries(database)() == 3
    found = await summaries(database)
    assert sorted(found) == [A, B, C]
    a = found[A]
    assert (a.ready, a.held, a.owed, a.failed, a.expired, a.given_up, a.oldest_at) == (1, 1, 2, 1, 1, 2, old)
    assert (a.link, a.advice, a.score) == ("up", "watch", 71.5)
    assert (found[B].link, found[B].owed, found[B].advice, found[B].score) == ("up", 1, "", -1)
    assert (found[C].link, found[C].link_since, found[C].owed, found[C].oldest_at) == ("down", old, 0, None)
    await DeliveryTotals(database)()
    now = await owed(database)
    assert now.states == {ready: 3, held: 1, failed: 1, expired: 1}
    assert (now.held_by_reason, now.owed, now.oldest) == ({HoldReason.SERVER: 1}, 4, old)
    assert now.counted_at is not None


async def test_only_what_changed_is_written(database: Database) -> None:
    """And what is gone is removed."""
    await know(database, A, B)
    await owe(database, (C, DeliveryState.READY, None, NOW))
    count = ServerSummaries(database)
    assert (await count(), await count()) == (3, 0)
    async with database.transaction() as session:
        await session.execute(update(DeliveryJob).values(state=DeliveryState.HELD))
    assert (await count(), await count()) == (1, 0)
    async with database.transaction() as session:
        await session.execute(delete(DeliveryJob))
        await session.execute(delete(Server).where(col(Server.url) == B))
    assert await count() == 2
    assert sorted(await summaries(database)) == [A]


async def test_links_are_called_as_operators_call_them(database: Database) -> None:
    """By what keeps deliveries from being sent. A pause that is longer than any pause was written by a wrong clock."""
    rest = NOW + timedelta(hours=1)
    links = [
        ("on_hold", ServerLink(server_url="1", since=NOW, operator_hold=True)),
        ("on_hold", ServerLink(server_url="2", since=NOW, operator_hold=True, state=LinkState.DOWN)),
        ("refusing", ServerLink(server_url="3", since=NOW, state=LinkState.REFUSING)),
        ("resting", ServerLink(server_url="4", since=NOW, rest_until=rest)),
        ("up", ServerLink(server_url="5", since=NOW, rest_until=NOW - timedelta(hours=1))),
        ("up", ServerLink(server_url="6", since=NOW, rest_until=NOW + timedelta(days=400))),
        ("mismatch", ServerLink(server_url="7", since=NOW, rest_until=rest, state=LinkState.MISMATCH)),
    ]
    async with database.transaction() as session:
        session.add_all(link for _, link in links)
    await ServerSummaries(database)()
    found = await summaries(database)
    assert [found[url].link for url in sorted(found)] == [name for name, _ in links]


async def test_counts_agree_with_rows_after_any_changes(database: Database) -> None:
    """Whoever made them."""
    random = Random(20)
    count, totals = ServerSummaries(database), DeliveryTotals(database)
    for turn in range(4):
        async with database.transaction() as session:
            await session.execute(delete(DeliveryJob))
        states = random.choices([*DeliveryState], k=300)
        reasons = [random.choice([*HoldReason]) if state is DeliveryState.HELD else None for state in states]
        rows = [(random.choice([A, B, C, None]), state, why, NOW) for state, why in zip(states, reasons, strict=True)]
        await owe(database, *rows[: 300 - turn * 70])
        await count()
        await totals()
        found, now = await summaries(database), await owed(database)
        wanted = Counter((url, state) for url, state, _, _ in rows[: 300 - turn * 70])
        for url, state in wanted:
            assert url is None or getattr(found[url], state.value) == wanted[url, state]
        assert now.states == Counter(state for _, state, _, _ in rows[: 300 - turn * 70])
        assert sum(now.held_by_reason.values()) == now.states[DeliveryState.HELD]


async def test_a_count_that_takes_long_is_made_less_often(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts are counted all the same."""
    rollups = Rollups(database)
    assert await rollups() == {"attempts": 0, "servers": 0}
    assert await rollups() == {"attempts": 0}
    monkeypatch.setattr(job, "SHARE", 0)
    rollups = Rollups(database)
    await rollups()
    assert "servers" in await rollups()
