"""Producers: what a follow, an unfollow and a post store, whom they owe what, and what stops them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from pydantic import JsonValue
from sqlalchemy import select
from sqlmodel import col
from structlog.testing import capture_logs

from db import BlacklistedServer, DeliveryJob, DeliveryPayload, Follow, Post, Server, User, create_host_tables, new_id
from federation.admin import blacklist
from federation.app import Federation
from federation.base.errors import ConfigurationError
from federation.delivery.producers import ServerRefused
from federation.http.errors import BlockedUrl
from federation.servers.discovery import DiscoveryError
from tests.federation.conftest import OWN_URL, MakeSettings
from tests.misbehaving import reset, respond
from tests.peer import Peer, acquaint
from workers import JobState

NOW = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
TEXT = [{"type": "text", "value": "hello"}]
SERVERS = [f"https://{name}.example" for name in "bcdefg"]


@pytest.fixture
async def node(request: pytest.FixtureRequest, make_settings: MakeSettings) -> AsyncIterator[Federation]:
    """A node with the host application's tables: on SQLite, or by parameter on PostgreSQL with BullMQ."""
    servers: dict[str, object] = {}
    if getattr(request, "param", "sqlite") == "postgres":
        servers = {
            "database_url": request.getfixturevalue("migrated_postgres_url"),
            "redis_url": request.getfixturevalue("redis_url"),
            "federation_queue_prefix": f"t-{new_id()}",
        }
    federation = Federation(make_settings(**servers))
    async with federation.database.transaction() as session:
        await (await session.connection()).run_sync(create_host_tables)
    yield federation
    await federation.close()


everywhere = pytest.mark.parametrize("node", ["sqlite", "postgres"], indirect=True)


async def all_of(node: Federation, model: type[object]) -> list[object]:
    async with node.database.read() as session:
        return list((await session.execute(select(model))).scalars())


async def jobs(node: Federation) -> dict[str, str]:
    """Name by id of the jobs in the delivery queue."""
    await node.delivery_queue.start()
    return {job.id: job.name for job in (await node.delivery_queue.storage.list(JobState.QUEUED)).jobs}


async def only_row(node: Federation) -> DeliveryJob:
    (row,) = await all_of(node, DeliveryJob)
    assert isinstance(row, DeliveryJob)
    return row


async def nothing_written(node: Federation) -> bool:
    models: tuple[type[object], ...] = (Follow, DeliveryJob, Server, Post)
    rows = [await all_of(node, model) for model in models]
    return not any(rows) and not await jobs(node)


@everywhere
async def test_a_follow_of_a_user_on_a_known_server_is_stored_and_owed(node: Federation, peer: Peer) -> None:
    """The row is pending and names the followed user's server; the payload is what receivers require."""
    await acquaint(node, peer)
    async with node.outbox.transaction() as session:
        requested = await node.producers.request_follow(
            session, follower_id="alice", following_id="bob", server_url=peer.url + "/", requester_signature="sig"
        )
    (follow,) = await all_of(node, Follow)
    assert isinstance(follow, Follow)
    assert (follow.id, follow.follower_id, follow.following_id) == (requested.follow_id, "alice", "bob")
    assert (follow.accepted, follow.acknowledged, follow.requester_signature) == (False, False, "sig")
    assert (follow.follower_server_url, follow.following_server_url) == (peer.url, None)
    row = await only_row(node)
    assert (row.id, row.job_name, row.server_url) == (requested.delivery_id, "deliver-follow", peer.url)
    assert row.target_url == f"{peer.url}/api/auth/social/follows"
    payload = json.loads(row.payload)
    created_at = payload["following"].pop("createdAt")
    assert created_at == follow.created_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    assert payload == {
        "following": {
            "id": follow.id,
            "followerId": "alice",
            "followingId": "bob",
            "accepted": False,
            "followerServerUrl": peer.url,
            "followingServerUrl": None,
            "acknowledged": False,
            "requesterSignature": "sig",
            "responderSignature": None,
        },
        "federationUrl": OWN_URL,
        "method": "FEDERATE",
    }
    assert await jobs(node) == {row.id: "deliver-follow"}
    assert peer.server.requests == []


