"""An event loop whose time passes only while nobody has anything to do, and then at once.

Theory of operation. Whenever no callback is ready, the clock jumps to the next timer. That alone would run a week's
691 200 ticks of everything that looks each second whether something is due, and four times as many of the release. So
the timers of such tasks are *lazy*: they are kept back until something is due for them (`Needs` says when, from the
database and the queues), and at most for some hours. A lazy timer is never early, and never kept back beyond the moment
from which it has something to find; for the code that waits it is as if the machine had been asleep.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import Context
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeVarTuple

Ts = TypeVarTuple("Ts")

START: Final = datetime.fromisoformat("2026-03-02T00:00:00+00:00")


@dataclass(frozen=True, slots=True)
class Need:
    """`first` tells from when on a lazy timer of its kind has something to find, in seconds of the loop, given the time
    now (None: it finds nothing); it is kept back for `patience` at most.
    """

    first: Callable[[float], float] | None
    patience: float

    def met(self, when: float, now: float) -> float:
        """When a timer for this moment fires."""
        last = when + self.patience
        return last if self.first is None else min(max(when, self.first(now)), last)


class Deadlock(Exception):
    """Nothing is ready, and no timer will make it so."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Lazy are the timers of tasks whose name begins with a key of `needs`."""

    def __init__(self, needs: Mapping[str, Need] | None = None) -> None:
        self._virtual = 0.0
        self._needs = dict(needs or {})
        self._woken: set[str] = set()
        self._lazy: dict[str, list[asyncio.TimerHandle]] = {name: [] for name in self._needs}
        self._ready: deque[asyncio.Handle]  # the loop's own; what is frozen is kept out of it
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._virtual

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        task = asyncio.current_task(self)
        name = "" if task is None else task.get_name()
        kind = name if name in self._lazy else name.partition("-")[0]
        if kind not in self._lazy:
            return super().call_at(when, callback, *args, context=context)
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._lazy[kind], timer)
        return timer

    def jump(self, seconds: float | None) -> None:
        """Time passes until something is to be done; the next ordinary timer is `seconds` off, None: there is none."""
        now = self._virtual
        chosen, earliest = None, math.inf if seconds is None else now + seconds
        for kind, waiting in self._lazy.items():
            while waiting and waiting[0].cancelled():
                heapq.heappop(waiting)
            if waiting and (first := waiting[0].when()) < earliest:
                due = first if kind in self._woken else self._needs[kind].met(first, now)
                if due < earliest:
                    chosen, earliest = kind, due
        if earliest == math.inf:
            raise Deadlock("nobody waits for anything that could happen")
        self._virtual = max(self._virtual, earliest)
        if chosen is not None:
            self._fire(chosen)

    def freeze(self, is_frozen: Callable[[Context], bool]) -> None:
        """From now on nothing runs that began in a context of this kind, however long it has been due."""
        self._ready = _Freezing(self._ready, is_frozen)

    def thaw(self) -> None:
        """Whatever was kept back comes first, in its order."""
        if isinstance(self._ready, _Freezing):
            self._ready = deque((*self._ready.kept, *self._ready))

    def wake(self) -> None:
        """The next timer of each kind is kept back for nothing: the clock was set, and what is due is not what was."""
        self._woken.update(self._lazy)

    def _fire(self, kind: str) -> None:
        """The first of these timers fires. One is enough: where it leaves something to do, the next follows."""
        self._woken.discard(kind)
        self._ready.append(heapq.heappop(self._lazy[kind]))  # as the loop does with its own


class _Freezing(deque[asyncio.Handle]):
    """What is ready to run, without what is frozen: that is kept back when its turn comes."""

    def __init__(self, handles: Iterable[asyncio.Handle], is_frozen: Callable[[Context], bool]) -> None:
        super().__init__(handles)
        self._is_frozen = is_frozen
        self.kept: list[asyncio.Handle] = []

    def popleft(self) -> asyncio.Handle:
        handle = super().popleft()
        context: Context = handle._context  # type: ignore[attr-defined] # each has one, which is not published
        if not self._is_frozen(context):
            return handle
        self.kept.append(handle)
        return _NOTHING


class _Nothing(asyncio.Handle):
    """Stands where a frozen callback stood: the loop passes over what was cancelled."""

    def __init__(self) -> None:
        self._cancelled = True  # all that the loop asks of it


_NOTHING: Final = _Nothing()


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: where another selector would sleep, the loop's time jumps."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self._loop.jump(timeout)
        return []


class MachineClock:
    """The clock of one machine, `offset` seconds ahead of the world's."""

    def __init__(self, world: LoopClock) -> None:
        self._world = world
        self.offset = 0.0

    def now(self) -> datetime:
        return self._world.now() + timedelta(seconds=self.offset)


class LoopClock:
    """The wall clock of a simulation, and all that is known of when it was set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.elapsed = loop.time
        self._set: list[tuple[float, float]] = [(0.0, 0.0)]

    @property
    def offset(self) -> float:
        """How many seconds it is off."""
        return self._set[-1][1]

    def set(self, by: float) -> None:
        """From now on it is so much further ahead."""
        self._set.append((self._loop.time(), self.offset + by))

    def shown(self, at: float) -> datetime:
        """What it showed at that time of the loop."""
        offset = next(offset for since, offset in reversed(self._set) if since <= at)
        return START + timedelta(seconds=at + offset)

    def now(self) -> datetime:
        return START + timedelta(seconds=self._loop.time() + self.offset)

    def loop_time(self, moment: datetime) -> float:
        """The loop's time at which this clock shows `moment`, unless it is set before."""
        return (moment - START).total_seconds() - self.offset
