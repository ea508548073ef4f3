"""All outputs together."""

from __future__ import annotations

from dataclasses import fields

import pytest
from pyspark.sql import DataFrame, SparkSession

from federation.analytics import frames
from federation.analytics.compute import compute
from federation.analytics.frames import Outputs
from tests.federation.analytics.rows import (
    NOW,
    WINDOW,
    columns,
    inputs,
)

OUTPUTS = [field.name for field in fields(Outputs)]


@pytest.fixture(scope="module")
def nothing(spark: SparkSession) -> Outputs:
    """What comes of an empty database."""
    return compute(inputs(spark), window=WINDOW, now=NOW)


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_have_their_schemas(nothing: Outputs, name: str) -> None:
    """Whatever is written has the columns and types that are promised."""
    output: DataFrame = getattr(nothing, name)
    assert columns(output.schema) == columns(getattr(frames, name.upper()))


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "network_summary"])
def test_empty_inputs_have_empty_outputs(nothing: Outputs, name: str) -> None:
    """An empty database is no error: it has nothing to tell."""
    assert getattr(nothing, name).count() == 0


def test_a_network_without_anything_has_its_days(nothing: Outputs) -> None:
    """Each day of the window is there, with counts of 0 and no ratios."""
    rows = nothing.network_summary.orderBy("day").collect()
    assert [row["day"] for row in rows] == list(WINDOW.days)
    assert {(row["servers_known"], row["attempts"], row["success_rate"], row["p95_ms"]) for row in rows} == {
        (0, 0, None, None)
    }
    assert rows[0]["errors"] == {}
