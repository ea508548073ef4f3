"""A delivery that needs a relay, as the worker sends it, and what the node thinks of its peers."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import update
from sqlmodel import col

from db import Server
from federation.http.client import Fetched
from federation.protocol.activities import ActivityMethod, DeliveryRequest, delivery_headers
from federation.protocol.keys import sign_message
from federation.protocol.sealing import seal
from federation.runtime.composition import Federation
from tests.federation.delivery.harness import post_payload
from tests.federation.protocol.vectors import A
from tests.peer import POSTS_PATH, Peer

TARGET = "http://c.example"
MANY = [f"sick{number}.test" for number in range(30)]
RELAYS = [f"relay{number}.test" for number in range(4)]
BUDGET = timedelta(seconds=15)


async def change(federation: Federation, peer: Peer, **values: object) -> None:
    """The peer's row in the registry has these values."""
    async with federation.database.transaction() as session:
        await session.execute(update(Server).where(col(Server.url) == peer.url).values(values))
    federation.registry.forget(peer.url)


async def make_sick(federation: Federation, peer: Peer, reason: str | None) -> None:
    await change(federation, peer, is_healthy=False, unhealthy_reason=reason)


async def health(federation: Federation, peer: Peer) -> tuple[bool, str | None]:
    server = await federation.registry.find(peer.url)
    assert server is not None
    return server.is_healthy, server.unhealthy_reason


async def deliver(federation: Federation, target: Peer, *, text: str = "hello", timeout: timedelta = BUDGET) -> Fetched:
    """A post to the target, as the worker sends it."""
    payload = post_payload("post-1", text=text)
    url = TARGET + POSTS_PATH
    body = DeliveryRequest(
        method=ActivityMethod.FEDERATE_POST,
        payload=seal(payload, target.keys.encryption.public),
        signature=sign_message(payload, A.keys.signing.secret),
    ).to_bytes()
    return await federation.fetch(
        url,
        method="POST",
        headers=delivery_headers(own_url="https://a.example", target_url=url),
        body=body,
        timeout=timeout,
        proxy_fallback=True,
        server_url=TARGET,
    )
