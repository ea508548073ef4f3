"""What Ctrl-C does to a command of ours: at every moment one line, and status 130.

While modules are imported it ends the process on the spot: an exception raised then may end up in a callback of the
interpreter, which prints and forgets it, or leave a library that half exists. What a transaction has begun by then is
undone as after any crash.
"""

from __future__ import annotations

import os
import sys

# `signal` itself imports a good deal more, in whose midst Ctrl-C would come as an exception.
from _signal import (  # type: ignore[import-not-found] # typeshed describes what `signal` makes of it alone
    SIGINT,
    default_int_handler,
    getsignal,
    signal,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # spelt so, because `typing` takes a while
    from collections.abc import Coroutine
    from types import FrameType
    from typing import NoReturn, TypeVar

    T = TypeVar("T")


def is_command() -> bool:
    """Whether this process is `federation` or `python -m federation...`: nobody else is to be ended."""
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # as long as Python looks for the module, and imports the packages around it
        return sys.orig_argv[-len(sys.argv)].partition(".")[0] == "federation"
    return os.path.splitext(os.path.basename(program))[0] == "federation"


def mind() -> bool:
    """From now on Ctrl-C ends this process; False where it is another's to mind, as of a shell that has it ignored."""
    if getsignal(SIGINT) not in (default_int_handler, end):
        return False
    signal(SIGINT, end)
    return True


def raise_unless_importing(number: int, frame: FrameType | None) -> None:
    """Handle the signal as an exception where the program itself is at work, to undo what it began."""
    within = frame
    while within is not None:
        if within.f_code.co_filename.startswith("<frozen importlib"):
            end()
        within = within.f_back
    default_int_handler(number, frame)


def run(work: Coroutine[object, object, T]) -> T:
    """Run it as `asyncio.run`, which has a way of its own with Ctrl-C: it cancels the work, wherever that stands."""
    import asyncio

    if getsignal(SIGINT) is not raise_unless_importing:
        return asyncio.run(work)
    signal(SIGINT, default_int_handler)  # the only one that it takes the place of
    try:
        return asyncio.run(work)
    finally:
        signal(SIGINT, raise_unless_importing)


def end(*_: object) -> NoReturn:
    """End the process as Ctrl-C wants it, without a look back."""
    if "--json" in sys.argv:
        os.write(1, b'{"error": {"kind": "interrupted", "message": "interrupted", "details": []}}\n')
    else:
        os.write(2, b"federation: interrupted\n")
    os._exit(130)


if is_command():
    mind()
