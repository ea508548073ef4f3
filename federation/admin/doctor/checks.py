"""The checks of the doctor: each is independent, changes nothing, and says what it found and what to do.

A `note` is something that cannot be known now and need not be wrong: for example, that a node which nobody started does
not answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from ipaddress import ip_address
from typing import Any, Final

from sqlalchemy import Integer, Select, bindparam, exists, func, or_, select, union_all
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import col

from db import Database, DeliveryJob, DeliveryState, FederationTable, HoldReason, Server
from db.catalog import denied
from db.url import absent_file
from federation.activitypub.codes import ALLOWS_HTTP, PLAIN_HTTP
from federation.activitypub.documents import NODEINFO_INDEX_PATH, nodeinfo_index
from federation.admin import queues as queue_admin
from federation.admin.deliveries import deliveries
from federation.admin.deliveries.deliveries import Selection
from federation.admin.servers.claims import claims as claims_of
from federation.admin.servers.known_keys import survey
from federation.admin.words import ago, counted
from federation.base.errors import Unreachable
from federation.base.settings.reach import (
    HOST_ADVICE,
    PATIENCE,
    connect,
    enumerated,
    host_lacks,
    missing_host_tables,
    schema_of,
    write_problem,
)
from federation.delivery.error_codes import BLACKLISTED
from federation.delivery.sightings import ADVICE, PLACES_ADVICE, naming, places, strangers
from federation.delivery.sightings import proxies as proxies_seen
from federation.http.errors import NetworkError, OutboundError
from federation.http.messages import Response
from federation.http.threat_policy import NetworkErrorCode
from federation.protocol.discovery import parse_discover_document
from federation.protocol.encodings import parse_json
from federation.protocol.errors import ProtocolError
from federation.protocol.relaying import ORIGIN_HEADER
from federation.runtime.composition import Federation
from federation.runtime.nodes import descriptors
from federation.scheduler.leases import last_runs
from workers import WorkersError
from workers.storage.abilities import Examined, Severity

OLD_BACKLOG: Final = timedelta(hours=1)
NEVER_WRITTEN: Final = frozenset({"blacklist_revision", "database_identity", "relay_candidates", "server_scorecards"})
"""Tables that a node never writes: triggers write the first, with their owner's rights, the analytics the others."""


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    verdict: Verdict
    found: str
    advice: str = ""


def ok(found: str) -> Found:
    return Found(verdict=Verdict.OK, found=found)


def note(found: str) -> Found:
    return Found(verdict=Verdict.NOTE, found=found)


def warning(found: str, advice: str) -> Found:
    return Found(verdict=Verdict.WARNING, found=found, advice=advice)


def failure(found: str, advice: str) -> Found:
    return Found(verdict=Verdict.FAILURE, found=found, advice=advice)


def queue_setting(federation: Federation) -> str:
    if federation.settings.queue_url is not None:
        return "QUEUE_URL"
    return "DATABASE_URL" if federation.queues_join_database else "REDIS_URL"


async def database(federation: Federation) -> Found:
    if file := absent_file(federation.settings.database_url.get_secret_value()):
        return failure(f"there is no file {file}", "`federation upgrade` makes it; or mend DATABASE_URL")
    schema = await schema_of(federation.database)
    if schema.problem is not None:
        advice = "federation upgrade" if schema.version.is_behind else "restore the database from a backup"
        if schema.version.is_unpublished:
            advice = schema.version.remedy
        return failure(schema.problem, advice)
    if await _knows_us_as_another(federation):
        text = f"{federation.database!r} has this node in its registry, as one of the others"
        return warning(text, "is that another node's database? See DATABASE_URL; or `federation servers forget` it")
    return ok(f"{federation.database!r} is at migration {schema.version.current}, and no table or column is missing")


