"""The test servers themselves: real, reachable, and empty at the start."""

from __future__ import annotations

import redis
import sqlalchemy


def test_valkey_answers(redis_url: str) -> None:
    """The shared Valkey speaks RESP."""
    with redis.Redis.from_url(redis_url) as client:
        assert client.ping()


def test_postgres_database_is_empty(postgres_url: str) -> None:
    """Each test gets a PostgreSQL database without tables."""
    engine = sqlalchemy.create_engine(postgres_url)
    assert sqlalchemy.inspect(engine).get_table_names() == []
    engine.dispose()
