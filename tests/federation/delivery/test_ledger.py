"""The ledger: writes share transactions, no entry answers for another, and only a row's own job is heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select, text
from sqlalchemy.exc import DataError, IntegrityError, OperationalError, SQLAlchemyError
from sqlmodel import col

from db import AttemptOutcome, Database, DeliveryAttempt, DeliveryJob, DeliveryState, Follow, HoldReason, Server
from federation.delivery.attempts import AttemptRecord
from federation.delivery.entries import Abandoned, Begin, Begun, Ended, FollowAnswer, NotBegun, Series
from federation.delivery.ledger import MAX_ERROR_CHARACTERS, MAX_GROUP, Ledger
from federation.delivery.rows import PlannedJob
from federation.servers.link_rules import Hold

SERVER = "https://b.example"
ACCEPTED = FollowAnswer(follower_id="user-a", following_id="user-b", server_url=SERVER, accepted=True)
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LATER = NOW + timedelta(minutes=1)
DOWN = Hold(reason=HoldReason.SERVER)


@pytest.fixture
async def ledger(database: Database) -> Ledger:
    return Ledger(database)


@pytest.fixture
async def sqlite(database_file: Path) -> AsyncIterator[Database]:
    """For what only SQLite's triggers and renames show in a line."""
    database = Database(f"sqlite:///{database_file}")
    yield database
    await database.close()


async def add_rows(database: Database, *ids: str, **values: Any) -> None:
    """Rows whose first job has their id, as the outbox writes them."""
    async with database.transaction() as session:
        session.add_all(
            DeliveryJob(
                **{
                    "id": each,
                    "target_url": f"{SERVER}/inbox",
                    "payload": f"text of {each}",
                    "created_at": NOW,
                    "job_name": "deliver-post",
                    "server_url": SERVER,
                    "job_id": each,
                    **values,
                }
            )
            for each in ids
        )


async def rows(database: Database) -> dict[str, DeliveryJob]:
    async with database.read() as session:
        return {row.id: row for row in (await session.execute(select(DeliveryJob))).scalars()}


async def attempts(database: Database) -> list[tuple[str, int | None, int, str, str | None]]:
    """Those on record: their delivery, series, number, outcome and code."""
    async with database.read() as session:
        found = (await session.execute(select(DeliveryAttempt).order_by(col(DeliveryAttempt.id)))).scalars()
        return [(each.delivery_id, each.series, each.attempt, each.outcome.value, each.error_code) for each in found]


async def run(database: Database, statement: str) -> None:
    async with database.transaction() as session:
        await session.execute(text(statement))


def beginning(row: str, *, job: str | None = None, attempt: int = 1, hold: Hold | None = None) -> Begin:
    return Begin(
        delivery_id=row,
        job_id=job or row,
        job_name="deliver-post",
        server_url=SERVER,
        attempt=attempt,
        at=NOW,
        hold=hold,
    )


async def begun(ledger: Ledger, row: str, *, job: str | None = None, attempt: int = 1) -> Series:
    """The row's own job has begun an attempt."""
    began = await ledger.begin(beginning(row, job=job, attempt=attempt))
    assert isinstance(began, Begun)
    return began.series


def series_of(row: str, *, job: str | None = None, number: int = 0) -> Series:
    return Series(
        delivery_id=row,
        job_id=job or row,
        number=number,
        first_attempted_at=NOW,
        attempts=0,
        holds=0,
        canary_at=None,
        is_canary=False,
    )


def failed(series: Series, **changes: Any) -> Ended:
    values: dict[str, Any] = {
        "series": series,
        "state": DeliveryState.FAILED,
        "at": LATER,
        "code": "NO_ACK",
        "error": "no",
        "outcome": "permanent",
    }
    return Ended(**{**values, **changes})


def held(series: Series, reason: HoldReason = HoldReason.SERVER, **changes: Any) -> Ended:
    return failed(series, state=DeliveryState.HELD, reason=reason, code="TIMEOUT", outcome="retryable", **changes)


def record(row: str, *, series: int = 0, attempt: int = 1, code: str | None = "NO_ACK") -> AttemptRecord:
    return AttemptRecord(
        delivery_id=row,
        job_name="deliver-post",
        method="FEDERATE_POST",
        server_url=SERVER,
        attempt=attempt,
        started_at=NOW,
        duration_ms=5,
        outcome=AttemptOutcome.DELIVERED if code is None else AttemptOutcome.PERMANENT,
        error_code=code,
        series=series,
    )


