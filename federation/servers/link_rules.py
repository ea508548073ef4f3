"""What is known of the way to a server, and how each event changes it: values and pure functions.

A link goes down by evidence over time, not by volume, and comes up by the way that failed: by a delivery that got
through, or, where nothing is held that could be sent, by a look at `/discover`. It says when the next look is due.
Until a delivery is acknowledged an outage goes on, even if the link was up in between: the pauses between looks grow.
The module `links` stores it, and acts on its changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from db import DEFAULT_WIRE, HoldReason, LinkState

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
HEARD_INTERVAL: Final = timedelta(minutes=1)
"""News of a server that is away bring the next look forward at most this often."""
LONGEST_BATCH: Final = timedelta(seconds=10)
"""Batches of a release follow one another more quickly than this, unless the server rests."""
SLOWEST_START: Final = 1 / 4
"""Deliveries a second with which a release begins at the least."""
MOST_CANARIES: Final = 10
"""How many deliveries one look may send ahead, where each is refused for itself."""
SKEW: Final = timedelta(seconds=5)
"""Clocks of processes that share a database differ by less than this."""
OPERATOR: Final = "OPERATOR"
"""The reason of a link that an operator holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Why deliveries to a server are held, and until when, if that is known.

    `may_be_tried`: one may go ahead of the others nevertheless, to find out whether the server is back.
    """

    reason: HoldReason
    until: datetime | None = None
    may_be_tried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One row of `server_links`; see `ServerLink` for its columns."""

    server_url: str
    wire: str = DEFAULT_WIRE
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
    look_ended_at: datetime | None = None
    profile: str | None = None
    signature: str | None = None
    first_answer_was_page: bool | None = None

    @property
    def is_open(self) -> bool:
        """Whether deliveries may be sent, apart from a rest."""
        return self.state is LinkState.UP and not self.operator_hold

    def hold(self, now: datetime) -> Hold | None:
        """Return what a delivery has to wait for at `now`, or None if it may be sent."""
        until = self.rests_until(now)
        if not self.is_open:
            is_away = self.state in (LinkState.DOWN, LinkState.REFUSING)
            may_be_tried = is_away and not self.operator_hold and until is None
            return Hold(reason=HoldReason.SERVER, may_be_tried=may_be_tried)
        return None if until is None else Hold(reason=HoldReason.REST, until=until)

    def rests_until(self, now: datetime) -> datetime | None:
        """Return the end of the rest that the server takes at `now`; None if it takes none.

        A rest that is longer than any that is granted was written by a wrong clock.
        """
        resting = self.rest_until is not None and now < self.rest_until <= now + LONGEST_REST
        return self.rest_until if resting else None

    def has_nothing_to_forget(self) -> bool:
        """Tell whether one more success would change nothing."""
        return (
            self.state is LinkState.UP
            and self.acknowledged
            and self.fell_at is None
            and not (self.evidence or self.rejections or self.rests or self.relayed or self.probes or self.moved_to)
        )


def believed(link: Link, now: datetime) -> Link:
    """Return the link without times of events that are yet to come: a clock that was wrong wrote them.

    Nor with a rest that is longer than any: kept, it would begin to count a day before its end.
    """
    is_rest_real = link.rest_until is not None and link.rest_until <= now + LONGEST_REST
    past = replace(
        link,
        rest_until=link.rest_until if is_rest_real else None,
        since=min(link.since, now),
        fell_at=link.fell_at and min(link.fell_at, now),
        last_success_at=link.last_success_at and min(link.last_success_at, now),
    )
    return link if past == link else past


def after_success(link: Link, now: datetime, *, relayed: bool) -> Link:
    """Return the link after a delivery was acknowledged. That proves nothing of keys: a mismatch stays one."""
    if link.state is LinkState.MISMATCH:
        return link
    link = replace(link, acknowledged=True, evidence=0, rejections=0, rests=0, last_success_at=now, moved_to=None)
    return replace(raised(link, now), relayed=relayed, fell_at=None, probes=0)


def raised(link: Link, now: datetime) -> Link:
    """Return the link as up, and its held deliveries due for release from now on, unless an operator holds it.

    Until a delivery is acknowledged it may turn out that the outage goes on: its beginning and its looks are kept.
    """
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
        fell_at=link.fell_at or link.since,
        canaries=0,
        next_probe_at=None,
        release_rate=link.release_start,
        release_at=None if link.operator_hold else now,
    )


def after_unavailable(link: Link, now: datetime, code: str, *, moved_to: str | None = None) -> Link:
    """Return the link after an attempt that the server was unable to judge; `moved_to` is where it sent us.

    Several buckets with such attempts take the link down.
    """
    link = replace(link, moved_to=moved_to)
    if link.state is not LinkState.UP:
        return link
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
    """Return the link as down because of `code`. If it fell while it was released, the next release begins slower.

    If nothing was acknowledged since it fell before, that outage goes on.
    """
    since = link.fell_at or now
    looks = 0 if link.fell_at is None else link.probes
    start = link.release_start if link.release_at is None else max(link.release_start / 2, SLOWEST_START)
    return replace(
        link,
        state=LinkState.DOWN,
        since=since,
        fell_at=since,
        reason=code,
        relayed=False,
        evidence=0,
        evidence_at=None,
        probes=looks,
        canaries=0,
        probed_at=now,
        next_probe_at=now + probe_interval(looks, away=now - since),
        release_start=start,
        release_at=None,
    )


