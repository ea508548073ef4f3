"""A site, as the engine's tests have it."""

from __future__ import annotations

from tests.federation.delivery.conftest import settings, site

__all__ = ["settings", "site"]
