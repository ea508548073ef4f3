"""How a node's tables and its statements grow: bytes of each table, and what our own functions cost on them."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

from sqlalchemy import Connection, create_engine, func, select, text

from bench.fan_out import payload_of
from bench.scale_rows import AWAY, Size, fill
from bench.server_cpu import Cpu, PostgresCpu, cpu_of
from db import AttemptOutcome, DeliveryState, FederationTable
from federation.admin.deliveries import deliveries
from federation.admin.deliveries.deliveries import Selection
from federation.admin.deliveries.pages import page_of_deliveries
from federation.admin.doctor import checks
from federation.admin.servers.pages import ServerSort, page_of_servers
from federation.admin.why import explain
from federation.app import Federation
from federation.base.jobs import POST_JOB
from federation.base.settings import Settings
from federation.delivery.attempts import AttemptRecord
from federation.delivery.entries import Begin, Gone
from federation.delivery.group import Group
from federation.delivery.purge import Purge
from federation.delivery.rows import made_ready
from federation.monitoring.numbers import read_numbers
from federation.node.posts import POSTS_PATH
from federation.rollups.job import Rollups

TABLES: Final = ("server_registry", "server_links", "delivery_jobs", "delivery_payloads", "delivery_attempts")
TIMES: Final = 3
GROUP: Final = 50
GROUPS: Final = 20
RECIPIENTS: Final = 1_000
RETURNED: Final = 50
OWN_URL: Final = "https://node.example"

Call = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a call took: wall clock, and processor time of this process and of the database's server."""

    name: str
    seconds: float
    cpu: float
    server_cpu: float
    rows: int | None = None

    def to_json(self) -> dict[str, object]:
        """Return it in milliseconds."""
        shown = {"ms": self.seconds, "cpu_ms": self.cpu, "server_cpu_ms": self.server_cpu}
        return {"name": self.name, "rows": self.rows} | {name: round(value * 1e3, 2) for name, value in shown.items()}


async def grown(place: str, settings: Settings, size: Size, tell: Callable[[str], None]) -> dict[str, object]:
    """Fill a fresh node, and measure its tables and what is asked of them."""
    url = settings.database_url.get_secret_value()
    cpu = cpu_of(url)
    federation = Federation(settings)
    try:
        if place == "postgres":
            rest(url)
        with measuring("fill", cpu, tell) as filled:
            await federation.database.transact(lambda connection: fill(connection, size))
        if place == "postgres":
            await vacuum(url)
        tables = await federation.database.transact(bytes_of_tables)
        for table in tables:
            tell(f"  {table['table']:20} {table['rows']:>9} rows, {table['bytes_each']:>6} bytes each")
        await federation.delivery_queue.start()
        costs = [*filled, *[cost async for cost in Asked(federation, size, cpu, tell).all()]]
    finally:
        await federation.close()
    return {"place": place, "size": str(size), "tables": tables, "costs": [cost.to_json() for cost in costs]}


