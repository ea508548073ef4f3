"""What cannot be stored as an annotation says it is."""

from __future__ import annotations

from typing import Any, TypeAlias

# Any: a type annotation is whatever its author wrote.
Hint: TypeAlias = Any


class Misfit(ValueError):
    """A value is not what its annotation says; `dumped` is what was made of it nevertheless."""

    def __init__(self, dumped: object, why: str = "its annotation does not allow it") -> None:
        super().__init__(why)
        self.dumped = dumped


class Lost(Misfit):
    """What was made of a value is not read as that value again."""
