"""A process of a crew: it does what the files in its folder say, and writes down what it does.

Run as `python member.py FOLDER`. Each line of `events` is `NUMBER PID WORD`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from workers.supervisor import Introduction, Membership
from workers.supervisor.http_port import HttpAnswer

METRICS = """\
# HELP up Whether.
# TYPE up gauge
up{{a="}}"}} 1
pid {pid}
"""
LEASE = timedelta(seconds=0.5)


class Member:
    def __init__(self, folder: Path, membership: Membership) -> None:
        self._folder = folder
        self._membership = membership
        self._held: list[bytes] = []
        self._stop = asyncio.Event()

    def note(self, word: str) -> None:
        with (self._folder / "events").open("a") as events:
            events.write(f"{self._membership.number} {os.getpid()} {word}\n")

    async def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._asked)
        async with self._membership.joined(self.answer, lead=lambda: self.note("leads")):
            self.note("begins")
            if not self._told("never-ready"):
                self._membership.tell_ready(Introduction(grace_seconds=0 if self._told("no-grace") else 3600))
            while not self._stop.is_set():
                self._obey()
                await asyncio.sleep(0.01)
        self.note("ends")

    async def answer(self, path: str) -> HttpAnswer | None:
        body = METRICS.format(pid=os.getpid()) if path == "/metrics" else "{}"
        return HttpAnswer(status=200, content_type="text/plain", body=body.encode())

    def _asked(self) -> None:
        self.note("asked")
        if not self._told("stubborn"):
            self._stop.set()

    def _told(self, word: str) -> bool:
        """Whether all are told this, or this one is."""
        return any((self._folder / name).exists() for name in (word, f"{word}-{os.getpid()}"))

    def _obey(self) -> None:
        if self._told("block"):
            self.note("blocks")
            time.sleep(3600)
        if self._told("grow") and not self._held:
            self._held.append(b"x" * (1 << 20) * 64)
            self.note("grew")
        if self._told("orphan"):
            (self._folder / f"orphan-{os.getpid()}").unlink()
            parent = "import subprocess; print(subprocess.Popen(['sleep', '0.01']).pid)"
            done = subprocess.run([sys.executable, "-S", "-c", parent], capture_output=True, text=True, check=True)
            self.note(f"orphaned:{done.stdout.strip()}")


def main() -> None:
    folder = Path(sys.argv[1])
    membership = Membership.inherited()
    assert membership is not None
    if (folder / "refuse").exists():
        sys.exit(2)
    if (folder / "crash").exists():
        sys.exit(3)
    membership.end_with_parent(LEASE)
    asyncio.run(Member(folder, membership).run())


if __name__ == "__main__":
    main()
