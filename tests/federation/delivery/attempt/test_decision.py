"""What becomes of a delivery after a failure."""

from __future__ import annotations

from datetime import timedelta

from msgspec.structs import replace

from db import HoldReason, LinkState
from federation.delivery.attempt.decision import (
    AGAIN,
    FAILED,
    HELD_FOR_SERVER,
    Fate,
    fate_of,
    ours,
    own_pause,
    waits_by_itself,
)
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


def waits(kind: FailureClass, alone: int, *, tried_later: bool = True, is_last: bool = True) -> Fate | None:
    series = replace(series_of("delivery"), alone=alone)
    return waits_by_itself(kind, series, NOW, tried_later=tried_later, is_last=is_last)


def test_what_its_wire_wants_to_try_later_waits_a_few_times_and_has_failed() -> None:
    """Each wait counts, whatever it is for."""
    for kind, reason, pauses in (
        (FailureClass.REJECTED, HoldReason.ALONE, (10, 60, 360)),
        (FailureClass.OURS, HoldReason.OURS, (15, 120, 720)),
    ):
        for number, minutes in enumerate(pauses):
            fate = waits(kind, number)
            assert fate is not None
            assert (fate.reason, fate.until, fate.uses_pause) == (reason, NOW + timedelta(minutes=minutes), True)
        assert waits(kind, len(pauses)) == FAILED


def test_a_refusal_goes_on_unless_it_is_our_fault() -> None:
    """Which needs no other attempt to be known, and is waited for as any fault of ours, without an end."""
    assert waits(FailureClass.REJECTED, 0, is_last=False) is None
    assert waits(FailureClass.REJECTED, 0, tried_later=False) is None
    assert waits(FailureClass.OURS, 9, tried_later=False, is_last=False) == ours(series_of("delivery"), NOW)
    assert not ours(series_of("delivery"), NOW).uses_pause
