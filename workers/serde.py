"""The encoding of payloads and results as the bytes that a storage keeps."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Protocol


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
    """Strict JSON in UTF-8: compact, no NaN or Infinity, non-ASCII text as it is.

    With `sort_keys`, equal objects have equal bytes, whatever the order of their keys.
    """

    def __init__(self, *, sort_keys: bool = False) -> None:
        self._encode = json.JSONEncoder(
            separators=(",", ":"), ensure_ascii=False, allow_nan=False, sort_keys=sort_keys
        ).encode
        self._decode = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite).decode

    def dumps(self, value: object) -> bytes:
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


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond what a number can be")
    return value


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
