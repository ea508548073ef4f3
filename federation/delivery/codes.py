"""The values of `delivery_attempts.error_code`: the outcome each belongs to, and what it means for the delivery.

Every reader of the attempt log judges by this list, and a failed attempt decides by this one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from db import AttemptOutcome
from federation.http.response import NOT_JUDGED, asks_for_rest
from federation.http.threat_policy import NetworkErrorCode

HTTP_CODE: Final = "HTTP_(?!2)[1-9][0-9]{2}"
"""Regular expression of the codes that name an HTTP status; they are retryable."""

STORED_ALREADY: Final = 409
"""The one status besides a 2xx that a delivered attempt may have: a repeat that finds the activity there."""

STALLED: Final = "STALLED"
"""The code of attempts that lost their worker, and of deliveries that lost theirs too often."""

BLACKLISTED: Final = "BLACKLISTED"
"""The code of deliveries that an operator's rule ended: they were given up on purpose, and need nobody."""


class FailureClass(StrEnum):
    """What a failure says, and therefore what becomes of the delivery when its attempts are used up."""

    UNAVAILABLE = "unavailable"
    """The server could not judge the delivery: it is held until the server is back."""
    REST = "rest"
    """The server asked for a pause: the delivery is held for that long, and the attempt does not count."""
    REJECTED = "rejected"
    """The server answered and refuses: the delivery has failed, and is kept for a while."""
    OURS = "ours"
    """A fault of this node: the delivery is held for a while."""
    INVALID = "invalid"
    """It can never be delivered, or must not be: it has failed, and leaves nothing to look at."""


ERROR_CODES: Final[Mapping[AttemptOutcome, frozenset[str]]] = {
    AttemptOutcome.DELIVERED: frozenset(),
    AttemptOutcome.RETRYABLE: frozenset(NetworkErrorCode)
    | {"DISCOVERY", "DISCOVERY_REFUSED", "FOREIGN_ANSWER", "KEY_MATERIAL", "DATABASE", "INTERNAL", STALLED},
    AttemptOutcome.PERMANENT: frozenset(
        {
            "BLACKLISTED",
            "BLOCKED_URL",
            "BODY_TOO_LARGE",
            "INVALID_ACK",
            "INVALID_ACK_SIGNATURE",
            "INVALID_PAYLOAD",
            "NO_ACK",
            "NO_OWN_KEYS",
            "NO_OWN_URL",
            "NO_PUBLIC_KEY",
            "NO_RECEIVER",
        }
    ),
    AttemptOutcome.PARKED: frozenset({"PARKED"}),
}
"""Every code but those of `HTTP_CODE`. No code belongs to two outcomes."""

LOGGED_CODES: Final[Mapping[AttemptOutcome, frozenset[str]]] = {
    **ERROR_CODES,
    AttemptOutcome.PERMANENT: ERROR_CODES[AttemptOutcome.PERMANENT] | {"NOT_JSON"},
}
"""The same, and what earlier versions have left in the log and in exports of it."""

CLASSES: Final[Mapping[str, FailureClass]] = {
    **dict.fromkeys(NetworkErrorCode, FailureClass.UNAVAILABLE),
    **dict.fromkeys(("DISCOVERY", "FOREIGN_ANSWER"), FailureClass.UNAVAILABLE),
    **dict.fromkeys(
        (
            *("BODY_TOO_LARGE", "DISCOVERY_REFUSED", "INVALID_ACK", "INVALID_ACK_SIGNATURE", "KEY_MATERIAL"),
            *("NO_ACK", "NO_PUBLIC_KEY", "NO_RECEIVER"),
        ),
        FailureClass.REJECTED,
    ),
    **dict.fromkeys(("DATABASE", "INTERNAL", "NO_OWN_KEYS", "NO_OWN_URL", STALLED), FailureClass.OURS),
    **dict.fromkeys(("BLACKLISTED", "BLOCKED_URL", "INVALID_JOB", "INVALID_PAYLOAD"), FailureClass.INVALID),
}
"""The class of every code except those of `HTTP_CODE`, which `class_of_status` classifies."""

_LOOKED_AT: Final = frozenset({400, 401, 403})
TOO_LARGE: Final = frozenset({413, 414, 431})
"""Statuses that are about the one request, whoever gives them: a proxy has limits of its own."""


def class_of_status(status: int, *, asks_to_wait: bool, is_json: bool) -> FailureClass:
    """Return the class of an HTTP status that is not a 2xx.

    `asks_to_wait`: the answer has a `Retry-After`; `is_json`: its body is a JSON object. Anything else is the page of a
    proxy or a hoster, and not the server's answer.
    """
    if asks_for_rest(status, with_pause=asks_to_wait):
        return FailureClass.REST
    if status in TOO_LARGE:
        return FailureClass.REJECTED
    if status in NOT_JUDGED or not 400 <= status <= 499 or not is_json:
        return FailureClass.UNAVAILABLE
    return FailureClass.REJECTED


def may_be_misunderstood(code: str) -> bool:
    """Tell whether the refusal may be about who we are or which key we sealed to.

    Then `/discover` is looked at first.
    """
    return code in {f"HTTP_{status}" for status in _LOOKED_AT}


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
        "NO_RECEIVER",
        STALLED,
    }
)
"""Failures that say nothing about the server: they are decided or caused on this side."""

FORGERIES: Final = frozenset({"INVALID_ACK", "INVALID_ACK_SIGNATURE"})
"""Somebody answered who could not prove to be the server."""
