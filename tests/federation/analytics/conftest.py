"""One Spark for all tests of the analytics: a JVM takes seconds to start, and half a gigabyte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from federation.analytics.sinks import write_outputs
from tests.federation.analytics.story import WINDOW, make_outputs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker of xdist runs them all (`--dist loadgroup`), so that one JVM does."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.xdist_group("spark"))
            item.add_marker(pytest.mark.timeout(300))  # the first one starts the JVM, perhaps on a busy machine
            # py4j leaves the closing of its sockets to the garbage collector.
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """This machine's Spark; do not stop it."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.memory": "1g",
        "spark.log.level": "ERROR",
    }
    session = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def written(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the results of the whole story; not to be written to."""
    out = tmp_path_factory.mktemp("results")
    write_outputs(make_outputs(spark), out, WINDOW)
    return out
