"""Whether a node is ready: what is looked at, how fast, and how often."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from db import Database
from db.migrate import upgrade
from federation.base.settings.settings import Settings
from federation.monitoring.endpoints import READY_PATH, Endpoints
from federation.monitoring.readiness import NotReady, Readiness, node_checks, serving_checks
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings, alter
from tests.misbehaving import MisbehavingServer, hang
from tests.patience import eventually
from tests.servers import free_port


@pytest.fixture
def settings(make_settings: MakeSettings, request: pytest.FixtureRequest) -> Settings:
    """With the queue on each storage for tests that ask for it."""
    everywhere = "queue_settings" in request.fixturenames
    return make_settings(**(request.getfixturevalue("queue_settings") if everywhere else {}))


def unhurried(federation: Federation, *, serves: bool = False) -> Readiness:
    """What is found by the checks but that of writes, however slow the machine is."""

    async def writes() -> None:
        pass

    database = federation.database
    checks = node_checks(
        database=database, writes=writes, queues=federation.delivery_queues.all, blacklist=federation.blacklist
    )
    return Readiness(serving_checks(checks, database) if serves else checks, timeout=timedelta(hours=1))


@pytest.mark.usefixtures("queue_settings")
async def test_a_node_with_everything_is_ready(federation: Federation) -> None:
    """On every storage of queues."""
    verdict = await federation.readiness()
    assert verdict.checks == {"database": True, "writes": True, "tables": True, "queue": True, "blacklist": True}
    assert verdict.ready


async def test_the_answer_names_what_failed_and_no_place(make_settings: MakeSettings) -> None:
    """503 with the checks by name; the log knows the error's type, and neither shows a host or a password."""
    url = f"postgresql://nobody:s3cret@127.0.0.1:{free_port()}/none"
    federation = Federation(make_settings(database_url=url))
    with capture_logs() as logs:
        answer = await Endpoints(federation.readiness, None)(READY_PATH)
    await federation.close()
    assert answer is not None
    assert answer.status == 503
    told = json.loads(answer.body)
    assert told["status"] == "fail"
    assert told["checks"] == dict.fromkeys(("database", "writes", "tables", "queue", "blacklist"), "fail")
    assert told["problems"] == {"writes": "the database takes no writes: OperationalError"}
    assert [entry["event"] for entry in logs if entry["event"] != "blacklist_behind"] == ["not_ready"]
    for shown in (answer.body.decode(), repr(logs)):
        assert "s3cret" not in shown
        assert "127.0.0.1" not in shown


async def test_a_queue_that_hangs_fails_alone(make_settings: MakeSettings) -> None:
    """A Redis that takes connections and says nothing: the rest is still told."""
    async with MisbehavingServer() as silent:
        silent.default = hang()
        address = silent.url.removeprefix("http://")
        federation = Federation(make_settings(redis_url=f"redis://{address}/0"))
        with capture_logs():
            verdict = await federation.readiness()
        await federation.close()
    assert verdict.checks == {"database": True, "writes": True, "tables": True, "queue": False, "blacklist": True}


@pytest.mark.parametrize(("revision", "ready"), [("0001", False), (None, False), ("9999", True)])
async def test_tables_of_an_earlier_version_are_not_enough(
    settings: Settings, database_file: Path, revision: str | None, ready: bool
) -> None:
    """Those of a later one are: while a new version is rolled out, the old processes go on."""
    database = Database(f"sqlite:///{database_file}")
    async with database.transaction() as session:
        if revision is None:
            await session.execute(text("DROP TABLE federation_alembic_version"))
        else:
            statement = text("UPDATE federation_alembic_version SET version_num = :revision")
            await session.execute(statement, {"revision": revision})
    await database.close()
    federation = Federation(settings)
    with capture_logs():
        verdict = await federation.readiness()
    await federation.close()
    assert verdict.checks == {"database": True, "writes": True, "tables": ready, "queue": True, "blacklist": True}


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        ("DROP TABLE server_links", "server_links"),
        ("ALTER TABLE delivery_jobs DROP COLUMN holds", "delivery_jobs.holds"),
    ],
)
async def test_a_table_or_column_that_is_gone_is_told_by_its_name(
    make_settings: MakeSettings, database_url: str, damage: str, name: str
) -> None:
    """In the answer and in the log, although the database's version says that it was made."""
    await asyncio.to_thread(alter, database_url, damage)
    federation = Federation(make_settings(database_url=database_url))
    with capture_logs() as logs:
        answer = await Endpoints(unhurried(federation), None)(READY_PATH)
    await federation.close()
    assert answer is not None
    told = json.loads(answer.body)
    assert (answer.status, told["checks"]["database"], told["checks"]["tables"]) == (503, "ok", "fail")
    assert f"the database lacks {name}," in told["problems"]["tables"]
    assert [f"lacks {name}," in entry["tables"] for entry in logs if entry["event"] == "not_ready"] == [True]


