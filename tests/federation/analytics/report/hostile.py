"""Findings whose every text from the network is one that a stranger chose."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

from federation.analytics.frames import Action
from federation.analytics.report.findings import (
    AdviceChange,
    Appearance,
    Changes,
    Findings,
    RelayedServer,
    SetAside,
    Turnover,
)


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
            month=replace(findings.attention[0].month, loss_codes={text(): 1}),
        )
        for action in Action
        for _ in range(8)
    ]
    change = AdviceChange(url=text(), before=Action.KEEP, now=Action.WATCH, reason=text())
    appeared, vanished = (Appearance(url=text(), day=findings.as_of, action=Action.KEEP) for _ in range(2))
    return replace(
        findings,
        attention=tuple(servers),
        changes=Changes(since=findings.as_of, worse=(change,), worse_count=1, better=(change,), better_count=1),
        turnover=Turnover(since=findings.as_of, arrived=(appeared,), vanished=(vanished,)),
        obligations=replace(
            findings.obligations, servers=(replace(servers[2], owed=3),), loss_codes={text(): 2, "TIMEOUT": 1}
        ),
        outages=replace(findings.outages, failures=1, servers=(servers[3],)),
        relaying=replace(findings.relaying, servers=(RelayedServer(url=text(), relayed=1, delivered=2),)),
        busiest=(servers[4],),
        actions=dict.fromkeys(Action, 8),
        worst=(servers[0],),
        servers=(servers[1],),
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
