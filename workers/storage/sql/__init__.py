"""Jobs in an SQLite file or a PostgreSQL database, beside an application's own tables."""

from workers.storage.sql.database import admission
from workers.storage.sql.storage import SqlStorage

__all__ = ["SqlStorage", "admission"]
