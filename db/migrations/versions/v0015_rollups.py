"""What is counted ahead of time, and indexes for lists of deliveries that go on from a key.

`delivery_jobs_state_idx` replaces the partial indexes of ready and of held deliveries by age: lists need the id behind
the time, because a fan-out makes thousands of deliveries at one time.

Revision ID: 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

_SORTS = ("owed", "held", "given_up", "score")


def upgrade() -> None:
    op.create_table(
        "rollup_positions",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("upto", sa.BigInteger),
        sa.Column("horizon", sa.BigInteger),
    )
    op.create_table(
        "attempt_minutes",
        sa.Column("minute", sa.DateTime, primary_key=True),
        sa.Column("outcome", sa.Text, primary_key=True),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("latencies", sa.JSON, nullable=False),
    )
    op.create_table(
        "delivery_totals",
        sa.Column("state", sa.Text, primary_key=True),
        sa.Column("held_reason", sa.Text, primary_key=True),
        sa.Column("deliveries", sa.BigInteger, nullable=False),
        sa.Column("counted_at", sa.DateTime, nullable=False),
    )
    _create_server_summaries()
    _index_deliveries()


def _create_server_summaries() -> None:
    table = "server_summaries"
    op.create_table(
        table,
        sa.Column("server_url", sa.Text, primary_key=True),
        sa.Column("link", sa.Text, nullable=False),
        sa.Column("link_since", sa.DateTime),
        sa.Column("advice", sa.Text, nullable=False),
        sa.Column("score", sa.Double, nullable=False),
        *(
            sa.Column(name, sa.BigInteger, nullable=False)
            for name in ("ready", "held", "owed", "failed", "expired", "given_up")
        ),
        sa.Column("oldest_at", sa.DateTime),
    )
    op.create_index(f"{table}_link_idx", table, ["link", "server_url"])
    op.create_index(f"{table}_advice_idx", table, ["advice", "server_url"])
    for name in _SORTS:
        op.create_index(f"{table}_{name}_idx", table, [name, "server_url"])
        op.create_index(f"{table}_link_{name}_idx", table, ["link", name, "server_url"])
        op.create_index(f"{table}_advice_{name}_idx", table, ["advice", name, "server_url"])


def _index_deliveries() -> None:
    table = "delivery_jobs"
    op.create_index(f"{table}_state_idx", table, ["state", "created_at", "id"])
    op.create_index(f"{table}_server_idx", table, ["server_url", "state", "created_at", "id"])
    _partial(f"{table}_code_idx", table, ["error_code", "created_at", "id"], "error_code IS NOT NULL")
    op.drop_index(f"{table}_ready_idx", table)
    op.drop_index(f"{table}_held_age_idx", table)
    # SQLite, which takes the index that more conditions are about, would take one of the above for what is released.
    op.drop_index(f"{table}_held_idx", table)
    op.drop_index(f"{table}_released_idx", table)
    _partial(f"{table}_held_idx", table, ["server_url", "state", "held_reason", "created_at"], "state = 'held'")
    _partial(f"{table}_released_idx", table, ["state", "released_at"], "released_at IS NOT NULL")


def _partial(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(name, table, columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))
