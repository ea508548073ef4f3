"""The actors of a process, served: as an ASGI application to mount, and as a function for Django and WSGI.

Both also take activities that others post to inboxes: to any path that ends in `/inbox`, as the application's actors
have theirs wherever it says.

Both ask the process's node, which a loop has of its own. The application's functions are called where its other code
runs: those of an ASGI application in its loop, or in a thread if they are no coroutine functions; those of the plain
function in the thread that called it.

The module of nodes is found by its name and not imported: nodes are made of this package.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, cast
from urllib.parse import quote

from db import Database
from federation.activitypub.documents import Software
from federation.activitypub.inbox import (
    BODY_TIMEOUT,
    MOST_OF_ACTIVITY,
    ActivitiesInbox,
    failed,
    is_inbox,
    taken,
)
from federation.activitypub.keys import ActorKeys
from federation.activitypub.refused import Admit, Anybody, HeaderLines, Network, Refused, Why, asker_of, everybody
from federation.activitypub.replies import RETRY_SECONDS, Reply, Wanted, late, misconfigured
from federation.activitypub.serving import (
    ActorFunction,
    Asking,
    CountFollows,
    FindFunction,
    Serving,
    Step,
    TotalFunction,
    UsageFunction,
)
from federation.base.errors import ConfigurationError
from workers.background import background
from workers.clock import Clock
from workers.version import version

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

ANSWERED_WITHIN: Final = timedelta(seconds=15)
"""How long `respond` waits for the database, and for keys of others, which take 5 s, and maybe 5 s before that."""

_NODES: Final = "federation.runtime.nodes"
_AS_THEY_ARE: Final = "/!$&'()*+,;=:@"
"""What is not encoded in a path, where a server has only the decoded one: actors may be at `/@alice`."""


class Parts(Protocol):
    """The parts of a node's ActivityPub that are needed here."""

    @property
    def keys(self) -> ActorKeys: ...
    @property
    def inbox(self) -> ActivitiesInbox: ...
    @property
    def door(self) -> Door: ...
    @property
    def count_follows(self) -> CountFollows: ...


class Node(Protocol):
    """The parts of a node that are needed here."""

    own_url: str | None
    database: Database
    clock: Clock

    @property
    def activitypub(self) -> Parts | None: ...


def asgi(
    *,
    actor: ActorFunction | None = None,
    find: FindFunction | None = None,
    total: TotalFunction | None = None,
    usage: UsageFunction | None = None,
    software: Software | None = None,
) -> ActorsApp:
    """Return an ASGI application that serves this node's actors, WebFinger, NodeInfo and host-meta, and their inboxes.

    `actor` returns the JSON of the actor with a URL, or None if there is none; `find` the URL of the actor with an
    account such as `alice@social.example`. Without `actor` documents are minimal, without `find` an account is that of
    the actor whose URL ends with its name. `total` returns how much is in an actor's `outbox`, `followers` or
    `following`, which are below its URL; where it returns None those who follow are counted, and there is no outbox.
    `usage` returns what NodeInfo counts. A function that is no coroutine function is called in a thread.
    """
    return ActorsApp(
        lambda: serving_of(
            _node("get_federation"), actor=actor, find=find, total=total, usage=usage, software=software
        ),
        lambda: inbox_of(_node("get_federation")),
        lambda: _parts(_node("get_federation")).door,
    )


