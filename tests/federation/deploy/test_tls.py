"""The proxies that end TLS: run before a node as they are shipped, but for ports and certificate."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme

from federation.protocol.activities import MAX_REQUEST_BYTES
from tests.federation.deploy.places import DEPLOY, approve, tool
from tests.federation.deploy.test_scrape import running
from tests.federation.deploy.test_units import environment
from tests.federation.test_run import Folder
from tests.patience import PATIENCE_SECONDS, until
from tests.servers import free_port

TLS = DEPLOY / "tls"
NAME = "node.example"
CLIENT, OTHER = "127.0.0.2", "127.0.0.3"
"""Addresses of this machine that are no proxy's."""


def replaced(text: str, **changes: str) -> str:
    """The text with each of these in the place of what is there; what is not there fails the test."""
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def nginx(place: Path, node: str, port: str) -> tuple[str, ...]:
    """As `nginx.conf` includes it, in a folder of its own and in the foreground."""
    program = tool("nginx", package="nginx")
    certificate = "/etc/letsencrypt/live/node.example"
    server = replaced(
        (TLS / "nginx.conf").read_text(),
        **{
            "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
            "    listen [::]:443 ssl;\n": "",
            "127.0.0.1:8000": f"127.0.0.1:{node}",
            f"{certificate}/fullchain.pem": f"{place}/chain.pem",
            f"{certificate}/privkey.pem": f"{place}/key.pem",
        },
    )
    paths = "".join(
        f"{kind}_temp_path {place}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    kept = f"daemon off;\nmaster_process off;\npid {place}/pid;\nerror_log stderr;\n"
    (place / "proxy.conf").write_text(f"{kept}events {{}}\nhttp {{\naccess_log off;\n{paths}{server}}}\n")
    command = (program, "-p", str(place), "-e", "stderr", "-c", f"{place}/proxy.conf")
    approve(*command, "-t", cwd=place)
    return command


def caddy(place: Path, node: str, port: str) -> tuple[str, ...]:
    """With the certificate given, which it would get by itself for a name that the world knows."""
    program = tool("caddy", package="caddy")
    site = replaced(
        (TLS / "Caddyfile").read_text(),
        **{
            "{\n\tservers {": "{\n\tadmin off\n\tauto_https off\n\tservers {",
            "read_body 20s": "read_body 1s",
            f"{NAME} {{\n": f"https://{NAME}:{port} {{\n\ttls {place}/chain.pem {place}/key.pem\n",
            "127.0.0.1:8000": f"127.0.0.1:{node}",
        },
    )
    (place / "Caddyfile").write_text(site)
    command = (program, "run", "--config", f"{place}/Caddyfile", "--adapter", "caddyfile")
    approve(program, "validate", *command[2:], cwd=place, HOME=str(place))
    return command


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(params=[nginx, caddy], ids=lambda start: start.__name__)
async def port(
    request: pytest.FixtureRequest,
    folder: Folder,
    tmp_path: Path,
    authority: trustme.CA,
) -> AsyncIterator[str]:
    """A proxy before a node with the settings of the shipped unit, that shows its metrics to one client."""
    place, node, own = tmp_path / "proxy", str(free_port()), str(free_port())
    place.mkdir()
    certificate = authority.issue_cert(NAME)
    certificate.private_key_pem.write_to_path(place / "key.pem")
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(place / "chain.pem", append=True)
    command = request.param(place, node, own)
    its = {**environment("federation-node.service"), "FEDERATION_PORT": node, "FEDERATION_METRICS_CLIENTS": CLIENT}
    started = await folder.start("federation", "node", "serve", **its)
    await started.until_logged("node_serving")
    with running(*command, cwd=place) as process:
        await until(lambda: answers(process, own, authority))
        yield own


def answers(process: subprocess.Popen[bytes], port: str, authority: trustme.CA) -> bool:
    assert process.poll() is None
    try:
        with client(port, authority) as asking:
            return asking.get("/healthz").is_success
    except httpx.TransportError:
        return False


def client(port: str, authority: trustme.CA, *, address: str = CLIENT) -> httpx.Client:
    """It comes from that address, and has the node's name and certificate in mind."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    transport = httpx.HTTPTransport(verify=context, local_address=address)
    return httpx.Client(transport=Named(transport, port), base_url=f"https://{NAME}", timeout=PATIENCE_SECONDS)


class Named(httpx.BaseTransport):
    """Finds the name at the proxy's port, as the world's name servers would."""

    def __init__(self, inner: httpx.HTTPTransport, port: str) -> None:
        self._inner, self._port = inner, int(port)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions["sni_hostname"] = NAME
        request.url = request.url.copy_with(host="127.0.0.1", port=self._port)
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


def test_a_node_is_reached_by_its_name(port: str, authority: trustme.CA) -> None:
    """What it shows to everybody."""
    with client(port, authority) as asking:
        shown = asking.get("/discover")
    assert (shown.status_code, "publicKey" in shown.text) == (200, True)


def test_the_node_knows_who_asks_whatever_they_say(port: str, authority: trustme.CA) -> None:
    """By the address of their connection with the proxy: one client may read the metrics, and nobody else."""
    claims = ({}, {"X-Forwarded-For": CLIENT}, {"Forwarded": f"for={CLIENT}"}, {"X-Real-IP": CLIENT})
    with client(port, authority) as asking:
        assert [asking.get("/metrics", headers=claim).status_code for claim in claims] == [200, 200, 200, 200]
    with client(port, authority, address=OTHER) as asking:
        assert [asking.get("/metrics", headers=claim).status_code for claim in claims] == [404, 404, 404, 404]


def test_the_limits_of_bodies_are_the_nodes_own(port: str, authority: trustme.CA) -> None:
    """A stranger's large body is refused in the node's words, as it is without a proxy."""
    with client(port, authority) as asking:
        refused = asking.post("/discover", content=b"x" * (MAX_REQUEST_BYTES // 2))
    assert refused.status_code in (400, 413)
    assert refused.headers["content-type"] == "application/json"


def test_a_body_that_never_ends_is_the_nodes_to_refuse(port: str, authority: trustme.CA) -> None:
    """It has been refused before it has arrived, and is written to no file of the proxy's meanwhile.

    As little of it comes as fits one read of the proxy: one that waits for the next holds the refusal back.
    """
    context = ssl.create_default_context()
    authority.configure_trust(context)
    head = f"POST /discover HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: {MAX_REQUEST_BYTES // 2}\r\n\r\n"
    with (
        socket.create_connection(("127.0.0.1", int(port)), PATIENCE_SECONDS, source_address=(CLIENT, 0)) as plain,
        context.wrap_socket(plain, server_hostname=NAME) as asking,
    ):
        asking.sendall(head.encode() + b"x" * 100)
        told = asking.recv(1024)
    assert told.split(b" ")[1] in (b"400", b"413")
