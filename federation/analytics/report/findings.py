"""What the results say, in as few rows as a reader can take in: the report and the summary are made of nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from federation.analytics.days import MONTH
from federation.analytics.frames import Action

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import date, datetime

DAYS: Final = MONTH
MOST_PER_ACTION: Final = 5_000
"""A list is whole up to here; what is left out is counted, and said to lie in the results."""

MOST_WITH_DAYS: Final = 20
"""So many servers of each advice are shown with their days."""
MOST_RANKED: Final = 10
MOST_LISTED: Final = 1_000
"""Of so many servers, by their names, the report has a line each."""

HELD_FOR: Final = timedelta(days=7)
"""FEDERATION_DELIVERY_MAX_AGE by default. Results are read where the node's settings may be unknown."""

MOST_CHANGES: Final = 20
MOST_CODES: Final = 6
MOST_LOSS_CODES: Final = 20
MOST_ANOMALIES: Final = 20
MOST_URLS: Final = 4
MOST_QUARANTINE: Final = 30
FEWEST_ATTEMPTS: Final = 20
"""A server with fewer attempts in 30 days and nothing to complain of is not among the worst."""

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
    servers_lost: int
    attempts: int
    delivered: int
    success_rate: float | None
    p50_ms: int | None
    p95_ms: int | None
    lost: int = 0
    own_trouble: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        return self.attempts - self.delivered


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCode:
    """How often attempts failed with one code: `daily` has the days of `Findings.days`."""

    code: str
    total: int
    daily: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """A server over the 7 or the 30 days up to and including `as_of`; `loss_codes` say of what it lost deliveries."""

    attempts: int = 0
    delivered: int = 0
    availability: float | None = None
    score: float | None = None
    p95_ms: int | None = None
    failures: int = 0
    mttf_s: float | None = None
    mttr_s: float | None = None
    longest_outage_s: float | None = None
    lost: int = 0
    loss_codes: Mapping[str, int] = field(default_factory=dict)

    @property
    def got_through(self) -> float | None:
        """The share of the attempts, of which there are none while what is owed is held."""
        return self.delivered / self.attempts if self.attempts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """When something began; `at_least` says that it may be earlier, but the days go no further back."""

    at: datetime
    at_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server and the verdict on it.

    `daily` is its availability on the days of `Findings.days`, or empty for one of a long list. `last_attempt` is the
    last of the 30 days on which something was sent to it.
    """

    url: str
    action: Action
    state: str | None = None
    reasons: tuple[str, ...]
    since: Since | None
    top_error: str | None
    trend: str | None
    week: Period
    month: Period
    owed: int = 0
    held: int = 0
    owed_since: datetime | None = None
    last_attempt: date | None = None
    daily: tuple[float | None, ...] = ()

    @property
    def expires(self) -> datetime | None:
        """When the first of what is held expires, by the default of the setting; what is not held never does."""
        return self.owed_since + HELD_FOR if self.held and self.owed_since else None


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
    """A suspicious key: the first of the servers that have it, how many there are, and which results had it first."""

    kind: str
    key_kind: str | None
    fingerprint: str | None
    urls: tuple[str, ...]
    servers: int
    detail: str | None
    found_on: date | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """How many rows of one input are in quarantine for one reason."""

    source: str
    reason: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Obligations:
    """What is owed to all servers, of that held, and since when; what was lost for good. `servers` have the most.

    `loss_codes` count what was lost in 30 days by why, the most frequent first. `history` has what was owed, and of
    that held, by the day of each of the results of 30 days.
    """

    owed: int
    held: int
    since: datetime | None
    lost_week: int
    lost_month: int
    owed_servers: int
    lost_servers: int
    loss_codes: Mapping[str, int]
    servers: tuple[Server, ...]
    history: tuple[tuple[date, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outages:
    """The outages that began within 30 days, and the servers with the most of them.

    `mttf_s` and `mttr_s` are those of a typical server: medians over the servers that have one.
    """

    failures: int
    failed_servers: int
    mttf_s: float | None
    mttr_s: float | None
    servers: tuple[Server, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceChange:
    """A server whose advice is another than it was; `reason` is the first of what it is now."""

    url: str
    before: Action
    now: Action
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What is different from the results before, which are of `since`: for None there are none within a week."""

    since: date | None = None
    urgent_before: int = 0
    owed_before: int = 0
    worse: tuple[AdviceChange, ...] = ()
    worse_count: int = 0
    better: tuple[AdviceChange, ...] = ()
    better_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Appearance:
    """A server, and the results in which it was first, or last, in the registry."""

    url: str
    day: date
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnover:
    """Who came into the registry and who left it, according to the results since `since`; None if there are no others.

    `arrived` and `vanished` begin with the latest.
    """

    since: date | None = None
    arrived: tuple[Appearance, ...] = ()
    arrived_count: int = 0
    vanished: tuple[Appearance, ...] = ()
    vanished_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedServer:
    """How many deliveries to a server arrived through others, of all that arrived, in 30 days."""

    url: str
    relayed: int
    delivered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaying:
    """What arrived through other servers: by day of `Findings.days`, and the servers with the most."""

    daily: tuple[int, ...]
    server_count: int
    servers: tuple[RelayedServer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completeness:
    """Which of the 30 days are missing, or not whole, and how many attempts were set aside.

    `early` were computed from what was read before they were over; of `purged` the database has lost attempts, which
    earlier exports have. `parked` is what was read and not attempted.
    """

    missing: tuple[date, ...]
    early: tuple[date, ...]
    purged: tuple[date, ...]
    attempts: int
    parked: int
    set_aside: int

    @property
    def read(self) -> int:
        """How many rows of attempts were read."""
        return self.attempts + self.parked + self.set_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The 30 days up to and including `as_of`, as far as they were computed: `days`, the oldest first.

    `attention` has, for each action but keep, the servers that lost the most attempts in the last 7 days; `actions` and
    `states` count them all, `urgent_states` those that need attention. `servers` are the first by name. `busiest` got
    the most of the attempts of 7 days, `week_attempts`. `latencies` counts servers by the p95 of those days: up to each
    of `LATENCY_BOUNDS_MS`, and above; `scores` by the score of the 30 days: below each of `SCORE_BOUNDS`, and from the
    last on.
    """

    as_of: date
    days: tuple[Day, ...]
    errors: tuple[ErrorCode, ...]
    error_totals: Mapping[str, int]
    actions: Mapping[Action, int]
    states: Mapping[str, int]
    urgent_states: Mapping[str, int]
    attention: tuple[Server, ...]
    changes: Changes
    turnover: Turnover
    obligations: Obligations
    outages: Outages
    relaying: Relaying
    completeness: Completeness
    busiest: tuple[Server, ...]
    week_attempts: int
    servers: tuple[Server, ...]
    worst: tuple[Server, ...]
    latencies: tuple[int, ...]
    scores: tuple[int, ...]
    relays: tuple[RelayFinding, ...]
    relay_count: int
    anomalies: tuple[Anomaly, ...]
    anomaly_counts: Mapping[str, int]
    quarantine: tuple[SetAside, ...]
    quarantined: int

    @property
    def urgent(self) -> dict[Action, int]:
        """How many servers have each advice but to keep them, the gravest first."""
        grave = (action for action in reversed(Action) if action is not Action.KEEP)
        return {action: number for action in grave if (number := self.actions.get(action))}

    def advised(self, action: Action) -> list[Server]:
        """Return those of `attention` that have this advice."""
        return [server for server in self.attention if server.action is action]
