"""A process that forks others: everything is imported once, so that a child is at work milliseconds after its birth.

`python -m tests.chaos.nursery SKEW` obeys lines of JSON on its standard input, one answer each, until that ends; then
it kills what it has left. It stays single-threaded and opens no connection, so that its children inherit neither.
Children are waited for on request only: until then the number of a dead one is not given to anybody else.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests import warm
from tests.chaos.clock import skew
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from tests.chaos.children import Order

ROOT: Final = Path(__file__).resolve().parents[2]
PRELOADED: Final = (
    "tests.chaos.children",
    "workers.storage.bull",
    "workers.storage.redis",
    "workers.storage.sql.postgres.target",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "sqlalchemy.dialects.postgresql.psycopg",
)
TOO_LATE: Final = "killed, as it would not end"


class Nursery:
    """The parent's side. The children's wall clock is wrong by `clock_skew` seconds; their stderr goes to `log`."""

    def __init__(self, log: Path, *, clock_skew: float = 0) -> None:
        self.clock_skew = clock_skew
        with open(log, "ab") as stderr:
            self._process = subprocess.Popen(
                [warm.PYTHON, "-m", "tests.chaos.nursery", str(clock_skew)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )

    def spawn(self, order: Order) -> int:
        """The number of a new child at work on the order."""
        return int(self._ask("spawn", asdict(order)))

    def signal(self, pid: int, number: int) -> None:
        """The child has the signal, unless it has ended."""
        self._ask("signal", pid, number)

    def wait(self, pid: int) -> int | str:
        """The exit status of a child that is ending, minus the signal if one ended it; if it goes on, it is killed."""
        status: int | str = self._ask("wait", pid)
        return status

    def kill(self, pid: int) -> int | str:
        """`kill -9`; the exit status, another one than -9 if the child had ended before."""
        self.signal(pid, signal.SIGKILL)
        return self.wait(pid)

    def close(self) -> None:
        """The nursery and all its children are gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=PATIENCE_SECONDS)
        self._process.stdout.close()

    def _ask(self, *words: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise RuntimeError(f"the nursery ended with status {self._process.wait()}; see the log")
        return json.loads(answer)


class _Children:
    """The nursery's side."""

    def __init__(self) -> None:
        self._unwaited: set[int] = set()

    def spawn(self, order: dict[str, Any]) -> int:
        pid = os.fork()
        if not pid:
            _live(order)
        self._unwaited.add(pid)
        return pid

    def signal(self, pid: int, number: int) -> None:
        if pid in self._unwaited:
            os.kill(pid, number)

    def wait(self, pid: int) -> int | str:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._unwaited.remove(pid)
                return TOO_LATE
            time.sleep(0.001)
        self._unwaited.remove(pid)
        return os.waitstatus_to_exitcode(found[1])

    def kill_all(self) -> None:
        for pid in self._unwaited:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _live(order: dict[str, Any]) -> None:
    """Never returns: nothing of the nursery's may run on in the child."""
    from tests.chaos import children

    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        children.live(children.Order(**order))
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def main() -> None:
    # Ctrl-C reaches the whole group; the parent ends us by closing our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Children that were asked to end before they were ready shall end as if they had been.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    skew(float(sys.argv[1]))
    # Only now: what is imported keeps the clock it finds.
    for module in PRELOADED:
        import_module(module)

    gc.freeze()
    nursery = _Children()
    try:
        for line in sys.stdin.buffer:
            verb, *arguments = json.loads(line)
            answer = getattr(nursery, verb)(*arguments)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        nursery.kill_all()


if __name__ == "__main__":
    main()