async def _knows_us_as_another(federation: Federation) -> bool:
    """Tell whether the database is another node's.

    No node registers itself, so only its peers have its URL or its key.
    """
    assert federation.keys is not None  # otherwise the settings would have been refused
    own_keys = [pair.signing.public_text for pair in federation.keys.pairs()]
    is_us = or_(col(Server.url) == federation.own_url, col(Server.public_key).in_(own_keys))
    async with federation.database.read() as session:
        return bool((await session.execute(select(exists().where(is_us)))).scalar_one())


async def writes(federation: Federation) -> Found:
    """Check that the database accepts writes: it has the rights, the lock and the room."""
    tables = FederationTable.metadata.tables.keys() - NEVER_WRITTEN
    async with federation.database.read() as session:
        lacking = await (await session.connection()).run_sync(denied, tables)
    if lacking:
        return failure(f"the database's user may not {enumerated(lacking)}", "grant it that, or see DATABASE_URL")
    if problem := await write_problem(federation.database):
        return failure(
            f"the database takes no writes: {problem}",
            "give it room on its disk, or us the right to write its file, or name the primary in DATABASE_URL",
        )
    return ok("the database takes writes")


async def host(federation: Federation) -> Found:
    names = await missing_host_tables(federation.database)
    if names:
        return failure(host_lacks(names), HOST_ADVICE)
    return ok("user, posts and blocks have what we use of them")


async def known_keys(federation: Federation) -> Found:
    """Check that servers and this node know each other by the keys that they have.

    The gravest problem is reported first.
    """
    seen = await survey(federation)
    if seen.missing:
        text = f"{_some(seen.missing)} this node by keys that are not set here"
        return failure(text, "restart what runs with older settings, or set them; `federation why URL` says more")
    if seen.newest and await _runs_with_other_keys(federation, seen.newest[0]):
        text = "the running node has not the keys that are set here, and that servers know it by"
        return failure(text, "restart every process: keys in their environment are read at the start alone")
    if seen.mismatched:
        text = f"{_some(seen.mismatched, 'shows', 'show')} another signing key than the registered one"
        return warning(text, "deliveries to them are held; `federation why URL` says what to do")
    if seen.refusing:
        text = f"{_some(seen.refusing)} this node by other keys than it has: our signature is refused"
        return warning(text, "`federation why URL` says what its operator has to do")
    if seen.old:
        text = f"{_some(seen.old)} this node by its old keys alone"
        return warning(text, "`federation keys rotate` asks them again, and says why they do not take the new ones")
    return ok("every server knows this node by its newest keys, and shows the registered ones")


async def _runs_with_other_keys(federation: Federation, asker: str) -> bool:
    """Tell whether the running node shows another pair than the newest to a server that knows it.

    No answer counts as no.
    """
    assert federation.own_url is not None  # otherwise the settings would have been refused
    assert federation.keys is not None
    try:
        response = await _own_discover(federation, asker=asker)
        shown = parse_discover_document(response.body)
    except (OutboundError, ProtocolError):  # another check reports that
        return False
    newest = federation.keys.pairs()[0].signing.public_text
    return shown.origin == federation.own_url and shown.public_key != newest


def _some(urls: Sequence[str], one: str = "knows", several: str = "know") -> str:
    verb = one if len(urls) == 1 else several
    return f"{counted(len(urls), 'server')} ({urls[0]}{' …' if len(urls) > 1 else ''}) {verb}"


