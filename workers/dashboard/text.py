"""What a page writes: text of strangers that cannot act on its reader, numbers and times as people read them.

HTML is escaped by the templates. That leaves characters that no escaping touches: those that turn the direction of
writing, control a terminal into which somebody pastes a line, or cannot be seen at all. They are written as Python
would write them. Every value that a template prints goes through `shown`, so that no page can forget it.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from markupsafe import Markup, escape

LONGEST_CELL: Final = 120
LONGEST_WORD: Final = 24
"""Up to so many characters stand in one line."""


def shown(value: object) -> object:
    """Return a text with what is not printable as `\\x1b` or `\\u202e`, and anything else as it is."""
    if isinstance(value, Markup) or not isinstance(value, str) or value.isprintable():
        return value
    return "".join(each if each.isprintable() else _spelt(each) for each in value)


def _spelt(each: str) -> str:
    return repr(each)[1:-1]


def short(value: object, limit: int = LONGEST_CELL) -> str:
    """Return the text, cut where nobody reads on."""
    text = str(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def ending(value: str, size: int = 12) -> str:
    """Return the end of an id: ids that were made in the same minute begin alike."""
    return value if len(value) <= size + 1 else f"…{value[-size:]}"


def seams(value: object) -> object:
    """Return a text that is long for a cell with its seams: a line may end behind a dot or an underscore of it."""
    text = str(value)
    if len(text) <= LONGEST_WORD:
        return text
    return Markup("<wbr>").join(escape(shown(part)) for part in re.split(r"(?<=[._])", text))


def block(value: str, limit: int = 8_000) -> Markup:
    """Return a text of several lines, such as a stack, with its ends of lines as they are."""
    lines = short(value, limit).splitlines()
    return Markup("\n").join(escape(shown(line)) for line in lines)


def coded(value: str) -> Markup:
    """Return a sentence with what stands between backticks as code."""
    parts = [escape(shown(part)) for part in value.split("`")]
    if len(parts) % 2 == 0:  # one of them stands for itself
        return Markup("`").join(parts)
    return Markup("").join(Markup("<code>{}</code>").format(part) if at % 2 else part for at, part in enumerate(parts))


def grouped(number: int) -> str:
    """Format the number in groups of three digits, which no line break separates."""
    return f"{number:,}".replace(",", "\u202f") if abs(number) >= 10_000 else str(number)


def milliseconds(number: float) -> str:
    """Format a duration as short as it is read."""
    return f"{number / 1000:.1f} s" if number >= 1_000 else f"{number:.0f} ms"


def or_none(value: object) -> object:
    """Return the value, or a dash for none."""
    return "\u2013" if value is None else value


def counted(number: int, thing: str) -> str:
    """Format a number of things."""
    plural = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{grouped(number)} {thing if number == 1 else plural}"


def ago(duration: timedelta) -> str:
    """Format the duration in its two largest units."""
    seconds = max(round(duration.total_seconds()), 0)
    parts = [(seconds // 86_400, "d"), (seconds // 3_600 % 24, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s")]
    first = next((index for index, (number, _) in enumerate(parts) if number), len(parts) - 1)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number) or "0 s"


def since(at: datetime) -> str:
    """Format how long ago the moment was."""
    return ago(datetime.now(UTC) - at)


def moment(at: datetime | None) -> Markup:
    """Return the moment as an element that says it in UTC; the page's script adds the reader's own zone."""
    if at is None:
        return Markup("&ndash;")
    utc = at.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        utc.strftime("%Y-%m-%dT%H:%M:%SZ"), utc.strftime("%d %b %H:%M:%S UTC")
    )
