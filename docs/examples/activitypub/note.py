"""A script by which an actor of this node sends a note: `python note.py ACTOR TO INBOX "hello"`."""

import asyncio
import sys
import uuid
from datetime import UTC, datetime

import federation
from federation import activitypub


async def main(actor: str, to: str, inbox: str, text: str) -> None:
    note = {
        "@context": "https://www.w3.org/ns/activitystreams",
        "id": f"{actor}/notes/{uuid.uuid4()}",
        "type": "Note",
        "attributedTo": actor,
        "to": [to],
        "cc": [activitypub.PUBLIC],
        "published": datetime.now(UTC).isoformat(timespec="seconds"),
        "content": text,
    }
    async with federation.transaction() as session:  # commits at the end; your own writes go into the same session
        await activitypub.add_actor(session, actor)  # its keys, unless they are there already
        recipients = [activitypub.Recipient(id=to, inbox=inbox)]
        sent = await activitypub.send(session, activitypub.create(note), recipients)
    print(f"{sent.activity_id} is owed to {len(sent.delivery_ids)} inbox")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
