"""Rows of the inputs, good unless a test says otherwise, and frames made of them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from itertools import count
from typing import TypeAlias

import pyarrow
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from federation.analytics.frames import ATTEMPTS, BLACKLIST, HEALTH_EVENTS, SERVER_DAILY, SERVERS, Inputs, Window

Values: TypeAlias = Mapping[str, object]

WINDOW = Window(since=date(2026, 11, 1), until=date(2026, 12, 1))
NOW = datetime(2026, 12, 1, 3, tzinfo=UTC)
_ids = count(1)


def at(text: str) -> datetime:
    """A time in UTC: `11-20 12:00` of the year all tests are in."""
    return datetime.strptime(f"2026-{text}", "%Y-%m-%d %H:%M").replace(tzinfo=UTC)


def key(name: str) -> str:
    """A well-formed key of its own for every name."""
    return base64.b64encode(hashlib.sha256(name.encode()).digest()).decode()


def fingerprint(key_text: str) -> str:
    """A key's, as the registry's commands and the analytics write it."""
    return hashlib.sha256(base64.b64decode(key_text)).hexdigest()


def attempt(server_url: str = "https://a.example", started_at: datetime | None = None, **changes: object) -> Values:
    """A delivered attempt, at noon on 20 November unless told otherwise."""
    return {
        "id": next(_ids),
        "delivery_id": "delivery",
        "job_name": "deliver-post",
        "method": "FEDERATE_POST",
        "server_url": server_url,
        "attempt": 1,
        "started_at": started_at or at("11-20 12:00"),
        "duration_ms": 100,
        "outcome": "delivered",
        "error_code": None,
        "http_status": 200,
        "relayed_by": None,
        "request_bytes": 1000,
        "response_bytes": 500,
        "unreadable": None,
        **changes,
    }


def failure(server_url: str, code: str, started_at: datetime | None = None, **changes: object) -> Values:
    """An attempt that is tried again, for the reason `code`."""
    unanswered = {"outcome": "retryable", "error_code": code, "http_status": None, "response_bytes": None}
    return attempt(server_url, started_at, **{**unanswered, **changes})


def server(url: str = "https://a.example", **changes: object) -> Values:
    """A healthy server known since 1 September, with keys of its own."""
    return {
        "id": f"id of {url}",
        "url": url,
        "public_key": key(f"signing {url}"),
        "encryption_public_key": key(f"encryption {url}"),
        "last_seen": at("11-30 00:00"),
        "created_at": at("09-01 00:00"),
        "updated_at": at("11-30 00:00"),
        "is_healthy": True,
        "health_check_attempts": 0,
        "unhealthy_reason": None,
        **changes,
    }


def event(server_url: str, to_state: str, moment: str | datetime, **changes: object) -> Values:
    """A change of health, from the opposite state."""
    return {
        "id": next(_ids),
        "server_url": server_url,
        "from_state": "healthy" if to_state == "unhealthy" else "unhealthy",
        "to_state": to_state,
        "reason": "TIMEOUT" if to_state == "unhealthy" else "probe",
        "at": at(moment) if isinstance(moment, str) else moment,
        **changes,
    }


def refusal(server_url: str, moment: str = "11-10 00:00", reason: str = "spam") -> Values:
    """An entry of the blacklist."""
    return {"id": f"{server_url} {moment}", "server_url": server_url, "created_at": at(moment), "reason": reason}


def daily(server_url: str, day: str, *, delivered: int, **changes: object) -> Values:
    """A server's day on which everything was delivered."""
    return {
        "server_url": server_url,
        "day": at(f"{day} 00:00").date(),
        "attempts": delivered,
        "delivered": delivered,
        "retryable": 0,
        "permanent": 0,
        "parked": 0,
        "errors": {},
        "relayed_share": 0.0 if delivered else None,
        "request_bytes": 0,
        "response_bytes": 0,
        "availability": 1.0 if delivered else None,
        "p50_ms": 100 if delivered else None,
        "p95_ms": 100 if delivered else None,
        "p99_ms": 100 if delivered else None,
        "slow": 0,
        "failed_hours": {},
        **changes,
    }


def days(first: str, last: str) -> list[str]:
    """Every day from `11-01` to `11-30`, say, both included."""
    begin, end = at(f"{first} 00:00"), at(f"{last} 00:00")
    return [f"{begin + timedelta(days=number):%m-%d}" for number in range((end - begin).days + 1)]


def delivery(server_url: str, name: str, **changes: object) -> Values:
    """A delivery that is owed since noon on 20 November."""
    return {
        "id": name,
        "server_url": server_url,
        "wire": "sealed",
        "state": "ready",
        "error_code": None,
        "created_at": at("11-20 12:00"),
        "settled_at": None,
        **changes,
    }


def loss(server_url: str, name: str, moment: str) -> Values:
    """A delivery that expired, and whose row is purged."""
    lost = {"state": "expired", "error_code": "TIMEOUT", "created_at": at("11-01 12:00"), "lost_at": at(moment)}
    return {"id": name, "server_url": server_url, **lost}


def frame(spark: SparkSession, schema: StructType, rows: Iterable[Values] = ()) -> DataFrame:
    """A frame of exactly that schema: through Arrow, because rows in Python lists would start a Python worker each time
    they are computed."""
    records = [{name: row[name] for name in schema.names} for row in rows]
    return spark.createDataFrame(pyarrow.Table.from_pylist(records, schema=to_arrow_schema(schema)), schema)


def inputs(
    spark: SparkSession,
    *,
    attempts: Iterable[Values] = (),
    servers: Iterable[Values] = (),
    blacklist: Iterable[Values] = (),
    events: Iterable[Values] = (),
    earlier: Iterable[Values] | None = None,
    stored: Iterable[Values] | None = None,
) -> Inputs:
    """All inputs of a run."""
    return Inputs(
        attempts=frame(spark, ATTEMPTS, attempts),
        servers=frame(spark, SERVERS, servers),
        blacklist=frame(spark, BLACKLIST, blacklist),
        health_events=frame(spark, HEALTH_EVENTS, events),
        earlier_servers=None if earlier is None else frame(spark, SERVERS, earlier),
        server_daily=None if stored is None else frame(spark, SERVER_DAILY, stored),
    )


def by_server(result: DataFrame, name: str = "server_url") -> dict[str, list[Row]]:
    """The rows of a small result, by server."""
    found: dict[str, list[Row]] = {}
    for row in result.collect():
        found.setdefault(row[name], []).append(row)
    return found


def columns(schema: StructType) -> list[tuple[str, str]]:
    """Names and types, whatever may be null: files know no such promise."""
    return [(field.name, field.dataType.simpleString()) for field in schema]
