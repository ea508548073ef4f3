"""The acknowledgment of a follow: opens it, verifies it, and turns it into what changes in the row of the follow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, TypeAlias

import structlog
from sqlalchemy import Connection, bindparam, tuple_, update

from db import Follow
from db.session import sqlite_cursor
from federation.delivery.errors import PermanentFailure
from federation.delivery.wire import Fragment
from federation.protocol.acks import Ack, FollowAck
from federation.protocol.encodings import parse_model
from federation.protocol.errors import ProtocolError
from federation.protocol.keys import KeyRing
from federation.protocol.values import Value

log = structlog.get_logger(__name__)

FindPublicKey: TypeAlias = Callable[[], Awaitable[str | None]]
FollowKey: TypeAlias = tuple[str, str, str]

_FOLLOWS = Follow.__table__  # type: ignore[attr-defined] # SQLModel adds it at run time
_KEY = (_FOLLOWS.c.follower_id, _FOLLOWS.c.following_id, _FOLLOWS.c.follower_server_url)
_FOLLOW = update(_FOLLOWS).where(tuple_(*_KEY).in_(bindparam("follows", expanding=True))).returning(*_KEY)
# A rejection and "received, not decided" look the same on this wire: only `acknowledged` is set.
_ANSWERED = """
UPDATE follows SET accepted = accepted OR ?4, acknowledged = acknowledged OR NOT ?4
WHERE follower_id = ?1 AND following_id = ?2 AND follower_server_url = ?3
"""
_CHANGED = {True: _FOLLOW.values(accepted=True), False: _FOLLOW.values(acknowledged=True)}


class FollowAnswer(Value, frozen=True, kw_only=True):
    """What the other server says of our follow: that it is accepted, or only that it is known."""

    fragment: ClassVar[Fragment | None] = Fragment(
        columns={"follower_id": "text", "following_id": "text", "server_url": "text", "accepted": "boolean"},
        ctes="""answers AS (
            SELECT follower_id, following_id, server_url,
                bool_or(accepted) AS accepted, bool_or(NOT accepted) AS noticed
            FROM {arrived} GROUP BY follower_id, following_id, server_url
        ), known AS (
            UPDATE follows AS f
            SET accepted = f.accepted OR a.accepted, acknowledged = f.acknowledged OR a.noticed
            FROM answers AS a
            WHERE f.follower_id = a.follower_id AND f.following_id = a.following_id
                AND f.follower_server_url = a.server_url
            RETURNING f.follower_id, f.following_id, f.follower_server_url AS server_url
        ), answered AS (
            SELECT id FROM {arrived} JOIN known USING (follower_id, following_id, server_url)
        )""",
        changed="answered",
    )

    follower_id: str
    following_id: str
    server_url: str
    accepted: bool

    @property
    def key(self) -> FollowKey:
        """The key that tells the follow from all others."""
        return self.follower_id, self.following_id, self.server_url

    @classmethod
    def apply(cls, connection: Connection, answers: Sequence[FollowAnswer], /) -> Sequence[bool]:
        """Write the answers to `follows`, and tell which of the follows are known here."""
        if connection.dialect.name == "sqlite":
            return cls._apply_one_by_one(connection, answers)
        known: set[FollowKey] = set()
        for accepted, statement in _CHANGED.items():
            keys = [answer.key for answer in answers if answer.accepted is accepted]
            if keys:
                known.update(tuple(row) for row in connection.execute(statement, {"follows": keys}))
        return [answer.key in known for answer in answers]

    @staticmethod
    def _apply_one_by_one(connection: Connection, answers: Sequence[FollowAnswer]) -> Sequence[bool]:
        """Do so on SQLite, which goes through all follows to find several by their keys."""
        known: list[bool] = []
        with sqlite_cursor(connection) as cursor:
            for answer in answers:
                cursor.execute(_ANSWERED, (*answer.key, answer.accepted))
                known.append(cursor.rowcount > 0)
        return known

    def log_missed(self, *, delivery_id: str) -> None:
        """Log that no such follow is known here."""
        log.info("follow_ack_unknown", delivery_id=delivery_id, server_url=self.server_url)


async def read_follow_ack(
    ack: Ack, server_url: str, *, keys: KeyRing, cached_public_key: str | None, find_public_key: FindPublicKey
) -> FollowAnswer:
    """Return what the server says of our follow, once it is proven to come from that server.

    The key is `cached_public_key` if the registry had one when the attempt began, otherwise the one it has now. If the
    cached key does not fit, the present one is tried as well: the server may have changed its keys meanwhile.

    Raises:
        PermanentFailure: the acknowledgment does not open, has the wrong shape, or is not signed by that server.
    """
    try:
        plaintext = ack.open(keys)
        following = parse_model(FollowAck, plaintext).following
    except ProtocolError as error:
        raise PermanentFailure("INVALID_ACK", f"the follow's acknowledgment: {error}") from None
    public_key = cached_public_key or await find_public_key()
    if public_key is None:
        raise PermanentFailure(
            "NO_PUBLIC_KEY",
            f"{server_url} is no longer registered, its acknowledgment cannot be verified",
        )
    if not ack.is_signed(plaintext, public_key) and not await _is_signed_anew(ack, plaintext, find_public_key):
        raise PermanentFailure("INVALID_ACK_SIGNATURE", f"the follow's acknowledgment is not signed by {server_url}")
    return FollowAnswer(
        follower_id=following.follower_id,
        following_id=following.following_id,
        server_url=server_url,
        accepted=following.accepted is True,
    )


async def _is_signed_anew(ack: Ack, plaintext: str, find_public_key: FindPublicKey) -> bool:
    public_key = await find_public_key()
    return public_key is not None and ack.is_signed(plaintext, public_key)
