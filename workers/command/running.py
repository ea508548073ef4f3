"""`run`: workers for queues of the application, in this process or in several; their log, probes and reloads."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from workers.command.arguments import checked, positive
from workers.command.durations import parse_duration
from workers.command.problems import CommandError
from workers.command.targets import working_queue
from workers.errors import WorkersError
from workers.foreground import log_ready, run_until_stopped, start_logging
from workers.middlewares import log_attempts
from workers.queue import Queue
from workers.storage.abilities import Pooled
from workers.supervisor import Command, Introduction, Membership, Plan, Supervisor, parse_bytes, parse_processes
from workers.supervisor.http_port import HttpAnswer, HttpPort
from workers.worker.events import Observer, WorkerEvent, WorkerEventKind, log_line
from workers.worker.handlers import Middleware

if TYPE_CHECKING:
    from workers.command.arguments import Commands

_NOT_SOURCES: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})


class Sources:
    """The `.py` files below `directory`, those of environments and hidden folders left out."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._seen = self._look()

    def changed(self) -> bool:
        """Return whether one was written, added or removed since the last call."""
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> dict[str, int]:
        return dict(self._files())

    def _files(self) -> Iterator[tuple[str, int]]:
        for folder, folders, files in os.walk(self._directory):
            folders[:] = [name for name in folders if name not in _NOT_SOURCES and not name.startswith(".")]
            for name in files:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    try:
                        yield path, os.stat(path).st_mtime_ns
                    except OSError:  # removed meanwhile
                        continue


_supervisor = logging.getLogger("workers.supervisor")


def write_report(level: int, event: str, **fields: object) -> None:
    """Write a line of the supervisor's: see `workers.supervisor.Report`."""
    told = ", ".join(f"{name}={log_line(str(value))}" for name, value in fields.items())
    words = event.replace("_", " ")
    _supervisor.log(level, "%s", f"{words} ({told})" if told else words)


ANSWERS_WITHIN: Final = 2.0
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Probes:
    """Answers by path. `middlewares` are what measures attempts; there are none, and no metrics, without the extra."""

    def __init__(self, queues: Sequence[Queue]) -> None:
        self._queues = queues
        self.middlewares: Sequence[Middleware] = _measuring()

    async def __call__(self, path: str) -> HttpAnswer | None:
        """Answer a GET, or return None if there is nothing at that path."""
        if path == "/healthz":  # any answer shows that the event loop turns
            return _json(200, {"status": "ok"})
        if path == "/readyz":
            return await self._ready()
        if path == "/metrics":
            return _metrics()
        return None

    async def _ready(self) -> HttpAnswer:
        checks = {queue.storage.queue: await _check(queue) for queue in self._queues}
        fine = all(check == "ok" for check in checks.values())
        return _json(200 if fine else 503, {"status": "ok" if fine else "fail", "checks": checks})


async def _check(queue: Queue) -> str:
    try:
        async with asyncio.timeout(ANSWERS_WITHIN):
            await queue.counts()
    except (WorkersError, TimeoutError):
        return "fail"
    return "ok"


def _measuring() -> Sequence[Middleware]:
    try:
        from workers.middlewares.metrics import measure_attempts
        from workers.middlewares.prometheus import PrometheusMetrics
    except ModuleNotFoundError:
        return ()
    try:
        return (measure_attempts(PrometheusMetrics()),)
    except ValueError:  # the application's queue measures them itself
        return ()


def _counting() -> Sequence[Observer]:
    try:
        from workers.middlewares.prometheus import JobCounters
    except ModuleNotFoundError:
        return ()
    try:
        return (JobCounters(),)
    except ValueError:  # the application's queue counts them itself
        return ()


def _metrics() -> HttpAnswer | None:
    try:
        from prometheus_client import generate_latest
    except ModuleNotFoundError:
        return None
    return HttpAnswer(status=200, content_type=_METRICS_TYPE, body=generate_latest())


def _json(status: int, value: object) -> HttpAnswer:
    return HttpAnswer(status=status, content_type="application/json", body=json.dumps(value).encode())


