"""How a command of ours reacts to Ctrl-C: at any moment with one line, and status 130.

While modules are imported it ends the process on the spot. An exception raised then may end up in a callback of the
interpreter, which prints and forgets it, or leave a library half imported. What a transaction has begun by then is
undone as after any crash.
"""

from __future__ import annotations

import os
import sys

# `signal` itself imports a good deal more, and during these imports Ctrl-C would come as an exception.
from _signal import (  # type: ignore[import-not-found] # typeshed only describes `signal`, which is made of it
    SIGINT,
    default_int_handler,
    getsignal,
    signal,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # written like this, because importing `typing` takes a while
    from collections.abc import Coroutine
    from types import FrameType
    from typing import NoReturn, TypeVar

    T = TypeVar("T")


def is_command() -> bool:
    """Tell whether this process is `federation` or `python -m federation...`; no other process may be ended."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # while Python looks for the module, and imports the packages around it
        return sys.orig_argv[-len(sys.argv)].partition(".")[0] == "federation"
    return os.path.splitext(os.path.basename(program))[0] == "federation"


def mind() -> bool:
    """Let Ctrl-C end this process from now on. Return False if others handle it, such as a shell that ignores it."""
    if getsignal(SIGINT) not in (default_int_handler, end):
        return False
    signal(SIGINT, end)
    return True


def raise_unless_importing(number: int, frame: FrameType | None) -> None:
    """Raise the signal as an exception, so that the program can undo what it began.

    During an import, end the process instead.
    """
    within = frame
    while within is not None:
        if within.f_code.co_filename.startswith("<frozen importlib"):
            end()
        within = within.f_back
    default_int_handler(number, frame)


def run(work: Coroutine[object, object, T]) -> T:
    """Run the work with `asyncio.run`, which has its own way of handling Ctrl-C: it cancels the work at any point."""
    import asyncio

    if getsignal(SIGINT) is not raise_unless_importing:
        return asyncio.run(work)
    signal(SIGINT, default_int_handler)  # the only handler that asyncio replaces
    try:
        return asyncio.run(work)
    finally:
        signal(SIGINT, raise_unless_importing)


def end(*_: object) -> NoReturn:
    """End the process as Ctrl-C requires, at once and without clean-up."""
    if "--json" in sys.argv:
        os.write(1, b'{"error": {"kind": "interrupted", "message": "interrupted", "details": []}}\n')
    else:
        os.write(2, b"federation: interrupted\n")
    os._exit(130)


if is_command():
    mind()
