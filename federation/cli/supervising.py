"""The supervisor of several processes that deliver."""

from __future__ import annotations

import sys

from federation import interrupts
from federation.cli.output import print_json
from federation.cli.problems import asked_for_json, fail
from federation.cli.session import LogLevel, start_logging


def supervise(processes: str, *, memory_limit: str | None, metrics_port: int | None, as_json: bool) -> None:
    """Run this command in several processes until stopped, and end with the supervisor's status.

    This process loads neither settings nor anything that works: it stays small, and the children see what is wrong.
    """
    import structlog

    from workers.supervisor import Command, Plan, Supervisor, parse_bytes, parse_processes

    start_logging(LogLevel.INFO)
    log = structlog.get_logger("federation.supervisor")
    plan = Plan(
        processes=parse_processes(processes),
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        metrics_port=metrics_port,
    )
    command = Command(arguments=(sys.executable, *sys.orig_argv[1:]))
    log.info("supervisor_started", processes=plan.processes)
    status = interrupts.run(Supervisor(command, plan, report=log.log).run())
    if status == 1 and asked_for_json():
        fail("the processes died in a loop, or had to be killed; the log says more", status=status)
    if status:
        sys.exit(status)
    if as_json:
        print_json({"stopped": True})
