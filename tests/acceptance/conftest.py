"""Real processes on real databases."""

from tests.federation.conftest import (
    database_file,
    migrated_file,
    migrated_postgres,
    migrated_postgres_url,
    peer,
    queue_prefix,
    queue_settings,
)

__all__ = [
    "database_file",
    "migrated_file",
    "migrated_postgres",
    "migrated_postgres_url",
    "peer",
    "queue_prefix",
    "queue_settings",
]