def respond(
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    client: str | None = None,
    actor: ActorFunction | None = None,
    find: FindFunction | None = None,
    total: TotalFunction | None = None,
    usage: UsageFunction | None = None,
    software: Software | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Answer a request from plain code, as `asgi` does: return status, headers and body.

    `target` is the path with its query, as it was sent. `body` counts where an activity is posted. The
    functions are called in this thread, unless they are coroutine functions, which run in the process's background
    loop. Before and after each it takes 15 s at most: then it answers 503.

    `client` is the address of whoever connected, in Django `request.META["REMOTE_ADDR"]`: what he posts is limited as
    by `asgi`. If `FEDERATION_TRUSTED_PROXIES` names it, the headers say for whom that proxy asks; or pass the address
    that a proxy you trust forwarded. Without one, or with a private one that is not named, nobody is told apart:
    nothing bounds how many activities a client posts, each of which may cost the check of a signature, and one client
    can use up the keys of new servers that are fetched for all.

    Raises:
        ConfigurationError: this process has no node that serves actors.
    """
    node, wanted = _node("background_node"), Wanted.of(method, target, headers)
    serving = serving_of(node, actor=actor, find=find, total=total, usage=usage, software=software)
    if is_inbox(method, wanted.path):
        inbox, door = inbox_of(node), _parts(node).door
        asker = door.asker(client or "", HeaderLines(headers.items()))
        take = partial(inbox.take, method=method, target=target, headers=headers, body=body)
        step = _in_time(partial(take, client=asker, admit=door.admit), wanted)
    else:
        step = _in_time(partial(serving.begin, wanted), wanted)
    while isinstance(step, Asking):
        step = _gone_on(step, wanted)
    return step.status, dict(step.headers), step.body


def _in_time(work: Callable[[], Awaitable[Step]], wanted: Wanted) -> Step:
    """Run it in the background loop; the thread does not wait for ever for a database or somebody's key."""

    async def bounded() -> Step:
        async with asyncio.timeout(ANSWERED_WITHIN.total_seconds()):
            return await work()

    try:
        return background.run(bounded)
    except TimeoutError:
        return late(wanted)


def _gone_on(asking: Asking, wanted: Wanted) -> Step:
    try:
        told = asking.function(*asking.about)
        if inspect.isawaitable(told):
            told = background.run(partial(_awaited, told))
    except Exception as error:
        return asking.fail(error)
    return _in_time(partial(asking.then, told), wanted)


async def _awaited(told: Awaitable[object]) -> object:
    return await told


def _node(by: str) -> Node:
    """Return the process's node for asynchronous or for plain code."""
    return cast(Node, getattr(import_module(_NODES), by)())


def serving_of(
    node: Node,
    *,
    actor: ActorFunction | None = None,
    find: FindFunction | None = None,
    total: TotalFunction | None = None,
    usage: UsageFunction | None = None,
    software: Software | None = None,
) -> Serving:
    """Return what serves the actors of *node*. It opens nothing, and need not be kept.

    Raises:
        ConfigurationError: the node has none.
    """
    parts = _parts(node)
    assert node.own_url is not None, "it has actors"
    return Serving(
        own_url=node.own_url,
        keys=parts.keys,
        database=node.database,
        clock=node.clock,
        software=software or Software(name="federation-delivery", version=version() or "0"),
        follows=parts.count_follows,
        actor=actor,
        find=find,
        total=total,
        usage=usage,
    )


def inbox_of(node: Node) -> ActivitiesInbox:
    """Return what takes activities that are sent to actors of *node*.

    Raises:
        ConfigurationError: the node has none.
    """
    return _parts(node).inbox


def _parts(node: Node) -> Parts:
    if node.activitypub is None:
        raise ConfigurationError(["FEDERATION_ACTIVITYPUB: not on; FEDERATION_ACTIVITYPUB=1 turns on this wire"])
    return node.activitypub


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Who may come to what an application serves: *proxies* say for whom they ask, *admit* counts each request."""

    proxies: Sequence[Network]
    admit: Admit

    def asker(self, host: str, headers: HeaderLines) -> Anybody:
        """Return who asks, by the address of whoever connected and by what it says if that is a proxy."""
        return asker_of(host, headers, self.proxies)


_OPEN: Final = Door(proxies=(), admit=everybody)


class ActorsApp:
    """An ASGI 3 application. What *serving* and *inbox* return answers a request; each is asked for it, as *door* is.

    Below a mount the target is the whole path, as others see it. The well-known paths are answered below it and without
    it: `/.well-known` itself may be the mount.
    """

    def __init__(
        self,
        serving: Callable[[], Serving],
        inbox: Callable[[], ActivitiesInbox],
        door: Callable[[], Door] = lambda: _OPEN,
    ) -> None:
        self._serving = serving
        self._inbox = inbox
        self._door = door
        self._room = Room()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await _write(send, await self._answer(scope, receive))
            case "lifespan":
                await self._live(receive, send)
            case "websocket":
                await send({"type": "websocket.close"})
            case other:
                raise ValueError(f"an ASGI scope of the type {other!r} is not known")

    async def _answer(self, scope: Scope, receive: Receive) -> Reply:
        wanted = _wanted(scope)
        try:
            if is_inbox(wanted.method, wanted.path):
                return await self._taken(self._inbox(), wanted, scope, receive)
            serving = self._serving()
        except ConfigurationError as error:
            return misconfigured(wanted, error)
        return await serving.answer_wanted(wanted)

    async def _taken(self, inbox: ActivitiesInbox, wanted: Wanted, scope: Scope, receive: Receive) -> Reply:
        headers, door = joined(scope["headers"]), self._door()
        host, _ = scope.get("client") or ("", 0)
        asker = door.asker(host, HeaderLines.of_scope(scope["headers"]))
        try:
            await door.admit(asker)
            await inbox.check_head(headers)
            with self._room.arriving() as body:
                await read_body(body, receive, headers, partial(inbox.vouch, headers, asker))
                await inbox.accept(
                    method=wanted.method, target=wanted.target, headers=headers, body=bytes(body.content), client=asker
                )
        except Refused as refused:
            return inbox.refused(refused)
        except Exception as error:
            return failed(wanted.target, error)
        return taken()

    async def _live(self, receive: Receive, send: Send) -> None:
        """Say at the start whether there is a node to serve; who mounts us may not ask."""
        while True:
            match (await receive())["type"]:
                case "lifespan.startup":
                    try:
                        self._serving()
                    except ConfigurationError as error:
                        await send({"type": "lifespan.startup.failed", "message": str(error)})
                        return
                    await send({"type": "lifespan.startup.complete"})
                case "lifespan.shutdown":
                    await send({"type": "lifespan.shutdown.complete"})
                    return


def joined(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers of a request by their names in lower case; those of one name are one, with commas."""
    headers: dict[str, str] = {}
    for name, value in ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw):
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def target_of(scope: Scope) -> str:
    """Return the path of a request as everybody sees it, with its query, nothing of it decoded."""
    return _wanted(scope).target


