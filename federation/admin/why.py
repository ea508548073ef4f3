"""Why a server does not get its deliveries, or that nothing stands in their way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from db import AttemptNote, LinkState
from federation.admin import blacklist
from federation.admin.blacklist import Entry
from federation.admin.deliveries import deliveries
from federation.admin.deliveries.deliveries import AttemptRow, DeliveryStats, Selection
from federation.admin.servers import misnamed, servers
from federation.admin.servers.claims import Claim, claims
from federation.admin.servers.known_keys import Ours, known_pair, meaning, refuses_signature
from federation.admin.servers.moves import Move, move_of
from federation.admin.servers.servers import HealthEvent, Scorecard, ServerRow
from federation.admin.words import ago, counted
from federation.base.settings.reach import connect
from federation.http.threat_policy import NetworkErrorCode, get_threat_policy
from federation.sealed.peers.health_checks import health_check_id
from federation.servers.link_rules import Link

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

_MEANING: Final = {
    "DNS_BLOCKED": "its name resolves to no public address, or to none at all",
    "TIMEOUT": "it does not answer in time",
    "CONN_REFUSED": "nothing listens on its port",
    "CONN_RESET": "it breaks connections off",
    "TLS_ERROR": "its certificate is not valid, or it does not speak TLS",
    "INVALID_RESPONSE_FROM_TARGET": "what it answers is no HTTP, or not ours",
    "UNKNOWN": "the connection failed in a way we have no name for",
    "DISCOVERY": "it could not be asked who it is",
    "FOREIGN_ANSWER": "something answers there that is not the server",
    "KEY_MISMATCH": "it shows another signing key than the registered one",
}


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
    if this one is not. `lacks_jobs`: deliveries are ready, to whatever
    server, and the queue has no job at all.
    """

    url: str
    link: Link
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
    move: Move | None
    known: bool
    meant: Sequence[str]

    @property
    def in_the_way(self) -> bool:
        """Whether there is something that an administrator should know."""
        backlog = self.backlog
        is_sick = self.server is None or not self.server.is_healthy
        is_held = self.rules or self.link.hold(self.at) or self.knows is Ours.MISSING
        is_claimed = any(claim.proved for claim in self.claims)
        return bool(is_sick or is_held or is_claimed or backlog.failed or backlog.held or backlog.expired)

    def sentences(self) -> Iterator[str]:
        """Yield the same as sentences for people, the most important first."""
        if not self.known:
            yield from self._unknown()
            return
        yield from (self._rule(rule) for rule in self.rules)
        if not self.rules:
            yield self._link()
            yield self._next()
        if self.move is not None:
            owed = self.backlog.open
            yield from self.move.sentences(self.url, registered=self.server is not None, owed=owed)
        yield from self._health()
        yield from self._keys()
        yield from (f"{claim}; last at {_moment(claim.at)}." for claim in self.claims)
        yield from self._scorecard()
        yield from self._backlog()
        yield from (self._attempt(attempt) for attempt in self.attempts)

    def _unknown(self) -> Iterator[str]:
        """Say that the name may be wrong."""
        if self.url == self.own_url:
            yield "It is this node itself."
            return
        yield "Nobody here knows it: it is not in the registry, and no delivery to it is owed or on record."
        if self.meant:
            yield misnamed.question(self.meant)
        yield f"`federation servers discover {self.url}` asks it who it is, as a first delivery would."

    def _link(self) -> str:
        """Say what becomes of deliveries to the server, since when, and why."""
        link = self.link
        since = f"since {_moment(link.since)} ({ago(self.at - link.since)})"
        if link.operator_hold:
            down = "" if link.state is LinkState.UP else f"; its link is {link.state.value}, because of {_cause(link)}"
            return f"Deliveries to it are held by an operator {since}{down}."
        match link.state:
            case LinkState.DOWN:
                return f"It is down {since}, because of {_cause(link)}; deliveries to it are held."
            case LinkState.REFUSING:
                last = f", the last with {link.reason}" if link.reason else ""
                return f"It refuses everything {since}: {counted(link.rejections)}{last}; deliveries to it are held."
            case LinkState.MISMATCH:
                return f"It shows another signing key than the registered one {since}; deliveries to it are held."
        hold = link.hold(self.at)
        if hold is not None and hold.until is not None:
            return f"It asked for a pause until {_moment(hold.until)}; deliveries to it are held so long."
        how = " through other servers, not directly" if link.relayed else ""
        if link.release_at is not None:
            return f"It is up again {since}; what was held for it is being sent{how}, slowly at first."
        times = f", though it was not there in {link.evidence} of the last intervals of 10 s" if link.evidence else ""
        return f"Deliveries to it are sent{how}{times}."

    def _next(self) -> str:
        """Say what is held, and what happens next and when."""
        return f"{self._held()}; {self._plan()}." if self.backlog.held else f"Nothing is held for it; {self._plan()}."

    def _held(self) -> str:
        backlog = self.backlog
        assert backlog.oldest_held is not None
        is_one = backlog.held == 1
        told = f"{counted(backlog.held)} {'is' if is_one else 'are'} held for it"
        return f"{told}, {'' if is_one else 'the oldest '}made {ago(self.at - backlog.oldest_held)} ago{self._expiry()}"

    def _expiry(self) -> str:
        assert self.backlog.oldest_held is not None
        if self.max_age is None:
            return ""
        return f" and given up {self._when(self.backlog.oldest_held + self.max_age)} at the latest"

    def _plan(self) -> str:
        link = self.link
        by_hand = f"`federation deliveries release {self.url}` sends what is held"
        if link.operator_hold:
            return f"{by_hand}, and nothing else does"
        match link.state:
            case LinkState.DOWN if self.backlog.held:
                next_ = "one delivery is sent to it to see if it takes it"
                return f"{next_} {self._probe_time()}, and then the others"
            case LinkState.DOWN:
                return f"it is looked at {self._probe_time()}, and once it is back everything held is sent"
            case LinkState.REFUSING:
                return f"one delivery is tried {self._probe_time()}, and if it is taken the others follow"
            case LinkState.MISMATCH:
                return (
                    f"it is looked at {self._probe_time()}, and once it shows the registered key, or has proved the new"
                    " one (`federation keys rotate` there), everything held is sent. If its operator says that the old"
                    f" key is lost, `federation servers forget {self.url}`, which ends the follows there and here, and"
                    f" `federation servers discover {self.url}` take the new one"
                )
        hold = link.hold(self.at)
        if hold is not None and hold.until is not None:
            return f"what waits goes out {self._when(hold.until)}"
        if link.release_at is not None:
            return f"the next of what is held goes out {self._when(link.release_at)}"
        return "what is held goes out when its time comes" if self.backlog.held else "new deliveries go out at once"

    def _probe_time(self) -> str:
        at = self.link.next_probe_at
        return "soon" if at is None else self._when(at)

    def _when(self, at: datetime) -> str:
        left = at - self.at
        return f"in {ago(left)} ({_moment(at)})" if left > timedelta(0) else "now"

    def _rule(self, rule: Entry) -> str:
        until = f"until {_moment(rule.expires_at)}" if rule.expires_at else "for good"
        return f"It is blacklisted by {rule.rule} {until}: {rule.reason}. Nothing is sent to it or taken from it."

    def _health(self) -> Iterator[str]:
        server = self.server
        if server is None:
            yield "It is not in the registry: the next delivery to it discovers it first."
            return
        since = f" since {_moment(self.since)} ({ago(self.at - self.since)})" if self.since else ""
        if server.is_healthy:
            yield f"It is healthy{since}; last seen {ago(self.at - server.last_seen)} ago."
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
        return f", because of {_explained(reason)}"

    def _probes(self, server: ServerRow) -> str:
        number = server.health_check_attempts
        failed = f"{number} {'probe has' if number == 1 else 'probes have'} failed so far; "
        if self.next_probe is None:
            return failed + "no further one is planned."
        left = self.next_probe.at - self.at
        when = f"in {ago(left)}" if left > timedelta(0) else "due now"
        by = "is in the queue" if self.next_probe.queued else "is the scheduler's"
        return f"{failed}the next one is {when} ({_moment(self.next_probe.at)}) and {by}."

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
            if self.lacks_jobs:
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
        return f"Attempt at {_moment(attempt.started_at)}: {ending} after {attempt.duration_ms} ms{last}."


