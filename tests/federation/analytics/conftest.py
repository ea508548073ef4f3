"""One Spark for all tests of the analytics: a JVM takes seconds to start, and half a gigabyte."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from federation.analytics.data.sinks import write_outputs
from federation.analytics.data.store_urls import StoreUrl, parse_store_url
from federation.analytics.errors import JavaNotFound
from federation.analytics.session import jvm_options, open_session
from tests.federation.analytics.azure_server import ACCOUNT, AZURE_CREDENTIALS, AzureServer, azure_server
from tests.federation.analytics.gcs_server import GcsServer, gcs_server
from tests.federation.analytics.history import THREE_DAYS, fill
from tests.federation.analytics.s3_server import CARELESS, CREDENTIALS, S3Server, start_s3
from tests.federation.analytics.script_run import ScriptRun
from tests.federation.analytics.story import WINDOW, make_outputs

HERE = Path(__file__).parent

INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""For a few rows, compiling a query takes longer than running it."""
SMALL_PAGES = {"spark.buffer.pageSize": "1m"}
"""Whatever sorts, counts or looks up takes a page of memory, which Java fills with zeros: of 32 MiB by default, for a
few rows. Four fifths of what the JVM held were such pages."""
AS_TESTED = INTERPRETED | SMALL_PAGES
UNVERIFIED = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
"""To check each class that is loaded is a twentieth of the JVM's time. These are as Spark's developers built them."""

MEMORY = "2g"
"""A run needs a third of that, and the tests of one JVM leave so much behind that it would collect it all, again and
again: of a GiB that is more than a quarter of its time."""
ONE_COLLECTOR = "-XX:ParallelGCThreads=1"
"""Beside the other tests a second one would wait for a core, and the first one, spinning, for it."""

FORGETFUL = dict.fromkeys(
    ("spark.ui.retainedJobs", "spark.ui.retainedStages", "spark.ui.retainedTasks", "spark.sql.ui.retainedExecutions"),
    "10",
)
"""Spark keeps a thousand queries for a page that nobody has."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They have the time that a JVM takes to start; one process runs them all (`tests/conftest.py`)."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(900))  # the first one starts the JVM, perhaps on a busy machine
            # py4j leaves the closing of its sockets to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """This machine's Spark; do not stop it. Without Java the test is not run, and says so."""
    few_tasks = {"spark.sql.shuffle.partitions": "2", "spark.sql.adaptive.enabled": "false", **FORGETFUL}
    java = {
        "spark.driver.memory": MEMORY,
        "spark.driver.extraJavaOptions": f"{jvm_options(None, 0)} {UNVERIFIED} {ONE_COLLECTOR}",
    }
    mounted = {"spark.hadoop.fs.viewfs.mounttable.tests.link./disk": tmp_path_factory.mktemp("viewfs").as_uri()}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**CREDENTIALS, **AZURE_CREDENTIALS}.items():  # its workers inherit them
            patched.setenv(name, value)
        try:
            session = open_session("local[2]", name="tests", settings={**AS_TESTED, **few_tasks, **java, **mounted})
        except JavaNotFound as error:
            pytest.skip(f"NOT RUN: {error}")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def script(
    tmp_path_factory: pytest.TempPathFactory, migrated_file: Path, s3: S3Server, request: pytest.FixtureRequest
) -> Iterator[ScriptRun]:
    """The script at work on three days in an SQLite file; its Spark, too, interprets its queries."""
    directory = tmp_path_factory.mktemp("script")
    database = f"sqlite:///{shutil.copy(migrated_file, directory / 'node.sqlite3')}"
    fill(database, THREE_DAYS)
    (directory / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in AS_TESTED.items()))
    exports = parse_store_url(f"s3://analytics/script{s3.options}") if request.config.getoption("--full") else None
    run = ScriptRun(database, directory, exports, {"SPARK_CONF_DIR": str(directory), **CREDENTIALS})
    yield run
    run.kill()


@pytest.fixture(scope="session", autouse=True)
def _script_ahead(request: pytest.FixtureRequest, _no_class_archive: None) -> None:
    """It takes long, and so begins first where a test asks for it."""
    if any("script" in item.fixturenames for item in request.session.items if isinstance(item, pytest.Function)):
        request.getfixturevalue("script")


@pytest.fixture
def sqlite_only(database_file: Path) -> str:
    """URL of a migrated, otherwise empty SQLite database."""
    return f"sqlite:///{database_file}"


@pytest.fixture
def postgres_only(migrated_postgres_url: str) -> str:
    """URL of a migrated, otherwise empty PostgreSQL database."""
    return migrated_postgres_url


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server with two buckets, `analytics` and `careless`."""
    server = start_s3()
    for bucket in ("analytics", CARELESS):
        server.bucket(bucket)
    yield server
    server.stop()


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has those that Spark's workers have."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_folder(s3: S3Server, s3_credentials: None) -> StoreUrl:
    """An empty folder on that server."""
    return parse_store_url(f"s3://analytics/{uuid.uuid4().hex}{s3.options}")


@pytest.fixture(scope="session")
def gcs() -> Iterator[GcsServer]:
    """A server of Google's kind with a bucket `analytics`."""
    with gcs_server() as server:
        server.make_bucket("analytics")
        yield server


@pytest.fixture
def gs_folder(gcs: GcsServer) -> StoreUrl:
    """An empty folder on that server."""
    return parse_store_url(f"gs://analytics/{uuid.uuid4().hex}{gcs.options}")


@pytest.fixture(scope="session")
def azure() -> Iterator[AzureServer]:
    """A server of Azure's kind with a container `analytics`."""
    with azure_server() as server:
        server.make_container("analytics")
        yield server


@pytest.fixture
def abfs_folder(azure: AzureServer, monkeypatch: pytest.MonkeyPatch) -> StoreUrl:
    """An empty folder on that server."""
    for name, value in AZURE_CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    account = f"analytics@{ACCOUNT}.dfs.core.windows.net"
    return parse_store_url(f"abfs://{account}/{uuid.uuid4().hex}{azure.options}")


@pytest.fixture
def viewfs_folder(spark: SparkSession) -> StoreUrl:
    """An empty folder in a file system of Hadoop's, which keeps its files on this disk."""
    return parse_store_url(f"viewfs://tests/disk/{uuid.uuid4().hex}")


@pytest.fixture(params=["file", "s3", "gs", "abfs", "viewfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> StoreUrl:
    """An empty folder in a store of each kind."""
    if request.param == "file":
        return parse_store_url(f"file://{tmp_path}/store")
    found: StoreUrl = request.getfixturevalue(f"{request.param}_folder")
    return found


@pytest.fixture(scope="session")
def written(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the results of the whole story; not to be written to."""
    out = tmp_path_factory.mktemp("results")
    write_outputs(make_outputs(spark), out, WINDOW)
    return out
