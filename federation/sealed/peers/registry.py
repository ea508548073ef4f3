"""The servers we know: their keys, their health, and who among them is blacklisted.

Theory of operation. Discovery, rotation and health write the rows; every attempt reads them. Reads go through a cache
of a few seconds, so a burst to one server costs one query. Every write of this process drops the server's entry, and
another process's write is seen when the entry expires. Health is advice (it picks relays), so that lag is harmless. The
blacklist is no part of that cache: see `Blacklist`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import structlog
from sqlalchemy import Connection, bindparam, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlmodel import col

from db import Database, Server, ServerHealth, ServerHealthEvent, among, new_id
from federation.base.cache import LoadingCache
from federation.base.logs import crash
from federation.servers.blacklist import Blacklist
from workers.batching import Batcher
from workers.clock import Clock, SystemClock

log = structlog.get_logger(__name__)

CACHE_TTL = timedelta(seconds=5)
MAX_LOADED: Final = 200

ScheduleHealthCheck = Callable[[str, int], Awaitable[None]]
"""Schedules probe number n (from 0) of a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownServer:
    """One registry row: both public keys in base64, the server's health, and the key of ours by which it knows us.

    `knows_key` None stands for our oldest key.
    """

    url: str
    public_key: str
    encryption_public_key: str
    is_healthy: bool
    health_check_attempts: int
    unhealthy_reason: str | None
    knows_key: str | None = None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStanding:
    """What we know of a server URL: its registry row, if it has one, and whether it is blacklisted."""

    server: KnownServer | None
    blacklisted: bool


class KeysTaken(Exception):
    """Another server is registered with one of these keys."""