@contextmanager
def counted_commits() -> Iterator[list[object]]:
    """Every transaction committed meanwhile, on any engine."""
    seen: list[object] = []

    def note(connection: Connection) -> None:
        seen.append(connection)

    event.listen(Engine, "commit", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "commit", note)


async def test_concurrent_writes_share_a_transaction(ledger: Ledger, database: Database) -> None:
    """What is handed in during one turn of the loop is one commit, whatever it says."""
    ids = [f"row-{n}" for n in range(90)]
    await add_rows(database, *ids)
    ending = [await begun(ledger, each) for each in ids[60:]]

    with counted_commits() as commits:
        await asyncio.gather(
            *(ledger.begin(beginning(each)) for each in ids[:30]),
            *(ledger.gone(each) for each in ids[30:60]),
            *(ledger.ended(failed(series)) for series in ending),
        )

    assert len(commits) == 1
    left = await rows(database)
    assert left.keys() == set(ids[:30]) | set(ids[60:])
    assert all((left[each].attempts, left[each].last_attempted_at) == (1, NOW) for each in ids[:30])
    assert all((left[each].outcome, left[each].settled_at) == ("permanent", LATER) for each in ids[60:])


async def test_what_arrives_during_a_commit_makes_the_next_group(ledger: Ledger, database: Database) -> None:
    """A writer at work does not keep others waiting longer than its one transaction."""
    await add_rows(database, *(f"row-{n}" for n in range(21)))

    with counted_commits() as commits:
        first = asyncio.create_task(begun(ledger, "row-0"))
        while not commits:
            await asyncio.sleep(0)
            if first.done():
                break
        await asyncio.gather(first, *(begun(ledger, f"row-{n}") for n in range(1, 21)))

    assert len(commits) == 2
    assert [row.attempts for row in (await rows(database)).values()] == [1] * 21


