"""What operators did.

Revision ID: 0014
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "admin_actions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("at", sa.DateTime, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("arguments", sa.Text, nullable=False),
        sa.Column("server_url", sa.Text),
        sa.Column("affected", sa.BigInteger, nullable=False),
        sa.Column("finished_at", sa.DateTime),
        sa.Column("error", sa.Text),
    )
    op.create_index("admin_actions_at_idx", "admin_actions", ["at"])
    named = sa.text("server_url IS NOT NULL")
    op.create_index(
        "admin_actions_server_url_idx",
        "admin_actions",
        ["server_url", "id"],
        postgresql_where=named,
        sqlite_where=named,
    )
