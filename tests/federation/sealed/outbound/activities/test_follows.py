"""What a follow and an unfollow store, whom they owe what, and what stops them."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from db import BlacklistedServer, Follow, User
from federation.admin import blacklist
from federation.base.errors import ConfigurationError
from federation.http.errors import BlockedUrl
from federation.protocol.encodings import parse_moment
from federation.runtime.composition import Federation
from federation.sealed.outbound.activities import ServerRefused, UnknownUser
from federation.sealed.peers.discovery import DiscoveryError
from tests.federation.conftest import OWN_URL
from tests.federation.sealed.outbound.activities.stored import NOW, all_of, everywhere, jobs, nothing_written, only_row
from tests.misbehaving import Exchange, Received, reset, respond
from tests.patience import until
from tests.peer import Peer, Pings, acquaint, settle
from tests.squatters import Squatter


@pytest.fixture(autouse=True)
async def local_users(node: Federation) -> None:
    """Whoever follows here."""
    await settle(node, "alice", "a")


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


@everywhere
async def test_nobody_is_asked_for_a_user_who_is_not_here(node: Federation, peer: Peer) -> None:
    """A server that is unknown is neither asked nor told who we are."""
    async with node.outbox.transaction() as session:
        with pytest.raises(UnknownUser, match="nobody"):
            await node.producers.request_follow(session, follower_id="nobody", following_id="bob", server_url=peer.url)
    assert peer.server.connections == 0
    assert await nothing_written(node)


@everywhere
async def test_a_user_may_be_made_in_the_same_transaction(node: Federation, peer: Peer) -> None:
    """Who is not committed yet follows somebody on an unknown server."""
    async with node.outbox.transaction() as session:
        session.add(User(id="carol"))
        await node.producers.request_follow(session, follower_id="carol", following_id="bob", server_url=peer.url)
    assert len(await jobs(node)) == 1


async def test_others_write_while_a_server_is_asked(node: Federation, peer: Peer) -> None:
    """The caller's transaction takes no lock before."""

    async def write_first(request: Received, exchange: Exchange) -> None:
        await settle(node, "dave")
        await peer.server.routes["/discover"](request, exchange)

    peer.server.upcoming.append(write_first)
    async with node.outbox.transaction() as session:
        await node.producers.request_follow(session, follower_id="alice", following_id="bob", server_url=peer.url)
    assert len(await jobs(node)) == 1


@everywhere
async def test_without_the_table_of_users_it_is_told_how_to_make_it(node: Federation, peer: Peer) -> None:
    """By each call that needs one of them."""
    async with node.database.transaction() as session:
        await session.execute(text('ALTER TABLE "user" RENAME TO elsewhere'))
    async with node.outbox.transaction() as session:
        with pytest.raises(ConfigurationError, match=r"the table user .* `federation upgrade --host-tables`"):
            await node.producers.request_follow(session, follower_id="alice", following_id="bob", server_url=peer.url)
    content = [{"type": "text", "value": "hello"}]
    with pytest.raises(ConfigurationError, match=r"the table user .* `federation upgrade --host-tables`"):
        async with node.outbox.transaction() as session:
            await node.producers.publish_post(session, author_id="alice", content=content)
    assert peer.server.connections == 0


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
    """Whose it is may be found out, but not in the caller's transaction."""
    peer.pings = Pings.UNKNOWN
    await node.registry.register(
        url="https://elsewhere.example",
        public_key=peer.keys.signing.public_text,
        encryption_public_key=peer.keys.encryption.public_text,
    )
    async with node.outbox.transaction() as session:
        with pytest.raises(DiscoveryError, match="registered for another server"):
            await node.producers.request_follow(session, follower_id="a", following_id="b", server_url=peer.url)
    assert await all_of(node, Follow) == []


async def test_a_follow_on_a_server_with_a_squatter_succeeds_later(node: Federation, peer: Peer) -> None:
    """Whose the keys are is found out beside the caller's transaction, which may hold the database."""
    async with Squatter(peer) as squatter:
        await node.discovery(squatter.url)
        with pytest.raises(DiscoveryError, match="registered for another server"):
            async with node.outbox.transaction() as session:
                await node.producers.request_follow(session, follower_id="a", following_id="b", server_url=peer.url)

        await until(lambda: node.registry.find(peer.url))

    async with node.outbox.transaction() as session:
        await node.producers.request_follow(session, follower_id="a", following_id="b", server_url=peer.url)
    assert await node.registry.find(squatter.url) is None


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
    """Only that follow of that user on that server; the payload names it, both users, and when it ended."""
    await acquaint(node, peer)
    async with node.database.transaction() as session:
        for follow_id, follower, server in [
            ("the-follow", "alice", peer.url),
            ("local", "alice", None),
            ("carols", "carol", peer.url),
        ]:
            session.add(
                Follow(
                    id=follow_id, follower_id=follower, following_id="bob", follower_server_url=server, created_at=NOW
                )
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
    payload = json.loads(row.payload)
    assert parse_moment(payload["following"].pop("createdAt")) > NOW
    assert payload == {
        "following": {"id": "the-follow", "followerId": "alice", "followingId": "bob"},
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
