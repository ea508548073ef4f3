"""The answers that refuse a request: exceptions on the inside, JSON on the outside.

Peers use two shapes: `{"error": …, "code"?: …}` where an endpoint refuses, and `{"message": …, "code": …}` where the
framework in front of it does. Both are kept, so that a peer's error handling finds what it looks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType

from starlette.responses import Response

from federation.base.settings.reach import enumerated
from federation.protocol.encodings import dump_json

RETRY_PAUSE = timedelta(seconds=5)
"""When to come back after a refusal that is not the sender's fault."""

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_NO_MEMBERS: Mapping[str, object] = MappingProxyType({})


class Refusal(Exception):
    """The request is answered with `status` and `text`, and nothing is stored.

    Peers tell refusals apart by `code`; where they expect none, `reason` names the refusal in our log. `text` may name
    parts of the request, but never quote them. `members` are what else peers expect in the answer.
    """

    text_member = "error"

    def __init__(
        self,
        status: int,
        text: str,
        *,
        code: str | None = None,
        reason: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        members: Mapping[str, object] = _NO_MEMBERS,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.code = code
        self.reason = reason or code
        self.headers = headers
        self.members = members

    def response(self) -> Response:
        code = {"code": self.code} if self.code else {}
        body = {**self.members, self.text_member: self.text, **code}
        return json_response(body, status=self.status, headers=self.headers)


class FrameworkRefusal(Refusal):
    """A refusal in the shape that the framework in front of the endpoints uses."""

    text_member = "message"


def try_later(text: str, *, reason: str) -> Refusal:
    """Return a refusal that is our fault: the sender should come back in a few seconds."""
    pause = str(round(RETRY_PAUSE.total_seconds()))
    return Refusal(503, text, code="UNAVAILABLE", reason=reason, headers={"Retry-After": pause})


def incomplete_database(names: Sequence[str]) -> Refusal:
    """Return a refusal that is our operator's fault: the database lacks these tables and columns.

    A few seconds will not mend that, so the sender is not told when to come back.
    """
    return Refusal(503, f"The database of this server lacks {enumerated(names)}", code="INCOMPLETE_DATABASE")


def json_response(body: object, *, status: int = 200, headers: Mapping[str, str] = _NO_HEADERS) -> Response:
    """Return a response with *body* as compact JSON."""
    return Response(dump_json(body), status_code=status, headers=headers, media_type="application/json")


def invalid_member(member: str, problem: str) -> Refusal:
    """Return the refusal of a malformed request to `/discover`: `error` is a JSON list of issues, as text."""
    issues = dump_json([{"path": [member] if member else [], "message": problem}])
    return Refusal(400, issues, reason="INVALID_REQUEST")


def invalid_proxy_data(problem: str) -> Refusal:
    """Return the refusal of a request that neither a relay nor a target accepts."""
    return Refusal(400, problem, code="INVALID_PROXY_DATA")
