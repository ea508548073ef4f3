"""How much is possible, and how more is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

MAX_PRIORITY: Final = 2_097_151
MAX_ATTEMPTS: Final = 1_000_000
MAX_CHAIN_INDEX: Final = 1_000_000
MAX_PROGRESS_BYTES: Final = 4_096
MAX_DELAY: Final = timedelta(days=36_525)


def check_whole(what: str, value: int, least: int, most: int) -> None:
    """Accept whole numbers in a range; `True` counts nothing, and a storage would cut 1.5 in its own way."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} must be a whole number from {least} to {most}, not {value!r}")


def check_progress(value: bytes) -> None:
    """Accept at most 4 KiB.

    Raises:
        ValueError: it is longer.
    """
    if len(value) > MAX_PROGRESS_BYTES:
        raise ValueError(f"progress must be at most {MAX_PROGRESS_BYTES} bytes long, not {len(value)}")
