"""Queues of every kind work on uvloop, which `uvicorn[standard]` brings, as on asyncio's own loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from workers import Tasks

uvloop = pytest.importorskip("uvloop", reason="uvloop has no wheel for this Python")


@pytest.fixture(params=["file", "sqlite", "postgres", "redis", "bullmq+redis", "bull+redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "file":
            return f"file://{tmp_path}"
        case "sqlite":
            return f"sqlite:///{tmp_path}/queue.sqlite3"
        case "postgres":
            return str(request.getfixturevalue("emptied_postgres_url"))
        case scheme:
            return f"{scheme}{str(request.getfixturevalue('redis_url')).removeprefix('redis')}?queue={scheme}"


def test_tasks_run_on_uvloop(url: str) -> None:
    """Functions of both kinds; their results are waited for by a coroutine, and by a thread beside the loop."""
    app = Tasks(url)
    loops: set[str] = set()

    @app.task
    async def double(number: int) -> int:
        loops.add(type(asyncio.get_running_loop()).__module__)
        return number * 2

    @app.task
    def plain(number: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        return number + 1

    def beside() -> int:
        return double.sync.enqueue(5).result(timeout=30)

    async def main() -> tuple[list[int], int, int]:
        async with app:
            many = [await double.enqueue(number) for number in range(20)]
            return (
                [await each.result(30) for each in many],
                await (await plain.enqueue(1)).result(30),
                await asyncio.to_thread(beside),
            )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == ([2 * number for number in range(20)], 2, 10)
    assert loops == {"uvloop"}
