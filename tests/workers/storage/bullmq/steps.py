"""The short steps that tests of the BullMQ storage are made of."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from workers.jobs import ErrorInfo

LEASES = {"*": timedelta(seconds=30)}
ERROR = ErrorInfo(type="ValueError", message="no")
SHORT = timedelta(milliseconds=50)


async def all_blocked(client: Any, count: int) -> bool:
    clients = await client.client_list()
    return sum(one["cmd"] == "bzpopmin" and "b" in one["flags"] for one in clients) == count
