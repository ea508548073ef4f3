"""Who does nothing but cost is turned away, and nobody else with it."""

from __future__ import annotations

from ipaddress import ip_network

from structlog.testing import capture_logs

from federation.node.app import FOLLOWS_PATH
from federation.node.clients import KEEP_PROVED, MAX_CLIENTS, REFUSALS, WINDOW, ClientStanding
from tests.federation.node.conftest import Node, serving
from tests.federation.node.remote_server import RemoteServer

JSON = {"Content-Type": "application/json"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refuse(standing: ClientStanding, client: str, times: int = REFUSALS, status: int = 403) -> None:
    for _ in range(times):
        standing.refused(client, status)


def test_refusals_bar_a_client_until_it_has_kept_quiet() -> None:
    """So many within the window; who goes on trying stays barred."""
    clock = Clock()
    standing = ClientStanding(clock)
    refuse(standing, "192.0.2.1", REFUSALS - 1)
    assert not standing.turns_away("192.0.2.1")
    refuse(standing, "192.0.2.1", 1)
    for _ in range(3 * REFUSALS):
        clock.now += WINDOW.total_seconds() / REFUSALS / 2
        assert standing.turns_away("192.0.2.1")
    assert not standing.turns_away("192.0.2.2")
    clock.now += WINDOW.total_seconds()
    assert not standing.turns_away("192.0.2.1")


def test_refusals_that_servers_get_every_day_bar_nobody() -> None:
    """A user that is not there, a conflict, a database that is away."""
    standing = ClientStanding(Clock())
    for status in (404, 409, 500, 503):
        refuse(standing, "192.0.2.1", status=status)
    assert not standing.turns_away("192.0.2.1")


def test_bodies_that_never_end_bar_a_client() -> None:
    """As other refusals do that are the client's fault."""
    standing = ClientStanding(Clock())
    refuse(standing, "192.0.2.1", status=408)
    assert standing.turns_away("192.0.2.1")


def test_who_brought_something_is_not_barred_for_an_hour() -> None:
    """Others may be behind the same address."""
    clock = Clock()
    standing = ClientStanding(clock)
    refuse(standing, "192.0.2.1")
    standing.proved("192.0.2.1")
    refuse(standing, "192.0.2.1")
    assert not standing.turns_away("192.0.2.1")
    clock.now += KEEP_PROVED.total_seconds()
    refuse(standing, "192.0.2.1")
    assert standing.turns_away("192.0.2.1")


def test_what_is_remembered_is_bounded() -> None:
    """The clients heard of least recently are forgotten."""
    standing = ClientStanding(Clock())
    refuse(standing, "first")
    for number in range(MAX_CLIENTS):
        standing.refused(f"client-{number}", 403)
    assert not standing.turns_away("first")


async def test_a_barred_client_is_told_so_and_logged_once(node: Node) -> None:
    """Its requests are not even read."""
    with capture_logs() as logs:
        answers = [await node.send(FOLLOWS_PATH, b"{", JSON) for _ in range(REFUSALS + 3)]
    assert [answer.status_code for answer in answers] == [400] * REFUSALS + [429] * 3
    assert answers[-1].headers["Retry-After"] == str(round(WINDOW.total_seconds()))
    events = [line["event"] for line in logs]
    assert (events.count("inbound_refused"), events.count("client_barred")) == (REFUSALS, 1)


async def test_a_server_that_brought_a_delivery_is_heard_beside_any_number_of_bad_ones(
    node: Node, peer: RemoteServer
) -> None:
    """From the same address."""
    assert (await node.follow(peer)).status_code == 200
    for _ in range(REFUSALS + 1):
        assert (await node.send(FOLLOWS_PATH, b"{", JSON)).status_code == 400
    assert (await node.post(peer)).status_code == 200


async def test_behind_a_proxy_clients_are_told_apart(database_url: str) -> None:
    """And behind one that nobody named none is barred."""
    for proxies, status in (([ip_network("10.0.0.0/8")], 429), ([], 400)):
        async with serving(database_url, proxies=proxies, client_address="10.0.0.1") as visited:
            for _ in range(REFUSALS):
                await visited.send(FOLLOWS_PATH, b"{", {**JSON, "X-Forwarded-For": "192.0.2.1"})
            bad = await visited.send(FOLLOWS_PATH, b"{", {**JSON, "X-Forwarded-For": "192.0.2.1"})
            other = await visited.send(FOLLOWS_PATH, b"{", {**JSON, "X-Forwarded-For": "192.0.2.2"})
        assert (bad.status_code, other.status_code) == (status, 400)
