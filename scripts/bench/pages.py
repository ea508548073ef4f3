"""Open pages of a node's dashboard, as browsers keep them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import cycle, islice
from typing import Final

from federation.dashboard.node_site import NodeSite
from workers.dashboard.feed import Listener

TOPICS: Final = ("overview", "attempts")


@contextlib.asynccontextmanager
async def open_pages(node: NodeSite, number: int) -> AsyncIterator[None]:
    """Keep so many pages open, of the overview and of the live attempts in turn; each takes whatever is new.

    Each has been read once by the time the block begins: what is done only once is not part of what it measures.
    """
    async with contextlib.AsyncExitStack() as stack:
        reading = []
        for topic in islice(cycle(TOPICS), number):
            listener = await stack.enter_async_context(node.site.feed.listen(topic))
            await listener.take()
            reading.append(asyncio.create_task(_read(listener)))
        try:
            yield
        finally:
            for each in reading:
                each.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


async def _read(listener: Listener) -> None:
    while await listener.take() is not None:
        pass
