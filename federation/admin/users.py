"""Local users of a node that has no host application: the rows of the minimal table `user`.

Where a host has that table, the users are the host's: half a user, without what else the host keeps, would be worse
than none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError
from sqlmodel import col

from db import Database, User
from db.host import columns_of_host, missing_of_host
from federation.base.audit import Order, noted
from federation.base.errors import ConfigurationError
from federation.base.settings.reach import HOST_ADVICE, enumerated

MAX_ID_LENGTH: Final = 512
"""The greatest length of users' ids in activities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUser:
    """A user of this node; see `db.User`."""

    id: str
    is_private: bool = False
    post_propagation_policy: str = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserPage:
    """Some users by id, and the id to go on after, which is None at the end."""

    users: list[LocalUser]
    after: str | None


async def add(database: Database, user: LocalUser, *, order: Order | None = None) -> bool:
    """Make a user; False if there is one of that id, which stays as it is.

    Raises:
        ValueError: the id is empty, too long, or holds what no activity can carry.
        ConfigurationError: there is no table of users, or it is the host application's own.
    """
    _require_id(user.id)
    try:
        async with database.transaction() as session:
            await (await session.connection()).run_sync(_require_minimal)
            await session.execute(insert(User).values(asdict(user)))
            if order is not None:
                await session.execute(noted(order, affected=1))
    except IntegrityError:
        return False
    return True


async def list_users(database: Database, *, limit: int, after: str | None = None) -> UserPage:
    """Return users by id, those of a host application, too.

    Raises:
        ConfigurationError: there is no table of users.
    """
    query = select(col(User.id), col(User.is_private), col(User.post_propagation_policy)).order_by(col(User.id))
    if after is not None:
        query = query.where(col(User.id) > after)
    async with database.read() as session:
        await (await session.connection()).run_sync(require_table, "user")
        rows = (await session.execute(query.limit(limit + 1))).all()
    users = [
        LocalUser(
            id=each.id,
            is_private=bool(each.is_private),
            post_propagation_policy=each.post_propagation_policy or "all",
        )
        for each in rows[:limit]
    ]
    return UserPage(users=users, after=users[-1].id if len(rows) > limit else None)


def _require_id(text: str) -> None:
    if not text.strip() or len(text) > MAX_ID_LENGTH or not text.isprintable():
        raise ValueError(f"a user's id has 1 to {MAX_ID_LENGTH} printable characters")


def require_table(connection: Connection, table: str) -> None:
    """Require one of the host application's tables, with the columns that we use.

    Raises:
        ConfigurationError: names what is missing, and what makes it.
    """
    lacking = [name for name in missing_of_host(connection) if name.partition(".")[0] == table]
    if lacking:
        raise ConfigurationError([f"the database lacks {enumerated(lacking)}: {HOST_ADVICE}"])


def _require_minimal(connection: Connection) -> None:
    require_table(connection, "user")
    more = columns_of_host(connection, "user")
    if more:
        has = enumerated(more)
        raise ConfigurationError([f"the table user is a host application's own (it has {has}): let that add users"])
