"""Which database this is, and what was seen of others that share its queues.

A copy of the database has the same identity: jobs are told apart by the node's URL as well.

Revision ID: 0009
"""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    identity = op.create_table("database_identity", sa.Column("id", sa.Text, primary_key=True))
    assert identity is not None
    op.bulk_insert(identity, [{"id": str(uuid.uuid4())}])
    op.create_table(
        "queue_sightings",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("what", sa.Text, primary_key=True),
        sa.Column("seen_at", sa.DateTime, nullable=False),
    )