async def queues(federation: Federation) -> Found:
    settings = federation.settings
    if federation.queues_join_database and absent_file(settings.database_url.get_secret_value()):
        return failure("they lie in the database, which is not there", "`federation upgrade` makes it")
    if settings.queue_url and (file := absent_file(settings.queue_url.get_secret_value())):
        return failure(f"there is no file {file}", "`federation upgrade` makes it; or mend QUEUE_URL")
    stats = await queue_admin.stats(queue_admin.all_queues(federation))
    if paused := [each.queue for each in stats if each.paused]:
        return warning(
            f"{enumerated(paused)} {'is' if len(paused) == 1 else 'are'} paused", "`federation queues resume`"
        )
    if aside := await queue_admin.quarantined(queue_admin.all_queues(federation)):
        text = f"{counted(len(aside), 'job')} set aside, as {aside[0].id!r}: {aside[0].reason}"
        return warning(text, "`federation queues repair`; who produces such jobs?")
    if lost := await queue_admin.stranded(queue_admin.all_queues(federation)):
        text = f"{counted(len(lost), 'job')} in no line, as {lost[0]!r}: no worker finds them"
        return warning(text, "`federation queues repair`; who pauses and resumes the queue?")
    jobs = sum(sum(each.counts.values()) for each in stats)
    return ok(f"{len(stats)} queues answer, with {counted(jobs, 'job')}")


async def queue_server(federation: Federation) -> Found:
    """Check that the queues' server keeps the jobs that it acknowledges."""
    storage = federation.delivery_queue.storage
    if not isinstance(storage, Examined):
        return ok("the queues lie in a database or in files")
    await connect(federation.delivery_queue)
    faults = storage.faults()
    if not faults:
        return ok("the queues' server evicts nothing, and keeps jobs on disk")
    gravest = faults[0]
    allow = ", or FEDERATION_ALLOW_EVICTION to true" if gravest.severity is Severity.ERROR else ""
    found = "; ".join(fault.found for fault in faults)
    return Found(verdict=_VERDICTS[gravest.severity], found=found, advice=f"{gravest.advice}{allow}")


_VERDICTS: Final = {Severity.ERROR: Verdict.FAILURE, Severity.WARNING: Verdict.WARNING, Severity.NOTE: Verdict.NOTE}


async def sharing(federation: Federation) -> Found:
    now, here = federation.clock.now(), federation.sightings.place
    theirs = await strangers(federation.database, now)
    if theirs:
        return failure(
            f"jobs of another node are in our delivery queue: {enumerated(theirs)}",
            ADVICE,
        )
    elsewhere = [place for place in await places(federation.database, now) if place != here]
    if elsewhere:
        return warning(
            f"our queues are in {here}, and those of another process of this node in {enumerated(elsewhere)}",
            PLACES_ADVICE,
        )
    return ok(f"our queues are in {here}, where no worker found jobs of another node")


async def proxies(federation: Federation) -> Found:
    named = federation.settings.federation_trusted_proxies
    seen = sorted(await proxies_seen(federation.database, federation.clock.now()))
    unnamed = [each for each in seen if not any(ip_address(each) in network for network in named)]
    if unnamed:
        text = f"{enumerated(unnamed)} forwards for others, none of whom is limited by address"
        return warning(text, f"if that is your proxy, set {naming(named, unnamed)} and restart")
    return ok("whoever forwards for others is named in FEDERATION_TRUSTED_PROXIES")


async def open_files(federation: Federation) -> Found:
    found = descriptors(federation.settings)
    if found.advice is not None:
        text = (
            f"{found.needed} are needed where all servers are slow, and a process started here may have {found.allowed}"
        )
        return warning(text, found.advice)
    return ok(f"a process started here may have the {found.needed} that are needed where all servers are slow")


async def backlog(federation: Federation) -> Found:
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
    unknown = await deliveries.by_unknown_wires(federation.database, Selection(), federation.wires.names)
    told += [f"{number} by the wire {wire!r}, which this node does not have" for wire, number in unknown.items()]
    text = "; ".join(told or ["nothing is owed"])
    if found.oldest_ready is not None and now - found.oldest_ready > OLD_BACKLOG:
        return warning(text, "`federation deliveries stats` says to whom; do workers run?")
    if HoldReason.OURS in found.held_by_reason and (plain := await _on_plain_http(federation)):
        return warning(f"{text}; {_are(plain, 'to go to plain http')}", f"{ALLOWS_HTTP}, where workers run")
    if found.open and not await last_runs(federation.database):
        return warning(text, "no process that delivers has ever run: `federation run`, or `federation workers run`")
    if found.ready and not await _may_be_delivering(federation):
        return warning(text, queue_admin.NOBODY_DELIVERS)
    if unknown:
        return warning(text, "nothing sends them until it is there again; they expire as all that is held")
    if found.held_by_reason.keys() & _HELD_BY_TROUBLE:
        return warning(text, "`federation deliveries stats --state held` says for whom, `federation why URL` why")
    return note(text) if found.held else ok(text)


