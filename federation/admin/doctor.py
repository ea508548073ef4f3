"""Everything a node needs, looked at once: what is in order, what is not, and what to do about it.

Each check stands for itself and none changes anything, so a doctor may be called at any time, beside a running node. A
`note` is what cannot be known now and need not be wrong, as that a node that nobody started does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from sqlalchemy import delete, exists, false, func, or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import col

from db import FederationTable, HoldReason, RunOutcome, Server, ServerLink
from db.catalog import denied
from db.errors import local_cause
from db.url import absent_file
from federation.admin import deliveries, queues
from federation.admin.deliveries import Selection
from federation.admin.words import ago, counted
from federation.app import Federation
from federation.base.errors import ConfigurationError, NoNodeHere, Unreachable
from federation.base.misspelt import misspelt, told
from federation.base.reach import HOST_ADVICE, PATIENCE, enumerated, host_lacks, missing_host_tables, schema_of
from federation.base.settings import Settings
from federation.delivery.sightings import ADVICE, PLACES_ADVICE, places, strangers
from federation.http.client import FederationClient
from federation.http.errors import NetworkError, OutboundError
from federation.http.guard import AddressGuard
from federation.http.threat_policy import NetworkErrorCode
from federation.http.transport import pooled_transport
from federation.process import descriptors
from federation.protocol.discovery import parse_discover_document
from federation.protocol.errors import ProtocolError
from federation.recurring_jobs import recurring_jobs
from federation.scheduler.leases import last_runs
from workers import StorageError, StorageUnavailable, WorkersError

CLOSING: Final = timedelta(seconds=1)
CLOCK_WARNING: Final = timedelta(seconds=2)
CLOCK_FAILURE: Final = timedelta(minutes=1)
OLD_BACKLOG: Final = timedelta(hours=1)
MISSED_RUNS: Final = 3
NEVER_WRITTEN: Final = frozenset({"blacklist_revision", "database_identity", "relay_candidates", "server_scorecards"})
"""By a node: triggers write the first, with their owner's rights, and the analytics the others."""


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found, and what to do if that is not good."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    verdict: Verdict
    found: str
    advice: str = ""


def _ok(found: str) -> _Found:
    return _Found(verdict=Verdict.OK, found=found)


def _note(found: str) -> _Found:
    return _Found(verdict=Verdict.NOTE, found=found)


def _warning(found: str, advice: str) -> _Found:
    return _Found(verdict=Verdict.WARNING, found=found, advice=advice)


def _failure(found: str, advice: str) -> _Found:
    return _Found(verdict=Verdict.FAILURE, found=found, advice=advice)


async def examine() -> list[Finding]:
    """What every check found about the node that this process's environment and working directory describe."""
    return [
        *(Finding(check="settings", verdict=Verdict.WARNING, found=told(name, nearest), advice="mend or remove it")
          for name, nearest in misspelt().items()),
        *await _examine_settings(),
    ]  # fmt: skip


async def _examine_settings() -> list[Finding]:
    try:
        settings = Settings.load_node()
    except NoNodeHere as nothing:
        return [Finding(check="settings", verdict=Verdict.FAILURE, found=nothing.found, advice=nothing.advice)]
    except ConfigurationError as error:
        return [
            Finding(check="settings", verdict=Verdict.FAILURE, found=problem, advice="mend .env or the environment")
            for problem in error.problems
        ]
    federation = Federation(settings)
    try:
        found = [Finding(check="settings", verdict=Verdict.OK, found=f"this node is {federation.own_url}")]
        found += [Finding(check="keys", verdict=Verdict.OK, found="both pairs fit together")]
        return found + await _examine(federation)
    finally:
        with contextlib.suppress(TimeoutError):  # what does not answer may not let itself be closed soon
            async with asyncio.timeout(CLOSING.total_seconds()):
                await federation.close()


