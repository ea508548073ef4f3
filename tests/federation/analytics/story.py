"""Results as a run would compute them, of a small network in which it is known who is sick, since when, and of what."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from federation.analytics import frames
from federation.analytics.frames import Action, AnomalyKind, Outputs, Trend, Window
from tests.federation.analytics.rows import frame

AS_OF = date(2026, 3, 30)
WINDOW = Window(since=date(2026, 3, 1), until=date(2026, 3, 31))

Row = tuple[Any, ...]  # a row of any of the schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class Character:
    """One server: what share of its attempts gets through day by day, and the verdict on it."""

    url: str
    traffic: int
    availability: Sequence[float | None]
    p95_ms: int = 400
    error: str = "TIMEOUT"
    action: Action = Action.KEEP
    reasons: Sequence[str] = ()
    sick_since: datetime | None = None
    trend: Trend = Trend.STABLE
    relayed: float = 0.0
    daily: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        for day, availability in zip(WINDOW.days, self.availability, strict=True):
            if availability is not None:
                self.daily.append(self._day(day, availability))

    def _day(self, day: date, availability: float) -> Row:
        delivered = round(self.traffic * availability)
        failed = self.traffic - delivered
        errors = {self.error: failed} if failed else {}
        latency = (self.p95_ms // 4, self.p95_ms, self.p95_ms * 2)
        counts = (self.traffic, delivered, failed, 0, 0)
        hours = [(3, failed)] if failed else []
        return (self.url, day, *counts, errors, self.relayed, 900, 300, delivered / self.traffic, *latency, 0, hours)

    def scorecard(self, days: int) -> Row:
        rows = [row for row in self.daily if row[1] > AS_OF - timedelta(days=days)]
        attempts, delivered = sum(row[2] for row in rows), sum(row[3] for row in rows)
        availability = delivered / attempts if attempts else None
        state = "unhealthy" if self.sick_since else "healthy"
        since = self.sick_since or datetime.combine(WINDOW.since, time(), UTC)
        outage = (datetime.combine(WINDOW.until, time(), UTC) - since).total_seconds() if self.sick_since else None
        times = (864_000.0, 7_200.0) if self.sick_since else (None, None)
        return (
            *(self.url, days, AS_OF, attempts, delivered, availability),
            None if availability is None else round(100 * availability, 1),
            *(self.p95_ms, 1 if self.sick_since else 0, *times, outage, self.trend.value, -0.1),
            *(state, since, self.error if attempts > delivered else None, self.action.value, list(self.reasons)),
            *((3, 2, since, 1, [(self.error, 1)]) if self.sick_since else (0, 0, None, 0, None)),
        )


def steady(level: float, days: int = 30) -> list[float | None]:
    return [level] * days


def at(month: int, day: int, hour: int = 0) -> datetime:
    return datetime(2026, month, day, hour, tzinfo=UTC)


SICK = (
    Character(
        url="https://spam.example",
        traffic=400,
        availability=[*steady(0.97, 24), *steady(0.05, 6)],
        error="INVALID_ACK_SIGNATURE",
        action=Action.REVIEW,
        reasons=[
            "380 of 400 acknowledgments a day carry a false signature",
            "its signing key changed outside rotation",
        ],
    ),
    Character(
        url="https://gone.example",
        traffic=900,
        availability=[*steady(0.99, 26), *steady(0.0, 4)],
        error="CONN_REFUSED",
        action=Action.PARK,
        reasons=["unhealthy for 4 days", "none of 3600 attempts got through in that time"],
        sick_since=at(3, 27, 3),
        trend=Trend.WORSENING,
    ),
    Character(
        url="https://expired.example:8443",
        traffic=250,
        availability=[*steady(0.99, 28), *steady(0.0, 2)],
        error="TLS_ERROR",
        action=Action.PARK,
        reasons=["unhealthy for 2 days"],
        sick_since=at(3, 29, 0),
        trend=Trend.WORSENING,
    ),
    Character(
        url="https://old.example",
        traffic=3,
        availability=steady(0.0),
        error="DNS_BLOCKED",
        action=Action.PRUNE,
        reasons=["not seen for 93 days"],
        sick_since=at(1, 2),
    ),
    Character(
        url="https://slow.example",
        traffic=1200,
        availability=[*steady(0.98, 20), *[0.97 - 0.015 * step for step in range(10)]],
        p95_ms=9200,
        relayed=0.1,
        action=Action.WATCH,
        reasons=["availability fell from 98% to 90%"],
        trend=Trend.WORSENING,
    ),
)


def well(count: int, seed: int) -> list[Character]:
    """Servers with nothing to complain of, in Zipf's proportions."""
    dice = random.Random(seed)
    return [
        Character(
            url=f"https://server-{number:03}.example",
            traffic=round(4000 / (number + 1)) + 20,
            availability=[min(1.0, 0.985 + dice.random() * 0.02) for _ in range(30)],
            p95_ms=round(150 * 10 ** dice.random()),
            error=dice.choice(["TIMEOUT", "TIMEOUT", "CONN_RESET", "HTTP_503", "HTTP_429", "HTTP_500", "PARKED"]),
        )
        for number in range(count)
    ]


