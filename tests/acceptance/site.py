"""A node of one or more processes, with what a test asks of it: commands, posts, and what its database and logs say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import select
from sqlmodel import col

from db import DeliveryAttempt, DeliveryJob, DeliveryState, Post, Server
from federation.base.queues.job_data import POST_JOB
from federation.node.posts import POSTS_PATH
from federation.protocol.activities import post_activity
from federation.runtime.composition import Federation
from tests import warm
from tests.acceptance.node_process import NodeProcess
from tests.patience import LONG_PATIENCE_SECONDS, PATIENCE_SECONDS, eventually
from tests.peer import Peer
from workers import JobState

OWN_URL: Final = "https://a.example"
"""The node of tests that do not ask it anything over HTTP."""

BATCH: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The processes of a node, the one that serves first, and a test's own view of its database and queues."""

    processes: Sequence[NodeProcess]
    view: Federation

    @property
    def server(self) -> NodeProcess:
        return self.processes[0]

    @property
    def url(self) -> str:
        return self.server.url

    async def start(self) -> None:
        await asyncio.gather(*(process.start() for process in self.processes))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def events(self, name: str) -> list[dict[str, object]]:
        """The lines of all its logs of this event."""
        return [event for process in self.processes for event in process.events(name)]

    async def command(self, *arguments: str) -> tuple[int, Any]:
        """Exit status and JSON of `federation ARGUMENTS --json`, as an operator of the node runs it."""
        process = await asyncio.create_subprocess_exec(
            *(warm.PYTHON, "-m", "federation", *arguments, "--json"),
            env=self.server.environment,
            cwd=self.server.directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, json.loads(output)

    async def owe(self, to: Site, post_ids: Iterable[str]) -> list[str]:
        """Posts with these ids are owed to another node; their deliveries."""
        async with self.view.outbox.transaction() as session:
            return [
                await self.view.outbox.enqueue_delivery(
                    session, POST_JOB, to.url + POSTS_PATH, to.url, post(self.url, post_id)
                )
                for post_id in post_ids
            ]

    async def rows(self, *, to: Site) -> list[DeliveryJob]:
        """The deliveries to another node that are owed, or given up and kept."""
        async with self.view.database.read() as session:
            query = select(DeliveryJob).where(col(DeliveryJob.server_url) == to.url)
            return list((await session.execute(query)).scalars())

    async def owed(self, *, to: Site) -> list[DeliveryJob]:
        """The deliveries to another node that are ready or held."""
        return [row for row in await self.rows(to=to) if row.state in (DeliveryState.READY, DeliveryState.HELD)]

    async def attempts(self, deliveries: Iterable[str]) -> list[DeliveryAttempt]:
        """All attempts on record at these deliveries, but for those that only waited for their turn."""
        async with self.view.database.read() as session:
            query = select(DeliveryAttempt).where(
                col(DeliveryAttempt.delivery_id).in_(list(deliveries)), col(DeliveryAttempt.outcome) != "parked"
            )
            return list((await session.execute(query.order_by(col(DeliveryAttempt.id)))).scalars())

    async def known(self, other: Site) -> Server:
        """What this node believes of another one."""
        async with self.view.database.read() as session:
            return (await session.execute(select(Server).where(col(Server.url) == other.url))).scalar_one()

    async def posts(self, name: str) -> list[str]:
        """The posts called `name-0`, `name-1` ... that are stored here, each as often as it is."""
        async with self.view.database.read() as session:
            ids = (await session.execute(select(col(Post.federation_post_id)))).scalars()
            return sorted(each for each in ids if each is not None and each.startswith(name))

    def let_in(self, name: str) -> list[str]:
        """Those posts once more, each as often as the log has it arrive."""
        arrivals = [*self.events("post_received"), *self.events("post_replayed")]
        ids = (str(event["federation_post_id"]) for event in arrivals)
        return sorted(each for each in ids if each.startswith(name))


async def owe(federation: Federation, peer: Peer, post_ids: Sequence[str]) -> list[str]:
    """Posts with these ids are owed to the peer; their deliveries."""
    deliveries: list[str] = []
    for start in range(0, len(post_ids), BATCH):
        async with federation.outbox.transaction() as session:
            deliveries += [
                await federation.outbox.enqueue_delivery(
                    session, POST_JOB, peer.url + POSTS_PATH, peer.url, post(OWN_URL, post_id)
                )
                for post_id in post_ids[start : start + BATCH]
            ]
    return deliveries


async def job_states(federation: Federation) -> set[JobState]:
    """The states that jobs of deliveries are in."""
    return {state for state, number in (await federation.delivery_queue.storage.counts()).items() if number}


async def all_jobs_completed(federation: Federation) -> None:
    """Wait until they are: what a killed worker had delivered, and not settled, is so when its lease is over."""
    await eventually(
        lambda: job_states(federation),
        lambda states: states == {JobState.COMPLETED},
        patience=LONG_PATIENCE_SECONDS,
    )


def post(own_url: str, post_id: str) -> str:
    """The activity that brings a post of this id."""
    return post_activity(
        federation_url=own_url,
        post_id=post_id,
        content=[{"type": "text", "value": "hello"}],
        author_id="writer",
        published=datetime.now(UTC),
        is_private=False,
    )


def numbered(name: str, count: int) -> list[str]:
    return [f"{name}-{number}" for number in range(count)]
