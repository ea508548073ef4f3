"""What is read of an activity that was posted to us, before it is verified: rules without I/O."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Final, TypeAlias

import msgspec

from federation.activitypub.activities import MAX_TYPE_CHARACTERS
from federation.protocol.urls import MAX_URL_CHARACTERS

DELETE: Final = "Delete"
MOST_OF_URL: Final = MAX_URL_CHARACTERS
"""In bytes: an index of PostgreSQL takes no more than 2 704, and it is not told from a database that is away."""


MOST_NESTED: Final = 100
"""Levels: what is read here is read again by a worker, which may be closer to Python's own bound."""
_TEXTS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_OTHERS: Final = bytes(each for each in range(256) if each not in b"[]{}")
_STEPS: Final = {**dict.fromkeys(b"[{", 1), **dict.fromkeys(b"]}", -1)}


class NoActivity(Exception):
    """A body is no activity. The message quotes nothing."""


class _Identified(msgspec.Struct):
    id: str


_Things: TypeAlias = str | _Identified | list[str | _Identified]


class PostedActivity(msgspec.Struct):
    """What is read of an activity."""

    type: str | list[str]
    actor: _Things
    id: str | None = None
    object: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def kind(self) -> str:
        """Its type, or the first of them."""
        return self.type if isinstance(self.type, str) else next(iter(self.type), "")

    @property
    def actor_id(self) -> str:
        """The URL of its actor; nothing if there are several, or none."""
        return _id(self.actor) or ""

    @property
    def ends_its_actor(self) -> bool:
        """Whether it is the news that its actor is no more."""
        if self.kind != DELETE:
            return False
        try:
            return _id(_OBJECT.decode(self.object)) == self.actor_id
        except (ValueError, RecursionError):
            return False


_ACTIVITY: Final = msgspec.json.Decoder(PostedActivity)
_OBJECT: Final = msgspec.json.Decoder[_Things](_Things)


def read_posted(body: bytes) -> PostedActivity:
    """Return what a body says.

    Raises:
        NoActivity: it is none.
    """
    try:
        body.decode()
        activity = _ACTIVITY.decode(body)
    except (ValueError, RecursionError):
        raise NoActivity("The body is no JSON object with the type and the actor of an activity") from None
    if is_nested(body, MOST_NESTED):
        raise NoActivity(f"The activity is nested more than {MOST_NESTED} levels deep")
    if not activity.kind.isprintable() or not 0 < len(activity.kind) <= MAX_TYPE_CHARACTERS:
        raise NoActivity("The activity has no type")
    if not activity.actor_id or not activity.actor_id.isprintable():
        raise NoActivity("The activity has no actor")
    if any(len(url.encode()) > MOST_OF_URL for url in (activity.actor_id, activity.id or "")):
        raise NoActivity(f"The activity has an id, or an actor, of more than {MOST_OF_URL} bytes")
    return activity


def is_nested(text: bytes, most: int) -> bool:
    """Tell whether a JSON text has more than `most` levels; one of a mebibyte takes a tenth of a second at worst."""
    if text.count(b"[") + text.count(b"{") <= most:
        return False
    brackets = _TEXTS.sub(b"", text).translate(None, _OTHERS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > most


def _id(named: _Things) -> str | None:
    """Return the URL of a thing, which may be in a list of one."""
    if isinstance(named, list):
        return _id(named[0]) if len(named) == 1 else None
    return named if isinstance(named, str) else named.id
