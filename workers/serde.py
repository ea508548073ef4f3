"""How payloads and results become the bytes a storage keeps."""

from __future__ import annotations

import json
from typing import Protocol


class Serde(Protocol):
    """Turns values into bytes and back."""

    def dumps(self, value: object) -> bytes:
        """Raises: TypeError or ValueError: the value cannot be encoded."""

    def loads(self, data: bytes) -> object:
        """Raises: ValueError: these bytes are not ours."""


class JsonSerde:
    """Strict JSON in UTF-8: compact, no NaN or Infinity, non-ASCII text as it is."""

    def __init__(self) -> None:
        self._encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode

    def dumps(self, value: object) -> bytes:
        return self._encode(value).encode()

    def loads(self, data: bytes) -> object:
        try:
            value: object = json.loads(data)
        except RecursionError:
            raise ValueError("JSON is nested too deeply") from None
        return value
