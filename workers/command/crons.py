"""`python -m workers crons`: what recurs in a queue is listed, paused, resumed, run now, removed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from workers.command.arguments import checked, identifier
from workers.command.commands import NOTHING, add_command
from workers.command.tables import as_json, one_line, table
from workers.crons import Crons, CronStatus
from workers.queue import Queue

if TYPE_CHECKING:
    from workers.command.arguments import Commands

Verb = Callable[[Crons, str], Awaitable[bool]]


def add_to(commands: Commands) -> None:
    """Add the commands to the parser."""
    told = "list what recurs in a queue; pause, resume, remove it, or run it now"
    crons = commands.add_parser("crons", help=told, description=f"{told[0].upper()}{told[1:]}.")
    verbs = crons.add_subparsers(required=True, metavar="VERB")
    add_command(verbs, "list", _list, "list what recurs, with its next time")
    for name, verb, shown in (
        ("pause", Crons.pause, "enqueue nothing for it until it is resumed"),
        ("resume", Crons.resume, "go on with its next time from now"),
        ("remove", Crons.remove, "let it not recur any more; only a higher version brings it back"),
    ):
        add_command(verbs, name, partial(_change, verb, name), shown).add_argument(
            "name", type=checked(identifier), metavar="NAME"
        )
    add_command(verbs, "run", _run_now, "enqueue one job of it now").add_argument(
        "name", type=checked(identifier), metavar="NAME"
    )


async def _list(queue: Queue, options: argparse.Namespace) -> int:
    found = await queue.crons.list()
    if options.json:
        print(as_json([_told(one) for one in found]))
    elif found:
        print(table(("name", "job", "recurs", "due", "last"), [_row(one) for one in found]))
    else:
        print("nothing recurs here", file=sys.stderr)
    return 0 if found else NOTHING


async def _change(verb: Verb, name: str, queue: Queue, options: argparse.Namespace) -> int:
    if not await verb(queue.crons, options.name):
        return _missing(options.name)
    done = f"{name}d"
    print(as_json({"name": options.name, "done": done}) if options.json else f"{done}: {one_line(options.name)}")
    return 0


async def _run_now(queue: Queue, options: argparse.Namespace) -> int:
    job_id = await queue.crons.run_now(options.name)
    if job_id is None:
        return _missing(options.name)
    print(as_json({"name": options.name, "id": job_id}) if options.json else f"queued: {one_line(job_id)}")
    return 0


def _missing(name: str) -> int:
    print(f"nothing called {one_line(name)} recurs here", file=sys.stderr)
    return NOTHING


def _told(one: CronStatus) -> dict[str, object]:
    return {
        "name": one.cron.name,
        "job": one.cron.job,
        "pattern": one.cron.pattern,
        "every_seconds": None if one.cron.every is None else one.cron.every.total_seconds(),
        "timezone": one.cron.timezone,
        "version": one.cron.version,
        "missed": one.cron.missed.value,
        "paused": one.paused,
        "due": _shown(one.due),
        "last": _shown(one.last),
    }


def _row(one: CronStatus) -> tuple[str, ...]:
    recurs = f"every {one.cron.every}" if one.cron.every else f"{one.cron.pattern} {one.cron.timezone}"
    due = "paused" if one.paused else _shown(one.due) or "never"
    return one.cron.name, one.cron.job, recurs, due, _shown(one.last) or ""


def _shown(moment: datetime | None) -> str | None:
    return None if moment is None else moment.astimezone(UTC).isoformat(timespec="seconds")
