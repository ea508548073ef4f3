"""HTML and SVG from Python calls: everything that is not made by `tag` is text and is escaped automatically.

Server URLs, error codes and reasons come from the network: they may hold tags, quotes, control characters and
characters that turn the direction of writing.
"""

from __future__ import annotations

import html
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

R = TypeVar("R")

_INVISIBLE: Final = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_VOID: Final = {"meta", "br"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = Markup | str | None


def tag(name: str, /, *children: Content, **attributes: str | float | None) -> Markup:
    """Return one element.

    An attribute's `_` becomes `-`, and a trailing one is dropped (`class_`); None leaves it out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Content) -> Markup:
    """Join the children, leaving out None."""
    return Markup(
        "".join(each if isinstance(each, Markup) else _escaped(each) for each in children if each is not None)
    )


def pasted(command: str, when: str | None = None) -> Markup:
    """Return a command to copy, in a line of its own, and above it when to do so."""
    told = tag("span", f"{when}:", class_="when") if when else None
    return join(told, tag("code", command, class_="command"))


def short(text: str, limit: int = 90) -> str:
    """Return the text, cut if it is longer than anybody reads."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """One column: its heading, and what a row has there: a number, sentences (`wide`), or a few words."""

    heading: str
    cell: Callable[[R], Content]
    number: bool = False
    wide: bool = False


def table(caption: str | None, columns: Sequence[Column[R]], rows: Iterable[R], *, name: str | None = None) -> Markup:
    """Return a table that scrolls by itself if the page is too narrow for it, also by the keyboard.

    `name` names it for those who do not see it; by default the caption does.
    """
    return scrolling(plain_table(caption, columns, rows, told=True), name or caption or "Table", style="scroll")


def plain_table(caption: str | None, columns: Sequence[Column[R]], rows: Iterable[R], *, told: bool = False) -> Markup:
    """Return a table. One that is `told` has its headings in each row, where the page is too narrow for columns."""
    heads = [tag("th", each.heading, scope="col", class_=_style(each)) for each in columns]
    labels = [each.heading if told and place else None for place, each in enumerate(columns)]
    body = [
        tag(
            "tr",
            *(
                tag("td", each.cell(row), class_=_style(each), data_label=label)
                for each, label in zip(columns, labels, strict=True)
            ),
        )
        for row in rows
    ]
    inner = (tag("caption", caption) if caption else None, tag("thead", tag("tr", *heads)), tag("tbody", *body))
    return tag("table", *inner)


def scrolling(content: Markup, name: str, *, style: str) -> Markup:
    """Return the content in a part of the page that scrolls by itself, and can be reached by the keyboard."""
    return tag("div", content, class_=style, role="group", aria_label=name, tabindex=0)


def _style(column: Column[R]) -> str | None:
    return "number" if column.number else "wide" if column.wide else None


def _number(value: str | float | None) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    return html.escape("".join("\ufffd" if unicodedata.category(each) in _INVISIBLE else each for each in text))
