"""What is written down of a world while it goes on: every request, and every change of a delivery's row and of a link.

Theory of operation. Triggers in the simulated database note each change together with the time of the loop, which
SQLite asks of the connection. So nothing of the code that is judged has a part in it, and what came and went between
two looks is known as well.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Self


class MishapKind(StrEnum):
    """What of ours failed."""

    PROCESS = "a process died"
    FROZEN = "a process stood still"
    DATABASE = "the database was away"
    QUEUE = "the queue was away"
    LOSS = "the queue lost its data"
    CLOCK = "a clock was set"


@dataclass(frozen=True, slots=True)
class Mishap:
    """Something of ours failed from `start` to `end`."""

    kind: MishapKind
    start: float
    end: float


@dataclass(slots=True, eq=False)
class Request:
    """One request of the node; `job` is that of the delivery which it belongs to. `status` is None without an answer.

    `told_at` is when it was sent by what its process takes for the time, `rest` what the answer asked for, `signature`
    how an activity was signed.
    """

    at: float
    told_at: datetime
    process: int
    server: str
    path: str
    job: str | None
    status: int | None = None
    answered_at: float | None = None
    rest: str | None = None
    signature: str | None = None

    @property
    def is_taken(self) -> bool:
        """Whether the server has what was sent."""
        return self.status is not None and (self.status < 300 or self.status == 409)


@dataclass(frozen=True, slots=True)
class RowChange:
    """A delivery's row as one statement left it; `state` is `gone` where it removed the row.

    Where an attempt begins, `link` is the state of its server's link (None: up), and `in_turn` tells that no older one
    of its ordering key is owed.
    """

    at: float
    id: str
    server: str
    state: str
    reason: str | None
    until: str | None
    series: int
    attempts: int
    sending: int | None
    released_at: str | None
    canary_at: str | None
    code: str | None
    suspect: int | None
    created_at: str
    in_turn: bool
    link: str | None
    was: str | None
    attempts_before: int
    canary_before: bool
    """Whether it was on its way as a canary, until now."""

    @property
    def begins(self) -> bool:
        """Whether an attempt begins."""
        return self.attempts > self.attempts_before

    @property
    def is_release(self) -> bool:
        """Whether it was held, and is sent as one of those that waited for the server."""
        is_canary = self.canary_at is not None and self.canary_at == self.released_at
        return (self.was, self.state) == ("held", "ready") and self.released_at is not None and not is_canary


@dataclass(frozen=True, slots=True)
class LinkChange:
    """A link as one statement left it."""

    at: float
    server: str
    state: str
    reason: str | None
    operator_hold: bool
    rest_until: str | None
    acknowledged_at: str | None
    was: str | None
    wire: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A process took a recurring job; `was_free` tells that nobody had it."""

    at: float
    job: str
    holder: str
    started_at: str
    leased_until_before: str | None
    started_at_before: str | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One row of the log of attempts."""

    delivery: str
    series: int
    number: int
    server: str
    started_at: str
    duration_ms: int
    outcome: str
    code: str | None
    status: int | None
    relayed_by: str | None
    note: str | None


@dataclass(frozen=True, slots=True)
class Past:
    """All that was written down of a world: by delivery and by server, in order."""

    rows: Mapping[str, Sequence[RowChange]]
    by_server: Mapping[str, Sequence[RowChange]]
    links: Mapping[str, Sequence[LinkChange]]
    turns: Mapping[str, Sequence[Turn]]
    attempts: Mapping[str, Sequence[Attempt]]
    requests: Mapping[str, Sequence[Request]]

    @classmethod
    def of(cls, keeper: sqlite3.Connection, requests: Sequence[Request], wires: Mapping[str, str]) -> Self:
        """What the triggers wrote into this database. Of each server the link by its wire counts: no other is used."""
        links = _read(keeper, "SELECT * FROM simulated_links ORDER BY rowid", LinkChange)
        changes = _with_canaries(_read(keeper, "SELECT * FROM simulated_rows ORDER BY rowid", RowChange))
        return cls(
            rows=_grouped(changes, lambda each: each.id),
            by_server=_grouped(changes, lambda each: each.server),
            links=_grouped([each for each in links if each.wire == wires[each.server]], _server),
            turns=_grouped(_read(keeper, "SELECT * FROM simulated_turns ORDER BY rowid", Turn), lambda each: each.job),
            attempts=_grouped(_read(keeper, _ATTEMPTS, Attempt), lambda each: each.delivery),
            requests=_grouped(requests, _server),
        )


def _with_canaries(changes: Sequence[RowChange]) -> list[RowChange]:
    """One change for two statements: that which releases a row, and that which marks it as its server's canary."""
    found: list[RowChange] = []
    last: dict[str, int] = {}
    for change in changes:
        place = last.get(change.id)
        before = None if place is None else found[place]
        is_marked = change.canary_at is not None and change.canary_at == change.released_at and not change.canary_before
        if place is not None and before is not None and before.is_release and is_marked:
            found[place] = replace(change, was=before.was)
        else:
            last[change.id] = len(found)
            found.append(change)
    return found


