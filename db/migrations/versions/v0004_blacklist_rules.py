"""Blacklist rules that expire, and a revision that tells every process when the rules have changed.

Triggers keep the revision, because the original implementation and administrators with a database shell write to the
table as well. `expires_at` is nullable: their rows do not name it.

Revision ID: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("blacklisted_servers", sa.Column("expires_at", sa.DateTime))
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
