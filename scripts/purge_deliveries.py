"""Deletes what has been kept long enough: settled deliveries, attempts, expired rotations, unused texts.

    scripts/purge_deliveries

For nodes that run no scheduler, from cron; the scheduler's job `purge` does the same. The database is DATABASE_URL's,
from the environment or from `.env` in the working directory. Prints how many rows of each kind were deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sqlalchemy.exc import SQLAlchemyError

from db import Database, DatabaseUrlError
from federation.activitypub.purge import ActivityPurge
from federation.base.errors import ConfigurationError, Unreachable
from federation.base.settings.reach import require_schema
from federation.base.settings.settings import Settings
from federation.retention import Purge
from federation.sealed.purge import SealedPurge


def main() -> None:
    """Purge, or say in one line why not and end with 1."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        gone = asyncio.run(_purge())
    except (ConfigurationError, DatabaseUrlError, Unreachable, OSError) as error:
        sys.exit(f"purge_deliveries: {error}")
    except SQLAlchemyError as error:
        sys.exit(f"purge_deliveries: the database failed: {type(error).__name__}; what was deleted by then is gone")
    print(", ".join(f"{name}: {count}" for name, count in gone.items()))


async def _purge() -> Mapping[str, object]:
    settings = Settings.load()
    settings.require_files()
    database = Database(settings.database_url.get_secret_value())
    try:
        await require_schema(database)
        wires = [SealedPurge(database), ActivityPurge(database)]
        purge = Purge(database, of_wires=wires, keep_attempts=settings.federation_keep_attempts)
        return await purge()
    finally:
        await database.close()


if __name__ == "__main__":
    main()
