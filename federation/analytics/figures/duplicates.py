"""Rows that share an id: found by reading the ids alone, and told apart only where there are some.

Theory of operation. Ids come from a sequence, so they lie densely. Per block of 64 ids, a count and a bitmap say
whether an id occurs twice. That is an aggregation of two numbers, begun on the map side, so that what is shuffled is a
64th of the rows where ids are dense, and one small row per id where they are not. The blocks with duplicates are hashed
into a fixed number of slots, which every task is given. A row outside these slots is alone and passes; a row inside
meets its neighbours in a separate shuffle. A clean input does not have it: once no slot is found, Spark (by adaptive
execution) drops that part of the plan, and with it a second reading of the rows. However many duplicates there are, the
driver holds no more than the slots.

Ten billion attempts are 1.6 * 10^8 blocks, of which 10^5 are crowded where one id in 100 000 is used twice. These fill
1 - e^(-10^5 / 2^21) = 4.7 % of the slots, and of the rows as many have the second shuffle. At 10^6 it is 38 %, and at
10^7 nearly all: there it breaks. All slots would be 2 million rows of 24 bytes at the driver and at each executor.
Where ids are not dense, one small row for each is shuffled, which is where the first part breaks.

Days are not looked at before rows meet: their times are a tenth of all bytes. So an id that is used again on another
day costs its rows that shuffle, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import Window
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation gives it

from federation.analytics.figures.quarantine import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

SLOTS: Final = 1 << 21
_BLOCK_BITS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicates:
    """Where duplicated ids may be: slot numbers, no more than `SLOTS`."""

    slots: DataFrame

    def mark(self, judged: DataFrame, *, order: Sequence[str]) -> DataFrame:
        """Return `judged`, with a reason for each good row that is not the first in `order` of its `day` and `id`.

        A good row is one whose `reason` is null.
        """
        rows = judged.withColumn("_slot", F.when(F.col("reason").isNull(), _slot(_block())))
        slots = F.broadcast(self.slots)
        alone = rows.join(slots, "_slot", "left_anti")
        number = F.row_number().over(Window.partitionBy("day", "id").orderBy(*order))
        reason = F.when(number > 1, F.lit(Reason.DUPLICATED_ID.value))
        return alone.unionByName(rows.join(slots, "_slot", "left_semi").withColumn("reason", reason)).drop("_slot")


def find_duplicates(ids: DataFrame) -> Duplicates:
    """Find where `ids` hold an `id` twice."""
    bit = F.expr(f"shiftleft(1L, cast(id & {(1 << _BLOCK_BITS) - 1} as int))")
    blocks = ids.groupBy(_block().alias("_block")).agg(F.count("*").alias("_rows"), F.bit_or(bit).alias("_bits"))
    crowded = blocks.where(F.col("_rows") != F.bit_count("_bits"))
    return Duplicates(slots=crowded.select(_slot(F.col("_block")).alias("_slot")).distinct())


def _block() -> Column:
    return F.shiftright("id", _BLOCK_BITS)


def _slot(block: Column) -> Column:
    return F.pmod(F.xxhash64(block), F.lit(SLOTS))
