"""Whole federations, as this node has them on record, and what a thoughtful operator would do about each server.

Beside `truth.py`, which tells of servers one by one in daily figures, these are lives in attempts, events, deliveries
and losses, of servers beside each other, and with the outages of this node among them. The advice was written down
before any of it was computed. Days and hours are counted back from the end of the month.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from federation.analytics.frames import Action
from tests.federation.analytics.rows import (
    NOW,
    Values,
    at,
    attempt,
    delivery,
    event,
    failure,
    fingerprint,
    key,
    loss,
    refusal,
    server,
)

KEEP, WATCH, PARK, PRUNE, REVIEW = Action.KEEP, Action.WATCH, Action.PARK, Action.PRUNE, Action.REVIEW
UNTIL: Final = at("12-01 00:00")
PERMANENT: Final = frozenset({"INVALID_ACK", "INVALID_ACK_SIGNATURE", "NO_ACK", "NOT_JSON"})

Life = Callable[["Past"], None]


def ago(days: float = 0, hours: float = 0) -> datetime:
    return UNTIL - timedelta(days=days, hours=hours)


@dataclass(slots=True)
class Past:
    """What is on record of one server, and of this node beside it."""

    url: str
    registry: dict[str, object] | None = field(default_factory=dict)
    attempts: list[Values] = field(default_factory=list)
    events: list[Values] = field(default_factory=list)
    deliveries: list[Values] = field(default_factory=list)
    losses: list[Values] = field(default_factory=list)
    links: list[Values] = field(default_factory=list)
    refusals: list[Values] = field(default_factory=list)
    accepted: list[Values] = field(default_factory=list)

    def took(self, per_day: int, first: int = 29, last: int = 0) -> None:
        """Have so many delivered on each day from `first` to `last`, at even distances."""
        self._try(per_day, first, last, None)

    def failed(self, per_day: int, code: str, first: int = 29, last: int = 0) -> None:
        """Have so many attempts fail. After a final code the delivery is lost."""
        self._try(per_day, first, last, code)
        if code in PERMANENT:
            for day in range(first, last - 1, -1):
                self.lost(per_day, day)

    def _try(self, per_day: int, first: int, last: int, code: str | None) -> None:
        for day in range(first, last - 1, -1):
            for number in range(per_day):
                moment = ago(day + 1) + timedelta(hours=24 * (number + 0.5) / per_day)
                if code is None:
                    self.attempts.append(attempt(self.url, moment))
                else:
                    outcome = "permanent" if code in PERMANENT else "retryable"
                    status = int(code[5:]) if code.startswith("HTTP_") else None
                    self.attempts.append(failure(self.url, code, moment, outcome=outcome, http_status=status))

    def lost(self, number: int, day: float, state: str = "expired") -> None:
        """Have so many deliveries given up, so many days ago."""
        begin = len(self.losses)
        moment = ago(day, hours=12)
        self.losses += [
            {**loss(self.url, f"{self.url} {begin + each}", "11-02 00:00"), "lost_at": moment, "state": state}
            for each in range(number)
        ]

    def owes(self, number: int, days: float, state: str = "held") -> None:
        """Have so many deliveries wait, since so many days."""
        self.deliveries += [
            delivery(self.url, f"owed {self.url} {each}", state=state, created_at=ago(days)) for each in range(number)
        ]

    def down(self, hours: float, until: float | None = None) -> None:
        """Have it go down, and come back unless `until` is None."""
        self.events.append(event(self.url, "unhealthy", ago(hours=hours)))
        if until is not None:
            self.events.append(event(self.url, "healthy", ago(hours=until)))
        elif self.registry is not None:
            self.registry |= {"is_healthy": False, "last_seen": ago(hours=hours), "unhealthy_reason": "UNKNOWN"}

    def shows_another_key(self, days: float) -> None:
        self.links.append(
            {"server_url": self.url, "wire": "sealed", "state": "mismatch", "since": ago(days), "reason": None}
        )

    def accept(self, days: float) -> None:
        """Have an operator say, so many days ago, that its registered keys are right."""
        own = fingerprint(key(f"signing {self.url}"))
        self.accepted.append({"server_url": self.url, "fingerprint": own, "accepted_at": ago(days)})

    def blacklist(self, rule: str) -> None:
        self.refusals.append(refusal(rule))

    @property
    def registered(self) -> list[Values]:
        changes = {"last_seen": ago(hours=1), "updated_at": NOW}
        return [] if self.registry is None else [server(self.url, **{**changes, **self.registry})]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Servers beside each other: their lives, and the advice on each; None for one that nothing should be said of."""

    name: str
    lives: Mapping[str, tuple[Life, Action | None]]

    def pasts(self) -> Iterator[tuple[Past, Action | None]]:
        for name, (lived, advice) in self.lives.items():
            past = Past(name if "://" in name else f"https://{name}.example")
            lived(past)
            yield past, advice


