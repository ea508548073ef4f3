"""The local users in whose name activities are sent: rows of the host application's table."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.orm import Session
from sqlmodel import col

from db import Database, User
from db.errors import is_outage
from federation.base.errors import ConfigurationError
from federation.base.settings.reach import HOST_ADVICE


class UnknownUser(ValueError):
    """This node has no such user."""

    def __init__(self, user_id: str) -> None:
        super().__init__(f"there is no user {user_id!r} here; `federation users list` shows who is")


def policy_of(session: Session, user_id: str) -> str | None:
    """Return to which servers the local user's posts go. What the session is yet to write counts, too.

    Raises:
        UnknownUser: this node has no such user.
        ConfigurationError: it has no table of users, or not the columns that are read.
    """
    session.flush()
    chosen = select(col(User.post_propagation_policy)).where(col(User.id) == user_id)
    try:
        found = session.execute(chosen).one_or_none()
    except (OperationalError, ProgrammingError) as error:
        if is_outage(error):
            raise
        why = type(error.orig).__name__
        raise ConfigurationError([f"the table user cannot be read ({why}): {HOST_ADVICE}"]) from error
    if found is None:
        raise UnknownUser(user_id)
    return found[0]


async def is_stored(database: Database, user_id: str) -> bool:
    """Tell whether the user is in the database, without the transaction of a caller who may have just made it.

    On SQLite that would have the only write lock from then on, also while a stranger's server is asked something.

    Raises:
        ConfigurationError: as `policy_of`.
    """
    async with database.read() as session:
        try:
            await session.run_sync(policy_of, user_id)
        except UnknownUser:
            return False
    return True
