"""A queue in a directory of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from workers.storage.file import FileStorage


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[FileStorage]:
    storage = FileStorage(tmp_path)
    await storage.connect()
    yield storage
    await storage.disconnect()
