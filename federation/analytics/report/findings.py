"""What the results say, in as few rows as a reader can take in: the report and the summary are made of nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from federation.analytics.days import MONTH

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import date, datetime

    from federation.analytics.frames import Action

DAYS: Final = MONTH
MOST_PER_ACTION: Final = 20
MOST_RANKED: Final = 10
MOST_CODES: Final = 6
MOST_ANOMALIES: Final = 20
MOST_URLS: Final = 4
MOST_QUARANTINE: Final = 30
FEWEST_ATTEMPTS: Final = 20
"""A server with fewer attempts in 30 days is neither among the best nor among the worst."""

BAD_DAY: Final = 0.9
"""A day is a bad one if a smaller share of the attempts at a server got through."""

LATENCY_BOUNDS_MS: Final = (100, 250, 500, 1000, 2500, 5000, 10_000)
SCORE_BOUNDS: Final = (50, 80, 90, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """One day of the whole network."""

    day: date
    servers_known: int
    servers_healthy: int
    servers_new: int
    servers_lost: int
    attempts: int
    delivered: int
    success_rate: float | None
    top10_share: float | None
    p50_ms: int | None
    p95_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCode:
    """How often attempts failed with one code: `daily` has the days of `Findings.days`."""

    code: str
    total: int
    daily: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A server over the 7 or the 30 days up to and including `as_of`."""

    attempts: int = 0
    delivered: int = 0
    availability: float | None = None
    score: float | None = None
    p95_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """When something began; `at_least` says that it may be earlier, but the days go no further back."""

    at: datetime
    at_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server and the verdict on it; `daily` is its availability on the days of `Findings.days`."""

    url: str
    action: Action
    reasons: tuple[str, ...]
    since: Since | None
    top_error: str | None
    trend: str | None
    week: Period
    month: Period
    daily: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayFinding:
    rank: int
    url: str
    score: float | None
    availability: float | None
    p95_ms: int | None
    last_seen: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """A suspicious key: the first of the servers that have it, and how many there are."""

    kind: str
    key_kind: str | None
    fingerprint: str | None
    urls: tuple[str, ...]
    servers: int
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """How many rows of one input are in quarantine for one reason."""

    source: str
    reason: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The 30 days up to and including `as_of`, as far as they were computed: `days`, the oldest first.

    `attention` has, for each action but keep, the servers that lost the most attempts in the last 7 days; `actions`
    counts them all. `latencies` counts servers by the p95 of those days: up to each of `LATENCY_BOUNDS_MS`, and above;
    `scores` by the score of the 30 days: below each of `SCORE_BOUNDS`, and from the last on.
    """

    as_of: date
    days: tuple[Day, ...]
    errors: tuple[ErrorCode, ...]
    error_totals: Mapping[str, int]
    actions: Mapping[Action, int]
    attention: tuple[Server, ...]
    worst: tuple[Server, ...]
    best: tuple[Server, ...]
    latencies: tuple[int, ...]
    scores: tuple[int, ...]
    relays: tuple[RelayFinding, ...]
    relay_count: int
    anomalies: tuple[Anomaly, ...]
    anomaly_counts: Mapping[str, int]
    quarantine: tuple[SetAside, ...]
    quarantined: int
