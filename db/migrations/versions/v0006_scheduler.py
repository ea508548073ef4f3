"""The leases and last runs of recurring jobs.

Revision ID: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "scheduler_jobs",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("token", sa.Integer, nullable=False),
        sa.Column("holder", sa.Text),
        sa.Column("leased_until", sa.DateTime),
        sa.Column("started_at", sa.DateTime),
        sa.Column("finished_at", sa.DateTime),
        sa.Column("outcome", sa.Text),
        sa.Column("detail", sa.Text),
    )
