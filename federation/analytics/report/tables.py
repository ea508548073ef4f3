"""Tables of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from federation.analytics.report.markup import Content, Markup, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """One column: its heading, and what a row has there."""

    heading: str
    cell: Callable[[R], Content]
    number: bool = False


def table(caption: str | None, columns: Sequence[Column[R]], rows: Iterable[R]) -> Markup:
    """A table that scrolls by itself where the page is too narrow for it."""
    heads = [tag("th", each.heading, scope="col", class_=_style(each)) for each in columns]
    body = [tag("tr", *(tag("td", each.cell(row), class_=_style(each)) for each in columns)) for row in rows]
    inner = (tag("caption", caption) if caption else None, tag("thead", tag("tr", *heads)), tag("tbody", *body))
    return tag("div", tag("table", *inner), class_="scroll")


def _style(column: Column[R]) -> str | None:
    return "number" if column.number else None
