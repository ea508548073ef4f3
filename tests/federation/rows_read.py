"""How many rows queries read: a plan by an index reads few, whatever the table holds.

PostgreSQL tells how many each step of a plan had and left out; SQLite tells its plan, and how many instructions of its
machine a query took.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Engine, event

MANY: Final = 20_000
"""So many that a plan which reads, or sorts, too many of them costs more than one by an index."""
INSTRUCTIONS_OF_A_ROW: Final = 45
"""What SQLite needs for one that a page reads, at most."""


@contextmanager
def watched(verbs: tuple[str, ...] = ("SELECT",)) -> Iterator[list[tuple[str, Any]]]:
    """The queries of the block, as the drivers get them, and statements that begin with another of the verbs."""
    seen: list[tuple[str, Any]] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: object, *_: object) -> None:
        if statement.startswith(verbs):
            seen.append((statement, parameters))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@contextmanager
def costed() -> Iterator[list[int]]:
    """The rows that each query of the block reads, counted when it is asked: later it may find others."""
    costs: list[int] = []
    is_counting = False

    def count(connection: Connection, _cursor: object, statement: str, parameters: object, *_: object) -> None:
        nonlocal is_counting
        if statement.startswith("SELECT") and not is_counting:
            is_counting = True
            costs.append(cost(connection, queries=[(statement, parameters)]))
            is_counting = False

    event.listen(Engine, "before_cursor_execute", count)
    try:
        yield costs
    finally:
        event.remove(Engine, "before_cursor_execute", count)


def cost(connection: Connection, *, queries: list[tuple[str, Any]], work_mem: str | None = None) -> int:
    """The rows that the queries read. With little `work_mem` lists are too long for it, as of very many rows."""
    if work_mem is not None and connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL work_mem = '{work_mem}'")
    one = _rows_on_postgres if connection.dialect.name == "postgresql" else _rows_on_sqlite
    return sum(one(connection, statement, parameters) for statement, parameters in queries)


def _rows_on_postgres(connection: Connection, statement: str, parameters: Any) -> int:
    [(plans,)] = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters)
    found = json.loads(plans) if isinstance(plans, str) else plans
    return sum(_rows_of_plan(each["Plan"]) for each in found)


def _rows_of_plan(plan: dict[str, Any]) -> int:
    """The rows that scans of tables, or walks along lists, have read, those that they left out included."""
    below = sum(map(_rows_of_plan, plan.get("Plans", [])))
    if "Relation Name" not in plan and plan["Node Type"] != "Materialize":
        return below
    left_out = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
    return below + int((plan["Actual Rows"] + left_out) * plan["Actual Loops"])


def _rows_on_sqlite(connection: Connection, statement: str, parameters: Any) -> int:
    """Rows by the instructions that were needed; a plan that scans a table is refused."""
    plan = [row[-1] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    if any(
        re.fullmatch(r"SCAN (delivery_jobs|delivery_attempts|server_summaries|blacklisted_servers)", step)
        for step in plan
    ):
        return MANY
    driver: Any = connection.connection.driver_connection
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    driver.set_progress_handler(count, 10)
    connection.exec_driver_sql(statement, parameters).all()
    driver.set_progress_handler(None, 0)
    return max(10 * steps // INSTRUCTIONS_OF_A_ROW, 1)
