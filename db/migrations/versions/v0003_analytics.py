"""The scorecards and the relay ranking that the analytics publish.

Revision ID: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    _create_server_scorecards()
    _create_relay_candidates()


def _create_server_scorecards() -> None:
    op.create_table(
        "server_scorecards",
        sa.Column("server_url", sa.Text, primary_key=True),
        sa.Column("window_days", sa.Integer, primary_key=True),
        sa.Column("as_of", sa.Date, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("delivered", sa.BigInteger, nullable=False),
        sa.Column("availability", sa.Double),
        sa.Column("score", sa.Double),
        sa.Column("p95_ms", sa.Integer),
        sa.Column("failures", sa.Integer),
        sa.Column("mttf_s", sa.Double),
        sa.Column("mttr_s", sa.Double),
        sa.Column("longest_outage_s", sa.Double),
        sa.Column("trend", sa.Text),
        sa.Column("trend_change", sa.Double),
        sa.Column("state", sa.Text),
        sa.Column("state_since", sa.DateTime),
        sa.Column("top_error", sa.Text),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("reasons", sa.JSON, nullable=False),
    )


def _create_relay_candidates() -> None:
    op.create_table(
        "relay_candidates",
        sa.Column("server_url", sa.Text, primary_key=True),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("as_of", sa.Date, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("score", sa.Double, nullable=False),
        sa.Column("availability", sa.Double),
        sa.Column("p95_ms", sa.Integer),
        sa.Column("last_seen", sa.DateTime),
    )
    op.create_index("relay_candidates_rank_idx", "relay_candidates", ["rank"])
