"""A standalone Spark cluster: a master and two workers, processes that share no directory and have a bare Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark

from tests.patience import PATIENCE_SECONDS

SPARK_HOME = Path(pyspark.__file__).parent
SITE = SPARK_HOME.parent

ON_EACH_MACHINE = ("pyspark", "py4j", "pyarrow", "pyarrow.libs")
TRAVELLING = (
    "sqlalchemy",
    "psycopg",
    "psycopg_binary",
    "psycopg_binary.libs",
    "greenlet",
    "typing_extensions.py",
    "obstore",
)
"""What `pip install --target` puts into a directory for `sqlalchemy`, `psycopg[binary]` and `obstore`."""


@dataclass(frozen=True)
class Cluster:
    """It is running. `python` is what its executors run, `archive` what travels to them with a job."""

    master: str
    python: Path
    libraries: Path
    archive: Path
    workers: tuple[Path, ...]

    def served(self) -> list[Path]:
        """Where executors ran: a directory of each, in that of its worker."""
        return [path.parent for worker in self.workers for path in sorted(worker.glob("app-*/*/stderr"))]


@contextmanager
def spark_cluster(directory: Path, environment: Mapping[str, str]) -> Iterator[Cluster]:
    """A cluster whose processes keep what they write below `directory`, and have no more variables than these."""
    bare, libraries = directory / "bare", directory / "libraries"
    for place, names in ((bare, ON_EACH_MACHINE), (libraries, TRAVELLING)):
        place.mkdir(parents=True)
        for name in names:
            for found in (*SITE.glob(name), *SITE.glob(f"{name}-[0-9]*.dist-info")):  # psycopg's has its version
                (place / found.name).symlink_to(found)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{bare}" exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    archive = directory / "libraries.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1, dereference=True) as packed:
        packed.add(libraries, arcname=".")

    variables = {
        "PATH": os.environ["PATH"],
        **{name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ},
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_DAEMON_MEMORY": "256m",
        **environment,
    }
    workers = (directory / "worker-1", directory / "worker-2")
    running: list[subprocess.Popen[bytes]] = []
    try:
        running.append(_start("master.Master", directory / "master", variables, "--port 0"))
        _await(directory / "master" / "log", "I have been elected leader", running[-1])
        [master] = set(re.findall(r"spark://[\d.:]+", (directory / "master" / "log").read_text()))
        for worker in workers:
            told = f"--cores 1 --memory 1g --work-dir {worker} {master}"
            running.append(_start("worker.Worker", worker, variables, told))
        for worker, process in zip(workers, running[1:], strict=True):
            _await(worker / "log", "Successfully registered with master", process)
        yield Cluster(master, python, libraries, archive, workers)
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(PATIENCE_SECONDS)


def _start(name: str, directory: Path, variables: Mapping[str, str], told: str) -> subprocess.Popen[bytes]:
    directory.mkdir()
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--webui-port", "0", *told.split()], cwd=directory, env=dict(variables), stdout=log, stderr=log
        )


def _await(log: Path, words: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while words not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
