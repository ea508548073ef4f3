"""The database of a node under test: an SQLite file with all tables, a copy of one that each process makes once."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path

from db.migrate import upgrade
from db.url import sqlite_file
from federation.base.queues.queue import queue_names
from federation.base.queues.storages import open_storage
from federation.base.settings.settings import Settings
from workers.background import background
from workers.storage.sql import SqlStorage


def prepare(settings: Settings) -> None:
    """Give the database all tables, and those of a host application. A file that is not there yet is copied."""
    file = sqlite_file(settings.database_url.get_secret_value())
    if file is None or file.exists() or settings.queue_url is not None or settings.redis_url is not None:
        _make(settings)
        return
    file.touch(mode=0o600)
    file.write_bytes(_template(settings.federation_activitypub))


@cache
def _template(with_activitypub: bool) -> bytes:
    with tempfile.TemporaryDirectory(prefix="federation-") as folder:
        file = Path(folder, "template.sqlite3")
        values = {"DATABASE_URL": f"sqlite:///{file}", "FEDERATION_ACTIVITYPUB": with_activitypub}
        _make(Settings.from_values(values))
        return file.read_bytes()


def _make(settings: Settings) -> None:
    """Do what `federation upgrade --host-tables` does."""
    upgrade(settings.database_url.get_secret_value(), host_tables=True)
    for name in queue_names(settings):
        storage = open_storage(settings, name)
        if isinstance(storage, SqlStorage):
            background.run(partial(_known, storage))


async def _known(storage: SqlStorage) -> None:
    await storage.migrate()
    await storage.connect()
    await storage.disconnect()
