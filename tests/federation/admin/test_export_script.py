"""`scripts/export_blacklist` as cron runs it: a whole file, or the one before and a line that says why."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from db import BlacklistedServer, Database
from tests import warm
from tests.patience import PATIENCE_SECONDS

SCRIPT = Path(__file__).parents[3] / "scripts" / "export_blacklist.py"
PAST = datetime(2025, 1, 1, tzinfo=UTC)


def run(directory: Path, database_url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"DATABASE_URL": database_url, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [warm.PYTHON, str(SCRIPT), *arguments]
    return subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


@pytest.fixture
async def two_rules(database: Database) -> None:
    async with database.transaction() as session:
        for url, end in (("*.evil.example", None), ("https://once.example", PAST)):
            session.add(BlacklistedServer(server_url=url, reason="spam", created_at=PAST, expires_at=end))


@pytest.mark.usefixtures("two_rules")
async def test_the_rules_are_written(database_url: str, tmp_path: Path) -> None:
    """To standard output, or in place of a file; on request with what has expired."""
    header, rule = "server_url,reason,expires_at,created_at\n", "*.evil.example,spam,,2025-01-01T00:00:00Z\n"
    printed = run(tmp_path, database_url)
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, header + rule, "")
    place = tmp_path / "list"
    place.mkdir()
    target = place / "blacklist.csv"
    target.write_text("the one before")
    written = run(tmp_path, database_url, "--output", str(target), "--expired")
    assert (written.returncode, written.stdout, written.stderr) == (0, "", "")
    expired = "https://once.example,spam,2025-01-01T00:00:00Z,2025-01-01T00:00:00Z\n"
    assert target.read_text() == header + rule + expired
    assert list(place.iterdir()) == [target]


@pytest.mark.parametrize(
    "url", ["sqlite:///no-such-directory/x.db", "postgresql://node:hunter2@127.0.0.1:1/x", "nonsense"]
)
def test_without_a_database_the_file_before_stays(url: str, tmp_path: Path) -> None:
    """One line says why, without a traceback or a password; the status is not 0."""
    target = tmp_path / "blacklist.csv"
    target.write_text("the one before")
    failed = run(tmp_path, url, "--output", str(target))
    assert failed.returncode == 1
    assert failed.stderr.startswith("export_blacklist: ")
    assert failed.stderr.count("\n") == 1
    assert "hunter2" not in failed.stderr
    assert target.read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [target]
