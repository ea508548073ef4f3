"""`federation analytics …` as an operator meets it; what can be told before Spark starts is told then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from federation.cli import main
from tests import warm
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[3]


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that ends with status 2, and nothing on stdout."""
    with pytest.raises(SystemExit) as end:
        main(["analytics", *arguments])
    stdout, stderr = capsys.readouterr()
    assert (end.value.code, stdout) == (2, "")
    assert "Traceback" not in stderr
    return stderr


def test_no_other_command_imports_spark() -> None:
    """Nor does asking for help."""
    check = (
        "import sys, federation, federation.cli as cli\n"
        "try: cli.main(['analytics', 'run', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('pyspark' in sys.modules or 'pyarrow' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        pytest.param(["run", "--input", "none"], "there are no exports in none", id="input"),
        pytest.param(["run", "--until", "2999-01-01"], "is after tomorrow", id="to-come"),
        pytest.param(["export", "--until", "2999-01-01"], "is after tomorrow", id="export-to-come"),
        pytest.param(["run", "--since", "2025-03-02", "--until", "2025-03-02"], "is not after --since", id="order"),
        pytest.param(["export", "--database", "mysql://x/y"], "backend 'mysql' is not supported", id="backend"),
        pytest.param(["export"], "no .env and no database here", id="no-database"),
        pytest.param(["run", "--input", "oss://bucket/in"], "oss:// cannot be served", id="scheme-in"),
        pytest.param(["export", "--out", "hdfs:/folder"], "hdfs:// lacks its host", id="scheme-out"),
        pytest.param(["run", "--input", "s3://key:s3cret@bucket/in"], "do not belong in the URL", id="credentials"),
        pytest.param(["export", "--partitions", "0"], "'0' is no number from 1", id="partitions"),
        pytest.param(["export", "--since", "soon"], "'soon' is no day as 2025-01-31", id="day"),
    ],
)
def test_wrong_arguments_are_told(
    empty_environment: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    """Status 2 and what to do, and nothing is written."""
    assert problem in failure([arguments[0], "--out", "out", *arguments[1:]], capsys)
    assert list(empty_environment.iterdir()) == []


def test_an_unreachable_database_is_told_without_its_password(
    empty_environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line; nothing is written."""
    monkeypatch.setenv("DATABASE_URL", f"postgresql://u:s3cret@127.0.0.1:{free_port()}/app")
    for command in ("run", "export"):
        stderr = failure([command, "--out", "out"], capsys)
        assert "/app cannot be read" in stderr
        assert "s3cret" not in stderr
        assert len(stderr.splitlines()) == 1
    assert list(empty_environment.iterdir()) == []


def test_a_report_of_nothing_starts_no_spark(tmp_path: Path) -> None:
    """That there are no results is told in one line, also where there is no Java."""
    done = subprocess.run(
        [warm.PYTHON, "-m", "federation", "analytics", "report", "--out", str(tmp_path / "out")],
        env=os.environ | {"JAVA_HOME": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "there are no results in" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_java_is_told(sqlite_only: str, tmp_path: Path) -> None:
    """In one line, with what to install; nothing is written. A process that has a session of Spark needs no other."""
    command = ["analytics", "run", "--database", sqlite_only, "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "federation", *command],
        env=os.environ | {"JAVA_HOME": str(tmp_path / "none")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    stderr = done.stderr
    assert "install Java 17 or newer" in stderr
    assert len(stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
