"""What is owed, held and lost, server by server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from federation.analytics.report import wording
from federation.analytics.report.advice import Command, listing
from federation.analytics.report.attention import STATES
from federation.analytics.report.markup import Column, Markup, join, pasted, short, table, tag

if TYPE_CHECKING:
    from federation.analytics.report.findings import Findings, Server


def owed(findings: Findings) -> Markup:
    found = findings.obligations
    if not found.owed and not found.lost_month:
        return tag("p", "Nothing is owed, and nothing was lost in 30 days.", class_="intro")
    parts = wording.total({"held": found.held, "to be sent": found.owed - found.held})
    since = f", the oldest since {wording.moment(found.since)}" if found.since else ""
    told = (
        f"{wording.plural(found.owed, 'delivery')} owed to {wording.plural(found.owed_servers, 'server')} = {parts}"
        f"{since}. What is held goes out by itself when its server is back. {wording.count(found.lost_week)} lost for"
        f" good in 7 days, {wording.count(found.lost_month)} in 30: refused for good, or too old."
    )
    columns: list[Column[Server]] = [
        Column("Server", lambda server: short(wording.server(server.url), 60)),
        Column("State", lambda server: STATES.get(server.state or "", wording.NOTHING)),
        Column("Owed", lambda server: wording.count(server.owed), number=True),
        Column("of it held", lambda server: wording.count(server.held), number=True),
        Column("Oldest since", lambda server: _since(server)),
        Column("Lost, 7 days", lambda server: wording.count(server.week.lost), number=True),
        Column("Lost, 30 days", lambda server: wording.count(server.month.lost), number=True),
    ]
    first = next((command for server in found.servers if server.owed and (command := listing(server.url))), None)
    commands = [Command("federation deliveries stats"), *([first] if first else [])]
    if found.lost_week:
        commands += [Command(f"federation deliveries list --state {state}") for state in ("failed", "expired")]
    return join(
        tag("p", told, class_="intro"),
        table(None, columns, found.servers, name="Servers to which the most is owed"),
        _more(findings),
        tag("p", "All of it by state and server, what waits for one server, and what was lost in 7 days:"),
        join(*(pasted(command) for command in commands)),
    )


def _since(server: Server) -> str:
    return wording.moment(server.owed_since) if server.owed_since else wording.NOTHING


def _more(findings: Findings) -> Markup | None:
    found = findings.obligations
    shown = sum(server.owed for server in found.servers)
    if found.owed == shown:
        return None
    left = f"{wording.count(found.owed - shown)} of the {wording.count(found.owed)} are owed to other servers."
    return tag("p", left, class_="soft small")
