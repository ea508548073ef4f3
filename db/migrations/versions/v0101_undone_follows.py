"""Follows that were undone before they came, and when keys of other actors end.

Revision ID: 0101
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0101"
down_revision = "0100"


def upgrade() -> None:
    op.create_table(
        "activitypub_undone_follows",
        sa.Column("follow_hash", sa.Text, primary_key=True),
        sa.Column("server_url", sa.Text, nullable=False),
        sa.Column("undone_at", sa.DateTime, nullable=False),
    )
    index = "activitypub_undone_follows_server_url_idx"
    op.create_index(index, "activitypub_undone_follows", ["server_url", "undone_at"])
    op.add_column("activitypub_remote_keys", sa.Column("expires_at", sa.DateTime))