def of(
    kind: str, lived: Callable[..., Life], advice: Mapping[object, Action | None]
) -> dict[str, tuple[Life, Action | None]]:
    """Return servers that differ in one parameter, and the advice by it."""
    return {f"{kind}-{place}": (lived(each), wanted) for place, (each, wanted) in enumerate(advice.items())}


def many(action: Action, *parameters: object) -> dict[object, Action | None]:
    return dict.fromkeys(parameters, action)


def then(*steps: Life) -> Life:
    """Return the life in which all of this happens."""

    def lived(past: Past) -> None:
        for step in steps:
            step(past)

    return lived


def took(per_day: int, first: int = 29, last: int = 0) -> Life:
    return lambda past: past.took(per_day, first, last)


def failed(per_day: int, code: str, first: int = 29, last: int = 0) -> Life:
    return lambda past: past.failed(per_day, code, first, last)


def lost(number: int, day: float, state: str = "expired") -> Life:
    return lambda past: past.lost(number, day, state)


def owes(number: int, days: float, state: str = "held") -> Life:
    return lambda past: past.owes(number, days, state)


def down(hours: float, until: float | None = None) -> Life:
    return lambda past: past.down(hours, until)


def accepted(days: float) -> Life:
    return lambda past: past.accept(days)


def shows_another_key(days: float) -> Life:
    return lambda past: past.shows_another_key(days)


def blacklisted(rule: str) -> Life:
    return lambda past: past.blacklist(rule)


def known(**registry: object) -> Life:
    """Have the registry say so of it."""

    def lived(past: Past) -> None:
        past.registry = {**(past.registry or {}), **registry}

    return lived


def stranger(past: Past) -> None:
    past.registry = None


def dead(days: float) -> Life:
    """Have it sound until it went down, so many days ago."""
    return then(*([took(5, 29, int(days) + 1)] if days < 29 else []), down(24 * days))


ACCUSED: Final = {
    # Nobody poses as a server whose posts arrive: a follow's answer of the wrong shape is a bug of it.
    **of("bad-follow", lambda n: then(took(30), failed(n, "INVALID_ACK", 6, 6)), many(WATCH, 3, 5, 9)),
    **of("bad-follow-unsigned", lambda n: then(took(30), failed(n, "NO_ACK", 4, 4)), many(WATCH, 3, 6)),
    **of("bad-follow-once", lambda n: then(took(30), failed(n, "INVALID_ACK", 4, 4)), many(KEEP, 1, 2)),
    **of("bad-follow-long-ago", lambda n: then(took(30), failed(n, "INVALID_ACK", 25, 25)), many(KEEP, 3, 5)),
    **of("bad-follows-only", lambda n: failed(n, "INVALID_ACK", 3, 3), many(WATCH, 1, 3, 5, 15)),
    **of("forged-long-ago", lambda n: then(took(30), failed(n, "INVALID_ACK_SIGNATURE", 25, 25)), many(KEEP, 2, 4, 8)),
    **of("forged-now", lambda n: then(took(n, 29, 5), failed(n, "INVALID_ACK_SIGNATURE", 4, 0)), many(REVIEW, 5, 20)),
    **of("forged-half", lambda n: then(took(n), failed(n, "INVALID_ACK_SIGNATURE", 6, 0)), many(REVIEW, 3, 10)),
    **of("forged-only", lambda n: failed(n, "INVALID_ACK_SIGNATURE", 2, 2), many(REVIEW, 3, 6, 40)),
    **of("forged-few", lambda n: then(took(30), failed(n, "INVALID_ACK_SIGNATURE", 2, 2)), many(WATCH, 3, 6)),
    **of("forged-once", lambda n: then(took(30), failed(n, "INVALID_ACK_SIGNATURE", 2, 2)), many(KEEP, 1, 2)),
    **of(
        "forged-and-accepted",
        lambda n: then(took(30), failed(n, "INVALID_ACK_SIGNATURE", 3, 3), accepted(1)),
        many(KEEP, 5, 10),
    ),
    **of(
        "forged-after-it-was-accepted",
        lambda n: then(took(10, 29, 3), accepted(10), failed(n, "INVALID_ACK_SIGNATURE", 2, 0)),
        many(REVIEW, 5, 10),
    ),
    **of("another-key", lambda days: then(took(5, 29, days), shows_another_key(days)), many(REVIEW, 2, 12)),
    **of(
        "another-key-and-accepted",
        lambda days: then(took(5, 29, days), shows_another_key(days), accepted(1)),
        many(KEEP, 1, 2),
    ),
    **of(
        "another-key-accepted-and-owed",
        lambda n: then(took(5, 29, 6), shows_another_key(5), accepted(1), owes(n, 5)),
        many(WATCH, 1, 20),
    ),
}

