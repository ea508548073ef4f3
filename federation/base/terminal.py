"""Text that a terminal shows, and does not obey.

What other servers wrote may hold anything: escape sequences, characters that turn the direction of writing, the end of
a line and the beginning of another that was never logged. A character is harmless if Python calls it printable: then it
is no control character, no format or direction character, no separator but the plain space, and is assigned.
"""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Final

_ESCAPES: Final = "federation.escapes"

BLOCK_INDENT = "  "
"""The beginning of each line of a block, so that none can be taken for the beginning of a log line."""


def spaced(text: str) -> str:
    """Return *text* in one line, with a space for each character that is not printable."""
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)


def escaped(text: str) -> str:
    """Return *text* in one line, with what is not printable as Python would write it: `\\x1b`, `\\n`, `\\u202e`."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def escaped_block(text: str) -> str:
    """Return the lines of *text*, each escaped and indented."""
    return "\n".join(f"{BLOCK_INDENT}{escaped(line)}" for line in text.rstrip("\n").split("\n"))


def escaped_json(document: str) -> str:
    """Return the same JSON, with `\\u` escapes for what is not printable. Line ends between members stay."""
    if document.replace("\n", "").isprintable():
        return document
    return "".join(each if each.isprintable() or each == "\n" else _json_escape(each) for each in document)


def show_escapes() -> None:
    """Print the escapes of what the terminal cannot show, as JSON has them: so JSON stays JSON."""
    codecs.register_error(_ESCAPES, _escape_what_is_unknown)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ESCAPES)


def mind_crashes() -> None:
    """Escape the tracebacks that the interpreter itself prints from now on, too: messages quote what was read."""
    sys.excepthook = _print_crash


def _print_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print("\n".join(_crash_lines(kind, error, trace)), file=sys.stderr)  # noqa: T201 - in the interpreter's place


def _crash_lines(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Iterator[str]:
    from traceback import TracebackException  # imported here, because a command that succeeds does not need it

    for part in TracebackException(kind, error, trace).format():
        # Frames, groups and what lies between them are the interpreter's own lines; each message becomes one line of
        # ours.
        is_message = not part.startswith((" ", "\n"))
        yield from map(escaped, [part.rstrip("\n")] if is_message else part.rstrip("\n").split("\n"))


def _escape_what_is_unknown(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return _json_escape(error.object[error.start : error.end]), error.end


def _json_escape(text: str) -> str:
    units = text.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
