"""Which database this is, and what its processes saw of others at their queues and before their port."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import Text
from sqlmodel import Field

from db.columns import FederationTable, TextEnum, UtcDateTime


class DatabaseIdentity(FederationTable, table=True):
    """One row: made with the table, and the same in every copy of the database."""

    __tablename__ = "database_identity"

    # Written by its migration, once.
    id: str = Field(sa_type=Text, primary_key=True)


class SightingKind(StrEnum):
    """`place`: a process on this database has its queues there. `stranger`: a job of that origin was in our queue.
    `proxy`: what connects from there forwards for others, and no setting names it.
    """

    PLACE = "place"
    STRANGER = "stranger"
    PROXY = "proxy"


class QueueSighting(FederationTable, table=True):
    """Something that was seen, and when it was last. Those of more than a day ago are removed by the next."""

    __tablename__ = "queue_sightings"

    # Written by delivery/sightings, for workers and for the inbound side.
    kind: SightingKind = Field(sa_type=TextEnum(SightingKind), primary_key=True)
    what: str = Field(sa_type=Text, primary_key=True)
    seen_at: datetime = Field(sa_type=UtcDateTime)
