"""What a server's answer to a delivery says: taken, refused, or somebody else's."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from federation.delivery.error_codes import FailureClass
from federation.delivery.errors import PermanentFailure, RetryableFailure
from federation.delivery.wire import Sending, Trace
from federation.http.gates import Fetched
from federation.http.response import Response
from federation.protocol.acks import Ack, find_ack, is_unsigned_follow_ack, parse_ack_body
from federation.protocol.activities import ActivityMethod, parse_method
from federation.protocol.errors import AckMissing, NotJson, PayloadError
from federation.protocol.refusals import refusal_code
from federation.sealed.codes import class_of_status
from federation.sealed.outbound.original import has_no_receiver, is_stored_already
from federation.sealed.peers.profiles import Profile

_UNKNOWN_SIGNER: Final = frozenset({401, 403})


@dataclass(slots=True)
class Attempt:
    """One delivery on its way. `public_key` is the server's that was registered when it began.

    `answerer`: who was at the other end of the connection.
    """

    sending: Sending
    method: ActivityMethod
    profile: Profile | None
    public_key: str | None = None
    answerer: bytes = field(default=b"", repr=False)

    @property
    def seen(self) -> Trace:
        return self.sending.seen


def may_not_know(fetched: Fetched) -> bool:
    """Tell whether the refusal may be about the key that signed."""
    if fetched.response.status not in _UNKNOWN_SIGNER:
        return False
    return refusal_code(fetched.response.body)[1] in (None, "INVALID_SIGNATURE")


def method_of(payload: str) -> ActivityMethod:
    try:
        return parse_method(payload)
    except PayloadError as error:
        raise PermanentFailure("INVALID_PAYLOAD", str(error)) from None


def require_taken(attempt: Attempt, response: Response, now: datetime, *, ours: str | None) -> None:
    """Raise unless the server has the activity, from this attempt or an earlier one. `ours` is our own URL."""
    if response.ok:
        return
    is_json, attempt.seen.remote_code = refusal_code(response.body)
    is_original = attempt.profile is Profile.ORIGINAL
    if (
        is_original
        and attempt.sending.is_repeat
        and is_stored_already(attempt.method, response.status, attempt.seen.remote_code)
    ):
        return
    pause = response.retry_after(now)
    kind = class_of_status(
        response.status,
        asks_to_wait=pause is not None,
        is_json=is_json,
    )
    moved_to = response.moved_to(attempt.sending.target_url, ours=ours)
    named = f" and names {moved_to}" if moved_to else ""
    said = f": {attempt.seen.remote_code}" if attempt.seen.remote_code else response.still_encoded
    problem = f"the server answered {response.status}{named}{said}"
    if is_original and kind is FailureClass.REJECTED and has_no_receiver(attempt.method, response.status):
        raise PermanentFailure("NO_RECEIVER", f"the server takes no unfollows: {problem}")
    raise RetryableFailure(
        f"HTTP_{response.status}",
        problem,
        failure_class=kind,
        at_least=pause if kind is FailureClass.REST else None,
        moved_to=moved_to,
    )


def acknowledgment(attempt: Attempt, response: Response) -> Ack | None:
    """Return the server's proof that it has the activity, or None if the answer is known to prove nothing."""
    if not response.ok:  # the server has had the activity since an earlier attempt
        return None
    body: object = None
    try:
        body = parse_ack_body(response.body)
        return find_ack(body)
    except (NotJson, AckMissing) as error:
        # An unsigned acknowledgment is the server's own answer, even if it has signed others before. It is no hoster's
        # page, and does not pass by itself.
        is_unsigned = attempt.method is ActivityMethod.FEDERATE and is_unsigned_follow_ack(body)
        if is_unsigned and attempt.profile is Profile.ORIGINAL:
            return None
        said = f"{error}{response.still_encoded}"
        if not isinstance(body, dict):
            problem = f"something else than a server of this protocol answered, such as a proxy: {said}"
            raise RetryableFailure("FOREIGN_ANSWER", problem) from None
        if attempt.sending.link.acknowledged and not is_unsigned:
            problem = f"something else than the server answered, which has acknowledged deliveries before: {said}"
            raise RetryableFailure("FOREIGN_ANSWER", problem) from None
        hint = "; the profile `original` of a server makes its unsigned answer count" if is_unsigned else ""
        raise PermanentFailure("NO_ACK", f"{error}{hint}") from None
