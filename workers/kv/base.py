"""The contract of a key-value store, and the limits of keys, values and times to live.

A key is a text, or a tuple of texts that names a place from the general to the particular: `("mail", "seen", "42")`. A
single text is a place one level deep. Different keys never collide, whatever characters they contain.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final, Protocol, TypeAlias, TypeGuard, runtime_checkable

from workers.checks import MAX_DELAY

Key: TypeAlias = str | tuple[str, ...]

MAX_KEY_BYTES: Final = 2_000
MAX_VALUE_BYTES: Final = 1 << 20
MAX_TTL: Final = 2 * MAX_DELAY
"""Enough for a mark that outlives the longest delay."""

_MILLISECOND: Final = timedelta(milliseconds=1)


class KvStore(Protocol):
    """Values that vanish when their time to live is over.

    A key has at most 2 000 bytes in UTF-8, where `%` and `/` in a part count as three; a value has at most 1 MiB. A
    `ttl` is from 1 ms to 200 years, by the clock of the store's server where it has one.

    Every method raises `ValueError` for what exceeds these limits, `StorageUnavailable` when nothing is known about its
    effect, and `StorageError` when the store cannot be used.
    """

    async def get(self, key: Key) -> bytes | None:
        """Return the value, None if there is none or it has expired."""

    async def set(self, key: Key, value: bytes, *, ttl: timedelta) -> None:
        """Set the key to this value, whatever it had before."""


@runtime_checkable
class ConditionalKvStore(KvStore, Protocol):
    """A store that compares and writes in one atomic step.

    Foreign stores may lack these methods, see `writes_conditionally`.
    """

    async def set_if_absent(self, key: Key, value: bytes, *, ttl: timedelta) -> bytes | None:
        """Set the key to this value and return None, or return the value that it has already, changing nothing."""

    async def compare_and_set(self, key: Key, expected: bytes, value: bytes, *, ttl: timedelta) -> bool:
        """Set the key to `value` only if it has the value `expected`; return whether it had."""

    async def compare_and_delete(self, key: Key, expected: bytes) -> bool:
        """Delete the key only if it has the value `expected`; return whether it had."""


def writes_conditionally(store: KvStore | None) -> TypeGuard[ConditionalKvStore]:
    """Tell whether the store has the conditional methods; one that is None counts as missing."""
    return isinstance(store, ConditionalKvStore)


def encode_key(key: Key) -> str:
    """Return the key as one readable text: its parts joined by `/`, with `%` and `/` in them escaped.

    Raises:
        ValueError: no parts, an empty one or no text, too many bytes, or not encodable as UTF-8 (a lone surrogate).
    """
    parts = key if isinstance(key, tuple) else (key,)
    if not parts or not all(isinstance(part, str) and part for part in parts):
        raise ValueError("a key is a text, or a tuple of texts, none of them empty")
    encoded = "/".join([part.replace("%", "%25").replace("/", "%2F") for part in parts])
    try:
        size = len(encoded.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"a key cannot be encoded as UTF-8: {error.reason}") from None
    if size > MAX_KEY_BYTES:
        raise ValueError(f"a key has at most {MAX_KEY_BYTES} bytes, escapes included, not {size}")
    return encoded


def check_value(value: bytes) -> None:
    """Accept bytes, up to 1 MiB.

    Raises:
        ValueError: the value is longer.
        TypeError: the value is not bytes.
    """
    if not isinstance(value, bytes):
        raise TypeError(f"a value is bytes, not {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"a value has at most {MAX_VALUE_BYTES} bytes, not {len(value)}")


def ttl_ms(ttl: timedelta) -> int:
    """Return the time to live in whole milliseconds, rounded up.

    Raises:
        ValueError: it is no timedelta above zero and up to 200 years.
    """
    if not isinstance(ttl, timedelta) or not timedelta(0) < ttl <= MAX_TTL:
        raise ValueError(f"a time to live is a timedelta above zero, up to 200 years, not {ttl!r}")
    return -(-ttl // _MILLISECOND)
