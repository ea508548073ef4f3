"""The entry of a journal about what recurs: `codec` has its format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workers.jobs import CronRow
from workers.storage.file.frames import Entry
from workers.storage.file.values import integer_of, number_of, text_of, time_of


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
