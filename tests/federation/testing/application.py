"""What an application does, as far as tests of nodes and remote servers need one."""

from __future__ import annotations

import federation
from federation import activitypub, sync
from federation.activitypub import Recipient, Sent
from federation.testing.node import LocalNode


def alice_of(node: LocalNode) -> str:
    return f"{node.url}/users/alice"


def note_of(actor: str, number: int = 1) -> dict[str, object]:
    note = {"id": f"{actor}/notes/{number}", "type": "Note", "attributedTo": actor, "content": f"note {number}"}
    return activitypub.create({**note, "to": [activitypub.PUBLIC]})


async def join(node: LocalNode) -> str:
    """Alice has an account."""
    async with federation.transaction() as session:
        await activitypub.add_actor(session, alice_of(node))
    return alice_of(node)


async def post(node: LocalNode, *to: Recipient, number: int = 1) -> Sent:
    """Alice posts a note, to all her followers unless it is for somebody."""
    async with federation.transaction() as session:
        activity = note_of(alice_of(node), number)
        return await activitypub.send(session, activity, to=to or activitypub.FOLLOWERS)


def join_plainly(node: LocalNode) -> str:
    with sync.transaction() as session:
        sync.activitypub.add_actor(session, alice_of(node))
    return alice_of(node)


def post_plainly(node: LocalNode, *to: Recipient, number: int = 1) -> Sent:
    with sync.transaction() as session:
        activity = note_of(alice_of(node), number)
        return sync.activitypub.send(session, activity, to=to or activitypub.FOLLOWERS)
