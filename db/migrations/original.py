"""The tables that a federation node has always had: made where the original implementation has not made them.

The first migration uses them as they are, so nothing here changes any more.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op


def create_original() -> None:
    """Make those that are missing; the others keep their rows."""
    existing = set(sa.inspect(op.get_bind()).get_table_names())
    for name, create in _TABLES.items():
        if name not in existing:
            create()


def _server_registry() -> None:
    op.create_table(
        "server_registry",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("public_key", sa.Text, nullable=False),
        sa.Column("encryption_public_key", sa.Text, nullable=False),
        sa.Column("last_seen", sa.DateTime, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("updated_at", sa.DateTime, nullable=False),
        sa.Column("is_healthy", sa.Boolean, nullable=False),
        sa.Column("health_check_attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("unhealthy_reason", sa.Text),
        sa.UniqueConstraint("url", name="server_registry_url_unique"),
        sa.UniqueConstraint("public_key", name="server_registry_public_key_unique"),
        sa.UniqueConstraint("encryption_public_key", name="server_registry_encryption_public_key_unique"),
    )
    op.create_index("serverRegistry_publicKey_uidx", "server_registry", ["public_key"], unique=True)
    op.create_index(
        "serverRegistry_encryptionPublicKey_uidx", "server_registry", ["encryption_public_key"], unique=True
    )
    op.create_index("serverRegistry_lastSeen_idx", "server_registry", ["last_seen"])


def _delivery_jobs() -> None:
    op.create_table(
        "delivery_jobs",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("target_url", sa.Text, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("last_attempted_at", sa.DateTime),
        sa.Column("next_attempt_at", sa.DateTime),
        sa.Column("created_at", sa.DateTime, nullable=False),
    )


def _blacklisted_servers() -> None:
    op.create_table(
        "blacklisted_servers",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("server_url", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
    )
    op.create_index("blacklistedServers_serverUrl_idx", "blacklisted_servers", ["server_url"])


def _rotate_challenge_tokens() -> None:
    op.create_table(
        "rotate_challenge_tokens",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("signing_old_token", sa.Text, nullable=False),
        sa.Column("signing_new_token", sa.Text, nullable=False),
        sa.Column("encryption_old_token", sa.Text, nullable=False),
        sa.Column("encryption_new_token", sa.Text, nullable=False),
        sa.Column("new_signing_public_key", sa.Text, nullable=False),
        sa.Column("new_encryption_public_key", sa.Text, nullable=False),
        sa.Column("server_url", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("attempts_left", sa.Integer, nullable=False, server_default=sa.text("3")),
        sa.Column("expires_at", sa.DateTime, nullable=False),
    )
    op.create_index("rotateChallengeTokens_serverUrl_idx", "rotate_challenge_tokens", ["server_url"])


def _follows() -> None:
    op.create_table(
        "follows",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("follower_id", sa.Text, nullable=False),
        sa.Column("following_id", sa.Text, nullable=False),
        sa.Column("accepted", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("follower_server_url", sa.Text),
        sa.Column("following_server_url", sa.Text),
        sa.Column("acknowledged", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("requester_signature", sa.Text),
        sa.Column("responder_signature", sa.Text),
        sa.ForeignKeyConstraint(
            ["follower_server_url"],
            ["server_registry.url"],
            name="follows_follower_server_url_server_registry_url_fk",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["following_server_url"],
            ["server_registry.url"],
            name="follows_following_server_url_server_registry_url_fk",
            ondelete="CASCADE",
        ),
    )
    op.create_index("follows_followerServerUrl_idx", "follows", ["follower_server_url"])
    op.create_index("follows_followingServerUrl_idx", "follows", ["following_server_url"])


# `follows` comes last: it references `server_registry`.
_TABLES = {
    "server_registry": _server_registry,
    "delivery_jobs": _delivery_jobs,
    "blacklisted_servers": _blacklisted_servers,
    "rotate_challenge_tokens": _rotate_challenge_tokens,
    "follows": _follows,
}
