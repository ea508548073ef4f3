"""The conformance suite over queues on a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deployments import Cluster, cluster
from tests.workers.harnesses import BullMQHarness, RedisHarness
from workers.storage.base import Storage
from workers.storage.bullmq import BullMQStorage
from workers.testing import Case, all_cases, run


@pytest.fixture(scope="module")
def servers() -> Iterator[Cluster]:
    """Three masters, which nobody stops."""
    with cluster(replicas=0) as servers:
        yield servers


class OnACluster(RedisHarness):
    """`RedisStorage` on a cluster."""

    def __init__(self, servers: Cluster) -> None:
        super().__init__(servers.url)
        self._servers = servers

    async def cut_connections(self) -> None:
        for node in self._servers.nodes:
            await RedisHarness(node.url).cut_connections()

    async def entries(self, storage: Storage) -> int:
        return sum([await RedisHarness(node.url).entries(storage) for node in self._servers.nodes])


class BullMQOnACluster(OnACluster):
    limits = BullMQHarness.limits

    async def make(self, queue: str) -> Storage:
        return BullMQStorage(self._url, queue, prefix="{bull}")


@pytest.mark.parametrize("harness", [OnACluster, BullMQOnACluster])
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.id)
async def test_conformance_on_a_cluster(case: Case, harness: type[OnACluster], servers: Cluster) -> None:
    """The storage keeps the promise of the case there, too, or declares in its limits that it cannot."""
    await servers.ready()
    async with harness(servers) as opened:
        verdict = await run(case, opened)
    if verdict.declared is not None:
        pytest.skip(f"declared: {verdict.declared}")
