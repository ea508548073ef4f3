"""The archive of Spark's classes: where it may lie, and that Java makes and takes it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from federation.analytics import class_archive
from federation.analytics.class_archive import find_archive, java_options, keep
from tests.patience import LONG_PATIENCE_SECONDS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "federation"


def put_java(home: Path, build: str) -> Path:
    """The files of a Java that its archives are known by."""
    (home / "bin").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / "lib" / "modules").write_text(build)
    (home / "bin" / "java").touch()
    return home / "bin" / "java"


def test_each_java_has_its_archive_where_only_we_write(cache: Path, tmp_path: Path) -> None:
    """One that is replaced by another build, as an update of the system does, is another."""
    java = put_java(tmp_path / "java", "17.0.15")
    first = find_archive(java)
    assert first is not None
    assert (first.parent, cache.stat().st_mode & 0o777) == (cache, 0o700)
    assert find_archive(java) == first
    (java.parent.parent / "lib" / "modules").write_text("17.0.15.1")
    assert find_archive(java) not in (None, first)


def test_no_archive_lies_where_others_can_write(cache: Path, tmp_path: Path) -> None:
    """It is code that we run."""
    java = put_java(tmp_path / "java", "17")
    assert find_archive(java) is not None
    cache.chmod(0o770)
    assert find_archive(java) is None


def test_without_a_place_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service whose home directory is closed starts as slowly as ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert find_archive(put_java(tmp_path / "java", "17")) is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "with space"))
    assert find_archive(tmp_path / "java" / "bin" / "java") is None


def test_what_java_wrote_is_put_in_place_whole(cache: Path, tmp_path: Path) -> None:
    """It is written beside it; archives that no run took for a month go."""
    archive = find_archive(put_java(tmp_path / "java", "17"))
    assert archive is not None
    option, _, _ = java_options(archive).partition(" ")
    name, _, fresh = option.partition("=")
    assert name == "-XX:ArchiveClassesAtExit"
    keep(archive)  # Java could not write it down
    assert not archive.exists()
    old, recent = cache / "spark-old.jsa", cache / "spark-recent.jsa"
    Path(fresh).write_text("classes")
    for other, age in ((old, class_archive.KEPT + 60), (recent, 60)):
        other.touch()
        os.utime(other, (time.time() - age,) * 2)
    keep(archive)
    assert sorted(cache.iterdir()) == sorted([archive, recent])
    assert java_options(archive).startswith(f"-XX:SharedArchiveFile={archive} ")


OPEN = """
from federation.analytics.session import session
for number in range(2):
    with session("local[1]") as spark:
        assert spark.range(10).count() == 10
        arguments = spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
        print([option.partition("=")[0] for option in arguments if "Archive" in option])
"""


@pytest.mark.full
def test_the_first_session_leaves_an_archive_that_the_next_takes(cache: Path) -> None:
    """In one process or another, and Java says nothing about it."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN], capture_output=True, text=True, check=True, timeout=LONG_PATIENCE_SECONDS
    )
    assert done.stdout.splitlines() == ["['-XX:ArchiveClassesAtExit']", "['-XX:SharedArchiveFile']"]
    assert "cds" not in done.stderr
    [archive] = cache.iterdir()
    assert archive.stat().st_size > 10 * 2**20
