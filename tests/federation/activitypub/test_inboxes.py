"""Inboxes that are not found, or gone: when they are, what is owed to them, and who is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import pytest
from sqlalchemy import select
from sqlmodel import col

from db import ActivityInbox, Database, DeliveryAttempt, DeliveryJob, DeliveryState
from federation.activitypub.inboxes import GoneInbox, Inboxes, InboxForgotten, gone_among, gone_since
from workers.clock import ManualClock

SERVER = "https://b.example"
BOB, CAROL, SHARED = f"{SERVER}/users/bob/inbox", f"{SERVER}/users/carol/inbox", f"{SERVER}/inbox"
DAY = timedelta(days=1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def inboxes(database: Database, clock: ManualClock) -> AsyncIterator[Inboxes]:
    opened = Inboxes(database, clock=clock)
    yield opened
    await opened.close()


async def row_of(database: Database, url: str) -> ActivityInbox | None:
    async with database.read() as session:
        return await session.get(ActivityInbox, url)


async def owe(database: Database, clock: ManualClock, name: str, inbox: str, **values: object) -> None:
    async with database.transaction() as session:
        session.add(
            DeliveryJob(
                id=name,
                target_url=inbox,
                server_url=SERVER,
                payload="{}",
                created_at=clock.now(),
                **{"wire": "activitypub", "job_name": "deliver-activity", **values},
            )
        )


async def states(database: Database) -> dict[str, tuple[DeliveryState, str | None]]:
    async with database.read() as session:
        rows = (await session.execute(select(DeliveryJob).order_by(col(DeliveryJob.id)))).scalars()
        return {row.id: (row.state, row.error_code) for row in rows}


async def among(database: Database, now: datetime, *urls: str, shared: tuple[str, ...] = ()) -> set[str]:
    return await database.transact(lambda connection: gone_among(connection, urls, now, shared=shared))


@pytest.mark.parametrize(
    ("last", "is_gone"), [(6 * DAY - timedelta(seconds=1), False), (6 * DAY, True), (9 * DAY, True)]
)
async def test_404s_cover_a_week_or_the_inbox_is_not_gone(
    inboxes: Inboxes, database: Database, clock: ManualClock, last: timedelta, is_gone: bool
) -> None:
    """The first and the last one count, whatever is between them."""
    began = clock.now()
    await inboxes.missing(BOB, SERVER, delivery_id="d")
    clock.advance(last)
    await inboxes.missing(BOB, SERVER, delivery_id="d")
    row = await row_of(database, BOB)
    assert row is not None
    assert (row.missing_since, row.missing_last, row.server_url) == (began, clock.now(), SERVER)
    assert (row.gone_at, row.gone_code) == ((clock.now(), 404) if is_gone else (None, None))


async def test_an_activity_that_is_taken_begins_the_week_anew(
    inboxes: Inboxes, database: Database, clock: ManualClock
) -> None:
    await inboxes.missing(BOB, SERVER, delivery_id="d")
    clock.advance(5 * DAY)
    effect = await inboxes.taken(BOB)
    assert effect is not None
    assert list(await database.transact(lambda connection: InboxForgotten.apply(connection, [effect, effect]))) == [
        True,
        True,
    ]
    assert await database.transact(lambda connection: InboxForgotten.apply(connection, [effect])) == [False]
    clock.advance(5 * DAY)
    await inboxes.missing(BOB, SERVER, delivery_id="d")
    row = await row_of(database, BOB)
    assert row is not None
    assert (row.missing_since, row.gone_at) == (clock.now(), None)


@pytest.fixture
def asked(database: Database, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The queries so far."""
    queries: list[str] = []
    real = database.rows

    async def counted(query: object, values: object = None) -> object:
        queries.append(str(query))
        return await real(query, values)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr(database, "rows", counted)  # counts, and passes on
    return queries


