"""What a server's answer to a delivery says: taken, refused, or somebody else's; by the server's profile.

The first implementation of this protocol falls short of what the protocol asks. It acknowledges a follow without a
signature: such a follow is known to be received, but nobody has proven more. It refuses a post that it has stored
already, so a delivery whose acknowledgment was lost is refused from then on. And it has no receiver for unfollows. All
of this applies only to servers that an operator has given its profile.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

from federation.delivery.error_codes import STORED_ALREADY, FailureClass
from federation.delivery.errors import PermanentFailure, RetryableFailure
from federation.delivery.wire import Sending, Trace
from federation.http.client import Fetched
from federation.http.messages import Response
from federation.protocol.acks import Ack, PostAck, find_ack, is_unsigned_follow_ack, parse_ack_body
from federation.protocol.activities import ActivityMethod, FollowActivity, NamedPostActivity, parse_method
from federation.protocol.encodings import parse_model
from federation.protocol.errors import AckMissing, EnvelopeError, NotJson, PayloadError, UrlError
from federation.protocol.keys import KeyRing
from federation.protocol.refusals import refusal_code
from federation.protocol.urls import canonical_origin
from federation.protocol.values import Value
from federation.sealed.codes import class_of_status
from federation.sealed.outbound.follows import FollowAnswer

ONE_IN: Final = 32
MAX_REMEMBERED: Final = 20_000
MAX_ANSWERERS: Final = 8

Chance = Callable[[], bool]

NO_KEY: Final = "key"
"""There is nothing to check the acknowledgment with."""
_STORED: Final[Mapping[ActivityMethod, str]] = {
    ActivityMethod.FEDERATE: "FOLLOW_ALREADY_EXISTS",
    ActivityMethod.FEDERATE_POST: "FEDERATED_POST_ALREADY_EXISTS",
}
_UNKNOWN_SIGNER: Final = frozenset({401, 403})


class Profile(StrEnum):
    """Values of `server_links.profile`: which implementation of the protocol a server runs, as an operator says."""

    ORIGINAL = "original"
    """The first implementation: it does not sign acknowledgments of follows, and refuses a post that it already has."""


def profile_of(name: str | None) -> Profile | None:
    """Return the profile of that name, or None for no name, or for one that this version does not know."""
    return Profile(name) if name in set(Profile) else None


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

    def note(self, fetched: Fetched) -> None:
        """Note what came back, in place of what came before."""
        self.seen.answered = not fetched.proxied
        self.seen.status = fetched.response.status
        self.seen.response_bytes = len(fetched.response.body)
        self.seen.relayed_by = fetched.peer
        self.answerer = fetched.response.answerer


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


def is_stored_already(method: ActivityMethod | None, status: int, remote_code: str | None) -> bool:
    """Tell whether the server refuses the activity because it already has it."""
    return method is not None and status == STORED_ALREADY and remote_code == _STORED.get(method, "")


def has_no_receiver(method: ActivityMethod | None, status: int) -> bool:
    """Tell whether the server refuses the activity because it knows no such kind, so that trying again is of no use."""
    return method is ActivityMethod.UNFOLLOW and status == 400


def received_follow(payload: str, server_url: str) -> FollowAnswer | None:
    """Return the follow that was sent as acknowledged and undecided, or None if no receiver could read the payload."""
    try:
        following = parse_model(FollowActivity, payload).following
    except PayloadError:
        return None
    return FollowAnswer(
        follower_id=following.follower_id,
        following_id=following.following_id,
        server_url=server_url,
        accepted=False,
    )


def one_in_some() -> bool:
    """Draw one acknowledgment in 32."""
    return random.random() * ONE_IN < 1  # noqa: S311 - nobody who answers sees what was drawn before


class Answer(Value, frozen=True, kw_only=True):
    """What is known of an acknowledgment before it is opened.

    `since` is when the server's link changed last, `answerer` who was at the other end of the connection.
    """

    server_url: str
    since: datetime | None
    answerer: bytes
    is_empty: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Of whom an acknowledgment was checked since the server's link changed last. `signs`: one was the server's."""

    since: datetime | None
    answerers: tuple[bytes, ...] = ()
    signs: bool = False


