"""Other servers, in one process of their own on loopback.

Each answers `/discover`, and every delivery with a canned, validly signed acknowledgment; an activity, in its `/inbox`,
is taken unread. Some may hang for ever, and all may go away and come back. With a certificate they speak TLS.

Theory of operation. The process reads one JSON object per line and answers each with one. The first says how many
servers there are; later ones let them go away (`down`: connections are refused), come back on the same ports (`up`), or
ask how many deliveries they accepted (`taken`). The process ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from federation.protocol.acks import ack_response, follow_ack, post_ack
from federation.protocol.keys import OwnKeys, decode_key, generate_own_keys

FOLLOWER: Final = "bench-follower"
FOLLOWED: Final = "bench-followed"
OWN_URL: Final = "http://127.0.0.1:9"
"""The URL of the measured node; nobody listens there."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The running process; each of `servers` is its URL and its two public keys."""

    servers: list[dict[str, str]]
    process: subprocess.Popen[str]

    @property
    def urls(self) -> list[str]:
        return [server["url"] for server in self.servers]

    def tell(self, command: str) -> Any:
        """Return what the process answers to a command, once it has done it."""
        return _ask(self.process, {"do": command})


@contextlib.contextmanager
def peer_process(servers: int, keys: OwnKeys, *, hanging: int = 0, certificate: Path | None = None) -> Iterator[Peers]:
    """Run `servers` servers for the node with these keys. The last `hanging` accept connections and never answer.

    `certificate` is a PEM file with their common certificate and its key; without one they speak plain HTTP.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.peer_servers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        request = {
            "servers": servers,
            "hanging": hanging,
            "encryption": keys.encryption.public_text,
            "certificate": certificate and str(certificate),
        }
        yield Peers(_ask(process, request), process)
    finally:
        process.kill()
        process.communicate()


def _ask(process: subprocess.Popen[str], request: dict[str, object]) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@dataclass(slots=True)
class _Server:
    """One server, its answers by what is asked, and how many deliveries it accepted."""

    recipient: bytes
    hangs: bool
    context: ssl.SSLContext | None = None
    url: str = ""
    port: int = 0
    taken: int = 0
    keys: OwnKeys = field(default_factory=generate_own_keys)
    _answers: dict[bytes, bytes] = field(default_factory=dict)
    _listener: asyncio.Server | None = None
    _connections: set[asyncio.StreamWriter] = field(default_factory=set)

    async def up(self) -> None:
        """Listen, on the port that it had before."""
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.context)
        self.port = self._listener.sockets[0].getsockname()[1]
        self.url = f"{'https' if self.context else 'http'}://127.0.0.1:{self.port}"
        self._answers = self._answers or self._canned()

    async def down(self) -> None:
        """Stop listening, and close every connection."""
        assert self._listener is not None
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _canned(self) -> dict[bytes, bytes]:
        follow = follow_ack(
            sender_url=OWN_URL,
            follow_id="row",
            created_at=datetime.now(UTC),
            follower_id=FOLLOWER,
            following_id=FOLLOWED,
            accepted=True,
        )
        post = post_ack(own_url=self.url, post_id="row", federation_post_id="post")
        secret = self.keys.signing.secret
        acks = {
            name: ack_response(text, recipient_key=self.recipient, signing_secret=secret)
            for name, text in ((b"/follows", follow), (b"/posts", post))
        }
        discover = {
            "url": self.url,
            "publicKey": self.keys.signing.public_text,
            "encryptionPublicKey": self.keys.encryption.public_text,
        }
        asides = {b"/discover": discover, b"/proxy": {}}  # a ping learns nothing about its keys
        answers = {path: _http(json.dumps(body).encode()) for path, body in {**acks, **asides}.items()}
        return {b"/inbox": _TAKEN, **answers}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            if self.hangs:
                await reader.read(-1)  # until the other side has had enough
                return
            while True:
                await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        for line in head.split(b"\r\n"):
            if line.lower().startswith(b"content-length"):
                await reader.readexactly(int(line.split(b":")[1]))
        path = head.split(b" ", 2)[1]
        for ending, answer in self._answers.items():
            if path.endswith(ending):
                self.taken += ending not in (b"/discover", b"/proxy")
                writer.write(answer)
        await writer.drain()


_TAKEN: Final = b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"


def _http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _context(certificate: str | None) -> ssl.SSLContext | None:
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


async def _serve() -> None:
    request = json.loads(sys.stdin.readline())
    recipient = decode_key(request["encryption"], what="recipient")
    quick = request["servers"] - request["hanging"]
    context = _context(request["certificate"])
    servers = [_Server(recipient, hangs=number >= quick, context=context) for number in range(request["servers"])]
    for server in servers:
        await server.up()
    keys = [
        {"url": s.url, "public": s.keys.signing.public_text, "encryption": s.keys.encryption.public_text}
        for s in servers
    ]
    print(json.dumps(keys), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)["do"]
        if command in ("up", "down"):
            await asyncio.gather(*(server.up() if command == "up" else server.down() for server in servers))
        print(json.dumps(sum(server.taken for server in servers)), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve())