@everywhere
async def test_a_follow_on_an_unknown_server_discovers_and_registers_it_first(node: Federation, peer: Peer) -> None:
    """Server, follow and delivery are one transaction; the server was asked to register us."""
    async with node.outbox.transaction() as session:
        await node.producers.request_follow(session, follower_id="alice", following_id="bob", server_url=peer.url)
        assert await node.registry.find(peer.url) is None
    assert await node.registry.find(peer.url) is not None
    assert peer.discoveries == ["GET", "REGISTER"]
    assert OWN_URL in peer.senders
    assert len(await jobs(node)) == len(await all_of(node, Follow)) == 1


async def test_an_introduction_that_fails_does_not_stop_the_follow(node: Federation, peer: Peer) -> None:
    """The server may ask for us itself; its health is not judged by it."""
    peer.server.upcoming += [peer.server.routes["/discover"], reset(), reset()]
    with capture_logs() as logs:
        async with node.outbox.transaction() as session:
            await node.producers.request_follow(session, follower_id="alice", following_id="bob", server_url=peer.url)
    assert [entry["event"] for entry in logs] == ["register_failed"]
    known = await node.registry.find(peer.url)
    assert known is not None
    assert known.is_healthy
    assert len(await jobs(node)) == 1


async def test_a_follow_whose_transaction_fails_leaves_nothing(node: Federation, peer: Peer) -> None:
    """Neither the discovered server nor the follow nor a delivery."""
    with suppress(LookupError):
        async with node.outbox.transaction() as session:
            await node.producers.request_follow(session, follower_id="alice", following_id="bob", server_url=peer.url)
            raise LookupError
    assert await nothing_written(node)


async def test_a_follow_on_a_server_that_cannot_be_discovered_writes_nothing(node: Federation, peer: Peer) -> None:
    """The caller learns it at once, and its transaction may go on."""
    peer.server.upcoming.append(respond(503))
    async with node.outbox.transaction() as session:
        with pytest.raises(DiscoveryError, match="503"):
            await node.producers.request_follow(session, follower_id="a", following_id="b", server_url=peer.url)
    await peer.server.stop()
    async with node.outbox.transaction() as session:
        with pytest.raises(DiscoveryError, match="CONN_REFUSED"):
            await node.producers.request_follow(session, follower_id="a", following_id="b", server_url=peer.url)
    assert await nothing_written(node)


@everywhere
async def test_a_server_with_another_servers_key_is_a_discovery_error(node: Federation, peer: Peer) -> None:
    """Found only when it is registered."""
    await node.registry.register(
        url="https://elsewhere.example",
        public_key=peer.keys.signing.public_text,
        encryption_public_key=peer.keys.encryption.public_text,
    )
    async with node.outbox.transaction() as session:
        with pytest.raises(DiscoveryError, match="registered for another server"):
            await node.producers.request_follow(session, follower_id="a", following_id="b", server_url=peer.url)
    assert await all_of(node, Follow) == []


async def test_a_follow_on_a_blacklisted_server_is_refused_without_asking_it(node: Federation, peer: Peer) -> None:
    """Known or not."""
    await acquaint(node, peer)
    async with node.database.transaction() as session:
        session.add(BlacklistedServer(server_url=peer.url, created_at=NOW, reason="spam"))
    node.registry.forget(peer.url)
    async with node.outbox.transaction() as session:
        with pytest.raises(ServerRefused, match="blacklisted"):
            await node.producers.request_follow(session, follower_id="a", following_id="b", server_url=peer.url)
    assert await all_of(node, Follow) == []
    assert peer.server.requests == []


async def test_a_follow_on_a_server_of_a_blacklisted_domain_is_refused(node: Federation, peer: Peer) -> None:
    """In any spelling of its URL."""
    await blacklist.add(node.database, "*.127.0.0.1", reason="spam")
    async with node.outbox.transaction() as session:
        with pytest.raises(ServerRefused, match="blacklisted"):
            await node.producers.request_follow(
                session, follower_id="a", following_id="b", server_url=f"HTTP://127.1:{peer.server.port}/"
            )
    assert await all_of(node, Follow) == []
    assert peer.server.connections == 0


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("nonsense", ValueError),
        ("https://user:pw@b.example", ValueError),
        (OWN_URL, ValueError),
        ("HTTPS://A.example:443/users", ValueError),
        ("http://10.0.0.1", BlockedUrl),
    ],
)
async def test_a_follow_on_an_unacceptable_url_is_refused(node: Federation, url: str, error: type[Exception]) -> None:
    """No server, an address nobody may reach, or ourselves."""
    async with node.outbox.transaction() as session:
        with pytest.raises(error):
            await node.producers.request_follow(session, follower_id="a", following_id="b", server_url=url)
    assert await nothing_written(node)


