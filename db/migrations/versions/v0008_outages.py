"""Deliveries that wait for their server: states of rows, links to servers, attempts told apart by their series.

Columns of `delivery_jobs` are nullable or have a default: the original implementation and earlier versions of this one
keep inserting rows that do not name them. What was given up in the last week only because its server could not be
reached is owed again.

Revision ID: 0008
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

ADOPTED_AGE = timedelta(days=7)
"""How long failed rows are kept, so that none is older than its text."""

_UNAVAILABLE = (
    *("DNS_BLOCKED", "TIMEOUT", "CONN_REFUSED", "CONN_RESET", "TLS_ERROR", "INVALID_RESPONSE_FROM_TARGET", "UNKNOWN"),
    # Of a discovery these versions did not tell what it failed for: nearly always the network.
    *("DISCOVERY", "HTTP_408", "HTTP_425"),
)


def upgrade() -> None:
    _extend_delivery_jobs()
    op.add_column("delivery_attempts", sa.Column("series", sa.Integer))
    op.add_column("delivery_attempts", sa.Column("remote_code", sa.Text))
    op.create_index(
        "delivery_attempts_number_uidx", "delivery_attempts", ["delivery_id", "series", "attempt"], unique=True
    )
    _create_server_links()
    _adopt_rows()
    _create_indexes()


def _extend_delivery_jobs() -> None:
    for column in (
        sa.Column("state", sa.Text, nullable=False, server_default="ready"),
        sa.Column("held_reason", sa.Text),
        sa.Column("held_at", sa.DateTime),
        sa.Column("job_id", sa.Text),
        sa.Column("series", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("sending", sa.Integer),
        sa.Column("first_attempted_at", sa.DateTime),
        sa.Column("released_at", sa.DateTime),
        sa.Column("canary_at", sa.DateTime),
        sa.Column("ordering_key", sa.Text),
        sa.Column("ordering_position", sa.BigInteger),
        sa.Column("holds", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("suspect", sa.Integer),
    ):
        op.add_column("delivery_jobs", column)


def _create_server_links() -> None:
    op.create_table(
        "server_links",
        sa.Column("server_url", sa.Text, primary_key=True),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("since", sa.DateTime, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("operator_hold", sa.Boolean, nullable=False),
        sa.Column("relayed", sa.Boolean, nullable=False),
        sa.Column("acknowledged", sa.Boolean, nullable=False),
        sa.Column("evidence", sa.Integer, nullable=False),
        sa.Column("evidence_at", sa.DateTime),
        sa.Column("last_success_at", sa.DateTime),
        sa.Column("rejections", sa.Integer, nullable=False),
        sa.Column("needs_canary", sa.Boolean, nullable=False),
        sa.Column("probes", sa.Integer, nullable=False),
        sa.Column("next_probe_at", sa.DateTime),
        sa.Column("rests", sa.Integer, nullable=False),
        sa.Column("rest_until", sa.DateTime),
        sa.Column("release_start", sa.Float, nullable=False),
        sa.Column("release_rate", sa.Float, nullable=False),
        sa.Column("release_at", sa.DateTime),
        sa.Column("looked_at", sa.DateTime),
        sa.Column("profile", sa.Text),
    )
    _partial("server_links_probe_idx", "server_links", ["next_probe_at"], "next_probe_at IS NOT NULL")
    _partial("server_links_release_idx", "server_links", ["release_at"], "release_at IS NOT NULL")


def _adopt_rows() -> None:
    rows = sa.table(
        "delivery_jobs",
        *(sa.column(name, sa.Text) for name in ("job_name", "state", "held_reason", "error_code", "outcome")),
        *(sa.column(name, sa.DateTime) for name in ("settled_at", "held_at", "next_attempt_at")),
    )
    now = datetime.now(UTC).replace(tzinfo=None)
    op.execute(rows.update().where(rows.c.settled_at.is_not(None)).values(state="failed"))
    reason = sa.case(
        (rows.c.error_code == "HTTP_429", "rest"), (rows.c.error_code == "STALLED", "ours"), else_="server"
    )
    release_at = sa.case((rows.c.error_code.in_(("HTTP_429", "STALLED")), sa.literal(now, sa.DateTime)))
    owed_again = (
        rows.update()
        .where(
            rows.c.job_name.is_not(None),
            rows.c.settled_at > now - ADOPTED_AGE,
            sa.or_(
                rows.c.error_code.in_((*_UNAVAILABLE, "HTTP_429", "STALLED")),
                rows.c.error_code.like("HTTP\\_5%", escape="\\"),
            ),
        )
        .values(
            state="held", held_reason=reason, held_at=now, next_attempt_at=release_at, settled_at=None, outcome=None
        )
    )
    op.execute(owed_again)


def _create_indexes() -> None:
    table = "delivery_jobs"
    op.drop_index("delivery_jobs_open_idx", table)
    _partial("delivery_jobs_ready_idx", table, ["created_at"], "state = 'ready' AND settled_at IS NULL")
    _partial("delivery_jobs_held_idx", table, ["server_url", "held_reason", "created_at"], "state = 'held'")
    _partial("delivery_jobs_held_age_idx", table, ["created_at"], "state = 'held'")
    _partial("delivery_jobs_held_until_idx", table, ["next_attempt_at"], "state = 'held'")
    _partial("delivery_jobs_suspect_idx", table, ["suspect"], "suspect IS NOT NULL")
    _partial("delivery_jobs_released_idx", table, ["released_at"], "released_at IS NOT NULL")
    order = ["ordering_key", "server_url", "ordering_position"]
    _partial("delivery_jobs_order_idx", table, order, "ordering_key IS NOT NULL")


def _partial(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(name, table, columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))
