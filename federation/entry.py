"""Where our processes begin: whenever Ctrl-C ends one, it prints one line and exits with status 130.

`federation.interrupts` handles the signal; a running command gets it as an exception, so that it can undo what it
began.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from federation.interrupts import end, mind, raise_unless_importing

COLLECT_AFTER: Final = 300_000
"""How many new objects start a garbage collection in a command: most are what it imports, which is no garbage.

CPython's 700 to 2 000 make it look at all of that again and again, a fifth of what `federation servers list` takes. A
process that goes on sets what it has imported aside; see `runtime.nodes.set_aside_loaded`.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one `federation` command, and end the process with its status if that is not 0."""
    minded = mind()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    from federation.base.terminal import mind_crashes, show_escapes
    from federation.cli import main as command

    mind_crashes()
    show_escapes()
    try:
        _run(lambda: command(arguments), minded=minded)
    except KeyboardInterrupt:  # before the command handles it, or after
        end()
    except SystemExit as done:
        # All output is written: do not wait for threads that still try to reach what does not answer.
        with suppress(OSError):  # nobody reads the output any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(done.code if isinstance(done.code, int) else 1)


def _run(command: Callable[[], None], *, minded: bool) -> None:
    try:
        if minded:
            signal.signal(signal.SIGINT, raise_unless_importing)
        command()
    finally:
        if minded:  # the command is done; in the interpreter's last moments the signal would kill without a message
            signal.signal(signal.SIGINT, signal.SIG_IGN)
