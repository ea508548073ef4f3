"""The quarantine of a BullMQ queue: jobs and keys at which BullMQ's scripts would stop half-way.

Theory of operation. Other producers choose ids, and everybody who reaches the server can write what he likes. One job
with the id `completed` has its hash where the queue's set of completed jobs belongs. BullMQ's scripts stop there, after
they have taken jobs out of one line and before they put them into another. So a script of ours, `guard`, looks before
they run: at the keys of the queue, and at the jobs that the next claims or the next recovery will meet. What comes
between that look and the claim is found among the active jobs, by a recovery. Claims that travel with settlements are
made without it: a job at which they stop is put back in line, where the look of the next claim finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from workers.checks import MAX_ATTEMPTS, MAX_PRIORITY
from workers.errors import StorageDamaged, StorageError
from workers.jobs import EnqueueResult, NewJob
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.codec import OWN_KEYS, BullMQJob, decode_id, decode_options
from workers.storage.bullmq.jobs import Jobs
from workers.storage.bullmq.server import Reply
from workers.storage.on_redis import quarantine
from workers.storage.on_redis.node_values import decode_bytes, json_object, whole
from workers.storage.on_redis.quarantine import text
from workers.storage.on_redis.wire import Command

NOT_AGAIN: Final = frozenset({"jobId", "delay", "de"})
"""Options that are over when a job is queued again; by its deduplication key it could be taken for a duplicate."""


class BullMQQuarantine(quarantine.Quarantine):
    """What was set aside of one queue."""

    def __init__(self, queue: QueueAccess, jobs: Jobs) -> None:
        super().__init__(queue.server, f"{queue.lua.base}{OWN_KEYS}:quarantine")
        self._queue = queue
        self._jobs = jobs

    def look(self, claims: int) -> Command:
        """Return the command that sets aside what would break the next `claims`; with 0, a recovery.

        `take_note` takes its reply.
        """
        return self._queue.lua.guard(self._queue.now_ms(), claims)

    def take_note(self, reply: Reply) -> StorageError | None:
        """Remember what was set aside, and return the error that names a key in the way, None if there is none."""
        if isinstance(reply, StorageError):
            return reply
        told, damage = reply
        self.heed(told)
        return StorageDamaged(f"the queue is damaged: {damage}") if damage else None

    async def mend(self) -> None:
        """Set aside what would break a recovery.

        Raises:
            StorageDamaged: a key is in the way that belongs to no job.
        """
        [reply] = await self._queue.server.run([self.look(0)])
        if error := self.take_note(reply):
            raise error

    def _name(self, raw: str) -> str:
        return decode_id(raw)

    async def _move_what_is_in_the_way(self) -> Sequence[Reply]:
        [reply] = await self._queue.server.run([self.look(-1)])
        if isinstance(reply, StorageError):
            raise reply
        told: Sequence[Reply] = reply[0]
        return told

    async def _enqueue(self, job: NewJob) -> EnqueueResult:
        [result] = await self._jobs.enqueue([job])
        return result

    async def _job(self, job_id: str, place: str) -> NewJob | None:
        """Return the job as a new one, with all of its options."""
        found = await self._fields(place, "name", "data", "opts", "priority")
        fields = {name: text(value) for name, value in found.items()}
        if "name" not in fields or "data" not in fields:
            return None
        options = decode_options(json_object(fields.get("opts")))
        try:
            return BullMQJob(
                id=job_id,
                name=fields["name"],
                payload=decode_bytes(fields["data"]),
                max_attempts=min(options.max_attempts, MAX_ATTEMPTS),
                keep_completed=options.keep_completed,
                keep_failed=options.keep_failed,
                priority=min(whole(fields.get("priority")), MAX_PRIORITY),
                backoff=options.backoff,
                options={name: value for name, value in options.written.items() if name not in NOT_AGAIN},
                ours=options.ours,
            )
        except ValueError:  # its id or its name is not allowed
            return None
