"""What is advised is what a thoughtful operator would do, of 300 servers whose advice was written down first."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

import pytest
from pyspark.sql import SparkSession

from federation.analytics.figures.keys import key_anomalies
from federation.analytics.figures.outages import find_outages
from federation.analytics.figures.scorecard import server_scorecard
from federation.analytics.frames import (
    ACCEPTED_KEYS,
    BLACKLIST,
    DELIVERIES,
    HEALTH_EVENTS,
    LINKS,
    LOSSES,
    SERVER_DAILY,
    SERVERS,
    Action,
    Keep,
)
from tests.federation.analytics.figures.truth import EVERYBODY, Life, Spell
from tests.federation.analytics.rows import (
    WINDOW,
    Values,
    at,
    daily,
    delivery,
    event,
    fingerprint,
    frame,
    key,
    loss,
    refusal,
    server,
)

UNTIL: Final = at("12-01 00:00")
GRAVITY: Final = tuple(Action)
AGREEMENT: Final = 0.99

ARGUED: Final = {
    # It says that it is gone, with a status that a broken proxy or a moved route sends as well. Nothing can be lost by
    # parking it: deliveries to it fail and are told as lost, and its operator can be asked before its follows end.
    "gone-0": Action.PARK,
    # Ten days well. A row of 30 days forgets the bad ones once its later half, 15 days, is good; the 7 days say keep.
    # Until then it is looked at, and that is all.
    "bad-until-4": Action.WATCH,
}
"""Where the advice differs from the operator's: what it is, and why it may."""


def ago(days: float = 0, hours: float = 0) -> datetime:
    return UNTIL - timedelta(days=days, hours=hours)


def url_of(name: str) -> str:
    return f"https://{name}.example"


def days_of(name: str, lived: Life) -> Iterator[Values]:
    for spell in lived.spells:
        first, last = spell.days
        for day in range(first, last - 1, -spell.every):
            yield day_of(name, day, spell)


def day_of(name: str, day: int, spell: Spell) -> Values:
    delivered = round(spell.per_day * spell.share)
    failed = spell.per_day - delivered
    measured = {"p50_ms": 200, "p95_ms": spell.p95_ms, "p99_ms": spell.p95_ms} if delivered else {}
    return daily(
        url_of(name),
        f"{ago(days=day + 1):%m-%d}",
        delivered=delivered,
        attempts=spell.per_day,
        retryable=failed,
        errors={spell.code: failed} if failed else {},
        relayed_share=spell.relayed if delivered else None,
        availability=delivered / spell.per_day,
        slow=round(delivered * spell.slow),
        **measured,
    )


def events_of(name: str, lived: Life) -> Iterator[Values]:
    for begin, end in lived.outages:
        yield event(url_of(name), "unhealthy", ago(hours=begin))
        if end is not None:
            yield event(url_of(name), "healthy", ago(hours=end))


def registered(name: str, lived: Life) -> Values:
    """Its row now."""
    is_down = lived.unseen_days is not None or bool(lived.outages and lived.outages[-1][1] is None)
    seen = lived.unseen_days if lived.unseen_days is not None else lived.outages[-1][0] / 24 if is_down else 0
    both = {name: key(name) for name in ("shared key", "accepted key")}
    changes: dict[str, object] = {
        "created_at": ago(days=lived.known_days),
        "is_healthy": lived.seen_well or not is_down,
        "last_seen": ago(hours=1) if lived.seen_well else ago(days=seen),
    }
    match lived.keys.partition(",")[0]:
        case "shared":
            changes["public_key"] = both["shared key"]
        case "accepted":
            changes["public_key"] = both["accepted key"]
        case "one for both uses":
            changes |= dict.fromkeys(("public_key", "encryption_public_key"), key(name))
        case "malformed signing key":
            changes["public_key"] = "none"
        case "malformed encryption key":
            changes["encryption_public_key"] = "none"
    return server(url_of(name), **changes)


