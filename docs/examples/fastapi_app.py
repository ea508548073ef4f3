"""A FastAPI application: notes that another server shall have, by plain and by asynchronous endpoints."""

import json
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated
from urllib.parse import parse_qs

import uvicorn
from fastapi import Depends, FastAPI, Request
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, insert
from sqlalchemy.orm import Session

import federation
import federation.sync
from db.url import parse_url

engine = create_engine(parse_url(os.environ["DATABASE_URL"]))
notes = Table("notes", MetaData(), Column("id", Integer, primary_key=True), Column("text", Text))
notes.create(engine, checkfirst=True)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await federation.close_federation()


app = FastAPI(lifespan=lifespan)


async def form(request: Request) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}


def post(fields: dict[str, str]) -> str:
    note = {"id": str(uuid.uuid4()), "text": fields["text"]}
    return json.dumps({"method": "FEDERATE_POST", "federationUrl": os.environ["BETTER_AUTH_URL"], "post": note})


@app.post("/notes")
def add_note(fields: Annotated[dict[str, str], Depends(form)]) -> dict[str, str]:
    with Session(engine) as session, session.begin():
        session.execute(insert(notes).values(text=fields["text"]))
        delivery = federation.sync.enqueue_delivery(
            session, "deliver-post", fields["server"] + "/api/auth/social/posts", fields["server"], post(fields)
        )
        if fields["text"] == "bad":
            raise ValueError("the block raises: neither note nor delivery was ever there")
    return {"delivery": delivery}


@app.post("/async-notes")
async def add_note_asynchronously(fields: Annotated[dict[str, str], Depends(form)]) -> dict[str, str]:
    async with federation.transaction() as session:  # or an AsyncSession of your own
        await session.execute(insert(notes).values(text=fields["text"]))
        delivery = await federation.enqueue_delivery(
            session, "deliver-post", fields["server"] + "/api/auth/social/posts", fields["server"], post(fields)
        )
        if fields["text"] == "bad":
            raise ValueError("the block raises: neither note nor delivery was ever there")
    return {"delivery": delivery}


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "5000")), log_level="warning")
