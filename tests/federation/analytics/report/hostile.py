"""Findings whose every text from the network is one that a stranger chose."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

from federation.analytics.frames import Action
from federation.analytics.report.findings import Findings, SetAside


def hostile_findings(findings: Findings, *texts: str) -> Findings:
    """*findings* with *texts*, in turn, for names, reasons, codes and URLs; servers of all actions need attention."""
    chosen = cycle(texts)

    def text() -> str:
        return next(chosen)

    servers = [
        replace(
            findings.attention[0],
            url=f"https://x.example/{text()}",
            reasons=(text(),),
            top_error=text(),
            trend=text(),
            action=action,
        )
        for action in Action
        for _ in range(8)
    ]
    return replace(
        findings,
        attention=tuple(servers),
        actions=dict.fromkeys(Action, 8),
        worst=(servers[0],),
        best=(servers[1],),
        errors=(replace(findings.errors[0], code=text()),),
        error_totals={text(): 9, "DATABASE": 1},
        relays=(replace(findings.relays[0], url=text()),),
        anomalies=(
            replace(
                findings.anomalies[0],
                kind=text(),
                key_kind=text(),
                fingerprint=text(),
                urls=(text(),),
                detail=text(),
            ),
        ),
        anomaly_counts={text(): 1},
        quarantine=(SetAside(source=text(), reason=text(), rows=1),),
    )
