"""What a reader of bytes from strangers is for the tests, and how inputs are made that break one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Final

from federation.protocol.errors import ProtocolError

LARGEST: Final = 1 << 20
NOW: Final = datetime(2026, 1, 2, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Reader:
    """`read` returns or raises one of `refusals`, whatever it is given; `seeds` it takes, or nearly."""

    read: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...] = (ProtocolError,)
    costly: bool = False
    """Most of its time is cryptography, which other inputs do not reach more of."""


_TOKENS: Final = (
    *(
        b'"',
        b"\\",
        b"\\u0000",
        b"\\ud800",
        b"\x00",
        b"[" * 99,
        b"[" * 5_000,
        b"1e999",
        b"-0",
        b"null",
        b"{}",
        b"0",
        b",",
        b"%",
        b"\n",
    ),
    *(b"\xed\xa0\x80", b"\xe2\x80\xae", b"\xff", b"9" * 20),
)


def altered(data: bytes, random: Random) -> bytes:
    """*data* with one to three places of it replaced: by something that often breaks a reader, by noise, by nothing."""
    for _ in range(random.randint(1, 3)):
        start = random.randint(0, len(data))
        end = start + random.choice((0, 1, 8, len(data)))
        data = (
            data[:start] + random.choice((random.choice(_TOKENS), random.randbytes(random.randint(0, 8)))) + data[end:]
        )
    return data


def text_of(data: bytes) -> str:
    """Any bytes as a text such as JSON can hold: with lone surrogates for what is no UTF-8."""
    return data.decode("utf-8", "surrogateescape")