def after_page(link: Link) -> Link:
    """Return the link after the server took a delivery with a page for an answer: if that is its first, it may."""
    return link if link.acknowledged else replace(link, first_answer_was_page=True)


def after_mismatch(link: Link, now: datetime) -> Link:
    """Return the link after the server's `/discover` showed another signing key than the registered one."""
    down = fallen(link, now, "KEY_MISMATCH") if link.state is LinkState.UP else link
    return replace(down, state=LinkState.MISMATCH, reason="KEY_MISMATCH", looked_at=now, look_ended_at=now)


def after_rejection(link: Link, now: datetime, code: str) -> Link:
    """Return the link after the server answered, and refused a delivery."""
    link = replace(link, rejections=link.rejections + 1)
    if link.state is not LinkState.UP or link.rejections < MAX_REJECTIONS:
        return link
    return replace(fallen(link, now, code), state=LinkState.REFUSING, next_probe_at=now + CANARY_INTERVAL)


def after_rest(link: Link, now: datetime, pause: timedelta | None) -> Link:
    """Return the link after the server asked to be left alone.

    Without a `pause` it rests a minute, and twice as long each further time. All answers that come before the rest is
    over are of the same moment, and count once. A link that is down is not looked at meanwhile.
    """
    resting = link.rests_until(now) is not None
    times = max(link.rests - 1, 0) if resting else link.rests
    pause = FIRST_REST * (1 << min(times, 20)) if pause is None else pause
    until = now + min(max(pause, SHORTEST_REST), LONGEST_REST)
    if resting and link.rest_until is not None:
        until = max(until, link.rest_until)
    link = replace(link, rest_until=until)
    if link.state is not LinkState.UP:
        planned = link.next_probe_at if link.state is LinkState.REFUSING else None
        link = replace(link, probed_at=now, next_probe_at=max(until, planned or until))
    if resting:
        return link
    return replace(link, rests=link.rests + 1, release_rate=max(link.release_rate / 2, SLOWEST_START))


def after_failed_probe(link: Link, now: datetime) -> Link:
    """Return the link after a look, be it at `/discover` or by a canary, showed that the server is not back."""
    if link.state is LinkState.UP:
        return link
    pause = (
        CANARY_INTERVAL if link.state is LinkState.REFUSING else probe_interval(link.probes + 1, away=now - link.since)
    )
    return replace(link, probes=link.probes + 1, canaries=0, probed_at=now, next_probe_at=now + pause)


def after_refused_canary(link: Link, now: datetime) -> Link:
    """Return the link after a canary was refused for itself, which says nothing of the others: the next goes at once.

    After `MOST_CANARIES` of them the look was in vain. A server that refuses everything gets one a day.
    """
    if link.state is not LinkState.DOWN or link.canaries + 1 >= MOST_CANARIES:
        return after_failed_probe(link, now)
    return replace(link, canaries=link.canaries + 1, probed_at=now, next_probe_at=now)


def may_look_at_keys(link: Link, now: datetime, *, interval: timedelta, takes: timedelta) -> bool:
    """Tell whether to look at the server's keys: nobody did within `interval`, or whoever did has died over it.

    A look that has not ended after `takes` counts as that. One from before the clock was set back by more than
    `interval` does not count. One that seems to lie ahead by less does: another process's clock is never quite the
    same, and somebody may have looked while this one waited for the link.
    """
    if link.looked_at is None:
        return True
    has_ended = link.look_ended_at is not None and link.look_ended_at >= link.looked_at
    return abs(now - link.looked_at) >= (interval if has_ended else min(takes, interval))


def was_just_looked_at(link: Link, now: datetime) -> bool:
    """Tell whether the last look is so recent that nobody's news of the server brings the next one forward."""
    return link.probed_at is not None and link.probed_at <= now < link.probed_at + HEARD_INTERVAL


def looked_at_soon(link: Link, now: datetime) -> Link:
    """Return the link with a look due now, if the last one was at least `HEARD_INTERVAL` ago.

    A server that refuses everything gets its one canary a day, whatever is heard of it.
    """
    is_patient = link.state is LinkState.REFUSING or was_just_looked_at(link, now)
    return link if is_patient else looked_at_now(link, now)


def looked_at_now(link: Link, now: datetime) -> Link:
    """Return the link with a look due now, unless it is up, or its server asked to be left alone."""
    is_later = link.next_probe_at is not None and link.next_probe_at > now
    is_left_alone = link.state is LinkState.UP or link.rests_until(now) is not None
    return link if is_left_alone or not is_later else replace(link, next_probe_at=now)


def probe_interval(probes: int, *, away: timedelta) -> timedelta:
    """Return how long after the `probes`-th failed look the next one follows.

    The intervals are 30 s, 1, 2, 5, 15, 25, 35, 45 minutes, 1, 2, 4 ... 24 hours, but no longer than a 24th of the time
    that the server has been away, or two minutes if that is more.
    """
    if probes < len(FIRST_PROBES):
        planned = FIRST_PROBES[probes]
    else:
        planned = min(timedelta(hours=1) * (1 << min(probes - len(FIRST_PROBES), 10)), LONGEST_PROBE)
    return min(planned, max(timedelta(minutes=2), away / PROBED_PART))


def answers(code: str) -> bool:
    """Tell whether something answered at the server's address, so that the delivery itself may be what it refuses."""
    return code.startswith("HTTP_") or code == "FOREIGN_ANSWER"


def _bucket(at: datetime) -> int:
    return int(at.timestamp() // BUCKET.total_seconds())
