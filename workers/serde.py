"""The encoding of payloads and results as the bytes that a storage keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

_Path: TypeAlias = "tuple[_Path, object] | None"
_Container: TypeAlias = "dict[object, object] | list[object] | tuple[object, ...]"


class Serde(Protocol):
    """Turns values into bytes and back."""

    def dumps(self, value: object) -> bytes:
        """Encode `value`.

        Raises:
            TypeError, ValueError: the value cannot be encoded.
        """

    def loads(self, data: bytes) -> object:
        """Decode `data`.

        Raises:
            ValueError: these bytes were not written by this serde.
        """


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload that a queue's serde has encoded already; the queue stores these bytes as they are."""

    data: bytes = field(repr=False)


class JsonSerde:
    """Strict JSON in UTF-8: compact, no NaN or Infinity, non-ASCII text as it is, and keys that are text.

    Tuples come back as lists, and enums that are text or numbers as these. With `sort_keys`, equal objects have equal
    bytes, whatever the order of their keys.
    """

    def __init__(self, *, sort_keys: bool = False) -> None:
        self._encode = json.JSONEncoder(
            separators=(",", ":"), ensure_ascii=False, allow_nan=False, sort_keys=sort_keys
        ).encode
        self._decode = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite).decode

    def dumps(self, value: object) -> bytes:
        if value is None:  # as most handlers return
            return b"null"
        odd = odd_key(value)
        if odd is not None:
            raise TypeError(f"keys in JSON are text, each once; {odd}")
        try:
            return self._encode(value).encode()
        except RecursionError:
            raise ValueError("the value is nested too deeply for JSON") from None

    def loads(self, data: bytes) -> object:
        try:
            value: object = self._decode(data.decode())
        except RecursionError:
            raise ValueError("JSON is nested too deeply") from None
        return value


_CONTAINERS: Final = (dict, list, tuple)
_TEXT: Final = frozenset((str,))
_SCALARS: Final = frozenset((str, int, float, bool, type(None)))


def odd_key(value: object) -> str | None:
    """Say where a key is no text, or the same text as another; None if JSON returns all keys as they are."""
    if type(value) is dict and _TEXT.issuperset(map(type, value)) and _SCALARS.issuperset(map(type, value.values())):
        return None  # as most payloads are
    for each, path in _containers(value):
        if isinstance(each, dict) and not _TEXT.issuperset(map(type, each)):
            odd = _first_odd(each, path)
            if odd is not None:
                return odd
    return None


def non_finite(value: object) -> list[str]:
    """Say where numbers are NaN or infinite."""
    if isinstance(value, float):
        return [] if math.isfinite(value) else ["all of it"]
    return [
        _shown((path, key))
        for each, path in _containers(value)
        for key, item in (each.items() if isinstance(each, dict) else enumerate(each))
        if isinstance(item, float) and not math.isfinite(item)
    ]


def _containers(value: object) -> Iterator[tuple[_Container, _Path]]:
    """Yield the value and all that it contains, each once, if they contain anything, with the path to each."""
    inner: list[tuple[object, _Path]] = [(value, None)]
    seen: set[int] = set()  # what contains itself is left to the encoder, which refuses it
    for each, path in inner:  # which grows meanwhile
        if id(each) in seen or not isinstance(each, _CONTAINERS):
            continue
        seen.add(id(each))
        yield each, path
        entries: Iterable[tuple[object, object]] = each.items() if isinstance(each, dict) else enumerate(each)
        inner += [(item, (path, key)) for key, item in entries if isinstance(item, _CONTAINERS)]


def _first_odd(keys: Iterable[object], path: _Path) -> str | None:
    texts: set[str] = set()
    for key in keys:
        if not isinstance(key, str):
            return f"this one is {type(key).__name__}: {_shown((path, key))}"
        if str.__str__(key) in texts:  # a text of a class of its own may differ from its equal
            return f"this one is there twice: {_shown((path, key))}"
        texts.add(str.__str__(key))
    return None


def _shown(path: _Path) -> str:
    """Return the path as Python writes it: `['orders'][0][7]`."""
    steps: list[str] = []
    while path is not None:
        path, key = path
        steps.append(f"[{str.__repr__(key) if isinstance(key, str) else repr(key)}]"[:80])
    return "".join(reversed(steps))


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond what a number can be")
    return value


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
