"""ActivityPub: our actors with their keys, others' inboxes and keys, what others sent, and who follows whom."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Index, Integer, Text, text
from sqlmodel import Field

from db.columns import FederationTable, TextEnum, UtcDateTime


class ActivityActor(FederationTable, table=True):
    """An actor of this node, in whose name activities are signed. `id` is its URL, `name` what accounts are found by.

    `is_instance`: it stands for the node and not for a user. What is removed at `removed_at` is served for a while, so
    that others can verify the news of it.
    """

    __tablename__ = "activitypub_actors"
    __table_args__ = (Index("activitypub_actors_name_idx", "name", "created_at"),)

    # Written by activitypub/actors, once.
    id: str = Field(sa_type=Text, primary_key=True)
    name: str = Field(sa_type=Text)
    created_at: datetime = Field(sa_type=UtcDateTime)
    is_instance: bool = False
    # Written by activitypub/actors.
    removed_at: datetime | None = Field(default=None, sa_type=UtcDateTime)


class ActivityKey(FederationTable, table=True):
    """A key pair of an actor. `key_id` is the URL by which others know it, `private` is sealed under the node's keys.

    It signs and is served from `use_from` until `retired_at`, or for good where that is null.
    """

    __tablename__ = "activitypub_keys"
    __table_args__ = (Index("activitypub_keys_actor_id_idx", "actor_id"),)

    # Written by activitypub/actors, once.
    key_id: str = Field(sa_type=Text, primary_key=True)
    actor_id: str = Field(sa_type=Text)
    kind: str = Field(sa_type=Text)
    # Written by activitypub/actors.
    private: str = Field(sa_type=Text, repr=False)
    # Written by activitypub/actors, once.
    public_pem: str = Field(sa_type=Text)
    created_at: datetime = Field(sa_type=UtcDateTime)
    use_from: datetime = Field(sa_type=UtcDateTime)
    # Written by activitypub/actors.
    retired_at: datetime | None = Field(default=None, sa_type=UtcDateTime)


class ActivityInbox(FederationTable, table=True):
    """An inbox of another server with which something was wrong: `url` is its whole URL, `server_url` its origin.

    It is gone since `gone_at`, by the status `gone_code`. `missing_since` and `missing_last` are when it answered 404
    first and last, with nothing taken in between. One that `is_shared` by the actors of its server is tried once a day
    while it is gone, at `tried_at` last.
    """

    __tablename__ = "activitypub_inboxes"
    __table_args__ = (Index("activitypub_inboxes_gone_at_idx", "gone_at"),)

    # Written by activitypub/inboxes.
    url: str = Field(sa_type=Text, primary_key=True)
    server_url: str = Field(sa_type=Text)
    gone_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    gone_code: int | None = None
    missing_since: datetime | None = Field(default=None, sa_type=UtcDateTime)
    missing_last: datetime | None = Field(default=None, sa_type=UtcDateTime)
    is_shared: bool = False
    tried_at: datetime | None = Field(default=None, sa_type=UtcDateTime)


class ReceivedState(StrEnum):
    """What has become of an activity that somebody sent."""

    NEW = "new"
    """The application's handler is yet to run."""
    DONE = "done"
    """It ran, and what it wrote was committed with this."""
    FAILED = "failed"
    """It raised as often as it may."""


