"""What a node builds from its settings."""

from __future__ import annotations

from bullmq.worker import default_maximum_block_timeout

from federation.base.settings.settings import Settings
from federation.runtime.composition import Federation


async def test_producers_and_workers_have_two_connections_of_their_own(redis_url: str, settings: Settings) -> None:
    """Each is made once; without a Redis there is none; beside queues elsewhere it is REDIS_URL's."""
    node = Federation(
        settings.model_copy(update={"redis_url": Settings.from_values({"REDIS_URL": redis_url}).redis_url})
    )
    try:
        assert node.redis is not None
        assert node.worker_redis is not None
        assert node.redis is node.redis
        assert node.redis is not node.worker_redis
        assert await node.redis.ping()
        assert await node.worker_redis.ping()
    finally:
        await node.close()
    without = Federation(settings)
    assert without.redis is None
    assert without.worker_redis is None
    await without.close()


async def test_a_stock_worker_may_block_on_the_workers_connection(redis_url: str, settings: Settings) -> None:
    """The client for workers waits longer for an answer than a stock `bullmq.Worker` ever blocks for a job."""
    url = Settings.from_values({"REDIS_URL": redis_url}).redis_url
    node = Federation(settings.model_copy(update={"redis_url": url}))
    assert node.worker_redis is not None
    patience = node.worker_redis.connection_pool.connection_kwargs["socket_timeout"]
    assert patience > default_maximum_block_timeout + 1
    await node.close()