@everywhere
async def test_an_unfollow_removes_the_follow_and_owes_the_news(node: Federation, peer: Peer) -> None:
    """Only that follow of that user on that server; the payload names both users."""
    await acquaint(node, peer)
    async with node.database.transaction() as session:
        for follower, following, server in [
            ("alice", "bob", peer.url),
            ("alice", "bob", None),
            ("carol", "bob", peer.url),
        ]:
            session.add(
                Follow(follower_id=follower, following_id=following, follower_server_url=server, created_at=NOW)
            )
    async with node.outbox.transaction() as session:
        delivery_id = await node.producers.request_unfollow(
            session, follower_id="alice", following_id="bob", server_url=peer.url + "/x"
        )
    left = await all_of(node, Follow)
    assert sorted((f.follower_id, f.follower_server_url or "") for f in left if isinstance(f, Follow)) == [
        ("alice", ""),
        ("carol", peer.url),
    ]
    row = await only_row(node)
    assert (row.id, row.job_name) == (delivery_id, "deliver-unfollow")
    assert row.target_url == f"{peer.url}/api/auth/social/follows"
    assert json.loads(row.payload) == {
        "following": {"followerId": "alice", "followingId": "bob"},
        "federationUrl": OWN_URL,
        "method": "UNFOLLOW",
    }
    assert list((await jobs(node)).values()) == ["deliver-unfollow"]


async def test_an_unfollow_of_nobody_sends_nothing(node: Federation) -> None:
    """The answer is None."""
    async with node.outbox.transaction() as session:
        assert (
            await node.producers.request_unfollow(
                session, follower_id="alice", following_id="bob", server_url="https://b.example"
            )
            is None
        )
    assert await nothing_written(node)


async def audience(node: Federation, policy: str | None) -> list[str]:
    """The servers owed a post of alice's, who has every kind of follow there is, under this policy."""
    async with node.database.transaction() as session:
        for number, url in enumerate(SERVERS):
            await node.registry.register(
                url=url, public_key=f"k{number}", encryption_public_key=f"e{number}", session=session
            )
        session.add(User(id="alice", post_propagation_policy=policy))
        b, c, d, e, f, g = SERVERS
        for follower, following, follower_server, following_server, accepted in [
            ("bob", "alice", b, None, True),  # filed by a relay
            ("carol", "alice", None, c, True),  # filed by a direct request
            ("bert", "alice", None, b, True),  # a second follower on the same server
            ("alice", "dave", d, None, True),  # alice's own follow
            ("erin", "alice", None, e, False),  # not accepted
            ("alice", "frank", f, None, False),
            ("local", "alice", None, None, True),
            ("bob", "somebody else", g, None, True),
        ]:
            session.add(
                Follow(
                    follower_id=follower,
                    following_id=following,
                    follower_server_url=follower_server,
                    following_server_url=following_server,
                    accepted=accepted,
                    created_at=NOW,
                )
            )
    async with node.outbox.transaction() as session:
        published = await node.producers.publish_post(session, author_id="alice", content=TEXT, published=NOW)
    rows = [row for row in await all_of(node, DeliveryJob) if isinstance(row, DeliveryJob)]
    assert {row.id for row in rows} == set(published.delivery_ids) == (await jobs(node)).keys()
    assert all(row.target_url == f"{row.server_url}/api/auth/social/posts" for row in rows)
    assert len({row.payload_id for row in rows}) <= 1
    return sorted(row.server_url or "" for row in rows)


@everywhere
@pytest.mark.parametrize(
    ("policy", "servers"),
    [("all", SERVERS[:3]), (None, SERVERS[:3]), ("followers", SERVERS[:2]), ("none", [])],
)
async def test_a_post_is_owed_to_the_servers_its_authors_policy_names(
    node: Federation, policy: str | None, servers: list[str]
) -> None:
    """Once per server, whichever column of an accepted follow names it; with `followers` only where she is followed."""
    assert await audience(node, policy) == servers


