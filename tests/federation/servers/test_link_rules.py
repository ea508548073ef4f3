"""What each event makes of a link: evidence over time, ways down and up, pauses, and when to look again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from db import HoldReason, LinkState
from federation.servers.link_rules import (
    LONGEST_REST,
    MAX_REJECTIONS,
    Hold,
    Link,
    after_exhausted,
    after_failed_probe,
    after_mismatch,
    after_rejection,
    after_rest,
    after_success,
    after_unavailable,
    fallen,
    probe_interval,
    raised,
)

URL = "https://b.example"
START = datetime(2026, 1, 1, tzinfo=UTC)
"""The beginning of an interval of ten seconds."""
UP = Link(server_url=URL, since=START)
MINUTE = timedelta(minutes=1)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def down(code: str = "TIMEOUT", *, since: datetime = START) -> Link:
    return fallen(UP, since, code)


@pytest.mark.parametrize(
    ("failures", "state", "evidence"),
    [
        ([0], LinkState.UP, 1),
        ([0, 1, 2, 5, 9.9], LinkState.UP, 1),
        ([0, 10, 11, 19], LinkState.UP, 2),
        ([9.9, 10, 19.9, 20], LinkState.DOWN, 0),
        ([0, 10, 20], LinkState.DOWN, 0),
        ([0, 3600, 7200], LinkState.DOWN, 0),
        ([*(n / 1000 for n in range(5000))], LinkState.UP, 1),
    ],
    ids=["one", "a-burst", "two-intervals", "around-the-edges", "three-intervals", "far-apart", "thousands"],
)
def test_a_link_falls_by_evidence_over_time(failures: Sequence[float], state: LinkState, evidence: int) -> None:
    """Failures in three intervals of ten seconds take it down, and no number of them within one or two."""
    link = UP
    for second in failures:
        link = after_unavailable(link, at(second), "TIMEOUT")
    assert (link.state, link.evidence) == (state, evidence)


def test_a_link_that_falls_says_why_since_when_and_when_to_look() -> None:
    """The reason is the failure's that took it down; a look is due in half a minute."""
    link = replace(UP, evidence=2, evidence_at=at(0), relayed=True, release_at=None)
    link = after_unavailable(link, at(20), "CONN_REFUSED")
    assert (link.state, link.reason, link.since) == (LinkState.DOWN, "CONN_REFUSED", at(20))
    assert (link.next_probe_at, link.probes, link.relayed, link.needs_canary) == (at(50), 0, False, False)
    assert not link.is_open


@pytest.mark.parametrize(
    ("code", "needs_canary"),
    [
        ("TIMEOUT", False),
        ("CONN_REFUSED", False),
        ("DNS_BLOCKED", False),
        ("DISCOVERY", False),
        ("HTTP_500", True),
        ("HTTP_503", True),
        ("HTTP_302", True),
        ("HTTP_404", True),
        ("FOREIGN_ANSWER", True),
    ],
)
def test_where_something_answered_a_probe_is_not_enough(code: str, needs_canary: bool) -> None:
    """A page that is served while deliveries fail says nothing of the next delivery."""
    assert down(code).needs_canary is needs_canary


def test_a_success_takes_all_evidence_back() -> None:
    """Two intervals, a success, two more: the link is up."""
    link = after_unavailable(after_unavailable(UP, at(0), "TIMEOUT"), at(10), "TIMEOUT")
    link = after_success(link, at(15), relayed=False)
    link = after_unavailable(after_unavailable(link, at(20), "TIMEOUT"), at(30), "TIMEOUT")
    assert (link.state, link.evidence, link.acknowledged, link.last_success_at) == (LinkState.UP, 2, True, at(15))


def test_a_failure_that_a_relay_made_good_is_none() -> None:
    """The link is up by relays, and nothing is held against the server."""
    link = after_success(replace(UP, evidence=2, evidence_at=at(0)), at(5), relayed=True)
    assert (link.state, link.relayed, link.evidence) == (LinkState.UP, True, 0)
    assert after_success(link, at(9), relayed=False).relayed is False


@pytest.mark.parametrize(
    ("last_success", "state"),
    [(None, LinkState.DOWN), (at(-1), LinkState.DOWN), (at(0), LinkState.UP), (at(40), LinkState.UP)],
    ids=["never", "before", "with-the-first", "meanwhile"],
)
def test_a_delivery_that_used_up_its_attempts_takes_the_link_down(
    last_success: datetime | None, state: LinkState
) -> None:
    """Unless another one got through since its first attempt: then it is this one's affair."""
    link = replace(UP, last_success_at=last_success)
    assert after_exhausted(link, at(75), "TIMEOUT", first_attempted_at=at(0)).state is state


