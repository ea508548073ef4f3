"""How long something waits that is tried until it works."""

from __future__ import annotations

from workers.retry import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(first=0.1, longest=0.5)
    assert [backoff.pause() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_success_begins_with_the_first_pause_again() -> None:
    backoff = Backoff(first=0.1, longest=0.5)
    backoff.pause()
    backoff.reset()
    assert backoff.pause() == 0.1
