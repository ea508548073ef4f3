"""Asking servers to prove that they hold the keys they show."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

from federation.http.client import FederationFetch
from federation.http.errors import OutboundError
from federation.protocol.errors import KeyMaterialError
from federation.protocol.keys import decode_key
from federation.protocol.possession import NO_PROOF, REFUTED, Proof, ping_request, possession_nonce, read_pong
from federation.protocol.relaying import ORIGIN_HEADER, RELAY_PATH

PING_TIMEOUT: Final = timedelta(seconds=5)
MAX_PINGS_PER_HOST: Final = 4


class Possession:
    """Pings servers in the name of *own_url*. Without a URL nobody is asked, as nobody would answer."""

    def __init__(self, *, own_url: str | None, fetch: FederationFetch) -> None:
        self._own_url = own_url
        self._fetch = fetch
        self._under_way: Counter[str] = Counter()

    async def ask(
        self, url: str, *, public_key: str, encryption_public_key: str, timeout: timedelta = PING_TIMEOUT
    ) -> Proof:
        """Ask the server at *url* to prove that it holds these keys. Sends one request, whose failure blames nobody.

        The server can answer only if it knows us. While four requests to its host are under way, no fifth one is sent.
        """
        host = urlsplit(url).hostname or url
        if self._own_url is None or timeout <= timedelta() or self._under_way[host] >= MAX_PINGS_PER_HOST:
            return NO_PROOF
        self._under_way[host] += 1
        try:
            return await self._ping(self._own_url, url, public_key, encryption_public_key, timeout)
        finally:
            self._under_way[host] -= 1
            if not self._under_way[host]:
                del self._under_way[host]

    async def _ping(
        self, own_url: str, url: str, public_key: str, encryption_public_key: str, timeout: timedelta
    ) -> Proof:
        nonce = possession_nonce(url, own_url)
        try:
            body = ping_request(nonce, decode_key(encryption_public_key, what="shown encryption key"))
        except KeyMaterialError:
            return REFUTED
        try:
            fetched = await self._fetch(
                url + RELAY_PATH,
                method="POST",
                headers={"Content-Type": "application/json", "Origin": own_url, ORIGIN_HEADER: own_url},
                body=body,
                timeout=min(timeout, PING_TIMEOUT),
                server_url=url,
                skip_health_update=True,
            )
        except OutboundError:
            return NO_PROOF
        response = fetched.response
        return read_pong(response.body, status=response.status, nonce=nonce, public_key=public_key)
