"""Texts that several deliveries share, and the column that refers to them.

Revision ID: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "delivery_payloads",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("refs", sa.Integer, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
    )
    op.add_column("delivery_jobs", sa.Column("payload_id", sa.Text))
    refers = sa.text("payload_id IS NOT NULL")
    op.create_index(
        "delivery_jobs_payload_id_idx", "delivery_jobs", ["payload_id"], postgresql_where=refers, sqlite_where=refers
    )
