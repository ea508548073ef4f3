"""The doctor's checks of a node that sends by ActivityPub: can its actors sign, and do others see their keys?

And is what others send handled?
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlencode

from sqlalchemy import ColumnElement, exists, or_, select
from sqlmodel import col

from db import ActivityActor, ActivityKey, ReceivedState
from federation.activitypub.documents import ACTIVITY_JSON, WEBFINGER_PATH
from federation.activitypub.keys import ActorKeys, ServedKey
from federation.activitypub.wire import shows_key
from federation.admin.activitypub import opens
from federation.admin.doctor.checks import Found, failure, note, ok, warning
from federation.admin.received import backlog, list_received
from federation.admin.words import ago, counted
from federation.base.settings.reach import PATIENCE
from federation.http.errors import NetworkError, OutboundError
from federation.http.messages import Response
from federation.http.threat_policy import NetworkErrorCode
from federation.monitoring.numbers import MAX_ROWS
from federation.runtime.composition import Federation

MOST_LOOKED_AT: Final = 1_000
"""How many keys are looked at, those that began to sign last."""
CLOCK_FAILURE: Final = timedelta(minutes=1)
"""Receivers compare the time of a signature with theirs; an hour is usual, and some allow less."""


_HEADERS: Final = {"Accept": ACTIVITY_JSON}


async def actors(federation: Federation) -> Found:
    """Check that each actor has a key, and that this node's own keys open it: else what it is to sign is held."""
    now = federation.clock.now()
    keyless = await federation.database.rows(
        select(col(ActivityActor.id))
        .where(col(ActivityActor.removed_at).is_(None), ~exists().where(_is_of_actor(), _is_left(now)))
        .order_by(col(ActivityActor.id))
        .limit(MOST_LOOKED_AT)
    )
    sealed = await federation.database.rows(
        select(col(ActivityKey.actor_id), col(ActivityKey.private))
        .where(_is_left(now))
        .order_by(col(ActivityKey.use_from).desc(), col(ActivityKey.key_id))
        .limit(MOST_LOOKED_AT)
    )
    shut = [row.actor_id for row in sealed if not opens(row.private, federation.keys)]
    if shut:
        text = f"this node's keys do not open those of {_some(shut)}: what is to be signed with them is held"
        return failure(text, "set the keys under which they were sealed, or `federation activitypub keys rotate ACTOR`")
    if keyless:
        text = f"{_some([row.id for row in keyless])} without a key: what is to be signed in that name is refused"
        return failure(text, "`federation activitypub keys rotate ACTOR` makes one")
    if not sealed:
        return note("this node has no actor yet; `activitypub.add_actor`, or `federation activitypub actors add ACTOR`")
    return ok("every actor has a key, and this node's keys open those that were looked at")


def _is_of_actor() -> ColumnElement[bool]:
    return col(ActivityKey.actor_id) == col(ActivityActor.id)


def _is_left(now: datetime) -> ColumnElement[bool]:
    """Return the condition for keys that sign, or will."""
    return or_(col(ActivityKey.retired_at).is_(None), col(ActivityKey.retired_at) > now)


def _some(actors: Sequence[str]) -> str:
    more = " …" if len(actors) > 1 else ""
    least = "at least " if len(actors) == MOST_LOOKED_AT else ""
    return f"{least}{counted(len(actors), 'actor')} ({actors[0]}{more})"


async def own_actor(federation: Federation) -> Found:
    """Ask for one actor's document and WebFinger by our public name, as those do who get what it signs."""
    assert federation.own_url is not None  # otherwise the settings would have been refused
    found = await _one(federation)
    if found is None:
        return note("there is no actor to ask for")
    (actor, key), client = found, federation.own_client
    start = f"start what serves the actors, or mend BETTER_AUTH_URL ({federation.own_url}), DNS or the proxy before it"
    try:
        document = await client.fetch(actor, headers=_HEADERS, timeout=PATIENCE)
        shows = await shows_key(client, key.key_id, key.public_pem, headers=_HEADERS)
        query = urlencode({"resource": actor})
        webfinger = await client.fetch(f"{federation.own_url}{WEBFINGER_PATH}?{query}", timeout=PATIENCE)
    except NetworkError as error:
        if error.code == NetworkErrorCode.CONN_REFUSED:
            return note(f"nothing listens at {federation.own_url}: what serves the actors is not running here")
        return warning(str(error), start)
    except OutboundError as error:
        return warning(str(error), start)
    if not document.ok:
        return failure(f"{actor} is answered with status {document.status}: nobody can verify what it signs", start)
    if not shows:
        text = f"{actor} does not show {key.key_id}, with which it signs"
        return failure(text, "does another program or a cache answer there? The document must be ours")
    if not webfinger.ok:
        text = f"WebFinger answers with status {webfinger.status} for {actor}: nobody finds it by its name"
        return warning(text, f"let {federation.own_url}{WEBFINGER_PATH} reach what serves the actors")
    skew = _skew(document, datetime.now(UTC))
    if abs(skew) >= CLOCK_FAILURE:
        text = f"{actor} is answered by a clock that differs from ours by {abs(skew.total_seconds()):.0f} s"
        return failure(text, "set the clocks by NTP: receivers refuse signatures of another time")
    return ok(f"{actor} shows the key with which it signs, and WebFinger finds it")


async def _one(federation: Federation) -> tuple[str, ServedKey] | None:
    """Return the actor that is there longest, with the key that it should show."""
    oldest = select(col(ActivityActor.id)).where(col(ActivityActor.removed_at).is_(None))
    rows = await federation.database.rows(oldest.order_by(col(ActivityActor.created_at)).limit(1))
    keys = ActorKeys(federation.database, federation.keys, federation.clock)  # it has read nothing yet
    try:
        key = await keys.served(rows[0].id) if rows else None
    finally:
        await keys.close()
    return None if key is None else (rows[0].id, key)


def _skew(response: Response, now: datetime) -> timedelta:
    """Return by how much the clock of who answered is ahead of ours; nothing if it did not tell the time."""
    try:
        told = parsedate_to_datetime(response.headers.get("date", ""))
    except ValueError:
        return timedelta(0)
    return (told if told.tzinfo else told.replace(tzinfo=UTC)) - now


LATE: Final = timedelta(minutes=15)
"""Longer than an activity takes that fails five times, and those that came after it."""
_SHOWN: Final = 200


async def received(federation: Federation) -> Found:
    """Warn of activities that could not be handled, and of those that wait for long."""
    numbers = await backlog(federation)
    if numbers.failed:
        [first] = (await list_received(federation, limit=1, states=(ReceivedState.FAILED,))).activities
        least = "at least " if numbers.failed >= MAX_ROWS else ""
        text = f"{least}{counted(numbers.failed, 'activity')} could not be handled; {first.number}: {first.last_error}"
        again = "`received retry --all` has them handled again, once that is mended"
        return warning(text[:_SHOWN], f"`federation activitypub received list --state failed` says more; {again}")
    waits = None if numbers.oldest is None else federation.clock.now() - numbers.oldest
    if waits is not None and waits > LATE:
        text = f"{counted(numbers.waiting, 'activity')} wait to be handled, the oldest for {ago(waits)}"
        return warning(text, "does a process run tasks (`federation run`, or `federation workers run`)?")
    return ok("what others sent was handled, or is about to be")
