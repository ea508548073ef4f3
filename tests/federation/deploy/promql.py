"""As much of PromQL as it takes to see whether an expression names what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

OF_PROMETHEUS = frozenset({"job", "instance"})
"""Labels that Prometheus gives each series itself."""

_SELECTOR = re.compile(r"\b((?:federation|process)_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


@dataclass
class Exposed:
    """What a process exposes: of each series' name its labels, and of each label the values seen."""

    labels: dict[str, set[str]] = field(default_factory=dict)
    values: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str]) -> None:
        self.labels.setdefault(name, set()).update(labels)
        for label, value in labels.items():
            self.values.setdefault((name, label), set()).add(value)

    def expect(self, name: str, labels: Set[str]) -> None:
        """A series may come that was not seen; its labels' values are those that the labels have elsewhere."""
        self.labels.setdefault(name, set()).update(labels)
        for label in labels - {label for seen, label in self.values if seen == name}:
            elsewhere = (values for (_, other), values in self.values.items() if other == label)
            self.values[name, label] = set[str]().union(*elsewhere)


def scraped(text: str) -> Exposed:
    """The series in an answer of `/metrics`."""
    exposed = Exposed()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            exposed.add(sample.name, sample.labels)
    return exposed


def matchers(text: str) -> dict[str, str]:
    """The labels in the braces of a series, with their values."""
    return {label: value for label, _, value in _MATCHER.findall(text)}


def strangers(expression: str, exposed: Exposed) -> Iterator[str]:
    """What an expression names that is not exposed: series, labels, and values that it asks for."""
    known = set(OF_PROMETHEUS)
    for name, inside in _SELECTOR.findall(expression):
        if name not in exposed.labels:
            yield name
            continue
        known |= exposed.labels[name]
        for label, operator, value in _MATCHER.findall(inside):
            if label in OF_PROMETHEUS:
                continue
            if label not in exposed.labels[name]:
                yield f"{name}{{{label}}}"
            elif not operator.startswith("!"):
                missing = set(value.split("|")) - exposed.values[name, label]
                yield from (f"{name}{{{label}={each}}}" for each in sorted(missing))
    for labels in _GROUPING.findall(expression):
        yield from (f"by {label}" for label in re.findall(r"\w+", labels) if label not in known)
