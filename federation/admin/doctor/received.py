"""A check of the doctor: is what others send by ActivityPub handled?"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from db import ReceivedState
from federation.admin.doctor.checks import Found, ok, warning
from federation.admin.received import backlog, list_received
from federation.admin.words import ago, counted
from federation.monitoring.numbers import MAX_ROWS
from federation.runtime.composition import Federation

LATE: Final = timedelta(minutes=15)
"""Longer than an activity takes that fails five times, and those that came after it."""
_SHOWN: Final = 200


async def received(federation: Federation) -> Found:
    """Warn of activities that could not be handled, and of those that wait for long."""
    numbers = await backlog(federation)
    if numbers.failed:
        [first] = (await list_received(federation, limit=1, states=(ReceivedState.FAILED,))).activities
        least = "at least " if numbers.failed >= MAX_ROWS else ""
        text = f"{least}{counted(numbers.failed, 'activity')} could not be handled; {first.number}: {first.last_error}"
        again = "`received retry --all` has them handled again, once that is mended"
        return warning(text[:_SHOWN], f"`federation activitypub received list --state failed` says more; {again}")
    waits = None if numbers.oldest is None else federation.clock.now() - numbers.oldest
    if waits is not None and waits > LATE:
        text = f"{counted(numbers.waiting, 'activity')} wait to be handled, the oldest for {ago(waits)}"
        return warning(text, "does a process run tasks (`federation run`, or `federation workers run`)?")
    return ok("what others sent was handled, or is about to be")
