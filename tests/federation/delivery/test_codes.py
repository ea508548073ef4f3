"""The list of error codes is what the delivery code emits, no more and no less."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import federation
from db import AttemptOutcome
from federation.codes import CODES, FORGERIES, LOGGED_CODES, OWN_FAULTS
from federation.delivery import error_codes
from federation.delivery.error_codes import HTTP_CODE, STALLED, FailureClass
from federation.http.threat_policy import NetworkErrorCode
from federation.sealed.codes import MAY_BE_ABOUT_KEYS, class_of_status

SOURCES = Path(federation.__file__).parent
FAILURES = {"PermanentFailure": AttemptOutcome.PERMANENT, "RetryableFailure": AttemptOutcome.RETRYABLE}
NOT_LOGGED = {"INVALID_JOB"}
"""Raised before there is a delivery an attempt could belong to."""
NOT_RAISED = {STALLED}
"""Written by who finds the traces of an attempt that could not say anything any more."""
NO_MORE = {AttemptOutcome.PARKED: {"PARKED"}, AttemptOutcome.PERMANENT: {"NOT_JSON"}}
"""Of earlier versions, whose attempts are still read."""
STATUSES = {"HTTP_429", "HTTP_401"}
"""Of a discovery that the server asked to come back later: no response of the delivery's own has this status; and of a
refusal that may be our fault."""


@cache
def raised() -> list[tuple[AttemptOutcome, ast.expr]]:
    """Every place that names a code, as the outcome and the expression of the code."""
    calls = (
        node
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    )
    return [
        (FAILURES[call.func.id], call.args[0])
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in FAILURES
    ]


def test_every_literal_code_is_listed_under_its_outcome() -> None:
    """A code somebody adds to the delivery code without listing it would send its attempts to quarantine."""
    emitted: dict[AttemptOutcome, set[str]] = {outcome: set() for outcome in AttemptOutcome}
    for outcome, code in raised():
        if isinstance(code, ast.Constant):
            emitted[outcome].add(code.value)
        elif isinstance(code, ast.Name):
            emitted[outcome].add(getattr(error_codes, code.id))
    emitted[AttemptOutcome.PERMANENT] -= NOT_LOGGED
    for outcome, codes in NO_MORE.items():
        emitted[outcome] |= codes
    assert emitted[AttemptOutcome.RETRYABLE] >= STATUSES
    emitted[AttemptOutcome.RETRYABLE] -= STATUSES
    emitted[AttemptOutcome.RETRYABLE] |= NOT_RAISED | set(NetworkErrorCode)
    assert emitted == LOGGED_CODES


def test_codes_that_are_no_literals_are_the_two_we_know() -> None:
    """Any other computed code could be anything, and nobody would list it."""
    computed = {ast.unparse(code) for _, code in raised() if not isinstance(code, ast.Constant | ast.Name)}
    assert computed == {"error.code", "f'HTTP_{response.status}'"}


def test_http_codes_are_those_of_refusals() -> None:
    """Every status but a 2xx, which is an answer."""
    listed = [status for status in range(1000) if re.fullmatch(HTTP_CODE, f"HTTP_{status}")]
    assert listed == [status for status in range(100, 1000) if not 200 <= status <= 299]


def test_no_code_has_two_outcomes() -> None:
    """A day's errors are counted by code alone."""
    assert sum(map(len, LOGGED_CODES.values())) == len(frozenset[str]().union(*LOGGED_CODES.values()))


def test_faults_and_forgeries_are_codes() -> None:
    """A misspelt one would never be found among the attempts."""
    assert CODES.keys() >= OWN_FAULTS | FORGERIES
    assert not OWN_FAULTS & FORGERIES


def test_every_code_that_is_raised_has_a_class() -> None:
    """Not only those that somebody remembered to list: without one, nobody knows what becomes of the delivery."""
    literal = {code.value for _, code in raised() if isinstance(code, ast.Constant)}
    assert literal - STATUSES <= CODES.keys()


