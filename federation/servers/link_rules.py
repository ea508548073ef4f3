"""What is known of the way to a server, and how each event changes it: values and pure functions.

A link goes down by evidence over time, not by volume, comes up by a delivery that got through or by a probe, and says
when it is to be probed next. The module `links` stores it, and acts on its changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from db import HoldReason, LinkState

BUCKET: Final = timedelta(seconds=10)
"""All failures within one bucket are one piece of evidence, however many deliveries they hit."""
BUCKETS_TO_FALL: Final = 3
MAX_REJECTIONS: Final = 1_000
FIRST_PROBES: Final = tuple(timedelta(minutes=minutes) for minutes in (0.5, 1, 2, 5, 15, 25, 35, 45))
LONGEST_PROBE: Final = timedelta(hours=24)
PROBED_PART: Final = 24
"""While something is held for a server, it is probed after each 24th part of the time that it has been away, at the
latest: the return of one that was away for an hour is noticed within three minutes."""
CANARY_INTERVAL: Final = timedelta(hours=24)
"""The time between two deliveries to a server that refuses them all."""
SHORTEST_REST: Final = timedelta(seconds=1)
FIRST_REST: Final = timedelta(minutes=1)
LONGEST_REST: Final = timedelta(hours=24)
LONGEST_WAIT: Final = max(LONGEST_PROBE, CANARY_INTERVAL, LONGEST_REST)
"""No link ever waits for a time further off than this."""
SLOWEST_RELEASE: Final = 1 / 64
OPERATOR: Final = "OPERATOR"
"""The reason of a link that an operator holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Why deliveries to a server are held, and until when, if that is known."""

    reason: HoldReason
    until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One row of `server_links`; see `ServerLink` for its columns."""

    server_url: str
    since: datetime
    state: LinkState = LinkState.UP
    reason: str | None = None
    operator_hold: bool = False
    relayed: bool = False
    acknowledged: bool = False
    evidence: int = 0
    evidence_at: datetime | None = None
    last_success_at: datetime | None = None
    rejections: int = 0
    needs_canary: bool = False
    fell_at: datetime | None = None
    probes: int = 0
    canaries: int = 0
    probed_at: datetime | None = None
    next_probe_at: datetime | None = None
    rests: int = 0
    rest_until: datetime | None = None
    release_start: float = 1.0
    release_rate: float = 1.0
    release_at: datetime | None = None
    looked_at: datetime | None = None
    moved_to: str | None = None
    profile: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether deliveries may be sent, apart from a rest."""
        return self.state is LinkState.UP and not self.operator_hold

    def hold(self, now: datetime) -> Hold | None:
        """Return what a delivery has to wait for at `now`, or None if it may be sent."""
        if not self.is_open:
            return Hold(reason=HoldReason.SERVER)
        if self.rest_until is not None and now < self.rest_until <= now + LONGEST_REST:
            return Hold(reason=HoldReason.REST, until=self.rest_until)
        return None

    def has_nothing_to_forget(self) -> bool:
        """Tell whether one more success would change nothing."""
        return (
            self.state is LinkState.UP
            and self.acknowledged
            and not (self.evidence or self.rejections or self.rests or self.relayed)
        )


def after_success(link: Link, now: datetime, *, relayed: bool) -> Link:
    """Return the link after a delivery was acknowledged."""
    link = replace(link, acknowledged=True, evidence=0, rejections=0, rests=0, last_success_at=now)
    return replace(raised(link, now), relayed=relayed)


def raised(link: Link, now: datetime) -> Link:
    """Return the link as up, and its held deliveries due for release from now on, unless an operator holds it."""
    if link.state is LinkState.UP:
        return link
    return replace(
        link,
        state=LinkState.UP,
        since=now,
        reason=None,
        relayed=False,
        evidence=0,
        rejections=0,
        needs_canary=False,
        probes=0,
        next_probe_at=None,
        release_rate=link.release_start,
        release_at=None if link.operator_hold else now,
    )


def after_unavailable(link: Link, now: datetime, code: str) -> Link:
    """Return the link after an attempt that the server was unable to judge.

    Several buckets with such attempts take the link down; during a release, one is enough.
    """
    if link.state is not LinkState.UP:
        return link
    if link.release_at is not None:
        return fallen(replace(link, release_start=max(link.release_start / 2, SLOWEST_RELEASE)), now, code)
    if link.evidence_at is not None and link.evidence and _bucket(link.evidence_at) == _bucket(now):
        return link
    link = replace(link, evidence=link.evidence + 1, evidence_at=now)
    return fallen(link, now, code) if link.evidence >= BUCKETS_TO_FALL else link


def after_exhausted(link: Link, now: datetime, code: str, *, first_attempted_at: datetime) -> Link:
    """Return the link after a delivery has used up its attempts on an unavailable server.

    It takes the link down if no delivery got through meanwhile.
    """
    succeeded = link.last_success_at is not None and link.last_success_at >= first_attempted_at
    return link if link.state is not LinkState.UP or succeeded else fallen(link, now, code)


def fallen(link: Link, now: datetime, code: str) -> Link:
    """Return the link as down because of `code`."""
    return replace(
        link,
        state=LinkState.DOWN,
        since=now,
        reason=code,
        relayed=False,
        evidence=0,
        evidence_at=None,
        needs_canary=answers(code),
        probes=0,
        next_probe_at=now + FIRST_PROBES[0],
        release_at=None,
    )


def after_mismatch(link: Link, now: datetime) -> Link:
    """Return the link after the server's `/discover` showed another signing key than the registered one."""
    down = fallen(link, now, "KEY_MISMATCH") if link.state is LinkState.UP else link
    return replace(down, state=LinkState.MISMATCH, reason="KEY_MISMATCH", needs_canary=False, looked_at=now)


