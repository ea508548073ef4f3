"""The values of `delivery_attempts.error_code`, of the engine and of all wires. Readers of the log judge by these.

No code belongs to two outcomes, as a day's errors are counted by code alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from db import AttemptOutcome
from federation.activitypub.codes import CODES as ACTIVITYPUB_CODES
from federation.delivery.error_codes import ENGINE_CODES, INVALID_JOB, FailureCode
from federation.sealed.codes import CODES as SEALED_CODES

CODES: Final[Mapping[str, FailureCode]] = {**ENGINE_CODES, **SEALED_CODES, **ACTIVITYPUB_CODES}
"""What each code says. Beside them stand those of `HTTP_CODE`, which are retryable."""

_OF_EARLIER_VERSIONS: Final[Mapping[AttemptOutcome, frozenset[str]]] = {
    AttemptOutcome.PERMANENT: frozenset({"NOT_JSON"}),
    AttemptOutcome.PARKED: frozenset({"PARKED"}),
}
LOGGED_CODES: Final[Mapping[AttemptOutcome, frozenset[str]]] = {
    outcome: frozenset(code for code, told in CODES.items() if told.outcome is outcome and code != INVALID_JOB)
    | _OF_EARLIER_VERSIONS.get(outcome, frozenset())
    for outcome in AttemptOutcome
}
"""The codes of attempts in the log and in exports of it, by outcome."""

OWN_FAULTS: Final = frozenset(code for code, told in CODES.items() if told.is_own)
"""Failures that say nothing about the server: they are decided or caused on this side."""

FORGERIES: Final = frozenset(code for code, told in CODES.items() if told.is_forgery)
"""Somebody answered who could not prove to be the server."""
