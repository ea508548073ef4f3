"""SVG from Python calls, and text of strangers made harmless wherever it is printed.

Server URLs, error codes and reasons come from the network: they may hold tags, quotes, control characters and
characters that turn the direction of writing. What is no `Markup` is escaped, here and by the templates.
"""

from __future__ import annotations

import unicodedata
from typing import Final

from markupsafe import Markup, escape

_INVISIBLE: Final = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def tag(name: str, /, *children: str, **attributes: str | float) -> Markup:
    """Return one element. An attribute's `_` becomes `-`, and a trailing one is dropped (`class_`)."""
    written = (
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), printable(_number(value)))
        for key, value in attributes.items()
    )
    inner = (escape(printable(each)) for each in children)
    return Markup("<{name}{written}>{inner}</{name}>").format(
        name=name, written=Markup("").join(written), inner=Markup("").join(inner)
    )


def printable(value: object) -> object:
    """Return a text without what cannot be seen, or turns the direction of writing, and anything else as it is."""
    if isinstance(value, Markup) or not isinstance(value, str) or value.isprintable():
        return value
    return "".join("\ufffd" if unicodedata.category(each) in _INVISIBLE else each for each in value)


def _number(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
