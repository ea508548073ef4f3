"""The rows of a large node, made in bulk: servers, links, deliveries and the log of attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Table, TextClause, text

from db import FederationTable

AWAY: Final = 5
"""One server in so many is down, and all that is held is held for these."""
SHARED_BY: Final = 100
"""How many deliveries share a text."""
TEXT_BYTES: Final = 2_400
DAYS_OF_ATTEMPTS: Final = 31
"""One day more than attempts are kept: a purge finds what a day brings."""
DAYS_OF_FAILED: Final = 8
"""One day more than failed deliveries are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much a node has. A tenth as many deliveries as are held are ready, and as many have failed."""

    servers: int
    held: int
    attempts: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read `servers:held:attempts`."""
        servers, held, attempts = map(int, text.split(":"))
        return cls(servers=max(servers, AWAY), held=max(held, 10), attempts=max(attempts, 10))

    def __str__(self) -> str:
        return f"{self.servers}:{self.held}:{self.attempts}"

    @property
    def ready(self) -> int:
        return self.held // 10


def fill(connection: Connection, size: Size) -> None:
    """Make all rows. Indexes are built at the end, as filling them row by row takes ten times as long."""
    rows = _Rows(connection.dialect.name == "postgresql")
    for table, count, columns in rows.tables(size):
        model = FederationTable.metadata.tables[table]
        for index in model.indexes:
            index.drop(connection)
        connection.execute(inserted(table, rows.numbers(count), columns))
        build_indexes(connection, model)
    connection.execute(text("ANALYZE"))


def inserted(table: str, numbers: str, columns: Mapping[str, str], *, also: str = "") -> TextClause:
    """Return the statement that inserts a row for each `n` of `numbers`."""
    made = f"{numbers} SELECT {', '.join(columns.values())} FROM t"  # noqa: S608 - of names and numbers of ours
    return text(f"INSERT INTO {table} ({', '.join(columns)}) {made} {also}")


def build_indexes(connection: Connection, table: Table) -> None:
    """Make the indexes of a table that has none."""
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        index.create(connection)


