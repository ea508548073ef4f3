"""A test of a task, which needs no server: `pytest unit_test.py`, beside recurring.py."""

import asyncio

import pytest
from recurring import tasks, tick


def test_a_tick_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        with tasks.in_memory() as memory:
            await tick.enqueue()
            await memory.drain()

    asyncio.run(run())
    assert capsys.readouterr().out == "tick\n"
