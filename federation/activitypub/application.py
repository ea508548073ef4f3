"""The actors of a process, served: as an ASGI application to mount, and as a function for Django and WSGI.

Both ask the process's node, which a loop has of its own. The application's functions are called where its other code
runs: those of an ASGI application in its loop, or in a thread if they are no coroutine functions; those of the plain
function in the thread that called it.

The module of nodes is found by its name and not imported: nodes are made of this package.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Final, Protocol, cast
from urllib.parse import quote

from db import Database
from federation.activitypub.documents import Software
from federation.activitypub.keys import ActorKeys
from federation.activitypub.serving import (
    ActorFunction,
    Asking,
    FindFunction,
    Reply,
    Serving,
    Step,
    Wanted,
    misconfigured,
)
from federation.base.errors import ConfigurationError
from workers.background import background
from workers.clock import Clock
from workers.version import version

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_NODES: Final = "federation.runtime.nodes"


class Parts(Protocol):
    """The parts of a node's ActivityPub that are needed here."""

    @property
    def keys(self) -> ActorKeys: ...


class Node(Protocol):
    """The parts of a node that are needed here."""

    own_url: str | None
    database: Database
    clock: Clock

    @property
    def activitypub(self) -> Parts | None: ...


def asgi(
    *, actor: ActorFunction | None = None, find: FindFunction | None = None, software: Software | None = None
) -> ActorsApp:
    """Return an ASGI application that serves this node's actors, WebFinger, NodeInfo and host-meta.

    `actor` returns the JSON of the actor with a URL, or None if there is none; `find` the URL of the actor with an
    account such as `alice@social.example`. Without `actor` documents are minimal, without `find` an account is that of
    the actor whose URL ends with its name. A function that is no coroutine function is called in a thread.
    """
    return ActorsApp(lambda: serving_of(_node("get_federation"), actor=actor, find=find, software=software))


def respond(
    method: str,
    target: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    actor: ActorFunction | None = None,
    find: FindFunction | None = None,
    software: Software | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """Answer a request from plain code, as `asgi` does: return status, headers and body.

    `target` is the path with its query, as it was sent. `body` is not looked at. `actor` and `find` are called in this
    thread, unless they are coroutine functions, which run in the process's background loop.

    Raises:
        ConfigurationError: this process has no node that serves actors.
    """
    serving = serving_of(_node("background_node"), actor=actor, find=find, software=software)
    step = background.run(partial(serving.begin, Wanted.of(method, target, headers)))
    while isinstance(step, Asking):
        step = _gone_on(step)
    return step.status, dict(step.headers), step.body


def _gone_on(asking: Asking) -> Step:
    try:
        told = asking.function(asking.about)
        if inspect.isawaitable(told):
            told = background.run(partial(_awaited, told))
    except Exception as error:
        return asking.fail(error)
    return background.run(partial(_then, asking, told))


async def _awaited(told: Awaitable[object]) -> object:
    return await told


async def _then(asking: Asking, told: object) -> Step:
    return await asking.then(told)


def _node(by: str) -> Node:
    """Return the process's node for asynchronous or for plain code."""
    return cast(Node, getattr(import_module(_NODES), by)())


def serving_of(
    node: Node,
    *,
    actor: ActorFunction | None = None,
    find: FindFunction | None = None,
    software: Software | None = None,
) -> Serving:
    """Return what serves the actors of *node*. It opens nothing, and need not be kept.

    Raises:
        ConfigurationError: the node has none.
    """
    if node.activitypub is None or node.own_url is None:
        raise ConfigurationError(["FEDERATION_ACTIVITYPUB: not on; FEDERATION_ACTIVITYPUB=1 turns on this wire"])
    return Serving(
        own_url=node.own_url,
        keys=node.activitypub.keys,
        database=node.database,
        clock=node.clock,
        software=software or Software(name="federation-delivery", version=version() or "0"),
        actor=actor,
        find=find,
    )


class ActorsApp:
    """An ASGI 3 application. What *serving* returns answers a request; it is asked for each.

    Below a mount the target is the whole path, as others see it. The well-known paths are answered below it and without
    it: `/.well-known` itself may be the mount.
    """

    def __init__(self, serving: Callable[[], Serving]) -> None:
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await _write(send, await self._answer(scope))
            case "lifespan":
                await self._live(receive, send)
            case "websocket":
                await send({"type": "websocket.close"})
            case other:
                raise ValueError(f"an ASGI scope of the type {other!r} is not known")

    async def _answer(self, scope: Scope) -> Reply:
        wanted = _wanted(scope)
        try:
            serving = self._serving()
        except ConfigurationError as error:
            return misconfigured(wanted, error)
        return await serving.answer_wanted(wanted)

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


def _wanted(scope: Scope) -> Wanted:
    mount = quote(scope.get("root_path", "").rstrip("/"))
    # Servers need not have the path as it was sent; and by the older reading of `root_path` it lacks the mount.
    raw = scope.get("raw_path")
    path = quote(scope["path"]) if raw is None else raw.decode("latin-1")
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
