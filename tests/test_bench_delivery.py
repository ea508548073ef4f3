"""The benchmark of deliveries measures a fan-out, and that fits where it has to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

SCRIPT: Final = Path(__file__).parent.parent / "scripts" / "bench_delivery.py"


def test_a_post_to_20_000_servers_takes_at_most_24_megabytes_of_valkey() -> None:
    """Its jobs refer to the text and hold no copy of its 2.4 KB."""
    done = subprocess.run([sys.executable, str(SCRIPT), "--fanout"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["recipients"], row["payload_bytes"]) == (20_000, 2_400)
    assert 2.4 < row["redis_mb"] <= 24
    assert row["enqueue_s"] > 0
