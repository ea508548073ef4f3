"""Who follows whom, where at least one side may live on another server."""

from datetime import datetime

from sqlalchemy import ForeignKeyConstraint, Index, Text, false
from sqlmodel import Field

from db.columns import FederationTable, UtcDateTime, new_id


class Follow(FederationTable, table=True):
    """A follow as this node knows it. Neither user id is a foreign key, and the pair is not unique.

    On the follower's node `follower_server_url` holds the *followed* user's server: read both columns as "server of
    the other party", null for a local one. Deleting a server from the registry deletes its follows.
    """

    __tablename__ = "follows"
    __table_args__ = (
        ForeignKeyConstraint(
            ["follower_server_url"],
            ["server_registry.url"],
            name="follows_follower_server_url_server_registry_url_fk",
            ondelete="CASCADE",
        ),
        ForeignKeyConstraint(
            ["following_server_url"],
            ["server_registry.url"],
            name="follows_following_server_url_server_registry_url_fk",
            ondelete="CASCADE",
        ),
        Index("follows_followerServerUrl_idx", "follower_server_url"),
        Index("follows_followingServerUrl_idx", "following_server_url"),
    )

    # Written by sealed/outbound/activities (our users' follows), node/follows (others'), once.
    id: str = Field(default_factory=new_id, sa_type=Text, primary_key=True)
    follower_id: str = Field(sa_type=Text)
    following_id: str = Field(sa_type=Text)
    # Written by node/follows; sealed/outbound/follows, when the follow is acknowledged.
    accepted: bool = Field(default=False, sa_column_kwargs={"server_default": false()})
    # Written by sealed/outbound/activities, node/follows, once.
    created_at: datetime = Field(sa_type=UtcDateTime)
    follower_server_url: str | None = Field(default=None, sa_type=Text)
    following_server_url: str | None = Field(default=None, sa_type=Text)
    # Written by node/follows; sealed/outbound/follows, when the follow is acknowledged.
    acknowledged: bool = Field(default=False, sa_column_kwargs={"server_default": false()})
    # Written by sealed/outbound/activities, once.
    requester_signature: str | None = Field(default=None, sa_type=Text)
    # Written by the original Node implementation alone.
    responder_signature: str | None = Field(default=None, sa_type=Text)


class FollowNews(FederationTable, table=True):
    """The newest that was told of one user's follow of another, by the clock of the follower's server.

    `id` and `follow_id` are digests: of direction, server, follower and followed, and of the id that the follow has at
    the follower's server. So a row has one size, whatever ids a stranger makes up. It outlives both follow and server.
    """

    __tablename__ = "follow_news"
    __table_args__ = (
        Index("follow_news_server_url_noted_at_idx", "server_url", "noted_at"),
        Index("follow_news_noted_at_idx", "noted_at"),
    )

    # Written by sealed/peers/follow_news, for producers and for inbound follows.
    id: str = Field(sa_type=Text, primary_key=True)
    server_url: str = Field(sa_type=Text)
    follow_id: str = Field(sa_type=Text)
    told_at: datetime = Field(sa_type=UtcDateTime)
    noted_at: datetime = Field(sa_type=UtcDateTime)
