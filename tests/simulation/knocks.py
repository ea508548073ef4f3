"""How activities are signed: a second time only where the first was refused, and as is known of the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from federation.activitypub.signatures import SignatureKind
from tests.simulation.inboxes import SHARED_INBOX
from tests.simulation.pace import LEARNS_OF_IT
from tests.simulation.records import Past, Request
from tests.simulation.story import moment
from tests.simulation.world import World

REFUSED: Final = (400, 401)
AT_ONCE: Final = 0.1
"""Seconds within which a second knock follows the answer to the first."""


def knocks(world: World, past: Past) -> Iterator[str]:
    """What is wrong with the requests by which activities were sent."""
    for server in world.servers.values():
        if server.inboxes is None:
            continue
        yield from server.inboxes.problems
        requests = past.requests.get(server.url, ())
        yield from _strays(requests)
        attempts = list(_attempts(requests))
        for attempt in attempts:
            yield from _of_attempt(world, server.url, attempt)
        yield from _remembered(world, server.url, attempts)
    yield from _on_record(world)


def _strays(requests: Sequence[Request]) -> Iterator[str]:
    """Nothing but activities is sent to such a server, and only to its inboxes."""
    for request in requests:
        is_inbox = request.path == SHARED_INBOX or request.path.endswith("/inbox")
        if request.job is None or not is_inbox:
            yield f"{request.server} was asked for {request.path} at {moment(request.at)}"


def _attempts(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """The requests of each attempt: a second knock begins when the first is answered."""
    last: dict[tuple[str | None, int], list[Request]] = {}
    for request in requests:
        key = request.job, request.process
        former = last.get(key)
        if former is not None and _follows_at_once(former[-1], request):
            former.append(request)
            continue
        if former is not None:
            yield former
        last[key] = [request]
    yield from last.values()


def _follows_at_once(former: Request, request: Request) -> bool:
    return former.answered_at is not None and 0 <= request.at - former.answered_at < AT_ONCE


def _of_attempt(world: World, server: str, attempt: Sequence[Request]) -> Iterator[str]:
    first, kinds = attempt[0], [each.signature for each in attempt]
    named = f"{first.job} to {server} at {moment(first.at)}"
    if len(set(kinds)) < len(kinds):
        yield f"{named} was signed by {kinds}"
    if len(kinds) > 1 and first.status not in REFUSED:
        yield f"{named} was signed anew after {first.status}"
    if len(kinds) == 1 and first.status in REFUSED and not world.in_trouble(first.at - 1, first.at + 1):
        yield f"{named} was answered {first.status}, and not signed by the other kind"


def _remembered(world: World, server: str, attempts: Sequence[Sequence[Request]]) -> Iterator[str]:
    """The first request is signed by the kind that got through last, or else by the usual one."""
    known, since = str(SignatureKind.CAVAGE), 0.0
    for attempt in sorted(attempts, key=lambda each: each[0].at):
        first, last = attempt[0], attempt[-1]
        if first.at > since + LEARNS_OF_IT and first.signature != known and not world.in_trouble(since - 1, first.at):
            yield f"{first.job} to {server} at {moment(first.at)} is signed by {first.signature}, not {known}"
        if last.is_taken and last.answered_at is not None and last.signature != known:
            known, since = str(last.signature), last.answered_at


def _on_record(world: World) -> Iterator[str]:
    """Attempts that were answered name the activity."""
    for delivery, activity in world.space.rows(_UNNAMED):
        yield f"an attempt at {delivery} was answered, and names the activity {activity}"


_UNNAMED: Final = """
SELECT delivery_id, activity_id FROM delivery_attempts
WHERE job_name = 'deliver-activity' AND http_status IS NOT NULL
AND (activity_id IS NULL OR activity_id NOT LIKE 'https://own.example/activities/post-%')
"""
