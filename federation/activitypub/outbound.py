"""Owing an activity: who gets it, by which inbox, and the rows of that, all in the caller's transaction.

Theory of operation. First everything is checked, without any I/O (`Senders.addressed`): bad input is refused before
anything is written. Recipients who have one inbox in common, which is usually the shared one of their server, get one
delivery. Then the rows are written (`Senders.send`): one text, and one row for each inbox, by statements of many rows.
Nothing is dialled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, Literal, TypeAlias

import structlog
from sqlalchemy import Connection, bindparam, or_, select
from sqlalchemy.orm import Session
from sqlmodel import col

from db import ActivityKey
from federation.activitypub.activities import JOB, LARGE_BYTES, Activity, at_inbox, parse, thing_of
from federation.delivery.outbox.insert import BATCH, OutboxInserter, Planned
from federation.protocol.urls import MAX_URL_CHARACTERS, canonical_origin, host_of
from workers.checks import check_text
from workers.clock import Clock

log = structlog.get_logger(__name__)

GoneAmong: TypeAlias = Callable[..., AbstractSet[str]]
"""See `inboxes.gone_among`."""
Plan: TypeAlias = Callable[[Session, Planned], None]
"""Adds the jobs of what was written into the session's transaction."""


class Auto(Enum):
    """The ordering key that the activity implies: see `activities.ordering_key`."""

    AUTO = "auto"


AUTO: Final = Auto.AUTO
OrderingKey: TypeAlias = str | Literal[Auto.AUTO] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipient:
    """An actor of another server, and where it takes activities: its own inbox, and its server's shared one."""

    id: str
    inbox: str
    shared_inbox: str | None = None


class SkipReason(StrEnum):
    """Why a recipient gets nothing."""

    OWN = "own"
    """It is on this node, which the application tells itself."""
    EXCLUDED = "excluded"
    """Its server is one that the caller excludes."""
    BLACKLISTED = "blacklisted"
    """Its server is blacklisted here."""
    GONE = "gone"
    """Its inbox is no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A recipient who gets nothing."""

    recipient: Recipient
    reason: SkipReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """An activity that is owed once the transaction commits: a delivery for each inbox that is to have it."""

    activity_id: str
    delivery_ids: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Addressed:
    """An activity that may be owed: each recipient with its inbox, each inbox with its server, and who gets nothing.

    With a `key` it waits in a line of that at each inbox. `shared` are the inboxes that belong to no single recipient.
    """

    activity: Activity
    key: str | None
    recipients: Sequence[Recipient]
    inboxes: Sequence[str]
    servers: Mapping[str, str]
    shared: AbstractSet[str]
    skipped: Sequence[Skipped]


