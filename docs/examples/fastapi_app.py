"""A FastAPI application: notes that are posts, too, for the servers that their author posts to.

It has a plain and an asynchronous endpoint.
"""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated
from urllib.parse import parse_qs

import uvicorn
from dotenv import load_dotenv
from fastapi import Depends, FastAPI, Request
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, insert
from sqlalchemy.orm import Session

import federation
import federation.sync
from db.url import parse_url

load_dotenv(".env")  # as the node reads it; what the environment has goes first
url = os.environ.get("DATABASE_URL") or sys.exit("start this in a node's folder, which `federation init` makes")
engine = create_engine(parse_url(url))
notes = Table("notes", MetaData(), Column("id", Integer, primary_key=True), Column("text", Text))
notes.create(engine, checkfirst=True)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await federation.close_federation()


app = FastAPI(lifespan=lifespan)


async def form(request: Request) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}


@app.post("/notes")
def add_note(fields: Annotated[dict[str, str], Depends(form)]) -> dict[str, object]:
    with Session(engine) as session, session.begin():
        session.execute(insert(notes).values(text=fields["text"]))
        content = [{"type": "text", "value": fields["text"]}]
        post = federation.sync.publish_post(session, author_id=fields["author"], content=content)
        if fields["text"] == "bad":
            raise ValueError("the block raises: neither note nor delivery was ever there")
    return {"post": post.post_id, "deliveries": post.delivery_ids}


@app.post("/async-notes")
async def add_note_asynchronously(fields: Annotated[dict[str, str], Depends(form)]) -> dict[str, object]:
    async with federation.transaction() as session:  # or an AsyncSession of your own
        await session.execute(insert(notes).values(text=fields["text"]))
        content = [{"type": "text", "value": fields["text"]}]
        post = await federation.publish_post(session, author_id=fields["author"], content=content)
        if fields["text"] == "bad":
            raise ValueError("the block raises: neither note nor delivery was ever there")
    return {"post": post.post_id, "deliveries": post.delivery_ids}


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "5000")), log_level="warning")
