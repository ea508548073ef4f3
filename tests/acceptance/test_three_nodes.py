"""A day of three nodes, as their operators run them: a relay, a blacklist with a backlog, a crash, a long outage.

A is three processes, a server and two workers, on PostgreSQL and BullMQ; B is one, on SQLite alone, and C one, on
PostgreSQL alone. What an operator does is a command; what came of it is read from databases and logs.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import select
from sqlmodel import col

from db import DeliveryAttempt, Follow, HoldReason, ServerHealthEvent, new_id
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from tests import warm
from tests.acceptance.node_process import HANG_FOR_AN_HOUR, RESOLVE, NodeProcess
from tests.acceptance.site import Site, numbered
from tests.conftest import postgres_database
from tests.federation.protocol.vectors import A, B
from tests.patience import until
from tests.peer import settle
from tests.servers import valkey

PER_SERVER = 3
BACKLOG, MEANWHILE, LOST, HELD = 40, 20, 7, 5
QUICK_PROBES = 5
PAUSE_MS = 600_000

SHORT = {
    "FEDERATION_PER_SERVER": str(PER_SERVER),
    "FEDERATION_HEALTH_FIRST_DELAY": "100ms",
    "FEDERATION_HEALTH_STEP": "50ms",
    "FEDERATION_HEALTH_CHECKS": str(QUICK_PROBES),
    "FEDERATION_LONG_PROBE_FIRST": "1s",
    "FEDERATION_LONG_PROBE_MAXIMUM": "1s",
    "FEDERATION_PROBE_INTERVAL": "500ms",
    "FEDERATION_OUTBOX_INTERVAL": "1s",
}


@pytest.mark.timeout(900)
async def test_a_day_of_three_nodes(story: Story) -> None:
    """Each chapter says what is true at its end; afterwards every process stops in good order, and none has crashed."""
    await asyncio.gather(*(site.start() for site in story.sites))

    await story.a_follow_goes_through_the_relay()
    await story.a_backlog_ends_with_a_rule()
    await story.a_producer_dies_after_its_commit()
    await story.a_long_outage_heals()

    processes = [process for site in story.sites for process in site.processes]
    assert await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes)) == [0] * len(processes)
    for process in processes:
        log = process.log.read_text()
        assert "Traceback" not in log
        assert '"stack"' not in log


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The three nodes and the Redis of A's queues; each chapter begins and ends with all of them at work."""

    a: Site
    b: Site
    c: Site
    redis_url: str

    @property
    def sites(self) -> tuple[Site, Site, Site]:
        return self.a, self.b, self.c

    async def a_follow_goes_through_the_relay(self) -> None:
        """A cannot resolve C's name; B can and passes the follow on, and C accepts it. Once A can, a probe finds C."""
        await settle(self.a.view, "alice")
        async with self.a.view.outbox.transaction() as session:
            follow = await self.a.view.producers.request_follow(
                session, follower_id="alice", following_id="carol", server_url=self.c.url
            )
        await self._over(to=self.c)
        [attempt] = await self._recorded([follow.delivery_id])
        assert (attempt.outcome, attempt.relayed_by) == ("delivered", self.b.url)
        async with self.a.view.database.read() as session:
            assert (await session.execute(select(col(Follow.accepted)))).scalars().all() == [True]
        assert (await self.a.known(self.c)).unhealthy_reason == "DNS_BLOCKED"

        for process in self.a.processes:
            process.learn("a.test", "b.test", "c.test")
        await until(lambda: self._healed_by_a_long_range_probe(since=0))

    async def a_backlog_ends_with_a_rule(self) -> None:
        """C hangs, and what is owed to it piles up while B gets its posts. A rule ends the backlog in both workers:
        what is new is refused at once, and of the rest no more arrives than was under way. Once it is lifted, C gets
        its posts again.
        """
        self.c.server.suspend()
        backlog = await self.a.owe(self.c, numbered("backlog", BACKLOG))
        await self.a.owe(self.b, numbered("meanwhile", MEANWHILE))
        await self._over(to=self.b)
        assert self.b.let_in("meanwhile") == sorted(numbered("meanwhile", MEANWHILE))
        assert len(await self.a.owed(to=self.c)) == BACKLOG

        assert (await self.a.command("blacklist", "add", self.c.url, "--reason", "spam"))[0] == 0
        await until(self._new_ones_are_refused)
        under_way = PER_SERVER * len(self._workers)
        self.c.server.resume()
        await self._over(to=self.c)

        delivered = await self._delivered_or_refused(backlog)
        assert len(delivered) <= under_way
        arrived = await self.c.posts("backlog")
        assert len(set(arrived)) == len(arrived) <= under_way

        assert (await self.a.command("blacklist", "remove", self.c.url))[0] == 0
        await until(self._gets_through)
        if ruled_out := await self.a.rows(to=self.c):  # kept for a week otherwise, as all that is given up
            dropped = await self.a.command("deliveries", "drop", "--server", self.c.url, "--state", "failed", "--yes")
            assert dropped == (0, {"dropped": len(ruled_out), "busy": 0})

    async def a_producer_dies_after_its_commit(self) -> None:
        """It is killed before one of its jobs is in the queue; the sweeper adds them all, and B gets each post once."""
        async with Redis.from_url(self.redis_url) as redis:
            with self._ready_producer() as producer:
                await redis.client_pause(PAUSE_MS, all=False)  # whoever adds a job waits
                assert producer.stdin is not None
                producer.stdin.write(b"\n")
                producer.stdin.flush()
                await until(self._lost_posts_are_owed)
                assert producer.poll() is None
            await redis.client_unpause()
        await self._over(to=self.b)
        assert sum(int(str(event["count"])) for event in self.a.events("outbox_jobs_added")) == LOST
        assert await self.b.posts("lost") == self.b.let_in("lost") == numbered("lost", LOST)

    async def a_long_outage_heals(self) -> None:
        """C is down until its quick probes are used up. What is owed to it is held, new posts without so much as a
        job, and once it is back everything arrives once, with nobody's help. `why` tells how it is, meanwhile and
        afterwards.
        """
        exhausted = len(self.a.events("health_checks_exhausted"))
        self.c.kill()
        early = await self.a.owe(self.c, numbered("held", HELD))
        await until(self._everything_is_held)
        late = await self.a.owe(self.c, numbered("held-later", HELD))
        rows = {row.id: row for row in await self.a.owed(to=self.c)}
        assert rows.keys() == {*early, *late}
        assert {row.held_reason for row in rows.values()} == {HoldReason.SERVER}
        assert [rows[delivery].attempts for delivery in late] == [0] * HELD
        assert await self.a.view.delivery_queue.storage.status(sorted(rows)) == [None] * len(rows)

        await until(lambda: self._quick_probes_are_used_up(since=exhausted))
        status, told = await self.a.command("why", self.c.url)
        assert (status, told["link"]["state"], told["link"]["reason"]) == (1, "down", "CONN_REFUSED")
        assert (told["server"]["is_healthy"], told["server"]["unhealthy_reason"]) == (False, "CONN_REFUSED")
        assert told["server"]["health_check_attempts"] >= QUICK_PROBES
        assert (told["backlog"]["held"], told["backlog"]["failed"]) == (2 * HELD, 0)
        assert (told["next_probe"]["queued"], told["rules"]) == (False, [])
        _, stats = await self.a.command("deliveries", "stats", "--server", self.c.url)
        assert (stats["open"], stats["held_by_reason"]) == (2 * HELD, {"server": 2 * HELD})

        await self.c.start()
        await self._over(to=self.c)
        expected = sorted([*numbered("held", HELD), *numbered("held-later", HELD)])
        assert await self.c.posts("held") == self.c.let_in("held") == expected
        status, told = await self.a.command("why", self.c.url)
        assert (status, told["link"]["state"], told["server"]["is_healthy"]) == (0, "up", True)
        assert (told["next_probe"], told["backlog"]["open"], told["backlog"]["failed"]) == (None, 0, 0)

    async def _over(self, *, to: Site) -> None:
        """A owes a node nothing any more."""

        async def are_over() -> bool:
            return not await self.a.owed(to=to)

        await until(are_over)

    async def _recorded(self, deliveries: Sequence[str]) -> list[DeliveryAttempt]:
        """The attempts at deliveries that are over, once the last of each is on record, up to a second late."""

        async def are_recorded() -> bool:
            ended = {each.delivery_id for each in await self.a.attempts(deliveries) if each.outcome != "retryable"}
            return len(ended) == len(deliveries)

        await until(are_recorded)
        return await self.a.attempts(deliveries)

    async def _delivered_or_refused(self, deliveries: Sequence[str]) -> set[str]:
        """Those that C took; the rule ended all others, held ones too, which are kept."""
        kept = {row.id for row in await self.a.rows(to=self.c) if row.error_code == "BLACKLISTED"}
        attempts = await self._recorded([each for each in deliveries if each not in kept])
        ended = [each for each in attempts if each.outcome != "retryable"]
        assert {each.error_code for each in ended} <= {None, "BLACKLISTED"}
        return {each.delivery_id for each in ended if each.outcome == "delivered"}

    async def _gets_through(self) -> bool:
        """Whether a new post arrives at C."""
        [delivery] = await self.a.owe(self.c, [f"again-{new_id()}"])
        await self._over(to=self.c)
        return "delivered" in {each.outcome for each in await self.a.attempts([delivery])}

    @property
    def _workers(self) -> Sequence[NodeProcess]:
        return self.a.processes[1:]

    async def _new_ones_are_refused(self) -> bool:
        """Whether each of A's workers has refused a post to C because of a rule; they get another one."""
        await self.a.owe(self.c, [f"refused-{new_id()}"])
        return all(
            "BLACKLISTED" in {event["code"] for event in worker.events("delivery_attempt")} for worker in self._workers
        )

    @contextlib.contextmanager
    def _ready_producer(self) -> Iterator[subprocess.Popen[bytes]]:
        """An application beside A that owes posts to B as soon as it is told to; killed with the block."""
        process = subprocess.Popen(
            [warm.PYTHON, "-m", "tests.acceptance.lost_producer", self.b.url, str(LOST)],
            env=self.a.server.environment,
            cwd=self.a.server.directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()

    async def _lost_posts_are_owed(self) -> bool:
        return len(await self.a.rows(to=self.b)) == LOST

    async def _everything_is_held(self) -> bool:
        return {row.held_reason for row in await self.a.owed(to=self.c)} == {HoldReason.SERVER}

    async def _quick_probes_are_used_up(self, *, since: int) -> bool:
        known = await self.a.known(self.c)
        return known.health_check_attempts >= QUICK_PROBES and len(self.a.events("health_checks_exhausted")) > since

    async def _healed_by_a_long_range_probe(self, *, since: int) -> bool:
        """A holds C for well, and it was the scheduler that found it so."""
        async with self.a.view.database.read() as session:
            events = select(ServerHealthEvent).where(col(ServerHealthEvent.server_url) == self.c.url)
            last = (await session.execute(events.order_by(col(ServerHealthEvent.id).desc()).limit(1))).scalar_one()
        return (last.to_state, last.reason) == ("healthy", "probe") and self._healed() > since

    def _healed(self) -> int:
        """How many servers A's long-range probes have found well."""
        runs = [run for run in self.a.events("scheduler_job") if run["job"] == "long-range-probes"]
        return sum(int(str(run["healed"])) for run in runs)


@pytest.fixture
async def story(
    migrated_file: Path, migrated_postgres_url: str, postgres_server: str, migrated_postgres: str, tmp_path: Path
) -> AsyncIterator[Story]:
    """A knows B and C, and C's name leads nowhere for it; B and C know A. Nothing runs yet."""
    async with contextlib.AsyncExitStack() as stack:
        redis_url = stack.enter_context(valkey()).url  # its own, for it will be paused
        c_url = stack.enter_context(postgres_database(postgres_server, template=migrated_postgres))
        b_url = f"sqlite:///{shutil.copy(migrated_file, tmp_path / 'b.sqlite3')}"
        a_settings = {**SHORT, "REDIS_URL": redis_url}
        a_server = NodeProcess("a", A.keys, tmp_path / "a", migrated_postgres_url, a_settings, ("a.test", "b.test"))
        a_server.command = ("node", "serve")
        workers = [
            replace(a_server, directory=tmp_path / name, command=("workers", "run"), site=RESOLVE + HANG_FOR_AN_HOUR)
            for name in ("w1", "w2")
        ]
        everybody = ("a.test", "b.test", "c.test")
        b_server = NodeProcess("b", B.keys, tmp_path / "b", b_url, SHORT, everybody)
        c_server = NodeProcess("c", generate_own_keys(), tmp_path / "c", c_url, SHORT, everybody)
        a, b, c = [
            await stack.enter_async_context(site(processes))
            for processes in ([a_server, *workers], [b_server], [c_server])
        ]
        for one, other in ((a, b), (a, c), (b, a), (c, a)):
            await introduce(one, other)
        yield Story(a=a, b=b, c=c, redis_url=redis_url)


@contextlib.asynccontextmanager
async def site(processes: Sequence[NodeProcess]) -> AsyncIterator[Site]:
    """A node with users; its processes are killed with the block."""
    view = Federation(processes[0].own_settings)
    made = Site(processes=processes, view=view)
    await settle(view, "carol")
    try:
        yield made
    finally:
        made.kill()
        await view.close()


async def introduce(site: Site, other: Site) -> None:
    """A node has the other's keys."""
    keys = other.server.keys
    await site.view.registry.register(
        url=other.url, public_key=keys.signing.public_text, encryption_public_key=keys.encryption.public_text
    )
