"""Which keys servers know: servers that do not know ours, or show others than are registered for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from sqlalchemy import select
from sqlmodel import col

from db import DEFAULT_WIRE, DeliveryAttempt, LinkState, Server, ServerLink
from federation.admin.deliveries.deliveries import AttemptRow, last_attempts
from federation.protocol.keys import KeyRing

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

_MEANING: Final[Mapping[str, str]] = {
    "NOT_SUPPORTED": "it runs something that cannot change keys, and goes on knowing the old ones",
    "UNKNOWN_THERE": "it did not know this node any more, and was asked to register it",
    "NOT_REGISTERED_HERE": "it is not in the registry any more",
    "BLACKLISTED_THERE": "it has this node on its blacklist",
    "RATE_LIMITED": "it was asked too often, and is asked again later",
    "ROTATION_PENDING": "somebody began a rotation to other keys there in this node's name; it is over in 5 minutes",
    "BAD_CHALLENGE": "what it wanted signed or opened is no challenge, and was not",
    "BLOCKED_URL": "its address is one that is never connected to",
    "BODY_TOO_LARGE": "its answer is larger than is read",
}


_UNKNOWN_SIGNATURE: Final = "INVALID_SIGNATURE"
_MOST_REFUSING: Final = 50


class Ours(StrEnum):
    """Which of our pairs a server knows; `missing` is one that this process does not have."""

    NEWEST = "newest"
    OLD = "old"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """URLs of servers, by how well their keys match what we know, and ours what they know.

    `newest` know our newest pair, as they should, `old` only the one before, and `missing` one that is not here;
    `mismatched` show another signing key than the registered one; `refusing` did not recognise the signature of the
    last attempt, within this hour.
    """

    newest: Sequence[str]
    mismatched: Sequence[str]
    old: Sequence[str]
    missing: Sequence[str]
    refusing: Sequence[str]


def known_pair(ring: KeyRing | None, knows_key: str | None) -> Ours | None:
    """Return by which of our pairs a server knows us whose row says *knows_key*, or None if we have no keys."""
    if ring is None:
        return None
    newest, *older = ring.pairs(now=True)
    if knows_key == newest.signing.public_text or (knows_key is None and not older):
        return Ours.NEWEST
    is_old = knows_key is None or knows_key in {pair.signing.public_text for pair in older}
    return Ours.OLD if is_old else Ours.MISSING


def meaning(problem: str) -> str:
    """Describe in words why a server did not accept our new keys."""
    if problem.startswith("HTTP_"):
        return f"it answered with status {problem.removeprefix('HTTP_')}"
    return _MEANING.get(problem, "it could not be reached")


_IS_MISMATCH = (col(ServerLink.state) == LinkState.MISMATCH) & (col(ServerLink.wire) == DEFAULT_WIRE)


async def survey(federation: Federation) -> Survey:
    """Return what is known of all servers that are not blacklisted. No server is asked."""
    mismatched = select(col(ServerLink.server_url)).where(_IS_MISMATCH)
    async with federation.database.read() as session:
        rows = (await session.execute(select(col(Server.url), col(Server.knows_key)).order_by(col(Server.url)))).all()
        theirs = [*(await session.execute(mismatched.order_by(col(ServerLink.server_url)))).scalars()]
    found: dict[Ours | None, list[str]] = {which: [] for which in Ours}
    for url, knows_key in rows:
        which = known_pair(federation.keys, knows_key)
        if which in found and not await federation.registry.is_blacklisted(url):
            found[which].append(url)
    return Survey(
        newest=found[Ours.NEWEST],
        mismatched=theirs,
        old=found[Ours.OLD],
        missing=found[Ours.MISSING],
        refusing=await _refusing(federation),
    )


def refuses_signature(last_attempts: Sequence[AttemptRow]) -> bool:
    """Tell whether the latest of them ended with a signature that the server did not recognise."""
    return any(attempt.remote_code == _UNKNOWN_SIGNATURE for attempt in last_attempts[:1])


async def _refusing(federation: Federation) -> list[str]:
    lately = federation.clock.now() - timedelta(hours=1)
    refused = (
        select(col(DeliveryAttempt.server_url))
        .where(col(DeliveryAttempt.started_at) > lately, col(DeliveryAttempt.remote_code) == _UNKNOWN_SIGNATURE)
        .distinct()
        .limit(_MOST_REFUSING)
    )
    async with federation.database.read() as session:
        urls = sorted((await session.execute(refused)).scalars())
    return [url for url in urls if refuses_signature(await last_attempts(federation.database, url, limit=1))]