async def test_who_serves_needs_the_hosts_tables(make_settings: MakeSettings, database_url: str) -> None:
    """Who only delivers does not; both say so in their own way, and as soon as the tables are there."""
    federation = Federation(make_settings(database_url=database_url))
    with capture_logs() as logs:
        answer = await Endpoints(unhurried(federation, serves=True), None)(READY_PATH)
        assert (await unhurried(federation)()).ready
    assert answer is not None
    told = json.loads(answer.body)
    assert (answer.status, told["checks"]["tables"], told["checks"]["host"]) == (503, "ok", "fail")
    assert "the host application's blocks, posts, user: " in told["problems"]["host"]
    assert "--host-tables" in told["problems"]["host"]
    assert ["posts" in entry["host"] for entry in logs if entry["event"] == "not_ready"] == [True]
    await asyncio.to_thread(upgrade, database_url, host_tables=True)
    with capture_logs():
        await eventually(federation.serving_readiness, lambda found: found.ready)
    await federation.close()


async def test_each_change_of_what_fails_is_logged() -> None:
    """A second thing that breaks is not hidden by the first."""
    broken = {"database"}

    def check(name: str) -> Callable[[], Awaitable[None]]:
        async def look() -> None:
            if name in broken:
                raise NotReady(f"{name} is broken")

        return look

    readiness = Readiness({name: check(name) for name in ("database", "queue")}, reuse=timedelta(0))
    with capture_logs() as logs:
        await readiness()
        broken.add("queue")
        assert (await readiness()).problems == {"database": "database is broken", "queue": "queue is broken"}
        await readiness()
    assert [set(entry) & {"database", "queue"} for entry in logs] == [{"database"}, {"database", "queue"}]


async def test_a_flood_asks_the_database_once() -> None:
    """A thousand askers share one look, and so do those of the next second."""
    looks = 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0)

    readiness = Readiness({"database": look}, reuse=timedelta(minutes=1))
    verdicts = await asyncio.gather(*(readiness() for _ in range(1000)))
    assert all(verdict.ready for verdict in verdicts)
    await readiness()
    assert looks == 1


async def test_a_verdict_is_not_used_for_long() -> None:
    """The next look sees what has changed, and changes are logged, once each."""
    works = True

    async def look() -> None:
        if not works:
            raise OSError("db.internal:5432 refused")

    readiness = Readiness({"database": look}, reuse=timedelta(0))
    with capture_logs() as logs:
        assert (await readiness()).ready
        works = False
        assert not (await readiness()).ready
        assert not (await readiness()).ready
        works = True
        assert (await readiness()).ready
    assert [entry["event"] for entry in logs] == ["not_ready", "ready_again"]
    assert logs[0]["database"] == "OSError"


@pytest.fixture
async def stubborn() -> AsyncIterator[asyncio.Event]:
    """Set at the end of the test, so that what waits for it ends."""
    release = asyncio.Event()
    yield release
    release.set()


async def test_what_hangs_fails_and_is_not_asked_again(stubborn: asyncio.Event) -> None:
    """Even if it does not mind being cancelled: no heap of hanging checks, and the others still pass."""
    begun = 0

    async def hang() -> None:
        nonlocal begun
        begun += 1
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                continue

    async def work() -> None:
        pass

    readiness = Readiness({"queue": hang, "database": work}, timeout=timedelta(milliseconds=50), reuse=timedelta(0))
    with capture_logs():
        for _ in range(3):
            assert (await readiness()).checks == {"queue": False, "database": True}
    assert begun == 1
    stubborn.set()
    with capture_logs():
        await eventually(readiness, lambda found: found.ready)
    await readiness.close()
