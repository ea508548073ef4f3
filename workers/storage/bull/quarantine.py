"""The quarantine of a Bull queue: jobs named like keys of the queue, and keys that are no jobs or in the way.

Node accepts any id. A job called `completed` has its hash where the set of completed jobs belongs, and no script can
start on such a queue: the claim or recovery that meets the job sets it aside.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from workers.checks import MAX_ATTEMPTS, MAX_PRIORITY
from workers.errors import StorageDamaged, Unsupported
from workers.jobs import EnqueueResult, NewJob
from workers.storage.bull.codec import DEFAULT_NAME, Dialect, count, decode_id, encode_id, keep_completed
from workers.storage.bull.options import BullJob, read_options
from workers.storage.bull.scripts import BullScripts
from workers.storage.on_redis import quarantine
from workers.storage.on_redis.messages import unpack
from workers.storage.on_redis.node_values import decode_bytes
from workers.storage.on_redis.quarantine import text
from workers.storage.on_redis.wire import Reply

Enqueue = Callable[[Sequence[NewJob]], Awaitable[Sequence[EnqueueResult]]]


class BullQuarantine(quarantine.Quarantine):
    """What was set aside of one queue; `next_id` makes an id for a job whose own is not allowed."""

    def __init__(
        self, lua: BullScripts, dialect: Dialect, enqueue: Enqueue, next_id: Callable[[], Awaitable[str]]
    ) -> None:
        super().__init__(lua.server, text(lua.base) + "workers:quarantine")
        self._lua = lua
        self._dialect = dialect
        self._enqueue_all = enqueue
        self._next_id = next_id

    async def run(self, script: str, *arguments: str | bytes | int) -> Reply:
        """Run the script and return its answer, once any job in its way has been set aside.

        Raises:
            StorageDamaged: a key is in the way that belongs to no job.
        """
        try:
            return await self._lua.run(script, *arguments)
        except StorageDamaged:
            told = await self._mend(repairing=False)
            if not told:
                raise
            self.heed(told)
            return await self._lua.run(script, *arguments)

    async def _mend(self, *, repairing: bool) -> Sequence[Reply]:
        told: Sequence[Reply] = unpack(await self._lua.run("mend", int(repairing)))
        return told

    def _name(self, raw: str) -> str:
        return decode_id(raw.encode(errors="surrogateescape"))

    async def _move_what_is_in_the_way(self) -> Sequence[Reply]:
        return await self._mend(repairing=True)

    async def _enqueue(self, job: NewJob) -> EnqueueResult:
        [result] = await self._enqueue_all([job])
        return result

    async def _job(self, job_id: str, place: str) -> NewJob | None:
        fields = await self._fields(place, "name", "data", "opts", "attempts")
        if "data" not in fields:
            return None
        options = read_options(job_id.encode(errors="surrogateescape"), fields.get("opts"))
        try:
            return BullJob(
                id=await self._fit_id(job_id),
                name=text(fields.get("name", DEFAULT_NAME)),
                payload=decode_bytes(text(fields["data"])),
                max_attempts=min(max(1, count(fields.get("attempts"))), MAX_ATTEMPTS),
                keep_completed=keep_completed(options, self._dialect),
                keep_failed=options.keep_failed,
                priority=min(options.priority, MAX_PRIORITY),
                backoff=options.backoff,
                timeout=options.timeout,
                others=options.others,
            )
        except ValueError:  # its name is not allowed
            return None

    async def _fit_id(self, job_id: str) -> str:
        try:
            encode_id(job_id, self._dialect)
        except Unsupported:
            return await self._next_id()
        return job_id