async def _may_be_delivering(federation: Federation) -> bool:
    """Tell whether a process delivers, or the queue cannot tell, which another check reports."""
    try:
        return await queue_admin.is_delivering(federation)
    except (Unreachable, WorkersError):
        return True


async def _on_plain_http(federation: Federation) -> int:
    selection = Selection(state=DeliveryState.HELD, code=PLAIN_HTTP)
    return (await deliveries.stats(federation.database, selection, servers=0)).held


_HELD_BY_TROUBLE: Final = frozenset({HoldReason.SERVER, HoldReason.OURS})
"""Reasons that point to a problem; the others pass by themselves, and soon."""


def _are(number: int, how: str) -> str:
    return f"{counted(number)} {'is' if number == 1 else 'are'} {how}"


async def claims(federation: Federation) -> Found:
    found = await claims_of(federation.database)
    if not found:
        return ok("no server claims a key with which another is registered")
    told = str(found[0]) + (f"; {counted(len(found) - 1, 'claim')} more" if len(found) > 1 else "")
    if found[0].proved:
        return warning(told, f"`federation servers forget {found[0].holder}`, if that is not its owner")
    return note(told)


async def discover(federation: Federation) -> Found:
    assert federation.own_url is not None  # otherwise the settings would have been refused
    assert federation.keys is not None
    start = f"start the node, or mend BETTER_AUTH_URL ({federation.own_url}), DNS or the proxy before it"
    try:
        response = await _own_discover(federation)
        if not response.ok:
            return await _without(federation, warning(f"answered with status {response.status}", start))
        shown = parse_discover_document(response.body)
    except NetworkError as error:
        if error.code == NetworkErrorCode.CONN_REFUSED:
            return note(f"nothing listens at {federation.own_url}: the node is not running here")
        return warning(str(error), _DISCOVER_ADVICE.get(error.code, start))
    except OutboundError as error:
        return warning(str(error), start)
    except ProtocolError as error:
        told = f"another program answers at {federation.own_url}: {error}{response.still_encoded}"
        return await _without(federation, failure(told, start))
    if shown.public_key not in {pair.signing.public_text for pair in federation.keys.pairs()}:
        return failure("shows another key than ours", "another node runs there, or the node runs with older keys")
    if shown.origin != federation.own_url:
        return failure(f"names itself {shown.origin}", "BETTER_AUTH_URL of the running node is another")
    return ok("answers with our name and key")


async def _without(federation: Federation, found: Found) -> Found:
    """Judge that `/discover` is not there: that is well where an application serves ActivityPub, and nothing else.

    It is so if no server with keys is known here, and what answers shows NodeInfo as this node does.
    """
    if federation.activitypub is None or await _knows_servers(federation) or not await _shows_nodeinfo(federation):
        return found
    return ok("what answers serves ActivityPub alone, and no server is known here that would need more")


async def _knows_servers(federation: Federation) -> bool:
    """Tell whether the registry has any, or cannot be read, which another check reports."""
    if absent_file(federation.settings.database_url.get_secret_value()):
        return True
    try:
        return bool(await federation.database.rows(select(col(Server.url)).limit(1)))
    except SQLAlchemyError:
        return True


async def _shows_nodeinfo(federation: Federation) -> bool:
    assert federation.own_url is not None  # otherwise the settings would have been refused
    try:
        answer = await federation.own_client.fetch(f"{federation.own_url}{NODEINFO_INDEX_PATH}", timeout=PATIENCE)
        return answer.ok and parse_json(answer.body, limit=len(answer.body)) == nodeinfo_index(federation.own_url)
    except (OutboundError, ProtocolError):
        return False


