"""A second wire, as small as one can be: plain JSON to an inbox; a 2xx is the acknowledgment; nobody can be asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from federation.delivery.error_codes import FailureClass, FailureCode
from federation.delivery.errors import PermanentFailure, RetryableFailure
from federation.delivery.wire import Effect, Sending
from federation.http.client import FederationFetch
from federation.http.errors import BlockedUrl, BodyTooLarge, NetworkError
from federation.http.messages import asks_for_rest
from federation.protocol.urls import canonical_origin

PLAIN_JOB: Final = "deliver-plain"
PLAIN_PATH: Final = "/inbox"
JSON: Final = {"Content-Type": "application/json"}


class PlainWire:
    name: Final = "plain"
    job_names: Final = (PLAIN_JOB,)
    codes: Final[Mapping[str, FailureCode]] = {}

    def __init__(self, fetch: FederationFetch) -> None:
        self._fetch = fetch

    def check(self, payload: str) -> None:
        activity = json.loads(payload)
        if not isinstance(activity, dict) or not isinstance(activity.get("id"), str):
            raise ValueError("payload: id is missing")

    async def name_of(self, server_url: str) -> str:
        return canonical_origin(server_url)

    async def send(self, sending: Sending) -> Effect | None:
        seen, body, limit = sending.seen, sending.payload.encode(), timedelta(seconds=15)
        try:
            fetched = await self._fetch(
                sending.target_url,
                method="POST",
                headers=JSON,
                body=body,
                timeout=limit,
                first_byte=sending.first_byte,
                skip_health_update=True,  # the registry's, of servers with keys
            )
        except BlockedUrl as error:
            raise PermanentFailure("BLOCKED_URL", str(error)) from None
        except BodyTooLarge as error:
            raise PermanentFailure("BODY_TOO_LARGE", str(error)) from None
        except NetworkError as error:
            seen.answered = False
            raise RetryableFailure(error.code, str(error)) from None
        seen.answered, seen.status = True, fetched.response.status
        pause = fetched.response.retry_after(datetime.now(UTC))
        if fetched.response.ok:
            return None
        kind = FailureClass.REJECTED if 400 <= seen.status < 500 else FailureClass.UNAVAILABLE
        if asks_for_rest(seen.status, with_pause=pause is not None):
            kind = FailureClass.REST
        raise RetryableFailure(f"HTTP_{seen.status}", "refused", failure_class=kind, at_least=pause)

    async def may_recover(self, sending: Sending, code: str) -> bool:
        return False

    async def is_well(self, server_url: str) -> bool | None:
        return None
