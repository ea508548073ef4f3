"""`federation dashboard` as its user meets it: a process that serves until it is stopped, or says why it does not."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest

from federation.base.errors import ConfigurationError
from federation.dashboard.serving import access_of
from tests import warm
from tests.federation.conftest import MakeSettings
from tests.patience import PATIENCE_SECONDS, eventually
from tests.security.doors import idle_connections
from tests.servers import free_port
from tests.workers.dashboard.conftest import ACCOUNTS

SECRET = "0123456789abcdef-shared"


async def command(directory: Path, *arguments: str, text: bytes | None = None) -> tuple[int | None, str, str]:
    """How the command ended, and what it wrote."""
    process = await started(directory, *arguments)
    async with asyncio.timeout(PATIENCE_SECONDS):
        out, err = await process.communicate(text)
    return process.returncode, out.decode(), err.decode()


async def started(directory: Path, *arguments: str, **variables: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(warm.PYTHON, "-m", "federation", *arguments),
        cwd=directory,
        env={**os.environ, **variables},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.fixture
async def node(empty_environment: Path) -> Path:
    """A node's folder."""
    status, _, err = await command(empty_environment, "init", "--url", f"http://127.0.0.1:{free_port()}")
    assert status == 0, err
    return empty_environment


@pytest.mark.parametrize("words", [["dashboard", "--port"], ["workers", "run", "--show-payloads", "--dashboard-port"]])
async def test_it_serves_until_it_is_stopped(node: Path, words: list[str]) -> None:
    """By itself, or beside what delivers, with the same options; an open page does not keep it from ending."""
    port = free_port()
    process = await started(node, *words, str(port))

    async def answers() -> int:
        try:
            return (await client.get(f"http://127.0.0.1:{port}/queues")).status_code
        except httpx.ConnectError:
            assert process.returncode is None
            return 0

    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        await eventually(answers, lambda status: status == 200)
        described = (await client.get(f"http://127.0.0.1:{port}/api/v1/openapi.json")).json()
        assert ("/api/v1/delivery/payload" in described["paths"]) is ("--show-payloads" in words)
        async with client.stream("GET", f"http://127.0.0.1:{port}/live?topic=queues") as stream:
            assert stream.status_code == 200
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_SECONDS):
                _, err = await process.communicate()
    assert process.returncode == 0
    assert b"dashboard_serving" in err


async def test_without_its_database_it_says_what_is_missing(node: Path) -> None:
    """From the start on, in one page and one line of the log; what delivers does not start."""
    port, away = free_port(), "postgresql://user:s3cret@127.0.0.1:1/nothing"
    process = await started(node, "dashboard", "--port", str(port), DATABASE_URL=away)
    page = f"http://127.0.0.1:{port}/deliveries"
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:

        async def answers() -> httpx.Response | None:
            try:
                return await client.get(page)
            except httpx.ConnectError:
                assert process.returncode is None
                return None

        answer = await eventually(answers, bool)
    assert answer is not None
    assert answer.status_code == 503
    assert "It is nothing at 127.0.0.1:1, by DATABASE_URL" in answer.text
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_SECONDS):
        _, err = await process.communicate()
    assert process.returncode == 0
    assert b"database_away" in err
    assert b"Traceback" not in err
    assert b"s3cret" not in err + answer.content
    process = await started(node, "run", "--dashboard-port", str(port), DATABASE_URL=away)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await process.communicate()
    assert process.returncode == 2


async def test_idle_connections_to_it_leave_the_node_its_descriptors(node: Path) -> None:
    """Of a process that may have 300 files: inbound side and dashboard are served, and the log has a line a minute."""
    port, own = free_port(), free_port()
    with (node / ".env").open("a") as written:
        written.write(f"\nFEDERATION_PORT={own}\n")
    process = await started(node, "run", "--dashboard-port", str(port))
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:

        async def served(at: str) -> int:
            try:
                return (await client.get(at, headers={"connection": "close"})).status_code
            except httpx.TransportError:
                assert process.returncode is None
                return 0

        doors = [f"http://127.0.0.1:{port}/login", f"http://127.0.0.1:{own}/healthz"]
        for door in doors:
            await eventually(partial(served, door), bool)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (300, 300))
        async with idle_connections(port, 600), idle_connections(own, 300):
            for door in doors:  # whoever is answered comes after all of them
                await eventually(partial(served, door), bool)
            for _ in range(5):
                assert [await served(door) for door in doors] == [303, 200]
            assert len(os.listdir(f"/proc/{process.pid}/fd")) < 270
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_SECONDS):
            _, err = await process.communicate()
    assert process.returncode == 0
    assert b"out of system resource" not in err
    assert len(err.splitlines()) < 40, err[-3000:]


