"""A night on a cluster: PostgreSQL is read, results go to S3 and back into the database, where `why` shows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from federation.analytics.data.store_urls import StoreUrl
from federation.analytics.data.stores import Store
from tests.federation.analytics.cluster import SPARK_HOME, Cluster, spark_cluster
from tests.federation.analytics.history import DAY, SERVERS, THREE_DAYS, fill
from tests.federation.analytics.s3_server import CREDENTIALS
from tests.federation.analytics.script_run import SCRIPT
from tests.patience import LONG_PATIENCE_SECONDS

ROOT = SCRIPT.parents[1]


@pytest.mark.full
def test_a_night_on_a_cluster(postgres_only: str, s3_folder: StoreUrl, tmp_path: Path, empty_environment: Path) -> None:
    """Master and workers share no directory and have Python, pyspark and pyarrow: all else travels with the job.

    Both worked, and wrote no file but Spark's logs.
    """
    fill(postgres_only, THREE_DAYS)
    with spark_cluster(tmp_path / "cluster", CREDENTIALS) as cluster:
        night = submit(cluster, postgres_only, s3_folder, tmp_path)
        assert night.returncode == 0, night.stderr
        assert "s3cret" not in night.stdout + night.stderr
        assert {path.parts[-3] for path in cluster.served()} == {"worker-1", "worker-2"}
        left = [path.name for directory in cluster.served() for path in directory.rglob("*.parquet")]
        assert left == []
    summary = json.loads(night.stdout)
    assert json.loads(Store(s3_folder).read("summary.json")) == summary
    assert len(Store(s3_folder).read("report.html")) > 1000
    told = why(postgres_only, SERVERS[1])
    assert "Its score of the 7 days up to 2025-03-03 is " in told, told


def submit(cluster: Cluster, database: str, out: StoreUrl, directory: Path) -> subprocess.CompletedProcess[str]:
    """How the script ended, started as the manual says, with the database's URL where `ps` does not show it."""
    command = [
        *(str(SPARK_HOME / "bin" / "spark-submit"), "--master", cluster.master),
        *("--archives", f"{cluster.archive}#libraries", "--conf", "spark.executorEnv.PYTHONPATH=libraries"),
        *("--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.ui.enabled=false"),
        *("--conf", "spark.sql.shuffle.partitions=4", "--conf", "spark.executor.memory=768m"),
        *(str(SCRIPT), "--out", out.text, "--since", f"{DAY}", "--until", f"{DAY.replace(day=4)}", "--json"),
    ]
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        **CREDENTIALS,
        "DATABASE_URL": database,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYSPARK_PYTHON": str(cluster.python),
        "PYTHONPATH": str(cluster.libraries),
    }
    return subprocess.run(
        command, cwd=directory, env=variables, capture_output=True, text=True, timeout=LONG_PATIENCE_SECONDS
    )


def why(database: str, url: str) -> str:
    """What the command says of a server; it ends with 1 where that one is down."""
    done = subprocess.run(
        [sys.executable, "-m", "federation", "why", url],
        env={**os.environ, "DATABASE_URL": database, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return " ".join(done.stdout.split())
