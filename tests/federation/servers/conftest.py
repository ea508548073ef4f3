"""Two nodes for the tests of what servers know of each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.federation.servers.two_nodes import Pair, knowing_each_other


@pytest.fixture
async def pair(empty_environment: Path, migrated_file: Path, tmp_path: Path) -> AsyncIterator[Pair]:
    async with knowing_each_other(tmp_path, migrated_file) as nodes:
        yield nodes
