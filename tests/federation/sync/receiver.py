"""A second node, as it is in life: a process on a database of its own, which accepts or refuses what it is sent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import insert, select
from sqlmodel import col

from db import Database, Follow, Post, User
from db.migrate import upgrade
from federation.base.settings.settings import Settings
from federation.protocol.keys import OwnKeys
from federation.runtime.composition import Federation
from federation.runtime.nodes import get_federation
from federation.sealed.peers.registry import Registry
from tests import warm
from tests.federation.conftest import OWN_URL
from tests.federation.protocol.vectors import A, B
from tests.patience import PATIENCE_SECONDS, until
from tests.servers import free_port

AUTHOR = "alice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """A node that serves at `url`, and knows the sending one."""

    url: str
    database: Database

    async def texts(self) -> list[str]:
        """Those of the posts that it has taken."""
        async with self.database.read() as session:
            contents = (await session.execute(select(col(Post.content)))).scalars().all()
        return sorted(str(block["value"]) for content in contents for block in content)  # type: ignore[union-attr, call-overload, index] # JSON of posts


@asynccontextmanager
async def process(*arguments: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process in this one's environment and these variables, ended with the block."""
    child = await asyncio.create_subprocess_exec(
        warm.PYTHON, *arguments, env={**os.environ, **environment}, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await child.wait()


async def listening(child: asyncio.subprocess.Process, port: int) -> None:
    """It has begun to serve."""

    async def answers() -> bool:
        assert child.returncode is None, "the process ended"
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    await until(answers)


@asynccontextmanager
async def receiving(folder: Path) -> AsyncIterator[Receiver]:
    """A node that this process's node knows, and where somebody follows its user `AUTHOR`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {
        "BETTER_AUTH_URL": url,
        "FEDERATION_PORT": str(port),
        "DATABASE_URL": f"sqlite:///{folder / 'receiver.sqlite3'}",
        "DEV_ALLOWED_HOSTNAMES": "127.0.0.1",
        **B.env,
    }
    await asyncio.to_thread(upgrade, environment["DATABASE_URL"], host_tables=True)
    there = Federation(Settings.from_values(environment))
    await _know(there.registry, OWN_URL, A.keys)
    own = get_federation()
    await _know(own.registry, url, B.keys)
    async with own.database.transaction() as session:
        await session.execute(insert(User).values(id=AUTHOR))
        followed = {"id": "f", "follower_id": "bob", "following_id": AUTHOR, "following_server_url": url}
        await session.execute(insert(Follow).values(**followed, accepted=True, created_at=datetime.now(UTC)))
    try:
        async with process("-m", "federation", "node", "serve", **environment, REDIS_URL="") as child:
            await listening(child, port)
            yield Receiver(url=url, database=there.database)
    finally:
        await there.close()


async def _know(registry: Registry, url: str, keys: OwnKeys) -> None:
    await registry.register(
        url=url, public_key=keys.signing.public_text, encryption_public_key=keys.encryption.public_text
    )
