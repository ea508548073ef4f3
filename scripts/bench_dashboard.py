"""How long the dashboard's pages take, how large they are, and what an open one costs, on a node with very many rows.

    python scripts/bench_dashboard.py [--place sqlite postgres] [--deliveries 1000000] [--servers 20000] [--seconds 60]

A tenth of the deliveries is held, a tenth failed and a twentieth expired; the others are ready. There are as many
attempts in the log as deliveries, up to 300 000, over ten days. Each page is asked for eleven times, in this process,
without a network; the first answer, which compiles templates, is not counted.

Then attempts are written at 5 000 a minute for `--seconds`, first with no page open, then with ten: five of the
overview and five of the live attempts. The difference of CPU seconds is what these cost. Writing is part of both.

Every place is fresh. Prints a table on stderr and one JSON object on stdout. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

import httpx
from sqlalchemy import Connection, insert, text

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.node import fresh_places, machine, unwind_when_terminated
from bench.pages import open_pages

from db import AttemptOutcome, DeliveryAttempt, LinkState, Server, ServerLink
from federation.app import Federation
from federation.base.logs import configure_logging
from federation.base.settings import Settings
from federation.cli.running import upgrade
from federation.dashboard.node_site import NodeSite
from federation.protocol.keys import generate_own_keys
from federation.rollups.job import Rollups
from workers.dashboard.access import Access

BASE: Final = "http://localhost:8765"
PAGES: Final = (
    "/",
    "/servers",
    "/servers?sort=held&down=1",
    "/servers?link=down",
    "/server?url=https://s7.example",
    "/deliveries",
    "/deliveries?state=held",
    "/deliveries?code=TIMEOUT",
    "/deliveries?server=https://s7.example",
    "/delivery?id=d700",
    "/live-attempts",
    "/queues",
    "/tasks",
    "/workers",
    "/scheduler",
    "/blacklist",
    "/actions",
)
TIMES: Final = 10
A_MINUTE: Final = 5_000
MOST_ATTEMPTS: Final = 300_000


def main() -> None:
    """Measure at each place asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", nargs="+", default=("sqlite", "postgres"), choices=("sqlite", "postgres"))
    parser.add_argument("--deliveries", type=int, default=1_000_000)
    parser.add_argument("--servers", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    configure_logging("warning")
    unwind_when_terminated()
    results = []
    for place in options.place:
        with fresh_places(place) as values:
            own = {"BETTER_AUTH_URL": "https://node.example", **generate_own_keys().to_env()}
            settings = Settings.from_values({**own, **values})
            upgrade(settings)
            results.append(asyncio.run(measured(place, settings, options)))
    print(json.dumps({"machine": machine(), "deliveries": options.deliveries, "servers": options.servers,
                      "results": results}, indent=2))  # fmt: skip


async def measured(place: str, settings: Settings, options: argparse.Namespace) -> dict[str, object]:
    """Fill one place, and measure there."""
    federation = Federation(settings)
    node = NodeSite(federation, access=Access())
    try:
        await federation.database.transact(
            lambda connection: fill(connection, deliveries=options.deliveries, servers=options.servers)
        )
        began = time.process_time()
        await Rollups(federation.database)()
        say(f"{place}: filled; counted in {time.process_time() - began:.1f} CPU s of this process")
        transport = httpx.ASGITransport(app=node.site.app)
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
            pages = [await timed(client, path) for path in PAGES]
        cost = await cost_of_open_pages(federation, node, options.seconds) if options.seconds else None
        return {"place": place, "pages": pages, "open": cost}
    finally:
        await node.close()
        await federation.close()


def fill(connection: Connection, *, deliveries: int, servers: int) -> None:
    """Make the rows, by one pattern."""
    numbers = "WITH RECURSIVE t(n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM t WHERE n < {})"
    is_postgres = connection.dialect.name == "postgresql"
    if is_postgres:
        made = "(now() at time zone 'utc') - (n % 10000) * interval '1 minute'"
        began = "(now() at time zone 'utc') - (n % 864000) * interval '1 second'"
    else:
        made = "strftime('%Y-%m-%d %H:%M:%S.000000', 'now', '-' || (n % 10000) || ' minutes')"
        began = "strftime('%Y-%m-%d %H:%M:%S.000000', 'now', '-' || (n % 864000) || ' seconds')"
    state = ("CASE WHEN n % 10 = 0 THEN 'held' WHEN n % 10 = 1 THEN 'failed' WHEN n % 20 = 2 THEN 'expired' "
             "ELSE 'ready' END")  # fmt: skip
    server = f"'https://s' || (n % {servers}) || '.example'"
    code = "CASE WHEN n % 3 = 0 THEN 'TIMEOUT' END"
    reason = "CASE WHEN n % 10 = 0 THEN 'server' END"
    outcome = "CASE WHEN n % 7 = 0 THEN 'retryable' ELSE 'delivered' END"
    tables = {
        "delivery_jobs (id, target_url, payload, created_at, server_url, job_name, state, error_code, held_reason)": (
            deliveries,
            f"'d' || n, {server} || '/inbox', '', {made}, {server}, 'post', {state}, {code}, {reason}",
        ),
        "delivery_attempts (delivery_id, job_name, server_url, attempt, series, started_at, duration_ms, outcome)": (
            min(deliveries, MOST_ATTEMPTS),
            f"'d' || n, 'post', {server}, 1, 0, {began}, n % 900, {outcome}",
        ),
    }
    for table, (number, values) in tables.items():
        rows = f"{numbers.format(number)} SELECT {values} FROM t"  # noqa: S608 - of numbers and patterns of ours
        connection.execute(text(f"INSERT INTO {table} {rows}"))
    now = datetime.now(UTC)
    names = [(number, f"https://s{number}.example") for number in range(servers)]
    links = [
        {"server_url": url, "since": now, "state": LinkState.UP if number % 9 else LinkState.DOWN}
        for number, url in names
    ]
    times = {"last_seen": now, "created_at": now, "updated_at": now, "is_healthy": True, "health_check_attempts": 0}
    known = [
        {"id": url, "url": url, "public_key": f"k{number}", "encryption_public_key": f"e{number}", **times}
        for number, url in names
    ]
    connection.execute(insert(ServerLink), links)
    connection.execute(insert(Server), known)
    connection.execute(text("ANALYZE"))


async def timed(client: httpx.AsyncClient, path: str) -> dict[str, object]:
    """Ask for a page again and again."""
    took = []
    for _ in range(TIMES + 1):
        began = time.perf_counter()
        answer = await client.get(path)
        took.append((time.perf_counter() - began) * 1000)
    answer.raise_for_status()
    row = {"page": path, "bytes": len(answer.content), "ms": round(statistics.median(took[1:]), 1),
           "most_ms": round(max(took[1:]), 1)}  # fmt: skip
    say(f"  {path:42} {row['ms']:>8} ms, at most {row['most_ms']:>8} ms, {row['bytes']:>7} bytes")
    return row


async def cost_of_open_pages(federation: Federation, node: NodeSite, seconds: float) -> dict[str, object]:
    """Write attempts, without and with open pages."""
    alone = await written(federation, seconds)
    async with open_pages(node, 10):
        watched = await written(federation, seconds)
    share = round((watched - alone) / seconds * 100, 2)
    say(f"  ten open pages take {share} % of a core at {A_MINUTE} attempts a minute")
    return {"cpu_s_alone": round(alone, 2), "cpu_s_with_ten_pages": round(watched, 2), "percent_of_a_core": share}


async def written(federation: Federation, seconds: float) -> float:
    """Return the CPU seconds of this process while it writes attempts for so long."""
    began, number = time.process_time(), 0
    ends = time.monotonic() + seconds
    tag = f"{began:.6f}"
    while time.monotonic() < ends:
        due = time.monotonic() + 1
        now = datetime.now(UTC)
        rows: list[dict[str, object]] = [
            {
                "delivery_id": f"{tag}-{number + each}",
                "job_name": "post",
                "server_url": f"https://s{(number + each) % 1000}.example",
                "attempt": 1,
                "series": 0,
                "started_at": now - timedelta(milliseconds=each),
                "duration_ms": each,
                "outcome": AttemptOutcome.DELIVERED,
            }
            for each in range(A_MINUTE // 60)
        ]
        number += len(rows)
        await federation.database.transact(partial(write, rows=rows))
        await asyncio.sleep(max(due - time.monotonic(), 0))
    return time.process_time() - began


def write(connection: Connection, *, rows: list[dict[str, object]]) -> None:
    connection.execute(insert(DeliveryAttempt), rows)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
