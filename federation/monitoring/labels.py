"""The few labels by which codes, paths and statuses are counted, so that the number of series is bounded."""

from __future__ import annotations

import re
from typing import Final

from db import AttemptOutcome
from federation.http.threat_policy import NetworkErrorCode

ATTEMPT_CODES: Final = frozenset(
    {
        *(code.value for code in NetworkErrorCode),
        *("BLACKLISTED", "BLOCKED_URL", "BODY_TOO_LARGE", "DATABASE", "DISCOVERY", "DISCOVERY_REFUSED"),
        *("FOREIGN_ANSWER", "INTERNAL", "INVALID_ACK"),
        *("INVALID_ACK_SIGNATURE", "INVALID_JOB", "INVALID_PAYLOAD", "KEY_MATERIAL", "NO_ACK"),
        *("NO_OWN_KEYS", "NO_OWN_URL", "NO_PUBLIC_KEY", "NO_RECEIVER", "PARKED", "STALLED"),
    }
)
OWN_FAULTS: Final = {
    "DATABASE": AttemptOutcome.RETRYABLE,
    "INTERNAL": AttemptOutcome.RETRYABLE,
    "NO_OWN_KEYS": AttemptOutcome.PERMANENT,
    "NO_OWN_URL": AttemptOutcome.PERMANENT,
}
"""Codes of attempts that fail on this side, with their outcome. An operator is woken for these."""
ENDPOINTS: Final = frozenset(
    {
        "/discover",
        "/discover/rotate/init",
        "/discover/rotate/confirm",
        "/api/auth/social/follows",
        "/api/auth/social/posts",
        "/proxy",
    }
)
OTHER: Final = "other"

_HTTP_CODE: Final = re.compile(r"HTTP_([1-5])[0-9]{2}")


def code_label(code: str | None) -> str:
    """Return one of about thirty labels: the code, `HTTP_4xx` for all of a class, `other` for unknown ones, `none`."""
    if code is None:
        return "none"
    if match := _HTTP_CODE.fullmatch(code):
        return f"HTTP_{match[1]}xx"
    return code if code in ATTEMPT_CODES else OTHER


def endpoint_label(path: str) -> str:
    """Return the path if it is an endpoint's, otherwise `other`."""
    return path if path in ENDPOINTS else OTHER


def status_label(status: int) -> str:
    """Return the class of an HTTP status, such as `4xx`."""
    return f"{status // 100}xx" if 100 <= status <= 599 else OTHER
