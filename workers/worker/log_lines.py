"""Text from outside, made safe for logs that keep one record per line."""

from __future__ import annotations

import re
from typing import Final

MAX_LINE_BYTES: Final = 8_192

# Controls, the line ends of Unicode, and lone surrogates, which no log file can hold.
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def log_line(text: str) -> str:
    """Return the text as one line of at most 8 KiB of UTF-8: control characters are escaped, the excess is cut."""
    escaped = _UNPRINTABLE.sub(_escape, text[:MAX_LINE_BYTES])
    return escaped.encode()[:MAX_LINE_BYTES].decode(errors="ignore")


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
