"""What SQLAlchemy compiles for one engine serves all of its kind.

A test opens engines of its own, and each of them would compile anew what the application says everywhere: a tenth of
the CPU of the tests. An engine finds a compiled statement by its dialect, so dialects of one kind are equal here.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.util import LRUCache

_COMPILED: Final[LRUCache[Any, Any]] = LRUCache(2_000)
_KIND: Final = attrgetter(
    *("__class__", "server_version_info", "paramstyle", "label_length", "max_identifier_length"),
    *("use_insertmanyvalues", "_json_serializer", "_json_deserializer"),
)
"""What of a dialect a compiled statement depends on."""


def install() -> None:
    """From now on, in this process and its forks."""
    DefaultDialect.__eq__ = _are_of_one_kind  # type: ignore[method-assign]  # there is no public place for it
    DefaultDialect.__hash__ = _hash_of_kind  # type: ignore[method-assign]  # as above
    Engine._compiled_cache = property(lambda engine: _COMPILED, lambda engine, own: None)  # type: ignore[assignment]  # no public place


def _are_of_one_kind(one: DefaultDialect, other: object) -> bool:
    return isinstance(other, DefaultDialect) and _KIND(one) == _KIND(other)


def _hash_of_kind(dialect: DefaultDialect) -> int:
    return hash(type(dialect))  # all else changes when it connects first
