"""Checks of input rows: every row is good, or it is in quarantine for the first reason that holds."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from db import AttemptOutcome, DeliveryState, ServerHealth
from federation.analytics.days import FIRST_DAY, is_within, midnight, utc_day
from federation.analytics.figures.duplicates import find_duplicates
from federation.analytics.figures.quarantine import Checked, Fault, Reason, first_reason, set_aside, without_copies
from federation.analytics.frames import (
    ATTEMPTS,
    BLACKLIST,
    DELIVERIES,
    HEALTH_EVENTS,
    LOSSES,
    SERVERS,
    Window,
    as_it_is,
)
from federation.codes import LOGGED_CODES
from federation.delivery.error_codes import HTTP_CODE, STORED_ALREADY
from federation.protocol.urls import MAX_URL_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from federation.analytics.frames import Keep

CLOCK_TOLERANCE: Final = timedelta(hours=1)
"""How far ahead of ours another machine's clock may be before its times count as being in the future."""

URL: Final = (
    r"(?i)https?://"
    r"(?:\[[0-9a-f:.]{2,45}\]|(?=.{1,253}(?:[:/]|\z))[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?)"
    r"(?::[0-9]{1,5})?(?:/[!-~]*)?"
)
"""An http or https URL with a host, in ASCII, without user name or white space: what may name a server."""

PLAIN_URL: Final = r"https://[a-z0-9_-][a-z0-9._-]*"
"""What nearly every URL is: `URL` takes three times as long to tell."""

DOMAIN_RULE: Final = r"(?i)\*\.[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*"
"""What a blacklist may have in place of a URL: it covers the domain, and every name below it."""

_PLAIN_CHARACTERS: Final = len("https://") + 63
"""Of that many, no part of a host name is too long."""

_TOLD: Final = ("delivery_id", "job_name", "method", "attempt", "unreadable")
"""The columns of an attempt that are only told of quarantined rows; the others are judged or counted."""

_BY_COUNTED: Final = sorted(ATTEMPTS.fieldNames(), key=lambda name: name in _TOLD)
"""All columns, those that are judged or counted first."""


def check_attempts(attempts: DataFrame, *, window: Window, now: datetime, ids: DataFrame | None = None) -> DataFrame:
    """Return every attempt of the window with its UTC `day` and its `reason`, which is null for a good one.

    Attempts of other times are left out, as nobody asked for them. Those without a time, or with one before 2000 or
    in the future, belong to no window: they are returned without a day. Of good rows that share an id on one day, the
    smallest stays good. `ids` is the column `id` of `attempts`, where that is read apart.
    """
    is_asked_for, is_ancient = is_within("started_at", window), _is_ancient("started_at")
    homeless = F.col("started_at").isNull() | is_ancient | _is_future("started_at", now)
    rows = attempts.select(*ATTEMPTS.fieldNames())
    judged = rows.where(is_asked_for | homeless).select(
        "*",
        F.when(is_asked_for & ~is_ancient, utc_day("started_at")).alias("day"),
        first_reason(_attempt_faults(now)).alias("reason"),
    )
    # A null is the first in every order, so only good rows are the copies of others.
    return find_duplicates(rows.select("id") if ids is None else ids).mark(judged, order=_BY_COUNTED)


