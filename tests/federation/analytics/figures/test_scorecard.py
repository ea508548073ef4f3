"""Scorecards and advice, against figures worked out by hand. The last 7 days are 24 to 30 November."""

from __future__ import annotations

from typing import Final

import pytest
from pyspark.sql import Row, SparkSession

from federation.analytics.figures.keys import key_anomalies
from federation.analytics.figures.outages import find_outages
from federation.analytics.figures.scorecard import server_scorecard
from federation.analytics.frames import (
    BLACKLIST,
    DELIVERIES,
    HEALTH_EVENTS,
    LINKS,
    LOSSES,
    SERVER_DAILY,
    SERVER_SCORECARD,
    SERVERS,
    Keep,
)
from tests.federation.analytics.rows import (
    WINDOW,
    Values,
    at,
    columns,
    daily,
    days,
    delivery,
    event,
    frame,
    key,
    loss,
    refusal,
    server,
)

SICK: Final = {"is_healthy": False, "unhealthy_reason": "TLS_ERROR"}
LAST_WEEK: Final = days("11-24", "11-30")


def _url(name: str) -> str:
    return f"https://{name}.example"


def _mixed(name: str, day: str, *, delivered: int, **errors: int) -> Values:
    """A day with failures of these codes beside the deliveries."""
    attempts = delivered + sum(errors.values())
    changes = {"attempts": attempts, "retryable": attempts - delivered, "errors": errors}
    return daily(_url(name), day, delivered=delivered, availability=delivered / attempts, **changes)


DOWN_SINCE: Final = {
    "down-long": "10-20 00:00",
    "down-18-days": "11-12 09:00",
    "down-today": "11-30 20:00",
    "down-but-relayed": "10-20 00:00",
}
REGISTRY: Final = [
    *(server(_url(name), **SICK) for name in DOWN_SINCE if name != "down-today"),
    server(_url("down-today"), is_healthy=False, unhealthy_reason="UNKNOWN"),
    *(
        server(_url(name))
        for name in ("fine", "idle", "half", "ours", "silent", "worse", "better", "few", "relayed", "held-some")
    ),
    *(server(_url(name)) for name in ("worst", "never", "slow", "flapping", "forger", "badly", "refused")),
    server(_url("twin-1"), public_key=key("common")),
    server(_url("twin-2"), public_key=key("common")),
    server(_url("keyless"), encryption_public_key="?"),
    server(_url("unborn"), created_at=at("12-01 00:00")),
]
DAILY: Final = [
    *(daily(_url("fine"), day, delivered=100) for day in days("10-31", "11-30")),
    # 30 days before the window's end is 1 November: what is earlier counts nowhere, nor does what is later.
    daily(_url("fine"), "12-01", delivered=1000),
    _mixed("half", "11-30", delivered=30, TIMEOUT=20, HTTP_503=20, NOT_JSON=10),
    _mixed("half", "11-10", delivered=40, DNS_BLOCKED=80),
    _mixed("ours", "11-30", delivered=10, DATABASE=50, INTERNAL=20),
    _mixed("silent", "11-28", delivered=0, CONN_REFUSED=25) | {"p95_ms": None},
    *(_mixed("worse", day, delivered=10) for day in days("11-24", "11-27")),
    *(_mixed("worse", day, delivered=19, TIMEOUT=1) for day in days("11-28", "11-30")),
    *(_mixed("worst", day, delivered=20) for day in days("11-24", "11-27")),
    *(_mixed("worst", day, delivered=3, TIMEOUT=1) for day in days("11-28", "11-30")),
    _mixed("never", "11-29", delivered=0, HTTP_403=19) | {"p95_ms": None},
    *(_mixed("better", day, delivered=5, TIMEOUT=5) for day in days("11-24", "11-27")),
    *(_mixed("better", day, delivered=10) for day in days("11-28", "11-30")),
    *(_mixed("few", day, delivered=1) for day in days("11-24", "11-27")),
    _mixed("few", "11-30", delivered=0, TIMEOUT=9) | {"p95_ms": None},
    *(daily(_url("relayed"), day, delivered=4, relayed_share=1.0) for day in LAST_WEEK),
    daily(_url("down-but-relayed"), "11-25", delivered=2, relayed_share=1.0),
    # A typical day's p95: of 100 deliveries 60 were on days with one of 8 s.
    daily(_url("slow"), "11-27", delivered=40, p95_ms=1_000),
    daily(_url("slow"), "11-28", delivered=30, p95_ms=8_000, slow=10),
    daily(_url("slow"), "11-29", delivered=30, p95_ms=8_000, slow=None),
    daily(_url("slow"), "11-30", delivered=5, slow=5),
    *(daily(_url("flapping"), day, delivered=10) for day in LAST_WEEK),
    _mixed("forger", "11-29", delivered=54, INVALID_ACK_SIGNATURE=6),
    _mixed("badly", "11-29", delivered=50, INVALID_ACK=2, NO_ACK=1),
    _mixed("refused", "11-29", delivered=0, BLACKLISTED=40) | {"p95_ms": None},
    daily(_url("held-some"), "11-29", delivered=10),
    *(daily(_url(name), "11-29", delivered=10) for name in ("twin-1", "twin-2", "keyless", "stranger", "fediverse")),
]
EVENTS: Final = [
    *(event(_url(name), "unhealthy", moment) for name, moment in DOWN_SINCE.items()),
    *(
        event(_url("flapping"), state, f"11-{day} {hour}:00")
        for day in (25, 26, 27)
        for hour, state in (("10", "unhealthy"), ("15", "healthy"))
    ),
]
OWED: Final = [
    delivery(_url("down-18-days"), "a", state="held", created_at=at("11-13 12:00")),
    delivery(_url("down-18-days"), "b", state="held"),
    delivery(_url("down-18-days"), "c"),
    delivery(_url("down-18-days"), "d", state="expired", settled_at=at("11-29 12:00")),
    delivery(_url("down-18-days"), "e", state="failed", error_code="TIMEOUT", settled_at=at("11-29 12:00")),
    delivery(_url("held-only"), "f", state="held"),
    *(delivery(_url("held-some"), f"held {each}", state="held") for each in range(2)),
]
LINKS_OF_WIRES: Final = [
    {"server_url": _url(name), "wire": wire, "state": "up", "since": at("11-01 12:00"), "reason": None}
    for name, wire in (
        ("stranger", "sealed"),
        ("fediverse", "activitypub"),
        ("fine", "sealed"),
        ("fine", "activitypub"),
    )
]
LOST: Final = [
    loss(_url("down-18-days"), "g", "11-05 12:00"),
    loss(_url("down-18-days"), "e", "11-29 12:00"),  # its row is not purged yet
    loss(_url("down-18-days"), "h", "10-05 12:00"),
    *(loss(_url("held-some"), f"lost {each}", "11-29 12:00") for each in range(3)),
    # An operator forgot it, and nothing is owed to it: nobody asks.
    loss(_url("forgotten"), "i", "11-25 12:00"),
]


