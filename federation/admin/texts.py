"""What a delivery says: its text, shown to an operator who asks for it, and never without a line in the audit log."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlmodel import col

from db import Database, DeliveryJob, DeliveryPayload
from federation.base.audit import Order, noted


async def show_text(database: Database, delivery_id: str, *, order: Order) -> str | None:
    """Return the text of a delivery; None if it has no row. That it was shown is written down with the reading."""
    own, shared = col(DeliveryJob.payload), col(DeliveryPayload.payload)
    query = (
        select(func.coalesce(shared, own))
        .select_from(DeliveryJob)
        .join(DeliveryPayload, col(DeliveryPayload.id) == col(DeliveryJob.payload_id), isouter=True)
        .where(col(DeliveryJob.id) == delivery_id)
    )
    async with database.transaction() as session:
        text = (await session.execute(query)).scalar_one_or_none()
        if text is not None:
            await session.execute(noted(order, affected=1))
    return text
