"""Setting rows aside: with the first reason that holds, and never silently."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pyspark.sql import Window as Over
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from federation.analytics.frames import QUARANTINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType


class Reason(StrEnum):
    """Why a row is set aside."""

    NO_ID = "no id"
    UNREADABLE = "a value that cannot be read"
    NO_TIME = "no time"
    ANCIENT_TIME = "time before 2000"
    FUTURE_TIME = "time in the future"
    MALFORMED_URL = "malformed URL"
    MALFORMED_RELAY_URL = "malformed URL of the relay"
    NO_DURATION = "no duration"
    NEGATIVE_DURATION = "negative duration"
    NEGATIVE_SIZE = "negative size"
    UNKNOWN_OUTCOME = "unknown outcome"
    UNKNOWN_CODE = "unknown error code"
    CODE_CONTRADICTS = "outcome contradicts the error code"
    STATUS_CONTRADICTS = "outcome contradicts the HTTP status"
    NO_STATE = "no state"
    UNKNOWN_STATE = "unknown state"
    NO_CHANGE = "no change of state"
    DUPLICATED_ID = "duplicated id"
    DUPLICATED_URL = "duplicated URL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The rows of one input: `good` ones go on, `bad` ones are of the schema `QUARANTINE`."""

    good: DataFrame
    bad: DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with a row where `holds` is true; null counts as false."""

    reason: Reason
    holds: Column


def first_reason(faults: Iterable[Fault]) -> Column:
    """Return the reason of the first fault that holds, or null for a good row."""
    return F.coalesce(*(F.when(fault.holds, F.lit(fault.reason.value)) for fault in faults))


def without_copies(reason: Column, *, key: str, order: Sequence[str | Column], copy: Reason) -> Column:
    """Return `reason`, or `copy` for good rows that share `key` with a good row before them in `order`."""
    number = F.row_number().over(Over.partitionBy(reason.isNull(), key).orderBy(*order))
    return F.coalesce(reason, F.when(number > 1, F.lit(copy.value)))


def as_json(schema: StructType) -> Column:
    """Return a whole row of `schema` as it is kept: nulls are named, and times are in UTC."""
    return F.to_json(F.struct(*schema.fieldNames()), {"timeZone": "UTC", "ignoreNullFields": "false"})


def set_aside(source: str, rows: DataFrame, schema: StructType, *, reason: str) -> DataFrame:
    """Return `rows`, which have a column `reason` and no day, in the form of the quarantine."""
    no_day = F.lit(None).cast("date").alias("day")
    return rows.select(
        F.lit(source).alias("source"), F.col(reason).alias("reason"), no_day, as_json(schema).alias("row")
    ).to(QUARANTINE)
