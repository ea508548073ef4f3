"""Medians of what was measured, as tables, and what two that took turns have to do with each other."""

from __future__ import annotations

import statistics
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, TypeVar

Contender = TypeVar("Contender")
Run: TypeAlias = Mapping[str, float]

_UNITS: Final = {"_per_s": "/s", "_ms": " (ms)", "_us": " (µs)", "_kib": " (KiB)", "_s": " (s)"}


def in_turn(contenders: Sequence[Contender], turn: int) -> Sequence[Contender]:
    """Return who is measured one after the other in that turn: each time in the other order."""
    return contenders if turn % 2 == 0 else contenders[::-1]


def ratios(runs: Sequence[Run], others: Sequence[Run]) -> dict[str, float]:
    """Return the medians of the ratios of runs side by side, of all figures that are never 0."""
    names = [name for name in runs[0] if all(run.get(name) for run in (*runs, *others))]
    pairs = list(zip(runs, others, strict=True))
    return {name: statistics.median(run[name] / other[name] for run, other in pairs) for name in names}


@dataclass(slots=True, kw_only=True)
class Row:
    """One row of a table: what to measure, and what each repetition found."""

    table: str
    labels: Mapping[str, object]
    measure: partial[Coroutine[Any, Any, dict[str, float]]]
    baseline: Row | None = None
    """The row with whose speed this one's is compared."""
    runs: list[Run] = field(default_factory=list)

    @property
    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(run[name] for run in self.runs), 3) for name in self.runs[0]}

    @property
    def cells(self) -> dict[str, object]:
        """Everything that the row shows, by column."""
        cells = {**self.labels, **self.medians}
        if self.baseline is not None:
            cells["times slower"] = self.baseline.medians["processed_per_s"] / self.medians["processed_per_s"]
        return cells


@dataclass(frozen=True, slots=True)
class Ratio:
    """A row that says how one row's figures stand to another's, which took turns with it."""

    row: Row
    other: Row

    @property
    def table(self) -> str:
        return self.row.table

    @property
    def cells(self) -> dict[str, object]:
        """Everything that the row shows, by column."""
        return {**self.row.labels, "code": "ratio", **ratios(self.row.runs, self.other.runs)}


def with_ratios(group: Sequence[Row]) -> list[Row | Ratio]:
    """Return the rows, and how the first stands to each other one."""
    return [*group, *(Ratio(group[0], other) for other in group[1:])]


class Shown(Protocol):
    """A row of one of the tables."""

    @property
    def table(self) -> str: ...

    @property
    def cells(self) -> dict[str, object]: ...


def by_table(rows: Sequence[Shown]) -> dict[str, list[dict[str, object]]]:
    """Return the cells of every row of every table."""
    tables: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        tables.setdefault(row.table, []).append(row.cells)
    return tables


def markdown(rows: Sequence[Shown]) -> str:
    """Return every table under its name."""
    return "\n\n".join(f"{name}:\n\n" + "\n".join(_lines(table)) for name, table in by_table(rows).items())


def _lines(table: list[dict[str, object]]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for cells in table for name in cells))
    yield _line([_title(name) for name in columns])
    yield "|---" * len(columns) + "|"
    for cells in table:
        yield _line([_shown(cells.get(name)) for name in columns])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _title(name: str) -> str:
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix).replace("_", " ") + unit
    return name.replace("_", " ")


def _shown(value: object) -> str:
    """Format numbers with three digits, and thousands set apart."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}".replace(",", " ") if rounded >= 1000 else f"{rounded:g}"
