"""Blacklist rules that end, in whatever spelling, and a revision that tells every process when they have changed.

Triggers keep the revision, because the original implementation and administrators with a database shell write to the
table as well. The first migration uses this as it is, so nothing here changes any more.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

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
