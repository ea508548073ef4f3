"""Check-then-insert where there is no unique constraint to rely on."""

from __future__ import annotations

import hashlib

from sqlalchemy import BigInteger, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession


async def one_at_a_time(session: AsyncSession, *subject: str) -> None:
    """Make every other transaction that asks for the same *subject* wait here until this one ends.

    What the first one commits is visible to the queries of the next. The tables of existing nodes have no unique
    constraint on what a peer may repeat, and may hold repetitions already, so none can be added. SQLite needs no lock:
    its write transactions exclude each other from their first statement on.
    """
    if session.get_bind().dialect.name != "postgresql":
        return
    digest = hashlib.sha256("\0".join(subject).encode()).digest()
    key = int.from_bytes(digest[:8], "big", signed=True)
    await session.execute(select(func.pg_advisory_xact_lock(cast(key, BigInteger))))
