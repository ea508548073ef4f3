"""Commands about jobs: `enqueue`, `list`, `show`, `retry`, `cancel`, `stats`, `migrate`."""

from __future__ import annotations

import argparse
import io
import json
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from workers.command.arguments import checked, identifier, positive
from workers.command.commands import NOTHING, add_command
from workers.command.durations import parse_duration
from workers.command.limits import limits_table, look_at_limits
from workers.command.problems import CommandError
from workers.command.tables import age, as_json, heard, one_line, table
from workers.command.targets import check_payload
from workers.errors import JobCancelledError, JobFailedError
from workers.jobs import CancelResult, JobState, JobStatus
from workers.limits import HeldBack
from workers.queue import Queue
from workers.specs import DEFAULT_NAME
from workers.storage.abilities import Migratable

if TYPE_CHECKING:
    from workers.command.arguments import Commands

_STATES: Final = [state.value for state in JobState]


def add_to(commands: Commands) -> None:
    """Add the commands to the parser."""
    enqueue = add_command(commands, "enqueue", _enqueue, "enqueue a job")
    enqueue.add_argument("payload", nargs="?", default="null", help="JSON, or - to read it from stdin; default: null")
    enqueue.add_argument("--name", default=DEFAULT_NAME, help="what kind of job it is; default: %(default)s")
    enqueue.add_argument("--id", help="its id, which no other job may have; default: a new one")
    enqueue.add_argument(
        "--delay", type=checked(parse_duration), metavar="DURATION", help="run it in 30s, 10m, 2h or 1d"
    )
    enqueue.add_argument("--priority", type=int, default=0, help="lower runs first; default: %(default)s")
    enqueue.add_argument("--max-attempts", type=checked(positive), metavar="N", help="instead of the queue's own")
    enqueue.add_argument(
        "--wait",
        type=checked(parse_duration),
        metavar="DURATION",
        help="wait for its result, at most so long, and print it",
    )

    listing = add_command(commands, "list", _list, "list jobs")
    listing.add_argument("--state", choices=_STATES, help="only jobs in this state; default: all that are kept")
    listing.add_argument("--name", help="only jobs of this name")
    listing.add_argument(
        "--limit", type=checked(positive), default=20, metavar="N", help="at most; default: %(default)s"
    )

    show = add_command(commands, "show", _show, "show one job, with its result or last error")
    show.add_argument("id", type=checked(identifier))

    retry = add_command(commands, "retry", _retry, "queue failed or cancelled jobs again, with fresh attempts")
    retry.add_argument("ids", type=checked(identifier), nargs="*", metavar="ID")
    retry.add_argument("--all", action="store_true", help="every failed job")
    retry.add_argument("--name", help="with --all: those of this name")
    retry.add_argument("--error", metavar="TYPE", help="with --all: those whose last error is of this type")

    cancel = add_command(commands, "cancel", _cancel, "cancel jobs; a running one is asked to stop")
    cancel.add_argument("ids", type=checked(identifier), nargs="+", metavar="ID")

    add_command(commands, "stats", _stats, "count jobs by state, and those that limits keep back; list workers")
    told = "make the tables of queues in their databases, or bring them to this version"
    add_command(commands, "migrate", _migrate, told, several=True)


async def _enqueue(queue: Queue, options: argparse.Namespace) -> int:
    payload = _payload(options.payload)
    try:
        check_payload(options.queue, options.name, payload)
        done = await queue.enqueue(
            payload,
            name=options.name,
            id=options.id,
            delay=options.delay,
            priority=options.priority,
            max_attempts=options.max_attempts,
        )
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from None
    if options.wait is not None:
        return await _wait(queue, done.id, options.wait)
    told = {"id": done.id, "status": done.status.value}
    print(as_json(told) if options.json else f"{done.status.value}: {one_line(done.id)}")
    return 0


def _payload(text: str) -> object:
    try:
        return json.loads(_stdin() if text == "-" else text)
    except ValueError as error:
        raise CommandError(f"the payload is no JSON ({error}); a text needs quotes, as '\"bob\"'") from None


def _stdin() -> str:
    if isinstance(sys.stdin, io.TextIOWrapper):  # JSON is UTF-8, whatever the locale is
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    return sys.stdin.read()


async def _wait(queue: Queue, job_id: str, timeout: timedelta) -> int:
    try:
        result = await queue.wait_for_job_chain_completion(job_id, timeout)
    except (JobFailedError, JobCancelledError) as error:
        print(f"{type(error).__name__}: {one_line(str(error))}", file=sys.stderr)
        return NOTHING
    print(as_json(result))
    return 0


async def _list(queue: Queue, options: argparse.Namespace) -> int:
    states = [JobState(options.state)] if options.state else list(JobState)
    jobs = [job for state in states for job in await _in_state(queue, state, options)]
    jobs = sorted(jobs, key=lambda job: job.created_at)[: options.limit]
    waits = await queue.manage.held_back([job.id for job in jobs])
    if options.json:
        print(as_json([_told(job, back) for job, back in zip(jobs, waits, strict=True)]))
    elif jobs:
        rows = [_row(job, back) for job, back in zip(jobs, waits, strict=True)]
        print(table(("id", "name", "state", "attempt", "age", ""), rows))
    else:
        print("no such jobs", file=sys.stderr)
    return 0 if jobs else NOTHING


