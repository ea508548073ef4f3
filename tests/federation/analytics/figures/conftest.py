"""What the figures' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from federation.analytics.frames import Keep
from federation.analytics.session import keeping


@pytest.fixture(scope="module")
def keep(spark: SparkSession) -> Iterator[Keep]:
    """As a run keeps frames: without, Spark would look through long plans again at each step."""
    with keeping(few_servers=True) as kept:
        yield kept
