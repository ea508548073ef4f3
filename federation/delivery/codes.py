"""What `delivery_attempts.error_code` may hold, by outcome: the list every reader of the attempt log judges by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from db import AttemptOutcome
from federation.http.threat_policy import NetworkErrorCode

HTTP_CODE: Final = "HTTP_(?!2)[1-9][0-9]{2}"
"""Regular expression of the codes that name an HTTP status; they are retryable."""

ERROR_CODES: Final[Mapping[AttemptOutcome, frozenset[str]]] = {
    AttemptOutcome.DELIVERED: frozenset(),
    AttemptOutcome.RETRYABLE: frozenset(NetworkErrorCode) | {"DISCOVERY", "KEY_MATERIAL", "DATABASE", "INTERNAL"},
    AttemptOutcome.PERMANENT: frozenset(
        {
            "BLACKLISTED",
            "BLOCKED_URL",
            "BODY_TOO_LARGE",
            "INVALID_ACK",
            "INVALID_ACK_SIGNATURE",
            "INVALID_PAYLOAD",
            "NOT_JSON",
            "NO_ACK",
            "NO_OWN_KEYS",
            "NO_OWN_URL",
            "NO_PUBLIC_KEY",
        }
    ),
    AttemptOutcome.PARKED: frozenset({"PARKED"}),
}
"""Every code but those of `HTTP_CODE`. No code belongs to two outcomes."""

OWN_FAULTS: Final = frozenset(
    {
        "BLACKLISTED",
        "BLOCKED_URL",
        "DATABASE",
        "INTERNAL",
        "INVALID_PAYLOAD",
        "NO_OWN_KEYS",
        "NO_OWN_URL",
        "NO_PUBLIC_KEY",
    }
)
"""Failures that say nothing of the server: they are decided or caused on this side."""

FORGERIES: Final = frozenset({"INVALID_ACK", "INVALID_ACK_SIGNATURE"})
"""Somebody answered who could not prove to be the server."""
