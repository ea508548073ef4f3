"""Which servers have proved that they hold their keys, and who claimed one of them, too.

Nullable: the original implementation inserts rows that do not name them.

Revision ID: 0012
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("server_registry", sa.Column("proved_at", sa.DateTime))
    op.add_column("server_registry", sa.Column("claimed_by", sa.Text))
    op.add_column("server_registry", sa.Column("claimed_at", sa.DateTime))
    op.add_column("server_registry", sa.Column("claim_proved", sa.Boolean))