def _wanted(scope: Scope) -> Wanted:
    mount = quote(scope.get("root_path", "").rstrip("/"), safe=_AS_THEY_ARE)
    # Servers need not have the path as it was sent; and by the older reading of `root_path` it lacks the mount.
    raw = scope.get("raw_path")
    path = quote(scope["path"], safe=_AS_THEY_ARE) if raw is None else raw.decode("latin-1")
    if not f"{path}/".startswith(f"{mount}/"):
        path = mount + path
    query = scope.get("query_string", b"").decode("latin-1")
    target = f"{path}?{query}" if query else path
    accepts = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"accept"]
    return Wanted(method=scope["method"], target=target, accept=", ".join(accepts) if accepts else None, mount=mount)


async def _write(send: Send, reply: Reply) -> None:
    headers = [(name.lower().encode("ascii"), value.encode("latin-1")) for name, value in reply.headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


MOST_HELD: Final = 16 * 1024 * 1024
"""How many bytes of bodies an application has in memory at a time."""
MOST_OF_ANYBODY: Final = 64 * 1024
"""How much is read of a body before its key is there."""


class Room:
    """What an application has in memory of bodies, in bytes."""

    def __init__(self) -> None:
        self.held = 0

    @contextmanager
    def arriving(self) -> Iterator[Arriving]:
        body = Arriving(self)
        try:
            yield body
        finally:
            self.held -= len(body.content)


@dataclass(slots=True)
class Arriving:
    room: Room
    content: bytearray = field(default_factory=bytearray)

    def arrives(self, part: bytes) -> None:
        """Add what has arrived.

        Raises:
            Refused: 413, it is too large; 503, all together are.
        """
        if len(self.content) + len(part) > MOST_OF_ACTIVITY:
            raise _too_large()
        if self.room.held + len(part) > MOST_HELD:
            raise Refused(Why.LIMIT, 503, "Too many activities arrive", retry_seconds=RETRY_SECONDS)
        self.room.held += len(part)
        self.content += part


async def read_body(
    body: Arriving, receive: Receive, headers: Mapping[str, str], vouch: Callable[[], Awaitable[None]]
) -> None:
    """Read a body, within the bounds of an activity; a large one only if somebody vouches for its sender."""
    announced = headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:20]) > MOST_OF_ACTIVITY:
        raise _too_large()
    has_more, is_vouched_for = True, False
    try:
        async with asyncio.timeout(BODY_TIMEOUT.total_seconds()):
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(Why.SLOW, 408, "The body broke off")
                body.arrives(message.get("body", b""))
                if len(body.content) > MOST_OF_ANYBODY and not is_vouched_for:
                    await vouch()
                    is_vouched_for = True
                has_more = message.get("more_body", False)
    except TimeoutError:
        raise Refused(Why.SLOW, 408, "The body did not arrive in time") from None


def _too_large() -> Refused:
    return Refused(Why.SIZE, 413, f"An activity has at most {MOST_OF_ACTIVITY} bytes")
