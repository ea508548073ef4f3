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


class DeliveryJob(FederationTable, table=True):
    """A delivery that is owed, or that failed for good and is kept for diagnosis; delivered ones are deleted.

    Rows written by the original Node implementation leave every column from `job_name` on null. A row is open while
    `settled_at` is null; `error_code` is the code of the attempt that settled it. With a `payload_id` the text is in
    `delivery_payloads`, and `payload` is empty.
    """

    __tablename__ = "delivery_jobs"
    __table_args__ = (
        # The predicate names no column that an attempt updates, so PostgreSQL can keep those updates out of the index.
        Index(
            "delivery_jobs_open_idx",
            "created_at",
            postgresql_where=text("settled_at IS NULL"),
            sqlite_where=text("settled_at IS NULL"),
        ),
        Index(
            "delivery_jobs_payload_id_idx",
            "payload_id",
            postgresql_where=text("payload_id IS NOT NULL"),
            sqlite_where=text("payload_id IS NOT NULL"),
        ),
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


class AttemptOutcome(StrEnum):
    """How one attempt ended; `parked` means given back unattempted, because the server was busy enough."""

    DELIVERED = "delivered"
    RETRYABLE = "retryable"
    PERMANENT = "permanent"
    PARKED = "parked"


class DeliveryAttempt(FederationTable, table=True):
    """One attempt at one delivery; append-only, purged by age. `method` is null where the payload named none.

    The byte counts are of the HTTP bodies and null where no request was sent or no response came.
    """

    __tablename__ = "delivery_attempts"
    __table_args__ = (
        Index("delivery_attempts_started_at_idx", "started_at"),
        Index("delivery_attempts_server_url_started_at_idx", "server_url", "started_at"),
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
