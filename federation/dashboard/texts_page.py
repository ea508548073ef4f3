"""The text of one delivery, for an operator who asks for it, where the dashboard was started to show texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from federation.admin.texts import show_text
from federation.dashboard.delivery_calls import DeliveryAsked, DeliveryText
from federation.dashboard.delivery_pages import DELIVERIES
from federation.dashboard.orders import api_order, ordered
from workers.dashboard.calls import AnyCall, Call, Caller
from workers.dashboard.site import SitePart
from workers.dashboard.text import short
from workers.dashboard.visit import Refusal, Visit

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

ACTION: Final = "deliveries payload"
PAGE: Final = "/delivery/payload"
LONGEST: Final = 60_000
"""How many characters a page shows; the API has all of them."""


def texts_part(federation: Federation) -> SitePart:
    """Return the page and the call. Both are `POST`: a text is shown because somebody asked, and that is recorded."""

    async def page(visit: Visit) -> Response:
        delivery_id = visit.carried("id")
        text = await show_text(federation.database, delivery_id, order=ordered(visit, ACTION, ids=[delivery_id]))
        if text is None:
            raise Refusal(404, f"Delivery {short(delivery_id)} has no text any more.")
        shown = {"here": DELIVERIES.path, "id": delivery_id, "text": text[:LONGEST], "is_cut": len(text) > LONGEST}
        return visit.page("payload.html", shown)

    return SitePart(actions={PAGE: page}, calls=_calls(federation))


def _calls(federation: Federation) -> Sequence[AnyCall]:
    async def text_of(caller: Caller, asked: DeliveryAsked) -> DeliveryText:
        text = await show_text(federation.database, asked.id, order=api_order(caller, ACTION, ids=[asked.id]))
        if text is None:
            raise Refusal(404, "The delivery has no text any more.")
        return DeliveryText(id=asked.id, text=text)

    summary = "Show the text of a delivery, which is recorded."
    return (Call(method="POST", path=PAGE, summary=summary, asks=DeliveryAsked, answers=DeliveryText, code=text_of),)
