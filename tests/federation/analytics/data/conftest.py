"""What only the tests of files and databases need."""

from __future__ import annotations

import pytest

from federation.analytics.data.export import SNAPSHOTS


@pytest.fixture
def few_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports have attempts and the registry: each other table is written as that is, and is 0.2 s of CPU."""
    for name in SNAPSHOTS.keys() - {"servers"}:
        monkeypatch.delitem(SNAPSHOTS, name)
