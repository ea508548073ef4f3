"""Names of servers that nobody here knows: which were probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Final

from sqlalchemy import case, or_, select, union
from sqlmodel import col

from db import Database, Server, ServerLink
from federation.protocol.errors import UrlError
from federation.protocol.urls import canonical_origin, host_of

MOST_LOOKED_AT: Final = 2_000
"""How many names are compared at most: first those that begin like the name, or are part of it."""
MOST_NAMED: Final = 5
NEAR: Final = 0.8
_LONGEST: Final = 253
_BEGINNING: Final = 3
_PARENTS: Final = 5
_SCHEME: Final = re.compile(r"[a-z]+(:/+|//+|:(?=[a-z]))", re.IGNORECASE)
"""What was to be `https://`, in front of a name."""


async def meant(database: Database, text: str) -> Sequence[str]:
    """Return the servers that were probably to be named by *text*, registered or with a link, the likeliest first."""
    host = _host_in(text)
    if not host.isprintable() or not host:
        return []
    known = union(select(col(Server.url).label("url")), select(col(ServerLink.server_url).label("url"))).subquery()
    url = known.c.url
    parents = [f"://{parent}" for parent in islice(_parents(host), _PARENTS)]
    akin = or_(*(url.contains(part, autoescape=True) for part in (f"://{host}", f".{host}", *parents)))
    begins_alike = url.contains(f"://{host[:_BEGINNING]}", autoescape=True)
    query = select(url).order_by(case((akin, 0), (begins_alike, 1), else_=2), url).limit(MOST_LOOKED_AT)
    return nearest(host, [row.url for row in await database.rows(query)])


def nearest(host: str, origins: Sequence[str]) -> Sequence[str]:
    """Return those of the origins that are nearest to the host.

    Its own with another scheme or port come first, then those above and below it; or else those that are spelt almost
    so.
    """
    hosts = {origin: host_of(origin) for origin in origins}
    same = [origin for origin, name in hosts.items() if name == host]
    akin = [origin for origin, name in hosts.items() if _are_akin(name, host)]
    if not same and not akin:
        alike = get_close_matches(host, sorted({*hosts.values()}), n=MOST_NAMED, cutoff=NEAR)
        akin = [origin for near in alike for origin, name in hosts.items() if name == near]
    return [*same, *akin][:MOST_NAMED]


def question(origins: Sequence[str]) -> str:
    """Ask whether one of these is meant."""
    *others, last = origins
    return f"Is {', '.join(others)} or {last} meant?" if others else f"Is {last} meant?"


def _are_akin(one: str, other: str) -> bool:
    """Tell whether one host is below the other, or is the other with its end left out."""
    shorter, longer = sorted((one, other), key=len)
    return longer.endswith(f".{shorter}") or longer.startswith(f"{shorter}.")


def _host_in(text: str) -> str:
    """Return the host that the text names, though it may be no URL and no name at all."""
    text = text.strip()
    scheme = _SCHEME.match(text)
    rest = text[scheme.end() :] if scheme else text
    try:
        return host_of(canonical_origin(f"https://{rest}"))
    except UrlError:
        return re.split("[/?#:]", rest, maxsplit=1)[0].rpartition("@")[2].lower()[:_LONGEST]


def _parents(host: str) -> Iterator[str]:
    """Yield the domains above the host that are no top-level domain."""
    while (host := host.partition(".")[2]) and "." in host:
        yield host
