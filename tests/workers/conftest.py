"""A PostgreSQL server for tests that stop it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import PostgresProcess, postgres_process


@pytest.fixture(scope="session")
def own_postgres() -> Iterator[PostgresProcess]:
    with postgres_process() as server:
        yield server


@pytest.fixture
def restartable_postgres(own_postgres: PostgresProcess) -> PostgresProcess:
    """A running server that the test may stop; tests on it share a database."""
    own_postgres.start()
    return own_postgres
