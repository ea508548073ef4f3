"""The list of error codes is what the delivery code emits, no more and no less."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import federation
from db import AttemptOutcome
from federation.delivery.codes import ERROR_CODES, FORGERIES, HTTP_CODE, OWN_FAULTS
from federation.http.threat_policy import NetworkErrorCode

SOURCES = Path(federation.__file__).parent
FAILURES = {"PermanentFailure": AttemptOutcome.PERMANENT, "RetryableFailure": AttemptOutcome.RETRYABLE}
NOT_LOGGED = {"INVALID_JOB"}
"""Raised before there is a delivery an attempt could belong to."""


def raised() -> Iterator[tuple[AttemptOutcome, ast.expr]]:
    """Every place that names a code, as the outcome and the expression of the code."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in FAILURES:
                yield FAILURES[node.func.id], node.args[0]
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "_log" and len(node.args) == 5:
                outcome = node.args[2]
                if isinstance(outcome, ast.Attribute) and outcome.attr == "PARKED":
                    yield AttemptOutcome.PARKED, node.args[3]


def test_every_literal_code_is_listed_under_its_outcome() -> None:
    """A code somebody adds to the delivery code without listing it would send its attempts to quarantine."""
    emitted: dict[AttemptOutcome, set[str]] = {outcome: set() for outcome in AttemptOutcome}
    for outcome, code in raised():
        if isinstance(code, ast.Constant):
            emitted[outcome].add(code.value)
    emitted[AttemptOutcome.PERMANENT] -= NOT_LOGGED
    emitted[AttemptOutcome.RETRYABLE] |= set(NetworkErrorCode)
    assert emitted == ERROR_CODES


def test_codes_that_are_no_literals_are_the_two_we_know() -> None:
    """Any other computed code could be anything, and nobody would list it."""
    computed = {ast.unparse(code) for _, code in raised() if not isinstance(code, ast.Constant)}
    assert computed == {"error.code", "f'HTTP_{response.status}'"}


def test_http_codes_are_those_of_refusals() -> None:
    """Every status but a 2xx, which is an answer."""
    listed = [status for status in range(1000) if re.fullmatch(HTTP_CODE, f"HTTP_{status}")]
    assert listed == [status for status in range(100, 1000) if not 200 <= status <= 299]


def test_no_code_has_two_outcomes() -> None:
    """A day's errors are counted by code alone."""
    assert sum(map(len, ERROR_CODES.values())) == len(frozenset[str]().union(*ERROR_CODES.values()))


def test_faults_and_forgeries_are_codes() -> None:
    """A misspelt one would never be found among the attempts."""
    known = frozenset[str]().union(*ERROR_CODES.values())
    assert known >= OWN_FAULTS | FORGERIES
    assert not OWN_FAULTS & FORGERIES
