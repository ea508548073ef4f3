"""The log of a command: lines for people on stderr."""

from __future__ import annotations

import logging
from typing import Final

from workers.worker.events import log_line

_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_supervisor = logging.getLogger("workers.supervisor")


def start_logging(level: str, *, process: int | None) -> None:
    """Log to stderr from `level` up, each line with the number of this process if it is one of several."""
    form = _FORMAT if process is None else f"%(asctime)s [{process}] %(levelname)-7s %(name)s: %(message)s"
    logging.basicConfig(level=level.upper(), format=form)


def write_report(level: int, event: str, **fields: object) -> None:
    """Write a line of the supervisor's: see `workers.supervisor.Report`."""
    told = ", ".join(f"{name}={log_line(str(value))}" for name, value in fields.items())
    words = event.replace("_", " ")
    _supervisor.log(level, "%s", f"{words} ({told})" if told else words)
