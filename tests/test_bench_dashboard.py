"""The benchmark of the dashboard measures each page, and what open pages cost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests import warm
from tests.patience import PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_dashboard.py"


@pytest.mark.full
def test_each_page_is_measured() -> None:
    """Over few rows, and for a moment."""
    few = ["--place", "sqlite", "--deliveries", "1000", "--servers", "20", "--seconds", "1"]
    done = subprocess.run([warm.PYTHON, str(SCRIPT), *few], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    [result] = json.loads(done.stdout)["results"]
    assert {"/", "/deliveries?state=held", "/tasks"} < {page["page"] for page in result["pages"]}
    assert all(0 < page["bytes"] < 100_000 for page in result["pages"])
    assert result["open"]["cpu_s_with_ten_pages"] >= 0  # the system counts it in steps of 10 ms
