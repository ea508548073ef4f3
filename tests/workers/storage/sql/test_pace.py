"""When the watcher of an SQLite file looks: soon after each write, seldom otherwise, and never too often."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workers.storage.sql.sqlite.changes.watcher import (
    CLOSEST_SECONDS,
    LINGER,
    POLL,
    REST,
    SOON_SECONDS,
    LookPace,
    Sight,
)

_POLL, _REST = POLL.total_seconds(), REST.total_seconds()
_TICK = CLOSEST_SECONDS / 10


def looks(pace: LookPace, seconds: float, seen: Sight, *, heard: bool) -> list[float]:
    """When it looks, within so long, if every look sees the same and writes never end or never begin."""
    found = []
    for tick in range(round(seconds / _TICK)):
        now = tick * _TICK
        if heard and pace.closed(now) <= 0:
            pace.hear()
        if pace.left(now) <= 0:
            found.append(now)
            pace.looked(now, seen, heard=heard, rest=REST)
    return found


def test_looks_become_rare_when_nothing_happens() -> None:
    """After the first one they follow at twice the distance each, up to 50 ms, and then every second."""
    found = looks(LookPace(), 5, Sight.NOTHING, heard=False)
    apart = [after - before for before, after in pairwise(found)]
    assert found[0] == 0
    assert apart[0] < 3 * CLOSEST_SECONDS
    assert [round(each, 3) for each in apart[-3:]] == [_REST] * 3
    assert len(found) < 15


def test_a_look_that_hears_a_write_is_followed_by_more() -> None:
    """A commit becomes visible after its last write, of which nobody tells: no write is left to a single look.

    The second look comes soon, also if more is heard meanwhile; the others take their time.
    """
    pace = LookPace()
    looks(pace, 5, Sight.NOTHING, heard=False)
    pace.hear()
    assert pace.left(6) <= 0
    pace.looked(6, Sight.NOTHING, heard=True, rest=REST)
    pace.hear()
    assert 0 < pace.left(6) < 1.5 * SOON_SECONDS
    pace.looked(6 + SOON_SECONDS, Sight.NOTHING, heard=False, rest=REST)
    assert SOON_SECONDS < pace.left(6 + SOON_SECONDS) < 2.5 * SOON_SECONDS


def test_a_long_transaction_costs_a_look_per_millisecond() -> None:
    """It writes all the time, and there is nothing to see."""
    found = looks(LookPace(), 1, Sight.NOTHING, heard=True)
    assert 900 <= len(found) <= 1_002


def test_a_commit_that_is_visible_late_is_seen_in_time() -> None:
    """A slow disk may be synchronised between the last write to the log and the moment that others see the commit."""
    pace = LookPace()
    looks(pace, 5, Sight.NOTHING, heard=False)
    pace.hear()
    pace.looked(6, Sight.NOTHING, heard=True, rest=REST)
    found = [6.0]
    while found[-1] < 9:
        found.append(found[-1] + pace.left(found[-1]))
        pace.looked(found[-1], Sight.NOTHING, heard=False, rest=REST)
    settled = 6 + LINGER.total_seconds()
    assert all(after - before < _POLL + _TICK for before, after in pairwise(found) if before < settled)
    assert round(found[-1] - found[-2], 3) == _REST


def test_a_busy_writer_in_another_process_costs_twenty_looks_a_second() -> None:
    """As long as its commits are of no use here; a use restores the pace at once, a quiet moment soon."""
    pace = LookPace()
    in_vain = looks(pace, 10, Sight.OTHERS, heard=True)
    assert len(in_vain) < 10 / _POLL + 10
    pace.find()
    assert pace.closed(10 + CLOSEST_SECONDS) <= 0
    looks(pace, 1, Sight.OTHERS, heard=True)
    for _ in range(6):
        pace.looked(20, Sight.NOTHING, heard=False, rest=REST)
    assert pace.closed(20 + CLOSEST_SECONDS) <= 0


def test_our_own_commits_cost_few_looks_and_make_nobody_late() -> None:
    """While only we write, looks are four milliseconds apart; others are heard within that, and then at once again."""
    pace = LookPace()
    found = looks(pace, 1, Sight.OURS, heard=True)
    assert len(found) < 260
    pace.hear()
    assert pace.left(found[-1]) < 5 * CLOSEST_SECONDS
    pace.looked(1.1, Sight.NEWS, heard=True, rest=REST)
    assert pace.left(1.1) < 1.5 * CLOSEST_SECONDS


def test_a_busy_writer_whose_commits_are_of_use_costs_a_look_per_millisecond() -> None:
    """Not more, however many there are."""
    found = looks(LookPace(), 1, Sight.NEWS, heard=True)
    assert 900 <= len(found) <= 1_001


_LOOKS = st.lists(st.tuples(st.sampled_from(Sight), st.booleans(), st.booleans()))


@given(story=_LOOKS)
def test_a_write_is_never_forgotten(story: list[tuple[Sight, bool, bool]]) -> None:
    """Whatever was seen, looks are 0.1 ms apart at least; a write causes one within 50, and a rest ends."""
    pace, now = LookPace(), 0.0
    for seen, heard, found in story:
        pace.looked(now, seen, heard=heard, rest=REST)
        if found:
            pace.find()
        assert pace.left(now) + 1e-9 >= SOON_SECONDS
        assert pace.left(now) <= _REST
        assert pace.closed(now) <= _POLL
        now += max(pace.left(now), 0)
    pace.hear()
    assert pace.left(now) <= _POLL
