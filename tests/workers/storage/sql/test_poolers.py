"""PostgreSQL behind a PgBouncer, which lends sessions as long as a client stays, or for single transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Final

import psycopg
import pytest
from sqlalchemy import make_url

from tests.bouncer import bouncer, busy, through
from tests.workers.harnesses import PostgresHarness
from tests.workers.storage.sql.steps import MINUTE, connected, exchange_ons
from workers.errors import StorageError, StorageUnavailable
from workers.jobs import JobEventKind
from workers.storage.sql import SqlStorage
from workers.storage.sql.postgres.driver.silence import OwnConnection, Patience
from workers.storage.sql.postgres.session import _are_lent, _process
from workers.storage.sql.postgres.target import PostgresTarget
from workers.testing import Case, all_cases, run
from workers.testing.case import CUTS, FREEZES, MEASURES, RESTARTS, SWALLOWS
from workers.testing.steps import PATIENCE, claim_one, completed, job

CORE: Final = frozenset({"enqueue", "claim", "settle", "wait", "events", "cancel", "chains", "dependencies"})
CASES: Final = [
    pytest.param(case, id=case.id, marks=() if case.verb in CORE else pytest.mark.full)
    for case in all_cases()
    if not {RESTARTS, CUTS, FREEZES, SWALLOWS, MEASURES} & {*case.needs}
]


@pytest.fixture
def database() -> str:
    return "postgres"


@pytest.fixture(scope="module")
def by_session(postgres_server: str) -> Iterator[int]:
    with bouncer(postgres_server, "session") as port:
        yield port


@pytest.fixture(scope="module")
def by_transaction(postgres_server: str) -> Iterator[int]:
    with bouncer(postgres_server, "transaction") as port:
        yield port


class PooledHarness(PostgresHarness):
    """`SqlStorage` behind a pool of transactions."""

    cuts = False
    measures = False


async def test_sessions_are_as_without_it(url: str, by_session: int, admin: psycopg.Connection) -> None:
    """With the defaults of both: who listens hears, and nobody waits longer for a lock than without it."""
    behind = SqlStorage(through(by_session, url), busy_timeout=timedelta(milliseconds=300))
    async with connected(behind):
        await exchange_ons(behind)
        await behind.drain()
        async with behind.events() as events:
            await behind.enqueue([job("a")])
            async with asyncio.timeout(PATIENCE):
                assert (await events.get()).kind is JobEventKind.QUEUED
        with admin.transaction(force_rollback=True):
            admin.execute("LOCK TABLE workers_jobs IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(StorageUnavailable, match="locked"):
                await behind.enqueue([job("b")])


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("order", ["last", "first"])
def test_a_pool_in_which_each_gets_its_own_again_is_found_out(
    postgres_server: str, url: str, order: str, autocommit: bool
) -> None:
    """Others have put its sessions into an order in which two clients would always get the same, each its own."""
    with (
        bouncer(postgres_server, "transaction", server_round_robin=int(order == "first")) as port,
        ExitStack() as stack,
    ):
        behind = make_url(through(port, url)).set(drivername="postgresql").render_as_string(hide_password=False)
        connect = partial(OwnConnection.connect, behind, autocommit=autocommit)
        one, other, third = (stack.enter_context(connect()) for _ in range(3))
        process = _process(one)
        one.rollback()
        for each in (third, other):
            each.autocommit = False
            each.execute("SELECT 1")
        for each in (third, other) if order == "last" else (other, third):
            each.rollback()
        assert _are_lent(process, one, lambda: other)
        assert one.autocommit is autocommit


async def test_transactions_are_refused_by_name(url: str, by_transaction: int) -> None:
    """At the first connection, however many others there are: wake-ups would get lost, and limits."""
    with suppress(StorageError):
        await SqlStorage(through(by_transaction, url)).connect()
    with pytest.raises(StorageError, match="pool_mode = session`, or add `notify=off`"):
        await SqlStorage(through(by_transaction, url)).connect()


@pytest.mark.parametrize("clients", [1, 2, 3])
async def test_turns_are_seen_through(url: str, postgres_server: str, clients: int) -> None:
    """A pool may lend the session that has rested the longest, so that two clients get two of them in turn."""
    with bouncer(postgres_server, "transaction", server_round_robin=1) as port, busy(port, url, clients):
        for _ in range(4):
            with pytest.raises(StorageError, match="pool_mode = session`, or add `notify=off`"):
                await SqlStorage(through(port, url)).connect()


@pytest.mark.parametrize("held", [1, 0], ids=["for the first connection", "for the second connection"])
async def test_a_full_pool_is_an_outage(url: str, postgres_server: str, held: int) -> None:
    """Whoever finds no room in it has seen nothing of how it lends; later there is some."""
    with (
        bouncer(postgres_server, "session", default_pool_size=1, query_wait_timeout=1) as port,
        busy(port, url, held),
        pytest.raises(StorageUnavailable),
    ):
        await SqlStorage(through(port, url)).connect()


@pytest.mark.parametrize("case", CASES)
async def test_transactions_keep_what_is_promised(case: Case, emptied_postgres_url: str, by_transaction: int) -> None:
    """With `notify=off` in the URL, but that wake-ups and events come a second later."""
    async with PooledHarness(through(by_transaction, emptied_postgres_url, notify="off")) as harness:
        verdict = await run(case, harness)
    if verdict.declared is not None:
        pytest.skip(f"declared: {verdict.declared}")


OF_THE_POOL = {"application_name", "client_encoding"}
"""It sets these itself, where a client's differ from those of the session that it lends."""


