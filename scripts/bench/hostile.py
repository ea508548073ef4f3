"""Requests that a node has to refuse, and a process that floods it with them from many loopback addresses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from federation.protocol.activities import ActivityMethod, DeliveryRequest, follow_activity, post_activity
from federation.protocol.keys import OwnKeys, generate_own_keys
from federation.protocol.sealing import seal
from federation.protocol.signing import sign_message

FOLLOWS: Final = "/api/auth/social/follows"
POSTS: Final = "/api/auth/social/posts"
MEBIBYTE: Final = 1024 * 1024
STRANGER: Final = "https://stranger.example"

ADDRESSES: Final = 50
LONGEST_ANSWER: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """One kind of request. The length of a `chunked` body is not announced."""

    path: str
    body: bytes
    claims: str | None
    chunked: bool = False

    def head(self, host: str) -> bytes:
        lines = [f"POST {self.path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", "Connection: close"]
        if self.claims is not None:
            lines += [f"Origin: {self.claims}", f"X-Federation-Origin: {self.claims}"]
        lines.append("Transfer-Encoding: chunked" if self.chunked else f"Content-Length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode()

    def pieces(self) -> list[bytes]:
        """Return the body in the pieces in which it is written, with its framing."""
        cut = [self.body[start : start + 65536] for start in range(0, len(self.body), 65536)]
        return [*(b"%x\r\n%s\r\n" % (len(each), each) for each in cut), b"0\r\n\r\n"] if self.chunked else cut


def delivery(text: str, method: str, sender: OwnKeys, recipient: bytes) -> bytes:
    """Return the body of a delivery that *sender* signs."""
    return DeliveryRequest(
        method=ActivityMethod(method),
        payload=seal(text, recipient),
        signature=sign_message(text, sender.signing.secret),
    ).to_bytes()


def follow(url: str, follower: str, followed: str) -> str:
    return follow_activity(
        federation_url=url,
        follow_id=follower,
        created_at=datetime.now(UTC),
        follower_id=follower,
        following_id=followed,
        follower_server_url=None,
    )


def hostile_requests(*, victim: str, recipient: bytes, followed: str) -> dict[str, Hostile]:
    """Return each kind by its name; those over 64 KiB are called `large ...`.

    *victim* is a registered server, *recipient* our key.
    """
    forger = generate_own_keys()
    signed = delivery(follow(STRANGER, "somebody", followed), "FEDERATE", forger, recipient)
    forged = delivery(follow(victim, "somebody", followed), "FEDERATE", forger, recipient)
    post = post_activity(
        federation_url=victim,
        post_id="forged",
        content=[{"type": "text", "value": "x" * 2_000_000}],
        author_id="somebody",
        published=datetime.now(UTC),
        is_private=False,
    )
    return {
        "no JSON": Hostile(path=FOLLOWS, body=b"follow me", claims=victim),
        "junk": Hostile(path=FOLLOWS, body=_with_junk(signed, 60_000), claims=STRANGER),
        "unknown author": Hostile(path=FOLLOWS, body=signed, claims=STRANGER),
        "forged": Hostile(path=FOLLOWS, body=forged, claims=victim),
        "wrong keys": Hostile(path="/proxy", body=_relay(forger), claims=victim),
        "large junk of a stranger": Hostile(path=FOLLOWS, body=_with_junk(signed, 4_000_000), claims=STRANGER),
        "large junk in chunks": Hostile(path=POSTS, body=_with_junk(signed, 4_000_000), claims=None, chunked=True),
        "large junk in a known name": Hostile(path=FOLLOWS, body=_with_junk(forged, 4_000_000), claims=victim),
        "large forged post": Hostile(
            path=POSTS, body=delivery(post, "FEDERATE_POST", forger, recipient), claims=victim
        ),
    }


def _with_junk(body: bytes, size: int) -> bytes:
    return b'{"junk":[' + b"{}," * (size // 3) + b"{}]," + body[1:]


def _relay(keys: OwnKeys) -> bytes:
    payload = seal("nothing", keys.encryption.public).to_wire()
    shown = {"publicSigningKey": keys.signing.public_text, "publicEncryptionKey": keys.encryption.public_text}
    target = "https://target.example/proxy"
    return json.dumps({"method": "PROXY", "targetUrl": target, **shown, "payload": payload}).encode()


async def send(request: Hostile, port: int, *, address: str = "127.0.0.1") -> int | None:
    """Send the request, and return the status of the answer, or None if there is none.

    The answer may come before the body is sent.
    """
    try:
        async with asyncio.timeout(LONGEST_ANSWER):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            try:
                return await _exchange(request, f"127.0.0.1:{port}", reader, writer)
            finally:
                writer.transport.abort()
    except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
        return None


async def _exchange(request: Hostile, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    answer = asyncio.create_task(reader.readline())
    writer.write(request.head(host))
    for piece in request.pieces():
        if answer.done():
            break
        writer.write(piece)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
    return int((await answer).split()[1])


async def flood(
    requests: Mapping[str, Hostile], port: int, *, rate: float, seconds: float
) -> dict[str, dict[str, int]]:
    """Send *rate* of the *requests* a second in turn, from 50 addresses, and return the statuses by kind.

    They are sent on time, however slow the answers are. Three of four are small.
    """
    small = [name for name in requests if not name.startswith("large")]
    large = [name for name in requests if name.startswith("large")]
    small_names, large_names = itertools.cycle(small), itertools.cycle(large)
    seen: dict[str, Counter[str]] = {name: Counter() for name in requests}

    async def one(name: str, number: int) -> None:
        status = await send(requests[name], port, address=f"127.0.1.{1 + number % ADDRESSES}")
        seen[name][str(status)] += 1

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            group.create_task(one(next(large_names if number % 4 == 3 else small_names), number))
    return {name: dict(counts) for name, counts in seen.items()}


def main() -> None:
    """Flood as the JSON object on stdin says, and print what was answered."""
    task = json.load(sys.stdin)
    requests = hostile_requests(
        victim=task["victim"], recipient=bytes.fromhex(task["recipient"]), followed=task["followed"]
    )
    print("ready", flush=True)
    print(json.dumps(asyncio.run(flood(requests, task["port"], rate=task["rate"], seconds=task["seconds"]))))


if __name__ == "__main__":
    main()
