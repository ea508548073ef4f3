"""The Grafana dashboard shows every metric there is, and asks for none that is not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.federation.deploy.conftest import declared
from tests.federation.deploy.places import DASHBOARD, approve, tool
from tests.federation.deploy.promql import Exposed, strangers

SELECTOR = re.compile(r"\b(?:federation|process)_\w+(\{[^}]*\})?")


def dashboard() -> dict[str, Any]:  # Any: JSON is what it is
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    """What every panel asks Prometheus."""
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])


async def test_the_dashboard_asks_for_what_is_exposed(exposed: Exposed) -> None:
    """Series, labels and values that a real process shows."""
    for expression in expressions():
        assert [*strangers(expression, exposed)] == [], expression
    (variable,) = [each for each in dashboard()["templating"]["list"] if each["name"] == "job"]
    assert [*strangers(variable["query"]["query"], exposed)] == []


def test_the_dashboard_shows_every_metric_of_ours() -> None:
    """Of a histogram the buckets."""
    asked = " ".join(expressions())
    wanted = {name for name in declared() if not name.endswith(("_seconds_count", "_seconds_sum"))}
    assert {name for name in wanted if not re.search(rf"\b{name}\b", asked)} == set()


def test_every_series_is_of_the_chosen_node() -> None:
    """Two nodes in one Prometheus are never shown as one."""
    for expression in expressions():
        for found in SELECTOR.finditer(expression):
            assert 'job="$job"' in (found[1] or ""), expression


def test_legends_have_what_the_queries_leave() -> None:
    """An aggregation drops every label that it does not name."""
    for target in (target for panel in panels() for target in panel["targets"]):
        wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        grouped = re.search(r"\b(?:sum|max) by \(([^)]*)\)", target["expr"])
        left = set(re.findall(r"\w+", grouped[1])) if grouped else {"instance"}
        assert wanted <= left, target["expr"]


def test_panels_do_not_lie_on_each_other() -> None:
    """Each has an id and a place of its own, and a title that says what it shows."""
    every = dashboard()["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in every)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)
    for unique in ("id", "title"):
        assert len({panel[unique] for panel in every}) == len(every)


def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    """As the expressions of rules, which its tool checks."""
    promtool = tool("promtool", package="prometheus")
    readable = [each.replace("$__rate_interval", "1m").replace("$job", "federation") for each in expressions()]
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(readable)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML
    assert f"{len(rules)} rules found" in approve(promtool, "check", "rules", "rules.yml", cwd=tmp_path)
