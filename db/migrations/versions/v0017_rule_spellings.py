"""An index of blacklist rules that may be spelt in another way than the canonical one.

Other programs write rules in spellings of their own. These few are looked at one by one, and all others are found by
their canonical spelling.

Revision ID: 0017
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"

_ON_SQLITE = (
    "server_url GLOB '*[^a-z0-9.:/*_-]*' OR server_url GLOB '*[/.]' OR server_url GLOB '*:*:*'"
    " OR ((server_url GLOB '*//[0-9]*' OR server_url GLOB '*.[0-9]*') AND server_url NOT GLOB '*.[a-z_-]*')"
)
_ON_POSTGRES = (
    """server_url COLLATE "C" ~ '[^a-z0-9.:/*_-]' OR server_url ~ '[/.]$' OR server_url ~ ':.*:'"""
    """ OR (server_url COLLATE "C" ~ '(//|[.])[0-9]' AND server_url COLLATE "C" !~ '[.][a-z_-]')"""
)


def upgrade() -> None:
    op.create_index(
        "blacklisted_servers_spelling_idx",
        "blacklisted_servers",
        ["id"],
        postgresql_where=sa.text(_ON_POSTGRES),
        sqlite_where=sa.text(_ON_SQLITE),
    )