async def test_a_post_goes_out_when_only_followers_or_only_follows_exist(node: Federation) -> None:
    """One empty side hides nothing of the other."""
    url = SERVERS[0]
    await node.registry.register(url=url, public_key="k", encryption_public_key="e")
    async with node.database.transaction() as session:
        session.add_all([User(id="followed"), User(id="following")])
        for follower, following in [("x", "followed"), ("following", "y")]:
            session.add(
                Follow(
                    follower_id=follower,
                    following_id=following,
                    follower_server_url=url,
                    accepted=True,
                    created_at=NOW,
                )
            )
    for author in ("followed", "following"):
        async with node.outbox.transaction() as session:
            published = await node.producers.publish_post(session, author_id=author, content=TEXT)
        assert len(published.delivery_ids) == 1


@everywhere
async def test_a_follow_row_with_an_unusable_server_does_not_keep_a_post_from_the_others(node: Federation) -> None:
    """An adopted registry may hold what cannot be delivered to, and one server in two spellings."""
    odd = ["https://user:pw@evil.example", "https://b.example", "https://B.example/", OWN_URL]
    async with node.database.transaction() as session:
        session.add(User(id="alice"))
        for number, url in enumerate(odd):
            await node.registry.register(
                url=url, public_key=f"k{number}", encryption_public_key=f"e{number}", session=session
            )
            session.add(
                Follow(
                    follower_id=f"f{number}",
                    following_id="alice",
                    follower_server_url=url,
                    accepted=True,
                    created_at=NOW,
                )
            )
    async with node.outbox.transaction() as session:
        await node.producers.publish_post(session, author_id="alice", content=TEXT)
    assert (await only_row(node)).server_url == "https://b.example"


@everywhere
@pytest.mark.parametrize(("given", "sent"), [(None, False), (False, False), (True, True)])
async def test_a_post_carries_what_receivers_require(node: Federation, given: bool | None, sent: bool) -> None:
    """An unset `isPrivate` goes out as false; what is stored is what was published."""
    await node.registry.register(url="https://b.example", public_key="k", encryption_public_key="e")
    async with node.database.transaction() as session:
        session.add(User(id="alice"))
        session.add(
            Follow(
                follower_id="bob",
                following_id="alice",
                follower_server_url="https://b.example",
                accepted=True,
                created_at=NOW,
            )
        )
    async with node.outbox.transaction() as session:
        published = await node.producers.publish_post(
            session, author_id="alice", content=TEXT, published=NOW, is_private=given, post_id="p1"
        )
    assert published.post_id == "p1"
    async with node.database.read() as session:
        post = (await session.execute(select(Post).where(col(Post.id) == "p1"))).scalar_one()
    assert (post.content, post.author_id, post.published, post.is_local, post.is_private) == (
        TEXT,
        "alice",
        NOW,
        True,
        sent,
    )
    assert (await only_row(node)).payload == ""
    async with node.database.read() as session:
        text = (await session.execute(select(DeliveryPayload))).scalar_one()
    assert (text.id, text.refs) == ((await only_row(node)).payload_id, 1)
    assert json.loads(text.payload) == {
        "method": "FEDERATE_POST",
        "federationUrl": OWN_URL,
        "post": {
            "id": "p1",
            "content": TEXT,
            "authorId": "alice",
            "published": "2026-01-02T03:04:05.678Z",
            "isPrivate": sent,
        },
    }


@pytest.mark.parametrize("content", [[], [{"type": "text"}], [{"type": "poem", "value": "x"}], [{"value": "x"}]])
async def test_a_post_receivers_would_refuse_is_refused_here(
    node: Federation, content: list[dict[str, JsonValue]]
) -> None:
    """The author hears of it at once, not five attempts later, and nothing is stored."""
    with pytest.raises(ValueError, match=r"content|payload|value|type"):
        async with node.outbox.transaction() as session:
            await node.producers.publish_post(session, author_id="alice", content=content)
    assert await all_of(node, Post) == []


async def test_a_node_without_a_url_has_no_producers(make_settings: MakeSettings) -> None:
    """The error names the variable."""
    nameless = Federation(make_settings(better_auth_url=None))
    try:
        with pytest.raises(ConfigurationError, match="BETTER_AUTH_URL"):
            _ = nameless.producers
    finally:
        await nameless.close()
