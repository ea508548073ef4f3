"""A fresh node to measure, and the machine on which it is measured."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import tempfile
from collections.abc import Iterator


def machine() -> dict[str, object]:
    """Describe the machine on which the numbers were measured."""
    return {"cpus": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}


def unwind_when_terminated() -> None:
    """Make SIGTERM end this process like Ctrl-C, so that what it started is stopped, and what it wrote is removed."""
    # Not by an exception of its own, which may come where Python ignores one: `asyncio.run` cancels its task instead.
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in its background without it
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


@contextlib.contextmanager
def fresh_places(kind: str) -> Iterator[dict[str, str]]:
    """Yield variables that say where a fresh node's rows and queues are. `bullmq` has its rows on PostgreSQL."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory(prefix="fd-bench-") as directory:
            yield {"DATABASE_URL": f"sqlite:///{directory}/node.sqlite3"}
        return
    from tests.servers import postgres, valkey  # imported here, because SQLite needs neither

    with contextlib.ExitStack() as stack:
        values = {"DATABASE_URL": stack.enter_context(postgres())}
        if kind == "bullmq":
            values["REDIS_URL"] = stack.enter_context(valkey()).url
        yield values
