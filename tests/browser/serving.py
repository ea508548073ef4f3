"""A dashboard on a port of its own, in the test's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from workers.dashboard.serving import DashboardServer, listen
from workers.dashboard.site import Site


@asynccontextmanager
async def served(site: Site) -> AsyncIterator[str]:
    """Its address, until the block ends; then it stops as a process would stop it."""
    listener = listen("127.0.0.1", 0)
    server = DashboardServer(site.app, before_stop=site.feed.end_streams)
    with listener:
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.request_stop()
    await site.close()
