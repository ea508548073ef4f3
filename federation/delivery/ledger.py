"""What became of each delivery, written to the database in groups.

Theory of operation. Attempts run side by side, and each writes twice: before it sends, and when it knows the outcome.
One transaction per write would cost more than the delivery, so concurrent writes share one: each caller hands in its
entry and waits; a single loop takes all that has gathered and commits it, under load after a few milliseconds in which
more may come. A caller returns only after its entry is committed, so everything an attempt reported is on disk before
its job is settled. Every entry may be repeated: a crash between the commit and the settling of the job runs the attempt
again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, bindparam, delete, tuple_, update
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.sql.dml import ReturningUpdate

from db import Database, DeliveryJob, Follow
from federation.delivery.payloads import release

MAX_GROUP: Final = 500
MAX_ERROR_CHARACTERS: Final = 1_000
LINGER_SECONDS: Final = 0.005
"""How long a group is waited for under load: a commit costs as much as several entries."""

FollowKey: TypeAlias = tuple[str, str, str]

_REFUSED: Final = (DataError, IntegrityError, UnicodeError)
"""Blames an entry, not the database. The last is what a text without a UTF-8 form raises, bare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """The delivery is about to be sent."""

    delivery_id: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowAnswer:
    """What the other server says of our follow: accepted; or only that it knows of it."""

    follower_id: str
    following_id: str
    server_url: str
    accepted: bool

    @property
    def key(self) -> FollowKey:
        """What tells the follow from all others."""
        return self.follower_id, self.following_id, self.server_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """The delivery is over: row and text are removed, in the transaction that applies the answer to a follow."""

    delivery_id: str
    follow: FollowAnswer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The delivery failed for good; its row stays for a while, with the reason."""

    delivery_id: str
    outcome: str
    error: str
    code: str
    at: datetime


Entry: TypeAlias = Attempted | Gone | Settled


class Ledger:
    """Group commit for delivery rows. `write` may be called by any number of tasks of one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[Entry, asyncio.Future[bool]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._crowded = False  # whether the last group had more than one entry

    async def attempted(self, delivery_id: str) -> None:
        """The row's counter is one higher and its last attempt is now; nothing happens without a row."""
        await self.write(Attempted(delivery_id=delivery_id, at=datetime.now(UTC)))

    async def gone(self, delivery_id: str, *, follow: FollowAnswer | None = None) -> bool:
        """The row is removed and the follow updated, both or neither. False: no such follow is known here."""
        return await self.write(Gone(delivery_id=delivery_id, follow=follow))

    async def settled(self, delivery_id: str, *, outcome: str, error: str, code: str) -> None:
        """The row says that, when and why the delivery failed for good; it can be found for 7 days.

        `code` is that of the attempt which ended it.
        """
        error = error.replace("\x00", "")[:MAX_ERROR_CHARACTERS]
        now = datetime.now(UTC)
        await self.write(Settled(delivery_id=delivery_id, outcome=outcome, error=error, code=code, at=now))

    async def write(self, entry: Entry) -> bool:
        """The entry is committed.

        Raises:
            SQLAlchemyError: it was not; the whole attempt is worth repeating.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, future))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_groups(), name="delivery-ledger")
        return await future

    async def close(self) -> None:
        """What was handed in is committed, or has failed."""
        if self._writer is not None:
            await asyncio.wait([self._writer])

    async def _write_groups(self) -> None:
        try:
            while self._waiting:
                # A lone attempt is joined only by those of this same turn of the loop.
                await asyncio.sleep(LINGER_SECONDS if self._crowded else 0)
                group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
                self._crowded = len(group) > 1
                await self._write_group(group)
        finally:
            self._writer = None

    async def _write_group(self, group: Sequence[tuple[Entry, asyncio.Future[bool]]]) -> None:
        try:
            entries = [entry for entry, _ in group]
            results = await self._database.transact(lambda connection: _write(connection, entries))
        except _REFUSED as error:
            if len(group) == 1:
                _fail(group, error)
                return
            for member in group:  # one entry the database refuses must not fail its neighbours
                await self._write_group([member])
        except Exception as error:
            _fail(group, error)
        else:
            for (_, future), result in zip(group, results, strict=True):
                if not future.done():
                    future.set_result(result)


def _write(connection: Connection, entries: Sequence[Entry]) -> list[bool]:
    """Whether each entry found what it is about; each kind is one statement, however many there are."""
    attempted = [entry for entry in entries if isinstance(entry, Attempted)]
    for ids in _rounds(entry.delivery_id for entry in attempted):
        connection.execute(_ATTEMPTED, {"rows": ids, "at": max(entry.at for entry in attempted)})
    settled = [
        {"row": e.delivery_id, "at": e.at, "how": e.outcome, "why": e.error, "code": e.code}
        for e in entries
        if isinstance(e, Settled)
    ]
    if settled:
        connection.execute(_SETTLED, settled)
    gone = [entry for entry in entries if isinstance(entry, Gone)]
    if gone:
        release(connection, connection.execute(_GONE, {"rows": [entry.delivery_id for entry in gone]}).scalars())
    answers = [entry.follow for entry in gone if entry.follow is not None]
    known = _answer(connection, _ACCEPTED, [answer for answer in answers if answer.accepted])
    known |= _answer(connection, _ACKNOWLEDGED, [answer for answer in answers if not answer.accepted])
    return [not isinstance(entry, Gone) or entry.follow is None or entry.follow.key in known for entry in entries]


def _rounds(ids: Iterable[str]) -> Iterator[list[str]]:
    """Lists without repetitions, together as many of each id as there were."""
    counts = Counter(ids)
    while counts:
        yield list(counts)
        counts -= Counter(counts.keys())


def _answer(connection: Connection, statement: ReturningUpdate[Any], answers: Sequence[FollowAnswer]) -> set[FollowKey]:
    if not answers:
        return set()
    follows = connection.execute(statement, {"follows": [answer.key for answer in answers]})
    return {(row.follower_id, row.following_id, row.follower_server_url) for row in follows}


_TABLE = DeliveryJob.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time; Core statements skip the ORM

_ROWS = _TABLE.c.id.in_(bindparam("rows", expanding=True))
_ATTEMPTED = update(_TABLE).where(_ROWS).values(attempts=_TABLE.c.attempts + 1, last_attempted_at=bindparam("at"))
_GONE = delete(_TABLE).where(_ROWS).returning(_TABLE.c.payload_id)
_SETTLED = (
    update(_TABLE)
    .where(_TABLE.c.id == bindparam("row"))
    .values(
        settled_at=bindparam("at"),
        outcome=bindparam("how"),
        last_error=bindparam("why"),
        error_code=bindparam("code"),
    )
)

_FOLLOWS = Follow.__table__  # type: ignore[attr-defined] # as above
_KEY = (_FOLLOWS.c.follower_id, _FOLLOWS.c.following_id, _FOLLOWS.c.follower_server_url)
_FOLLOW = update(_FOLLOWS).where(tuple_(*_KEY).in_(bindparam("follows", expanding=True))).returning(*_KEY)
# A rejection and "received, not decided" look the same on this wire: only `acknowledged` is set.
_ACCEPTED = _FOLLOW.values(accepted=True)
_ACKNOWLEDGED = _FOLLOW.values(acknowledged=True)


def _fail(group: Sequence[tuple[Entry, asyncio.Future[bool]]], error: Exception) -> None:
    for _, future in group:
        if not future.done():
            future.set_exception(error)
