"""`python -m workers limits`: the limits of a queue are listed, with how many jobs each keeps back, and removed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from workers.command.arguments import checked, identifier
from workers.command.commands import NOTHING, add_command
from workers.command.tables import as_json, one_line, table
from workers.limits import Limit
from workers.management import Throttled
from workers.queue import Queue

if TYPE_CHECKING:
    from workers.command.arguments import Commands

MOST: Final = 10_000
"""At how many queued jobs a command looks."""


@dataclass(frozen=True, slots=True)
class LimitsLook:
    """The limits of a queue, by name, and how many jobs they keep back."""

    limits: dict[str, Limit]
    throttled: Throttled

    def as_rows(self) -> list[dict[str, object]]:
        """Return them as a JSON document has them."""
        return [
            {
                "name": name,
                "rate": limit.rate,
                "burst": limit.burst,
                "concurrency": limit.concurrency,
                "version": limit.version,
                "held_back": self.throttled.by_limit.get(name, 0),
                "looked_at": self.throttled.looked_at,
            }
            for name, limit in sorted(self.limits.items())
        ]


async def look_at_limits(queue: Queue, most: int = MOST) -> LimitsLook:
    """Look at the limits, and at up to about `most` queued jobs."""
    return LimitsLook(await queue.manage.limits(), await queue.manage.throttled(most=most))


def limits_table(look: LimitsLook) -> str:
    """Return the limits in columns; the last head says if not all queued jobs were looked at."""
    heads = ("limit", "rate", "burst", "at once", "keeps back" + _of(look.throttled))
    rows = look.as_rows()
    return table(
        heads, [[_cell(row[key]) for key in ("name", "rate", "burst", "concurrency", "held_back")] for row in rows]
    )


def add_to(commands: Commands) -> None:
    """Add the commands to the parser."""
    told = "list the limits of a queue, or remove one"
    limits = commands.add_parser("limits", help=told, description=f"{told[0].upper()}{told[1:]}.")
    verbs = limits.add_subparsers(required=True, metavar="VERB")
    add_command(verbs, "list", _list, "list the limits, with how many jobs each keeps back")
    removed = (
        "forget a limit, so that it keeps no job back any more; a process that declares it stores it when it starts"
    )
    add_command(verbs, "remove", _remove, removed).add_argument("name", type=checked(identifier), metavar="NAME")


async def _list(declaring: Queue, options: argparse.Namespace) -> int:
    async with _undeclared(declaring) as queue:
        look = await look_at_limits(queue)
    if options.json:
        print(as_json(look.as_rows()))
    elif look.limits:
        print(limits_table(look))
    else:
        print("there are no limits here", file=sys.stderr)
    return 0 if look.limits else NOTHING


async def _remove(declaring: Queue, options: argparse.Namespace) -> int:
    async with _undeclared(declaring) as queue:
        removed = await queue.manage.remove_limit(options.name)
    if not removed:
        print(f"there is no limit called {one_line(options.name)}", file=sys.stderr)
        return NOTHING
    told = {"name": options.name, "done": "removed"}
    print(as_json(told) if options.json else f"removed: {one_line(options.name)}")
    return 0


def _undeclared(queue: Queue) -> Queue:
    """Return the queue without the limits that its code declares, which it would store at its first use."""
    return Queue(queue.storage)


def _of(throttled: Throttled) -> str:
    return "" if throttled.is_all else f" (of {throttled.looked_at} queued jobs)"


def _cell(value: object) -> str:
    return "" if value is None else str(value)
