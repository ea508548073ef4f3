"""What is asked of a server, and of whatever carries it there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from federation.http.guard import Target
from federation.http.response import Response

_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, with all headers but those that frame it, and how much may come back."""

    method: str
    target: Target
    headers: Mapping[str, str]
    body: bytes | None = field(repr=False)
    max_bytes: int

    @property
    def framing(self) -> dict[str, str]:
        """The headers that say for whom the request is, and where it ends."""
        host = {"Host": self.target.origin.partition("://")[2]}
        if self.body is None and self.method in _WITHOUT_BODY:
            return host
        return {**host, "Content-Length": str(len(self.body or b""))}


class Carrier(Protocol):
    """Carries requests to servers. It has no deadline of its own: it is cancelled, and then closes the connection."""

    async def exchange(self, request: Request, began: Callable[[], None]) -> Response:
        """Return the whole response; call *began* when its head has arrived.

        Raises:
            BodyTooLarge: the body has, or announces, more than `request.max_bytes`.
            TRANSPORT_FAILURES: there is no complete response.
        """

    async def aclose(self) -> None:
        """Close every connection. Exchanges still running fail."""
