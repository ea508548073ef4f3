"""Real processes on real databases."""

from tests.federation.conftest import database_file, migrated_file, peer

__all__ = ["database_file", "migrated_file", "peer"]
