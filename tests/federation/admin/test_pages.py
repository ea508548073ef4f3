"""Lists, a page at a time: complete and in order, by an index, reading less than a thousand rows; on both databases."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

import pytest
from sqlalchemy import Connection, and_, insert, or_, select, text, update
from sqlmodel import col

from db import (
    AttemptMinute,
    AttemptOutcome,
    Database,
    DeliveryJob,
    DeliveryState,
    DeliveryTotal,
    HoldReason,
    ServerSummary,
)
from federation.admin.attempts import attempts_at_delivery, page_of_attempts
from federation.admin.deliveries.deliveries import OPEN, Selection, show, stats
from federation.admin.deliveries.pages import page_of_deliveries
from federation.admin.doctor import checks
from federation.admin.overview import last_hour, owed
from federation.admin.scans import MOST_SCANNED, MOST_SHOWN, CursorError, ListPage
from federation.admin.servers.backlog import MOST_LOOKED_AT, backlog_of
from federation.admin.servers.pages import ServerSort, page_of_servers, summary_of
from federation.rollups.attempts import BOUNDS_MS
from tests.federation.rows_read import MANY, cost, watched

ROWS: Final = 6_000
SERVERS: Final = 40
ATTEMPTED: Final = 400
NOW: Final = datetime(2026, 1, 31, tzinfo=UTC)
A_SERVER: Final = "https://7.example"

FILTERS: Final[list[dict[str, str]]] = [{}, {"link": "down"}, {"advice": "block"}, {"link": "up", "advice": "block"}]

HELD, FAILED, EXPIRED = DeliveryState.HELD, DeliveryState.FAILED, DeliveryState.EXPIRED

Read = Callable[[Database], Awaitable[object]]


def fill(connection: Connection, *, rows: int = ROWS) -> None:
    """Deliveries of every state, ten at a time made at one moment; attempts and servers. All by one pattern."""
    numbers = "WITH RECURSIVE t(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM t WHERE n < {})"
    if connection.dialect.name == "postgresql":
        made = "timestamp '2026-01-01' + (n / 10) * interval '1 minute'"
    else:
        made = "strftime('%Y-%m-%d %H:%M:%S.000000', '2026-01-01', '+' || (n / 10) || ' minutes')"
    state = "CASE n % 7 WHEN 0 THEN 'failed' WHEN 1 THEN 'expired' WHEN 2 THEN 'held' ELSE 'ready' END"
    server = f"'https://' || (n % {SERVERS}) || '.example'"
    attempted = f"'https://' || (n % {ATTEMPTED}) || '.example'"
    code = "CASE WHEN n % 500 = 0 THEN 'RARE' WHEN n % 3 = 0 THEN 'TIMEOUT' END"
    outcome = "CASE WHEN n % 500 = 0 THEN 'permanent' ELSE 'delivered' END"
    link = "CASE n % 9 WHEN 0 THEN 'down' ELSE 'up' END"
    advice = "CASE WHEN n % 700 = 0 THEN 'block' WHEN n % 2 = 0 THEN 'keep' ELSE '' END"
    tables = {
        "delivery_jobs (id, target_url, payload, created_at, server_url, state, error_code)": (
            f"'d' || n, 'x', '', {made}, {server}, {state}, {code}"
        ),
        "delivery_attempts (delivery_id, job_name, server_url, attempt, series, started_at, duration_ms, outcome)": (
            f"'d' || (n / 300), 'post', {attempted}, n % 300, 0, {made}, 7, {outcome}"
        ),
        "server_summaries (server_url, link, advice, score, ready, held, owed, failed, expired, given_up)": (
            f"'https://s' || n, {link}, {advice}, n % 5 - 1, 0, n % 4, n % 3, 0, 0, n % 6"
        ),
    }
    for table, values in tables.items():
        number = rows // 3 if table.startswith("server") else rows
        connection.execute(text(f"INSERT INTO {table} {numbers.format(number)} SELECT {values} FROM t"))
    zeros = [0] * (len(BOUNDS_MS) + 1)
    minutes = [
        {"minute": NOW - timedelta(minutes=number), "outcome": outcome, "attempts": 1, "latencies": zeros}
        for number in range(600)
        for outcome in AttemptOutcome
    ]
    totals = [{"state": HELD, "held_reason": reason, "deliveries": 5, "counted_at": NOW} for reason in HoldReason]
    connection.execute(insert(AttemptMinute), minutes)
    connection.execute(insert(DeliveryTotal), totals)
    if connection.dialect.name == "postgresql":
        connection.execute(text("ANALYZE"))


@pytest.fixture
async def filled(database: Database) -> Database:
    await database.transact(fill)
    return database


@pytest.fixture
async def overfilled(database: Database) -> Database:
    await database.transact(partial(fill, rows=MANY))
    return database


async def all_pages(ask: Callable[[str | None], Awaitable[ListPage[Any]]]) -> list[Any]:
    """Every row, by as many pages as it takes."""
    page = await ask(None)
    rows = [*page.rows]
    while page.after is not None:
        page = await ask(page.after)
        rows += page.rows
    return rows


async def ids_of(database: Database, *conditions: Any, descending: bool = False) -> list[str]:
    """In the order of the list, by one plain query."""
    keys = (col(DeliveryJob.created_at), col(DeliveryJob.id))
    query = select(col(DeliveryJob.id)).where(*conditions)
    return [row.id for row in await database.rows(query.order_by(*(key.desc() if descending else key for key in keys)))]


STATE, CODE, SERVER = col(DeliveryJob.state), col(DeliveryJob.error_code), col(DeliveryJob.server_url)
SELECTIONS: Final[list[tuple[Selection, list[Any]]]] = [
    (Selection(), []),
    (Selection(state=HELD), [STATE == HELD]),
    (Selection(state=OPEN), [STATE.in_((DeliveryState.READY, HELD))]),
    (Selection(server_url=A_SERVER), [SERVER == A_SERVER]),
    (Selection(server_url=A_SERVER, state=FAILED), [SERVER == A_SERVER, STATE == FAILED]),
    (Selection(code="TIMEOUT"), [CODE == "TIMEOUT"]),
    (Selection(code="RARE", state=FAILED), [CODE == "RARE", STATE == FAILED]),
    (Selection(code="TIMEOUT", state=EXPIRED), [CODE == "TIMEOUT", STATE == EXPIRED]),
    (Selection(code="TIMEOUT", server_url=A_SERVER), [CODE == "TIMEOUT", SERVER == A_SERVER]),
    (Selection(ids=("d1", "d2", "d9"), state=HELD), [col(DeliveryJob.id).in_(("d2", "d9"))]),
]


async def test_every_selected_delivery_is_on_one_page(filled: Database) -> None:
    """In the order of the list, in both directions, though ten were made at one moment."""
    for selection, conditions in SELECTIONS:
        for newest_first in (False, True):
            wanted = await ids_of(filled, *conditions, descending=newest_first)

            async def ask(
                after: str | None, selection: Selection = selection, newest_first: bool = newest_first
            ) -> ListPage[Any]:
                return await page_of_deliveries(filled, selection, newest_first=newest_first, limit=193, after=after)

            assert [row.id for row in await all_pages(ask)] == wanted, selection


async def test_a_list_is_merged_as_far_as_each_state_was_read(database: Database) -> None:
    """Where nearly all deliveries of a page are in one state, those of the others behind them come later."""
    rows = [
        {
            "id": f"d{number:03}",
            "target_url": "x",
            "payload": "",
            "state": FAILED if number % 100 == 0 else DeliveryState.READY,
            "created_at": NOW,
        }
        for number in range(500)
    ]
    await database.transact(lambda connection: connection.execute(insert(DeliveryJob), rows))
    found = await all_pages(lambda after: page_of_deliveries(database, Selection(), limit=200, after=after))
    assert [row.id for row in found] == [row["id"] for row in rows]


async def test_age_is_a_bound_of_the_same_index(filled: Database) -> None:
    moment = datetime(2026, 1, 1, 2, tzinfo=UTC)
    wanted = await ids_of(filled, col(DeliveryJob.created_at) < moment)
    old = Selection(older_than=datetime.now(UTC) - moment)
    assert [row.id for row in (await page_of_deliveries(filled, old, limit=200)).rows] == wanted[:200]


@pytest.mark.parametrize("cursor", ["", "yesterday d1", "2026-01-01T00:00:00 1", "\x00", f"{9**99} a"])
async def test_a_cursor_of_somebody_else_is_refused(database: Database, cursor: str) -> None:
    for ask in (
        page_of_deliveries(database, Selection(), after=cursor),
        page_of_attempts(database, after=cursor),
        page_of_servers(database, sort=ServerSort.OWED, after=cursor),
        attempts_at_delivery(database, "d", after=cursor),
    ):
        with pytest.raises(CursorError):
            await ask


async def test_every_server_is_on_one_page(filled: Database) -> None:
    """In each order, with each filter; those without a score below all others."""
    url = col(ServerSummary.server_url)
    for sort in ServerSort:
        column = url if sort is ServerSort.URL else col(getattr(ServerSummary, sort.value))
        for chosen in FILTERS:
            conditions = (col(getattr(ServerSummary, name)) == value for name, value in chosen.items())
            rows = await filled.rows(select(url).where(*conditions).order_by(column.desc(), url.desc()))

            async def ask(after: str | None, sort: ServerSort = sort, chosen: dict[str, str] = chosen) -> ListPage[Any]:
                return await page_of_servers(
                    filled,
                    sort=sort,
                    descending=True,
                    limit=199,
                    after=after,
                    **chosen,
                )

            found = await all_pages(ask)
            assert [row.server_url for row in found] == [row.server_url for row in rows], (sort, chosen)
    one = await summary_of(filled, "https://s9")
    assert one is not None
    assert (one.link, one.advice, one.held, one.score) == ("down", None, 1, 3)
    other = await summary_of(filled, "https://s2")
    assert other is not None
    assert (other.link, other.advice, other.given_up) == ("up", "keep", 2)
    assert [row.score for row in (await page_of_servers(filled, sort=ServerSort.SCORE)).rows[:1]] == [None]
    assert await summary_of(filled, "https://nobody") is None


async def test_every_attempt_is_on_one_page(filled: Database) -> None:
    """The latest first; also of what arrived, and has no row any more."""
    at_server = await all_pages(lambda after: page_of_attempts(filled, server_url=A_SERVER, limit=4, after=after))
    assert len(at_server) == ROWS // ATTEMPTED
    assert [each.started_at for each in at_server] == sorted((each.started_at for each in at_server), reverse=True)
    permanent = AttemptOutcome.PERMANENT
    rare = await all_pages(lambda after: page_of_attempts(filled, outcome=permanent, limit=5, after=after))
    assert len(rare) == ROWS // 500
    mine = await all_pages(lambda after: attempts_at_delivery(filled, "d3", limit=70, after=after))
    assert [each.attempt for each in mine] == [*range(299, -1, -1)]


def pages() -> Iterator[tuple[str, Read]]:
    """Everything that a page reads, in the middle of a list."""
    for number, (selection, _) in enumerate(SELECTIONS):
        for newest in (False, True):
            cursor = "2026-01-01T16:40:00+00:00 d10007"
            limits: dict[str, Any] = {"newest_first": newest, "limit": 200, "after": cursor}
            yield f"deliveries {number} {newest}", partial(page_of_deliveries, selection=selection, **limits)
    for sort in ServerSort:
        for chosen in FILTERS:
            order: dict[str, Any] = {"sort": sort, "descending": True, "limit": 200, **chosen}
            yield f"servers {sort} {chosen}", partial(page_of_servers, **order)
    permanent = AttemptOutcome.PERMANENT
    yield "attempts", lambda database: page_of_attempts(database, limit=200)
    yield "attempts at a server", lambda database: page_of_attempts(database, server_url=A_SERVER, limit=200)
    yield "attempts that failed", lambda database: page_of_attempts(database, outcome=permanent)
    yield "attempts with a code", lambda database: page_of_attempts(database, server_url=A_SERVER, code="NONE")
    yield "attempts at a delivery", lambda database: attempts_at_delivery(database, "d3", limit=200)
    yield "a delivery", lambda database: show(database, "d3")
    yield "a server", lambda database: summary_of(database, "https://s9")
    yield "what is owed to a server", lambda database: backlog_of(database, A_SERVER)
    yield "the last hour", lambda database: last_hour(database, now=NOW)
    yield "what is owed", owed


async def test_what_is_owed_to_a_server_is_counted_or_was_counted_last(filled: Database) -> None:
    """Up to a hundred of each state by looking at them; beyond, the number is that of the last count."""
    exact = replace(await stats(filled, Selection(server_url=A_SERVER)), servers=())
    assert await backlog_of(filled, A_SERVER) == exact
    assert exact.ready > exact.held > 0
    more = ServerSummary(server_url=A_SERVER, link="down", advice="", score=-1, ready=9, held=7_000, owed=7_009,
                         failed=8_000, expired=0, given_up=8_000)  # fmt: skip
    async with filled.transaction() as session:
        session.add(more)
        moved = {"server_url": A_SERVER, "error_code": "TIMEOUT", "state": FAILED}
        others = and_(SERVER != A_SERVER, STATE.not_in((HELD, EXPIRED)))
        await session.execute(update(DeliveryJob).where(or_(STATE == FAILED, others)).values(moved))
        await session.execute(update(DeliveryJob).where(STATE == EXPIRED, SERVER == A_SERVER).values(state=HELD))
        if not filled.is_sqlite:
            await session.execute(text("ANALYZE delivery_jobs"))  # as the server itself does before long
    with watched() as queries:
        seen = await backlog_of(filled, A_SERVER)
    assert await filled.transact(partial(cost, queries=queries)) <= 1_000
    assert (seen.ready, seen.held, seen.failed, seen.expired) == (exact.ready, exact.held + exact.expired, 8_000, 0)
    assert seen.open == seen.ready + seen.held
    assert seen.codes == {"TIMEOUT": MOST_LOOKED_AT}
    assert (seen.oldest_ready, seen.oldest_open) == (exact.oldest_ready, exact.oldest_open)


async def test_no_page_reads_more_than_a_thousand_rows(overfilled: Database) -> None:
    """Each order is that of an index; what no index is sorted by is looked at in bounds."""
    for name, read in pages():
        with watched() as queries:
            await read(overfilled)
        assert queries, name
        number = await overfilled.transact(partial(cost, queries=queries))
        assert 0 < number <= 1_000, f"{name}: {number}"


async def test_what_was_given_up_is_looked_at_in_bounds(overfilled: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, by the index of their states."""
    monkeypatch.setattr(checks, "MOST_LOOKED_AT", 50)
    with watched() as queries:
        assert (await checks.given_up_in(overfilled)).found.startswith("at least 100 ")
    assert 0 < await overfilled.transact(partial(cost, queries=queries)) <= 1_000


async def test_a_scan_of_the_table_would_be_noticed(overfilled: Database) -> None:
    """So that the test above can fail: neither an index nor a limit, an order of no index."""
    attempts, made = col(DeliveryJob.attempts), col(DeliveryJob.created_at)
    for query in (
        select(col(DeliveryJob.id)).where(attempts > 0),
        select(col(DeliveryJob.id)).where(STATE == DeliveryState.READY).order_by(attempts, made).limit(5),
    ):
        with watched() as queries:
            await overfilled.rows(query)
        assert await overfilled.transact(partial(cost, queries=queries)) > 1_000


def test_what_is_scanned_and_shown_stays_below_a_thousand() -> None:
    assert MOST_SCANNED + MOST_SHOWN < 1_000
