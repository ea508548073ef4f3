"""`federation analytics …` as an operator meets it; what can be told before Spark starts is told then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from federation.cli import main
from tests.federation.analytics.history import attempts, fill
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
        pytest.param(["run", "--since", "2025-03-02", "--until", "2025-03-02"], "is not after --since", id="order"),
        pytest.param(["export", "--jdbc", "none.jar"], "there is no file none.jar", id="jar"),
        pytest.param(["export", "--database", "mysql://x/y"], "backend 'mysql' is not supported", id="backend"),
        pytest.param(["export"], "there is no database federation.sqlite3", id="no-database"),
        pytest.param(["export", "--since", "soon"], "'soon' is no day as 2025-01-31", id="day"),
    ],
)
def test_wrong_arguments_are_told(
    empty_environment: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    """Status 2 and what to do, and nothing is written."""
    assert problem in failure([*arguments, "--out", "out"], capsys)
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


def test_a_missing_java_is_told(
    sqlite_only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with what to install; nothing is written."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    stderr = failure(["export", "--database", sqlite_only, "--out", str(tmp_path / "out")], capsys)
    assert "install Java 17 or newer" in stderr
    assert len(stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


RUN_AND_EXPORT = """
import os, runpy, sys
script, database, master = sys.argv[1:]
sys.path[0] = os.path.dirname(script)
sys.argv = [script, "--database", database, "--out", "out", "--json", "--master", "local[1]"]
runpy.run_path(script, run_name="__main__")
from federation.cli import main
main(["analytics", "export", "--database", database, "--out", "exports", "--json", "--master", master])
"""
"""The script, which finds our code from where it lies, and then, in the same JVM, an export on a cluster."""


def test_the_script_and_an_export_on_a_cluster(
    spark: SparkSession, sqlite_only: str, interpreted: dict[str, str], tmp_path: Path
) -> None:
    """In a process and a directory of its own: JSON on stdout, a report, and nothing on stderr but Java's greeting.

    An executor, a process in another directory, exports what one machine does: it is handed the code that reads.
    """
    fill(sqlite_only, attempts(20, 3))
    # Executors keep their logs in Spark's own directory: this test's is a copy of links.
    spark_home, installed = tmp_path / "spark", Path(pyspark.__file__).parent
    spark_home.mkdir()
    for name in ("bin", "jars", "python"):
        (spark_home / name).symlink_to(installed / name)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYSPARK_PYTHON")}
    script, master = ROOT / "scripts" / "registry_analytics.py", "local-cluster[1,1,1024]"
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_EXPORT, str(script), sqlite_only, master],
        cwd=tmp_path,
        env={**environment, **interpreted, "SPARK_HOME": str(spark_home)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "incubator modules" not in line] == []
    summary, end = json.JSONDecoder().raw_decode(done.stdout)
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["as_of"], summary["totals"]["attempts"]) == ("2025-03-03", 60)
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000
    days = [f"2025-03-0{day}" for day in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "out" / "server_daily").iterdir()) == [f"day={day}" for day in days]
    assert json.loads(done.stdout[end:])["attempts"] == dict.fromkeys(days, 20)
    assert [path.parent.name for path in (spark_home / "work").glob("app-*/*/stderr")] == ["0"]
