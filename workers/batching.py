"""One call for many: what is asked while a call is under way goes into the next one, together.

Theory of operation. There is never more than one call under way, unless a batch is full, so batches form by themselves:
callers that ask in the same turn of the event loop share a call, and so do those that ask while the last one lasts. An
idle batcher adds no delay. Settlements, the ledger of deliveries, enqueues and cached reads all go through here; they
differ in what `call` does and in which errors concern a whole batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

from workers.errors import StorageUnavailable
from workers.retry import Backoff

FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0

T = TypeVar("T")
R = TypeVar("R")
Asked: TypeAlias = "tuple[T, asyncio.Future[R]]"


def is_unavailable(error: Exception) -> bool:
    """Tell whether asking again, about fewer items, would fail in the same way."""
    return isinstance(error, StorageUnavailable)


class Batcher(Generic[T, R]):
    """Calls `call` with up to `limit` items at once; it returns their answers in the same order.

    An error that `is_common` concerns the whole batch: it is the answer for every item, except that those worth
    repeating (`repeats`, by default none) are tried again, with back-off, for as long as they are. After any other
    error each item is tried alone, so that a bad one costs its neighbours nothing.

    A full batch does not wait for the one before it, as long as fewer than `calls` (default 1) are under way. After a
    batch of more than `crowd` items the next one waits `linger` seconds, in which more may come. Unless
    `skips_cancelled`, an item is asked about even if nobody waits for its answer any more.
    """

    def __init__(
        self,
        call: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
        limit: int,
        *,
        calls: int = 1,
        is_common: Callable[[Exception], bool] = is_unavailable,
        repeats: Callable[[T], bool] = lambda _: False,
        linger: float = 0.0,
        crowd: int = 0,
        skips_cancelled: bool = True,
    ) -> None:
        self._call = call
        self._limit = limit
        self._calls = calls
        self._is_common = is_common
        self._repeats = repeats
        self._linger = linger
        self._crowd = crowd
        self._skips_cancelled = skips_cancelled
        self._crowded = False  # whether the last batch was large
        self._alone = False  # whether an item is asked about in its caller's task
        self._waiting: deque[Asked[T, R]] = deque()
        self._serving: dict[asyncio.Task[None], list[Asked[T, R]]] = {}  # what each has taken

    @property
    def is_busy(self) -> bool:
        """Whether a call is under way, or about to be."""
        return bool(self._serving)

    async def ask(self, item: T) -> R:
        """Return the answer for `item`, or raise its error. When cancelled before its turn, nothing is asked."""
        return await self.put(item)

    async def ask_at_once(self, item: T) -> R:
        """Return the answer as `ask` does, but ask in the own task while nobody else asks, and without repeats.

        That saves two turns of the event loop. What others ask meanwhile goes into a batch, which does not wait for it.
        The call is its caller's: `close` and `abandon` leave it alone.
        """
        if self._serving or self._alone:
            return await self.put(item)
        self._alone = True
        try:
            (answer,) = await self._call([item])
        finally:
            self._alone = False
        return answer

    def put(self, item: T) -> asyncio.Future[R]:
        """Add `item` to the next batch, and return the future of its answer."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if not self._serving or (len(self._serving) < self._calls and len(self._waiting) >= self._limit):
            self._serving[asyncio.create_task(self._serve(), name="batched-calls")] = []
        return future

    async def close(self) -> None:
        """Wait until everything that was asked is answered."""
        while self._serving:
            await asyncio.wait(self._serving)

    def abandon(self, error: Exception) -> None:
        """End the calls under way, and answer everything that was asked with `error`."""
        for serving, taken in self._serving.items():
            serving.cancel()
            _refuse(taken, error)
        _refuse(self._waiting, error)
        self._waiting.clear()

    async def _serve(self) -> None:
        this = asyncio.current_task()
        assert this is not None
        try:
            while self._waiting:
                if self._crowded and self._linger:
                    await asyncio.sleep(self._linger)
                self._serving[this] = taken = self._take()
                self._crowded = len(taken) > self._crowd
                await self._answer(taken)
                self._serving[this] = []
                await asyncio.sleep(0)  # those who were just answered may have the next question
        finally:
            del self._serving[this]

    def _take(self) -> list[Asked[T, R]]:
        taken: list[Asked[T, R]] = []
        while self._waiting and len(taken) < self._limit:
            asked = self._waiting.popleft()
            if not (self._skips_cancelled and asked[1].done()):
                taken.append(asked)
        return taken

    async def _answer(self, batch: list[Asked[T, R]]) -> None:
        backoff: Backoff | None = None  # made when it is needed: this is on the way of every job
        while batch:
            try:
                answers = await self._call([item for item, _ in batch])
            except Exception as error:
                if not self._is_common(error):
                    await self._answer_apart(batch, error)
                    return
                again = {id(asked) for asked in batch if self._repeats(asked[0])}
                _refuse([asked for asked in batch if id(asked) not in again], error)
                batch = [asked for asked in batch if id(asked) in again]
                backoff = backoff or Backoff(first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
                if batch:
                    await asyncio.sleep(backoff.pause())
            else:
                _accept(batch, answers)
                return

    async def _answer_apart(self, batch: list[Asked[T, R]], error: Exception) -> None:
        if len(batch) == 1:
            _refuse(batch, error)
            return
        for asked in batch:
            await self._answer([asked])


def _accept(batch: Sequence[Asked[T, R]], answers: Sequence[R]) -> None:
    for (_, future), answer in zip(batch, answers, strict=True):
        if not future.done():
            future.set_result(answer)


def _refuse(batch: Iterable[Asked[T, R]], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
