"""Where a process of ours begins: whenever Ctrl-C ends it, it ends in one line and with status 130.

While the first code is imported it ends on the spot: an exception raised then may end up in a callback of the
interpreter, which prints and forgets it. Nothing is half done at that moment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one `federation` command, and end the process with its status if that is not 0."""
    # A shell that starts us in the background may have had it ignored.
    minded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if minded:
        signal.signal(signal.SIGINT, _end)
    from federation.cli import main as command

    try:
        if minded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command(arguments)
    except KeyboardInterrupt:  # before the command minds it, or after
        _end()
    except SystemExit as end:
        # Everything is told: no thread need be awaited that still tries to reach what does not answer.
        with suppress(OSError):  # nobody listens any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
    finally:
        if minded:  # it is done; in the interpreter's last moments the signal would kill without a word
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(*_: object) -> NoReturn:
    if "--json" in sys.argv:
        os.write(1, b'{"error": {"kind": "interrupted", "message": "interrupted", "details": []}}\n')
    else:
        os.write(2, b"federation: interrupted\n")
    os._exit(130)
