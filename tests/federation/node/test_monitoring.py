"""`/metrics`, `/healthz` and `/readyz` on the port that the world reaches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from ipaddress import ip_network

import httpx
import pytest
from structlog.testing import capture_logs

from db import create_host_tables
from federation.admin.doctor.checks import Verdict, proxies
from federation.delivery.sightings import MOST
from federation.monitoring.prometheus import ProcessMetrics
from federation.runtime.composition import Federation
from tests.federation.conftest import MakeSettings

Asks = dict[str, object]


@pytest.fixture
async def node(make_settings: MakeSettings, request: pytest.FixtureRequest) -> AsyncIterator[Federation]:
    """A node with metrics, a host's tables, and the settings a test asks for."""
    federation = Federation(make_settings(**getattr(request, "param", {})), metrics=ProcessMetrics())
    async with federation.database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)
    yield federation
    await federation.close()


def client(node: Federation, address: str) -> httpx.AsyncClient:
    """Requests come from *address*."""
    transport = httpx.ASGITransport(app=node.node_app(), client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="https://a.example")


async def test_metrics_are_nobodys_by_default(node: Federation) -> None:
    """Not loopback's either; the answer is that of any path there is not."""
    async with client(node, "127.0.0.1") as local:
        metrics, nothing = await local.get("/metrics"), await local.get("/nothing")
    assert (metrics.status_code, metrics.text) == (nothing.status_code, nothing.text) == (404, nothing.text)


READERS = {"federation_metrics_clients": "127.0.0.1, 10.1.0.0/16, 2001:db8::7"}
BESIDE_PROXY = {**READERS, "federation_trusted_proxies": "127.0.0.1, ::1"}
BEHIND_PROXY = {**READERS, "federation_trusted_proxies": "192.0.2.1"}


@pytest.mark.parametrize(
    ("node", "address", "headers", "status"),
    [
        (READERS, "127.0.0.1", {}, 200),
        (READERS, "10.1.2.3", {}, 200),
        (READERS, "2001:db8::7", {}, 200),
        (READERS, "::ffff:10.1.2.3", {}, 200),
        (READERS, "10.2.0.1", {}, 404),
        (READERS, "2001:db8::8", {}, 404),
        (READERS, "203.0.113.9", {"X-Forwarded-For": "127.0.0.1"}, 404),
        (READERS, "127.0.0.1", {"X-Forwarded-For": "203.0.113.9"}, 404),
        (READERS, "127.0.0.1", {"Via": "1.1 proxy"}, 404),
        (BEHIND_PROXY, "192.0.2.1", {"X-Forwarded-For": "10.1.2.3"}, 200),
        (BEHIND_PROXY, "192.0.2.1", {"X-Forwarded-For": "10.1.2.3, 203.0.113.9"}, 404),
        (BEHIND_PROXY, "192.0.2.1", {}, 404),
        (BESIDE_PROXY, "127.0.0.1", {}, 200),
        (BESIDE_PROXY, "::1", {}, 404),
        (BESIDE_PROXY, "127.0.0.1", {"X-Forwarded-For": "203.0.113.9"}, 404),
        (BESIDE_PROXY, "127.0.0.1", {"X-Forwarded-For": "127.0.0.1"}, 404),
        (BESIDE_PROXY, "127.0.0.1", {"X-Real-IP": "127.0.0.1"}, 404),
        (BESIDE_PROXY, "127.0.0.1", {"Via": "1.1 proxy"}, 404),
    ],
    indirect=["node"],
    ids=[
        "loopback",
        "network",
        "ipv6",
        "mapped",
        "other-network",
        "other-ipv6",
        "claims-loopback",
        "unnamed-proxy",
        "unnamed-proxy-via",
        "behind-proxy",
        "claims-through-proxy",
        "proxy-that-hides",
        "beside-proxy",
        "beside-proxy-unnamed",
        "through-local-proxy",
        "claims-through-local-proxy",
        "through-local-proxy-real-ip",
        "through-local-proxy-via",
    ],
)
async def test_metrics_are_for_those_who_are_named(
    node: Federation, address: str, headers: dict[str, str], status: int
) -> None:
    """By the address their connection comes from, or that a proxy of ours vouches for."""
    async with client(node, address) as asking:
        answer = await asking.get("/metrics", headers=headers)
    assert answer.status_code == status


@pytest.mark.parametrize("node", [READERS], indirect=True, ids=["readers"])
async def test_requests_are_counted_by_endpoint_and_class(node: Federation) -> None:
    """And those who watch are not."""
    async with client(node, "127.0.0.1") as local:
        await local.get("/discover")
        await local.post("/discover", content=b"nonsense")
        await local.get("/healthz")
        text = (await local.get("/metrics")).text
    assert 'federation_inbound_requests_total{endpoint="/discover",status="2xx"} 1.0' in text
    assert 'federation_inbound_requests_total{endpoint="/discover",status="4xx"} 1.0' in text
    assert "healthz" not in text


async def test_everybody_may_ask_how_it_is(node: Federation) -> None:
    """Alive and ready, in JSON that no cache keeps."""
    async with client(node, "203.0.113.9") as stranger:
        alive, ready = await stranger.get("/healthz"), await stranger.get("/readyz")
    assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
    assert (ready.status_code, ready.json()["status"]) == (200, "ok")
    assert ready.headers["cache-control"] == "no-store"


async def test_a_proxy_that_nobody_named_is_logged_once_and_found_by_the_doctor(node: Federation) -> None:
    """With the setting to write; once it is named there is nothing to find."""
    headers = {"X-Forwarded-For": "203.0.113.9"}
    with capture_logs() as logs:
        for address in ("10.0.0.7", "10.0.0.7", "fd00::1", *(f"10.0.1.{number}" for number in range(50))):
            async with client(node, address) as proxy:
                await proxy.post("/discover", content=b"{}", headers=headers)
        await node.unnamed_proxies.close()
    told = [each for each in logs if each["event"] == "proxy_not_named"]
    assert [each["setting"] for each in told[:2]] == [
        "FEDERATION_TRUSTED_PROXIES=10.0.0.7",
        "FEDERATION_TRUSTED_PROXIES=fd00::1",
    ]
    assert len(told) == MOST
    found = await proxies(node)
    assert (found.verdict, "10.0.0.7, 10.0.1.0" in found.found) == (Verdict.WARNING, True)
    assert "FEDERATION_TRUSTED_PROXIES=10.0.0.7,10.0.1.0," in found.advice
    named = node.settings.model_copy(
        update={"federation_trusted_proxies": (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))}
    )
    node.settings = named
    assert (await proxies(node)).verdict is Verdict.OK


@pytest.mark.parametrize("node", [{"federation_trusted_proxies": "10.0.0.7"}], indirect=True)
async def test_those_behind_a_proxy_that_does_not_say_for_whom_it_asks_are_one_client(node: Federation) -> None:
    """They are limited together, not unlimited; who is named by it has a window of its own."""
    async with client(node, "10.0.0.7") as proxy:
        answers = [(await proxy.post("/discover", content=b"{}")).status_code for _ in range(11)]
        hidden = await proxy.post("/discover", content=b"{}", headers={"X-Forwarded-For": "8.8.8.8, unknown"})
        named = await proxy.post("/discover", content=b"{}", headers={"Forwarded": "for=8.8.8.8"})
    assert (answers, hidden.status_code, named.status_code) == ([400] * 10 + [429], 429, 400)
