"""What the application of a world owes: posts to servers of the sealed wire, activities to those that take these."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from federation.activitypub.outbound import Recipient, Sent, SkipReason
from federation.base.queues.job_data import POST_JOB
from federation.delivery.outbox.outbox import Outbox
from federation.protocol.activities import post_activity
from tests.peer import POSTS_PATH
from tests.plain_wire import PLAIN_JOB, PLAIN_PATH
from tests.simulation.activities import Author, blacklisted_among, inbox_of, owe, recipients, server_of
from tests.simulation.loop import LoopClock
from tests.simulation.node import Process
from tests.simulation.own_actor import OWN_URL
from tests.simulation.plan import PlannedDelivery
from tests.simulation.servers import server_url
from workers import WorkersError

if TYPE_CHECKING:
    from tests.simulation.world import World

AGAIN_AFTER: Final = 20.0
"""Seconds of virtual time until the application owes again what its database or queue did not take."""


@dataclass(frozen=True, slots=True)
class Owed:
    """One delivery of the application to one server; of an activity, to this `inbox`."""

    delivery_id: str
    activity_id: str
    server: str
    at: float
    ordering_key: str | None
    is_poison: bool
    page: int | None = None
    inbox: str | None = None


@dataclass(frozen=True, slots=True)
class Skip:
    """An inbox to which nothing was owed at `at`."""

    at: float
    server: str
    inbox: str
    reason: SkipReason


@dataclass(frozen=True, slots=True)
class _Post:
    """What is owed now: `others` are servers of another wire than those of `to`, which take the `activity`."""

    planned: PlannedDelivery
    name: str
    others: Sequence[str]
    to: Sequence[Recipient]
    activity: Mapping[str, Any]


class Application:
    """The application of one world. What would crash its sender is in `poison`."""

    def __init__(self, world: World, process: Process, poison: set[str], clock: LoopClock) -> None:
        self._world = world
        self._process = process
        self._poison = poison
        self._clock = clock
        self._author = Author()
        self._posts = 0

    async def owe(self, planned: PlannedDelivery) -> None:
        """Owe it, and try again where the database is away."""
        post = self._post(planned)
        if planned.is_poison:
            self._poison.add(post.name)
        if planned.page is not None and planned.user is None:
            self._world.servers[server_url(planned.servers[0])].dislikes[post.name] = planned.page
        at = asyncio.get_running_loop().time()
        while True:
            try:
                owed = await self._owed(post)
                break
            except (SQLAlchemyError, WorkersError) as error:
                self._world.story.tell("* not owed", activity=post.name, error=repr(error)[:300])
                await asyncio.sleep(AGAIN_AFTER)
        for each in owed:
            self._world.owed.append(each)
            self._world.story.tell(
                "* owed",
                delivery_id=each.delivery_id,
                server_url=each.server,
                activity=each.activity_id,
                key=each.ordering_key,
            )
        if asyncio.get_running_loop().time() > at:
            self._world.story.tell("* owed late", activity=post.name)

    def _post(self, planned: PlannedDelivery) -> _Post:
        self._posts += 1
        name = f"post-{self._posts}"
        is_taken = {number: self._world.servers[server_url(number)].inboxes is not None for number in planned.servers}
        to = recipients(planned, [number for number in planned.servers if is_taken[number]])
        return _Post(
            planned=planned,
            name=name,
            others=[server_url(number) for number in planned.servers if not is_taken[number]],
            to=to,
            activity=self._author.activity(planned, name) if to else {},
        )

    async def _owed(self, post: _Post) -> list[Owed]:
        """All of it in one transaction."""
        federation = self._process.federation
        assert federation is not None
        blacklisted = await blacklisted_among(federation, post.to) if post.to else frozenset()
        async with federation.outbox.transaction() as session:
            ids = await self._enqueue(federation.outbox, session, post) if post.others else ()
            sent = Sent(activity_id=post.name)
            if post.to:
                sent = await owe(federation, session, post.activity, post.to, blacklisted)
        now = asyncio.get_running_loop().time()
        skipped = {each.recipient: each.reason for each in sent.skipped}
        self._world.skips += [Skip(now, server_of(each), inbox_of(each), why) for each, why in skipped.items()]
        inboxes = dict.fromkeys((server_of(each), inbox_of(each)) for each in post.to if each not in skipped)
        places = [*((server, None) for server in post.others), *inboxes]
        return [
            Owed(
                delivery_id,
                post.name,
                server,
                now,
                post.planned.ordering_key,
                is_poison=post.planned.is_poison,
                page=post.planned.page,
                inbox=inbox,
            )
            for delivery_id, (server, inbox) in zip((*ids, *sent.delivery_ids), places, strict=True)
        ]

    async def _enqueue(self, outbox: Outbox, session: AsyncSession, post: _Post) -> tuple[str, ...]:
        payload = post_activity(
            federation_url=OWN_URL,
            post_id=post.name,
            content=[{"type": "text", "value": "a post"}],
            author_id="author",
            published=self._clock.now(),
            is_private=False,
        )
        name, path = POST_JOB, POSTS_PATH
        if self._world.plan.is_plain:
            name, path, payload = PLAIN_JOB, PLAIN_PATH, json.dumps({"id": post.name})
        if len(post.planned.servers) > 1:
            return await outbox.enqueue_fanout(session, name, path, post.others, payload)
        server = post.others[0]
        key = post.planned.ordering_key
        return (await outbox.enqueue_delivery(session, name, server + path, server, payload, ordering_key=key),)
