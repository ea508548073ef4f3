"""What becomes of a delivery after a failure."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from db import LinkState
from federation.delivery.attempt.decision import AGAIN, HELD_FOR_SERVER, fate_of, own_pause
from federation.delivery.error_codes import FailureClass
from federation.servers.link_rules import Link
from tests.federation.delivery.entries import NOW, series_of


def test_a_fault_of_ours_holds_a_delivery_twice_as_long_each_time_up_to_an_hour() -> None:
    """Of those in a row."""
    minutes = [own_pause(holds) / timedelta(minutes=1) for holds in (0, 1, 2, 5, 6, 7, 10_000)]
    assert minutes == [1, 2, 4, 32, 60, 60, 60]


def test_a_canary_that_is_refused_has_had_its_turn() -> None:
    """Its other attempts come with later looks. A delivery to a server that is up goes on at once."""
    series = replace(series_of("delivery"), canary_at=NOW, is_canary=True)
    for state, expected in ((LinkState.DOWN, HELD_FOR_SERVER), (LinkState.UP, AGAIN)):
        link = Link(server_url="https://b.example", since=NOW, state=state)
        assert fate_of(FailureClass.REJECTED, is_last=False, series=series, link=link, now=NOW) == expected
