"""The dashboard of a node on its own port: as a process of its own, or beside what delivers and serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from federation.base.errors import ConfigurationError
from federation.base.settings.types import plain
from federation.dashboard.node_site import NodeSite
from workers.dashboard.access import Access, AccessError, TrustedProxy
from workers.dashboard.accounts import parse_accounts
from workers.dashboard.serving import DashboardServer, listen

if TYPE_CHECKING:
    from federation.base.settings.settings import Settings
    from federation.runtime.composition import Federation

log = structlog.get_logger(__name__)


class NodeDashboard:
    """Serves the dashboard from `serve` until `request_stop`. Its port is open from the beginning on.

    Raises:
        ConfigurationError: the settings let in whom they should not, or the port is taken.
    """

    def __init__(
        self, federation: Federation, *, port: int, allow_actions: bool = False, shows_texts: bool = False
    ) -> None:
        access = access_of(federation.settings, allow_actions=allow_actions)
        self._node = NodeSite(federation, access=access, shows_texts=shows_texts)
        try:
            self._listener = listen(access.bind, port)
        except OSError as error:
            at = f"{access.bind}:{port}"
            where = "--port or --dashboard-port, and FEDERATION_DASHBOARD_BIND"
            problem = f"the dashboard, by {where}: cannot listen on {at}: {error.strerror}"
            raise ConfigurationError([problem]) from error
        site = self._node.site
        self._server = DashboardServer(site.app, before_stop=site.feed.end_streams, behind_proxy=access.is_behind_proxy)
        host = f"[{access.bind}]" if ":" in access.bind else access.bind
        self.url = access.url or f"http://{host}:{self._listener.getsockname()[1]}"
        self._asks = not access.is_open

    async def serve(self) -> None:
        """Serve until asked to stop."""
        log.info("dashboard_serving", url=self.url, asks_for_login=self._asks)
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            self._listener.close()
            await self._node.close()

    def request_stop(self) -> None:
        """End the open pages' streams, and accept no more connections."""
        self._server.request_stop()


def access_of(settings: Settings, *, allow_actions: bool) -> Access:
    """Return the rules that the settings make.

    Raises:
        ConfigurationError: they let in whom they should not.
    """
    secret = plain(settings.federation_dashboard_proxy_secret)
    networks = settings.federation_dashboard_proxies
    accounts = plain(settings.federation_dashboard_accounts) or ""
    if secret is not None and not networks:
        raise ConfigurationError(
            ["FEDERATION_DASHBOARD_PROXIES: name the proxy that says who asks; its secret alone proves no address"]
        )
    if networks and secret is None and not accounts:
        raise ConfigurationError(
            [
                "FEDERATION_DASHBOARD_PROXIES: nobody says who asks: set FEDERATION_DASHBOARD_PROXY_SECRET if the "
                "proxy says so, or FEDERATION_DASHBOARD_ACCOUNTS"
            ]
        )
    try:
        return Access(
            accounts=parse_accounts(accounts),
            proxy=None if secret is None else TrustedProxy(networks=networks, secret=secret),
            proxies=networks,
            allow_actions=allow_actions,
            url=settings.federation_dashboard_url,
            bind=settings.federation_dashboard_bind,
        )
    except AccessError as error:
        raise ConfigurationError([f"FEDERATION_DASHBOARD_BIND, FEDERATION_DASHBOARD_URL: {error}"]) from None
    except ValueError as error:
        raise ConfigurationError([f"FEDERATION_DASHBOARD_ACCOUNTS: {error}"]) from None
