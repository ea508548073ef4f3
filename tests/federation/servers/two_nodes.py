"""Two whole nodes in this process, who know each other and talk through a network that can be cut."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
from sqlalchemy import select
from sqlmodel import col

from db import Post, Server, create_host_tables
from federation.admin import keys as admin
from federation.base.queues.job_data import FOLLOW_JOB, POST_JOB
from federation.base.settings.settings import OLD_KEY_VARIABLES, Settings, write_env_file
from federation.cli.output import progress
from federation.delivery.wire import Sending, Trace
from federation.http.client import FederationClient
from federation.http.guard import AddressGuard
from federation.node.follows import FOLLOWS_PATH
from federation.node.posts import POSTS_PATH
from federation.protocol.activities import follow_activity
from federation.protocol.keys import KeyRing, OwnKeys
from federation.protocol.rotation import ROTATE_CONFIRM_PATH, ROTATE_INIT_PATH
from federation.runtime.composition import Federation
from federation.sealed.outbound.follows import FollowAnswer
from federation.sealed.peers.key_rotation import KeyRotation
from tests.acceptance.site import post
from tests.federation.protocol.vectors import A, B

A_URL, B_URL = "https://a.example", "https://b.example"
QUICK = {"FEDERATION_DELIVERY_BACKOFF": "10ms"}
ASKED = (ROTATE_INIT_PATH, ROTATE_CONFIRM_PATH)

Behaviour = Callable[[httpx.Request], httpx.Response | None]


class Cut(httpx.ConnectError):
    """The connection broke."""


@dataclass(slots=True)
class Net(httpx.AsyncBaseTransport):
    """Brings requests to the nodes of this process. `before` may answer in a node's place, or raise; `after` may raise
    when the node has answered.
    """

    nodes: dict[str, httpx.ASGITransport] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    before: Behaviour | None = None
    after: Behaviour | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request.url.path)
        if self.before is not None and (answer := self.before(request)) is not None:
            return answer
        response = await self.nodes[request.url.host].handle_async_request(request)
        if self.after is not None:
            self.after(request)
        return response

    async def aclose(self) -> None:
        """Nothing is to be closed."""


@dataclass(slots=True, kw_only=True)
class Pair:
    """A, whose keys are in `.env`, and B, whose are in its environment, who know each other."""

    a: Federation
    b: Federation
    net: Net
    start: Callable[[Settings], Federation]

    @property
    def rotation(self) -> KeyRotation:
        assert self.a.key_rotation is not None
        return self.a.key_rotation

    async def rotate(self) -> admin.RotationState:
        return await admin.rotate(self.a, only=None, progress=progress)

    def restart_b(self, new: OwnKeys, old: OwnKeys | None = None) -> None:
        """B runs with other keys in its environment; what the process before has under way comes to its end."""
        values = {"BETTER_AUTH_URL": B_URL, "DATABASE_URL": self.b.settings.database_url, **new.to_env()}
        if old is not None:
            values |= dict(zip(OLD_KEY_VARIABLES, old.to_env().values(), strict=True))
        self.b = self.start(Settings.from_values(values))

    async def deliver(self, sender: Federation, name: str) -> None:
        """A post called *name* from one to the other, at the first attempt."""
        await self._send(sender, POST_JOB, name, POSTS_PATH, post(sender.own_url or "", name))

    async def follow(self, sender: Federation, name: str) -> FollowAnswer | None:
        """A follow called *name* of somebody called `alice`, at the first attempt; its verified answer."""
        text = follow_activity(
            federation_url=sender.own_url or "",
            follow_id=name,
            created_at=datetime.now(UTC),
            follower_id=f"follower-{name}",
            following_id="alice",
            follower_server_url=None,
        )
        return await self._send(sender, FOLLOW_JOB, name, FOLLOWS_PATH, text)

    async def _send(self, sender: Federation, job: str, name: str, path: str, text: str) -> FollowAnswer | None:
        to = A_URL if sender.own_url == B_URL else B_URL
        sending = Sending(
            job_name=job,
            delivery_id=name,
            target_url=to + path,
            server_url=to,
            payload=text,
            started_at=datetime.now(UTC),
            link=await sender.links.view(to),
            is_repeat=False,
            first_byte=None,
            seen=Trace(),
            refuse_blacklisted=nobody_is,
        )
        answer = await sender.wires.of(job).send(sending)
        assert answer is None or isinstance(answer, FollowAnswer)
        return answer

    async def both_ways(self, name: str) -> None:
        """Posts arrive both ways, each at its first attempt."""
        for sender, receiver in ((self.a, self.b), (self.b, self.a)):
            await self.deliver(sender, name)
            async with receiver.database.read() as session:
                found = select(Post).where(col(Post.federation_post_id) == name)
                assert (await session.execute(found)).scalar_one_or_none() is not None

    async def key_at_b(self) -> str:
        known = await self.b.registry.find(A_URL)
        assert known is not None
        return known.public_key

    async def known_by_b(self) -> Server:
        async with self.a.database.read() as session:
            return (await session.execute(select(Server).where(col(Server.url) == B_URL))).scalar_one()


async def nobody_is() -> None:
    """No server of these is blacklisted."""


def newest(node: Federation) -> str:
    return ring(node).pairs(now=True)[0].signing.public_text


def ring(node: Federation) -> KeyRing:
    assert node.keys is not None
    return node.keys


@asynccontextmanager
async def knowing_each_other(directory: Path, migrated_file: Path) -> AsyncIterator[Pair]:
    """A, with its keys in the `.env` of the working directory, and B; their databases are in *directory*."""
    for name in "ab":
        shutil.copy(migrated_file, directory / f"{name}.sqlite3")
    urls = {name: f"sqlite:///{directory}/{name}.sqlite3" for name in "ab"}
    write_env_file(Path(".env"), {"BETTER_AUTH_URL": A_URL, "DATABASE_URL": urls["a"], **QUICK, **A.env})
    net = Net()
    async with AsyncExitStack() as stack:

        def start(settings: Settings) -> Federation:
            node = Federation(settings, client=FederationClient(AddressGuard(frozenset()), net))
            stack.push_async_callback(node.close)
            net.nodes[(node.own_url or "").removeprefix("https://")] = httpx.ASGITransport(node.node_app())
            return node

        a = start(Settings.load())
        b = start(Settings.from_values({"BETTER_AUTH_URL": B_URL, "DATABASE_URL": urls["b"], **B.env}))
        for node in (a, b):
            async with node.database.transaction() as session:
                await (await session.connection()).run_sync(create_host_tables)
        for node, url, of in ((a, B_URL, B), (b, A_URL, A)):
            await node.registry.register(
                url=url,
                public_key=of.keys.signing.public_text,
                encryption_public_key=of.keys.encryption.public_text,
            )
        yield Pair(a=a, b=b, net=net, start=start)


def cut_at(path: str) -> Behaviour:
    def cut(request: httpx.Request) -> None:
        if request.url.path == path:
            raise Cut("cut")

    return cut


async def register_dead(pair: Pair, number: int) -> None:
    """Servers that answer nothing."""
    for each in range(number):
        await pair.a.registry.register(
            url=f"https://dead-{each}.example", public_key=f"k{each}", encryption_public_key=f"e{each}"
        )
    pair.net.before = lambda request: refuse(request) if request.url.host.startswith("dead") else None


def refuse(request: httpx.Request) -> httpx.Response:
    raise Cut("nobody there", request=request)


async def shown(pair: Pair) -> str:
    async with httpx.AsyncClient(transport=pair.net) as client:
        return str((await client.get(f"{A_URL}/discover")).json()["publicKey"])
