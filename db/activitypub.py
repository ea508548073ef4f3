"""ActivityPub: the actors of this node with their keys, and inboxes of others with which something was wrong."""

from datetime import datetime

from sqlalchemy import Index, Text
from sqlmodel import Field

from db.columns import FederationTable, UtcDateTime


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
