"""Keeps notes that others send: the workers of a node call `keep` by `FEDERATION_TASKS=replies`.

`python replies.py` shows them, and makes their table.
"""

import asyncio
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

import federation
from federation import activitypub
from federation.activitypub import IncomingActivity

TABLE = text("CREATE TABLE IF NOT EXISTS replies (author TEXT, content TEXT)")
KEEP = text("INSERT INTO replies VALUES (:author, :content)")
SHOW = text("SELECT author, content FROM replies")


@activitypub.on("Create")
async def keep(session: AsyncSession, activity: IncomingActivity, actor: str) -> None:
    note: Any = activity.object
    if isinstance(note, dict) and note.get("type") == "Note" and activity.vouches(note):  # nobody else's, says he
        await session.execute(KEEP, {"author": actor, "content": note.get("content")})


async def main() -> None:
    async with federation.transaction() as session:
        await session.execute(TABLE)
        for author, content in await session.execute(SHOW):
            print(f"{author} says: {content}")


if __name__ == "__main__":
    asyncio.run(main())
