"""Owes a note in alice's name: `python hello.py ALICE BOB INBOX "hello, fediverse"`."""

import asyncio
import sys

import federation
from federation import activitypub


async def main(alice: str, bob: str, inbox: str, text: str) -> None:
    note = {"id": f"{alice}/notes/1", "type": "Note", "attributedTo": alice, "to": [bob], "content": text}
    async with federation.transaction() as session:  # commits at the end; your own writes go into the same session
        await activitypub.add_actor(session, alice)  # her keys, unless they are there already
        sent = await activitypub.send(session, activitypub.create(note), [activitypub.Recipient(id=bob, inbox=inbox)])
    print(f"{sent.activity_id} is owed to {len(sent.delivery_ids)} inbox")


asyncio.run(main(*sys.argv[1:]))