@pytest.mark.parametrize(
    ("kind", "codes"),
    [
        (
            FailureClass.UNAVAILABLE,
            {
                *("DNS_BLOCKED", "TIMEOUT", "CONN_REFUSED", "CONN_RESET", "TLS_ERROR", "UNKNOWN"),
                *("INVALID_RESPONSE_FROM_TARGET", "DISCOVERY", "FOREIGN_ANSWER"),
            },
        ),
        (FailureClass.REST, set()),
        (
            FailureClass.REJECTED,
            {
                *("BODY_TOO_LARGE", "DISCOVERY_REFUSED", "INVALID_ACK", "INVALID_ACK_SIGNATURE", "KEY_MATERIAL"),
                *("INBOX_GONE", "NO_ACK", "NO_PUBLIC_KEY", "NO_RECEIVER"),
            },
        ),
        (
            FailureClass.OURS,
            {
                *("DATABASE", "INTERNAL", "STALLED", "NO_OWN_URL", "NO_OWN_KEYS"),
                *("OWN_ACTOR_UNREACHABLE", "PLAIN_HTTP"),
            },
        ),
        (FailureClass.INVALID, {"BLACKLISTED", "BLOCKED_URL", "INVALID_JOB", "INVALID_PAYLOAD"}),
    ],
)
def test_the_class_of_each_code(kind: FailureClass, codes: set[str]) -> None:
    """As the specification has them: whoever moves a code changes what becomes of deliveries."""
    assert {code for code, told in CODES.items() if told.failure_class is kind} == codes


UNAVAILABLE, REST, REJECTED = FailureClass.UNAVAILABLE, FailureClass.REST, FailureClass.REJECTED


JUDGED = (400, 401, 403, 404, 405, 409, 410, 415, 421, 422, 451, 499)
FAILED = (500, 501, 502, 504, 507, 520, 530, 599)


@pytest.mark.parametrize("is_json", [True, False])
@pytest.mark.parametrize(
    ("statuses", "asks_to_wait", "kind"),
    [
        ((429,), False, REST),
        ((429, 503), True, REST),
        ((503, *FAILED), False, UNAVAILABLE),
        (FAILED, True, UNAVAILABLE),
        ((300, 301, 302, 303, 304, 307, 308), True, UNAVAILABLE),
        ((408, 425), False, UNAVAILABLE),
        ((408, 425), True, UNAVAILABLE),
        ((413, 414, 431), False, REJECTED),
        ((413, 414, 431), True, REJECTED),
        ((100, 199, 600, 999), False, UNAVAILABLE),
    ],
)
def test_the_class_of_a_status(
    statuses: tuple[int, ...], asks_to_wait: bool, is_json: bool, kind: FailureClass
) -> None:
    """Whatever the body. What is too large for a proxy is this delivery's affair, whoever says so."""
    found = {status: class_of_status(status, asks_to_wait=asks_to_wait, is_json=is_json) for status in statuses}
    assert found == dict.fromkeys(statuses, kind)


@pytest.mark.parametrize("asks_to_wait", [True, False])
@pytest.mark.parametrize(("is_json", "kind"), [(True, REJECTED), (False, UNAVAILABLE)])
def test_a_refusal_is_json(is_json: bool, kind: FailureClass, asks_to_wait: bool) -> None:
    """A page is nobody's answer: any proxy has one for each of these."""
    found = {status: class_of_status(status, asks_to_wait=asks_to_wait, is_json=is_json) for status in JUDGED}
    assert found == dict.fromkeys(JUDGED, kind)


def test_refusals_that_may_be_a_misunderstanding() -> None:
    """Those by which servers say that they do not know the sender, or cannot read what it sealed."""
    assert {"HTTP_400", "HTTP_401", "HTTP_403"} == MAY_BE_ABOUT_KEYS
