"""The gates of an in-memory queue: which of them are closed, and when they open; see `workers.gates`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from datetime import UTC, datetime
from typing import Final

from workers.gates import QUEUE_GATE, RESERVED, WHOLE_QUEUE, Limit, LimitKey, limit_key_of
from workers.storage.memory.line import Line, is_over

WHEN_ONE_ENDS: Final = datetime.max.replace(tzinfo=UTC)
"""The time at which a gate opens that as many jobs have passed as may run at once."""


class Gates:
    """The limits of a queue, how many jobs run of each gate, and the buckets, by when they are full again."""

    def __init__(self, processing: Sized, on_bucket: Callable[[str], None]) -> None:
        """Make the gates of a queue with these running jobs.

        `on_bucket` is told of each gate whose bucket changes, or is forgotten.
        """
        self.limits: dict[str, Limit] = {}
        self._processing = processing
        self._on_bucket = on_bucket
        self._running: dict[str, int] = {}
        self._full: Line[tuple[datetime]] = Line()
        self._opening: Line[tuple[datetime]] = Line()
        self._looked_at = datetime.min.replace(tzinfo=UTC)

    def limit_of(self, gate: str) -> Limit | None:
        """Return the limit that the gate belongs to; None for other gates, and for a limit that nobody declared."""
        if not gate.startswith(RESERVED):
            return None
        if gate == QUEUE_GATE:
            return self.limits.get(WHOLE_QUEUE)
        key = limit_key_of(gate)
        return None if key is None else self.limits.get(key.limit)

    def busy(self, gate: str) -> bool:
        """Tell whether the gate is closed until a job of it ends."""
        if not gate.startswith(RESERVED):
            return gate in self._running
        limit = self.limit_of(gate)
        if limit is None or limit.concurrency is None:
            return False
        running = len(self._processing) if gate == QUEUE_GATE else self._running.get(gate, 0)
        return running >= limit.concurrency

    def queue_closed_until(self, now: datetime) -> datetime | None:
        """Return until when no job at all starts, None if jobs may."""
        return self.closed_until(QUEUE_GATE, now) if WHOLE_QUEUE in self.limits else None

    def closed_until(self, gate: str, now: datetime) -> datetime | None:
        """Return until when no job passes the gate, None if it is open."""
        if self.busy(gate):
            return WHEN_ONE_ENDS
        limit = self.limit_of(gate)
        if limit is None:
            return None
        full_at = self.full_at(gate)
        known = limit.known(full_at, now)
        if known is not None and known != full_at:
            self._fill(gate, known)
        return limit.opens_at(known, now)

    def full_at(self, gate: str) -> datetime | None:
        """Return when the gate's bucket is full again; None for one that is full, as nothing is kept of it."""
        key = self._full.key(gate)
        return None if key is None else key[0]

    def began(self, gate: str) -> None:
        self._running[gate] = self._running.get(gate, 0) + 1

    def ended(self, gate: str) -> None:
        left = self._running.get(gate, 0) - 1
        if left > 0:
            self._running[gate] = left
        else:
            self._running.pop(gate, None)

    def take_token(self, gate: str, now: datetime) -> None:
        """Take a token from the gate's bucket, if it has one."""
        limit = self.limit_of(gate)
        full_at = None if limit is None else limit.taken(self.full_at(gate), now)
        if full_at is not None:
            self._fill(gate, full_at)

    def _fill(self, gate: str, full_at: datetime) -> None:
        self._full.add((full_at,), gate)
        self._on_bucket(gate)

    def restore_bucket(self, gate: str, full_at: datetime | None) -> None:
        """Set when the bucket is full, None for now, as it was written elsewhere."""
        if full_at is None:
            self._full.discard(gate)
        else:
            self._full.add((full_at,), gate)

    def buckets(self) -> list[str]:
        """Return the gate of every bucket that is not full."""
        return self._full.members()

    def open_later(self, gate: str, until: datetime) -> None:
        """Note that jobs are parked at the gate until then."""
        if until is not WHEN_ONE_ENDS:
            self._opening.add((until,), gate)

    def next_opening(self) -> datetime | None:
        """Return when the first gate opens that jobs are parked at."""
        head = self._opening.head()
        return None if head is None else head[0][0]

    def opened(self, now: datetime) -> Iterator[str]:
        """Yield, once, the gates that have opened by `now`; all of them if the clock was set back."""
        went_back, self._looked_at = now < self._looked_at, now
        gates = self._opening.members() if went_back else []
        while not went_back and (head := self._opening.head()) is not None and is_over(head[0], now):
            gates.append(self._opening.pop()[1])
        for gate in gates:
            self._opening.discard(gate)
        yield from gates

    def sweep(self, now: datetime) -> Iterator[str]:
        """Forget the buckets that are full, and yield the gate of each."""
        while (head := self._full.head()) is not None and is_over(head[0], now):
            gate = self._full.pop()[1]
            self._on_bucket(gate)
            yield gate

    def declare(self, limits: Mapping[str, Limit]) -> list[str]:
        """Keep the limits whose version is no lower than that of the one kept; return their names."""
        newer = {
            name: limit
            for name, limit in limits.items()
            if name not in self.limits or limit.version >= self.limits[name].version
        }
        changed = [name for name, limit in newer.items() if self.limits.get(name) != limit]
        self.limits.update(newer)
        return changed


def is_of(gate: str, name: str) -> bool:
    """Tell whether the gate belongs to the limit of that name."""
    key: LimitKey | None = limit_key_of(gate)
    return key is not None and key.limit == name
