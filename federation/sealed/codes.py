"""The failures of the sealed wire, beside the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from db import AttemptOutcome
from federation.delivery.error_codes import TOO_LARGE, FailureClass, FailureCode
from federation.http.messages import NOT_JUDGED, asks_for_rest

_PERMANENT, _RETRYABLE = AttemptOutcome.PERMANENT, AttemptOutcome.RETRYABLE
_REJECTED: Final = FailureCode(FailureClass.REJECTED, _RETRYABLE)

CODES: Final[Mapping[str, FailureCode]] = {
    "DISCOVERY": FailureCode(FailureClass.UNAVAILABLE, _RETRYABLE),
    **dict.fromkeys(("DISCOVERY_REFUSED", "KEY_MATERIAL"), _REJECTED),
    "INVALID_ACK_SIGNATURE": FailureCode(FailureClass.REJECTED, _PERMANENT, is_forgery=True),
    # The wrong shape proves nothing: a server with a bug answers so.
    **dict.fromkeys(("INVALID_ACK", "NO_ACK"), FailureCode(FailureClass.REJECTED, _PERMANENT)),
    **dict.fromkeys(("NO_PUBLIC_KEY", "NO_RECEIVER"), FailureCode(FailureClass.REJECTED, _PERMANENT, is_own=True)),
    **dict.fromkeys(("NO_OWN_KEYS", "NO_OWN_URL"), FailureCode(FailureClass.OURS, _PERMANENT, is_own=True)),
}

MAY_BE_ABOUT_KEYS: Final = frozenset({"HTTP_400", "HTTP_401", "HTTP_403"})
"""Refusals that may be about who we are or which key we sealed to: then `/discover` is looked at first."""


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