_NOTHING: Final = _Known(since=None)


class AckChecks:
    """Says which acknowledgments of posts are checked: few, and each where somebody may be new.

    Theory of operation. Opening an acknowledgment takes 0.18 ms of processor time, a third of a delivery. So one in 32
    is opened, at random, which is a hundredth. Whoever begins to answer in a server's place is mostly seen at once all
    the same: by another address, another certificate, or a link that was down before. So the first acknowledgment of a
    server in this process is checked, the first after its link has changed, and the first from each address and
    certificate. After one that was not the server's, all are checked until one is the server's again. One that has
    nothing in it to open, from a server that signs, costs nothing to check, and never passes.

    Chance alone decides beyond `MAX_REMEMBERED` servers, and beyond `MAX_ANSWERERS` of one server: some stand behind
    hundreds of addresses, and all would be new.
    """

    def __init__(self, chance: Chance = one_in_some) -> None:
        self._chance = chance
        self._known: dict[str, _Known] = {}

    def wants(self, answer: Answer) -> bool:
        """Tell whether the acknowledgment is to be checked."""
        known = self._known.get(answer.server_url)
        if known is None:
            return len(self._known) < MAX_REMEMBERED or self._chance()
        if known.since != answer.since or (answer.is_empty and known.signs):
            return True
        is_new = answer.answerer not in known.answerers and len(known.answerers) < MAX_ANSWERERS
        return is_new or self._chance()

    def is_forged(self, answer: Answer, *, proved: bool | None) -> bool:
        """Note what a check has found, and tell whether somebody else than the server acknowledged.

        *proved*: the acknowledgment is the server's, or is not; None if that could not be found out. An empty one is
        forged only where the server has signed another: there may be servers that never sign.
        """
        known = self._known.get(answer.server_url, _NOTHING)
        forged = proved is False and (known.signs or not answer.is_empty)
        answerers = known.answerers if known.since == answer.since else ()
        if forged:
            answerers = ()
        elif answer.answerer not in answerers and len(answerers) < MAX_ANSWERERS:
            answerers = (*answerers, answer.answerer)
        signs = known.signs or proved is True
        self._remember(answer.server_url, _Known(since=answer.since, answerers=answerers, signs=signs))
        return forged

    def _remember(self, server_url: str, known: _Known) -> None:
        if server_url not in self._known and len(self._known) >= MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[server_url] = known


def post_ack_mismatch(ack: Ack, server_url: str, *, payload: str, keys: KeyRing, public_key: str | None) -> str | None:
    """Return what is wrong with the acknowledgment of the post in `payload`, or None if nothing is.

    `data`: it is not sealed to us. `key`: there is no key to check its signature with. `signature`: it is not signed by
    the server. `content`: it acknowledges no post. `post`: it acknowledges another post. `server`: it names another
    server.

    Raises:
        PayloadError: the payload is no post.
    """
    try:
        plaintext = ack.open(keys)
    except EnvelopeError:
        return "data"
    if public_key is None:
        return NO_KEY
    if not ack.is_signed(plaintext, public_key):
        return "signature"
    try:
        content = parse_model(PostAck, plaintext)
    except PayloadError:
        return "content"
    if content.post.federation_post_id != parse_model(NamedPostActivity, payload).post.id:
        return "post"
    return None if _is_name_of(content.federation_url, server_url) else "server"


def _is_name_of(url: str, server_url: str) -> bool:
    """Tell whether both URLs name one server; peers may spell theirs with a slash at the end."""
    try:
        return url == server_url or canonical_origin(url) == canonical_origin(server_url)
    except UrlError:
        return False
