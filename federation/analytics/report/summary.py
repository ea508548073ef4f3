"""The findings as JSON, for whoever reads them by program: the same results make the same summary."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from federation.analytics.data.results import write_text
from federation.analytics.report.comparison import Stretch, compare
from federation.analytics.report.wording import short

if TYPE_CHECKING:
    from datetime import date

    from federation.analytics.data.snapshots import Place
    from federation.analytics.report.findings import Findings, RelayFinding, Server

SUMMARY_FILE: Final = "summary.json"

_MOST_SERVERS: Final = 10
_DIGITS: Final = 6


def write_summary(summary: dict[str, object], out: Place) -> None:
    """Write the summary to `out`/summary.json, whole or not at all."""
    write_text(f"{json.dumps(summary, indent=2, allow_nan=False)}\n", SUMMARY_FILE, out)


def summary_of(findings: Findings) -> dict[str, object]:
    """Return what the findings say, in values that JSON has."""
    comparison = compare(findings.days)
    return {
        "as_of": findings.as_of.isoformat(),
        "window": _window(findings),
        "totals": _totals(findings),
        "recent": _stretch(comparison.now),
        "before": None if comparison.before is None else _stretch(comparison.before),
        "errors": dict(findings.error_totals),
        "actions": {action.value: number for action, number in findings.actions.items()},
        "states": dict(findings.states),
        "changes": {
            "since": _iso(findings.changes.since),
            "graver": findings.changes.worse_count,
            "better": findings.changes.better_count,
        },
        "turnover": {
            "since": _iso(findings.turnover.since),
            "new": findings.turnover.arrived_count,
            "vanished": findings.turnover.vanished_count,
        },
        "deliveries": {
            "owed": findings.obligations.owed,
            "held": findings.obligations.held,
            "owed_since": _iso(findings.obligations.since),
            "lost_7_days": findings.obligations.lost_week,
            "lost_30_days": findings.obligations.lost_month,
            "loss_codes_30_days": dict(findings.obligations.loss_codes),
        },
        "outages": {
            "count": findings.outages.failures,
            "servers": findings.outages.failed_servers,
            "mttf_s": _rounded(findings.outages.mttf_s),
            "mttr_s": _rounded(findings.outages.mttr_s),
        },
        "relayed": {"deliveries": sum(findings.relaying.daily), "servers": findings.relaying.server_count},
        "top10_share_7_days": _top10(findings),
        "completeness": _completeness(findings),
        "attention": [_server(server) for server in findings.attention[:_MOST_SERVERS]],
        "worst_servers": [_server(server) for server in findings.worst],
        "relay_candidates": {"count": findings.relay_count, "best": [_relay(relay) for relay in findings.relays]},
        "key_anomalies": dict(sorted(findings.anomaly_counts.items())),
        "quarantine": {"rows": findings.quarantined, "reasons": [asdict(each) for each in findings.quarantine]},
    }


def _top10(findings: Findings) -> float | None:
    attempts = sum(server.week.attempts for server in findings.busiest)
    return _rounded(attempts / findings.week_attempts) if findings.week_attempts else None


def _completeness(findings: Findings) -> dict[str, object]:
    found = findings.completeness
    days = {"missing_days": found.missing, "early_days": found.early, "purged_days": found.purged}
    return {
        **{name: [day.isoformat() for day in each] for name, each in days.items()},
        "attempts_read": found.read,
        "attempts_parked": found.parked,
        "attempts_set_aside": found.set_aside,
    }


def _window(findings: Findings) -> dict[str, object]:
    days = findings.days
    return {
        "first_day": _iso(days[0].day if days else None),
        "last_day": _iso(days[-1].day if days else None),
        "days": len(days),
        "days_with_attempts": sum(1 for each in days if each.attempts),
    }


def _totals(findings: Findings) -> dict[str, object]:
    attempts = sum(day.attempts for day in findings.days)
    delivered = sum(day.delivered for day in findings.days)
    last = findings.days[-1] if findings.days else None
    return {
        "servers": sum(findings.actions.values()),
        "servers_healthy": last.servers_healthy if last else None,
        "attempts": attempts,
        "delivered": delivered,
        "success_rate": _rounded(delivered / attempts) if attempts else None,
    }


def _stretch(stretch: Stretch) -> dict[str, object]:
    return {**asdict(stretch), "success_rate": _rounded(stretch.success_rate)}


def _server(server: Server) -> dict[str, object]:
    return {
        "server_url": short(server.url, 2048),
        "action": server.action.value,
        "reasons": list(server.reasons),
        "since": _iso(server.since.at if server.since else None),
        "top_error": server.top_error,
        "trend": server.trend,
        "attempts_7_days": server.week.attempts,
        "availability_7_days": _rounded(server.week.availability),
        "score_7_days": _rounded(server.week.score),
        "score_30_days": _rounded(server.month.score),
    }


def _relay(relay: RelayFinding) -> dict[str, object]:
    return {"rank": relay.rank, "server_url": short(relay.url, 2048), "score": _rounded(relay.score)}


def _iso(value: date | None) -> str | None:
    return None if value is None else value.isoformat()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
