"""A made-up history in the form of exports: for benchmarks, and to look at the report without a database.

Every value is a function of the seed and of a row's number, so the same arguments make the same rows on any number of
cores. Attempts are numbered in the order of time. Traffic follows a daily and a weekly cycle. It is spread over the
servers by Zipf's law, or one of them gets a share of all. Some servers are flaky, some are down for hours or days, a
few for good, and health events say so. About one attempt in 20 000 is malformed, and the registry has a few suspicious
keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from federation.analytics import frames
from federation.analytics.data.directories import replace_directory, staging_in
from federation.analytics.data.export import ATTEMPTS, EARLIER_SERVERS
from federation.analytics.data.results import local
from federation.analytics.errors import DirectoryUnusable
from scripts.made_up.attempts import make_attempts
from scripts.made_up.servers import make_blacklist, make_health_events, make_registry, make_servers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import SparkSession

    from scripts.made_up.servers import History


def generate(
    spark: SparkSession, history: History, directory: Path, *, told: Callable[[str], None] = lambda _: None
) -> None:
    """Write the exports of `history` to `directory`, as an export of a database would have left them.

    Raises:
        DirectoryUnusable: there are exports already, which might be real.
    """
    if any((directory / name).exists() for name in (ATTEMPTS, "servers")):
        raise DirectoryUnusable(f"{directory} holds exports already; choose another directory, or remove it")
    servers = make_servers(spark, history)
    tables = {
        "servers": make_registry(servers, history).select(*frames.SERVERS.names),
        EARLIER_SERVERS: make_registry(servers, history, earlier=True).select(*frames.SERVERS.names),
        "blacklist": make_blacklist(servers, history).select(*frames.BLACKLIST.names),
        "health_events": make_health_events(servers, history).select(*frames.HEALTH_EVENTS.names),
    }
    with staging_in(directory) as staging:
        for name, frame in tables.items():
            told(f"making {name}")
            frame.coalesce(1).write.parquet(local(staging / name))
        told(f"making {history.attempts:,} attempts")
        make_attempts(spark, history, servers).write.partitionBy("day").parquet(local(staging / ATTEMPTS))
        for name in (*tables, ATTEMPTS):
            replace_directory(staging / name, directory / name)
