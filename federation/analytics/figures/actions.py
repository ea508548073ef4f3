"""What an operator is advised to do about a server, and why.

Every finding of a scorecard names an action. The gravest one is advised, and all findings are its reasons, the gravest
first. Each row is judged by its own window; the graver of the two is the verdict.

| action | when |
|---|---|
| `review-for-blacklist` | its keys are shared or were changed outside a rotation, or it shows others; or at least 3 answers, and 10 %, were signed with another's key lately |
| `prune` | down for 30 days or more, and nothing delivered in a window of 30 days |
| `park` | down for 3 days or more; or none of at least 20 attempts delivered, in the window or in its later half |
| `watch` | down; or less than 90 % of at least 10 attempts delivered, or delivered within 5 s, lately; or everything lost in 30 days, or at least 2 deliveries, and a tenth, lately; or at least 3 follows acknowledged badly, or fewer answers with another's signature than above, lately; or 3 or more outages, one of at least 15 minutes, or 8 of any length; or most of at least 10 attempts reached it through relays; or what is owed has waited for 3 days, though it is up; or not in the registry; or a malformed key |
| `keep` | none of these, or on the blacklist already |

Lately is the later half of the window, or all of it if that half has fewer than 10 attempts: what has been well for so
long is well. Attempts that failed through our own fault count neither way, and what was our own trouble is nobody's
outage. Of `keep`, `watch`, `park` and `prune`, more direct deliveries out of the same attempts, or shorter outages,
never bring a graver one.
"""  # noqa: E501 - a table row cannot be broken

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import DeliveryState, ServerHealth
from federation.analytics.days import DAY, seconds_between, utc_day
from federation.analytics.figures.daily import SLOW_MS
from federation.analytics.frames import BLACKLISTED, UNREGISTERED, Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, DataFrame

FORGED_ANSWERS: Final = 3
FORGED_SHARE: Final = 0.1
BAD_ACKS: Final = 3
WATCH_LOST: Final = 2
LOST_SHARE: Final = 0.1
PRUNE_AFTER: Final = timedelta(days=30)
PARK_AFTER: Final = timedelta(days=3)
PARK_ATTEMPTS: Final = 20
WATCH_RELIABILITY: Final = 0.9
WATCH_ATTEMPTS: Final = 10
WATCH_FAILURES: Final = 3
WATCH_OUTAGE: Final = timedelta(minutes=15)
"""Outages that are all shorter are restarts, as somebody who cares for a server makes them."""

WATCH_RESTARTS: Final = 8
WATCH_DIRECT: Final = 0.5
WATCH_OWED: Final = timedelta(days=3)

UNTOLD: Final = "UNKNOWN"
"""The code that says nothing. The registry has it, too, for reasons that the original does not know."""

_WHY_DOWN: Final = ("unhealthy_reason", "link_reason", "top_error")
_URGENCY: Final = tuple(Action)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRule:
    """What `texts`, an array, say of a server if `holds` is true (null counts as false), and what to do about it."""

    action: Action
    holds: Column
    texts: Column


def advise(figures: DataFrame, *, until: datetime) -> DataFrame:
    """Return `figures` with `action` and `reasons`, as of `until`."""
    findings = sorted(_findings(until), key=lambda finding: -_URGENCY.index(finding.action))
    is_refused = F.col("state") == BLACKLISTED
    gravest = F.coalesce(*(F.when(finding.holds, F.lit(finding.action.value)) for finding in findings))
    texts = F.flatten(F.array_compact(F.array(*(F.when(finding.holds, finding.texts) for finding in findings))))
    reasons = F.when(F.size(texts) > 0, F.array_distinct(texts)).otherwise(F.array(_good_news()))
    return figures.select(
        "*",
        F.when(is_refused, Action.KEEP.value).otherwise(F.coalesce(gravest, F.lit(Action.KEEP.value))).alias("action"),
        F.when(is_refused, F.array(_refusal())).otherwise(reasons).alias("reasons"),
    )


def _findings(until: datetime) -> Iterator[AdviceRule]:
    yield from _key_findings()
    yield from _down_findings(until)
    yield from _delivery_findings()
    stranger = F.lit("not in the registry: it was removed, or it never introduced itself")
    is_strange = (F.col("state") == UNREGISTERED) & F.col("needs_no_registry").isNull()
    yield _finding(Action.WATCH, is_strange, stranger)
    failures = F.format_string(
        "went down %d times in %d days, for %s at the longest",
        "failures",
        "window_days",
        _duration(F.col("longest_outage_s")),
    )
    lasting = (F.col("failures") >= WATCH_FAILURES) & (F.col("longest_outage_s") >= WATCH_OUTAGE.total_seconds())
    yield _finding(Action.WATCH, lasting | (F.col("failures") >= WATCH_RESTARTS), failures)
    yield from _owed_findings(until)
    yield from _lost_findings()


