"""The tables that a federation node has always had: made where the original implementation has not made them.

And what the original's table of blacklist rules is given: rules that end, in whatever spelling, and a revision that
tells every process when they have changed. Triggers keep the revision, because the original implementation and
administrators with a database shell write to the table as well.

The first migration uses all of this as it is, so nothing here changes any more.
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


# Other programs write rules in spellings of their own. These few are looked at one by one, and all others are found by
# their canonical spelling.
_MISSPELT_ON_SQLITE = (
    "server_url GLOB '*[^a-z0-9.:/*_-]*' OR server_url GLOB '*[/.]' OR server_url GLOB '*:*:*'"
    " OR ((server_url GLOB '*//[0-9]*' OR server_url GLOB '*.[0-9]*') AND server_url NOT GLOB '*.[a-z_-]*')"
)
_MISSPELT_ON_POSTGRES = (
    """server_url COLLATE "C" ~ '[^a-z0-9.:/*_-]' OR server_url ~ '[/.]$' OR server_url ~ ':.*:'"""
    """ OR (server_url COLLATE "C" ~ '(//|[.])[0-9]' AND server_url COLLATE "C" !~ '[.][a-z_-]')"""
)

# The owner's rights, because the role of another process need not know our table. Once per transaction, because each
# update of one row has to step over all earlier ones of its transaction: a hundred thousand inserts would never end.
_POSTGRES_FUNCTION = """
CREATE FUNCTION blacklist_changed() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF current_setting('federation.blacklist_changed_in', true) IS DISTINCT FROM txid_current()::text THEN
        EXECUTE format('UPDATE %I.blacklist_revision SET revision = revision + 1', TG_TABLE_SCHEMA);
        PERFORM set_config('federation.blacklist_changed_in', txid_current()::text, true);
    END IF;
    RETURN NULL;
END $$
"""

# Before the rows are touched: whoever changes the table takes the revision's lock first, so none wait in a circle.
_POSTGRES_TRIGGER = """
CREATE TRIGGER blacklist_changed BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON blacklisted_servers
FOR EACH STATEMENT EXECUTE FUNCTION blacklist_changed()
"""

_SQLITE_TRIGGER = """
CREATE TRIGGER blacklist_{name} AFTER {change} ON blacklisted_servers
BEGIN
    UPDATE blacklist_revision SET revision = revision + 1;
END
"""


def extend_blacklist() -> None:
    """Give the original table what is ours; its rows do not name `expires_at`, which is nullable."""
    op.add_column("blacklisted_servers", sa.Column("expires_at", sa.DateTime))
    op.create_index(
        "blacklisted_servers_spelling_idx",
        "blacklisted_servers",
        ["id"],
        postgresql_where=sa.text(_MISSPELT_ON_POSTGRES),
        sqlite_where=sa.text(_MISSPELT_ON_SQLITE),
    )
    table = op.create_table(
        "blacklist_revision",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.bulk_insert(table, [{"id": 1, "revision": 0}])
    if op.get_bind().dialect.name == "postgresql":
        op.execute(_POSTGRES_FUNCTION)
        op.execute(_POSTGRES_TRIGGER)
    else:
        for change in ("INSERT", "UPDATE", "DELETE"):
            op.execute(_SQLITE_TRIGGER.format(change=change, name=change.lower()))
