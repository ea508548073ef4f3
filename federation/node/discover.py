"""`/discover`: who we are and whom we know, and the two questions that other servers may ask us."""

from __future__ import annotations

from typing import Final

from sqlalchemy import select
from sqlmodel import col
from starlette.responses import Response

from db import Database, Server
from federation.node.front import Inbound
from federation.node.key_check import KeyCheck
from federation.node.refusals import Refusal, json_response
from federation.node.registration import Registration
from federation.protocol.discovery import own_document
from federation.protocol.errors import NotJson, UrlError
from federation.protocol.relaying import ORIGIN_HEADER
from federation.protocol.urls import canonical_origin
from federation.sealed.peers.own_identity import OwnIdentity

MAX_DISCOVER_REQUEST_BYTES: Final = 16 * 1024

# Keeps the document below the 256 KiB that peers read, even if every host name has the greatest length.
MAX_PEERS: Final = 500


class Discover:
    """Answers GET and POST `/discover`; *identity* provides the document's part about us."""

    def __init__(
        self,
        *,
        own_url: str,
        identity: OwnIdentity,
        database: Database,
        registration: Registration,
        key_check: KeyCheck,
    ) -> None:
        self._own_url = own_url
        self._identity = identity
        self._database = database
        self._registration = registration
        self._key_check = key_check

    async def show(self, inbound: Inbound) -> Response:
        """Answer with our URL, our keys, and the servers that we believe healthy, those seen last first.

        The keys are those by which the server knows us that names itself as asking.
        """
        query = (
            select(col(Server.url))
            .where(col(Server.is_healthy))
            .order_by(col(Server.last_seen).desc())
            .limit(MAX_PEERS)
        )
        async with self._database.read() as session:
            urls = (await session.execute(query)).scalars().all()
        return json_response(
            {
                **own_document(self._own_url, await self._identity.shown(_asker(inbound))),
                "peers": [{"url": url, "isHealthy": True} for url in urls],
            }
        )

    async def answer(self, inbound: Inbound) -> Response:
        """Do what `REGISTER` or `DISCOVER` asks for.

        Raises:
            Refusal: it is not done.
        """
        match inbound.value:
            case {"method": "REGISTER"}:
                return await self._registration(inbound.value, network=inbound.network)
            case {"method": "DISCOVER"}:
                return await self._key_check(inbound.value)
            case NotJson():
                raise Refusal(400, "Invalid JSON", code="INVALID_JSON")
            case _:
                raise Refusal(400, "Invalid method", reason="INVALID_METHOD")


def _asker(inbound: Inbound) -> str | None:
    """Return the server that names itself as asking."""
    try:
        return canonical_origin(inbound.headers.get(ORIGIN_HEADER, ""))
    except UrlError:
        return None
