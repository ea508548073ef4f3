"""What the report says of a server that needs attention, in words."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Final

from db import ServerHealth
from federation.analytics.frames import BLACKLISTED, UNREGISTERED, Action
from federation.analytics.report import wording
from federation.analytics.report.findings import BAD_DAY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from federation.analytics.report.findings import Findings, Period, Server, Since

NAMES: Final = {
    Action.REVIEW: "review for blacklist",
    Action.PARK: "park",
    Action.WATCH: "watch",
    Action.PRUNE: "prune",
    Action.KEEP: "keep",
}
_STATES: Final = {
    ServerHealth.HEALTHY.value: "up",
    ServerHealth.UNHEALTHY.value: "down",
    BLACKLISTED: "on the blacklist",
    UNREGISTERED: "not in the registry",
}


def state(name: str | None) -> str:
    return _STATES.get(name or "", wording.NOTHING)


def by_state(counts: Mapping[str, int]) -> str:
    """Write what a number of servers is the sum of."""
    return wording.total({told: counts.get(name, 0) for name, told in _STATES.items()})


def state_of(server: Server, findings: Findings) -> str:
    """Say how a server is; since when it is down its first reason says."""
    found = _STATES.get(server.state or "", "")
    if server.state == ServerHealth.UNHEALTHY:
        return found
    return ", ".join(filter(None, (found, since_told(server, findings).strip(wording.NOTHING))))


def expiry(server: Server, end: datetime) -> str:
    """Say when the first of what is held expires, or should have by the `end` of the last day."""
    day = wording.day_and_year(server.expires)
    if server.held < server.owed:
        return f"The oldest of what is held expires on {day} at the earliest"
    if server.expires is not None and server.expires <= end:
        return f"The oldest of what is held has been due to expire since {day}"
    return f"The oldest of what is held expires on {day}"


def loss_codes(period: Period) -> str:
    """Write of what a server lost deliveries; results of an earlier version do not tell."""
    codes = {wording.short(code, 40): number for code, number in period.loss_codes.items()}
    return wording.total(codes) if codes else wording.NOTHING


def end_of(findings: Findings) -> datetime:
    return datetime.combine(findings.as_of + timedelta(days=1), time(), UTC)


def since_told(server: Server, findings: Findings) -> str:
    """Say since when a server needs attention, or how often it did, if it is well in between."""
    return _since(server.since, findings) if server.since else _on_and_off(server)


def _since(since: Since, findings: Findings) -> str:
    lasted = wording.duration(end_of(findings) - since.at)
    whole_day = since.at.time() == time()
    when = wording.day_and_year(since.at) if whole_day else wording.moment(since.at)
    if not since.at_least:
        return f"since {when} ({lasted})"
    first = findings.days[0].day if findings.days else None
    return f"since {when} or earlier" if since.at.date() == first else f"bad from the first attempt on, {when}"


def _on_and_off(server: Server) -> str:
    """Say how often a server was unhealthy, if it is not, or not known to be, unhealthy without a break until now."""
    known = [ratio for ratio in server.daily if ratio is not None]
    bad = sum(ratio < BAD_DAY for ratio in known)
    return f"bad on {bad} of {wording.plural(len(known), 'day')}" if bad else wording.NOTHING
