"""Values that are made for every delivery, several times."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A plain value. Making one costs a tenth of what a frozen dataclass costs, which sets each field by a call."""

    unshown: ClassVar[frozenset[str]] = frozenset()
    """The fields that are in no log and no traceback."""

    def __repr__(self) -> str:
        """Return what a dataclass would."""
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:  # as msgspec has it, whose own returns all fields
        """Return the fields that tracebacks drawn by rich may show."""
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name not in self.unshown]