def after_rejection(link: Link, now: datetime, code: str) -> Link:
    """Return the link after the server answered, and refused a delivery."""
    link = replace(link, rejections=link.rejections + 1)
    if link.state is not LinkState.UP or link.rejections < MAX_REJECTIONS:
        return link
    down = fallen(link, now, code)
    return replace(down, state=LinkState.REFUSING, needs_canary=True, next_probe_at=now + CANARY_INTERVAL)


def after_rest(link: Link, now: datetime, pause: timedelta | None) -> Link:
    """Return the link after the server asked to be left alone.

    Without a `pause` it rests a minute, and twice as long each further time.
    """
    pause = FIRST_REST * (1 << min(link.rests, 20)) if pause is None else pause
    until = now + min(max(pause, SHORTEST_REST), LONGEST_REST)
    if link.rest_until is not None and link.rest_until <= now + LONGEST_REST:  # otherwise written by a wrong clock
        until = max(until, link.rest_until)
    return replace(
        link,
        rests=link.rests + 1,
        rest_until=until,
        release_rate=max(link.release_rate / 2, SLOWEST_RELEASE),
    )


def after_failed_probe(link: Link, now: datetime) -> Link:
    """Return the link after a probe, or a canary, showed that the server is not back."""
    return probe_planned(replace(link, probes=link.probes + 1), now)


def probe_planned(link: Link, now: datetime) -> Link:
    """Return the link with the time of its next probe, which is None if it is up."""
    if link.state is LinkState.UP:
        return replace(link, next_probe_at=None)
    if link.state is LinkState.REFUSING:
        return replace(link, next_probe_at=now + CANARY_INTERVAL)
    return replace(link, next_probe_at=now + probe_interval(link.probes, away=now - link.since))


def probe_interval(probes: int, *, away: timedelta) -> timedelta:
    """Return how long after the `probes`-th failed probe the next one follows.

    The intervals are 30 s, 1, 2, 5, 15, 25, 35, 45 minutes, 1, 2, 4 ... 24 hours, but no longer than a 24th of the time
    that the server has been away, or two minutes if that is more.
    """
    if probes < len(FIRST_PROBES):
        planned = FIRST_PROBES[probes]
    else:
        planned = min(timedelta(hours=1) * (1 << min(probes - len(FIRST_PROBES), 10)), LONGEST_PROBE)
    return min(planned, max(timedelta(minutes=2), away / PROBED_PART))


def answers(code: str) -> bool:
    """Tell whether something answers at the server's address, so that a probe proves nothing."""
    return code.startswith("HTTP_") or code == "FOREIGN_ANSWER"


def _bucket(at: datetime) -> int:
    return int(at.timestamp() // BUCKET.total_seconds())
