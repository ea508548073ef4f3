"""The host application's tables, as far as federation reads and writes them."""

from datetime import datetime

from pydantic import JsonValue
from sqlalchemy import JSON, Connection, ForeignKeyConstraint, Index, Text, false, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlmodel import Field

from db.columns import HostTable, UtcDateTime, new_id


class User(HostTable, table=True):
    """A local user. `post_propagation_policy` is `all`, `followers` or `none`; null means `all`."""

    __tablename__ = "user"

    id: str = Field(default_factory=new_id, sa_type=Text, primary_key=True)
    is_private: bool | None = Field(default=False, sa_column_kwargs={"server_default": false()})
    post_propagation_policy: str | None = Field(
        default="all", sa_type=Text, sa_column_kwargs={"server_default": text("'all'")}
    )


class Post(HostTable, table=True):
    """A post, by a local author (`author_id`) or a remote one (`federated_author_id`)."""

    __tablename__ = "posts"
    __table_args__ = (
        ForeignKeyConstraint(["author_id"], ["user.id"], name="posts_author_id_user_id_fk", ondelete="CASCADE"),
        Index("posts_federationUrl_idx", "federation_url"),
        Index("posts_federationPostId_idx", "federation_post_id"),
    )

    id: str = Field(default_factory=new_id, sa_type=Text, primary_key=True)
    content: JsonValue = Field(sa_type=JSON().with_variant(JSONB(), "postgresql"), repr=False)
    author_id: str | None = Field(default=None, sa_type=Text)
    federated_author_id: str | None = Field(default=None, sa_type=Text)
    published: datetime = Field(sa_type=UtcDateTime)
    is_local: bool = Field(default=False, sa_column_kwargs={"server_default": false()})
    is_private: bool | None = Field(default=False, sa_column_kwargs={"server_default": false()})
    created_at: datetime = Field(sa_type=UtcDateTime)
    federation_url: str | None = Field(default=None, sa_type=Text)
    federation_post_id: str | None = Field(default=None, sa_type=Text)
    author_signature: str | None = Field(default=None, sa_type=Text)


class Block(HostTable, table=True):
    """A local user who blocks another local user."""

    __tablename__ = "blocks"
    __table_args__ = (
        ForeignKeyConstraint(["blocker_id"], ["user.id"], name="blocks_blocker_id_user_id_fk", ondelete="CASCADE"),
        ForeignKeyConstraint(
            ["blocked_user_id"], ["user.id"], name="blocks_blocked_user_id_user_id_fk", ondelete="CASCADE"
        ),
    )

    id: str = Field(default_factory=new_id, sa_type=Text, primary_key=True)
    blocker_id: str = Field(sa_type=Text)
    blocked_user_id: str = Field(sa_type=Text)
    created_at: datetime = Field(sa_type=UtcDateTime)


def create_host_tables(connection: Connection) -> None:
    """`user`, `posts` and `blocks` exist; those already there are left alone. For demonstrations and tests.

    From async code: `await (await session.connection()).run_sync(create_host_tables)`.
    """
    HostTable.metadata.create_all(connection)
