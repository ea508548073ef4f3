"""Other servers, in one process of their own on loopback, which a node asks to accept its new keys.

    python -m bench.rotating_servers SERVERS PUBLIC_KEY ENCRYPTION_KEY

They know the node by these keys, and do all that the protocol asks of them, in memory: they send challenges, and check
all four proofs. Each line of input is answered with a line of JSON: first the servers, then how many of them know the
node by each key. The process ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from federation.protocol.keys import OwnKeys, decode_key, generate_own_keys
from federation.protocol.models import parse_model, validate
from federation.protocol.rotation import Challenges, Proofs, RotationRequest
from federation.protocol.sealing import Envelope, open_with_any


@dataclass(frozen=True, slots=True)
class RotatingServers:
    """The running process; each of `servers` is its URL and its two public keys."""

    servers: list[dict[str, str]]
    process: subprocess.Popen[str]

    def known_keys(self) -> dict[str, int]:
        """Count the servers that know the node by each of its public signing keys."""
        known: dict[str, int] = _ask(self.process)
        return known


@contextlib.contextmanager
def rotating_servers(servers: int, keys: OwnKeys) -> Iterator[RotatingServers]:
    """Run `servers` servers that know the node by these keys."""
    command = (sys.executable, "-m", "bench.rotating_servers", str(servers))
    process = subprocess.Popen(
        [*command, keys.signing.public_text, keys.encryption.public_text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        yield RotatingServers(_ask(process), process)
    finally:
        process.kill()
        process.communicate()


def _ask(process: subprocess.Popen[str]) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@dataclass(slots=True)
class _Server:
    """One server, the keys by which it knows the node, and the rotation that is pending."""

    known: tuple[str, str]
    keys: OwnKeys = field(default_factory=generate_own_keys)
    url: str = ""
    _asked: RotationRequest | None = None
    _challenges: Challenges | None = None
    _listener: asyncio.Server | None = None

    async def up(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length:")[2].partition("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                status, answer = (self._init if "/rotate/init " in head else self._confirm)(body)
                text = json.dumps(answer).encode()
                writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text)
                await writer.drain()

    def _init(self, body: object) -> tuple[int, dict[str, object]]:
        asked = validate(RotationRequest, body)
        if self.known == (asked.new_signing_public_key, asked.new_encryption_public_key):
            return 400, {"error": "These keys are already registered"}
        if self._challenges is None:
            self._asked, self._challenges = asked, _fresh()
        old, new = (decode_key(key, what="key") for key in (self.known[1], asked.new_encryption_public_key))
        return 200, self._challenges.to_wire(old_key=old, new_key=new)

    def _confirm(self, body: dict[str, object]) -> tuple[int, dict[str, object]]:
        if self._asked is None or self._challenges is None:
            return 404, {"error": "No rotation is pending for this server"}
        proofs = parse_model(Proofs, open_with_any(Envelope.from_wire(body["envelope"]), self.keys)[0])
        new = self._asked.new_signing_public_key
        if not self._challenges.met_by(proofs, old_key=self.known[0], new_key=new):
            return 400, {"error": "Not all four proofs are right."}
        self.known, self._asked, self._challenges = (new, self._asked.new_encryption_public_key), None, None
        return 200, {"message": "The new keys are registered"}


def _fresh() -> Challenges:
    texts = (str(uuid.uuid4()) for _ in range(4))
    return Challenges(
        signing_old=next(texts), signing_new=next(texts), encryption_old=next(texts), encryption_new=next(texts)
    )


async def _main(number: int, known: tuple[str, str]) -> None:
    servers = [_Server(known) for _ in range(number)]
    for server in servers:
        await server.up()
    await asyncio.to_thread(sys.stdin.readline)
    told = [
        {"url": s.url, "public": s.keys.signing.public_text, "encryption": s.keys.encryption.public_text}
        for s in servers
    ]
    print(json.dumps(told), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(Counter(server.known[0] for server in servers)), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(int(sys.argv[1]), (sys.argv[2], sys.argv[3])))
