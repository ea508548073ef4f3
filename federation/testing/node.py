"""A node for the time of a test: its settings, its environment, its database, and what waits for the engine."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Final

from db.migrate import upgrade
from db.url import sqlite_file
from federation.base.queues.queue import queue_names
from federation.base.queues.storages import open_storage
from federation.base.settings.settings import Settings
from federation.protocol.keys import EncryptionKeyPair, OwnKeys, SigningKeyPair
from federation.runtime.composition import Federation
from federation.runtime.nodes import has_nodes, release_all
from federation.sync.process import close as close_plain
from federation.testing.clock import MovableClock
from federation.testing.engine import Engine, OwedActivity
from federation.testing.loopback import HOST
from federation.testing.network import Network
from workers.background import background
from workers.homes import Home
from workers.storage.sql import SqlStorage

OWN_URL: Final = "https://node.example"
CLOSING_SECONDS: Final = 10.0


class LocalNode:
    """What nodes under test have for any kind of code; see `FederationNode`."""

    def __init__(
        self, settings: Mapping[str, str] | None = None, *, folder: Path | None = None, app: object | None = None
    ) -> None:
        self.clock = MovableClock()
        """The time of this node: `clock.advance(timedelta(days=1))`."""
        self.network = Network()
        self.app = app
        self._given = dict(settings or {})
        self._folder = folder
        self._engine: Engine | None = None
        self._closing = ExitStack()

    @property
    def app(self) -> object | None:
        """The application, ASGI or WSGI, by which others reach the node; without it the node answers by itself."""
        return self.network.app

    @app.setter
    def app(self, app: object | None) -> None:
        self.network.app = app

    @property
    def settings(self) -> Settings:
        """Those of the node, which are in the environment, too."""
        return self.engine.node.settings

    @property
    def url(self) -> str:
        """The URL under which others know the node."""
        url = self.settings.better_auth_url
        assert url is not None, "it was given one"
        return url

    @property
    def database_url(self) -> str:
        """Where the tables are; those of the application may be there, too."""
        return self.settings.database_url.get_secret_value()

    @property
    def engine(self) -> Engine:
        """What works, in the background loop.

        Raises:
            RuntimeError: the node is not there yet, or no more.
        """
        self.check_open()
        assert self._engine is not None
        return self._engine

    def check_open(self) -> None:
        """Accept a node that is there.

        Raises:
            RuntimeError: it is not there yet, or no more.
        """
        if self._engine is None:
            raise RuntimeError(f"this {type(self).__name__} is not open: use it in a `with` block, or as a fixture")

    def owed(self) -> list[OwedActivity]:
        """Return what the application owes to others or has given up, oldest first, without delivering anything."""
        return background.run(self.engine.owed)

    def open(self) -> None:
        """Make the node the process's.

        Raises:
            RuntimeError: the process has a node already.
            ConfigurationError: lists every malformed setting.
        """
        if has_nodes():
            raise RuntimeError(
                "this process has a node already: open the FederationNode, or ask for its fixture, before the "
                "application calls `federation`, and have one at a time"
            )
        with ExitStack() as stack:
            values = self._values(stack)
            settings = Settings.from_values(values)
            _prepare(settings)
            stack.enter_context(_Environment(values))
            self._engine = background.run(partial(_engine, settings, self.clock, self.network))
            stack.callback(self._end)
            background.run(self._engine.start)
            self._closing = stack.pop_all()

    def close(self) -> None:
        """Close the node, its remotes, and what the application has opened of it. A second call does nothing."""
        self._closing.close()

    def _values(self, stack: ExitStack) -> dict[str, str]:
        folder = self._folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="federation-")))
        defaults = {
            "BETTER_AUTH_URL": OWN_URL,
            "DATABASE_URL": f"sqlite:///{folder / 'federation.sqlite3'}",
            "DEV_ALLOWED_HOSTNAMES": HOST,
            "FEDERATION_ACTIVITYPUB": "1",
            **_keys().to_env(),
        }
        return {**defaults, **self._given}

    def _end(self) -> None:
        engine, self._engine = self._engine, None
        assert engine is not None, "it is open"
        try:
            background.run(self.network.close)
            for federation, home in release_all():
                if federation is not engine.node:
                    _close(federation, home)
        finally:
            close_plain()
            background.run(engine.close)


def _keys() -> OwnKeys:
    """Return the keys of every node under test: what one has sealed in a database that stays, the next one opens."""
    seed = hashlib.sha256(b"federation.testing: no secret").digest()
    return OwnKeys(signing=SigningKeyPair.from_seed(seed), encryption=EncryptionKeyPair.from_secret(seed))


async def _engine(settings: Settings, clock: MovableClock, network: Network) -> Engine:
    return Engine(settings, clock, network)


def _close(federation: Federation, home: Home | None) -> None:
    """Close another loop's node in that loop, which may stand still between two tests."""
    if home is None or home.loop is background.loop:
        background.run(federation.close)
    elif not home.loop.is_running():
        home.loop.run_until_complete(federation.close())
    elif asyncio._get_running_loop() is home.loop:
        home.loop.create_task(federation.close())  # this very call keeps the loop from doing it now
    else:
        asyncio.run_coroutine_threadsafe(federation.close(), home.loop).result(CLOSING_SECONDS)


class _Environment:
    """The environment in which an application finds these settings, and no others of a node."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        names = {*(name.upper() for name in Settings.model_fields), *self._values}
        self._before = {name: os.environ.pop(name, None) for name in names}
        os.environ.update(self._values)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _prepare(settings: Settings) -> None:
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
