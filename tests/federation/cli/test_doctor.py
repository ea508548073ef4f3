"""`federation doctor`: green on a fresh node, and on a sick one what is wrong and what to do."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import pytest
import redis
from redis.asyncio import Redis
from sqlalchemy import make_url

from db import DeliveryAttempt, DeliveryJob, DeliveryState, HoldReason, RunOutcome, SchedulerJob
from db.deliveries import AttemptOutcome
from db.migrate import upgrade
from federation.admin.doctor import checks, time_checks
from federation.admin.doctor.checks import Verdict
from federation.admin.doctor.doctor import Finding, examine, worst
from federation.base.settings.settings import OLD_KEY_VARIABLES, Settings
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from tests import warm
from tests.federation.cli.conftest import LIMITED, Command
from tests.federation.cli.elsewhere import PEER, at_work, know, owe
from tests.federation.conftest import alter
from tests.federation.protocol.vectors import B
from tests.misbehaving import respond
from tests.patience import PATIENCE_SECONDS
from tests.peer import Peer
from tests.servers import free_port, valkey

ROOT = Path(__file__).parents[3]

DAMAGES = [
    ("DROP TABLE server_links", "server_links"),
    ("ALTER TABLE delivery_jobs DROP COLUMN holds", "delivery_jobs.holds"),
]


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Commands in an empty folder; with `open_files` they may have no more of them."""
    folder = tmp_path / "empty"
    folder.mkdir()

    def run(*arguments: str, open_files: int | None = None) -> subprocess.CompletedProcess[str]:
        limited = ["-c", LIMITED, "RLIMIT_NOFILE", str(open_files)]
        return subprocess.run(
            [warm.PYTHON, *(limited if open_files else ["-m", "federation"]), *arguments],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    return run


def test_a_fresh_node_is_all_green(fresh: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """After `federation init` in an empty folder there is no warning and no failure."""
    assert fresh("init", "--url", f"http://127.0.0.1:{free_port()}").returncode == 0
    done = fresh("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"ok", "note"}
    document = json.loads(fresh("doctor", "--json").stdout)
    verdicts = {each["check"]: each["verdict"] for each in document["findings"]}
    assert verdicts == {
        "settings": "ok",
        "keys": "ok",
        "database": "ok",
        "writes": "ok",
        "host": "ok",
        "peer keys": "ok",
        "queues": "ok",
        "storage": "ok",
        "open files": "ok",
        "sharing": "ok",
        "proxies": "ok",
        "clock": "ok",
        "scheduler": "note",
        "sweeps": "note",
        "backlog": "ok",
        "given up": "ok",
        "claims": "ok",
        "/discover": "note",
    }


def test_a_folder_without_settings_lacks_everything(empty_environment: Path, command_anywhere: Command) -> None:
    """Each missing setting is a failure of its own, and the status is 1."""
    (empty_environment / ".env").touch()
    done = command_anywhere("doctor", "--json")
    assert done.status == 1
    assert isinstance(done.json, dict)
    assert {each["found"].partition(":")[0] for each in done.json["findings"]} >= {
        "BETTER_AUTH_URL",
        "FEDERATION_PRIVATE_KEY",
    }


async def finding(check: str) -> Finding:
    return next(each for each in await examine() if each.check == check)


@pytest.mark.usefixtures("node_environment")
async def test_our_own_discover_must_show_our_key(monkeypatch: pytest.MonkeyPatch, peer: Peer) -> None:
    """Another node's is a failure, an error a warning; a node that is not started is neither."""
    monkeypatch.setenv("BETTER_AUTH_URL", peer.url)
    assert (await finding("/discover")).verdict is Verdict.FAILURE
    settings = Settings.load()
    peer.keys = settings.own_keys() or peer.keys
    assert (await finding("/discover")).verdict is Verdict.OK
    peer.server.routes["/discover"] = respond(502)
    assert (await finding("/discover")).verdict is Verdict.WARNING
    monkeypatch.setenv("BETTER_AUTH_URL", f"http://127.0.0.1:{free_port()}")
    assert (await finding("/discover")).verdict is Verdict.NOTE


@pytest.mark.usefixtures("node_environment")
async def test_a_queue_that_is_down_and_tables_that_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are failures; the other checks are made all the same."""
    monkeypatch.setenv("BETTER_AUTH_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("REDIS_URL", f"redis://127.0.0.1:{free_port()}")
    monkeypatch.setenv("DATABASE_URL", "sqlite:///new.sqlite3")
    findings = {each.check: each for each in await examine()}
    assert findings["queues"].verdict is findings["database"].verdict is Verdict.FAILURE
    assert "federation upgrade" in findings["database"].advice
    assert findings["/discover"].verdict is Verdict.NOTE
    assert worst([*findings.values()]) is Verdict.FAILURE


@pytest.mark.usefixtures("node_environment")
async def test_a_server_that_loses_jobs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to set; one where that is allowed is a note, and one whose memory has no limit a warning."""
    with valkey() as server:
        monkeypatch.setenv("REDIS_URL", server.url)
        assert (await finding("storage")).verdict is Verdict.OK
        async with Redis.from_url(server.url) as admin:
            await admin.config_set("maxmemory-policy", "allkeys-lru")
            assert (await finding("storage")).verdict is Verdict.WARNING
            await admin.config_set("maxmemory", 500_000_000)
        lost = await finding("storage")
        assert (lost.verdict, "maxmemory-policy allkeys-lru" in lost.found) == (Verdict.FAILURE, True)
        assert "noeviction, or FEDERATION_ALLOW_EVICTION to true" in lost.advice
        monkeypatch.setenv("FEDERATION_ALLOW_EVICTION", "true")
        assert (await finding("storage")).verdict is Verdict.NOTE


def test_no_worker_starts_on_a_server_that_loses_jobs(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with one that says what to set."""
    with valkey() as server:
        monkeypatch.setenv("REDIS_URL", server.url)
        with redis.Redis.from_url(server.url) as admin:
            admin.config_set("maxmemory", 500_000_000)
            admin.config_set("maxmemory-policy", "allkeys-lru")
        done = command("workers", "run")
    assert done.status == 2
    assert "set its maxmemory-policy to noeviction" in done.stderr
    assert "FEDERATION_ALLOW_EVICTION" in done.stderr


@pytest.mark.usefixtures("node_environment")
@pytest.mark.parametrize(("off", "verdict"), [(0, Verdict.OK), (1.6, Verdict.WARNING), (-3600, Verdict.FAILURE)])
async def test_a_clock_beside_bullmqs_server_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, off: float, verdict: Verdict
) -> None:
    """There a second is much: the delays of jobs go by this machine's clock."""
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setattr(time_checks, "datetime", Moved.by(off))
    found = await finding("clock")
    assert found.verdict is verdict
    assert ("this machine's clock" in found.advice) == (verdict is Verdict.WARNING)


class Moved(datetime):
    """A clock that is off."""

    @classmethod
    def by(cls, seconds: float) -> type[datetime]:
        class Off(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> Self:
                return super().now(tz) + timedelta(seconds=seconds)

        return Off


@pytest.mark.parametrize(("damage", "name"), DAMAGES)
def test_a_table_or_column_that_is_gone_is_a_failure(
    command: Command, monkeypatch: pytest.MonkeyPatch, database_url: str, damage: str, name: str
) -> None:
    """By its name, in doctor and in `db check`; whoever upgrades is not told that all is well."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("BETTER_AUTH_URL", f"http://127.0.0.1:{free_port()}")
    upgrade(database_url, host_tables=True)
    assert command("doctor").status == 0
    alter(database_url, damage)
    done = command("doctor", "--json")
    assert done.status == 1
    assert isinstance(done.json, dict)
    (found,) = [each for each in done.json["findings"] if each["check"] == "database"]
    assert (found["verdict"], f"lacks {name}," in found["found"]) == ("failure", True)
    assert "backup" in found["advice"]
    check = command("db", "check", "--json")
    assert isinstance(check.json, dict)
    assert (check.status, check.json["up_to_date"], check.json["missing"]) == (1, False, [name])
    upgraded = command("db", "upgrade")
    assert (upgraded.status, upgraded.stdout, f"lacks {name}," in upgraded.stderr) == (2, "", True)


def test_a_queue_that_is_not_whole_or_paused_is_a_finding(
    command: Command, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    """The queues of this node are in its database."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("BETTER_AUTH_URL", f"http://127.0.0.1:{free_port()}")
    upgrade(database_url, host_tables=True)

    def of_queues() -> dict[str, str]:
        done = command("doctor", "--json")
        assert isinstance(done.json, dict)
        (found,) = [each for each in done.json["findings"] if each["check"] == "queues"]
        return dict(found)

    assert of_queues()["verdict"] == "ok"
    assert command("queues", "pause", "delivery").status == 0
    paused = of_queues()
    assert (paused["verdict"], paused["found"]) == ("warning", "federation-delivery is paused")
    assert "federation-delivery (paused)" in command("queues", "stats").stdout
    assert command("queues", "resume").status == 0
    assert of_queues()["verdict"] == "ok"
    alter(database_url, "DROP TABLE workers_payloads")
    damaged = of_queues()
    assert (damaged["verdict"], "lack workers_payloads" in damaged["found"]) == ("failure", True)


@pytest.mark.parametrize(
    ("statements", "names"),
    [
        (("DROP TABLE posts",), "posts"),
        (("ALTER TABLE posts DROP COLUMN author_signature", "DROP TABLE blocks"), "blocks, posts.author_signature"),
    ],
)
def test_what_is_missing_of_the_hosts_tables_is_a_failure(
    command: Command, monkeypatch: pytest.MonkeyPatch, database_url: str, statements: tuple[str, ...], names: str
) -> None:
    """By name, beside a database that is in order as far as it is ours."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("BETTER_AUTH_URL", f"http://127.0.0.1:{free_port()}")
    upgrade(database_url, host_tables=True)
    alter(database_url, *statements)
    done = command("doctor", "--json")
    assert done.status == 1
    assert isinstance(done.json, dict)
    findings = {each["check"]: each for each in done.json["findings"]}
    assert (findings["database"]["verdict"], findings["host"]["verdict"]) == ("ok", "failure")
    assert findings["host"]["found"] == f"the database lacks the host application's {names}"
    assert "`federation upgrade --host-tables`" in findings["host"]["advice"]


def test_too_few_open_files_are_a_warning(fresh: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """With what to raise, or to lower."""
    assert fresh("init", "--url", f"http://127.0.0.1:{free_port()}").returncode == 0
    done = fresh("doctor", "--json", open_files=900)
    (found,) = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "open files"]
    assert (found["verdict"], "may have 900" in found["found"]) == ("warning", True)
    assert "LimitNOFILE" in found["advice"]
    assert "FEDERATION_OVERTIME" in found["advice"]


@pytest.mark.usefixtures("node_environment")
async def test_an_old_backlog_and_failed_recurring_work_are_warnings() -> None:
    """With what to look at."""
    long_ago = datetime.now(UTC) - timedelta(hours=3)
    node = Federation(Settings.load())
    async with node.database.transaction() as session:
        session.add(DeliveryJob(target_url="t", payload="{}", created_at=long_ago))
        session.add(
            SchedulerJob(
                name="purge", started_at=datetime.now(UTC), outcome=RunOutcome.FAILED, detail='{"error": "DataError"}'
            )
        )
    await node.close()
    backlog, scheduler = await finding("backlog"), await finding("scheduler")
    assert (backlog.verdict, "for 3 h" in backlog.found) == (Verdict.WARNING, True)
    assert (scheduler.verdict, "purge (DataError)" in scheduler.found) == (Verdict.WARNING, True)


@pytest.mark.usefixtures("node_environment")
@pytest.mark.parametrize(
    ("state", "reason", "verdict", "told"),
    [
        (DeliveryState.HELD, HoldReason.SERVER, Verdict.WARNING, "2 deliveries are held for 2 servers (2 server)"),
        (DeliveryState.HELD, HoldReason.REST, Verdict.NOTE, "2 deliveries are held for 2 servers (2 rest)"),
        (
            DeliveryState.HELD,
            HoldReason.ORDER,
            Verdict.WARNING,
            "; 2 by the wire 'gone', which this node does",
        ),
    ],
    ids=["server", "rest", "wire"],
)
async def test_what_is_held_is_a_finding(
    state: DeliveryState, reason: HoldReason | None, verdict: Verdict, told: str
) -> None:
    """Never "nothing is owed"; a warning where somebody should look."""
    node = Federation(Settings.load())
    now = datetime.now(UTC)
    async with node.database.transaction() as session:
        session.add(SchedulerJob(name="purge", started_at=now, outcome=RunOutcome.DONE))
        for number in range(2):
            url = f"https://{number}.example"
            row = DeliveryJob(target_url=url, server_url=url, job_name="n", payload="{}", created_at=now)
            row.state, row.held_reason = state, reason
            row.wire = "gone" if reason is HoldReason.ORDER else row.wire
            session.add(row)
    await node.close()
    backlog = await finding("backlog")
    assert (backlog.verdict, told in backlog.found, "nothing" in backlog.found) == (verdict, True, False)


async def give_up(*rows: tuple[DeliveryState, str | None, str]) -> None:
    """Deliveries ended so, with that code, and that number of the server that they were for."""
    node = Federation(Settings.load())
    now = datetime.now(UTC)
    async with node.database.transaction() as session:
        for state, code, server in rows:
            url = f"https://{server}.example"
            row = DeliveryJob(target_url=url, server_url=url, payload="{}", created_at=now, settled_at=now)
            row.state, row.error_code = state, code
            session.add(row)
    await node.close()


@pytest.mark.usefixtures("node_environment")
async def test_what_was_given_up_is_a_warning() -> None:
    """With why, the worst servers, and the commands to run next; it is no failure, which would fail the command."""
    assert (await finding("given up")).verdict is Verdict.OK
    failed, expired = DeliveryState.FAILED, DeliveryState.EXPIRED
    await give_up(
        *[(failed, "HTTP_404", "a")] * 3,
        *[(failed, "NO_ACK", "b")] * 2,
        *[(expired, "TIMEOUT", each) for each in "bcde"],
    )
    told = await finding("given up")
    assert (told.verdict, told.found) == (
        Verdict.WARNING,
        "9 deliveries given up in the last days: 5 failed, 4 expired; because of TIMEOUT (4), HTTP_404 (3), NO_ACK (2);"
        " to https://a.example (3), https://b.example (3), https://c.example (1) and 2 more",
    )
    assert "`deliveries retry --state failed`" in told.advice
    assert "`--state expired`" in told.advice


@pytest.mark.usefixtures("node_environment")
async def test_what_the_blacklist_ended_needs_nobody() -> None:
    """It was an operator's rule."""
    await give_up((DeliveryState.FAILED, "BLACKLISTED", "a"))
    assert (await finding("given up")).verdict is Verdict.OK
    await give_up((DeliveryState.EXPIRED, None, "b"))
    found = (await finding("given up")).found
    assert found.endswith("last days: 1 expired; because of never tried (1); to https://b.example (1)")


@pytest.mark.usefixtures("node_environment")
@pytest.mark.parametrize("number", [4, 6])
async def test_no_more_is_looked_at_than_a_page_waits_for(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Of more, the number is the least that there are."""
    monkeypatch.setattr(checks, "MOST_LOOKED_AT", 5)
    await give_up(*[(DeliveryState.FAILED, "NO_ACK", "a")] * number)
    assert (await finding("given up")).found.startswith("at least 5 deliveries" if number == 6 else "4 deliveries")


@pytest.mark.usefixtures("node_environment")
@pytest.mark.parametrize("state", [DeliveryState.READY, DeliveryState.HELD])
async def test_what_nobody_ever_worked_on_is_a_warning(state: DeliveryState) -> None:
    """However young it is: it will only get older."""
    node = Federation(Settings.load())
    async with node.database.transaction() as session:
        row = DeliveryJob(target_url="t", server_url="https://p.example", payload="{}", created_at=datetime.now(UTC))
        row.state, row.held_reason = state, HoldReason.REST if state is DeliveryState.HELD else None
        session.add(row)
    await node.close()
    backlog = await finding("backlog")
    assert (backlog.verdict, "`federation workers run`" in backlog.advice) == (Verdict.WARNING, True)


@pytest.mark.usefixtures("node_environment")
async def test_that_nobody_delivers_any_more_is_a_warning() -> None:
    """At once: the age of what waits says it an hour later."""
    node = Federation(Settings.load())
    async with node.database.transaction() as session:
        session.add(SchedulerJob(name="purge", started_at=datetime.now(UTC), outcome=RunOutcome.DONE))
    await owe(node, 1)
    found = await finding("backlog")
    assert (found.verdict, "no process that delivers runs" in found.advice) == (Verdict.WARNING, True)
    await at_work(node)
    await node.close()
    assert (await finding("backlog")).verdict is Verdict.OK


@pytest.mark.usefixtures("node_environment")
async def test_what_is_owed_is_told_though_the_queue_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """That nobody can tell who delivers is the finding of the queue's own check."""
    node = Federation(Settings.load())
    async with node.database.transaction() as session:
        session.add(SchedulerJob(name="purge", started_at=datetime.now(UTC), outcome=RunOutcome.DONE))
    await owe(node, 1)
    await node.close()
    monkeypatch.setenv("REDIS_URL", f"redis://127.0.0.1:{free_port()}")
    found = await finding("backlog")
    assert (found.verdict, "1 delivery is to be sent" in found.found) == (Verdict.OK, True)


@pytest.mark.usefixtures("node_environment")
@pytest.mark.parametrize("by", ["url", "key"])
async def test_the_database_of_another_node_is_a_warning(by: str) -> None:
    """It has us among its peers, whom a node's own database never has."""
    assert (await finding("database")).verdict is Verdict.OK
    node = Federation(Settings.load())
    assert node.keys is not None
    assert node.own_url is not None
    await node.registry.register(
        url=node.own_url if by == "url" else "https://a-by-another-name.example",
        public_key=node.keys.pairs()[0].signing.public_text if by == "key" else B.env["FEDERATION_PUBLIC_KEY"],
        encryption_public_key=B.env["FEDERATION_ENCRYPTION_PUBLIC_KEY"],
    )
    await node.close()
    found = await finding("database")
    assert (found.verdict, "another node's database?" in found.advice) == (Verdict.WARNING, True)
    assert (await finding("backlog")).verdict is Verdict.OK


@pytest.mark.usefixtures("node_environment")
async def test_keys_that_do_not_fit_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not know our new keys, who shows others, who knows us by keys that are not here: the gravest first."""
    node = Federation(Settings.load())
    await know(node)
    assert (await finding("peer keys")).verdict is Verdict.OK
    for name, value in zip(OLD_KEY_VARIABLES, generate_own_keys().to_env().values(), strict=True):
        monkeypatch.setenv(name, value)
    old = await finding("peer keys")
    assert (old.verdict, f"1 server ({PEER}) knows this node by its old keys" in old.found) == (Verdict.WARNING, True)
    assert "`federation keys rotate`" in old.advice
    async with node.database.transaction() as session:
        attempt = DeliveryAttempt(
            delivery_id="one",
            job_name="n",
            server_url=PEER,
            attempt=1,
            started_at=datetime.now(UTC),
            duration_ms=1,
            outcome=AttemptOutcome.RETRYABLE,
            remote_code="INVALID_SIGNATURE",
        )
        session.add(attempt)
    refusing = await finding("peer keys")
    assert (refusing.verdict, "our signature is refused" in refusing.found) == (Verdict.WARNING, True)
    await node.links.mismatched(PEER)
    theirs = await finding("peer keys")
    assert (theirs.verdict, "shows another signing key" in theirs.found) == (Verdict.WARNING, True)
    assert "`federation why URL`" in theirs.advice
    await node.registry.note_knows(PEER, "another")
    missing = await finding("peer keys")
    assert (missing.verdict, "by keys that are not set here" in missing.found) == (Verdict.FAILURE, True)
    await node.close()


@pytest.mark.usefixtures("node_environment")
async def test_a_user_who_may_only_read_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, migrated_postgres_url: str
) -> None:
    """What the user may not do is named."""
    url = make_url(migrated_postgres_url)
    name = f"reader_{url.database}"
    rights = (f"CREATE ROLE {name} LOGIN", f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
    await asyncio.to_thread(alter, migrated_postgres_url, *rights)
    reader = url.set(username=name, password=None).render_as_string(hide_password=False)
    monkeypatch.setenv("DATABASE_URL", reader)
    found = await finding("writes")
    assert (found.verdict, "DELETE on accepted_keys" in found.found) == (Verdict.FAILURE, True)
    await asyncio.to_thread(alter, migrated_postgres_url, f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}")
    assert (await finding("writes")).verdict is Verdict.OK
    await asyncio.to_thread(alter, migrated_postgres_url, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.mark.usefixtures("node_environment")
async def test_a_file_that_takes_no_writes_is_a_failure(database_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one without a right to write it, or on a disk that is read-only."""
    with closing(sqlite3.connect(database_file)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    connect = sqlite3.connect

    def read_only(database: str, **options: object) -> sqlite3.Connection:
        return connect(f"file:{database}?mode=ro", uri=True, **options)  # type: ignore[call-overload] # handed through

    for module in (sqlite3, sqlite3.dbapi2):  # each driver has its own way to it
        monkeypatch.setattr(module, "connect", read_only)
    found = await finding("writes")
    assert (found.verdict, found.found) == (
        Verdict.FAILURE,
        "the database takes no writes: its file, or the directory around it, is read-only",
    )


def test_looking_at_a_node_without_a_database_makes_none(
    fresh: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Not even an empty file, which the next `init` would have to wonder about."""
    assert fresh("init").returncode == 0
    for file in (tmp_path / "empty").glob("federation.sqlite3*"):
        file.unlink()
    told = json.loads(fresh("doctor", "--json").stdout)
    verdicts = {each["check"]: each["verdict"] for each in told["findings"]}
    assert (verdicts["database"], verdicts["queues"]) == ("failure", "failure")
    assert not list((tmp_path / "empty").glob("federation.sqlite3*"))
