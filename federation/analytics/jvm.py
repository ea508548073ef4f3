"""What no public call of PySpark does: all that reaches into the JVM, and what we would have to do without.

- `HadoopFolder`, `has_filesystem`: a commit is a rename that is refused where there is a file, and Spark has no call
  for it. Without, `hdfs://` could be read and written, but not committed to.
- `leaf_of`: a plan made of what is kept does not have in it how that was computed, and takes half the time.
- `remember_classes`: naming a class does not search hundreds of jars each time: a third of the time of planning.
- `size_of`: what Spark expects of a frame, or counted of one that is kept.
- `end_java`: an archive of classes is written when a JVM ends, and PySpark has no call to end one.

The second and the third are for speed alone. With Spark Connect there is no JVM to reach into.
"""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_ENDS_WITHIN: Final = 120
"""How long a JVM may take to write down its classes, in seconds."""

_NAMED_OFTEN: Final = ("PythonUtils", "PythonSQLUtils", "functions", "org.apache.spark.sql.functions")

_RAISED: Final = (Py4JJavaError, PySparkException)
"""Java's exceptions: PySpark has its own for some of them."""
_TAKEN: Final = "org.apache.hadoop.fs.FileAlreadyExistsException"
_ABSENT: Final = "java.io.FileNotFoundException"


def has_filesystem(spark: SparkSession, scheme: str) -> bool:
    """Tell whether the session's Hadoop has a file system for URLs of this scheme, in a jar or its configuration."""
    try:
        _java_of(spark).org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, spark._jsc.hadoopConfiguration())
    except Py4JJavaError:
        return False
    return True


class HadoopFolder:
    """A folder in a file system of Hadoop's, by the JVM of the Spark that runs. Errors are `OSError`."""

    def __init__(self, root: str) -> None:
        spark = SparkSession.getActiveSession()
        if spark is None:
            raise OSError("no Spark runs yet, which has Hadoop's client")
        self._gateway: Any = spark.sparkContext._gateway
        self._java = _java_of(spark)
        self._hadoop = self._java.org.apache.hadoop.fs
        self._root = root
        configuration, place = spark._jsc.hadoopConfiguration(), self._hadoop.Path(root)
        self._configuration = configuration
        self._files = self._asked(lambda: place.getFileSystem(configuration))
        self._context = self._asked(lambda: self._hadoop.FileContext.getFileContext(place.toUri(), configuration))
        self._folder = str(place.toUri().getPath())

    def list(self, folder: str) -> Iterator[tuple[str, datetime]]:
        try:
            found = self._files.listFiles(self._path(folder), True)
            while found.hasNext():
                file = found.next()
                name = str(file.getPath().toUri().getPath()).removeprefix(f"{self._folder}/")
                yield name, datetime.fromtimestamp(file.getModificationTime() / 1000, UTC)
        except Py4JJavaError as error:
            if _kind(error) != _ABSENT:
                raise _translated(error) from None

    def read(self, name: str) -> bytes:
        def read() -> Any:
            stream = self._files.open(self._path(name))
            try:
                return self._java.org.apache.commons.io.IOUtils.toByteArray(stream)
            finally:
                stream.close()

        return bytes(self._asked(read))

    def put(self, name: str, data: bytes, *, over: bool) -> bool:
        """Write the file beside its place, and rename it: HDFS does that at once, and refuses to where there is one.

        If the connection was lost meanwhile, that one may be ours.
        """
        folder, _, last = name.rpartition("/")
        beside = self._path(f"{folder}/.{last}.{self._java.java.util.UUID.randomUUID()}".lstrip("/"))

        def write() -> None:
            stream = self._files.create(beside, True)
            try:
                stream.write(data)
                stream.hsync()
            finally:
                stream.close()

        self._asked(write)
        try:
            self._context.rename(beside, self._path(name), self._options("OVERWRITE" if over else "NONE"))
        except Py4JJavaError as error:
            self._asked(lambda: self._files.delete(beside, False))
            if _kind(error) == _TAKEN:
                return False
            raise _translated(error) from None
        return True

    def delete(self, name: str) -> None:
        self._asked(lambda: self._files.delete(self._path(name), False))

    def fetch(self, name: str, target: Path) -> None:
        self._copy(self._path(name), self._here(target))

    def send(self, source: Path, name: str) -> None:
        self._copy(self._here(source), self._path(name))

    def _copy(self, source: Any, target: Any) -> None:
        """Copy a file. Hadoop's own calls for that want its file system with checksums here, which ours is not."""

        def copy() -> None:
            there, here = (path.getFileSystem(self._configuration) for path in (target, source))
            self._hadoop.FileUtil.copy(here, source, there, target, False, True, self._configuration)

        self._asked(copy)

    def _here(self, place: Path) -> Any:
        return self._hadoop.Path(f"file://{place.absolute()}")

    def _path(self, name: str) -> Any:
        return self._hadoop.Path(f"{self._root}/{name}".rstrip("/"))

    def _options(self, name: str) -> Any:
        """Return how to rename, as Java takes it."""
        kinds = getattr(self._hadoop, "Options$Rename")
        made = self._gateway.new_array(kinds, 1)
        made[0] = getattr(kinds, name)
        return made

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except _RAISED as error:
            raise _translated(error) from None


def _java_of(spark: SparkSession) -> Any:
    return spark._jvm


def _kind(error: Py4JJavaError) -> str:
    """Return the class of Java's exception, or of what a server's exception stands for."""
    return str(error.java_exception.getClass().getName())


def _translated(error: Py4JJavaError | PySparkException) -> OSError:
    told = error.java_exception.toString() if isinstance(error, Py4JJavaError) else error
    first_line = (str(told).splitlines() or [type(error).__name__])[0]
    return OSError(first_line.rpartition("Exception: ")[2] or first_line)


def size_of(rows: DataFrame) -> int:
    """Return the bytes of `rows`, which files hold, or which were computed and kept; of others, what Spark expects."""
    return int(str(rows._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()))


def leaf_of(kept: DataFrame) -> DataFrame:
    """Return a frame that is kept as one whose plan does not have in it how it was computed."""
    session, leaf = kept.sparkSession, kept._jdf.queryExecution().withCachedData()
    datasets = _java_of(session).org.apache.spark.sql.classic.Dataset
    return DataFrame(datasets.ofRows(session._jsparkSession, leaf), session)


class _Remembered:
    """A class of the JVM that is asked for each of its members only once, not whenever one is named."""

    def __init__(self, asked: object) -> None:
        self._asked = asked

    def __getattr__(self, name: str) -> object:
        member: object = getattr(self._asked, name)
        setattr(self, name, member)
        return member


def remember_classes(session: SparkSession) -> None:
    """Remember the classes that are named often, and their members."""
    for name in _NAMED_OFTEN:
        named = getattr(session._jvm, name)
        if not isinstance(named, _Remembered):
            setattr(session._jvm, name, _Remembered(named))


def end_java() -> None:
    """End the JVM of this process, and wait for it. A session after that starts one of its own."""
    gateway: Any = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = None
    if gateway is None:
        return
    gateway.shutdown()
    gateway.proc.stdin.close()  # it waits for that
    try:
        gateway.proc.wait(timeout=_ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()