LOST: Final = {
    **of("lost-all", lambda n: failed(n, "NOT_JSON", 3, 3), many(WATCH, 1, 2, 5, 9)),
    **of("lost-all-long-ago", lambda n: failed(n, "NOT_JSON", 20, 20), many(WATCH, 1, 4)),
    **of("lost-its-only-one", lambda n: then(failed(n, "HTTP_404", 1, 1), lost(1, 1)), many(WATCH, 3, 5)),
    **of("lost-many-of-few", lambda n: then(took(5, 8, 8), failed(n, "NOT_JSON", 4, 4)), many(WATCH, 2, 4)),
    **of("lost-one-of-few", lambda n: then(took(n, 8, 8), failed(1, "NOT_JSON", 4, 4)), many(KEEP, 6, 12)),
    **of("lost-few-of-many", lambda n: then(took(20), failed(n, "NOT_JSON", 4, 4)), many(KEEP, 1, 3, 8)),
    **of("lost-and-mended", lambda n: then(failed(n, "NOT_JSON", 25, 25), took(2, 20, 0)), many(KEEP, 4, 9)),
    **of("expired", lambda n: then(took(5), lost(n, 2)), many(WATCH, 20, 40)),
    **of("dead-and-owed", lambda days: then(dead(days), owes(30, days)), many(PARK, 8, 15) | many(PRUNE, 35, 40)),
    **of("dead", dead, many(PARK, 8, 15, 28) | many(PRUNE, 35, 60)),
    **of("refuses", lambda n: then(failed(n, "HTTP_403", 9, 5), lost(n, 5), owes(n, 9)), many(PARK, 5, 20)),
    **of("up-and-owed", lambda n: then(took(10), owes(n, 4, "ready")), many(WATCH, 1, 50)),
    **of("owed-since-today", lambda n: then(took(10), owes(n, 0.2, "ready")), many(KEEP, 1, 50)),
    **of("silent-and-gone", lambda n: then(stranger, lost(n, 40)), {3: None, 9: None}),
    **of("forgotten", lambda n: then(down(24 * 40), stranger, lost(n, 5, "failed")), {1: None, 9: None}),
    **of("never-introduced", lambda n: then(stranger, lost(n, 5, "failed")), many(WATCH, 1, 9)),
    **of("stranger-and-owed", lambda n: then(stranger, owes(n, 2)), many(WATCH, 1, 9)),
}

CLOCKS: Final = {
    # A wrong clock wrote one value, which says nothing of the server.
    **of("seen-ahead", lambda days: then(took(20), known(last_seen=ago(-days))), many(KEEP, 2, 30, 400)),
    **of("made-ahead", lambda days: then(took(20), known(created_at=ago(-days))), many(KEEP, 2, 30, 400)),
    **of(
        "seen-ahead-and-back",
        lambda days: then(took(20), down(24 * days), known(is_healthy=True, last_seen=ago(-30))),
        many(KEEP, 5, 20),
    ),
    **of("seen-ahead-and-dead", lambda days: then(dead(days), known(last_seen=ago(-30))), {8: PARK, 40: PRUNE}),
    **of("introduced-again", lambda n: then(took(n), known(created_at=ago(hours=-2))), many(KEEP, 1, 20)),
}

