"""The messages between an attempt and the ledger: what it reports of its delivery, and what it is told."""

from __future__ import annotations

from datetime import datetime
from typing import TypeAlias

from db import DEFAULT_WIRE, AttemptOutcome, DeliveryState, HoldReason
from federation.delivery.error_codes import STALLED
from federation.delivery.ledger.attempt_log import AttemptRecord
from federation.delivery.wire import Effect
from federation.protocol.values import Value
from federation.servers.link_rules import Hold


class Series(Value, frozen=True, kw_only=True):
    """The attempts of one job at one delivery. Later entries of an attempt must name it to be heard.

    `first_attempted_at` is when the first of them began; `attempts` is how many were made at the delivery, in any
    series, including this one; `holds` is how often in a row a fault of ours held it, `alone` how many series were used
    up after which it waited by itself. `canary_at` is when it last went ahead of others to an absent server;
    `is_canary` tells that it does so now. `shared`: other deliveries have the same text.
    """

    delivery_id: str
    job_id: str
    number: int
    first_attempted_at: datetime
    attempts: int
    holds: int
    canary_at: datetime | None
    is_canary: bool
    alone: int = 0
    shared: bool = False


class Begun(Value, frozen=True, kw_only=True):
    """The attempt may send `text`, which is None where the row has no text of its own."""

    series: Series
    text: str | None


class NotBegun(Value, frozen=True, kw_only=True):
    """The attempt may not send: there is no row, it is held now, another job acts for it, or no job may."""

    exists: bool
    held: HoldReason | None = None


class Begin(Value, frozen=True, kw_only=True):
    """An attempt is about to send. With `hold` the row is held instead, unless it is the canary sent to find out."""

    delivery_id: str
    job_id: str
    job_name: str
    server_url: str
    attempt: int
    at: datetime
    wire: str = DEFAULT_WIRE
    hold: Hold | None = None


class Gone(Value, frozen=True, kw_only=True):
    """The delivery is over: row and text are removed, in the transaction that writes what its acknowledgment changes.

    `shared`: as far as is known, other deliveries have the same text.
    """

    delivery_id: str
    effect: Effect | None = None
    attempt: AttemptRecord | None = None
    shared: bool = False


class Ended(Value, frozen=True, kw_only=True):
    """An attempt failed: the row stays `ready` for the next attempt of its job, or is `held`, or `failed`.

    `attempt` is None if none was made; `until` is when a held one is released, if that is known. `uses_pause`: it
    counts among the waits of which a delivery gets a few.
    """

    series: Series
    state: DeliveryState
    at: datetime
    code: str
    error: str
    reason: HoldReason | None = None
    until: datetime | None = None
    outcome: AttemptOutcome | None = None
    attempt: AttemptRecord | None = None
    suspect: int | None = None
    uses_pause: bool = False


class Abandoned(Value, frozen=True, kw_only=True):
    """A job ended without a decision by its attempt. The row is held until `until`.

    The code STALLED says that its worker disappeared too often. The delivery is a suspect from then on, as it may be
    what crashes workers. Suspects run apart from all other deliveries, in groups that are halved after each crash,
    until a crash can have only one cause.
    """

    delivery_id: str
    job_id: str
    at: datetime
    until: datetime
    error: str
    code: str = STALLED


Entry: TypeAlias = Begin | Gone | Ended | Abandoned
