"""Alice, and notes in her name, in a node's folder: `uvicorn --env-file .env activitypub_fastapi:app` serves them."""

import os

from fastapi import FastAPI

import federation
from federation import activitypub

app, alice = FastAPI(), os.environ["BETTER_AUTH_URL"] + "/users/alice"


@app.post("/notes")
async def add_note(text: str, to: str, inbox: str) -> list[str]:
    recipient, note_id = activitypub.Recipient(id=to, inbox=inbox), f"{alice}/notes/{os.urandom(8).hex()}"
    note = {"id": note_id, "type": "Note", "attributedTo": alice, "to": [to], "content": text}
    async with federation.transaction() as session:  # or an AsyncSession of your own, with your own writes
        await activitypub.add_actor(session, alice)  # her keys, unless they are there already
        sent = await activitypub.send(session, activitypub.create(note), [recipient])
    return [*sent.delivery_ids]


app.mount("/", activitypub.asgi())  # `actor=` returns documents of your own
