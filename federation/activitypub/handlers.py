"""What an application does with activities that others send: its functions, by the activity's type.

Importing the application's modules declares them, as it declares tasks. A coroutine function gets an `AsyncSession`,
any other function the `Session` inside of it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Self, TypeAlias, TypeVar

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from federation.protocol.urls import origin_of
from workers import Snooze, TransactionError

Function: TypeAlias = Callable[..., object]
"""Called with a session, the activity and the URL of its actor; the result counts only where a Follow is decided."""
F = TypeVar("F", bound=Function)

REST: Final = "*"
"""Stands for all types that have no function of their own."""
_AUTHORS: Final = ("attributedTo", "actor")
_NOT_ITS_OWN: Final = "the transaction of a function for activities ends after it,"


class NotTried(Snooze):
    """Nothing of the activity was tried."""


class FollowDecision(StrEnum):
    """What an actor of ours says to somebody who wants to follow it."""

    ACCEPT = "accept"
    REJECT = "reject"
    PENDING = "pending"
    """Nothing yet: see `answer_follow`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingActivity:
    """An activity that `actor` signed. `members` is its whole JSON, of which nobody has checked more than that."""

    id: str | None
    types: tuple[str, ...]
    actor: str
    members: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, text: str, actor: str) -> Self:
        """Read the text of an activity, which is a JSON object."""
        members: Mapping[str, Any] = json.loads(text, parse_int=_integer)
        found = members.get("id")
        return cls(id=found if isinstance(found, str) else None, types=types_of(members), actor=actor, members=members)

    @property
    def object(self) -> Any:
        """What it is about: a URL, an object, several of them, or None."""
        return one_of(self.members.get("object"))

    @property
    def object_id(self) -> str | None:
        """The URL of what it is about, None if that has none or is not one thing."""
        return id_of(self.object)

    def vouches(self, thing: Any) -> bool:
        """Tell whether the actor may speak for a thing, which is a URL or an object such as a note.

        It may for those of its own origin, written by nobody of another one, and for one without an id, which is part
        of the activity. All else is a claim: fetch it from where it belongs.
        """
        if not isinstance(thing, Mapping):
            return _is_named_on(thing, self.actor)
        authors = (thing.get(name) for name in _AUTHORS)
        named = [each for value in authors for each in (value if isinstance(value, list) else [value])]
        return all(_is_named_on(each, self.actor) for each in (thing.get("id"), *named) if each is not None)


def _integer(digits: str) -> int | float:
    """Return a number; one of thousands of digits, which Python refuses to read, is as infinite as 1e999 is."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def types_of(members: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types of an object, which may be one or a list."""
    value = members.get("type")
    return tuple(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str))


def one_of(thing: Any) -> Any:
    """Return the thing in a list of one, which is that very thing in JSON-LD; or else what is given."""
    return thing[0] if isinstance(thing, list) and len(thing) == 1 else thing


def id_of(thing: object) -> str | None:
    """Return the URL of a thing, which is that URL or an object with it."""
    found = thing.get("id") if isinstance(thing, Mapping) else thing
    return found if isinstance(found, str) and found else None


def _is_named_on(thing: object, actor: str) -> bool:
    """Tell whether a thing has a URL on the actor's origin. A name that is no text may be read otherwise elsewhere."""
    url = id_of(thing)
    return url is not None and is_of(url, actor)


def is_of(url: str, actor: str) -> bool:
    """Tell whether a URL is on the origin of the actor's."""
    try:
        return origin_of(url) == origin_of(actor)
    except ValueError:
        return False


class Handlers:
    """The functions of an application."""

    def __init__(self) -> None:
        self._by_type: dict[str, list[Function]] = {}
        self.decides_follows: Function | None = None

    def __bool__(self) -> bool:
        return bool(self._by_type) or self.decides_follows is not None

    def on(self, *types: str) -> Callable[[F], F]:
        """Declare the decorated function for activities of these types: `@activitypub.on("Create", "Update")`.

        `"*"` is the rest. The function is called with the session of a transaction, the activity, and the URL of its
        actor, which signed it. What it writes and that the activity is done are committed together: its effects are
        there once. If it raises, nothing is written, and it is called again, five times in all. What an actor sent
        comes in the order of arrival. The transaction is not its to end, but for savepoints. On SQLite the only write
        lock is held meanwhile: leave slow things to a task.

        Raises:
            TypeError: no type is given, or one is no text.
        """
        if not types or not all(isinstance(each, str) and each for each in types):
            raise TypeError('types of activities are texts: @activitypub.on("Create")')

        def declare(function: F) -> F:
            for each in types:
                self._by_type.setdefault(each, []).append(function)
            return function

        return declare

    def on_follow(self, function: F) -> F:
        """Declare the decorated function as the one that decides who may follow: it returns a `FollowDecision`.

        It is called as those of `on` are; `activity.object_id` is the actor of ours. Without one, everybody may.

        Raises:
            ValueError: there is one.
        """
        if self.decides_follows is not None:
            raise ValueError("a function that decides follows is declared already")
        self.decides_follows = function
        return function

    def of(self, types: Sequence[str]) -> Sequence[Function]:
        """Return the functions for an activity of these types, in the order in which they were declared."""
        found = [function for each in types for function in self._by_type.get(each, ())]
        return list(dict.fromkeys(found)) or self._by_type.get(REST, [])


async def call(function: Function, session: AsyncSession, activity: IncomingActivity) -> object:
    """Call a function of the application in the session's transaction, and return its result.

    Raises:
        TransactionError: it has ended that transaction, or wanted to; savepoints of its own it may end.
    """
    inside = session.sync_session
    begun = inside.get_transaction()
    event.listen(inside, "before_commit", _refuse)
    try:
        if inspect.iscoroutinefunction(function):
            result: object = await function(session, activity, activity.actor)
        else:
            result = await session.run_sync(function, activity, activity.actor)
    finally:
        event.remove(inside, "before_commit", _refuse)
    if begun is None or inside.get_transaction() is not begun or not begun.is_active:
        raise TransactionError(f"{_NOT_ITS_OWN} and was rolled back")
    return result


def _refuse(session: Session) -> None:
    """Keep a function from committing half of what the transaction is for."""
    if not session.in_nested_transaction():
        raise TransactionError(f"{_NOT_ITS_OWN} and is not committed by it")


HANDLERS: Final = Handlers()
"""Those of this process."""
on = HANDLERS.on
on_follow = HANDLERS.on_follow
