"""Three hundred servers, and what a thoughtful operator would do about each.

The advice was written down from the lives alone, before any of it was computed: keep (there is nothing to do), watch
(look at it again), park (nothing gets there: tell its operator), prune (it will not come back), review (somebody may
pose as it). Days and hours are counted back from the end of the month, and day 0 is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from federation.analytics.frames import Action

KEEP, WATCH, PARK, PRUNE, REVIEW = Action.KEEP, Action.WATCH, Action.PARK, Action.PRUNE, Action.REVIEW
ALL_MONTH: Final = (29, 0)

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """Days on which it was tried so often, of which this share arrived; the rest failed with `code`."""

    per_day: int
    share: float
    days: tuple[int, int]
    every: int
    code: str
    slow: float
    relayed: float
    p95_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What is on record of one server.

    `outages` are begins and ends in hours ago, None for an end that no event tells: it is down, unless it was
    `seen_well`. `unseen_days` says that the registry knows it to be down, and no event does. `keys` names what is odd
    about them. `owed` is how many deliveries wait, and since how many days.
    """

    spells: tuple[Spell, ...] = ()
    outages: tuple[tuple[float, float | None], ...] = ()
    known_days: float = 200
    unseen_days: float | None = None
    seen_well: bool = False
    is_registered: bool = True
    is_blacklisted: bool = False
    keys: str = ""
    owed: tuple[int, float] = (0, 0)
    lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[P]):
    """Lives that differ in one parameter, and the advice by it."""

    name: str
    life: Callable[[P], Life]
    advice: Mapping[P, Action]

    def servers(self) -> Iterator[tuple[str, Life, Action]]:
        """Yield each one's name, life and advice."""
        for place, (parameter, advice) in enumerate(self.advice.items()):
            yield f"{self.name}-{place}", self.life(parameter), advice


def tried(
    per_day: int,
    share: float = 1,
    days: tuple[int, int] = ALL_MONTH,
    *,
    every: int = 1,
    code: str = "TIMEOUT",
    slow: float = 0,
    relayed: float = 0,
    p95_ms: int = 300,
) -> Spell:
    return Spell(
        per_day=per_day, share=share, days=days, every=every, code=code, slow=slow, relayed=relayed, p95_ms=p95_ms
    )


def life(*spells: Spell, **known: Any) -> Life:  # Any: what `Life` takes
    return Life(spells=spells, **known)


