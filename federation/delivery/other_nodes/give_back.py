"""Jobs of other nodes that a wrong setting brings to our queue: they go back until somebody mends the setting."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from federation.base.queues.job_data import FederationDeliveryJob
from federation.delivery.errors import NotNow
from federation.delivery.other_nodes.origin import OwnJobOrigin, origin_of
from federation.delivery.other_nodes.sightings import Sightings
from workers import Job
from workers.clock import Clock, SystemClock

FIRST_PAUSE: Final = timedelta(minutes=1)
LONGEST_PAUSE: Final = timedelta(hours=1)


class ForeignJobs:
    """Tells jobs of other nodes from ours, as far as jobs name their node, and notes each of them in `sightings`."""

    def __init__(self, origin: OwnJobOrigin, sightings: Sightings, clock: Clock | None = None) -> None:
        self._origin = origin
        self._sightings = sightings
        self._clock = clock or SystemClock()

    async def give_back(self, job: Job, delivery: FederationDeliveryJob) -> None:
        """Give the job back if it is another node's; do nothing with a job of ours.

        The row of another node's job is not in our database, so nobody here can decide about it.

        Raises:
            NotNow: the job is another node's.
            SQLAlchemyError: as `OwnJobOrigin.get`.
        """
        ours, theirs = await self._origin.get(), origin_of(delivery)
        if ours.has(theirs):
            return
        pause = pause_for(self._clock.now() - job.created_at)
        self._sightings.stranger(theirs, ours, delivery_id=delivery.delivery_job_id, pause=pause)
        raise NotNow(f"the job is of {theirs}, and this is {ours}", pause)


def pause_for(age: timedelta) -> timedelta:
    """Return how long a foreign job of that age is left alone: 1, 2, 4 … 60 min, as each pause doubles its age."""
    return min(max(age, timedelta(0)) + FIRST_PAUSE, LONGEST_PAUSE)