@pytest.fixture(scope="module")
def cards(spark: SparkSession, keep: Keep) -> dict[tuple[str, int], Row]:
    """All scorecards, by server and window."""
    servers = frame(spark, SERVERS, REGISTRY)
    result = server_scorecard(
        frame(spark, SERVER_DAILY, DAILY),
        servers=servers,
        blacklist=frame(spark, BLACKLIST, [refusal(_url("refused")), refusal(_url("refused"), "11-09 00:00", "lies")]),
        outages=find_outages(frame(spark, HEALTH_EVENTS, EVENTS), servers, until=at("12-01 00:00")),
        anomalies=key_anomalies(servers, earlier=None, window=WINDOW),
        deliveries=frame(spark, DELIVERIES, OWED),
        losses=frame(spark, LOSSES, LOST),
        links=frame(spark, LINKS, LINKS_OF_WIRES),
        window=WINDOW,
        until=at("12-01 00:00"),
        keep=keep,
    )
    assert columns(result.schema) == columns(SERVER_SCORECARD)
    return {(row["server_url"], row["window_days"]): row for row in result.collect()}


def test_every_known_server_has_a_card_per_window(cards: dict[tuple[str, int], Row]) -> None:
    """Also those never attempted, and those that only attempts or deliveries name; not those of after the window."""
    known = {row["url"] for row in REGISTRY} - {_url("unborn")} | {
        _url("stranger"),
        _url("held-only"),
        _url("fediverse"),
    }
    assert set(cards) == {(url, length) for url in known for length in (7, 30)}
    assert {row["as_of"] for row in cards.values()} == {WINDOW.as_of}


def test_a_window_is_so_many_days_to_its_last(cards: dict[tuple[str, int], Row]) -> None:
    """Days before and after it do not count."""
    assert (cards[_url("fine"), 7]["attempts"], cards[_url("fine"), 30]["attempts"]) == (700, 3000)


