"""What we answer to those who verify us or look for our actors: a function of the request, the tables, the application.

Theory of operation. Nothing here writes. An actor is served if `activitypub_actors` has it; its document is the
application's, or a minimal one, with the key that signs now. A removed actor is served for `REMOVED_FOR` with what
verifies the news of it, then it is gone. Its collections are shown while it is, by how much is in them: those who
follow are in a table, and of its posts only the application knows.

The application's functions belong to its thread: an ORM keeps a connection for each. So no answer calls them. It stops
at an `Asking`, and whoever wanted the answer calls the function in the way that suits it, and goes on.

Requests come from strangers. Of a target only its text is compared, undecoded, with what was stored: neither dots nor
encoded slashes mean anything. The name of the host is ours from the settings, never a header's. No body is read.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs, quote

from sqlalchemy import Row, bindparam, select
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import col

from db import ActivityActor, Database
from federation.activitypub import documents
from federation.activitypub.documents import Software, Usage
from federation.activitypub.keys import ActorKeys
from federation.activitypub.replies import (
    Reply,
    Wanted,
    answer_failed,
    database_failed,
    json_reply,
    problem,
    reply_of,
    unacceptable,
    unknown,
)
from workers.clock import Clock

_ACTOR: Final = select(col(ActivityActor.is_instance), col(ActivityActor.removed_at)).where(
    col(ActivityActor.id) == bindparam("url")
)

MAX_NAMESAKES: Final = 100
"""How many actors whose URLs end alike are looked through for an account."""
_NAMESAKES: Final = (
    select(col(ActivityActor.created_at), col(ActivityActor.id), col(ActivityActor.is_instance))
    .where(col(ActivityActor.name) == bindparam("found_by"), col(ActivityActor.removed_at).is_(None))
    .order_by(col(ActivityActor.created_at))  # as the index has them, so that no more than these are read
    .limit(MAX_NAMESAKES)
)

REMOVED_FOR: Final = timedelta(days=30)

ActorFunction: TypeAlias = Callable[[str], Mapping[str, object] | Awaitable[Mapping[str, object] | None] | None]
"""Returns the JSON of the actor with this URL, without its key, or None."""
FindFunction: TypeAlias = Callable[[str], str | Awaitable[str | None] | None]
"""Returns the URL of the actor with an account such as `alice@social.example`, or None."""
TotalFunction: TypeAlias = Callable[[str, str], int | Awaitable[int | None] | None]
"""Returns how much is in the `outbox`, `followers` or `following` of the actor with this URL; None: as we count."""
UsageFunction: TypeAlias = Callable[[], Usage | Awaitable[Usage]]
CountFollows: TypeAlias = Callable[[str, str], Awaitable[int]]
"""Returns how many are in the `followers` or `following` of the actor with this URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """A question to the application. `then` goes on with what `function` returned, `fail` with what it raised."""

    function: Callable[..., object]
    about: tuple[str, ...]
    then: Callable[[object], Awaitable[Step]]
    fail: Callable[[Exception], Reply]


Step: TypeAlias = "Reply | Asking"


