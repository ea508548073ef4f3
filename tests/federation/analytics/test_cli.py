"""`federation analytics …` as an operator meets it; what can be told before Spark starts is told then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from federation.analytics.generate import generate
from federation.analytics.made_servers import History
from federation.cli import main
from tests.federation.analytics.history import attempts, fill
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[3]
UNTIL = date(2025, 3, 6)


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


def test_a_cluster_exports_what_one_machine_does(
    java: Path, sqlite_only: str, interpreted: dict[str, str], tmp_path: Path
) -> None:
    """Two executors, processes of their own, read the tables: they are handed the code that does."""
    fill(sqlite_only, attempts(20, 3))
    # Executors keep their logs in Spark's own directory: this test's is a copy of links.
    spark_home, installed = tmp_path / "spark", Path(pyspark.__file__).parent
    spark_home.mkdir()
    for name in ("bin", "jars", "python"):
        (spark_home / name).symlink_to(installed / name)
    out, master = tmp_path / "exports", "local-cluster[2,1,1024]"
    arguments = ["analytics", "export", "--database", sqlite_only, "--out", str(out), "--master", master, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "federation", *arguments],
        cwd=tmp_path,
        env={**os.environ, **interpreted, "PYTHONPATH": str(ROOT), "SPARK_HOME": str(spark_home)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["attempts"] == {f"2025-03-0{day}": 20 for day in (1, 2, 3)}
    executors = [path.parent.name for path in (spark_home / "work").glob("app-*/*/stderr")]
    assert sorted(executors) == ["0", "1"]


def test_the_script_makes_results_of_exports(spark: SparkSession, interpreted: dict[str, str], tmp_path: Path) -> None:
    """In a process and a directory of its own: JSON on stdout, a report, and nothing on stderr but Java's greeting."""
    exports, out = tmp_path / "exports", tmp_path / "out"
    generate(spark, History(attempts=3000, servers=40, days=5, until=UNTIL), exports)
    script = [sys.executable, str(ROOT / "scripts" / "registry_analytics.py")]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYSPARK_PYTHON")}
    done = subprocess.run(
        [*script, "--input", str(exports), "--out", str(out), "--json", "--master", "local[1]"],
        cwd=tmp_path,
        env={**environment, **interpreted},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "incubator modules" not in line] == []
    summary = json.loads(done.stdout)
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["as_of"] == "2025-03-05"
    assert 2900 < summary["totals"]["attempts"] <= 3000
    assert (out / "report.html").stat().st_size > 1000
    assert sorted(path.name for path in (out / "server_daily").iterdir()) == [
        f"day=2025-03-0{day}" for day in range(1, 6)
    ]
