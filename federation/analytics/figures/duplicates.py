"""Rows that share an id: found without shuffling the rows, and told apart only where there are some.

Theory of operation. Ids come from a sequence, so those of a day lie densely. Per day and block of 64 ids, a count and a
bitmap say whether an id occurs twice. That is an aggregation of two numbers, begun on the map side, so that what is
shuffled is a 64th of the rows where ids are dense, and one small row per id where they are not. The blocks with
duplicates are hashed into a fixed number of slots, which every task is given. A row outside these slots is alone and
passes; a row inside meets its neighbours in a separate shuffle, which a clean input does not have. However many
duplicates there are, the driver holds no more than the slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

SLOTS: Final = 1 << 16
_BLOCK_BITS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicates:
    """Where duplicated ids are: slot numbers, no more than `SLOTS`."""

    slots: DataFrame

    def first_copies(self, rows: DataFrame, *, order: Sequence[str]) -> DataFrame:
        """Return `rows` with one row per `day` and `id`: the smallest in `order`."""
        alone = _with_slot(rows).join(F.broadcast(self.slots), "_slot", "left_anti").drop("_slot")
        return alone.unionByName(self._numbered(rows, order).where(F.col("_copy") == 1).drop("_copy"))

    def other_copies(self, rows: DataFrame, *, order: Sequence[str]) -> DataFrame:
        """Return those of `rows` that `first_copies` leaves out."""
        return self._numbered(rows, order).where(F.col("_copy") > 1).drop("_copy")

    def _numbered(self, rows: DataFrame, order: Sequence[str]) -> DataFrame:
        contested = _with_slot(rows).join(F.broadcast(self.slots), "_slot", "left_semi").drop("_slot")
        return contested.withColumn("_copy", F.row_number().over(Window.partitionBy("day", "id").orderBy(*order)))


def find_duplicates(rows: DataFrame) -> Duplicates:
    """Find where `rows` with `id` and `day` hold an id twice on one day.

    Only within one day: days are exported and recomputed one by one, and another day must not change a day's figures.
    """
    bit = F.expr(f"shiftleft(1L, cast(id & {(1 << _BLOCK_BITS) - 1} as int))")
    blocks = rows.groupBy("day", _block().alias("_block")).agg(
        F.count("*").alias("_rows"), F.bit_or(bit).alias("_bits")
    )
    crowded = blocks.where(F.col("_rows") != F.bit_count("_bits"))
    return Duplicates(slots=crowded.select(_slot(F.col("_block")).alias("_slot")).distinct())


def _with_slot(rows: DataFrame) -> DataFrame:
    return rows.withColumn("_slot", _slot(_block()))


def _block() -> Column:
    return F.shiftright("id", _BLOCK_BITS)


def _slot(block: Column) -> Column:
    return F.pmod(F.xxhash64(F.col("day"), block), F.lit(SLOTS))
