"""What recurs on a storage that turns it by itself."""

from __future__ import annotations

from workers.crons.definition import Cron, CronStatus
from workers.errors import Unsupported
from workers.jobs import Declared, NewJob
from workers.storage.abilities import TurnsCrons


class CronSchedulers:
    """What recurs in one queue."""

    def __init__(self, storage: TurnsCrons) -> None:
        self._storage = storage

    def refuse(self, cron: Cron) -> None:
        """Accept what the storage can keep.

        Raises:
            Unsupported: it cannot.
        """
        self._storage.refuse_cron(cron)

    async def declare(self, cron: Cron) -> Declared:
        """See `TurnsCrons.declare_cron`."""
        return await self._storage.declare_cron(cron)

    async def pause(self, name: str) -> bool:
        """Refuse it: the storage has no word for it."""
        raise Unsupported(f"{self._storage!r} cannot pause what recurs: pause the queue, or remove {name!r}")

    async def resume(self, name: str) -> bool:
        """Refuse it: nothing can be paused."""
        raise Unsupported(f"{self._storage!r} cannot pause what recurs, so {name!r} cannot be resumed")

    async def remove(self, name: str) -> bool:
        """See `TurnsCrons.remove_cron`."""
        return await self._storage.remove_cron(name)

    async def job_now(self, name: str, suffix: str) -> NewJob | None:
        """See `TurnsCrons.cron_job`."""
        return await self._storage.cron_job(name, suffix)

    async def all(self) -> list[CronStatus]:
        """See `Crons.list`."""
        return [CronStatus(cron=one.cron, due=one.due) for one in await self._storage.scheduled()]
