"""Workers that need not be waited for."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not end when forced to is given up after 0.1 s instead of 5 s."""
    monkeypatch.setattr("workers.worker.worker.FORCED_STOP_SECONDS", 0.1)
