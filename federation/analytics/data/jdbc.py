"""The same tables through JDBC, if the operator has the database's driver: `--jdbc path/to/driver.jar`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from py4j.protocol import Py4JJavaError
from pyspark.sql import functions as F  # noqa: N812 - the name every Spark program gives it

from db.url import parse_url
from federation.analytics.data.arrow_columns import UNREADABLE
from federation.analytics.data.tables import DEFAULT_PARTITIONS, TABLES
from federation.analytics.errors import DatabaseUnavailable, DriverNotFound

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructField
    from sqlalchemy import URL

DRIVERS: Final = {"postgresql": "org.postgresql.Driver", "sqlite": "org.sqlite.JDBC"}

_FETCHED_ROWS: Final = "10000"
_EARLIEST: Final = "0001-01-01"
_LATEST: Final = "9999-12-31"


@dataclass(frozen=True, kw_only=True)
class JdbcTables:
    """Reads tables through `spark.read.format("jdbc")`."""

    spark: SparkSession
    url: str
    partitions: int | None = None

    def read(self, table: str, *, since: datetime | None = None, until: datetime | None = None) -> DataFrame:
        """Read the table as `read_table` does: with the table's schema in `frames`.

        Raises:
            DriverNotFound: Spark has no driver for the database.
            DatabaseUnavailable: the driver cannot reach it.
        """
        options = jdbc_options(self.url, table, since=since, until=until)
        parts = time_parts(self.url, table, since=since, until=until, partitions=self.partitions)
        driver, url, query = options["driver"], options.pop("url"), options.pop("dbtable")
        read = self.spark.read
        try:
            if parts is None:
                loaded = read.jdbc(url, query, properties=options)
            else:
                loaded = read.jdbc(url, query, predicates=parts, properties=options)
        except Py4JJavaError as error:
            raise _translated(error, driver) from None
        columns = [F.col(field.name).cast(field.dataType) for field in TABLES[table].schema.fields]
        return loaded.select(*columns)


def time_parts(
    url: str,
    table: str,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    partitions: int | None = None,
) -> list[str] | None:
    """Return the conditions of the parts in which a bounded table with a time is read; None for all in one.

    Spark would cut ranges of numbers and of times with a zone by itself, but our times have none.
    """
    time = TABLES[table].time
    if parse_url(url).get_backend_name() != "postgresql" or time is None or since is None or until is None:
        return None
    step = max(timedelta(minutes=1), (until - since) / (partitions or DEFAULT_PARTITIONS))
    starts = itertools.takewhile(lambda start: start < until, (since + step * number for number in itertools.count()))
    cuts = [*map(_text, starts), _text(until)]
    return [f"{time} >= '{low}' AND {time} < '{high}'" for low, high in itertools.pairwise(cuts)]


def jdbc_options(
    url: str, table: str, *, since: datetime | None = None, until: datetime | None = None
) -> dict[str, str]:
    """Return the options of Spark's JDBC source.

    Times come as text or without a zone, and are cast in the session's UTC: the driver would take them for local ones.

    Raises:
        DatabaseUnavailable: it is reached through a Unix socket.
    """
    parsed = parse_url(url)
    backend = parsed.get_backend_name()
    options = {
        "url": _jdbc_url(parsed),
        "driver": DRIVERS[backend],
        "dbtable": _query(backend, table, since, until),
        "fetchsize": _FETCHED_ROWS,
        "preferTimestampNTZ": "true",
    }
    if parsed.username is not None:
        options["user"] = parsed.username
    if parsed.password is not None:
        options["password"] = str(parsed.password)
    return options


def _jdbc_url(url: URL) -> str:
    if url.get_backend_name() == "sqlite":
        return f"jdbc:sqlite:{url.database}"
    given = dict(url.query)
    host = str(url.host or given.pop("host", "localhost"))
    if host.startswith("/"):
        raise DatabaseUnavailable(
            "the database is reached through a Unix socket, which Java cannot: name its host and port, or leave --jdbc"
            " away"
        )
    port = f":{url.port}" if url.port else ""
    query = f"?{urlencode(given, doseq=True)}" if given else ""
    return f"jdbc:postgresql://{host}{port}/{url.database or ''}{query}"


def _query(backend: str, table: str, since: datetime | None, until: datetime | None) -> str:
    described = TABLES[table]
    bounded = described.time if since is not None and until is not None else None
    columns = [_selected(backend, field, is_bounded=field.name == bounded) for field in described.schema.fields]
    bounds = [(">=", since), ("<", until)]
    conditions = [f"{described.time} {sign} '{_text(moment)}'" for sign, moment in bounds if moment is not None]
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"(SELECT {', '.join(columns)} FROM {table}{where}) AS read_table"  # noqa: S608 - names and times of ours


def _selected(backend: str, field: StructField, *, is_bounded: bool) -> str:
    """Return the column as Spark can hold it: it fails at an infinite time, which becomes null."""
    name = field.name
    if name == UNREADABLE:
        return f"CAST(NULL AS TEXT) AS {name}"
    if field.dataType.typeName() != "timestamp" or (is_bounded and backend == "postgresql"):
        return name
    if backend == "sqlite":
        return f"CAST({name} AS TEXT) AS {name}"
    return f"CASE WHEN {name} BETWEEN '{_EARLIEST}' AND '{_LATEST}' THEN {name} END AS {name}"


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).replace(tzinfo=None, microsecond=0).isoformat(sep=" ")


def _translated(error: Py4JJavaError, driver: str) -> DriverNotFound | DatabaseUnavailable:
    """Describe the error in one line. The driver's own message is left out, as it may quote anything."""
    kind = error.java_exception.getClass().getName()
    if kind.endswith("ClassNotFoundException"):
        return DriverNotFound(
            f"Spark has no JDBC driver {driver}; name its jar with --jdbc /path/to/driver.jar (spark-submit: --jars),"
            " or leave --jdbc away"
        )
    return DatabaseUnavailable(
        f"the database cannot be read through JDBC ({kind}); is the URL right, and the server up?"
    )
