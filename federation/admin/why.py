"""Why a server does not get its deliveries, or that nothing stands in their way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from db import DEFAULT_WIRE, AttemptNote, LinkState
from federation.activitypub.codes import ALLOWS_HTTP, PLAIN_HTTP
from federation.admin import blacklist
from federation.admin import queues as queue_admin
from federation.admin.blacklist import Entry
from federation.admin.deliveries import deliveries
from federation.admin.deliveries.deliveries import AttemptRow, DeliveryStats, Selection
from federation.admin.inboxes import InboxRow, inboxes_at
from federation.admin.named import Named, named
from federation.admin.servers import misnamed, servers
from federation.admin.servers.claims import Claim, claims
from federation.admin.servers.known_keys import Ours, known_pair, meaning, refuses_signature
from federation.admin.servers.servers import HealthEvent, Scorecard, ServerRow
from federation.admin.servers.ways import Move, Way, explained, is_on_record, move_of, ways_to
from federation.admin.words import ago, counted, moment
from federation.base.settings.reach import connect
from federation.http.threat_policy import NetworkErrorCode, get_threat_policy
from federation.sealed.peers.health_checks import health_check_id
from federation.servers.link_rules import Link

if TYPE_CHECKING:
    from federation.runtime.composition import Federation


@dataclass(frozen=True, slots=True, kw_only=True)
class NextProbe:
    """When the server is probed next. If `at` is past, the probe is due.

    `queued` says that a job in the queue does it.
    """

    at: datetime
    queued: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All that is known of why a server gets its deliveries or not.

    `since` is when its health became what it is; `max_age` is when held deliveries expire. `unknown_wires` counts those
    that are owed by a wire which this node does not have. `meant` names servers that are known here by a similar name,
    if this one is not. `lacks_jobs`: deliveries are ready, to whatever server, and the queue has no job at all.
    `lacks_workers`: some are ready for this one, and no process delivers. `ways` has the link of each wire that it
    speaks, `link` the one that is in the way, if one is; `inboxes` are those that were asked about, `named` what else
    was, if that is no whole server.
    """

    url: str
    link: Link
    ways: Sequence[Way]
    inboxes: Sequence[InboxRow]
    named: Named | None
    server: ServerRow | None
    since: datetime | None
    events: Sequence[HealthEvent]
    rules: Sequence[Entry]
    claims: Sequence[Claim]
    scorecard: Scorecard | None
    backlog: DeliveryStats
    unknown_wires: Mapping[str, int]
    attempts: Sequence[AttemptRow]
    next_probe: NextProbe | None
    max_age: timedelta | None
    at: datetime
    knows: Ours | None
    own_url: str | None
    lacks_jobs: bool
    lacks_workers: bool
    move: Move | None
    known: bool
    meant: Sequence[str]

    @property
    def in_the_way(self) -> bool:
        """Whether there is something that an administrator should know."""
        backlog = self.backlog
        is_sick = not self.server.is_healthy if self.server else self._needs_registry
        is_gone = any(inbox.gone_at for inbox in self.inboxes) or (self.named is not None and not self.named.known)
        is_held = self.rules or any(way.link.hold(self.at) for way in self.ways) or self.knows is Ours.MISSING
        is_claimed = any(claim.proved for claim in self.claims)
        is_ill = is_sick or is_gone or is_held or is_claimed or self.lacks_workers
        return bool(is_ill or backlog.failed or backlog.held or backlog.expired)

    def last_seen(self, server: ServerRow) -> datetime:
        """Return when it was last well: the registry is not told each time, an attempt that is shown may be later."""
        return max([server.last_seen, *(each.started_at for each in self.attempts if each.code is None)])

    @property
    def _needs_registry(self) -> bool:
        """Whether deliveries go to it by the wire of servers with keys, as far as is known."""
        return any(way.wire == DEFAULT_WIRE for way in self.ways)

    def sentences(self) -> Iterator[str]:
        """Yield the same as sentences for people, the most important first."""
        if not self.known:
            yield from self._unknown()
            return
        yield from () if self.named is None else self.named.sentences()
        for inbox in self.inboxes:
            yield from inbox.sentences(self.at)
        yield from self.hindrances()
        if self.move is not None:
            owed = self.backlog.open
            yield from self.move.sentences(self.url, registered=self.server is not None, owed=owed)
        yield from self._health()
        yield from self._keys()
        if self.backlog.held and any(attempt.code == PLAIN_HTTP for attempt in self.attempts[:1]):
            yield f"What is owed to it on plain http is held; {ALLOWS_HTTP} where deliveries are sent."
        yield from (f"{claim}; last at {moment(claim.at)}." for claim in self.claims)
        yield from self._scorecard()
        yield from self._backlog()
        yield from (self._attempt(attempt) for attempt in self.attempts)

    def _unknown(self) -> Iterator[str]:
        """Say that the name may be wrong."""
        if self.url == self.own_url:
            yield "It is this node itself."
            return
        yield "Nobody here knows it: it is not in the registry, and no delivery to it is owed or on record."
        meant = (self.named.meant if self.named else ()) or self.meant
        if meant:
            yield misnamed.question(meant)
        asks = f"`federation servers discover {self.url}` asks it who it is"
        yield f"{asks}, as a first delivery by {DEFAULT_WIRE} would."

    def hindrances(self) -> Iterator[str]:
        """Say how deliveries go; of several wires, by each. To a blacklisted server none does."""
        yield from (self._rule(rule) for rule in self.rules)
        if self.lacks_workers:
            yield f"Nothing is sent: {queue_admin.NOBODY_DELIVERS}."
        for way in () if self.rules else self.ways:
            if self.lacks_workers and way.is_free(self.at):
                continue
            for sentence in way.sentences(self.at, max_age=self.max_age):
                yield sentence if len(self.ways) == 1 else f"By {way.wire}: {sentence}"

    def _rule(self, rule: Entry) -> str:
        until = f"until {moment(rule.expires_at)}" if rule.expires_at else "for good"
        return f"It is blacklisted by {rule.rule} {until}: {rule.reason}. Nothing is sent to it or taken from it."

    def _health(self) -> Iterator[str]:
        server = self.server
        if server is None:
            if self._needs_registry:
                yield "It is not in the registry: the next delivery to it discovers it first."
            else:
                yield f"Deliveries go to it by {self.link.wire} alone, which needs no registry."
            return
        since = f" since {moment(self.since)} ({ago(self.at - self.since)})" if self.since else ""
        if server.is_healthy:
            yield f"It is healthy{since}; last seen {ago(self.at - self.last_seen(server))} ago."
            return
        yield f"It is unhealthy{since}{self._reason(server)}."
        if self.link.state is LinkState.UP:
            yield self._probes(server)

    def _reason(self, server: ServerRow) -> str:
        """Say why it is unhealthy, unless the link has said so.

        `UNKNOWN` is no reason: the registry has it where the true one is a code that the original does not know.
        """
        reason = server.unhealthy_reason
        if reason in (None, NetworkErrorCode.UNKNOWN, self.link.reason):
            return ""
        return f", because of {explained(reason)}"

    def _probes(self, server: ServerRow) -> str:
        number = server.health_check_attempts
        failed = f"{number} {'probe has' if number == 1 else 'probes have'} failed so far; "
        if self.next_probe is None:
            return failed + "no further one is planned."
        left = self.next_probe.at - self.at
        when = f"in {ago(left)}" if left > timedelta(0) else "due now"
        by = "is in the queue" if self.next_probe.queued else "is the scheduler's"
        return f"{failed}the next one is {when} ({moment(self.next_probe.at)}) and {by}."

    def _keys(self) -> Iterator[str]:
        """Say by which keys it knows us, unless they are the newest, or that it does not know us."""
        server = self.server
        if server is None:
            return
        if self.knows is Ours.MISSING:
            yield (
                "It knows this node by keys that are not set here, so nothing can be sent to it: restart what runs with"
                " older settings, or set them. If they are lost, `federation keys rotate --forget-old` gives them up."
            )
        elif self.knows is Ours.OLD:
            yield self._rotation(server)
        elif refuses_signature(self.attempts):
            yield (
                "It refuses our signature, so it knows this node by other keys: its operator has to remove this node"
                f" there (`federation servers forget {self.own_url}`), and `federation servers discover {self.url}`"
                " here introduces it anew."
            )

    def _rotation(self, server: ServerRow) -> str:
        again = f"`federation keys rotate --only {self.url}` asks it now"
        if server.rotation_tried_at is None or server.rotation_problem is None:
            return f"It knows this node by its old keys, and was not asked to take the new ones: {again}."
        asked, problem = ago(self.at - server.rotation_tried_at), server.rotation_problem
        told = f"It knows this node by its old keys: asked {asked} ago, {problem}: {meaning(problem)}"
        return f"{told}. It is asked again each hour, and when it is back; {again}."

    def _scorecard(self) -> Iterator[str]:
        card = self.scorecard
        if card is None:
            return
        score = "not known" if card.score is None else f"{card.score:.0f} of 100"
        why = f": {'; '.join(card.reasons)}" if card.reasons else ""
        yield f"Its score of the {card.window_days} days up to {card.as_of} is {score}; advice: {card.action}{why}."

    def _backlog(self) -> Iterator[str]:
        backlog = self.backlog
        if backlog.ready:
            assert backlog.oldest_ready is not None
            verb = "is" if backlog.ready == 1 else "are"
            age = ago(self.at - backlog.oldest_ready)
            if self.lacks_workers:
                yield f"{counted(backlog.ready)} to it {verb} to be sent, the oldest made {age} ago."
            elif self.lacks_jobs:
                yield (
                    f"{counted(backlog.ready)} to it {verb} to be sent, the oldest made {age} ago, and no job is in the"
                    " queue, which has lost its data: a process that delivers adds the jobs within a minute."
                )
            else:
                yield f"{counted(backlog.ready)} to it {verb} on the way, the oldest made {age} ago."
        for wire, number in self.unknown_wires.items():
            verb = "waits" if number == 1 else "wait"
            yield f"{counted(number)} to it {verb} for the wire {wire!r}, which this node does not have."
        if not backlog.open:
            yield "No delivery is owed to it."
        if backlog.expired:
            yield f"{counted(backlog.expired)} to it expired: held until too old."
        if backlog.failed:
            codes = ", ".join(f"{number} {code}" for code, number in backlog.codes.items())
            known = sum(backlog.codes.values())
            of_some = f"; of the oldest {known}" if known < backlog.failed else ""
            yield f"{counted(backlog.failed)} to it failed for good in the last days{of_some}: {codes}."

    def _attempt(self, attempt: AttemptRow) -> str:
        by = f" through {attempt.relayed_by}" if attempt.relayed_by else ""
        status = f", status {attempt.http_status}" if attempt.http_status else ""
        said = f" ({attempt.remote_code})" if attempt.remote_code else ""
        ending = f"{attempt.outcome}{by}" if attempt.code is None else f"{attempt.code}{said}{status}{by}"
        last = ", and given up" if attempt.note is AttemptNote.GIVEN_UP else ""
        return f"Attempt at {moment(attempt.started_at)}: {ending} after {attempt.duration_ms} ms{last}."


