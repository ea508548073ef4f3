"""A node as a newcomer makes it, with `init` and `run`: it takes follows and posts, or says which tables it lacks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select
from sqlmodel import col

from db import Follow, Post
from federation.base.settings.settings import Settings
from federation.node.follows import FOLLOWS_PATH
from federation.protocol.keys import generate_own_keys
from federation.runtime.composition import Federation
from tests.federation.node.remote_server import RemoteServer
from tests.federation.test_run import Command, Folder, serves
from tests.patience import eventually
from tests.servers import free_port

LOOPBACK = {"DEV_ALLOWED_HOSTNAMES": "127.0.0.1"}


class FreshNode:
    """A folder in which `federation init` was called, and what runs there."""

    def __init__(self, folder: Folder, **settings: str) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"
        self._settings = {**LOOPBACK, **settings}

    async def command(self, *arguments: str) -> str:
        """What a command that goes well prints."""
        status, stdout, stderr = await self.run(*arguments)
        assert status == 0, stdout + stderr
        return stdout

    async def run(self, *arguments: str, **settings: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr of a command, with these settings for it alone."""
        return await self.folder.run(*arguments, **{**self._settings, **settings})

    async def doctor(self) -> dict[str, dict[str, str]]:
        """Its findings, by check."""
        _, stdout, _ = await self.folder.run("doctor", "--json", **self._settings)
        return {each["check"]: each for each in json.loads(stdout)["findings"]}

    async def start(self, **settings: str) -> Command:
        running = await self.folder.start("federation", "run", **{**self._settings, **settings})
        await running.until(lambda: serves(self.url))
        return running

    def readyz(self) -> httpx.Response:
        return httpx.get(f"{self.url}/readyz")

    @asynccontextmanager
    async def view(self) -> AsyncIterator[Federation]:
        """The application's side of the node, in this process."""
        values = self.folder.settings().model_dump(exclude_unset=True)
        named = {name.lower(): value for name, value in self._settings.items()}
        node = Federation(Settings.from_values({**values, **named}))
        yield node
        await node.close()


def _folder(path: Path) -> Path:
    """Empty, in another that is for logs."""
    folder = path / "folder"
    folder.mkdir(parents=True)
    return folder


@asynccontextmanager
async def initialised(path: Path, **settings: str) -> AsyncIterator[FreshNode]:
    node = FreshNode(Folder(_folder(path)), **settings)
    await node.command("init", "--url", node.url)
    yield node
    await node.folder.close()


async def test_two_fresh_nodes_follow_and_post(tmp_path: Path) -> None:
    """Nothing but `init`, `users add` and `run` on either side: a follow is accepted, and a post arrives."""
    async with initialised(tmp_path / "a") as a, initialised(tmp_path / "b") as b:
        await a.command("users", "add", "alice")
        await b.command("users", "add", "bob")
        for node in (a, b):
            await node.start()
            ready = node.readyz()
            assert (ready.status_code, ready.json()["checks"]["host"]) == (200, "ok")
            assert (await node.doctor())["host"]["verdict"] == "ok"
        async with a.view() as at_a, b.view() as at_b:
            async with at_a.outbox.transaction() as session:
                await at_a.producers.request_follow(session, follower_id="alice", following_id="bob", server_url=b.url)

            async def accepted() -> list[bool]:
                async with at_a.database.read() as session:
                    return list((await session.execute(select(col(Follow.accepted)))).scalars())

            await eventually(accepted, lambda found: found == [True])
            async with at_b.outbox.transaction() as session:
                published = await at_b.producers.publish_post(
                    session, author_id="bob", content=[{"type": "text", "value": "hello, fediverse"}]
                )

            async def arrived() -> list[str | None]:
                async with at_a.database.read() as session:
                    return list((await session.execute(select(col(Post.federation_post_id)))).scalars())

            await eventually(arrived, lambda found: found == [published.post_id])


@pytest.mark.spread("kind")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_node_without_its_hosts_tables_says_so(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """By name, at its start, in doctor, `/readyz` and its answers; it takes follows as soon as they are there."""
    there = request.getfixturevalue("database_file" if kind == "sqlite" else "migrated_postgres_url")
    url = f"sqlite:///{there}" if kind == "sqlite" else there
    peer = RemoteServer(url="https://a.example", keys=generate_own_keys())
    async with initialised(tmp_path / "node", DATABASE_URL=url) as node, node.view() as view:
        assert (await node.doctor())["host"]["found"].endswith("lacks the host application's blocks, posts, user")
        running = await node.start()
        await running.until_logged('"host_tables_missing"')
        ready = node.readyz()
        assert (ready.status_code, ready.json()["checks"]["tables"]) == (503, "ok")
        assert "blocks, posts, user" in ready.json()["problems"]["host"]
        await view.registry.register(
            url=peer.url,
            public_key=peer.keys.signing.public_text,
            encryption_public_key=peer.keys.encryption.public_text,
        )
        assert view.keys is not None
        body = peer.delivery(peer.follow("alice", "bob"), "FEDERATE", view.keys.pairs()[0])
        async with httpx.AsyncClient(base_url=node.url, headers=peer.headers()) as client:
            refused = await client.post(FOLLOWS_PATH, content=body)
            assert (refused.status_code, refused.json()["code"]) == (503, "INCOMPLETE_DATABASE")
            assert refused.json()["error"] == "The database of this server lacks blocks, posts, user"
            await running.until_logged('"inbound_tables_missing"')
            await node.command("upgrade", "--host-tables")
            await node.command("users", "add", "bob")
            taken = await client.post(FOLLOWS_PATH, content=body)
        assert (taken.status_code, taken.json()["accepted"]) == (200, True)
        assert "inbound_database_unavailable" not in running.stderr

        async def is_ready() -> int:
            return node.readyz().status_code

        await eventually(is_ready, lambda status: status == 200)
