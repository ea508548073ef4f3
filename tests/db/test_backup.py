"""Backups of SQLite databases: of one moment, whole, and nobody else's to read."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from db.backup import BackupError, back_up
from tests import warm
from tests.federation.test_run import ROOT
from tests.patience import PATIENCE_SECONDS

BACKUPS = 5

# One transaction after the other, each of two rows that have no meaning without each other.
WRITER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
connection.execute("PRAGMA synchronous = OFF")
number = 0
while True:
    number += 1
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("INSERT INTO pairs VALUES (?, 'left', randomblob(2000))", (number,))
    connection.execute("INSERT INTO pairs VALUES (?, 'right', randomblob(2000))", (number,))
    connection.execute("COMMIT")
    print(number, flush=True)
"""

# With no room for more than so many bytes in any file.
ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from db.backup import BackupError, back_up
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    back_up(Path(sys.argv[1]), Path(sys.argv[2]))
except BackupError as error:
    print(error)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A database in WAL mode, of more than a hundred pages."""
    path = tmp_path / "source" / "node.sqlite3"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE pairs (number INTEGER, side TEXT, filling BLOB)")
        connection.executemany("INSERT INTO pairs VALUES (0, ?, randomblob(2000))", [("left",), ("right",)] * 200)
        connection.commit()
    return path


@pytest.fixture
def destination(tmp_path: Path) -> Path:
    """In a directory of its own, which is empty."""
    directory = tmp_path / "backups"
    directory.mkdir()
    return directory / "backup.sqlite3"


@pytest.fixture
def writer(source: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes without a pause, and has begun to."""
    process = subprocess.Popen([warm.PYTHON, "-c", WRITER, str(source)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.communicate()


def unpaired(file: Path) -> tuple[int, int]:
    """How many pairs lack a side, and how many there are."""
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        whole = "SELECT number FROM pairs WHERE number > 0 GROUP BY number HAVING count(DISTINCT side) "
        (torn,) = connection.execute(f"SELECT count(*) FROM ({whole} <> 2)").fetchone()
        (pairs,) = connection.execute(f"SELECT count(*) FROM ({whole} = 2)").fetchone()
        return torn, pairs


def test_a_backup_is_of_one_moment(source: Path, destination: Path, writer: subprocess.Popen[str]) -> None:
    """However much is written meanwhile: no transaction is in it by halves, and none that was committed is missing."""
    assert writer.stdout is not None
    written = 1
    for number in range(BACKUPS):
        file = destination.with_name(f"backup-{number}")
        size = back_up(source, file)
        torn, pairs = unpaired(file)
        assert (torn, size) == (0, file.stat().st_size)
        assert pairs >= written
        written = int(writer.stdout.readline())
    assert writer.poll() is None, "the writer was made to fail"


def test_a_backup_stays_in_wal_mode(source: Path, destination: Path) -> None:
    """So a node that is started on it works as it did."""
    back_up(source, destination)
    with closing(sqlite3.connect(destination)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_backup_is_its_owners_alone_and_nothing_lies_beside_it(source: Path, destination: Path) -> None:
    """Whatever the umask of the process."""
    before = os.umask(0)
    try:
        back_up(source, destination)
    finally:
        os.umask(before)
    assert destination.stat().st_mode & 0o777 == 0o600
    assert list(destination.parent.iterdir()) == [destination]
    assert list(source.parent.iterdir()) == [source]


@pytest.mark.parametrize("kind", ["file", "link to nowhere"])
def test_a_backup_replaces_nothing(source: Path, destination: Path, kind: str) -> None:
    """Neither yesterday's nor what a link would lead to."""
    if kind == "file":
        destination.write_text("yesterday's")
    else:
        destination.symlink_to(destination.with_name("elsewhere"))
    with pytest.raises(BackupError, match="exists and stays as it is"):
        back_up(source, destination)
    assert list(destination.parent.iterdir()) == [destination]
    assert kind != "file" or destination.read_text() == "yesterday's"


def test_a_damaged_database_has_no_backup(source: Path, destination: Path) -> None:
    """The check is of what was written: pages that were overwritten are noticed, and nothing is left."""
    with open(source, "r+b") as file:
        file.seek(20 * 4096)
        file.write(b"\xff" * 4096)
    with pytest.raises(BackupError):
        back_up(source, destination)
    assert list(destination.parent.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"no database, but a text of more than sixteen bytes" * 100])
def test_what_is_no_database_has_no_backup(tmp_path: Path, destination: Path, content: bytes | None) -> None:
    """Nor is a database made where there is none."""
    source = tmp_path / "else"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(BackupError):
        back_up(source, destination)
    assert source.exists() == (content is not None)
    assert list(destination.parent.iterdir()) == []


def test_a_full_disk_leaves_nothing(source: Path, destination: Path) -> None:
    """It is told by a code, and what had been written is gone."""
    done = subprocess.run(
        [warm.PYTHON, "-c", ON_A_FULL_DISK, str(source), str(destination)],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "could not be copied" in done.stdout
    assert "(SQLITE_" in done.stdout
    assert list(destination.parent.iterdir()) == []


def test_a_backup_that_is_killed_leaves_no_file_of_its_name(source: Path, destination: Path) -> None:
    """At whatever moment."""
    program = "import sys; from pathlib import Path; from db.backup import back_up; print(flush=True)\n"
    program += "back_up(Path(sys.argv[1]), Path(sys.argv[2]))"
    with open(source.parent / "log", "wb") as log:
        process = subprocess.Popen(
            [warm.PYTHON, "-c", program, str(source), str(destination)],
            env={"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not destination.exists() or unpaired(destination) == (0, 0)
