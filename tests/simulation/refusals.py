"""What servers that take activities refuse is given up for that reason, not before its time, and no inbox is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from federation.activitypub.outbound import SkipReason
from tests.simulation.inboxes import SHARED_INBOX
from tests.simulation.owing import Owed, Skip
from tests.simulation.pace import LEARNS_OF_IT, is_doubt
from tests.simulation.plan import DAY, GONE, MINUTE, NOT_FOUND, Deed, Trouble
from tests.simulation.records import MishapKind, Past, Request, RowChange
from tests.simulation.story import moment
from tests.simulation.world import World

LOOK_EACH: Final = 10 * MINUTE
LASTS: Final = MINUTE
"""An attempt that meets the end of a trouble ends within this time."""
SERIES: Final = 3
"""So many times something is held for later that its server refuses, and may not refuse for good."""
MISSING_FOR: Final = 6 * DAY
_CODES: Final = {
    Trouble.MISSING: ("HTTP_404", "INBOX_GONE"),
    Trouble.GONE: ("INBOX_GONE",),
    Trouble.REFUSES_US: ("HTTP_401",),
    Trouble.LACKS_OUR_KEY: (),
}
_GIVEN_UP: Final = "SELECT 1 FROM simulated_rows WHERE id = ? AND state = 'failed' AND code <> 'BLACKLISTED'"


def was_refused(world: World, owed: Owed) -> bool:
    """Whether it was given up because the inbox refused it, which `refusals` judges."""
    return owed.inbox is not None and bool(world.space.rows(_GIVEN_UP, owed.delivery_id))


def refusals(world: World, past: Past) -> Iterator[str]:
    """What is wrong with what was given up, or was not even owed, and with looks at our own actor."""
    for owed in world.owed:
        changes = past.rows.get(owed.delivery_id, ())
        failed = next((each for each in changes if each.state == "failed" and each.code != "BLACKLISTED"), None)
        if failed is not None and owed.inbox is not None and owed.page is None and not owed.is_poison:
            yield from _given_up(world, owed, failed, changes)
        if owed.inbox is not None:
            yield from _in_vain(world, owed, _at_inbox(past, owed.server, owed.inbox))
    for skip in world.skips:
        yield from _skipped(world, skip, _at_inbox(past, skip.server, skip.inbox))
    yield from _after_its_end(world, past)
    yield from _own_looks(world)
    for changes in past.rows.values():
        yield from _whose_fault(world, changes)


def _given_up(world: World, owed: Owed, failed: RowChange, changes: Sequence[RowChange]) -> Iterator[str]:
    named = f"{owed.delivery_id} to {owed.inbox}, owed since {moment(owed.at)}, failed at {moment(failed.at)}"
    is_refused = any(
        phase.start < failed.at < phase.end + LASTS and failed.code in _CODES.get(phase.trouble, ())
        for phase in world.servers[owed.server].planned.phases
    )
    if not is_refused:
        yield f"{named} with {failed.code}, and its server refuses nothing so"
    later = [each for each in changes if each.was == "ready" and (each.reason == "alone" or is_doubt(each))]
    if failed.code != "INBOX_GONE" and len(later) != SERIES and not world.in_trouble(owed.at, failed.at):
        yield f"{named} with {failed.code}, after {len(later)} pauses"


def _in_vain(world: World, owed: Owed, requests: Sequence[Request]) -> Iterator[str]:
    """Nothing is owed to an inbox that is gone, but once a day to one that a server's users share."""
    last = next((each for each in reversed(requests) if (each.answered_at or math.inf) < owed.at), None)
    if last is None or last.status != GONE or world.in_trouble(last.at - 1, last.at + 1):
        return
    is_tried = owed.inbox == owed.server + SHARED_INBOX and owed.at - last.at > DAY - MINUTE
    if not is_tried and not world.in_trouble(last.at, owed.at, MishapKind.CLOCK):
        yield f"{owed.delivery_id} was owed to {owed.inbox} at {moment(owed.at)}, which is gone"


def _skipped(world: World, skip: Skip, requests: Sequence[Request]) -> Iterator[str]:
    """Nothing is owed to a server that is blacklisted, or to an inbox that said that it is gone."""
    before = [each for each in requests if each.answered_at is not None and each.answered_at <= skip.at]
    taken_at = max((each.at for each in before if each.is_taken), default=0.0)
    missing = [each.at for each in before if each.status == NOT_FOUND and each.at > taken_at]
    is_gone = any(each.status == GONE and each.at > taken_at for each in before)
    is_gone |= bool(missing) and missing[-1] - missing[0] > MISSING_FOR - LASTS
    is_banned = any(
        ban.deed is Deed.BLACKLISTS and ban.start < skip.at < ban.end + 5 * MINUTE and ban.server == skip.server
        for ban in world.bans
    )
    is_so = {SkipReason.GONE: is_gone, SkipReason.BLACKLISTED: is_banned}.get(skip.reason, False)
    if not is_so and not world.in_trouble(0, skip.at, MishapKind.CLOCK):
        yield f"nothing was owed to {skip.inbox} at {moment(skip.at)}, as it was {skip.reason}, which is not so"


def _after_its_end(world: World, past: Past) -> Iterator[str]:
    """What was owed to an inbox when it said that it is gone is not sent there any more."""
    owed_at = {each.delivery_id: each for each in world.owed if each.inbox is not None}
    for delivery, owed in owed_at.items():
        requests = _at_inbox(past, owed.server, str(owed.inbox))
        over = next((each.answered_at for each in requests if each.status == GONE and each.at > owed.at), None)
        for request in requests:
            is_its = request.job is not None and request.job.partition(".")[0] == delivery
            if is_its and over is not None and request.at > over + LEARNS_OF_IT and not world.in_trouble(owed.at, over):
                yield f"{delivery} was sent to {owed.inbox} at {moment(request.at)}, which is gone since {moment(over)}"


def _own_looks(world: World) -> Iterator[str]:
    """A process looks at our own actor at most once in ten minutes."""
    for process in {each for each, _ in world.own_looks}:
        for before, at in pairwise(at for each, at in world.own_looks if each == process):
            if at - before < LOOK_EACH - 1 and not world.in_trouble(before, at, MishapKind.PROCESS):
                yield f"process {process} looked at our own actor at {moment(before)}, and again at {moment(at)}"


def _whose_fault(world: World, changes: Sequence[RowChange]) -> Iterator[str]:
    """What is held after a 401 is held for our actor if nobody could fetch that, as far as the last look can tell."""
    for held in (each for each in changes if (each.state, each.reason, each.was) == ("held", "ours", "ready")):
        named, seen = f"{held.id} was held at {moment(held.at)} for {held.code}", held.at - LOOK_EACH - LASTS
        was_hidden = any(start < held.at and seen < end for start, end in world.plan.hidden)
        was_always = any(start < seen and held.at < end for start, end in world.plan.hidden)
        if held.code == "OWN_ACTOR_UNREACHABLE" and not was_hidden:
            yield f"{named}, and our actor was to be seen"
        if is_doubt(held) and was_always:
            yield f"{named}, and our actor was not to be seen"


def _at_inbox(past: Past, server: str, inbox: str) -> list[Request]:
    return [each for each in past.requests.get(server, ()) if server + each.path == inbox]
