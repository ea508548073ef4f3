"""What follows the commit of a session: the jobs of the deliveries that were owed in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import event
from sqlalchemy.orm import Session

from federation.delivery.owing import Planned

_KEY: Final = "federation.outbox"


@dataclass(slots=True)
class Pending:
    """What one session's transaction will add."""

    planned: list[Planned] = field(default_factory=list)

    def take(self, session: Session) -> list[Planned]:
        """Those whose row is part of the transaction: a savepoint rolled back takes its rows out of the session."""
        planned, self.planned = self.planned, []
        return [each for each in planned if each.stored in session]


def pending_of(session: Session) -> Pending | None:
    """What the session's transaction will add, None if nothing follows it yet."""
    pending: Pending | None = session.info.get(_KEY)
    return pending


def set_pending(session: Session, pending: Pending) -> None:
    """Whoever commits the session asks `pending` himself."""
    session.info[_KEY] = pending


def follow_commit(session: Session, add: Callable[[list[Planned]], None]) -> Pending:
    """`add` is called after each commit of the session, with what was planned in it."""
    pending = Pending()
    set_pending(session, pending)

    @event.listens_for(session, "after_commit")
    def committed(_session: Session) -> None:
        if session.in_nested_transaction():  # a savepoint ended, the transaction goes on
            return
        planned = pending.take(session)
        if planned:
            add(planned)

    return pending
