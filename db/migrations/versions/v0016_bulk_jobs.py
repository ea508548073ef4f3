"""Actions of operators on many deliveries or servers that go on by themselves.

Revision ID: 0016
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.create_table(
        "bulk_jobs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("verb", sa.Text, nullable=False),
        sa.Column("chosen", sa.JSON, nullable=False),
        sa.Column("total", sa.BigInteger),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("leased_until", sa.DateTime),
        sa.Column("finished_at", sa.DateTime),
        sa.Column("result", sa.JSON),
        sa.Column("error", sa.Text),
    )
    is_open = sa.text("finished_at IS NULL")
    op.create_index("bulk_jobs_open_idx", "bulk_jobs", ["id"], postgresql_where=is_open, sqlite_where=is_open)
