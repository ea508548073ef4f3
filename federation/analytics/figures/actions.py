"""What an operator is advised to do about a server, and why.

Every finding of a scorecard names an action. The gravest one is advised, and all findings are its reasons, the gravest
first. Each row's advice is based on that row's window: act on the 30 days, and take the 7 days as an early warning.

| action | when |
|---|---|
| `review-for-blacklist` | its keys are shared or were changed outside a rotation, or it shows others; or at least 3 answers were not proven its own |
| `prune` | down for 30 days or more, and nothing delivered in the window |
| `park` | down for 3 days or more; or none of at least 20 attempts delivered |
| `watch` | down; or under 90 % of at least 10 attempts delivered within 5 s, or of at least 10 in the later half of the window delivered; or 3 or more outages; or reached through relays only; or not in the registry; or a malformed key |
| `keep` | none of these, or on the blacklist already |

Attempts that failed through our own fault count neither way. Of `keep`, `watch`, `park` and `prune`, more direct
deliveries out of the same attempts, or shorter outages, never bring a graver one.
"""  # noqa: E501 - a table row cannot be broken

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import ServerHealth
from federation.analytics.days import DAY, seconds_between, utc_day
from federation.analytics.figures.daily import SLOW_MS
from federation.analytics.frames import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, DataFrame

BLACKLISTED: Final = "blacklisted"
"""The state of a server that is on the blacklist, whatever its health."""

FORGED_ANSWERS: Final = 3
PRUNE_AFTER: Final = timedelta(days=30)
PARK_AFTER: Final = timedelta(days=3)
PARK_ATTEMPTS: Final = 20
WATCH_RELIABILITY: Final = 0.9
WATCH_ATTEMPTS: Final = 10
WATCH_FAILURES: Final = 3

UNREGISTERED: Final = "unregistered"
"""The state of a server that was attempted and is not in the registry."""

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
    yield _finding(Action.WATCH, F.col("state") == UNREGISTERED, stranger)
    failures = F.format_string(
        "went down %d times in %d days, for %s at the longest",
        "failures",
        "window_days",
        _duration(F.col("longest_outage_s")),
    )
    yield _finding(Action.WATCH, F.col("failures") >= WATCH_FAILURES, failures)


def _key_findings() -> Iterator[AdviceRule]:
    suspicious, malformed = F.col("suspicious_keys"), F.col("malformed_keys")
    yield AdviceRule(action=Action.REVIEW, holds=F.size(suspicious) > 0, texts=suspicious)
    yield AdviceRule(action=Action.WATCH, holds=F.size(malformed) > 0, texts=malformed)
    forged = F.format_string("%d answers in %d days were not proven to be its own", "forged", "window_days")
    yield _finding(Action.REVIEW, F.col("forged") >= FORGED_ANSWERS, forged)


def _down_findings(until: datetime) -> Iterator[AdviceRule]:
    """Yield the findings about a server that is down. All have one text, as reasons are distinct."""
    down = F.col("state") == ServerHealth.UNHEALTHY.value
    seconds = seconds_between(F.col("state_since"), F.lit(until))
    error = F.coalesce("unhealthy_reason", "top_error")
    text = F.concat(
        F.coalesce(
            F.format_string("down since %s (%s)", utc_day("state_since").cast("string"), _duration(seconds)),
            F.lit("down, since when is not on record"),
        ),
        F.coalesce(F.concat(F.lit(", last error "), error), F.lit("")),
    )
    nothing_delivered = F.col("delivered") == 0
    yield _finding(Action.PRUNE, down & (seconds >= PRUNE_AFTER.total_seconds()) & nothing_delivered, text)
    yield _finding(Action.PARK, down & (seconds >= PARK_AFTER.total_seconds()), text)
    yield _finding(Action.WATCH, down, text)


def _delivery_findings() -> Iterator[AdviceRule]:
    often = F.coalesce(F.concat(F.lit(", most often "), F.col("top_error")), F.lit(""))
    none = F.concat(F.format_string("none of %d attempts in %d days delivered", "blamed", "window_days"), often)
    yield _finding(Action.PARK, (F.col("delivered") == 0) & (F.col("blamed") >= PARK_ATTEMPTS), none)
    some = F.concat(_delivered_share(), often)
    unreliable = _is_few(F.col("delivered"), of="blamed")
    # The graver finding above has said it already.
    yield _finding(Action.WATCH, unreliable & ((F.col("delivered") > 0) | (F.col("blamed") < PARK_ATTEMPTS)), some)
    # Not the trend, by which a server would get better advice for having been worse before.
    worse = F.format_string(
        "delivers less than before: %.1f %% in the later half of %d days, %.1f %% in the days before",
        _percent("delivered_later", "blamed_later"),
        "window_days",
        _percent("delivered_before", "blamed_before"),
    )
    yield _finding(Action.WATCH, _is_few(F.col("delivered_later"), of="blamed_later") & ~unreliable, worse)
    relayed = F.format_string("reached through relays only: all %d deliveries of %d days", "delivered", "window_days")
    only_relayed = (F.col("delivered") > 0) & (F.col("relayed") == F.col("delivered"))
    yield _finding(Action.WATCH, only_relayed, relayed)
    seconds = F.lit(SLOW_MS // 1000)
    slow = F.format_string(
        "slow: %d of %d deliveries in %d days took longer than %d s", "slow", "delivered", "window_days", seconds
    )
    # Not their latency, by which a server would get better advice for failing where it was slow.
    in_time = F.col("delivered") - F.col("slow")
    yield _finding(Action.WATCH, _is_few(in_time, of="blamed") & ~unreliable, slow)


def _is_few(delivered: Column, *, of: str) -> Column:
    """Tell whether there are enough attempts to judge by, and less than 90 % of them count as `delivered`."""
    return F.coalesce((F.col(of) >= WATCH_ATTEMPTS) & (delivered < WATCH_RELIABILITY * F.col(of)), F.lit(False))


def _finding(action: Action, holds: Column, text: Column) -> AdviceRule:
    return AdviceRule(action=action, holds=holds, texts=F.array(text))


def _good_news() -> Column:
    idle = F.format_string("healthy; nothing was sent to it in %d days", "window_days")
    return F.when(F.col("blamed") > 0, _delivered_share()).otherwise(idle)


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
