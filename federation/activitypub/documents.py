"""What we say of our actors and of ourselves, and in which form somebody takes it: values of values, without I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import unquote
from xml.sax.saxutils import quoteattr

Json: TypeAlias = dict[str, object]

ACTIVITY_JSON: Final = "application/activity+json"
LD_JSON: Final = 'application/ld+json; profile="https://www.w3.org/ns/activitystreams"'
JRD: Final = "application/jrd+json"
XRD: Final = "application/xrd+xml; charset=utf-8"
NODEINFO: Final = 'application/json; profile="http://nodeinfo.diaspora.software/ns/schema/2.1#"'

ACTIVITY_CONTEXT: Final = "https://www.w3.org/ns/activitystreams"
SECURITY_CONTEXT: Final = "https://w3id.org/security/v1"
NODEINFO_SCHEMA: Final = "http://nodeinfo.diaspora.software/ns/schema/2.1"

WEBFINGER_PATH: Final = "/.well-known/webfinger"
NODEINFO_INDEX_PATH: Final = "/.well-known/nodeinfo"
NODEINFO_PATH: Final = "/nodeinfo/2.1"
HOST_META_PATH: Final = "/.well-known/host-meta"

MAX_AGE_SECONDS: Final = 180

OUTBOX: Final = "outbox"
FOLLOWERS: Final = "followers"
FOLLOWING: Final = "following"
COLLECTIONS: Final = (OUTBOX, FOLLOWERS, FOLLOWING)
"""Below an actor's URL, unless the application's document has others."""

_OFFERED: Final = {"application/activity+json": ACTIVITY_JSON, "application/ld+json": LD_JSON}
"""By the media type that an asker names; the first of equals is taken."""
_QUALITY: Final = re.compile(r"(?:0|1)?(?:\.[0-9]*)?")
_SOFTWARE_NAME: Final = re.compile(r"[a-z0-9-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What NodeInfo says runs here. Its schema allows lower-case letters, digits and hyphens in a name.

    Raises:
        ValueError: the name has others.
    """

    name: str
    version: str
    repository: str | None = None

    def __post_init__(self) -> None:
        if not _SOFTWARE_NAME.fullmatch(self.name):
            raise ValueError(f"software: the name {self.name!r} is not of a-z, 0-9 and -")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What NodeInfo counts; None is not told. Users are counted who were active within a month, or half a year."""

    users: int | None = None
    active_month: int | None = None
    active_half_year: int | None = None
    local_posts: int | None = None


def public_key(actor_url: str, *, key_id: str, pem: str) -> dict[str, str]:
    """Return an actor's key as one object: several receivers read no array."""
    return {"id": key_id, "owner": actor_url, "publicKeyPem": pem}


def with_key(document: Mapping[str, object], key: Mapping[str, str]) -> Json:
    """Return the application's document with the key, in place of any that it has, and with the context of keys."""
    return {"@context": _with_security(document.get("@context")), **_without_context(document), "publicKey": dict(key)}


def _without_context(document: Mapping[str, object]) -> Json:
    return {name: value for name, value in document.items() if name != "@context"}


def _with_security(context: object) -> list[object]:
    """Add the context of keys to one of any shape, before the terms that the application defines itself: they win."""
    if context is None:
        context = ACTIVITY_CONTEXT
    parts = list(context) if isinstance(context, list | tuple) else [context]
    if SECURITY_CONTEXT in parts:
        return parts
    first = next((at for at, part in enumerate(parts) if not isinstance(part, str)), len(parts))
    return [*parts[:first], SECURITY_CONTEXT, *parts[first:]]


def minimal_actor(actor_url: str, *, is_instance: bool) -> Json:
    """Return the document of an actor of whom we know nothing but the URL."""
    return {
        "@context": ACTIVITY_CONTEXT,
        **_core(actor_url, is_instance),
        **{name: f"{actor_url}/{name}" for name in COLLECTIONS},
        "preferredUsername": name_of(actor_url),
    }


def collection_of(url: str) -> tuple[str, str] | None:
    """Return the actor's URL and the name of the collection that has this URL; None if none can."""
    actor_url, _, name = url.rpartition("/")
    return (actor_url, name) if name in COLLECTIONS else None


