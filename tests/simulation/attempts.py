"""The log of attempts, the rows and what was sent agree, attempt by attempt, whatever died in between."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Final

from db import AttemptNote
from federation.delivery.error_codes import STALLED
from federation.delivery.rows import row_of_job
from tests.peer import DISCOVER_PATH
from tests.simulation.plan import GONE, NOT_FOUND
from tests.simulation.records import Attempt, MishapKind, Past, Request, RowChange, moment_of
from tests.simulation.story import moment
from tests.simulation.world import World

NEAR: Final = timedelta(seconds=1)
"""Between the beginning of an attempt, as its process noted it, and its first request, if nothing keeps it waiting."""
LEASE: Final = 60.0
"""Seconds within which a lost attempt is missed: a lease, and the pause between two looks for what is lost."""
_LOST: Final = (MishapKind.PROCESS, MishapKind.FROZEN, MishapKind.LOSS, MishapKind.QUEUE, MishapKind.DATABASE)


def attempts_agree(world: World, past: Past) -> Iterator[str]:
    """Each request has its attempt, each attempt its request, and each row counts and names those it had."""
    sent = _by_series(world)
    inboxes = {owed.delivery_id: owed.inbox for owed in world.owed}
    for delivery, attempts in past.attempts.items():
        begun = {(each.series, each.sending): each.at for each in past.rows[delivery] if each.begins}
        yield from _numbers(world, delivery, begun)
        for attempt in attempts:
            at = begun.get((attempt.series, attempt.number))
            if at is not None:
                yield from _of_attempt(world, attempt, at, sent.get((delivery, attempt.series), ()))
            elif attempt.code != "BLACKLISTED":
                yield f"attempt {attempt.series}.{attempt.number} of {delivery} never began: {attempt.outcome}"
    for (delivery, series), requests in sent.items():
        own = [each for each in past.attempts.get(delivery, ()) if each.series == series]
        for request in requests:
            is_missing = not any(_covers(attempt, request) for attempt in own)
            if is_missing and not _unwritten(world, request):
                yield f"{delivery} was sent to {request.server} at {moment(request.at)}, in series {series}: no attempt"
    for delivery, changes in past.rows.items():
        tried = {series for each, series in sent if each == delivery}
        attempts = past.attempts.get(delivery, ())
        yield from _of_row(world, delivery, changes, attempts, tried)
        if changes[-1].state == "failed" and not _lost_its_inbox(past, changes[-1], inboxes.get(delivery)):
            yield from _of_last(world, changes, attempts)


def _by_series(world: World) -> dict[tuple[str, int], list[Request]]:
    found: dict[tuple[str, int], list[Request]] = {}
    for request in world.requests:
        if request.job is not None and request.path != DISCOVER_PATH:
            delivery = row_of_job(request.job)
            series = int(request.job.removeprefix(delivery).removeprefix(".") or 0)
            found.setdefault((delivery, series), []).append(request)
    return found


def _covers(attempt: Attempt, request: Request) -> bool:
    began = moment_of(attempt.started_at)
    if attempt.code == STALLED:
        return began <= request.told_at
    return began <= request.told_at <= began + timedelta(milliseconds=attempt.duration_ms) + NEAR


def _unwritten(world: World, request: Request) -> bool:
    """Whether the attempt may not be written yet, or never was: the database was away, or the clock set meanwhile."""
    is_fresh = request.at > world.plan.end - LEASE
    return is_fresh or world.in_trouble(request.at - LEASE, request.at + LEASE, MishapKind.DATABASE, MishapKind.CLOCK)


def _numbers(world: World, delivery: str, begun: Mapping[tuple[int, int | None], float]) -> Iterator[str]:
    """Attempts of a series count from 1; one is missing only where a process was gone before it could begin."""
    for series in {series for series, _ in begun}:
        numbers = [number for each, number in begun if each == series]
        first = min(at for (each, _), at in begun.items() if each == series)
        last = max(at for (each, _), at in begun.items() if each == series)
        if numbers != list(range(1, len(numbers) + 1)) and not world.in_trouble(first - LEASE, last + 1):
            yield f"{delivery} made the attempts {numbers} in series {series}, the first at {moment(first)}"


def _of_attempt(world: World, attempt: Attempt, at: float, requests: Sequence[Request]) -> Iterator[str]:
    named = f"attempt {attempt.series}.{attempt.number} of {attempt.delivery} at {moment(at)}"
    end = at + attempt.duration_ms / 1000
    if attempt.code == STALLED and not world.in_trouble(at - LEASE, at + LEASE, *_LOST):
        yield f"{named} is {STALLED}, and no process was lost"
    if world.in_trouble(at - 1, end + 1, MishapKind.CLOCK, MishapKind.FROZEN):
        return
    own = [request for request in requests if _covers(attempt, request)]
    if attempt.outcome == "delivered":
        answered = [each for each in own if each.is_taken and each.answered_at is not None]
        if not answered:
            yield f"{named} counts as delivered, and {attempt.server} did not say so: {[each.status for each in own]}"
    elif attempt.status is not None and attempt.status not in {each.status for each in own} | {None}:
        yield f"{named} names the status {attempt.status}, and the answers were {[each.status for each in own]}"
    elif (
        any(each.is_taken for each in own)
        and attempt.code not in (STALLED, "FOREIGN_ANSWER")
        and not own[-1].path.endswith("proxy")
    ):
        yield f"{named} is {attempt.outcome} {attempt.code}, though it was answered: {[each.status for each in own]}"


def _of_row(
    world: World, delivery: str, changes: Sequence[RowChange], attempts: Sequence[Attempt], sent: Container[int]
) -> Iterator[str]:
    """What is left of a row counts its attempts, and names the code of the last one that failed."""
    last = changes[-1]
    start, end = changes[0].at, last.at + LEASE
    if world.in_trouble(start, end, MishapKind.DATABASE):
        return  # an attempt that could not be written is counted, and made again under its number
    # A canary for which there was no room counts as an attempt in its row, though none was made.
    if any(each.begins and each.attempts != each.attempts_before + 1 for each in changes):
        yield f"{delivery} counts attempts that it does not begin: {[each.attempts for each in changes if each.begins]}"
    logged = Counter(attempt.series for attempt in attempts)
    begins = (change for change in changes if change.begins)
    made = (each for each in begins if each.series in sent or each.series in logged or not each.canary_before)
    begun = Counter(each.series for each in made)
    under_way = Counter({last.series: 1} if last.sending is not None and last.state == "ready" else {})
    if last.state != "gone" and begun != logged + under_way and last.at < world.plan.end - LEASE:
        yield f"{delivery} began {dict(begun)} attempts by series, of which {dict(logged)} are in the log: {last.state}"
    if last.state == "gone" and sum(begun.values()) > sum(logged.values()):
        yield f"{delivery} began {dict(begun)} attempts by series, and is gone with {dict(logged)} in the log"
    noted = [each for each in attempts if each.note == AttemptNote.GIVEN_UP and each.code != "BLACKLISTED"]
    if noted and (last.state not in ("failed", "gone") or noted != attempts[-1:]):
        yield f"{delivery} has the attempts {noted} for its last, and is {last.state}"


def _of_last(world: World, changes: Sequence[RowChange], attempts: Sequence[Attempt]) -> Iterator[str]:
    """What was given up by an attempt of its own has its code, and that attempt says that it was the last."""
    last = changes[-1]
    if last.code in ("BLACKLISTED", STALLED) or world.in_trouble(changes[0].at, last.at + LEASE, MishapKind.DATABASE):
        return
    failures = [each for each in attempts if each.outcome != "delivered" and each.code != STALLED]
    if failures and failures[-1].code != last.code:
        yield f"{last.id} failed with {last.code}, and its last attempt with {failures[-1].code}"
    if not any(each.note == AttemptNote.GIVEN_UP for each in attempts):
        yield f"{last.id} failed with {last.code}, and none of its attempts says that it was the last"


def _lost_its_inbox(past: Past, last: RowChange, inbox: str | None) -> bool:
    """Whether it was given up because another delivery had just found out that the inbox is gone, or not there."""
    return any(
        each.status in (GONE, NOT_FOUND)
        and each.job is not None
        and row_of_job(each.job) != last.id
        and last.at - 1 < (each.answered_at or math.inf) <= last.at
        for each in past.requests.get(last.server, ())
        if last.code == "INBOX_GONE" and last.server + each.path == inbox
    )
