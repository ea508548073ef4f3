"""Claims that are given back when their caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TypeVar

from workers.errors import WorkersError
from workers.jobs import Claim, Released, Settlement
from workers.storage.abilities import Exchange
from workers.storage.on_redis.server import to_the_end

C = TypeVar("C", bound=Claim)


async def claimed(
    claiming: Coroutine[object, object, list[C]], settle: Callable[[Sequence[Settlement]], Awaitable[object]]
) -> list[C]:
    """Return what `claiming` brings; if this is cancelled meanwhile, what it claimed is released."""
    call = asyncio.ensure_future(claiming)
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await to_the_end(_give_back(call, settle))
        raise


async def exchanged(
    exchanging: Coroutine[object, object, Exchange], settle: Callable[[Sequence[Settlement]], Awaitable[object]]
) -> Exchange:
    """Return what `exchanging` brings; if this is cancelled meanwhile, what it claimed is released."""
    call = asyncio.ensure_future(exchanging)
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await to_the_end(_give_back(_claims_of(call), settle))
        raise


async def _claims_of(call: asyncio.Future[Exchange]) -> Sequence[Claim]:
    return (await call).claims or ()


async def _give_back(
    claiming: Awaitable[Sequence[Claim]], settle: Callable[[Sequence[Settlement]], Awaitable[object]]
) -> None:
    with suppress(WorkersError):  # the leases will run out
        await settle([Released(claim=claim) for claim in await claiming])
