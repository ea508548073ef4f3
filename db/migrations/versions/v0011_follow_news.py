"""The newest that was told of each follow, so that an older word that is sent again changes nothing.

Revision ID: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "follow_news",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("server_url", sa.Text, nullable=False),
        sa.Column("follow_id", sa.Text, nullable=False),
        sa.Column("told_at", sa.DateTime, nullable=False),
        sa.Column("noted_at", sa.DateTime, nullable=False),
    )
    op.create_index("follow_news_server_url_noted_at_idx", "follow_news", ["server_url", "noted_at"])
    op.create_index("follow_news_noted_at_idx", "follow_news", ["noted_at"])
