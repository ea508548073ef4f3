"""A supervisor of members, as a process of its own: `python -m tests.workers.supervisor.crew FOLDER PLAN`.

It is in a hurry where a real one has patience, and writes its reports as JSON lines on stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from tests import warm
from tests.patience import PATIENCE_SECONDS, until
from tests.servers import free_port
from tests.workers.manual import ROOT
from workers.supervisor import Command, Pace, Plan, Supervisor

MEMBER = Path(__file__).with_name("member.py")


def report(level: int, event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), file=sys.stderr, flush=True)


def main() -> None:
    folder, told = Path(sys.argv[1]), json.loads(sys.argv[2])
    start = timedelta(seconds=told.pop("start", 3600))
    hurry = timedelta(milliseconds=10)
    pace = Pace(
        first_pause=hurry, longest_pause=hurry, settled=timedelta(hours=1), look=hurry, start=start, forced=hurry
    )
    command = Command(arguments=[sys.executable, str(MEMBER), str(folder)])
    sys.exit(asyncio.run(Supervisor(command, Plan(pace=pace, **told), report=report).run()))


@dataclass(slots=True)
class Crew:
    """A running crew in its folder."""

    folder: Path
    process: subprocess.Popen[bytes]
    port: int
    _told: set[str] = field(default_factory=set)

    def tell(self, word: str, pid: int | None = None) -> None:
        """All members, or one, do this from now on."""
        (self.folder / (word if pid is None else f"{word}-{pid}")).touch()

    def forget(self, word: str) -> None:
        (self.folder / word).unlink()

    def events(self, word: str) -> list[tuple[int, int]]:
        """The number and process id of each member that noted this."""
        file = self.folder / "events"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(number), int(pid)) for number, pid, noted in lines if noted == word]

    def reports(self, event: str) -> list[dict[str, object]]:
        lines = (json.loads(line) for line in (self.folder / "reports").read_text().splitlines())
        return [line for line in lines if line["event"] == event]

    async def until_ready(self, number: int) -> list[int]:
        """The process ids of the first `number` members that became ready, in this order."""
        await self.until(lambda: len(self.reports("process_ready")) >= number)
        return [int(str(each["pid"])) for each in self.reports("process_ready")]

    async def until(self, condition: object) -> None:
        assert callable(condition)

        def look() -> object:
            found = condition()
            assert found or self.process.poll() is None, (self.folder / "reports").read_text()
            return found

        await until(look)

    async def ended(self) -> int:
        """The supervisor's exit status."""
        return await asyncio.to_thread(self.process.wait, PATIENCE_SECONDS)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, be it a zombie."""
    return Path(f"/proc/{pid}").exists()


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is none that ended and nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@asynccontextmanager
async def crew(folder: Path, *, command: tuple[str, ...] = (), **plan: object) -> AsyncIterator[Crew]:
    """A crew whose members are all gone in the end; `command` replaces what starts it."""
    port = free_port()
    plan = {"processes": 2, "metrics_port": port, **plan}
    program = command or (warm.PYTHON,)
    with (folder / "reports").open("wb") as reports:
        process = subprocess.Popen(
            [*program, "-m", "tests.workers.supervisor.crew", str(folder), json.dumps(plan)],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
            stdin=subprocess.DEVNULL,
            stderr=reports,
        )
    running = Crew(folder, process, port)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        members = {pid for _, pid in running.events("begins")}
        await until(lambda: not [pid for pid in members if is_running(pid)])


if __name__ == "__main__":
    main()
