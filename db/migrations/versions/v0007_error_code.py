"""The code of what ended a delivery, in its row: a million of them are found, counted and chosen by it.

Nullable, as rows settled before have none.

Revision ID: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("delivery_jobs", sa.Column("error_code", sa.Text))