class ReceivedActivity(FederationTable, table=True):
    """An activity that an actor of another server sent, and signed. `activity_hash` tells whether it came before.

    That is the SHA-256 of the actor and the activity's id, or of its text if it has no id. `number` is the order of
    arrival. `text` is empty once a function of the application has handled it, or this node alone.
    """

    __tablename__ = "activitypub_received"
    __table_args__ = (
        Index("activitypub_received_hash_uidx", "activity_hash", unique=True),
        Index(
            "activitypub_received_open_idx",
            "actor",
            "number",
            postgresql_where=text("state = 'new'"),
            sqlite_where=text("state = 'new'"),
        ),
        Index(
            "activitypub_received_failed_idx",
            "number",
            postgresql_where=text("state = 'failed'"),
            sqlite_where=text("state = 'failed'"),
        ),
        Index(
            "activitypub_received_activity_id_idx",
            "activity_id",
            postgresql_where=text("activity_id IS NOT NULL"),
            sqlite_where=text("activity_id IS NOT NULL"),
        ),
        Index("activitypub_received_at_idx", "received_at"),
    )

    # Written by activitypub/received, once.
    number: int | None = Field(default=None, sa_type=BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    activity_hash: str = Field(sa_type=Text)
    activity_id: str | None = Field(default=None, sa_type=Text)
    type: str = Field(sa_type=Text)
    actor: str = Field(sa_type=Text)
    received_at: datetime = Field(sa_type=UtcDateTime)
    # Written by activitypub/received, activitypub/received_runner.
    state: ReceivedState = Field(default=ReceivedState.NEW, sa_type=TextEnum(ReceivedState))
    text: str = Field(sa_type=Text, repr=False)
    # Written by activitypub/received.
    attempts: int = 0
    # Written by activitypub/received, activitypub/received_runner.
    last_error: str | None = Field(default=None, sa_type=Text)


class RemoteActorKey(FederationTable, table=True):
    """A public key of an actor of another server, or that it could not be had, which `failed_at` tells.

    From `expires_at` on it counts no more, if its owner says so.
    """

    __tablename__ = "activitypub_remote_keys"
    __table_args__ = (Index("activitypub_remote_keys_owner_idx", "owner"),)

    # Written by activitypub/remote_keys.
    key_id: str = Field(sa_type=Text, primary_key=True)
    owner: str | None = Field(default=None, sa_type=Text)
    public_pem: str | None = Field(default=None, sa_type=Text)
    fetched_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    refetched_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    failed_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    expires_at: datetime | None = Field(default=None, sa_type=UtcDateTime)


class FollowDirection(StrEnum):
    """Who follows whom."""

    FOLLOWER = "follower"
    """The other actor follows ours."""
    FOLLOWING = "following"
    """Ours follows the other."""


class FollowState(StrEnum):
    """What the one who is followed has said."""

    PENDING = "pending"
    ACCEPTED = "accepted"
    REJECTED = "rejected"


class ActivityFollow(FederationTable, table=True):
    """A follow between an actor of ours and one of another server, by whose inboxes the other is reached.

    `follow_id` is the id of the Follow activity that counts; `since` is when it came or went.
    """

    __tablename__ = "activitypub_follows"
    __table_args__ = (Index("activitypub_follows_remote_actor_idx", "remote_actor"),)

    # Written by activitypub/follows.
    local_actor: str = Field(sa_type=Text, primary_key=True)
    remote_actor: str = Field(sa_type=Text, primary_key=True)
    direction: FollowDirection = Field(sa_type=TextEnum(FollowDirection), primary_key=True)
    inbox: str = Field(sa_type=Text)
    shared_inbox: str | None = Field(default=None, sa_type=Text)
    follow_id: str | None = Field(default=None, sa_type=Text)
    state: FollowState = Field(default=FollowState.PENDING, sa_type=TextEnum(FollowState))
    since: datetime = Field(sa_type=UtcDateTime)


class UndoneFollow(FederationTable, table=True):
    """A Follow that was undone by an actor of a server before it came: if it comes soon, it changes nothing.

    `follow_hash` is the SHA-256 of the actor and the id of the Follow.
    """

    __tablename__ = "activitypub_undone_follows"
    __table_args__ = (Index("activitypub_undone_follows_server_url_idx", "server_url", "undone_at"),)

    # Written by activitypub/undone.
    follow_hash: str = Field(sa_type=Text, primary_key=True)
    server_url: str = Field(sa_type=Text)
    undone_at: datetime = Field(sa_type=UtcDateTime)
