"""What is counted ahead of time, so that nobody who looks has to count: attempts by minute, deliveries by state.

All of it follows from the other tables, is brought up to date by a recurring job, and may be late by its interval.
"""

from datetime import datetime

from sqlalchemy import JSON, BigInteger, Double, Index, Text
from sqlmodel import Field

from db.columns import FederationTable, TextEnum, UtcDateTime
from db.deliveries import AttemptOutcome, DeliveryState


class RollupPosition(FederationTable, table=True):
    """How far the attempt log is counted: up to and including the attempt `position`.

    `upto` is the last number that the next count covers, once no transaction of PostgreSQL below `horizon` is open.
    """

    __tablename__ = "rollup_positions"

    # Written by rollups/attempts.
    name: str = Field(sa_type=Text, primary_key=True)
    position: int = Field(sa_type=BigInteger)
    upto: int | None = Field(default=None, sa_type=BigInteger)
    horizon: int | None = Field(default=None, sa_type=BigInteger)


class AttemptMinute(FederationTable, table=True):
    """The attempts that began in one minute and ended in one way.

    `latencies` counts them by duration, one number for each bound of `rollups/attempts`.
    """

    __tablename__ = "attempt_minutes"

    # Written by rollups/attempts.
    minute: datetime = Field(sa_type=UtcDateTime, primary_key=True)
    outcome: AttemptOutcome = Field(sa_type=TextEnum(AttemptOutcome), primary_key=True)
    attempts: int = Field(sa_type=BigInteger)
    latencies: list[int] = Field(sa_type=JSON)


class DeliveryTotal(FederationTable, table=True):
    """How many deliveries are in a state, and for held ones why; the reason is empty for all others."""

    __tablename__ = "delivery_totals"

    # Written by rollups/job, all of it each time.
    state: DeliveryState = Field(sa_type=TextEnum(DeliveryState), primary_key=True)
    held_reason: str = Field(sa_type=Text, primary_key=True)
    deliveries: int = Field(sa_type=BigInteger)
    counted_at: datetime = Field(sa_type=UtcDateTime)


SORTS = ("owed", "held", "given_up", "score")
"""The numbers by which servers are sorted, each also among the servers of one state, and of one advice."""


class ServerSummary(FederationTable, table=True):
    """A server as lists show it. The registry, the links and the scorecards say more, and sooner.

    `link` is the state of its link, or `on_hold` or `resting`; `advice` is empty, and `score` -1, before the analytics
    have judged it. `given_up` is failed and expired together. `oldest_at` is when the oldest owed delivery was made.
    """

    __tablename__ = "server_summaries"
    __table_args__ = (
        Index("server_summaries_link_idx", "link", "server_url"),
        Index("server_summaries_advice_idx", "advice", "server_url"),
        *(Index(f"server_summaries_{name}_idx", name, "server_url") for name in SORTS),
        *(Index(f"server_summaries_link_{name}_idx", "link", name, "server_url") for name in SORTS),
        *(Index(f"server_summaries_advice_{name}_idx", "advice", name, "server_url") for name in SORTS),
    )

    # Written by rollups/servers.
    server_url: str = Field(sa_type=Text, primary_key=True)
    link: str = Field(sa_type=Text)
    link_since: datetime | None = Field(default=None, sa_type=UtcDateTime)
    advice: str = Field(sa_type=Text)
    score: float = Field(sa_type=Double)
    ready: int = Field(sa_type=BigInteger)
    held: int = Field(sa_type=BigInteger)
    owed: int = Field(sa_type=BigInteger)
    failed: int = Field(sa_type=BigInteger)
    expired: int = Field(sa_type=BigInteger)
    given_up: int = Field(sa_type=BigInteger)
    oldest_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
