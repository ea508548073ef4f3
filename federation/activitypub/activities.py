"""An activity, as far as we read it, and the order in which activities about one thing arrive.

We read `id`, `type`, `actor` and `object` as plain JSON, and nothing more: the vocabulary is the application's. Its
text is sent as it was handed in. What could never be delivered is refused here, before anything is written; the
message names the member, and quotes no content.

Sources: W3C ActivityPub and Activity Streams 2.0; RFC 8259.
"""

from __future__ import annotations

import json
from binascii import b2a_base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

from federation.delivery.outbox.ordering_keys import at_place
from federation.protocol.urls import MAX_URL_CHARACTERS, origin_of

JOB: Final = "deliver-activity"
"""The name of the jobs by which activities are sent."""
WIRE: Final = "activitypub"

MAX_BYTES: Final = 1024 * 1024
LARGE_BYTES: Final = 64 * 1024
"""What is longer is taken by most servers; Misskey refuses it."""
MAX_TYPE_CHARACTERS: Final = 256

CONTEXT: Final = "https://www.w3.org/ns/activitystreams"
PUBLIC: Final = CONTEXT + "#Public"
"""Whom everybody is addressed by."""

BLIND: Final = ("bto", "bcc")
"""Whom nobody else is to see among the recipients."""
ABOUT_OBJECT: Final = frozenset({"Create", "Update", "Delete", "Undo", "Accept", "Reject", "Add", "Remove"})
"""The types of activities that must not overtake others about the same object. An Undo's object is what it undoes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What we read of an activity, and its text.

    `type` is the first of its types that the order depends on, or else its first; `object_id` is None where the object
    has no id of its own. `hides_key`: it tells what its actor is like, without a key.
    """

    id: str
    type: str
    actor: str
    object_id: str | None
    text: str = field(repr=False)
    hides_key: bool = False

    @property
    def size(self) -> int:
        """How many bytes are sent."""
        return len(self.text.encode())


def parse(activity: Mapping[str, object] | str | bytes) -> Activity:
    """Return what is to be read of an activity: a mapping, or its JSON, which is kept as it is.

    Raises:
        ValueError: it could never be delivered; the message names the member.
    """
    text = _text(activity)
    members = _parsed(text)
    if not isinstance(members, dict):
        raise ValueError("activity: it must be a JSON object")
    _check_blind(members)
    found = Activity(
        id=check_id("id", members.get("id")),
        type=_type(check_types(members.get("type"))),
        actor=check_id("actor", members.get("actor")),
        object_id=_object_id(members.get("object")),
        text=text,
        hides_key=_hides_key(members),
    )
    if _origin("id", found.id) != _origin("actor", found.actor):
        raise ValueError("id: its origin must be that of the actor, or receivers drop the activity")
    return found


def _hides_key(members: Mapping[str, Any]) -> bool:
    """Tell whether it is an Update of its actor, as an object that has no key: Mastodon then forgets the one it had."""
    thing = members.get("object")
    if not isinstance(thing, dict) or thing.get("id") != members.get("actor"):
        return False
    return "Update" in check_types(members.get("type")) and not thing.get("publicKey")


def _check_blind(members: Mapping[str, Any]) -> None:
    """Check that nobody is named who is not to be seen: ActivityPub (6.2) forbids to deliver these members.

    Raises:
        ValueError: somebody is, by the activity or by what it is about.
    """
    left: list[Any] = [members]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            left.append(each.get("object"))
            for name in BLIND:
                if each.get(name):
                    raise ValueError(f"{name}: all receivers would see it; say whom it is for to `send` alone")


def ordering_key(inbox: str, activity: Activity) -> str:
    """Return the key of the line in which an activity waits: one line for each inbox and object."""
    return at_inbox(thing_of(activity), inbox)


def thing_of(activity: Activity) -> str:
    """Return the key of what an activity is about: of the object, or, for other types, of its own id.

    What is later about such an activity, as an Undo of it, is about that id.
    """
    about = activity.object_id if activity.type in ABOUT_OBJECT else None
    return "activity " + _digest(activity.id if about is None else about)


def at_inbox(key: str, inbox: str) -> str:
    """Return the key of the line that a key has at one inbox."""
    return at_place(key, _digest(inbox))


def _digest(text: str) -> str:
    """Return the SHA-256 of a text, in 43 characters."""
    return b2a_base64(sha256(text.encode()).digest(), newline=False)[:-1].decode()


def _text(activity: Mapping[str, object] | str | bytes) -> str:
    if isinstance(activity, Mapping):
        activity = _rendered(activity)
    if not isinstance(activity, str | bytes):
        raise ValueError(f"activity: a mapping or its JSON, not {type(activity).__name__}")
    try:
        text = activity.decode() if isinstance(activity, bytes) else activity
        size = len(text.encode())
    except UnicodeError:
        raise ValueError("activity: no UTF-8, or half of a surrogate pair") from None
    if size > MAX_BYTES:
        raise ValueError(f"activity: {size} bytes, more than {MAX_BYTES}")
    return text