def _key_findings() -> Iterator[AdviceRule]:
    suspicious, malformed = F.col("suspicious_keys"), F.col("malformed_keys")
    yield AdviceRule(action=Action.REVIEW, holds=F.size(suspicious) > 0, texts=suspicious)
    yield AdviceRule(action=Action.WATCH, holds=F.size(malformed) > 0, texts=malformed)
    forged, blamed = _lately("forged"), _lately("blamed")
    told = F.format_string("%d of %d answers in %d days were not signed with its key", forged, blamed, _lately_days())
    some = forged >= FORGED_ANSWERS
    yield _finding(Action.REVIEW, some & (forged >= FORGED_SHARE * blamed), told)
    yield _finding(Action.WATCH, some & (forged < FORGED_SHARE * blamed), told)
    bad = _lately("bad_acks")
    badly = F.format_string("it acknowledged %d follows badly in %d days", bad, _lately_days())
    yield _finding(Action.WATCH, bad >= BAD_ACKS, badly)


def _down_findings(until: datetime) -> Iterator[AdviceRule]:
    """Yield the findings about a server that is down. All have one text, as reasons are distinct."""
    down = (F.col("state") == ServerHealth.UNHEALTHY.value) & ~F.col("is_excused")
    seconds = seconds_between(F.col("state_since"), F.lit(until))
    error = F.coalesce(*(F.when(F.col(name) != UNTOLD, F.col(name)) for name in _WHY_DOWN))
    text = F.concat(
        F.coalesce(
            F.format_string("down since %s (%s)", utc_day("state_since").cast("string"), _duration(seconds)),
            F.lit("down, since when is not on record"),
        ),
        F.coalesce(F.concat(F.lit(", last error "), error), F.lit("")),
    )
    # Seven days without a delivery do not say that nobody reaches it.
    nothing_delivered = (F.col("delivered") == 0) & (F.col("window_days") >= PRUNE_AFTER.days)
    is_gone = down & (seconds >= PRUNE_AFTER.total_seconds()) & nothing_delivered
    yield _finding(Action.PRUNE, is_gone, text)
    owed = F.lit("deliveries are owed to it: drop them, then forget it")
    yield _finding(Action.PRUNE, is_gone & (F.col("owed") > 0), owed)
    yield _finding(Action.PARK, down & (seconds >= PARK_AFTER.total_seconds()), text)
    yield _finding(Action.WATCH, down, text)


def _owed_findings(until: datetime) -> Iterator[AdviceRule]:
    seconds = seconds_between(F.col("owed_since"), F.lit(until))
    since = utc_day("owed_since").cast("string")
    text = F.format_string("it is up, and deliveries wait for it since %s (%s)", since, _duration(seconds))
    is_up = F.col("state") == ServerHealth.HEALTHY.value
    yield _finding(Action.WATCH, is_up & (seconds >= WATCH_OWED.total_seconds()), text)


def _lost_findings() -> Iterator[AdviceRule]:
    """Yield the findings about what was lost for good: of few deliveries each counts."""
    says_why = F.col("top_loss") != DeliveryState.FAILED.value
    often = F.coalesce(F.when(says_why, F.concat(F.lit(", most often "), F.col("top_loss"))), F.lit(""))
    everything = F.format_string("deliveries that ended in %d days: %d, all of them lost", "window_days", "lost")
    nothing = (F.col("lost") > 0) & (F.col("delivered") == 0) & (F.col("window_days") >= PRUNE_AFTER.days)
    yield _finding(Action.WATCH, nothing, F.concat(everything, often))
    lost, delivered = _lately("lost"), _lately("delivered")
    many = (lost >= WATCH_LOST) & (lost >= LOST_SHARE * (lost + delivered))
    told = F.format_string("lost for good: %d of %d deliveries in %d days", lost, lost + delivered, _lately_days())
    yield _finding(Action.WATCH, many & ~nothing, F.concat(told, often))


def _delivery_findings() -> Iterator[AdviceRule]:
    often = F.coalesce(F.concat(F.lit(", most often "), F.col("top_error")), F.lit(""))
    none = F.concat(F.format_string("none of %d attempts in %d days delivered", "blamed", "window_days"), often)
    nothing = (F.col("delivered") == 0) & (F.col("blamed") >= PARK_ATTEMPTS)
    yield _finding(Action.PARK, nothing, none)
    lately = F.concat(F.format_string("none of %d attempts in %d days delivered", "blamed_later", later_days()), often)
    nothing_lately = (F.col("delivered_later") == 0) & (F.col("blamed_later") >= PARK_ATTEMPTS) & ~nothing
    yield _finding(Action.PARK, nothing_lately, lately)
    # The graver findings above have said it already.
    yield from _few_findings(often, told=nothing | nothing_lately)
    direct = F.col("delivered") - F.col("relayed")
    mostly = (F.col("blamed") >= WATCH_ATTEMPTS) & (direct < WATCH_DIRECT * F.col("delivered"))
    deliveries = F.format_string("%d deliveries of %d days", "delivered", "window_days")
    only = F.concat(F.lit("reached through relays only: all "), deliveries)
    most = F.concat(F.format_string("reached mostly through relays: %d of ", F.col("relayed").cast("long")), deliveries)
    yield _finding(Action.WATCH, mostly, F.when(direct > 0, most).otherwise(only))


