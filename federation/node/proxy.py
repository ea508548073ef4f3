"""`POST /proxy`: pass on what is sealed to others, and accept what others passed on to us."""

from __future__ import annotations

from typing import TypeVar

from starlette.responses import Response

from federation.node.forwarding import Forwarder
from federation.node.front import Inbound
from federation.node.refusals import invalid_proxy_data
from federation.node.targeted import TargetedInbox
from federation.protocol.errors import NotJson, PayloadError
from federation.protocol.models import WireModel, validate
from federation.protocol.relaying import ORIGIN_HEADER, PROXY, TARGETED, ProxyRequest, TargetedRequest

ModelT = TypeVar("ModelT", bound=WireModel)


class ProxyEndpoint:
    """Callable with a request to `/proxy` that was admitted (see `ProxyAdmission`)."""

    def __init__(self, *, forwarder: Forwarder, targeted: TargetedInbox) -> None:
        self._forwarder = forwarder
        self._targeted = targeted

    async def __call__(self, inbound: Inbound) -> Response:
        """Do what the request asks for.

        Raises:
            Refusal: it is not done.
        """
        bearer = inbound.headers.get(ORIGIN_HEADER, "")
        match inbound.value:
            case {"method": str(method)} if method == PROXY:
                request = _parse(ProxyRequest, inbound.value)
                return await self._forwarder(request, sender_url=bearer, client=inbound.client)
            case {"method": str(method)} if method == TARGETED:
                return await self._targeted(_parse(TargetedRequest, inbound.value), bearer_url=bearer)
            case NotJson() as error:
                raise invalid_proxy_data(f"body: {error}")
            case _:
                raise invalid_proxy_data(f"method: expected {PROXY} or {TARGETED}")


def _parse(model: type[ModelT], value: object) -> ModelT:
    try:
        return validate(model, value)
    except PayloadError as error:
        raise invalid_proxy_data(str(error)) from None
