"""What a receiver's answer to an activity says: taken, refused or away, to knock again, or to go elsewhere.

Theory of operation. Receivers do not agree on how requests are signed, so a server that refuses one kind of signature
with 400, 401 or maybe 403 is asked again, at once, by the other kind: it is knocked at twice, and one answer counts.
The status decides; a body is nobody's word, except that a page in place of what came before shows that somebody else
answers.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import urldefrag, urljoin

from msgspec.structs import replace

from federation.activitypub.codes import GONE, NOT_FOUND, class_of_status
from federation.activitypub.signatures import SignatureKind
from federation.delivery.error_codes import STORED_ALREADY, FailureClass
from federation.delivery.errors import PermanentFailure, RetryableFailure
from federation.http.messages import Response
from federation.protocol.encodings import parse_json
from federation.protocol.errors import ProtocolError, UrlError
from federation.protocol.urls import canonical_origin, host_of

MOST_OF_BODY: Final = 64 * 1024
"""How many bytes of an answer's body are read; more change nothing."""
LONGEST_REASON: Final = 80
BAD_REQUEST: Final = 400
UNAUTHORIZED: Final = 401
FORBIDDEN: Final = 403
ABOUT_SIGNATURES: Final = frozenset({BAD_REQUEST, UNAUTHORIZED})
"""What receivers answer who cannot read or verify a signature."""
FOLLOWED: Final = frozenset({307, 308})
"""The redirects by which the same request is to be made elsewhere."""
_OF_LEMMY: Final = {"error": "unknown", "message": ""}
_FIT: Final = re.compile(r"[!-\[\]-~]+")
"""Visible characters, without the backslash, which some read as a slash."""
_BEFORE_A_PAGE: Final = b" \t\r\n\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knock:
    """A request that was signed by `kind`, and answered by `url` in the end."""

    kind: SignatureKind
    url: str
    response: Response


def first_kind(remembered: str | None, otherwise: SignatureKind) -> SignatureKind:
    """Return the kind of signature to begin with; what is remembered may be of a version with other kinds."""
    return SignatureKind(remembered) if remembered in set(SignatureKind) else otherwise


def second_kind(first: Knock, remembered: str | None) -> SignatureKind | None:
    """Return the kind of signature to knock by once more, or None if the first answer counts.

    A 401 is about who asks. So may be a 400, unless the server is known to take this kind: then it is about the rest.
    PeerTube says 403 where it cannot read a signature. It takes the older kind: who knows that, and says 403, means it.
    """
    status, is_newer = first.response.status, first.kind is SignatureKind.RFC9421
    may_be_about_it = status in ABOUT_SIGNATURES or (status == FORBIDDEN and is_newer)
    if not may_be_about_it or (status != UNAUTHORIZED and remembered is not None):
        return None
    return SignatureKind.CAVAGE if first.kind is SignatureKind.RFC9421 else SignatureKind.RFC9421


def counted(first: Knock, second: Knock) -> Knock:
    """Return the answer that counts: the second, unless it is no more than the other kind refused, too."""
    return first if second.response.status in ABOUT_SIGNATURES else second


def followed(response: Response, asked: str, *, by: Collection[int] = FOLLOWED) -> str | None:
    """Return the URL at which to make the request to *asked* again, or None if the answer counts as it is.

    *by* are the statuses that say so.

    It is on the same origin, or on https where http was asked of the same host. `Location` is a stranger's text.
    """
    location = response.headers.get("location", "").strip(" \t")
    if response.status not in by or not _FIT.fullmatch(location):
        return None
    try:
        url = urldefrag(urljoin(asked, location)).url
        before, after = canonical_origin(asked), canonical_origin(url)
    except (UrlError, ValueError):
        return None
    is_safer = before.startswith("http:") and after.startswith("https:") and host_of(before) == host_of(after)
    return url if before == after or is_safer else None


def understood(response: Response) -> Response:
    """Return the answer by the status that others would give it.

    Lemmy answers what it has already with 400, and an error that is an empty text: it took it by an answer that was
    lost, or at another of its inboxes.
    """
    if response.status != BAD_REQUEST:
        return response
    try:
        told = parse_json(response.body, limit=MOST_OF_BODY)
    except ProtocolError:
        return response
    return replace(response, status=STORED_ALREADY) if told == _OF_LEMMY else response


def is_page(response: Response) -> bool:
    """Tell whether a 2xx comes with a page, or other markup."""
    return response.ok and response.body[:100].lstrip(_BEFORE_A_PAGE).startswith(b"<")


def reason_of(body: bytes) -> str | None:
    """Return what a refusal says of itself: the first 80 printable characters of `error`, if it has that text."""
    try:
        told = parse_json(body, limit=MOST_OF_BODY)
    except ProtocolError:
        return None
    reason = told.get("error") if isinstance(told, dict) else None
    if not isinstance(reason, str):
        return None
    return "".join(letter for letter in reason if letter.isprintable())[:LONGEST_REASON] or None


def failure_of(
    response: Response, asked: str, now: datetime, *, reason: str | None, ours: str
) -> PermanentFailure | RetryableFailure:
    """Return what it means that *asked* did not take the activity. `ours` is our own URL."""
    pause = response.retry_after(now)
    kind = class_of_status(response.status, asks_to_wait=pause is not None)
    moved_to = response.moved_to(asked, ours=ours)
    named = f" and names {moved_to}" if moved_to else ""
    problem = f"the server answered {response.status}{named}{f': {reason}' if reason else ''}"
    if response.status == GONE:
        return PermanentFailure("INBOX_GONE", problem)
    return RetryableFailure(
        f"HTTP_{response.status}",
        problem,
        failure_class=kind,
        at_least=pause if kind is FailureClass.REST else None,
        moved_to=moved_to,
        tried_later=response.status == NOT_FOUND,
    )
