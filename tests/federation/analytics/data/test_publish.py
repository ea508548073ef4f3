"""Publishing: the database holds what the results say, whatever it held before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlmodel import col

from db import RelayCandidate, ServerScorecard
from db.engines import migration_engine
from db.url import parse_url
from federation.analytics.data import publish as publishing
from federation.analytics.data.publish import NotPublishable, Published, publish, require_publishable
from federation.analytics.data.sinks import write_outputs
from federation.analytics.frames import Window
from tests.federation.analytics.story import AS_OF, SICK, Character, at, make_outputs, steady

SERVERS = len(SICK) + 20
LAST_DAY = Window(since=AS_OF, until=AS_OF + timedelta(days=1))


@contextmanager
def engine_on(database_url: str) -> Iterator[Engine]:
    engine = migration_engine(parse_url(database_url))
    try:
        yield engine
    finally:
        engine.dispose()


def scorecards(database_url: str) -> list[ServerScorecard]:
    query = select(ServerScorecard).order_by(col(ServerScorecard.server_url), col(ServerScorecard.window_days))
    with engine_on(database_url) as engine, Session(engine, expire_on_commit=False) as session:
        return list(session.scalars(query).all())


def relays(database_url: str) -> list[RelayCandidate]:
    with engine_on(database_url) as engine, Session(engine, expire_on_commit=False) as session:
        return list(session.scalars(select(RelayCandidate).order_by(col(RelayCandidate.rank))).all())


def values(rows: list[ServerScorecard]) -> list[dict[str, Any]]:
    return [row.model_dump(exclude={"generation"}) for row in rows]


def execute(database_url: str, *statements: str) -> None:
    with engine_on(database_url) as engine, engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def test_every_row_arrives_as_it_was_computed(spark: SparkSession, written: Path, database_url: str) -> None:
    """Two scorecards per server, with instants, lists and nulls, and the ranking; publishing again changes no row."""
    require_publishable(database_url)
    published = publish(spark, written, AS_OF, database_url=database_url)
    assert published == Published(scorecards=2 * SERVERS, relay_candidates=20, removed=0)
    first = scorecards(database_url)
    assert len(first) == 2 * SERVERS
    [gone] = [row for row in first if row.server_url == "https://gone.example" and row.window_days == 30]
    assert (gone.as_of, gone.attempts, gone.action, gone.state) == (AS_OF, 27_000, "park", "unhealthy")
    assert gone.availability == pytest.approx(891 * 26 / 27_000)
    assert gone.state_since == at(3, 27, 3)
    assert gone.reasons == ["unhealthy for 4 days", "none of 3600 attempts got through in that time"]
    assert (gone.mttf_s, gone.top_error) == (864_000.0, "CONN_REFUSED")
    assert {row.mttf_s for row in first} == {864_000.0, None}
    ranking = relays(database_url)
    assert [relay.rank for relay in ranking] == list(range(1, 21))
    assert ranking[0].last_seen == at(3, 30, 23)

    assert publish(spark, written, AS_OF, database_url=database_url) == published
    assert values(scorecards(database_url)) == values(first)


def test_servers_that_vanished_lose_their_rows_and_no_text_is_too_odd(
    spark: SparkSession, written: Path, tmp_path: Path, database_url: str
) -> None:
    """What the next results do not have is gone; a NUL, which PostgreSQL cannot store, is replaced."""
    publish(spark, written, AS_OF, database_url=database_url)
    odd = Character(url="https://odd.example", traffic=1, availability=steady(1.0), reasons=["a\x00b", "\u202e'; --"])
    write_outputs(make_outputs(spark, [odd]), tmp_path, LAST_DAY)
    published = publish(spark, tmp_path, AS_OF, database_url=database_url)
    assert published == Published(scorecards=2, relay_candidates=1, removed=2 * SERVERS + 20)
    rows = scorecards(database_url)
    assert [(row.server_url, row.window_days) for row in rows] == [
        ("https://odd.example", 7),
        ("https://odd.example", 30),
    ]
    assert rows[0].reasons == ["a\ufffdb", "\u202e'; --"]
    assert [relay.server_url for relay in relays(database_url)] == ["https://odd.example"]


def test_recomputing_the_past_does_not_undo_the_present(spark: SparkSession, written: Path, database_url: str) -> None:
    """A database that holds a later day's results keeps them, and the answer says so."""
    publish(spark, written, AS_OF, database_url=database_url)
    later = AS_OF + timedelta(days=1)
    execute(database_url, f"UPDATE server_scorecards SET as_of = '{later}'")
    before = scorecards(database_url)
    now = datetime.combine(later, time(), UTC)
    assert publish(spark, written, AS_OF, database_url=database_url, now=now) == Published(newer=later)
    assert scorecards(database_url) == before


def test_results_of_a_day_to_come_stand_in_no_ones_way(spark: SparkSession, written: Path, database_url: str) -> None:
    """Somebody mistyped the last day: the next run replaces them."""
    publish(spark, written, AS_OF, database_url=database_url)
    for table in ("server_scorecards", "relay_candidates"):
        execute(database_url, f"UPDATE {table} SET as_of = '2999-12-31'")
    now = datetime.combine(AS_OF + timedelta(days=1), time(), UTC)
    published = publish(spark, written, AS_OF, database_url=database_url, now=now)
    assert published.newer is None
    assert {card.as_of for card in scorecards(database_url)} == {AS_OF}
    assert {relay.as_of for relay in relays(database_url)} == {AS_OF}


def test_a_publication_that_failed_is_completed_by_the_next(
    spark: SparkSession, written: Path, database_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction is a few rows, in the order of their keys: those before the failing one stay, none of its own."""
    monkeypatch.setattr(publishing, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(publishing, "_ROWS_PER_RANGE", 10)
    database_url = f"sqlite:///{database_file}"
    refuse = "SELECT RAISE(ABORT, 'the disk is full')"
    condition = "NEW.server_url = 'https://server-001.example'"
    execute(
        database_url, f"CREATE TRIGGER full BEFORE INSERT ON server_scorecards WHEN {condition} BEGIN {refuse}; END"
    )
    with pytest.raises(DBAPIError):
        publish(spark, written, AS_OF, database_url=database_url)
    urls = sorted([character.url for character in SICK] + [f"https://server-{n:03}.example" for n in range(20)])
    place = urls.index("https://server-001.example")
    whole_batches = 2 * place // 4 * 2
    assert [row.server_url for row in scorecards(database_url)][::2] == urls[:whole_batches]
    assert relays(database_url) == []

    execute(database_url, "DROP TRIGGER full")
    assert publish(spark, written, AS_OF, database_url=database_url).scorecards == 2 * SERVERS
    assert [row.server_url for row in scorecards(database_url)][::2] == urls
    assert {row.generation for row in scorecards(database_url)} == {2}


def test_a_database_without_the_tables_is_refused_before_anything_is_read(
    spark: SparkSession, tmp_path: Path, postgres_url: str
) -> None:
    """The message says what to run, for both kinds of database."""
    for database_url in (f"sqlite:///{tmp_path}/empty.sqlite3", postgres_url):
        with pytest.raises(NotPublishable, match=r"no table server_scorecards.*federation upgrade"):
            require_publishable(database_url)
    with pytest.raises(FileNotFoundError, match="server_scorecard"):
        publish(spark, tmp_path, AS_OF, database_url=postgres_url)