def check_servers(servers: DataFrame, *, now: datetime, keep: Keep = as_it_is) -> Checked:
    """Put every registry row in `good`, with a URL of its own, or in `bad`. Its keys are judged elsewhere.

    A time that is missing or in the future says nothing of the server, only of a clock: the row is in both, without
    such times in `good`. Of rows that share a URL, the one written last stays. The judged rows go through `keep`, as
    much is made of them.
    """
    faults = (
        Fault(reason=Reason.MALFORMED_URL, holds=_malformed("url")),
        Fault(reason=Reason.NO_STATE, holds=F.col("is_healthy").isNull()),
    )
    wrong_clock = first_reason([*_time_faults("created_at", now), *_time_faults("last_seen", now)])
    newest: list[str | Column] = [F.col("updated_at").desc_nulls_last(), *SERVERS.fieldNames()]
    reason = without_copies(first_reason(faults), key="url", order=newest, copy=Reason.DUPLICATED_URL)
    rows = keep(_judged(servers, SERVERS, reason).withColumn("_clock", wrong_clock), by_server=True)
    times = {name: F.when(~_is_future(name, now), F.col(name)) for name in ("created_at", "last_seen")}
    odd = rows.withColumn("_reason", F.coalesce("_reason", "_clock")).where(F.col("_reason").isNotNull())
    return Checked(
        good=rows.where(F.col("_reason").isNull()).drop("_reason", "_clock").withColumns(times),
        bad=set_aside("servers", odd, SERVERS, reason="_reason"),
    )


def check_blacklist(blacklist: DataFrame) -> Checked:
    """Put every decision in `good` or in `bad`. One without a time counts all the same: only the rule is judged.

    A rule is a URL, or a star and a domain.
    """
    rule = F.col("server_url")
    is_domain = F.coalesce(rule.rlike(rf"^{DOMAIN_RULE}\z") & (F.length(rule) <= MAX_URL_CHARACTERS), F.lit(False))
    reason = first_reason([Fault(reason=Reason.MALFORMED_URL, holds=_malformed("server_url") & ~is_domain)])
    return _checked("blacklist", blacklist, BLACKLIST, reason=reason)


def check_deliveries(deliveries: DataFrame, *, now: datetime) -> Checked:
    """Put every delivery that is owed or was given up in `good`, or in `bad`."""
    states = [state.value for state in DeliveryState]
    faults = (
        *_delivery_faults(now),
        Fault(reason=Reason.UNKNOWN_STATE, holds=~_is_one_of("state", states)),
    )
    return _checked("deliveries", deliveries, DELIVERIES, reason=first_reason(faults))


def check_losses(losses: DataFrame, *, now: datetime) -> Checked:
    """Put every delivery that was written down as lost in `good`, or in `bad`."""
    faults = (*_delivery_faults(now), *_time_faults("lost_at", now))
    return _checked("losses", losses, LOSSES, reason=first_reason(faults))


def _delivery_faults(now: datetime) -> Iterator[Fault]:
    yield Fault(reason=Reason.NO_ID, holds=F.col("id").isNull())
    yield from _time_faults("created_at", now)
    yield Fault(reason=Reason.MALFORMED_URL, holds=_malformed("server_url"))


def check_health_events(events: DataFrame, *, now: datetime) -> Checked:
    """Put every event in `good`, once, or in `bad`. One that repeats a change under an id of its own is good."""
    states = [state.value for state in ServerHealth]
    faults = (
        Fault(reason=Reason.NO_ID, holds=F.col("id").isNull()),
        *_time_faults("at", now),
        Fault(reason=Reason.MALFORMED_URL, holds=_malformed("server_url")),
        Fault(reason=Reason.UNKNOWN_STATE, holds=~(_is_one_of("from_state", states) & _is_one_of("to_state", states))),
        Fault(reason=Reason.NO_CHANGE, holds=F.col("from_state") == F.col("to_state")),
    )
    order = HEALTH_EVENTS.fieldNames()
    reason = without_copies(first_reason(faults), key="id", order=order, copy=Reason.DUPLICATED_ID)
    return _checked("health_events", events, HEALTH_EVENTS, reason=reason)


def _checked(source: str, frame: DataFrame, schema: StructType, *, reason: Column) -> Checked:
    rows, is_good = _judged(frame, schema, reason), F.col("_reason").isNull()
    bad = set_aside(source, rows.where(~is_good), schema, reason="_reason")
    return Checked(good=rows.where(is_good).drop("_reason"), bad=bad)


def _judged(frame: DataFrame, schema: StructType, reason: Column) -> DataFrame:
    return frame.select(*schema.fieldNames(), reason.alias("_reason"))