async def explain(
    federation: Federation, url: str, *, backlog: DeliveryStats | None = None, typed: str | None = None
) -> Explanation:
    """Return what is known of the server with the canonical URL *url*. The server itself is not asked.

    Its deliveries are all counted, unless *backlog* says how many there are. *typed* is what somebody typed to name it,
    which may be the URL of an inbox or an actor of it.

    Raises:
        Unreachable: the queue does not answer.
    """
    database = federation.database
    whole = servers.whole_url(typed or url)
    inboxes = await inboxes_at(database, whole)
    server = await servers.show(database, url)
    backlog = backlog or await deliveries.stats(database, Selection(server_url=url), servers=1)
    ways = await ways_to(federation, url, registered=server is not None, backlog=backlog)
    now = federation.clock.now()
    link = next((way.link for way in ways if way.link.hold(now)), ways[0].link)
    events = await servers.health_events(database, url)
    # A server that was never unhealthy has no events: it has been healthy since we first knew it.
    since = events[0].at if events else server.created_at if server else None
    claimed = await claims(database, url)
    told = Explanation(
        url=url,
        link=link,
        ways=ways,
        inboxes=inboxes,
        named=None if inboxes else await named(database, whole, own_url=federation.own_url),
        server=server,
        since=since,
        events=events,
        rules=await blacklist.check(database, url),
        claims=claimed,
        scorecard=(await servers.scorecards(database, [url])).get(url),
        backlog=backlog,
        unknown_wires=await deliveries.by_unknown_wires(database, Selection(server_url=url), federation.wires.names),
        attempts=await deliveries.last_attempts(database, url),
        next_probe=await _next_probe(federation, server, link),
        max_age=federation.settings.federation_delivery_max_age,
        at=now,
        knows=known_pair(federation.keys, server.knows_key) if server else None,
        own_url=federation.own_url,
        lacks_jobs=await _lacks_jobs(federation),
        lacks_workers=backlog.ready > 0 and not await queue_admin.is_delivering(federation),
        move=await move_of(database, link, claimed),
        known=True,
        meant=(),
    )
    return told if _is_known(told) else replace(told, known=False, meant=await misnamed.meant(database, typed or url))


