"""By which key the acknowledgment of a follow is known to be its server's."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from federation.delivery.errors import PermanentFailure
from federation.protocol.acks import ack_response, find_ack, follow_ack
from federation.protocol.keys import generate_own_keys
from federation.sealed.outbound.follows import read_follow_ack
from tests.federation.protocol.vectors import A, B

KEY, ANOTHER = B.keys.signing.public_text, generate_own_keys().signing.public_text
ANSWER = follow_ack(
    sender_url="https://a.example",
    follow_id="theirs",
    created_at=datetime(2026, 1, 2, tzinfo=UTC),
    follower_id="alice",
    following_id="bob",
    accepted=True,
)


async def accepted(cached: str | None, registered: str | None) -> bool:
    """Whether the follow is, where the registry had one key when the attempt began and has the other now."""
    body = ack_response(ANSWER, recipient_key=A.keys.encryption.public, signing_secret=B.keys.signing.secret)

    async def find() -> str | None:
        return registered

    answer = await read_follow_ack(
        find_ack(body), "https://b.example", keys=A.keys, cached_public_key=cached, find_public_key=find
    )
    return answer.accepted


@pytest.mark.parametrize(
    ("cached", "registered"),
    [(KEY, KEY), (KEY, ANOTHER), (KEY, None), (None, KEY), (ANOTHER, KEY)],
    ids=["the-same", "changed-after-it-answered", "gone", "not-known-then", "changed-before-it-answered"],
)
async def test_it_is_signed_with_the_key_of_then_or_of_now(cached: str | None, registered: str | None) -> None:
    """The server may change its keys, or leave, while the attempt is under way."""
    assert await accepted(cached, registered)


@pytest.mark.parametrize(
    ("cached", "registered", "code"),
    [
        (ANOTHER, ANOTHER, "INVALID_ACK_SIGNATURE"),
        (ANOTHER, None, "INVALID_ACK_SIGNATURE"),
        (None, ANOTHER, "INVALID_ACK_SIGNATURE"),
        (None, None, "NO_PUBLIC_KEY"),
    ],
)
async def test_any_other_key_proves_nothing(cached: str | None, registered: str | None, code: str) -> None:
    """Nor does none."""
    with pytest.raises(PermanentFailure) as failure:
        await accepted(cached, registered)
    assert failure.value.code == code