def test_failures_of_a_link_that_is_down_change_nothing() -> None:
    """Least of all its date, by which it is looked at."""
    link = down()
    assert after_unavailable(link, at(100), "CONN_RESET") == link
    assert after_exhausted(link, at(100), "CONN_RESET", first_attempted_at=at(0)) == link
    mismatch = after_mismatch(link, at(5))
    assert after_unavailable(mismatch, at(100), "CONN_RESET") == mismatch


def test_a_failure_during_a_release_ends_it_at_once() -> None:
    """The next one begins at half the rate, again and again, but never at nothing."""
    link, starts = raised(down(), at(60)), []
    for n in range(8):
        assert (link.state, link.release_at, link.release_rate) == (LinkState.UP, at(60 + n), link.release_start)
        link = after_unavailable(link, at(60 + n), "TIMEOUT")
        assert (link.state, link.release_at) == (LinkState.DOWN, None)
        starts.append(link.release_start)
        link = raised(link, at(61 + n))
    assert starts == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 64, 1 / 64]


def test_a_link_comes_up_with_nothing_against_it_and_a_release() -> None:
    """By a success or a probe alike; raising one that is up changes nothing."""
    link = replace(down("HTTP_500"), evidence=2, rejections=7, probes=5)
    for found in (raised(link, at(99)), replace(after_success(link, at(99), relayed=False), acknowledged=False)):
        assert (found.state, found.since, found.reason, found.release_at) == (LinkState.UP, at(99), None, at(99))
        assert (found.evidence, found.rejections, found.probes, found.needs_canary) == (0, 0, 0, False)
        assert found.next_probe_at is None
    assert raised(UP, at(99)) == UP


@pytest.mark.parametrize(
    ("pauses", "seconds"),
    [
        ([None], 60),
        ([None, None], 120),
        ([None] * 5, 960),
        ([None] * 40, 86_400),
        ([timedelta(seconds=7)], 7),
        ([timedelta(0)], 1),
        ([timedelta(seconds=-9)], 1),
        ([timedelta(days=9)], 86_400),
        ([timedelta(hours=1), timedelta(seconds=7)], 3600),
        ([timedelta(seconds=7), None], 120),
    ],
    ids=["unsaid", "again", "fifth", "fortieth", "said", "none", "past", "endless", "shorter", "said-then-unsaid"],
)
def test_a_rest_is_as_long_as_asked_or_twice_as_long_each_time(
    pauses: Sequence[timedelta | None], seconds: float
) -> None:
    """Within a second and a day, and never shorter than one that was granted already."""
    link = UP
    for pause in pauses:
        link = after_rest(link, at(0), pause)
    assert link.rest_until == at(seconds)
    assert (link.state, link.evidence, link.rejections, link.rests) == (LinkState.UP, 0, 0, len(pauses))


def test_a_rest_halves_the_release_and_a_success_ends_the_doubling() -> None:
    """It is no evidence against the server, and the first one after a success is a minute again."""
    link = replace(UP, release_rate=16.0, release_at=at(0))
    for _ in range(2):
        link = after_rest(link, at(0), None)
    assert (link.release_rate, link.release_at) == (4.0, at(0))
    rested = after_rest(after_success(link, at(500), relayed=False), at(500), None)
    assert (rested.rests, rested.rest_until) == (1, at(560))


def test_a_date_of_a_clock_that_was_wrong_does_not_rest_a_server_for_years() -> None:
    """Nor does it lengthen the next pause."""
    link = replace(UP, rest_until=START + timedelta(days=4000))
    assert link.hold(START) is None
    assert after_rest(link, START, MINUTE).rest_until == START + MINUTE


@pytest.mark.parametrize(
    ("link", "hold"),
    [
        (UP, None),
        (replace(UP, relayed=True), None),
        (down(), Hold(reason=HoldReason.SERVER)),
        (after_mismatch(UP, START), Hold(reason=HoldReason.SERVER)),
        (replace(UP, state=LinkState.REFUSING), Hold(reason=HoldReason.SERVER)),
        (replace(UP, operator_hold=True), Hold(reason=HoldReason.SERVER)),
        (replace(UP, rest_until=at(1)), Hold(reason=HoldReason.REST, until=at(1))),
        (replace(UP, rest_until=START + LONGEST_REST), Hold(reason=HoldReason.REST, until=START + LONGEST_REST)),
        (replace(UP, rest_until=START), None),
        (replace(down(), rest_until=at(1)), Hold(reason=HoldReason.SERVER)),
    ],
    ids=["up", "relayed", "down", "mismatch", "refusing", "operator", "rest", "long-rest", "rested", "down-and-rest"],
)
def test_what_a_delivery_has_to_wait_for(link: Link, hold: Hold | None) -> None:
    """Its server's link, before the pause its server asked for, before nothing."""
    assert link.hold(START) == hold


