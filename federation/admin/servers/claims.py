"""Keys that two servers show: one is registered with it, the other claims it, without success so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import or_, select
from sqlalchemy.orm import aliased
from sqlmodel import col

from db import Database, Server
from federation.sealed.peers.claims import CLAIM_AGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`claimed_by` shows a key with which `holder` is registered, and did so last at the time `at`.

    `proved` says that it has proved to hold that key, `holder_proved` that the holder has.
    """

    holder: str
    claimed_by: str
    at: datetime
    proved: bool
    holder_proved: bool

    def __str__(self) -> str:
        told = f"{self.claimed_by} shows a key with which {self.holder} is registered"
        if not self.proved:
            nor = "" if self.holder_proved else ", which never did, either"
            return f"{told}, and did not prove to hold it{nor}"
        return f"{told}, and can open what is sealed to it" + (", as can that one" if self.holder_proved else "")


async def claims(database: Database, url: str | None = None) -> Sequence[Claim]:
    """Return the claims of the last week, those that were proved first; with a *url*, those that concern that server.

    A claimant that has been registered since, with whatever keys, no longer claims anything.
    """
    claimant = aliased(Server)
    query = (
        select(
            col(Server.url),
            col(Server.claimed_by),
            col(Server.claimed_at),
            col(Server.claim_proved),
            col(Server.proved_at),
        )
        .outerjoin(claimant, col(claimant.url) == col(Server.claimed_by))
        .where(col(Server.claimed_at) > datetime.now(UTC) - CLAIM_AGE, col(claimant.url).is_(None))
        .order_by(col(Server.claim_proved).desc(), col(Server.claimed_at).desc())
    )
    if url is not None:
        query = query.where(or_(col(Server.url) == url, col(Server.claimed_by) == url))
    async with database.read() as session:
        return [
            Claim(holder=holder, claimed_by=by, at=at, proved=bool(proved), holder_proved=proved_at is not None)
            for holder, by, at, proved, proved_at in await session.execute(query)
            if by is not None and at is not None
        ]