class Serving:
    """Answers for the actors of the node that serves as *own_url*, in canonical form.

    *find* names the actor of an account; without it an account is that of the first actor whose URL ends with its name.
    *total* says how much a collection holds; where it does not, *follows* counts, and there is no outbox. *usage* is
    what NodeInfo counts.
    """

    def __init__(
        self,
        *,
        own_url: str,
        keys: ActorKeys,
        database: Database,
        clock: Clock,
        software: Software,
        follows: CountFollows,
        actor: ActorFunction | None = None,
        find: FindFunction | None = None,
        total: TotalFunction | None = None,
        usage: UsageFunction | None = None,
    ) -> None:
        self._own_url = own_url
        self._keys = keys
        self._database = database
        self._clock = clock
        self._software = software
        self._actor = actor
        self._find = find
        self._follows = follows
        self._total = total
        self._usage = usage

    async def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> Reply:
        """Answer a request; see `Wanted`. Whatever goes wrong is an answer, too. *body* is not looked at."""
        return await self.answer_wanted(Wanted.of(method, target, headers))

    async def answer_wanted(self, wanted: Wanted) -> Reply:
        """Answer, calling the application's functions here: those that are not coroutine functions in a thread."""
        step = await self.begin(wanted)
        while isinstance(step, Asking):
            try:
                told = await _asked(step)
            except Exception as error:
                return step.fail(error)
            step = await step.then(told)
        return step

    async def begin(self, wanted: Wanted) -> Step:
        """Go as far as to the answer, or to what the application has to be asked."""
        return await self._guarded(wanted, self._first(wanted))

    async def _guarded(self, wanted: Wanted, work: Awaitable[Step]) -> Step:
        try:
            step = await work
        except SQLAlchemyError as error:
            step = database_failed(wanted, error)
        except Exception as error:
            step = answer_failed(wanted, error)
        return wanted.finished(step) if isinstance(step, Reply) else step

    def _ask(
        self, wanted: Wanted, function: Callable[..., object], *about: str, then: Callable[[object], Awaitable[Step]]
    ) -> Asking:
        return Asking(
            function=function,
            about=about,
            then=lambda told: self._guarded(wanted, then(told)),
            fail=lambda error: wanted.finished(answer_failed(wanted, error)),
        )

    async def _first(self, wanted: Wanted) -> Step:
        refusal = wanted.refusal()
        if refusal is not None:
            return refusal
        match wanted.path.removeprefix(wanted.base):
            case documents.WEBFINGER_PATH:
                return await self._webfinger(wanted)
            case documents.NODEINFO_INDEX_PATH:
                return json_reply(documents.nodeinfo_index(f"{self._own_url}{wanted.base}"), "application/json", _OPEN)
            case documents.NODEINFO_PATH:
                return await self._nodeinfo(wanted)
            case documents.HOST_META_PATH:
                return reply_of(200, documents.host_meta(self._own_url).encode(), documents.XRD, _OPEN)
            case _:
                return await self._document(wanted)

    async def _nodeinfo(self, wanted: Wanted) -> Step:
        async def told(usage: object) -> Step:
            if not isinstance(usage, Usage):
                raise TypeError("what NodeInfo counts is a Usage")
            return json_reply(documents.nodeinfo(self._software, usage), documents.NODEINFO, _OPEN)

        return await told(Usage()) if self._usage is None else self._ask(wanted, self._usage, then=told)

    async def _document(self, wanted: Wanted) -> Step:
        url = f"{self._own_url}{wanted.target}"
        row = await self._row(url)
        if row is None and (named := documents.collection_of(url)) is not None:
            return await self._collection(wanted, *named)
        key = await self._keys.served(url) if row is not None else None
        if row is None or key is None:
            return unknown()
        now = self._clock.now()
        if row.removed_at is not None and row.removed_at + REMOVED_FOR <= now:
            return problem(410, "This actor is no more")
        kind = documents.accepted(wanted.accept)
        if kind is None:
            return unacceptable()
        shown = documents.public_key(url, key_id=key.key_id, pem=key.public_pem)
        headers = documents.caching(is_changing=key.changes_at is not None and now < key.changes_at)
        if row.removed_at is not None:
            left = documents.removed_actor(url, is_instance=row.is_instance, key=shown)
            return json_reply(left, kind, headers)
        minimal = documents.minimal_actor(url, is_instance=row.is_instance)
        if self._actor is None:
            return json_reply(documents.with_key(minimal, shown), kind, headers)

        async def told(document: object) -> Step:
            if document is None and row.is_instance:  # we may have made it ourselves, to sign what we ask for
                document = minimal
            if document is None:
                return unknown()
            return json_reply(documents.with_key(_mapping(document), shown), kind, headers)

        return self._ask(wanted, self._actor, url, then=told)

    async def _collection(self, wanted: Wanted, actor_url: str, name: str) -> Step:
        """Answer how much is in a collection of an actor that is shown."""
        row, kind = await self._row(actor_url), documents.accepted(wanted.accept)
        if row is None or row.removed_at is not None:
            return unknown()
        if kind is None:
            return unacceptable()

        async def counted(total: object) -> Step:
            if total is None and name == documents.OUTBOX:
                return unknown()
            held = await self._follows(actor_url, name) if total is None else _count(total)
            url = f"{self._own_url}{wanted.target}"
            return json_reply(documents.collection(url, held), kind, documents.caching(is_changing=False))

        async def shown(document: object) -> Step:
            if document is None and not row.is_instance:
                return unknown()
            if self._total is None:
                return await counted(None)
            return self._ask(wanted, self._total, actor_url, name, then=counted)

        return await shown({}) if self._actor is None else self._ask(wanted, self._actor, actor_url, then=shown)

    async def _webfinger(self, wanted: Wanted) -> Step:
        resources = parse_qs(wanted.target.partition("?")[2], keep_blank_values=True).get("resource", [])
        if len(resources) != 1 or not resources[0].isprintable():
            return problem(400, "WebFinger is asked for one resource", _OPEN)
        resource = resources[0]
        scheme, _, rest = resource.partition(":")
        if scheme.lower() == "acct":
            return await self._account(wanted, rest.removeprefix("@"))
        if "@" in scheme:  # some leave out `acct:`
            return await self._account(wanted, resource.removeprefix("@"))
        if scheme.lower() in ("https", "http") and rest.startswith("//"):
            return await self._named(wanted, resource)
        return problem(400, "The resource is neither an account (acct:name@host) nor a URL", _OPEN)

    async def _account(self, wanted: Wanted, account: str) -> Step:
        name, _, host = account.rpartition("@")
        if not name or not host or "/" in account or "@" in name:
            return problem(400, "The account is not of the form name@host", _OPEN)

        is_ours = host.lower() == self._host

        async def found(url: object, name: str = name) -> Step:
            if url is None and is_ours:  # the application need not know the actor that signs what we ask for
                url = await self._namesake(name, is_instance=True)
            if not isinstance(url, str) or not await self._is_alive(url):
                return unknown()
            return json_reply(documents.webfinger(f"acct:{name}@{host.lower()}", url), documents.JRD, _OPEN)

        if self._find is not None:
            return self._ask(wanted, self._find, account, then=found)
        url = await self._namesake(name) if is_ours else None
        return unknown() if url is None else await found(url, documents.name_of(url))

    async def _named(self, wanted: Wanted, url: str) -> Step:
        """Answer for an actor's URL: its account has the name that its document has."""
        row = await self._row(url)
        if row is None or row.removed_at is not None:
            return unknown()

        async def told(document: object) -> Step:
            if document is None and row.is_instance:  # as its document is minimal then
                document = {}
            if document is None:
                return unknown()
            name = _mapping(document).get("preferredUsername")
            account = f"acct:{name if isinstance(name, str) else documents.name_of(url)}@{self._host}"
            return json_reply(documents.webfinger(account, url), documents.JRD, _OPEN)

        return await told({}) if self._actor is None else self._ask(wanted, self._actor, url, then=told)

    @property
    def _host(self) -> str:
        return self._own_url.partition("://")[2]

    async def _row(self, url: str) -> Row[*tuple[Any, ...]] | None:
        rows = await self._database.rows(_ACTOR, {"url": url})
        return rows[0] if rows else None

    async def _is_alive(self, url: str) -> bool:
        row = await self._row(url)
        return row is not None and row.removed_at is None

    async def _namesake(self, name: str, *, is_instance: bool = False) -> str | None:
        """Return the actor that has had this name longest, or else in other cases: Misskey asks in lower case.

        *is_instance*: of those that stand for the node.
        """
        ends = f"/{quote(name)}", f"/@{quote(name)}"
        rows = await self._database.rows(_NAMESAKES, {"found_by": quote(name).lower()})
        alike = [row.id for row in sorted(rows) if row.is_instance or not is_instance]
        return next((each for each in alike if each.endswith(ends)), next(iter(alike), None))


async def _asked(asking: Asking) -> object:
    if inspect.iscoroutinefunction(asking.function):
        return await asking.function(*asking.about)
    told = await asyncio.to_thread(asking.function, *asking.about)
    return await told if inspect.isawaitable(told) else told


_OPEN: Final = {"Access-Control-Allow-Origin": "*", "Cache-Control": f"public, max-age={documents.MAX_AGE_SECONDS}"}
"""Programs in browsers ask for what is well known, from pages of other origins (RFC 7033, 5)."""


def _mapping(document: object) -> Mapping[str, object]:
    if not isinstance(document, Mapping):
        raise TypeError("an actor's document is a mapping or None")
    return document


def _count(total: object) -> int:
    if not isinstance(total, int) or isinstance(total, bool) or total < 0:
        raise TypeError("how much is in a collection is a number or None")
    return total