class _Rows:
    """Writes the rows as expressions of `n`, which counts from 0, in the database's own SQL."""

    def __init__(self, is_postgres: bool) -> None:
        self._is_postgres = is_postgres

    def numbers(self, count: int) -> str:
        if self._is_postgres:
            return f"WITH t AS (SELECT generate_series(0::bigint, {count} - 1) AS n)"
        counted = f"SELECT 0 UNION ALL SELECT n + 1 FROM t WHERE n < {count} - 1"  # noqa: S608 - a number of ours
        return f"WITH RECURSIVE t(n) AS ({counted})"

    def tables(self, size: Size) -> list[tuple[str, int, dict[str, str]]]:
        """Return each table with how many rows it gets, and its columns with their expressions."""
        down = f"n % {AWAY} = 0"
        registry = {
            "id": self._id(),
            "url": url("n"),
            "public_key": self._key("a"),
            "encryption_public_key": self._key("b"),
            "last_seen": self._ago("n % 86400"),
            "created_at": self._ago("86400 * 40"),
            "updated_at": self._ago("60"),
            "is_healthy": self._is(f"NOT ({down})"),
            "health_check_attempts": f"CASE WHEN {down} THEN 8 ELSE 0 END",
            "unhealthy_reason": f"CASE WHEN {down} THEN 'CONN_REFUSED' END",
        }
        links = {
            "server_url": url("n"),
            "state": f"CASE WHEN {down} THEN 'down' ELSE 'up' END",
            "since": self._ago("86400 * 3"),
            "acknowledged": self._is(f"NOT ({down})"),
            "relayed": self._is("1 = 0"),
            "operator_hold": self._is("1 = 0"),
            "needs_canary": self._is("1 = 0"),
            "evidence": "0",
            "rejections": "0",
            "rests": "0",
            "probes": f"CASE WHEN {down} THEN 9 ELSE 0 END",
            "release_start": "1",
            "release_rate": "1",
            "last_success_at": f"CASE WHEN NOT ({down}) THEN {self._ago('86400 * 3')} END",
            "next_probe_at": f"CASE WHEN {down} THEN {self._ago('-(60 + n % 10800)')} END",
        }
        texts = {
            "id": self._text_id("n"),
            "payload": self._text(),
            "refs": str(SHARED_BY),
            "created_at": self._ago("86400"),
        }
        away = f"{AWAY} * (n % {max(size.servers // AWAY, 1)})"
        well = f"{AWAY} * (n % {max(size.servers // AWAY, 1)}) + 1"
        return [
            ("server_registry", size.servers, registry),
            ("server_links", size.servers, links),
            ("delivery_payloads", -(-(size.held + 2 * size.ready) // SHARED_BY), texts),
            ("delivery_jobs", size.held + 2 * size.ready, self._deliveries(size, away, well)),
            ("delivery_attempts", size.attempts, self.attempts(size.servers, size.attempts)),
        ]

    def _deliveries(self, size: Size, away: str, well: str) -> dict[str, str]:
        is_held, is_ready = f"n < {size.held}", f"n < {size.held + size.ready}"
        server = url(f"(CASE WHEN {is_held} THEN {away} ELSE {well} END)")
        spread = f"(n % {size.ready or 1}) * 1.0 / {size.ready or 1}"
        made = f"CASE WHEN {is_held} THEN 60 + n * 518400.0 / {size.held} WHEN {is_ready} THEN 60 + {spread} * 600"
        settled = f"86400 * {DAYS_OF_FAILED} * {spread}"

        def by_state(held: str, ready: str, failed: str) -> str:
            return f"CASE WHEN {is_held} THEN {held} WHEN {is_ready} THEN {ready} ELSE {failed} END"

        return {
            "id": self._timed_id(f"{made} ELSE 120 + {settled} END"),
            "target_url": f"{server} || '/api/auth/social/posts'",
            "payload": "''",
            "payload_id": self._text_id(f"n / {SHARED_BY}"),
            "created_at": self._ago(f"{made} ELSE 120 + {settled} END"),
            "job_name": "'deliver-post'",
            "server_url": server,
            "queued_at": by_state("NULL", self._ago("3600"), "NULL"),
            "attempts": by_state("5", "0", "5"),
            "last_attempted_at": by_state(self._ago("86400"), "NULL", self._ago(settled)),
            "state": by_state("'held'", "'ready'", "'failed'"),
            "held_reason": by_state("'server'", "NULL", "NULL"),
            "held_at": by_state(self._ago("86400"), "NULL", "NULL"),
            "settled_at": by_state("NULL", "NULL", self._ago(settled)),
            "outcome": by_state("NULL", "NULL", "'permanent'"),
            "error_code": by_state("'CONN_REFUSED'", "NULL", "'HTTP_403'"),
            "last_error": by_state("'nothing listens on its port'", "NULL", "'it answered with 403'"),
        }

    def attempts(self, servers: int, count: int) -> dict[str, str]:
        """Return the columns of the log, in which time goes on from row to row."""
        failed = "n % 7 = 0"
        return {
            "delivery_id": self._timed_id(f"86400 * {DAYS_OF_ATTEMPTS} * (1 - n * 1.0 / {count})"),
            "job_name": "'deliver-post'",
            "method": "'FEDERATE_POST'",
            "server_url": url(f"n % {servers}"),
            "attempt": "1",
            "series": "0",
            "started_at": self._ago(f"86400 * {DAYS_OF_ATTEMPTS} * (1 - n * 1.0 / {count})"),
            "duration_ms": "n % 900",
            "outcome": f"CASE WHEN {failed} THEN 'retryable' ELSE 'delivered' END",
            "error_code": f"CASE WHEN {failed} THEN 'TIMEOUT' END",
            "http_status": f"CASE WHEN {failed} THEN NULL ELSE 200 END",
            "request_bytes": "1500",
            "response_bytes": "300",
        }

    def _id(self) -> str:
        if self._is_postgres:
            return "gen_random_uuid()::text"
        parts = " || '-' || ".join(f"hex(randomblob({size}))" for size in (4, 2, 2, 2, 6))
        return f"lower({parts})"

    def _timed_id(self, seconds: str) -> str:
        """Return an id as it was made so many seconds ago."""
        if self._is_postgres:
            return f"uuidv7(-({seconds}) * interval '1 second')::text"
        made = f"printf('%012x', CAST((strftime('%s', 'now') - ({seconds})) * 1000 AS integer))"
        three, six = "substr(lower(hex(randomblob(2))), 2)", "lower(hex(randomblob(6)))"
        return f"substr({made}, 1, 8) || '-' || substr({made}, 9) || '-7' || {three} || '-8' || {three} || '-' || {six}"

    def _text(self) -> str:
        """Return a text that can hardly be compressed."""
        if self._is_postgres:
            parts = f"generate_series(1, {TEXT_BYTES // 32})"
            return f"(SELECT string_agg(md5(random()::text), '') FROM {parts})"  # noqa: S608 - a number of ours
        return f"hex(randomblob({TEXT_BYTES // 2}))"

    def _text_id(self, number: str) -> str:
        """Return an id of a text, which is as long as others are and follows from a number."""
        return f"'00000000-0000-4000-8000-' || {self._padded(number, 12)}"

    def _key(self, first: str) -> str:
        return f"'{first}' || {self._padded('n', 42)} || '='"

    def _padded(self, number: str, digits: int) -> str:
        number = f"CAST({number} AS bigint)"
        return f"lpad({number}::text, {digits}, '0')" if self._is_postgres else f"printf('%0{digits}d', {number})"

    def _ago(self, seconds: str) -> str:
        """Return the moment so many seconds ago."""
        if self._is_postgres:
            return f"(now() AT TIME ZONE 'utc') - ({seconds}) * interval '1 second'"
        return f"strftime('%Y-%m-%d %H:%M:%f000', 'now', (-({seconds})) || ' seconds')"

    def _is(self, condition: str) -> str:
        return f"({condition})" if self._is_postgres else f"CASE WHEN {condition} THEN 1 ELSE 0 END"


def attempt_columns(*, is_postgres: bool, servers: int, count: int) -> tuple[str, dict[str, str]]:
    """Return SQL that counts `n`, and the columns of as many attempts."""
    rows = _Rows(is_postgres)
    return rows.numbers(count), rows.attempts(servers, count)


def url(number: str) -> str:
    """Return the URL of the server of this number, as an expression."""
    return f"'https://social-' || CAST({number} AS bigint) || '.example'"
