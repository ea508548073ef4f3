"""A plugin of pytest: `pytest_plugins = ["workers.pytest_plugin"]` in your `conftest.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

import pytest

from workers.tasks import InMemory, Tasks


class TasksInMemory(Protocol):
    """Keeps what is enqueued to `tasks` in memory until the test ends; see `Tasks.in_memory`."""

    def __call__(self, tasks: Tasks, *, eager: bool = False) -> InMemory: ...


@pytest.fixture
def tasks_in_memory() -> Iterator[TasksInMemory]:
    """Call it with your tasks: `memory = tasks_in_memory(tasks)`, then `await memory.drain()`; or with `eager=True`."""
    with ExitStack() as stack:

        def begin(tasks: Tasks, *, eager: bool = False) -> InMemory:
            return stack.enter_context(tasks.in_memory(eager=eager))

        yield begin
