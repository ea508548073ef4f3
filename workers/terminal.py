"""What a command reads and prints, whichever characters the terminal knows."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Final

_ESCAPES: Final = "workers.escapes"


def show_escapes() -> None:
    """Print the escapes of what the terminal cannot show, as JSON has them: so JSON stays JSON."""
    codecs.register_error(_ESCAPES, _escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ESCAPES)


def as_typed(argument: str) -> str:
    """Return an argument whose bytes are UTF-8 as text, also where the locale knows ASCII alone.

    Raises:
        ValueError: its bytes are no text.
    """
    try:
        argument.encode()
    except UnicodeEncodeError:
        return os.fsencode(argument).decode()
    return argument


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)), error.end