class Asked:
    """What workers, the scheduler, operators and their pages ask of the tables, by the functions that they use."""

    def __init__(self, federation: Federation, size: Size, cpu: Cpu, tell: Callable[[str], None]) -> None:
        self._federation = federation
        self._database = federation.database
        self._size = size
        self._cpu = cpu
        self._tell = tell

    async def all(self) -> AsyncIterator[Cost]:
        """Measure each, first those that change nothing."""
        federation, database = self._federation, self._database
        server = f"https://social-{AWAY}.example"
        again: dict[str, Call] = {
            "stats": lambda: deliveries.stats(database, Selection()),
            "stats of a server": lambda: deliveries.stats(database, Selection(server_url=server)),
            "why": lambda: explain(federation, server),
            "doctor: backlog": lambda: checks.backlog(federation),
            "doctor: peer keys": lambda: checks.known_keys(federation),
            "metrics": lambda: read_numbers(database, recurring=[]),
            "page of servers": lambda: page_of_servers(database, sort=ServerSort.HELD, descending=True),
            "page of deliveries": lambda: page_of_deliveries(database, Selection(state=DeliveryState.HELD)),
            "links due": self._due,
            "relays": self._relays,
            "long-range probes": federation.long_range_probes,
            "held sweep": federation.held.sweep,
        }
        once: dict[str, Call] = {
            "rollups, first": Rollups(database),
            "rollups, again": Rollups(database),
            "outbox sweep": federation.sweeper.sweep,
        }
        for name, call in again.items():
            yield await self._measured(name, call, TIMES)
        for name, call in once.items():
            yield await self._measured(name, call, 1)
        yield await self._release()
        yield await self._measured("fan-out", self._fan_out, TIMES, rows=RECIPIENTS)
        for each in await self._deliver():
            yield each
        yield await self._measured("purge", Purge(database), 1)
        yield await self._measured("purge, again", Purge(database), 1)
        if isinstance(self._cpu, PostgresCpu):
            url = federation.settings.database_url.get_secret_value()
            for table in ("delivery_attempts", "delivery_jobs"):
                yield await self._measured(f"vacuum {table}", partial(vacuum, url, table), 1)

    async def _measured(self, name: str, call: Call, times: int, *, rows: int | None = None) -> Cost:
        found = []
        for _ in range(times):
            with measuring(name, self._cpu, lambda _: None) as costs:
                done = await call()
            found += costs
        cost = Cost(
            name=name,
            seconds=statistics.median(each.seconds for each in found),
            cpu=statistics.median(each.cpu for each in found),
            server_cpu=statistics.median(each.server_cpu for each in found),
            rows=done if isinstance(done, int) else rows,
        )
        self._tell(line(cost))
        return cost

    async def _due(self) -> None:
        await self._federation.links.due_for_probe(10)
        await self._federation.links.due_for_release(50)

    async def _relays(self) -> None:
        peers = self._federation.relay_peers
        peers._by_merit.drop("")  # its order is kept for half a minute
        await peers.healthy(OWN_URL)

    async def _release(self) -> Cost:
        """Release what is held for fifty servers that are back."""
        for number in range(RETURNED):
            await self._federation.links.returned(f"https://social-{AWAY * number}.example", reason="bench")
        return await self._measured("release", self._federation.releaser.tick, 1)

    async def _fan_out(self) -> None:
        urls = [f"https://social-{number}.example" for number in range(RECIPIENTS)]
        async with self._federation.outbox.transaction() as session:
            await self._federation.outbox.enqueue_fanout(session, POST_JOB, POSTS_PATH, urls, payload_of(OWN_URL))

    async def _deliver(self) -> list[Cost]:
        """Begin and end as many deliveries as workers do in twenty transactions of fifty."""
        made = await self._database.transact(lambda connection: take(connection, GROUP * GROUPS))
        groups = [made[first : first + GROUP] for first in range(0, len(made), GROUP)]
        costs = []
        for name, entries in (("begin", begins), ("end", ends)):
            with measuring(name, self._cpu, self._tell, rows=len(made)) as found:
                for group in groups:
                    await self._database.transact(partial(write, entries=entries(group)))
            costs += found
        return costs


Delivery = tuple[str, str, str]


def take(connection: Connection, count: int) -> list[Delivery]:
    """Make held rows ready, and return their ids, job ids and servers."""
    now = datetime.now(UTC)
    held = text("SELECT id FROM delivery_jobs WHERE state = 'held' LIMIT :most")
    ids = list(connection.execute(held, {"most": count}).scalars())
    return [(row.id, f"{row.id}.{row.series}", row.server_url) for row in made_ready(connection, ids, now)]


def begins(group: Sequence[Delivery]) -> list[Begin]:
    now = datetime.now(UTC)
    return [
        Begin(delivery_id=row, job_id=job, job_name=POST_JOB, server_url=server, attempt=1, at=now)
        for row, job, server in group
    ]


