"""What each event makes of a link: evidence over time, ways down and up, pauses, and when to look again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from db import HoldReason, LinkState
from federation.servers.link_rules import (
    CANARY_INTERVAL,
    HEARD_INTERVAL,
    LONGEST_REST,
    MAX_REJECTIONS,
    MOST_CANARIES,
    Hold,
    Link,
    after_exhausted,
    after_failed_probe,
    after_mismatch,
    after_refused_canary,
    after_rejection,
    after_rest,
    after_success,
    after_unavailable,
    believed,
    fallen,
    looked_at_now,
    looked_at_soon,
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
    assert (link.probed_at, link.next_probe_at, link.probes, link.relayed) == (at(20), at(50), 0, False)
    assert not link.is_open


def test_an_outage_goes_on_until_a_delivery_is_acknowledged() -> None:
    """A link that was raised by a look and falls again keeps when it fell, and its pauses grow."""
    link, pauses = down(), []
    for moment in (at(100), at(200), at(300), at(400)):
        link = after_failed_probe(link, moment)
        link = raised(link, moment + timedelta(seconds=1))
        assert (link.state, link.since) == (LinkState.UP, moment + timedelta(seconds=1))
        link = fallen(link, moment + timedelta(seconds=30), "TIMEOUT")
        assert (link.state, link.since) == (LinkState.DOWN, START)
        assert link.next_probe_at is not None
        pauses.append(link.next_probe_at - moment - timedelta(seconds=30))
    assert [pause / MINUTE for pause in pauses] == [1, 2, 2, 2]
    assert link.probes == 4

    link = fallen(after_success(raised(link, at(500)), at(501), relayed=False), at(600), "TIMEOUT")
    assert (link.since, link.probes, link.next_probe_at) == (at(600), 0, at(630))


def test_a_redirect_is_remembered_until_a_delivery_gets_through_or_fails_otherwise() -> None:
    """Whoever looks at a server that moved is told where to."""
    link = after_unavailable(UP, at(0), "HTTP_308", moved_to="https://new.example")
    assert link.moved_to == "https://new.example"
    assert after_unavailable(link, at(1), "HTTP_500").moved_to is None
    assert after_success(link, at(1), relayed=False).moved_to is None


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


@pytest.mark.parametrize("is_acknowledged", [False, True], ids=["a-probe", "a-canary"])
def test_during_a_release_the_usual_evidence_counts(is_acknowledged: bool) -> None:
    """One failure is one, whatever raised the link. If it falls the next release begins at half, no slower than 1/4."""
    link, starts = down(), []
    for n in (60, 160, 260, 360):
        link = after_success(link, at(n), relayed=False) if is_acknowledged else raised(link, at(n))
        assert (link.state, link.release_at, link.release_rate) == (LinkState.UP, at(n), link.release_start)
        for seconds in (1, 2, 10, 11):
            link = after_unavailable(link, at(n + seconds), "TIMEOUT")
            assert (link.state, link.release_at) == (LinkState.UP, at(n))
        link = after_unavailable(link, at(n + 20), "TIMEOUT")
        assert (link.state, link.release_at) == (LinkState.DOWN, None)
        starts.append(link.release_start)
    assert starts == [1 / 2, 1 / 4, 1 / 4, 1 / 4]


def test_a_fall_without_a_release_slows_no_later_one() -> None:
    """Only what the server did during a release says how gently the next one has to begin."""
    link = replace(raised(down(), at(60)), release_at=None)
    assert fallen(link, at(90), "TIMEOUT").release_start == 1


def test_a_link_comes_up_with_nothing_against_it_and_a_release() -> None:
    """By a success or a probe alike; raising one that is up changes nothing."""
    link = replace(down("HTTP_500"), evidence=2, rejections=7, probes=5)
    for found in (raised(link, at(99)), replace(after_success(link, at(99), relayed=False), acknowledged=False)):
        assert (found.state, found.since, found.reason, found.release_at) == (LinkState.UP, at(99), None, at(99))
        assert (found.evidence, found.rejections, found.next_probe_at) == (0, 0, None)
    assert (raised(link, at(99)).fell_at, raised(link, at(99)).probes) == (START, 5)
    success = after_success(link, at(99), relayed=False)
    assert (success.fell_at, success.probes) == (None, 0)
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
        ([timedelta(hours=1), timedelta(seconds=7)], 7),
        ([timedelta(seconds=7), None], 120),
    ],
    ids=["unsaid", "again", "fifth", "fortieth", "said", "none", "past", "endless", "shorter", "said-then-unsaid"],
)
def test_a_rest_is_as_long_as_asked_or_twice_as_long_each_time(
    pauses: Sequence[timedelta | None], seconds: float
) -> None:
    """Within a second and a day. Each answer comes after the rest before it."""
    link, now = UP, START
    for pause in pauses:
        now = link.rest_until or now
        link = after_rest(link, now, pause)
    assert link.rest_until is not None
    assert link.rest_until - now == timedelta(seconds=seconds)
    assert (link.state, link.evidence, link.rejections, link.rests) == (LinkState.UP, 0, 0, len(pauses))


@pytest.mark.parametrize(
    ("pauses", "seconds"),
    [
        ([None] * 16, 60),
        ([timedelta(hours=1), timedelta(seconds=7)], 3600),
        ([timedelta(seconds=7), timedelta(hours=1), None], 3600),
    ],
    ids=["unsaid", "shorter", "longer"],
)
def test_answers_of_one_moment_are_one_rest(pauses: Sequence[timedelta | None], seconds: float) -> None:
    """As long as the longest that was granted; they double nothing, and halve the release once."""
    link = replace(UP, release_rate=16.0)
    for n, pause in enumerate(pauses):
        link = after_rest(link, at(n / 100), pause)
    assert link.rest_until is not None
    assert timedelta(seconds=seconds) <= link.rest_until - START < timedelta(seconds=seconds + 1)
    assert (link.rests, link.release_rate) == (1, 8.0)


def test_a_server_that_is_down_is_not_looked_at_while_it_rests() -> None:
    """A canary was answered with the wish to be left alone."""
    link = after_rest(down(), at(30), timedelta(minutes=20))
    assert (link.state, link.next_probe_at) == (LinkState.DOWN, at(30) + timedelta(minutes=20))


def test_a_rest_halves_the_release_and_a_success_ends_the_doubling() -> None:
    """It is no evidence against the server, and the first one after a success is a minute again."""
    link = replace(UP, release_rate=1.0, release_at=at(0))
    rates = []
    for moment in (at(0), at(60), at(180)):
        link = after_rest(link, moment, None)
        rates.append(link.release_rate)
    assert (rates, link.release_at) == ([1 / 2, 1 / 4, 1 / 4], at(0))
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
        (down(), Hold(reason=HoldReason.SERVER, may_be_tried=True)),
        (after_mismatch(UP, START), Hold(reason=HoldReason.SERVER)),
        (replace(UP, state=LinkState.REFUSING), Hold(reason=HoldReason.SERVER, may_be_tried=True)),
        (replace(UP, operator_hold=True), Hold(reason=HoldReason.SERVER)),
        (replace(down(), operator_hold=True), Hold(reason=HoldReason.SERVER)),
        (replace(UP, rest_until=at(1)), Hold(reason=HoldReason.REST, until=at(1))),
        (replace(UP, rest_until=START + LONGEST_REST), Hold(reason=HoldReason.REST, until=START + LONGEST_REST)),
        (replace(UP, rest_until=START), None),
        (replace(down(), rest_until=at(1)), Hold(reason=HoldReason.SERVER)),
    ],
    ids=[
        *("up", "relayed", "down", "mismatch", "refusing", "operator", "down-and-operator"),
        *("rest", "long-rest", "rested", "down-and-rest"),
    ],
)
def test_what_a_delivery_has_to_wait_for(link: Link, hold: Hold | None) -> None:
    """Its server's link, before the pause its server asked for, before nothing.

    One may go ahead to find out, but not to whom an operator holds, or who shows another key, or asked for a rest.
    """
    assert link.hold(START) == hold


def test_a_thousand_refusals_with_none_accepted_make_a_server_refusing() -> None:
    """One canary a day then; a success in between begins the count anew."""
    link = after_rejection(replace(UP, rejections=MAX_REJECTIONS - 2), at(0), "HTTP_403")
    assert link.state is LinkState.UP
    assert after_rejection(after_success(link, at(1), relayed=False), at(2), "HTTP_403").rejections == 1
    link = after_rejection(link, at(1), "HTTP_403")
    assert (link.state, link.reason) == (LinkState.REFUSING, "HTTP_403")
    assert link.next_probe_at == at(1) + timedelta(days=1)
    link = after_failed_probe(link, at(1) + timedelta(days=1))
    assert (link.state, link.next_probe_at) == (LinkState.REFUSING, at(1) + timedelta(days=2))
    assert after_success(link, at(9), relayed=False).state is LinkState.UP


@pytest.mark.parametrize("link", [UP, down("HTTP_500")], ids=["up", "down"])
def test_another_key_is_a_mismatch_whatever_was_before(link: Link) -> None:
    """Nothing goes out, not even a canary; it is looked at as one that is down."""
    found = after_mismatch(link, at(5))
    assert (found.state, found.reason) == (LinkState.MISMATCH, "KEY_MISMATCH")
    assert after_success(found, at(6), relayed=False) == found
    assert found.looked_at == at(5)
    assert found.next_probe_at is not None
    again = after_failed_probe(found, found.next_probe_at)
    assert (again.state, again.probes) == (LinkState.MISMATCH, 1)


def test_a_canary_that_is_refused_for_itself_is_followed_by_the_next_ten_at_most() -> None:
    """The server is there, and of the others nothing is known. The tenth makes the look one in vain."""
    link = down("HTTP_500")
    for n in range(1, MOST_CANARIES):
        link = after_refused_canary(link, at(n))
        assert (link.state, link.probes, link.canaries, link.next_probe_at) == (LinkState.DOWN, 0, n, at(n))
    link = after_refused_canary(link, at(40))
    assert (link.probes, link.canaries, link.next_probe_at) == (1, 0, at(40) + MINUTE)
    refusing = replace(link, state=LinkState.REFUSING)
    assert after_refused_canary(refusing, at(99)).next_probe_at == at(99) + CANARY_INTERVAL
    assert after_refused_canary(UP, at(99)) == UP


def test_a_failed_look_at_a_link_that_is_up_again_changes_nothing() -> None:
    """Another process may have raised it meanwhile."""
    assert after_failed_probe(UP, at(9)) == UP


def test_news_of_a_server_bring_its_look_forward_once_a_minute() -> None:
    """Of one that is away: one that is up is not looked at."""
    link = after_failed_probe(after_failed_probe(down(), at(0)), at(0))
    soon = HEARD_INTERVAL - timedelta(seconds=1)
    assert looked_at_soon(link, START + soon) == link
    assert looked_at_soon(link, START + HEARD_INTERVAL).next_probe_at == START + HEARD_INTERVAL
    assert looked_at_now(link, START + soon).next_probe_at == START + soon
    assert looked_at_soon(link, START - timedelta(days=1)).next_probe_at == START - timedelta(days=1)
    assert looked_at_now(UP, at(9)) == UP
    later = START + timedelta(hours=2)
    refusing = replace(link, state=LinkState.REFUSING, next_probe_at=START + CANARY_INTERVAL)
    assert looked_at_soon(refusing, later) == refusing
    assert after_rest(refusing, later, None).next_probe_at == START + CANARY_INTERVAL
    resting = after_rest(link, START, timedelta(hours=3))
    assert looked_at_soon(resting, later) == looked_at_now(resting, later) == resting


def test_what_is_yet_to_happen_has_not_happened() -> None:
    """A clock that was ahead wrote it. A success of tomorrow must not excuse every failure of today."""
    link = replace(down(), fell_at=at(50), last_success_at=at(70), since=at(50))
    found = believed(link, at(10))
    assert (found.since, found.fell_at, found.last_success_at) == (at(10), at(10), at(10))
    assert believed(link, at(99)) is link


def test_a_rest_that_a_clock_far_ahead_wrote_is_forgotten() -> None:
    """It must not begin to count when the right time comes near its end."""
    link = replace(UP, rest_until=START + timedelta(days=3))
    assert believed(link, START).rest_until is None
    near = replace(UP, rest_until=START + LONGEST_REST)
    assert believed(near, START) is near


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
