"""Public keys of other servers' actors: those known, and how the others are fetched.

Theory of operation. Strangers name the URL that we fetch. So it is asked for through the guard, few times and for a few
seconds, with bounds for each key, each server and in all; a failure is remembered, and before a fetch whoever makes us
do it is counted, more strictly for a server that none of our keys is from. Nothing is known of a key but what the
document of its owner says (`key_documents`).

A key that was fetched is in memory, and once it has verified a request of its owner in `activitypub_remote_keys`, for
all processes: whoever names keys writes no rows, and makes no server known. One that does not verify a request may have
been replaced under its name: it is looked at once more, by one process in five minutes, and others find its row.
Failures of keys that were never believed are only in memory, too.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from sqlalchemy import Connection, bindparam, select, update
from sqlalchemy.dialects import postgresql, sqlite

from db import Database, RemoteActorKey
from federation.activitypub.answers import followed
from federation.activitypub.key_documents import (
    PAGE,
    Document,
    KeyGone,
    KeyRefused,
    ShownKey,
    is_activity,
    is_on_origin,
    owner_named,
    public_key,
    read_document,
    shown_by_owner,
)
from federation.activitypub.keys import KeyUnreadable, NoActorKey
from federation.activitypub.signatures import VerifyingKey
from federation.http.client import FederationClient
from federation.http.errors import NetworkError, OutboundError
from federation.http.guard import AddressGuard
from federation.http.messages import NOT_JUDGED, REDIRECTS, Response
from workers.clock import Clock, monotonic

KEPT: Final = timedelta(hours=24)
LOOK_AGAIN: Final = timedelta(minutes=5)
"""How soon a key that does not verify is fetched again, or one that could not be had."""
FETCH_TIMEOUT: Final = timedelta(seconds=5)
"""Of all requests for one key."""
GONE: Final = (404, 410)
PASSING: Final = frozenset({401, 429, *NOT_JUDGED})
"""A 401 says that the server could not verify us, as while it could not fetch our own key: many who get 401 themselves,
such as Misskey, never try again."""
MOST_OF_DOCUMENT: Final = 256 * 1024
MOST_REDIRECTS: Final = 2
"""Of all requests for one key."""
MOST_PER_ORIGIN: Final = 10
MOST_AT_ONCE: Final = 50
MOST_NEW_PER_ORIGIN: Final = 8
MOST_NEW_AT_ONCE: Final = 40
"""The other places are for keys that were believed: strangers, who may name any others, cannot take all."""
MOST_PER_CLIENT: Final = 5
"""Of new ones, and as many of others; whoever is not known is one client for each origin."""
MOST_WAITING: Final = 100
"""How many requests wait for new keys of one origin, and as many for those that were believed."""
MOST_REMEMBERED: Final = 2_000
MOST_FAILURES: Final = 5_000

Admit: TypeAlias = Callable[[bool], Awaitable[None]]
"""Asked before a key is fetched, with whether its server is known; raises if whoever makes us do so may not."""
Signer: TypeAlias = Callable[[str], Awaitable[Mapping[str, str]]]
"""Returns the headers of a signed GET of a URL."""


class KeyUnavailable(Exception):
    """A key cannot be had now, for reasons that will pass. The message quotes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteKey:
    """A key of an actor of another server, as the owner's document showed it at `fetched_at`, until it ends."""

    key_id: str
    owner: str
    public: VerifyingKey = field(repr=False)
    fetched_at: datetime
    expires_at: datetime | None = None

    def is_over(self, now: datetime) -> bool:
        """Tell whether it counts no more, by its owner's word."""
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class _Stored:
    """A key in memory, which *is_written* for all processes, or has not verified anything yet."""

    key: RemoteKey
    refetched_at: datetime | None = None
    failed_at: datetime | None = None
    is_written: bool = True

    @property
    def pem(self) -> str:
        """The key as we write it: what its owner shows may have more around it."""
        return self.key.public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@dataclass(slots=True)
class _Look:
    """The requests for one key. `until` is their deadline, by the loop's clock."""

    key_id: str
    origin: str
    until: float
    redirects: int = MOST_REDIRECTS


