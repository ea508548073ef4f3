"""How a remote server reaches the node: by the application if a test names one, or else as on the node's own port."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any, cast

import httpx

from federation.activitypub.application import inbox_of, serving_of
from federation.activitypub.inbox import is_inbox
from federation.activitypub.refused import Anybody
from federation.runtime.composition import Federation
from federation.testing.loopback import RemoteAnswer


class NotTaken(Exception):
    """The node, or the application, did not take what a remote sent. `status` is that of its answer."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(f"{status}: {told}")
        self.status = status


async def ask(
    node: Federation, app: object | None, *, method: str, target: str, headers: Mapping[str, str], body: bytes = b""
) -> RemoteAnswer:
    """Ask for an actor, or post to an inbox."""
    if app is not None:
        return await _asked(app, str(node.own_url), method, target, headers, body)
    if is_inbox(method, target.partition("?")[0]):
        taken = await inbox_of(node).take(method=method, target=target, headers=headers, body=body, client=Anybody())
        return RemoteAnswer(taken.status, taken.headers, taken.body)
    shown = await serving_of(node).answer(method, target, headers)
    return RemoteAnswer(shown.status, shown.headers, shown.body)


async def ask_node(node: Federation, *, target: str, headers: Mapping[str, str], body: bytes) -> RemoteAnswer:
    """Post to the node's own port, which has the endpoints of the sealed wire."""
    return await _asked(node.node_app(), str(node.own_url), "POST", target, headers, body)


async def _asked(
    app: object, own_url: str, method: str, target: str, headers: Mapping[str, str], body: bytes
) -> RemoteAnswer:
    request = {"method": method, "url": own_url + target, "headers": dict(headers), "content": body}
    if _is_asgi(app):
        transport = httpx.ASGITransport(app=cast(Any, app))
        async with httpx.AsyncClient(transport=transport) as client:
            return _read(await client.request(**cast(Any, request)))
    return await asyncio.to_thread(_asked_plainly, app, request)


def _asked_plainly(app: object, request: Mapping[str, object]) -> RemoteAnswer:
    with httpx.Client(transport=httpx.WSGITransport(app=cast(Any, app))) as client:
        return _read(client.request(**cast(Any, request)))


def _is_asgi(app: object) -> bool:
    return inspect.iscoroutinefunction(app if inspect.isfunction(app) else cast(Any, type(app)).__call__)


def _read(response: httpx.Response) -> RemoteAnswer:
    return RemoteAnswer(response.status_code, dict(response.headers), response.content)
