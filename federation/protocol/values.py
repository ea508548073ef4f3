"""Values that are made for every delivery, several times."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A plain value. Making one costs a tenth of what a frozen dataclass costs, which sets each field by a call."""

    unshown: ClassVar[frozenset[str]] = frozenset()
    """The fields that are in no log and no traceback."""

    def __repr__(self) -> str:
        """Return what a dataclass would."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in self.unshown)
        return f"{type(self).__qualname__}({', '.join(shown)})"