_NEVER: Final = (datetime.min.replace(tzinfo=UTC), KeyUnavailable, "")


async def everybody(_is_known: bool) -> None:
    """Let everybody have keys fetched."""


class RemoteKeys:
    """Finds keys of others, for the node that serves as *own_url*.

    They are fetched anew after *kept*. With *allow_http* they may be on plain http; those of hosts that the guard
    allows by name may in any case.
    """

    def __init__(
        self,
        *,
        own_url: str,
        database: Database,
        client: FederationClient,
        guard: AddressGuard,
        signer: Signer,
        clock: Clock,
        kept: timedelta = KEPT,
        allow_http: bool = False,
    ) -> None:
        self._own_url = own_url
        self._database = database
        self._client = client
        self._guard = guard
        self._signer = signer
        self._clock = clock
        self._kept = kept
        self._allow_http = allow_http
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._failures: OrderedDict[str, tuple[datetime, type[Exception], str]] = OrderedDict()
        self._known_origins: OrderedDict[str, None] = OrderedDict()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._under_way: Counter[str] = Counter()
        self._new_of_clients: Counter[str] = Counter()
        self._others_of_clients: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._waiting_for_known: Counter[str] = Counter()

    async def key(
        self, key_id: str, *, refetch: bool = False, admit: Admit = everybody, client: str | None = None
    ) -> RemoteKey:
        """Return a key, fetched for a client if need be. *refetch*: the one that this returned did not verify.

        Then it may be the same again: it is looked at once in five minutes.

        Raises:
            KeyRefused: there is no such key, or nobody would believe it; `KeyGone` if its server says so.
            KeyUnavailable: it cannot be had now.
            SQLAlchemyError: the database failed.
            Exception: whatever *admit* raises.
        """
        known = self._stored.get(key_id)
        if known is not None and not refetch and self._is_fresh(known):
            self._stored.move_to_end(key_id)
            return known.key
        origin = self._origin(key_id)
        async with self._turn(key_id, origin):
            stored, now = await self._find(key_id, anew=refetch), self._clock.now()
            if stored is not None and self._is_fresh(stored, refetch=refetch):
                return stored.key
            self._fail_again(key_id, stored, now)
            await admit(origin in self._known_origins)
            with self._place(origin, client or f"unknown:{origin}", is_new=not _is_written(stored)):
                return await self._fetched(key_id, origin, stored, refetch=refetch)

    async def last(self, key_id: str) -> RemoteKey | None:
        """Return a key as its owner showed it last, however long ago that was, if it was believed and has not ended.

        Raises:
            SQLAlchemyError: the database failed.
        """
        stored = await self._find(key_id, anew=False)
        if stored is None or not stored.is_written or stored.key.is_over(self._clock.now()):
            return None
        return stored.key

    async def believe(self, key: RemoteKey) -> None:
        """Keep for all processes a key that has verified a request of its owner.

        Raises:
            SQLAlchemyError: the database failed.
        """
        found = self._stored.get(key.key_id)
        if found is not None and found.key is key and not found.is_written:
            await self._write(found)
            self._remember(replace(found, is_written=True))

    def _origin(self, key_id: str) -> str:
        """Return the origin of a key that may be asked for.

        Raises:
            KeyRefused: it may not.
        """
        try:
            target = self._guard.check_url(key_id)
        except OutboundError:
            raise KeyRefused("the key's id is no URL that may be asked for") from None
        if target.origin == self._own_url or not key_id.isascii():
            raise KeyRefused("the key's id is not another server's")
        if target.url.scheme == "http" and not self._allow_http and not self._guard.exempts(target):
            raise KeyRefused("the key is on plain http; FEDERATION_ACTIVITYPUB_HTTP=1 allows it")
        return target.origin

    @asynccontextmanager
    async def _turn(self, key_id: str, origin: str) -> AsyncIterator[None]:
        """Let one request at a time look for a key: those that wait find what it found."""
        is_new = not _is_written(self._stored.get(key_id))
        if is_new and self._waiting[origin] >= MOST_WAITING:
            is_new = not _is_written(await self._find(key_id, anew=False))
        waiting = self._waiting if is_new else self._waiting_for_known
        if waiting[origin] >= MOST_WAITING:
            raise KeyUnavailable("too many requests wait for keys of the server")
        turn = self._turns.setdefault(key_id, asyncio.Lock())
        with _counted(waiting, origin):
            async with turn:
                yield

    @contextmanager
    def _place(self, origin: str, client: str, *, is_new: bool) -> Iterator[None]:
        per_origin, at_once = (MOST_NEW_PER_ORIGIN, MOST_NEW_AT_ONCE) if is_new else (MOST_PER_ORIGIN, MOST_AT_ONCE)
        of_clients = self._new_of_clients if is_new else self._others_of_clients
        if self._under_way[origin] >= per_origin or self._under_way.total() >= at_once:
            raise KeyUnavailable("too many keys are being fetched")
        if of_clients[client] >= MOST_PER_CLIENT:
            raise KeyUnavailable("too many keys are being fetched for the client")
        with _counted(self._under_way, origin), _counted(of_clients, client):
            yield

    async def _find(self, key_id: str, *, anew: bool) -> _Stored | None:
        """Return what is known of a key. *anew*: what another process knows, unless this one has just looked."""
        known = self._stored.get(key_id)
        if known is not None and (not anew or self._is_recent(known.refetched_at)):
            return known
        rows = await self._database.rows(_ROW, {"key": key_id})
        if not rows:
            return known
        owner, pem, fetched_at, refetched_at, failed_at, end = rows[0]
        key = RemoteKey(key_id=key_id, owner=owner, public=public_key(pem), fetched_at=fetched_at, expires_at=end)
        found = _Stored(key, refetched_at, failed_at)
        if known is not None and known.pem != found.pem:
            found = replace(found, refetched_at=self._clock.now())  # here this one is news, and worth a try
        self._remember(found)
        return found

    def _is_recent(self, at: datetime | None) -> bool:
        return at is not None and self._clock.now() < at + LOOK_AGAIN

    def _is_fresh(self, stored: _Stored, *, refetch: bool = False) -> bool:
        """Tell whether a key counts without a look at it; *refetch*: another process may just have looked."""
        now = self._clock.now()
        if stored.key.is_over(now):
            return False
        return self._is_recent(stored.refetched_at) if refetch else now < stored.key.fetched_at + self._kept

    def _fail_again(self, key_id: str, stored: _Stored | None, now: datetime) -> None:
        """Raise what was raised a moment ago."""
        at, kind, told = self._failures.get(key_id, _NEVER)
        if now < at + LOOK_AGAIN:
            raise kind(told)
        if stored is not None and self._is_recent(stored.failed_at):
            raise KeyUnavailable("the key could not be had a moment ago")

    async def _fetched(self, key_id: str, origin: str, stored: _Stored | None, *, refetch: bool) -> RemoteKey:
        now = self._clock.now()
        try:
            look = _Look(key_id, origin, until=monotonic() + FETCH_TIMEOUT.total_seconds())
            shown = await self._shown(look, now)
            public, end = public_key(shown.pem), shown.expires_at
            key = RemoteKey(key_id=key_id, owner=shown.owner, public=public, fetched_at=now, expires_at=end)
        except (KeyRefused, KeyUnavailable) as failure:
            await self._failed(key_id, failure, stored, now)
            raise
        found = _Stored(key, refetched_at=now if refetch else None, is_written=_is_written(stored))
        if found.is_written:
            await self._write(found)
        self._failures.pop(key_id, None)
        self._remember(found)
        return key

    async def _write(self, found: _Stored) -> None:
        await self._database.transact(lambda connection: _store(connection, found))

    async def _failed(
        self, key_id: str, failure: KeyRefused | KeyUnavailable, stored: _Stored | None, now: datetime
    ) -> None:
        self._failures[key_id] = now, type(failure), str(failure)  # an error would hold what it was about
        self._failures.move_to_end(key_id)
        if len(self._failures) > MOST_FAILURES:
            self._failures.popitem(last=False)
        if _is_written(stored):
            await self._database.transact(lambda it: it.execute(_FAILED, {"key": key_id, "at": now}))

    async def _shown(self, look: _Look, now: datetime) -> ShownKey:
        first, urls = await self._get(look.key_id.partition("#")[0], look)
        shown = shown_by_owner(first, urls, look.key_id, now=now)
        if shown is None:
            document, urls = await self._get(owner_named(first, look.key_id), look)
            shown = shown_by_owner(document, urls, look.key_id, now=now, own=first)
        if shown is None:
            raise KeyRefused("the owner does not list the key")
        return shown

    async def _get(self, asked: str, look: _Look) -> tuple[Document, AbstractSet[str]]:
        """Return a document, and the URLs by which it was asked for and where it is in the end."""
        url = asked
        response = await self._ask(url, look)
        while (further := followed(response, url, by=REDIRECTS)) is not None:
            look.redirects -= 1
            if look.redirects < 0 or not is_on_origin(further, look.origin):
                raise KeyRefused("the document is elsewhere")
            url, response = further, await self._ask(further, look)
        if response.status >= 500 or response.status in PASSING:
            raise KeyUnavailable(f"the server answered {response.status}")
        if response.status in GONE:
            raise KeyGone(f"the server answered {response.status}")
        if not response.ok:
            raise KeyRefused(f"the server answered {response.status}")
        kind = response.headers.get("content-type", "")
        if kind.startswith(PAGE):
            raise KeyUnavailable("the server shows a page in place of the document")
        if not is_activity(kind):
            raise KeyRefused("the document has a type that actors do not have")
        return read_document(response.body), {asked, url}

    async def _ask(self, url: str, look: _Look) -> Response:
        try:
            headers = await self._signer(str(self._guard.check_url(url).url))
            left = timedelta(seconds=max(look.until - monotonic(), 0))
            return await self._client.fetch(url, headers=headers, timeout=left, max_bytes=MOST_OF_DOCUMENT)
        except (NetworkError, OSError) as error:
            raise KeyUnavailable(f"the server does not answer: {type(error).__name__}") from error
        except OutboundError as error:
            raise KeyRefused(f"what the server answers is no actor: {type(error).__name__}") from error
        except (KeyUnreadable, NoActorKey) as error:
            raise KeyUnavailable("this node cannot sign in its own name") from error

    def _remember(self, stored: _Stored) -> None:
        _keep(self._stored, stored.key.key_id, stored)
        if stored.is_written:
            _keep(self._known_origins, self._guard.check_url(stored.key.key_id).origin, None)


