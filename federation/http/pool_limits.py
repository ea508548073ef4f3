"""How many connections a node's process may need at once."""

from __future__ import annotations

from typing import Final

from federation.base.settings.settings import Settings
from federation.http.pool import PoolLimits

SPARE_CONNECTIONS: Final = 60
"""For the inbound side (16 callbacks, 24 forwards), a sweep (10) and producers, in addition to the workers' own."""


def pool_limits(settings: Settings) -> PoolLimits:
    """Return limits with room for every attempt and probe at once: waiting for one would count against the server."""
    attempts = (
        settings.federation_delivery_concurrency
        + 2 * settings.federation_overtime  # deliveries and discoveries each have that much room
        + settings.federation_health_concurrency
        + settings.federation_discovery_concurrency
    )
    return PoolLimits(
        connections=attempts + SPARE_CONNECTIONS,
        connections_per_server=settings.federation_per_server + settings.federation_health_concurrency + 1,
    )
