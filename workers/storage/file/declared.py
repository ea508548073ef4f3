"""The entries of a journal about what is declared, limits and crons, and about buckets: `codec` has their format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from workers.jobs import CronRow
from workers.limits import Limit
from workers.storage.file.frames import Entry
from workers.storage.file.values import integer_of, number_of, optional_integer_of, optional_text_of, text_of, time_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitDeclared:
    """The limit of that name, None for a removed one."""

    name: str
    limit: Limit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketChanged:
    """When the bucket of the key is full again, None for a full one."""

    key: str
    full_at: datetime | None


def limit_entry(name: str, limit: Limit | None) -> Entry:
    return ("l", name) if limit is None else ("l", name, limit.rate, limit.concurrency, limit.burst, limit.version)


def bucket_entry(key: str, full_at: datetime | None) -> Entry:
    return ("b", key) if full_at is None else ("b", key, number_of(full_at))


def read_limit(values: Iterator[object]) -> LimitDeclared:
    name, described = text_of(next(values)), list(values)
    if not described:
        return LimitDeclared(name=name, limit=None)
    rate, concurrency, burst, version = described
    limit = Limit(
        optional_text_of(rate),
        concurrency=optional_integer_of(concurrency),
        burst=optional_integer_of(burst),
        version=integer_of(version),
    )
    return LimitDeclared(name=name, limit=limit)


def read_bucket(values: Iterator[object]) -> BucketChanged:
    return BucketChanged(key=text_of(next(values)), full_at=time_of(next(values, None)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CronReplaced:
    """The row of a cron, in the place of the one before it."""

    row: CronRow


def cron_entry(row: CronRow) -> Entry:
    return ("c", row.name, row.revision, number_of(row.due), row.body)


def read_cron(values: Iterator[object]) -> CronReplaced:
    row = CronRow(
        name=text_of(next(values)),
        revision=integer_of(next(values)),
        due=time_of(next(values)),
        body=text_of(next(values)),
    )
    return CronReplaced(row=row)
