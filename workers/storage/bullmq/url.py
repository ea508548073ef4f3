"""What the URL of a BullMQ queue says beside its server."""

from __future__ import annotations

from typing import Final

from workers.errors import StorageError
from workers.storage.redis_urls import take_parameter

STALLS_PARAMETER: Final = "max_foreign_stalls"
METRICS_PARAMETER: Final = "metrics"


def stalls_of(url: str) -> int | None:
    """Return the `max_foreign_stalls` of a storage's URL, None if it says nothing.

    Raises:
        StorageError: it is no number.
    """
    return _number(url, STALLS_PARAMETER, "a whole number of at least 0")


def metrics_of(url: str) -> int | None:
    """Return the `metrics` of a storage's URL, None if it says nothing.

    Raises:
        StorageError: it is no number.
    """
    return _number(url, METRICS_PARAMETER, "a whole number of minutes")


def server_url(url: str) -> str:
    """Return a storage's URL without what only the storage understands, apart from the queue."""
    for name in (STALLS_PARAMETER, METRICS_PARAMETER):
        url, _ = take_parameter(url, name)
    return url


def _number(url: str, name: str, wanted: str) -> int | None:
    written = take_parameter(url, name)[1]
    if written is not None and not (written.isascii() and written.isdigit()):
        raise StorageError(f"{name} is {wanted}, not {written[:40]!r}")
    return None if written is None else int(written)