async def _own_discover(federation: Federation, *, asker: str | None = None) -> Response:
    """Return what the running node answers to anybody, or to the server *asker*."""
    headers = {} if asker is None else {ORIGIN_HEADER: asker}
    return await federation.own_client.fetch(f"{federation.own_url}/discover", headers=headers, timeout=PATIENCE)


_DISCOVER_ADVICE: Final = {
    NetworkErrorCode.DNS_BLOCKED: "give the name of BETTER_AUTH_URL an address in DNS, or mend BETTER_AUTH_URL",
    NetworkErrorCode.TLS_ERROR: "mend the certificate of the proxy before the node, or the scheme in BETTER_AUTH_URL",
    NetworkErrorCode.TIMEOUT: "is the node overloaded, or does a firewall lie between here and BETTER_AUTH_URL?",
}


MOST_LOOKED_AT: Final = 5_000
"""How many deliveries that were given up are looked at in each state, those that were made last."""
NAMED: Final = 3
"""How many codes and servers are named, the worst first."""


async def given_up(federation: Federation) -> Found:
    """Warn of deliveries that were given up, but for those that a rule of the blacklist ended: that was on purpose.

    Nobody tries them again by themselves, and after a week they are purged. The check costs the same however many there
    are. Rows that versions without states gave up are not among them: to find these, all that is ready would be looked
    at.
    """
    return await given_up_in(federation.database)


async def given_up_in(database: Database) -> Found:
    """Look at those that were made last."""
    looked_at, states = Counter[DeliveryState](), Counter[DeliveryState]()
    codes, servers = Counter[str](), Counter[str]()
    for state, code, server_url, number in await database.rows(_GIVEN_UP, {"most": MOST_LOOKED_AT}):
        looked_at[state] += number
        if code != BLACKLISTED:
            states[state] += number
            codes[code or "never tried"] += number
            servers[server_url or "unnamed servers"] += number
    if not states:
        return ok("no delivery was given up in the last days")
    least = "at least " if MOST_LOOKED_AT in looked_at.values() else ""
    by_state = ", ".join(f"{number} {state.value}" for state, number in states.most_common())
    why, to = _worst(codes), _worst(servers)
    text = f"{least}{counted(states.total())} given up in the last days: {by_state}; because of {why}; to {to}"
    return warning(text, _advice([state for state, _ in states.most_common()]))


def _worst(numbers: Counter[str]) -> str:
    first = sorted(numbers.items(), key=lambda each: (-each[1], each[0]))[:NAMED]
    named = ", ".join(f"{name} ({number})" for name, number in first)
    return named if len(numbers) <= NAMED else f"{named} and {len(numbers) - NAMED} more"


def _advice(states: Sequence[DeliveryState]) -> str:
    chosen = f"--state {states[0].value}"
    also = f"; likewise with `--state {states[1].value}`" if len(states) > 1 else ""
    return (
        f"`federation deliveries list {chosen}` says more; `deliveries retry {chosen}` owes them again,"
        f" `deliveries drop {chosen}` forgets them{also}"
    )


_MOST: Final = bindparam("most", type_=Integer)


def _latest(state: DeliveryState) -> Select[*tuple[Any, ...]]:
    made, row = col(DeliveryJob.created_at), col(DeliveryJob.id)
    chosen = select(col(DeliveryJob.state), col(DeliveryJob.error_code), col(DeliveryJob.server_url))
    latest = chosen.where(col(DeliveryJob.state) == state).order_by(made.desc(), row.desc()).limit(_MOST)
    return select(latest.subquery(state.value))


_LATEST: Final = union_all(_latest(DeliveryState.FAILED), _latest(DeliveryState.EXPIRED)).subquery()
_GIVEN_UP: Final = select(_LATEST, func.count()).group_by(*_LATEST.c)