async def _examine(federation: Federation) -> list[Finding]:
    """Side by side: what does not answer costs its patience once, not once for each check."""
    until = asyncio.get_running_loop().time() + PATIENCE.total_seconds()
    look = partial(_run, federation=federation, until=until)
    async with asyncio.TaskGroup() as group:
        queues_, files, discover = (
            group.create_task(look(check, of))
            for check, of in (("queues", _queues), ("open files", _open_files), ("/discover", _discover))
        )
        database = await look("database", _database)
        of_database = [
            group.create_task(look(check, of)) if database.verdict is not Verdict.FAILURE else None
            for check, of in (
                ("writes", _writes),
                ("host", _host),
                ("sharing", _sharing),
                ("clock", _clock),
                ("scheduler", _scheduler),
                ("backlog", _backlog),
            )
        ]
    writes, host, *others = of_database
    tasks = [writes, host, queues_, files, *others, discover]
    return [database, *(task.result() for task in tasks if task is not None)]


async def _run(
    check: str, look: Callable[[Federation], Awaitable[_Found]], *, federation: Federation, until: float
) -> Finding:
    try:
        async with asyncio.timeout_at(until):
            found = await look(federation)
    except Unreachable as error:
        found = _failure(str(error), "start it, or mend the setting")
    except StorageUnavailable as error:
        found = _failure(str(error), f"is {_queue_setting(federation)} right, and the server up?")
    except StorageError as error:
        found = _failure(str(error), "`federation upgrade`, if it lacks tables")
    except WorkersError as error:
        found = _failure(str(error), f"mend {_queue_setting(federation)}")
    except TimeoutError:
        text = f"no answer within {PATIENCE.total_seconds():.0f} s"
        found = _failure(text, "is the setting right, and the server up and not overloaded?")
    except SQLAlchemyError as error:
        kind = type(error).__name__
        found = _failure(f"the database failed: {local_cause(error) or kind}", "look at the database's own log")
    return Finding(check=check, verdict=found.verdict, found=found.found, advice=found.advice)


def _queue_setting(federation: Federation) -> str:
    if federation.settings.queue_url is not None:
        return "QUEUE_URL"
    return "DATABASE_URL" if federation.queues_join_database else "REDIS_URL"


async def _database(federation: Federation) -> _Found:
    if file := absent_file(federation.settings.database_url.get_secret_value()):
        return _failure(f"there is no file {file}", "`federation upgrade` makes it; or mend DATABASE_URL")
    schema = await schema_of(federation.database)
    if schema.problem is not None:
        advice = "federation upgrade" if schema.version.is_behind else "restore the database from a backup"
        return _failure(schema.problem, advice)
    if await _knows_us_as_another(federation):
        text = f"{federation.database!r} has this node in its registry, as one of the others"
        return _warning(text, "is that another node's database? See DATABASE_URL; or `federation servers forget` it")
    return _ok(f"{federation.database!r} is at migration {schema.version.current}, and no table or column is missing")


async def _knows_us_as_another(federation: Federation) -> bool:
    """No node registers itself: by its URL or its key it is found with its peers alone."""
    assert federation.keys is not None  # or the settings had been refused
    is_us = or_(col(Server.url) == federation.own_url, col(Server.public_key) == federation.keys.signing.public_text)
    async with federation.database.read() as session:
        return bool((await session.execute(select(exists().where(is_us)))).scalar_one())


async def _writes(federation: Federation) -> _Found:
    """Whether it takes what we write: a statement that changes no row needs the rights and the lock all the same."""
    tables = FederationTable.metadata.tables.keys() - NEVER_WRITTEN
    async with federation.database.read() as session:
        lacking = await (await session.connection()).run_sync(denied, tables)
    if lacking:
        return _failure(f"the database's user may not {enumerated(lacking)}", "grant it that, or see DATABASE_URL")
    try:
        async with federation.database.transaction() as session:
            await session.execute(delete(ServerLink).where(false()))
    except SQLAlchemyError as error:
        kind = type(error.__cause__ or error).__name__
        return _failure(f"the database takes no writes: {kind}", "is it, or its file, read-only, or a standby?")
    return _ok("the database takes writes")


async def _host(federation: Federation) -> _Found:
    names = await missing_host_tables(federation.database)
    if names:
        return _failure(host_lacks(names), HOST_ADVICE)
    return _ok("user, posts and blocks have what we use of them")


