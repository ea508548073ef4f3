"""What a network failure means: may a relay be tried, and is a direct health probe worth making?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class NetworkErrorCode(StrEnum):
    """Why no usable HTTP answer came; stored as a server's `unhealthy_reason`, so the texts are a wire format."""

    DNS_BLOCKED = "DNS_BLOCKED"
    TIMEOUT = "TIMEOUT"
    CONN_REFUSED = "CONN_REFUSED"
    CONN_RESET = "CONN_RESET"
    TLS_ERROR = "TLS_ERROR"
    INVALID_RESPONSE_FROM_TARGET = "INVALID_RESPONSE_FROM_TARGET"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreatPolicy:
    """What may be done about a server after a failure of one kind."""

    relay_eligible: bool
    direct_health_checkable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOverride:
    """An administrator's wish for one code; a flag that is None keeps its default."""

    relay_eligible: bool | None = None
    direct_health_checkable: bool | None = None


_PROBE_ONLY = ThreatPolicy(relay_eligible=False, direct_health_checkable=True)
_RELAY_ONLY = ThreatPolicy(relay_eligible=True, direct_health_checkable=False)
_BOTH = ThreatPolicy(relay_eligible=True, direct_health_checkable=True)

_POLICIES: Mapping[NetworkErrorCode, ThreatPolicy] = {
    NetworkErrorCode.DNS_BLOCKED: _RELAY_ONLY,
    NetworkErrorCode.TIMEOUT: _PROBE_ONLY,
    NetworkErrorCode.CONN_REFUSED: _PROBE_ONLY,
    NetworkErrorCode.CONN_RESET: _PROBE_ONLY,
    NetworkErrorCode.TLS_ERROR: _PROBE_ONLY,
    NetworkErrorCode.INVALID_RESPONSE_FROM_TARGET: _RELAY_ONLY,
    NetworkErrorCode.UNKNOWN: _BOTH,
}

NO_OVERRIDES: Mapping[NetworkErrorCode, PolicyOverride] = {}


def get_threat_policy(
    code: str | None, overrides: Mapping[NetworkErrorCode, PolicyOverride] = NO_OVERRIDES
) -> ThreatPolicy:
    """Return the policy for *code*, with an administrator's single flags in place of the defaults.

    None (a server without a recorded reason) and a code that this version does not know count as `UNKNOWN`: both flags
    are set, so a row written by another version is still probed and can heal.
    """
    known = _known(code)
    policy, override = _POLICIES[known], overrides.get(known)
    if override is None:
        return policy
    if override.relay_eligible is not None:
        policy = replace(policy, relay_eligible=override.relay_eligible)
    if override.direct_health_checkable is not None:
        policy = replace(policy, direct_health_checkable=override.direct_health_checkable)
    return policy


def _known(code: str | None) -> NetworkErrorCode:
    try:
        return NetworkErrorCode(code)  # type: ignore[arg-type] # None is no member, which the lookup handles
    except ValueError:
        return NetworkErrorCode.UNKNOWN
