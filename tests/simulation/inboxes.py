"""The inboxes of a simulated server that takes activities: they verify what was signed, and know what they have."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from federation.activitypub.signatures import BadSignature, claims_in, verify
from tests.misbehaving import Canned, Received
from tests.peer import json_answer
from tests.simulation.own_actor import ACTOR, KEY_ID, public_key
from tests.simulation.plan import LOST_INBOXES, Receiver

SHARED_INBOX: Final = "/shared-inbox"
WINDOW: Final = timedelta(hours=1)
"""How far the time of a signature may be off."""
PAGE: Final = b"\r\n<!DOCTYPE html><html><head><title>Thanks</title></head></html>"
NOT_VERIFIED: Final = json_answer({"error": "Request not signed"}, 401)


def inbox_path(user: str) -> str:
    """Where a user's own inbox is."""
    return f"/users/{user}/inbox"


class Inboxes:
    """Those of one server. `problems` are signatures that no server would take."""

    def __init__(self, server_url: str, receiver: Receiver) -> None:
        self._server_url = server_url
        self._receiver = receiver
        self._lost = {inbox_path(user): status for user, status in LOST_INBOXES.items()}
        self.problems: list[str] = []

    def refusal(self, request: Received, now: datetime) -> Canned | None:
        """What it answers to an activity that it does not take, whatever that says."""
        try:
            kinds = {claim.kind for claim in claims_in(request.headers)}
            self._verify(request, now)
        except BadSignature as error:
            self.problems.append(f"what {self._server_url} got at {request.path} is badly signed: {error}")
            return NOT_VERIFIED
        if kinds.isdisjoint(self._receiver.kinds):
            return replace(NOT_VERIFIED, status=self._receiver.unsigned)
        status = self._lost.get(request.path)
        return None if status is None else json_answer({"error": "no such user"}, status)

    def answer(self, *, is_known: bool) -> Canned:
        """What it answers to an activity that it takes, or has."""
        if is_known:
            return json_answer({"error": "known"}, 409)
        return Canned(status=200 if self._receiver.shows_page else 202, body=PAGE if self._receiver.shows_page else b"")

    def _verify(self, request: Received, now: datetime) -> None:
        key_id = verify(
            method=request.method,
            url=self._server_url + request.path,
            headers=request.headers,
            body=request.body,
            public=public_key(),
            now=now,
            window=WINDOW,
        )
        if key_id != KEY_ID or json.loads(request.body)["actor"] != ACTOR:
            raise BadSignature("it is another actor's")


def name_of(body: bytes) -> str:
    """What the world calls an activity."""
    return str(json.loads(body)["id"]).rpartition("/")[2]