def _few_findings(often: Column, *, told: Column) -> Iterator[AdviceRule]:
    """Yield the findings about deliveries that are few, or in time too seldom, of the later half or of all days."""
    is_few, all_are_few = _are_few("delivered"), _is_few("delivered", of="blamed")
    yield _finding(Action.WATCH, is_few & all_are_few & ~told, F.concat(_delivered_share(), often))
    # Not the trend, by which a server would get better advice for having been worse before.
    worse = F.format_string(
        "delivers less than before: %.1f %% in the later half of %d days, %.1f %% in the days before",
        _percent("delivered_later", "blamed_later"),
        "window_days",
        _percent("delivered_before", "blamed_before"),
    )
    yield _finding(Action.WATCH, is_few & ~all_are_few & ~told, worse)
    # Not their latency, by which a server would get better advice for failing where it was slow.
    too_slow, all_are_slow = _are_few("in_time") & ~is_few, _is_few("in_time", of="blamed")
    yield _finding(Action.WATCH, too_slow & all_are_slow, _slow("slow", "delivered", F.col("window_days")))
    yield _finding(Action.WATCH, too_slow & ~all_are_slow, _slow("slow_later", "delivered_later", later_days()))


def _slow(slow: str, delivered: str, days: Column) -> Column:
    text = "slow: %d of %d deliveries in %d days took longer than %d s"
    return F.format_string(text, slow, delivered, days, F.lit(SLOW_MS // 1000))


def _are_few(count: str) -> Column:
    """Tell whether `count` is few in the window's later half, or in all of it where that has few attempts."""
    later = _is_few(f"{count}_later", of="blamed_later")
    return F.when(F.col("blamed_later") >= WATCH_ATTEMPTS, later).otherwise(_is_few(count, of="blamed"))


def _is_few(count: str, *, of: str) -> Column:
    """Tell whether there are enough attempts to judge by, and `count` is less than 90 % of them."""
    few = (F.col(of) >= WATCH_ATTEMPTS) & (F.col(count) < WATCH_RELIABILITY * F.col(of))
    return F.coalesce(few, F.lit(False))


def _lately(count: str) -> Column:
    """Return `count` of the window's later half, or of all of it where that half has too few attempts to judge by."""
    return F.when(F.col("blamed_later") >= WATCH_ATTEMPTS, F.col(f"{count}_later")).otherwise(F.col(count))


def _lately_days() -> Column:
    return F.when(F.col("blamed_later") >= WATCH_ATTEMPTS, later_days()).otherwise(F.col("window_days"))


def later_days() -> Column:
    """Return how many days the later half of a window has."""
    return F.floor(F.col("window_days") / 2).cast("int")


def _finding(action: Action, holds: Column, text: Column) -> AdviceRule:
    return AdviceRule(action=action, holds=holds, texts=F.array(text))


def _good_news() -> Column:
    idle = F.format_string("healthy; nothing was sent to it in %d days", "window_days")
    return (
        F.when(F.col("is_excused"), "it went down in trouble of this node's own, and was not looked at since")
        .when(F.col("blamed") > 0, _delivered_share())
        .otherwise(idle)
    )


def _refusal() -> Column:
    since = F.coalesce(F.concat(F.lit(" since "), utc_day("state_since").cast("string")), F.lit(""))
    why = F.coalesce(F.concat(F.lit(": "), F.col("blacklist_reason")), F.lit(""))
    return F.concat(F.lit("on the blacklist"), since, why)


def _delivered_share() -> Column:
    percent = _percent("delivered", "blamed")
    return F.format_string("%.1f %% of %d attempts in %d days delivered", percent, "blamed", "window_days")


def _percent(part: str, whole: str) -> Column:
    return F.try_divide(100.0 * F.col(part), F.col(whole).cast("double"))


def _duration(seconds: Column) -> Column:
    """Return the duration in words, rounded down: `18 days`, `5 hours`, `12 minutes`; null for null."""
    text = _in_units(seconds, "minute", 60.0)
    for unit, length in (("hour", 3_600.0), ("day", DAY.total_seconds())):
        text = F.when(seconds >= length, _in_units(seconds, unit, length)).otherwise(text)
    return text


def _in_units(seconds: Column, unit: str, length: float) -> Column:
    count = F.floor(seconds / length)
    plural = F.when(count == 1, F.lit(unit)).otherwise(F.lit(f"{unit}s"))
    return F.concat(count.cast("string"), F.lit(" "), plural)
