"""Cookies that only this process can write: a session, and the token that a form of that session carries.

A cookie is `data.signature`, signed with a key that each process makes for itself, so that a restart ends every
session. Whoever comes without a session gets one that names nobody: forms are protected before the login too, and
logging in gives a new id, so that nobody can be made to use a session that somebody else knows.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

LIFETIME: Final = timedelta(hours=12)
MOST_ENDED: Final = 10_000
_LONGEST_COOKIE: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BrowserSession:
    """One browser: `name` is that of the account that logged in, None before that."""

    id: str
    name: str | None
    until: float

    @classmethod
    def begin(cls, name: str | None = None) -> BrowserSession:
        """Begin a session with an id of its own."""
        return cls(id=secrets.token_urlsafe(16), name=name, until=time.time() + LIFETIME.total_seconds())


class Signer:
    """Writes and reads signed cookies, and knows which sessions have been ended."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._all_ended_until = 0.0

    def written(self, session: BrowserSession) -> str:
        """Return the cookie of the session."""
        data = json.dumps([session.id, session.name, session.until]).encode()
        text = base64.urlsafe_b64encode(data).decode().rstrip("=")
        return f"{text}.{self._signature('session', text)}"

    def read(self, cookie: str | None) -> BrowserSession | None:
        """Return the session of a cookie; None if it was not written here, is too old, or its session was ended."""
        text, _, signature = (cookie or "")[:_LONGEST_COOKIE].partition(".")
        if not _is_same(self._signature("session", text), signature):
            return None
        id_, name, until = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if until < time.time() or id_ in self._ended or (name is not None and until <= self._all_ended_until):
            return None
        return BrowserSession(id=id_, name=name, until=until)

    def end(self, session: BrowserSession) -> None:
        """Let nobody use the session any more.

        One that names nobody gives nothing, and anybody can have any number of these: they are not remembered. Of the
        others the newest are; with an older one all end that nobody can have begun after it.
        """
        if session.name is None:
            return
        self._ended[session.id] = session.until
        if len(self._ended) > MOST_ENDED:
            _, until = self._ended.popitem(last=False)
            if until > time.time():
                self._all_ended_until = max(self._all_ended_until, until)

    def form_token(self, session: BrowserSession) -> str:
        """Return what each form of this session carries."""
        return self._signature("form", session.id)

    def is_form_token(self, session: BrowserSession, token: str) -> bool:
        """Tell whether a form with this token came from a page of this session."""
        return _is_same(self.form_token(session), token)

    def _signature(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}:{text}".encode(errors="replace"), hashlib.sha256).hexdigest()


def _is_same(expected: str, given: str) -> bool:
    return hmac.compare_digest(expected.encode(), given.encode(errors="replace"))