async def test_a_port_that_is_taken_is_named(node: Path) -> None:
    """With exit status 2, before anything runs."""
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        status, _, err = await command(node, "run", "--dashboard-port", str(port))
    assert status == 2
    assert f"cannot listen on 127.0.0.1:{port}" in err


async def test_what_a_delivery_says_is_shown_by_a_dashboard_only(node: Path) -> None:
    """Whoever asks for it without one has forgotten something."""
    status, _, err = await command(node, "run", "--show-payloads")
    assert status == 2
    assert "add --dashboard-port" in err


async def test_an_account_is_made_by_the_command(node: Path) -> None:
    """Its password comes from stdin, and is not shown; a token is shown once."""
    status, out, _ = await command(node, "dashboard", "--new-account", "anna", text=b"secret word\n")
    assert status == 0
    assert out.startswith("anna:operator:$argon2id$")
    assert "secret word" not in out
    status, out, err = await command(node, "dashboard", "--new-account", "wall", "--viewer", "--token")
    assert (status, out.startswith("wall:viewer:sha256:"), "shown once" in err) == (0, True, True)
    status, _, err = await command(node, "dashboard", "--new-account", "<b>", "--token")
    assert status == 2
    assert "name:role:hash" in err
    status, out, err = await command(node, "dashboard", "--new-account", "ben", "--viewer", text=b"")
    assert (status, out) == (2, "")
    assert "a password must have at least 8 characters" in err


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("federation_dashboard_bind", "0.0.0.0", "without an account it listens on loopback only"),
        ("federation_dashboard_accounts", "anna:s3cret", "FEDERATION_DASHBOARD_ACCOUNTS: the role of anna"),
        ("federation_dashboard_accounts", "anna:operator:$argon2id", "FEDERATION_DASHBOARD_ACCOUNTS: the hash of anna"),
        ("federation_dashboard_url", "ops.example", "https://dashboard.example"),
        ("federation_dashboard_proxy_secret", SECRET, "name the proxy that says who asks"),
        ("federation_dashboard_proxies", "10.0.0.5", "nobody says who asks"),
    ],
)
def test_settings_that_let_in_too_many_are_refused(
    make_settings: MakeSettings, setting: str, value: str, told: str
) -> None:
    """With the variable's name, and nothing secret."""
    with pytest.raises(ConfigurationError) as refused:
        access_of(make_settings(**{setting: value}), allow_actions=False)
    assert told in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_settings_make_the_rules(make_settings: MakeSettings) -> None:
    """Accounts, the proxy, and the name by which browsers ask."""
    accounts = " ".join(f"{each.name}:{each.role}:{each.hash}" for each in ACCOUNTS)
    settings = make_settings(
        federation_dashboard_accounts=accounts,
        federation_dashboard_proxies="10.0.0.5",
        federation_dashboard_proxy_secret=SECRET,
        federation_dashboard_url="https://ops.example",
    )
    access = access_of(settings, allow_actions=False)
    assert access.accounts == ACCOUNTS
    assert access.is_proxy(ip_address("10.0.0.5"))
    assert not access.is_open
    assert access.proxy is not None
    assert "ops.example" in access.hosts


def test_a_proxy_may_be_named_for_addresses_alone(make_settings: MakeSettings) -> None:
    """Where accounts let people in: it says then who asks by address, and not by name."""
    accounts = " ".join(f"{each.name}:{each.role}:{each.hash}" for each in ACCOUNTS)
    settings = make_settings(federation_dashboard_accounts=accounts, federation_dashboard_proxies="10.0.0.5")
    access = access_of(settings, allow_actions=False)
    assert access.proxy is None
    assert access.is_proxy(ip_address("10.0.0.5"))
    assert not access.is_proxy(ip_address("10.0.0.6"))
