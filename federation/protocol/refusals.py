"""What a server says about its refusal: the one word of its answer that is fit to be passed on."""

from __future__ import annotations

import re
from typing import Final

from federation.protocol.encodings import parse_json
from federation.protocol.errors import ProtocolError

MAX_REFUSAL_BYTES: Final = 64 * 1024
_CODE: Final = re.compile(r"[A-Z0-9_]{1,64}")


def refusal_code(body: bytes) -> tuple[bool, str | None]:
    """Return whether a refusal's body is a JSON object, and its `code`, or else its `reason`, if that is a code.

    A code is 1 to 64 capital letters, digits and underscores; any other text may be anything, and is not passed on.
    """
    try:
        refusal = parse_json(body, limit=MAX_REFUSAL_BYTES)
    except ProtocolError:
        return False, None
    if not isinstance(refusal, dict):
        return False, None
    for name in ("code", "reason"):
        value = refusal.get(name)
        if isinstance(value, str) and _CODE.fullmatch(value):
            return True, value
    return True, None
