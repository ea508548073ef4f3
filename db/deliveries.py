"""Deliveries: the outbox, and the log of every attempt to reach a server."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Index, Integer, Text, text
from sqlmodel import Field

from db.columns import DEFAULT_WIRE, FederationTable, TextEnum, UtcDateTime, new_timed_id


class DeliveryPayload(FederationTable, table=True):
    """A text that several deliveries share; `refs` counts their rows, and it goes with the last of them."""

    __tablename__ = "delivery_payloads"
    __table_args__ = (
        Index(
            "delivery_payloads_activity_id_idx",
            "activity_id",
            postgresql_where=text("activity_id IS NOT NULL"),
            sqlite_where=text("activity_id IS NOT NULL"),
        ),
    )

    # Written by delivery/outbox/insert, once.
    id: str = Field(default_factory=new_timed_id, sa_type=Text, primary_key=True)
    payload: str = Field(sa_type=Text, repr=False)
    # Written by delivery/outbox/insert, delivery/rows (rows that go).
    refs: int
    # Written by delivery/outbox/insert, once.
    created_at: datetime = Field(sa_type=UtcDateTime)
    activity_id: str | None = Field(default=None, sa_type=Text)
    """What is sent, by the name that its own protocol gives it; null where that has none."""
    actor: str | None = Field(default=None, sa_type=Text)
    """In whose name it is signed, where the wire signs in the name of several."""


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
    ALONE = "alone"
    """A later try: its server takes others, and did not take this one."""


class AttemptNote(StrEnum):
    """What an attempt's outcome and code do not say."""

    GIVEN_UP = "given_up"
    """It was the delivery's last: no other follows by itself."""
    FORGED_ACK = "forged_ack"
    """The delivery counts as delivered, though the acknowledgment was not the server's."""


class AttemptOutcome(StrEnum):
    """How one attempt ended."""

    DELIVERED = "delivered"
    RETRYABLE = "retryable"
    """It failed, and another attempt may succeed."""
    PERMANENT = "permanent"
    """It failed, and so would every other."""
    PARKED = "parked"
    """It was given back unattempted, because the server was busy enough."""


def _partial(name: str, *columns: str, where: str) -> Index:
    return Index(name, *columns, postgresql_where=text(where), sqlite_where=text(where))


