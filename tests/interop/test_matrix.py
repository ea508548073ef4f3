"""The table of what works beside other programs says what tests show."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from tests.interop.matrix import COLUMNS, ROWS, table

PAGE = Path(__file__).parents[2] / "docs" / "queue" / "storages.md"
CELLS = [
    pytest.param(library, worker, test, id=f"{test}-{library}-{worker}")
    for tests in ROWS.values()
    for (library, worker), test in zip(COLUMNS, tests, strict=True)
    if test is not None
]


def test_the_manual_has_the_table() -> None:
    """As `tests/interop/matrix.py` makes it."""
    assert table() in PAGE.read_text()


@pytest.mark.parametrize(("library", "worker", "test"), CELLS)
def test_a_cell_has_a_test_with_the_real_thing(library: str, worker: str, test: str) -> None:
    """The test exists, and has a process of Node's or a worker of the Python package on the other side."""
    module, _, name = test.partition(".")
    asked = inspect.signature(getattr(import_module(f"tests.interop.{module}"), name)).parameters.keys()
    if worker == "worker of the Python package":
        assert module == "test_stock_worker"
    else:
        assert asked & ({"node"} if library == "bullmq" else {"peer"})
