"""Writes the blacklist as CSV.

    scripts/export_blacklist [--output FILE] [--expired]

The database is DATABASE_URL's, from the environment or from `.env` in the working directory, as for the node itself. A
file is replaced in one step, so that nobody reads half of one; without --output the list goes to standard output.
`federation blacklist import` reads it again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sqlalchemy.exc import SQLAlchemyError

from db import Database, DatabaseUrlError
from federation.admin.blacklist import export_csv
from federation.admin.blacklist.importing import whole_file
from federation.base.errors import ConfigurationError
from federation.base.settings.settings import Settings


def main() -> None:
    """Export, or say in one line why not and end with 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write here instead of to standard output")
    parser.add_argument("--expired", action="store_true", help="include rules that are no longer in force")
    options = parser.parse_args()
    try:
        with whole_file(options.output) as file:
            asyncio.run(_export(file, expired=options.expired))
    except (ConfigurationError, DatabaseUrlError, OSError) as error:
        sys.exit(f"export_blacklist: {error}")
    except SQLAlchemyError as error:
        sys.exit(f"export_blacklist: the database cannot be read: {type(error).__name__}; is DATABASE_URL right?")


async def _export(file: IO[str], *, expired: bool) -> None:
    settings = Settings.load()
    settings.require_files()
    database = Database(settings.database_url.get_secret_value())
    try:
        await export_csv(database, file, expired=expired)
    finally:
        await database.close()


if __name__ == "__main__":
    main()