async def explain(
    federation: Federation, url: str, *, backlog: DeliveryStats | None = None, typed: str | None = None
) -> Explanation:
    """Return what is known of the server with the canonical URL *url*. The server itself is not asked.

    Its deliveries are all counted, unless *backlog* says how many there are. *typed* is what somebody typed to name it.

    Raises:
        Unreachable: the queue does not answer.
    """
    database = federation.database
    server = await servers.show(database, url)
    link = await _link(federation, url)
    events = await servers.health_events(database, url)
    # A server that was never unhealthy has no events: it has been healthy since we first knew it.
    since = events[0].at if events else server.created_at if server else None
    claimed = await claims(database, url)
    told = Explanation(
        url=url,
        link=link,
        server=server,
        since=since,
        events=events,
        rules=await blacklist.check(database, url),
        claims=claimed,
        scorecard=(await servers.scorecards(database, [url])).get(url),
        backlog=backlog or await deliveries.stats(database, Selection(server_url=url), servers=1),
        unknown_wires=await deliveries.by_unknown_wires(database, Selection(server_url=url), federation.wires.names),
        attempts=await deliveries.last_attempts(database, url),
        next_probe=await _next_probe(federation, server, link),
        max_age=federation.settings.federation_delivery_max_age,
        at=federation.clock.now(),
        knows=known_pair(federation.keys, server.knows_key) if server else None,
        own_url=federation.own_url,
        lacks_jobs=await _lacks_jobs(federation),
        move=await move_of(database, link, claimed),
        known=True,
        meant=(),
    )
    return told if _is_known(told) else replace(told, known=False, meant=await misnamed.meant(database, typed or url))


async def _link(federation: Federation, url: str) -> Link:
    """Return the link to the server: of several wires, the first that is not open, or else that is known."""
    links = [await federation.links.of(wire).find(url) for wire in federation.wires.names]
    closed = (link for link in links if not link.is_open)
    known = (link for link in links if link != Link(server_url=url, wire=link.wire, since=link.since))
    return next(closed, None) or next(known, links[0])


def _is_known(told: Explanation) -> bool:
    """Tell whether any table has anything about the server."""
    backlog, link = told.backlog, told.link
    on_record = told.server or told.rules or told.claims or told.events or told.scorecard or told.attempts
    owed = backlog.open or backlog.failed or backlog.expired
    return bool(on_record or owed) or link != Link(server_url=link.server_url, wire=link.wire, since=link.since)


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


def _cause(link: Link) -> str:
    return "a reason that is not on record" if link.reason is None else _explained(link.reason)


def _explained(reason: str) -> str:
    if reason.startswith("HTTP_3"):
        return f"{reason}: it redirects, and redirects are not followed"
    if reason.startswith("HTTP_"):
        return f"{reason}: something answers there, but not as the server should"
    return f"{reason}: {_MEANING.get(reason, 'a code this version does not know')}"


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
