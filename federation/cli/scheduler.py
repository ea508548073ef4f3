"""`federation scheduler`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from federation.cli.options import AsJson, group
from federation.cli.orders import order
from federation.cli.output import print_json, print_lines, print_table
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.session import with_node

if TYPE_CHECKING:
    from federation.runtime.composition import Federation
    from federation.scheduler.runner import Run

app = group("Recurring work: list it, run it now.")


@app.command("list")
def list_jobs(as_json: AsJson = False) -> None:
    """List what recurs, when it last ran and how that went."""
    from federation.admin import scheduler

    jobs = with_node(scheduler.list_jobs)
    if as_json:
        print_json(jobs)
        return
    columns = ("NAME", "EVERY", "LAST BEGAN", "OUTCOME", "DETAIL", "DOES")
    print_table(columns, ((j.name, j.every, j.started_at, j.outcome, j.detail, j.does) for j in jobs))


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