async def _queues(federation: Federation) -> _Found:
    settings = federation.settings
    if federation.queues_join_database and absent_file(settings.database_url.get_secret_value()):
        return _failure("they lie in the database, which is not there", "`federation upgrade` makes it")
    if settings.queue_url and (file := absent_file(settings.queue_url.get_secret_value())):
        return _failure(f"there is no file {file}", "`federation upgrade` makes it; or mend QUEUE_URL")
    stats = await queues.stats(queues.all_queues(federation))
    jobs = sum(sum(each.counts.values()) for each in stats)
    return _ok(f"{len(stats)} queues answer, with {counted(jobs, 'job')}")


async def _sharing(federation: Federation) -> _Found:
    now, here = federation.clock.now(), federation.sightings.place
    theirs = await strangers(federation.database, now)
    if theirs:
        return _failure(
            f"jobs of another node are in our delivery queue: {enumerated(theirs)}",
            ADVICE,
        )
    elsewhere = [place for place in await places(federation.database, now) if place != here]
    if elsewhere:
        return _warning(
            f"our queues are in {here}, and those of another process of this node in {enumerated(elsewhere)}",
            PLACES_ADVICE,
        )
    return _ok(f"our queues are in {here}, where no worker found jobs of another node")


async def _open_files(federation: Federation) -> _Found:
    found = descriptors(federation.settings)
    if found.advice is not None:
        text = (
            f"{found.needed} are needed where all servers are slow, and a process started here may have {found.allowed}"
        )
        return _warning(text, found.advice)
    return _ok(f"a process started here may have the {found.needed} that are needed where all servers are slow")


async def _clock(federation: Federation) -> _Found:
    skews = {"the database's": await _database_skew(federation)}
    if federation.redis is not None:
        from redis.exceptions import RedisError  # here, because a node without a Redis need not have the package

        try:
            before = datetime.now(UTC)
            seconds, micros = await federation.redis.time()
        except (RedisError, OSError) as error:
            text = f"Redis did not tell the time: {type(error).__name__}"
            return _failure(text, f"is {_queue_setting(federation)} right, and the server up?")
        skews["Redis'"] = datetime.fromtimestamp(seconds + micros / 1e6, UTC) - _middle(before)
    whose, skew = max(skews.items(), key=lambda each: abs(each[1]))
    text = f"{whose} clock differs from ours by {abs(skew.total_seconds()):.1f} s"
    if abs(skew) >= CLOCK_FAILURE:
        return _failure(text, "set the clocks by NTP: delays, leases and purges go by them")
    if abs(skew) >= CLOCK_WARNING:
        return _warning(text, "set the clocks by NTP")
    return _ok(text)


async def _database_skew(federation: Federation) -> timedelta:
    async with federation.database.read() as session:
        connection = await session.connection()
        if connection.dialect.name != "postgresql":
            return timedelta(0)  # this machine's
        before = datetime.now(UTC)
        now: datetime = (await session.execute(select(func.clock_timestamp()))).scalar_one()
        return now.astimezone(UTC) - _middle(before)


def _middle(before: datetime) -> datetime:
    """When the server that was asked at `before` and has answered by now most likely looked at its clock."""
    return before + (datetime.now(UTC) - before) / 2


async def _scheduler(federation: Federation) -> _Found:
    runs = {run.name: run for run in await last_runs(federation.database)}
    if not runs:
        return _note("no recurring job has run yet; the first `federation run` begins with them")
    now = datetime.now(UTC)
    failed, late = [], []
    for job in recurring_jobs(federation):
        run = runs.get(job.name)
        if run is None or run.started_at is None or now - run.started_at > MISSED_RUNS * job.interval + job.timeout:
            late.append(job.name)
        elif run.outcome is RunOutcome.FAILED:
            failed.append(f"{job.name} ({_error_of(run.detail)})")
    if failed:
        return _warning(f"failed at their last run: {', '.join(failed)}", "`federation scheduler run NAME`")
    if late:
        return _warning(f"not run for long: {', '.join(late)}", "does `federation workers run` run?")
    return _ok("every recurring job ran when it was due, and well")


