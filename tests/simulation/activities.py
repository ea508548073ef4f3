"""What the application of a world sends by ActivityPub, in the name of its only actor, and how that is owed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncSession

from federation.activitypub.activities import PUBLIC, create, delete, follow, undo
from federation.activitypub.keys import public_pem, seal
from federation.activitypub.outbound import Recipient, Sent
from federation.runtime.composition import Federation
from tests.simulation.inboxes import SHARED_INBOX, inbox_path
from tests.simulation.loop import START
from tests.simulation.node import own_keys
from tests.simulation.own_actor import ACTOR, KEY_ID, OWN_URL, private_key
from tests.simulation.plan import PlannedDelivery
from tests.simulation.servers import server_url

ACTIVITIES: Final = f"{OWN_URL}/activities/"
FOLLOWS_EACH: Final = 3
"""Each so-manieth line of activities is about a follow, and the others about notes."""
DELETED: Final = 3
"""The place in its line of what takes a note back."""


@cache
def actor_rows() -> Sequence[tuple[str, tuple[object, ...]]]:
    """The actor and its key as the database has them, which saves a key for each world."""
    now, sealed = START.strftime("%Y-%m-%d %H:%M:%S.%f"), seal(private_key(), own_keys().signing.secret)
    key = (KEY_ID, ACTOR, "rsa", sealed, public_pem(private_key()), now, now)
    return (
        ("INSERT INTO activitypub_actors (id, name, created_at, is_instance) VALUES (?, '', ?, 0)", (ACTOR, now)),
        (
            "INSERT INTO activitypub_keys (key_id, actor_id, kind, private, public_pem, created_at, use_from)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            key,
        ),
    )


class Author:
    """Makes activities: of a line about one note a Create, its Updates and its Delete, or a Follow and its Undo."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._follows: dict[str, Mapping[str, Any]] = {}

    def activity(self, planned: PlannedDelivery, name: str) -> Mapping[str, Any]:
        """The next one of the line of that delivery."""
        line = planned.ordering_key or name
        place = self._places.get(line, 0)
        self._places[line] = place + 1
        made_id = ACTIVITIES + name
        if planned.ordering_key is not None and sum(line.encode()) % FOLLOWS_EACH == 0:
            if place == 0:
                asked = follow(ACTOR, f"{server_url(planned.servers[0])}/users/bob", activity_id=made_id)
                return self._follows.setdefault(line, asked)
            return undo(self._follows[line], activity_id=made_id)
        note = {"id": f"{ACTOR}/notes/{line}", "type": "Note", "attributedTo": ACTOR, "to": [PUBLIC], "content": "hi"}
        if place == 0:
            return create(note, activity_id=made_id)
        if place < DELETED:
            return {**create(note, activity_id=made_id), "type": "Update"}
        return delete(ACTOR, str(note["id"]), activity_id=made_id)


def recipients(planned: PlannedDelivery, numbers: Iterable[int]) -> list[Recipient]:
    """Who is to have it: of each server two users with one inbox between them, or one with an inbox of its own."""
    found: list[Recipient] = []
    for number in numbers:
        server = server_url(number)
        names = ("bob", "carol") if planned.user is None else (planned.user,)
        shared = server + SHARED_INBOX if planned.user is None else None
        found += [
            Recipient(id=f"{server}/users/{name}", inbox=server + inbox_path(name), shared_inbox=shared)
            for name in names
        ]
    return found


def inbox_of(recipient: Recipient) -> str:
    """Where the recipient is reached."""
    return recipient.shared_inbox or recipient.inbox


def server_of(recipient: Recipient) -> str:
    return recipient.id.partition("/users")[0]


async def blacklisted_among(federation: Federation, to: Iterable[Recipient]) -> frozenset[str]:
    return frozenset(await federation.blacklist.covered({server_of(each) for each in to}))


async def owe(
    federation: Federation,
    session: AsyncSession,
    activity: Mapping[str, Any],
    to: Sequence[Recipient],
    blacklisted: frozenset[str],
) -> Sent:
    """As `activitypub.send` does, which asks for the node of its loop."""
    parts = federation.activitypub
    assert parts is not None
    addressed = parts.senders.addressed(activity, to)
    work = partial(parts.senders.send, addressed=addressed, blacklisted=blacklisted, plan=federation.outbox.plan)
    return await federation.outbox.within(session, work, "activitypub.send")
