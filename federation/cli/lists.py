"""Lists of things: the few columns that matter, unless somebody wants more, and ids that are short enough to type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import typer

from federation.cli.output import print_table

SHORTEST: Final = 8
"""How many characters of an id's end are shown at least, and may stand for it."""


def print_list(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    few: Sequence[str],
    wide: bool = False,
    chosen: str | None = None,
) -> None:
    """Print a table of the columns that are `chosen`, by name; else of `few` of them, or of all if it may be `wide`."""
    names = _named(chosen, columns) if chosen is not None else columns if wide else few
    places = [columns.index(name) for name in names]
    print_table(names, ([row[place] for place in places] for row in rows))


def _named(chosen: str, columns: Sequence[str]) -> list[str]:
    names = [name.strip().upper().replace("-", " ") for name in chosen.split(",")]
    for name in names:
        if name not in columns:
            raise typer.BadParameter(f"there is no column {name.lower()}; there are {', '.join(columns).lower()}")
    return names


def shortened(ids: Sequence[str]) -> list[str]:
    """Return the ends of these ids, as long as they have to be to tell one from the other.

    The ends, because ids that were made in the same minute begin alike.
    """
    longest = max(map(len, ids), default=0)
    size = next((size for size in range(SHORTEST, longest) if len({each[-size:] for each in ids}) == len(ids)), longest)
    return [each[-size:] for each in ids]