def add_to(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "run",
        help="run the workers of queues until stopped",
        description="Run the workers of queues until SIGTERM or Ctrl-C, which lets jobs finish; a second one does not. "
        "With several processes, SIGHUP replaces them one by one.",
    )
    parser.add_argument("queues", nargs="+", metavar="module:queue", help="a Queue with handlers, or Tasks")
    parser.add_argument(
        "--concurrency", type=checked(positive), metavar="N", help="jobs at a time, instead of the queue's own"
    )
    parser.add_argument(
        "--grace",
        type=checked(parse_duration),
        metavar="DURATION",
        help="how long a stop lets jobs finish, such as 30s, instead of the queue's own",
    )
    parser.add_argument(
        "--processes",
        type=checked(parse_processes),
        metavar="N|auto",
        help="work in N processes, or one for each processor",
    )
    parser.add_argument(
        "--memory-limit",
        type=checked(parse_bytes),
        metavar="SIZE",
        help="stop and start a process again that has more memory, such as 300M; kill it at twice as much",
    )
    parser.add_argument(
        "--watch", nargs="?", const=".", metavar="DIRECTORY", help="start again when a .py file below it changes"
    )
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="serve /metrics, /healthz and /readyz")
    parser.add_argument("--metrics-bind", default="127.0.0.1", metavar="ADDRESS", help="where; default: %(default)s")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Work here, or supervise processes that do."""
    membership = Membership.inherited()
    start_logging(options.log_level, process=None if membership is None else membership.number)
    if membership is None and (options.processes or options.watch or options.memory_limit):
        return _supervise(options)
    queues = [working_queue(target) for target in options.queues]
    if membership is not None:
        membership.end_with_parent(min(queue.lease for queue in queues))
    return asyncio.run(_work(queues, options, membership))


def _supervise(options: argparse.Namespace) -> int:
    plan = Plan(
        processes=options.processes or 1,
        memory_limit=options.memory_limit,
        metrics_port=options.metrics_port,
        changed=Sources(options.watch).changed if options.watch else lambda: False,
    )
    command = Command(arguments=(sys.executable, *sys.orig_argv[1:]))
    return asyncio.run(Supervisor(command, plan, report=write_report).run())


async def _work(queues: Sequence[Queue], options: argparse.Namespace, membership: Membership | None) -> int:
    """Run a worker for each queue until all have stopped, and return the status to end with."""
    if membership is not None:
        await _require_connections(queues, membership.of)
    probes = Probes(queues) if membership is not None or options.metrics_port is not None else None
    counting = () if probes is None else _counting()
    grace = max(queue.grace for queue in queues) if options.grace is None else options.grace
    ready = _Ready(len(queues), grace, options.metrics_bind, membership)
    for queue in queues:
        await queue.make_tables()
    workers = [
        queue.worker(
            concurrency=options.concurrency,
            grace=options.grace,
            observers=[ready, *counting],
            middlewares=[log_attempts, *(() if probes is None else probes.middlewares)],
        )
        for queue in queues
    ]
    async with AsyncExitStack() as stack:
        if probes is not None and membership is not None:
            await stack.enter_async_context(membership.joined(probes, lead=lambda: None))
        elif probes is not None:
            port = HttpPort(probes)
            stack.push_async_callback(port.close)
            await _open(port, options)
        await run_until_stopped(workers)
    return 0


async def _open(port: HttpPort, options: argparse.Namespace) -> None:
    try:
        await port.start(options.metrics_bind, options.metrics_port)
    except OSError as error:
        place = f"{options.metrics_bind}:{options.metrics_port}"
        raise CommandError(f"--metrics-port: cannot listen on {place}: {error.strerror}") from None


async def _require_connections(queues: Sequence[Queue], processes: int) -> None:
    """Check that the servers admit the connections of all processes.

    Raises:
        CommandError: one admits fewer; the message has the arithmetic.
    """
    for storage in (queue.storage for queue in queues):
        if isinstance(storage, Pooled) and storage.connections:
            shortage = (await storage.admission()).shortage(processes, each=storage.connections)
            if shortage is not None:
                raise CommandError(f"--processes {processes}: {shortage}")


class _Ready:
    """Tells the log, and the supervisor if there is one, when all workers are ready."""

    def __init__(self, wanted: int, grace: timedelta, bind: str, membership: Membership | None) -> None:
        self._wanted = wanted
        self._membership = membership
        self._introduction = Introduction(grace_seconds=grace.total_seconds(), bind=bind)

    def __call__(self, event: WorkerEvent) -> None:
        if event.kind is not WorkerEventKind.READY:
            return
        log_ready(event)
        self._wanted -= 1
        if self._wanted == 0 and self._membership is not None:
            self._membership.tell_ready(self._introduction)