class Registry:
    """Reads and writes `server_registry`; `schedule_health_check` is called for each server found unhealthy."""

    def __init__(
        self,
        database: Database,
        *,
        schedule_health_check: ScheduleHealthCheck,
        blacklist: Blacklist | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.database = database
        self._clock = clock or SystemClock()
        self._schedule_health_check = schedule_health_check
        self._blacklist = blacklist or Blacklist(database)
        self._rotation_notes = Batcher(self._write_rotation_notes, MAX_LOADED)
        self._servers = LoadingCache(Batcher(self._load, MAX_LOADED).ask, ttl=CACHE_TTL)

    async def standing(self, url: str) -> ServerStanding:
        """Return what is known of `url`: its row, as `known` returns it, and whether it is blacklisted."""
        return ServerStanding(server=await self.known(url), blacklisted=await self.is_blacklisted(url))

    async def known(self, url: str) -> KnownServer | None:
        """Return the registry row of `url`, matched byte for byte and at most a few seconds old."""
        return await self._servers.get(url)

    async def is_blacklisted(self, url: str) -> bool:
        """Tell whether a rule of the blacklist covers `url`, in any spelling, whether it is registered or not."""
        return await self._blacklist.covering(url) is not None

    async def find(self, url: str) -> KnownServer | None:
        """Return the registry row of `url` as it is now."""
        self._servers.drop(url)
        return await self._servers.get(url)

    async def close(self) -> None:
        """Stop reading, and wait until nothing is being read any more."""
        await self._servers.close()
        await self._blacklist.close()

    def forget(self, url: str) -> None:
        """Drop what is cached of `url`, and check the blacklist before it is used again."""
        self._servers.drop(url)
        self._blacklist.recheck()

    async def register(
        self,
        *,
        url: str,
        public_key: str,
        encryption_public_key: str,
        knows_key: str | None = None,
        session: AsyncSession | None = None,
    ) -> None:
        """Add the server to the registry as healthy, or only note that it was seen again. Existing keys are kept.

        `knows_key` is the key of ours by which a new server will know us; None stands for the oldest. With `session`
        this is part of the caller's transaction, otherwise of one of its own.

        Raises:
            KeysTaken: one of the keys belongs to another URL. The transaction can go on.
        """
        row = partial(
            self.register_within,
            url=url,
            public_key=public_key,
            encryption_public_key=encryption_public_key,
            knows_key=knows_key,
        )
        if session is not None:
            await session.run_sync(row)
            return
        try:
            async with self.database.transaction() as own:
                await own.run_sync(row)
        finally:
            self._servers.drop(url)  # again: what was read before the commit is old

    def register_within(
        self,
        session: Session,
        *,
        url: str,
        public_key: str,
        encryption_public_key: str,
        knows_key: str | None = None,
    ) -> None:
        """Do the same as `register`, within a synchronous caller's transaction."""
        try:
            _upsert(session, url, public_key, encryption_public_key, knows_key, self._clock.now())
        finally:
            self._servers.drop(url)

    async def note_knows(self, url: str, public_key: str) -> None:
        """Note that the server knows us by this key of ours."""
        await self._note_rotation(url, public_key, None)

    async def note_not_rotated(self, url: str, problem: str) -> None:
        """Note that the server was asked to know us by another key, and does not yet.

        `problem` is a code for the reason.
        """
        await self._note_rotation(url, None, problem)

    async def _note_rotation(self, url: str, knows: str | None, problem: str | None) -> None:
        """Write the note, together with others of the same moment: a rotation has thousands, fifty at a time."""
        try:
            note = {"server": url, "knows": knows, "problem": problem, "at": self._clock.now()}
            await self._rotation_notes.ask(note)
        finally:
            self._servers.drop(url)

    async def mark_healthy(self, server_url: str, *, reason: str) -> None:
        """Mark the server as healthy, and reset its probe counter to 0; `reason` says what showed it."""
        now = self._clock.now()
        values = {
            "is_healthy": True,
            "unhealthy_reason": None,
            "health_check_attempts": 0,
            "last_seen": now,
            "updated_at": now,
        }
        if await self._change_health(server_url, values, ServerHealth.HEALTHY, reason, now):
            log.info("server_healthy", server_url=server_url, reason=reason)

    async def mark_unhealthy(self, server_url: str, code: str, *, reason: str | None = None) -> None:
        """Mark the server as unhealthy because of `code`, reset its probe counter to 0, and schedule probe 0.

        `reason` is what its history and the log tell instead, where the original does not know the true code.
        Nothing happens for a server that is not registered. A probe that cannot be scheduled is only logged.
        """
        now = self._clock.now()
        values = {"is_healthy": False, "unhealthy_reason": code, "health_check_attempts": 0, "updated_at": now}
        changed = await self._change_health(server_url, values, ServerHealth.UNHEALTHY, reason or code, now)
        if changed is None:
            return
        if changed:
            log.warning("server_unhealthy", server_url=server_url, code=reason or code)
        try:
            await self._schedule_health_check(server_url, 0)
        except Exception as error:
            log.error("health_check_not_scheduled", server_url=server_url, **crash(error))

    async def count_failed_probe(self, url: str) -> int | None:
        """Count one more failed probe, atomically. Return the new count, or None if the server is gone or healthy."""
        values = {"server": url, "now": self._clock.now()}

        def count(connection: Connection) -> int | None:
            return connection.execute(_PROBE_FAILED, values).scalar_one_or_none()

        try:
            return await self.database.transact(count)
        finally:
            self._servers.drop(url)

    async def _change_health(
        self, url: str, values: Mapping[str, object], state: ServerHealth, reason: str, now: datetime
    ) -> bool | None:
        """Write `values`, and an event if the state changed.

        Return whether it changed, or None if there is no such server.
        """

        def change(connection: Connection) -> bool | None:
            was_healthy = connection.execute(_LOCKED_HEALTH, {"server": url}).scalar_one_or_none()
            if was_healthy is None:
                return None
            connection.execute(_CHANGED, {"server": url, **values})
            before = ServerHealth.HEALTHY if was_healthy else ServerHealth.UNHEALTHY
            if before is not state:
                event = {"server_url": url, "from_state": before, "to_state": state, "reason": reason, "at": now}
                connection.execute(_EVENT, event)
            return before is not state

        try:
            return await self.database.transact(change)
        finally:
            self._servers.drop(url)

    async def _load(self, urls: Sequence[str]) -> list[KnownServer | None]:
        found = {row.url: KnownServer(**row._mapping) for row in await self.database.rows(_KNOWN, {"urls": urls})}
        return [found.get(url) for url in urls]

    async def _write_rotation_notes(self, notes: Sequence[Mapping[str, object]]) -> Sequence[None]:
        in_order = sorted(notes, key=lambda note: str(note["server"]))  # else two processes could wait for each other
        await self.database.transact(lambda connection: connection.execute(_ROTATION_NOTED, in_order))
        return [None] * len(notes)


def _upsert(
    session: Session, url: str, public_key: str, encryption_public_key: str, knows_key: str | None, now: datetime
) -> None:
    if _note_seen(session, url, now):
        return
    row = {
        "id": new_id(),
        "url": url,
        "public_key": public_key,
        "encryption_public_key": encryption_public_key,
        "last_seen": now,
        "created_at": now,
        "updated_at": now,
        "is_healthy": True,
        "health_check_attempts": 0,
        "knows_key": knows_key,
    }
    try:
        with session.begin_nested():
            session.execute(insert(Server).values(row))
    except IntegrityError as error:
        # Another transaction may have registered it between the two statements.
        if not _note_seen(session, url, now):
            raise KeysTaken(f"{url}: one of its keys is registered for another server") from error


def _note_seen(session: Session, url: str, now: datetime) -> bool:
    seen = update(Server).where(col(Server.url) == url).values(last_seen=now, updated_at=now).returning(col(Server.id))
    return (session.execute(seen)).first() is not None


_TABLE = Server.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_LOCKED_HEALTH = select(_TABLE.c.is_healthy).where(_TABLE.c.url == bindparam("server")).with_for_update()
_CHANGED = update(_TABLE).where(_TABLE.c.url == bindparam("server"))
_EVENT = insert(ServerHealthEvent.__table__)  # type: ignore[attr-defined] # SQLModel adds it at run time
_PROBE_FAILED = (
    _CHANGED.where(_TABLE.c.is_healthy.is_(False))
    .values(health_check_attempts=_TABLE.c.health_check_attempts + 1, updated_at=bindparam("now"))
    .returning(_TABLE.c.health_check_attempts)
)
_ROTATION_NOTED = _CHANGED.values(
    knows_key=func.coalesce(bindparam("knows"), _TABLE.c.knows_key),
    rotation_problem=bindparam("problem"),
    rotation_tried_at=bindparam("at"),
)
_KNOWN = select(*(col(getattr(Server, field.name)) for field in fields(KnownServer))).where(
    among(col(Server.url), "urls")
)
