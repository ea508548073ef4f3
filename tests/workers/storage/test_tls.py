"""Redis over TLS: a real TLS connection, which a proxy ends in front of a server that speaks none."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
import trustme

from tests.deployments import SERVICE, ask, cluster, sentinel_of
from tests.patience import PATIENCE_SECONDS
from tests.servers import ValkeyProcess
from workers import StorageError
from workers.storage import open_storage
from workers.testing.steps import job


@asynccontextmanager
async def over_tls(port: int, authority: trustme.CA) -> AsyncIterator[int]:
    """Another port, at which the server of this one speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def serve(client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(client, to_server), copy(server, back))

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield listening.sockets[0].getsockname()[1]
    listening.close()
    await listening.wait_closed()


Place: TypeAlias = Callable[[ValkeyProcess, trustme.CA], AbstractAsyncContextManager[str]]


@asynccontextmanager
async def alone(server: ValkeyProcess, authority: trustme.CA) -> AsyncIterator[str]:
    async with over_tls(server.port, authority) as port:
        yield f"rediss://127.0.0.1:{port}"


@asynccontextmanager
async def in_a_cluster(server: ValkeyProcess, authority: trustme.CA) -> AsyncIterator[str]:
    with cluster(masters=1, replicas=0) as servers:
        await servers.ready()
        [node] = servers.nodes
        async with over_tls(node.port, authority) as port:
            ask(node, "CONFIG", "SET", "cluster-announce-port", port)
            yield f"rediss+cluster://127.0.0.1:{port}"


@asynccontextmanager
async def behind_sentinels(server: ValkeyProcess, authority: trustme.CA) -> AsyncIterator[str]:
    async with over_tls(server.port, authority) as port:
        with sentinel_of(port) as sentinel:
            async with over_tls(sentinel.port, authority) as sentinels_port:
                yield f"rediss+sentinel://127.0.0.1:{sentinels_port}/{SERVICE}"


@pytest.mark.parametrize("place", [alone, in_a_cluster, behind_sentinels])
async def test_certificates_are_verified(place: Place, valkey_server: ValkeyProcess, tmp_path: Path) -> None:
    """Jobs go over TLS if the server's certificate is of an authority that is trusted; if not, the error says that."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "right.pem"))
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "wrong.pem"))
    async with asyncio.timeout(PATIENCE_SECONDS), place(valkey_server, authority) as url:
        storage = open_storage(f"{url}?ssl_ca_certs={tmp_path}/right.pem", queue=str(tmp_path))
        await storage.connect()
        await storage.enqueue([job("a")])
        assert await storage.status(["a"]) != [None]
        await storage.disconnect()
        with pytest.raises(StorageError, match="certificate is not trusted: unable to get local issuer certificate"):
            await open_storage(f"{url}?ssl_ca_certs={tmp_path}/wrong.pem").connect()
        with pytest.raises(StorageError, match="certificate is not trusted: Hostname mismatch"):
            await open_storage(f"{url.replace('127.0.0.1', 'localhost')}?ssl_ca_certs={tmp_path}/right.pem").connect()
