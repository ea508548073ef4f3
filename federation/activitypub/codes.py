"""The failures of ActivityPub's wire, beside the engine's, and the classes of what receivers answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from db import AttemptOutcome
from federation.delivery.error_codes import STORED_ALREADY, FailureClass, FailureCode
from federation.http.messages import NOT_JUDGED, asks_for_rest

_PERMANENT, _RETRYABLE = AttemptOutcome.PERMANENT, AttemptOutcome.RETRYABLE

PLAIN_HTTP: Final = "PLAIN_HTTP"
"""The code of what is owed to an inbox on plain http, to which this node does not send."""
ALLOWS_HTTP: Final = "FEDERATION_ACTIVITYPUB_HTTP=1 allows it"

CODES: Final[Mapping[str, FailureCode]] = {
    "INBOX_GONE": FailureCode(FailureClass.REJECTED, _PERMANENT, is_own=True),
    "NO_OWN_KEYS": FailureCode(FailureClass.OURS, _PERMANENT, is_own=True),
    "OWN_ACTOR_UNREACHABLE": FailureCode(FailureClass.OURS, _RETRYABLE, is_own=True),
    PLAIN_HTTP: FailureCode(FailureClass.OURS, _PERMANENT, is_own=True),
}
"""An inbox that is gone says nothing about its server, which answers. Who owed something to plain http was allowed to: a setting
that is missing where it is sent must not delete it."""

NOT_FOUND: Final = 404
GONE: Final = 410
NOT_IMPLEMENTED: Final = 501


def is_taken(status: int) -> bool:
    """Tell whether the receiver has the activity, from this request or an earlier one."""
    return 200 <= status <= 299 or status == STORED_ALREADY


def class_of_status(status: int, *, asks_to_wait: bool) -> FailureClass:
    """Return the class of a status by which an activity is not taken; `asks_to_wait`: it has a `Retry-After`.

    The body says nothing: receivers answer in many ways, and some with pages.
    """
    if asks_for_rest(status, with_pause=asks_to_wait):
        return FailureClass.REST
    is_refusal = 400 <= status <= 499 and status not in NOT_JUDGED
    return FailureClass.REJECTED if is_refusal or status == NOT_IMPLEMENTED else FailureClass.UNAVAILABLE
