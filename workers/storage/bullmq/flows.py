"""Flows on BullMQ: trees of jobs across queues, as its `FlowProducer` makes them.

Theory of operation. A flow is inserted by BullMQ's own scripts in one transaction, parents before children, under WATCH
of every job in it. What BullMQ's scripts would answer with a number, and go on, is looked for before: a child that has
another parent, an id that has a job. A child that has completed before is linked last: linked first, it would set a new
parent free that has no other child yet.

To find a job's state BullMQ walks the list of those that wait. So before the transaction a look tells which of the jobs
exist at all, and the state of the others is not asked for. If one of those has appeared meanwhile, everything begins
anew.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from workers.errors import LeaseLost, StorageError
from workers.jobs import ChildFailure, ChildrenPage, Claim, EnqueueResult, EnqueueStatus, FlowNode, JobRef, JobState
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.codec import decode_id, encode_id, encode_options
from workers.storage.bullmq.jobs import refuse_unknown_to_bullmq
from workers.storage.bullmq.record import (
    STATE_FIELDS,
    BullMQClaim,
    BullMQRecord,
    loss,
    own_claim,
    reading,
    record,
    still_holds,
)
from workers.storage.bullmq.scripts import CANCELLED, BullMQScripts
from workers.storage.bullmq.server import Contended, Reply
from workers.storage.on_redis.node_values import decode_bytes, encode_bytes, whole
from workers.storage.on_redis.server import ROUNDS
from workers.storage.on_redis.wire import Command
from workers.storage.rules import (
    REDIS_VALUE_BYTES,
    STARTS_ANEW,
    foreign_cursor,
    refuse_deduplication,
    refuse_dependencies,
)

PAGE_BYTES: Final = 16 << 20
SCANNED_AT_ONCE: Final = 100
"""How many children are read in one step; Redis may answer some more."""
UNFINISHED: Final = "dependencies"
ENDED: Final = ("processed", "failed", "unsuccessful")
"""Where children are that have ended: with a result, with an ignored failure, with one that fails their parent."""

_CURSOR: Final = re.compile(r"([0-2]):(\d{1,20})", re.ASCII)


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


_FIELDS: Final = (*STATE_FIELDS, "parentKey")
_READS: Final = 4
"""How many commands read one job, and how many tell whether it is a child already."""
_FLAGS: Final[Mapping[ChildFailure, str]] = {
    ChildFailure.FAIL_PARENT: "fpof",
    ChildFailure.CONTINUE_PARENT: "cpof",
    ChildFailure.IGNORE: "idof",
    ChildFailure.REMOVE: "rdof",
}
"""BullMQ's short names for its options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPlace:
    """Where a job of a flow is, or is to be."""

    lua: BullMQScripts
    raw: str

    @property
    def key(self) -> str:
        """The key of the job's hash, which is what BullMQ calls a child by."""
        return self.lua.job(self.raw)

    @property
    def watched(self) -> tuple[str, str]:
        return self.key, self.lua.lock(self.raw)

    def asks_for(self, child: FlowPlace) -> tuple[Command, ...]:
        """Return the commands that ask whether `child` is a child of this job, in whatever state."""
        processed, failed, unsuccessful = (f"{self.key}:{name}" for name in ENDED)
        hashes = ("HEXISTS", processed, child.key), ("HEXISTS", failed, child.key)
        return ("SISMEMBER", f"{self.key}:{UNFINISHED}", child.key), *hashes, ("ZSCORE", unsuccessful, child.key)