async def test_an_inbox_with_which_nothing_was_wrong_costs_nothing(
    inboxes: Inboxes, database: Database, asked: list[str]
) -> None:
    """However many there are, and whatever else is noted meanwhile, a process asks once a minute."""
    for number in range(10):
        await inboxes.missing(f"{SERVER}/strangers/{number}/inbox", SERVER, delivery_id="d")
        await inboxes.gone(f"{SERVER}/strangers/{number}/old", SERVER, delivery_id="d")
        assert await inboxes.taken(f"{SERVER}/users/{number}/inbox") is None
    await inboxes.missing(BOB, SERVER, delivery_id="d")
    assert await inboxes.taken(BOB) == InboxForgotten(BOB)
    assert await inboxes.taken(f"{SERVER}/strangers/3/old") == InboxForgotten(f"{SERVER}/strangers/3/old")
    assert len(asked) == 1


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_process_knows_no_more_inboxes_than_it_may(
    database: Database, clock: ManualClock, asked: list[str], is_read: bool
) -> None:
    """Of those that strangers add, by what it reads or by what it notes: from then on it looks for each."""
    reader, noter = (Inboxes(database, clock=clock, max_known=most) for most in (2, 1_000 if is_read else 2))
    for number in range(4):
        await noter.missing(f"{SERVER}/users/{number}/inbox", SERVER, delivery_id="d")
    found = reader if is_read else noter
    assert await found.taken(BOB) is None
    for number in range(4):
        url = f"{SERVER}/users/{number}/inbox"
        assert await found.taken(url) == InboxForgotten(url)
    assert len(await found._known.get("")) == 3
    assert len(asked) == (4 if is_read else 3)  # a read by each process, then BOB's and those that are not known
    for each in (reader, noter):
        await each.close()


async def test_a_shared_inbox_is_not_gone_because_it_was_not_found(
    inboxes: Inboxes, database: Database, clock: ManualClock
) -> None:
    """Whoever sends next says that it is shared; one that was taken for another is back."""
    for url in (SHARED, BOB):
        await inboxes.missing(url, SERVER, delivery_id="d")
    assert await among(database, clock.now(), SHARED, shared=(SHARED,)) == set()
    clock.advance(7 * DAY)
    for url in (SHARED, BOB):
        await inboxes.missing(url, SERVER, delivery_id="d")
    row = await row_of(database, SHARED)
    assert row is not None
    assert row.gone_at is None
    assert await among(database, clock.now(), SHARED, BOB) == {BOB}
    assert await among(database, clock.now(), SHARED, BOB, shared=(SHARED, BOB)) == set()


async def test_a_gone_inbox_is_skipped_for_a_month(inboxes: Inboxes, database: Database, clock: ManualClock) -> None:
    """Then it is tried again, and may be gone again."""
    await inboxes.gone(BOB, SERVER, delivery_id="d")
    assert await among(database, clock.now(), BOB, CAROL) == {BOB}
    clock.advance(30 * DAY - timedelta(seconds=1))
    assert await among(database, clock.now(), BOB, CAROL) == {BOB}
    clock.advance(timedelta(seconds=1))
    assert await among(database, clock.now(), BOB, CAROL) == set()
    await inboxes.missing(BOB, SERVER, delivery_id="d")
    assert await among(database, clock.now(), BOB, CAROL) == {BOB}


async def test_a_gone_inbox_that_is_shared_is_tried_once_a_day(
    inboxes: Inboxes, database: Database, clock: ManualClock
) -> None:
    await inboxes.gone(SHARED, SERVER, delivery_id="d")
    found = []
    for hours in (0, 23, 1, 1, 23, 1):
        clock.advance(timedelta(hours=hours))
        found.append(bool(await among(database, clock.now(), SHARED, shared=(SHARED,))))
    assert found == [True, True, False, True, False, True]