def test_a_server_that_does_everything_right_scores_100(cards: dict[tuple[str, int], Row]) -> None:
    """It is to be kept, and the reason is how well it does."""
    card = cards[_url("fine"), 30]
    assert (card["score"], card["availability"], card["trend"]) == (pytest.approx(100), 1.0, "stable")
    assert (card["action"], card["reasons"]) == ("keep", ["100.0 % of 700 attempts in 7 days delivered"])
    assert (card["state"], card["state_since"], card["top_error"]) == (
        "healthy",
        at("09-01 00:00").replace(tzinfo=None),
        None,
    )


def test_scores_follow_the_formula(cards: dict[tuple[str, int], Row]) -> None:
    """0.6 of reliability, 0.3 of uptime, 0.1 of latency, what is unknown left out."""
    assert cards[_url("half"), 7]["score"] == pytest.approx(100 * (0.6 * 30 / 80 + 0.3 + 0.1))
    assert cards[_url("half"), 30]["score"] == pytest.approx(100 * (0.6 * 70 / 200 + 0.3 + 0.1))
    assert cards[_url("slow"), 7]["score"] == pytest.approx(100 * (0.6 + 0.3 + 0.1 * (15 - 8) / 14))
    # Nothing delivered, so no latency.
    assert cards[_url("silent"), 7]["score"] == pytest.approx(100 * 0.3 / 0.9)
    assert cards[_url("idle"), 7]["score"] == pytest.approx(100)


def test_what_is_down_or_waits_lowers_the_score(cards: dict[tuple[str, int], Row]) -> None:
    """By a third for each day down; by the part that did not arrive, as it is owed, or lost for good."""
    away = 4 / 24
    assert cards[_url("down-today"), 30]["score"] == pytest.approx(100 * (1 - away / 30) * (1 - away / 3))
    assert cards[_url("down-18-days"), 30]["score"] == cards[_url("down-but-relayed"), 30]["score"] == 0
    assert cards[_url("held-some"), 7]["score"] == pytest.approx(100 * 10 / (10 + 2 + 3))


def test_our_own_faults_count_neither_way(cards: dict[tuple[str, int], Row]) -> None:
    """Seven of eight attempts failed, none of them through the server: it is as reliable as can be."""
    card = cards[_url("ours"), 7]
    assert (card["availability"], card["score"], card["action"]) == (0.125, pytest.approx(100), "keep")
    assert card["reasons"] == ["100.0 % of 10 attempts in 7 days delivered"]


@pytest.mark.parametrize(
    ("name", "trend", "change"),
    [
        ("worse", "worsening", 57 / 60 - 1),
        ("better", "improving", 0.5),
        ("few", "unknown", None),
        ("idle", "unknown", None),
    ],
)
def test_the_trend_is_the_last_days_against_those_before(
    cards: dict[tuple[str, int], Row], name: str, trend: str, change: float | None
) -> None:
    """The last 3 days of 7; with fewer than 10 attempts on either side nobody can tell."""
    card = cards[_url(name), 7]
    assert (card["trend"], card["trend_change"]) == (trend, pytest.approx(change))


