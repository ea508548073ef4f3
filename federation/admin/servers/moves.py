"""Servers whose redirects lead to another name: what is known here of that name, and what an operator can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from db import Database, LinkState
from federation.admin.servers import servers
from federation.admin.servers.claims import Claim
from federation.servers.link_rules import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The redirects of a server lead `to` another name, which says nothing of whose that is.

    `registered` says that a server is registered under that name, `claims_keys` that the server there shows a key with
    which the first one is registered.
    """

    to: str
    registered: bool
    claims_keys: bool

    def sentences(self, url: str, *, registered: bool, owed: int) -> Iterator[str]:
        """Yield what to do, for a server with the canonical URL *url* that *owed* deliveries are for."""
        yield f"Its last redirect led to {self.to}."
        forget = f"`federation servers forget {url}`"
        discover = f"`federation servers discover {self.to}`"
        if self.claims_keys:
            yield (
                f"The server there shows a key of this one: {forget}, which ends the follows that name it, and then"
                f" {discover} register it under that name."
            )
        elif self.registered and registered:
            yield (
                "A server is registered under that name, by other keys. If it replaces this one,"
                f" {forget} removes the old name, with the follows that name it."
            )
        elif self.registered:
            yield "A server is registered under that name."
        else:
            first = (
                f" If that says that a key is registered for another, {forget} comes first, which ends the follows."
                * registered
            )
            yield f"If this server has moved there, {discover} registers it under that name.{first}"
        if owed:
            yield (
                f"What is owed to {url} goes to no other name:"
                f" `federation deliveries drop --server {url}` gives it up before its time."
            )


async def move_of(database: Database, link: Link, claims: Sequence[Claim]) -> Move | None:
    """Return where the server's redirects lead, or None if it does not redirect, or no longer."""
    to = link.moved_to
    if to is None or (link.state is LinkState.UP and not link.evidence):
        return None
    return Move(
        to=to,
        registered=await servers.show(database, to) is not None,
        claims_keys=any((claim.holder, claim.claimed_by) == (link.server_url, to) for claim in claims),
    )
