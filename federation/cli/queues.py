"""`federation queues` and `federation workers list`."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from federation.cli.lists import print_list, shortened
from federation.cli.options import AsJson, Columns, Duration, Wide, Yes, group
from federation.cli.orders import order
from federation.cli.output import confirm, print_json, print_lines, print_table
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.session import with_node

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from federation.runtime.composition import Federation
    from workers import Queue

app = group("The queues: stats, pause, resume, clean, repair.")

QueueName: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="[QUEUE]",
        help="delivery, activities (by ActivityPub), health-check, discovery or tasks; without one, all.",
        show_default=False,
    ),
]


class EndState(StrEnum):
    """How a job ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@app.command("stats")
def stats(queue: QueueName = None, wide: Wide = False, columns: Columns = None, as_json: AsJson = False) -> None:
    """Count the jobs in each state; tell which queues are paused."""
    from federation.admin import queues
    from workers import JobState

    found = with_node(lambda federation: queues.stats(_chosen(federation, queue)))
    if as_json:
        print_json(found)
        return
    names = (f"{each.queue} (paused)" if each.paused else each.queue for each in found)
    counts = ([each.counts[state] for state in JobState] for each in found)
    print_list(
        ("QUEUE", *(state.value.upper() for state in JobState)),
        ((name, *numbers) for name, numbers in zip(names, counts, strict=True)),
        few=("QUEUE", "QUEUED", "SCHEDULED", "WAITING", "PROCESSING", "FAILED"),
        wide=wide,
        chosen=columns,
    )


@app.command("pause")
def pause(queue: QueueName = None, as_json: AsJson = False) -> None:
    """Stop workers from taking jobs until `resume`.

    This goes for every process. Running jobs go on. New ones are still enqueued: nothing is lost.
    """
    from federation.admin import queues

    names = _with_each("pause", queue, queues.pause)
    if as_json:
        print_json({"paused": names})
    else:
        print_lines([f"paused; `federation queues resume{f' {queue}' if queue else ''}` goes on"])


@app.command("resume")
def resume(queue: QueueName = None, as_json: AsJson = False) -> None:
    """Let workers take jobs again."""
    from federation.admin import queues

    names = _with_each("resume", queue, queues.resume)
    if as_json:
        print_json({"resumed": names})
    else:
        print_lines(["resumed"])


@app.command("clean")
def clean(
    queue: QueueName = None,
    state: Annotated[EndState, typer.Option("--state", help="Which records.")] = EndState.COMPLETED,
    older_than: Duration = "1d",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove records of jobs that have ended.

    They are removed by themselves (completed after a day, others after a week); this is for when memory is short.
    Deliveries in the database are not touched: a failed one can still be retried.
    """
    from federation.admin import queues
    from federation.base.settings.types import parse_duration
    from workers import JobState

    age = parse_duration(older_than)
    ended = "were cancelled" if state is EndState.CANCELLED else state.value
    confirm(f"Remove the records of jobs that {ended} more than {older_than} ago?", yes=yes)

    async def session(federation: Federation) -> dict[str, int]:
        chosen = _chosen(federation, queue)
        asked = order("queues clean", queue=queue, state=state.value, older_than=older_than)
        async with queues.recording(federation, asked) as count:
            gone = await queues.clean(chosen, JobState(state.value), older_than=age)
            await count.add(sum(gone.values()))
        return gone

    removed = with_node(session)
    if as_json:
        print_json(removed)
    else:
        print_table(("QUEUE", "REMOVED"), removed.items())


@app.command("repair")
def repair(
    queue: QueueName = None,
    drop: Annotated[bool, typer.Option("--drop", help="Remove what cannot be queued again.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Queue again what was set aside, and clear the way.

    Other programs that write to the queues' Redis may leave jobs there that no worker can run, and keys where the queue
    needs its own. Both are set aside: the log reports them as `job_set_aside` and `worker_error`. This command queues
    the jobs as new ones. What is no job is kept, unless `--drop` removes it. On Bull it also queues jobs that are in no
    line, as Bull's own pause and resume may leave them. Queues in a database or in files set nothing aside: then the
    command says so, with status 1.
    """
    from federation.admin import queues

    async def session(federation: Federation) -> tuple[list[queues.Repair], bool]:
        chosen = _chosen(federation, queue)
        async with queues.recording(federation, order("queues repair", queue=queue, drop=drop)) as count:
            repaired = await queues.repair(chosen, drop=drop)
            await count.add(len(repaired))
        return repaired, queues.set_nothing_aside(chosen)

    if drop:
        confirm("Remove what was set aside and cannot be queued again?", yes=yes)
    found, pointless = with_node(session)
    if as_json:
        print_json(found)
    elif pointless:
        print_lines(["these queues set nothing aside: a job that cannot be read fails, and `queues clean` removes it"])
    elif found:
        print_table(
            ("QUEUE", "ID", "REASON", "NOW"), ((each.queue, each.id, each.reason, each.outcome) for each in found)
        )
    else:
        print_lines(["nothing was set aside"])
    if pointless:
        raise typer.Exit(NOT_FOUND)


def list_workers(wide: Wide = False, columns: Columns = None, as_json: AsJson = False) -> None:
    """List running workers, and those that fell silent.

    A worker is silent that was not heard of for 90 s: it may have died.
    """
    from federation.admin import queues
    from federation.admin.words import ago

    found = with_node(lambda federation: queues.workers(queues.all_queues(federation)))
    if as_json:
        print_json(found)
        return
    now = datetime.now(UTC)
    if found:
        print_list(
            ("QUEUE", "WORKER", "FULL ID", "SEEN", "HOLDS"),
            (
                (
                    each.queue,
                    short,
                    each.id,
                    f"not heard of for {ago(now - each.seen_at)}" if each.silent else each.seen_at,
                    each.claims,
                )
                for short, each in zip(shortened([each.id for each in found]), found, strict=True)
            ),
            few=("QUEUE", "WORKER", "SEEN", "HOLDS"),
            wide=wide,
            chosen=columns,
        )
    if all(each.silent for each in found):
        print_lines(["no worker runs; `federation workers run` starts one"])
        raise typer.Exit(1)


def _with_each(verb: str, name: str | None, work: Callable[[Sequence[Queue]], Awaitable[None]]) -> list[str]:
    """Do the work with each chosen queue, and return their names."""
    from federation.admin import queues

    async def session(federation: Federation) -> list[str]:
        chosen = _chosen(federation, name)
        async with queues.recording(federation, order(f"queues {verb}", queue=name)) as count:
            await work(chosen)
            await count.add(len(chosen))
        return [queue.storage.queue for queue in chosen]

    return with_node(session)


def _chosen(federation: Federation, name: str | None) -> Sequence[Queue]:
    from federation.admin import queues

    try:
        return queues.chosen_queues(federation, name)
    except LookupError as error:
        fail(str(error))