@pytest.mark.parametrize(
    ("name", "window_days", "action", "reasons"),
    [
        ("down-long", 30, "prune", ["down since 2026-10-20 (42 days), last error TLS_ERROR"]),
        (
            "down-18-days",
            30,
            "park",
            [
                "down since 2026-11-12 (18 days), last error TLS_ERROR",
                "lost for good: 2 of 2 deliveries in 7 days, most often expired",
            ],
        ),
        ("down-today", 7, "watch", ["down since 2026-11-30 (4 hours)"]),
        (
            "down-but-relayed",
            30,
            "park",
            ["down since 2026-10-20 (42 days), last error TLS_ERROR"],
        ),
        ("silent", 7, "park", ["none of 25 attempts in 7 days delivered, most often CONN_REFUSED"]),
        ("half", 7, "watch", ["37.5 % of 80 attempts in 7 days delivered, most often TIMEOUT"]),
        ("half", 30, "watch", ["37.5 % of 80 attempts in 7 days delivered, most often TIMEOUT"]),
        ("down-long", 7, "prune", ["down since 2026-10-20 (42 days), last error TLS_ERROR"]),
        ("worse", 7, "keep", ["97.0 % of 100 attempts in 7 days delivered"]),
        (
            "worst",
            7,
            "watch",
            ["delivers less than before: 75.0 % in the later half of 7 days, 100.0 % in the days before"],
        ),
        ("never", 7, "watch", ["0.0 % of 19 attempts in 7 days delivered, most often HTTP_403"]),
        ("stranger", 7, "watch", ["not in the registry: it was removed, or it never introduced itself"]),
        ("fediverse", 7, "keep", ["100.0 % of 10 attempts in 7 days delivered"]),
        ("relayed", 7, "watch", ["reached through relays only: all 28 deliveries of 7 days"]),
        ("slow", 7, "watch", ["slow: 15 of 105 deliveries in 7 days took longer than 5 s"]),
        ("flapping", 7, "watch", ["went down 3 times in 7 days, for 5 hours at the longest"]),
        ("keyless", 7, "watch", ["its encryption key is not the base64 of 32 bytes"]),
        ("forger", 7, "review-for-blacklist", ["6 of 60 answers in 3 days were not signed with its key"]),
        ("badly", 7, "watch", ["it acknowledged 3 follows badly in 3 days"]),
        ("twin-1", 7, "review-for-blacklist", ["2 servers have the same signing key"]),
        ("refused", 7, "keep", ["on the blacklist since 2026-11-09: spam"]),
        ("idle", 30, "keep", ["healthy; nothing was sent to it in 7 days"]),
    ],
)
def test_actions_come_with_their_reasons(
    cards: dict[tuple[str, int], Row], name: str, window_days: int, action: str, reasons: list[str]
) -> None:
    """The gravest finding of both windows decides; every finding is told, with the figures it rests on."""
    card = cards[_url(name), window_days]
    assert (card["action"], card["reasons"]) == (action, reasons)


def test_the_state_is_told_with_its_time(cards: dict[tuple[str, int], Row]) -> None:
    """Down since the outage began, healthy since the last one ended or since we know it, refused since it was."""
    states = {name: (cards[_url(name), 7]["state"], cards[_url(name), 7]["state_since"]) for name in _STATES}
    told = {name: (state, since and f"{since:%m-%d %H:%M}") for name, (state, since) in states.items()}
    assert told == _STATES


_STATES: Final = {
    "down-18-days": ("unhealthy", "11-12 09:00"),
    "flapping": ("healthy", "11-27 15:00"),
    "fine": ("healthy", "09-01 00:00"),
    "refused": ("blacklisted", "11-09 00:00"),
    "stranger": ("unregistered", None),
    "fediverse": ("unregistered", None),
}


def test_typical_latency_weighs_days_by_deliveries(cards: dict[tuple[str, int], Row]) -> None:
    """More than half of the deliveries were on days with a p95 of 8 s."""
    assert cards[_url("slow"), 7]["p95_ms"] == 8_000
    assert cards[_url("idle"), 7]["p95_ms"] is None


def test_a_server_does_not_look_better_for_being_down(cards: dict[tuple[str, int], Row]) -> None:
    """What is owed to it meanwhile is held, and is no attempt: the time counts as undelivered."""
    assert cards[_url("down-but-relayed"), 7]["availability"] == 0
    assert cards[_url("flapping"), 7]["availability"] == pytest.approx(1 - 3 * 5 / (7 * 24))
    assert cards[_url("down-long"), 7]["availability"] == 0  # nothing was attempted
    assert cards[_url("idle"), 7]["availability"] is None


def test_what_is_owed_and_lost_is_told(cards: dict[tuple[str, int], Row]) -> None:
    """What is owed is so now; what is lost counts in the window in which it was given up, and once."""
    month, week = cards[_url("down-18-days"), 30], cards[_url("down-18-days"), 7]
    since = at("11-13 12:00").replace(tzinfo=None)
    assert [(card["owed"], card["held"], card["owed_since"]) for card in (month, week)] == 2 * [(3, 2, since)]
    assert (month["lost"], week["lost"]) == (3, 2)
    assert (month["loss_codes"], week["loss_codes"]) == ({"TIMEOUT": 2, "expired": 1}, {"TIMEOUT": 1, "expired": 1})
    assert (cards[_url("held-only"), 7]["held"], cards[_url("held-only"), 7]["state"]) == (1, "unregistered")
    idle = cards[_url("idle"), 7]
    assert (idle["owed"], idle["held"], idle["owed_since"], idle["lost"]) == (0, 0, None, 0)
