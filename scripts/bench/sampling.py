"""Where the CPU time of a process goes, by samples of its stacks (`--profile`).

Theory of operation. The kernel sends a signal for every few milliseconds of CPU time that the process has used, and the
handler adds what each thread has used since the signal before to the stack that it is in now. So the sum is exact, C
code counts for the function that called it, and a delivery costs about as much as without. The handler runs in the main
thread, which may be waiting while the signal came to another one: the event loop is woken then, as by any signal that
it handles. What is below the event loop is the same for all tasks and left out. A stack belongs to the part of its
innermost frame that has one: a write to a socket belongs to whoever writes, and what pydantic or json does to whoever
calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

INTERVAL_SECONDS: Final = 0.001
"""Of CPU time. The kernel rounds it up to its tick, often 4 ms."""

OTHER: Final = "other"
_LOOP: Final = "event loop"
_OF_PATHS: Final[Mapping[str, Sequence[str]]] = {
    "HTTP": ("federation/http/", "httpx/", "httptools/", "aiohappyeyeballs/"),
    "TLS": ("asyncio/sslproto.py", "ssl.py"),
    "cryptography": (
        *("nacl/", "cryptography/"),
        *(f"federation/protocol/{name}.py" for name in ("sealing", "keys")),
        "federation/activitypub/signatures.py",
    ),
    "Redis": (
        *("redis/", "hiredis/", "workers/storage/bullmq/server.py"),
        *(f"workers/storage/on_redis/{name}.py" for name in ("server", "shared_connection", "wire", "listener")),
    ),
    "database": ("sqlalchemy/", "psycopg/", "psycopg_pool/", "aiosqlite/", "sqlite3/", "greenlet/", "db/"),
    "queue core": ("workers/", "bullmq/"),
    "our code": ("federation/",),
    "benchmark": ("bench/", "bench_delivery.py", "bench_activitypub.py"),
}
PARTS: Final = (*_OF_PATHS, _LOOP, OTHER)
_LOOPS_OWN: Final = ("asyncio/", "selectors.py", "concurrent/futures/")
_BELOW: Final = ("Handle._run", "BaseEventLoop.run_forever")


class Samples:
    """Seconds of CPU time by stack, outermost frame first."""

    def __init__(self) -> None:
        self.seconds: defaultdict[tuple[CodeType, ...], float] = defaultdict(float)
        self._used: dict[int, float] = {}

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take samples of this process during the block, which runs in the event loop of the main thread."""
        self._used = {thread: _used_by(thread) for thread in sys._current_frames()}
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGPROF, lambda: None)  # the signal wakes the loop from now on
        signal.signal(signal.SIGPROF, self._sample)  # a handler of the loop's would not see what it interrupts
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_SECONDS, INTERVAL_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            loop.remove_signal_handler(signal.SIGPROF)

    def folded(self) -> dict[str, int]:
        """Return microseconds by stack, as tools for flame graphs read them: `outer;inner`."""
        folded: Counter[str] = Counter()
        for stack, seconds in self.seconds.items():
            folded[";".join(map(_frame_name, stack))] += round(seconds * 1e6)
        return dict(folded)

    def _sample(self, _signal: int, interrupted: FrameType | None) -> None:
        main = threading.main_thread().ident
        for thread, top in sys._current_frames().items():
            used = _used_by(thread)
            spent = used - self._used.get(thread, 0.0)
            self._used[thread] = used
            if spent > 0:  # a thread may have the number of one that has ended
                self.seconds[_stack(interrupted if thread == main else top)] += spent


def by_part(folded: Mapping[str, int]) -> dict[str, int]:
    """Return the microseconds of each part, of all of `PARTS` in their order."""
    parts = dict.fromkeys(PARTS, 0)
    for stack, microseconds in folded.items():
        parts[_part(stack.split(";"))] += microseconds
    return parts


def write_folded(folded: Mapping[str, int], path: Path) -> None:
    """Write one line per stack, for `flamegraph.pl`, inferno or speedscope."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{stack} {microseconds}\n" for stack, microseconds in sorted(folded.items())))


def table(parts: Mapping[str, int], deliveries: int) -> str:
    """Return what one delivery costs in each part that cost anything, in µs and as a share, the dearest first."""
    total = sum(parts.values()) or 1
    rows = [("all", total), *sorted(((n, us) for n, us in parts.items() if us), key=lambda row: -row[1])]
    return "\n".join(f"{name:>14} {us / deliveries:9.1f} µs {us / total:6.1%}" for name, us in rows)


def _used_by(thread: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _stack(frame: FrameType | None) -> tuple[CodeType, ...]:
    """Return the code of the frames, outermost first, without what is below the event loop's present callback."""
    stack: list[CodeType] = []
    while frame is not None and (not stack or frame.f_code.co_qualname not in _BELOW):
        stack.append(frame.f_code)
        frame = frame.f_back
    stack.reverse()
    return tuple(stack)


def _frame_name(code: CodeType) -> str:
    return f"{_short(code.co_filename)}:{code.co_qualname}".replace(";", ",").replace(" ", "_")


def _short(filename: str) -> str:
    """Return the path from the folder on from which the module was imported."""
    inside = [root for root in sys.path if root and filename.startswith(f"{root}/")]
    return filename[len(max(inside, key=len)) + 1 :] if inside else filename


def _part(stack: Sequence[str]) -> str:
    if _starts(stack[0], _OF_PATHS["benchmark"]):
        return "benchmark"
    for frame in reversed(stack):
        for part, paths in _OF_PATHS.items():
            if _starts(frame, paths):
                return part
    return _LOOP if any(_starts(frame, _LOOPS_OWN) for frame in stack) else OTHER


def _starts(frame: str, paths: Sequence[str]) -> bool:
    return frame.startswith(tuple(paths))