def test_a_thousand_refusals_with_none_accepted_make_a_server_refusing() -> None:
    """One canary a day then; a success in between begins the count anew."""
    link = after_rejection(replace(UP, rejections=MAX_REJECTIONS - 2), at(0), "HTTP_403")
    assert link.state is LinkState.UP
    assert after_rejection(after_success(link, at(1), relayed=False), at(2), "HTTP_403").rejections == 1
    link = after_rejection(link, at(1), "HTTP_403")
    assert (link.state, link.reason, link.needs_canary) == (LinkState.REFUSING, "HTTP_403", True)
    assert link.next_probe_at == at(1) + timedelta(days=1)
    link = after_failed_probe(link, at(1) + timedelta(days=1))
    assert (link.state, link.next_probe_at) == (LinkState.REFUSING, at(1) + timedelta(days=2))
    assert after_success(link, at(9), relayed=False).state is LinkState.UP


@pytest.mark.parametrize("link", [UP, down("HTTP_500")], ids=["up", "down"])
def test_another_key_is_a_mismatch_whatever_was_before(link: Link) -> None:
    """Nothing goes out, not even a canary; it is looked at as one that is down."""
    found = after_mismatch(link, at(5))
    assert (found.state, found.reason, found.needs_canary) == (LinkState.MISMATCH, "KEY_MISMATCH", False)
    assert found.looked_at == at(5)
    assert found.next_probe_at is not None
    again = after_failed_probe(found, found.next_probe_at)
    assert (again.state, again.probes) == (LinkState.MISMATCH, 1)


@pytest.mark.parametrize(
    ("probes", "minutes"),
    [
        *enumerate((0.5, 1, 2, 5, 15, 25, 35, 45)),
        *((8 + n, hours * 60) for n, hours in enumerate((1, 2, 4, 8, 16, 24, 24, 24))),
        (1_000_000, 24 * 60),
    ],
)
def test_looks_come_ever_later(probes: int, minutes: float) -> None:
    """At a server that was away for a long time, as the health checks of the original implementation."""
    assert probe_interval(probes, away=timedelta(days=365)) == timedelta(minutes=minutes)


@pytest.mark.parametrize(
    ("probes", "away", "interval"),
    [
        (2, timedelta(0), timedelta(minutes=2)),
        (4, timedelta(minutes=10), timedelta(minutes=2)),
        (6, timedelta(hours=1), timedelta(minutes=2.5)),
        (9, timedelta(hours=12), timedelta(minutes=30)),
        (14, timedelta(days=7), timedelta(hours=7)),
    ],
)
def test_a_server_that_is_away_for_a_short_time_is_looked_at_often(
    probes: int, away: timedelta, interval: timedelta
) -> None:
    """One that was away for an hour is noticed within three minutes of its return."""
    assert probe_interval(probes, away=away) == interval


def test_the_looks_of_an_hour_are_so_close_that_a_return_is_noticed_within_three_minutes() -> None:
    """Whenever in that hour it returns."""
    link, looks = down(), [START]
    while looks[-1] < START + timedelta(hours=1):
        assert link.next_probe_at is not None
        looks.append(link.next_probe_at)
        link = after_failed_probe(link, link.next_probe_at)
    assert max(later - earlier for earlier, later in pairwise(looks)) < timedelta(minutes=3)


@pytest.mark.parametrize(
    ("link", "nothing"),
    [
        (UP, False),
        (replace(UP, acknowledged=True), True),
        (replace(UP, acknowledged=True, evidence=1), False),
        (replace(UP, acknowledged=True, rejections=1), False),
        (replace(UP, acknowledged=True, rests=1), False),
        (replace(UP, acknowledged=True, relayed=True), False),
        (replace(down(), acknowledged=True), False),
    ],
)
def test_what_a_success_has_to_forget(link: Link, nothing: bool) -> None:
    """A link that a success would leave as it is needs no write, and only such a one."""
    assert link.has_nothing_to_forget() is nothing
