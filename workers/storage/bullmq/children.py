"""What became of a job's children, as BullMQ keeps it beside the job: by the keys of the children."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from workers.errors import StorageError
from workers.jobs import ChildrenPage, Claim, JobRef
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.codec import decode_id
from workers.storage.bullmq.record import BullMQClaim
from workers.storage.on_redis.node_values import decode_bytes, whole
from workers.storage.rules import foreign_cursor

PAGE_BYTES: Final = 16 << 20
SCANNED_AT_ONCE: Final = 100
"""How many children are read in one step; Redis may answer some more."""
UNFINISHED: Final = "dependencies"
ENDED: Final = ("processed", "failed", "unsuccessful")
"""Where children are that have ended: with a result, with an ignored failure, with one that fails their parent."""

_CURSOR: Final = re.compile(r"([0-2]):(\d{1,20})", re.ASCII)


def own_claim(claim: Claim) -> BullMQClaim:
    """Return the claim, which this storage has made.

    Raises:
        StorageError: another storage has.
    """
    if not isinstance(claim, BullMQClaim):
        raise StorageError(f"job {claim.job_id!r}: this claim was made by another storage")
    return claim


@dataclass(slots=True)
class _Found:
    """What was read so far, by the names in `ENDED`."""

    by_name: dict[str, dict[str, str]] = field(default_factory=lambda: {name: {} for name in ENDED})
    size: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.by_name.values()))

    def take(self, name: str, flat: Sequence[str]) -> None:
        """Take the answer to a scan: keys of children, each with its value."""
        self.by_name[name].update(zip(flat[::2], flat[1::2], strict=True))
        self.size += sum(map(len, flat))


class ChildrenReader:
    """The part of a BullMQ storage that reads the children of claimed jobs."""

    def __init__(self, queue: QueueAccess, prefix: str) -> None:
        self._queue = queue
        self._prefix = prefix

    async def page(self, claim: Claim, limit: int, cursor: str | None) -> ChildrenPage:
        """See `FlowStorage.children`. The cursor is a place in the structures that hold children."""
        key = self._queue.lua.job(own_claim(claim).raw)
        at, position = _read_cursor(cursor)
        found = _Found()
        while at < len(ENDED) and (left := limit - len(found)) > 0 and found.size < PAGE_BYTES:
            name = ENDED[at]
            command = "ZSCAN" if name == "unsuccessful" else "HSCAN"
            scan = (command, f"{key}:{name}", position, "COUNT", min(left, SCANNED_AT_ONCE))
            [(position, flat)] = await self._queue.ask([scan])
            found.take(name, flat)
            at, position = (at + 1, "0") if position == "0" else (at, position)
        [unfinished] = await self._queue.ask([("SCARD", f"{key}:{UNFINISHED}")])
        completed, ignored, failed = (found.by_name[name] for name in ENDED)
        return ChildrenPage(
            completed={self._id(child): decode_bytes(value) for child, value in completed.items()},
            ignored={self._id(child): reason for child, reason in ignored.items()},
            failed={self._id(child): reason for child, reason in (await self._reasons(failed)).items()},
            unfinished=whole(unfinished),
            cursor=f"{at}:{position}" if at < len(ENDED) else None,
        )

    async def _reasons(self, failed: Mapping[str, str]) -> dict[str, str | None]:
        """Return why the children failed, None if the record is gone; another program may have named any key."""
        replies = await self._queue.server.run([("HGET", child, "failedReason") for child in failed])
        return {child: reply if isinstance(reply, str) else None for child, reply in zip(failed, replies, strict=True)}

    def _id(self, key: str) -> JobRef:
        """Return what a key `<prefix>:<queue>:<id>` means; another prefix than ours is part of the queue's name."""
        own = key.removeprefix(f"{self._prefix}:")
        queue, _, raw = key.rpartition(":") if own == key else own.partition(":")
        return JobRef(queue, decode_id(raw))


def _read_cursor(cursor: str | None) -> tuple[int, str]:
    """Return the structure to go on with, and the place in it."""
    if cursor is None:
        return 0, "0"
    read = _CURSOR.fullmatch(cursor)
    if read is None:
        raise foreign_cursor(cursor)
    return int(read[1]), read[2]
