"""What is asked of a server, and its complete response: when to come back, or where to go instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import ClassVar, Protocol

from federation.http.guard import Target
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin
from federation.protocol.values import Value

_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})


class Request(Value, frozen=True, kw_only=True):
    """One request, with all headers but those that frame it, and how much may come back.

    `head_decides`: all that matters is the head of the answer. Its body is what has come of it within `BODY_PATIENCE`,
    cut off after `max_bytes`: one that is too long, broken, late or compressed fails nothing.
    """

    unshown: ClassVar = frozenset({"body"})

    method: str
    target: Target
    headers: Mapping[str, str]
    body: bytes | None
    max_bytes: int
    head_decides: bool = False

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
            BodyTooLarge: the body has, or announces, more than `request.max_bytes`, unless `request.head_decides`.
            TRANSPORT_FAILURES: there is no complete response.
        """

    async def aclose(self) -> None:
        """Close every connection. Exchanges still running fail."""


SHORTEST_PAUSE = timedelta(seconds=1)
LONGEST_PAUSE = timedelta(hours=24)
BODY_PATIENCE = timedelta(seconds=2)
NOT_JUDGED = frozenset({408, 425})
"""The 4xx statuses that say nothing about the request, because the server did not get to judge it."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})

_SECONDS = re.compile(r"[0-9]+")
# Several values are joined by commas, and a date has one, too: after the day of the week, in short or in full.
_COMMA = re.compile(r"(?<!mon|tue|wed|thu|fri|sat|sun|day),", re.IGNORECASE)
_MAX_VALUES = 64
_MAX_DATE_CHARACTERS = 64


class Response(Value, frozen=True, kw_only=True):
    """The status, the headers as they came (names in any case), and the whole body.

    `encoding`: the Content-Encoding that the body still has, as the server calls it, or None if it has none.
    `answerer`: tells who is at the other end of its connection, by address and certificate, from others that may answer
    for the same server; empty where that is not known.
    """

    unshown: ClassVar = frozenset({"body", "answerer"})

    status: int
    headers: Mapping[str, str]
    body: bytes
    encoding: str | None = None
    answerer: bytes = b""

    @property
    def ok(self) -> bool:
        """Whether the status is a 2xx."""
        return 200 <= self.status <= 299

    @property
    def still_encoded(self) -> str:
        """What to add to the text of a failure that the encoding explains; nothing if the body has none."""
        return "" if self.encoding is None else f" (its Content-Encoding, which we did not ask for: {self.encoding})"

    def retry_after(self, now: datetime) -> timedelta | None:
        """Return how long the server asks to be left alone, from one second to 24 hours, or None if it does not say.

        Reads `Retry-After`, or else `X-Retry-After` (which the original implementation's rate limiter sends): whole
        seconds or an HTTP date. Anything else counts as absent. Of several values the longest counts: an application
        and the proxy before it may each say one.
        """
        for name in ("retry-after", "x-retry-after"):
            values = _COMMA.split(self.headers.get(name, ""), _MAX_VALUES)[:_MAX_VALUES]
            pauses = [pause for value in values if (pause := _parse_pause(value.strip(), now)) is not None]
            if pauses:
                return min(max(*pauses, SHORTEST_PAUSE), LONGEST_PAUSE)
        return None

    def moved_to(self, asked: str, *, ours: str | None) -> str | None:
        """Return the origin that this answer, to a request for the URL *asked*, redirects to.

        None if it is no redirect, or names no other origin, or names *ours*. Redirects are not followed, and `Location`
        is a stranger's text: only what has one canonical spelling counts, and a path alone stays at its origin. URLs
        are ASCII; other characters were decoded by a guess, so they could make the name of somebody else.
        """
        location = self.headers.get("location", "").strip(" \t")
        if self.status not in REDIRECTS or not location.isascii():
            return None
        if location.startswith("//"):
            location = f"{asked.partition(':')[0]}:{location}"
        try:
            named = canonical_origin(location)
        except UrlError:
            return None
        return None if named in (canonical_origin(asked), ours) else named


def asks_for_rest(status: int, *, with_pause: bool) -> bool:
    """Tell whether a server wants to be left alone: by a 429, or by a 503 that says for how long."""
    return status == 429 or (status == 503 and with_pause)


def _parse_pause(text: str, now: datetime) -> timedelta | None:
    if _SECONDS.fullmatch(text):
        return timedelta(seconds=int(text)) if len(text) < 9 else LONGEST_PAUSE
    if len(text) > _MAX_DATE_CHARACTERS:
        return None
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - now