def collection(url: str, total: int) -> Json:
    """Return a collection that shows how much is in it, and nothing of that."""
    return {"@context": ACTIVITY_CONTEXT, "id": url, "type": "OrderedCollection", "totalItems": total}


def removed_actor(actor_url: str, *, is_instance: bool, key: Mapping[str, str]) -> Json:
    """Return what is left of a removed actor: enough for receivers to verify its Delete."""
    return with_key(_core(actor_url, is_instance), key)


def _core(actor_url: str, is_instance: bool) -> Json:
    return {"id": actor_url, "type": "Application" if is_instance else "Person", "inbox": f"{actor_url}/inbox"}


def name_of(actor_url: str) -> str:
    """Return the name that an actor's URL ends with, without the `@` that some put before it."""
    path = actor_url.partition("://")[2].partition("?")[0].rstrip("/")
    return unquote(path.rpartition("/")[2]).removeprefix("@")


def webfinger(subject: str, actor_url: str) -> Json:
    """Return the JRD of an actor (RFC 7033)."""
    link = {"rel": "self", "type": ACTIVITY_JSON, "href": actor_url}
    return {"subject": subject, "aliases": [actor_url], "links": [link]}


def nodeinfo_index(base_url: str) -> Json:
    """Return where the one version of NodeInfo is that we have."""
    return {"links": [{"rel": NODEINFO_SCHEMA, "href": f"{base_url}{NODEINFO_PATH}"}]}


def nodeinfo(software: Software, usage: Usage) -> Json:
    """Return NodeInfo 2.1. How many users there are is the application's to tell."""
    users = {"total": usage.users, "activeMonth": usage.active_month, "activeHalfyear": usage.active_half_year}
    repository = {} if software.repository is None else {"repository": software.repository}
    return {
        "version": "2.1",
        "software": {"name": software.name, "version": software.version, **repository},
        "protocols": ["activitypub"],
        "services": {"inbound": [], "outbound": []},
        "openRegistrations": False,
        "usage": {"users": _told(users), **_told({"localPosts": usage.local_posts})},
        "metadata": {},
    }


def _told(counts: Mapping[str, int | None]) -> Json:
    return {name: count for name, count in counts.items() if count is not None}


def host_meta(own_url: str) -> str:
    """Return the XRD that says where WebFinger answers (RFC 6415)."""
    template = quoteattr(f"{own_url}{WEBFINGER_PATH}?resource={{uri}}")
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<XRD xmlns="http://docs.oasis-open.org/ns/xri/xrd-1.0">\n'
        f'  <Link rel="lrdd" type="{JRD}" template={template}/>\n'
        "</XRD>\n"
    )


def accepted(accept: str | None) -> str | None:
    """Return the content type in which who sends this `Accept` takes an actor's document; None if in none of ours."""
    if accept is None or not accept.strip():
        return ACTIVITY_JSON
    ranges = dict(found for part in accept.split(",") if (found := _range(part)) is not None)
    kind = max(_OFFERED, key=lambda kind: _quality(kind, ranges))
    return _OFFERED[kind] if _quality(kind, ranges) > 0 else None


def _range(part: str) -> tuple[str, float] | None:
    """Return a media range and its quality value, or None if that is no number from 0 to 1."""
    kind, *parameters = part.split(";")
    quality = 1.0
    for name, _, value in (parameter.partition("=") for parameter in parameters):
        if name.strip().lower() == "q":
            digits = value.strip()
            if not _QUALITY.fullmatch(digits) or digits in ("", ".") or float(digits) > 1:
                return None
            quality = float(digits)
    return kind.strip().lower(), quality


def _quality(kind: str, ranges: Mapping[str, float]) -> float:
    """Return the value of the range that says most about this type."""
    return next((ranges[each] for each in (kind, "application/*", "*/*") if each in ranges), 0.0)


def caching(*, is_changing: bool) -> dict[str, str]:
    """Return the headers by which caches keep a document: not while its key is about to change."""
    seconds = 0 if is_changing else MAX_AGE_SECONDS
    return {"Vary": "Accept", "Cache-Control": f"public, max-age={seconds}"}
