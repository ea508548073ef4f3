"""How long a fault of ours holds a delivery."""

from __future__ import annotations

from datetime import timedelta

from federation.delivery.fates import own_pause


def test_a_fault_of_ours_holds_a_delivery_twice_as_long_each_time_up_to_an_hour() -> None:
    """Of those in a row."""
    minutes = [own_pause(holds) / timedelta(minutes=1) for holds in (0, 1, 2, 5, 6, 7, 10_000)]
    assert minutes == [1, 2, 4, 32, 60, 60, 60]