async def _in_state(queue: Queue, state: JobState, options: argparse.Namespace) -> list[JobStatus]:
    found: list[JobStatus] = []
    cursor: str | None = None
    name = options.name if queue.storage.capabilities.ordered_listing else None
    while len(found) < options.limit:
        page = await queue.manage.list(state, name=name, cursor=cursor, limit=max(options.limit, 100))
        found += [job for job in page.jobs if options.name in (None, job.name)]
        cursor = page.cursor
        if cursor is None:
            break
    return found


async def _show(queue: Queue, options: argparse.Namespace) -> int:
    found = await queue.get_job(options.id)
    if found is None:
        print(f"there is no job {one_line(options.id)}, or none any more", file=sys.stderr)
        return NOTHING
    job = found.status
    told = _told(job, await queue.held_back(job.id))
    if found.meta:
        told["meta"] = found.meta
    if job.state is JobState.COMPLETED:
        told["result"] = await queue.get_result(job.id)
    stack = "" if job.last_error is None else job.last_error.stack
    if options.json:
        print(as_json({**told, **({"stack": stack} if stack else {})}))
        return 0
    print(table((), [(name, value if isinstance(value, str) else as_json(value)) for name, value in told.items()]))
    for line in stack.splitlines():
        print(f"  {one_line(line)}")
    return 0


async def _retry(queue: Queue, options: argparse.Namespace) -> int:
    if bool(options.ids) == options.all:
        raise CommandError("name the ids of the jobs to retry, or --all, and not both")

    def is_meant(job: JobStatus) -> bool:
        error = None if job.last_error is None else job.last_error.type
        return options.name in (None, job.name) and options.error in (None, error)

    number = await (queue.manage.retry_where(is_meant) if options.all else queue.manage.retry(options.ids))
    print(as_json({"retried": number}) if options.json else f"queued again: {number}")
    return 0 if number else NOTHING


async def _cancel(queue: Queue, options: argparse.Namespace) -> int:
    found = {job_id: await queue.cancel(job_id) for job_id in options.ids}
    if options.json:
        print(as_json({job_id: result.value for job_id, result in found.items()}))
    else:
        words = {CancelResult.PROCESSING: "is running, and asked to stop", CancelResult.NOT_FOUND: "not found"}
        told = [(job_id, words.get(result, result.value)) for job_id, result in found.items()]
        print(table((), told))
    return 0 if {CancelResult.CANCELLED, CancelResult.PROCESSING} & set(found.values()) else NOTHING


async def _stats(queue: Queue, options: argparse.Namespace) -> int:
    counts, paused, workers = await queue.counts(), await queue.manage.is_paused(), await queue.manage.workers()
    look = await look_at_limits(queue)
    if options.json:
        listed = [
            {"id": each.id, "seen_at": each.seen_at.isoformat(), "claims": each.claims, "silent": each.is_silent}
            for each in workers
        ]
        told = {
            "counts": {state.value: number for state, number in counts.items()},
            "paused": paused,
            "workers": listed,
            "limits": look.as_rows(),
        }
        print(as_json(told))
        return 0
    print(table((), [(state.value, str(number)) for state, number in counts.items()]))
    if paused:
        print("the queue is paused: nothing is claimed")
    if look.limits:
        print(limits_table(look))
    rows = [(each.id, f"{each.claims} running", heard(each)) for each in workers]
    print(table(("workers", "", ""), rows) if rows else "no workers")
    return 0


async def _migrate(queue: Queue, options: argparse.Namespace) -> int:
    if not isinstance(queue.storage, Migratable):
        raise CommandError(f"{queue.storage!r} has no tables, and needs none")
    await queue.storage.migrate()
    print(as_json({"migrated": True}) if options.json else "the tables are ready")
    return 0


def _row(job: JobStatus, back: HeldBack | None) -> tuple[str, ...]:
    attempt = f"{job.attempt}/{job.max_attempts}"
    return job.id, job.name, job.state.value, attempt, age(job.created_at), _why(job, back)


def _why(job: JobStatus, back: HeldBack | None) -> str:
    if back is not None:
        return f"waits {back}"
    if job.last_error is not None:
        return f"{job.last_error.type}: {job.last_error.message}"[:60]
    return "" if job.next_run_at is None else f"due {job.next_run_at:%Y-%m-%d %H:%M:%S}"


def _told(job: JobStatus, back: HeldBack | None) -> dict[str, object]:
    """Return what is known of a job, without what it has not."""
    error = job.last_error
    moments = {"created_at": job.created_at, "next_run_at": job.next_run_at, "finished_at": job.finished_at}
    told: dict[str, object] = {
        "id": job.id,
        "name": job.name,
        "state": job.state.value,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "priority": job.priority,
        **{name: moment.isoformat() for name, moment in moments.items() if moment is not None},
        "worker_id": job.worker_id,
        "last_error": None if error is None else f"{error.type}: {error.message}",
        "progress": job.progress,
        "waits": None if back is None else str(back),
    }
    return {name: value for name, value in told.items() if value is not None}