def _attempt_faults(now: datetime) -> Iterator[Fault]:
    yield Fault(reason=Reason.UNREADABLE, holds=F.col("unreadable").isNotNull())
    yield Fault(reason=Reason.NO_ID, holds=F.col("id").isNull())
    yield from _time_faults("started_at", now)
    yield Fault(reason=Reason.ANCIENT_TIME, holds=_is_ancient("started_at"))
    yield Fault(reason=Reason.MALFORMED_URL, holds=_malformed("server_url"))
    relay = F.col("relayed_by")
    yield Fault(reason=Reason.MALFORMED_RELAY_URL, holds=relay.isNotNull() & _malformed("relayed_by"))
    yield Fault(reason=Reason.NO_DURATION, holds=F.col("duration_ms").isNull())
    yield Fault(reason=Reason.NEGATIVE_DURATION, holds=F.col("duration_ms") < 0)
    yield Fault(reason=Reason.NEGATIVE_SIZE, holds=(F.col("request_bytes") < 0) | (F.col("response_bytes") < 0))
    outcomes = [outcome.value for outcome in AttemptOutcome]
    yield Fault(reason=Reason.UNKNOWN_OUTCOME, holds=~_is_one_of("outcome", outcomes))
    yield from _code_faults()


def _code_faults() -> Iterator[Fault]:
    code, status = F.col("error_code"), F.col("http_status")
    known = sorted(frozenset[str]().union(*LOGGED_CODES.values()))
    names_status = code.rlike(rf"^{HTTP_CODE}\z")
    yield Fault(reason=Reason.UNKNOWN_CODE, holds=~(code.isin(known) | names_status))
    yield Fault(reason=Reason.CODE_CONTRADICTS, holds=~_code_agrees(names_status))
    is_delivered = F.col("outcome") == AttemptOutcome.DELIVERED.value
    differs = names_status & (code != F.concat(F.lit("HTTP_"), status.cast("string")))
    took = status.between(200, 299) | (status == STORED_ALREADY)
    yield Fault(reason=Reason.STATUS_CONTRADICTS, holds=(is_delivered & ~took) | differs)


def _code_agrees(names_status: Column) -> Column:
    """Tell whether the code fits the outcome: a delivered attempt has none, any other attempt one of its outcome's."""
    outcome, code = F.col("outcome"), F.col("error_code")
    agrees = (outcome == AttemptOutcome.DELIVERED.value) & code.isNull()
    for each, codes in LOGGED_CODES.items():
        if codes:
            agrees |= (outcome == each.value) & code.isNotNull() & code.isin(sorted(codes))
    agrees |= (outcome == AttemptOutcome.RETRYABLE.value) & code.isNotNull() & names_status
    return F.coalesce(agrees, F.lit(False))


def _time_faults(column: str, now: datetime) -> Iterator[Fault]:
    yield Fault(reason=Reason.NO_TIME, holds=F.col(column).isNull())
    yield Fault(reason=Reason.FUTURE_TIME, holds=_is_future(column, now))


def _is_ancient(column: str) -> Column:
    return F.col(column) < F.lit(midnight(FIRST_DAY))


def _is_future(column: str, now: datetime) -> Column:
    return F.col(column) > F.lit(now + CLOCK_TOLERANCE)


def _malformed(column: str) -> Column:
    url = F.col(column)
    # The length comes first: a regular expression takes long over megabytes.
    plain = (F.length(url) <= _PLAIN_CHARACTERS) & url.rlike(rf"^{PLAIN_URL}\z") & ~F.contains(url, F.lit(".."))
    sound = (F.length(url) <= MAX_URL_CHARACTERS) & url.rlike(rf"^(?:{URL})\z")
    return ~F.coalesce(plain | sound, F.lit(False))


def _is_one_of(column: str, values: Sequence[str]) -> Column:
    return F.coalesce(F.col(column).isin(list(values)), F.lit(False))
