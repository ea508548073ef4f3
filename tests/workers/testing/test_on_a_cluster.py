"""The conformance suite over queues on a cluster: one case of each verb in every run, all of them with `--full`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import pytest

from tests.deployments import Cluster, cluster
from tests.workers.harnesses import RedisHarness
from workers import Limit, StorageError
from workers.crons import Cron
from workers.jobs import Declared
from workers.storage.base import Capabilities, Storage
from workers.storage.bullmq import BullMQStorage
from workers.storage.redis import RedisStorage
from workers.testing import Case, all_cases, run
from workers.testing.steps import job

IN_EVERY_RUN: Final = frozenset(
    {
        "enqueue.a_batch_answers_in_order",
        "claim.concurrent_claimers_never_share_a_job",
        "wait.an_enqueue_wakes",
        "renew.a_lost_lease_is_reported_with_its_reason",
        "settle.outcomes_keep_the_order_of_the_batch",
        "recover.a_crashed_workers_jobs_come_back",
        "retention.jobs_may_drop_themselves",
        "cancel.a_request_is_told_at_once",
        "chains.a_continued_job_goes_on_as_its_next_link",
        "progress.it_is_told_to_subscribers",
        "inspect.every_state_is_listed",
        "manage.failed_jobs_can_be_retried",
        "manage.a_queue_can_be_drained",
        "events.a_jobs_life_is_told_in_order",
        "isolation.queues_share_nothing",
        "restart.every_verb_works_after_a_cut",
    }
)

HOURLY: Final = Cron(name="hourly", job="work", every=timedelta(hours=1))


@pytest.fixture(scope="module")
def servers() -> Iterator[Cluster]:
    """Three masters without replicas."""
    with cluster(replicas=0) as servers:
        yield servers


class OnACluster(RedisHarness):
    """`RedisStorage` on a cluster."""

    def __init__(self, servers: Cluster) -> None:
        super().__init__(servers.url)
        self._servers = servers
        self.restarts = True

    async def restart_server(self) -> None:
        for node in self._servers.nodes:
            node.restart()
        await self._servers.ready()

    async def cut_connections(self) -> None:
        for node in self._servers.nodes:
            await RedisHarness(node.url).cut_connections()

    async def entries(self, storage: Storage) -> int:
        return sum([await RedisHarness(node.url).entries(storage) for node in self._servers.nodes])


class BullMQOnACluster(OnACluster):
    """`BullMQStorage` on a cluster."""

    @property
    def capabilities(self) -> Capabilities:
        return BullMQStorage.capabilities

    async def make(self, queue: str) -> Storage:
        return BullMQStorage(self._url, queue, prefix="{bull}")


@pytest.mark.parametrize("harness", [OnACluster, BullMQOnACluster])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.id in IN_EVERY_RUN else pytest.mark.full, id=case.id) for case in all_cases()],
)
async def test_conformance_on_a_cluster(case: Case, harness: type[OnACluster], servers: Cluster) -> None:
    """The storage keeps the promise of the case there, too, or declares in its capabilities that it cannot."""
    await servers.ready()
    async with harness(servers) as opened:
        verdict = await run(case, opened)
    if verdict.declared is not None:
        pytest.skip(f"declared: {verdict.declared}")


async def test_what_recurs_on_bullmq_and_its_limit_on_a_cluster(servers: Cluster) -> None:
    """BullMQ's scripts for both have their keys in one slot."""
    await servers.ready()
    async with BullMQOnACluster(servers) as harness:
        storage = await harness.open()
        assert isinstance(storage, BullMQStorage)
        assert await storage.declare_cron(HOURLY) is Declared.STORED
        assert await storage.declare_cron(HOURLY) is Declared.KEPT
        await storage.declare_limits({"*": Limit("5/s", concurrency=2)})
        assert await storage.declared_limits() == {"*": Limit("5/s", concurrency=2)}
        assert await storage.drain() == 0
        assert await storage.remove_cron("hourly")
        assert await storage.declare_cron(HOURLY) is Declared.REMOVED


@pytest.mark.parametrize("kind", [RedisStorage, BullMQStorage])
async def test_a_node_is_not_taken_for_the_cluster(kind: type[RedisStorage | BullMQStorage], servers: Cluster) -> None:
    """A URL that names one server of a cluster is an error that says so, at the latest at the first call."""
    await servers.ready()
    refused = 0
    for node in servers.nodes:
        storage = kind(node.url, "{mail}")
        try:
            async with contextlib.AsyncExitStack() as stack:
                await storage.connect()
                stack.push_async_callback(storage.disconnect)
                await storage.enqueue([job()])
        except StorageError as error:
            refused += "its URL begins with redis+cluster://" in str(error)
    assert refused == len(servers.nodes) - 1


def test_the_cases_of_every_run_exist() -> None:
    """A case that was renamed is not left out."""
    assert {case.id for case in all_cases()} >= IN_EVERY_RUN
