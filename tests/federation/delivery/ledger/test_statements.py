"""What an entry does to its row, and to the next of its ordering key: only the row's own job is heard."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import select, update
from sqlmodel import col

from db import AttemptNote, Database, DeliveryAttempt, DeliveryJob, DeliveryState, HoldReason
from federation.delivery.ledger.entries import Abandoned, Begun, Gone, NotBegun, Series
from federation.delivery.ledger.ledger import Ledger
from federation.delivery.ledger.statements import FIRST_SUSPECTS, Group
from federation.delivery.rows import PlannedJob
from federation.servers.link_rules import Hold
from tests.federation.delivery.entries import (
    DOWN,
    LATER,
    NOW,
    SERVER,
    add_rows,
    attempts,
    beginning,
    begun,
    counted_commits,
    failed,
    held,
    record,
    rows,
    run,
    series_of,
)
from tests.federation.rows_read import watched


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

    assert len(commits) == (1 if database.is_sqlite else 2)
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


@pytest.mark.parametrize(
    "hold",
    [
        Hold(reason=HoldReason.SERVER),
        Hold(reason=HoldReason.REST, until=LATER),
        Hold(reason=HoldReason.BUSY, until=LATER),
    ],
    ids=["by-hand", "rest", "no-room"],
)
async def test_a_canary_waits_where_nobody_may_be_tried(ledger: Ledger, database: Database, hold: Hold) -> None:
    """Its job was late. Meanwhile an operator holds the server, or it asked for a rest, or it is up and has no room."""
    await add_rows(database, "row-1", canary_at=LATER, released_at=LATER)

    assert await ledger.begin(beginning("row-1", hold=hold)) == NotBegun(exists=True, held=hold.reason)
    assert (await rows(database))["row-1"].attempts == 0


async def test_a_row_that_was_a_canary_once_waits_with_the_others(ledger: Ledger, database: Database) -> None:
    """It was released again since, as one of many."""
    await add_rows(database, "row-1", canary_at=NOW, released_at=LATER)

    outcome = await ledger.begin(beginning("row-1", hold=DOWN))

    assert outcome == NotBegun(exists=True, held=HoldReason.SERVER)


@pytest.mark.parametrize("state", [DeliveryState.READY, DeliveryState.HELD, DeliveryState.FAILED])
async def test_an_attempt_that_lost_its_job_leaves_the_row_to_the_next(
    ledger: Ledger, database: Database, state: DeliveryState
) -> None:
    """Its process stood still. How it ended is on record, and the one under way is not forgotten."""
    await add_rows(database, "row-1")
    series = await begun(ledger, "row-1", attempt=1)
    await begun(ledger, "row-1", attempt=2)

    late = failed(series, state=state, reason=HoldReason.OURS, attempt=record("row-1", attempt=1))
    assert await ledger.ended(late) is False

    row = (await rows(database))["row-1"]
    assert (row.state, row.sending) == (DeliveryState.READY, 2)
    assert await attempts(database) == [("row-1", 0, 1, "permanent", "NO_ACK")]


async def test_an_attempt_under_way_is_on_record_when_an_earlier_one_arrived(
    ledger: Ledger, database: Database
) -> None:
    """As one that lost its worker, which it may have; if it ends after all, that replaces it."""
    await add_rows(database, "row-1")
    await begun(ledger, "row-1", attempt=1)
    series = await begun(ledger, "row-1", attempt=2)

    await ledger.gone("row-1", attempt=record("row-1", attempt=1, code=None))
    assert set(await attempts(database)) == {
        ("row-1", 0, 1, "delivered", None),
        ("row-1", 0, 2, "retryable", "STALLED"),
    }

    await ledger.ended(failed(series, attempt=record("row-1", attempt=2)))
    assert ("row-1", 0, 2, "permanent", "NO_ACK") in await attempts(database)


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
    assert (await attempts(database))[0] == ("row-1", 0, 1, "permanent", "NO_ACK")


async def test_a_canary_that_crashes_workers_is_found_out(ledger: Ledger, database: Database) -> None:
    """Its job ends each time, as the server is away still, so the row counts: it is a suspect from the first on."""
    await add_rows(database, "row-1")
    seen = []
    for number in range(40):
        row = (await rows(database))["row-1"]
        if row.state is DeliveryState.FAILED:
            break
        await add_to(
            database,
            "row-1",
            state=DeliveryState.READY,
            held_reason=None,
            sending=1,
            last_attempted_at=NOW,
            canary_at=NOW,
        )
        assert isinstance(await ledger.begin(beginning("row-1", attempt=2, hold=DOWN)), NotBegun)
        row = (await rows(database))["row-1"]
        seen.append((row.state, row.held_reason, row.suspect))
        assert number < 39
    assert seen[0] == (DeliveryState.HELD, HoldReason.SERVER, FIRST_SUSPECTS)
    assert {each[:2] for each in seen[:-1]} == {(DeliveryState.HELD, HoldReason.SERVER)}
    assert (seen[-1][0], row.error_code) == (DeliveryState.FAILED, "STALLED")


@pytest.mark.parametrize("hold", [DOWN, Hold(reason=HoldReason.BUSY, until=LATER)], ids=["down", "busy"])
async def test_a_crash_makes_no_suspect_of_what_was_no_canary(ledger: Ledger, database: Database, hold: Hold) -> None:
    """Hundreds wait for servers that hang when a process is killed, and are held when they come back."""
    await add_rows(database, "row-1")
    await begun(ledger, "row-1", attempt=1)
    await ledger.begin(beginning("row-1", attempt=2, hold=hold))
    row = (await rows(database))["row-1"]
    assert (row.state, row.held_reason, row.suspect) == (DeliveryState.HELD, hold.reason, None)


@pytest.mark.parametrize("is_noted", [True, False])
async def test_an_attempt_that_lost_its_worker_is_on_record_though_the_next_ends_the_delivery_at_once(
    ledger: Ledger, database: Database, is_noted: bool
) -> None:
    """As where its server was blacklisted meanwhile, which is found out before anything is sent."""
    await add_rows(database, "row-1")
    await begun(ledger, "row-1", attempt=1)
    await ledger.gone("row-1", attempt=record("row-1", attempt=2, code="NO_ACK") if is_noted else None)
    noted = [("row-1", 0, 2, "permanent", "NO_ACK")] if is_noted else []
    assert sorted(await attempts(database)) == [("row-1", 0, 1, "retryable", "STALLED"), *noted]


async def test_an_attempt_whose_row_went_to_another_job_was_not_the_last(ledger: Ledger, database: Database) -> None:
    """It failed for good, and the delivery goes on all the same."""
    await add_rows(database, "row-1", "row-2")
    last = [await begun(ledger, row) for row in ("row-1", "row-2")]
    await run(database, "UPDATE delivery_jobs SET job_id = 'row-2.1' WHERE id = 'row-2'")

    for series in last:
        given_up = replace(record(series.delivery_id), note=AttemptNote.GIVEN_UP)
        await ledger.ended(failed(series, attempt=given_up))

    async with database.read() as session:
        notes = await session.execute(select(col(DeliveryAttempt.delivery_id), col(DeliveryAttempt.note)))
        assert {row.delivery_id: row.note for row in notes} == {"row-1": AttemptNote.GIVEN_UP, "row-2": None}


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
    assert (await begun(ledger, "row-1", attempt=2, at=LATER)).first_attempted_at == NOW
    assert (await rows(database))["row-1"].first_attempted_at == NOW


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


@pytest.mark.parametrize("in_line", [False, True])
async def test_deliveries_that_are_alone_in_their_lines_cost_no_more_than_others(
    database: Database, in_line: bool
) -> None:
    """Each activity has a line of its own at each inbox: a statement for each would be one for each delivery."""
    for each in ("a", "b", "c"):
        await add_rows(database, each, **({"ordering_key": each, "ordering_position": 1} if in_line else {}))
    gone = [Gone(delivery_id=each, attempt=record(each)) for each in ("a", "b", "c")]

    with watched(("SELECT", "DELETE", "UPDATE", "INSERT")) as seen:
        written = await database.transact(lambda connection: Group(connection, NOW).write(gone))

    assert written.results == [True, True, True]
    assert len(seen) == 2  # the rows go, and the attempts are noted


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


async def test_what_was_given_up_before_a_delivery_that_arrives_is_forgotten(
    ledger: Ledger, database: Database
) -> None:
    """A retry by hand would undo what arrived. What is younger, of another key or to another server may be retried."""
    over: dict[str, Any] = {"state": DeliveryState.FAILED, "settled_at": NOW, "ordering_position": 1}
    await add_rows(database, "older", **over, ordering_key="key")
    await add_rows(database, "arrives", ordering_key="key", ordering_position=2)
    await add_rows(database, "younger", **over | {"ordering_position": 3}, ordering_key="key")
    await add_rows(database, "of another key", **over, ordering_key="another")
    await add_rows(database, "elsewhere", **over, ordering_key="key", server_url="https://c.example")

    await ledger.gone("arrives")

    assert (await rows(database)).keys() == {"younger", "of another key", "elsewhere"}


async def test_a_queue_that_is_down_does_not_undo_an_end(database: Database) -> None:
    """The next one is ready and without a job, which the sweeper finds."""

    async def refuse(jobs: Sequence[PlannedJob]) -> None:
        raise ConnectionError("away")

    ledger = Ledger(database, add_jobs=refuse)
    await add_line(database, "first", "second")

    assert await ledger.gone("first") is True

    assert (await rows(database))["second"].state is DeliveryState.READY


async def add_to(database: Database, row: str, **values: Any) -> None:
    """The row has these values now."""
    async with database.transaction() as session:
        await session.execute(update(DeliveryJob).where(col(DeliveryJob.id) == row).values(**values))