class DeliveryJob(FederationTable, table=True):
    """A delivery that is owed, or that was given up and is kept for diagnosis. Delivered ones are deleted.

    A row of the original Node implementation has the default in every column from `job_name` on, until its job is first
    met. `job_id` names the one queue job that may act for the row: that of series `n` is called as the row's id, then
    `<id>.<n>`. `error_code` and `last_error` are those of the last attempt that failed. `next_attempt_at` is when a
    delivery held for `rest`, `busy`, `ours` or `alone` is released. `sending` is the number of an attempt under way.
    With a `payload_id` the text is in `delivery_payloads`, and `payload` is empty.
    """

    __tablename__ = "delivery_jobs"
    __table_args__ = (
        # None names a column that the beginning of an attempt updates, so PostgreSQL keeps that out of the indexes.
        Index("delivery_jobs_state_idx", "state", "created_at", "id"),
        Index("delivery_jobs_server_idx", "server_url", "state", "created_at", "id"),
        _partial("delivery_jobs_code_idx", "error_code", "created_at", "id", where="error_code IS NOT NULL"),
        # The state is a column of these two as well: SQLite takes the index that more conditions are about.
        _partial(
            "delivery_jobs_held_idx",
            *("server_url", "state", "wire", "held_reason", "created_at"),
            where="state = 'held'",
        ),
        _partial("delivery_jobs_held_until_idx", "next_attempt_at", where="state = 'held'"),
        _partial("delivery_jobs_suspect_idx", "suspect", where="suspect IS NOT NULL"),
        _partial("delivery_jobs_released_idx", "state", "released_at", where="released_at IS NOT NULL"),
        _partial(
            "delivery_jobs_order_idx",
            *("ordering_key", "server_url", "ordering_position"),
            where="ordering_key IS NOT NULL",
        ),
        _partial("delivery_jobs_payload_id_idx", "payload_id", where="payload_id IS NOT NULL"),
    )

    # Who writes a column, by module of `federation`: delivery/outbox/insert makes the row, for producers.
    # delivery/ledger/statements counts and ends attempts, for workers; delivery/ledger/postgres_fast_path and
    # delivery/ledger/sqlite_fast_path do the same to most rows. delivery/held/sweeper holds, expires and fails what is
    # held. delivery/rows makes ready what was held.
    # delivery/outbox/sweeper replaces lost jobs. delivery/held/release chooses canaries.
    # admin/deliveries/bulk is `federation deliveries retry`.
    # Written by delivery/outbox/insert, once.
    id: str = Field(default_factory=new_timed_id, sa_type=Text, primary_key=True)
    target_url: str = Field(sa_type=Text)
    payload: str = Field(sa_type=Text, repr=False)
    # Written by delivery/outbox/insert, delivery/ledger/statements, admin/deliveries/bulk.
    attempts: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    # Written by delivery/ledger/statements, admin/deliveries/bulk.
    last_attempted_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    # Written by delivery/ledger/statements, delivery/held/sweeper, delivery/rows, admin/deliveries/bulk.
    next_attempt_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    # Written by delivery/outbox/insert, once.
    created_at: datetime = Field(sa_type=UtcDateTime)
    # Written by delivery/outbox/insert; delivery/ledger/statements, where the first job of a Node producer's row is
    # met.
    job_name: str | None = Field(default=None, sa_type=Text)
    server_url: str | None = Field(default=None, sa_type=Text)
    wire: str = Field(default=DEFAULT_WIRE, sa_type=Text, sa_column_kwargs={"server_default": DEFAULT_WIRE})
    """The protocol by which it is sent, as its job's name says."""
    # Written by delivery/outbox/insert, delivery/outbox/sweeper, delivery/rows, admin/deliveries/bulk.
    queued_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    # Written by delivery/ledger/statements, delivery/held/sweeper, delivery/rows, admin/deliveries/bulk.
    settled_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    # Written by delivery/ledger/statements, delivery/held/sweeper, admin/deliveries/bulk.
    outcome: AttemptOutcome | None = Field(default=None, sa_type=TextEnum(AttemptOutcome))
    """Of the attempt with which it was given up; null while it is owed."""
    last_error: str | None = Field(default=None, sa_type=Text)
    # Written by delivery/outbox/insert, once.
    payload_id: str | None = Field(default=None, sa_type=Text)
    # Written by delivery/ledger/statements, delivery/held/sweeper, admin/deliveries/bulk.
    error_code: str | None = Field(default=None, sa_type=Text)
    # Written by delivery/outbox/insert, delivery/ledger/statements, delivery/held/sweeper, delivery/rows,
    # admin/deliveries/bulk.
    state: DeliveryState = Field(
        default=DeliveryState.READY, sa_type=TextEnum(DeliveryState), sa_column_kwargs={"server_default": "ready"}
    )
    held_reason: HoldReason | None = Field(default=None, sa_type=TextEnum(HoldReason))
    held_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    # Written by delivery/outbox/insert, delivery/ledger/statements, delivery/rows, delivery/outbox/sweeper,
    # admin/deliveries/bulk.
    job_id: str | None = Field(default=None, sa_type=Text)
    # Written by delivery/rows, delivery/outbox/sweeper, admin/deliveries/bulk.
    series: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    # Written by delivery/ledger/statements, delivery/rows, delivery/outbox/sweeper, admin/deliveries/bulk.
    sending: int | None = None
    first_attempted_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    """When the present series of attempts began."""
    # Written by delivery/ledger/statements, delivery/rows, admin/deliveries/bulk.
    released_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    """When it was released last, until it is tried."""
    # Written by delivery/held/release, delivery/ledger/statements, admin/deliveries/bulk.
    canary_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    """When it was last sent ahead of the others, to see whether its server takes deliveries again."""
    # Written by delivery/outbox/insert, once.
    ordering_key: str | None = Field(default=None, sa_type=Text)
    ordering_position: int | None = Field(default=None, sa_type=BigInteger)
    # Written by delivery/ledger/statements, admin/deliveries/bulk.
    holds: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    """How often in a row it was held for a fault of ours: each wait is twice as long."""
    suspect: int | None = None
    """Set once it was under way in too many crashes: how many such deliveries may run together, below 1 that it ran
    alone, and how often in vain."""
    alone: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    """How many series of attempts were used up after which it waited by itself, not for its server."""
    # Written by delivery/outbox/insert, once.
    trace: str | None = Field(default=None, sa_type=Text)
    """The trace context of whoever owed it, as JSON of W3C's headers, to which the spans of attempts are linked."""


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
        _partial("delivery_attempts_activity_id_idx", "activity_id", where="activity_id IS NOT NULL"),
    )

    # Written by delivery/ledger/attempt_log, once.
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
    note: AttemptNote | None = Field(default=None, sa_type=TextEnum(AttemptNote))
    activity_id: str | None = Field(default=None, sa_type=Text)
    """As in `delivery_payloads`."""


class DeliveryLoss(FederationTable, table=True):
    """A delivery that was given up for good: what is left of its row, which is purged before anybody may have asked.

    `id` is the row's, `state` how it ended (failed, expired), `error_code` that of its last attempt.
    """

    __tablename__ = "delivery_losses"
    __table_args__ = (Index("delivery_losses_lost_at_idx", "lost_at"),)

    # Written by retention, once.
    id: str = Field(sa_type=Text, primary_key=True)
    server_url: str | None = Field(default=None, sa_type=Text)
    job_name: str | None = Field(default=None, sa_type=Text)
    state: DeliveryState = Field(sa_type=TextEnum(DeliveryState))
    error_code: str | None = Field(default=None, sa_type=Text)
    created_at: datetime = Field(sa_type=UtcDateTime)
    lost_at: datetime = Field(sa_type=UtcDateTime)
