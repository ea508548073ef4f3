"""The outbox columns of `delivery_jobs`, the attempt log and the health history.

Every new column is nullable: the original implementation keeps inserting rows that do not name them.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_ROW_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    _extend_delivery_jobs()
    _create_delivery_attempts()
    _create_server_health_events()


def _extend_delivery_jobs() -> None:
    op.add_column("delivery_jobs", sa.Column("job_name", sa.Text))
    op.add_column("delivery_jobs", sa.Column("server_url", sa.Text))
    op.add_column("delivery_jobs", sa.Column("queued_at", sa.DateTime))
    op.add_column("delivery_jobs", sa.Column("settled_at", sa.DateTime))
    op.add_column("delivery_jobs", sa.Column("outcome", sa.Text))
    op.add_column("delivery_jobs", sa.Column("last_error", sa.Text))
    is_open = sa.text("settled_at IS NULL")
    op.create_index(
        "delivery_jobs_open_idx", "delivery_jobs", ["created_at"], postgresql_where=is_open, sqlite_where=is_open
    )


def _create_delivery_attempts() -> None:
    op.create_table(
        "delivery_attempts",
        sa.Column("id", _ROW_ID, primary_key=True),
        sa.Column("delivery_id", sa.Text, nullable=False),
        sa.Column("job_name", sa.Text, nullable=False),
        sa.Column("method", sa.Text),
        sa.Column("server_url", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("started_at", sa.DateTime, nullable=False),
        sa.Column("duration_ms", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("error_code", sa.Text),
        sa.Column("http_status", sa.Integer),
        sa.Column("relayed_by", sa.Text),
        sa.Column("request_bytes", sa.Integer),
        sa.Column("response_bytes", sa.Integer),
    )
    op.create_index("delivery_attempts_started_at_idx", "delivery_attempts", ["started_at"])
    op.create_index("delivery_attempts_server_url_started_at_idx", "delivery_attempts", ["server_url", "started_at"])


def _create_server_health_events() -> None:
    op.create_table(
        "server_health_events",
        sa.Column("id", _ROW_ID, primary_key=True),
        sa.Column("server_url", sa.Text, nullable=False),
        sa.Column("from_state", sa.Text, nullable=False),
        sa.Column("to_state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("at", sa.DateTime, nullable=False),
    )
    op.create_index("server_health_events_server_url_at_idx", "server_health_events", ["server_url", "at"])
