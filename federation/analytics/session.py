"""The Spark session in which every command runs, and the Java under it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyspark
from pyspark import StorageLevel
from pyspark.sql import SparkSession

from federation.analytics.class_archive import find_archive, java_options, keep
from federation.analytics.errors import AnalyticsError, JavaNotFound
from federation.analytics.jvm import end_java, leaf_of, remember_classes, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame

    from federation.analytics.frames import Keep

OLDEST_JAVA: Final = 17

_INSTALL: Final = (
    f"install Java {OLDEST_JAVA} or newer (on Debian and Ubuntu: apt install openjdk-17-jre-headless),"
    " or point JAVA_HOME at one"
)
_BYTES_PER_PART: Final = 16 * 2**20
_FEWEST_PARTS: Final = 2
_MOST_PARTS: Final = 1_000

_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")

# The optimising compiler makes ten million attempts a third quicker, if it is left to what runs ten times as often as
# by default, for it takes long itself; a million attempts would be slower by half, and the process is 70 MiB larger.
_QUICK_COMPILER: Final = "-XX:TieredStopAtLevel=1"
_BOTH_COMPILERS: Final = (
    "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000"
    " -XX:Tier4BackEdgeThreshold=400000"
)
MUCH: Final = 128 * 2**20
"""So many bytes of attempts are worth the optimising compiler."""

# Java keeps 48 MiB of compiled code by default if it does not optimise, which is too little for Spark. The collector is
# the one with the least overhead on few cores; by default, it would collect whenever some more classes are there.
_JVM_OPTIONS: Final = (
    "-XX:ReservedCodeCacheSize=240m -XX:+UseParallelGC -XX:MetaspaceSize=220m"
    f" -Dlog4j2.configurationFile={_LOGGING.as_uri()} -Duser.timezone=UTC"
)

# The JVM of a driver is started with these options: they cannot be set later.
_LOCAL: Final = {
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "8",
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # There is no page that would show the plans, but Spark writes them out for it, in full, whenever one changes.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.debug.maxToStringFields": "1",
}
_EVERYWHERE: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Otherwise errors would name our line that made a column, at the cost of a third of the time that planning takes.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.dataFrameQueryContext.enabled": "false",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Else the first `lower` learns for a second how letters of all scripts are capitalised. Ours are of host names.
    "spark.sql.icu.caseMappings.enabled": "false",
    # The other implementation writes a checksum beside every file, which we would leave behind, and runs chmod for
    # both.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    # So a task that writes a few days side by side need not sort its rows by day.
    "spark.sql.maxConcurrentOutputFileWriters": "4",
    # Each of those files buffers that much: a GiB of memory could not hold the default of 128 MiB for all of them.
    "spark.hadoop.parquet.block.size": str(32 * 2**20),
    # What a task counts of this much, it can hold; of four times as much it would have to sort and write to disk.
    "spark.sql.files.maxPartitionBytes": "32m",
    # What is aggregated into lists comes sorted, and is only sorted once more by the other way.
    "spark.sql.execution.useObjectHashAggregateExec": "false",
    # Files are named one by one; by default, Spark would start a job to look at more than 32 of them.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
}

# For a few rows, compiling a query takes longer than running it; so does planning it anew after each of its parts. They
# are joined in one part, where they are: a shuffle would be a stage of its own, and what is broadcast a job.
_FEW_ROWS: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}


def find_java() -> Path:
    """Return the `java` that Spark will start: that of JAVA_HOME if it is set, otherwise the first on PATH.

    Raises:
        JavaNotFound: there is none, it does not run, or it is too old.
    """
    home, found = os.environ.get("JAVA_HOME"), _named_java()
    if found is None:
        raise JavaNotFound(f"Spark needs Java, and there is no `java` on PATH: {_INSTALL}")
    try:
        told = subprocess.run([found, "-version"], capture_output=True, text=True, timeout=30, check=True)  # noqa: S603 - the operator's own Java
    except (OSError, subprocess.SubprocessError):
        place = f"JAVA_HOME={home} holds no Java that runs" if home else f"{found} does not run"
        raise JavaNotFound(f"Spark needs Java, and {place}: {_INSTALL}") from None
    version = _VERSION.search(told.stderr + told.stdout)
    if version is None or int(version[1]) < OLDEST_JAVA:
        named = version[1] if version else "of an unknown version"
        raise JavaNotFound(f"Spark needs Java {OLDEST_JAVA} or newer, and {found} is Java {named}: {_INSTALL}")
    return Path(found)


def _named_java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin", "java")) if home else shutil.which("java")


@contextmanager
def session(
    master: str | None = None,
    *,
    name: str = "federation-analytics",
    settings: Mapping[str, str] | None = None,
    work: int = 0,
) -> Iterator[SparkSession]:
    """Open a session as `open_session` does, and stop it.

    The first one on this machine leaves an archive of Spark's classes, with which later ones start in half the time. It
    takes Java a few seconds more to end.
    """
    java = None if "PYSPARK_GATEWAY_PORT" in os.environ else _named_java()
    archive = find_archive(Path(java)) if java else None
    is_new = archive is not None and not archive.exists()
    spark = open_session(master, name=name, settings=settings, archive=archive, work=work)
    try:
        yield spark
    finally:
        spark.stop()
        if archive is not None and is_new:
            end_java()
            keep(archive)


def open_session(
    master: str | None = None,
    *,
    name: str = "federation-analytics",
    settings: Mapping[str, str] | None = None,
    archive: Path | None = None,
    work: int = 0,
) -> SparkSession:
    """Open a session in UTC that keeps Spark's own log to warnings. Stop it when done.

    `archive` is where the JVM's classes are, or are to be written down. `work` is how many bytes of attempts there are
    to be read: a JVM that is started for many compiles with more care. `master` None means what spark-submit was told,
    otherwise this machine with all its cores. On this machine the driver has 1 GiB, unless `settings` says otherwise
    ("spark.driver.memory"): a running JVM is not resized.

    Raises:
        JavaNotFound: see `find_java`; not checked if spark-submit has started the JVM already.
        AnalyticsError: that JVM has a Spark of another version.
    """
    builder = SparkSession.builder.appName(name)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        find_java()
        if master is None:
            master = "local[*]"
        if master.startswith("local"):
            # By default, Spark would start its Python workers with whatever `python3` is on PATH.
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            builder = builder.config(map={**_LOCAL, "spark.driver.extraJavaOptions": jvm_options(archive, work)})
    if master is not None:
        builder = builder.master(master)
    progress = "true" if sys.stderr.isatty() else "false"
    builder = builder.config(map={**_EVERYWHERE, "spark.ui.showConsoleProgress": progress, **(settings or {})})
    session = builder.getOrCreate()
    require_same_spark(session.version)
    session.sparkContext.setLogLevel("WARN")
    remember_classes(session)
    return session


def require_same_spark(running: str) -> None:
    """Check that the Spark that runs is one that this PySpark knows.

    Raises:
        AnalyticsError: they differ by more than a patch: what one says, the other may not understand.
    """
    ours = str(pyspark.__version__)
    if running.split(".")[:2] != ours.split(".")[:2]:
        raise AnalyticsError(
            f"the Spark that runs is {running}, and PySpark here is {ours}: start the command with a spark-submit of"
            f" {'.'.join(ours.split('.')[:2])}, on a cluster of that version"
        )


def jvm_options(archive: Path | None, work: int) -> str:
    """Return the options of a JVM that is to read so many bytes of attempts."""
    compiler = _BOTH_COMPILERS if work >= MUCH else _QUICK_COMPILER
    return " ".join([compiler, _JVM_OPTIONS, *([] if archive is None else [java_options(archive)])])


def divide_work(rows: DataFrame, size: int | None = None) -> None:
    """Let Spark shuffle in as many parts as the size of `rows`, which files hold, asks for.

    `size` is in bytes, for rows of which Spark does not know it, those in a store: it would expect as many as can be.
    Each task that counts one of them has them in memory; of few rows, many tasks would be all the work. A session on
    a cluster keeps what it was told.
    """
    session = rows.sparkSession
    if str(session.sparkContext.master).startswith("local["):
        expected = size_of(rows) if size is None else size
        parts = min(max(expected // _BYTES_PER_PART, _FEWEST_PARTS), _MOST_PARTS)
        session.conf.set("spark.sql.shuffle.partitions", str(parts))


@contextmanager
def few_rows(session: SparkSession, *, when: bool = True) -> Iterator[None]:
    """Have Spark plan queries at once, interpret them, and keep them in one part, `when` they are of few rows."""
    before = {name: session.conf.get(name) for name in _FEW_ROWS} if when else {}
    try:
        for name in before:
            session.conf.set(name, _FEW_ROWS[name])
        yield
    finally:
        for name, earlier in before.items():
            if earlier is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, earlier)


@contextmanager
def keeping(*, few_servers: bool = False) -> Iterator[Keep]:
    """Yield a `Keep` that lasts until the block ends; `few_servers` tells that frames by server are small."""
    kept: list[DataFrame] = []

    def keep(frame: DataFrame, *, by_server: bool = False) -> DataFrame:
        session = frame.sparkSession
        with few_rows(session, when=by_server and few_servers):
            kept.append(frame.persist(StorageLevel.MEMORY_AND_DISK))
        return leaf_of(frame)

    try:
        yield keep
    finally:
        for frame in kept:
            frame.unpersist()