async def test_nobody_elses_session_is_changed(url: str, by_transaction: int) -> None:
    """What is lent is given back as it was, without statements that are prepared."""
    behind = SqlStorage(through(by_transaction, url, notify="off"))
    async with connected(behind):
        await exchange_ons(behind)
        async with behind.session():
            pass
        plain = through(by_transaction, url).replace("+psycopg", "")
        with psycopg.connect(plain, autocommit=True) as other:
            settings = other.execute("SELECT name FROM pg_settings WHERE source = 'session'").fetchall()
            prepared = other.execute("SELECT name FROM pg_prepared_statements").fetchall()
    assert {name for (name,) in settings} <= OF_THE_POOL
    assert prepared == []


async def test_what_was_told_is_forgotten(url: str, by_transaction: int, admin: psycopg.Connection) -> None:
    """It is written down only while somebody reads it."""
    behind = SqlStorage(through(by_transaction, url, notify="off"))
    async with connected(SqlStorage(url)) as direct:
        async with direct.events():
            await direct.enqueue([job("a")])
        assert admin.execute("SELECT count(*) FROM workers_told").fetchone() == (0,)
        async with connected(behind), behind.events() as events:
            await direct.settle([completed(await claim_one(direct))])
            async with asyncio.timeout(PATIENCE):
                heard = [(await events.get()).kind for _ in range(2)]
            assert heard == [JobEventKind.ACTIVE, JobEventKind.COMPLETED]


def test_what_a_url_says_counts(url: str) -> None:
    """Options and limits of its own stand beside ours, or in their place."""
    said = {"options": "-c statement_timeout=77s", "connect_timeout": "33", "keepalives_idle": "11"}
    target = PostgresTarget.of(make_url(url).update_query_dict(said), MINUTE, checked=True)
    patience = Patience(MINUTE)
    with target.listening_connection(target.sessions(patience), patience) as connection:
        told = connection.info.get_parameters()
        found = connection.execute("SELECT current_setting('statement_timeout'), current_setting('lock_timeout')")
        assert found.fetchone() == ("77s", "1min")
    assert {name: told[name] for name in said} == said
    assert (told["keepalives_interval"], told["tcp_user_timeout"]) == ("10", "10000")


def test_notify_is_on_or_off(url: str) -> None:
    with pytest.raises(StorageError, match="`on` or `off`"):
        SqlStorage(f"{url}&notify=maybe")
