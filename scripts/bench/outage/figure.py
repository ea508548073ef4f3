"""One line of the table: what was measured, the bar for it, and whether it is met."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A value that has to be at least or at most `bar`.

    `labels` say what it belongs to, `details` what else was seen.
    """

    name: str
    labels: dict[str, object]
    value: float
    bar: float
    has_to_be: Literal["at least", "at most"]
    details: dict[str, float] = field(default_factory=dict)

    @property
    def is_met(self) -> bool:
        return self.value >= self.bar if self.has_to_be == "at least" else self.value <= self.bar

    def to_json(self) -> dict[str, object]:
        return {
            "figure": self.name,
            **self.labels,
            "value": round(self.value, 4),
            "bar": self.bar,
            "has_to_be": self.has_to_be,
            "met": self.is_met,
            **{name: round(value, 4) for name, value in self.details.items()},
        }

    def line(self) -> str:
        labels = ", ".join(f"{name} {value}" for name, value in self.labels.items())
        details = ", ".join(f"{name} {value:.4g}" for name, value in self.details.items())
        verdict = "met" if self.is_met else "MISSED"
        return f"{verdict:>6}  {self.name}: {self.value:.4g}, {self.has_to_be} {self.bar:g}  ({labels}; {details})"
