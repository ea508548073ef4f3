"""`federation deliveries tail`."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from federation.base.terminal import escaped_json
from federation.cli.options import AsJson
from federation.cli.output import jsonable, shown
from federation.cli.session import with_node

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from db import Database
    from federation.admin.attempts import LoggedAttempt

MOST_BEFORE: Final = 500


class Outcome(StrEnum):
    """How an attempt ended."""

    DELIVERED = "delivered"
    RETRYABLE = "retryable"
    PERMANENT = "permanent"
    PARKED = "parked"


COLOURS: Final = {
    Outcome.DELIVERED: typer.colors.GREEN,
    Outcome.RETRYABLE: typer.colors.YELLOW,
    Outcome.PERMANENT: typer.colors.RED,
    Outcome.PARKED: typer.colors.BLUE,
}


def tail(
    server: Annotated[str | None, typer.Option("--server", metavar="URL", help="Only those at this server.")] = None,
    outcome: Annotated[list[Outcome] | None, typer.Option("--outcome", help="Only those; may be repeated.")] = None,
    code: Annotated[str | None, typer.Option("--code", help="Only those that failed with this.")] = None,
    last: Annotated[
        int, typer.Option("--last", "-n", min=0, max=MOST_BEFORE, help="Begin with so many earlier ones.")
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Show attempts as they end, in every process, until Ctrl-C.

    With `--json`, each is one document in a line of its own.
    """
    from federation.admin.servers.servers import server_url

    name = server_url(server) if server else None
    outcomes = {each.value for each in outcome or Outcome}

    def is_meant(attempt: LoggedAttempt) -> bool:
        return (
            name in (None, attempt.server_url)
            and attempt.outcome in outcomes
            and (code is None or attempt.code == code)
        )

    show = _show_json if as_json else _show_line
    try:
        with_node(lambda federation: _follow(federation.database, is_meant, show, last))
    except KeyboardInterrupt:  # the way to end it
        pass
    except BrokenPipeError:  # whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _follow(
    database: Database,
    is_meant: Callable[[LoggedAttempt], bool],
    show: Callable[[LoggedAttempt], None],
    last: int,
) -> None:
    from federation.admin.attempt_feed import AttemptFeed
    from federation.admin.attempts import newest_attempts

    async with AttemptFeed(database).watch() as watcher:
        before = await newest_attempts(database, last)  # after the feed began, so that none falls between
        shown_before = {each.id for each in before}
        _show_all(before, is_meant, show)
        problem: str | None = None
        while True:
            news = await watcher.news()
            _show_all([each for each in news.attempts if each.id not in shown_before], is_meant, show)
            if news.missed:
                typer.echo(f"federation: {news.missed} attempts came too fast to be shown", err=True)
            if news.problem != problem:
                problem = news.problem
                told = f"the database does not answer: {problem}; still trying" if problem else "the database answers"
                typer.echo(f"federation: {told}", err=True)


def _show_all(
    attempts: Sequence[LoggedAttempt],
    is_meant: Callable[[LoggedAttempt], bool],
    show: Callable[[LoggedAttempt], None],
) -> None:
    for attempt in filter(is_meant, attempts):
        show(attempt)
    sys.stdout.flush()


def _show_json(attempt: LoggedAttempt) -> None:
    typer.echo(escaped_json(json.dumps(jsonable(attempt), ensure_ascii=False)), file=sys.stdout)


def _show_line(attempt: LoggedAttempt) -> None:
    """Print what people look for first at the front; colours only where a terminal shows them."""
    from db import AttemptNote

    is_last = attempt.note is AttemptNote.GIVEN_UP
    colour = COLOURS[Outcome.PERMANENT if is_last else Outcome(attempt.outcome.value)]
    outcome = typer.style(f"{attempt.ended:<9}", fg=colour)
    status = "" if attempt.http_status is None else str(attempt.http_status)
    why = [each for each in (attempt.code, attempt.remote_code) if each is not None]
    relayed = [f"relayed by {attempt.relayed_by}"] if attempt.relayed_by else []
    number = f"#{attempt.attempt}" if not attempt.series else f"#{attempt.series}.{attempt.attempt}"
    parts = [attempt.server_url, attempt.job_name, number, f"{attempt.duration_ms} ms", status, *why, *relayed]
    told = "  ".join(shown(part) for part in [*parts, attempt.delivery_id] if part)
    typer.echo(f"{shown(attempt.started_at)}  {outcome}  {told}", file=sys.stdout)
