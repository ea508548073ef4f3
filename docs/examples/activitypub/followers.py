"""A script by which an actor of this node sends a note to all its followers: `python followers.py ACTOR "hello"`."""

import asyncio
import sys
import uuid

import federation
from federation import activitypub


async def main(actor: str, text: str) -> None:
    note = {
        "id": f"{actor}/notes/{uuid.uuid4()}",
        "type": "Note",
        "attributedTo": actor,
        "to": [f"{actor}/followers"],
        "content": text,
    }
    async with federation.transaction() as session:
        sent = await activitypub.send(session, activitypub.create(note), to=activitypub.FOLLOWERS)
    print(f"{sent.activity_id} is owed to {len(sent.delivery_ids)} inboxes")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
