"""The table of network error codes."""

from __future__ import annotations

import pytest

from federation.http.threat_policy import NetworkErrorCode, PolicyOverride, get_threat_policy

TABLE = {
    "DNS_BLOCKED": (True, False),
    "TIMEOUT": (False, True),
    "CONN_REFUSED": (False, True),
    "CONN_RESET": (False, True),
    "TLS_ERROR": (False, True),
    "INVALID_RESPONSE_FROM_TARGET": (True, False),
    "UNKNOWN": (True, True),
}


@pytest.mark.parametrize("code", TABLE)
def test_policy_of_each_code(code: str) -> None:
    """Every code has the relay and probe flags other nodes give it."""
    policy = get_threat_policy(code)
    assert (policy.relay_eligible, policy.direct_health_checkable) == TABLE[code]


def test_table_is_complete() -> None:
    """No code exists without a row in the table."""
    assert set(TABLE) == set(NetworkErrorCode)


@pytest.mark.parametrize("code", [None, "", "SOMETHING_NEW"])
def test_unknown_code_counts_as_unknown(code: str | None) -> None:
    """A missing or foreign code allows both, so that the server can heal."""
    assert get_threat_policy(code) == get_threat_policy("UNKNOWN")


def test_override_changes_one_flag() -> None:
    """An administrator's flag replaces the default and leaves the other flag and the other codes alone."""
    overrides = {NetworkErrorCode.TIMEOUT: PolicyOverride(relay_eligible=True)}
    timeout = get_threat_policy("TIMEOUT", overrides)
    assert (timeout.relay_eligible, timeout.direct_health_checkable) == (True, True)
    assert get_threat_policy("CONN_RESET", overrides) == get_threat_policy("CONN_RESET")


def test_override_can_forbid() -> None:
    """False overrides as well as True."""
    overrides = {NetworkErrorCode.UNKNOWN: PolicyOverride(direct_health_checkable=False)}
    policy = get_threat_policy(None, overrides)
    assert (policy.relay_eligible, policy.direct_health_checkable) == (True, False)
