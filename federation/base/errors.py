"""What this application raises about its own set-up."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigurationError(Exception):
    """The settings do not describe a node that can run; `problems` holds one sentence per setting, with what to do."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class Unreachable(Exception):
    """A database or a queue does not answer; the message says which, and what to look at."""