class Flows:
    """The part of a BullMQ storage that inserts flows."""

    def __init__(self, queue: QueueAccess, prefix: str) -> None:
        self._queue = queue
        self._prefix = prefix

    async def add(self, nodes: Sequence[FlowNode], claim: Claim | None) -> list[EnqueueResult | None]:
        """See `FlowStorage.enqueue_flow`."""
        _check(nodes)
        held = None if claim is None else own_claim(claim)
        top = None if held is None else FlowPlace(lua=self._queue.lua, raw=held.raw)
        places = self._places(nodes)
        if top is not None and top.key in {place.key for place in places}:
            raise ValueError(f"job {nodes[0].job.id!r} cannot be its own child")
        for _ in range(ROUNDS):
            existing = await self._existing(places)
            insertion = _Insertion(nodes, places, top, held, existing, self._queue.now_ms())
            if top is not None or 0 not in existing or not insertion.is_done(await self._read(places[0])):
                await self._queue.server.transact(
                    insertion.watched, insertion.commands, insertion.decide, confirmed=True
                )
            if not insertion.surprised:
                return await self._with_values(insertion)
        raise Contended(f"other clients added jobs of the same flow {ROUNDS} times in a row")

    def _places(self, nodes: Sequence[FlowNode]) -> list[FlowPlace]:
        queues = {name: BullMQScripts(name, self._prefix) for name in {node.queue for node in nodes}}
        return [FlowPlace(lua=queues[node.queue], raw=encode_id(node.job.id)) for node in nodes]

    async def _existing(self, places: Sequence[FlowPlace]) -> set[int]:
        replies = await self._queue.server.run([("EXISTS", place.key) for place in places])
        return {at for at, reply in enumerate(replies) if reply}

    async def _read(self, place: FlowPlace) -> list[Reply]:
        [replies] = await self._queue.server.run_atomic([reading(place.lua, place.raw)])
        return replies

    async def _with_values(self, insertion: _Insertion) -> list[EnqueueResult | None]:
        """Return the outcomes, with the results of jobs that have completed."""
        ended = [at for at, one in enumerate(insertion.results) if one and one.status is EnqueueStatus.COMPLETED]
        values = await self._queue.server.run([insertion.value_of(at) for at in ended])
        for at, value in zip(ended, values, strict=True):
            if isinstance(value, StorageError):
                raise value
            insertion.results[at] = EnqueueResult(
                id=insertion.nodes[at].job.id,
                status=EnqueueStatus.COMPLETED,
                existing_state=JobState.COMPLETED,
                result=decode_bytes(value or "null"),
            )
        return insertion.results


class _Insertion:
    """One flow on its way into its queues; `top` is the running job that gets it as further children."""

    def __init__(
        self,
        nodes: Sequence[FlowNode],
        places: Sequence[FlowPlace],
        top: FlowPlace | None,
        claim: BullMQClaim | None,
        existing: Container[int],
        now_ms: int,
    ) -> None:
        self.nodes = nodes
        self._places = places
        self._top = top
        self._claim = claim
        self._existing = existing
        self._now_ms = now_ms
        self.results: list[EnqueueResult | None] = []
        self.surprised = False
        """Whether a job exists that did not at the look before."""

    def is_done(self, replies: Sequence[Reply]) -> bool:
        """Tell from its record whether the root of a tree stays as it is, and so all of it; then `results` are set."""
        found = record(self._places[0].raw, replies, self._now_ms)
        if _is_new(found):
            return False
        self.results = [_result(self.nodes[0], found), *[None] * (len(self.nodes) - 1)]
        return True

    @property
    def watched(self) -> list[str]:
        places = [*self._places, *([] if self._top is None else [self._top])]
        return [key for place in places for key in place.watched]

    @property
    def commands(self) -> list[Command]:
        """The commands whose replies `decide` takes."""
        commands = [*self._checks]
        if self._top is not None:
            commands += reading(self._top.lua, self._top.raw)
        for at, (node, place) in enumerate(zip(self.nodes, self._places, strict=True)):
            known = at in self._existing
            commands += reading(place.lua, place.raw, _FIELDS) if known else [("EXISTS", place.key)]
            if self._top is not None and node.parent is None:
                commands += self._top.asks_for(place)
        return commands

    @property
    def _checks(self) -> list[Command]:
        """The commands that fail if a queue is damaged; one for each."""
        return [lua.fit_for_flows() for lua in {place.lua.base: place.lua for place in self._places}.values()]

    def decide(self, replies: Sequence[Reply]) -> list[Command]:
        """Return the commands that insert the flow, and set `results`.

        Raises:
            LeaseLost: the claim does not hold the running job.
            StorageError: a job of the flow is the child of another job.
        """
        unread = islice(replies, len(self._checks), None)
        if self._top is not None:
            self._check_held(record(self._top.raw, [*islice(unread, _READS)], self._now_ms))
        self.results, self.surprised = [], False
        commands: list[Command] = []
        late: list[Command] = []
        for at, (node, place) in enumerate(zip(self.nodes, self._places, strict=True)):
            found = self._found(at, unread)
            known = [*islice(unread, _READS)] if self._top is not None and node.parent is None else []
            result = None if self._is_left_out(node) else _known(node, known) or _result(node, found)
            self.results.append(result)
            if result is not None and not any(known):
                (late if found.state is JobState.COMPLETED else commands).extend(self._link(node, place, found))
        return [] if self.surprised else [*commands, *late]

    def _found(self, at: int, unread: Iterator[Reply]) -> BullMQRecord:
        place = self._places[at]
        if at in self._existing:
            return record(place.raw, [*islice(unread, _READS)], self._now_ms, _FIELDS)
        self.surprised = self.surprised or bool(next(unread))
        return record(place.raw, ([None] * len(_FIELDS), "unknown", None, None), self._now_ms, _FIELDS)

    def _check_held(self, found: BullMQRecord) -> None:
        assert self._claim is not None
        if not still_holds(own_claim(self._claim), found):
            raise LeaseLost(self._claim.job_id, loss(found))

    def _is_left_out(self, node: FlowNode) -> bool:
        """Tell whether the job is below one that is not inserted."""
        above = None if node.parent is None else self.results[node.parent]
        return node.parent is not None and (above is None or above.status is not EnqueueStatus.QUEUED)

    def _parent(self, node: FlowNode) -> FlowPlace | None:
        return self._top if node.parent is None else self._places[node.parent]

    def _link(self, node: FlowNode, place: FlowPlace, found: BullMQRecord) -> list[Command]:
        """Return the commands that insert the job, or make the one that exists a child of its parent."""
        parent, lua = self._parent(node), place.lua
        if parent is not None and found.state is not None and found.fields.get("parentKey") not in (None, parent.key):
            raise StorageError(f"job {node.job.id!r} of queue {node.queue!r} is the child of another job")
        if not _is_new(found):
            return [] if parent is None else [self._adding(node, place, parent)]
        gone = [*lua.remove(place.raw), ("ZREM", lua[CANCELLED], place.raw)] if found.fields else []
        return [*gone, self._adding(node, place, parent)]

    def _adding(self, node: FlowNode, place: FlowPlace, parent: FlowPlace | None) -> Command:
        job, link, options = node.job, None, encode_options(node.job, place.raw)
        if parent is not None:
            flag = {} if node.on_failure is None else {_FLAGS[node.on_failure]: True}
            queue = parent.lua.base[:-1]
            link = {"id": parent.raw, "queueKey": queue, **flag}
            options |= {"parent": {"id": parent.raw, "queue": queue}, **flag}
        data = encode_bytes(job.payload)
        return place.lua.add(place.raw, job.name, data, options, self._now_ms, parent=link, awaits=node.awaits)

    def value_of(self, at: int) -> Command:
        """Return the command that reads the result of a job that has completed."""
        parent, place = self._parent(self.nodes[at]), self._places[at]
        if parent is None:
            return "HGET", place.key, "returnvalue"
        return "HGET", f"{parent.key}:{ENDED[0]}", place.key


