"""The log of attempts in several layouts: what writing costs, and what it takes to get rid of a day.

A layout replaces that of the real table, under its name, so that our own purge and our own look-ups work on each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, create_engine, text

from bench.scale_growth import bytes_of_tables, measuring, rest, vacuum
from bench.scale_rows import DAYS_OF_ATTEMPTS, attempt_columns, build_indexes, inserted
from bench.server_cpu import PostgresCpu
from db import FederationTable
from federation.admin.deliveries import deliveries
from federation.app import Federation
from federation.base.settings import Settings
from federation.delivery.purge import KEEP_ATTEMPTS, Purge
from workers.clock import ManualClock

SERVERS: Final = 10_000
GROUP: Final = 50
GROUPS: Final = 200
LOOKS: Final = 20
TABLE: Final = FederationTable.metadata.tables["delivery_attempts"]
BY_TIME: Final = "delivery_attempts_started_at_idx"
PARTITIONED: Final = (
    "CREATE TABLE delivery_attempts (LIKE whole_log INCLUDING DEFAULTS) PARTITION BY RANGE (started_at)",
    "CREATE SEQUENCE attempt_numbers",
    "ALTER TABLE delivery_attempts ALTER id SET DEFAULT nextval('attempt_numbers')",
)
PARTITIONED_INDEXES: Final = (
    "CREATE UNIQUE INDEX ON delivery_attempts (id, started_at)",
    "CREATE INDEX ON delivery_attempts (server_url, started_at)",
    "CREATE UNIQUE INDEX ON delivery_attempts (delivery_id, series, attempt, started_at)",
)
Tell = Callable[[str], None]


def compared(settings: Settings, attempts: int, tell: Tell) -> list[dict[str, object]]:
    """Measure each layout with as many attempts."""
    rest(settings.database_url.get_secret_value())
    return [asyncio.run(_measured(settings, name, attempts, tell)) for name in ("as it is", "brin", "partitions")]


async def _measured(settings: Settings, name: str, attempts: int, tell: Tell) -> dict[str, object]:
    federation = Federation(settings)
    try:
        return await _Layout(federation, settings, name, attempts, tell).measured()
    finally:
        await federation.close()


class _Layout:
    def __init__(self, federation: Federation, settings: Settings, name: str, attempts: int, tell: Tell) -> None:
        self._database = federation.database
        self._name = name
        self._attempts = attempts
        self._tell = tell
        self._url = url = settings.database_url.get_secret_value()
        self._cpu = PostgresCpu(url)
        self._engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
        self._figures: dict[str, object] = {"layout": name, "attempts": attempts}
        self._midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        self._oldest_kept = self._midnight - KEEP_ATTEMPTS

    async def measured(self) -> dict[str, object]:
        self._tell(f"{self._name}: ms, ms of CPU here, ms of CPU of the server")
        if self._name == "as it is":  # indexes grow less dense than they are built
            await self._write()
            self._figures["bytes_as_written"] = (await self._log())["parts"]
        await self._database.transact(self._make)
        await vacuum(self._url)
        if self._name != "partitions":  # there the parts have the bytes
            self._figures["bytes"] = (await self._log())["parts"]
        await self._cost("write", self._write, per=GROUP * GROUPS)
        await self._cost("last attempts", self._last_attempts, per=LOOKS)
        await self._cost("of a delivery", self._of_a_delivery, per=LOOKS)
        day = self._attempts // DAYS_OF_ATTEMPTS
        purge = Purge(self._database, clock=ManualClock(self._midnight))
        await self._cost("purge", self._drop_day if self._name == "partitions" else purge, per=day)
        await self._cost("vacuum", self._vacuum, per=day)
        left = await self._database.transact(_oldest)
        if left < self._oldest_kept.replace(tzinfo=None):
            raise RuntimeError(f"{self._name}: attempts of {left} are left")
        self._engine.dispose()
        return self._figures

    async def _log(self) -> dict[str, object]:
        """Return the bytes of the table."""
        tables = await self._database.transact(bytes_of_tables)
        return next(each for each in tables if each["table"] == TABLE.name)

    async def _cost(self, name: str, call: Callable[[], Awaitable[object]], *, per: int) -> None:
        before = _wal(self._engine.connect())
        with measuring(name, self._cpu, self._tell) as costs:
            await call()
        wal = _wal(self._engine.connect()) - before
        [cost] = costs
        self._figures[name] = {
            "s": round(cost.seconds, 3),
            "server_us_each": round(cost.server_cpu / per * 1e6, 1),
            "wal_bytes_each": round(wal / per, 1),
            "each_of": per,
        }

    def _make(self, connection: Connection) -> None:
        """Give the table this layout, and fill it."""
        for index in TABLE.indexes:
            connection.execute(text(f"DROP INDEX IF EXISTS {index.name}"))
        connection.execute(text("TRUNCATE delivery_attempts"))
        if self._name == "partitions":
            self._partition(connection)
        numbers, columns = attempt_columns(is_postgres=True, servers=SERVERS, count=self._attempts)
        made = f"86400 * {DAYS_OF_ATTEMPTS} * (1 - n * 1.0 / {self._attempts}) * interval '1 second'"
        columns |= {"started_at": f"date_trunc('day', now() AT TIME ZONE 'utc') - {made}"}  # whole days
        connection.execute(inserted(TABLE.name, numbers, columns))
        if self._name == "partitions":
            for statement in PARTITIONED_INDEXES:
                connection.execute(text(statement))
        else:
            build_indexes(connection, TABLE)
        if self._name == "brin":
            connection.execute(text(f"DROP INDEX {BY_TIME}"))
            connection.execute(text(f"CREATE INDEX {BY_TIME} ON delivery_attempts USING brin (started_at)"))

    def _partition(self, connection: Connection) -> None:
        connection.execute(text("ALTER TABLE delivery_attempts RENAME TO whole_log"))
        for statement in PARTITIONED:
            connection.execute(text(statement))
        today = self._midnight.date()
        for day in range(-DAYS_OF_ATTEMPTS, 2):
            first, last = today + timedelta(days=day), today + timedelta(days=day + 1)
            connection.execute(
                text(
                    f"CREATE TABLE attempts_of_{first:%Y%m%d} PARTITION OF delivery_attempts"
                    f" FOR VALUES FROM ('{first}') TO ('{last}')"
                )
            )

    async def _write(self) -> None:
        """Insert new attempts in groups, each in a transaction, as the ledger does."""
        numbers, columns = attempt_columns(is_postgres=True, servers=SERVERS, count=GROUP)
        columns |= {"started_at": "now() AT TIME ZONE 'utc'", "delivery_id": "uuidv7()::text"}
        insert = inserted(TABLE.name, numbers, columns, also="ON CONFLICT DO NOTHING")
        for _ in range(GROUPS):
            await self._database.transact(lambda connection: connection.execute(insert))

    async def _last_attempts(self) -> None:
        for number in range(LOOKS):
            await deliveries.last_attempts(self._database, f"https://social-{number}.example")

    async def _of_a_delivery(self) -> None:
        """Look for the attempts of deliveries, as a group of the ledger does before it writes one."""
        mine = text("SELECT id FROM delivery_attempts WHERE delivery_id = :id AND series = 0 AND attempt = 1")
        async with self._database.read() as session:
            for number in range(LOOKS):
                await session.execute(mine, {"id": f"none-{number}"})

    async def _drop_day(self) -> None:
        """Drop the partitions whose attempts are all too old."""
        last = self._oldest_kept - timedelta(days=1)

        def drop(connection: Connection) -> None:
            connection.execute(text(f"DROP TABLE attempts_of_{last:%Y%m%d}"))

        await self._database.transact(drop)

    async def _vacuum(self) -> None:
        await vacuum(self._url, "delivery_attempts")


def _wal(connection: Connection) -> int:
    with connection:
        told = connection.execute(text("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")).scalar_one()
        return int(told)


def _oldest(connection: Connection) -> datetime:
    return connection.execute(text("SELECT min(started_at) FROM delivery_attempts")).scalar_one()
