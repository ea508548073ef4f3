"""The values of `delivery_attempts.error_code` that any wire may cause, and what each means for the delivery.

A failed attempt decides by this table and its wire's; `federation.codes` has all of them together, for readers of the
attempt log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from db import AttemptOutcome
from federation.http.threat_policy import NetworkErrorCode

HTTP_CODE: Final = "HTTP_(?!2)[1-9][0-9]{2}"
"""Regular expression of the codes that name an HTTP status; they are retryable."""

STORED_ALREADY: Final = 409
"""The one status besides a 2xx that a delivered attempt may have: a repeat that finds the activity there."""

STALLED: Final = "STALLED"
"""The code of attempts that lost their worker, and of deliveries that lost theirs too often."""

BLACKLISTED: Final = "BLACKLISTED"
"""The code of deliveries that an operator's rule ended: they were given up on purpose, and need nobody."""

INVALID_JOB: Final = "INVALID_JOB"
"""The one code that no attempt has: there was no delivery that it could belong to."""


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


@dataclass(frozen=True, slots=True)
class FailureCode:
    """What a code says of a failure: its class, and the outcome of the attempt that it ends.

    `is_own`: it says nothing about the server, as it is decided or caused on this side. `is_forgery`: somebody answered
    who could not prove to be the server.
    """

    failure_class: FailureClass
    outcome: AttemptOutcome
    is_own: bool = False
    is_forgery: bool = False


ENGINE_CODES: Final[Mapping[str, FailureCode]] = {
    **dict.fromkeys(
        (*NetworkErrorCode, "FOREIGN_ANSWER"), FailureCode(FailureClass.UNAVAILABLE, AttemptOutcome.RETRYABLE)
    ),
    "BODY_TOO_LARGE": FailureCode(FailureClass.REJECTED, AttemptOutcome.PERMANENT),
    **dict.fromkeys(
        ("DATABASE", "INTERNAL", STALLED), FailureCode(FailureClass.OURS, AttemptOutcome.RETRYABLE, is_own=True)
    ),
    **dict.fromkeys(
        (BLACKLISTED, "BLOCKED_URL", INVALID_JOB, "INVALID_PAYLOAD"),
        FailureCode(FailureClass.INVALID, AttemptOutcome.PERMANENT, is_own=True),
    ),
}
"""The codes of failures that any wire may meet. Beside them stand those of `HTTP_CODE`, whose class the wire tells."""

TOO_LARGE: Final = frozenset({413, 414, 431})
"""Statuses that are about the one request, whoever gives them: a proxy has limits of its own."""
