"""Which of our key pairs a server knows, and what became of asking it to take the new one.

Nullable: the original implementation inserts rows that do not name them.

Revision ID: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("server_registry", sa.Column("knows_key", sa.Text))
    op.add_column("server_registry", sa.Column("rotation_tried_at", sa.DateTime))
    op.add_column("server_registry", sa.Column("rotation_problem", sa.Text))
