"""Deliveries: the outbox, and the log of every attempt to reach a server."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Index, Integer, Text, text
from sqlmodel import Field

from db.columns import FederationTable, TextEnum, UtcDateTime, new_id


class DeliveryPayload(FederationTable, table=True):
    """A text that several deliveries share; `refs` counts their rows, and it goes with the last of them."""

    __tablename__ = "delivery_payloads"

    id: str = Field(default_factory=new_id, sa_type=Text, primary_key=True)
    payload: str = Field(sa_type=Text, repr=False)
    refs: int
    created_at: datetime = Field(sa_type=UtcDateTime)


class DeliveryState(StrEnum):
    """What a row in `delivery_jobs` stands for; a delivered delivery has no row."""

    READY = "ready"
    """Owed, and a job in the queue stands for the next try."""
    HELD = "held"
    """Owed, and waiting without a job, for a `HoldReason`."""
    FAILED = "failed"
    """Given up: kept for a while, for whoever wants to know why, or to try again."""
    EXPIRED = "expired"
    """Held until it was too old; kept as a failed one is."""


class HoldReason(StrEnum):
    """What a held delivery waits for."""

    SERVER = "server"
    """Its server, which is down, refuses, shows another key, or was held by an operator."""
    ORDER = "order"
    """An older delivery of the same ordering key."""
    REST = "rest"
    """The end of the pause its server asked for."""
    BUSY = "busy"
    """Room among the attempts that wait for slow servers."""
    OURS = "ours"
    """This node, which could not do its part."""


def _partial(name: str, *columns: str, where: str) -> Index:
    return Index(name, *columns, postgresql_where=text(where), sqlite_where=text(where))


class DeliveryJob(FederationTable, table=True):
    """A delivery that is owed, or that was given up and is kept for diagnosis; delivered ones are deleted.

    Rows written by the original Node implementation leave every column from `job_name` on to its default, until their
    job is first met. `job_id` names the one queue job that may act for the row: its series number `n` is the row's id,
    then `<id>.<n>`. `error_code` and `last_error` are those of the last attempt that failed. `next_attempt_at` is when
    a delivery held for `rest`, `busy` or `ours` is released. `sending` is the number of an attempt under way. With a
    `payload_id` the text is in `delivery_payloads`, and `payload` is empty.
    """

    __tablename__ = "delivery_jobs"
    __table_args__ = (
        # The predicates name no column that an attempt updates, so PostgreSQL can keep those updates out of the index.
        _partial("delivery_jobs_ready_idx", "created_at", where="state = 'ready' AND settled_at IS NULL"),
        _partial("delivery_jobs_held_idx", "server_url", "held_reason", "created_at", where="state = 'held'"),
        _partial("delivery_jobs_held_age_idx", "created_at", where="state = 'held'"),
        _partial("delivery_jobs_held_until_idx", "next_attempt_at", where="state = 'held'"),
        _partial("delivery_jobs_suspect_idx", "suspect", where="suspect IS NOT NULL"),
        _partial("delivery_jobs_released_idx", "released_at", where="released_at IS NOT NULL"),
        _partial(
            "delivery_jobs_order_idx",
            *("ordering_key", "server_url", "ordering_position"),
            where="ordering_key IS NOT NULL",
        ),
        _partial("delivery_jobs_payload_id_idx", "payload_id", where="payload_id IS NOT NULL"),
    )

    id: str = Field(default_factory=new_id, sa_type=Text, primary_key=True)
    target_url: str = Field(sa_type=Text)
    payload: str = Field(sa_type=Text, repr=False)
    attempts: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    last_attempted_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    next_attempt_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    created_at: datetime = Field(sa_type=UtcDateTime)
    job_name: str | None = Field(default=None, sa_type=Text)
    server_url: str | None = Field(default=None, sa_type=Text)
    queued_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    settled_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    outcome: str | None = Field(default=None, sa_type=Text)
    last_error: str | None = Field(default=None, sa_type=Text)
    payload_id: str | None = Field(default=None, sa_type=Text)
    error_code: str | None = Field(default=None, sa_type=Text)
    state: DeliveryState = Field(
        default=DeliveryState.READY, sa_type=TextEnum(DeliveryState), sa_column_kwargs={"server_default": "ready"}
    )
    held_reason: HoldReason | None = Field(default=None, sa_type=TextEnum(HoldReason))
    held_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    job_id: str | None = Field(default=None, sa_type=Text)
    series: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    sending: int | None = None
    first_attempted_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    """When the present series of attempts began."""
    released_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    """When it was released last, until it is tried."""
    canary_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    """When it was last sent ahead of the others, to see whether its server takes deliveries again."""
    ordering_key: str | None = Field(default=None, sa_type=Text)
    ordering_position: int | None = Field(default=None, sa_type=BigInteger)
    holds: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    """How often in a row it was held for a fault of ours: each wait is twice as long."""
    suspect: int | None = None
    """Set once it was under way in too many crashes: how many such deliveries may run together, below 1 that it ran
    alone, and how often in vain."""


class AttemptOutcome(StrEnum):
    """How one attempt ended; `parked` means given back unattempted, because the server was busy enough."""

    DELIVERED = "delivered"
    RETRYABLE = "retryable"
    PERMANENT = "permanent"
    PARKED = "parked"


class DeliveryAttempt(FederationTable, table=True):
    """One attempt at one delivery; append-only, purged by age. `method` is null where the payload named none.

    `series` tells the delivery's series of attempts apart, each of which counts from 1; null where there is no row.

    The byte counts are of the HTTP bodies and null where no request was sent or no response came.
    """

    __tablename__ = "delivery_attempts"
    __table_args__ = (
        Index("delivery_attempts_started_at_idx", "started_at"),
        Index("delivery_attempts_server_url_started_at_idx", "server_url", "started_at"),
        Index("delivery_attempts_number_uidx", "delivery_id", "series", "attempt", unique=True),
    )

    id: int | None = Field(default=None, sa_type=BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    delivery_id: str = Field(sa_type=Text)
    job_name: str = Field(sa_type=Text)
    method: str | None = Field(default=None, sa_type=Text)
    server_url: str = Field(sa_type=Text)
    attempt: int
    started_at: datetime = Field(sa_type=UtcDateTime)
    duration_ms: int
    outcome: AttemptOutcome = Field(sa_type=TextEnum(AttemptOutcome))
    error_code: str | None = Field(default=None, sa_type=Text)
    http_status: int | None = None
    relayed_by: str | None = Field(default=None, sa_type=Text)
    request_bytes: int | None = None
    response_bytes: int | None = None
    series: int | None = None
    remote_code: str | None = Field(default=None, sa_type=Text)
    """The `code` or `reason` that a refusing server's JSON gave."""