def _error_of(detail: str | None) -> str:
    try:
        return str(json.loads(detail or "{}").get("error", "?"))
    except (ValueError, AttributeError):
        return "?"


async def _backlog(federation: Federation) -> _Found:
    found = await deliveries.stats(federation.database, Selection(), servers=0)
    now = datetime.now(UTC)
    told = []
    if found.oldest_ready is not None:
        told.append(f"{_are(found.ready, 'to be sent')}, the oldest for {ago(now - found.oldest_ready)}")
    if found.oldest_held is not None:
        reasons = ", ".join(f"{number} {reason.value}" for reason, number in found.held_by_reason.items())
        servers = counted(found.held_servers, "server")
        age = ago(now - found.oldest_held)
        told.append(f"{_are(found.held, 'held')} for {servers} ({reasons}), the oldest for {age}")
    if found.expired:
        told.append(f"{found.expired} expired: held until too old")
    told.append(f"{found.failed} failed {'one is' if found.failed == 1 else 'ones are'} kept")
    text = "; ".join(told if found.open or found.expired else ["nothing is owed", *told])
    if found.oldest_ready is not None and now - found.oldest_ready > OLD_BACKLOG:
        return _warning(text, "`federation deliveries stats` says to whom; do workers run?")
    if found.open and not await last_runs(federation.database):
        return _warning(text, "no process that delivers has ever run: `federation run`, or `federation workers run`")
    if found.expired:
        return _warning(text, "`federation deliveries list --state expired`; `retry --state expired` owes them again")
    if found.held_by_reason.keys() & _HELD_BY_TROUBLE:
        return _warning(text, "`federation deliveries stats --state held` says for whom, `federation why URL` why")
    return _note(text) if found.held else _ok(text)


_HELD_BY_TROUBLE: Final = frozenset({HoldReason.SERVER, HoldReason.OURS})
"""The other reasons pass by themselves, and soon."""


def _are(number: int, how: str) -> str:
    return f"{counted(number)} {'is' if number == 1 else 'are'} {how}"


async def _discover(federation: Federation) -> _Found:
    assert federation.own_url is not None  # or the settings had been refused
    assert federation.keys is not None
    host = urlsplit(federation.own_url).hostname or ""
    # Our own address may well be a private one; only this one client may ask it.
    guard = AddressGuard(federation.settings.dev_allowed_hostnames | {host})
    start = f"start the node, or mend BETTER_AUTH_URL ({federation.own_url}), DNS or the proxy before it"
    try:
        async with FederationClient(guard, pooled_transport(guard)) as client:
            response = await client.fetch(f"{federation.own_url}/discover", timeout=PATIENCE)
        if not response.ok:
            return _warning(f"answered with status {response.status}", start)
        shown = parse_discover_document(response.body)
    except NetworkError as error:
        if error.code == NetworkErrorCode.CONN_REFUSED:
            return _note(f"nothing listens at {federation.own_url}: the node is not running here")
        return _warning(str(error), _DISCOVER_ADVICE.get(error.code, start))
    except OutboundError as error:
        return _warning(str(error), start)
    except ProtocolError as error:
        return _failure(f"another program answers at {federation.own_url}: {error}", start)
    if shown.public_key != federation.keys.signing.public_text:
        return _failure("shows another key than ours", "another node runs there, or the node runs with an older .env")
    if shown.origin != federation.own_url:
        return _failure(f"names itself {shown.origin}", "BETTER_AUTH_URL of the running node is another")
    return _ok("answers with our name and key")


_DISCOVER_ADVICE: Final = {
    NetworkErrorCode.DNS_BLOCKED: "give the name of BETTER_AUTH_URL an address in DNS, or mend BETTER_AUTH_URL",
    NetworkErrorCode.TLS_ERROR: "mend the certificate of the proxy before the node, or the scheme in BETTER_AUTH_URL",
    NetworkErrorCode.TIMEOUT: "is the node overloaded, or does a firewall lie between here and BETTER_AUTH_URL?",
}


def worst(findings: Sequence[Finding]) -> Verdict:
    """The worst verdict among the findings."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index)