async def test_under_load_a_group_is_waited_for(
    ledger: Ledger, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a group of several, what comes a few turns of the loop later shares the next transaction."""
    monkeypatch.setattr("federation.delivery.ledger.LINGER_SECONDS", 0.5)
    await add_rows(database, *(f"row-{n}" for n in range(4)))
    await asyncio.gather(ledger.gone("row-0"), ledger.gone("row-1"))

    with counted_commits() as commits:
        first = asyncio.create_task(ledger.gone("row-2"))
        for _ in range(5):
            await asyncio.sleep(0)
        await asyncio.gather(first, ledger.gone("row-3"))

    assert len(commits) == 1
    assert await rows(database) == {}


async def test_a_group_is_bounded(ledger: Ledger, database: Database) -> None:
    """More than one group's worth takes more transactions, in order, and nothing is left over."""
    ids = [f"row-{n}" for n in range(MAX_GROUP + 1)]
    await add_rows(database, *ids)

    with counted_commits() as commits:
        await asyncio.gather(*(ledger.gone(each) for each in ids))

    assert len(commits) == 2
    assert await rows(database) == {}


async def test_a_refused_entry_does_not_fail_its_neighbours(sqlite: Database) -> None:
    """Each of the others is committed; only the refused one's caller hears of it."""
    ledger = Ledger(sqlite)
    await add_rows(sqlite, "good-1", "bad", "good-2")
    await run(
        sqlite,
        "CREATE TRIGGER refuse BEFORE UPDATE ON delivery_jobs WHEN NEW.id = 'bad' "
        "BEGIN SELECT RAISE(FAIL, 'not this one'); END",
    )

    outcomes = await asyncio.gather(
        *(ledger.begin(beginning(each)) for each in ("good-1", "bad", "good-2")), return_exceptions=True
    )

    assert isinstance(outcomes[0], Begun)
    assert isinstance(outcomes[1], IntegrityError)
    assert isinstance(outcomes[2], Begun)
    assert {each: row.attempts for each, row in (await rows(sqlite)).items()} == {"good-1": 1, "bad": 0, "good-2": 1}


async def test_an_id_without_a_utf8_form_does_not_fail_its_neighbours(ledger: Ledger, database: Database) -> None:
    """What the driver cannot even encode is one caller's affair, too."""
    await add_rows(database, "good")

    outcomes = await asyncio.gather(ledger.gone("row-\ud800"), ledger.gone("good"), return_exceptions=True)

    assert isinstance(outcomes[0], UnicodeError)
    assert outcomes[1] is True
    assert await rows(database) == {}


async def test_a_nul_in_an_id_does_not_fail_its_neighbours_on_postgresql(migrated_postgres_url: str) -> None:
    """PostgreSQL stores no NUL: that entry fails, the others are committed."""
    database = Database(migrated_postgres_url)
    ledger = Ledger(database)
    await add_rows(database, "good-1", "good-2")

    outcomes = await asyncio.gather(
        ledger.gone("good-1"), ledger.gone("row\x00"), ledger.begin(beginning("good-2")), return_exceptions=True
    )

    assert outcomes[0] is True
    assert isinstance(outcomes[1], DataError)
    assert isinstance(outcomes[2], Begun)
    assert {each: row.attempts for each, row in (await rows(database)).items()} == {"good-2": 1}
    await database.close()


async def test_a_database_error_reaches_every_caller(sqlite: Database) -> None:
    """Nobody waits for ever or believes in a commit that was none, and the ledger works again afterwards."""
    ledger = Ledger(sqlite)
    await add_rows(sqlite, "row-1", "row-2")
    await run(sqlite, "ALTER TABLE delivery_jobs RENAME TO hidden")

    outcomes = await asyncio.gather(
        ledger.begin(beginning("row-1")),
        ledger.gone("row-2"),
        ledger.ended(failed(series_of("row-3"))),
        return_exceptions=True,
    )

    assert [type(each) for each in outcomes] == [OperationalError] * 3
    await run(sqlite, "ALTER TABLE hidden RENAME TO delivery_jobs")
    await ledger.gone("row-2")
    assert {each: row.attempts for each, row in (await rows(sqlite)).items()} == {"row-1": 0}


async def test_repeats_change_nothing(ledger: Ledger, database: Database) -> None:
    """A row that is gone, or never was, takes every entry again; so does one that is over."""
    await add_rows(database, "row-1", "row-2")
    series = await begun(ledger, "row-2")

    for time in range(2):
        assert await ledger.gone("row-1", attempt=record("row-1", code=None)) is True
        assert await ledger.ended(failed(series, error="the same", attempt=record("row-2"))) is (time == 0)
    assert await ledger.begin(beginning("row-1")) == NotBegun(exists=False)
    assert await ledger.begin(beginning("row-2")) == NotBegun(exists=True)
    assert await ledger.ended(failed(series_of("never-was"))) is False

    (left,) = (await rows(database)).values()
    assert (left.id, left.last_error, left.error_code, left.attempts) == ("row-2", "the same", "NO_ACK", 1)
    assert await attempts(database) == [
        ("row-1", 0, 1, "delivered", None),
        ("row-2", 0, 1, "permanent", "NO_ACK"),
    ]


async def test_an_error_text_fits_and_holds_no_nul(ledger: Ledger, database: Database) -> None:
    """What a row says of its failure is bounded, and storable on every database."""
    await add_rows(database, "row-1")

    await ledger.ended(failed(await begun(ledger, "row-1"), error="\x00" + "x" * 100_000))

    assert (await rows(database))["row-1"].last_error == "x" * MAX_ERROR_CHARACTERS


async def test_a_caller_that_gives_up_takes_nobody_with_it(ledger: Ledger, database: Database) -> None:
    """A cancelled attempt's entry may be written or not; its neighbours' are."""
    await add_rows(database, "row-1", "row-2")
    tasks = [asyncio.create_task(ledger.gone(f"row-{n}")) for n in (1, 2)]
    await asyncio.sleep(0)

    tasks[0].cancel()

    assert await tasks[1] is True
    assert "row-2" not in await rows(database)
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert await ledger.gone("row-1") is True


@pytest.mark.parametrize(
    "values",
    [
        {"job_id": "another"},
        {"job_id": "row-1.1", "series": 1},
        {"state": DeliveryState.HELD, "held_reason": HoldReason.SERVER},
        {"state": DeliveryState.FAILED, "settled_at": NOW},
        {"state": DeliveryState.EXPIRED, "settled_at": NOW},
        {"settled_at": NOW},
    ],
    ids=["anothers", "of-a-later-series", "held", "failed", "expired", "settled-by-an-earlier-version"],
)
async def test_only_a_ready_rows_own_job_may_send(ledger: Ledger, database: Database, values: dict[str, Any]) -> None:
    """Any other learns that there is a row which is not its business, and has changed nothing."""
    await add_rows(database, "row-1", **values)
    before = (await rows(database))["row-1"].model_dump()

    assert await ledger.begin(beginning("row-1")) == NotBegun(exists=True)
    assert await ledger.ended(failed(series_of("row-1"))) is False
    assert await ledger.abandoned(abandoned("row-1")) is False

    assert (await rows(database))["row-1"].model_dump() == before
    assert await attempts(database) == []


async def test_an_attempt_begins_with_the_text_and_the_series(ledger: Ledger, database: Database) -> None:
    """The row counts it, says which one is under way, and since when its series is being tried."""
    await add_rows(database, "row-1", job_id="row-1.2", series=2, holds=3, released_at=NOW)

    began = await ledger.begin(beginning("row-1", job="row-1.2", attempt=4))

    assert began == Begun(
        series=Series(
            delivery_id="row-1",
            job_id="row-1.2",
            number=2,
            first_attempted_at=NOW,
            attempts=1,
            holds=3,
            canary_at=None,
            is_canary=False,
        ),
        text="text of row-1",
    )
    row = (await rows(database))["row-1"]
    assert (row.attempts, row.sending, row.first_attempted_at, row.last_attempted_at) == (1, 4, NOW, NOW)
    assert row.released_at is None


async def test_a_shared_text_is_somebody_elses_to_read(ledger: Ledger, database: Database) -> None:
    """The row has none of its own then."""
    await add_rows(database, "row-1", payload="", payload_id="text-1")

    began = await ledger.begin(beginning("row-1"))

    assert isinstance(began, Begun)
    assert began.text is None


async def test_a_node_producers_row_takes_the_first_job_it_meets(ledger: Ledger, database: Database) -> None:
    """It has no job yet, and neither a job's name nor a server; from now on it has all three, and no other job."""
    await add_rows(database, "row-1", job_id=None, job_name=None, server_url=None)

    assert isinstance(await ledger.begin(beginning("row-1", job="17")), Begun)
    assert await ledger.begin(beginning("row-1", job="18")) == NotBegun(exists=True)

    row = (await rows(database))["row-1"]
    assert (row.job_id, row.job_name, row.server_url, row.attempts) == ("17", "deliver-post", SERVER, 1)


async def test_of_two_jobs_of_one_row_in_one_group_one_may_send(ledger: Ledger, database: Database) -> None:
    """Whoever comes first, whether the row names its job or takes the first one."""
    await add_rows(database, "adopted", job_id=None, job_name=None, server_url=None)
    await add_rows(database, "named")

    with counted_commits() as commits:
        outcomes = await asyncio.gather(
            *(ledger.begin(beginning("adopted", job=job)) for job in ("17", "18")),
            *(ledger.begin(beginning("named")) for _ in range(2)),
        )

    assert len(commits) == 1
    assert [isinstance(each, Begun) for each in outcomes] == [True, False, True, False]
    assert {each: row.attempts for each, row in (await rows(database)).items()} == {"adopted": 1, "named": 1}


@pytest.mark.parametrize(
    "hold", [DOWN, Hold(reason=HoldReason.REST, until=LATER), Hold(reason=HoldReason.BUSY, until=LATER)]
)
async def test_a_delivery_whose_server_must_be_left_alone_is_held(
    ledger: Ledger, database: Database, hold: Hold
) -> None:
    """Without an attempt counted; and a Node producer's is ours from then on, so that it can be released."""
    await add_rows(database, "row-1")
    await add_rows(database, "adopted", job_id=None, job_name=None, server_url=None)

    outcomes = [await ledger.begin(beginning(each, hold=hold)) for each in ("row-1", "adopted")]

    assert outcomes == [NotBegun(exists=True, held=hold.reason)] * 2
    for row in (await rows(database)).values():
        assert (row.state, row.held_reason, row.held_at) == (DeliveryState.HELD, hold.reason, NOW)
        assert (row.next_attempt_at, row.attempts, row.sending) == (hold.until, 0, None)
        assert (row.job_name, row.server_url) == ("deliver-post", SERVER)
    assert await attempts(database) == []


async def test_a_canary_goes_ahead_to_a_server_that_must_be_left_alone(ledger: Ledger, database: Database) -> None:
    """Once: with its next attempt it is a delivery like the others, which wait."""
    await add_rows(database, "row-1", canary_at=LATER, released_at=LATER)

    began = await ledger.begin(beginning("row-1", hold=DOWN))

    assert isinstance(began, Begun)
    assert began.series.is_canary
    assert await ledger.begin(beginning("row-1", attempt=2, hold=DOWN)) == NotBegun(exists=True, held=HoldReason.SERVER)


async def test_a_row_that_was_a_canary_once_waits_with_the_others(ledger: Ledger, database: Database) -> None:
    """It was released again since, as one of many."""
    await add_rows(database, "row-1", canary_at=NOW, released_at=LATER)

    outcome = await ledger.begin(beginning("row-1", hold=DOWN))

    assert outcome == NotBegun(exists=True, held=HoldReason.SERVER)


@pytest.mark.parametrize("hold", [None, DOWN], ids=["sent", "held"])
async def test_an_attempt_that_lost_its_worker_is_on_record_as_stalled(
    ledger: Ledger, database: Database, hold: Hold | None
) -> None:
    """Whoever looks at the row next puts it there; if it ends after all, how it ended replaces that."""
    await add_rows(database, "row-1")
    series = await begun(ledger, "row-1", attempt=1)

    await ledger.begin(beginning("row-1", attempt=2, hold=hold))
    assert await attempts(database) == [("row-1", 0, 1, "retryable", "STALLED")]

    await ledger.ended(failed(series, state=DeliveryState.READY, attempt=record("row-1", attempt=1)))
    assert await attempts(database) == [("row-1", 0, 1, "permanent", "NO_ACK")]
    await ledger.gone("row-1", attempt=record("row-1", attempt=1, code=None))
    assert await attempts(database) == [("row-1", 0, 1, "permanent", "NO_ACK")]


async def test_an_attempt_that_begins_again_is_the_same_one(ledger: Ledger, database: Database) -> None:
    """A worker that gave its job back uncounted leaves a mark of the number that comes again."""
    await add_rows(database, "row-1")
    await begun(ledger, "row-1", attempt=1)

    await begun(ledger, "row-1", attempt=1)

    assert await attempts(database) == []


async def test_a_failed_attempt_leaves_the_row_to_the_next_of_its_job(ledger: Ledger, database: Database) -> None:
    """It stays ready, and says what went wrong."""
    await add_rows(database, "row-1")
    series = await begun(ledger, "row-1")

    ended = failed(series, state=DeliveryState.READY, code="TIMEOUT", attempt=record("row-1", code="TIMEOUT"))
    assert await ledger.ended(ended) is True

    row = (await rows(database))["row-1"]
    assert (row.state, row.job_id, row.error_code, row.last_error) == (DeliveryState.READY, "row-1", "TIMEOUT", "no")
    assert (row.sending, row.settled_at, row.outcome, row.held_at) == (None, None, None, None)
    assert (await begun(ledger, "row-1", attempt=2)).first_attempted_at == NOW


async def test_faults_of_ours_in_a_row_are_counted(ledger: Ledger, database: Database) -> None:
    """So that each wait is twice as long; another reason to wait begins anew."""
    await add_rows(database, "row-1", "row-2", holds=2)

    await ledger.ended(held(await begun(ledger, "row-1"), HoldReason.OURS, until=LATER))
    await ledger.ended(held(await begun(ledger, "row-2")))

    found = await rows(database)
    assert {each: (row.held_reason, row.holds) for each, row in found.items()} == {
        "row-1": (HoldReason.OURS, 3),
        "row-2": (HoldReason.SERVER, 0),
    }
    assert (found["row-1"].held_at, found["row-1"].next_attempt_at) == (LATER, LATER)


async def test_attempts_in_between_do_not_end_the_count(ledger: Ledger, database: Database) -> None:
    """A fault of ours that outlasts the five attempts of each series is waited for longer and longer."""
    await add_rows(database, "row-1", holds=2)

    await ledger.ended(failed(await begun(ledger, "row-1"), state=DeliveryState.READY, code="INTERNAL", outcome=None))
    await ledger.ended(held(await begun(ledger, "row-1", attempt=2), HoldReason.OURS, until=LATER))

    assert (await rows(database))["row-1"].holds == 3


def abandoned(row: str, *, job: str | None = None) -> Abandoned:
    return Abandoned(
        delivery_id=row,
        job_id=job or row,
        at=LATER,
        until=LATER + timedelta(minutes=10),
        error="its worker disappeared",
    )


async def test_a_job_that_ended_without_a_word_holds_its_row(ledger: Ledger, database: Database) -> None:
    """For as long as its earlier faults ask for, with the attempt that was under way on record."""
    await add_rows(database, "row-1", holds=2)
    await begun(ledger, "row-1", attempt=4)

    assert await ledger.abandoned(abandoned("row-1")) is True

    row = (await rows(database))["row-1"]
    assert (row.state, row.held_reason, row.error_code) == (DeliveryState.HELD, HoldReason.OURS, "STALLED")
    assert (row.last_error, row.holds, row.sending) == ("its worker disappeared", 3, None)
    assert row.next_attempt_at == LATER + timedelta(minutes=10)
    assert await attempts(database) == [("row-1", 0, 4, "retryable", "STALLED")]
    assert await ledger.abandoned(abandoned("row-1")) is False


async def add_line(database: Database, *ids: str, key: str = "key") -> None:
    """Deliveries of one ordering key, as the outbox adds them one after the other."""
    for position, each in enumerate(ids, 1):
        waits = {} if position == 1 else {"state": DeliveryState.HELD, "held_reason": HoldReason.ORDER}
        await add_rows(database, each, ordering_key=key, ordering_position=position, **waits)


@pytest.mark.parametrize("end", ["gone", "failed"])
async def test_the_end_of_an_older_delivery_makes_the_next_one_ready(database: Database, end: str) -> None:
    """In the same transaction; its job is added after that, and no other's."""
    added: list[Sequence[PlannedJob]] = []

    async def add(jobs: Sequence[PlannedJob]) -> None:
        added.append(jobs)

    ledger = Ledger(database, add_jobs=add)
    await add_line(database, "first", "second", "third")
    await add_line(database, "elsewhere-1", "elsewhere-2", key="another")
    series = await begun(ledger, "first")

    with counted_commits() as commits:
        if end == "gone":
            await ledger.gone("first")
        else:
            await ledger.ended(failed(series))
        await ledger.close()

    assert len(commits) == 1
    found = await rows(database)
    assert (found["second"].state, found["second"].job_id, found["second"].held_reason) == (
        DeliveryState.READY,
        "second.1",
        None,
    )
    assert found["third"].state is found["elsewhere-2"].state is DeliveryState.HELD
    assert [[(name, options) for name, _, options in jobs] for jobs in added] == [
        [("deliver-post", {"jobId": "second.1"})]
    ]


async def test_a_held_older_delivery_keeps_the_next_one_waiting(ledger: Ledger, database: Database) -> None:
    """It is not over, only late; and so does one that is to be tried again."""
    await add_line(database, "first", "second")
    series = await begun(ledger, "first")

    await ledger.ended(failed(series, state=DeliveryState.READY))
    assert (await rows(database))["second"].state is DeliveryState.HELD
    await ledger.ended(held(series))

    assert (await rows(database))["second"].state is DeliveryState.HELD


async def test_a_next_one_that_waits_for_its_server_goes_on_waiting(ledger: Ledger, database: Database) -> None:
    """The order is not what holds it."""
    await add_line(database, "first")
    line = {"ordering_key": "key", "ordering_position": 2}
    await add_rows(database, "second", state=DeliveryState.HELD, held_reason=HoldReason.SERVER, **line)

    await ledger.gone("first")

    assert (await rows(database))["second"].held_reason is HoldReason.SERVER


async def test_a_queue_that_is_down_does_not_undo_an_end(database: Database) -> None:
    """The next one is ready and without a job, which the sweeper finds."""

    async def refuse(jobs: Sequence[PlannedJob]) -> None:
        raise ConnectionError("away")

    ledger = Ledger(database, add_jobs=refuse)
    await add_line(database, "first", "second")

    assert await ledger.gone("first") is True

    assert (await rows(database))["second"].state is DeliveryState.READY


@pytest.mark.parametrize("end", ["gone", "ended"])
async def test_an_attempt_and_its_rows_fate_are_one_write(sqlite: Database, end: str) -> None:
    """If the log does not take the attempt, the row is as it was; repeating the entry writes both."""
    ledger = Ledger(sqlite)
    await add_rows(sqlite, "row-1")
    series = await begun(ledger, "row-1")
    await run(
        sqlite,
        "CREATE TRIGGER refuse BEFORE INSERT ON delivery_attempts BEGIN SELECT RAISE(ABORT, 'pulled the plug'); END",
    )

    async def write() -> bool:
        if end == "gone":
            return await ledger.gone("row-1", attempt=record("row-1"))
        return await ledger.ended(failed(series, attempt=record("row-1")))

    with pytest.raises(SQLAlchemyError):
        await write()

    row = (await rows(sqlite))["row-1"]
    assert (row.state, row.sending, await attempts(sqlite)) == (DeliveryState.READY, 1, [])
    await run(sqlite, "DROP TRIGGER refuse")
    assert await write() is True
    assert await attempts(sqlite) == [("row-1", 0, 1, "permanent", "NO_ACK")]
    assert end == "ended" or await rows(sqlite) == {}


async def test_a_row_and_its_attempt_are_one_commit(ledger: Ledger, database: Database) -> None:
    """On either database; the attempt of a job that was superseded is on record too, and changes nothing else."""
    await add_rows(database, "row-1", "row-2", job_id="another")

    with counted_commits() as commits:
        await asyncio.gather(
            ledger.gone("row-1", attempt=record("row-1", code=None)),
            ledger.ended(failed(series_of("row-2"), attempt=record("row-2"))),
        )

    assert len(commits) == 1
    assert sorted(await attempts(database)) == [
        ("row-1", 0, 1, "delivered", None),
        ("row-2", 0, 1, "permanent", "NO_ACK"),
    ]
    assert {each: row.state for each, row in (await rows(database)).items()} == {"row-2": DeliveryState.READY}


async def add_follow(database: Database) -> None:
    async with database.transaction() as session:
        known = {"last_seen": NOW, "created_at": NOW, "updated_at": NOW, "is_healthy": True}
        session.add(Server(url=SERVER, public_key="p", encryption_public_key="e", **known))
        await session.flush()
        session.add(Follow(follower_id="user-a", following_id="user-b", created_at=NOW, follower_server_url=SERVER))


async def only_follow(database: Database) -> tuple[bool, bool]:
    async with database.read() as session:
        follow = (await session.execute(select(Follow))).scalar_one()
        return follow.accepted, follow.acknowledged


async def test_a_follow_and_its_row_change_together(sqlite: Database) -> None:
    """A break between the two leaves both as they were; repeating the entry then does both."""
    ledger = Ledger(sqlite)
    await add_follow(sqlite)
    await add_rows(sqlite, "row-1")
    await run(
        sqlite,
        "CREATE TRIGGER refuse BEFORE UPDATE ON follows BEGIN SELECT RAISE(ABORT, 'pulled the plug'); END",
    )

    with pytest.raises(SQLAlchemyError):
        await ledger.gone("row-1", follow=ACCEPTED)

    assert "row-1" in await rows(sqlite)
    assert await only_follow(sqlite) == (False, False)
    await run(sqlite, "DROP TRIGGER refuse")
    assert await ledger.gone("row-1", follow=ACCEPTED) is True
    assert await rows(sqlite) == {}
    assert await only_follow(sqlite) == (True, False)


async def test_each_caller_learns_of_its_own_follow(ledger: Ledger, database: Database) -> None:
    """In one group, the answer to a follow we do not have is told apart from the one we have."""
    await add_follow(database)
    await add_rows(database, "row-1", "row-2", "row-3")
    stranger = FollowAnswer(follower_id="user-a", following_id="nobody", server_url=SERVER, accepted=True)
    elsewhere = FollowAnswer(
        follower_id="user-a", following_id="user-b", server_url="https://evil.example", accepted=True
    )

    known = await asyncio.gather(
        ledger.gone("row-1", follow=stranger),
        ledger.gone("row-2", follow=ACCEPTED),
        ledger.gone("row-3", follow=elsewhere),
    )

    assert list(known) == [False, True, False]
    assert await rows(database) == {}
    assert await only_follow(database) == (True, False)


async def test_an_acknowledgment_leaves_acceptance_alone(ledger: Ledger, database: Database) -> None:
    """A late "received" after an acceptance does not take it back."""
    await add_follow(database)
    received = FollowAnswer(follower_id="user-a", following_id="user-b", server_url=SERVER, accepted=False)

    await ledger.gone("row-1", follow=ACCEPTED)
    await ledger.gone("row-1", follow=received)

    assert await only_follow(database) == (True, True)
