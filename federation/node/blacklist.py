"""The gate in front of every endpoint: a request that gives a blacklisted server as its own is turned away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from starlette.datastructures import Headers

from federation.node.refusals import Refusal
from federation.protocol.urls import MAX_URL_CHARACTERS
from federation.sealed.peers.registry import Registry

_HEADERS = ("origin", "x-federation-origin")
BODY_MEMBERS = ("url", "serverUrl")


class BlacklistGate:
    """Refuses requests that carry the name of a blacklisted server, in any spelling.

    There are no exemptions: Sipher lets a request pass that names this node itself as its origin, which anyone can
    write.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def check_headers(self, headers: Headers) -> None:
        """Refuse a request that names a blacklisted server in its headers.

        Raises:
            Refusal: it does.
        """
        await self.check(_named_in_headers(headers))

    async def check_body(self, value: object) -> None:
        """Refuse a request that names a blacklisted server in its parsed body.

        Raises:
            Refusal: it does.
        """
        await self.check(_named_in_body(value))

    async def check(self, named: Iterable[object]) -> None:
        """Check that none of the server URLs in *named* is blacklisted. What is no URL at all is ignored.

        Raises:
            Refusal: one of them is.
        """
        for url in {value for value in named if isinstance(value, str) and len(value) <= MAX_URL_CHARACTERS}:
            if await self._registry.is_blacklisted(url):
                raise Refusal(403, "Your server has been blacklisted.", reason="BLACKLISTED")


def _named_in_headers(headers: Headers) -> Iterator[str]:
    for name in _HEADERS:
        yield from headers.getlist(name)


def _named_in_body(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from (value.get(member) for member in BODY_MEMBERS)