def down_for(hours: float, **known: Any) -> Life:  # Any: what `Life` takes
    """Sound until it went down; since then what is owed is held, and nothing is attempted."""
    first = int(hours // 24) + 1
    spells = (tried(20, days=(29, first)),) if first <= 29 else ()
    return Life(spells=spells, outages=((hours, None),), **known)


def back_after(hours: float, ago: float) -> Life:
    """Sound, then down for so many hours, and up again since `ago`."""
    first, last = int((hours + ago) // 24) + 1, int(ago // 24)
    before = (tried(20, days=(29, first)),) if first <= 29 else ()
    return Life(spells=(*before, tried(20, days=(last, 0))), outages=((hours + ago, ago),))


def often_down(times: int, hours: float, days: int = 28) -> Life:
    """Down so many times within the last `days`, evenly spread, and up now."""
    step = days * 24 / times
    return Life(
        spells=(tried(20),), outages=tuple((step * n + hours + 2, step * n + 2) for n in reversed(range(times)))
    )


def many(action: Action, *parameters: P) -> dict[P, Action]:
    return dict.fromkeys(parameters, action)


TRAFFIC: Final = (
    Kind(name="sound", life=lambda n: life(tried(n)), advice=many(KEEP, 1, 3, 10, 30, 100, 300, 1000, 5000)),
    Kind(
        # Each delivery has five attempts, so all of them arrive.
        name="now-and-then-a-failure",
        life=lambda share: life(tried(100, share)),
        advice=many(KEEP, 0.99, 0.98, 0.97, 0.96, 0.95, 0.94, 0.93, 0.92, 0.91),
    ),
    Kind(
        name="unreliable",
        life=lambda share: life(tried(100, share)),
        advice=many(WATCH, 0.88, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01),
    ),
    Kind(name="half", life=lambda n: life(tried(n, 0.5)), advice=many(WATCH, 2, 6, 40, 1000)),
    Kind(
        name="half-by-code",
        life=lambda code: life(tried(20, 0.5, code=code)),
        advice=many(WATCH, "HTTP_500", "HTTP_503", "HTTP_429", "CONN_RESET", "NO_ACK", "HTTP_404", "NOT_JSON"),
    ),
    Kind(
        name="refuses-all",
        # After five attempts a delivery is lost: of few, each counts.
        life=lambda n: life(tried(n, 0, days=(3, 3), code="HTTP_403"), lost=-(-n // 5)),
        advice=many(WATCH, 1, 3, 5, 10, 12, 15, 19) | many(PARK, 20, 30, 50, 100, 500),
    ),
    Kind(
        name="refuses-all-month",
        life=lambda every: life(tried(1, 0, every=every, code="HTTP_500"), lost=1),
        advice={1: PARK, 2: WATCH, 3: WATCH, 6: WATCH},
    ),
    Kind(
        name="takes-nothing-by-code",
        life=lambda code: life(tried(5, 0, days=(9, 0), code=code)),
        advice=many(PARK, "NO_ACK", "NOT_JSON", "HTTP_404", "HTTP_401", "DISCOVERY_REFUSED", "HTTP_503"),
    ),
    # It says itself that it is gone for good.
    Kind(name="gone", life=lambda n: life(tried(n, 0, days=(14, 0), code="HTTP_410")), advice={3: PRUNE}),
    Kind(
        name="few-attempts",
        life=lambda arrived: life(tried(9, arrived / 9, days=(2, 2)), lost=0 if arrived else 2),
        advice={0: WATCH} | many(KEEP, 1, 2, 4, 6, 8, 9),
    ),
    Kind(
        name="ten-attempts",
        life=lambda arrived: life(tried(10, arrived / 10, days=(2, 2))),
        advice=many(WATCH, 0, 1, 5, 7, 8) | many(KEEP, 9, 10),
    ),
    Kind(
        name="fails-lately",
        life=lambda share: life(tried(10, days=(29, 3)), tried(10, share, days=(2, 0))),
        advice=many(WATCH, 0.8, 0.5, 0.2),
    ),
    Kind(
        name="takes-nothing-since",
        life=lambda days: life(tried(10, days=(29, days)), tried(10, 0, days=(days - 1, 0), code="HTTP_500")),
        advice=many(WATCH, 1, 2) | many(PARK, 3, 4, 6, 10, 20),
    ),
    Kind(
        # Well for a week is well.
        name="bad-until",
        life=lambda days: life(tried(10, 0.5, days=(29, days)), tried(10, days=(days - 1, 0))),
        advice=many(WATCH, 1, 2, 3, 5) | many(KEEP, 10, 16, 20, 25),
    ),
    Kind(
        name="one-bad-day",
        life=lambda day: life(
            tried(50, days=(29, day + 1)),
            tried(50, 0, days=(day, day)),
            *([tried(50, days=(day - 1, 0))] if day else []),
        ),
        advice=many(WATCH, 0, 1, 2) | many(KEEP, 5, 6, 10, 20),
    ),
    Kind(
        name="slow",
        life=lambda share: life(tried(40, slow=share, p95_ms=8000 if share > 0.05 else 2000)),
        advice=many(KEEP, 0, 0.025, 0.05) | many(WATCH, 0.2, 0.5, 0.9, 1),
    ),
    Kind(name="not-quick", life=lambda p95: life(tried(40, p95_ms=p95)), advice=many(KEEP, 1000, 2000, 3000, 4900)),
    Kind(
        name="slow-and-few",
        life=lambda n: life(tried(n, days=(4, 4), slow=1, p95_ms=9000)),
        advice=many(KEEP, 1, 5, 9) | many(WATCH, 12, 30),
    ),
    Kind(
        name="slow-until",
        life=lambda days: life(tried(20, days=(29, days), slow=1, p95_ms=9000), tried(20, days=(days - 1, 0))),
        advice=many(WATCH, 1, 3) | many(KEEP, 16, 20),
    ),
    Kind(
        # The direct way is broken where most come by another.
        name="relayed",
        life=lambda share: life(tried(20, relayed=share)),
        advice=many(KEEP, 0.05, 0.1, 0.3, 0.5) | many(WATCH, 0.8, 0.95, 1),
    ),
    Kind(
        name="relayed-and-few",
        life=lambda n: life(tried(n, days=(5, 5), relayed=1)),
        advice=many(KEEP, 1, 3) | many(WATCH, 10, 20),
    ),
    Kind(
        name="our-own-fault",
        life=lambda code: life(tried(10, 0, code=code)),
        advice=many(
            KEEP, "DATABASE", "INTERNAL", "STALLED", "NO_RECEIVER", "BLOCKED_URL", "INVALID_PAYLOAD", "NO_OWN_KEYS"
        ),
    ),
    Kind(
        name="our-own-fault-among-good",
        life=lambda share: life(tried(50, share, code="INTERNAL")),
        advice=many(KEEP, 0.9, 0.5, 0.2),
    ),
    Kind(name="idle", life=lambda days: life(known_days=days), advice=many(KEEP, 1, 5, 30, 90, 400)),
    Kind(
        name="newcomer",
        life=lambda n: life(tried(n, days=(1, 0)), known_days=2),
        advice=many(KEEP, 1, 2, 5, 20, 100),
    ),
    Kind(
        name="newcomer-that-stumbles",
        life=lambda n: life(tried(n, 0.5, days=(0, 0)), known_days=1),
        advice=many(KEEP, 2, 4, 8) | many(WATCH, 20, 40, 100),
    ),
    Kind(
        name="busy-until",
        life=lambda days: life(tried(50, days=(29, days))),
        advice=many(KEEP, 5, 10, 20, 28),
    ),
)

HEALTH: Final = (
    Kind(
        name="down-for-hours",
        life=down_for,
        advice=many(WATCH, 0.2, 1, 3, 6, 12, 24, 36, 48, 60, 71)
        | many(PARK, 73, 80, 96, 120, 168, 240, 336, 480, 600, 700),
    ),
    Kind(name="down-for-days", life=lambda days: down_for(24 * days), advice=many(PRUNE, 31, 35, 40, 60, 90, 200)),
    Kind(
        name="down-without-an-event",
        life=lambda days: life(unseen_days=days),
        advice=many(WATCH, 1, 2) | many(PARK, 4, 10, 20, 29) | many(PRUNE, 31, 45, 100),
    ),
    Kind(
        name="down-and-relayed",
        life=lambda days: life(tried(5, relayed=1), outages=((24 * days, None),)),
        advice={1: WATCH, 2: WATCH} | many(PARK, 5, 10, 35, 60),
    ),
    Kind(
        # It lives, wherever it is: relays got through this month.
        name="down-and-relayed-last-week",
        life=lambda days: life(tried(5, days=(29, 10), relayed=1), outages=((24 * days, None),)),
        advice=many(PARK, 40, 60),
    ),
    Kind(
        name="back-after",
        life=lambda spell: back_after(*spell),
        advice=many(KEEP, (5, 1), (24, 2), (72, 5), (120, 1), (240, 24), (500, 48)),
    ),
    Kind(
        # Somebody updates it.
        name="restarts",
        life=lambda times: often_down(times, 0.05),
        advice=many(KEEP, 1, 2, 3, 5) | many(WATCH, 8, 15, 28),
    ),
    Kind(
        name="flaps",
        life=lambda times: often_down(times, 5),
        advice=many(KEEP, 1, 2) | many(WATCH, 3, 4, 6, 10, 20),
    ),
    Kind(name="flaps-this-week", life=lambda times: often_down(times, 2, days=6), advice=many(WATCH, 3, 5, 10)),
    Kind(name="down-every-weekend", life=lambda hours: often_down(4, hours), advice=many(WATCH, 12, 40)),
    Kind(name="off-at-night", life=lambda hours: often_down(28, hours), advice=many(WATCH, 4, 8)),
    Kind(
        # The registry has seen it since.
        name="end-not-on-record",
        life=lambda days: life(tried(20), outages=((24 * days, None),), seen_well=True),
        advice=many(KEEP, 1, 5),
    ),
    Kind(
        name="unreliable-and-down",
        life=lambda hours: life(tried(20, 0.6, days=(29, int(hours // 24) + 1)), outages=((hours, None),)),
        advice={5: WATCH, 50: WATCH, 100: PARK, 400: PARK},
    ),
    Kind(
        name="down-with-much-owed",
        life=lambda hours: down_for(hours, owed=(100, hours / 24)),
        advice={10: WATCH, 100: PARK, 400: PARK, 800: PRUNE},
    ),
    Kind(
        # It is up, so why is it not sent?
        name="owed-for-days",
        life=lambda days: life(tried(5, days=(29, 8)), owed=(30, days)),
        advice=many(KEEP, 0.05, 0.5, 1) | many(WATCH, 4, 6, 20),
    ),
    Kind(name="lost-some", life=lambda n: life(tried(20, 0.95), lost=n), advice=many(KEEP, 1, 3, 10)),
    Kind(name="lost-many", life=lambda n: life(tried(20, 0.5, code="HTTP_403"), lost=n), advice=many(WATCH, 50, 150)),
)

IDENTITY: Final = (
    Kind(
        name="forged-answers",
        life=lambda n: life(
            tried(200, days=(29, 3)), tried(200, 1 - n / 200, days=(2, 2), code="INVALID_ACK_SIGNATURE")
        ),
        advice=many(KEEP, 1, 2) | many(WATCH, 3, 10) | many(REVIEW, 100),
    ),
    Kind(
        name="unproven-answers",
        # Of the wrong shape: a bug of it proves nothing about who it is.
        life=lambda n: life(tried(n, 0, days=(20, 20), code="INVALID_ACK"), lost=n),
        advice={2: WATCH, 5: WATCH, 40: PARK},
    ),
    Kind(
        name="keys",
        life=lambda keys: life(tried(20), keys=keys),
        advice={
            "shared, first of two": REVIEW,
            "shared, second of two": REVIEW,
            "one for both uses": REVIEW,
            "signing key changed alone": REVIEW,
            "encryption key changed alone": REVIEW,
            "row replaced": REVIEW,
            "another is shown": REVIEW,
            "malformed signing key": WATCH,
            "malformed encryption key": WATCH,
            "rotated": KEEP,
            "changed alone and accepted": KEEP,
            "row replaced and accepted": KEEP,
            "accepted, first of two": KEEP,
            "accepted, second of two": KEEP,
        },
    ),
    Kind(
        name="keys-of-one-that-is-down",
        life=lambda keys: down_for(100, keys=keys),
        advice={"row replaced": REVIEW, "another is shown": REVIEW, "malformed signing key": PARK, "rotated": PARK},
    ),
    Kind(
        name="blacklisted",
        life=lambda lived: lived,
        advice=many(
            KEEP,
            life(is_blacklisted=True),
            life(tried(20), is_blacklisted=True),
            life(tried(20, 0, code="BLACKLISTED"), is_blacklisted=True),
            life(tried(20, 0), is_blacklisted=True),
            life(outages=((100, None),), is_blacklisted=True),
            life(outages=((1000, None),), is_blacklisted=True),
            life(keys="row replaced", is_blacklisted=True),
        ),
    ),
    Kind(
        name="not-in-the-registry",
        life=lambda n: life(tried(n), is_registered=False),
        advice=many(WATCH, 1, 10, 50),
    ),
    Kind(
        name="not-in-the-registry-and-silent",
        life=lambda n: life(tried(n, 0, code="DISCOVERY"), is_registered=False, owed=(n, 2)),
        advice=many(PARK, 1, 5, 20),
    ),
    Kind(
        name="not-in-the-registry-and-owed",
        life=lambda n: life(is_registered=False, owed=(n, 2)),
        advice=many(WATCH, 1, 20),
    ),
)


COMBINED: Final = (
    Kind(
        name="two-troubles",
        life=lambda lived: lived,
        advice={
            life(tried(20, slow=1, relayed=1, p95_ms=9000)): WATCH,
            life(tried(20), outages=((500, 490), (400, 390), (300, 290), (80, None))): PARK,
            life(tried(20, 0.5, days=(29, 8))): WATCH,
            life(outages=((960, None),), keys="row replaced"): REVIEW,
            life(tried(20, 0.6), is_registered=False): WATCH,
        },
    ),
)

EVERYBODY: Final = [server for kind in (*TRAFFIC, *HEALTH, *IDENTITY, *COMBINED) for server in kind.servers()]
