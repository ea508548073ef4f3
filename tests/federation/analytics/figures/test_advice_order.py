"""Who does better is never advised worse."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Final

import pytest
from pyspark.sql import SparkSession

from federation.analytics.figures.keys import key_anomalies
from federation.analytics.figures.outages import find_outages
from federation.analytics.figures.scorecard import server_scorecard
from federation.analytics.frames import (
    BLACKLIST,
    DELIVERIES,
    HEALTH_EVENTS,
    LOSSES,
    SERVER_DAILY,
    SERVERS,
    Action,
    Keep,
)
from tests.federation.analytics.rows import WINDOW, Values, at, daily, days, delivery, event, frame, server

PAIRS: Final = 1_000
UNTIL: Final = at("12-01 00:00")
DAYS: Final = days("11-01", "11-30")
GRAVITY: Final = (Action.KEEP, Action.WATCH, Action.PARK, Action.PRUNE)


class History:
    """What one server did: its attempts of some days, one after the other, and its outages."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        quality = chance.choice((0, 0.5, 0.85, 0.9, 0.95, 1))
        self.days = {
            day: [self._attempt(quality) for _ in range(chance.choice((1, 3, 10, 30)))]
            for day in chance.sample(DAYS, chance.choice((0, 1, 2, 5, 20)))
        }
        self.outages = self._outages()
        self.owed_days = chance.choice((None, None, 1, 5))

    def _attempt(self, quality: float) -> str:
        if self._chance.random() < quality:
            return self._chance.choices(("quick", "slow", "relayed"), (20, self._chance.choice((0, 3)), 1))[0]
        return self._chance.choices(("failed", "ours"), (10, 1))[0]

    def _outages(self) -> list[tuple[float, float]]:
        """Begins and lengths, in hours before the window's end; the last one may go on."""
        if self._chance.random() < 0.6:
            return []
        begins = sorted((self._chance.uniform(1, 45 * 24) for _ in range(self._chance.choice((1, 1, 3)))), reverse=True)
        ends = [*begins[1:], self._chance.choice((0.0, -1.0))]
        return [(begin, begin - end) for begin, end in zip(begins, ends, strict=True)]

    def improve(self) -> None:
        """Deliver directly what failed, or end an outage earlier."""
        failed = [
            (day, at) for day, attempts in self.days.items() for at, how in enumerate(attempts) if how == "failed"
        ]
        if failed and (not self.outages or self._chance.random() < 0.7):
            how = self._chance.choice(("quick", "slow"))
            for day, at_ in self._chance.sample(failed, self._chance.randint(1, len(failed))):
                self.days[day][at_] = how
        elif self.outages:
            at_ = self._chance.randrange(len(self.outages))
            begin, length = self.outages[at_]
            self.outages[at_] = (begin, length * self._chance.uniform(0.01, 0.99))

    def daily(self, url: str) -> list[Values]:
        return [_row(url, day, attempts) for day, attempts in self.days.items()]

    def events(self, url: str) -> list[Values]:
        changes: list[Values] = []
        for begin, length in self.outages:
            changes.append(event(url, "unhealthy", UNTIL - timedelta(hours=begin)))
            if begin - length >= 0:
                changes.append(event(url, "healthy", UNTIL - timedelta(hours=begin - length)))
        return changes

    @property
    def is_down(self) -> bool:
        return any(begin - length < 0 for begin, length in self.outages)


def _row(url: str, day: str, attempts: list[str]) -> Values:
    delivered = sum(how in ("quick", "slow", "relayed") for how in attempts)
    errors = {code: attempts.count(how) for how, code in (("failed", "TIMEOUT"), ("ours", "DATABASE"))}
    p95 = 9_000 if "slow" in attempts else 100
    return daily(
        url,
        day,
        delivered=delivered,
        attempts=len(attempts),
        retryable=len(attempts) - delivered,
        errors={code: count for code, count in errors.items() if count},
        relayed_share=attempts.count("relayed") / delivered if delivered else None,
        availability=delivered / len(attempts),
        p95_ms=p95 if delivered else None,
        slow=attempts.count("slow"),
    )


@pytest.mark.full
def test_who_does_better_is_never_advised_worse(spark: SparkSession, keep: Keep) -> None:
    """With the same attempts, keys and blacklist, more direct deliveries or shorter outages bring no graver advice."""
    rows: list[Values] = []
    events: list[Values] = []
    registry: list[Values] = []
    owed: list[Values] = []
    for number in range(PAIRS):
        history = History(random.Random(number))
        for name in ("before", "better"):
            url = f"https://{name}-{number}.example"
            rows += history.daily(url)
            events += history.events(url)
            registry.append(server(url, is_healthy=not history.is_down, last_seen=UNTIL))
            if history.owed_days is not None:
                owed.append(delivery(url, url, created_at=UNTIL - timedelta(days=history.owed_days)))
            history.improve()
    servers = frame(spark, SERVERS, registry)
    cards = server_scorecard(
        frame(spark, SERVER_DAILY, rows),
        servers=servers,
        blacklist=frame(spark, BLACKLIST),
        outages=find_outages(frame(spark, HEALTH_EVENTS, events), servers, until=UNTIL),
        anomalies=key_anomalies(servers, earlier=None, window=WINDOW),
        deliveries=frame(spark, DELIVERIES, owed),
        losses=frame(spark, LOSSES),
        window=WINDOW,
        until=UNTIL,
        keep=keep,
    )
    found = {
        (row["server_url"], row["window_days"]): (GRAVITY.index(Action(row["action"])), row["reasons"])
        for row in cards.select("server_url", "window_days", "action", "reasons").collect()
    }
    seen = set()
    for number in range(PAIRS):
        for length in (7, 30):
            before = found[f"https://before-{number}.example", length]
            better = found[f"https://better-{number}.example", length]
            assert better[0] <= before[0], (number, length, before, better)
            seen.add((before[0], better[0]))
    assert {(1, 0), (2, 0), (2, 1), (3, 2)} <= seen  # improvements of each kind were among them