def _is_written(stored: _Stored | None) -> bool:
    return stored is not None and stored.is_written


@contextmanager
def _counted(counter: Counter[str], name: str) -> Iterator[None]:
    counter[name] += 1
    try:
        yield
    finally:
        counter[name] -= 1
        if not counter[name]:
            del counter[name]


def _keep(kept: OrderedDict[str, Any], name: str, value: object) -> None:
    kept[name] = value
    kept.move_to_end(name)
    if len(kept) > MOST_REMEMBERED:
        kept.popitem(last=False)


def _store(connection: Connection, found: _Stored) -> None:
    values = {
        "key_id": found.key.key_id,
        "owner": found.key.owner,
        "public_pem": found.pem,
        "fetched_at": found.key.fetched_at,
        "refetched_at": found.refetched_at,
        "failed_at": None,
        "expires_at": found.key.expires_at,
    }
    insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(_TABLE)
    others = {name: insert.excluded[name] for name in values if name != "key_id"}
    connection.execute(insert.on_conflict_do_update(index_elements=["key_id"], set_=others), values)


_TABLE: Final = RemoteActorKey.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_NAMES: Final = ("owner", "public_pem", "fetched_at", "refetched_at", "failed_at", "expires_at")
_COLUMNS: Final = tuple(_TABLE.c[name] for name in _NAMES)
_ROW: Final = select(*_COLUMNS).where(_TABLE.c.key_id == bindparam("key"), _TABLE.c.fetched_at.is_not(None))
_FAILED: Final = update(_TABLE).where(_TABLE.c.key_id == bindparam("key")).values(failed_at=bindparam("at"))
