"""The bytes of a journal: a preamble, then frames, each of them whole or void.

    preamble  "workers-queue 4\\n" · marker, 8 random bytes · the predecessor's marker, 8 bytes
              · where the snapshot ends, u64 · CRC-32 of all that, u32
    frame     marker · length of the entries, u32 · length of the blobs, u64 · CRC-32 of lengths, entries and blobs, u32
              · entries, JSON · blobs, raw

The 5 is the version of all that follows: a journal of another one is left alone. Numbers are little-endian. The marker
differs from file to file and appears in no message. So the next frame can be found by it after damage, and a payload,
which strangers may write, cannot pass for a frame.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Entry: TypeAlias = Sequence[object]

VERSION: Final = 5
"""What a version does not know it takes for damage: whoever adds something to what is written counts on."""

_MAGIC: Final = b"workers-queue %d\n" % VERSION
_ANY_MAGIC: Final = b"workers-queue "
_PREAMBLE: Final = struct.Struct("<16s8s8sQ")
_CHECK: Final = struct.Struct("<I")
_LENGTHS: Final = struct.Struct("<IQ")
_HEADER_BYTES: Final = 8 + _LENGTHS.size + _CHECK.size
_READ_AHEAD: Final = 1 << 20

PREAMBLE_BYTES: Final = _PREAMBLE.size + _CHECK.size
NO_MARKER: Final = bytes(8)


class OtherVersion(Exception):
    """The journal is of another version, which the message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preamble:
    """The beginning of a journal."""

    marker: bytes = field(default_factory=lambda: os.urandom(8))
    predecessor: bytes = NO_MARKER
    """The marker of the journal that this one replaced; its last state is this one's snapshot."""
    snapshot_end: int = PREAMBLE_BYTES

    def encode(self) -> bytes:
        """Return the bytes at the beginning of the file."""
        body = _PREAMBLE.pack(_MAGIC, self.marker, self.predecessor, self.snapshot_end)
        return body + _CHECK.pack(zlib.crc32(body))

    @classmethod
    def decode(cls, data: bytes) -> Preamble | None:
        """Read the preamble that `data` begins with; None when there is none.

        Raises:
            OtherVersion: it is one of another version.
        """
        body, check = data[: _PREAMBLE.size], data[_PREAMBLE.size : PREAMBLE_BYTES]
        is_ours = body.startswith(_MAGIC)
        if body.startswith(_ANY_MAGIC) and not is_ours:
            raise OtherVersion(body[len(_ANY_MAGIC) : len(_MAGIC)].decode(errors="replace").strip())
        if len(data) < PREAMBLE_BYTES or not is_ours or check != _CHECK.pack(zlib.crc32(body)):
            return None
        _, marker, predecessor, snapshot_end = _PREAMBLE.unpack(body)
        return cls(marker=marker, predecessor=predecessor, snapshot_end=snapshot_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What one step wrote: its entries, then their payloads and results, one after another."""

    entries: bytes
    blobs: bytes = field(repr=False)
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes that are no frame; `torn` when nothing valid comes after them."""

    start: int
    end: int
    torn: bool


def encode(marker: bytes, entries: Sequence[Entry], blobs: Sequence[bytes]) -> bytes:
    """Return one frame."""
    text = json.dumps(entries, separators=(",", ":"), check_circular=False).encode()
    body = b"".join((text, *blobs))
    lengths = _LENGTHS.pack(len(text), len(body) - len(text))
    return b"".join((marker, lengths, _CHECK.pack(zlib.crc32(body, zlib.crc32(lengths))), body))


def scan(descriptor: int, marker: bytes, start: int) -> Iterator[Frame | Damage]:
    """Yield everything in the file from `start` on, in order.

    The caller holds the lock, so nothing is being written.
    """
    size = os.fstat(descriptor).st_size
    # Buffered, because most frames are small; a new file object each time, because buffers grow stale.
    with open(descriptor, "rb", buffering=_READ_AHEAD, closefd=False) as file:
        while start < size:
            file.seek(start)
            frame = _frame(file.read(_HEADER_BYTES), start, size, marker, file.read)
            if frame is None:
                end = _next_frame(descriptor, marker, start, size)
                yield Damage(start=start, end=end or size, torn=end is None)
                start = end or size
            else:
                yield frame
                start = frame.end


def _frame(header: bytes, start: int, size: int, marker: bytes, read: Callable[[int], bytes]) -> Frame | None:
    if len(header) < _HEADER_BYTES or not header.startswith(marker):
        return None
    lengths = header[8 : 8 + _LENGTHS.size]
    text, blobs = _LENGTHS.unpack(lengths)
    end = start + _HEADER_BYTES + text + blobs
    if end > size:
        return None
    body = read(text + blobs)
    if _CHECK.pack(zlib.crc32(body, zlib.crc32(lengths))) != header[-_CHECK.size :]:
        return None
    return Frame(entries=body[:text], blobs=body[text:], start=start, end=end)


def _next_frame(descriptor: int, marker: bytes, start: int, size: int) -> int | None:
    rest = os.pread(descriptor, size - start, start)
    found = rest.find(marker, 1)
    file = io.BytesIO(rest)
    while found >= 0:
        file.seek(found)
        if _frame(file.read(_HEADER_BYTES), start + found, size, marker, file.read):
            return start + found
        found = rest.find(marker, found + 1)
    return None
