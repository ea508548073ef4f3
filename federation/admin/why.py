"""Why a server does not get its deliveries, or that nothing stands in their way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from federation.admin import blacklist, deliveries, servers
from federation.admin.blacklist import Entry
from federation.admin.deliveries import AttemptRow, DeliveryStats, Selection
from federation.admin.servers import HealthEvent, Scorecard, ServerRow
from federation.base.reach import connect
from federation.health.checks import health_check_id
from federation.http.threat_policy import get_threat_policy
from workers import JobState

if TYPE_CHECKING:
    from federation.app import Federation

_MEANING: Final = {
    "DNS_BLOCKED": "its name resolves to no public address, or to none at all",
    "TIMEOUT": "it does not answer in time",
    "CONN_REFUSED": "nothing listens on its port",
    "CONN_RESET": "it breaks connections off",
    "TLS_ERROR": "its certificate is not valid, or it does not speak TLS",
    "INVALID_RESPONSE_FROM_TARGET": "what it answers is no HTTP, or not ours",
    "UNKNOWN": "the connection failed in a way we have no name for",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NextProbe:
    """When the server is looked at again: by a job in the queue, or by the scheduler; `at` may be past: it is due."""

    at: datetime
    queued: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All that is known of why a server gets its deliveries or not. `since`: when it fell into its present state."""

    url: str
    server: ServerRow | None
    since: datetime | None
    events: Sequence[HealthEvent]
    rules: Sequence[Entry]
    scorecard: Scorecard | None
    backlog: DeliveryStats
    attempts: Sequence[AttemptRow]
    next_probe: NextProbe | None
    at: datetime

    @property
    def in_the_way(self) -> bool:
        """Whether there is something an administrator should know."""
        return bool(self.rules or self.server is None or not self.server.is_healthy or self.backlog.failed)

    def sentences(self) -> Iterator[str]:
        """The same for people, the most important first."""
        yield from (self._rule(rule) for rule in self.rules)
        yield from self._health()
        yield from self._scorecard()
        yield from self._backlog()
        yield from (self._attempt(attempt) for attempt in self.attempts)

    def _rule(self, rule: Entry) -> str:
        until = f"until {_moment(rule.expires_at)}" if rule.expires_at else "for good"
        return f"It is blacklisted by {rule.rule} {until}: {rule.reason}. Nothing is sent to it or taken from it."

    def _health(self) -> Iterator[str]:
        server = self.server
        if server is None:
            yield "It is not in the registry: the next delivery to it discovers it first."
            return
        since = f" since {_moment(self.since)} ({_ago(self.at - self.since)})" if self.since else ""
        if server.is_healthy:
            yield f"It is healthy{since}; last seen {_ago(self.at - server.last_seen)} ago."
            return
        reason = server.unhealthy_reason or "UNKNOWN"
        meaning = _MEANING.get(reason, "a code this version does not know")
        yield f"It is unhealthy{since}, because of {reason}: {meaning}."
        yield f"Deliveries to it are still attempted. {self._probes(server)}"

    def _probes(self, server: ServerRow) -> str:
        failed = f"{server.health_check_attempts} probes have failed so far; "
        if self.next_probe is None:
            return failed + "no further one is planned."
        left = self.next_probe.at - self.at
        when = f"in {_ago(left)}" if left > timedelta(0) else "due now"
        by = "is in the queue" if self.next_probe.queued else "is the scheduler's"
        return f"{failed}the next one is {when} ({_moment(self.next_probe.at)}) and {by}."

    def _scorecard(self) -> Iterator[str]:
        card = self.scorecard
        if card is None:
            return
        score = "not known" if card.score is None else f"{card.score:.0f} of 100"
        why = f": {'; '.join(card.reasons)}" if card.reasons else ""
        yield f"Its score of the {card.window_days} days up to {card.as_of} is {score}; advice: {card.action}{why}."

    def _backlog(self) -> Iterator[str]:
        backlog = self.backlog
        if backlog.open:
            assert backlog.oldest_open is not None
            yield f"{backlog.open} deliveries are owed to it, the oldest for {_ago(self.at - backlog.oldest_open)}."
        else:
            yield "No delivery is owed to it."
        if backlog.failed:
            codes = ", ".join(f"{number} {code}" for code, number in backlog.codes.items())
            yield f"{backlog.failed} deliveries to it failed for good in the last days: {codes}."

    def _attempt(self, attempt: AttemptRow) -> str:
        by = f" through {attempt.relayed_by}" if attempt.relayed_by else ""
        status = f", status {attempt.http_status}" if attempt.http_status else ""
        ending = f"{attempt.outcome}{by}" if attempt.code is None else f"{attempt.code}{status}{by}"
        return f"Attempt at {_moment(attempt.started_at)}: {ending} after {attempt.duration_ms} ms."


async def explain(federation: Federation, url: str) -> Explanation:
    """What is known of the server *url*, a canonical URL; nothing is asked of the server itself.

    Raises:
        Unreachable: the queue does not answer.
    """
    database = federation.database
    server = await servers.show(database, url)
    events = await servers.health_events(database, url)
    # A server that was never sick has no events: then it has been well since we know it.
    since = events[0].at if events else server.created_at if server else None
    return Explanation(
        url=url,
        server=server,
        since=since,
        events=events,
        rules=await blacklist.check(database, url),
        scorecard=(await servers.scorecards(database, [url])).get(url),
        backlog=await deliveries.stats(database, Selection(server_url=url), servers=1),
        attempts=await deliveries.last_attempts(database, url),
        next_probe=await _next_probe(federation, server),
        at=datetime.now(UTC),
    )


async def _next_probe(federation: Federation, server: ServerRow | None) -> NextProbe | None:
    if server is None or server.is_healthy:
        return None
    if get_threat_policy(server.unhealthy_reason).direct_health_checkable:
        queue = federation.health_check_queue
        await connect(queue)
        job = await queue.get_status(health_check_id(server.url, server.health_check_attempts))
        if job is not None and job.state not in (JobState.COMPLETED, JobState.FAILED):
            return NextProbe(at=job.next_run_at or job.created_at, queued=True)
    return NextProbe(at=federation.probe_plan.due_at(server.known, server.updated_at), queued=False)


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _ago(duration: timedelta) -> str:
    """The duration in its two largest units."""
    seconds = max(round(duration.total_seconds()), 0)
    parts = [(seconds // 86_400, "d"), (seconds // 3_600 % 24, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s")]
    first = next((index for index, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number) or "0 s"
