"""What operators did: the audit log."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import JSON, BigInteger, Index, Integer, Text, text
from sqlmodel import Field

from db.columns import FederationTable, TextEnum, UtcDateTime


class ActionSource(StrEnum):
    """By what way an operator asked for an action."""

    CLI = "cli"
    DASHBOARD = "dashboard"
    API = "api"


class AdminAction(FederationTable, table=True):
    """Something that an operator had done: who, when, what, and to how many things.

    `action` is the command that does it, as `deliveries retry`; `arguments` is a JSON object without secrets;
    `server_url` is the server that it is about, if it is about one. `affected` grows with each of its transactions. An
    action without `finished_at` is under way, or its process died; `error` names the type of what stopped it.
    """

    __tablename__ = "admin_actions"
    __table_args__ = (
        Index("admin_actions_at_idx", "at"),
        Index(
            "admin_actions_server_url_idx",
            *("server_url", "id"),
            postgresql_where=text("server_url IS NOT NULL"),
            sqlite_where=text("server_url IS NOT NULL"),
        ),
    )

    # Written by base/audit, once.
    id: int | None = Field(default=None, sa_type=BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    at: datetime = Field(sa_type=UtcDateTime)
    actor: str = Field(sa_type=Text)
    source: ActionSource = Field(sa_type=TextEnum(ActionSource))
    action: str = Field(sa_type=Text)
    arguments: str = Field(sa_type=Text)
    server_url: str | None = Field(default=None, sa_type=Text)
    # Written by base/audit.
    affected: int = Field(default=0, sa_type=BigInteger)
    finished_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    error: str | None = Field(default=None, sa_type=Text)


class BulkVerb(StrEnum):
    """What a bulk job does."""

    RETRY = "retry"
    """Deliveries are owed again."""
    DROP = "drop"
    """Deliveries are given up."""
    IMPORT = "import"
    """Rules of a list are added to the blacklist."""


class BulkJob(FederationTable, table=True):
    """An action on many deliveries, or the import of a list, that goes on without whoever asked for it.

    Its row of `admin_actions` has the same `id`, and says how many things it has changed by now, of `total`. `chosen`
    is the selection, or the list. The process that works on it has it until `leased_until`, by the number `token`.
    `result` is what the action returned; `error` why it ended without.
    """

    __tablename__ = "bulk_jobs"
    __table_args__ = (
        Index(
            "bulk_jobs_open_idx",
            "id",
            postgresql_where=text("finished_at IS NULL"),
            sqlite_where=text("finished_at IS NULL"),
        ),
    )

    # Written by admin/deliveries/bulk_jobs, once.
    id: int = Field(
        sa_type=BigInteger().with_variant(Integer, "sqlite"),
        primary_key=True,
        sa_column_kwargs={"autoincrement": False},
    )
    created_at: datetime = Field(sa_type=UtcDateTime)
    verb: BulkVerb = Field(sa_type=TextEnum(BulkVerb))
    chosen: dict[str, object] = Field(sa_type=JSON)
    # Written by admin/deliveries/bulk_jobs.
    total: int | None = Field(default=None, sa_type=BigInteger)
    token: int = Field(default=0, sa_type=BigInteger)
    leased_until: datetime | None = Field(default=None, sa_type=UtcDateTime)
    finished_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    result: dict[str, object] | None = Field(default=None, sa_type=JSON)
    error: str | None = Field(default=None, sa_type=Text)
