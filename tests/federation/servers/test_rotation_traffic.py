"""Follows and posts both ways while keys change, on either side and on both at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlmodel import col

from db import DeliveryJob, Follow, HoldReason, LinkState, Post, ServerLink
from federation.admin import users
from federation.base.own_keys import drop_old_pair
from federation.base.queues.job_data import POST_JOB
from federation.delivery.errors import RetryableFailure
from federation.node.posts import POSTS_PATH
from federation.protocol.keys import OwnKeys, generate_own_keys
from federation.runtime.composition import Federation
from federation.sealed.outbound.follows import FollowAnswer
from tests.acceptance.site import post
from tests.federation.delivery.harness import Site
from tests.federation.protocol.vectors import B
from tests.federation.servers.two_nodes import A_URL, B_URL, Pair, newest, refuse

LAPS = 4


@dataclass(slots=True)
class Traffic:
    """Posts and follows from both to each other, each of which has to arrive at its first attempt."""

    pair: Pair
    sent: list[str] = field(default_factory=list)

    async def lap(self, times: int = LAPS) -> None:
        """So many posts and follows more have gone each way."""
        for _ in range(times):
            name = f"lap-{len(self.sent)}"
            self.sent.append(name)
            await asyncio.gather(*(self._send(sender, name) for sender in (self.pair.a, self.pair.b)))

    async def _send(self, sender: Federation, name: str) -> None:
        await self.pair.deliver(sender, name)
        answer = await self.pair.follow(sender, name)
        assert isinstance(answer, FollowAnswer)
        assert answer.accepted

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """It goes on while the block runs."""
        over = asyncio.Event()

        async def flow() -> None:
            while not over.is_set():
                await self.lap(1)

        async with asyncio.TaskGroup() as group:
            group.create_task(flow())
            yield
            over.set()

    async def assert_arrived(self) -> None:
        """Everything is with both, once."""
        for node in (self.pair.a, self.pair.b):
            async with node.database.read() as session:
                posts = (await session.execute(select(col(Post.federation_post_id)))).scalars().all()
                follows = (await session.execute(select(col(Follow.follower_id)))).scalars().all()
            assert sorted(map(str, posts)) == sorted(self.sent)
            assert sorted(follows) == sorted(f"follower-{name}" for name in self.sent)


async def rotate_b(pair: Pair, old: OwnKeys) -> OwnKeys:
    """B is restarted with new keys and its old ones, and brings them to A."""
    new = generate_own_keys()
    pair.restart_b(new, old)
    assert pair.b.key_rotation is not None
    [asked] = await pair.b.key_rotation.ask([A_URL])
    assert asked.problem is None
    return new


async def test_traffic_goes_on_whoever_changes_keys(pair: Pair) -> None:
    """A, then B, then both at once, each time until the old pair is gone."""
    for node in (pair.a, pair.b):
        await users.add(node.database, users.LocalUser(id="alice"))
    traffic = Traffic(pair)
    file = Path(".env")
    async with traffic.beside():
        assert (await pair.rotate()).waiting == []
        await traffic.lap()
        assert drop_old_pair(file)
        await traffic.lap()
        of_b = await rotate_b(pair, B.keys)
        await traffic.lap()
        pair.restart_b(of_b)
        await traffic.lap()
        state, of_b = await asyncio.gather(pair.rotate(), rotate_b(pair, of_b))
        assert state.waiting == []
        await traffic.lap()
        assert drop_old_pair(file)
        pair.restart_b(of_b)
        await traffic.lap()

    await traffic.assert_arrived()


async def test_what_was_held_for_a_mismatch_goes_out_sealed_to_the_new_key(pair: Pair) -> None:
    """B shows another key; what is owed to it is held, and goes out once B has proved the key."""
    new = generate_own_keys()
    pair.restart_b(new)
    async with Site(pair.a) as site:
        assert await pair.a.discovery.look_again(B_URL, None)
        delivery = await owe(pair.a, "held")
        assert await held(pair.a, delivery) == (HoldReason.SERVER, LinkState.MISMATCH)

        # B was heard of, and looked at in vain, a moment before it proved its key: that must not put the next look off.
        await pair.a.links.look_now(B_URL)
        assert await pair.a.link_probes.tick() == 1
        pair.restart_b(new, B.keys)
        assert pair.b.key_rotation is not None
        await pair.b.key_rotation.ask([A_URL])
        assert await pair.a.link_probes.tick() == 1
        assert await pair.a.releaser.tick() == 1
        await site.ended(f"{delivery}.1")

    assert await has(pair.b, "held")


async def test_a_server_that_was_away_gets_what_was_held_and_then_the_new_keys(pair: Pair) -> None:
    """B knows A's old pair when it returns, and what was held is signed by that."""
    pair.net.before = refuse
    [waiting] = (await pair.rotate()).waiting
    assert waiting.problem == "UNKNOWN"
    async with Site(pair.a) as site:
        await pair.a.links.exhausted(B_URL, "CONN_REFUSED", first_attempted_at=datetime.now(UTC))
        delivery = await owe(pair.a, "held")
        assert await held(pair.a, delivery) == (HoldReason.SERVER, LinkState.DOWN)
        assert await pair.rotation() == {"asked": 0, "confirmed": 0}

        pair.net.before = None
        await pair.a.links.look_now(B_URL)
        assert await pair.a.link_probes.tick() == 1
        await site.ended(f"{delivery}.1")

    assert await has(pair.b, "held")
    assert await pair.rotation() == {"asked": 1, "confirmed": 1}
    assert await pair.key_at_b() == newest(pair.a)
    await pair.both_ways("after")


async def test_a_server_that_uses_its_new_keys_later_gets_what_is_owed_then(pair: Pair) -> None:
    """As the original does, once all its servers have confirmed: until then it is a mismatch, and refused here."""
    new = await rotate_b(pair, B.keys)
    pair.restart_b(B.keys)
    await pair.b.registry.note_knows(A_URL, B.keys.signing.public_text)  # the original notes nothing of the kind
    with pytest.raises(RetryableFailure, match="INVALID_SIGNATURE"):
        await pair.deliver(pair.b, "too-early")
    async with Site(pair.a) as site:
        delivery = await owe(pair.a, "held")
        await site.ended(delivery)
        assert await held(pair.a, delivery) == (HoldReason.SERVER, LinkState.MISMATCH)

        pair.restart_b(new)
        await pair.b.registry.note_knows(A_URL, new.signing.public_text)
        await pair.a.links.look_now(B_URL)
        assert await pair.a.link_probes.tick() == 1
        assert await pair.a.releaser.tick() == 1
        await site.ended(f"{delivery}.1")

    assert await has(pair.b, "held")
    await pair.both_ways("after")


async def owe(node: Federation, name: str) -> str:
    async with node.outbox.transaction() as session:
        return await node.outbox.enqueue_delivery(
            session, POST_JOB, B_URL + POSTS_PATH, B_URL, post(node.own_url or "", name)
        )


async def held(node: Federation, delivery: str) -> tuple[HoldReason | None, LinkState]:
    """Why the delivery is held, and the state of the link to B."""
    async with node.database.read() as session:
        row = await session.get_one(DeliveryJob, delivery)
        link = await session.get_one(ServerLink, (B_URL, "sealed"))
        return row.held_reason, link.state


async def has(node: Federation, name: str) -> bool:
    async with node.database.read() as session:
        found = select(Post).where(col(Post.federation_post_id) == name)
        return (await session.execute(found)).scalar_one_or_none() is not None