def registered_before(name: str, lived: Life) -> Values:
    """Its row as an earlier run saw it."""
    now, old_signing, old_encryption = registered(name, lived), key(f"old {name}"), key(f"older {name}")
    match lived.keys.removesuffix(" and accepted"):
        case "signing key changed alone" | "changed alone":
            return {**now, "public_key": old_signing}
        case "encryption key changed alone":
            return {**now, "encryption_public_key": old_encryption}
        case "row replaced":
            return {**now, "id": "another", "public_key": old_signing, "encryption_public_key": old_encryption}
        case "rotated":
            return {**now, "public_key": old_signing, "encryption_public_key": old_encryption}
    return now


@pytest.fixture(scope="module")
def advised(spark: SparkSession, keep: Keep) -> dict[str, tuple[Action, list[str]]]:
    """The graver advice of the 7 and the 30 days, as the report gives it, and its reasons."""
    known = [(name, lived) for name, lived, _ in EVERYBODY if lived.is_registered]
    servers = frame(spark, SERVERS, [registered(*each) for each in known])
    accepted = [
        {"server_url": row["url"], "fingerprint": fingerprint(str(row["public_key"])), "accepted_at": ago(days=1)}
        for row, (_, lived) in zip((registered(*each) for each in known), known, strict=True)
        if "accepted" in lived.keys
    ]
    shown = [
        {"server_url": url_of(name), "wire": "sealed", "state": "mismatch", "since": ago(days=2), "reason": None}
        for name, lived in known
        if lived.keys == "another is shown"
    ]
    anomalies = key_anomalies(
        servers,
        earlier=frame(spark, SERVERS, [registered_before(*each) for each in known]),
        window=WINDOW,
        links=frame(spark, LINKS, shown),
        accepted=frame(spark, ACCEPTED_KEYS, accepted),
    )
    events = [row for name, lived, _ in EVERYBODY for row in events_of(name, lived)]
    cards = server_scorecard(
        frame(spark, SERVER_DAILY, [row for name, lived, _ in EVERYBODY for row in days_of(name, lived)]),
        servers=servers,
        blacklist=frame(spark, BLACKLIST, [refusal(url_of(name)) for name, lived in known if lived.is_blacklisted]),
        outages=find_outages(frame(spark, HEALTH_EVENTS, events), servers, until=UNTIL),
        anomalies=anomalies,
        deliveries=frame(
            spark,
            DELIVERIES,
            [
                delivery(url_of(name), f"{name} {number}", state="held", created_at=ago(days=lived.owed[1]))
                for name, lived, _ in EVERYBODY
                for number in range(lived.owed[0])
            ],
        ),
        losses=frame(
            spark,
            LOSSES,
            [
                loss(url_of(name), f"{name} {number}", "11-27 12:00")
                for name, lived, _ in EVERYBODY
                for number in range(lived.lost)
            ],
        ),
        window=WINDOW,
        until=UNTIL,
        keep=keep,
    )
    found: dict[str, tuple[Action, list[str]]] = {}
    for row in cards.select("server_url", "window_days", "action", "reasons").collect():
        name = row["server_url"].removeprefix("https://").removesuffix(".example")
        action = Action(row["action"])
        if name not in found or GRAVITY.index(action) > GRAVITY.index(found[name][0]):
            found[name] = (action, row["reasons"])
    return found


def test_the_advice_is_a_thoughtful_operators(advised: dict[str, tuple[Action, list[str]]]) -> None:
    """Of 300 servers, but for a few about whom one may differ."""
    assert len(EVERYBODY) == len(advised) == 300
    differs = {name: advised[name] for name, _, wanted in EVERYBODY if advised[name][0] is not wanted}
    assert {name: action for name, (action, _) in differs.items()} == ARGUED, differs
    assert len(differs) <= (1 - AGREEMENT) * len(EVERYBODY)
