"""The change of our own keys: each server is asked to accept the new pair, and is shown that we hold both.

Theory of operation. The new pair is on the disk before any server is asked, and no answer is needed to go on: a server
that has the new pair already says so, which is how a lost confirmation is found. What a server wants signed or opened
is done only if it has the form of a challenge: it could otherwise have us sign an activity, or open what somebody else
had sealed to us.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, TypeAlias

import structlog
from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlmodel import col

from db import DEFAULT_WIRE, Database, LinkState, Server, ServerLink
from federation.http.client import FederationFetch
from federation.http.errors import BlockedUrl, BodyTooLarge, NetworkError
from federation.http.messages import Response
from federation.protocol.encodings import parse_json
from federation.protocol.errors import ProtocolError
from federation.protocol.keys import KeyRing, OwnKeys, decode_key
from federation.protocol.refusals import MAX_REFUSAL_BYTES
from federation.protocol.rotation import (
    ROTATE_CONFIRM_PATH,
    ROTATE_INIT_PATH,
    confirm_request,
    rotation_request,
    solved,
)
from federation.sealed.peers.registry import KnownServer, Registry
from federation.servers.link_rules import SKEW
from workers.clock import Clock, SystemClock

log = structlog.get_logger(__name__)

STEP_TIMEOUT: Final = timedelta(seconds=30)
AT_ONCE: Final = 50
AGAIN: Final = timedelta(hours=1)
"""How long a server that did not accept the new pair is left alone, unless its link returns."""
MOST_IN_A_RUN: Final = 200
GRACE: Final = timedelta(minutes=10)
"""How long the old pair outlives its last user, for the sake of requests under way."""

_PROBLEMS: Final = {
    403: "BLACKLISTED_THERE",
    405: "NOT_SUPPORTED",
    409: "ROTATION_PENDING",
    429: "RATE_LIMITED",
}

Introduce: TypeAlias = Callable[[str], Awaitable[object]]
Told: TypeAlias = Callable[["Asked"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The result of asking a server. `problem` is a code; without one, the server knows the new pair."""

    url: str
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A server that does not know the new pair."""

    url: str
    problem: str | None
    tried_at: datetime | None


class KeyRotation:
    """Brings the newest pair of *ring* to servers; *introduce* asks a server to register us."""

    def __init__(
        self,
        *,
        own_url: str,
        ring: KeyRing,
        database: Database,
        registry: Registry,
        fetch: FederationFetch,
        introduce: Introduce,
        clock: Clock | None = None,
    ) -> None:
        self._own_url = own_url
        self._ring = ring
        self._database = database
        self._registry = registry
        self._fetch = fetch
        self._introduce = introduce
        self._clock = clock or SystemClock()

    @property
    def newest(self) -> str:
        """The public signing key that every server is to know."""
        return self._ring.pairs(now=True)[0].signing.public_text

    @property
    def is_under_way(self) -> bool:
        """Whether there is an old pair that some server may know us by."""
        return len(self._ring.pairs(now=True)) > 1

    async def waiting(self) -> list[Waiting]:
        """Return the servers that do not know the new pair, healthy ones first. Blacklisted ones are left out."""
        query = (
            select(col(Server.url), col(Server.rotation_problem), col(Server.rotation_tried_at))
            .where(self._needs_old())
            .order_by(col(Server.is_healthy).desc(), col(Server.url))
        )
        async with self._database.read() as session:
            found = [Waiting(url=url, problem=why, tried_at=at) for url, why, at in await session.execute(query)]
        return [each for each in found if not await self._registry.is_blacklisted(each.url)]

    async def ask(self, urls: Sequence[str], told: Told = lambda _: None) -> list[Asked]:
        """Ask each of these servers to accept the new pair, fifty at a time. *told* is called for each when it is done.

        Raises:
            SQLAlchemyError: the database failed.
        """
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(url: str) -> Asked:
            async with slots:
                asked = Asked(url=url, problem=await self._ask(url))
            told(asked)
            return asked

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(url)) for url in urls]
        return [task.result() for task in tasks]

    async def __call__(self) -> Mapping[str, object]:
        """Ask those servers again that did not accept the new pair before: when their link is back, and each hour.

        Servers that we met since the first one was asked are asked, too. All others wait for the command.

        Raises:
            SQLAlchemyError: the database failed.
        """
        if not self.is_under_way:
            return {"asked": 0, "confirmed": 0}
        asked = await self.ask(await self._due())
        return {"asked": len(asked), "confirmed": sum(each.problem is None for each in asked)}

    async def missing(self) -> int:
        """Return how many servers know us by keys that this process lacks, having been started before they were made.

        Raises:
            SQLAlchemyError: the database failed.
        """
        ours = [pair.signing.public_text for pair in self._ring.pairs(now=True)]
        async with self._database.read() as session:
            known = (await session.execute(select(col(Server.url)).where(col(Server.knows_key).not_in(ours)))).scalars()
        return len([url for url in known if not await self._registry.is_blacklisted(url)])

    async def is_over(self) -> bool:
        """Tell whether no server has needed the old pair for ten minutes."""
        if not self.is_under_way or await self.waiting():
            return False
        async with self._database.read() as session:
            last = (await session.execute(select(func.max(Server.rotation_tried_at)))).scalar_one()
        return last is None or last < self._clock.now() - GRACE

    async def prepare(self) -> None:
        """Forget which servers were asked: the results of an earlier rotation say nothing about the next.

        Raises:
            SQLAlchemyError: the database failed.
        """
        asked = update(Server).where(col(Server.rotation_tried_at).is_not(None))
        async with self._database.transaction() as session:
            await session.execute(asked.values(rotation_tried_at=None, rotation_problem=None))

    async def forget_old(self, newest: str) -> None:
        """Note that every server knows the pair with this public signing key: there is no other left."""
        forgotten = update(Server).where(or_(col(Server.knows_key).is_(None), col(Server.knows_key) != newest))
        async with self._database.transaction() as session:
            await session.execute(forgotten.values(knows_key=newest, rotation_problem=None))

    async def _due(self) -> list[str]:
        tried, met = col(Server.rotation_tried_at), col(Server.created_at)
        now = self._clock.now()
        first = select(func.min(tried)).scalar_subquery()  # if there is none, nobody has been asked yet
        query = (
            select(col(Server.url))
            .outerjoin(
                ServerLink, (col(ServerLink.server_url) == col(Server.url)) & (col(ServerLink.wire) == DEFAULT_WIRE)
            )
            .where(
                self._needs_old(),
                func.coalesce(col(ServerLink.state), LinkState.UP) != LinkState.DOWN,
                or_(
                    tried < now - AGAIN,
                    tried > now + SKEW,  # written by a clock that was ahead
                    tried < col(ServerLink.since),
                    and_(tried.is_(None), met > first),
                ),
            )
            .order_by(tried)
            .limit(MOST_IN_A_RUN)
        )
        async with self._database.read() as session:
            urls = list((await session.execute(query)).scalars())
        return [url for url in urls if not await self._registry.is_blacklisted(url)]

    def _needs_old(self) -> ColumnElement[bool]:
        return or_(col(Server.knows_key).is_(None), col(Server.knows_key) != self.newest)

    async def _ask(self, url: str) -> str | None:
        server = await self._registry.find(url)
        if server is None:
            return "NOT_REGISTERED_HERE"
        new = self._ring.pairs(now=True)[0]
        try:
            problem = await self._rotate(server, new)
        except NetworkError as error:
            problem = error.code.value
        except BlockedUrl:
            problem = "BLOCKED_URL"
        except BodyTooLarge:
            problem = "BODY_TOO_LARGE"
        except ProtocolError:
            problem = "BAD_CHALLENGE"
        if problem is None:
            await self._registry.note_knows(url, new.signing.public_text)
        else:
            await self._registry.note_not_rotated(url, problem)
        log.info("key_rotation", server_url=url, problem=problem)
        return problem

    async def _rotate(self, server: KnownServer, new: OwnKeys) -> str | None:
        """Ask one server to accept the new pair. Return the problem, or None if it knows the new pair.

        Raises:
            OutboundError: it did not answer.
            ProtocolError: its answer is no challenge, or its key is unusable.
        """
        response = await self._post(server, ROTATE_INIT_PATH, rotation_request(self._own_url, new))
        if response.status == 400 and "already registered" in (_error(response) or ""):
            return None
        if response.status == 404:
            return await self._meet(server, new) if _error(response) is not None else "NOT_SUPPORTED"
        if not response.ok:
            return _problem(response)
        key = decode_key(server.encryption_public_key, what="registered encryption key")
        proofs = solved(response.body, new=new, ring=self._ring)
        response = await self._post(server, ROTATE_CONFIRM_PATH, confirm_request(self._own_url, proofs, key))
        return None if response.ok else _problem(response)

    async def _meet(self, server: KnownServer, new: OwnKeys) -> str | None:
        """Introduce ourselves to a server that does not know us: it has no key to replace."""
        await self._introduce(server.url)
        met = await self._registry.find(server.url)
        return None if met is not None and met.knows_key == new.signing.public_text else "UNKNOWN_THERE"

    async def _post(self, server: KnownServer, path: str, body: bytes) -> Response:
        headers = {
            "Content-Type": "application/json",
            "Origin": self._own_url,
            "X-Federation-Origin": self._own_url,
        }
        fetched = await self._fetch(
            server.url + path,
            method="POST",
            headers=headers,
            body=body,
            timeout=STEP_TIMEOUT,
            server_url=server.url,
            skip_health_update=True,
        )
        return fetched.response


def _problem(response: Response) -> str:
    return _PROBLEMS.get(response.status, f"HTTP_{response.status}")


def _error(response: Response) -> str | None:
    """Return the text with which an endpoint refuses, or None if there is no such endpoint."""
    try:
        refusal = parse_json(response.body, limit=MAX_REFUSAL_BYTES)
    except ProtocolError:
        return None
    error = refusal.get("error") if isinstance(refusal, dict) else None
    return error if isinstance(error, str) else None
