"""Hadoop's client as pyarrow loads it, with a stand-in for HDFS itself (`hadoop/libhdfs.c`)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from federation.analytics.session import find_java

SOURCE = Path(__file__).parent / "hadoop" / "libhdfs.c"


def hadoop_client(directory: Path) -> dict[str, str]:
    """Compile the stand-in. Return the variables with which pyarrow finds it, and it its files: in `directory`.

    None without a compiler: Spark's workers, which inherit them, do without.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    (directory / "files").mkdir()
    target = directory / "libhdfs.so"
    subprocess.run([compiler, "-O1", "-w", "-shared", "-fPIC", "-o", str(target), str(SOURCE)], check=True)
    return {
        "JAVA_HOME": str(find_java().resolve().parents[1]),  # pyarrow loads libjvm first; nothing starts it here
        "ARROW_LIBHDFS_DIR": str(directory),
        "STAND_IN_HDFS_ROOT": str(directory / "files"),
    }
