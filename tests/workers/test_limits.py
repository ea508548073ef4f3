"""Limits as values: what a rate is, what is refused, and what a bucket has."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.jobs import NewJob
from workers.limits import Limit, LimitKey, fair_key_of, limit_key_of, ordering_key_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("rate", "interval", "capacity"),
    [
        ("10/s", SECOND / 10, 10),
        ("3/s", timedelta(microseconds=333_334), 3),
        ("1/30s", 30 * SECOND, 1),
        ("1000000/s", timedelta(microseconds=1), 1_000_000),
    ],
)
def test_a_rate_is_read(rate: str, interval: timedelta, capacity: int) -> None:
    """A token comes in each interval, rounded up, and the bucket holds the count of the rate."""
    assert (Limit(rate).interval, Limit(rate).capacity) == (interval, capacity)
    assert Limit(rate, burst=7).capacity == 7


@pytest.mark.parametrize("rate", ["", "0/s", "10/0s", "-1/s", "1.5/s", "10", "10/x", "10 / s", "1000001/s", "2000/ms"])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    """Zero, negative, too large or nonsense: one line says what a rate is."""
    with pytest.raises(ValueError, match=r"^a rate is [^\n]+, not '") as refused:
        Limit(rate)
    assert repr(rate) in str(refused.value)


def test_bad_limits_are_refused() -> None:
    """No number is a rate, a burst needs one, and what counts is above zero."""
    with pytest.raises(TypeError, match="a rate is a text"):
        Limit(10)  # type: ignore[arg-type] # what is refused
    for bad in ({"burst": 1}, {"rate": "1/s", "burst": 0}, {"concurrency": 0}, {"concurrency": -1}, {"version": -1}):
        with pytest.raises(ValueError, match=r"limit|burst"):
            Limit(**bad)


@given(st.lists(st.integers(-5_000, 5_000), max_size=60), st.integers(1, 5))
def test_a_bucket_gives_no_more_than_its_rate(steps: list[int], burst: int) -> None:
    """However the clock moves, so many start as the bucket held, and one per interval of time that has passed."""
    limit = Limit("1/s", burst=burst)
    now, full_at, passed, started = NOW, None, timedelta(0), 0
    for step in steps:
        now += timedelta(milliseconds=step)
        passed += max(timedelta(milliseconds=step), timedelta(0))
        full_at = limit.known(full_at, now)
        opens = limit.opens_at(full_at, now)
        assert opens is None or opens - now <= SECOND
        if opens is None:
            full_at, started = limit.taken(full_at, now), started + 1
    assert started <= burst + passed // SECOND


@given(st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_holding_keys_are_told_apart(key: str, other: str) -> None:
    """A holding key leads back to the key it was made of, and to no other kind of key."""
    limited = LimitKey("send", key)
    held = limited.holding_key
    assert (limit_key_of(held), fair_key_of(held), ordering_key_of(held)) == (limited, None, None)
    fair = NewJob(id="a", name="b", payload=b"", fair_key=other).holding_key
    assert (limit_key_of(fair), fair_key_of(fair), ordering_key_of(fair)) == (None, other, None)


@pytest.mark.parametrize(
    "keys",
    [
        {"ordering_key": "a", "fair_key": "b"},
        {"limit_key": LimitKey("send"), "fair_key": "b"},
        {"ordering_key": "\x1ea"},
        {"limit_key": LimitKey("a\x1fb")},
        {"fair_key": ""},
    ],
)
def test_a_job_has_one_holding_key(keys: dict[str, str]) -> None:
    """Two of them, or one that could be taken for another, are refused."""
    with pytest.raises(ValueError, match=r"key|limit"):
        NewJob(id="a", name="b", payload=b"", **keys)  # type: ignore[arg-type] # one of three keys each
