"""`scripts/purge_deliveries` as cron runs it."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlmodel import col

from db import Database, DeliveryJob
from tests import warm
from tests.patience import PATIENCE_SECONDS

SCRIPT = Path(__file__).parents[3] / "scripts" / "purge_deliveries.py"


def run(directory: Path, database_url: str) -> subprocess.CompletedProcess[str]:
    environment = {"DATABASE_URL": database_url, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [warm.PYTHON, str(SCRIPT)]
    return subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


@pytest.mark.spread("database_url")
async def test_what_is_past_its_time_goes(database: Database, database_url: str, tmp_path: Path) -> None:
    """And what is not stays; the numbers are printed."""
    now = datetime.now(UTC)
    async with database.transaction() as session:
        for name, settled_at in (("open", None), ("fresh", now), ("old", now - timedelta(days=8))):
            row = DeliveryJob(
                id=name, target_url="t", payload="{}", created_at=settled_at or now, settled_at=settled_at
            )
            session.add(row)
    done = run(tmp_path, database_url)
    assert (done.returncode, done.stderr) == (0, "")
    names = (
        *("attempts", "rules", "texts", "health_events", "actions", "bulk_jobs", "losses"),
        *("rotations", "follow_news", "servers", "inboxes", "actor_keys", "remote_keys", "received", "undone_follows"),
        "follows",
    )
    others = ", ".join(f"{name}: 0" for name in names)
    assert done.stdout == f"deliveries: 1, {others}\n"
    async with database.read() as session:
        assert set((await session.execute(select(col(DeliveryJob.id)))).scalars()) == {"open", "fresh"}


@pytest.mark.parametrize("url", ["sqlite:///empty.db", "postgresql://node:hunter2@127.0.0.1:1/x", "nonsense"])
def test_without_a_database_one_line_says_why(url: str, tmp_path: Path) -> None:
    """No traceback, no password, and a status that cron reports."""
    failed = run(tmp_path, url)
    assert failed.returncode == 1
    assert failed.stderr.startswith("purge_deliveries: ")
    assert failed.stderr.count("\n") == 1
    assert "hunter2" not in failed.stderr
