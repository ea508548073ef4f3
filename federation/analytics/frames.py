"""The shapes of what the analytics read and write: explicit schemas, and frames under their names.

Input columns are always nullable, whatever the database promises: exports are files, and files may hold anything. Times
are instants (Spark's `timestamp`), days are UTC days; durations are milliseconds where the column says `_ms`, seconds
where it says `_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

_TEXT: Final = StringType()
_COUNT: Final = LongType()
_NUMBER: Final = IntegerType()
_RATIO: Final = DoubleType()
_TIME: Final = TimestampType()
_DAY: Final = DateType()
_COUNTS: Final = MapType(_TEXT, _COUNT, valueContainsNull=False)
_TEXTS: Final = ArrayType(_TEXT, containsNull=False)


def _schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind, nullable=True) for name, kind in columns.items()])


ATTEMPTS: Final = _schema(
    id=_COUNT,
    delivery_id=_TEXT,
    job_name=_TEXT,
    method=_TEXT,
    server_url=_TEXT,
    attempt=_NUMBER,
    started_at=_TIME,
    duration_ms=_NUMBER,
    outcome=_TEXT,
    error_code=_TEXT,
    http_status=_NUMBER,
    relayed_by=_TEXT,
    request_bytes=_NUMBER,
    response_bytes=_NUMBER,
    unreadable=_TEXT,
)
"""`delivery_attempts`, one row per attempt.

`unreadable`, which the table does not have, is null, or the JSON of what was not of its column's kind, by column: that
column is null then.
"""

SERVERS: Final = _schema(
    id=_TEXT,
    url=_TEXT,
    public_key=_TEXT,
    encryption_public_key=_TEXT,
    last_seen=_TIME,
    created_at=_TIME,
    updated_at=_TIME,
    is_healthy=BooleanType(),
    health_check_attempts=_NUMBER,
    unhealthy_reason=_TEXT,
)
"""`server_registry`, as it stood when it was read."""

BLACKLIST: Final = _schema(id=_TEXT, server_url=_TEXT, created_at=_TIME, reason=_TEXT)
"""`blacklisted_servers`, as it stood when it was read."""

HEALTH_EVENTS: Final = _schema(id=_COUNT, server_url=_TEXT, from_state=_TEXT, to_state=_TEXT, reason=_TEXT, at=_TIME)
"""`server_health_events`, one row per change of a server's health."""

LINKS: Final = _schema(server_url=_TEXT, wire=_TEXT, state=_TEXT, since=_TIME, reason=_TEXT)
"""`server_links`, as it stood when it was read: whether the way to a server is open, by each wire that it speaks.

`reason` is the code of the failure that closed it: the registry has `UNKNOWN` for what the original does not know.
"""

DELIVERIES: Final = _schema(
    id=_TEXT, server_url=_TEXT, wire=_TEXT, state=_TEXT, error_code=_TEXT, created_at=_TIME, settled_at=_TIME
)
"""`delivery_jobs` without payloads: what is owed, and what was given up within 7 days. `wire` is how it is sent."""

LOSSES: Final = _schema(id=_TEXT, server_url=_TEXT, state=_TEXT, error_code=_TEXT, created_at=_TIME, lost_at=_TIME)
"""`delivery_losses`: what was given up longer ago."""

ACCEPTED_KEYS: Final = _schema(server_url=_TEXT, fingerprint=_TEXT, accepted_at=_TIME)
"""`accepted_keys`: the keys that an operator has looked at, and when."""

SERVER_DAILY: Final = _schema(
    server_url=_TEXT,
    day=_DAY,
    attempts=_COUNT,
    delivered=_COUNT,
    retryable=_COUNT,
    permanent=_COUNT,
    parked=_COUNT,
    errors=_COUNTS,
    relayed_share=_RATIO,
    request_bytes=_COUNT,
    response_bytes=_COUNT,
    availability=_RATIO,
    p50_ms=_NUMBER,
    p95_ms=_NUMBER,
    p99_ms=_NUMBER,
    slow=_COUNT,
    failed_hours=MapType(_NUMBER, _COUNT, valueContainsNull=False),
)
"""One row per server and UTC day with attempts. `attempts` = delivered + retryable + permanent, without parked.

`errors` counts attempts by error code. Ratios are 0 to 1, and null if nothing was attempted; `relayed_share` refers to
what was delivered, and is null if nothing was. `slow` counts deliveries that took longer than `figures.daily.SLOW_MS`,
`failed_hours` failed attempts by the hour of the day in which they began; days that an earlier version computed have
none.
"""

SERVER_SCORECARD: Final = _schema(
    server_url=_TEXT,
    window_days=_NUMBER,
    as_of=_DAY,
    attempts=_COUNT,
    delivered=_COUNT,
    availability=_RATIO,
    score=_RATIO,
    p95_ms=_NUMBER,
    failures=_NUMBER,
    mttf_s=_RATIO,
    mttr_s=_RATIO,
    longest_outage_s=_RATIO,
    trend=_TEXT,
    trend_change=_RATIO,
    state=_TEXT,
    state_since=_TIME,
    top_error=_TEXT,
    action=_TEXT,
    reasons=_TEXTS,
    owed=_COUNT,
    held=_COUNT,
    owed_since=_TIME,
    lost=_COUNT,
    loss_codes=_COUNTS,
)
"""One row per server, known, reached or owed something, and window (7 and 30 days up to and including `as_of`).

`availability` counts the time in which the server was down as undelivered. `state` is healthy, unhealthy, blacklisted
or unregistered, as is one that needs no registry. `owed` counts the deliveries that wait to be sent, `held` those of
them that wait for the server or for us, `owed_since` is the oldest's time; `lost` counts those that were given up in
the window, `loss_codes` by the code of the last attempt (none if nothing was lost, or by a version that did not tell).
`action` and `reasons` are those of both windows. Null: a ratio of nothing, a mean over no outage, a time
not on record.
"""

