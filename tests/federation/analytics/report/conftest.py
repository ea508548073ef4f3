"""What was found in the story that the tests tell."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from federation.analytics.data.computed import computed_days
from federation.analytics.report.find import find
from federation.analytics.report.findings import Findings
from tests.federation.analytics.story import AS_OF


@pytest.fixture(scope="session")
def findings(spark: SparkSession, written: Path) -> Findings:
    return find(spark, written, AS_OF, computed_days(written))
