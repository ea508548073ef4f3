"""How values travel to PostgreSQL and back, by libpq's own functions."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import psycopg


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


LOADERS: Final[Mapping[int, Callable[[bytes], object]]] = {
    16: lambda data: data == b"\x01",  # boolean
    17: bytes,
    20: _number,
    21: _number,
    23: _number,
    25: bytes.decode,
    2278: bytes.decode,  # void
}
"""How to read a column in binary, by the number of its type."""

_ARRAYS: Final = {1001: 17, 1009: 25}
"""The types whose arrays go in binary, bytea and text: the number of the array's, and of an element's."""
_HEAD: Final = struct.Struct("!iIIii")
_LENGTH: Final = struct.Struct("!i").pack
_NULL: Final = b"\xff\xff\xff\xff"


def encoded(value: object, kind: int) -> tuple[bytes | None, bool]:
    """Return the value of a parameter of the type with that number, and whether it is in binary.

    Raises:
        psycopg.DataError: a text has NUL in it.
        TypeError: our statements have no values of its type.
    """
    if isinstance(value, list) and kind in _ARRAYS:
        return _array(_ARRAYS[kind], value), True
    encode = _ENCODERS.get(type(value)) or _encoder_of_base(value)
    return encode(value), isinstance(value, bytes)


def _array(kind: int, elements: Sequence[bytes | str | None]) -> bytes:
    """Return an array of one dimension as `array_recv` reads it."""
    if not elements:
        return _HEAD.pack(0, 0, kind, 0, 0)[:12]
    parts = [_HEAD.pack(1, None in elements, kind, len(elements), 1)]
    for element in elements:
        if element is None:
            parts.append(_NULL)
        else:
            data = element if isinstance(element, bytes) else _text(element)
            parts += (_LENGTH(len(data)), data)
    return b"".join(parts)


def _encoder_of_base(value: object) -> Callable[[Any], bytes | None]:
    """Return that of what the value's type is derived from, as an enumeration's is."""
    for kind, encode in _ENCODERS.items():
        if isinstance(value, kind):
            return encode
    raise TypeError(f"a statement has no values of {type(value).__name__}")


def _numbers(elements: Sequence[int | None]) -> bytes:
    return ("{" + ",".join(["NULL" if element is None else str(int(element)) for element in elements]) + "}").encode()


def _text(text: str) -> bytes:
    if "\0" in text:  # libpq would take what is before it for the whole
        raise psycopg.DataError("PostgreSQL has no text with NUL")
    return text.encode()


_ENCODERS: Final[Mapping[type, Callable[[Any], bytes | None]]] = {  # a value of any type goes to the one of its own
    type(None): lambda _: None,
    bool: lambda value: b"t" if value else b"f",  # before int, from which it is derived
    bytes: lambda value: value,
    int: lambda value: b"%d" % value,
    list: _numbers,
    str: _text,
}
