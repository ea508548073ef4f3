"""Metadata of a job: a few short texts that travel with it, for people and for tracing, and that no handler needs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

MAX_META: Final = 16
"""How many names a job's metadata has at most."""
MAX_META_NAME_BYTES: Final = 64
MAX_META_VALUE_BYTES: Final = 512
MAX_META_BYTES: Final = 2_048
"""How long names and values are together."""
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
TRACE_NAMES: Final = (TRACEPARENT, TRACESTATE)
"""The trace context of the enqueue, as W3C's headers have it: beside the number and length of everything else."""


def check_meta(meta: object) -> dict[str, str]:
    """Return a copy of metadata that may be stored with a job.

    Raises:
        ValueError: more than `MAX_META` names, or more than `MAX_META_BYTES` of them and their values; a name that is
            not 1 to 64 bytes of UTF-8, a value of more than 512.
        TypeError: no mapping of texts to texts.
    """
    if not isinstance(meta, Mapping):
        raise TypeError(f"meta is a mapping of texts to texts, not {type(meta).__name__}")
    found = dict(meta)
    sizes = {name: _size(name, value) for name, value in found.items()}
    counted = [size for name, size in sizes.items() if name not in TRACE_NAMES]
    if len(counted) > MAX_META:
        raise ValueError(f"meta has at most {MAX_META} names, not {len(counted)}")
    if sum(counted) > MAX_META_BYTES:
        raise ValueError(f"meta has at most {MAX_META_BYTES} bytes of names and values, not {sum(counted)}")
    return found


def _size(name: object, value: object) -> int:
    if not isinstance(name, str):
        raise TypeError(f"a name in meta is text, not {type(name).__name__}")
    length = _bytes("a name in meta", name)
    if not 1 <= length <= MAX_META_NAME_BYTES:
        raise ValueError(f"a name in meta is 1 to {MAX_META_NAME_BYTES} bytes long, not {length}")
    if not isinstance(value, str):
        raise TypeError(f"meta[{name!r}] is text, not {type(value).__name__}")
    size = _bytes(f"meta[{name!r}]", value)
    if size > MAX_META_VALUE_BYTES:
        raise ValueError(f"meta[{name!r}] is at most {MAX_META_VALUE_BYTES} bytes long, not {size}")
    return length + size


def _bytes(what: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} cannot be encoded as UTF-8: {error.reason} at {error.start}") from None


def encode_meta(meta: Mapping[str, str]) -> str:
    """Return it as JSON of ASCII; storages write none for a job without metadata."""
    return json.dumps(dict(meta), separators=(",", ":"))


def decode_meta(text: str | bytes) -> dict[str, str]:
    """Return what `encode_meta` was given; nothing for what somebody made unreadable, so that the job still runs."""
    try:
        return read_meta(json.loads(text))
    except (ValueError, RecursionError):
        return {}


def read_meta(value: object, names: Iterable[str] | None = None) -> dict[str, str]:
    """Return the metadata in a JSON value, only that of these `names` if some are given; nothing if it is none."""
    if not isinstance(value, Mapping):
        return {}
    try:
        return check_meta(value if names is None else {name: value[name] for name in names if name in value})
    except (ValueError, TypeError):
        return {}
