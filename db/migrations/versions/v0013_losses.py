"""What was lost for good, which keys an operator has accepted, and what scorecards say of deliveries.

Revision ID: 0013
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "delivery_losses",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("server_url", sa.Text),
        sa.Column("job_name", sa.Text),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("error_code", sa.Text),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("lost_at", sa.DateTime, nullable=False),
    )
    op.create_index("server_health_events_at_idx", "server_health_events", ["at"])
    op.create_index("delivery_losses_lost_at_idx", "delivery_losses", ["lost_at"])
    op.create_table(
        "accepted_keys",
        sa.Column("server_url", sa.Text, primary_key=True),
        sa.Column("fingerprint", sa.Text, primary_key=True),
        sa.Column("accepted_at", sa.DateTime, nullable=False),
    )
    op.add_column("server_scorecards", sa.Column("owed", sa.BigInteger))
    op.add_column("server_scorecards", sa.Column("held", sa.BigInteger))
    op.add_column("server_scorecards", sa.Column("owed_since", sa.DateTime))
    op.add_column("server_scorecards", sa.Column("lost", sa.BigInteger))
