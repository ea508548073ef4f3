"""Bodies that come compressed although we ask for them as they are: inflated up to the cap, or left and told."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import httpx
import pytest
import respx

from federation.http.client import MAX_BODY_BYTES, MAX_LAYERS, FederationClient
from federation.http.errors import BodyTooLarge
from federation.http.guard import AddressGuard
from tests.misbehaving import MisbehavingServer, respond

TEXT = b'{"method": "PROXY_RESPONSE"}' * 100
THRICE = gzip.compress(gzip.compress(gzip.compress(TEXT, mtime=0), mtime=0), mtime=0)


def _encoding(value: str | bytes) -> str:
    """The name of a case; pytest numbers those that have the same."""
    return value[:20] if isinstance(value, str) else ""


def raw_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflater.compress(data) + deflater.flush()


def zeros(mebibytes: int) -> bytes:
    """A raw stream of so many mebibytes that does not end: the compressor is asked for the first alone."""
    deflater = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    piece = deflater.compress(bytes(1024 * 1024)) + deflater.flush(zlib.Z_FULL_FLUSH)
    return piece * mebibytes


def gzipped(raw: bytes) -> bytes:
    """The stream within a member of gzip, which lacks its end."""
    return b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + raw


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(TEXT)),
        ("x-gzip", gzip.compress(TEXT)),
        ("GZip", gzip.compress(TEXT)),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", raw_deflate(TEXT)),
        ("gzip, gzip", gzip.compress(gzip.compress(TEXT))),
        ("deflate,gzip", gzip.compress(zlib.compress(TEXT))),
        ("identity", TEXT),
        ("", TEXT),
        (", identity ,gzip,", gzip.compress(TEXT)),
    ],
    ids=_encoding,
)
@pytest.mark.parametrize("status", [200, 503])
async def test_what_can_be_inflated_is(
    client: FederationClient, server: MisbehavingServer, status: int, encoding: str, body: bytes
) -> None:
    """In both formats that everybody knows, by every status; we asked for neither."""
    server.default = respond(status, {"Content-Encoding": encoding}, body)
    response = await client.fetch(server.url)
    assert (response.status, response.body, response.encoding, response.still_encoded) == (status, TEXT, None, "")
    assert server.requests[0].headers["accept-encoding"] == "identity"


async def test_encodings_may_be_named_in_several_lines(client: FederationClient, server: MisbehavingServer) -> None:
    """Each by whoever compressed."""
    body = gzip.compress(zlib.compress(TEXT))
    server.default = respond(200, {"Content-Encoding": "deflate", "content-encoding": "gzip"}, body)
    assert (await client.fetch(server.url)).body == TEXT


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(TEXT)[:-1]),
        ("gzip", gzip.compress(TEXT)[:-8] + bytes(8)),
        ("gzip", gzip.compress(TEXT) + b"x"),
        ("gzip", gzip.compress(TEXT) * 2),
        ("gzip", zlib.compress(TEXT)),
        ("gzip", TEXT),
        ("gzip, gzip", gzip.compress(TEXT)),
        ("deflate", zlib.compress(TEXT)[:-1]),
        ("deflate", raw_deflate(TEXT)[:-1]),
        ("deflate", gzip.compress(TEXT)),
        ("br", TEXT),
        ("gzip, br", gzip.compress(TEXT)),
        ("utf-8", TEXT),
        (", ".join(["gzip"] * (MAX_LAYERS + 1)), THRICE),
        ("gzip," * 5_000, gzip.compress(TEXT)),
    ],
    ids=_encoding,
)
async def test_what_cannot_be_inflated_comes_as_it_is(
    client: FederationClient, server: MisbehavingServer, encoding: str, body: bytes
) -> None:
    """A server may name an encoding that it does not use; the name goes with the body, for whoever cannot read it."""
    server.default = respond(200, {"Content-Encoding": encoding}, body)
    response = await client.fetch(server.url)
    assert (response.status, response.body, response.encoding) == (200, body, encoding[:40])
    assert response.still_encoded == f" (its Content-Encoding, which we did not ask for: {encoding[:40]})"


async def test_a_strange_encoding_is_told_in_a_few_plain_characters(
    client: FederationClient, server: MisbehavingServer
) -> None:
    """It is text of a stranger's, which ends up on terminals."""
    server.default = respond(200, {"Content-Encoding": "\x80\xffevil\t" + "x" * 1_000}, b"{}")
    told = (await client.fetch(server.url)).still_encoded
    assert told == f" (its Content-Encoding, which we did not ask for: ??evil?{'x' * 33})"


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304), ("GET", 200)])
async def test_nothing_has_no_encoding(
    client: FederationClient, server: MisbehavingServer, method: str, status: int
) -> None:
    """Whatever the headers say of a body that is not there."""
    server.default = respond(status, {"Content-Encoding": "gzip"}, b"")
    for _ in range(2):
        response = await client.fetch(server.url, method=method)
        assert (response.status, response.body, response.encoding) == (status, b"", None)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzipped(zeros(900))),
        ("deflate", zeros(900)),
        ("gzip, gzip", gzip.compress(gzipped(zeros(10 * 1024)))),
        ("gzip", gzip.compress(bytes(MAX_BODY_BYTES + 1))),
        ("gzip, gzip", gzip.compress(gzip.compress(bytes(MAX_BODY_BYTES + 1)))),
    ],
    ids=["gzip", "deflate", "twice", "one byte", "one byte, twice"],
)
async def test_a_bomb_is_too_large(
    client: FederationClient, server: MisbehavingServer, encoding: str, body: bytes
) -> None:
    """Of what would be gigabytes, no more is inflated than a body may have."""
    assert len(body) < MAX_BODY_BYTES
    server.default = respond(200, {"Content-Encoding": encoding}, body)
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge, match=f"inflates to more than {MAX_BODY_BYTES} bytes"):
            await client.fetch(server.url)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * MAX_BODY_BYTES  # what came, in pieces and as a whole, and as much inflated


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_inflates_to_exactly_the_cap_passes(
    client: FederationClient, server: MisbehavingServer, encoding: str
) -> None:
    """The cap is the body's, not that of what was sent."""
    body = (gzip.compress if encoding == "gzip" else zlib.compress)(bytes(1000))
    server.default = respond(200, {"Content-Encoding": encoding}, body)
    assert (await client.fetch(server.url, max_bytes=1000)).body == bytes(1000)
    with pytest.raises(BodyTooLarge):
        await client.fetch(server.url, max_bytes=999)


async def test_an_injected_transport_has_the_same_door() -> None:
    """An application's tests meet what deliveries meet."""
    router = respx.MockRouter()
    router.get("https://b.example/").respond(200, headers={"Content-Encoding": "gzip"}, content=gzip.compress(TEXT))
    transport = httpx.MockTransport(router.async_handler)
    async with FederationClient(AddressGuard(), transport) as client:
        assert (await client.fetch("https://b.example/")).body == TEXT
