"""The sessions in which handlers write beside the queue's tables."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession


class Sessions:
    """Of the engine `given`, which stays open, or of one that is made when first needed."""

    def __init__(self, given: AsyncEngine | None, make: Callable[[], AsyncEngine]) -> None:
        self._given = given
        self._make = make
        self._own: AsyncEngine | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AsyncSession]:
        """A session that has done nothing yet, and is closed at the end."""
        engine = self._given or self._own
        if engine is None:
            engine = self._own = self._make()
        # Nothing expires: what the handler has loaded can be read after the block too.
        async with AsyncSession(engine, expire_on_commit=False) as session:
            yield session

    async def dispose(self) -> None:
        """The connections made here are closed."""
        own, self._own = self._own, None
        if own is not None:
            await own.dispose()
