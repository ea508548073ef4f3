"""Bodies that arrive at an application: one at a time within the bounds of an activity, and all together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from federation.activitypub.inbox import BODY_TIMEOUT, MOST_OF_ACTIVITY
from federation.activitypub.refused import Refused, Why
from federation.activitypub.replies import RETRY_SECONDS

if TYPE_CHECKING:
    from starlette.types import Receive

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