def ends(group: Sequence[Delivery]) -> list[Gone]:
    now = datetime.now(UTC)
    return [Gone(delivery_id=row, attempt=attempt(row, server, now)) for row, _, server in group]


def attempt(row: str, server: str, now: datetime) -> AttemptRecord:
    return AttemptRecord(
        delivery_id=row,
        job_name=POST_JOB,
        method="FEDERATE_POST",
        server_url=server,
        attempt=1,
        series=1,
        started_at=now,
        duration_ms=20,
        outcome=AttemptOutcome.DELIVERED,
        http_status=200,
        request_bytes=1500,
        response_bytes=300,
    )


def write(connection: Connection, entries: Sequence[Begin] | Sequence[Gone]) -> None:
    Group(connection, datetime.now(UTC)).write(entries)


def rest(url: str) -> None:
    """Let PostgreSQL do nothing by itself, whose processor time would count."""
    _execute(url, "ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()")


async def vacuum(url: str, table: str = "") -> None:
    """Do what autovacuum does in time."""
    _execute(url, f"VACUUM (ANALYZE) {table}")


def _execute(url: str, *statements: str) -> None:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def bytes_of_tables(connection: Connection) -> list[dict[str, object]]:
    """Return the size of each table, and of each of its indexes, in bytes for each row."""
    is_postgres = connection.dialect.name == "postgresql"
    found = []
    for name in TABLES:
        number = select(func.count()).select_from(FederationTable.metadata.tables[name])
        rows = max(int(connection.execute(number).scalar_one()), 1)
        sizes = sizes_of(connection, name) if is_postgres else sizes_on_sqlite(connection, name)
        each = {index: round(size / rows, 1) for index, size in sizes.items()}
        total = sum(sizes.values())
        found.append({"table": name, "rows": rows, "bytes": total, "bytes_each": round(total / rows), "parts": each})
    return found


def sizes_of(connection: Connection, table: str) -> dict[str, int]:
    """Return the bytes of a table of PostgreSQL, and of its indexes."""
    parts = text(
        "SELECT CAST(CAST(indexrelid AS regclass) AS text), pg_relation_size(indexrelid) FROM pg_index"
        " WHERE indrelid = CAST(:name AS regclass) ORDER BY 1"
    )
    heap = connection.execute(text("SELECT pg_table_size(CAST(:name AS regclass))"), {"name": table}).scalar_one()
    return {"table": heap} | {name: size for name, size in connection.execute(parts, {"name": table})}  # noqa: C416 - rows are no tuples to `dict`


def sizes_on_sqlite(connection: Connection, table: str) -> dict[str, int]:
    names = [table, *(str(index.name) for index in FederationTable.metadata.tables[table].indexes)]
    automatic = text("SELECT name FROM sqlite_schema WHERE type = 'index' AND tbl_name = :name AND sql IS NULL")
    names += connection.execute(automatic, {"name": table}).scalars()
    size = "SELECT coalesce(sum(pgsize), 0) FROM dbstat WHERE aggregate = 1 AND name = :name"
    return {
        "table" if name == table else name: connection.execute(text(size), {"name": name}).scalar_one()
        for name in sorted(names)
    }


@contextmanager
def measuring(name: str, cpu: Cpu, tell: Callable[[str], None], *, rows: int | None = None) -> Iterator[list[Cost]]:
    """Measure the block. The list has its cost when it ends."""
    costs: list[Cost] = []
    began, own, servers = time.perf_counter(), time.process_time(), cpu.seconds()
    yield costs
    cost = Cost(
        name=name,
        seconds=time.perf_counter() - began,
        cpu=time.process_time() - own,
        server_cpu=cpu.seconds() - servers,
        rows=rows,
    )
    costs.append(cost)
    tell(line(cost))


def line(cost: Cost) -> str:
    """Return the cost as a line of a table."""
    parts = (cost.seconds, cost.cpu, cost.server_cpu)
    return f"  {cost.name:24}" + "".join(f"{value * 1000:>12.1f}" for value in parts)
