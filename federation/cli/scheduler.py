"""`federation scheduler`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from federation.cli.lists import print_list
from federation.cli.options import AsJson, Columns, Wide, group
from federation.cli.orders import order
from federation.cli.output import print_json, print_lines
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.session import with_node

if TYPE_CHECKING:
    from federation.runtime.composition import Federation
    from federation.scheduler.runner import Run

app = group("Recurring work: list it, run it now.")


@app.command("list")
def list_jobs(wide: Wide = False, columns: Columns = None, as_json: AsJson = False) -> None:
    """List what recurs, when it last ran and how that went."""
    from federation.admin import scheduler
    from federation.admin.words import ago

    jobs = with_node(scheduler.list_jobs)
    if as_json:
        print_json(jobs)
        return
    rows = ((j.name, ago(j.every), j.started_at, j.outcome, _told(j.detail), j.does) for j in jobs)
    names = ("NAME", "EVERY", "LAST BEGAN", "OUTCOME", "DETAIL", "DOES")
    print_list(names, rows, few=("NAME", "EVERY", "LAST BEGAN", "OUTCOME"), wide=wide, chosen=columns)


def _told(detail: str | None) -> str | None:
    """Return the numbers of a run in words; they are stored as JSON."""
    try:
        numbers = json.loads(detail or "")
    except ValueError:
        return detail
    return ", ".join(f"{name}: {value}" for name, value in numbers.items()) if isinstance(numbers, dict) else detail


@app.command("run")
def run(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name that `scheduler list` shows.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Run one recurring job now, in this process, whenever it last ran.

    If another process is running it, it is not run: then the command says so, with exit status 1. So does a run that
    fails.
    """
    from db import RunOutcome
    from federation.admin import scheduler

    async def run_named(federation: Federation) -> Run | None:
        try:
            return await scheduler.run(federation, name, order=order("scheduler run", name=name))
        except LookupError as error:
            fail(str(error))

    done = with_node(run_named)
    if done is None:
        fail(f"{name} is running in another process at this moment", status=NOT_FOUND)
    if as_json:
        print_json(done)
    else:
        numbers = ", ".join(f"{key}: {value}" for key, value in done.detail.items())
        print_lines([f"{name}: {done.outcome.value} after {done.duration.total_seconds():.2f} s; {numbers}"])
    if done.outcome is not RunOutcome.DONE:
        raise typer.Exit(NOT_FOUND)
