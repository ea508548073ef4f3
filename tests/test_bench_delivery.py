"""The benchmark of deliveries measures what its options name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests import warm
from tests.patience import LONG_PATIENCE_SECONDS

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_delivery.py"


@pytest.mark.full
def test_a_profile_says_where_a_deliverys_time_goes(tmp_path: Path) -> None:
    """All of it, by part; the stacks behind it are in a file. Over TLS that is a part of its own."""
    few = ["--queue", "sqlite", "--servers", "2", "--deliveries", "200", "--tls", "--profile", str(tmp_path)]
    told = measured(*few)
    (row,), (profile,) = told["rows"], told["profiles"]
    assert told["tls"] is True
    assert (row["failed"], row["held"]) == (0, 0)
    assert sum(profile["us"].values()) / 1000 == pytest.approx(row["cpu_ms_each"], rel=0.3)
    assert all(
        profile["us"][part] > 0 for part in ("HTTP", "TLS", "cryptography", "database", "queue core", "our code")
    )
    lines = Path(profile["file"]).read_text().splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == round(sum(profile["us"].values()) * 200)
    assert [path.name for path in tmp_path.iterdir()] == ["sqlite-2-here.folded"]


def measured(*options: str) -> dict[str, Any]:
    """What a small run tells."""
    command = [warm.PYTHON, str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told
