"""The errors that this application raises about its own set-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class ConfigurationError(Exception):
    """The settings do not describe a node that can run; `problems` holds one sentence per setting, with what to do."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class NoNodeHere(ConfigurationError):
    """Neither the environment nor the working directory describes a node; most likely it is the wrong directory."""

    def __init__(self, directory: Path) -> None:
        self.found = f"no .env and no database here, in {directory}"
        self.advice = "`federation init` makes a node; or go to the directory of yours"
        super().__init__([f"{self.found}: {self.advice}"])


class Unreachable(Exception):
    """A database or a queue does not answer; the message says which, and what to look at."""
