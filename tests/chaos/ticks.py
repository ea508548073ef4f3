"""What recurs in a round: crons that together are due four times in a second, and the ticks that came of them.

Their jobs leave no record, so that a tick that is enqueued again runs again, and the ledgers show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from tests.chaos.demands import CRONS, TICK_EVERY
from tests.chaos.ledger import now
from tests.patience import LONG_PATIENCE_SECONDS, eventually
from workers.crons import Crons
from workers.crons.definition import KeptCron
from workers.jobs import CronLook, CronRow
from workers.storage.base import Storage
from workers.testing.cases.crons import keeper


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    """When each of `CRONS` was first due, by the storage's clock; `offset` is when the monotonic one stood at 0."""

    firsts: Mapping[str, datetime]
    offset: datetime

    @classmethod
    async def begin(cls, storage: Storage) -> Ticks:
        """All crons are stored, each due a little later than the one before."""
        asked, look = now(), await keeper(storage).crons()
        start = look.now - look.now.microsecond % 1000 * timedelta(microseconds=1)
        firsts = {name: start + number * TICK_EVERY / len(CRONS) for number, name in enumerate(CRONS)}
        for name, first in firsts.items():
            row = CronRow(name=name, revision=1, due=first, body=KeptCron(cron=CRONS[name]).encoded())
            assert await keeper(storage).replace_cron(row)
        return cls(firsts=firsts, offset=look.now - timedelta(seconds=asked))

    async def end(self, storage: Storage) -> dict[str, float]:
        """Nothing recurs any more; all ticks that there should be, by their jobs' ids, and when they were due.

        First all that was missed while no worker was there has to be made up for.
        """
        asked = await keeper(storage).crons()

        def caught_up(look: CronLook) -> bool:
            return all(row.due is not None and row.due > asked.now for row in look.rows)

        await eventually(keeper(storage).crons, caught_up, patience=LONG_PATIENCE_SECONDS)
        book = Crons(storage, _is_connected)
        for name in CRONS:
            assert await book.pause(name)
        lasts = {row.name: KeptCron.decoded(row.name, row.body).last for row in (await keeper(storage).crons()).rows}
        return dict(tick for name, last in lasts.items() if last is not None for tick in self._up_to(name, last))

    def _up_to(self, name: str, last: datetime) -> list[tuple[str, float]]:
        count = (last - self.firsts[name]) // TICK_EVERY + 1
        times = [self.firsts[name] + number * TICK_EVERY for number in range(count)]
        return [(CRONS[name].job_at(one).id, (one - self.offset).total_seconds()) for one in times]


async def _is_connected() -> None:
    """The round has connected the storage."""
