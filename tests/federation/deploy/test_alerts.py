"""The alerts ring when they should, judged by Prometheus' own tool, on series as a real process exposes them."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.federation.deploy.places import PROMETHEUS, ROOT, approve, tool
from tests.federation.deploy.promql import OF_PROMETHEUS, Exposed, matchers, strangers

CONFIGURATIONS = ("prometheus.yml", "prometheus.compose.yml")


def rules() -> list[dict[str, Any]]:  # Any: YAML is what it is
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())["tests"]
    return found


def test_prometheus_finds_the_alerts_as_tested() -> None:
    """`promtool test rules` agrees with every case."""
    promtool = tool("promtool", package="prometheus")
    assert "SUCCESS" in approve(promtool, "test", "rules", "alerts.test.yml", cwd=PROMETHEUS)


def test_prometheus_takes_the_configurations() -> None:
    """Those for systemd and for compose, with the rules that they name."""
    promtool = tool("promtool", package="prometheus")
    for name in CONFIGURATIONS:
        assert f"{len(rules())} rules found" in approve(promtool, "check", "config", name, cwd=PROMETHEUS)


def test_every_alert_is_tested_ringing_and_silent() -> None:
    """An alert that no case expects may never ring; one that no case expects to be silent may always ring."""
    looks = [look for case in cases() for look in case.get("alert_rule_test", [])]
    rings = {look["alertname"] for look in looks if look["exp_alerts"]}
    silent = {look["alertname"] for look in looks if not look["exp_alerts"]}
    assert rings == silent == {rule["alert"] for rule in rules()}


async def test_nothing_a_process_exposes_collides_with_prometheus_own_labels(exposed: Exposed) -> None:
    """Such a label would come out of Prometheus as `exported_job`, and alerts on it would watch the wrong thing."""
    assert len(exposed.labels) > 25
    for name, labels in exposed.labels.items():
        assert not labels & OF_PROMETHEUS, name
        assert not any(label.startswith("exported_") for label in labels), name


async def test_alerts_and_their_tests_name_what_is_exposed(exposed: Exposed) -> None:
    """Series, labels and values that a real process shows from its start, before anything went wrong."""
    for rule in rules():
        assert [*strangers(rule["expr"], exposed)] == [], rule["alert"]
    for series in (each["series"] for case in cases() for each in case.get("input_series", [])):
        name, labels = series.partition("{")[0], matchers(series)
        assert labels.keys() - OF_PROMETHEUS == exposed.labels[name], series
        assert labels.keys() >= OF_PROMETHEUS, series


async def test_a_wrong_name_would_be_found(exposed: Exposed) -> None:
    """What the tests of alerts and dashboard go by tells right from wrong."""
    wrong = {
        'max(federation_oldest_owed_seconds{state="raedy"})': ["federation_oldest_owed_seconds{state=raedy}"],
        'federation_oldest_owed_seconds{stage="ready"}': ["federation_oldest_owed_seconds{stage}"],
        "federation_oldest_owned_seconds > 1": ["federation_oldest_owned_seconds"],
        "max by (exported_job) (federation_scheduler_last_success_timestamp_seconds)": ["by exported_job"],
    }
    assert {expression: [*strangers(expression, exposed)] for expression in wrong} == wrong


def test_the_manual_lists_the_alerts() -> None:
    """All of them, and no other."""
    listed = re.findall(
        r"^\| `(Federation\w+)` \|", (ROOT / "docs" / "operate" / "metrics.md").read_text(), re.MULTILINE
    )
    assert listed == [rule["alert"] for rule in rules()]