def _is_new(found: BullMQRecord) -> bool:
    return found.state is None or found.state in STARTS_ANEW


def _result(node: FlowNode, found: BullMQRecord) -> EnqueueResult:
    if _is_new(found):
        return EnqueueResult(id=node.job.id, status=EnqueueStatus.QUEUED)
    status = EnqueueStatus.COMPLETED if found.state is JobState.COMPLETED else EnqueueStatus.DUPLICATE
    return EnqueueResult(id=node.job.id, status=status, existing_state=found.state)


def _known(node: FlowNode, known: Sequence[Reply]) -> EnqueueResult | None:
    """Return the outcome for a job that is a child already, whatever became of its record; else None."""
    if not any(known):
        return None
    unfinished, completed, *_ = known
    status = EnqueueStatus.COMPLETED if completed else EnqueueStatus.DUPLICATE
    state = None if unfinished else JobState.COMPLETED if completed else JobState.FAILED
    return EnqueueResult(id=node.job.id, status=status, existing_state=state)


def _check(nodes: Sequence[FlowNode]) -> None:
    """Accept jobs that BullMQ can take together.

    Raises:
        Unsupported: an ordering, limit, fair or deduplication key, or a priority above 0.
        ValueError: a queue with a colon in its name.
        StorageError: payloads that are too large for one transaction.
    """
    refuse_deduplication((node.job for node in nodes), "BullMQStorage")
    refuse_dependencies((node.job for node in nodes), "BullMQStorage")
    for node in nodes:
        refuse_unknown_to_bullmq(node.job)
        if ":" in node.queue:
            raise ValueError(f"a BullMQ queue cannot be named {node.queue!r}: names have no colons")
    if (size := sum(len(node.job.payload) for node in nodes)) > REDIS_VALUE_BYTES:
        raise StorageError(f"{size} bytes of payloads are more than the {REDIS_VALUE_BYTES} that a flow may have")
