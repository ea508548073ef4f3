"""A client has its share of what there is for all, and takes none of another's."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

from federation.node.refusals import Refusal, try_later
from federation.node.shares import MAX_WAITING, SHARES, Places
from tests.patience import PATIENCE_SECONDS, until

CLIENT, NEIGHBOUR, STRANGER = ("8.8.8.1", "8.8.8.0/24"), ("8.8.8.2", "8.8.8.0/24"), ("9.9.9.9", "9.9.9.0/24")


def places(most: int = 2 * SHARES, patience: float = 0.02) -> Places:
    return Places(most, full=lambda: try_later("full", reason="FULL"), patience=timedelta(seconds=patience))


async def test_a_client_and_a_network_have_a_sixteenth() -> None:
    """Others have theirs, and whoever cannot be known has no share."""
    shared = places()
    async with AsyncExitStack() as taken:
        for _ in range(2):
            await taken.enter_async_context(shared.place(CLIENT))
        for holders in (CLIENT, NEIGHBOUR):
            with pytest.raises(Refusal):
                await taken.enter_async_context(shared.place(holders))
        for _ in range(2):
            await taken.enter_async_context(shared.place(STRANGER))
        for _ in range(2 * SHARES - 4):
            await taken.enter_async_context(shared.place(()))
        with pytest.raises(Refusal):
            await taken.enter_async_context(shared.place(()))
    async with shared.place(CLIENT), shared.place(NEIGHBOUR):
        pass


async def test_what_is_asked_takes_nothing_from_the_client_of_its_address() -> None:
    """Somebody may name any address as a server, and all its places may be taken."""
    shared = places()
    async with AsyncExitStack() as taken:
        for _ in range(SHARES):
            await taken.enter_async_context(shared.place((), {CLIENT[0]: SHARES}))
        with pytest.raises(Refusal):
            await taken.enter_async_context(shared.place(STRANGER, {CLIENT[0]: SHARES}))
        await taken.enter_async_context(shared.place(CLIENT))
        await taken.enter_async_context(shared.place(CLIENT, {CLIENT[0]: 1 + SHARES}))


async def test_who_has_its_share_waits_for_it() -> None:
    """As many as may wait; one more is told to come back at once."""
    shared = places(patience=PATIENCE_SECONDS)
    done = asyncio.Event()
    begun = 0

    async def work() -> None:
        nonlocal begun
        async with shared.place(CLIENT):
            begun += 1
            await done.wait()

    async with asyncio.TaskGroup() as working:
        for _ in range(2 + MAX_WAITING):
            working.create_task(work())
        await until(lambda: begun == 2)
        with pytest.raises(Refusal):
            async with shared.place(CLIENT):
                pass
        done.set()
    assert begun == 2 + MAX_WAITING
