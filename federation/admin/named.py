"""What a URL below a server's names, where it is no activity and no actor of ours: an actor of others, or nothing.

Of what nobody knows it says which was probably meant. Theory of operation. Who mistypes a URL mostly gets its beginning
right: what is meant is near it in the order of an index, however much that holds. So a few rows on both sides of it are
compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import SequenceMatcher
from typing import Any, Final

from sqlalchemy import ColumnElement, func, select
from sqlmodel import col

from db import (
    ActivityActor,
    ActivityFollow,
    ActivityInbox,
    Database,
    DeliveryAttempt,
    DeliveryPayload,
    FollowDirection,
    FollowState,
    ReceivedActivity,
    RemoteActorKey,
)
from federation.admin.follows import FollowCounts, counts_with
from federation.admin.servers.misnamed import MOST_NAMED, NEAR, question
from federation.admin.words import counted, moment
from federation.protocol.urls import canonical_origin, host_of

COMPARED: Final = 50
"""How many values on each side of a URL are compared."""
_ROUNDS: Final = 4
_LONGEST: Final = 256
"""How many characters are compared: the time it takes grows with their square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What is known of what the URL names. `is_ours`: it is below this node's own.

    An actor of others has `follows` with actors of ours, or a key, which was fetched at `key_fetched_at` last. `meant`
    has the URLs that were probably to be named, if nobody knows this one.
    """

    url: str
    is_ours: bool
    known: bool
    follows: FollowCounts
    key_fetched_at: datetime | None
    meant: Sequence[str]

    def sentences(self) -> Iterator[str]:
        """Yield the same as sentences for people."""
        if self.known:
            yield f"{self.url} is an actor: {', '.join(self._told())}."
            return
        if self.is_ours:
            yield (
                "Nobody here knows it: this node has no such actor, and no activity of that id is owed, or on record as"
                " sent."
            )
        else:
            yield f"Nobody here knows {self.url}: no inbox, actor or activity of that name is on record."
        if self.meant:
            yield question(self.meant)
        if not self.is_ours:
            yield "What follows is about its server."

    def _told(self) -> Iterator[str]:
        for direction, words in _WORDS.items():
            for state, number in self.follows.get(direction, {}).items():
                yield words[state].format(counted(number, "actor"))
        if self.key_fetched_at is not None:
            yield f"its key was fetched at {moment(self.key_fetched_at)} last"


_WORDS: Final = {
    FollowDirection.FOLLOWER: {
        FollowState.PENDING: "asks to follow {} of this node",
        FollowState.ACCEPTED: "follows {} of this node",
        FollowState.REJECTED: "was refused by {} of this node",
    },
    FollowDirection.FOLLOWING: {
        FollowState.PENDING: "is asked by {} of this node",
        FollowState.ACCEPTED: "is followed by {} of this node",
        FollowState.REJECTED: "has refused {} of this node",
    },
}


async def named(database: Database, url: str, *, own_url: str | None) -> Named | None:
    """Return what is known of what a URL names that is no activity and no actor of ours. None: it names a server."""
    if _parts(url)[1] in ("", "/"):
        return None
    follows = await counts_with(database, url)
    fetched = select(func.max(col(RemoteActorKey.fetched_at)).label("at")).where(col(RemoteActorKey.owner) == url)
    fetched_at = (await database.rows(fetched))[0].at
    known = bool(follows) or fetched_at is not None
    return Named(
        url=url,
        is_ours=canonical_origin(url) == own_url,
        known=known,
        follows=follows,
        key_fetched_at=fetched_at,
        meant=() if known else await _meant(database, url, own_url),
    )


async def _meant(database: Database, url: str, own_url: str | None) -> Sequence[str]:
    """Return what the URL was to be, the likeliest first: what it lies below, and then what is spelt almost so."""
    at_home = f"{own_url}{_parts(url)[1]}"  # by another name, or scheme, of this node
    above = select(col(ActivityActor.id)).where(col(ActivityActor.id).in_([*_above(url), at_home, *_above(at_home)]))
    actors = [row.id for row in await database.rows(above.order_by(col(ActivityActor.id).desc()).limit(MOST_NAMED))]
    candidates = {each for column in _COLUMNS for each in await _neighbours(database, column, url)}
    ratios = {each: _likeness(url, each) for each in candidates - {*actors}}
    near = sorted((each for each in ratios if ratios[each]), key=lambda each: (-ratios[each], each))
    return [*actors, *near][:MOST_NAMED]


async def _neighbours(database: Database, column: ColumnElement[Any], url: str) -> set[str]:  # Any: of text, or null
    """Return values that come right before and after the URL; one that many rows have counts once."""
    found: set[str] = set()
    for order, is_beyond in ((column.asc(), column.__gt__), (column.desc(), column.__lt__)):
        last, side = url, set[str]()
        for _ in range(_ROUNDS):
            page = select(column.label("value")).where(is_beyond(last)).order_by(order).limit(COMPARED)
            rows = [row.value for row in await database.rows(page)]
            side.update(rows)
            if len(rows) < COMPARED or len(side) >= COMPARED:
                break
            last = rows[-1]
        found |= side
    return found


def _above(url: str) -> Iterator[str]:
    """Yield what the URL lies below: of `/users/alice/inbox#x` `/users/alice/inbox`, `/users/alice` and `/users`."""
    origin, rest = _parts(url)
    yield from (f"{origin}{rest[: mark.start()]}" for mark in re.finditer("[/?#]", rest) if mark.start())


def _likeness(one: str, other: str) -> float:
    """Return how much the hosts and what follows them are alike, 1 at most; 0 unless each is almost the same."""
    (host, rest), (other_host, other_rest) = _parts(one), _parts(other)
    ratios = _ratio(host_of(host), host_of(other_host)), _ratio(rest, other_rest)
    return ratios[0] * ratios[1] if min(ratios) >= NEAR else 0


def _ratio(one: str, other: str) -> float:
    matcher = SequenceMatcher(None, one[:_LONGEST], other[:_LONGEST], autojunk=False)
    return matcher.ratio() if matcher.quick_ratio() >= NEAR else 0


def _parts(url: str) -> tuple[str, str]:
    """Return the origin and what follows it."""
    scheme, _, rest = url.partition("://")
    end = re.search("[/?#]|$", rest)
    assert end is not None
    return f"{scheme}://{rest[: end.start()]}", rest[end.start() :]


_COLUMNS: Final[Sequence[ColumnElement[Any]]] = tuple(  # Any: of text, or null
    getattr(model, name)
    for model, name in (
        (ActivityActor, "id"),
        (DeliveryPayload, "activity_id"),
        (DeliveryAttempt, "activity_id"),
        (ReceivedActivity, "activity_id"),
        (ActivityFollow, "remote_actor"),
        (RemoteActorKey, "owner"),
        (ActivityInbox, "url"),
    )
)
"""Each has an index of its own."""
