"""What a command cannot do, in a sentence for whoever typed it."""

from __future__ import annotations


class CommandError(Exception):
    """Ends the command with status 2; the message says what was wrong, and what to do."""