NETWORK_SUMMARY: Final = _schema(
    day=_DAY,
    servers_known=_COUNT,
    servers_healthy=_COUNT,
    servers_new=_COUNT,
    servers_lost=_COUNT,
    attempts=_COUNT,
    delivered=_COUNT,
    success_rate=_RATIO,
    top10_share=_RATIO,
    p50_ms=_NUMBER,
    p95_ms=_NUMBER,
    errors=_COUNTS,
    lost=_COUNT,
    own_trouble=_TEXTS,
)
"""One row per UTC day of the window, even for days without attempts. Percentiles need the attempts themselves.

`lost` counts the deliveries that were given up; `own_trouble` has the hours in which this node was cut off or did
nothing, as `07:30 to 07:52`. Days that an earlier version computed have neither.
"""

KEY_ANOMALIES: Final = _schema(
    as_of=_DAY,
    kind=_TEXT,
    key_kind=_TEXT,
    fingerprint=_TEXT,
    server_urls=_TEXTS,
    detail=_TEXT,
    found_on=_DAY,
)
"""Suspicious keys: `kind` is an `AnomalyKind`, `key_kind` signing or encryption, `fingerprint` the key's SHA-256 in hex
(null for a key that is malformed), `found_on` the `as_of` of the run that found it first."""

RELAY_CANDIDATES: Final = _schema(
    as_of=_DAY,
    rank=_NUMBER,
    server_url=_TEXT,
    score=_RATIO,
    availability=_RATIO,
    p95_ms=_NUMBER,
    last_seen=_TIME,
)
"""Peers that a delivery could go through, the best first (rank 1)."""

QUARANTINE: Final = _schema(source=_TEXT, reason=_TEXT, day=_DAY, row=_TEXT)
"""Rows that were set aside: `source` is the input's name, `row` its JSON, `day` the UTC day of an attempt.

All other inputs are read whole by each run, as are attempts of impossible times: their rows have no day."""


def no_rows(spark: SparkSession, schema: StructType) -> DataFrame:
    """Return an empty frame. One made of a Python list would start Python workers to find nothing."""
    return spark.createDataFrame(to_arrow_schema(schema).empty_table(), schema)


BLACKLISTED: Final = "blacklisted"
"""The state of a server that is on the blacklist, whatever its health."""

UNREGISTERED: Final = "unregistered"
"""The state of a server that was attempted, or is owed something, and is not in the registry."""


class AnomalyKind(StrEnum):
    """What is wrong with a key."""

    SHARED = "shared"
    CHANGED = "changed"
    MALFORMED = "malformed"
    MISMATCHED = "mismatched"


class Action(StrEnum):
    """What an operator is advised to do about a server, the most urgent last."""

    KEEP = "keep"
    WATCH = "watch"
    PARK = "park"
    PRUNE = "prune"
    REVIEW = "review-for-blacklist"


class Trend(StrEnum):
    """How a server's reliability changes: the later half of the window against the days before."""

    IMPROVING = "improving"
    STABLE = "stable"
    WORSENING = "worsening"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The UTC days `since` up to, not including, `until`; `as_of`, the last of them, dates scorecards and rankings.

    Raises:
        ValueError: `until` is not after `since`.
    """

    since: date
    until: date

    def __post_init__(self) -> None:
        if self.until <= self.since:
            raise ValueError(f"a window ends after it begins: {self.until} is not after {self.since}")

    @property
    def as_of(self) -> date:
        return self.until - timedelta(days=1)

    @property
    def days(self) -> Iterator[date]:
        return (self.since + timedelta(days=number) for number in range((self.until - self.since).days))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What is read: frames of the schemas above, unchecked.

    `attempts` may hold more than the window asks for. `earlier_servers` is the registry as an earlier run saw it, None
    on the first run. `server_daily` are stored days, as a rule those before the window, that scorecards look back at; a
    day that `attempts` have, too, is taken from there. `earlier_anomalies` is what a run of an earlier day found.
    `links`, `deliveries`, `losses` and `accepted_keys` are None if an export has none.
    `attempt_ids` has the ids of the same attempts, from a reader that would read all their columns for one.
    """

    attempts: DataFrame
    servers: DataFrame
    blacklist: DataFrame
    health_events: DataFrame
    earlier_servers: DataFrame | None = None
    server_daily: DataFrame | None = None
    links: DataFrame | None = None
    earlier_anomalies: DataFrame | None = None
    deliveries: DataFrame | None = None
    losses: DataFrame | None = None
    accepted_keys: DataFrame | None = None
    attempt_ids: DataFrame | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What is computed: frames of the schemas above.

    `counts` are those of attempts that all figures of attempts are made of.
    """

    server_daily: DataFrame
    server_scorecard: DataFrame
    network_summary: DataFrame
    key_anomalies: DataFrame
    relay_candidates: DataFrame
    quarantine: DataFrame
    counts: DataFrame | None = None


class Keep(Protocol):
    """Has Spark compute a frame once, when it is first needed, whatever is made of it."""

    def __call__(self, frame: DataFrame, *, by_server: bool = False) -> DataFrame:
        """Keep the frame, in memory, or on Spark's local disks if that is short. Return what others are to be made of.

        A frame `by_server` has a few rows for each server, however many attempts there are.
        """


def as_it_is(frame: DataFrame, *, by_server: bool = False) -> DataFrame:
    """Return the frame itself, a `Keep` by which it is computed whenever it is needed."""
    return frame
