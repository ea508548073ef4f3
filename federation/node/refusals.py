"""The answers that refuse a request, as exceptions on the inside and JSON on the outside.

Two shapes are in use among peers: `{"error": …, "code"?: …}` where an endpoint refuses, and `{"message": …, "code": …}`
where the framework in front of it does. Both are kept, so that a peer's error handling finds what it looks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType

from starlette.responses import Response

from federation.base.reach import enumerated
from federation.protocol.json_text import dump_json

RETRY_PAUSE = timedelta(seconds=5)
"""When to come back after a refusal that is not the sender's fault."""

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_NO_MEMBERS: Mapping[str, object] = MappingProxyType({})


class Refusal(Exception):
    """The request is answered with `status` and `text`, and nothing is stored.

    `code` is what peers tell refusals apart by; `reason` names the refusal in our log where peers expect no code.
    `text` may name parts of the request, never quote them. `members` are what else peers expect in the answer.
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
    """A refusal in the shape of the framework before the endpoints."""

    text_member = "message"


def try_later(text: str, *, reason: str) -> Refusal:
    """A refusal that is our fault: the sender should come back in a few seconds."""
    pause = str(round(RETRY_PAUSE.total_seconds()))
    return Refusal(503, text, code="UNAVAILABLE", reason=reason, headers={"Retry-After": pause})


def incomplete_database(names: Sequence[str]) -> Refusal:
    """A refusal that is our operator's fault: the database lacks these tables and columns. No few seconds mend that."""
    return Refusal(503, f"The database of this server lacks {enumerated(names)}", code="INCOMPLETE_DATABASE")


def json_response(body: object, *, status: int = 200, headers: Mapping[str, str] = _NO_HEADERS) -> Response:
    """A response with *body* as compact JSON."""
    return Response(dump_json(body), status_code=status, headers=headers, media_type="application/json")


def invalid_member(member: str, problem: str) -> Refusal:
    """The refusal of a request to `/discover` that lacks its shape: `error` is a JSON list of issues, as text."""
    issues = dump_json([{"path": [member] if member else [], "message": problem}])
    return Refusal(400, issues, reason="INVALID_REQUEST")


def invalid_proxy_data(problem: str) -> Refusal:
    """The refusal of a request that is none a relay or a target takes."""
    return Refusal(400, problem, code="INVALID_PROXY_DATA")
