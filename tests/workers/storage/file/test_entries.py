"""The entries of a journal: what this version does not write is told from what it writes, whatever it is."""

from __future__ import annotations

import json

import pytest

from workers.storage.file.codec import BadEntry, decode
from workers.storage.file.frames import Frame

STATE = ["queued", 0, 0, 1, 0, 0, 0, None, None, None, None, False, None, None, None]


@pytest.mark.parametrize(
    ("entry", "blobs"),
    [
        (["x", "a"], b""),
        (["g", "9", "a"], b""),
        (["g", "0"], b""),
        (["q", 7], b""),
        (["t", "", "a", 1 << 80], b""),
        (["s", "", "a", "asleep", *STATE[1:], None], b""),
        (["s", "", "a", *STATE, 3], b"re"),
        (["s", "", "a", *STATE, -1], b"r"),
        (["s", "", "a", *STATE, 3], b"ress"),
        (["s", "", "a", *STATE, None, None, None, 7], b""),
        (["c", "a", 1, None], b""),
        (["c", "a", 1, "soon", "{}"], b""),
        (["l", "api", "10 a second", None, None, 0], b""),
        (["l", "api", "10/s", None], b""),
        (["b", "\x1eLapi\x1fa", "soon"], b""),
        (7, b""),
    ],
    ids=[
        *("unknown-kind", "unknown-event", "breaks-off", "number-for-text", "no-time", "unknown-state"),
        *("result-missing", "negative-length", "bytes-left-over", "half-moved-back", "cron-breaks-off", "no-due-time"),
        *("no-rate", "limit-breaks-off", "no-time-of-a-bucket", "no-list"),
    ],
)
def test_what_this_version_does_not_write_is_a_bad_entry(entry: object, blobs: bytes) -> None:
    """Which is set aside, and spoils nothing else: no other error leaves the decoder."""
    with pytest.raises(BadEntry):
        decode(Frame(entries=json.dumps([entry]).encode(), blobs=blobs, start=0, end=0))
