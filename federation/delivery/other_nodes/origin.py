"""Whose deliveries a queue holds: our jobs carry the id of the database with their row, and this node's URL.

Without that, two databases on one queue, by a wrong setting or a copied `.env`, would end each other's jobs: the row is
not there, so the delivery looks as if it were over. The URL tells a copy of the database from its original. A key could
not serve for this, as keys are rotated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, select
from sqlmodel import col

from db import Database, DatabaseIdentity
from federation.base.queues.job_data import FederationDeliveryJob

_IDENTITY: Final = select(col(DatabaseIdentity.id))


@dataclass(frozen=True, slots=True)
class JobOrigin:
    """The node and the database that a job belongs to. None means unknown, as with jobs of Node's producers."""

    node: str | None
    database: str | None

    def __str__(self) -> str:
        return f"{self.node or 'a node without a URL'}, database {self.database or 'not known'}"

    def has(self, other: JobOrigin) -> bool:
        """Tell whether a job of `other` belongs to this origin, as far as the job says."""
        return other.node in (None, self.node) and other.database in (None, self.database)


class OwnJobOrigin:
    """The origin of this process's jobs. The database's id is read once."""

    def __init__(self, database: Database, own_url: str | None) -> None:
        self._database = database
        self._own_url = own_url
        self._origin: JobOrigin | None = None

    async def get(self) -> JobOrigin:
        """Return the origin that our jobs carry.

        Raises:
            SQLAlchemyError: the database did not answer, or has not been upgraded.
        """
        if self._origin is None:
            self._set([row.id for row in await self._database.rows(_IDENTITY)])
        assert self._origin is not None
        return self._origin

    def on(self, connection: Connection) -> JobOrigin:
        """Return the same, for synchronous code that has a connection to the database."""
        if self._origin is None:
            self._set(list(connection.execute(_IDENTITY).scalars()))
        assert self._origin is not None
        return self._origin

    def _set(self, found: list[str]) -> None:
        self._origin = JobOrigin(node=self._own_url, database=found[0] if found else None)


def origin_of(job: FederationDeliveryJob) -> JobOrigin:
    return JobOrigin(node=job.node, database=job.database)
