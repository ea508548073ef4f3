"""The nightly run of the analytics.

It is a process of its own, so that the workers' process holds neither Java nor its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final

from federation.scheduler.runner import JobFailed

AFTER_MIDNIGHT: Final = timedelta(minutes=15)
"""How long to wait: attempts reach the database up to a second late, and clocks of several machines differ."""
MOST_DAYS: Final = timedelta(days=30)
"""How far back days are looked for that were not computed: as far as scorecards look."""
TOLD: Final = 2
"""The status of a command that explains on stderr, in lines written for the operator, what it could not do."""
STOPS_WITHIN: Final = timedelta(seconds=10)
MAX_LINE_CHARACTERS: Final = 300


class NightlyAnalytics:
    """Runs `federation analytics run --out OUT` once the last UTC day is over; until then, calling it does nothing."""

    def __init__(self, out: Path) -> None:
        self._out = out

    async def __call__(self) -> Mapping[str, object]:
        """Make sure that the results in OUT include the last UTC day that is over.

        Raises:
            JobFailed: the process failed. The message has its status, and its last line if that is meant to be read.
        """
        until = (datetime.now(UTC) - AFTER_MIDNIGHT).date()
        yesterday = until - timedelta(days=1)
        computed = _computed(self._out / "computed.json")
        if yesterday in computed:
            return {"as_of": yesterday.isoformat(), "ran": False}
        since = ["--since", _goes_on_from(computed, yesterday).isoformat()] if computed else []
        await self._run("analytics", "run", "--out", str(self._out), *since, "--until", until.isoformat())
        return {"as_of": yesterday.isoformat(), "ran": True}

    async def _run(self, *arguments: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "federation", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            last = await _last_line(process)
            status = await process.wait()
        finally:
            await _end(process)
        if status == TOLD:
            raise JobFailed(f"the analytics ended with status {status}: {last}")
        if status:  # the last line of a traceback may quote anything, even a secret
            command = shlex.join(("federation", *arguments))
            raise JobFailed(f"the analytics ended with status {status}; run `{command}` to see why")


def _computed(file: Path) -> frozenset[date]:
    """Return the days that were computed from what was read after they were over, by a clock that was not ahead."""
    try:
        noted = json.loads(file.read_text(encoding="utf-8"))["read_at"].items()
        moments = {date.fromisoformat(day): datetime.fromisoformat(moment) for day, moment in noted}
        now = datetime.now(UTC)
        return frozenset(
            day for day, moment in moments.items() if (moment - AFTER_MIDNIGHT).date() > day and moment <= now
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return frozenset()


def _goes_on_from(computed: frozenset[date], yesterday: date) -> date:
    """Return the last day before which all are computed; it is computed once more, as attempts may have come late."""
    day = yesterday
    earliest = max(min(computed), yesterday - MOST_DAYS)
    missing = [day - timedelta(days=back) for back in range((day - earliest).days + 1)]
    return min(each for each in missing if each not in computed) - timedelta(days=1)


async def _last_line(process: asyncio.subprocess.Process) -> str:
    """Return the last line that the process writes to stderr. Nothing else of it is kept."""
    assert process.stderr is not None
    last = b""
    while chunk := await process.stderr.read(4_096):
        last = (last + chunk)[-4_096:]
    return (last.decode(errors="replace").strip().splitlines() or [""])[-1].strip()[:MAX_LINE_CHARACTERS]


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process, by force if necessary, and wait for it."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOPS_WITHIN.total_seconds()):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
