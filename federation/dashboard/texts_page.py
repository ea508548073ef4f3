"""The text of one delivery, for an operator who asks for it, where the dashboard was started to show texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import func, select
from sqlmodel import col
from starlette.responses import Response

from db import Database, DeliveryJob, DeliveryPayload
from federation.base.audit import Order, noted
from federation.dashboard.delivery_pages import DELIVERIES
from federation.dashboard.orders import Node, api_order, ordered
from workers.dashboard.api import ApiAnswer, ApiOrder, Caller, Text, calls
from workers.dashboard.site import SitePart
from workers.dashboard.text import short
from workers.dashboard.visit import Refusal, Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

ACTION: Final = "deliveries payload"
PAGE: Final = "/delivery/payload"
LONGEST: Final = 60_000
"""How many characters a page shows; the API has all of them."""

api: Final = calls()


class NamedDelivery(ApiOrder):
    """One delivery."""

    id: Text


class DeliveryText(ApiAnswer):
    """What a delivery says, in whole."""

    id: str
    text: str


def texts_part(federation: Federation) -> SitePart:
    """Return the page and the call. Both are `POST`: a text is shown because somebody asked, and that is recorded."""

    async def page(visit: Visit) -> Response:
        delivery_id = visit.carried("id")
        text = await _text(federation.database, delivery_id, order=ordered(visit, ACTION, ids=[delivery_id]))
        if text is None:
            raise Refusal(404, f"Delivery {short(delivery_id)} has no text any more.")
        shown = {"here": DELIVERIES.path, "id": delivery_id, "text": text[:LONGEST], "is_cut": len(text) > LONGEST}
        return visit.page("payload.html", shown)

    return SitePart(actions={PAGE: page}, calls=api.routes)


@api.post(PAGE)
async def show_payload(node: Node, caller: Caller, asked: NamedDelivery) -> DeliveryText:
    """Show the text of a delivery, which is recorded."""
    text = await _text(node.database, asked.id, order=api_order(caller, ACTION, ids=[asked.id]))
    if text is None:
        raise Refusal(404, "The delivery has no text any more.")
    return DeliveryText(id=asked.id, text=text)


async def _text(database: Database, delivery_id: str, *, order: Order) -> str | None:
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