class Senders:
    """Writes what is owed in the names of this node's actors.

    `allow_http`: whether an inbox may be one of plain http; those of `allowed_hostnames`, by host or by host and port,
    may in any case.
    """

    def __init__(
        self,
        *,
        own_url: str,
        inserter: OutboxInserter,
        gone_among: GoneAmong,
        allow_http: bool,
        allowed_hostnames: AbstractSet[str],
        clock: Clock,
    ) -> None:
        self._own_url = own_url
        self._inserter = inserter
        self._gone_among = gone_among
        self._allow_http = allow_http
        self._allowed_hostnames = allowed_hostnames
        self._clock = clock

    def addressed(
        self,
        activity: Mapping[str, object] | str | bytes,
        to: Iterable[Recipient],
        *,
        prefer_shared_inbox: bool = True,
        exclude: Iterable[str] = (),
        key: OrderingKey = AUTO,
    ) -> Addressed:
        """Check what is to be sent, and to whom, without any I/O.

        Raises:
            ValueError: it could never be delivered; the message names the member.
            TypeError: a recipient is no `Recipient`, or the ordering key no text.
        """
        found = parse(activity)
        line = thing_of(found) if key is Auto.AUTO else key
        if line is not None:
            check_text("ordering_key", line)
            check_text("ordering_key, with the inbox,", at_inbox(line, ""))
        excluded = frozenset(_origins("exclude", exclude))
        recipients: list[Recipient] = []
        inboxes: list[str] = []
        servers: dict[str, str] = {}
        shared: set[str] = set()
        skipped: list[Skipped] = []
        for recipient in to:
            inbox, server_url = self._inbox(recipient, prefer_shared_inbox=prefer_shared_inbox)
            if server_url == self._own_url:
                skipped.append(Skipped(recipient=recipient, reason=SkipReason.OWN))
            elif server_url in excluded:
                skipped.append(Skipped(recipient=recipient, reason=SkipReason.EXCLUDED))
            else:
                recipients.append(recipient)
                inboxes.append(inbox)
                servers[inbox] = server_url
                if inbox == recipient.shared_inbox:
                    shared.add(inbox)
        return Addressed(
            activity=found,
            key=line,
            recipients=recipients,
            inboxes=inboxes,
            servers=servers,
            shared=shared,
            skipped=skipped,
        )

    def send(self, session: Session, addressed: Addressed, *, blacklisted: AbstractSet[str], plan: Plan) -> Sent:
        """Write the text and the rows. `blacklisted` are servers that get nothing.

        Raises:
            ValueError: the actor has no key here, or the session is on another database. Nothing is written then.
        """
        activity = addressed.activity
        self._inserter.enter(session)
        self._require_key(session, activity.actor)
        open_to = [inbox for inbox, server_url in addressed.servers.items() if server_url not in blacklisted]
        gone = self._gone(session.connection(), open_to, addressed.shared)
        inboxes = [inbox for inbox in open_to if inbox not in gone]
        skipped = tuple(_skipped(addressed, blacklisted, gone))
        if not inboxes:
            return Sent(activity_id=activity.id, skipped=skipped)
        key = addressed.key
        planned = self._inserter.addressed(
            session,
            JOB,
            [(inbox, addressed.servers[inbox], None if key is None else at_inbox(key, inbox)) for inbox in inboxes],
            activity.text,
            activity_id=activity.id,
            actor=activity.actor,
        )
        plan(session, planned)
        if (size := activity.size) > LARGE_BYTES:
            log.warning("activity_large", activity=activity.id, bytes=size, limit=LARGE_BYTES)
        if activity.hides_key:
            log.warning("activity_hides_key", activity=activity.id, actor=activity.actor)
        return Sent(activity_id=activity.id, delivery_ids=planned.owed, skipped=skipped)

    def can_reach(self, recipient: Recipient) -> bool:
        """Tell whether what goes to its inboxes, of which `send` may use either, could ever be delivered."""
        try:
            self._inbox(recipient, prefer_shared_inbox=True)
        except ValueError:
            return False
        return True

    def _gone(self, connection: Connection, inboxes: Sequence[str], shared: AbstractSet[str]) -> set[str]:
        now, gone = self._clock.now(), set[str]()
        for start in range(0, len(inboxes), BATCH):
            gone |= self._gone_among(connection, inboxes[start : start + BATCH], now, shared=shared)
        return gone

    def _require_key(self, session: Session, actor: str) -> None:
        now = {"actor": actor, "now": self._clock.now()}
        if session.execute(_KEY, now).first() is None:
            raise ValueError(f"actor: {actor} has no key here; `activitypub.add_actor` makes one")

    def _inbox(self, recipient: Recipient, *, prefer_shared_inbox: bool) -> tuple[str, str]:
        """Return the inbox by which a recipient is reached, and its server."""
        if not isinstance(recipient, Recipient):
            raise TypeError(f"to: a Recipient, not {type(recipient).__name__}")
        server_url = self._server_of("inbox", recipient, recipient.inbox)
        if recipient.shared_inbox is None:
            return recipient.inbox, server_url
        shared_url = self._server_of("shared_inbox", recipient, recipient.shared_inbox)
        return (recipient.shared_inbox, shared_url) if prefer_shared_inbox else (recipient.inbox, server_url)

    def _server_of(self, member: str, recipient: Recipient, inbox: str) -> str:
        """Return the server of an inbox that can be sent to as it is spelt."""
        try:
            server_url = _server_of(inbox)
        except ValueError as error:
            raise ValueError(f"{member}: {error}, for {recipient.id}") from None
        if server_url.startswith("http:") and not self._may_be_plain(server_url):
            raise ValueError(f"{member}: http: without FEDERATION_ACTIVITYPUB_HTTP=1, for {recipient.id}")
        return server_url

    def _may_be_plain(self, server_url: str) -> bool:
        authority = server_url.partition("://")[2]
        with_port = authority if authority.rpartition("]")[2].rpartition(":")[1] else f"{authority}:80"
        return self._allow_http or bool(self._allowed_hostnames & {host_of(server_url), with_port})


_WANTED: Final = "canonical URL: https, a host in lower case, a path, neither user name nor fragment, all of it ASCII"
_CHARACTER: Final = "(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
_INBOX: Final = re.compile(rf"(https?://[a-z0-9._:\[\]-]+)/{_CHARACTER}*(?:\?(?:{_CHARACTER}|\?)+)?")
"""What an HTTP client sends as it is spelt: a signature covers the spelling."""
_PLAIN: Final = re.compile(r"https://(?:[a-z0-9-]{1,63}\.){1,3}[a-z-][a-z0-9-]{0,50}")
"""Most origins, easily recognised as canonical: short, and the last label does not begin like a number."""
_DOTS: Final = re.compile(r"^[^?]*/\.\.?(?:[/?]|$)")

_KEY: Final = (
    select(col(ActivityKey.key_id))
    .where(
        col(ActivityKey.actor_id) == bindparam("actor"),
        or_(col(ActivityKey.retired_at).is_(None), col(ActivityKey.retired_at) > bindparam("now")),
    )
    .limit(1)
)


def _server_of(inbox: object) -> str:
    """Return the server of an inbox.

    Raises:
        ValueError: it cannot be sent to as it is spelt.
    """
    found = _INBOX.fullmatch(inbox) if isinstance(inbox, str) else None
    if found is None or _DOTS.search(found[0]):
        raise ValueError(f"no {_WANTED}")
    if len(found[0]) > MAX_URL_CHARACTERS:
        raise ValueError(f"longer than {MAX_URL_CHARACTERS} characters")
    server_url = found[1]
    if _PLAIN.fullmatch(server_url) is None and canonical_origin(server_url) != server_url:
        raise ValueError(f"no {_WANTED}")
    return server_url


def _origins(member: str, urls: Iterable[str]) -> Iterable[str]:
    for url in urls:
        try:
            yield canonical_origin(url)
        except ValueError as error:
            raise ValueError(f"{member}: {error}") from None


def _skipped(addressed: Addressed, blacklisted: AbstractSet[str], gone: AbstractSet[str]) -> Iterable[Skipped]:
    yield from addressed.skipped
    if not blacklisted and not gone:
        return
    for recipient, inbox in zip(addressed.recipients, addressed.inboxes, strict=True):
        if addressed.servers[inbox] in blacklisted:
            yield Skipped(recipient=recipient, reason=SkipReason.BLACKLISTED)
        elif inbox in gone:
            yield Skipped(recipient=recipient, reason=SkipReason.GONE)
