"""What links and deliveries know of how a server failed, of sweeps, and of the clocks of processes.

Revision ID: 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("server_links", sa.Column("fell_at", sa.DateTime))
    op.add_column("server_links", sa.Column("canaries", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.add_column("server_links", sa.Column("probed_at", sa.DateTime))
    op.add_column("server_links", sa.Column("moved_to", sa.Text))
    op.add_column("server_links", sa.Column("look_ended_at", sa.DateTime))
    planned = sa.text("next_probe_at IS NOT NULL")
    op.create_index(
        "server_links_probed_idx", "server_links", ["probed_at"], postgresql_where=planned, sqlite_where=planned
    )
    op.add_column("delivery_jobs", sa.Column("alone", sa.Integer, nullable=False, server_default=sa.text("0")))
    op.add_column("delivery_attempts", sa.Column("note", sa.Text))
    op.create_table(
        "sweeps",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("swept_at", sa.DateTime, nullable=False),
        sa.Column("spares_seconds", sa.Float, nullable=False, server_default=sa.text("0")),
        sa.Column("queue_lost_at", sa.DateTime),
    )
    op.create_table(
        "process_clocks",
        sa.Column("process", sa.Text, primary_key=True),
        sa.Column("machine_at", sa.DateTime, nullable=False),
        sa.Column("database_at", sa.DateTime, nullable=False),
    )
