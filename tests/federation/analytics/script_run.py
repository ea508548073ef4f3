"""The script at work in a process of its own, which the tests go on beside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark

from federation.analytics.data.store_urls import StoreUrl
from tests.patience import LONG_PATIENCE_SECONDS

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "registry_analytics.py"

RUN_AND_EXPORT = """
import os, runpy, sys
script, database, *exporting = sys.argv[1:]
sys.path[0] = os.path.dirname(script)
sys.argv = [script, "--database", database, "--out", "out", "--json", "--master", "local[1]"]
runpy.run_path(script, run_name="__main__")
if exporting:
    from federation.cli import main
    main(["analytics", "export", "--database", database, "--json", *exporting])
"""
"""The script, which finds our code from where it lies; then, if it is asked for, in the same JVM an export."""
CLUSTER = ("--master", "local-cluster[1,1,1024]")


class ScriptRun:
    """`RUN_AND_EXPORT` on `database`, in `directory`, with a Spark of its own whose executors keep their logs there.

    With `exports` a cluster of one executor exports to that store.
    """

    def __init__(self, database: str, directory: Path, exports: StoreUrl | None, settings: dict[str, str]) -> None:
        self.database = database
        self.exports = exports
        self.directory = directory
        spark_home, installed = directory / "spark", Path(pyspark.__file__).parent
        spark_home.mkdir(parents=True)
        for name in ("bin", "jars", "python"):
            (spark_home / name).symlink_to(installed / name)
        export = ("--out", exports.text, *CLUSTER) if exports else ()
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYSPARK_PYTHON")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUN_AND_EXPORT, str(SCRIPT), database, *export],
            cwd=directory,
            env={**inherited, **settings, "SPARK_HOME": str(spark_home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str, str]:
        """Its status, stdout and stderr, once it has ended."""
        stdout, stderr = self._process.communicate(timeout=LONG_PATIENCE_SECONDS)
        return self._process.returncode, stdout, stderr

    def kill(self) -> None:
        """It has ended."""
        self._process.kill()
        self._process.communicate()
