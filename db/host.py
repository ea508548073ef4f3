"""The host application's tables, as far as federation reads and writes them."""

from datetime import datetime
from typing import Final

from pydantic import JsonValue
from sqlalchemy import JSON, Connection, ForeignKeyConstraint, Index, Text, false, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlmodel import Field

from db.catalog import columns, missing
from db.columns import HostTable, UtcDateTime, new_id
from db.errors import is_outage

UNUSED: Final = frozenset({"blocks.id", "blocks.created_at"})
"""Columns of our minimal tables that we neither read nor write: a host's own may do without."""


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


class HostTablesError(Exception):
    """The host's own tables cannot have ours beside them; the message names the table and says why."""


def create_host_tables(connection: Connection) -> tuple[str, ...]:
    """Make those of `user`, `posts` and `blocks` that the database lacks; return their names. Others are left alone.

    For a node without a host application, for demonstrations and tests. From async code:
    `await (await session.connection()).run_sync(create_host_tables)`.

    Raises:
        HostTablesError: a table of the host's own is in the way.
    """
    tables = HostTable.metadata.sorted_tables
    there = columns(connection, [table.name for table in tables])
    made = [table for table in tables if table.name not in there]
    for table in made:
        try:
            table.create(connection, checkfirst=False)
        except (ProgrammingError, OperationalError) as error:
            if is_outage(error):
                raise
            why = type(error.orig).__name__  # not its text, which may quote what the host keeps
            problem = f"the table {table.name} cannot be made beside the host's own ({why}); nothing was changed"
            raise HostTablesError(problem) from error
    return tuple(table.name for table in made)


def missing_of_host(connection: Connection) -> tuple[str, ...]:
    """Name what we use of the host's tables and the database lacks, as `missing` does."""
    return tuple(name for name in missing(connection, HostTable.metadata) if name not in UNUSED)


def columns_of_host(connection: Connection, table: str) -> tuple[str, ...]:
    """Name the columns of one of these tables that are not in its model, sorted: a table with any is the host's."""
    ours = HostTable.metadata.tables[table].columns.keys()
    return tuple(sorted(columns(connection, [table]).get(table, set()) - set(ours)))