def make_outputs(
    spark: SparkSession, characters: Sequence[Character] = (*SICK, *well(20, seed=1)), **rows: Iterable[Row]
) -> Outputs:
    """The frames of these servers; `rows` takes the place of what would be made for a frame of that name."""
    ranked = sorted((c for c in characters if c.action is Action.KEEP), key=lambda c: c.p95_ms)
    made: dict[str, Iterable[Row]] = {
        "server_daily": [row for character in characters for row in character.daily],
        "server_scorecard": [character.scorecard(days) for character in characters for days in (7, 30)],
        "network_summary": network(characters),
        "key_anomalies": ANOMALIES,
        "relay_candidates": [
            (AS_OF, rank, character.url, 1 - rank / 100, 0.99, character.p95_ms, at(3, 30, 23))
            for rank, character in enumerate(ranked, start=1)
        ],
        "quarantine": QUARANTINED,
    }
    made.update(rows)
    schemas: dict[str, StructType] = {name: getattr(frames, name.upper()) for name in made}
    records = {name: [dict(zip(schemas[name].names, row, strict=True)) for row in made[name]] for name in made}
    return Outputs(**{name: frame(spark, schema, records[name]) for name, schema in schemas.items()})


def network(characters: Sequence[Character]) -> list[Row]:
    return [_network_day(characters, day) for day in WINDOW.days]


def _network_day(characters: Sequence[Character], day: date) -> Row:
    rows = [row for character in characters for row in character.daily if row[1] == day]
    errors: dict[str, int] = {}
    for row in rows:
        for code, count in row[7].items():
            errors[code] = errors.get(code, 0) + count
    attempts, delivered = sum(row[2] for row in rows), sum(row[3] for row in rows)
    sick = sum(1 for each in characters if each.sick_since and each.sick_since.date() <= day)
    top = sum(sorted((row[2] for row in rows), reverse=True)[:10])
    shares = (delivered / attempts, top / attempts) if attempts else (None, None)
    return (
        day,
        len(characters),
        len(characters) - sick,
        0,
        0,
        attempts,
        delivered,
        *shares,
        90,
        700 + 10 * sick,
        errors,
        day.day % 2,
        ["07:30 to 07:52"] if day.day == 12 else [],
    )


ANOMALIES: Sequence[Row] = (
    (
        AS_OF,
        AnomalyKind.SHARED.value,
        "signing",
        "ab" * 32,
        ["https://spam.example", "https://slow.example"],
        "2 servers",
        AS_OF,
    ),
    (
        AS_OF,
        AnomalyKind.CHANGED.value,
        "signing",
        "cd" * 32,
        ["https://spam.example"],
        "changed between two snapshots",
        AS_OF,
    ),
    (AS_OF, AnomalyKind.MALFORMED.value, "encryption", None, ["https://old.example"], "31 bytes, not 32", AS_OF),
)

QUARANTINED: Sequence[Row] = (
    *((("attempts", "unknown error code", AS_OF, '{"id": 1}'),) * 3),
    ("attempts", "negative duration", AS_OF, '{"id": 2}'),
    ("servers", "malformed URL", None, '{"id": "s"}'),
)
