"""Which acknowledgments of posts are checked: few enough to cost next to nothing, and each where somebody may be new.

Theory of operation. Opening an acknowledgment takes 0.18 ms of processor time, a third of a delivery. So one in 32 is
opened, at random, which is a hundredth. Whoever begins to answer in a server's place is mostly seen at once all the
same: by another address, another certificate, or a link that was down before. So the first acknowledgment of a server
in this process is checked, the first after its link has changed, and the first from each address and certificate. After
one that was not the server's, all are checked until one is the server's again. One that has nothing in it to open, from
a server that signs, costs nothing to check, and never passes.

Chance alone decides beyond `MAX_REMEMBERED` servers, and beyond `MAX_ANSWERERS` of one server: some stand behind
hundreds of addresses, and all would be new.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

ONE_IN: Final = 32
MAX_REMEMBERED: Final = 20_000
MAX_ANSWERERS: Final = 8

Chance = Callable[[], bool]


def one_in_some() -> bool:
    """Draw one acknowledgment in 32."""
    return random.random() * ONE_IN < 1  # noqa: S311 - nobody who answers sees what was drawn before


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is known of an acknowledgment before it is opened.

    `since` is when the server's link changed last, `answerer` who was at the other end of the connection.
    """

    server_url: str
    since: datetime | None
    answerer: bytes
    is_empty: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Of whom an acknowledgment was checked since the server's link changed last. `signs`: one was the server's."""

    since: datetime | None
    answerers: tuple[bytes, ...] = ()
    signs: bool = False


_NOTHING: Final = _Known(since=None)


class AckChecks:
    """Remembers what was checked, in this process, and says what is to be."""

    def __init__(self, chance: Chance = one_in_some) -> None:
        self._chance = chance
        self._known: dict[str, _Known] = {}

    def wants(self, answer: Answer) -> bool:
        """Tell whether the acknowledgment is to be checked."""
        known = self._known.get(answer.server_url)
        if known is None:
            return len(self._known) < MAX_REMEMBERED or self._chance()
        if known.since != answer.since or (answer.is_empty and known.signs):
            return True
        is_new = answer.answerer not in known.answerers and len(known.answerers) < MAX_ANSWERERS
        return is_new or self._chance()

    def is_forged(self, answer: Answer, *, proved: bool | None) -> bool:
        """Note what a check has found, and tell whether somebody else than the server acknowledged.

        *proved*: the acknowledgment is the server's, or is not; None if that could not be found out. An empty one is
        forged only where the server has signed another: there may be servers that never sign.
        """
        known = self._known.get(answer.server_url, _NOTHING)
        forged = proved is False and (known.signs or not answer.is_empty)
        answerers = known.answerers if known.since == answer.since else ()
        if forged:
            answerers = ()
        elif answer.answerer not in answerers and len(answerers) < MAX_ANSWERERS:
            answerers = (*answerers, answer.answerer)
        signs = known.signs or proved is True
        self._remember(answer.server_url, _Known(since=answer.since, answerers=answerers, signs=signs))
        return forged

    def _remember(self, server_url: str, known: _Known) -> None:
        if server_url not in self._known and len(self._known) >= MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[server_url] = known
