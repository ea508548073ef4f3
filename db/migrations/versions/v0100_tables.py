"""Every table of the first release; a database of the original implementation has some of them already.

What is added to its tables is nullable or has a default, because it goes on inserting rows that do not name our
columns.

The numbers below this one are those of checkouts before the first release.

Revision ID: 0100
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from alembic import op

from db.migrations.original import create_original, extend_blacklist

revision = "0100"
down_revision = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    create_original()
    _extend_server_registry()
    extend_blacklist()
    _extend_delivery_jobs()
    _create_delivery_payloads()
    _create_delivery_attempts()
    _create_delivery_losses()
    _create_server_links()
    _create_server_health_events()
    _create_follow_news()
    _create_analytics()
    _create_operators()
    _create_rollups()
    _create_scheduling()
    _create_identity()
    _create_activitypub()


def _partial(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(name, table, columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))


def _add(table: str, columns: Iterable[sa.Column[Any]]) -> None:
    for column in columns:
        op.add_column(table, column)


def _extend_server_registry() -> None:
    _add(
        "server_registry",
        (
            sa.Column("knows_key", sa.Text),
            sa.Column("rotation_tried_at", sa.DateTime),
            sa.Column("rotation_problem", sa.Text),
            sa.Column("proved_at", sa.DateTime),
            sa.Column("claimed_by", sa.Text),
            sa.Column("claimed_at", sa.DateTime),
            sa.Column("claim_proved", sa.Boolean),
        ),
    )


def _extend_delivery_jobs() -> None:
    table = "delivery_jobs"
    _add(
        table,
        (
            *(sa.Column(name, sa.Text) for name in ("job_name", "server_url")),
            sa.Column("wire", sa.Text, nullable=False, server_default="sealed"),
            *(sa.Column(name, sa.DateTime) for name in ("queued_at", "settled_at")),
            *(sa.Column(name, sa.Text) for name in ("outcome", "last_error", "payload_id", "error_code")),
            sa.Column("state", sa.Text, nullable=False, server_default="ready"),
            sa.Column("held_reason", sa.Text),
            sa.Column("held_at", sa.DateTime),
            sa.Column("job_id", sa.Text),
            sa.Column("series", sa.Integer, nullable=False, server_default=sa.text("0")),
            sa.Column("sending", sa.Integer),
            *(sa.Column(name, sa.DateTime) for name in ("first_attempted_at", "released_at", "canary_at")),
            sa.Column("ordering_key", sa.Text),
            sa.Column("ordering_position", sa.BigInteger),
            sa.Column("holds", sa.Integer, nullable=False, server_default=sa.text("0")),
            sa.Column("suspect", sa.Integer),
            sa.Column("alone", sa.Integer, nullable=False, server_default=sa.text("0")),
            sa.Column("trace", sa.Text),
        ),
    )
    _partial(f"{table}_payload_id_idx", table, ["payload_id"], "payload_id IS NOT NULL")
    _partial(f"{table}_held_until_idx", table, ["next_attempt_at"], "state = 'held'")
    _partial(f"{table}_suspect_idx", table, ["suspect"], "suspect IS NOT NULL")
    order = ["ordering_key", "server_url", "ordering_position"]
    _partial(f"{table}_order_idx", table, order, "ordering_key IS NOT NULL")
    # Lists need the id behind the time, because a fan-out makes thousands of deliveries at one time.
    op.create_index(f"{table}_state_idx", table, ["state", "created_at", "id"])
    op.create_index(f"{table}_server_idx", table, ["server_url", "state", "created_at", "id"])
    _partial(f"{table}_code_idx", table, ["error_code", "created_at", "id"], "error_code IS NOT NULL")
    # With their state, because SQLite takes the index that more conditions are about: else one of the above.
    held = ["server_url", "state", "wire", "held_reason", "created_at"]
    _partial(f"{table}_held_idx", table, held, "state = 'held'")
    _partial(f"{table}_released_idx", table, ["state", "released_at"], "released_at IS NOT NULL")


def _create_delivery_payloads() -> None:
    op.create_table(
        "delivery_payloads",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("refs", sa.Integer, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("activity_id", sa.Text),
        sa.Column("actor", sa.Text),
    )
    _partial("delivery_payloads_activity_id_idx", "delivery_payloads", ["activity_id"], "activity_id IS NOT NULL")


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
        sa.Column("series", sa.Integer),
        sa.Column("remote_code", sa.Text),
        sa.Column("note", sa.Text),
        sa.Column("activity_id", sa.Text),
    )
    _partial("delivery_attempts_activity_id_idx", "delivery_attempts", ["activity_id"], "activity_id IS NOT NULL")
    op.create_index("delivery_attempts_started_at_idx", "delivery_attempts", ["started_at"])
    op.create_index("delivery_attempts_server_url_started_at_idx", "delivery_attempts", ["server_url", "started_at"])
    op.create_index(
        "delivery_attempts_number_uidx", "delivery_attempts", ["delivery_id", "series", "attempt"], unique=True
    )


def _create_delivery_losses() -> None:
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
    op.create_index("delivery_losses_lost_at_idx", "delivery_losses", ["lost_at"])


def _create_server_links() -> None:
    op.create_table(
        "server_links",
        sa.Column("server_url", sa.Text, primary_key=True),
        sa.Column("wire", sa.Text, primary_key=True, server_default="sealed"),
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
        sa.Column("probes", sa.Integer, nullable=False),
        sa.Column("next_probe_at", sa.DateTime),
        sa.Column("rests", sa.Integer, nullable=False),
        sa.Column("rest_until", sa.DateTime),
        sa.Column("release_start", sa.Float, nullable=False),
        sa.Column("release_rate", sa.Float, nullable=False),
        sa.Column("release_at", sa.DateTime),
        sa.Column("looked_at", sa.DateTime),
        sa.Column("profile", sa.Text),
        sa.Column("fell_at", sa.DateTime),
        sa.Column("canaries", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("probed_at", sa.DateTime),
        sa.Column("moved_to", sa.Text),
        sa.Column("look_ended_at", sa.DateTime),
        sa.Column("signature", sa.Text),
        sa.Column("first_answer_was_page", sa.Boolean),
    )
    _partial("server_links_probe_idx", "server_links", ["next_probe_at"], "next_probe_at IS NOT NULL")
    _partial("server_links_release_idx", "server_links", ["release_at"], "release_at IS NOT NULL")
    _partial("server_links_probed_idx", "server_links", ["probed_at"], "next_probe_at IS NOT NULL")


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
    op.create_index("server_health_events_at_idx", "server_health_events", ["at"])


def _create_follow_news() -> None:
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


def _create_analytics() -> None:
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
        sa.Column("owed", sa.BigInteger),
        sa.Column("held", sa.BigInteger),
        sa.Column("owed_since", sa.DateTime),
        sa.Column("lost", sa.BigInteger),
    )
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
    op.create_table(
        "accepted_keys",
        sa.Column("server_url", sa.Text, primary_key=True),
        sa.Column("fingerprint", sa.Text, primary_key=True),
        sa.Column("accepted_at", sa.DateTime, nullable=False),
    )


def _create_operators() -> None:
    op.create_table(
        "admin_actions",
        sa.Column("id", _ROW_ID, primary_key=True),
        sa.Column("at", sa.DateTime, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("arguments", sa.Text, nullable=False),
        sa.Column("server_url", sa.Text),
        sa.Column("affected", sa.BigInteger, nullable=False),
        sa.Column("finished_at", sa.DateTime),
        sa.Column("error", sa.Text),
    )
    op.create_index("admin_actions_at_idx", "admin_actions", ["at"])
    _partial("admin_actions_server_url_idx", "admin_actions", ["server_url", "id"], "server_url IS NOT NULL")
    op.create_table(
        "bulk_jobs",
        sa.Column("id", _ROW_ID, primary_key=True, autoincrement=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("verb", sa.Text, nullable=False),
        sa.Column("chosen", sa.JSON, nullable=False),
        sa.Column("total", sa.BigInteger),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("leased_until", sa.DateTime),
        sa.Column("finished_at", sa.DateTime),
        sa.Column("result", sa.JSON),
        sa.Column("error", sa.Text),
    )
    _partial("bulk_jobs_open_idx", "bulk_jobs", ["id"], "finished_at IS NULL")


def _create_rollups() -> None:
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
    for name in ("owed", "held", "given_up", "score"):
        op.create_index(f"{table}_{name}_idx", table, [name, "server_url"])
        op.create_index(f"{table}_link_{name}_idx", table, ["link", name, "server_url"])
        op.create_index(f"{table}_advice_{name}_idx", table, ["advice", name, "server_url"])


def _create_scheduling() -> None:
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


def _create_identity() -> None:
    # A copy of the database has the same identity: jobs are told apart by the node's URL as well.
    identity = op.create_table("database_identity", sa.Column("id", sa.Text, primary_key=True))
    assert identity is not None
    op.bulk_insert(identity, [{"id": str(uuid.uuid4())}])
    op.create_table(
        "queue_sightings",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("what", sa.Text, primary_key=True),
        sa.Column("seen_at", sa.DateTime, nullable=False),
    )


def _create_activitypub() -> None:
    op.create_table(
        "activitypub_actors",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("is_instance", sa.Boolean, nullable=False),
        sa.Column("removed_at", sa.DateTime),
    )
    op.create_index("activitypub_actors_name_idx", "activitypub_actors", ["name", "created_at"])
    op.create_table(
        "activitypub_keys",
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("actor_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("private", sa.Text, nullable=False),
        sa.Column("public_pem", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("use_from", sa.DateTime, nullable=False),
        sa.Column("retired_at", sa.DateTime),
    )
    op.create_index("activitypub_keys_actor_id_idx", "activitypub_keys", ["actor_id"])
    op.create_table(
        "activitypub_inboxes",
        sa.Column("url", sa.Text, primary_key=True),
        sa.Column("server_url", sa.Text, nullable=False),
        sa.Column("gone_at", sa.DateTime),
        sa.Column("gone_code", sa.Integer),
        sa.Column("missing_since", sa.DateTime),
        sa.Column("missing_last", sa.DateTime),
        sa.Column("is_shared", sa.Boolean, nullable=False),
        sa.Column("tried_at", sa.DateTime),
    )
    op.create_index("activitypub_inboxes_gone_at_idx", "activitypub_inboxes", ["gone_at"])
    _create_inbound_activitypub()


def _create_inbound_activitypub() -> None:
    op.create_table(
        "activitypub_received",
        sa.Column("number", _ROW_ID, primary_key=True),
        sa.Column("activity_hash", sa.Text, nullable=False),
        sa.Column("activity_id", sa.Text),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("received_at", sa.DateTime, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("last_error", sa.Text),
    )
    op.create_index("activitypub_received_hash_uidx", "activitypub_received", ["activity_hash"], unique=True)
    _partial("activitypub_received_open_idx", "activitypub_received", ["actor", "number"], "state = 'new'")
    _partial("activitypub_received_failed_idx", "activitypub_received", ["number"], "state = 'failed'")
    named = "activity_id IS NOT NULL"
    _partial("activitypub_received_activity_id_idx", "activitypub_received", ["activity_id"], named)
    op.create_index("activitypub_received_at_idx", "activitypub_received", ["received_at"])
    op.create_table(
        "activitypub_remote_keys",
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text),
        sa.Column("public_pem", sa.Text),
        sa.Column("fetched_at", sa.DateTime),
        sa.Column("refetched_at", sa.DateTime),
        sa.Column("failed_at", sa.DateTime),
    )
    op.create_index("activitypub_remote_keys_owner_idx", "activitypub_remote_keys", ["owner"])
    op.create_table(
        "activitypub_follows",
        sa.Column("local_actor", sa.Text, primary_key=True),
        sa.Column("remote_actor", sa.Text, primary_key=True),
        sa.Column("direction", sa.Text, primary_key=True),
        sa.Column("inbox", sa.Text, nullable=False),
        sa.Column("shared_inbox", sa.Text),
        sa.Column("follow_id", sa.Text),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("since", sa.DateTime, nullable=False),
    )
    op.create_index("activitypub_follows_remote_actor_idx", "activitypub_follows", ["remote_actor"])