async def test_what_is_owed_to_a_gone_inbox_fails(inboxes: Inboxes, database: Database, clock: ManualClock) -> None:
    """What is held and what is ready, but for the delivery that found out, and nothing else."""
    held = {"state": DeliveryState.HELD, "held_reason": "server", "held_at": clock.now()}
    await owe(database, clock, "finder", BOB, sending=1)
    await owe(database, clock, "ready", BOB, job_id="ready")
    await owe(database, clock, "held", BOB, next_attempt_at=clock.now(), **held)
    await owe(database, clock, "lost before", BOB, state=DeliveryState.EXPIRED, error_code="TIMEOUT")
    await owe(database, clock, "another's", CAROL, **held)
    await owe(database, clock, "shared", SHARED)
    await inboxes.gone(BOB, SERVER, delivery_id="finder")

    assert await states(database) == {
        "another's": (DeliveryState.HELD, None),
        "finder": (DeliveryState.READY, None),
        "held": (DeliveryState.FAILED, "INBOX_GONE"),
        "lost before": (DeliveryState.EXPIRED, "TIMEOUT"),
        "ready": (DeliveryState.FAILED, "INBOX_GONE"),
        "shared": (DeliveryState.READY, None),
    }
    async with database.read() as session:
        row = await session.get_one(DeliveryJob, "held")
    assert (row.held_reason, row.held_at, row.next_attempt_at, row.settled_at) == (None, None, None, clock.now())


async def test_an_attempt_that_was_under_way_to_an_inbox_that_is_gone_is_on_record(
    inboxes: Inboxes, database: Database, clock: ManualClock
) -> None:
    """Its worker may have died over it: nobody else would tell of it."""
    began = clock.now()
    await owe(database, clock, "under way", BOB, job_id="under way", sending=2, last_attempted_at=began, attempts=2)
    clock.advance(timedelta(seconds=1))
    await inboxes.gone(BOB, SERVER, delivery_id="finder")
    async with database.read() as session:
        (attempt,) = (await session.execute(select(DeliveryAttempt))).scalars()
    assert (attempt.delivery_id, attempt.series, attempt.attempt) == ("under way", 0, 2)
    assert (attempt.error_code, attempt.started_at, attempt.note) == ("STALLED", began, None)


async def test_a_404_within_the_hour_is_not_written_again(
    inboxes: Inboxes, database: Database, clock: ManualClock
) -> None:
    began = clock.now()
    for _ in range(3):
        await inboxes.missing(BOB, SERVER, delivery_id="d")
        clock.advance(timedelta(minutes=29))
    row = await row_of(database, BOB)
    assert row is not None
    assert row.missing_last == began
    await inboxes.missing(BOB, SERVER, delivery_id="d")
    assert (await row_of(database, BOB)).missing_last == clock.now()  # type: ignore[union-attr] # it is there


async def test_the_application_is_told_which_inboxes_are_gone(
    inboxes: Inboxes, database: Database, clock: ManualClock
) -> None:
    """Since a moment; those that are only not found are not among them."""
    began = clock.now()
    await inboxes.gone(BOB, SERVER, delivery_id="d")
    await inboxes.missing(SHARED, SERVER, delivery_id="d")
    clock.advance(DAY)
    await inboxes.gone(CAROL, SERVER, delivery_id="d")
    first = GoneInbox(url=BOB, server_url=SERVER, gone_at=began, code=410)
    second = GoneInbox(url=CAROL, server_url=SERVER, gone_at=clock.now(), code=410)

    async def told(since: datetime) -> list[GoneInbox]:
        return await database.transact(lambda connection: gone_since(connection, since))

    assert await told(began) == [first, second]
    assert await told(began + timedelta(seconds=1)) == [second]
    assert await told(clock.now() + DAY) == []


async def test_an_actor_that_is_heard_of_has_its_own_inbox_again(
    inboxes: Inboxes, database: Database, clock: ManualClock, asked: list[str]
) -> None:
    """Where nothing is wrong with any inbox that costs nothing. What its server shares stays gone."""
    await inboxes.heard_of("https://b.example/users/bob", BOB)
    assert len(asked) == 1, "the reading of those that it knows"
    for url in (BOB, SHARED):
        await inboxes.gone(url, SERVER, delivery_id="d")
    await among(database, clock.now(), SHARED, shared=(SHARED,))
    await inboxes.heard_of("https://b.example/users/bob", BOB, SHARED)
    assert await row_of(database, BOB) is None
    assert await row_of(database, SHARED) is not None
    await inboxes.missing(BOB, SERVER, delivery_id="d")
    await inboxes.heard_of("https://b.example/users/bob", BOB)
    await inboxes.missing(BOB, SERVER, delivery_id="d")
    assert await row_of(database, BOB) is not None