def moment_of(stored: str) -> datetime:
    """A time as SQLite has it."""
    return datetime.fromisoformat(stored).replace(tzinfo=UTC)


def watch(template: sqlite3.Connection) -> None:
    """Have this database write down what happens to it."""
    for table, kind in (("simulated_rows", RowChange), ("simulated_links", LinkChange), ("simulated_turns", Turn)):
        template.execute(f"CREATE TABLE {table} ({', '.join(field.name for field in fields(kind))})")
    template.executescript(_TRIGGERS)


def tell_time(connection: sqlite3.Connection, now: Callable[[], float]) -> None:
    """Let the triggers know the time of the loop."""
    connection.create_function("simulated_now", 0, now)


def _server(each: Any) -> str:
    return str(each.server)


def _read(keeper: sqlite3.Connection, query: str, kind: Callable[..., Any]) -> list[Any]:
    return [kind(*row) for row in keeper.execute(query)]


def _grouped(values: Sequence[Any], key: Callable[[Any], str]) -> Mapping[str, Sequence[Any]]:
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for value in values:
        found[key(value)].append(value)
    return found


_ATTEMPTS: Final = """
SELECT delivery_id, series, attempt, server_url, started_at, duration_ms, outcome, error_code, http_status, relayed_by,
    note
FROM delivery_attempts ORDER BY series, attempt
"""


def _row_values(row: str, state: str, *, was: str) -> str:
    return f"""
    simulated_now(), {row}.id, {row}.server_url, {state}, {row}.held_reason, {row}.next_attempt_at, {row}.series,
    {row}.attempts, {row}.sending, {row}.released_at, {row}.canary_at, {row}.error_code, {row}.suspect,
    {row}.created_at, {{in_turn}},
    (SELECT iif(operator_hold, 'operator', state) FROM server_links
        WHERE server_url = {row}.server_url AND wire = {row}.wire),
    {was}
    """


_IN_TURN: Final = """NOT EXISTS (
    SELECT 1 FROM delivery_jobs AS older WHERE older.ordering_key = NEW.ordering_key
    AND older.server_url = NEW.server_url AND older.ordering_position < NEW.ordering_position
    AND older.state IN ('ready', 'held')
)"""
_WAS: Final = "OLD.state, OLD.attempts, OLD.canary_at IS NOT NULL AND OLD.canary_at IS OLD.released_at"
_TRIGGERS: Final = f"""
CREATE TRIGGER simulated_insert AFTER INSERT ON delivery_jobs BEGIN
    INSERT INTO simulated_rows SELECT {_row_values("NEW", "NEW.state", was="NULL, 0, 0").format(in_turn="1")};
END;
CREATE TRIGGER simulated_update AFTER UPDATE OF
    state, held_reason, next_attempt_at, series, attempts, sending, released_at, canary_at ON delivery_jobs
BEGIN
    INSERT INTO simulated_rows
    SELECT {_row_values("NEW", "NEW.state", was=_WAS).format(in_turn=f"NEW.attempts = OLD.attempts OR {_IN_TURN}")};
END;
CREATE TRIGGER simulated_delete AFTER DELETE ON delivery_jobs BEGIN
    INSERT INTO simulated_rows SELECT {_row_values("OLD", "'gone'", was=_WAS).format(in_turn="1")};
END;
CREATE TRIGGER simulated_link AFTER INSERT ON server_links BEGIN
    INSERT INTO simulated_links VALUES (simulated_now(), NEW.server_url, NEW.state, NEW.reason, NEW.operator_hold,
        NEW.rest_until, NEW.last_success_at, NULL, NEW.wire);
END;
CREATE TRIGGER simulated_link_change AFTER UPDATE ON server_links BEGIN
    INSERT INTO simulated_links VALUES (simulated_now(), NEW.server_url, NEW.state, NEW.reason, NEW.operator_hold,
        NEW.rest_until, NEW.last_success_at, OLD.state, NEW.wire);
END;
CREATE TRIGGER simulated_turn AFTER UPDATE OF token ON scheduler_jobs BEGIN
    INSERT INTO simulated_turns VALUES (simulated_now(), NEW.name, NEW.holder, NEW.started_at, OLD.leased_until,
        OLD.started_at);
END;
"""
