"""Requests for what we show, and answers to all that others ask, as HTTP has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from db.errors import is_outage
from federation.activitypub import documents
from federation.activitypub.documents import Json
from federation.base.errors import ConfigurationError
from federation.base.logs import crash
from federation.protocol.encodings import dump_json
from federation.protocol.urls import MAX_URL_CHARACTERS

log = structlog.get_logger(__name__)

MAX_ACCEPT_CHARACTERS: Final = 4096
"""The only header that is read."""
METHODS: Final = ("GET", "HEAD")
RETRY_SECONDS: Final = 5


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, as HTTP has it."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A request. `target` is its path as everybody sees it, with its query, nothing of it decoded.

    `mount` is the beginning of the path below which we are mounted, if others see it.
    """

    method: str
    target: str
    accept: str | None
    mount: str = ""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def base(self) -> str:
        """The part of the path before what is ours: empty where we have the whole host, or are asked by a full path."""
        return "" if self.path in _WELL_KNOWN or not self.path.startswith(f"{self.mount}/") else self.mount

    def refusal(self) -> Reply | None:
        """Return the answer to what is not worth a look."""
        if self.method not in METHODS:
            return problem(405, "Only GET and HEAD", {"Allow": ", ".join(METHODS)})
        if len(self.target) > MAX_URL_CHARACTERS:
            return problem(414, f"The target has more than {MAX_URL_CHARACTERS} characters")
        if len(self.accept or "") > MAX_ACCEPT_CHARACTERS:
            return problem(431, f"Accept has more than {MAX_ACCEPT_CHARACTERS} characters")
        if not self.target.startswith("/") or not _is_plain(self.target):
            return problem(400, "The target is not a path in ASCII")
        return None

    def finished(self, reply: Reply) -> Reply:
        """Return the answer as this method wants it: HEAD has no body."""
        return Reply(reply.status, reply.headers, b"") if self.method == "HEAD" else reply

    @classmethod
    def of(cls, method: str, target: str, headers: Mapping[str, str], *, mount: str = "") -> Wanted:
        """Return a request with these headers, whose names may be in any case."""
        accept = next((value for name, value in headers.items() if name.lower() == "accept"), None)
        return cls(method=method, target=target, accept=accept, mount=mount)


_WELL_KNOWN: Final = frozenset(
    {
        documents.WEBFINGER_PATH,
        documents.NODEINFO_INDEX_PATH,
        documents.NODEINFO_PATH,
        documents.HOST_META_PATH,
    }
)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def json_reply(value: Json, kind: str, headers: Mapping[str, str]) -> Reply:
    """Return a document of this content type."""
    return reply_of(200, dump_json(value).encode(), kind, headers)


def problem(status: int, text: str, headers: Mapping[str, str] | None = None) -> Reply:
    """Return a refusal. It is not cached: what is not there may be there in a moment."""
    kept = {**(headers or {}), "Cache-Control": "no-store"}
    return reply_of(status, dump_json({"error": text}).encode(), "application/json", kept)


def reply_of(status: int, body: bytes, kind: str, headers: Mapping[str, str]) -> Reply:
    """Return an answer with a body of this content type."""
    return Reply(status, {"Content-Type": kind, "Content-Length": str(len(body)), **headers}, body)


def unacceptable() -> Reply:
    """Return the answer to who takes neither of our forms."""
    return problem(406, f"Only {documents.ACTIVITY_JSON} and {documents.LD_JSON}", {"Vary": "Accept"})


def unknown() -> Reply:
    """Return the answer where there is nothing."""
    return problem(404, "There is nothing here", {"Access-Control-Allow-Origin": "*"})


def database_failed(wanted: Wanted, error: SQLAlchemyError) -> Reply:
    """Return the answer to what the database failed at, and log it."""
    if not is_outage(error):
        return answer_failed(wanted, error)
    log.error("inbound_database_unavailable", path=wanted.path, error=type(error).__name__)
    return problem(503, "The database is unavailable", {"Retry-After": str(RETRY_SECONDS)})


def late(wanted: Wanted) -> Reply:
    """Return the answer to what took too long, and log it."""
    log.error("inbound_late", path=wanted.path)
    return wanted.finished(problem(503, "This takes too long now", {"Retry-After": str(RETRY_SECONDS)}))


def misconfigured(wanted: Wanted, error: ConfigurationError) -> Reply:
    """Return the answer of a process without a node that serves actors. Its problems name settings, and no values."""
    log.error("inbound_failed", path=wanted.path, problems=list(error.problems))
    return wanted.finished(problem(500, "Internal error"))


def answer_failed(wanted: Wanted, error: Exception) -> Reply:
    """Return the answer where something of ours, or of the application, went wrong, and log it."""
    log.error("inbound_failed", path=wanted.path, **crash(error))
    return problem(500, "Internal error")