def _is_known(told: Explanation) -> bool:
    """Tell whether any table has anything about the server."""
    backlog = told.backlog
    on_record = told.server or told.rules or told.claims or told.events or told.scorecard or told.attempts
    owed = backlog.open or backlog.failed or backlog.expired
    is_named = told.inboxes or (told.named is not None and told.named.known)
    return bool(on_record or owed or is_named) or any(is_on_record(way.link) for way in told.ways)


async def _lacks_jobs(federation: Federation) -> bool:
    for queue in federation.delivery_queues.all:
        await connect(queue)
    return await federation.outbox_sweeper.lacks_jobs()


async def _next_probe(federation: Federation, server: ServerRow | None, link: Link) -> NextProbe | None:
    if link.state is not LinkState.UP:
        return None if link.next_probe_at is None else NextProbe(at=link.next_probe_at, queued=False)
    if server is None or server.is_healthy:
        return None
    if get_threat_policy(server.unhealthy_reason).direct_health_checkable:
        queue = federation.health_check_queue
        await connect(queue)
        job = await queue.get_status(health_check_id(server.url, server.health_check_attempts))
        if job is not None and not job.state.is_final:
            return NextProbe(at=job.next_run_at or job.created_at, queued=True)
    return NextProbe(at=federation.probe_plan.due_at(server.known, server.updated_at), queued=False)