def _rendered(activity: Mapping[str, object]) -> str:
    try:
        return json.dumps(dict(activity), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"activity: it cannot be rendered as JSON: {str(error)[:200]}") from None


def _parsed(text: str) -> object:
    """Parse the text.

    From None, because the original errors hold the whole of it.
    """
    try:
        parsed: object = _DECODER.decode(text)
        if "\\ud" in text or "\\uD" in text:  # an escape of half a surrogate pair cannot be encoded
            json.dumps(parsed, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"activity: no JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except UnicodeEncodeError:
        raise ValueError("activity: half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("activity: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"activity: no JSON: {error}") from None
    return parsed


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object.

    Of one that is there twice, receivers may read the other.
    """
    members = dict(pairs)
    if len(members) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the member {twice[:100]!a} is there twice")
    return members


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no number")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_members, parse_constant=_no_number)


def check_id(name: str, value: object) -> str:
    """Return the value of the member of that name, which tables and their indexes have to take.

    Raises:
        ValueError: it is written as no URL is; the message names the member.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: missing, or no text")
    if len(value) > MAX_URL_CHARACTERS:
        raise ValueError(f"{name}: longer than {MAX_URL_CHARACTERS} characters")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(f"{name}: no URL: white space, or characters that are not ASCII")
    return value


def check_types(value: object) -> list[str]:
    """Return the types, of which an activity may have one or a list.

    Raises:
        ValueError: one of them is no text that is printable and short, or there is none.
    """
    given = value if isinstance(value, list) else [value]
    types = [each for each in given if isinstance(each, str) and each]
    if not types or len(types) < len(given):
        raise ValueError("type: missing, or neither text nor a list of texts")
    if not all(each.isprintable() and len(each) <= MAX_TYPE_CHARACTERS for each in types):
        raise ValueError(f"type: longer than {MAX_TYPE_CHARACTERS} characters, or not printable")
    return types


def _type(types: Sequence[str]) -> str:
    return next((each for each in types if each in ABOUT_OBJECT), types[0])


def _object_id(value: object) -> str | None:
    found = value.get("id") if isinstance(value, dict) else value
    return found if isinstance(found, str) and found else None


def _origin(name: str, url: str) -> str:
    try:
        return origin_of(url)
    except ValueError as error:
        raise ValueError(f"{name}: no URL of a server: {error}") from None


def create(note: Mapping[str, Any], *, activity_id: str | None = None) -> dict[str, Any]:
    """Make the Create of an object, by the actor to which it is attributed and for the same audience."""
    actor = note["attributedTo"]
    return _made("Create", activity_id or _part(note["id"], "create"), actor, note, _audience(note))


def follow(actor: str, followed: str, *, activity_id: str) -> dict[str, Any]:
    """Make the Follow of an actor. Each needs an id of its own, by which it is accepted and undone."""
    return _made("Follow", activity_id, actor, followed, {"to": [followed]})


def accept(following: Mapping[str, Any], *, activity_id: str | None = None) -> dict[str, Any]:
    """Make the Accept of a Follow, by the actor that is followed."""
    return _answer("Accept", "accepts", following, activity_id)


def reject(following: Mapping[str, Any], *, activity_id: str | None = None) -> dict[str, Any]:
    """Make the Reject of a Follow, by the actor that is not to be followed, or no more."""
    return _answer("Reject", "rejects", following, activity_id)


def undo(activity: Mapping[str, Any], *, activity_id: str | None = None) -> dict[str, Any]:
    """Make the Undo of an activity, by its actor and for the same audience."""
    return _made("Undo", activity_id or _part(activity["id"], "undo"), activity["actor"], activity, _audience(activity))


def delete(
    actor: str, object_id: str, *, to: Sequence[str] = (PUBLIC,), activity_id: str | None = None
) -> dict[str, Any]:
    """Make the Delete of an object, or of the actor itself."""
    gone = object_id if object_id == actor else {"id": object_id, "type": "Tombstone"}
    return _made("Delete", activity_id or _part(object_id, "delete"), actor, gone, {"to": [*to]})


def _answer(name: str, part: str, following: Mapping[str, Any], activity_id: str | None) -> dict[str, Any]:
    followed = _object_id(following["object"])
    if followed is None:
        raise ValueError("object: the Follow must name the actor that is followed")
    made_id = activity_id or _part(followed, f"{part}/{sha256(following['id'].encode()).hexdigest()}")
    return _made(name, made_id, followed, following, {"to": [following["actor"]]})


def _made(name: str, made_id: str, actor: object, about: object, audience: Mapping[str, object]) -> dict[str, Any]:
    """Make an activity; the context of an object stands at its head."""
    context: object = CONTEXT
    if isinstance(about, Mapping):
        context = about.get("@context", CONTEXT)
        about = {name: value for name, value in about.items() if name != "@context"}
    return {"@context": context, "id": made_id, "type": name, "actor": actor, "object": about, **audience}


def _audience(of: Mapping[str, Any], names: Iterable[str] = ("published", "to", "cc")) -> dict[str, Any]:
    return {name: of[name] for name in names if name in of}


def _part(url: str, name: str) -> str:
    return f"{url}/{name}" if "#" in url else f"{url}#{name}"