REFUSED: Final = {
    "https://star.test": (then(failed(5, "HTTP_500"), blacklisted("*.star.test")), KEEP),
    "https://below.star.test": (failed(5, "HTTP_500"), KEEP),
    "https://far.below.star.test:8443": (dead(40), KEEP),
    "http://plain.star.test": (failed(5, "INVALID_ACK_SIGNATURE"), KEEP),
    "https://instar.test": (failed(5, "HTTP_500"), PARK),
    "https://star.test.other.test": (failed(5, "HTTP_500"), PARK),
    "refused": (then(failed(5, "HTTP_500"), blacklisted("https://refused.example")), KEEP),
}

ORDINARY: Final = World(name="ordinary", lives={**ACCUSED, **LOST, **CLOCKS, **REFUSED})

CUTS: Final = tuple(24.0 * day + 7.5 for day in (25, 16, 7))
"""Hours ago at which the uplink was away for 20 minutes."""


def through_cuts(lateness: int, *, per_day: int = 5) -> Life:
    """Have it down by our account whenever the uplink was away; it is probed some minutes after that ended."""
    minutes = 20 + lateness % 9
    return then(took(per_day), *(down(cut - lateness % 5 / 60, cut - minutes / 60) for cut in CUTS))


UPLINK: Final = World(
    name="uplink",
    lives={
        **of("peer", through_cuts, many(KEEP, *range(25))),
        "flaps": (then(through_cuts(3), *(down(24 * day, 24 * day - 2) for day in (20, 12, 11, 4))), WATCH),
        "stayed-away": (then(took(5, 29, 8), down(CUTS[0], CUTS[0] - 0.4), down(CUTS[2])), PARK),
        "dead-before": (dead(12), PARK),
        "newcomer": (then(took(5, 3, 0), known(created_at=ago(4))), KEEP),
    },
)

OFF: Final = World(
    # This node was switched off 35 days ago, and runs again since the last hour.
    name="off",
    lives={
        **of("sound", lambda n: known(last_seen=ago(35, hours=n), updated_at=ago(35)), many(KEEP, *range(1, 16))),
        **of(
            "by-the-last-breath",
            lambda n: then(down(35 * 24 + n / 60), known(updated_at=ago(35))),
            many(KEEP, *range(1, 6)),
        ),
    },
)

OFF_FOR_DAYS: Final = World(
    name="off for a week, two weeks ago",
    lives={
        **of("sound", lambda n: then(took(n, 29, 21), took(n, 13, 0)), many(KEEP, *range(1, 11))),
        **of(
            "back-since",
            lambda n: then(took(5, 29, 21), down(21 * 24 + n / 60, 14 * 24 - 1), took(5, 13, 0)),
            many(KEEP, *range(1, 4)),
        ),
        # Of these days nobody saw more than the last two.
        "away-before-and-now": (then(took(5, 29, 21), took(5, 13, 2), down(48)), WATCH),
    },
)

CUT_OFF: Final = World(
    name="cut off for four days, until now",
    lives={
        **of(
            "peer",
            lambda n: then(took(5, 29, 4), failed(2, "TIMEOUT", 3, 3), down(96 - n / 60), owes(5, 3)),
            many(KEEP, *range(12)),
        ),
        "dead-before": (dead(12), PARK),
    },
)

QUIET: Final = World(
    # Two posts a week: that little happens does not say that this node was off.
    name="quiet",
    lives={
        **of("peer", lambda n: then(*(took(1, day, day) for day in (27, 23, 20, 16, 13, 9, 6, 2))), many(KEEP, 1, 2)),
        "dead": (dead(40), PRUNE),
        "dead-for-a-week": (then(took(1, 27, 27), took(1, 20, 20), took(1, 9, 9), down(24 * 7)), PARK),
    },
)

HOSTER: Final = World(
    # They went together, and the others did not: it was not us.
    name="a hoster that failed",
    lives={
        **of("gone", lambda n: then(took(n + 3, 29, 6), down(24 * 5 + 10)), many(PARK, *range(6))),
        **of("elsewhere", lambda n: took(n + 3), many(KEEP, 1, 2)),
    },
)

WORLDS: Final = (ORDINARY, UPLINK, OFF, OFF_FOR_DAYS, CUT_OFF, QUIET, HOSTER)
