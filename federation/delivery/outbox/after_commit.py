"""What follows the commit of a session: adding the jobs of the deliveries that were owed in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import event
from sqlalchemy.orm import Session

from federation.delivery.outbox.insert import Planned

_KEY: Final = "federation.outbox"


@dataclass(slots=True)
class Pending:
    """The jobs that one session's transaction will lead to."""

    planned: list[Planned] = field(default_factory=list)

    def take(self, session: Session) -> list[Planned]:
        """Remove and return the jobs whose row is part of the transaction.

        A savepoint that is rolled back takes its rows out of the session, and with them their jobs.
        """
        planned, self.planned = self.planned, []
        return [each for each in planned if each.stored in session]


def pending_of(session: Session) -> Pending | None:
    """Return what the session's transaction will add, or None if nothing follows it yet."""
    pending: Pending | None = session.info.get(_KEY)
    return pending


def set_pending(session: Session, pending: Pending) -> None:
    """Attach `pending` to the session. Whoever commits the session has to take the jobs out of it."""
    session.info[_KEY] = pending


def follow_commit(session: Session, add: Callable[[list[Planned]], None]) -> Pending:
    """Call `add` after each commit of the session, with the jobs that were planned in it."""
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
