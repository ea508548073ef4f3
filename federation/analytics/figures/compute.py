"""All outputs from all inputs."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from federation.analytics.days import end_of
from federation.analytics.figures.checks import (
    check_attempts,
    check_blacklist,
    check_deliveries,
    check_health_events,
    check_losses,
    check_servers,
)
from federation.analytics.figures.daily import server_daily
from federation.analytics.figures.keys import key_anomalies
from federation.analytics.figures.network import network_summary
from federation.analytics.figures.outages import find_outages
from federation.analytics.figures.owed import lost_deliveries
from federation.analytics.figures.own_trouble import own_trouble, without_own
from federation.analytics.figures.relays import relay_candidates
from federation.analytics.figures.scorecard import server_scorecard
from federation.analytics.figures.tally import bad, good, tally
from federation.analytics.frames import DELIVERIES, LOSSES, Inputs, Keep, Outputs, Window, as_it_is, no_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


def compute(inputs: Inputs, *, window: Window, now: datetime | None = None, keep: Keep = as_it_is) -> Outputs:
    """Compute every output, lazily: Spark works when they are written.

    `now`, by default this moment, tells future times. `server_daily` holds the days of `window` that the attempts
    cover. Scorecards and relay candidates look back 30 days from the window's end: at the days computed, and at
    `inputs.server_daily` for those before. A day in both is taken from the attempts. What several
    outputs are made of goes through `keep`, so that it is computed once; by default, it is whenever it is needed.
    """
    now = now or datetime.now(UTC)
    until = end_of(window, now=now)
    judged = check_attempts(inputs.attempts, window=window, now=now, ids=inputs.attempt_ids)
    tallied = keep(tally(judged))
    counts = good(tallied)
    servers = check_servers(inputs.servers, now=now, keep=keep)
    blacklist = check_blacklist(inputs.blacklist)
    events = check_health_events(inputs.health_events, now=now)
    session = inputs.attempts.sparkSession
    deliveries = check_deliveries(_or_none(inputs.deliveries, session, DELIVERIES), now=now)
    losses = check_losses(_or_none(inputs.losses, session, LOSSES), now=now)

    daily = keep(server_daily(counts))
    known_days = daily if inputs.server_daily is None else _with_stored(daily, inputs.server_daily)
    recorded = keep(find_outages(events.good, servers.good, until=until, keep=keep), by_server=True)
    signs = _signs(servers.good, events.good, deliveries.good, losses.good)
    trouble = keep(own_trouble(recorded, known_days, signs, window=window, until=until), by_server=True)
    outages = keep(without_own(recorded, trouble, until=until), by_server=True)
    anomalies = key_anomalies(
        servers.good,
        earlier=inputs.earlier_servers,
        window=window,
        links=inputs.links,
        known=inputs.earlier_anomalies,
        accepted=inputs.accepted_keys,
    )
    anomalies = keep(anomalies, by_server=True)
    scorecard = server_scorecard(
        known_days,
        servers=servers.good,
        blacklist=blacklist.good,
        outages=outages,
        anomalies=anomalies,
        deliveries=deliveries.good,
        losses=losses.good,
        links=inputs.links,
        accepted=inputs.accepted_keys,
        trouble=trouble,
        events=events.good,
        window=window,
        until=until,
        keep=keep,
    )
    scorecard = keep(scorecard, by_server=True)
    return Outputs(
        server_daily=daily,
        server_scorecard=scorecard,
        network_summary=network_summary(
            counts,
            known_days,
            servers=servers.good,
            outages=recorded,
            trouble=trouble,
            lost=lost_deliveries(deliveries.good, losses.good),
            window=window,
        ),
        key_anomalies=anomalies,
        relay_candidates=relay_candidates(known_days, scorecard, servers=servers.good, trouble=trouble, window=window),
        quarantine=_together([bad(tallied), *(each.bad for each in (servers, blacklist, events, deliveries, losses))]),
        counts=tallied,
    )


def _signs(servers: DataFrame, events: DataFrame, deliveries: DataFrame, losses: DataFrame) -> DataFrame:
    """Return every time, `at`, that this node wrote down of what it did beside its attempts."""
    times = (
        (servers, ("last_seen", "updated_at", "created_at")),
        (events, ("at",)),
        (deliveries, ("created_at", "settled_at")),
        (losses, ("lost_at",)),
    )
    return _together(rows.select(F.explode(F.array(*names)).alias("at")) for rows, names in times)


def _or_none(frame: DataFrame | None, session: SparkSession, schema: StructType) -> DataFrame:
    return no_rows(session, schema) if frame is None else frame


def _with_stored(daily: DataFrame, stored: DataFrame) -> DataFrame:
    days = daily.select("day").distinct()
    return daily.unionByName(stored.join(F.broadcast(days), "day", "left_anti").select(*daily.columns))


def _together(frames: Iterable[DataFrame]) -> DataFrame:
    return reduce(DataFrame.unionByName, frames)
